"""Masks of boxes and points by SAM2, which encodes an image once.

Coordinates are pixels (x, y) of the original image; SAM2 takes pixels of its square input. SAM2
has no neutral padding: padded points would change a row's mask. So only rows with equal numbers of
points and boxes are decoded together.

Letters: B images, M prompts (a box or none, its points), S pixels of SAM2's side.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
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


def sam_features(sam: Sam2Model, pixels: torch.Tensor) -> list[torch.Tensor]:
    """Return features of images (B, 3, S, S) uint8, as SAM2's mask decoder takes them.

    They are [(B, C/8, S/4, S/4), (B, C/4, S/8, S/8), (B, C, S/16, S/16)]
    """
    dtype = sam.vision_encoder.neck.convs[0].weight.dtype
    encoded = sam.vision_encoder(normalise_sam_pixels(pixels).to(dtype))
    return decoder_features(sam, list(encoded.fpn_hidden_states))


def split_by_box(prompt: PointPrompt) -> list[PointPrompt]:
    """Return prompts of at most one box, whose masks' union is the mask of `prompt`.

    Duplicates count once: to SAM2 a repeated point is another prompt. Of several boxes each has the
    positive point at its own position, as in the answer's list; negative points belong to all.
    Without box and positive point the list is empty.
    """
    negative = tuple(dict.fromkeys(prompt.negative))
    if len(prompt.boxes) == len(prompt.positive) > 1:
        pairs = dict.fromkeys(zip(prompt.boxes, prompt.positive))
        return [PointPrompt((box,), (point,), negative) for box, point in pairs]
    boxes, positive = tuple(dict.fromkeys(prompt.boxes)), tuple(dict.fromkeys(prompt.positive))
    assert len(boxes) < 2, f"{len(boxes)} boxes have {len(positive)} points, not one each"
    return [PointPrompt(boxes, positive, negative)] if boxes or positive else []


@torch.no_grad()
def point_masks(
    sam: Sam2Model,
    features: list[torch.Tensor],
    sizes: list[tuple[int, int]],
    image_index: list[int],
    prompts: list[PointPrompt],
    passes: int = 1,
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[tuple[float, float]]]:
    """Return the masks that SAM2 predicts for prompts[k] in image image_index[k].

    A prompt with neither box nor positive point has an empty mask.

    Args:
        features: `sam_features`; sizes: (H, W) of the B original images.
        passes: 1 = all points at once; 2 = as SAM2 was trained on: box and positive points first,
            then all points with the logits of the first pass. Without negative points both masks
            are those of the first pass.

    Returns:
        Masks (H, W) bool, masks without the negative points, and the `mask_confidence` of both, 0
        for an empty one.
    """
    groups = [split_by_box(prompt) for prompt in prompts]
    image_of_each = [i for i, group in zip(image_index, groups, strict=True) for _ in group]
    single = [prompt for group in groups for prompt in group]  # M prompts of one box at most
    first = decode(sam, features, sizes, image_of_each, [replace(p, negative=()) for p in single])
    # Rows without negative points keep their first mask.
    final, with_negative = first.clone(), [m for m, p in enumerate(single) if p.negative]
    if with_negative:
        final[with_negative] = decode(
            sam,
            features,
            sizes,
            [image_of_each[m] for m in with_negative],
            [single[m] for m in with_negative],
            first[with_negative] if passes == 2 else None,
        )
    counts, native_sizes = list(map(len, groups)), [sizes[i] for i in image_index]
    masks, confidence = unions_of_groups(final.split(counts), native_sizes)
    without, confidence_without = unions_of_groups(first.split(counts), native_sizes)
    return masks, without, list(zip(confidence, confidence_without))


def unions_of_groups(
    groups: Iterable[torch.Tensor], sizes: list[tuple[int, int]]
) -> tuple[list[torch.Tensor], list[float]]:
    """Return the union (H, W) bool of each group of logits (m, S/4, S/4), and its confidence.

    The confidence is `mask_confidence`, 0 of a group of none.
    """
    masks, confidence = [], []
    for logits, size in zip(groups, sizes, strict=True):
        masks.append(union_of_masks(logits, size))
        # The union of the boxes' masks has the maximum of their logits.
        value = mask_confidence(logits.amax(0, keepdim=True)) if len(logits) else 0.0
        confidence.append(float(value))
    return masks, confidence


@torch.no_grad()
def best_masks(
    sam: Sam2Model,
    features: list[torch.Tensor],
    sizes: list[tuple[int, int]],
    image_index: list[int],
    groups: list[list[PointPrompt]],
) -> list[torch.Tensor]:
    """Return the unions (H, W) bool of SAM2's masks of groups[k], prompts in image image_index[k].

    Of each prompt SAM2 predicts three masks, of which the one with the best score counts, as in
    the published evaluations of Seg-Zero and VisionReasoner.

    Args:
        features: `sam_features`; sizes: (H, W) of the B original images.
    """
    image_of_each = [i for i, group in zip(image_index, groups, strict=True) for _ in group]
    single = [prompt for group in groups for prompt in group]  # M
    logits = decode(sam, features, sizes, image_of_each, single, best_of_three=True)
    counts = list(map(len, groups))
    return [union_of_masks(part, sizes[i]) for part, i in zip(logits.split(counts), image_index)]


def union_of_masks(logits: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Return the union (H, W) bool, at `size`, of m masks by their logits (m, S/4, S/4)."""
    mask = torch.zeros(size, dtype=torch.bool, device=logits.device)
    # One by one, since masks at native size are large.
    for box_logits in logits[:, None, None]:
        mask |= F.interpolate(box_logits, size, mode="bilinear")[0, 0] > 0
    return mask


