"""Operations of a decode step in plain torch.

They serve sizes that `decode_triton` does not support, and are what it is tested against.

Letters: N = P*G rows, H query heads, K key-value heads, D head size, L prompt slots, T suffix
slots, C width, F MLP width, r LoRA rank, k linears of one input, V vocabulary.
Linears are `fused_weights.FusedLinears`, of which weight, bias, lora_b, scaling and sizes are read.
"""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from rl_train.engine.layers import NormOperands, rms_norm, rotate
from rl_train.engine.sampling import sample_token

if TYPE_CHECKING:
    from rl_train.engine.decode import Graph
    from rl_train.engine.fused_weights import FusedLinears


def embed(token: torch.Tensor, table: torch.Tensor, weight: torch.Tensor):
    """Embed token (N,): return the residual stream (N, C), and x and power as `add` does."""
    residual = F.embedding(token, table)
    return residual, *_before_norm(residual, weight)


def add(residual: torch.Tensor, inputs: torch.Tensor, linear: "FusedLinears", weight: torch.Tensor):
    """Add the output of a linear for inputs (N, F) to residual (N, C), in place.

    Args:
        weight: (C,) of the RMSNorm that reads the sum.

    Returns:
        x (N, C): sum * weight; power (N, any): summands of the sum's mean square. RMSNorm is
        x / sqrt(power.sum(1) + eps). As the divisor is one number a row, linears take x and their
        outputs are divided.
    """
    residual.add_(outputs(F.linear(inputs, linear.weight), linear))
    return _before_norm(residual, weight)


def _before_norm(residual, weight):
    return residual * weight, residual.float().square().mean(1, keepdim=True)


def normed(x: torch.Tensor, power: torch.Tensor, eps: float):
    """Return the RMSNorm (N, C) of x and power that `add` returned."""
    return (x * torch.rsqrt(power.sum(1, keepdim=True) + eps)).to(x.dtype)


def outputs(y: torch.Tensor, linears: "FusedLinears"):
    """Return the linears' outputs (N, sum of outputs) from their product y (N, sum + k*r).

    The last k*r columns are the outputs of LoRA's A.
    """
    sizes = linears.sizes
    # (N, outputs), (N, k*r)
    y, inner = y[:, : sum(sizes)], y[:, sum(sizes) :]
    if linears.lora_b is None:
        return y
    parts = zip(inner.chunk(len(sizes), 1), linears.lora_b.split_with_sizes(sizes))
    return y + linears.scaling * torch.cat([a @ b.t() for a, b in parts], dim=1)


def rotate_and_store(
    y: torch.Tensor,
    power: torch.Tensor,
    eps: float,
    qkv: "FusedLinears",
    cos: torch.Tensor,
    sin: torch.Tensor,
    position: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    step: torch.Tensor,
    head_norms: tuple[NormOperands, ...] = (),
):
    """Complete q, k, v; rotate q and k; write k and v to slot `step` of keys, values (N, K, T, D).

    Args:
        y: (N, (H + 2K) D + 3r) product of x of `add` with the matrix of linears `qkv`;
            power: see `add`; eps: of the RMSNorm.
        cos, sin: (positions, D/2); position: (N,) long; step: (1,) long.
        head_norms: of each head of q and of k, before the rotation; (): none.

    Returns:
        q (N, H, D).
    """
    num_rows, num_kv, _, size = keys.shape
    width = sum(qkv.sizes)
    num_heads = width // size - 2 * num_kv
    qkv_heads = normed(outputs(y, qkv), power, eps)
    # The bias comes behind the division, which must not scale it.
    if qkv.bias is not None:
        qkv_heads = qkv_heads + qkv.bias[:width]
    qkv_heads = qkv_heads.view(num_rows, -1, size)  # (N, H + 2K, D)
    q, k, v = qkv_heads.split([num_heads, num_kv, num_kv], 1)
    if head_norms:
        q, k = (rms_norm(x, norm.weight, norm.eps) for x, norm in zip((q, k), head_norms))
    cos, sin = cos[position, None], sin[position, None]
    keys.index_copy_(2, step, rotate(k, cos, sin)[:, :, None])
    values.index_copy_(2, step, v[:, :, None])
    return rotate(q, cos, sin)


