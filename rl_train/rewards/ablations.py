"""Ablation rewards (--ablation_reward) replace a task's own reward by a cheap signal.

Each is a cheap cause: a reason why a metric may rise without the ability that the task is to teach.
A gain of a task must exceed what each of them gains. The task's own components stay measured and
logged. The ablation is one more component, and the only one that counts. A new one is a function of
`AblatedRows` and a line in `ABLATIONS`.

Letters: B samples, G generations, N = B*G rows.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from rl_train.data.text import clean_caption
from rl_train.points.parser import Point, PointPrompt
from rl_train.rewards.combine import combine
from rl_train.rewards.iou import best_object_iou, mask_iou
from rl_train.rewards.meteor import meteor, tokenize
from rl_train.rewards.positions import fraction_in_named_part
from rl_train.rollout import Batch, RewardOutput, Rollout

if TYPE_CHECKING:
    from rl_train.tasks.base import TaskContext

COMPONENT = "ablation_reward"
LOOP1, LOOP2, POINTS = "loop1", "loop2", "points"  # names of tasks
REFERRING, CAPTIONING, GROUNDED = "referring", "captioning", "gcg"
DESCRIBES = (LOOP1, CAPTIONING)  # tasks whose answer is a caption
ANY_OBJECT = "any_object"  # the ablation that needs the other regions of the images
SALIENT = "the most salient object"  # phrase that names nothing
# Of the image's shorter side: distance of a negative point from the image's middle; its smallest
# and largest distance from a positive point; its offset (x, y) from the first positive point.
AWAY, NEAR, OFFSET = 0.125, (0.1, 0.25), (0.2, 0.0)
EDGE = 0.15  # of the box's side, width of the rim inside its edge


class Task(Protocol):
    """Interface of a task: the members of `tasks.base.Task` that an ablation uses."""

    name: str
    context: "TaskContext"
    reward_weights: dict[str, float]  # of the reward components that count

    def rewards(self, rollout: Rollout) -> RewardOutput: ...


@dataclass(frozen=True)
class AblatedRows:
    """Facts of N rows that an ablation may use."""

    task: Task
    rollout: Rollout
    outcome: RewardOutput  # task.rewards(rollout)
    seed: tuple[int, ...]  # of the run, with step and index of the task
    caption: str  # the one caption of "fixed"

    @property
    def reward(self) -> torch.Tensor:
        """The task's own reward (N,), NaN where it was not scored."""
        return combine(self.outcome.rewards, self.task.reward_weights)

    def against(self, batch: Batch) -> torch.Tensor:
        """Return the task's reward (N,) of the same answers against another truth.

        The teacher is asked again.
        """
        rewards = self.task.rewards(replace(self.rollout, batch=batch)).rewards
        return combine(rewards, self.task.reward_weights)


def permuted(rows: AblatedRows) -> torch.Tensor:
    """Return the task's rewards in another order inside each group; see `shuffled`."""
    return shuffled(rows.reward, rows.rollout.num_generations, rows.seed, rows.rollout.batch.index)


def constant(rows: AblatedRows) -> torch.Tensor:
    """Return a reward of 1 for every row, from which nothing can be learnt."""
    return torch.ones(len(rows.rollout))


def length(rows: AblatedRows) -> torch.Tensor:
    """Return `length_reward` of the rows."""
    return length_reward(rows.rollout, rows.outcome)


def fixed(rows: AblatedRows) -> torch.Tensor:
    """Return the reward against one caption, whatever the region.

    Without a reply that describes the mask it is METEOR of the completion itself.
    """
    rollout = rows.rollout
    if not rows.outcome.replies:
        return meteor([rows.caption] * len(rollout), rollout.texts)
    return rows.against(replace(rollout.batch, captions=[rows.caption] * len(rollout.batch)))


def other(rows: AblatedRows) -> torch.Tensor:
    """Return the reward against the region and the caption of another sample."""
    return rows.against(shift_by_one(rows.rollout.batch))


def confidence(rows: AblatedRows) -> torch.Tensor:
    """Return SAM2's own confidence in each row's mask."""
    return torch.tensor(rows.outcome.mask_confidence)


def area(rows: AblatedRows) -> torch.Tensor:
    """Return the fraction of the image that each row's mask covers; of points, minus that.

    A teacher's mask of a phrase that fits nothing is small, SAM2's of too few points is large.
    """
    sign = -1 if rows.task.name == POINTS else 1
    return torch.tensor([sign * mask.float().mean().item() for mask in rows.outcome.masks])


