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
    REPAIRS,
    STYLE_SCALES,
    STYLES,
    UNTIDY,
    AnswerFormat,
    ParsedAnswer,
    PointPrompt,
)
from rl_train.points.prompts import point_question
from rl_train.points.published import FRAME, parse_solution
from rl_train.policies.qwen_vl import QwenImageFeatures, QwenVLPolicy
from rl_train.policies.sam2_prompting import split_by_box
from rl_train.rewards import mask_iou, objects
from rl_train.rewards.points import box_rewards, point_rewards, prompt_of_masks
from rl_train.rewards.published_points import REWARD_SETS, published_rewards
from rl_train.rollout import Batch, RewardOutput, Rollout
from rl_train.tasks.base import Task, TaskContext
from rl_train.utils.rng import RowRNG
from sa2va_hf.batches import Prompts

MIN_POINTS = 3  # a box and two points: what segzero answers


@dataclass(frozen=True)
class AnswerOptions:
    """Flags of the question, the answer's format and the passes of SAM2."""

    weight: float = flag(1.0, "weight of the points' loss", name="point_weight", type=WEIGHT)
    answer_style: str = flag(
        "segzero",
        "format of the model's answers. segzero: a box and two points; visionreasoner: a list of "
        "boxes with a point each; segzero_plus: a box and a list of points, in [0, 1]; points: "
        "points as bare JSON, without thoughts",
        choices=STYLES,
    )
    negative_points: str = flag(
        "optional",
        "whether negative points are asked for, under a key of their own",
        choices=NEGATIVE_POINTS,
    )
    coordinates: str | None = flag(
        None,
        "unit of the answers' coordinates. pixels: of the image as the model sees it (Qwen2.5-VL); "
        "unit: [0, 1]; thousand: 0..1000 (Qwen3-VL)",
        default_is="unit with --answer_style segzero_plus, else the model's own",
        choices=list(COORDINATE_SCALES),
    )
    max_points: int = flag(
        8, "largest number of boxes and points of an answer; one with more is not read", type=COUNT
    )
    sam_passes: int = flag(
        1,
        "times that SAM2 is asked. 1: with all points at once; 2: with box and positive points, "
        "then with all points and the mask that it drew, as it was trained",
        choices=[1, 2],
    )
    trainable_modules = ("lora",)


class PointTask(Task):
    """Base of the second system's tasks: question, answer format and metrics.

    `PointSegmentation` is its reinforcement learning, `sft_tasks.PointAnswers` its supervised
    training.
    """

    name = "points"
    family = "qwen_vl"
    takes_no_target = True  # in one answer style

    def __init__(self, options: AnswerOptions, context: TaskContext):
        self.options, self.context, self.loss_weight = options, context, options.weight
        if options.max_points < MIN_POINTS:
            raise ValueError(f"--max_points {options.max_points}: must be at least {MIN_POINTS}")
        style = options.answer_style
        if context.names_nothing and style != "visionreasoner":
            raise ValueError(
                f"--answer_style {style}: cannot say that a phrase names nothing, as some of these "
                "samples do; take visionreasoner, whose answer is then []"
            )
        self.format = AnswerFormat(
            style,
            options.negative_points,
            options.coordinates or STYLE_SCALES.get(style, context.policy.coordinates),
            options.max_points,
        )

    def prompts(self, batch: Batch, features: QwenImageFeatures) -> Prompts:
        """Return the question for box and points of each sample's caption."""
        questions = [point_question(caption, self.format) for caption in batch.captions]
        return self.context.policy.point_questions(features, list(range(len(batch))), questions)

    def parse(
        self, texts: list[str], features: QwenImageFeatures, image_index: list[int]
    ) -> list[ParsedAnswer]:
        """Return the answers parsed from the texts, in pixels of their images' masks."""
        return [
            self.format.parse_in_pixels(text, features.seen_sizes[i], features.sizes[i])
            for text, i in zip(texts, image_index)
        ]

    def solutions(self, batch: Batch) -> list[PointPrompt]:
        """Return the true boxes and points of each sample, in pixels of a frame of FRAME.

        They are those that the data set states; of a sample without any those of its mask, as the
        published sets were made of masks.
        """
        num_points = 2 if self.format.style == "segzero" else 1
        solutions = []
        for i, size in enumerate(batch.sizes):
            if batch.solutions and batch.solutions[i]:
                solutions.append(parse_solution(batch.solutions[i]))
                continue
            prompt = prompt_of_masks(self.regions(batch, i), num_points)
            prompt = prompt.scaled(FRAME / size[1], FRAME / size[0])
            solutions.append(prompt.map(lambda values: tuple(float(int(v + 0.5)) for v in values)))
        return solutions

    def regions(self, batch: Batch, i: int) -> list[torch.Tensor]:
        """Return the masks (H, W) bool that an answer about sample i has a box for, each.

        Those are the regions that its caption names, in the style that can say several.
        """
        several = batch.objects is not None and self.format.style == "visionreasoner"
        regions = batch.objects[i] if several else [batch.masks[i]]
        return [region.to(self.context.policy.device) for region in regions]

    def solutions_in_pixels(self, batch: Batch) -> list[PointPrompt]:
        """Return `solutions` in pixels of the original images."""
        return [
            solution.scaled(width / FRAME, height / FRAME)
            for solution, (height, width) in zip(self.solutions(batch), batch.sizes)
        ]

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
        parsed = self.parse(texts, features, list(range(len(batch))))
        answers = [answer.prompt for answer in parsed]
        if not batch.has_masks:
            return point_metrics.measure_boxes(
                batch, texts, answers, self.solutions_in_pixels(batch)
            )
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
        if not batch.has_masks:
            raise ValueError("--best_of: needs masks, and these samples have boxes and points")
        G, prompts = num_generations, self.prompts(batch, features)
        uniforms = RowRNG(0, 0, 0, batch.index, G).uniforms(max_new_tokens)
        completions, texts = policy.complete(features, prompts, G, max_new_tokens, uniforms)
        image = [i for i in range(len(batch)) for _ in range(G)]  # (N,)
        answers = [answer.prompt for answer in self.parse(texts, features, image)]
        masks, *_ = segment_points(policy, features, image, answers, self.options.sam_passes)
        targets = [batch.masks[i].to(policy.device) for i in image]
        iou = mask_iou(masks, targets, 1.0).cpu().view(-1, G)  # (B, G)
        return dict(
            best_of_G_seg_iou=pick_best(iou, iou),
            by_logp_seg_iou=pick_best(iou, mean_logps(completions, G)),
            sampled_seg_iou=iou.mean(1).tolist(),
        )


