"""The parts of the training forward that are not matrix products, in plain torch.

For sizes that `forward_triton` does not fit, and what it is tested against.

Letters: m tokens, C width, H query heads, K key-value heads, D head size, F MLP width.
"""

import torch
import torch.nn.functional as F


def add_norm(residual, delta, weight, eps):
    """(residual + delta, its RMSNorm), both (m, C)."""
    residual = residual + delta
    x = residual.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return residual, weight * x.to(residual.dtype)


def add_norm_backward(d_normed, d_residual, residual, weight, eps):
    """(m, C) derivative by the sum `residual`.

    Given those by its norm and, unless None, by the sum itself.
    """
    x, d = residual.float(), d_normed.float() * weight.float()
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    x = x * scale
    d = scale * (d - x * (d * x).mean(-1, keepdim=True))
    return (d if d_residual is None else d + d_residual).to(residual.dtype)


def rotate(heads, cos, sin, num_turned):
    """Heads (m, H + 2K, D), the first num_turned turned by angles whose cos, sin are (m, D/2)."""
    first, second = heads[:, :num_turned].chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([turned, heads[:, num_turned:]], dim=1)


def gate(y, width):
    """silu(gate) * up (m, F) of y = [gate, up, ..] (m, 2F + ..)."""
    return F.silu(y[:, :width]) * y[:, width : 2 * width]


def gate_backward(d, y):
    """(derivative by [gate, up] (m, 2F), silu(gate) * up (m, F)), given d (m, F) by the latter."""
    width = d.shape[1]
    g, u, d = y[:, :width].float(), y[:, width : 2 * width].float(), d.float()
    share = torch.sigmoid(g)
    silu = g * share
    dy = torch.cat([d * u * (share + silu * (1 - share)), d * silu], dim=1)
    return dy.to(y.dtype), gate(y, width)
