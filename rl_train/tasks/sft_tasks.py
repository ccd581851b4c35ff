"""Tasks of supervised training: questions about a sample and their reference answers.

Letters: B samples, one example of each a task, T tokens of the longest answer, D width of a prompt
embedding, h w the size of mask logits.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch

from rl_train.config.flags import COUNT, WEIGHT, flag
from rl_train.data.text import phrase
from rl_train.engine import ScoreOutput
from rl_train.evaluation import gcg_metrics
from rl_train.loss import Statistic
from rl_train.points.parser import AnswerFormat, PointPrompt
from rl_train.policies.base import Features
from rl_train.policies.qwen_vl import STOP_TEXTS, QwenImageFeatures
from rl_train.rewards import mask_iou
from rl_train.rewards.points import deepest_point, prompt_of_masks
from rl_train.rollout import Batch
from rl_train.tasks.base import Task, TaskContext
from rl_train.tasks.point_segmentation import AnswerOptions, PointTask
from sa2va_hf.batches import ImageFeatures, Prompts
from sa2va_hf.losses import resize_masks, resized_mask_loss
from sa2va_hf.prompts import (
    FORCED_ANSWER,
    NO_TARGET_ANSWER,
    SEGMENT_ANSWERS,
    SEGMENT_WORDINGS,
)

CONFUSED = 0.05  # smallest confused area, as a fraction of the target's, for a negative point


@dataclass
class Conversation:
    """An answer, and further questions about the same image with their answers."""

    ids: list[int]
    is_taught: list[bool]  # of each token: it is an answer's, not a question's
    num_turns: int = 1

    @classmethod
    def of_answer(cls, ids: list[int]) -> "Conversation":
        """Return a conversation of one turn."""
        return cls(list(ids), [True] * len(ids))

    def add(self, question: list[int], answer: list[int]):
        """Add a turn."""
        self.ids += question + answer
        self.is_taught += [False] * len(question) + [True] * len(answer)
        self.num_turns += 1


@dataclass
class Examples:
    """Record of one task's B examples of a batch, as `policy.score_answers` takes them."""

    task: "SFTTask"
    batch: Batch
    features: Features  # of the batch
    prompts: Prompts  # B
    ids: torch.Tensor  # (B, T)
    valid: torch.Tensor  # (B, T) bool, answers with the tokens that end them
    taught: torch.Tensor  # (B, T) bool, `valid` without the questions of later turns
    num_turns: list[int]  # B


class SFTTask(Task):
    """A task with examples in place of prompts and rewards."""

    def examples(
        self, batch: Batch, features: Features, rngs: list[np.random.Generator]
    ) -> tuple[Prompts, list[list[int] | Conversation]]:
        """Return (B prompts, B answers as token ids, with the tokens that end them).

        Args:
            rngs: B generators, one per sample, the only source of randomness.
        """

    def loss_terms(
        self, examples: Examples, features: Features, scores: ScoreOutput, rows: float
    ) -> tuple[list[torch.Tensor], dict[str, Statistic]]:
        """Return (loss terms beside the cross-entropy, {name: statistic}).

        Args:
            scores: of `policy.score_answers`.
            rows: number of turns of the step's examples, by which the terms are divided.
        """
        return [], {}


class RegionCaptions(SFTTask):
    """Image and region -> caption."""

    name = "captions"
    family = "sa2va"

    @dataclass(frozen=True)
    class Options:
        weight: float = flag(
            1.0, "weight of the captions' loss", name="caption_weight", type=WEIGHT
        )
        trainable_modules = ("lora", "mlp1")

    def __init__(self, options: Options, context: TaskContext):
        self.context, self.loss_weight = context, options.weight

    def examples(
        self, batch: Batch, features: ImageFeatures, rngs: list[np.random.Generator]
    ) -> tuple[Prompts, list[list[int]]]:
        policy = self.context.policy
        prompts = policy.describe_prompts(features, range(len(batch)), features.prompt_masks)
        return prompts, [policy.prompts.answer(caption) for caption in batch.captions]


