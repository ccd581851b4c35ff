"""What supervised training teaches: questions about a sample and their true answers.

Letters: B samples, one example of each a task, T tokens of the longest answer, D width of a prompt
embedding, h w the size of mask logits.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from rl_train.flags import WEIGHT, flag
from rl_train.points.answers import Answer, Form
from rl_train.policies.qwen_points import ENDS
from rl_train.rewards import mask_iou
from rl_train.rewards.points import bounding_box, deepest_point, deepest_points
from rl_train.tasks.point_measures import confused_regions
from rl_train.tasks.point_segmentation import AnswerOptions, PointSegmentation
from rl_train.tasks.protocol import Context
from rl_train.types import Batch
from sa2va_hf.losses import resize_masks, resized_mask_loss
from sa2va_hf.prompts import FORCED_ANSWER, SEGMENT_ANSWERS, SEGMENT_WORDINGS

CONFUSED = 0.05  # of a target's area: what SAM2 takes in beside it, from which a point pays


@dataclass
class Examples:
    """One task's B examples of a batch, as `policy.score_answers` takes them."""

    task: object
    batch: Batch
    prompts: object  # B prompts, the policy's own
    ids: torch.Tensor  # (B, T)
    valid: torch.Tensor  # (B, T) bool, the answers with what ends them


class SupervisedTask(Protocol):
    """One kind of example. Built as Class(options, context), as the tasks of the loops are.

    It has `name`, `weight`, `family`, `asks_teacher` (False), `measure` and `action` (None) as
    `protocol.Task` says; `Options` have `weight` and `trains`. Its class may have `asks_reference`,
    whether it uses that role, which else is not kept; an object `longest_answer`, in tokens, where
    that is less than --max_completion_length (`memory` tries answers of that length).
    """

    def examples(self, batch: Batch, features, rngs: list) -> tuple[object, list[list[int]]]:
        """(B prompts, B answers as token ids with what ends them).

        Args:
            rngs: B numpy generators, one of each sample: nothing else is drawn from.
        """

    def terms(self, examples: Examples, features, scores, rows: float) -> tuple[list, dict]:
        """(terms beside the cross-entropy, statistics as of `objective.MicroBatchLoss`).

        Args:
            scores: of `policy.score_answers`; rows: examples of the step, by which terms are
                divided.
        """


class RegionCaptions:
    """Image and region -> caption."""

    name = "captions"
    family, asks_teacher, measure, action = "sa2va", False, None, None

    @dataclass(frozen=True)
    class Options:
        weight: float = flag(1.0, "of the captions' loss", name="caption_weight", type=WEIGHT)
        trains = ("lora", "mlp1")

    def __init__(self, options: Options, context: Context):
        self.context, self.weight = context, options.weight

    def examples(self, batch: Batch, features, rngs):
        policy = self.context.policy
        prompts = policy.describe_prompts(features, range(len(batch)), features.grids)
        return prompts, [policy.prompts.answer(caption) for caption in batch.captions]

    def terms(self, examples: Examples, features, scores, rows: float):
        return [], {}


class ReferringSegmentation:
    """Image and caption -> an answer with [SEG], and its mask."""

    name = "masks"
    family, asks_teacher, measure, action = "sa2va", False, None, None

    @dataclass(frozen=True)
    class Options:
        weight: float = flag(1.0, "of the masks' loss", name="mask_weight", type=WEIGHT)
        one_answer: bool = flag(False, f'always "{FORCED_ANSWER}", of the five answers with [SEG]')
        trains = ("lora", "mlp1", "text_hidden_fcs", "sam2")

    def __init__(self, options: Options, context: Context):
        self.context, self.weight = context, options.weight
        self.answers = (FORCED_ANSWER,) if options.one_answer else SEGMENT_ANSWERS
        encode = context.policy.prompts.answer
        self.longest_answer = max(len(encode(answer)) for answer in self.answers)  # one [SEG] each
        if self.longest_answer > context.max_new_tokens:
            raise ValueError(
                f"--max_completion_length {context.max_new_tokens}: cuts answers that say [SEG], "
                f"of up to {self.longest_answer} tokens"
            )

    def examples(self, batch: Batch, features, rngs):
        policy = self.context.policy
        wordings = [SEGMENT_WORDINGS[rng.integers(len(SEGMENT_WORDINGS))] for rng in rngs]
        prompts = policy.segment_prompts(features, range(len(batch)), batch.captions, wordings)
        answers = [self.answers[rng.integers(len(self.answers))] for rng in rngs]
        return prompts, [policy.prompts.answer(answer) for answer in answers]

    def terms(self, examples: Examples, features, scores, rows: float):
        """The masks' 2.0 BCE + 0.5 Dice, as the published supervised training weighs them."""
        policy, targets = self.context.policy, examples.batch.masks
        prompts = policy.scored_mask_embeddings(scores, examples.ids, examples.valid)  # (B, D)
        logits = policy.decode_masks(features, range(len(targets)), prompts)  # (B, h, w)
        resized = resize_masks(targets, logits)
        loss = resized_mask_loss(logits, resized).sum() / rows
        iou = mask_iou(logits > 0, resized > 0, 1.0)
        return [loss], dict(mask_loss=loss.detach(), mask_iou=(iou.sum(), len(iou)))


class PointAnswers:
    """Image and caption -> box and points, in the form that `point_segmentation` asks for.

    Negative points are in what SAM2 takes in beside the target, prompted by its box and depth.
    """

    name = "points"
    family, asks_teacher, action = "qwen2_5_vl", False, None

    @dataclass(frozen=True)
    class Options(AnswerOptions):
        thought: str = flag(
            "The region that is meant differs from those around it.",
            "what is taught to be thought before an answer, in the forms that have thoughts",
        )

    def __init__(self, options: Options, context: Context):
        self.context, self.weight, self.thought = context, options.weight, options.thought
        shared = {name: getattr(options, name) for name in AnswerOptions.__dataclass_fields__}
        self.asked = PointSegmentation(PointSegmentation.Options(**shared), context)

    def examples(self, batch: Batch, features, rngs):
        policy, form = self.context.policy, self.asked.form
        targets = [mask.to(policy.device) for mask in batch.masks]
        confused = [torch.zeros_like(target) for target in targets]
        if form.with_negatives:
            confused = confused_regions(policy, features, targets)
        answers = []
        for i, size in enumerate(features.sizes):
            answer = true_answer(form, targets[i], confused[i])
            stated = form.stated(answer, features.seen_sizes[i], size)
            text = form.format(stated, self.thought if form.thinks else "")
            answers.append(policy.encode_text(text + ENDS[0]))
        return self.asked.prompts(batch, features), answers

    def terms(self, examples: Examples, features, scores, rows: float):
        return [], {}

    def measure(self, *batch) -> dict[str, list]:
        return self.asked.measure(*batch)


def true_answer(form: Form, target: torch.Tensor, confused: torch.Tensor) -> Answer:
    """The answer that is taught of a target (H, W) bool, in its own pixels.

    Box and positive points as the form's checkpoints give them: of segzero the two deepest, else
    one; of "points" no box. A negative point in what is confused with it (H, W), if that is much.
    """
    box, positive = (bounding_box(target),), (deepest_point(target),)
    if form.style == "segzero":
        positive = deepest_points(target)
    elif form.style == "points":
        box = ()
    much = confused.sum() >= CONFUSED * target.sum()
    return Answer(box, positive, (deepest_point(confused),) if much else ())


SUPERVISED = {
    "region_captions": RegionCaptions,
    "referring_segmentation": ReferringSegmentation,
    "point_answers": PointAnswers,
}
