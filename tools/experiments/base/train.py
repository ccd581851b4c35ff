"""Sizes of a base, and its training on the lab's scenes."""

from dataclasses import dataclass
from pathlib import Path

from tools.demo.warm_start import Schedule, train_base
from tools.experiments.base.model import config_of

VOCAB_SIZE = 900  # of the tokenizer at most, without special tokens


@dataclass(frozen=True)
class Size:
    """A base's sizes, and how long it is trained.

    Attributes:
        side: pixels of the image that the vision model sees.
    """

    side: int
    width: int
    vision_layers: int
    llm_layers: int
    schedule: Schedule


SIZES = {
    "small": Size(336, 256, 4, 3, Schedule((600, 100, 300), (64, 64, 64), (1.5e-3, 4e-4, 6e-4))),
    # shows that the commands run
    "tiny": Size(112, 64, 1, 1, Schedule((4, 2, 2), (8, 8, 8), (1e-3, 4e-4, 6e-4))),
}


def train_on_scenes(
    size: Size, data_dir: Path, output_dir: Path, seed: int, dtype: str, num_workers: int
):
    """Train a base on the scenes below `data_dir` into output_dir/base."""
    config = config_of(size.side, size.width, size.vision_layers, size.llm_layers)
    splits = (data_dir / "train", data_dir / "heldout")
    train_base(config, VOCAB_SIZE, size.schedule, *splits, output_dir, seed, dtype, num_workers)
