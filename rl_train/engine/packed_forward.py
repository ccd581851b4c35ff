"""Forward and backward of a decoder LLM with LoRA over packed tokens, in few kernels.

In an update eager modules spend more time on copies than on products: LoRA layers cast their input
to float32 and back, and each operation between two products reads and writes all tokens. Here
linears of one input are one product (see `fused_weights`), of which their LoRA A's are rows; where
autograd goes through a layer these are a product of their own, and wide linears are apart. Only
CUDA graphs (`layer_graphs`) add padding. The two halves of a layer, before and behind attention
(`layers`), are compiled to few kernels on a GPU.

Letters: m tokens of all sequences, P sequences, S slots of each, C width, H query heads,
K key-value heads, D head size.
"""

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch.autograd.function import FunctionCtx, once_differentiable

from rl_train.engine import layer_graphs, varlen_attention
from rl_train.engine.fused_weights import FusedModel, address
from rl_train.engine.layer_graphs import LayerGraphs
from rl_train.engine.layers import Rotation, mark_rows_dynamic
from rl_train.engine.packing import Layout
from sa2va_hf.to_device import to_device


def hidden_states(
    fused: FusedModel,
    embeds: torch.Tensor,
    layout: Layout,
    gradient_checkpointing: bool = False,
    cache: list[list[torch.Tensor]] | None = None,
) -> torch.Tensor:
    """Return the last hidden states (P, S, C), 0 at the padding.

    They are those after the final norm, or before it if `fused.before_norm`.

    They carry gradient to embeds and LoRA. Without gradient, or where layers are recomputed, the
    copies of the LoRA in the fused matrices are refreshed.

    Args:
        gradient_checkpointing: recompute all layers in the backward; if False, those of quantised
            layers and of few tokens.
        embeds: (P, S, C), or (P, S, (1 + n) * C): the n parts behind the first are added to the
            outputs of the first n layers (deepstack).
        cache: list that receives the keys and values of each layer, [(m, K, D), (m, K, D)], with
            padding behind the m; only without gradient.

    Raises:
        AssertionError: embeds are wider than C, and the family has no deepstack.
    """
    functions, device, graphs = fused.functions, embeds.device, None
    with torch.autocast(device.type, enabled=False):
        segments = varlen_attention.varlen_segments(layout.part)
        by_flash = varlen_attention.by_flash(embeds)
        if fused.graphs is not None and by_flash:
            padded = segments.padded()
            if fused.graphs.fit(padded):
                segments, graphs = padded, fused.graphs
        # Autograd can't keep a quantised layer's matrices, in whose place the next layer's are
        # made. And for few tokens, graphs recompute a layer faster than autograd launches it.
        recompute = gradient_checkpointing or fused.is_quantized or graphs is not None
        recompute = recompute and torch.is_grad_enabled()
        autograd_in_layers = torch.is_grad_enabled() and not recompute
        if not autograd_in_layers:
            fused.refresh()  # copies of the LoRA make fewer, larger products
        bias = None if by_flash else layout.bias(embeds.dtype, device)
        segments = replace(segments.to(device), bias=bias)
        num_tokens = len(segments.slots)
        more_tokens = segments.num_tokens - num_tokens  # padding for the graphs
        position = to_device(layout.position_ids, device)
        position = position.flatten(1)[:, segments.slots].t()  # (m, axes)
        position = position.expand(-1, fused.num_axes)  # a single axis stands for all
        angle = position.index_select(1, fused.axis) * fused.inv_freq  # (m, D/2), row by row
        angle = F.pad(angle, (0, 0, 0, more_tokens)) if graphs else angle
        rotation = [(f(angle) * fused.rope_scale).to(embeds.dtype) for f in (torch.cos, torch.sin)]
        rotation = Rotation(*mark_rows_dynamic(*[f[:, None] for f in rotation]))  # (m, 1, D/2)
        # (m, C) each: embeddings, and what is added behind the first layers (deepstack)
        width = fused.embedding.shape[1]
        residual, deepstack = embeds.flatten(0, 1)[segments.slots], ()
        residual = F.pad(residual, (0, 0, 0, more_tokens)) if graphs else residual
        if residual.shape[1] > width:
            assert fused.family.deepstack, f"embeddings of {residual.shape[1]} numbers, not {width}"
            residual, *deepstack = (part.contiguous() for part in residual.split(width, dim=1))
        forward = graphs.forward if graphs else partial(layer_graphs.forward, fused)
        for number, layer in enumerate(fused.layers):
            if recompute:
                # LoRA's parameters are inputs, as only a Function's inputs get gradients.
                residual = _Checkpoint.apply(
                    fused, graphs, number, rotation, segments, residual, *layer.sources
                )
            elif autograd_in_layers:
                mark_rows_dynamic(residual)
                q, k, v = functions.before_attention(residual, layer.live, rotation)
                attn_output = varlen_attention.Attention.apply(q, k, v, segments)
                # The second layer may compile too: unlike the first one's, its input needs a
                # gradient.
                mark_rows_dynamic(residual, attn_output)
                residual = functions.after_attention(residual, attn_output, layer.live)
            else:
                residual, _ = forward(number, residual, rotation, segments, cache)
            if number < len(deepstack):
                residual = residual + deepstack[number]
        residual = residual[:num_tokens] if graphs else residual
        if not fused.before_norm:
            mark_rows_dynamic(residual)
            residual = functions.norm(residual, fused.final_norm)
        # Back to padded sequences: (m, C) -> (P, S, C).
        shape = *embeds.shape[:2], width
        slots = residual.new_zeros(shape).flatten(0, 1)
        return slots.index_copy(0, segments.slots, residual).view(shape)


class _Checkpoint(torch.autograd.Function):
    """Checkpointed layer: saves its input and attention, and recomputes the rest in the backward.

    Autograd's graph of a layer would cost more Python time than the GPU's work takes. The layer's
    output is not saved, as the backward does not need it.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        fused: FusedModel,
        graphs: LayerGraphs | None,
        number: int,
        rotation: Rotation,
        segments: varlen_attention.VarlenSegments,
        residual: torch.Tensor,
        *lora: torch.nn.Parameter,
    ) -> torch.Tensor:
        residual = residual.detach()  # as in the backward: torch.compile makes one version
        forward = graphs.forward if graphs else partial(layer_graphs.forward, fused)
        out, attended = forward(number, residual, rotation, segments)
        ctx.save_for_backward(*lora, residual, *attended)
        ctx.fused, ctx.graphs, ctx.number = fused, graphs, number
        ctx.rotation, ctx.segments = rotation, segments
        ctx.lora_address = address(lora)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, d: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        fused, graphs, no_gradients = ctx.fused, ctx.graphs, 5 * [None]  # of forward's first inputs
        num_lora = len(ctx.needs_input_grad) - len(no_gradients) - 1
        lora, (residual, *attended) = ctx.saved_tensors[:num_lora], ctx.saved_tensors[num_lora:]
        assert address(lora) == ctx.lora_address, (
            "another LoRA came into use between a checkpointed forward and its backward"
        )
        fused.refresh_if_changed()  # forwards of other roles may have run in between
        backward = graphs.backward if graphs else partial(layer_graphs.backward, fused)
        with torch.autocast(d.device.type, enabled=False):
            d, d_lora = backward(ctx.number, d, residual, attended, ctx.rotation, ctx.segments)
        return *no_gradients, d, *d_lora
