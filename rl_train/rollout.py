"""What the roles do with images and prompts: sample answers, segment captions, describe masks.

Letters: B images, N = B*G rows (row i*G+j answers prompt i), T completion tokens, M [SEG] tokens in all rows,
D prompt-embedding width.
"""
from dataclasses import dataclass, field

import numpy as np
import torch

from rl_train.data.loader import Batch
from rl_train.grpo import gaussian_logp
from rl_train.policy import Images, Policy, Prompts
from rl_train.sampler import generate
from sa2va_hf.processing_sa2va import region_grid, upsample_masks

TEACHER_ROWS = 64      # rows that segment() and describe() put through the model at a time


@dataclass
class Latent:
    """The sampled prompt embeddings of the [SEG] tokens, row-major."""
    z: torch.Tensor         # (M, D) sampled
    offset: torch.Tensor    # (M, D) z minus the mean it was sampled around
    logp: torch.Tensor      # (M,) log-density, mean over dimensions


@dataclass
class Rollout:
    batch: Batch
    images: Images
    prompts: Prompts                # N rows
    ids: torch.Tensor               # (N, T)
    logp: torch.Tensor              # (N, T) under the policy that sampled
    valid: torch.Tensor             # (N, T)
    stopped: torch.Tensor           # (N,) False = truncated
    texts: list[str]                # N completions, cut at the stop text
    num_generations: int
    seg_rows: torch.Tensor | None = None    # (M,) row of each [SEG] token, where the answer has a mask
    latent: Latent | None = None            # its sampled prompt embeddings, where --mask_sigma > 0
    masks: list[torch.Tensor] = field(default_factory=list)   # N (H, W) bool: the policy's (loop 2) or the teacher's (loop 1)
    replies: list[str] = field(default_factory=list)          # N captions of the teacher (loop 2)

    def __len__(self):
        return len(self.texts)

    @property
    def has_mask(self) -> bool:
        return self.seg_rows is not None

    @property
    def sample_of_row(self) -> list[int]:
        return [row // self.num_generations for row in range(len(self))]


def noise(seed: int, step: int, task: int, indices: list[int], num_generations: int, num_tokens: int, dim: int):
    """Random numbers of N rows, each from (seed, step, task, sample, generation) and nothing else.

    Returns:
        uniforms (N, num_tokens) in [0, 1) for token sampling; normals (N, num_tokens, dim) for latents at [SEG].
    """
    rngs = [np.random.default_rng([seed, step, task, i, j]) for i in indices for j in range(num_generations)]
    uniforms = np.stack([rng.random(num_tokens) for rng in rngs])
    normals = np.stack([rng.standard_normal((num_tokens, dim), dtype=np.float32) for rng in rngs]) if dim else None
    return torch.from_numpy(uniforms), None if normals is None else torch.from_numpy(normals)


@torch.no_grad()
def sample(policy: Policy, batch: Batch, images: Images, prompts: Prompts, num_generations: int, max_new_tokens: int,
           random=None, mask_sigma: float | None = None) -> Rollout:
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
        completions = generate(policy.model.language_model, embeds, attention, num_generations=num_generations,
                               max_new_tokens=max_new_tokens, stop=policy.stop, pad_id=policy.pad_id,
                               temperature=policy.temperature, uniforms=uniforms)
    texts = [policy.prompts.completion_text(ids[valid].tolist()) for ids, valid in zip(completions.ids, completions.valid)]
    rollout = Rollout(batch, images, rows, completions.ids, completions.logp, completions.valid, completions.stopped, texts,
                      num_generations)
    if mask_sigma is not None:
        seg = policy.seg_tokens(rollout.ids, rollout.valid)                                    # (N, T)
        with policy.autocast():
            mean = policy.model.text_hidden_fcs(completions.hidden[seg]).float()               # (M, D)
        z, rollout.seg_rows = mean, seg.nonzero()[:, 0]
        if normals is not None and mask_sigma > 0:
            z = mean + mask_sigma * normals[:, :seg.shape[1]].to(mean.device)[seg]
            rollout.latent = Latent(z, z - mean, gaussian_logp(z, mean, mask_sigma))
        rollout.masks = row_masks(policy, images, rows.image, rollout.seg_rows.tolist(), z)
    return rollout


def row_masks(policy: Policy, images: Images, image: list[int], seg_rows: list[int], prompts: torch.Tensor) -> list[torch.Tensor]:
    """(H, W) bool mask of each row: the union of its [SEG] masks, empty without one.

    Args:
        image: the image of each row; seg_rows: the row of each prompt embedding (M, D).
    """
    masks = [torch.zeros(images.sizes[i], dtype=torch.bool, device=policy.device) for i in image]
    if seg_rows:
        logits = policy.decode_masks(images, [image[row] for row in seg_rows], prompts)        # (M, 256, 256)
        for row, one in zip(seg_rows, logits):
            masks[row] |= upsample_masks(one[None], policy.processor.sam_size, images.sizes[image[row]])[0] > 0
    return masks


@torch.no_grad()
def segment(policy: Policy, images: Images, image: list[int], captions: list[str]) -> list[torch.Tensor]:
    """(H, W) bool mask of captions[p] in image[p], with the answer "Sure, [SEG]" forced: one forward, no decoding."""
    masks = []
    for start in range(0, len(captions), TEACHER_ROWS):
        chunk = slice(start, start + TEACHER_ROWS)
        prompts = policy.segment_prompts(images, image[chunk], captions[chunk])
        answer = torch.tensor([policy.prompts.forced_answer] * len(prompts.ids), device=policy.device)
        with policy.autocast():
            embeds, mask = policy.embed(images, prompts, answer)
            hidden = policy.hidden_states(embeds, torch.cat([mask, torch.ones_like(answer)], dim=1))[:, -1]
            embeddings = policy.model.text_hidden_fcs(hidden).float()                          # (p, D)
        masks += row_masks(policy, images, prompts.image, list(range(len(embeddings))), embeddings)
    return masks


@torch.no_grad()
def describe(policy: Policy, batch: Batch, images: Images, image: list[int], masks: list[torch.Tensor],
             max_new_tokens: int) -> list[str]:
    """Greedy caption of masks[p] (H, W) in image[p]; an empty mask gives an empty caption without asking the model."""
    processor = policy.processor
    captions = [""] * len(masks)
    asked = [p for p, mask in enumerate(masks) if mask.any()]
    for start in range(0, len(asked), TEACHER_ROWS):
        chunk = asked[start:start + TEACHER_ROWS]
        grids = [region_grid(masks[p][None], processor.grid_size, processor.image_size, processor.rule)[0] for p in chunk]
        prompts = policy.describe_prompts(images, [image[p] for p in chunk], grids)
        for p, text in zip(chunk, sample(policy, batch, images, prompts, 1, max_new_tokens).texts):
            captions[p] = text
    return captions
