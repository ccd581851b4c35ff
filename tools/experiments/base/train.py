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
        loop1, loop2: schedules of the parts of a base for each loop.
    """

    side: int
    width: int
    vision_layers: int
    llm_layers: int
    loop1: Schedule
    loop2: Schedule

    @property
    def config(self) -> dict:
        return config_of(self.side, self.width, self.vision_layers, self.llm_layers)


RATES1, RATES2 = (1.5e-3, 4e-4, 6e-4), (1.5e-3, 4e-4, 4e-4, 1.2e-3)
SIZES = {
    "small": Size(
        side=336,
        width=256,
        vision_layers=4,
        llm_layers=3,
        loop1=Schedule((600, 100, 300), (64,) * 3, RATES1),
        loop2=Schedule((600, 100, 400, 700), (64,) * 4, RATES2),
    ),
    # shows that the commands run
    "tiny": Size(
        side=112,
        width=64,
        vision_layers=1,
        llm_layers=1,
        loop1=Schedule((4, 2, 2), (8,) * 3, RATES1),
        loop2=Schedule((2, 2, 2, 30), (16,) * 4, RATES2),
    ),
}


def train_on_scenes(
    size: Size, data_dir: Path, output_dir: Path, seed: int, dtype: str, num_workers: int
):
    """Train a base on the scenes below `data_dir` into output_dir/base."""
    splits = (data_dir / "train", data_dir / "heldout")
    train_base(size.config, VOCAB_SIZE, size.loop1, *splits, output_dir, seed, dtype, num_workers)
