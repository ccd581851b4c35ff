"""Forward and backward of a decoder LLM with LoRA over packed tokens: no padding, few kernels.

In an update eager modules spend more time on copies than on products: LoRA layers cast their input
to float32 and back, and each operation between two products reads and writes all tokens. Here
linears of one input are one product (see `fused_weights`), and their LoRA A's another, or a part of
it without gradient. The two halves of a layer, before and behind attention (`layers`), are compiled
to few kernels on a GPU.

Letters: m tokens of all sequences, P sequences, S slots of each, C width, H query heads,
K key-value heads, D head size.
"""

import torch
from torch.autograd.function import FunctionCtx, once_differentiable

from rl_train.engine import varlen_attention
from rl_train.engine.fused_weights import FusedModel, address
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
        embeds: (P, S, W), W = C or more: the rest is added to the states behind the first layers.
        cache: list that receives the keys and values of each layer, [(m, K, D), (m, K, D)].
    """
    functions = fused.functions
    # Autograd can't keep a quantised layer's matrices, in whose place the next layer's are made.
    recompute = torch.is_grad_enabled() and (gradient_checkpointing or fused.is_quantized)
    with_gradient = torch.is_grad_enabled() and not recompute  # autograd inside each layer
    if not with_gradient:
        fused.refresh()  # copies of the LoRA make fewer, larger products
    with torch.autocast(embeds.device.type, enabled=False):
        bias = (
            None if varlen_attention.by_flash(embeds) else layout.bias(embeds.dtype, embeds.device)
        )
        runs = varlen_attention.varlen_segments(layout.part, embeds.device, bias)
        position = to_device(layout.position_ids, embeds.device)
        position = position.flatten(1)[:, runs.slots].t()  # (m, axes)
        position = position.expand(-1, fused.num_axes)  # a single axis stands for all
        angle = position.index_select(1, fused.axis) * fused.inv_freq  # (m, D/2), row by row
        rotation = [(f(angle) * fused.rope_scale).to(embeds.dtype) for f in (torch.cos, torch.sin)]
        rotation = Rotation(*mark_rows_dynamic(*[f[:, None] for f in rotation]))  # (m, 1, D/2)
        # (m, C) each: embeddings, and what is added behind the first layers (deepstack)
        width = fused.embedding.shape[1]
        residual, deepstack = embeds.flatten(0, 1)[runs.slots], ()
        if residual.shape[1] > width:
            assert fused.family.deepstack, f"embeddings of {residual.shape[1]} numbers, not {width}"
            residual, *deepstack = (part.contiguous() for part in residual.split(width, dim=1))
        for number, layer in enumerate(fused.layers):
            if recompute:
                # LoRA's parameters are inputs, as only a Function's inputs get gradients.
                residual = _Checkpoint.apply(
                    fused, number, rotation, runs, residual, *layer.sources
                )
            else:
                with fused.gathered(number, then=number + 1) as copied:
                    weights = layer.live if with_gradient else copied
                    # With autograd the second layer may compile too: unlike the first one's, its
                    # input needs a gradient.
                    may_compile = number == 0 or with_gradient
                    _mark(may_compile, residual)
                    q, k, v = functions.before_attention(residual, weights, rotation)
                    if cache is not None:
                        cache.append([k, v])
                    mixed = varlen_attention.Attention.apply(q, k, v, runs)
                    _mark(may_compile, residual, mixed)
                    residual = functions.after_attention(residual, mixed, weights)
            if number < len(deepstack):
                residual = residual + deepstack[number]
        if not fused.before_norm:
            mark_rows_dynamic(residual)
            residual = functions.norm(residual, fused.final_norm)
        # Back to padded sequences: (m, C) -> (P, S, C).
        shape = *embeds.shape[:2], width
        slots = residual.new_zeros(shape).flatten(0, 1)
        return slots.index_copy(0, runs.slots, residual).view(shape)


def _mark(may_compile, *tensors):
    """Call `mark_rows_dynamic` if the layer that computes next may compile.

    Layers of the same shapes share what the first one's calls compile, and a mark takes 10 us.
    """
    if may_compile:
        mark_rows_dynamic(*tensors)


class _Checkpoint(torch.autograd.Function):
    """Checkpointed layer: saves its input and attention, and recomputes the rest in the backward.

    Autograd's graph of a layer would cost more Python time than the GPU's work takes. The layer's
    output is not saved, as the backward does not need it.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        fused: FusedModel,
        number: int,
        rotation: Rotation,
        runs: varlen_attention.VarlenSegments,
        residual: torch.Tensor,
        *lora: torch.nn.Parameter,
    ) -> torch.Tensor:
        functions = fused.functions
        residual = residual.detach()  # as in the backward: one graph for all layers
        with fused.gathered(number, then=number + 1) as layer:
            _mark(number == 0, residual)
            q, k, v = functions.before_attention(residual, layer, rotation)
            attended = varlen_attention.attend(q, k, v, runs)
            del q, k, v  # freed before the MLP, the layer's peak of memory
            mixed = attended[0]
            _mark(number == 0, residual, mixed)
            out = functions.after_attention(residual, mixed, layer)
        ctx.save_for_backward(*lora, residual, *attended)
        ctx.fused, ctx.number, ctx.rotation, ctx.runs = fused, number, rotation, runs
        ctx.lora_address = address(lora)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, d: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        fused, functions = ctx.fused, ctx.fused.functions
        num_lora = len(ctx.needs_input_grad) - 5  # 5: the inputs before *lora
        lora, (residual, *attended) = ctx.saved_tensors[:num_lora], ctx.saved_tensors[num_lora:]
        assert address(lora) == ctx.lora_address, (
            "another LoRA came into use between a checkpointed forward and its backward"
        )
        fused.follow()  # forwards of other roles may have run in between
        rotation, mixed = ctx.rotation, attended[0]
        may_compile = ctx.number == len(fused.layers) - 1  # the first in a backward
        with fused.gathered(ctx.number, then=ctx.number - 1) as layer:
            _mark(may_compile, d, residual, mixed)
            # Backward through the MLP and the output projection, without their forward.
            d, d_mixed, *by_rest = functions.after_attention_vjp(d, residual, mixed, layer)
            q, k, v = functions.before_attention(residual, layer, rotation)
            by_heads = varlen_attention.attend_vjp(d_mixed, q, k, v, ctx.runs, *attended)
            _mark(may_compile, d, *by_heads)
            d, *by_qkv = functions.before_attention_vjp(d, by_heads, residual, layer, rotation)
        return None, None, None, None, d, *by_qkv, *by_rest  # in the order of forward's inputs
