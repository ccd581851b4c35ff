"""Loop 2's cheap causes: chosen on training regions by a measure of masks, measured on others.

Letters: n regions, G samples of each.
"""

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm

from rl_train.policies.sa2va_queries import caption_likelihood, segment_generated
from rl_train.rewards import mask_iou
from rl_train.rewards.ablations import SALIENT, group_iou
from rl_train.rewards.iou import best_object_iou
from rl_train.rewards.meteor import require_wordnet
from rl_train.rewards.positions import fraction_in_named_part
from rl_train.rollout import Batch, Rollout
from rl_train.tasks.base import Task, TaskContext
from rl_train.tasks.caption_mask_caption import CaptionMaskCaption
from rl_train.utils.rng import RowRNG
from tools.experiments.gauntlet.masks import (
    UNCHANGED,
    Variant,
    choose_variants,
    measure_variants,
    points_at,
    variants_of,
)
from tools.experiments.gauntlet.regions import Regions
from tools.experiments.gauntlet.samples import (
    ANY_OBJECT,
    PickBy,
    choose_directions,
    join_batches,
    measures_of_picked,
    put_first,
    result_with_samples,
)
from tools.experiments.gauntlet.table import LoopResult, Rival
from tools.experiments.scalar_baseline import row_logits

if TYPE_CHECKING:
    from sa2va_hf.batches import ImageFeatures

MEASURES = {
    "iou": "mask IoU",
    "found": "object found",
    "pointed": "highest logit on the object",
}
# Rewards of the task, the default first.
REWARDS = {"meteor": "METEOR", "likelihood": "likelihood with the image"}
# Scores that are rewards of the task, or its ceiling: not cheap.
TRUE_SCORES = REWARDS | {"iou": "IoU with the region: the ceiling"}


class OneModel:
    """Roles of one model without training: each is the base itself."""

    def use(self, name: str) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()


@dataclass(frozen=True)
class Chosen:
    """Choices made on training regions.

    Attributes:
        reward: a name in REWARDS, against which cheap causes are compared.
        measure: a name in MEASURES, by which they were chosen.
    """

    reward: str
    measure: str
    variants: dict[str, tuple[str, Variant]]  # {cause: (what was chosen, variant)}
    picks: list[PickBy]
    task: CaptionMaskCaption  # its noise is fitted to training regions


def sampled(
    task: Task,
    batch: Batch,
    features: "ImageFeatures",
    num_generations: int,
    rng: RowRNG | None = None,
) -> Rollout:
    """Return G answers to a task's question about each region, with latents if it samples masks.

    Args: rng: default: the same numbers for every base, task and call.
    """
    policy, tokens = task.context.policy, task.context.max_reply_tokens
    rng = rng or RowRNG(0, 0, 1, batch.index, num_generations)
    prompts, uniforms = task.prompts(batch, features), rng.uniforms(tokens)
    rollout = policy.sample(batch, features, prompts, num_generations, tokens, uniforms)
    if task.action:
        rollout.latents = task.action.draw(rollout, rng)
    return rollout


@torch.no_grad()
def sample_scores(
    regions: Regions, task: CaptionMaskCaption, num_generations: int
) -> dict[str, torch.Tensor]:
    """Return {score: (n, G)} of G masks that the base samples: rewards, measures, cheap scores."""
    G, parts = num_generations, []
    for batch, features in tqdm(regions.parts, desc="sampled masks", leave=False, disable=None):
        rollout = sampled(task, batch, features, G)
        rewards = task.rewards(rollout).rewards
        scores = {name: rewards[name] for name in TRUE_SCORES}
        measures = dict(found=rewards["on_target"], pointed=pointed(regions, rollout, features))
        parts.append(scores | measures | cheap_scores(regions, rollout, features))
    regions.check()
    return join_batches(parts, G)


