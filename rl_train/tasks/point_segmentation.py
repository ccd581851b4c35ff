"""Box and points for a referring expression: the policy answers, SAM2 decodes the mask.

Segzero_plus's task, with Seg-Zero's and VisionReasoner's ways to answer. No teacher is asked.
Letters: B samples, G generations, N = B*G rows.
"""

from dataclasses import dataclass

import torch

from rl_train.config.flags import COUNT, WEIGHT, flag
from rl_train.evaluation import point_metrics
from rl_train.evaluation.best_of_n import mean_logps, pick_best
from rl_train.evaluation.point_metrics import confused_regions, segment_points
from rl_train.points.parser import (
    COORDINATE_SCALES,
    NEGATIVE_POINTS,
    REASONS,
    STYLES,
    AnswerFormat,
    PointPrompt,
)
from rl_train.points.prompts import point_question
from rl_train.policies.qwen_vl import QwenImageFeatures, QwenVLPolicy
from rl_train.rewards import mask_iou
from rl_train.rewards.points import point_rewards
from rl_train.rollout import Batch, RewardOutput, Rollout
from rl_train.tasks.base import Task, TaskContext, with_measurements
from rl_train.utils.rng import RowRNG
from sa2va_hf.batches import Prompts

MIN_POINTS = 3  # a box and two points: what segzero answers


@dataclass(frozen=True)
class AnswerOptions:
    """Flags of the question, the answer's format and the passes of SAM2."""

    weight: float = flag(1.0, "of the points' loss", name="point_weight", type=WEIGHT)
    answer_style: str = flag(
        "segzero",
        "how the checkpoint answers: segzero = a box and two points; visionreasoner = a list "
        "of boxes with a point each; points = points as bare JSON, without thoughts",
        choices=STYLES,
    )
    negative_points: str = flag(
        "optional", "asked for beside these, under a key of their own", choices=NEGATIVE_POINTS
    )
    coordinates: str = flag(
        "pixels",
        "of its answers: of the image as it sees it (Qwen2.5-VL), in [0, 1] or 0..1000 (Qwen3-VL)",
        choices=list(COORDINATE_SCALES),
    )
    max_points: int = flag(
        8, "boxes and points of an answer; with more it cannot be read", type=COUNT
    )
    sam_passes: int = flag(
        1,
        "1 = SAM2 is given all at once; 2 = box and positive points, then all with the mask "
        "that it drew, as it was trained",
        choices=[1, 2],
    )
    trainable_modules = ("lora",)


