"""Measure what cheap causes gain without training, beside best-of-G by the true reward.

    python -m tools.experiments.gauntlet --model_path outputs/demo/checkpoint \
        --data_dir outputs/demo/train --eval_data_dir outputs/demo/heldout \
        --output_dir outputs/gauntlet --dtype float32 --max_completion_length 24

Everything is chosen on regions of --data_dir and measured on held-out ones of --eval_data_dir,
which are read only afterwards. A cause that takes more than half of the true reward's gain is
marked: a loop that gains as much may have learnt no more than that (README.md beside this file).
Several --model_path are checkpoints of one recipe: intervals over them stand beside those over
regions. OUTPUT_DIR receives table.md and table.json after each checkpoint, of those so far.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils.data import Subset

from rl_train.config.flags import AT_LEAST_2, COUNT, POSITIVE, WEIGHT
from rl_train.data.registry import opener_of
from rl_train.distributed.process_group import RankInfo
from rl_train.export.load_policy import find_base, open_policy
from rl_train.policies.sa2va import Sa2VAPolicy
from rl_train.rewards.positions import named_part
from rl_train.utils.command_line import FlagParser, run_program
from tools.experiments.common import add_region_flags, open_regions, run_alone
from tools.experiments.gauntlet import loop1, loop2
from tools.experiments.gauntlet.regions import Regions
from tools.experiments.gauntlet.table import (
    LoopResult,
    check_new,
    markdown,
    summarise,
    verdict,
    write,
)

LOOPS = {
    1: ("Loop 1: captions of regions", loop1),
    2: ("Loop 2: masks of captions", loop2),
}


def build_parser() -> FlagParser:
    parser = FlagParser(prog="python -m tools.experiments.gauntlet", description=__doc__)
    add = parser.add_argument
    models = "Sa2VA folders, or checkpoints of runs"
    add("--model_path", nargs="+", required=True, type=Path, help=models)
    add_region_flags(parser)
    add("--output_dir", required=True, type=Path, help="receives table.md and table.json")
    add("--loops", nargs="+", type=int, choices=list(LOOPS), default=list(LOOPS))
    add(
        "--loop1_reward",
        choices=list(loop1.MEASURES),
        default="iou",
        help="reward of loop 1: iou, or found, 1 if the mask lies on the region and on no other "
        "(in training: --reward_weights loop1.iou=0 loop1.on_target=1)",
    )
    add(
        "--loop2_reward",
        choices=list(loop2.REWARDS),
        default="meteor",
        help="reward of loop 2, as --reward_weights loop2.meteor or loop2.likelihood",
    )
    add(
        "--loop2_measure",
        choices=list(loop2.MEASURES),
        default="iou",
        help="of loop 2's masks, by which causes are chosen and compared; pointed: 1 if the "
        "highest logit lies on the region, which no threshold and no area changes",
    )
    add(
        "--without_places",
        action="store_true",
        help="leave out regions whose phrase names a place (left of the owl), by which the part of "
        "the image that it names would be a cheap cause",
    )
    subsets = "folders of --data_dir to read (gar, dam), or its split; default: all"
    add("--subsets", nargs="+", default=[], metavar="SUBSET", help=subsets)
    add("--num_generations", type=AT_LEAST_2, default=8, help="G, samples of each region")
    add(
        "--latent_std",
        type=lambda text: text if text == "auto" else WEIGHT(text),
        default="auto",
        help="of the noise by which masks are sampled, as of rl_train.train",
    )
    add("--temperature", type=POSITIVE, default=1.0, help="of the samples")
    add("--max_tiles", type=COUNT, default=1)
    return parser


@torch.no_grad()
def results_of(
    policy: Sa2VAPolicy,
    chosen_on: Subset,
    heldout: Subset,
    args: argparse.Namespace,
) -> dict[int, LoopResult]:
    """Return {loop: result} of one checkpoint. Held-out regions are read when all is chosen."""

    def opened(dataset: Subset) -> Regions:
        return Regions(
            policy,
            dataset,
            args.max_completion_length,
            args.max_prompt_length,
            args.batch_size,
            args.num_workers,
        )

    training, G = opened(chosen_on), args.num_generations
    chosen = {}
    if 1 in args.loops:
        chosen[1] = loop1.choose(training, G, args.loop1_reward)
    if 2 in args.loops:
        chosen[2] = loop2.choose(
            training, G, args.latent_std, args.loop2_reward, args.loop2_measure
        )
    del training
    regions = opened(heldout)
    return {loop: LOOPS[loop][1].measure(regions, chosen[loop], G) for loop in chosen}


def without_places(regions: Subset) -> Subset:
    """Return the regions whose phrase names no part of the image. Raises ValueError if none is."""
    plain = [i for i in range(len(regions)) if named_part(regions[i]["caption"], (2, 2)) is None]
    if not plain:
        raise ValueError("--without_places: each phrase of the data names a place")
    return Subset(regions, plain)


def report(results: dict[int, list[LoopResult]], head: str) -> tuple[str, dict]:
    """Return (markdown, JSON) of {loop: results of the checkpoints}."""
    parts, record = [head], {}
    for loop, of_loop in results.items():
        title, module = LOOPS[loop]
        rows = summarise(of_loop)
        measures = {name: module.MEASURES[name] for name in rows[0]["measures"]}
        table = markdown(title, rows, measures, len(of_loop))
        parts += [table, verdict(title, rows)]
        record[f"loop{loop}"] = dict(rows=rows, values=[to_json(result) for result in of_loop])
    return "\n\n".join(parts) + "\n", record


def to_json(result: LoopResult) -> dict:
    """Return the values of every held-out region, by row."""
    named = dict(greedy=result.greedy, samples=result.samples, best=result.best)
    return named | {rival.name: rival.values for rival in result.rivals}


def run(
    args: argparse.Namespace,
    ranks: RankInfo,
    open_policy: Callable[..., Sa2VAPolicy] = open_policy,
):
    """Choose, measure, print and write; ValueError for what is wrong in the flags and files."""
    check_new(args.output_dir)
    for path in args.model_path:  # said before data are read
        find_base(path, None, "--model_path", Sa2VAPolicy.family)
    chosen_on, heldout = open_regions(args, opener_of(args.dataset, args.subsets))
    if args.without_places:
        chosen_on, heldout = without_places(chosen_on), without_places(heldout)
    results, num_checkpoints = {loop: [] for loop in args.loops}, len(args.model_path)
    for number, path in enumerate(args.model_path, 1):
        policy = open_policy(
            path,
            None,
            "policy",
            ranks.device,
            args.max_completion_length,
            max_tiles=args.max_tiles,
            dtype=args.dtype,
            temperature=args.temperature,
        )
        for loop, result in results_of(policy, chosen_on, heldout, args).items():
            results[loop].append(result)
        head = (
            f"{number} of {num_checkpoints} checkpoint(s), chosen on {len(chosen_on)} training "
            f"regions, measured on {len(heldout)} held-out ones, G = {args.num_generations}."
        )
        text, record = report(results, head)
        # An interruption keeps what is measured.
        write(text, record, args)


def main(argv: list[str] | None = None):
    run_alone(build_parser(), run, argv)


if __name__ == "__main__":
    run_program(main)
