"""Qwen2 with LoRA, forward and backward over packed tokens: no padding, few kernels, little kept for the backward.

Written for the update, where eager modules spend more time on copies than on products: LoRA layers cast their input to float32
and back, and each operation between two products reads and writes all tokens. Here linears of one input are one product (see
`fused`), LoRA's B adds to its output in place, what lies between the products is one kernel (`forward_triton`; on the CPU
`forward_torch`), and a layer keeps its input twice, [q, k, v], attention's output and [gate, up].

Letters: m tokens of all sequences, C width, H query heads, K key-value heads, D head size, F MLP width, r LoRA rank.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from rl_train.engine import decode_torch, forward_torch


@dataclass
class Runs:
    """Tokens of P packed sequences without their padding, as runs: a prompt, or what was fed of a row, which sees its prompt too."""

    num_slots: int  # S of each sequence
    slots: torch.Tensor  # (m,) where each token is among the P*S slots
    keys: torch.Tensor  # the tokens that the first run sees, the second, ..
    query_ends: torch.Tensor  # (runs + 1,) int32, from 0
    key_ends: torch.Tensor  # (runs + 1,) int32, from 0
    longest: tuple[int, int]  # queries of a run, keys of a run


def runs(part: torch.Tensor) -> Runs:
    """Of `packing.Layout.part` (P, S)."""
    many = int(part.max()) + 1
    slots = (part >= 0).flatten().nonzero()[:, 0]
    run = part.flatten()[slots] + slots // part.shape[1] * many
    names, counts = (t.tolist() for t in run.unique_consecutive(return_counts=True))
    at, keys, lengths = 0, [], []
    for name, count in zip(names, counts):
        own = torch.arange(at, at + count)
        if name % many == 0:
            prompt = own[:0]
        keys.append(torch.cat([prompt, own]))
        lengths.append(len(keys[-1]))
        if name % many == 0:
            prompt = own
        at += count
    query_ends, key_ends = (
        torch.tensor([0, *sizes]).cumsum(0).to(part.device, torch.int32)
        for sizes in (counts, lengths)
    )
    return Runs(
        part.shape[1],
        slots,
        torch.cat(keys).to(part.device),
        query_ends,
        key_ends,
        (max(counts), max(lengths)),
    )


def hidden_states(
    decoder, embeds, packed, gradient_checkpointing=False, ops=None, cache=None
) -> torch.Tensor:
    """(P, S, C) last hidden states after the final norm, 0 at the padding; carries gradient to embeds and LoRA.

    Args:
        decoder: `decode.Decoder` of the language model, whose fused matrices are used, with the LoRA as it is now.
        embeds: (P, S, C); packed: `packing.Layout`.
        ops: `forward_triton` or `forward_torch`; default by the decoder's own.
        cache: list that receives the keys and values of each layer, [(m, K, D), (m, K, D)].
    """
    ops = ops or default_ops(decoder)
    layout = runs(packed.part)
    shape, num_kv, size = embeds.shape, decoder.num_kv, decoder.head_size
    with torch.autocast(embeds.device.type, enabled=False):
        decoder.refresh()
        refreshes = decoder.num_refreshes
        angle = packed.position_ids.flatten()[layout.slots, None] * decoder.inv_freq  # (m, D/2)
        turn = [(f(angle) * decoder.rope_scale).to(embeds.dtype) for f in (torch.cos, torch.sin)]
        flash = by_flash(embeds)
        bias = None if flash else packed.bias(embeds.dtype)
        residual = embeds.flatten(0, 1)[layout.slots]  # (m, C)
        delta = torch.zeros_like(residual)

        def layer(residual, delta, fuseds, norm, mlp_norm):
            assert decoder.num_refreshes == refreshes, (
                "the LoRA was copied anew between a checkpointed forward and its backward"
            )
            qkv, out, gate_up, down = fuseds
            residual, x = _AddNorm.apply(residual, delta, norm.weight, norm.variance_epsilon, ops)
            qkv = _Linear.apply(x, qkv, *qkv.sources).unflatten(1, (-1, size))  # (m, H + 2K, D)
            qkv = _Rotate.apply(qkv, *turn, num_kv, ops)
            if cache is not None:
                cache.append([x.contiguous() for x in split(qkv, num_kv)[1:]])
            x = (
                _Flash.apply(qkv, num_kv, layout)
                if flash
                else dense_attention(qkv, num_kv, layout, bias)
            )
            delta = _Linear.apply(x, out, *out.sources)
            residual, x = _AddNorm.apply(
                residual, delta, mlp_norm.weight, mlp_norm.variance_epsilon, ops
            )
            return residual, _MLP.apply(x, gate_up, down, ops, *gate_up.sources, *down.sources)

        for parts in decoder.layers:
            if gradient_checkpointing and torch.is_grad_enabled():
                residual, delta = _Checkpoint.apply(
                    layer, parts, residual, delta, *[p for fused in parts[0] for p in fused.sources]
                )
            else:
                residual, delta = layer(residual, delta, *parts)
        norm = decoder.final_norm
        hidden = _AddNorm.apply(residual, delta, norm.weight, norm.variance_epsilon, ops)[1]
        return hidden.new_zeros(shape).flatten(0, 1).index_copy(0, layout.slots, hidden).view(shape)


def default_ops(decoder):
    """Triton's where the decoder takes them too."""
    if decoder.ops is decode_torch:
        return forward_torch
    from rl_train.engine import forward_triton

    return forward_triton


