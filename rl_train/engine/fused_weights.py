"""Weights of a decoder LLM as few matrices, of which its parameters are views while in use.

Parameters in 4 bits stay as they are. Those in int8 become views of larger int8 tensors.

Of layers in shards (--fsdp) the matrices are copies, made when a layer is gathered. While all are
gathered, this rank's shards do not exist beside them: the last layers' matrices lie in their
memory.

Of quantised layers (--quantize_base) there is one layer's matrices at a time, in memory that all
layers share: each use of a layer dequantises it. Only the sampler may multiply with int8 itself.

Linears that read one input are one product. Of [Wq; Wk; Wv; Aq; Ak; Av] the W are the model's
frozen weights, of which there is one copy in memory; the rows of the LoRA are copied in from the
live float32 parameters, of whatever role is active, by `refresh`. Only forwards that autograd
follows read the parameters themselves. A second LoRA, whose A are the last rows, is there from
`hold_lora` on: with it the sampler writes answers of two roles at a time.

Letters: r LoRA rank, k linears of one input, D head size, V vocabulary, C width.
"""

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch._functorch.config
from peft.tuners.lora import Linear as LoraLinear
from torch import nn

from rl_train.distributed.fsdp import ShardedLayers, own_rows
from rl_train.engine import decode_torch, layer_vjp, layers
from rl_train.engine.families import Family, family_of
from rl_train.engine.layer_graphs import LayerGraphs
from rl_train.engine.quantize import QuantizedLinear

ALIGNMENT = 256  # numbers; of matrices in the shards' memory, as torch aligns its own


