"""Attention inside the windows of Qwen2.5-VL's vision encoder, windows of one size in one call.

transformers calls attention once a window unless flash-attn is installed: 108 calls in each layer
for an image of 1288 x 952 pixels. Letters: n tokens, H heads, D their size.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VLVisionAttention,
    apply_rotary_pos_emb_vision,
)


class WindowAttention(Qwen2_5_VLVisionAttention):
    """The attention of a layer, with the weights of transformers' module."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        cu_seqlens: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **others: object,
    ) -> torch.Tensor:
        """Return the layer's states (n, C).

        Args:
            hidden_states: (n, C), window after window.
            cu_seqlens: (windows + 1,) where windows begin and end.
            position_embeddings: cosines and sines (n, D).
            others: of transformers, for flash-attn.
        """
        q, k, v = self.qkv(hidden_states).unflatten(-1, (3, self.num_heads, -1)).unbind(1)
        q, k = apply_rotary_pos_emb_vision(q, k, *position_embeddings)
        return self.proj(attend_in_windows(q, k, v, cu_seqlens).flatten(1))


def attend_in_windows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor
) -> torch.Tensor:
    """Return attention (n, H, D) of q, k, v (n, H, D), of each token to those of its window."""
    out = torch.empty_like(q)
    for rows in rows_of_windows(cu_seqlens):  # (windows of one size, size)
        # (windows, H, size, D)
        q_rows, k_rows, v_rows = (x[rows].transpose(1, 2) for x in (q, k, v))
        mixed = F.scaled_dot_product_attention(q_rows, k_rows, v_rows)
        out = out.index_copy(0, rows.flatten(), mixed.transpose(1, 2).flatten(0, 1))
    return out


def rows_of_windows(cu_seqlens: torch.Tensor) -> list[torch.Tensor]:
    """Return the rows (windows, size) of the windows of each size, on the device of their ends.

    They are kept with the tensor, which all layers of a kind share, so that the GPU waits once.
    """
    kept = getattr(cu_seqlens, "rows_of_windows", None)
    if kept is not None:
        return kept
    ends = cu_seqlens.cpu()
    starts, sizes = ends[:-1], ends.diff()
    rows = [
        (starts[sizes == size, None] + torch.arange(size)).to(cu_seqlens.device)
        for size in sizes.unique().tolist()
        if size
    ]
    cu_seqlens.rows_of_windows = rows
    return rows


def batch_windows(vision: nn.Module):
    """Give the layers of a vision encoder of Qwen2.5-VL this attention; others stay as they are."""
    for block in vision.blocks:
        if type(block.attn) is Qwen2_5_VLVisionAttention:
            block.attn.__class__ = WindowAttention
