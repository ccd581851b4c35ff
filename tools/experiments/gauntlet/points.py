"""Measure what habits of negative points gain without training, beside best-of-G by the reward.

    python -m tools.experiments.gauntlet.points --model_path outputs/points_demo/qwen \
        --sam_path outputs/points_demo/sam --data_dir outputs/points_demo/train \
        --eval_data_dir outputs/points_demo/heldout --output_dir outputs/gauntlet_points \
        --answer_style points --image_size 96 --dtype float32 --max_completion_length 32

Rules put the negative points of the base's greedy answers elsewhere, whatever the image shows; best
of G picks a sample by each ablation of --ablation_reward. Everything is chosen on regions of
--data_dir and measured on held-out ones, which are read only afterwards.

Letters: n regions, G samples of each.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.utils.data import Dataset
from tqdm import tqdm

from rl_train.config.flags import AT_LEAST_2, COUNT_OR_0, POSITIVE, add_flags, read_flags
from rl_train.config.grpo_config import PolicyConfig
from rl_train.data.loader import eval_loader
from rl_train.distributed.process_group import RankInfo
from rl_train.evaluation.point_metrics import segment_points
from rl_train.export.load_policy import find_base, open_policy
from rl_train.points.parser import PointPrompt
from rl_train.policies.qwen_vl import QwenVLPolicy
from rl_train.rewards import mask_iou
from rl_train.rewards.ablations import ABLATIONS, AWAY, POINTS, AblatedRows, ablations_of
from rl_train.rewards.iou import on_target
from rl_train.tasks.base import TaskContext
from rl_train.tasks.point_segmentation import PointSegmentation
from rl_train.utils.command_line import FlagParser, run_program
from rl_train.utils.rng import RowRNG
from tools.experiments.common import add_region_flags, open_regions, run_alone
from tools.experiments.gauntlet.samples import PickBy, choose_direction, result_with_samples
from tools.experiments.gauntlet.table import (
    LoopResult,
    Measures,
    Rival,
    check_new,
    markdown,
    summarise,
    verdict,
    write,
)

MEASURES = {"iou": "mask IoU", "found": "object found"}
TITLE = "Points: masks that SAM2 draws"
UNCHANGED = "unchanged"
DISTANCES = (0.1, 0.2)  # of the image's shorter side, of a negative point from the positive one
RIM = 0.05  # of the box's side, of a negative point from the box's edge
# Ablations that need the teacher, another truth or no sample are no scores of a sample.
NO_SCORES = ("shuffled", "constant", "fixed", "other")

Rule = Callable[[PointPrompt, tuple[int, int]], PointPrompt]  # (answer, (width, height)) -> answer


@dataclass(frozen=True)
class Chosen:
    """Rules {cause: (name, rule)} and scores that were chosen on training regions."""

    rules: dict[str, tuple[str, Rule]]
    picks: list[PickBy]


def at_offset(direction: int, distance: float) -> Rule:
    """Return the rule of one negative point, in one of 8 directions from the first positive one."""
    angle = direction * math.pi / 4
    step = (math.cos(angle) * distance, math.sin(angle) * distance)

    def rule(prompt: PointPrompt, image: tuple[int, int]) -> PointPrompt:
        if not prompt.positive:
            return prompt
        pairs = zip(prompt.positive[0], step, image)
        point = tuple(min(max(x + part * min(image), 0.0), size - 1.0) for x, part, size in pairs)
        return replace(prompt, negative=(point,))

    return rule


def at_place(x: float, y: float) -> Rule:
    """Return the rule of one negative point at one place, in fractions of the image."""
    return lambda prompt, image: replace(prompt, negative=((x * image[0], y * image[1]),))


def inside_edge(x: float, y: float) -> Rule:
    """Return the rule of one negative point at one place of the first box, in fractions of it."""

    def rule(prompt: PointPrompt, image: tuple[int, int]) -> PointPrompt:
        if not prompt.boxes:
            return prompt
        left, top, right, bottom = prompt.boxes[0]
        point = (left + x * (right - left), top + y * (bottom - top))
        return replace(prompt, negative=(point,))

    return rule


def without_middle(prompt: PointPrompt, image: tuple[int, int]) -> PointPrompt:
    """Drop the negative points at the middle of the image."""
    middle = (image[0] / 2, image[1] / 2)
    away = [p for p in prompt.negative if math.dist(p, middle) > AWAY * min(image)]
    return replace(prompt, negative=tuple(away))


def hidden(prompt: PointPrompt, image: tuple[int, int]) -> PointPrompt:
    return replace(prompt, negative=())


RULES: dict[str, dict[str, Rule]] = {
    "no negative point": {"hidden": hidden},
    "away from the middle of the image": {"dropped there": without_middle},
    "one offset from the positive point": {
        f"{45 * direction} degrees, {distance:g} of the side": at_offset(direction, distance)
        for direction in range(8)
        for distance in DISTANCES
    },
    "one place in the image": {
        f"{x:g}, {y:g}": at_place(x, y) for x in (0.1, 0.5, 0.9) for y in (0.1, 0.5, 0.9)
    },
    "inside the box's edge": {
        "left": inside_edge(RIM, 0.5),
        "right": inside_edge(1 - RIM, 0.5),
        "top": inside_edge(0.5, RIM),
        "bottom": inside_edge(0.5, 1 - RIM),
    },
}


class PointRegions:
    """Regions of a data set, encoded once, and the base's answers about them."""

    def __init__(self, task: PointSegmentation, dataset: Dataset, args: argparse.Namespace):
        self.task, self.policy, self.tokens = task, task.context.policy, args.max_completion_length
        inputs = self.policy.preprocessor(self.tokens, args.max_prompt_length)
        loader = eval_loader(dataset, inputs, args.batch_size, args.num_workers, distractors=True)
        bar = tqdm(loader, desc="regions", leave=False, disable=None)
        self.parts = [(batch, self.policy.encode(batch)) for batch in bar]

    def measure(self, rules: dict[str, Rule]) -> dict[str, Measures]:
        """Return {rule: measures} of greedy answers under each rule, and UNCHANGED."""
        measured = {name: dict(iou=[], found=[]) for name in (UNCHANGED, *rules)}
        for batch, features in tqdm(self.parts, desc="rules", leave=False, disable=None):
            prompts, rows = self.task.prompts(batch, features), list(range(len(batch)))
            _, texts = self.policy.complete(features, prompts, 1, self.tokens)
            answers = [parsed.prompt for parsed in self.task.parse(texts, features, rows)]
            targets = [mask.to(self.policy.device) for mask in batch.masks]
            for name, values in measured.items():
                ruled = [
                    answer if answer is None or name == UNCHANGED else rules[name](answer, image)
                    for answer, image in zip(answers, [(w, h) for h, w in batch.sizes])
                ]
                passes = self.task.options.sam_passes
                masks, *_ = segment_points(self.policy, features, rows, ruled, passes)
                values["iou"] += mask_iou(masks, targets).tolist()
                values["found"] += on_target(masks, batch.masks, batch.distractors).tolist()
        return measured

    def scores(self, num_generations: int) -> dict[str, torch.Tensor]:
        """Return {score: (n, G)} of samples: measures, "reward" and each ablation as a score."""
        G, parts = num_generations, []
        for batch, features in tqdm(self.parts, desc="samples", leave=False, disable=None):
            uniforms = RowRNG(0, 0, 0, batch.index, G).uniforms(self.tokens)
            prompts = self.task.prompts(batch, features)
            rollout = self.policy.sample(batch, features, prompts, G, self.tokens, uniforms)
            outcome = self.task.rewards(rollout)
            rows = AblatedRows(self.task, rollout, outcome, (0,), "")
            part = dict(reward=rows.reward, iou=outcome.rewards["iou"])
            part["found"] = outcome.rewards["on_target"]
            for name in ablations_of(POINTS):
                if name not in NO_SCORES:
                    part[name] = ABLATIONS[name].reward(rows)
            parts.append(part)
        return {
            name: torch.cat([part[name] for part in parts]).double().view(-1, G)
            for name in parts[0]
        }


