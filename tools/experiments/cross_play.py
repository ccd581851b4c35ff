"""Measure how well each listener finds regions by each speaker's captions, with 95 % intervals.

Two roles that learn together may agree on a language that nobody else understands; a listener that
was trained apart from the speaker shows it. A player is a Sa2VA folder or a checkpoint of a run,
whose teacher is PATH:teacher; tokenizers may differ, for captions are text:

    python -m tools.experiments.cross_play --speakers BASE O/checkpoint_step_N \
        --listeners BASE O/checkpoint_step_N OTHER/checkpoint_step_N:teacher \
        --data_dir D --num_samples 128 --distractors --output cross.json

The change is that to the first speaker with the same listener, paired over regions. Decoding is
greedy, and masks are those of the listener's own answers, as in tools.evaluate.
"""

import argparse
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm

from rl_train.data.loader import eval_loader
from rl_train.distributed.process_group import RankInfo, print0, raise_on_any_rank
from rl_train.evaluation.bootstrap import bootstrap, means, paired_difference, rows_of
from rl_train.evaluation.cycle_metrics import measure_captions
from rl_train.export.load_policy import find_base, open_policy
from rl_train.policies.sa2va_queries import describe
from rl_train.utils.command_line import FlagParser, run_program
from rl_train.utils.io import check_writable
from tools.evaluate import build_dataset
from tools.evaluate_flags import add_data_flags
from tools.experiments.common import run_alone

if TYPE_CHECKING:
    from torch.utils.data import Dataset


TEACHER = ":teacher"  # behind a checkpoint's path


@dataclass
class Spoken:
    """A speaker's captions of n regions."""

    captions: list[str]
    index: list[int]  # of the region in the data set, or of its stand-in
    image_ids: list[str]
    references: list[str]


def build_parser() -> FlagParser:
    parser = FlagParser(
        prog="python -m tools.experiments.cross_play",
        description=__doc__,
    )
    players = partial(parser.add_argument, nargs="+", required=True, metavar="PATH")
    players("--speakers", help="who describe the regions; first the base")
    players("--listeners", help="who find them by the descriptions")
    add_data_flags(parser)
    parser.add_argument(
        "--output", type=Path, help="JSON file for captions, means, intervals, changes and values"
    )
    return parser


def batches_of(
    flag: str, player: str, dataset: "Dataset", args: argparse.Namespace, device: torch.device | str
):
    """Yield (policy, batch, features) of the player that the flag names, batch by batch."""
    path, role = player.removesuffix(TEACHER), "teacher" if player.endswith(TEACHER) else "policy"
    tokens = args.max_completion_length
    policy = open_policy(
        Path(path),
        None,
        role,
        device,
        tokens,
        flag=flag,
        dtype=args.dtype,
        max_tiles=args.max_tiles,
    )
    inputs, others = policy.preprocessor(tokens, args.max_prompt_length), args.distractors
    loader = eval_loader(dataset, inputs, args.batch_size, args.num_workers, distractors=others)
    for batch in tqdm(loader, desc=f"{flag} {player}", leave=False):
        yield policy, batch, policy.encode(batch)
        raise_on_any_rank(
            [f"{flag} {player}: {fault}" for fault in policy.nan_watcher.take().names()]
        )


@torch.no_grad()
def speak(
    speaker: str, dataset: "Dataset", args: argparse.Namespace, device: torch.device | str
) -> Spoken:
    """Return the speaker's greedy captions of all regions."""
    spoken = Spoken([], [], [], [])
    for policy, batch, features in batches_of("--speakers", speaker, dataset, args, device):
        masks, rows = [mask.to(policy.device) for mask in batch.masks], range(len(batch))
        spoken.captions += describe(policy, features, rows, masks, args.max_completion_length)
        spoken.index += batch.index
        spoken.image_ids += batch.image_ids
        spoken.references += batch.captions
    return spoken