class ReferringSegmentation(SFTTask):
    """Image and caption -> an answer with [SEG], and its mask; none where nothing is named."""

    name, takes_no_target = "masks", True
    family = "sa2va"

    @dataclass(frozen=True)
    class Options:
        weight: float = flag(1.0, "weight of the masks' loss", name="mask_weight", type=WEIGHT)
        one_answer: bool = flag(
            False, f'teach always the answer "{FORCED_ANSWER}" instead of one of five with [SEG]'
        )
        turns: int = flag(
            1,
            "number of questions in an example of masks, each about another region of the image; "
            "Sa2VA's own training has 5",
            type=COUNT,
        )
        trainable_modules = ("lora", "mlp1", "text_hidden_fcs", "sam2")

    def __init__(self, options: Options, context: TaskContext):
        self.context, self.loss_weight, self.turns = context, options.weight, options.turns
        if options.turns > context.policy.max_masks:
            raise ValueError(
                f"--turns {options.turns}: of an example at most {context.policy.max_masks} masks "
                "are decoded"
            )
        self.answers = (FORCED_ANSWER,) if options.one_answer else SEGMENT_ANSWERS
        encode = context.policy.prompts.answer
        spoken = (*self.answers, NO_TARGET_ANSWER) if context.names_nothing else self.answers
        longest_answer = max(len(encode(answer)) for answer in spoken)  # one [SEG] or none
        if longest_answer > context.max_reply_tokens:
            raise ValueError(
                f"--max_completion_length {context.max_reply_tokens}: cuts the true answers, "
                f"of up to {longest_answer} tokens"
            )

    def examples(
        self, batch: Batch, features: ImageFeatures, rngs: list[np.random.Generator]
    ) -> tuple[Prompts, list[list[int] | Conversation]]:
        policy = self.context.policy
        wordings = [SEGMENT_WORDINGS[rng.integers(len(SEGMENT_WORDINGS))] for rng in rngs]
        prompts = policy.segment_prompts(features, range(len(batch)), batch.captions, wordings)
        answers = [
            NO_TARGET_ANSWER if none else self.answers[rng.integers(len(self.answers))]
            for rng, none in zip(rngs, batch.no_target)
        ]
        encoded = [policy.prompts.answer(answer) for answer in answers]
        if batch.companion_captions is None:
            return prompts, encoded
        return prompts, [
            self._conversation(len(ids), answer, captions, rng)
            for ids, answer, captions, rng in zip(
                prompts.ids, encoded, batch.companion_captions, rngs
            )
        ]

    def _conversation(
        self,
        prompt_length: int,
        answer: list[int],
        captions: list[str],
        rng: np.random.Generator,
    ) -> Conversation:
        """Return an answer followed by a turn for each caption that the context has room for."""
        policy = self.context.policy
        conversation = Conversation.of_answer(answer)
        limit = policy.model.config.llm.max_position_embeddings - prompt_length
        for caption in captions[: self.turns - 1]:
            wording = SEGMENT_WORDINGS[rng.integers(len(SEGMENT_WORDINGS))]
            question = policy.prompts.next_turn(phrase(caption), wording)
            answer_ids = policy.prompts.answer(self.answers[rng.integers(len(self.answers))])
            if len(conversation.ids) + len(question) + len(answer_ids) > limit:
                break
            conversation.add(question, answer_ids)
        return conversation

    def loss_terms(
        self, examples: Examples, features: ImageFeatures, scores: ScoreOutput, rows: float
    ) -> tuple[list[torch.Tensor], dict[str, Statistic]]:
        """Return 2.0 BCE + 0.5 Dice of the masks, weighted as in the published training.

        Captions that name nothing have no mask, and no term.
        """
        policy, batch = self.context.policy, examples.batch
        image, targets = [], []  # of each [SEG], row by row
        for i, (none, num_turns) in enumerate(zip(batch.no_target, examples.num_turns)):
            masks = [] if none else [batch.masks[i]]
            if num_turns > 1:
                masks += batch.companion_masks[i][: num_turns - 1]
            image += [i] * len(masks)
            targets += masks
        if not image:
            zero = scores.logp.new_zeros(())
            return [], dict(mask_loss=zero, mask_iou=(zero, 0))
        prompts = policy.scored_mask_embeddings(scores, examples.ids, examples.valid)  # (m, D)
        logits = policy.decode_masks(features, image, prompts)  # (m, h, w)
        # At the size of the logits: SAM2's 256 x 256 are not enlarged.
        resized = resize_masks(targets, logits)
        loss = resized_mask_loss(logits, resized).sum() / rows
        iou = mask_iou(logits > 0, resized > 0, 1.0)
        return [loss], dict(mask_loss=loss.detach(), mask_iou=(iou.sum(), len(iou)))


