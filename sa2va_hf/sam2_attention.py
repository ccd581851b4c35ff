"""Attention of SAM2's image encoder without scores that nothing reads.

transformers' forward first computes scores between the heads of each token and then drops them:
an eighth of the encoder's time. This one always attends by scaled_dot_product_attention.

Letters: B windows of H x W tokens, C width, D head size.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.sam2.modeling_sam2 import Sam2MultiScaleAttention, do_pool


class MultiScaleAttention(Sam2MultiScaleAttention):
    """The attention of a layer, with the weights of transformers' module."""

    def forward(self, hidden_states: torch.Tensor, **others: object) -> torch.Tensor:
        """Return the layer's states (B, H', W', C), pooled where a stage begins.

        Args:
            hidden_states: (B, H, W, C); others: arguments that transformers passes on, ignored.
        """
        height, width = hidden_states.shape[1:3]
        # (B, H * W, heads, D) each
        q, k, v = self.qkv(hidden_states).flatten(1, 2).unflatten(-1, (3, -1)).unbind(2)
        if self.query_stride:
            q = do_pool(q.unflatten(1, (height, width)), self.query_stride)
            height, width = q.shape[1:3]
            q = q.flatten(1, 2)
        q, k, v = (
            x.unflatten(-1, (self.num_attention_heads, -1)).transpose(1, 2) for x in (q, k, v)
        )
        attn_output = F.scaled_dot_product_attention(q, k, v, scale=self.scale)
        # (B, heads, H'*W', D) -> (B, H', W', C)
        return self.proj(attn_output.transpose(1, 2).flatten(2).unflatten(1, (height, width)))


def leave_out_unread_scores(sam: nn.Module):
    """Give the layers of SAM2's image encoder this attention; other models stay as they are."""
    for module in sam.modules():
        if type(module) is Sam2MultiScaleAttention:
            module.__class__ = MultiScaleAttention
