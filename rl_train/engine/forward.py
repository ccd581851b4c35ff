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

from rl_train.engine import blocks
from rl_train.engine.blocks import any_number
from rl_train.engine.fused import address
from sa2va_hf.transfer import send


def hidden_states(fused, embeds, layout, gradient_checkpointing=False, cache=None) -> torch.Tensor:
    """(P, S, C) last hidden states after the final norm, 0 at the padding.

    Carries gradient to embeds and LoRA. Without, and with checkpoints, it refreshes the copies of
    the LoRA in the fused matrices.

    Args:
        fused: `fused.FusedModel`.
        embeds: (P, S, C); layout: `packing.Layout`.
        cache: list that receives the keys and values of each layer, [(m, K, D), (m, K, D)].
    """
    before_attention, behind_attention, last_norm, *_ = fused.functions
    recompute = gradient_checkpointing and torch.is_grad_enabled()
    followed = torch.is_grad_enabled() and not recompute  # by autograd, into each layer
    if not followed:
        fused.refresh()  # with copies of the LoRA it is fewer, larger products
    with torch.autocast(embeds.device.type, enabled=False):
        bias = None if blocks.by_flash(embeds) else layout.bias(embeds.dtype, embeds.device)
        places = blocks.runs(layout.part, embeds.device, bias)
        position = send(layout.position_ids, embeds.device)
        position = position.flatten(1)[:, places.slots].t()  # (m, axes)
        position = position.expand(-1, fused.num_axes)  # a single one holds for all
        angle = position.index_select(1, fused.axis) * fused.inv_freq  # (m, D/2), row by row
        turn = [(f(angle) * fused.rope_scale).to(embeds.dtype) for f in (torch.cos, torch.sin)]
        turn = any_number(*[f[:, None] for f in turn])  # (m, 1, D/2)
        residual = embeds.flatten(0, 1)[places.slots]  # (m, C)

        def operands(linears, *norms):
            """What the functions before and behind attention take of a layer."""
            norm, mlp_norm = ((norm.weight, norm.variance_epsilon) for norm in norms)
            qkv, *rest = [one.live if followed else one.copied for one in linears]
            return (*turn, norm, qkv), (mlp_norm, *rest)

        for parts in fused.layers:
            if recompute:
                lora = [parameter for linears in parts[0] for parameter in linears.sources]
                residual = _Checkpoint.apply(fused, parts, operands, places, residual, *lora)
                continue
            before, behind = operands(*parts)
            q, k, v = before_attention(*any_number(residual), *before)
            if cache is not None:
                cache.append([k, v])
            mixed = blocks.Attention.apply(q, k, v, places)
            residual = behind_attention(*any_number(residual, mixed), *behind)
        final = fused.final_norm
        hidden = last_norm(*any_number(residual), final.weight, final.variance_epsilon)
        slots = hidden.new_zeros(embeds.shape).flatten(0, 1)
        return slots.index_copy(0, places.slots, hidden).view(embeds.shape)


class _Checkpoint(torch.autograd.Function):
    """A layer that keeps its input and attention, and computes the rest again in the backward.

    Without autograd, whose graph of a layer costs more Python than the GPU's work, and without the
    layer's output, which nobody needs again.
    """

    @staticmethod
    def forward(ctx, fused, parts, operands, places, residual, *lora):
        before_attention, behind_attention, *_ = fused.functions
        residual = residual.detach()  # as in the backward: one graph for all layers
        with fused.present(parts):
            before, behind = operands(*parts)
            attended = blocks.attend(*before_attention(*any_number(residual), *before), places)
            out = behind_attention(*any_number(residual, attended[0]), *behind)
        ctx.save_for_backward(*lora, residual, *attended)
        ctx.layer, ctx.used = (fused, parts, operands, places), address(lora)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d):
        fused, parts, operands, places = ctx.layer
        number = len(ctx.needs_input_grad) - 5
        lora, (residual, *attended) = ctx.saved_tensors[:number], ctx.saved_tensors[number:]
        assert address(lora) == ctx.used, (
            "another LoRA came into use between a checkpointed forward and its backward"
        )
        fused.follow()  # forwards of other roles may have come in between
        before_attention, *_, before_vjp, behind_vjp = fused.functions
        with fused.present(parts):
            before, behind = operands(*parts)
            inputs = any_number(d, residual, attended[0])
            d, d_mixed, *by_rest = behind_vjp(*inputs, *behind)
            q, k, v = before_attention(residual, *before)
            by_heads = blocks.attend_vjp(d_mixed, q, k, v, places, *attended)
            d, *by_qkv = before_vjp(*any_number(d), any_number(*by_heads), residual, *before)
        return None, None, None, None, d, *by_qkv, *by_rest