class GroundedCaptions(SFTTask):
    """Image -> caption with a mask for each phrase (GCG)."""

    name, family = "gcg", "sa2va"
    measure = staticmethod(gcg_metrics.measure)

    @dataclass(frozen=True)
    class Options:
        weight: float = flag(1.0, "weight of gcg's loss", name="gcg_weight", type=WEIGHT)
        trainable_modules = ("lora", "mlp1", "text_hidden_fcs", "sam2")

    def __init__(self, options: Options, context: TaskContext):
        self.context, self.loss_weight = context, options.weight

    def examples(
        self, batch: Batch, features: ImageFeatures, rngs: list[np.random.Generator]
    ) -> tuple[Prompts, list[list[int]]]:
        policy, answers = self.context.policy, batch.columns.get("grounded_caption", [])
        if None in answers or not answers:
            raise ValueError(
                "--tasks grounded_captions: the samples of the data have no phrases with masks; "
                "give --dataset gcg"
            )
        prompts = gcg_metrics.grounded_prompts(policy, features)
        return prompts, [policy.prompts.answer(answer) for answer in answers]

    def loss_terms(
        self, examples: Examples, features: ImageFeatures, scores: ScoreOutput, rows: float
    ) -> tuple[list[torch.Tensor], dict[str, Statistic]]:
        """Return the masks' loss: the m-th [SEG] of an answer with the m-th phrase's mask.

        It is the mean over the masks of each example. A [SEG] that is cut off, or beyond the
        largest number of masks of an answer, has no term.
        """
        policy, regions = self.context.policy, examples.batch.regions
        seg = policy.seg_tokens(examples.ids, examples.valid)  # (B, T)
        image = seg.nonzero()[:, 0].tolist()  # (M,), row by row
        if not image:
            zero = scores.logp.new_zeros(())
            return [], dict(mask_loss=zero, mask_iou=(zero, 0))
        targets = [masks[m] for masks, num in zip(regions, seg.sum(1)) for m in range(num)]
        prompts = policy.scored_mask_embeddings(scores, examples.ids, examples.valid)  # (M, D)
        logits = policy.decode_masks(features, image, prompts)  # (M, h, w)
        resized = resize_masks(targets, logits)
        counts = Counter(image)
        # Each example weighs 1, whatever its number of masks.
        mask_weights = torch.tensor([1 / counts[i] for i in image], device=logits.device)
        loss = (resized_mask_loss(logits, resized) * mask_weights).sum() / rows
        iou = mask_iou(logits > 0, resized > 0, 1.0)
        return [loss], dict(mask_loss=loss.detach(), mask_iou=(iou.sum(), len(iou)))


class PointAnswers(PointTask, SFTTask):
    """Image and caption -> box and points, in the format that `point_segmentation` asks for.

    Negative points lie in the region that SAM2 confuses with the target. Of samples without masks
    the data set's own boxes and points are taught, and no negative ones.
    """

    takes_boxes = True

    @dataclass(frozen=True)
    class Options(AnswerOptions):
        thought: str = flag(
            "The region that is meant differs from those around it.",
            "thought that is taught before an answer, in the answer styles that have thoughts",
            metavar="TEXT",
        )

    def examples(
        self, batch: Batch, features: QwenImageFeatures, rngs: list[np.random.Generator]
    ) -> tuple[Prompts, list[list[int]]]:
        policy, answers = self.context.policy, []
        if batch.has_masks:
            targets = [mask.to(policy.device) for mask in batch.masks]
            confused = self.confused_regions(policy, features, targets)
            truths = [
                true_answer(self.format, target, region, self.regions(batch, i))
                for i, (target, region) in enumerate(zip(targets, confused))
            ]
        else:
            truths = self.solutions_in_pixels(batch)
        for i, (answer, size) in enumerate(zip(truths, features.sizes, strict=True)):
            self._check(answer, batch.image_ids[i])
            # In the coordinates that the model sees and answers in.
            in_frame = self.format.in_frame(answer, features.seen_sizes[i], size)
            answers.append(
                policy.encode_text(
                    self.format.format(in_frame, self.options.thought) + STOP_TEXTS[0]
                )
            )
        return self.prompts(batch, features), answers

    def _check(self, answer: PointPrompt, image_id: str):
        """Raise ValueError if --answer_style cannot say an answer."""
        num_boxes, num_points = len(answer.boxes), len(answer.positive)
        fits = dict(
            segzero=(num_boxes, num_points) == (1, 2),
            visionreasoner=num_boxes == num_points,
            segzero_plus=num_boxes == 1,
            points=num_boxes <= 1,
        )
        if not fits[self.format.style]:
            raise ValueError(
                f"--answer_style {self.format.style}: cannot say the solution of {image_id}, "
                f"{num_boxes} boxes and {num_points} points"
            )


def true_answer(
    answer_format: AnswerFormat,
    target: torch.Tensor,
    confused: torch.Tensor,
    regions: list[torch.Tensor] | None = None,
) -> PointPrompt:
    """Return the reference answer of a target (H, W) bool, in its own pixels.

    Boxes and positive points are as the format's checkpoints give them: two deepest points for
    "segzero" and "segzero_plus", else one; no box for "points". One negative point lies in the
    region confused with the target (H, W), if that is at least CONFUSED of the target's area. The
    answer is empty if there is no region.

    Args:
        regions: masks (H, W) whose union is the target, each with its box; default: the target.
    """
    regions = [target] if regions is None else regions
    style = answer_format.style
    prompt = prompt_of_masks(regions, 2 if style in ("segzero", "segzero_plus") else 1)
    boxes = () if style == "points" else prompt.boxes
    if not regions:
        return prompt
    # A few confused pixels on the edge are no place for a negative point.
    has_negative = confused.sum() >= CONFUSED * target.sum()
    return PointPrompt(boxes, prompt.positive, (deepest_point(confused),) if has_negative else ())


SFT_TASKS = {
    "region_captions": RegionCaptions,
    "referring_segmentation": ReferringSegmentation,
    "grounded_captions": GroundedCaptions,
    "point_answers": PointAnswers,
}
