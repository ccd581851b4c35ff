"""A token of the sampler in plain torch.

It serves sizes that `decode_triton` does not support, and is what that is tested against. Both have
the same functions.

Letters: N = P*G rows of P prefixes, H query heads, K key-value heads, D head size, L prefix slots,
S suffix slots, T new tokens, C width, V vocabulary.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

from rl_train.engine import layers
from rl_train.engine.layers import Layer, LayerOps, Linears, Norm, Rotation
from rl_train.engine.sampling import sample_token

if TYPE_CHECKING:
    from rl_train.engine.decode import DecodeGraph


class TokenCache(NamedTuple):
    """Keys and values that the newest tokens of N rows attend to in a layer."""

    prefix_keys: torch.Tensor  # (P, K, L, D), shared by the G rows of a prefix
    prefix_values: torch.Tensor
    keys: torch.Tensor  # (N, K, S, D) of the rows themselves
    values: torch.Tensor
    pad: torch.Tensor  # (P,) empty slots before each prefix
    own_pad: torch.Tensor  # (N,) empty slots before each row's own
    done: torch.Tensor  # (N,) bool; attention of rows that are done is undefined
    slot: torch.Tensor  # (1,) long, of the newest token among S


def reads_int8(layer: Layer, num_rows: int) -> bool:
    """Tell whether int8 weights need not be dequantised for so many rows: never."""
    return False


def embed(token: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return the residual (N, C) of tokens (N,)."""
    return F.embedding(token, table)


def rotation(cos: torch.Tensor, sin: torch.Tensor, position: torch.Tensor) -> Rotation:
    """Return the rotation of tokens at position (N,), of cos, sin (positions, D/2)."""
    return Rotation(cos[position, None], sin[position, None])


def layer_ops(cache: TokenCache) -> LayerOps:
    """Return what computes a layer whose newest keys and values go to `cache`."""
    return layers.TORCH_OPS._replace(linear=linear)


def linear(x: torch.Tensor, linears: Linears) -> Sequence[torch.Tensor]:
    """Compute `layers.linear`; each half of the rows with its own LoRA if there are two."""
    if not linears.second_b:
        return layers.linear(x, linears)
    num_outputs, halves = sum(linears.sizes), []
    bias = None if linears.bias is None else linears.bias[:num_outputs]
    base = linears._replace(weight=linears.weight[:num_outputs], bias=bias, second_b=())
    loras = zip(linears.weight[num_outputs:].chunk(2), (linears.b, linears.second_b))
    for rows, (a, b) in zip(x.chunk(2), loras):
        halves.append(layers.linear(rows, base._replace(a=[a], b=b)))
    return [torch.cat(outputs) for outputs in zip(*halves)]


def attend(
    cache: TokenCache, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None
) -> torch.Tensor:
    """Return attention (N, H*D) of q (N, H, D) over its prefix and its row's slots up to `slot`.

    Args:
        k, v: (N, K, D), which are stored at `slot`; None: `LayerOps.heads` stored them.
    """
    prefix_keys, prefix_values, keys, values, pad, own_pad, _, slot = cache
    if k is not None:
        keys.index_copy_(2, slot, k[:, :, None])
        values.index_copy_(2, slot, v[:, :, None])
    (num_rows, num_heads, size), (num_prefixes, num_kv, length, _) = q.shape, prefix_keys.shape
    heads_per_kv, device = num_heads // num_kv, q.device
    grouped = (q * size**-0.5).view(num_rows, num_kv, -1, size)  # (N, K, H/K, D)
    # The G rows of a prefix read its keys by one product: (P, K, G, H/K, D).
    shared = grouped.view(num_prefixes, -1, num_kv, heads_per_kv, size).transpose(1, 2)
    shape = shared.shape
    prefix = shared.flatten(2, 3) @ prefix_keys.transpose(2, 3)  # (P, K, G*H/K, L)
    padding = torch.arange(length, device=device) < pad[:, None, None, None]
    prefix = prefix.masked_fill(padding, float("-inf"))
    prefix = prefix.view(*shape[:-1], length).transpose(1, 2).reshape(num_rows, num_kv, -1, length)
    suffix = grouped @ keys.transpose(2, 3)  # (N, K, H/K, S)
    slots = torch.arange(keys.shape[2], device=device)
    unused = (slots < own_pad[:, None, None, None]) | (slots > slot)
    suffix = suffix.masked_fill(unused, float("-inf"))
    # One softmax over both: (N, K, H/K, L + S).
    p = torch.softmax(torch.cat([prefix, suffix], dim=-1).float(), dim=-1).to(q.dtype)
    shared = p[..., :length].view(num_prefixes, -1, num_kv, heads_per_kv, length).transpose(1, 2)
    mixed = (shared.flatten(2, 3) @ prefix_values).view(shape).transpose(1, 2)
    return (mixed.reshape(grouped.shape) + p[..., length:] @ values).reshape(num_rows, -1)


def final(residual: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the last residual (N, C) and its norm (N, C)."""
    return residual, layers.norm(residual, norm)


def choose(rows: "DecodeGraph", logits: torch.Tensor):
    """Sample a token of each row by `sampling.sample_token` and store it at column `step`.

    Rows that are done get the pad.

    Args:
        rows: `decode.DecodeGraph`, of which it reads uniforms (N, T), step and how to sample, and
            writes token, ids, logp, valid, the stop text's state, done.
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