class PointSegmentation(PointTask):
    """Task of the second system: rewards of an answer's mask, or of its boxes and points alone."""

    takes_boxes = True
    reward_components = ("iou", "format", "negatives", "box_iou", "matched")

    @dataclass(frozen=True)
    class Options(AnswerOptions):
        reward_set: str = flag(
            "mask",
            "mask = IoU of SAM2's mask, with --format_weight; segzero, visionreasoner = the "
            "published rewards of boxes and points, which need no masks",
            choices=["mask", *REWARD_SETS],
        )
        hide_negatives: bool = flag(
            False,
            "for ablations, keep negative points from SAM2 in training: nothing can be learnt of "
            "them",
        )
        format_weight: float = flag(
            0.1,
            "weight of the reward for an answer that can be read, half of it for tags",
            type=WEIGHT,
            aliases=("lambda_format",),
        )
        negative_weight: float = flag(
            0.0,
            "weight of the reward for negative points that lie outside the target and where SAM2, "
            "prompted by the true box and deepest point, draws too much; an answer without any "
            "gets half of it",
            type=WEIGHT,
        )

    def __init__(self, options: Options, context: TaskContext):
        super().__init__(options, context)
        if options.negative_points == "off" and (options.negative_weight or options.hide_negatives):
            flag_name = "negative_weight" if options.negative_weight else "hide_negatives"
            raise ValueError(f"--{flag_name}: --negative_points off asks for none")
        is_published = options.reward_set in REWARD_SETS
        if is_published and options.reward_set != options.answer_style:
            raise ValueError(
                f"--reward_set {options.reward_set}: is made for --answer_style "
                f"{options.reward_set}, not {options.answer_style}"
            )
        if not context.has_masks and not is_published:
            raise ValueError(
                "--reward_set mask: these samples have boxes and points and no masks; take one of "
                f"{', '.join(REWARD_SETS)}"
            )
        if not context.has_masks and options.negative_weight:
            raise ValueError("--negative_weight: needs masks, and these samples have none")
        negatives = {"negatives": options.negative_weight} if options.negative_weight else {}
        weights = {"iou": 1.0, "format": options.format_weight}
        if is_published:
            weights = dict.fromkeys(REWARD_SETS[options.reward_set][1], 1.0)
        self.set_reward_weights(weights | negatives)

    def own_rewards(self, rollout: Rollout) -> RewardOutput:
        """Return `point_rewards` of the masks by SAM2 of the answers, at the image's own size.

        An answer that cannot be read has an empty mask and 0 in all components that count. The
        region that SAM2 confuses with the target follows from the target alone. Samples without
        masks have `box_rewards`. --reward_set adds the published rewards, of the texts; a weight of
        "matched" adds `matched_rewards`. The user's rewards see the parsed answers as `answers` and
        the data set's own `solution`.
        """
        policy, batch, features = self.context.policy, rollout.batch, rollout.features
        image = rollout.prompts.image_index
        parsed = self.parse(rollout.texts, features, image)
        answers = [answer.prompt for answer in parsed]
        # confidences: (with, without) the negative points of each row
        masks, without, confidences = segment_points(
            policy, features, image, answers, self.options.sam_passes
        )
        if self.options.hide_negatives:
            masks = without
        well_formed = [
            self.format.is_well_formed(text) and not set(answer.repairs) & set(UNTIDY)
            for text, answer in zip(rollout.texts, parsed)
        ]
        targets = [mask.to(policy.device) for mask in batch.masks]  # B
        if batch.has_masks:
            confused = rollout.repeat_for_rows(self.confused_regions(policy, features, targets))
            targets = rollout.repeat_for_rows(targets)  # N
            rewards = point_rewards(answers, well_formed, masks, without, targets, confused)
            if "matched" in self.weighted_components:
                rewards |= self.matched_rewards(rollout, answers)
        else:
            targets = rollout.repeat_for_rows(targets)  # N, empty
            true_prompts = rollout.repeat_for_rows(self.solutions_in_pixels(batch))
            rewards = box_rewards(answers, well_formed, true_prompts)
        if self.options.reward_set in REWARD_SETS:
            rewards |= self.published_rewards(rollout)
        captions = rollout.repeat_for_rows(batch.captions)
        solutions = rollout.repeat_for_rows(batch.solutions or [None] * len(batch))
        reasons, repairs = [p.reason for p in parsed], [p.repairs for p in parsed]
        return RewardOutput(
            rewards,
            masks,
            targets,
            [point_question(caption, self.format) for caption in captions],
            mask_confidence=[pair[self.options.hide_negatives] for pair in confidences],
            unparsed={name: torch.tensor([name == r for r in reasons]) for name in REASONS},
            repaired={name: torch.tensor([name in r for r in repairs]) for name in REPAIRS},
            point_prompts=answers,
            masks_without_negatives=without,
            columns=dict(answers=answers, solution=solutions),
        )

    def matched_rewards(
        self, rollout: Rollout, answers: list[PointPrompt | None]
    ) -> dict[str, torch.Tensor]:
        """Return `objects.matched_rewards` of the masks of each answer's boxes, one by one.

        SAM2 decodes them once more, each alone.
        """
        policy, batch, image = self.context.policy, rollout.batch, rollout.prompts.image_index
        groups = [split_by_box(answer) if answer else [] for answer in answers]
        rows = [row for row, group in enumerate(groups) for _ in group]
        with_negatives, without, _ = segment_points(
            policy,
            rollout.features,
            [image[row] for row in rows],
            [prompt for group in groups for prompt in group],
            self.options.sam_passes,
        )
        masks = iter(without if self.options.hide_negatives else with_negatives)
        regions = rollout.repeat_for_rows([each.to(policy.device) for each in batch.regions])
        each = [
            torch.stack([next(masks) for _ in group]) if group else true[:0]
            for group, true in zip(groups, regions)
        ]
        rewards = objects.matched_rewards(each, regions)
        rewards["matched"] *= torch.tensor([answer is not None for answer in answers])
        return rewards

    def published_rewards(self, rollout: Rollout) -> dict[str, torch.Tensor]:
        """Return {component: (N,)} of --reward_set.

        Raises ValueError if a solution has other numbers of boxes and points than the rewards take.
        """
        batch, reward_set, solutions = rollout.batch, self.options.reward_set, []
        for solution, image_id in zip(self.solutions(batch), batch.image_ids):
            num_boxes, num_points = len(solution.boxes), len(solution.positive)
            if reward_set == "segzero" and (num_boxes, num_points) != (1, 2):
                raise ValueError(
                    f"--reward_set segzero: the solution of {image_id} has {num_boxes} boxes and "
                    f"{num_points} points, not one and two; take --reward_set visionreasoner"
                )
            # Seg-Zero's solution has two points of its one box: the first counts.
            if reward_set == "visionreasoner":
                solution = PointPrompt(solution.boxes, solution.positive[:num_boxes])
            solutions.append(solution)
        limits = map(self.format.limits, rollout.features.seen_sizes)
        scales = [(FRAME / width, FRAME / height) for width, height in limits]
        return published_rewards(
            reward_set,
            rollout.texts,
            rollout.repeat_for_rows(solutions),
            [scales[i] for i in rollout.prompts.image_index],
        )