class _Checkpoint(torch.autograd.Function):
    """A layer that is computed again in the backward: half the Python of torch.utils.checkpoint, which here costs more than the GPU's work."""

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
        found = iter(
            torch.autograd.grad(
                outputs, [t for t, need in zip([*inputs, *ctx.lora], needed) if need], d
            )
        )
        return None, None, *[next(found) if need else None for need in needed]


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, residual, delta, weight, eps, ops):
        residual, x = ops.add_norm(residual, delta, weight, eps)
        ctx.save_for_backward(residual, weight)
        ctx.eps, ctx.ops = eps, ops
        ctx.set_materialize_grads(False)
        return residual, x

    @staticmethod
    @once_differentiable
    def backward(ctx, d_residual, d_x):
        residual, weight = ctx.saved_tensors
        d = ctx.ops.add_norm_backward(d_x, d_residual, residual, weight, ctx.eps)
        return d, d, None, None, None


# A linear is y = x W^T + b + s (x A^T) B^T; W is frozen, A and B are not. Fused ones share x, and their y's stand side by side.


def linear(fused, x):
    """((m, outputs + k*r) of k fused linears: their outputs, then x A^T of each."""
    y = fused(x)
    decode_torch.add_lora(y, fused.lora_b, fused.scaling, fused.sizes)
    return y


def linear_backward(fused, weight, lora_b, dy, inner):
    """(derivative by x, by x A^T or None, by each B), given dy (m, outputs) and inner = x A^T (m, k*r)."""
    outputs = sum(fused.sizes)
    dx = dy @ weight[:outputs]  # (m, inputs)
    if lora_b is None:
        return dx, None, []
    d_inner, d_b, sizes = torch.empty_like(inner), [], fused.sizes
    for d_out, d_in, x_in, b in zip(
        dy.split_with_sizes(sizes, 1),
        d_inner.chunk(len(sizes), 1),
        inner.chunk(len(sizes), 1),
        lora_b.split_with_sizes(sizes),
    ):
        d_in.addmm_(d_out, b, beta=0, alpha=fused.scaling)
        d_b.append((d_out.t() @ x_in).float().mul_(fused.scaling))
    return dx.addmm_(d_inner, weight[outputs:]), d_inner, d_b


def gradients(fused, d_inner, x, d_b) -> list[torch.Tensor]:
    """Of A, B of the first linear, of the second, .., in float32."""
    if d_inner is None:
        return []
    d_a = (d_inner.t() @ x).float().chunk(len(d_b))
    return [d for pair in zip(d_a, d_b) for d in pair]


class _Linear(torch.autograd.Function):
    """(m, outputs); `lora` are the parameters that fused.weight and fused.lora_b were copied from."""

    @staticmethod
    def forward(ctx, x, fused, *lora):
        y = linear(fused, x)
        outputs = sum(fused.sizes)
        ctx.save_for_backward(x, y[:, outputs:].clone(), fused.weight, fused.lora_b)
        ctx.fused = fused
        return y[:, :outputs]

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, inner, weight, lora_b = ctx.saved_tensors
        dx, d_inner, d_b = linear_backward(ctx.fused, weight, lora_b, dy, inner)
        return dx, None, *gradients(ctx.fused, d_inner, x, d_b)


