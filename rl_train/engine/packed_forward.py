"""A decoder LLM with LoRA, forward and backward over packed tokens: no padding, few kernels.

Written for the update, where eager modules spend more time on copies than on products: LoRA layers
cast their input to float32 and back, and each operation between two products reads and writes all
tokens. Here linears of one input are one product (see `fused`), their LoRA A's another or, where
autograd does not follow, a part of it; and what comes before and behind attention are two functions
(`blocks`), which on a GPU torch.compile turns into few kernels.

Letters: m tokens of all sequences, P sequences, S slots of each, C width, H query heads,
K key-value heads, D head size.
"""

import torch
from torch.autograd.function import once_differentiable

from rl_train.engine import layers
from rl_train.engine.fused_weights import FusedLayer, FusedModel, address
from rl_train.engine.layers import any_number
from rl_train.engine.packing import Layout
from sa2va_hf.to_device import to_device


def hidden_states(
    fused: FusedModel,
    embeds: torch.Tensor,
    layout: Layout,
    gradient_checkpointing: bool = False,
    cache: list[list[torch.Tensor]] | None = None,
) -> torch.Tensor:
    """(P, S, C) last hidden states after the final norm, 0 at the padding.

    Carries gradient to embeds and LoRA. Without, and with checkpoints, it refreshes the copies of
    the LoRA in the fused matrices.

    Args:
        embeds: (P, S, C).
        cache: list that receives the keys and values of each layer, [(m, K, D), (m, K, D)].
    """
    functions = fused.functions
    recompute = gradient_checkpointing and torch.is_grad_enabled()
    followed = torch.is_grad_enabled() and not recompute  # by autograd, into each layer
    if not followed:
        fused.refresh()  # with copies of the LoRA it is fewer, larger products
    with torch.autocast(embeds.device.type, enabled=False):
        bias = None if layers.by_flash(embeds) else layout.bias(embeds.dtype, embeds.device)
        places = layers.varlen_segments(layout.part, embeds.device, bias)
        position = to_device(layout.position_ids, embeds.device)
        position = position.flatten(1)[:, places.slots].t()  # (m, axes)
        position = position.expand(-1, fused.num_axes)  # a single one holds for all
        angle = position.index_select(1, fused.axis) * fused.inv_freq  # (m, D/2), row by row
        turn = [(f(angle) * fused.rope_scale).to(embeds.dtype) for f in (torch.cos, torch.sin)]
        turn = any_number(*[f[:, None] for f in turn])  # (m, 1, D/2)
        residual = embeds.flatten(0, 1)[places.slots]  # (m, C)
        for layer in fused.layers:
            if recompute:
                lora = [parameter for linears in layer.linears for parameter in linears.sources]
                residual = _Checkpoint.apply(fused, layer, turn, places, residual, *lora)
                continue
            by = layer.operands(turn, live=followed)
            any_number(residual)
            q, k, v = functions.before_attention(residual, by.cos, by.sin, by.norm, by.qkv)
            if cache is not None:
                cache.append([k, v])
            mixed = layers.Attention.apply(q, k, v, places)
            any_number(residual, mixed)
            residual = functions.behind_attention(
                residual, mixed, by.mlp_norm, by.out, by.gate_up, by.down
            )
        final = fused.final_norm
        any_number(residual)
        hidden = functions.rms_norm(residual, final.weight, final.variance_epsilon)
        slots = hidden.new_zeros(embeds.shape).flatten(0, 1)
        return slots.index_copy(0, places.slots, hidden).view(embeds.shape)


class _Checkpoint(torch.autograd.Function):
    """A layer that keeps its input and attention, and computes the rest again in the backward.

    Without autograd, whose graph of a layer costs more Python than the GPU's work, and without the
    layer's output, which nobody needs again.
    """

    @staticmethod
    def forward(ctx, fused: FusedModel, layer: FusedLayer, turn, places, residual, *lora):
        functions = fused.functions
        residual = residual.detach()  # as in the backward: one graph for all layers
        by = layer.operands(turn, live=False)
        any_number(residual)
        q, k, v = functions.before_attention(residual, by.cos, by.sin, by.norm, by.qkv)
        attended = layers.attend(q, k, v, places)
        # Not kept until the layer's end.
        del q, k, v
        mixed = attended[0]
        any_number(residual, mixed)
        out = functions.behind_attention(residual, mixed, by.mlp_norm, by.out, by.gate_up, by.down)
        ctx.save_for_backward(*lora, residual, *attended)
        ctx.fused, ctx.layer, ctx.turn, ctx.places = fused, layer, turn, places
        ctx.used = address(lora)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d):
        fused, functions = ctx.fused, ctx.fused.functions
        number = len(ctx.needs_input_grad) - 5
        lora, (residual, *attended) = ctx.saved_tensors[:number], ctx.saved_tensors[number:]
        assert address(lora) == ctx.used, (
            "another LoRA came into use between a checkpointed forward and its backward"
        )
        fused.follow()  # forwards of other roles may have come in between
        by = ctx.layer.operands(ctx.turn, live=False)
        mixed = attended[0]
        any_number(d, residual, mixed)
        d, d_mixed, *by_rest = functions.behind_attention_vjp(
            d, residual, mixed, by.mlp_norm, by.out, by.gate_up, by.down
        )
        q, k, v = functions.before_attention(residual, by.cos, by.sin, by.norm, by.qkv)
        by_heads = layers.attend_vjp(d_mixed, q, k, v, ctx.places, *attended)
        any_number(d, *by_heads)
        d, *by_qkv = functions.before_attention_vjp(
            d, by_heads, residual, by.cos, by.sin, by.norm, by.qkv
        )
        return None, None, None, None, d, *by_qkv, *by_rest
