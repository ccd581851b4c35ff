"""Masks of boxes and points by SAM2, which encodes an image once.

Coordinates are pixels (x, y) of the original image; SAM2 takes pixels of its square input. SAM2
has no neutral padding: padded points would change a row's mask. So only rows with equal numbers of
points and boxes are decoded together.

Letters: B images, M prompts (a box or none, its points), S pixels of SAM2's side.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from transformers import Sam2Model

from rl_train.points.parser import PointPrompt
from rl_train.rewards.iou import mask_confidence
from sa2va_hf.mask_decoder import decoder_features
from sa2va_hf.prediction import MASKS_AT_ONCE
from sa2va_hf.processing_sa2va import normalise_sam_pixels

FOREGROUND, BACKGROUND = 1, 0  # labels of SAM2's points


@dataclass(frozen=True)
class Prompt:
    """One prompt of SAM2, in pixels of the original image."""

    image: int
    box: tuple[float, float, float, float] | None
    positive: tuple[tuple[float, float], ...]
    negative: tuple[tuple[float, float], ...] = ()


def sam_features(sam: Sam2Model, pixels: torch.Tensor) -> list[torch.Tensor]:
    """Features of images (B, 3, S, S) uint8, as SAM2's mask decoder takes them.

    Returns [(B, C/8, S/4, S/4), (B, C/4, S/8, S/8), (B, C, S/16, S/16)]
    """
    dtype = sam.vision_encoder.neck.convs[0].weight.dtype
    encoded = sam.vision_encoder(normalise_sam_pixels(pixels).to(dtype))
    return decoder_features(sam, list(encoded.fpn_hidden_states))


def prompts_of(image: int, answer: PointPrompt) -> list[Prompt]:
    """Prompts whose masks' union is the answer's mask: one per box, or one of points alone.

    Duplicates count once: to SAM2 a repeated point is another prompt. With several boxes, a
    positive point belongs to the nearest one, at distance 0 inside it, and then to the one whose
    centre is nearest. Negative points belong to all. An answer with neither box nor positive point
    has no prompt.
    """
    boxes = tuple(dict.fromkeys(answer.boxes))
    positive, negative = (
        tuple(dict.fromkeys(answer.positive)),
        tuple(dict.fromkeys(answer.negative)),
    )
    if len(boxes) < 2:
        box = boxes[0] if boxes else None
        return [Prompt(image, box, positive, negative)] if boxes or positive else []

    def distance(box, x: float, y: float) -> tuple[float, float]:
        """Squared distances from a box, 0 inside it, and from its centre."""
        x1, y1, x2, y2 = box
        dx, dy = max(x1 - x, 0.0, x - x2), max(y1 - y, 0.0, y - y2)
        return dx**2 + dy**2, (x - (x1 + x2) / 2) ** 2 + (y - (y1 + y2) / 2) ** 2

    nearest = [min(boxes, key=lambda box: distance(box, *point)) for point in positive]
    return [
        Prompt(image, box, tuple(p for p, b in zip(positive, nearest) if b == box), negative)
        for box in boxes
    ]


@torch.no_grad()
def point_masks(
    sam: Sam2Model,
    features: list[torch.Tensor],
    sizes: list[tuple[int, int]],
    image: list[int],
    answers: list[PointPrompt],
    passes: int = 1,
    confidence: list[tuple[float, float]] | None = None,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """((H, W) bool mask of answers[k] in image[k], the same without its negative points).

    Args:
        features: `sam_features`; sizes: (H, W) of the B original images.
        passes: 1 = all points at once; 2 = as SAM2 was trained on: box and positive points first,
            then all points with the logits of the first pass. Without negative points both masks
            are those of the first pass.
        confidence: list that receives the `mask_confidence` of both masks of each answer.
    """
    assert passes in (1, 2), f"{passes} passes"
    prompts_per_answer = [prompts_of(i, answer) for i, answer in zip(image, answers, strict=True)]
    prompts = [prompt for prompts in prompts_per_answer for prompt in prompts]
    first = decode(sam, features, sizes, [replace(prompt, negative=()) for prompt in prompts])
    final, with_negative = first.clone(), [m for m, p in enumerate(prompts) if p.negative]
    if with_negative:
        previous = first[with_negative] if passes == 2 else None
        final[with_negative] = decode(
            sam, features, sizes, [prompts[m] for m in with_negative], previous
        )
    counts, masks, confidences = list(map(len, prompts_per_answer)), ([], []), ([], [])
    for column, all_logits in enumerate((final, first)):
        for logits, i in zip(all_logits.split(counts), image):  # (m, S/4, S/4) of one answer
            mask = torch.zeros(sizes[i], dtype=torch.bool, device=logits.device)
            for one_logits in logits[
                :, None, None
            ]:  # one by one, since masks at native size are large
                mask |= F.interpolate(one_logits, sizes[i], mode="bilinear")[0, 0] > 0
            masks[column].append(mask)
            if confidence is not None:
                union = logits.amax(0, keepdim=True) if len(logits) else None
                confidences[column].append(0.0 if union is None else float(mask_confidence(union)))
    if confidence is not None:
        confidence += zip(*confidences)
    return masks


def decode(
    sam: Sam2Model,
    features: list[torch.Tensor],
    sizes: list[tuple[int, int]],
    prompts: list[Prompt],
    previous: torch.Tensor | None = None,
) -> torch.Tensor:
    """(M, S/4, S/4) float32 mask logits of prompts.

    One mask each. SAM2 chooses among several only if its config has
    `dynamic_multimask_via_stability`.

    Args:
        previous: (M, S/4, S/4) logits that go in with the points, or None.
    """
    logits = features[0].new_zeros(len(prompts), *features[0].shape[-2:], dtype=torch.float32)
    equal_shapes = defaultdict(list)
    for m, p in enumerate(prompts):
        equal_shapes[p.box is not None, len(p.positive) + len(p.negative)].append(m)
    for all_rows in equal_shapes.values():
        for start in range(0, len(all_rows), MASKS_AT_ONCE):
            rows = all_rows[start : start + MASKS_AT_ONCE]
            dense = None if previous is None else previous[rows, None]  # (m, 1, S/4, S/4)
            logits[rows] = _decode_equal_shapes(
                sam, features, sizes, [prompts[m] for m in rows], dense
            )
    return logits


def _decode_equal_shapes(
    sam: Sam2Model,
    features: list[torch.Tensor],
    sizes: list[tuple[int, int]],
    prompts: list[Prompt],
    dense: torch.Tensor | None,
) -> torch.Tensor:
    """Decode prompts that all have a box or none, and equally many points; see `decode`."""
    tensor, side = (
        partial(torch.tensor, device=features[0].device),
        sam.prompt_encoder.input_image_size,
    )
    image = tensor([prompt.image for prompt in prompts])
    scale = tensor([[side / sizes[p.image][1], side / sizes[p.image][0]] for p in prompts])  # x, y
    points = labels = boxes = None
    if prompts[0].positive or prompts[0].negative:
        points = tensor([[*p.positive, *p.negative] for p in prompts]) * scale[:, None]
        labels = [[FOREGROUND] * len(p.positive) + [BACKGROUND] * len(p.negative) for p in prompts]
        points, labels = points[:, None], tensor(labels)[:, None]  # (m, 1, points, 2), (m, 1, ..)
    if prompts[0].box is not None:
        boxes = (tensor([p.box for p in prompts]) * scale.repeat(1, 2))[:, None]  # (m, 1, 4)
    sparse, dense = sam.prompt_encoder(
        input_points=points, input_labels=labels, input_boxes=boxes, input_masks=dense
    )
    positions = sam.get_image_wide_positional_embeddings()
    *fine, coarse = (level[image] for level in features)
    masks, *_ = sam.mask_decoder(
        image_embeddings=coarse,
        image_positional_embeddings=positions.expand(len(prompts), -1, -1, -1),
        sparse_prompt_embeddings=sparse,
        dense_prompt_embeddings=dense,
        multimask_output=False,
        high_resolution_features=fine,
    )
    return masks[:, 0, 0].float()