@torch.no_grad()
def choose(training: PointRegions, num_generations: int) -> Chosen:
    """Choose rules and directions by the IoU with training regions."""
    named = {f"{cause}: {name}": rule for cause, of in RULES.items() for name, rule in of.items()}
    measured = training.measure(named)
    rules = {}
    for cause, of_cause in RULES.items():
        best = max(of_cause, key=lambda name: sum(measured[f"{cause}: {name}"]["iou"]))
        rules[cause] = (best, of_cause[best])
    scores = training.scores(num_generations)
    cheap = [name for name in scores if name not in ("reward", *MEASURES)]
    return Chosen(rules, [choose_direction(name, scores[name], scores["iou"]) for name in cheap])


@torch.no_grad()
def measure(heldout: PointRegions, chosen: Chosen, num_generations: int) -> LoopResult:
    """Measure what was chosen on held-out regions; nothing is chosen here."""
    measured = heldout.measure({cause: rule for cause, (_, rule) in chosen.rules.items()})
    rivals = [
        Rival(cause, name, "greedy", measured[cause]) for cause, (name, _) in chosen.rules.items()
    ]
    scores = heldout.scores(num_generations)
    return result_with_samples(
        greedy=measured[UNCHANGED],
        rivals=rivals,
        scores=scores,
        true_reward="reward",
        picks=chosen.picks,
        measures=MEASURES,
    )