def any_object(rows: AblatedRows) -> torch.Tensor:
    """Return the IoU of each row's mask with the object of its image that it fits best."""
    batch = rows.rollout.batch
    return best_object_iou(rows.outcome.masks, batch.masks, batch.distractors)


def majority(rows: AblatedRows) -> torch.Tensor:
    """Return the agreement with the other answers of the group: words of loop 1, else masks."""
    num_generations = rows.rollout.num_generations
    if rows.task.name in DESCRIBES:
        return word_agreement(rows.rollout.texts, num_generations)
    return group_iou(rows.outcome.masks, num_generations)


def no_image(rows: AblatedRows) -> torch.Tensor:
    """Return the base's likelihood of the caption in a grey image.

    Loop 1's is of the sampled caption and the whole image, loop 2's of the true caption and the
    sampled mask, of which place and size are seen.
    """
    # Here, as policies import the configuration, whose flag names these ablations.
    from rl_train.policies.sa2va_queries import blank_features, caption_likelihood

    context, rollout = rows.task.context, rows.rollout
    policy, tokens = context.policy, context.max_reply_tokens
    blank = blank_features(policy, tokens)
    captions, masks = rollout.repeat_for_rows(rollout.batch.captions), rows.outcome.masks
    if rows.task.name in DESCRIBES:
        whole = torch.ones(blank.sizes[0], dtype=torch.bool, device=policy.device)
        # A sampled special token, such as an image's, would count as one in the question.
        captions = [clean_caption(text) for text in rollout.texts]
        masks = [whole] * len(rollout)
    with context.roles.use("reference"):
        images = [0] * len(rollout)
        return caption_likelihood(policy, blank, images, masks, captions, tokens).cpu()


def position(rows: AblatedRows) -> torch.Tensor:
    """Return the fraction of a mask in the part of the image that a text names by its position.

    In loop 1 of the region by the sampled caption, else of the sampled mask by the true caption.
    """
    rollout = rows.rollout
    texts, masks = rollout.repeat_for_rows(rollout.batch.captions), rows.outcome.masks
    if rows.task.name in DESCRIBES:
        texts, masks = rollout.texts, rollout.repeat_for_rows(rollout.batch.masks)
    return torch.tensor([fraction_in_named_part(mask, text) for mask, text in zip(masks, texts)])


def salient(rows: AblatedRows) -> torch.Tensor:
    """Return the IoU of each row's mask with the base's mask of SALIENT."""
    from rl_train.policies.sa2va_queries import segment  # see `no_image`

    context, rollout = rows.task.context, rows.rollout
    images = list(range(len(rollout.batch)))
    with context.roles.use("reference"):
        salient_masks = segment(context.policy, rollout.features, images, [SALIENT] * len(images))
    return mask_iou(rows.outcome.masks, rollout.repeat_for_rows(salient_masks.masks)).cpu()


def hidden(rows: AblatedRows) -> torch.Tensor:
    """Return the task's reward with the masks that SAM2 draws without negative points."""
    iou = mask_iou(rows.outcome.masks_without_negatives, rows.outcome.targets, 1.0).cpu()
    return combine(rows.outcome.rewards | {"iou": iou}, rows.task.reward_weights)


def of_negatives(rows: AblatedRows, value: Callable[..., float]) -> torch.Tensor:
    """Return the mean of value(point, prompt, (width, height)) over each answer's negative points.

    0 of an answer without any, or that could not be read.
    """
    sizes = rows.rollout.repeat_for_rows(
        [(width, height) for height, width in rows.rollout.batch.sizes]
    )
    return torch.tensor(
        [
            sum(value(point, prompt, image) for point in prompt.negative) / len(prompt.negative)
            if prompt and prompt.negative
            else 0.0
            for prompt, image in zip(rows.outcome.point_prompts, sizes)
        ]
    )


def away(rows: AblatedRows) -> torch.Tensor:
    """Return the fraction of negative points that are not at the middle of the image, a habit."""

    def is_away(point: Point, prompt: PointPrompt, image: tuple[int, int]) -> bool:
        middle = (image[0] / 2, image[1] / 2)
        return math.dist(point, middle) > AWAY * min(image)

    return of_negatives(rows, is_away)


def near(rows: AblatedRows) -> torch.Tensor:
    """Return the fraction of negative points at a distance NEAR from a positive one."""

    def is_near(point: Point, prompt: PointPrompt, image: tuple[int, int]) -> bool:
        distances = [math.dist(point, positive) for positive in prompt.positive]
        low, high = (part * min(image) for part in NEAR)
        return bool(distances) and low <= min(distances) <= high

    return of_negatives(rows, is_near)