class FusedLinears:
    """Linears that read one input, with their LoRA, as one matrix (sum of outputs + k*r, inputs).

    Args:
        modules: the linears.
        sharded: whether their weights are in shards: then there is a matrix from `fill` to `free`.

    Quantised ones are filled once they have `memory`. Then their matrix is a view of it, which
    holds their weights from `dequantize` until another layer's.

    Attributes:
        sources, targets: A, B of the first linear, of the second, ..: parameters and their copies.
        second_targets: likewise of the second LoRA.
        live, copied: the linears as `layers.linear` takes them; their LoRA is the parameters
            themselves, or their copies. Of quantised linears `live` is not used.
        both_loras: as `copied`, with both LoRAs.
        sizes: outputs of each linear.
        memory: where the matrix lies while all layers in shards are gathered; None: anywhere. Of
            quantised linears the memory that they share with those of other layers.
        int8: of linears in int8 their weights (outputs, inputs) and scales (outputs,), of which the
            parameters are views; else None.
        lora_a: of quantised linears their own copies of the A of one or two LoRAs (rows, inputs),
            which `dequantize` writes behind the weights.
    """

    def __init__(self, modules: list[nn.Module], sharded: bool = False):
        self.bases = [_base(module) for module in modules]
        self.loras = [_lora(module) for module in modules if isinstance(module, LoraLinear)]
        self.sources, self.sharded = [p for lora in self.loras for p in lora[:2]], sharded
        self.sizes = [base.out_features for base in self.bases]
        self.is_quantized = isinstance(self.bases[0], QuantizedLinear)
        self.memory: torch.Tensor | None = None
        self.lora_a: torch.Tensor | None = None
        self.int8: list[torch.Tensor] | None = None
        if self.is_quantized and self.bases[0].choice == "8bit":
            self.int8 = [
                _joined([getattr(base, name) for base in self.bases])
                for name in ("weight", "scale")
            ]
        self.has_second = False
        self.free()
        if not sharded and not self.is_quantized:
            self.fill()

    def free(self):
        """Let go of the matrix."""
        self.live = self.copied = self.both_loras = None
        self.targets, self.second_targets = [], []

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the matrix with one LoRA."""
        rank_sum = sum(len(lora[0]) for lora in self.loras)
        return sum(self.sizes) + rank_sum, self.bases[0].in_features

    def fill(self, memory: torch.Tensor | None = None):
        """Make the matrix and copy the LoRA in use into it, of quantised linears into `lora_a`.

        The parameters become views of it, unless the weights are in shards or quantised.

        Args:
            memory: where to; None: into new memory. Of quantised linears it is their `memory`.
        """
        self.targets, self.second_targets = [], []
        bases, loras, sizes, views = self.bases, self.loras, self.sizes, not self.sharded
        scaling, outputs = loras[0][2] if loras else 0.0, sum(sizes)
        dtype = bases[0].dtype if self.is_quantized else bases[0].weight.dtype
        new = partial(torch.zeros, dtype=dtype, device=bases[0].weight.device)
        rank, inputs = len(loras[0][0]) if loras else 0, bases[0].in_features
        num_loras, with_lora = 2 if self.has_second else 1, outputs + rank * len(loras)
        a = new(num_loras * rank * len(loras), inputs)
        # (outputs + k*r, inputs), and k*r more rows of the second LoRA
        if self.is_quantized:
            rows = outputs + len(a)
            weight, self.lora_a = self.memory[: rows * inputs].view(rows, inputs), a
        else:
            weight = _joined([base.weight for base in bases], a, views, memory)
        bias = None
        if any(base.bias is not None for base in bases):
            assert all(base.bias is not None for base in bases), "a bias on some linears only"
            # LoRA's A have no bias: zeros stand in their rows.
            bias = _joined([base.bias for base in bases], a[:, 0], views)
        joined_b, rows_b = [None], [()] * num_loras
        if loras:
            joined_b = new(num_loras, outputs, rank)
            rows_a = (a if self.is_quantized else weight[outputs:]).split(rank)
            rows_b = [each.split(sizes) for each in joined_b]
            # Views: copying into them fills the matrices.
            for rows in zip(rows_a, rows_b[0]):
                self.targets += rows
            for rows in zip(rows_a[len(loras) :], rows_b[-1]):  # none without the second
                self.second_targets += rows
            _copy(self.targets, self.sources)
        # Two views of one storage: with autograd the LoRA's parameters, without it their copies.
        self.live = layers.Linears(
            # Detached by .data, so that a refresh is no change of what autograd has saved.
            weight=weight.data[:outputs],
            bias=None if bias is None else bias[:outputs],
            sizes=sizes,
            scaling=scaling,
            a=self.sources[::2],
            b=self.sources[1::2],
        )
        self.copied = layers.Linears(
            weight=weight[:with_lora],
            bias=None if bias is None else bias[:with_lora],
            sizes=sizes,
            scaling=scaling,
            b=rows_b[0],
            joined_b=joined_b[0],
        )
        if self.has_second and loras:
            self.both_loras = self.copied._replace(
                weight=weight, bias=bias, joined_b=joined_b, second_b=rows_b[1]
            )
        else:
            self.both_loras = self.copied

    def dequantize(self):
        """Write the dequantised weights and LoRA's A to the memory that all layers share."""
        *wholes, lora_a = self.both_loras.weight.split([*self.sizes, len(self.lora_a)])
        for base, whole in zip(self.bases, wholes):
            base.dequantize(out=whole)
        lora_a.copy_(self.lora_a)

    def int8_weights(self, num_loras: int) -> layers.Int8Weights:
        """Return the weights in int8 and A of one or two LoRAs."""
        rows_of_a = num_loras * (self.shape[0] - sum(self.sizes))
        return layers.Int8Weights(*self.int8, self.lora_a[:rows_of_a])

    def shards(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return of each weight this rank's shard and a copy of the same rows of the matrix."""
        wholes = self.live.weight.split(self.sizes)
        weights = [base.weight for base in self.bases]
        return [(w.to_local(), own_rows(w, rows).clone()) for w, rows in zip(weights, wholes)]


def _joined(parameters, padding=None, views=True, out=None) -> torch.Tensor:
    """Stack the parameters and `padding`; with `views` the parameters become views of it."""
    parts = [parameter.data for parameter in parameters]
    parts += [] if padding is None else [padding]
    joined = torch.cat(parts, out=out)
    if views:
        for parameter, rows in zip(parameters, joined.split([*map(len, parts)])):
            parameter.data = rows
    return joined


class FusedLayer:
    """A decoder layer in the form that `layers` takes.

    Args:
        sharded: see `FusedLinears`.

    Attributes:
        live, copied: its weights; their LoRA is the parameters themselves, or their copies.
        both_loras: its weights with two LoRAs, once there is a second.
        sources, targets: parameters of its LoRA and their copies.
    """

    def __init__(self, layer: nn.Module, family: Family, sharded: bool = False):
        self.module, self.family = layer, family
        self.linears = [FusedLinears(_modules(layer, names), sharded) for names in family.linears]
        self.sources = [source for group in self.linears for source in group.sources]
        self.qkv_sizes = self.linears[0].sizes
        self._collect()

    def dequantize(self):
        """Make the matrices of quantised linears, in the place of another layer's."""
        for group in self.linears:
            group.dequantize()

    def in_int8(self, num_loras: int) -> layers.Layer:
        """Return weights in int8, with copies of one or two LoRAs, for the sampler's kernels."""
        layer = self.both_loras if num_loras > 1 else self.copied
        names = "qkv", "out", "gate_up", "down"
        return layer._replace(
            **{
                name: getattr(layer, name)._replace(int8=group.int8_weights(num_loras))
                for name, group in zip(names, self.linears)
            }
        )

    def fill(self):
        """Call `FusedLinears.fill` of all groups and collect their matrices."""
        for group in self.linears:
            group.fill()
        self._collect()

    def gather(self, with_all: bool = False):
        """Gather a layer in shards, make its matrices, shard it again: a collective.

        Args:
            with_all: whether all layers are being gathered, so that its shard may be overwritten.
        """
        self.module.unshard()
        for group in self.linears:
            group.fill(group.memory if with_all else None)
        self.module.reshard()
        self._collect()

    def restore(self):
        """Write this rank's shards of a layer anew, if there are its matrices."""
        if self.live.qkv is not None:
            # All are copied before any is written: the matrices may lie where the shards do.
            for shard, rows in [pair for group in self.linears for pair in group.shards()]:
                shard.copy_(rows)

    def free(self):
        """Let go of the matrices of a layer in shards."""
        for group in self.linears:
            group.free()
        self._collect()

    def _collect(self):
        """Take over what the groups of linears have."""
        layer, family = self.module, self.family
        self.live, self.copied, self.both_loras = (
            layers.Layer(
                norm=norm_of(layer.get_submodule(family.norm)),
                qkv=qkv,
                head_norms=tuple(map(norm_of, _modules(layer, family.head_norms))),
                out=out,
                mlp_norm=norm_of(layer.get_submodule(family.mlp_norm)),
                gate_up=gate_up,
                down=down,
            )
            for qkv, out, gate_up, down in zip(
                *[(group.live, group.copied, group.both_loras) for group in self.linears]
            )
        )
        self.targets = [target for group in self.linears for target in group.targets]

    def add_second_lora(self) -> list[torch.Tensor]:
        """Make the matrices anew with room for a second LoRA, and return its tensors."""
        for group in self.linears:
            group.has_second = True
        self.fill()
        return [target for group in self.linears for target in group.second_targets]


def norm_of(module: nn.Module) -> layers.Norm:
    """Return an RMSNorm in the form that `layers` takes."""
    return layers.Norm(module.weight, module.variance_epsilon)


def _modules(layer, names) -> list[nn.Module]:
    return [layer.get_submodule(name) for name in names]


class FusedModel:
    """A language model's frozen weights as the fused matrices of the fast path.

    The model's linears and lm_head become views of these matrices and compute as before. `release`
    gives them storage of their own again.

    Args:
        language_model: one for which `unsupported` returns None.
        before_norm: whether its last hidden states are those before the final norm.
        sharded: its layers, if they are in shards.

    Attributes:
        is_whole: whether no layer is in shards, or all are gathered.
        is_quantized: whether the layers' linears are quantised.
        has_int8: whether they are in int8.
        second_targets: copies of the LoRA that `hold_lora` keeps; None: never called.
    """

    def __init__(
        self,
        language_model: nn.Module,
        before_norm: bool = False,
        sharded: ShardedLayers | None = None,
    ):
        model, head, config = language_model.model, language_model.lm_head, language_model.config
        self.model, self.head, self.final_norm = model, head, norm_of(model.norm)
        self.before_norm, self.family = before_norm, family_of(model.layers[0])
        # lm_head's V rows, and zeros up to a multiple of 64: Sa2VA-4B's 151,679 rows alone take a
        # matrix product to a kernel that reads single numbers, at a third of the speed.
        aligning = head.weight.new_zeros(-len(head.weight) % 64, head.weight.shape[1])
        self.padded_head = _joined([head.weight], aligning)
        self.embedding = model.embed_tokens.weight.data  # (V, C)
        self.is_sharded, self.is_whole = sharded is not None, sharded is None
        self.layers = [FusedLayer(layer, self.family, self.is_sharded) for layer in model.layers]
        self.is_quantized = self.layers[0].linears[0].is_quantized
        self.has_int8 = self.layers[0].linears[0].int8 is not None
        if self.is_quantized:
            self._share_memory()
        self.shard_memory = sharded.pack() if sharded else None
        if self.shard_memory is not None:
            bases = [
                base for layer in self.layers for group in layer.linears for base in group.bases
            ]
            # Else `reshard` would not restore all shards.
            assert sum(base.weight.nbytes for base in bases) == sharded.nbytes
            self._lend(self.shard_memory)
        # (sources, targets) of all layers in one list: one call copies the LoRA.
        self.sources = [source for layer in self.layers for source in layer.sources]
        self.targets = [target for layer in self.layers for target in layer.targets]
        self.second_targets: list[torch.Tensor] | None = None
        rotary = model.rotary_emb
        # Not `inv_freq`: after a long call of the modules it is that of dynamic RoPE.
        self.inv_freq = rotary.original_inv_freq.float()
        self.rope_scale = rotary.attention_scaling
        # (D/2,) axis of the positions by which each frequency turns: time, height or width.
        sections = config.rope_parameters.get("mrope_section", [len(self.inv_freq)])
        self.num_axes = len(sections)
        axes = self.family.axes(sections, len(self.inv_freq))
        self.axis = torch.tensor(axes, device=head.weight.device)  # (D/2,)
        self.num_kv = config.num_key_value_heads
        num_heads = config.num_attention_heads + 2 * self.num_kv  # of q, k and v
        self.head_size = sum(self.layers[0].qkv_sizes) // num_heads
        # What computes a token of the sampler, and the functions of a layer beside attention.
        self.decode_ops, self.functions = decode_torch, layer_vjp.FUNCTIONS
        if head.weight.is_cuda:
            # Allow recomputing tensors that a product of the backward reads too, such as the MLP's
            # gated values: a third less memory without gradient checkpointing.
            torch._functorch.config.ban_recompute_materialized_backward = False
            self.functions = layer_vjp.LayerFunctions(*map(torch.compile, self.functions))
            from rl_train.engine import decode_triton

            if decode_triton.fits(self.head_size, config.hidden_size, config.intermediate_size):
                self.decode_ops = decode_triton
        self.graphs = LayerGraphs(self) if self.may_have_graphs() else None
        self.state = self._state()

    def may_have_graphs(self) -> bool:
        """Return whether CUDA graphs may launch the layers: whole ones with LoRAs of equal shapes.

        A quantised layer's graphs dequantise it, into memory that stays where it is.
        """
        shapes = [[p.shape for p in layer.sources] for layer in self.layers]
        alike = all(of_layer == shapes[0] for of_layer in shapes)
        return self.embedding.is_cuda and alike and not self.is_sharded

    def check(self):
        """Raise AssertionError if the model no longer computes with the fused matrices."""
        assert self.state == self._state(), (
            "the model was moved, or its LoRA is merged, off or another one: "
            "call release() of its engine before that"
        )

    def _state(self) -> tuple:
        """Return a value that `.to(..)`, merging, disabling and unloading change.

        They change all linears alike, so only one is read: this runs at every use.
        """
        module, lora = self.model.layers[0].get_submodule(self.family.qkv[0]), ()
        if isinstance(module, LoraLinear):
            lora = (module.merged, module.disable_adapters, tuple(module.active_adapters))
        if self.is_sharded:
            return id(module), None, *lora
        base = _base(module)
        # A cast does not move packed weights, but their scales.
        weight = base.scale if self.is_quantized else base.weight
        return id(module), weight.data_ptr(), *lora

    def _share_memory(self):
        """Give quantised layers memory in which one layer's matrices lie at a time.

        It has room for a second LoRA.
        """
        for groups in zip(*(layer.linears for layer in self.layers)):  # the same of all layers
            num_elements = 0
            for group in groups:
                rows, inputs = group.shape
                rows_of_a = rows - sum(group.sizes)
                num_elements = max(num_elements, (rows + rows_of_a) * inputs)
            memory = self.embedding.new_empty(num_elements)
            for group in groups:
                group.memory = memory
        for layer in self.layers:
            layer.fill()

    def _lend(self, memory: torch.Tensor):
        """Let the last layers' matrices, as many as fit, lie in the memory of this rank's shards.

        At any time the memory holds shards, then matrices, both up to its end in the order of the
        layers. A layer's matrices are no smaller than its shards. So matrices that are made in this
        order overwrite no shards of later layers, and shards that are written in the reverse order
        no matrices of earlier ones.
        """
        end = len(memory) // ALIGNMENT * ALIGNMENT
        for group in [group for layer in self.layers for group in layer.linears][::-1]:
            rows, columns = group.shape
            end -= -(-rows * columns // ALIGNMENT) * ALIGNMENT
            if end < 0:
                return
            group.memory = memory[end : end + rows * columns].view(rows, columns)

    def unshard(self):
        """Gather all layers in shards until `reshard`: a collective."""
        for number in range(len(self.layers)):
            self._gather(number, then=number + 1, with_all=True)
        self.targets = [target for layer in self.layers for target in layer.targets]
        self.is_whole = True

    @torch.no_grad()
    def reshard(self):
        """Let go of all layers in shards, or of those gathered when an `unshard` failed."""
        for layer in reversed(self.layers):  # see `_lend`
            if self.shard_memory is not None:
                layer.restore()
            layer.free()
        self.targets, self.is_whole = [], False

    def addresses(self) -> list[int]:
        """Return where the matrices of all layers lie, which a CUDA graph has captured."""
        groups = [group.copied for layer in self.layers for group in layer.linears]
        tensors = [t for g in groups for t in (g.weight, g.bias, g.joined_b) if t is not None]
        return [tensor.data_ptr() for tensor in tensors]

    @contextlib.contextmanager
    def gathered(
        self, number: int, then: int, num_loras: int = 1, in_int8: bool = False
    ) -> Iterator[layers.Layer]:
        """Context in which a layer's weights with copies of the LoRA are there.

        Those of a quantised layer are gone at the next call.

        Args:
            then: number of the layer that is needed next; beyond the layers: none.
            num_loras: 2: with the LoRA that is held too.
            in_int8: whether to leave weights in int8 as they are, for the sampler's kernels.
        """
        layer = self.layers[number]
        if in_int8:
            yield layer.in_int8(num_loras)
            return
        if self.is_quantized:
            layer.dequantize()
        elif not self.is_whole:
            self._gather(number, then)
        yield layer.both_loras if num_loras > 1 else layer.copied
        if not self.is_whole:
            layer.free()

    def _gather(self, number: int, then: int, with_all: bool = False):
        """Gather a layer in shards; begin with the next, which goes on while this one computes."""
        self.layers[number].gather(with_all)
        if 0 <= then < len(self.layers):
            self.layers[then].module.unshard(async_op=True)  # its `gather` waits for it

    def refresh(self):
        """Copy the active LoRA into the fused matrices, as `gathered` does where it gathers."""
        if self.is_whole:
            _copy(self.targets, self.sources)
        self.copied_from = address(self.sources)

    def refresh_if_changed(self):
        """Call `refresh` if the copies are of another LoRA than the active one."""
        if self.copied_from != address(self.sources):
            self.refresh()

    def hold_lora(self) -> bool:
        """Keep the LoRA of the copies as the second one, which `refresh` does not change.

        At the first call it is the LoRA in use, which is copied anew.

        Returns:
            whether the matrices have moved: at the first call.
        """
        assert not self.is_sharded
        is_first = self.second_targets is None
        if is_first:
            self.second_targets = [t for layer in self.layers for t in layer.add_second_lora()]
            self.targets = [target for layer in self.layers for target in layer.targets]
            self.state = self._state()
            self.refresh()
        _copy(self.second_targets, self.targets)
        return is_first

    def restore_lora(self):
        """Copy the LoRA that is held in the place of the other one, until the next `refresh`."""
        _copy(self.targets, self.second_targets)
        self.copied_from = None

    def release(self):
        """Give the model's parameters storage of their own; this object must not be used after."""
        for parameter in (self.head.weight, *self.model.parameters()):
            # A view holds the storage of its whole matrix.
            if parameter.untyped_storage().nbytes() > parameter.nbytes:
                parameter.data = parameter.data.clone()


@torch.no_grad()
def _copy(targets, sources):
    if targets:
        torch._foreach_copy_(targets, sources)


def address(sources: Sequence[torch.Tensor]) -> int | None:
    """Return the address of the first parameter, which tells the policy's LoRA from other roles'.

    A role exchanges all its parameters together. Offloaded roles may get the same address in turn.
    """
    return sources[0].data_ptr() if sources else None


def _base(module) -> nn.Linear:
    return module.base_layer if isinstance(module, LoraLinear) else module


def _lora(module: LoraLinear):
    """Return A (r, in), B (out, r) and alpha / r of a LoRA with one adapter."""
    (name,) = module.active_adapters
    return module.lora_A[name].weight, module.lora_B[name].weight, module.scaling[name]


def unsupported(language_model: nn.Module) -> str | None:
    """Return why the fast path does not support `language_model`, or None if it does."""
    config, model, head = language_model.config, language_model.model, language_model.lm_head
    families = {type(layer): family_of(layer) for layer in model.layers}
    unknown = [layer_type.__name__ for layer_type, family in families.items() if family is None]
    if unknown:
        return f"layers of {', '.join(unknown)} are not known"
    family, *others = set(families.values())
    if others:
        names = ", ".join(layer_type.__name__ for layer_type in families)
        return f"its layers are of several families: {names}"
    rope = config.rope_parameters["rope_type"]
    # Dynamic rotary embeddings are the default ones up to `Engine.max_positions`.
    supported = config.hidden_act == "silu" and rope in ("default", "dynamic")
    full = not family.windows or set(config.layer_types) == {"full_attention"}
    if not supported or not full:
        return "only silu, full attention and default rotary embeddings are known"
    if type(head) is not nn.Linear or type(model.embed_tokens) is not nn.Embedding:
        return "lm_head or embed_tokens is not plain"
    groups = [[_modules(layer, names) for names in family.linears] for layer in model.layers]
    bases = [_base(module) for layer in groups for group in layer for module in group]
    kinds = {type(base) for base in bases}
    others = {kind.__name__ for kind in kinds - {nn.Linear, QuantizedLinear}}
    if others:
        return f"it has linears of another kind: {', '.join(sorted(others))}"
    if len(kinds) > 1:
        return "only some of its linears are quantised"
    # The decode step adds a bias to q, k and v alone.
    others = [module for layer in groups for group in layer[1:] for module in group]
    if any(_base(module).bias is not None for module in others):
        return "linears beside q, k and v have a bias"
    parameters = [(n, p) for n, p in (*model.named_parameters(), ("lm_head", head.weight))]
    base = [parameter for name, parameter in parameters if "lora_" not in name]
    # Frozen weights get no gradient here, so a trainable one would silently not learn.
    if any(parameter.requires_grad for parameter in base):
        return "its base weights train"
    quantized = [linear for linear in bases if type(linear) is QuantizedLinear]
    packed = {id(parameter) for linear in quantized for parameter in (linear.weight, linear.scale)}
    placements = {(p.dtype, p.device) for p in base if id(p) not in packed}
    placements |= {(linear.dtype, linear.weight.device) for linear in quantized}
    if len(placements) > 1 or base[0].dtype not in (torch.float32, torch.bfloat16):
        return (
            f"its weights are {', '.join(f'{dtype} on {device}' for dtype, device in placements)}"
        )
    for number, layer in enumerate(groups):
        for group in layer:
            reason = _unsupported_loras(group)
            if reason:
                return f"layer {number}: {reason}"
    return None


def _unsupported_loras(group) -> str | None:
    loras = [module for module in group if isinstance(module, LoraLinear)]
    if loras and len(loras) < len(group):
        return "LoRA on some linears only of those that share an input"
    for lora in loras:
        plain = len(lora.active_adapters) == 1 and not lora.lora_variant
        if not plain or lora.merged or lora.disable_adapters or any(lora.lora_bias.values()):
            return "LoRA that is merged, disabled, of more than one adapter, or not the plain kind"
    # One chunk and one factor serve all LoRAs of a product.
    if len({(len(_lora(lora)[0]), _lora(lora)[2]) for lora in loras}) > 1:
        return "LoRA of different rank or scale on linears that share an input"
    return None
