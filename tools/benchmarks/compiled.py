"""A token of the sampler under torch.compile, which its kernels are held against.

Letters: N = P*G rows about P prompts, m tokens (in a decode step N), H query heads, K key-value
heads, D head size, L prompt slots, T suffix slots, S = L + T*G, C width, r LoRA rank, k linears of
one input.
"""

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from rl_train.engine import decode_torch, layers
from rl_train.engine.decode import DecodeGraph
from rl_train.engine.decode_torch import TokenCache
from rl_train.engine.fused_weights import FusedModel
from rl_train.engine.layers import Layer, LayerOps, Linears, Norm, Rotation
from rl_train.engine.lm_head import product

RECOMPILE_LIMIT = 64  # each size, and each shape that one function meets, is compiled for itself
BLOCK = 128  # keys that FlexAttention skips or reads together
AUTOTUNE = "max-autotune-no-cudagraphs"  # with coordinate descent, and products in Triton
KERNELS = ("norm", "heads", "attend", "gate")  # the other parts are compiled anyway


def fused_linear(x: torch.Tensor, linears: Linears) -> Sequence[torch.Tensor]:
    """Return what `layers.linear` does, by a product with [W; A] and one with LoRA's B.

    Args:
        linears: from `joined_lora`.
    """
    y, lora_b = F.linear(x, linears.weight, linears.bias), linears.joined_b
    if lora_b is None:
        return y.split(linears.sizes, 1)
    rank = lora_b.shape[:-1].numel()  # of all
    y, inner = y[:, :-rank].float(), y[:, -rank:]
    if lora_b.dim() == 2:
        return (y + inner @ lora_b).to(x.dtype).split(linears.sizes, 1)
    lora_outputs = torch.bmm(inner.unflatten(1, lora_b.shape[:2]).transpose(0, 1), lora_b)
    return (y + lora_outputs.transpose(0, 1).flatten(1)).to(x.dtype).split(linears.sizes, 1)


FUSED_OPS = layers.TORCH_OPS._replace(linear=fused_linear)


def joined_lora(linears: Linears) -> Linears:
    """Return the linears with the scaled B of their current LoRA as one tensor.

    It is (k*r, outputs), in blocks, or (k, r, outputs of each).
    """
    if not linears.b:
        return linears
    # Two equal blocks are a batched product; three of unequal widths one block-diagonal matrix.
    parts = [b.t() * linears.scaling for b in linears.b]
    joined_b = torch.stack(parts) if len(parts) == 2 else torch.block_diag(*parts)
    return linears._replace(joined_b=joined_b)


def layer_of(layer: Layer) -> Layer:
    """Return a layer whose linears `fused_linear` takes."""
    names = ("qkv", "out", "gate_up", "down")
    return layer._replace(**{name: joined_lora(getattr(layer, name)) for name in names})


def store(
    k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
):
    """Write k, v (N, K, D) to `slots` (G,) of keys, values (P, K, S, D)."""
    for cache, new in ((keys, k), (values, v)):
        cache[:, :, slots] = new.unflatten(0, (len(cache), -1)).transpose(1, 2)


def attend_by_products(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor
):
    """Return attention (N, H*D) of q (N, H, D) over keys, values (P, K, S, D).

    Args: bias: (P, 1, G, 1, S).
    """
    (n, num_heads, size), (num_prompts, num_kv, *_) = q.shape, keys.shape
    per, group = num_heads // num_kv, n // num_prompts
    q = (q * size**-0.5).view(num_prompts, group, num_kv, per, size).transpose(1, 2)
    scores = q.reshape(num_prompts, num_kv, -1, size) @ keys.transpose(2, 3)
    scores = scores.float().unflatten(2, (group, per)) + bias
    p = torch.softmax(scores, dim=-1).to(q.dtype).flatten(2, 3)
    return (p @ values).unflatten(2, (group, per)).transpose(1, 2).reshape(n, -1)


def attend_by_flex(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, block_mask: BlockMask
):
    """Return what `attend_by_products` does; `block_mask` is of the G rows of a prompt."""
    grouped = q.unflatten(0, (len(keys), -1)).transpose(1, 2)  # (P, H, G, D)
    attn_output = flex_attention(grouped, keys, values, block_mask=block_mask, enable_gqa=True)
    return attn_output.transpose(1, 2).reshape(len(q), -1)