def edge(rows: AblatedRows) -> torch.Tensor:
    """Return the fraction of negative points in the rim inside the edge of the answer's box."""

    def is_at_edge(point: Point, prompt: PointPrompt, image: tuple[int, int]) -> bool:
        return any(_in_rim(point, box) for box in prompt.boxes)

    return of_negatives(rows, is_at_edge)


def offset(rows: AblatedRows) -> torch.Tensor:
    """Return minus the distance of negative points from the first positive point plus OFFSET."""

    def closeness(point: Point, prompt: PointPrompt, image: tuple[int, int]) -> float:
        if not prompt.positive:
            return -1.0
        side = min(image)
        target = [x + part * side for x, part in zip(prompt.positive[0], OFFSET)]
        return -min(math.dist(point, target) / side, 1.0)

    # No negative point is as bad as the farthest one.
    values = of_negatives(rows, closeness)
    without = [not (prompt and prompt.negative) for prompt in rows.outcome.point_prompts]
    return torch.where(torch.tensor(without), -1.0, values)


@dataclass(frozen=True)
class Ablation:
    """A cheap cause: its reward (N,), the tasks that it is of (() for all), and its help.

    If `moves_rows`, the reward permutes rows, and the NaN of an unscored row moves with it.
    """

    reward: Callable[[AblatedRows], torch.Tensor]
    help: str
    tasks: tuple[str, ...] = ()
    moves_rows: bool = False


MASKS = (LOOP1, LOOP2, REFERRING, POINTS)
CAPTIONS = (LOOP1, LOOP2, CAPTIONING)  # with a caption that is sampled or rewarded
ABLATIONS = {
    "shuffled": Ablation(permuted, "permuted in each group", moves_rows=True),
    "constant": Ablation(constant, "equal"),
    "length": Ablation(
        length,
        "-|words - n| / n, n the mean of the batch's true captions (loop 2: fractions of the "
        "image, n of the true regions)",
    ),
    "fixed": Ablation(
        fixed, "one caption of the data set is the target of all (loop 1: METEOR with it)"
    ),
    "other": Ablation(other, "region and caption of another sample of the batch are the target"),
    "confidence": Ablation(confidence, "SAM2's confidence in the mask", (*MASKS, GROUNDED)),
    "area": Ablation(area, "area of the mask, of points minus it", (*MASKS, GROUNDED)),
    ANY_OBJECT: Ablation(
        any_object, "IoU with the object of the image that the mask fits best", (*MASKS, GROUNDED)
    ),
    "majority": Ablation(
        majority,
        "agreement with the other answers of the group",
        (*MASKS, CAPTIONING, GROUNDED),
    ),
    "no_image": Ablation(
        no_image, "the base's likelihood of the caption in a grey image", CAPTIONS
    ),
    "position": Ablation(
        position,
        "fraction of the mask in the half or quarter that the caption names",
        (*MASKS, CAPTIONING),
    ),
    "salient": Ablation(
        salient, f"IoU with the base's mask of '{SALIENT}'", (LOOP1, LOOP2, REFERRING)
    ),
    "hidden": Ablation(hidden, "the own reward with negative points kept from SAM2", (POINTS,)),
    "away": Ablation(away, "negative points not at the middle of the image", (POINTS,)),
    "near": Ablation(near, "negative points at some distance from a positive one", (POINTS,)),
    "edge": Ablation(edge, "negative points inside the edge of the answer's box", (POINTS,)),
    "offset": Ablation(
        offset, "negative points at one offset from the first positive one", (POINTS,)
    ),
}
ABLATION_REWARDS = tuple(ABLATIONS)


def _described(name: str) -> str:
    ablation = ABLATIONS[name]
    return f"{name}{' (points)' * (ablation.tasks == (POINTS,))}: {ablation.help}"


ABLATION_HELP = "; ".join(map(_described, ABLATIONS))


def ablations_of(task: str) -> tuple[str, ...]:
    """Return the names of the ablations that a task of this name can be trained on."""
    return tuple(name for name, each in ABLATIONS.items() if not each.tasks or task in each.tasks)


def check_ablation(name: str, tasks: Sequence[str]):
    """Raise ValueError if an ablation is not one of all these tasks."""
    for task in tasks:
        if name not in ablations_of(task):
            raise ValueError(
                f"--ablation_reward {name}: is of {' and '.join(ABLATIONS[name].tasks)}, not of "
                f"the task {task}, which takes {', '.join(ablations_of(task))}"
            )