class PointTask(Task):
    """Base of the second system's tasks: question, answer format and metrics.

    `PointSegmentation` is its reinforcement learning, `sft_tasks.PointAnswers` its supervised
    training.
    """

    name = "points"
    family = "qwen2_5_vl"

    def __init__(self, options: AnswerOptions, context: TaskContext):
        self.options, self.context, self.weight = options, context, options.weight
        if options.max_points < MIN_POINTS:
            raise ValueError(f"--max_points {options.max_points}: must be at least {MIN_POINTS}")
        self.format = AnswerFormat(
            options.answer_style, options.negative_points, options.coordinates, options.max_points
        )

    def prompts(self, batch: Batch, features: QwenImageFeatures) -> Prompts:
        """Return the question for box and points of each sample's caption."""
        questions = [point_question(caption, self.format) for caption in batch.captions]
        return self.context.policy.point_questions(features, list(range(len(batch))), questions)

    def parse(
        self, texts: list[str], features: QwenImageFeatures, image: list[int]
    ) -> tuple[list[PointPrompt | None], list[str]]:
        """Return (answers parsed from texts[p] about image[p], reasons why not).

        Answers are in pixels of the images' masks, None if unparsed; the reason of a parsed one is
        "".
        """
        parsed = [
            self.format.parse_in_pixels(text, features.seen_sizes[i], features.sizes[i])
            for text, i in zip(texts, image)
        ]
        return [answer for answer, _ in parsed], [reason for _, reason in parsed]

    def confused_regions(
        self, policy: QwenVLPolicy, features: QwenImageFeatures, targets: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return B (H, W) bool regions that SAM2 confuses with the targets.

        They are empty if the format has no negative points.
        """
        if self.format.with_negatives:
            return confused_regions(policy, features, targets)
        return [torch.zeros_like(target) for target in targets]

    def measure(
        self, policy: QwenVLPolicy, batch: Batch, features: QwenImageFeatures, max_new_tokens: int
    ) -> dict[str, list]:
        """Return {column: B values} of greedy answers; see `point_metrics.measure`."""
        _, texts = policy.complete(features, self.prompts(batch, features), 1, max_new_tokens)
        answers, _ = self.parse(texts, features, list(range(len(batch))))
        return point_metrics.measure(
            policy, batch, features, texts, answers, self.options.sam_passes
        )

    def measure_samples(
        self,
        policy: QwenVLPolicy,
        batch: Batch,
        features: QwenImageFeatures,
        max_new_tokens: int,
        num_generations: int,
    ) -> dict[str, list]:
        """Return {column: B values} of G sampled answers; see `cycle_metrics.measure_samples`."""
        G, prompts = num_generations, self.prompts(batch, features)
        uniforms = RowRNG(0, 0, 0, batch.index, G).uniforms(max_new_tokens)
        completions, texts = policy.complete(features, prompts, G, max_new_tokens, uniforms)
        image = [i for i in range(len(batch)) for _ in range(G)]  # (N,)
        answers, _ = self.parse(texts, features, image)
        masks, *_ = segment_points(policy, features, image, answers, self.options.sam_passes)
        targets = [batch.masks[i].to(policy.device) for i in image]
        iou = mask_iou(masks, targets, 1.0).cpu().view(-1, G)  # (B, G)
        return dict(
            best_of_G_seg_iou=pick_best(iou, iou),
            by_logp_seg_iou=pick_best(iou, mean_logps(completions, G)),
            sampled_seg_iou=iou.mean(1).tolist(),
        )


class PointSegmentation(PointTask):
    """Task of the second system, with the IoU of the mask that an answer prompts as its reward."""

    @dataclass(frozen=True)
    class Options(AnswerOptions):
        hide_negatives: bool = flag(
            False, "from SAM2 in training (a control: nothing can be learnt of them)"
        )
        format_weight: float = flag(
            0.1,
            "of the reward for an answer that can be read, half of it for tags",
            type=WEIGHT,
        )
        negative_weight: float = flag(
            0.0,
            "of the reward for negative points where SAM2 draws too much of the true box and "
            "deepest point, and not in the target; without any half of it",
            type=WEIGHT,
        )

    def __init__(self, options: Options, context: TaskContext):
        super().__init__(options, context)
        if options.negative_points == "off" and (options.negative_weight or options.hide_negatives):
            flag_name = "negative_weight" if options.negative_weight else "hide_negatives"
            raise ValueError(f"--{flag_name}: --negative_points off asks for none")
        negatives = {"negatives": options.negative_weight} if options.negative_weight else {}
        weights = {"iou": 1.0, "format": options.format_weight}
        self.weights = weights | negatives | context.user_weights

    def rewards(self, rollout: Rollout) -> RewardOutput:
        """Return `point_rewards` of the masks by SAM2 of the answers, at the image's own size.

        An answer that cannot be read has an empty mask and 0 in all components that count. The
        region that SAM2 confuses with the target follows from the target alone. See
        `with_measurements` for "on_target" and the user's rewards, which see the masks and the
        parsed answers as `answers`.
        """
        policy, batch, features = self.context.policy, rollout.batch, rollout.features
        image = rollout.prompts.image_index
        answers, reasons = self.parse(rollout.texts, features, image)
        # confidences: (with, without) the negative points of each row
        masks, without, confidences = segment_points(
            policy, features, image, answers, self.options.sam_passes
        )
        if self.options.hide_negatives:
            masks = without
        # What SAM2 confuses depends on the target alone: once a sample, not once a row.
        targets = [mask.to(policy.device) for mask in batch.masks]  # B
        confused = rollout.of_rows(self.confused_regions(policy, features, targets))
        targets = rollout.of_rows(targets)  # N
        well_formed = [self.format.is_well_formed(text) for text in rollout.texts]
        captions = rollout.of_rows(batch.captions)
        rewards = with_measurements(
            self,
            rollout,
            point_rewards(answers, well_formed, masks, without, targets, confused),
            [point_question(caption, self.format) for caption in captions],
            masks,
            targets,
            answers=answers,
            mask_confidence=[pair[self.options.hide_negatives] for pair in confidences],
        )
        unparsed = {name: torch.tensor([name == reason for reason in reasons]) for name in REASONS}
        return RewardOutput(
            rewards,
            masks,
            unparsed=unparsed,
            point_prompts=answers,
            masks_without_negatives=without,
        )
