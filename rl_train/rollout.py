"""What the roles do with images and prompts: sample answers, segment captions, describe masks.

Letters: B images, N = B*G rows (row i*G+j answers prompt i), T completion tokens, M [SEG] tokens in all rows,
D prompt-embedding width.
"""

from dataclasses import dataclass, field

import numpy as np
import torch

from rl_train.grpo import gaussian_logp
from rl_train.policies.sa2va import Images, Policy, Prompts
from rl_train.rewards import mask_iou
from rl_train.types import Batch
from sa2va_hf.processing_sa2va import region_grid, upsample_masks

SIGMA_IOU, SIGMA_SAMPLES = (
    0.8,
    4,
)  # --mask_sigma auto: IoU of sampled masks with the mean's; samples for each caption
TEACHER_ROWS = 64  # rows that the teacher puts through the model at a time


@dataclass
class Latent:
    """The sampled prompt embeddings of the [SEG] tokens, row-major."""

    z: torch.Tensor  # (M, D) sampled
    offset: torch.Tensor  # (M, D) z minus the mean it was sampled around
    logp: torch.Tensor  # (M,) log-density, mean over dimensions
    sigma: float  # standard deviation in each dimension


@dataclass
class Rollout:
    batch: Batch
    images: Images
    prompts: Prompts  # N rows
    ids: torch.Tensor  # (N, T)
    logp: torch.Tensor  # (N, T) under the policy that sampled
    valid: torch.Tensor  # (N, T)
    stopped: torch.Tensor  # (N,) False = truncated
    texts: list[str]  # N completions, cut at the stop text
    num_generations: int
    seg_rows: torch.Tensor | None = (
        None  # (M,) row of each [SEG] token, where the answer has a mask
    )
    seg_means: torch.Tensor | None = None  # (M, D) prompt embedding of each before sampling
    latent: Latent | None = None  # its sampled prompt embeddings, where --mask_sigma > 0
    masks: list[torch.Tensor] = field(
        default_factory=list
    )  # N (H, W) bool: the policy's (loop 2) or the teacher's (loop 1)
    replies: list[str] = field(default_factory=list)  # N captions of the teacher (loop 2)

    def __len__(self):
        return len(self.texts)

    @property
    def has_mask(self) -> bool:
        return self.seg_rows is not None

    @property
    def sample_of_row(self) -> list[int]:
        return [row // self.num_generations for row in range(len(self))]


def noise(
    seed: int,
    step: int,
    task: int,
    indices: list[int],
    num_generations: int,
    num_tokens: int,
    dim: int,
):
    """Random numbers of N rows, each from (seed, step, task, sample, generation) and nothing else.

    Returns:
        uniforms (N, num_tokens) in [0, 1) for token sampling; normals (N, num_tokens, dim), of which a row uses its k-th for its
        k-th [SEG], or None if dim is 0.
    """
    rngs = [
        np.random.default_rng([seed, step, task, i, j])
        for i in indices
        for j in range(num_generations)
    ]
    uniforms = np.stack([rng.random(num_tokens) for rng in rngs])
    normals = (
        np.stack([rng.standard_normal((num_tokens, dim), dtype=np.float32) for rng in rngs])
        if dim
        else None
    )
    return torch.from_numpy(uniforms), None if normals is None else torch.from_numpy(normals)


@torch.no_grad()
def sample(
    policy: Policy,
    batch: Batch,
    images: Images,
    prompts: Prompts,
    num_generations: int,
    max_new_tokens: int,
    random=None,
    mask_sigma: float | None = None,
) -> Rollout:
    """G answers to each of B prompts.

    Args:
        random: (uniforms, normals) of `noise`, or None for greedy decoding.
        mask_sigma: None if the answer is text alone; else the answer has a mask, decoded from a prompt embedding drawn
            with this standard deviation (0 or greedy: the mean itself).
    """
    uniforms, normals = (None, None) if random is None else random
    rows = prompts.repeat(num_generations)
    with policy.autocast():
        embeds, attention = policy.embed(images, prompts)
        completions = policy.engine.generate(
            embeds,
            attention,
            num_generations=num_generations,
            max_new_tokens=max_new_tokens,
            stop=policy.stop,
            uniforms=uniforms,
            shared_prefix_lengths=policy.shared_prefix_lengths(images, prompts),
        )
    texts = [
        policy.prompts.completion_text(ids[valid].tolist())
        for ids, valid in zip(completions.ids, completions.valid)
    ]
    rollout = Rollout(
        batch,
        images,
        rows,
        completions.ids,
        completions.logp,
        completions.valid,
        completions.stopped,
        texts,
        num_generations,
    )
    if mask_sigma is not None:
        seg = policy.seg_tokens(rollout.ids, rollout.valid)  # (N, T)
        with policy.autocast():
            mean = policy.model.text_hidden_fcs(completions.hidden[seg]).float()  # (M, D)
        z, rollout.seg_rows, rollout.seg_means = mean, seg.nonzero()[:, 0], mean
        if normals is not None and mask_sigma > 0:
            ordinal = seg.cumsum(1)[seg] - 1  # (M,) of each [SEG] in its row
            z = mean + mask_sigma * normals.to(mean.device)[rollout.seg_rows, ordinal]
            rollout.latent = Latent(z, z - mean, gaussian_logp(z, mean, mask_sigma), mask_sigma)
        rollout.masks = row_masks(policy, images, rows.image, rollout.seg_rows.tolist(), z)
    return rollout


def answer(
    policy: Policy,
    batch: Batch,
    images: Images,
    image: list[int],
    captions: list[str],
    max_new_tokens: int,
) -> Rollout:
    """The model's own greedy answers (not forced ones) to captions[p] in image[p], with their masks."""
    return sample(
        policy,
        batch,
        images,
        policy.segment_prompts(images, image, captions),
        1,
        max_new_tokens,
        mask_sigma=0.0,
    )


@torch.no_grad()
def calibrate_sigma(policy: Policy, batches, max_new_tokens: int) -> float:
    """The mask_sigma whose masks have a mean IoU of SIGMA_IOU with the mask of the mean, over the captions of `batches`.

    Of each answer the first [SEG] counts. By bisection of the logarithm, between 1/64 and 16 times the spread of the prompt
    embeddings themselves: SAM2's embedding has no scale of its own.

    Raises:
        ValueError: no caption was answered with [SEG], or no sigma in that range gives that IoU.
    """
    drawn = []  # (images, image of each row, mean, its masks, noise)
    for batch in batches:
        images = policy.encode_images(
            batch.inputs.pixel_values, batch.inputs.sam_pixels, batch.sizes
        )
        answers = answer(
            policy, batch, images, list(range(len(batch))), batch.captions, max_new_tokens
        )
        if len(answers.seg_rows):
            rows = answers.seg_rows
            first = torch.cat([rows.new_ones(1, dtype=torch.bool), rows[1:] != rows[:-1]])
            image = rows[first].repeat_interleave(SIGMA_SAMPLES).tolist()
            mean = answers.seg_means[first].repeat_interleave(SIGMA_SAMPLES, 0)
            indices = [batch.index[row] for row in rows[first].tolist()]
            eps = noise(0, 0, 0, indices, SIGMA_SAMPLES, 1, mean.shape[1])[1][:, 0].to(mean.device)
            drawn.append((images, image, mean, policy.decode_masks(images, image, mean) > 0, eps))
    if not drawn:
        raise ValueError(
            "--mask_sigma auto: the model answered no caption with [SEG], give a number"
        )

    def agreement(sigma):
        return (
            torch.cat(
                [
                    mask_iou(policy.decode_masks(images, image, mean + sigma * eps) > 0, masks, 1.0)
                    for images, image, mean, masks, eps in drawn
                ]
            )
            .mean()
            .item()
        )

    low, high = (
        torch.cat([mean for _, _, mean, _, _ in drawn]).std().log2().item() + octaves
        for octaves in (-6, 4)
    )
    ends = agreement(2**low), agreement(2**high)
    if not ends[0] > SIGMA_IOU > ends[1]:
        raise ValueError(
            f"--mask_sigma auto: sampled masks have an IoU of {ends[0]:.2f} to {ends[1]:.2f} with the mean's for sigma from "
            f"{2**low:.3g} to {2**high:.3g}, never {SIGMA_IOU}; look at the model's masks, or give a number"
        )
    for _ in range(10):
        middle = (low + high) / 2
        low, high = (middle, high) if agreement(2**middle) > SIGMA_IOU else (low, middle)
    return 2**low


def row_masks(
    policy: Policy, images: Images, image: list[int], seg_rows: list[int], prompts: torch.Tensor
) -> list[torch.Tensor]:
    """(H, W) bool mask of each row: the union of its [SEG] masks, empty without one.

    Args:
        image: the image of each row; seg_rows: the row of each prompt embedding (M, D).
    """
    masks = [torch.zeros(images.sizes[i], dtype=torch.bool, device=policy.device) for i in image]
    if seg_rows:
        logits = policy.decode_masks(
            images, [image[row] for row in seg_rows], prompts
        )  # (M, 256, 256)
        for row, one in zip(seg_rows, logits):
            masks[row] |= (
                upsample_masks(one[None], policy.processor.sam_size, images.sizes[image[row]])[0]
                > 0
            )
    return masks


@torch.no_grad()
def segment(
    policy: Policy, images: Images, image: list[int], captions: list[str]
) -> list[torch.Tensor]:
    """(H, W) bool mask of captions[p] in image[p], with the answer "Sure, [SEG]" forced: one forward, no decoding."""
    masks = []
    for start in range(0, len(captions), TEACHER_ROWS):
        chunk = slice(start, start + TEACHER_ROWS)
        prompts = policy.segment_prompts(images, image[chunk], captions[chunk])
        hidden = policy.read(
            images, prompts.followed_by([policy.prompts.forced_answer] * len(prompts.ids))
        )[:, 0]  # (p, C)
        with policy.autocast():
            embeddings = policy.model.text_hidden_fcs(hidden).float()  # (p, D)
        masks += row_masks(policy, images, prompts.image, list(range(len(embeddings))), embeddings)
    return masks


def segment_sampled(
    policy: Policy,
    batch: Batch,
    images: Images,
    image: list[int],
    captions: list[str],
    max_new_tokens: int,
) -> list[torch.Tensor]:
    """(H, W) bool mask of captions[p] in image[p], by the model's own greedy answer: the union of its [SEG] masks, empty without one."""
    masks = []
    for start in range(0, len(captions), TEACHER_ROWS):
        chunk = slice(start, start + TEACHER_ROWS)
        masks += answer(policy, batch, images, image[chunk], captions[chunk], max_new_tokens).masks
    return masks


@torch.no_grad()
def describe(
    policy: Policy,
    batch: Batch,
    images: Images,
    image: list[int],
    masks: list[torch.Tensor],
    max_new_tokens: int,
) -> list[str]:
    """Greedy caption of masks[p] (H, W) in image[p]; an empty mask gives an empty caption without asking the model."""
    processor = policy.processor
    captions = [""] * len(masks)
    asked = [p for p, mask in enumerate(masks) if mask.any()]
    for start in range(0, len(asked), TEACHER_ROWS):
        chunk = asked[start : start + TEACHER_ROWS]
        grids = [
            region_grid(masks[p][None], processor.grid_size, processor.image_size, processor.rule)[
                0
            ]
            for p in chunk
        ]
        prompts = policy.describe_prompts(images, [image[p] for p in chunk], grids)
        for p, text in zip(chunk, sample(policy, batch, images, prompts, 1, max_new_tokens).texts):
            captions[p] = text
    return captions


@torch.no_grad()
def caption_likelihood(
    policy: Policy,
    images: Images,
    image: list[int],
    masks: list[torch.Tensor],
    captions: list[str],
    max_new_tokens: int,
) -> torch.Tensor:
    """(N,) likelihood per token, exp(mean log-prob), of captions[p] as the model's description of masks[p] (H, W) in image[p].

    In (0, 1), at the policy's temperature; 0 for an empty mask, without asking the model. One forward, no decoding; of a caption
    the first max_new_tokens tokens. Masks of one region grid are one question: asked once, so that rounding (which depends on a
    row's neighbours) does not make equal rewards differ.
    """
    processor, questions = policy.processor, {}  # {question: its rows}
    for p, mask in enumerate(masks):
        if mask.any():
            grid = region_grid(
                mask[None], processor.grid_size, processor.image_size, processor.rule
            )[0].cpu()
            questions.setdefault((image[p], captions[p], grid.numpy().tobytes()), []).append(
                (p, grid)
            )
    likelihood = torch.zeros(len(masks))
    asked = list(questions.values())
    for start in range(0, len(asked), TEACHER_ROWS):
        chunk = asked[start : start + TEACHER_ROWS]
        rows, grids = zip(*[question[0] for question in chunk])
        prompts = policy.describe_prompts(images, [image[p] for p in rows], list(grids))
        answers = [policy.prompts.answer(captions[p])[:max_new_tokens] for p in rows]
        for question, value in zip(chunk, policy.mean_logp(images, prompts, answers).exp().cpu()):
            likelihood[[p for p, _ in question]] = value
    return likelihood
