"""Flags, regions and process of experiments that choose on some regions and measure on others."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import Subset

from rl_train.config.flags import COUNT, COUNT_OR_0
from rl_train.config.grpo_config import DataConfig
from rl_train.data import DATASETS
from rl_train.data.split import sample_regions, split_dataset
from rl_train.data.workers import reporting_dead_workers
from rl_train.distributed import process_group
from rl_train.distributed.process_group import print0
from rl_train.utils.command_line import FlagParser


def add_region_flags(parser: FlagParser, batch_size: int = 8):
    """Add the flags of `open_regions`, and of how a model is asked about the regions."""
    add = parser.add_argument
    add("--data_dir", required=True, help="folder of regions to choose on")
    add("--eval_data_dir", required=True, help="folder of held-out regions to measure on")
    add("--num_samples", type=COUNT, default=256, help="to choose on, spread over images")
    add("--eval_samples", type=COUNT, default=128, help="held out; as of rl_train.train")
    add_asking_flags(parser, batch_size)


def add_asking_flags(parser: FlagParser, batch_size: int):
    """Add the flags of a data set's format, and of how a model is asked about its regions."""
    add = parser.add_argument
    add("--dataset", choices=list(DATASETS), default="gar", help="format of the data")
    add("--batch_size", type=COUNT, default=batch_size)
    add("--max_completion_length", type=COUNT, default=128)
    add("--max_prompt_length", type=COUNT, default=DataConfig.max_prompt_length)
    add("--num_workers", type=COUNT_OR_0, default=2)
    add("--dtype", choices=["float32", "bfloat16"], default="bfloat16")


def open_regions(
    args: argparse.Namespace, opener: Callable[[str], Any] | None = None
) -> tuple[Subset, Subset]:
    """Return (regions of --data_dir to choose on, held-out regions of --eval_data_dir).

    Args: opener: of --data_dir; None: the reader of --dataset, which opens --eval_data_dir.
    """
    reader = DATASETS[args.dataset]
    training, heldout, damaged = split_dataset(
        opener or reader,
        args.data_dir,
        args.eval_data_dir,
        args.eval_samples,
        1.0,
        eval_opener=reader,
    )
    print0(f"--data_dir {args.data_dir}: {damaged.report}")
    return Subset(training, sample_regions(training.image_keys, args.num_samples)), heldout


def run_alone(
    parser: FlagParser,
    run: Callable[[argparse.Namespace, process_group.RankInfo], None],
    argv: Sequence[str] | None,
):
    """Run an experiment with its flags in one process; a ValueError ends it with its sentence."""
    args, ranks = parser.parse_args(argv), process_group.init()
    try:
        if ranks.world_size > 1:
            raise ValueError("runs as one process")
        reporting_dead_workers(args.num_workers, run, args, ranks)
    except ValueError as error:  # the user's input: one sentence, no traceback
        raise SystemExit(f"{parser.short_name}: {error}") from error
    finally:
        process_group.close()
