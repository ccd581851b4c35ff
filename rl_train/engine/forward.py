"""A decoder LLM with LoRA, forward and backward over packed tokens: no padding, few kernels.

Written for the update, where eager modules spend more time on copies than on products: LoRA layers
cast their input to float32 and back, and each operation between two products reads and writes all
tokens. Here the base weights of linears of one input are one product (see `fused`), their LoRA A's
another, and what comes before and behind attention are two functions (`blocks`), which on a GPU
torch.compile turns into few kernels.

Letters: m tokens of all sequences, P sequences, S slots of each, C width, H query heads,
K key-value heads, D head size.
"""

from functools import partial

import torch
from torch.autograd.function import once_differentiable

from rl_train.engine import blocks


def hidden_states(fused, embeds, layout, gradient_checkpointing=False, cache=None) -> torch.Tensor:
    """(P, S, C) last hidden states after the final norm, 0 at the padding.

    Carries gradient to embeds and LoRA.

    Args:
        fused: `fused.FusedModel`.
        embeds: (P, S, C); layout: `packing.Layout`.
        cache: list that receives the keys and values of each layer, [(m, K, D), (m, K, D)].
    """
    places, num_kv = blocks.runs(layout.part, embeds.device), fused.num_kv
    before_attention, behind_attention, last_norm = fused.functions
    with torch.autocast(embeds.device.type, enabled=False):
        position = layout.position_ids.to(embeds.device, non_blocking=True)
        position = position.flatten(1)[:, places.slots].t()  # (m, axes)
        position = position.expand(-1, fused.num_axes)  # a single one holds for all
        angle = position.index_select(1, fused.axis) * fused.inv_freq  # (m, D/2), row by row
        turn = [(f(angle) * fused.rope_scale).to(embeds.dtype) for f in (torch.cos, torch.sin)]
        turn = [f[:, None] for f in turn]  # (m, 1, D/2)
        bias = None if blocks.by_flash(embeds) else layout.bias(embeds.dtype, embeds.device)
        residual = embeds.flatten(0, 1)[places.slots]  # (m, C)
        delta = 0 * residual  # not zeros: what needs a gradient is alike in all layers

        def layer(residual, delta, linears, *norms):
            qkv, *rest = [one.operands for one in linears]
            norm, mlp_norm = ((norm.weight, norm.variance_epsilon) for norm in norms)
            rest.insert(1, mlp_norm)
            tokens = any_number(residual, delta, *turn)
            residual, heads = before_attention(*tokens, num_kv, norm, qkv)
            if cache is not None:
                cache.append([x.contiguous() for x in blocks.split(heads, num_kv)[1:]])
            if bias is None:
                mixed = blocks.Flash.apply(heads, num_kv, places)
            else:
                mixed = blocks.dense_attention(heads, num_kv, places, bias)
            return behind_attention(*any_number(residual, mixed), *rest)

        for parts in fused.layers:
            if gradient_checkpointing and torch.is_grad_enabled():
                lora = [parameter for linears in parts[0] for parameter in linears.sources]
                present = partial(fused.present, parts)
                residual, delta = _Checkpoint.apply(layer, present, parts, residual, delta, *lora)
            else:
                residual, delta = layer(residual, delta, *parts)
        final = fused.final_norm
        tokens = any_number(residual, delta)
        hidden = last_norm(*tokens, final.weight, final.variance_epsilon)
        slots = hidden.new_zeros(embeds.shape).flatten(0, 1)
        return slots.index_copy(0, places.slots, hidden).view(embeds.shape)


def any_number(*tensors):
    """The tensors, of which torch.compile shall not take the number of tokens for a constant."""
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return tensors


class _Checkpoint(torch.autograd.Function):
    """A layer that is computed again in the backward.

    It takes half the Python of torch.utils.checkpoint, which here costs more than the GPU's work.
    """

    @staticmethod
    def forward(ctx, layer, present, parts, residual, delta, *lora):
        ctx.save_for_backward(residual, delta, *lora)
        ctx.layer, ctx.present, ctx.parts, ctx.used = layer, present, parts, _address(lora)
        with present():
            return layer(residual.detach(), delta.detach(), *parts)

    @staticmethod
    @once_differentiable
    def backward(ctx, *d):
        residual, delta, *lora = ctx.saved_tensors
        needed, inputs = ctx.needs_input_grad[3:], (residual, delta)
        assert _address(lora) == ctx.used, (
            "another LoRA came into use between a checkpointed forward and its backward"
        )
        blocks.recompute_gated()
        with ctx.present(), torch.enable_grad():
            inputs = [t.detach().requires_grad_(need) for t, need in zip(inputs, needed)]
            outputs = ctx.layer(*inputs, *ctx.parts)
        wanted = [t for t, need in zip([*inputs, *lora], needed) if need]
        gradients = iter(torch.autograd.grad(outputs, wanted, d))
        return None, None, None, *[next(gradients) if need else None for need in needed]


def _address(lora) -> int | None:
    """Where the first parameter's numbers are: a role's own, which it exchanges all together."""
    return lora[0].data_ptr() if lora else None