def decode(
    sam: Sam2Model,
    features: list[torch.Tensor],
    sizes: list[tuple[int, int]],
    image_index: list[int],
    prompts: list[PointPrompt],
    previous: torch.Tensor | None = None,
    best_of_three: bool = False,
) -> torch.Tensor:
    """Return mask logits (M, S/4, S/4) float32 of M prompts, one mask each.

    A prompt has at most one box. SAM2 chooses among several only if its config has
    `dynamic_multimask_via_stability`.

    Args:
        previous: (M, S/4, S/4) logits that go in with the points, or None.
        best_of_three: take the best by score of the three masks that SAM2 predicts for an ambiguous
            prompt, in place of its single mask.
    """
    logits = features[0].new_zeros(len(prompts), *features[0].shape[-2:], dtype=torch.float32)
    # {(boxes, points): rows}; negative points count as points, their labels differ.
    equal_shapes = defaultdict(list)
    for m, p in enumerate(prompts):
        equal_shapes[len(p.boxes), len(p.positive) + len(p.negative)].append(m)
    for all_rows in equal_shapes.values():
        for start in range(0, len(all_rows), MASKS_AT_ONCE):
            rows = all_rows[start : start + MASKS_AT_ONCE]
            index = torch.tensor([image_index[m] for m in rows], device=logits.device)
            logits[rows] = _decode_equal_shapes(
                sam,
                [level[index] for level in features],
                [sizes[image_index[m]] for m in rows],
                [prompts[m] for m in rows],
                None if previous is None else previous[rows, None],  # (m, 1, S/4, S/4)
                best_of_three,
            )
    return logits


def _decode_equal_shapes(
    sam: Sam2Model,
    features: list[torch.Tensor],
    sizes: list[tuple[int, int]],
    prompts: list[PointPrompt],
    dense: torch.Tensor | None,
    best_of_three: bool,
) -> torch.Tensor:
    """Decode m prompts that all have a box or none, and equally many points; see `decode`.

    Args:
        features: levels (m, ..) of each prompt's image; sizes: (H, W) of each.
        dense: (m, 1, S/4, S/4) previous logits, or None.
    """
    tensor = partial(torch.tensor, device=features[0].device)
    side = sam.prompt_encoder.input_image_size  # pixels of SAM2's square input
    scale = tensor([[side / width, side / height] for height, width in sizes])  # (m, 2) of x, y
    points = labels = boxes = None
    if prompts[0].positive or prompts[0].negative:
        points = tensor([[*p.positive, *p.negative] for p in prompts]) * scale[:, None]
        labels = [[FOREGROUND] * len(p.positive) + [BACKGROUND] * len(p.negative) for p in prompts]
        points, labels = points[:, None], tensor(labels)[:, None]  # (m, 1, points, 2), (m, 1, ..)
    if prompts[0].boxes:
        boxes = tensor([p.boxes for p in prompts]) * scale.repeat(1, 2)[:, None]  # (m, 1, 4)
    sparse, dense = sam.prompt_encoder(
        input_points=points, input_labels=labels, input_boxes=boxes, input_masks=dense
    )
    positions = sam.get_image_wide_positional_embeddings()
    *fine, coarse = features
    masks, scores, *_ = sam.mask_decoder(
        image_embeddings=coarse,
        image_positional_embeddings=positions.expand(len(prompts), -1, -1, -1),
        sparse_prompt_embeddings=sparse,
        dense_prompt_embeddings=dense,
        multimask_output=best_of_three,
        high_resolution_features=fine,
    )
    best = scores[:, 0].argmax(-1)  # (m,); 0 of a single mask
    return masks[torch.arange(len(masks), device=best.device), 0, best].float()
