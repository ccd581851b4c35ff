"""What a role of Sa2VA is asked: segment captions, describe masks, rate a description.

Greedy, without gradient. Letters: P questions, M [SEG] in their answers, D embedding width.
"""

import torch

from rl_train.data.text import phrase
from rl_train.policies.sa2va import Sa2VAPolicy
from rl_train.rewards.iou import mask_confidence
from sa2va_hf.batches import Images
from sa2va_hf.processing_sa2va import upsample_masks
from sa2va_hf.transfer import send

ROWS_AT_ONCE = 64  # that the teacher puts through the model
GRIDS_AT_ONCE = 16  # masks
GROWTH = 2  # tokens of a sampled text in a question, for each that it may have as an answer


def askable(policy: Sa2VAPolicy, texts: list[str], max_new_tokens: int) -> list[str]:
    """The sampled texts, each cut where a question would hold too many tokens of it.

    Words are about as many tokens again; bytes that are no letters become more, each time.
    """
    limit, cut = GROWTH * max_new_tokens, []
    for text in texts:
        ids = policy.tokenizer.encode(phrase(text), add_special_tokens=False)
        cut.append(text if len(ids) <= limit else policy.tokenizer.decode(ids[:limit]))
    return cut


def answer(policy: Sa2VAPolicy, images: Images, image, captions, max_new_tokens, confidence=None):
    """(`row_masks`, p of each [SEG] (M,), prompt embeddings (M, D)) for captions[p] in image[p].

    Of the model's own greedy answers, not forced ones. Args: confidence: see `row_masks`.
    """
    prompts = policy.segment_prompts(images, image, captions)
    completions, _ = policy.complete(images, prompts, 1, max_new_tokens)
    rows, means = policy.mask_embeddings(completions)
    seen = (policy, images, prompts.image, rows.tolist(), means)
    return row_masks(*seen, confidence), rows, means


@torch.no_grad()
def row_masks(
    policy: Sa2VAPolicy,
    images: Images,
    image: list[int],
    seg_rows: list[int],
    embeddings,
    confidence: list[float] | None = None,
) -> list[torch.Tensor]:
    """(H, W) bool mask of each row: the union of its [SEG] masks, empty without one.

    Row r is about image[r]; seg_rows are the rows of the prompt embeddings (M, D).

    Args:
        confidence: list that receives the `mask_confidence` of each row's mask.
    """
    of_row = {}  # {row: (256, 256) highest of its logits}
    masks = [torch.zeros(images.sizes[i], dtype=torch.bool, device=policy.device) for i in image]
    if seg_rows:
        logits = policy.decode_masks(images, [image[row] for row in seg_rows], embeddings)
        for row, one in zip(seg_rows, logits):  # (256, 256)
            of_row[row] = torch.maximum(one, of_row[row]) if row in of_row else one
            size = images.sizes[image[row]]
            masks[row] |= upsample_masks(one[None], policy.processor.sam_size, size)[0] > 0
    if confidence is not None:
        found = mask_confidence(torch.stack(list(of_row.values()))).tolist() if of_row else []
        found = dict(zip(of_row, found))
        confidence += [found.get(row, 0.0) for row in range(len(masks))]
    return masks


@torch.no_grad()
def segment(
    policy: Sa2VAPolicy, images: Images, image, captions, confidence=None
) -> list[torch.Tensor]:
    """(H, W) bool mask of captions[p] in image[p] by one forward: "Sure, [SEG]" is forced.

    Args: confidence: see `row_masks`.
    """
    masks = []
    for start in range(0, len(captions), ROWS_AT_ONCE):
        chunk = slice(start, start + ROWS_AT_ONCE)
        prompts = policy.segment_prompts(images, image[chunk], captions[chunk])
        forced = [policy.prompts.forced_answer] * len(prompts)
        hidden = policy.read(images, prompts.followed_by(forced))[:, 0]  # (p, C)
        with policy.autocast():
            embeddings = policy.model.text_hidden_fcs(hidden).float()  # (p, D)
        rows = list(range(len(prompts)))
        masks += row_masks(policy, images, prompts.image, rows, embeddings, confidence)
    return masks


