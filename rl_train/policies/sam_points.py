"""Masks of boxes and points by SAM2, whose features of an image are made once.

Coordinates come in pixels of the original image (x, y) and go to SAM2 in pixels of its square
input. SAM2 has no neutral padding: a row beside others with more points would see other tokens. So
rows are decoded together with those that have as many points and as many boxes.

Letters: B images, M prompts (a box or none, its points), S pixels of SAM2's side.
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from rl_train.points.answers import Answer
from rl_train.rewards.iou import mask_confidence
from sa2va_hf.mask_path import decoder_features
from sa2va_hf.prediction import MASKS_AT_ONCE
from sa2va_hf.processing_sa2va import normalise_sam_pixels

FOREGROUND, BACKGROUND = 1, 0  # labels of SAM2's points


@dataclass(frozen=True)
class Prompt:
    """What SAM2 is given at a time, in pixels of the original image."""

    image: int
    box: tuple[float, float, float, float] | None
    positive: tuple[tuple[float, float], ...]
    negative: tuple[tuple[float, float], ...] = ()

    @property
    def kind(self) -> tuple[bool, int]:
        """What rows must have in common to be decoded together: a box, and how many points."""
        return self.box is not None, len(self.positive) + len(self.negative)


def sam_features(sam, pixels: torch.Tensor) -> list[torch.Tensor]:
    """SAM2's features of images (B, 3, S, S) uint8, as its mask decoder takes them.

    [(B, C/8, S/4, S/4), (B, C/4, S/8, S/8), (B, C, S/16, S/16)]
    """
    dtype = sam.vision_encoder.neck.convs[0].weight.dtype
    seen = sam.vision_encoder(normalise_sam_pixels(pixels).to(dtype))
    return decoder_features(sam, list(seen.fpn_hidden_states))


def prompts_of(image: int, answer: Answer) -> list[Prompt]:
    """The prompts whose masks' union is the answer's: one for each box, or one of points alone.

    What occurs twice counts once, for to SAM2 a point that is given twice is another prompt. Of
    several boxes a positive point belongs to the nearest, that is the one it lies in; of those that
    it lies in, to the one whose centre is nearest. Negative points belong to all. An answer with
    neither box nor positive point says nothing of what it means, and has no prompt.
    """
    boxes, positive, negative = (
        tuple(dict.fromkeys(kind)) for kind in (answer.boxes, answer.positive, answer.negative)
    )
    if len(boxes) < 2:
        box = boxes[0] if boxes else None
        return [Prompt(image, box, positive, negative)] if boxes or positive else []
    nearest = [min(range(len(boxes)), key=lambda b: _distance(boxes[b], p)) for p in positive]
    return [
        Prompt(image, box, tuple(p for p, b in zip(positive, nearest) if b == number), negative)
        for number, box in enumerate(boxes)
    ]


def _distance(box, point) -> tuple[float, float]:
    """(squared distance of a point from a box, 0 in it, and from the box's centre)."""
    (x1, y1, x2, y2), (x, y) = box, point
    aside, above = max(x1 - x, 0.0, x - x2), max(y1 - y, 0.0, y - y2)
    centre = (x - (x1 + x2) / 2) ** 2 + (y - (y1 + y2) / 2) ** 2
    return aside**2 + above**2, centre


@torch.no_grad()
def point_masks(
    sam,
    features,
    sizes: list[tuple[int, int]],
    image: list[int],
    answers,
    passes: int = 1,
    confidence: list | None = None,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """((H, W) bool mask of answers[k] in image[k], the same without its negative points).

    Args:
        features: `sam_features`; sizes: (H, W) of the B original images.
        passes: 1 = all points at once; 2 = as SAM2 was trained on: box and positive points first,
            then all of them with the logits that came of that. Without negative points both are
            the first.
        confidence: list that receives the `mask_confidence` of both masks of each answer.
    """
    assert passes in (1, 2), f"{passes} passes"
    of_answer = [prompts_of(i, answer) for i, answer in zip(image, answers, strict=True)]
    whole = [prompt for prompts in of_answer for prompt in prompts]
    plain = [Prompt(prompt.image, prompt.box, prompt.positive) for prompt in whole]
    first = decode(sam, features, sizes, plain)
    final, some = first.clone(), [m for m, prompt in enumerate(whole) if prompt.negative]
    if some:
        before = first[some] if passes == 2 else None
        final[some] = decode(sam, features, sizes, [whole[m] for m in some], before)
    counts = list(map(len, of_answer))
    sizes = [sizes[i] for i in image]
    if confidence is not None:
        confidence += zip(*(_confidence(logits.split(counts)) for logits in (final, first)))
    return _unions(final.split(counts), sizes), _unions(first.split(counts), sizes)


def _unions(logits, sizes) -> list[torch.Tensor]:
    """(H, W) bool of each answer's logits (m, h, w): what any of them covers, at that size."""
    masks = []
    for some, size in zip(logits, sizes):
        mask = torch.zeros(size, dtype=torch.bool, device=some.device)
        for one in some:  # at native size each by itself, for there they are large
            mask |= F.interpolate(one[None, None], size, mode="bilinear")[0, 0] > 0
        masks.append(mask)
    return masks


def _confidence(logits) -> list[float]:
    """`mask_confidence` of the union of each answer's logits (m, h, w); 0 of none."""
    sure = [mask_confidence(some.amax(0, keepdim=True)) if len(some) else 0.0 for some in logits]
    return list(map(float, sure))


def decode(sam, features, sizes, prompts: list[Prompt], before=None) -> torch.Tensor:
    """(M, S/4, S/4) float32 mask logits of prompts.

    One mask each, the decoder's own choice among several only where its config has
    `dynamic_multimask_via_stability`.

    Args:
        before: (M, S/4, S/4) logits that go in with the points, or None.
    """
    logits = features[0].new_zeros(len(prompts), *features[0].shape[-2:], dtype=torch.float32)
    alike = defaultdict(list)
    for m, prompt in enumerate(prompts):
        alike[prompt.kind].append(m)
    for rows in alike.values():
        for start in range(0, len(rows), MASKS_AT_ONCE):
            some = rows[start : start + MASKS_AT_ONCE]
            of_some = [prompts[m] for m in some]
            dense = None if before is None else before[some, None]
            logits[some] = _decode_alike(sam, features, sizes, of_some, dense)
    return logits


def _decode_alike(sam, features, sizes, prompts, dense) -> torch.Tensor:
    """`decode` of prompts of one kind; dense: (m, 1, S/4, S/4) or None."""
    device, side = features[0].device, sam.prompt_encoder.input_image_size
    has_box, num_points = prompts[0].kind
    image = torch.tensor([prompt.image for prompt in prompts], device=device)
    tensor = partial(torch.tensor, device=device)
    scale = tensor([[side / sizes[p.image][1], side / sizes[p.image][0]] for p in prompts])  # x, y
    points = labels = boxes = None
    if num_points:
        points = tensor([[*p.positive, *p.negative] for p in prompts]) * scale[:, None]
        kinds = [[FOREGROUND] * len(p.positive) + [BACKGROUND] * len(p.negative) for p in prompts]
        points, labels = points[:, None], tensor(kinds)[:, None]  # (m, 1, points, 2), (m, 1, ..)
    if has_box:
        boxes = (tensor([p.box for p in prompts]) * scale.repeat(1, 2))[:, None]  # (m, 1, 4)
    prompt = dict(input_points=points, input_labels=labels, input_boxes=boxes)
    sparse, dense = sam.prompt_encoder(**prompt, input_masks=dense)
    places = sam.get_image_wide_positional_embeddings()
    *fine, coarse = (level[image] for level in features)
    masks, *_ = sam.mask_decoder(
        image_embeddings=coarse,
        image_positional_embeddings=places.expand(len(prompts), -1, -1, -1),
        sparse_prompt_embeddings=sparse,
        dense_prompt_embeddings=dense,
        multimask_output=False,
        high_resolution_features=fine,
    )
    return masks[:, 0, 0].float()