def attend(
    q: torch.Tensor,
    prefix_keys: torch.Tensor,
    prefix_values: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    pad: torch.Tensor,
    done: torch.Tensor,
    step: torch.Tensor,
):
    """Return attention (N, H*D) of q (N, H, D) over its prompt and its row's slots up to `step`.

    Results of rows that are done (N,) bool are undefined, so a kernel may skip them.

    Args:
        prefix_keys, prefix_values: (P, K, L, D), shared by the G rows of a prompt; the first pad[p]
            slots are empty.
        keys, values: (N, K, T, D) of the rows themselves.
    """
    (num_rows, num_heads, size), (num_prompts, num_kv, length, _) = q.shape, prefix_keys.shape
    heads_per_kv, device = num_heads // num_kv, q.device
    grouped = (q * size**-0.5).view(num_rows, num_kv, -1, size)  # (N, K, H/K, D)
    # The G rows of a prompt read its keys by one product: (P, K, G, H/K, D).
    shared = grouped.view(num_prompts, -1, num_kv, heads_per_kv, size).transpose(1, 2)
    shape = shared.shape
    prefix = shared.flatten(2, 3) @ prefix_keys.transpose(2, 3)  # (P, K, G*H/K, L)
    padding = torch.arange(length, device=device) < pad[:, None, None, None]
    prefix = prefix.masked_fill(padding, float("-inf"))
    prefix = prefix.view(*shape[:-1], length).transpose(1, 2).reshape(num_rows, num_kv, -1, length)
    suffix = grouped @ keys.transpose(2, 3)  # (N, K, H/K, T)
    suffix = suffix.masked_fill(torch.arange(keys.shape[2], device=device) > step, float("-inf"))
    # One softmax over both: (N, K, H/K, L + T).
    p = torch.softmax(torch.cat([prefix, suffix], dim=-1).float(), dim=-1).to(q.dtype)
    shared = p[..., :length].view(num_prompts, -1, num_kv, heads_per_kv, length).transpose(1, 2)
    prefix = (
        (shared.flatten(2, 3) @ prefix_values).view(shape).transpose(1, 2).reshape(grouped.shape)
    )
    return (prefix + p[..., length:] @ values).reshape(num_rows, -1)


def gate(y: torch.Tensor, power: torch.Tensor, eps: float, gate_up: "FusedLinears"):
    """Return silu(gate) * up (N, F) from y (N, 2F + 2r).

    Args:
        y: product of x of `add` with the matrix of linears `gate_up`; power, eps: see there.
    """
    width = gate_up.sizes[0]
    # The norm's divisor commutes with the linears: it is one number a row.
    y = normed(outputs(y, gate_up), power, eps)
    return F.silu(y[:, :width]) * y[:, width:]


def choose(rows: "Graph", logits: torch.Tensor):
    """Sample a token of each row by `sampling.sample_token` and store it at column `step`.

    Rows that are done get the pad.

    Args:
        rows: `decode.Graph`, of which it reads uniforms (N, T), step and how to sample; and writes
            token, ids, logp, valid, the stop text's state, done.
        logits: (N, at least V) float32; the first vocab of each row are tokens'.
    """
    # Buffers are written in place at fixed addresses, so that a graph can replay this.
    u = None if rows.greedy else rows.uniforms.index_select(1, rows.step)[:, 0]
    token, logp = sample_token(logits[:, : rows.vocab], rows.temperature, u)
    rows.token.copy_(token.masked_fill(rows.done, rows.pad_id))
    rows.ids.index_copy_(1, rows.step, rows.token[:, None])
    rows.logp.index_copy_(1, rows.step, logp.masked_fill(rows.done, 0.0)[:, None])
    rows.valid.index_copy_(1, rows.step, ~rows.done[:, None])
    if rows.stop:
        state, ends = rows.stop.step(rows.state, rows.token)
        rows.state.copy_(state)
        rows.done.logical_or_(ends)