def pointed(regions: Regions, rollout: Rollout, features: "ImageFeatures") -> torch.Tensor:
    """Return `points_at` (N,) of the sampled masks."""
    latents, G = rollout.latents, rollout.num_generations
    targets = [mask.to(regions.policy.device) for mask in rollout.batch.masks]
    values = torch.zeros(len(targets), G)
    for j in range(G):  # one sample of each region at a time, as logits take memory
        own = latents.rows % G == j
        seg_rows = (latents.rows[own] // G).tolist()
        logits = row_logits(regions.policy, features, seg_rows, latents.z[own])
        values[:, j] = torch.tensor([points_at(*pair) for pair in zip(logits, targets)])
    return values.flatten()


def cheap_scores(
    regions: Regions, rollout: Rollout, features: "ImageFeatures"
) -> dict[str, torch.Tensor]:
    """Return {score: (N,)} of sampled masks: cheap causes, by which a mask may be picked."""
    policy, batch, masks = regions.policy, rollout.batch, rollout.latents.masks
    captions, rows = rollout.repeat_for_rows(batch.captions), list(range(len(batch)))
    salient = segment_generated(policy, features, rows, [SALIENT] * len(rows), regions.tokens).masks
    blank = regions.blank_features()
    prior = caption_likelihood(policy, blank, [0] * len(masks), masks, captions, regions.tokens)
    neighbours = rollout.repeat_for_rows([*batch.captions[1:], batch.captions[0]])
    image = rollout.prompts.image_index
    of_neighbour = caption_likelihood(policy, features, image, masks, neighbours, regions.tokens)
    in_part = [fraction_in_named_part(mask, text) for mask, text in zip(masks, captions)]
    return {
        "confidence": torch.tensor(rollout.latents.confidence),
        "area": torch.tensor([mask.float().mean().item() for mask in masks]),
        "majority": group_iou(masks, rollout.num_generations),
        "the most salient object": mask_iou(masks, rollout.repeat_for_rows(salient)).cpu(),
        "the part named in the phrase": torch.tensor(in_part),
        ANY_OBJECT: best_object_iou(masks, batch.masks, batch.distractors),
        "likelihood of another image's phrase": of_neighbour.cpu(),
        "likelihood without image": prior.cpu(),
    }


def choose(
    training: Regions,
    num_generations: int,
    latent_std: float | str,
    reward: str = "meteor",
    measure: str = "iou",
) -> Chosen:
    """Choose every cheap cause on training regions, by a measure of masks: the strongest."""
    require_wordnet()
    options = CaptionMaskCaption.Options(latent_std=latent_std, mask_loss_coef=0.0)
    task = CaptionMaskCaption(options, TaskContext(training.policy, OneModel(), training.tokens))
    task.set_reward_weights(dict.fromkeys(REWARDS, 0.5))  # all are computed
    task.action.calibrate([batch for batch, _ in training.parts], training.tokens)
    causes = variants_of(training)
    named = {
        f"{cause}: {name}": variant for cause, of in causes.items() for name, variant in of.items()
    }
    names = {cause: [f"{cause}: {name}" for name in of] for cause, of in causes.items()}
    best = choose_variants(measure_variants(training, named), names, measure)
    scores = sample_scores(training, task, num_generations)
    cheap = [name for name in scores if name not in (*TRUE_SCORES, *MEASURES)]
    return Chosen(
        reward,
        measure,
        {cause: (name.partition(": ")[2], named[name]) for cause, name in best.items()},
        choose_directions(scores, cheap, measure),
        task,
    )


def measure(heldout: Regions, chosen: Chosen, num_generations: int) -> LoopResult:
    """Measure what was chosen on held-out regions; nothing is chosen here."""
    measures = put_first(chosen.measure, MEASURES)
    measured = measure_variants(
        heldout, {cause: variant for cause, (_, variant) in chosen.variants.items()}
    )
    measured = {cause: {name: of[name] for name in measures} for cause, of in measured.items()}
    rivals = [
        Rival(cause, name, "greedy", measured[cause])
        for cause, (name, _) in chosen.variants.items()
    ]
    scores = sample_scores(heldout, chosen.task, num_generations)
    for name, text in TRUE_SCORES.items():
        if name != chosen.reward:
            values = measures_of_picked(scores, scores[name], measures)
            rivals.append(Rival(f"best of G by {text}", "largest", "samples", values, cheap=False))
    return result_with_samples(
        greedy=measured[UNCHANGED],
        rivals=rivals,
        scores=scores,
        true_reward=chosen.reward,
        picks=chosen.picks,
        measures=measures,
    )
