"""Box and points for a referring expression: the policy says them, SAM2 draws the mask from them.

Segzero_plus's task, with Seg-Zero's and VisionReasoner's ways to answer. No teacher is asked.
"""

from dataclasses import dataclass

import torch

from rl_train.draws import Draws
from rl_train.flags import COUNT, WEIGHT, flag
from rl_train.points.answers import FRAMES, NEGATIVE_POINTS, REASONS, STYLES, Form
from rl_train.points.questions import question
from rl_train.rewards import mask_iou
from rl_train.rewards.custom import user_components, with_components
from rl_train.rewards.iou import hits
from rl_train.rewards.points import point_rewards
from rl_train.tasks import point_measures
from rl_train.tasks.best_of import kept, mean_logps
from rl_train.tasks.point_measures import confused_regions, draw
from rl_train.tasks.protocol import Context
from rl_train.types import Batch, Outcome, Rollout

MIN_POINTS = 3  # a box and two points: what segzero answers


@dataclass(frozen=True)
class AnswerOptions:
    """How a checkpoint is asked, answers and is drawn."""

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
        choices=list(FRAMES),
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
    trains = ("lora",)


class PointSegmentation:
    name = "points"
    action = None
    family, asks_teacher = "qwen2_5_vl", False

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

    def __init__(self, options: Options, context: Context):
        self.options, self.context, self.weight = options, context, options.weight
        if options.max_points < MIN_POINTS:
            raise ValueError(f"--max_points {options.max_points}: must be at least {MIN_POINTS}")
        if options.negative_points == "off" and (options.negative_weight or options.hide_negatives):
            used = "negative_weight" if options.negative_weight else "hide_negatives"
            raise ValueError(f"--{used}: --negative_points off asks for none")
        form = (options.answer_style, options.negative_points, options.coordinates)
        self.form = Form(*form, options.max_points)
        self.weights = {"iou": 1.0, "format": options.format_weight}
        self.weights |= {"negatives": options.negative_weight} if options.negative_weight else {}
        self.weights |= {reward.name: reward.weight for reward in context.user_rewards}

    def prompts(self, batch: Batch, features):
        """The question for box and points of each sample's caption."""
        rows = list(range(len(batch)))
        questions = [question(caption, self.form) for caption in batch.captions]
        return self.context.policy.point_prompts(features, rows, questions)

    def judge(self, rollout: Rollout) -> Outcome:
        """`point_rewards` of the masks that SAM2 draws from the answers, at the image's own size.

        An answer that cannot be read draws nothing and has 0 in all that counts. The region that
        SAM2 confuses with the target follows from the target alone, see `confused_regions`. The
        user's own rewards see the masks, and what was read of each answer as `answers`. With
        --other_regions "hit" is a measurement: see `hits`.
        """
        policy, batch, features = self.context.policy, rollout.batch, rollout.features
        image, targets = rollout.prompts.image, [m.to(policy.device) for m in batch.masks]
        answers, reasons = self.read(rollout.texts, features, image)
        passes, hidden, sure = self.options.sam_passes, self.options.hide_negatives, []
        masks, without = draw(policy, features, image, answers, passes, sure)
        masks = without if hidden else masks
        if self.form.with_negatives:
            confused = confused_regions(policy, features, targets)
        else:
            confused = [torch.zeros_like(target) for target in targets]
        in_form = [self.form.in_form(text) for text in rollout.texts]
        of_rows = (rollout.of_rows(targets), rollout.of_rows(confused))
        rewards = point_rewards(answers, in_form, masks, without, *of_rows)
        if batch.others is not None:
            rewards["hit"] = hits(masks, batch.masks, batch.others)
        questions = [question(caption, self.form) for caption in rollout.of_rows(batch.captions)]
        common = (self.context.user_rewards, rollout, questions, masks, of_rows[0])
        more = dict(answers=answers, mask_confidence=[of_both[hidden] for of_both in sure])
        rewards = with_components(rewards, user_components(*common, **more))
        refused = {name: torch.tensor([name == why for why in reasons]) for name in REASONS}
        return Outcome(rewards, masks, refused=refused, answers=answers, masks_without=without)

    def read(self, texts: list[str], features, image: list[int]) -> tuple[list, list[str]]:
        """(the answers that the texts about image[p] state, None of what is none; why not, or "").

        In pixels of the images' masks.
        """
        seen, sizes = features.seen_sizes, features.sizes
        read = [self.form.read(text, seen[i], sizes[i]) for text, i in zip(texts, image)]
        return [answer for answer, _ in read], [reason for _, reason in read]

    def measure(self, policy, batch: Batch, features, max_new_tokens: int) -> dict[str, list]:
        """{column: B values} of greedy answers, held out: see `point_measures.measure`."""
        _, texts = policy.complete(features, self.prompts(batch, features), 1, max_new_tokens)
        answers, _ = self.read(texts, features, list(range(len(batch))))
        passes = self.options.sam_passes
        return point_measures.measure(policy, batch, features, texts, answers, passes)

    def measure_samples(
        self, policy, batch: Batch, features, max_new_tokens: int, num_generations: int
    ) -> dict[str, list]:
        """{column: B values} of G sampled answers: see `cycle_measures.measure_samples`."""
        G, prompts = num_generations, self.prompts(batch, features)
        uniforms = Draws(0, 0, 0, batch.index, G).uniforms(max_new_tokens)
        done, texts = policy.complete(features, prompts, G, max_new_tokens, uniforms)
        rows = [i for i in range(len(batch)) for _ in range(G)]
        answers, _ = self.read(texts, features, rows)
        masks, _ = draw(policy, features, rows, answers, self.options.sam_passes)
        targets = [batch.masks[i].to(policy.device) for i in rows]
        iou = mask_iou(masks, targets, 1.0).cpu().view(-1, G)  # (B, G)
        return dict(
            best_of_G_seg_iou=kept(iou, iou),
            by_logp_seg_iou=kept(iou, mean_logps(done, G)),
            sampled_seg_iou=iou.mean(1).tolist(),
        )
