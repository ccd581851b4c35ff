"""The parts of a decode step in plain torch: for the CPU, and what `decode_triton` is tested against.

Letters: N = P*G rows, H query heads, K key-value heads, D head size, L prompt slots, T suffix slots, C width, F MLP width,
r LoRA rank, V vocabulary.
"""

import torch
import torch.nn.functional as F

from rl_train.engine.tokens import draw


def embed(token, table, weight):
    """(residual stream (N, C), x, power): the embeddings of token (N,), and what `add` returns of them."""
    residual = F.embedding(token, table)
    return residual, *_before_norm(residual, weight)


def add(residual, inputs, matrix, lora_b, scaling, weight):
    """Add to residual (N, C), in place, a linear's output, given its inputs (N, F), its matrix and LoRA A (C + r, F), LoRA B (C, r) or None.

    Args:
        weight: (C,) of the RMSNorm that reads the sum.

    Returns:
        x (N, C): sum * weight; power (N, k): shares of its mean square. RMSNorm is x / sqrt(power.sum(1) + eps), and what divides
        is one number a row: the linears are given x, and their outputs are divided.
    """
    width = residual.shape[1]
    y = F.linear(inputs, matrix)
    add_lora(y, lora_b, scaling, [width])
    residual.add_(y[:, :width])
    return _before_norm(residual, weight)


def _before_norm(residual, weight):
    return residual * weight, residual.float().square().mean(1, keepdim=True)


def normed(x, power, eps):
    """The RMSNorm (N, C) itself, of what `add` returns."""
    return (x * torch.rsqrt(power.sum(1, keepdim=True) + eps)).to(x.dtype)


def add_lora(y, lora_b, scaling, sizes):
    """Add to each linear's columns of y (N, sum(sizes) + m*r), which end in the m outputs of LoRA A, its LoRA B, in place."""
    if lora_b is not None:
        *outs, inner = y.split_with_sizes([*sizes, y.shape[1] - sum(sizes)], 1)
        for out, a, b in zip(outs, inner.chunk(len(sizes), 1), lora_b.split_with_sizes(sizes)):
            out.addmm_(a, b.t(), alpha=scaling)


def rotate_and_store(y, power, eps, bias, lora_b, scaling, cos, sin, position, keys, values, step):
    """Finish y = [q, k, v, their LoRA A outputs], turn q and k, write k and v to slot `step` of keys, values (N, K, T, D).

    Args:
        y: (N, (H + 2K) D + 3r) product with x of `add`, overwritten; power: see `add`; bias: (at least (H + 2K) D,) or None.
        lora_b: ((H + 2K) D, r) or None; cos, sin: (positions, D/2); position: (N,) long; step: (1,) long.

    Returns:
        q (N, H, D).
    """
    n, num_kv, _, size = keys.shape
    width = lora_b.shape[0] if lora_b is not None else y.shape[1]
    num_heads = width // size - 2 * num_kv
    add_lora(y, lora_b, scaling, [num_heads * size, num_kv * size, num_kv * size])
    qkv = normed(y[:, :width], power, eps)
    qkv = (qkv if bias is None else qkv + bias[:width]).view(n, -1, size)  # (N, H + 2K, D)
    first, second = qkv[:, : num_heads + num_kv].chunk(2, dim=-1)
    cos, sin = cos[position, None], sin[position, None]
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    keys.index_copy_(2, step, turned[:, num_heads:, None])
    values.index_copy_(2, step, qkv[:, num_heads + num_kv :, None])
    return turned[:, :num_heads].contiguous()


def attend(q, prefix_keys, prefix_values, keys, values, pad, step):
    """Attention (N, H*D) of q (N, H, D) over the prompt, whose keys its G rows share, and over the row's own slots up to `step`.

    Args:
        prefix_keys, prefix_values: (P, K, L, D), the first pad[p] slots of which are empty; keys, values: (N, K, T, D).
    """
    (n, num_heads, size), (num_prompts, num_kv, length, _) = q.shape, prefix_keys.shape
    q = q * size**-0.5
    own = q.view(n, num_kv, -1, size)  # (N, K, H/K, D)
    shared = own.view(num_prompts, -1, num_kv, num_heads // num_kv, size).transpose(
        1, 2
    )  # (P, K, G, H/K, D)
    shape = shared.shape
    prefix = shared.flatten(2, 3) @ prefix_keys.transpose(2, 3)  # (P, K, G*H/K, L)
    prefix = prefix.masked_fill(
        torch.arange(length, device=q.device) < pad[:, None, None, None], float("-inf")
    )
    prefix = prefix.view(*shape[:-1], length).transpose(1, 2).reshape(n, num_kv, -1, length)
    suffix = own @ keys.transpose(2, 3)  # (N, K, H/K, T)
    suffix = suffix.masked_fill(torch.arange(keys.shape[2], device=q.device) > step, float("-inf"))
    p = torch.softmax(torch.cat([prefix, suffix], dim=-1).float(), dim=-1).to(q.dtype)
    prefix = (
        p[..., :length]
        .view(num_prompts, -1, num_kv, num_heads // num_kv, length)
        .transpose(1, 2)
        .flatten(2, 3)
        @ prefix_values
    )
    prefix = prefix.view(shape).transpose(1, 2).reshape(own.shape)
    return (prefix + p[..., length:] @ values).reshape(n, -1)


def gate(y, power, eps, lora_b, scaling, width):
    """silu(gate) * up (N, F) of y = [gate, up, their LoRA A outputs] (N, 2F + 2r), a product with x of `add`; overwrites y."""
    add_lora(y, lora_b, scaling, [width, width])
    y = normed(y[:, : 2 * width], power, eps)
    return F.silu(y[:, :width]) * y[:, width:]


def choose(rows):
    """Draw a token of each row as `tokens.draw` does, and write it down at column `step`; pad for rows that are done.

    Args:
        rows: `decode.Graph`, of which it reads logits (N, at least V), of which vocab are tokens', uniforms (N, T), step and how to draw;
            and writes token, ids, logp, valid, the stop text's state, done.
    """
    rows.logits[:, rows.vocab :] = float("-inf")
    u = None if rows.greedy else rows.uniforms.index_select(1, rows.step)[:, 0]
    token, logp = draw(rows.logits, rows.temperature, u)
    rows.token.copy_(token.masked_fill(rows.done, rows.pad_id))
    rows.ids.index_copy_(1, rows.step, rows.token[:, None])
    rows.logp.index_copy_(1, rows.step, logp.masked_fill(rows.done, 0.0)[:, None])
    rows.valid.index_copy_(1, rows.step, ~rows.done[:, None])
    if rows.stop:
        state, ends = rows.stop.step(rows.state, rows.token)
        rows.state.copy_(state)
        rows.done |= ends