class AblationReward:
    """Replacement of a task's reward by one of ABLATIONS.

    Args:
        name: of ABLATIONS.
        seed: of the run.
        caption: rewarded by "fixed", whatever the image.
    """

    def __init__(self, name: str, seed: int = 0, caption: str = ""):
        self.name, self.seed, self.caption = name, seed, caption

    def __call__(
        self, task: Task, rollout: Rollout, outcome: RewardOutput, seed: tuple[int, int]
    ) -> RewardOutput:
        """Return the outcome with COMPONENT, the ablation's reward, among its rewards.

        Rows that the task did not score stay NaN; the NaN moves if the ablation moves rows.

        Args:
            outcome: `task.rewards(rollout)`.
            seed: (step, index of the task), which seeds the order of "shuffled" with the run's.
        """
        ablation = ABLATIONS[self.name]
        rows = AblatedRows(task, rollout, outcome, (self.seed, *seed), self.caption)
        values = ablation.reward(rows)
        if not ablation.moves_rows:
            values = torch.where(rows.reward.isnan(), torch.nan, values)
        return replace(outcome, rewards=outcome.rewards | {COMPONENT: values})


def shuffled(
    rewards: torch.Tensor, num_generations: int, seed: tuple[int, ...], indices: list[int]
) -> torch.Tensor:
    """Return rewards (N,) in another order inside each group.

    Args:
        seed, indices: the order of group i follows from seed and indices[i], its sample, alone.
    """
    groups = [
        group[np.random.default_rng([*seed, index]).permutation(num_generations)]
        for group, index in zip(rewards.split(num_generations), indices)
    ]
    return torch.cat(groups)


def length_reward(rollout: Rollout, outcome: RewardOutput) -> torch.Tensor:
    """Return -|size - n| / n of each row (N,), n the mean size of the batch's true values.

    The size of a caption is its number of words. Where masks are sampled or the teacher replies, it
    is the fraction of the image that the row's mask covers.
    """
    if outcome.replies or rollout.latents is not None:
        sizes, true_sizes = (
            torch.tensor([mask.float().mean().item() for mask in masks])
            for masks in (outcome.masks, rollout.batch.masks)
        )
    else:
        sizes, true_sizes = (
            torch.tensor([len(tokenize(text)) for text in texts], dtype=torch.float32)
            for texts in (rollout.texts, rollout.batch.captions)
        )
    # Above 0, so that empty masks give no division by it.
    n = true_sizes.mean().clamp(min=torch.finfo(torch.float32).tiny)
    return -(sizes - n).abs() / n


def shift_by_one(batch: Batch) -> Batch:
    """Return the batch with the mask and caption of each sample's right neighbour.

    The last sample has those of the first. Masks are resized to the image, by nearest pixel.
    Neighbours are new in each epoch, whose order is random (`data.loader.StepSampler`).
    """
    masks, captions = ([*values[1:], values[0]] for values in (batch.masks, batch.captions))
    resized = [
        torch.nn.functional.interpolate(mask[None, None].float(), size, mode="nearest-exact")
        for mask, size in zip(masks, batch.sizes)
    ]  # (1, 1, H, W) each
    return replace(batch, masks=[mask[0, 0] > 0 for mask in resized], captions=captions)


def word_agreement(texts: Sequence[str], num_generations: int) -> torch.Tensor:
    """Return the mean overlap (Dice) of each text's words with those of its group's others (N,).

    The largest is the majority's text.
    """
    agreements = []
    for start in range(0, len(texts), num_generations):
        bags = [Counter(tokenize(text)) for text in texts[start : start + num_generations]]
        for bag in bags:
            overlaps = [_dice(bag, other_bag) for other_bag in bags]
            # A text agrees with itself.
            agreements.append((sum(overlaps) - 1) / (num_generations - 1))
    return torch.tensor(agreements)


def group_iou(masks: Sequence[torch.Tensor], num_generations: int) -> torch.Tensor:
    """Return the mean IoU of each mask (H, W) bool with the other masks of its group (N,)."""
    agreements = []
    for start in range(0, len(masks), num_generations):
        group = torch.stack(list(masks[start : start + num_generations]))  # (G, H, W)
        for mask in group:
            iou = mask_iou(group, mask.expand_as(group), 1.0)
            agreements.append((iou.sum().item() - 1) / (num_generations - 1))
    return torch.tensor(agreements)


def _dice(a: Counter, b: Counter) -> float:
    total = a.total() + b.total()
    return 2 * (a & b).total() / total if total else 1.0


def _in_rim(point: Point, box: Sequence[float]) -> bool:
    """Return whether a point lies inside a box, within EDGE of its sides from its edge."""
    (x, y), (left, top, right, bottom) = point, box
    distance = min(
        min(x - left, right - x) / max(right - left, 1),
        min(y - top, bottom - y) / max(bottom - top, 1),
    )
    return 0 <= distance <= EDGE