def segment_sampled(
    policy: Sa2VAPolicy, images: Images, image, captions, max_new_tokens, confidence=None
):
    """(H, W) bool mask of captions[p] in image[p] by the model's own `answer`.

    Args: confidence: see `row_masks`.
    """
    masks = []
    for start in range(0, len(captions), ROWS_AT_ONCE):
        chunk = slice(start, start + ROWS_AT_ONCE)
        asked = (image[chunk], captions[chunk], max_new_tokens, confidence)
        masks += answer(policy, images, *asked)[0]
    return masks


def region_grids(policy: Sa2VAPolicy, masks: list[torch.Tensor]) -> dict[int, torch.Tensor]:
    """{p: (g, g) bool region cells, on the CPU} of masks[p] (H, W), but of those that are empty.

    Of one size GRIDS_AT_ONCE masks in one go, since each takes several bytes a pixel.
    """
    alike, grids = {}, {}
    for p, mask in enumerate(masks):
        alike.setdefault(mask.shape, []).append(p)
    for same in alike.values():
        for start in range(0, len(same), GRIDS_AT_ONCE):
            some = same[start : start + GRIDS_AT_ONCE]
            stacked = torch.stack([masks[p] for p in some])
            found = policy.processor.region_grid(stacked).cpu()
            grids |= zip(some, found)  # any pixel gives a cell
    return {p: grids[p] for p in range(len(masks)) if grids[p].any()}


@torch.no_grad()
def describe(
    policy: Sa2VAPolicy, images: Images, image, masks, max_new_tokens, grids=None
) -> list[str]:
    """Greedy caption of masks[p] (H, W) in image[p]; of an empty mask "", without asking.

    Args: grids: `region_grids` of the masks, where they are found already.
    """
    grids = region_grids(policy, masks) if grids is None else grids
    captions, asked = [""] * len(masks), list(grids)
    for start in range(0, len(asked), ROWS_AT_ONCE):
        chunk = asked[start : start + ROWS_AT_ONCE]
        regions = [grids[p] for p in chunk]
        prompts = policy.describe_prompts(images, [image[p] for p in chunk], regions)
        for p, text in zip(chunk, policy.complete(images, prompts, 1, max_new_tokens)[1]):
            captions[p] = text
    return captions


@torch.no_grad()
def caption_likelihood(
    policy: Sa2VAPolicy, images: Images, image, masks, captions, max_new_tokens, grids=None
) -> torch.Tensor:
    """(P,) likelihood per token, exp(mean log-prob), of captions[p] as description of masks[p].

    In (0, 1), at the policy's temperature; 0 for an empty mask, without asking the model. One
    forward, no decoding; of a caption the first max_new_tokens tokens. Masks of one region grid are
    one question: asked once, so that rounding (which depends on a row's neighbours) does not make
    equal rewards differ. On the policy's device, which may still compute it.

    Args: grids: see `describe`.
    """
    grids = region_grids(policy, masks) if grids is None else grids
    questions = {}  # {question: its rows and their grid}
    for p, grid in grids.items():
        key = (image[p], captions[p], grid.numpy().tobytes())
        questions.setdefault(key, []).append((p, grid))
    likelihood = torch.zeros(len(masks), device=policy.device)
    asked = list(questions.values())
    for start in range(0, len(asked), ROWS_AT_ONCE):
        chunk = asked[start : start + ROWS_AT_ONCE]
        rows, regions = zip(*[question[0] for question in chunk])
        prompts = policy.describe_prompts(images, [image[p] for p in rows], list(regions))
        answers = [policy.prompts.answer(captions[p])[:max_new_tokens] for p in rows]
        values = policy.mean_logp(images, prompts, answers).exp()
        row, of = zip(*[(p, k) for k, question in enumerate(chunk) for p, _ in question])
        row, of = send(torch.tensor([row, of]), policy.device)
        likelihood.index_copy_(0, row, values[of])
    return likelihood
