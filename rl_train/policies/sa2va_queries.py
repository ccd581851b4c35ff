"""Queries to a role of Sa2VA: segment captions, describe masks, score a description.

Greedy, without gradient. Letters: P questions, M [SEG] in their answers, D embedding width.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import torch
from PIL import Image

from rl_train.data.text import phrase
from rl_train.policies.sa2va import Sa2VAPolicy
from rl_train.rewards.iou import mask_confidence, rows_by_size
from rl_train.rollout import Batch
from sa2va_hf.batches import ImageFeatures, Prompts
from sa2va_hf.processing_sa2va import upsample_masks
from sa2va_hf.prompts import SEGMENT
from sa2va_hf.to_device import to_device

ROWS_AT_ONCE = 64  # rows of one forward of the teacher
REGION_PIXELS_AT_ONCE = 2**24  # of the masks whose region cells are computed in one call
UPSAMPLED_PIXELS_AT_ONCE = 2**26  # of float32 logits that are upsampled in one call: 256 MB
# Tokens that a sampled text may have in a question, for each that it may have as an answer.
CAPTION_TOKENS_FACTOR = 2
BLANK_SIDE, GREY = 448, 127  # pixels and value of the image without contents


@dataclass
class RowMasks:
    """The mask of each row, and how sure SAM2 is of it; a GPU may still compute both.

    Masks of one size may lie in one storage, a row's own and that of its only [SEG] in one place.
    """

    masks: list[torch.Tensor]  # (H, W) bool, empty without [SEG]
    scores: torch.Tensor  # (N,) `mask_confidence` of each mask, 0 without [SEG]
    seg_masks: list[torch.Tensor] | None = None  # (m, H, W) bool, one for each [SEG] of a row

    @property
    def confidence(self) -> list[float]:
        """The scores as floats; reading them waits for the GPU."""
        return self.scores.tolist()


def chunks(rows: Sequence, at_once: int | None = None) -> Iterator[Sequence]:
    """Yield `rows` in parts of at most `at_once`, or ROWS_AT_ONCE."""
    at_once = at_once or ROWS_AT_ONCE
    for start in range(0, len(rows), at_once):
        yield rows[start : start + at_once]


def truncate_captions(policy: Sa2VAPolicy, texts: list[str], max_new_tokens: int) -> list[str]:
    """Return sampled texts cut to CAPTION_TOKENS_FACTOR * max_new_tokens tokens.

    So they fit a question. Words are encoded to about as many tokens again; bytes that are no
    letters become more tokens each time.
    """
    limit, truncated = CAPTION_TOKENS_FACTOR * max_new_tokens, []
    for text in texts:
        ids = policy.tokenizer.encode(phrase(text), add_special_tokens=False)
        truncated.append(text if len(ids) <= limit else policy.tokenizer.decode(ids[:limit]))
    return truncated


def segment_by_own_answer(
    policy: Sa2VAPolicy,
    features: ImageFeatures,
    image_index: Sequence[int],
    captions: list[str],
    max_new_tokens: int,
    wording: str = SEGMENT,
) -> tuple[RowMasks, torch.Tensor, torch.Tensor]:
    """Return the masks that the model's own greedy answers give captions[p].

    Args: wording: of the question, with {x} for the phrase.

    Returns:
        `row_masks`, the p of each [SEG] (M,), and prompt embeddings (M, D).
    """
    wordings = [wording] * len(captions)
    prompts = policy.segment_prompts(features, image_index, captions, wordings)
    completions, _ = policy.complete(features, prompts, 1, max_new_tokens)
    rows, means = policy.mask_embeddings(completions)
    segmented = row_masks(policy, features, prompts.image_index, rows.tolist(), means)
    return segmented, rows, means


@torch.no_grad()
def row_masks(
    policy: Sa2VAPolicy,
    features: ImageFeatures,
    image_index: list[int],
    seg_rows: list[int],
    embeddings: torch.Tensor,
    one_by_one: bool = False,
) -> RowMasks:
    """Return the (H, W) bool mask of each row: the union of its [SEG] masks, empty without one.

    Row r is about image image_index[r]; seg_rows are the rows of the prompt embeddings (M, D).

    Args: one_by_one: keep the masks of the [SEG] too, which takes their memory.
    """
    logits_of_row = [[] for _ in image_index]  # (256, 256) of each [SEG] of a row
    if seg_rows:
        all_logits = policy.decode_masks(
            features, [image_index[row] for row in seg_rows], embeddings
        )
        for row, logits in zip(seg_rows, all_logits):
            logits_of_row[row].append(logits)
    masks, masks_of_segs = [None] * len(image_index), [None] * len(image_index)
    # A row may hold several [SEG] or none; its mask is their union, its logits their maximum.
    for size, rows in rows_by_size(features.sizes[i] for i in image_index).items():
        segs = [logits for row in rows for logits in logits_of_row[row]]
        counts = [len(logits_of_row[row]) for row in rows]
        for row, seg_masks in zip(rows, upsampled_masks(policy, segs, size).split(counts)):
            masks_of_segs[row] = seg_masks  # (m, H, W)
            masks[row] = seg_masks[0] if len(seg_masks) == 1 else seg_masks.any(0)
    highest = {row: reduce(torch.maximum, segs) for row, segs in enumerate(logits_of_row) if segs}
    scores = torch.zeros(len(masks), device=policy.device)
    if highest:
        rows = to_device(torch.tensor(list(highest)), policy.device)
        scores = scores.index_copy(0, rows, mask_confidence(torch.stack(list(highest.values()))))
    return RowMasks(masks, scores, masks_of_segs if one_by_one else None)


def upsampled_masks(
    policy: Sa2VAPolicy, logits: list[torch.Tensor], size: tuple[int, int]
) -> torch.Tensor:
    """Return the (m, H, W) bool masks at `size` = (H, W) of m logits (256, 256).

    `upsample_masks` takes as many in a call as UPSAMPLED_PIXELS_AT_ONCE allows, counting each at
    SAM2's size and at `size`.
    """
    sam_size, (height, width) = policy.processor.sam_size, size
    masks = torch.empty(len(logits), height, width, dtype=torch.bool, device=policy.device)
    at_once = max(1, UPSAMPLED_PIXELS_AT_ONCE // (sam_size**2 + height * width))
    for part in chunks(range(len(logits)), at_once):
        upsampled = upsample_masks(torch.stack([logits[k] for k in part]), sam_size, size)
        torch.gt(upsampled, 0, out=masks[part.start : part.stop])
    return masks


def join(parts: list[RowMasks]) -> RowMasks:
    """Join the masks of consecutive rows."""
    masks = [mask for part in parts for mask in part.masks]
    return RowMasks(masks, torch.cat([part.scores for part in parts]) if parts else torch.zeros(0))


@torch.no_grad()
def segment(
    policy: Sa2VAPolicy,
    features: ImageFeatures,
    image_index: list[int],
    captions: list[str],
) -> RowMasks:
    """Return the masks of captions, by a forward of the forced "Sure, [SEG]"."""
    parts = []
    for rows in chunks(range(len(captions))):
        chunk_images = [image_index[p] for p in rows]
        prompts = policy.segment_prompts(features, chunk_images, [captions[p] for p in rows])
        forced = [policy.prompts.forced_answer] * len(prompts)
        # The forced answer ends in [SEG], so the last state is the one that prompts SAM2.
        hidden = policy.last_hidden_states(features, prompts.followed_by(forced))[:, 0]  # (p, C)
        with policy.autocast():
            embeddings = policy.model.text_hidden_fcs(hidden).float()  # (p, D)
        parts.append(row_masks(policy, features, chunk_images, range(len(rows)), embeddings))
    return join(parts)


def segment_generated(
    policy: Sa2VAPolicy,
    features: ImageFeatures,
    image_index: list[int],
    captions: list[str],
    max_new_tokens: int,
) -> RowMasks:
    """Return the masks of captions, by greedy answers of the model itself.

    In chunks of `segment_by_own_answer`.
    """
    parts = []
    for rows in chunks(range(len(captions))):
        chunk_images, chunk_captions = [image_index[p] for p in rows], [captions[p] for p in rows]
        segmented, _, _ = segment_by_own_answer(
            policy, features, chunk_images, chunk_captions, max_new_tokens
        )
        parts.append(segmented)
    return join(parts)


def segment_model_captions(
    policy: Sa2VAPolicy,
    features: ImageFeatures,
    image_index: Sequence[int],
    captions: list[str],
    max_new_tokens: int,
    forced: bool = False,
) -> RowMasks:
    """Return the masks of captions that a model wrote, empty of a caption without words.

    A model's text may grow when it is encoded again, beyond the model's context, so it is cut.

    Args: forced: by the forced answer of `segment`, else by `segment_generated`.
    """
    spoken = [p for p, text in enumerate(captions) if phrase(text)]
    index = [image_index[p] for p in spoken]
    texts = truncate_captions(policy, [captions[p] for p in spoken], max_new_tokens)
    if forced:
        segmented = segment(policy, features, index, texts)
    else:
        segmented = segment_generated(policy, features, index, texts, max_new_tokens)
    masks = [
        torch.zeros(features.sizes[i], dtype=torch.bool, device=policy.device) for i in image_index
    ]
    scores = torch.zeros(len(captions), device=policy.device)
    if spoken:
        rows = to_device(torch.tensor(spoken), policy.device)
        scores = scores.index_copy(0, rows, segmented.scores)
    for p, mask in zip(spoken, segmented.masks):
        masks[p] = mask
    return RowMasks(masks, scores)


def region_grids(policy: Sa2VAPolicy, masks: list[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return {p: (g, g) bool region cells, on the CPU} of the masks[p] (H, W) that are not empty.

    Those of one size are converted together, as many as REGION_PIXELS_AT_ONCE allows: a tiny
    region takes four bytes a pixel of its image.
    """
    cells_of_mask = {}  # {p: (g, g)}
    for size, rows in rows_by_size(mask.shape for mask in masks).items():
        for part in chunks(rows, max(1, REGION_PIXELS_AT_ONCE // size.numel())):
            cells = policy.processor.region_grid(torch.stack([masks[p] for p in part]))
            cells_of_mask |= dict(zip(part, cells))
    if not cells_of_mask:
        return {}
    grids = torch.stack([cells_of_mask[p] for p in range(len(masks))]).cpu()
    return {p: grid for p, grid in enumerate(grids) if grid.any()}  # any pixel gives a cell


@torch.no_grad()
def describe(
    policy: Sa2VAPolicy,
    features: ImageFeatures,
    image_index: list[int],
    masks: list[torch.Tensor],
    max_new_tokens: int,
) -> list[str]:
    """Return the greedy caption of masks[p] (H, W) in image image_index[p], "" of an empty one."""
    captions, grids = [""] * len(masks), region_grids(policy, masks)
    for rows, prompts in caption_prompts(policy, features, image_index, grids):
        for p, text in zip(rows, policy.complete(features, prompts, 1, max_new_tokens)[1]):
            captions[p] = text
    return captions


def describe_later(
    policy: Sa2VAPolicy,
    features: ImageFeatures,
    image_index: list[int],
    grids: dict[int, torch.Tensor],
    num_masks: int,
    max_new_tokens: int,
) -> Callable[[], list[str]]:
    """Return a function that returns what `describe` does, by the weights in use now.

    See `Sa2VAPolicy.complete_later`.
    """
    delayed_texts = [
        (rows, policy.complete_later(features, prompts, max_new_tokens))
        for rows, prompts in caption_prompts(policy, features, image_index, grids)
    ]

    def captions() -> list[str]:
        texts = [""] * num_masks
        for rows, answers in delayed_texts:
            for p, text in zip(rows, answers()):
                texts[p] = text
        return texts

    return captions


def caption_prompts(
    policy: Sa2VAPolicy,
    features: ImageFeatures,
    image_index: list[int],
    grids: dict[int, torch.Tensor],
) -> Iterator[tuple[list[int], Prompts]]:
    """Yield masks and the prompts that ask for their captions; not those that are empty."""
    for rows in chunks(list(grids)):
        regions = [grids[p] for p in rows]
        yield rows, policy.describe_prompts(features, [image_index[p] for p in rows], regions)


@torch.no_grad()
def caption_likelihood(
    policy: Sa2VAPolicy,
    features: ImageFeatures,
    image_index: list[int],
    masks: list[torch.Tensor],
    captions: list[str],
    max_new_tokens: int,
    grids: dict[int, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return the likelihood per token (P,), exp(mean log-prob), of captions[p] for masks[p].

    It lies in (0, 1), at the policy's temperature, and is 0 for an empty mask. One forward scores
    the first max_new_tokens tokens of each caption. Equal questions are asked once: rounding
    depends on a row's neighbours and would make equal rewards differ. The result is on the policy's
    device, which may still compute it.

    Args: grids: see `describe`.
    """
    grids = region_grids(policy, masks) if grids is None else grids
    questions = {}  # {question: its rows}
    for p, grid in grids.items():
        key = (image_index[p], captions[p], grid.numpy().tobytes())
        questions.setdefault(key, []).append(p)
    likelihood = torch.zeros(len(masks), device=policy.device)
    for equal_rows in chunks(list(questions.values())):
        firsts = [rows[0] for rows in equal_rows]
        regions = [grids[p] for p in firsts]
        prompts = policy.describe_prompts(features, [image_index[p] for p in firsts], regions)
        answers = [policy.prompts.answer(captions[p])[:max_new_tokens] for p in firsts]
        values = policy.mean_logp(features, prompts, answers).exp()
        # (row, its question), so that equal rows get equal values.
        pairs = [(p, k) for k, rows in enumerate(equal_rows) for p in rows]
        row, question = to_device(torch.tensor(pairs), policy.device).unbind(1)
        likelihood.index_copy_(0, row, values[question])
    return likelihood


@torch.no_grad()
def blank_features(policy: Sa2VAPolicy, max_new_tokens: int) -> ImageFeatures:
    """Return features of a grey image: what is likely in it is likely without a look at any."""
    side = BLANK_SIDE
    mask = np.ones((side, side), dtype=bool)
    image = Image.new("RGB", (side, side), (GREY,) * 3)
    sample = dict(image=image, mask=mask, caption="", category="", image_id="grey")
    inputs = policy.preprocessor(max_new_tokens)
    inputs = inputs.collate([inputs.prepare(sample)])
    return policy.encode(Batch([0], [torch.from_numpy(mask)], [""], ["grey"], [], inputs))