class _MLP(torch.autograd.Function):
    """(m, C) down(silu(gate(x)) * up(x)); the product in the brackets is computed again in the backward."""

    @staticmethod
    def forward(ctx, x, gate_up, down, ops, *lora):
        y = linear(gate_up, x)  # (m, 2F + 2r)
        outputs = sum(down.sizes)
        z = linear(down, ops.gate(y, gate_up.sizes[0]))
        ctx.save_for_backward(
            x, y, z[:, outputs:].clone(), gate_up.weight, gate_up.lora_b, down.weight, down.lora_b
        )
        ctx.gate_up, ctx.down, ctx.ops = gate_up, down, ops
        return z[:, :outputs]

    @staticmethod
    @once_differentiable
    def backward(ctx, dz):
        x, y, inner, weight, lora_b, down_weight, down_b = ctx.saved_tensors
        d_gated, d_inner, d_b = linear_backward(ctx.down, down_weight, down_b, dz, inner)
        dy, gated = ctx.ops.gate_backward(d_gated, y)
        down = gradients(ctx.down, d_inner, gated, d_b)
        dx, d_inner, d_b = linear_backward(ctx.gate_up, weight, lora_b, dy, y[:, dy.shape[1] :])
        return dx, None, None, None, *gradients(ctx.gate_up, d_inner, x, d_b), *down


# Attention (m, H*D) of heads [q, k, v] (m, H + 2K, D).


class _Rotate(torch.autograd.Function):
    """Rotary positions of q and k."""

    @staticmethod
    def forward(ctx, qkv, cos, sin, num_kv, ops):
        ctx.save_for_backward(cos, sin)
        ctx.num_turned, ctx.ops = qkv.shape[1] - num_kv, ops
        return ops.rotate(qkv, cos, sin, ctx.num_turned)

    @staticmethod
    @once_differentiable
    def backward(ctx, d):
        cos, sin = ctx.saved_tensors
        return ctx.ops.rotate(d, cos, -sin, ctx.num_turned), None, None, None, None


def split(qkv, num_kv):
    """q (m, H, D), k (m, K, D), v (m, K, D)."""
    return qkv.split_with_sizes([qkv.shape[1] - 2 * num_kv, num_kv, num_kv], 1)


def padded(x, runs, num_prompts):
    """(P, heads, S, D) of x (m, heads, D), 0 at the padding."""
    slots = x.new_zeros(num_prompts * runs.num_slots, *x.shape[1:]).index_copy(0, runs.slots, x)
    return slots.unflatten(0, (num_prompts, -1)).transpose(1, 2)


def by_flash(x) -> bool:
    """Does flash attention take such tensors?"""
    return x.is_cuda and x.dtype == torch.bfloat16


class _Flash(torch.autograd.Function):
    """By flash attention for runs of different length. The keys of a prompt are repeated for its rows, but kept once."""

    @staticmethod
    def forward(ctx, qkv, num_kv, runs):
        q, k, v = split(qkv, num_kv)
        out, sums, state, unused, _ = torch.ops.aten._flash_attention_forward(
            q,
            k[runs.keys],
            v[runs.keys],
            runs.query_ends,
            runs.key_ends,
            *runs.longest,
            0.0,
            True,
            False,
        )
        ctx.save_for_backward(qkv, out, sums, state, unused)
        ctx.num_kv, ctx.runs = num_kv, runs
        return out.flatten(1)

    @staticmethod
    @once_differentiable
    def backward(ctx, d):
        (qkv, out, sums, state, unused), runs = ctx.saved_tensors, ctx.runs
        q, k, v = split(qkv, ctx.num_kv)
        dq, *d_kv = torch.ops.aten._flash_attention_backward(
            d.reshape(out.shape),
            q,
            k[runs.keys],
            v[runs.keys],
            out,
            sums,
            runs.query_ends,
            runs.key_ends,
            *runs.longest,
            0.0,
            True,
            state,
            unused,
        )
        d_qkv = torch.empty_like(qkv)
        first, *parts = split(d_qkv, ctx.num_kv)
        first.copy_(dq)
        for part, repeated in zip(parts, d_kv):  # up to G + 1 numbers add up, in float32
            part.copy_(
                torch.zeros_like(part, dtype=torch.float32).index_add_(
                    0, runs.keys, repeated.float()
                )
            )
        return d_qkv, None, None


def dense_attention(qkv, num_kv, runs, bias):
    """The same over the padded sequences with a bias (P, 1, S, S), for what flash attention does not know."""
    q, k, v = (padded(x, runs, len(bias)) for x in split(qkv, num_kv))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1)[runs.slots].flatten(1)