@torch.no_grad()
def listen(
    listener: str,
    spoken: dict[str, Spoken],
    dataset: "Dataset",
    args: argparse.Namespace,
    device: torch.device | str,
) -> dict[str, dict]:
    """Return {speaker: {metric: (n,) float64}} of what the listener finds by its captions."""
    columns, start = {speaker: {} for speaker in spoken}, 0
    for policy, batch, features in batches_of("--listeners", listener, dataset, args, device):
        # Both players read the data set in one order.
        positions = slice(start, start + len(batch))
        for speaker, of_speaker in spoken.items():
            check_same_regions(listener, batch.index, speaker, of_speaker.index[positions])
            metrics = measure_captions(
                policy,
                batch,
                features,
                of_speaker.captions[positions],
                args.max_completion_length,
            )
            for name, values in metrics.items():
                columns[speaker].setdefault(name, []).extend(values)
        start = positions.stop
    return {
        speaker: {name: torch.tensor(v, dtype=torch.float64) for name, v in metrics.items()}
        for speaker, metrics in columns.items()
    }


def check_same_regions(listener: str, index: list[int], speaker: str, described: list[int]):
    """Raise ValueError if a region fits only one of the players, so that it has a stand-in."""
    if index != described:
        raise ValueError(
            f"--listeners {listener} read other regions than --speakers {speaker} described: "
            "one of them has no room for a caption, raise --max_prompt_length"
        )


def pair_record(speaker: str, listener: str, values: dict, of_first: dict) -> dict:
    """Return means, intervals and values of a pair, and the changes to the first speaker's."""
    metrics = means(values)
    return dict(
        speaker=speaker,
        listener=listener,
        means=metrics,
        intervals={metric: bootstrap(rows_of(values, metric)) for metric in metrics},
        changes={
            metric: paired_difference(rows_of(of_first, metric), rows_of(values, metric))
            for metric in metrics
        },
        values={name: column.tolist() for name, column in values.items()},
    )


def table(pairs: list[dict], num_samples: int) -> str:
    """Format means and changes of all pairs with their intervals, a block for each metric."""
    lines, first = [], pairs[0]["speaker"]
    for metric in pairs[0]["means"]:
        lines.append(f"{metric}, n = {num_samples}; change: to speaker {first}")
        for pair in pairs:
            low, high = pair["intervals"][metric]
            line = f"  {pair['means'][metric]:.4f} [{low:.4f}, {high:.4f}]"
            change = "  {:+.4f} [{:+.4f}, {:+.4f}]".format(*pair["changes"][metric])
            line += " " * len(change) if pair["speaker"] == first else change
            lines.append(f"{line}  {pair['speaker']} -> {pair['listener']}")
    return "\n".join(lines)


def run(args: argparse.Namespace, ranks: RankInfo):
    """Let all speak, then all listen; print and write. Raises ValueError, naming the flag."""
    if args.output:
        check_writable("--output", args.output, is_file=True)
    for flag, players in (("--speakers", args.speakers), ("--listeners", args.listeners)):
        if len(set(players)) < len(players):
            raise ValueError(f"{flag} {' '.join(players)}: one of them is there twice")
        for player in players:  # said before data are read
            find_base(Path(player.removesuffix(TEACHER)), None, flag)
    dataset, device = build_dataset(args), ranks.device
    spoken = {speaker: speak(speaker, dataset, args, device) for speaker in args.speakers}
    pairs = []
    for listener in args.listeners:
        results = listen(listener, spoken, dataset, args, device)
        first = results[args.speakers[0]]
        pairs += [pair_record(speaker, listener, results[speaker], first) for speaker in spoken]
    print0(table(pairs, len(dataset)))
    if args.output:
        flags = {name: value for name, value in vars(args).items() if name != "output"}
        regions = spoken[args.speakers[0]]
        captions = {speaker: of_speaker.captions for speaker, of_speaker in spoken.items()}
        head = dict(flags=flags, image_ids=regions.image_ids, references=regions.references)
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(head | dict(captions=captions, pairs=pairs)))


def main(argv: list[str] | None = None):
    run_alone(build_parser(), run, argv)


if __name__ == "__main__":
    run_program(main)