def build_parser() -> FlagParser:
    parser = FlagParser(prog="python -m tools.experiments.gauntlet.points", description=__doc__)
    add = parser.add_argument
    models = "Qwen2.5-VL folders, or checkpoints of runs"
    add("--model_path", nargs="+", required=True, type=Path, help=models)
    add("--sam_path", help="SAM2 folder")
    add_region_flags(parser, batch_size=4)
    add("--output_dir", required=True, type=Path, help="receives table.md and table.json")
    add("--num_generations", type=AT_LEAST_2, default=8, help="G, samples of each region")
    add("--temperature", type=POSITIVE, default=1.0, help="of the samples")
    add("--image_size", type=COUNT_OR_0, default=PolicyConfig.image_size)
    add_flags(parser, PointSegmentation.Options, "answers of Qwen2.5-VL, as in training")
    return parser


def result_of(
    task: PointSegmentation, chosen_on: Dataset, heldout: Dataset, args: argparse.Namespace
) -> LoopResult:
    """Return the result of one checkpoint. Held-out regions are read when all is chosen."""
    G = args.num_generations
    chosen = choose(PointRegions(task, chosen_on, args), G)
    return measure(PointRegions(task, heldout, args), chosen, G)


def run(args: argparse.Namespace, ranks: RankInfo):
    """Choose, measure, print and write; ValueError for what is wrong in the flags and files."""
    check_new(args.output_dir)
    for path in args.model_path:  # said before data are read
        find_base(path, None, "--model_path", QwenVLPolicy.family)
    chosen_on, heldout = open_regions(args)
    results, options = [], read_flags(args, PointSegmentation.Options)
    for number, path in enumerate(args.model_path, 1):
        policy = open_policy(
            path,
            None,
            "policy",
            ranks.device,
            args.max_completion_length,
            sam_path=args.sam_path,
            image_size=args.image_size,
            dtype=args.dtype,
            temperature=args.temperature,
        )
        task = PointSegmentation(options, TaskContext(policy, None, args.max_completion_length))
        results.append(result_of(task, chosen_on, heldout, args))
        rows = summarise(results)
        head = (
            f"{number} of {len(args.model_path)} checkpoint(s), chosen on {len(chosen_on)} "
            f"training regions, measured on {len(heldout)} held-out ones, "
            f"G = {args.num_generations}."
        )
        table = markdown(TITLE, rows, MEASURES, number)
        text = "\n\n".join([head, table, verdict(TITLE, rows)]) + "\n"
        values = [{rival.name: rival.values for rival in result.rivals} for result in results]
        # An interruption keeps what is measured.
        write(text, dict(rows=rows, values=values), args)


def main(argv: list[str] | None = None):
    run_alone(build_parser(), run, argv)


if __name__ == "__main__":
    run_program(main)
