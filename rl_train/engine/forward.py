"""A decoder LLM with LoRA, forward and backward over packed tokens: no padding, few kernels.

Written for the update, where eager modules spend more time on copies than on products: LoRA layers
cast their input to float32 and back, and each operation between two products reads and writes all
tokens. Here linears of one input are one product (see `fused`), LoRA's B adds to its output in
place, what lies between the products is one kernel (`forward_triton`, or its twin `forward_torch`),
and a layer keeps its input twice, [q, k, v], attention's output and [gate, up].

Letters: m tokens of all sequences, P sequences, S slots of each, C width, H query heads,
K key-value heads, D head size.
"""

import torch
from torch.autograd.function import once_differentiable

from rl_train.engine import blocks


def hidden_states(fused, embeds, layout, gradient_checkpointing=False, cache=None) -> torch.Tensor:
    """(P, S, C) last hidden states after the final norm, 0 at the padding.

    Carries gradient to embeds and LoRA.

    Args:
        fused: `fused.FusedModel`, with the LoRA as it is now.
        embeds: (P, S, C); layout: `packing.Layout`.
        cache: list that receives the keys and values of each layer, [(m, K, D), (m, K, D)].
    """
    places, ops = blocks.runs(layout.part, embeds.device), fused.forward_ops
    num_kv, size = fused.num_kv, fused.head_size
    with torch.autocast(embeds.device.type, enabled=False):
        fused.refresh()
        refreshes = fused.num_refreshes
        position = layout.position_ids.to(embeds.device, non_blocking=True)
        position = position.flatten(1)[:, places.slots].t()  # (m, axes)
        position = position.expand(-1, fused.num_axes)  # a single one holds for all
        angle = position.index_select(1, fused.axis) * fused.inv_freq  # (m, D/2), row by row
        turn = [(f(angle) * fused.rope_scale).to(embeds.dtype) for f in (torch.cos, torch.sin)]
        flash = blocks.by_flash(embeds)
        bias = None if flash else layout.bias(embeds.dtype, embeds.device)
        residual = embeds.flatten(0, 1)[places.slots]  # (m, C)
        delta = torch.zeros_like(residual)

        def layer(residual, delta, linears, norm, mlp_norm):
            assert fused.num_refreshes == refreshes, (
                "the LoRA was copied anew between a checkpointed forward and its backward"
            )
            qkv, out, gate_up, down = linears
            residual, x = blocks.AddNorm.apply(residual, delta, norm, ops)
            heads = blocks.Linear.apply(x, qkv, *qkv.sources)
            heads = heads.unflatten(1, (-1, size))  # (m, H + 2K, D)
            heads = blocks.Rotate.apply(heads, *turn, num_kv, ops)
            if cache is not None:
                cache.append([x.contiguous() for x in blocks.split(heads, num_kv)[1:]])
            if flash:
                x = blocks.Flash.apply(heads, num_kv, places)
            else:
                x = blocks.dense_attention(heads, num_kv, places, bias)
            delta = blocks.Linear.apply(x, out, *out.sources)
            residual, x = blocks.AddNorm.apply(residual, delta, mlp_norm, ops)
            lora = *gate_up.sources, *down.sources
            return residual, blocks.MLP.apply(x, gate_up, down, ops, *lora)

        for parts in fused.layers:
            if gradient_checkpointing and torch.is_grad_enabled():
                lora = [parameter for linears in parts[0] for parameter in linears.sources]
                residual, delta = _Checkpoint.apply(layer, parts, residual, delta, *lora)
            else:
                residual, delta = layer(residual, delta, *parts)
        hidden = blocks.AddNorm.apply(residual, delta, fused.final_norm, ops)[1]
        slots = hidden.new_zeros(embeds.shape).flatten(0, 1)
        return slots.index_copy(0, places.slots, hidden).view(embeds.shape)


class _Checkpoint(torch.autograd.Function):
    """A layer that is computed again in the backward.

    It takes half the Python of torch.utils.checkpoint, which here costs more than the GPU's work.
    """

    @staticmethod
    def forward(ctx, layer, parts, residual, delta, *lora):
        ctx.save_for_backward(residual, delta)
        ctx.layer, ctx.parts, ctx.lora = layer, parts, lora
        return layer(residual, delta, *parts)

    @staticmethod
    @once_differentiable
    def backward(ctx, *d):
        needed = ctx.needs_input_grad[2:]
        with torch.enable_grad():
            inputs = [t.detach().requires_grad_(need) for t, need in zip(ctx.saved_tensors, needed)]
            outputs = ctx.layer(*inputs, *ctx.parts)
        wanted = [t for t, need in zip([*inputs, *ctx.lora], needed) if need]
        gradients = iter(torch.autograd.grad(outputs, wanted, d))
        return None, None, *[next(gradients) if need else None for need in needed]