def first(
    residual: torch.Tensor,
    layer: Layer,
    rotation: Rotation,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
):
    """Return (residual, q) before attention, of which k and v are stored."""
    q, k, v = layers.before_attention(residual, layer, rotation, FUSED_OPS)
    store(k, v, keys, values, slots)
    return residual, q.contiguous()


def between(residual: torch.Tensor, attn_output: torch.Tensor, layer: Layer, *following: Any):
    """Finish the layer of attention `attn_output`, and return `first` of the layer that follows."""
    return first(layers.after_attention(residual, attn_output, layer, FUSED_OPS), *following)


def last(residual: torch.Tensor, attn_output: torch.Tensor, layer: Layer, norm: Norm):
    """Return the last residual (N, C) and its norm, after the attention of the last layer."""
    residual = layers.after_attention(residual, attn_output, layer, FUSED_OPS)
    return residual, layers.norm(residual, norm)


def slots_and_bias(step: torch.Tensor, pad: torch.Tensor, length: int, group: int, slots: int):
    """Return (slots (G,) of this token, the end of those in use (1,), bias (P, 1, G, 1, S))."""
    row, slot = torch.arange(group, device=step.device), torch.arange(slots, device=step.device)
    end = length + (step + 1) * group
    # Behind the prompt lie the first tokens of all G rows, then the second ones: every G-th is a
    # row's own.
    own_slots = (slot >= length) & (slot < end) & ((slot - length) % group == row[:, None])
    visible = own_slots | ((slot >= pad[:, None, None]) & (slot < length))  # (P, G, S)
    bias = torch.zeros_like(visible, dtype=torch.float32).masked_fill(~visible, float("-inf"))
    return end - group + row, end, bias[:, None, :, None]


