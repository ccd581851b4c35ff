"""Linears that read one input, with their LoRA, as one matrix that the model's own parameters are views of.

Of [Wq; Wk; Wv; Aq; Ak; Av] the W are the model's frozen weights: there is one copy, which the training forward uses too. The
LoRA's rows are copied in from the live float32 parameters, of whatever role is active. r is the LoRA's rank, m the number of linears.
"""

import torch
import torch.nn.functional as F
from peft.tuners.lora import Linear as LoraLinear
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import Qwen2ForCausalLM


class Fused:
    """Linears that read one input, with their LoRA, as one matrix (sum of outputs + m*r, inputs).

    Attributes:
        weight, bias: of the one matrix product; bias is None if no linear has one.
        lora_b: (sum of outputs, r) LoRA B's below each other, or None; scaling: alpha / r.
    """

    def __init__(self, modules: list[nn.Module]):
        self.bases = [_base(module) for module in modules]
        loras = [_lora(module) for module in modules if isinstance(module, LoraLinear)]
        self.sizes, weight = [base.out_features for base in self.bases], self.bases[0].weight
        rank, self.scaling = (len(loras[0][0]), loras[0][2]) if loras else (0, 0.0)
        self.weight = torch.cat(
            [base.weight.data for base in self.bases]
            + [weight.new_zeros(rank * len(loras), weight.shape[1])]
        )
        *outputs, a = self.weight.split([*self.sizes, rank * len(loras)])
        self.lora_b = (
            weight.new_zeros(sum(self.sizes), rank) if loras else None
        )  # not empty: warm-ups run before `refresh`
        for base, rows in zip(self.bases, outputs):
            base.weight.data = rows
        self.bias = None
        if any(base.bias is not None for base in self.bases):
            self.bias = torch.cat(
                [
                    weight.new_zeros(size) if base.bias is None else base.bias.data
                    for base, size in zip(self.bases, self.sizes)
                ]
                + [weight.new_zeros(len(a))]
            )
            for base, part in zip(self.bases, self.bias.split([*self.sizes, len(a)])):
                if base.bias is not None:
                    base.bias.data = part
        self.known = [_identity(module) for module in modules]
        self.sources = [p for lora in loras for p in lora[:2]]  # A, B, A, B, ..
        self.targets = (
            [t for pair in zip(a.split(rank), self.lora_b.split(self.sizes)) for t in pair]
            if loras
            else []
        )

    def stale(self, modules: list[nn.Module]) -> bool:
        """Is this no longer what `modules` compute: their weights left it, by `.to(..)` say, or their LoRA is another, off or merged?"""
        return self.known != [_identity(module) for module in modules]

    def __call__(self, x):
        """(N, inputs) -> (N, sum of outputs + m*r): base outputs, then LoRA A's."""
        return F.linear(x, self.weight, self.bias)


def _identity(module) -> tuple:
    """What must stay as it is while a Fused stands for `module`; cheap, as it is compared for every linear at every use."""
    if not isinstance(module, LoraLinear):
        return id(module), module.weight.data_ptr()
    names = module.active_adapters
    parameters = [
        id(p) for name in names for p in (module.lora_A[name].weight, module.lora_B[name].weight)
    ]
    return (
        id(module),
        module.base_layer.weight.data_ptr(),
        module.disable_adapters,
        module.merged,
        parameters,
        [module.scaling[name] for name in names],
    )


def aligned(head: nn.Linear) -> torch.Tensor:
    """(V rounded up to a multiple of 64, C) whose first V rows `head`'s weight becomes, and the others 0.

    Sa2VA-4B's 151,679 rows alone take a matrix product to a kernel that reads single numbers, at a third of the speed.
    """
    weight = torch.cat(
        [head.weight.data, head.weight.new_zeros(-len(head.weight) % 64, head.weight.shape[1])]
    )
    head.weight.data = weight[: len(head.weight)]
    return weight


def _base(module) -> nn.Linear:
    return module.base_layer if isinstance(module, LoraLinear) else module


def _lora(module: LoraLinear):
    """(A (r, in), B (out, r), alpha / r) of a LoRA with one adapter."""
    (name,) = module.active_adapters
    return module.lora_A[name].weight, module.lora_B[name].weight, module.scaling[name]


def groups(layer) -> list[list[nn.Module]]:
    """The linears of a decoder layer by the input that they share."""
    attention, mlp = layer.self_attn, layer.mlp
    return [
        [attention.q_proj, attention.k_proj, attention.v_proj],
        [attention.o_proj],
        [mlp.gate_proj, mlp.up_proj],
        [mlp.down_proj],
    ]


def unsupported(language_model) -> str | None:
    """Why a Decoder would not compute what `language_model` computes, or None if it does."""
    if type(language_model) is not Qwen2ForCausalLM:
        return f"{type(language_model).__name__} is not Qwen2ForCausalLM"
    config, model, head = language_model.config, language_model.model, language_model.lm_head
    if (
        config.hidden_act != "silu"
        or set(config.layer_types) != {"full_attention"}
        or config.rope_parameters["rope_type"] != "default"
    ):
        return "only silu, full attention and default rotary embeddings are known"
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return "its base is shared out over the ranks"
    if head.weight.dtype not in (torch.float32, torch.bfloat16):
        return f"its weights are {head.weight.dtype}"
    if (
        type(head) is not nn.Linear
        or head.bias is not None
        or type(model.embed_tokens) is not nn.Embedding
    ):
        return "lm_head or embed_tokens is not plain"
    for number, layer in enumerate(model.layers):
        for place, group in enumerate(groups(layer)):
            reason = _unsupported_group(group, head.weight)
            if place > 0 and any(_base(module).bias is not None for module in group):
                reason = "a bias behind attention or in the MLP"
            if reason:
                return f"layer {number}: {reason}"
    return None


def _unsupported_group(group, like) -> str | None:
    loras = [module for module in group if isinstance(module, LoraLinear)]
    if any(type(_base(module)) is not nn.Linear for module in group):
        return "a linear of another kind"
    if any(
        _base(module).weight.dtype != like.dtype or _base(module).weight.device != like.device
        for module in group
    ):
        return "weights of more than one dtype or device"
    if loras and len(loras) < len(group):
        return "LoRA on some linears only of those that share an input"
    if any(
        len(m.active_adapters) != 1
        or m.merged
        or m.disable_adapters
        or m.lora_variant
        or any(m.lora_bias.values())
        for m in loras
    ):
        return "LoRA that is merged, disabled, of more than one adapter, or not the plain kind"
    if len({(_lora(module)[0].shape[0], _lora(module)[2]) for module in loras}) > 1:
        return "LoRA of different rank or scale on linears that share an input"
    return None
