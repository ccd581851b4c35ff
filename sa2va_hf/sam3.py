"""SAM3's tracker in the place of SAM2 (Sa2VA-Qwen3-VL-4B-SAM3).

It computes as SAM2 does, with other sizes: its input has 1008 pixels a side, its mask logits 288.
And the object score gates its masks.
"""

import torch
from torch import nn
from transformers import (
    Sam2VideoConfig,
    Sam2VideoModel,
    Sam3TrackerVideoConfig,
    Sam3TrackerVideoModel,
)
from transformers.models.sam3.modeling_sam3 import Sam3VisionNeck

from .sam2_attention import leave_out_unread_scores

ABSENT = -1024.0  # mask logit of an object that the score says is absent


def build_sam(config: Sam2VideoConfig | Sam3TrackerVideoConfig) -> nn.Module:
    """Build SAM2 or SAM3, whose one Gaussian matrix two native modules share.

    SAM3 also holds what its files have and the tracker does not use: the detector's neck and the
    position of a class token.
    """
    if isinstance(config, Sam3TrackerVideoConfig):
        sam = Sam3TrackerVideoModel(config)
        sam.detector_neck = Sam3VisionNeck(config.vision_config)
        positions = sam.vision_encoder.backbone.embeddings.position_embeddings  # (1, patches, C)
        sam.class_position = nn.Parameter(torch.zeros_like(positions[:, :1]))
    else:
        sam = Sam2VideoModel(config)
        leave_out_unread_scores(sam)
    sam.prompt_encoder.shared_embedding = sam.shared_image_embedding
    return sam


def is_sam3(sam: nn.Module) -> bool:
    """Return whether a module is SAM3's tracker."""
    return isinstance(sam, Sam3TrackerVideoModel)


def image_features(sam: nn.Module, pixels: torch.Tensor) -> list[torch.Tensor]:
    """Return the three levels of features that the mask decoder takes, from fine to coarse.

    Args:
        pixels: (B, 3, S, S), normalised.
    """
    levels = sam.vision_encoder(pixels).fpn_hidden_states
    return list(levels[:3])  # SAM3 has a fourth, coarser one for its detector


def gate(sam: nn.Module, masks: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
    """Return mask logits (P, h, w), all ABSENT where SAM3's object score (P, 1) is not above 0.

    The original's SAM2 has no such gate.
    """
    if not is_sam3(sam):
        return masks
    return masks.masked_fill((score <= 0)[:, :, None], ABSENT)