class CompiledGraph(DecodeGraph):
    """A decode step whose parts between, before and behind attention are compiled functions.

    The LoRA is the one in use when it is made.

    Args:
        attention: "products", "flex", or "kernel": this project's, the rest compiled.
        mode, backend: of torch.compile.
    """

    def __init__(
        self,
        *args: Any,
        attention: str,
        mode: str | None = None,
        backend: str | Callable = "inductor",
        **sizes: Any,
    ):
        self.attention = attention
        self.compile = partial(torch.compile, dynamic=False, mode=mode, backend=backend)
        super().__init__(*args, **sizes)

    def _capture(self, pool):
        fused, compile = self.fused, self.compile
        fused.refresh()
        assert not fused.is_quantized, "its layers' matrices are not all there"
        self.layers = [layer_of(layer.copied) for layer in fused.layers]
        self.first, self.between, self.last = map(compile, (first, between, last))
        self.slots_and_bias = compile(slots_and_bias)
        self.choose = compile(decode_torch.choose)
        if self.attention == "kernel":
            self.caches = self.suffix
        else:
            self._join_caches()
            flex = self.attention == "flex"
            self.attend = compile(attend_by_flex if flex else attend_by_products)
        return super()._capture(pool)

    def _join_caches(self):
        """Join the slots of a prompt and its rows: [prompt | first of all rows | second | ..]."""
        layers, two, num_prompts, num_kv, length, size = self.prefix.shape
        group, device = self.rows_per_prefix, self.prefix.device
        slots = length + self.suffix.shape[4] * group
        self.caches = self.prefix.new_zeros(layers, two, num_prompts, num_kv, slots, size)
        self.prefix, self.end = self.caches[..., :length, :], self.pad.clone()
        pad, end = self.pad, self.end  # (P,)

        def seen(
            prompt: torch.Tensor, head: torch.Tensor, row: torch.Tensor, slot: torch.Tensor
        ) -> torch.Tensor:
            own = (slot >= length) & ((slot - length) % group == row) & (slot < end[prompt])
            return own | ((slot >= pad[prompt]) & (slot < length))

        if self.attention == "flex":
            blocks = -(-slots // BLOCK)
            self.blocks = torch.zeros(num_prompts, 1, 1, dtype=torch.int32, device=device)
            every = torch.arange(blocks, dtype=torch.int32, device=device)
            every = every.expand(num_prompts, 1, 1, -1).contiguous()
            self.mask = BlockMask.from_kv_blocks(
                self.blocks, every, BLOCK_SIZE=BLOCK, mask_mod=seen, seq_lengths=(group, slots)
            )

    def forward(self):
        fused, kernel = self.fused, self.attention == "kernel"
        rotation = decode_torch.rotation(self.cos, self.sin, self.position)
        residual = F.embedding(self.token, fused.embedding)
        slots = self.step  # of their own suffixes
        if not kernel:
            length, whole = self.prefix.shape[4], self.caches.shape[4]
            slots, end, visible = self.slots_and_bias(
                self.step, self.pad, length, self.rows_per_prefix, whole
            )
        if self.attention == "flex":
            self.end.copy_(end.expand_as(self.end))
            self.blocks.copy_(((end + BLOCK - 1) // BLOCK).view(1, 1, 1).expand_as(self.blocks))
            visible = self.mask
        following = [
            (layer, rotation, *cache, slots) for layer, cache in zip(self.layers, self.caches)
        ]
        residual, q = self.first(residual, *following[0])
        for number, layer in enumerate(self.layers):
            if kernel:
                caches = *self.prefix[number], *self.caches[number]
                cache = TokenCache(
                    *caches, pad=self.pad, own_pad=self.own_pad, done=self.done, slot=self.slot
                )
                attn_output = fused.decode_ops.attend(cache, q, None, None)
            else:
                attn_output = self.attend(q, *self.caches[number], visible)
            if number + 1 < len(self.layers):
                residual, q = self.between(residual, attn_output, layer, *following[number + 1])
        residual, normed = self.last(residual, attn_output, layer, fused.final_norm)
        return residual if fused.before_norm else normed, normed

    def sample(self, normed: torch.Tensor):
        self.choose(self, product(normed, self.fused.padded_head.t()))


GRAPHS = dict(
    compiled=dict(attention="flex"),
    compiled_products=dict(attention="products"),
    compiled_autotune=dict(attention="flex", mode=AUTOTUNE),
    mixed_attend=dict(attention="kernel"),
)


WITHOUT = {f"without_{name}": [name] for name in KERNELS} | dict(without_any=KERNELS)


def without(fused: FusedModel, name: str):
    """Return a copy of `fused` that decodes with WITHOUT[name] as compiled plain torch."""
    from rl_train.engine import decode_triton as kernels  # needs Triton
    from rl_train.engine.linear_triton import Normed, complete

    def add_norm(residual, projected, weights):
        total = residual + complete(projected)[0]
        power = total.float().square().mean(1, keepdim=True)
        return total, total * weights.weight, power

    compiled = partial(torch.compile, dynamic=False)
    add_norm, attend = compiled(add_norm), compiled(decode_torch.attend)
    gate = compiled(lambda projected: layers.gate(complete(projected)))
    heads = compiled(
        lambda projected, norms, rotation: layers.heads(complete(projected), norms, rotation)
    )

    def norm(residual: kernels.Residual, weights: Norm) -> Normed:
        if residual.pending is None:
            return kernels.norm(residual, weights)
        total, x, power = add_norm(residual.value, residual.pending, weights)
        residual.value.copy_(total)
        residual.pending = None
        return Normed(x, power, weights.eps)

    def stored_heads(
        cache: TokenCache, projected: Any, norms: tuple[Norm, ...], rotation: Rotation
    ):
        turned = decode_torch.rotation(*rotation)
        q, k, v = heads(projected, norms, turned)
        cache.keys.index_copy_(2, cache.slot, k[:, :, None])
        cache.values.index_copy_(2, cache.slot, v[:, :, None])
        return q.contiguous(), None, None

    def layer_ops(cache: TokenCache) -> LayerOps:
        replaced = dict(norm=norm, gate=gate, heads=partial(stored_heads, cache))
        chosen = {part: replaced[part] for part in WITHOUT[name] if part in replaced}
        return kernels.layer_ops(cache)._replace(**chosen)

    ops = vars(fused.decode_ops) | dict(layer_ops=layer_ops)
    if "attend" in WITHOUT[name]:
        ops["attend"] = attend
    other = copy(fused)
    other.decode_ops = SimpleNamespace(**ops)
    return other
