"""A Sa2VA that answers about one picture at a time, for the page of tools.predict."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from PIL import Image

from rl_train.points.parser import PointPrompt
from rl_train.policies.sa2va import Sa2VAPolicy
from rl_train.policies.sa2va_queries import describe, segment_by_own_answer, segment_model_captions
from rl_train.policies.sam2_prompting import point_masks
from rl_train.rewards.iou import mask_iou
from rl_train.rollout import Batch
from rl_train.utils.rng import RowRNG
from sa2va_hf.mask_decoder import decoder_features

NUM_ROLLOUTS = 4


@dataclass
class PictureModel:
    """A policy that answers about one picture at a time.

    Attributes:
        name: as the page shows it; max_new_tokens: of its longest answer.
        picture: whose features are kept.
    """

    name: str
    policy: Sa2VAPolicy
    max_new_tokens: int
    picture: bytes = field(default=b"", repr=False)

    def look(self, image: Image.Image):
        """Encode a picture, unless it is the one that was encoded last."""
        content = image.tobytes() + repr(image.size).encode()
        if content == self.picture:
            return
        mask = torch.ones(image.height, image.width, dtype=torch.bool)
        sample = dict(image=image, mask=mask.numpy(), caption="", category="", image_id="page")
        inputs = self.policy.preprocessor(self.max_new_tokens)
        inputs = inputs.collate([inputs.prepare(sample)])
        self.batch = Batch([0], [mask], [""], ["page"], [], inputs)
        with torch.no_grad():
            self.features = self.policy.encode(self.batch)
        self.picture = content

    @torch.no_grad()
    def region_at(self, x: int, y: int) -> np.ndarray:
        """Return the region (H, W) bool that the model's own SAM2 finds under a point."""
        sam = self.policy.model.grounding_encoder
        with self.policy.autocast():
            features = decoder_features(sam, self.features.sam)
            masks, *_ = point_masks(
                sam, features, self.features.sizes, [0], [PointPrompt((), ((x, y),), ())]
            )
        return masks[0].cpu().numpy()

    def describe(self, region: np.ndarray) -> tuple[str, np.ndarray, float]:
        """Return the greedy caption of a region, the mask that it finds, and its IoU."""
        mask = torch.from_numpy(region).to(self.policy.device)
        (caption,) = describe(self.policy, self.features, [0], [mask], self.max_new_tokens)
        ((found_mask, iou),) = self.find([caption], mask)
        return caption, found_mask, iou

    def find(self, captions: list[str], region: torch.Tensor) -> list[tuple[np.ndarray, float]]:
        """Return the mask of each caption with its IoU with the region: loop 1's reward."""
        rows, tokens = [0] * len(captions), self.max_new_tokens
        masks = segment_model_captions(
            self.policy, self.features, rows, captions, tokens, forced=True
        ).masks
        ious = mask_iou(masks, [region] * len(masks)).tolist()
        return [(mask.cpu().numpy(), iou) for mask, iou in zip(masks, ious)]

    @torch.no_grad()
    def rollouts(self, region: np.ndarray, seed: int) -> list[tuple[str, np.ndarray, float]]:
        """Return sampled captions of a region, the mask that each finds, and its IoU."""
        mask = torch.from_numpy(region).to(self.policy.device)
        grid = self.policy.processor.region_grid(mask).cpu()
        prompts = self.policy.describe_prompts(self.features, [0], [grid])
        uniforms = RowRNG(seed, 0, 0, [0], NUM_ROLLOUTS).uniforms(self.max_new_tokens)
        texts = self.policy.complete(
            self.features, prompts, NUM_ROLLOUTS, self.max_new_tokens, uniforms
        )[1]
        return [(text, *mask_and_iou) for text, mask_and_iou in zip(texts, self.find(texts, mask))]

    @torch.no_grad()
    def segment(self, words: str) -> tuple[np.ndarray, float]:
        """Return the mask (H, W) bool of the model's own answer to a phrase, and its confidence."""
        segmented, *_ = segment_by_own_answer(
            self.policy, self.features, [0], [words], self.max_new_tokens
        )
        return segmented.masks[0].cpu().numpy(), segmented.confidence[0]


def box_region(box: Sequence[int], size: tuple[int, int]) -> np.ndarray:
    """Return the region (H, W) bool inside a box (left, top, right, bottom) of an image (W, H)."""
    left, top, right, bottom = box
    region = np.zeros(size[::-1], dtype=bool)
    region[top:bottom, left:right] = True
    return region
