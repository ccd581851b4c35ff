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
        schedule: of the parts of a base for loop 1.
        few_masks: of the parts of a base for loop 2.
    """

    side: int
    width: int
    vision_layers: int
    llm_layers: int
    schedule: Schedule
    few_masks: Schedule

    @property
    def config(self) -> dict:
        return config_of(self.side, self.width, self.vision_layers, self.llm_layers)


RATES, FEW_RATES = (1.5e-3, 4e-4, 6e-4), (1.5e-3, 4e-4, 4e-4, 1.2e-3)
SIZES = {
    "small": Size(
        side=336,
        width=256,
        vision_layers=4,
        llm_layers=3,
        schedule=Schedule((600, 100, 300), (64,) * 3, RATES),
        few_masks=Schedule((600, 100, 400, 700), (64,) * 4, FEW_RATES),
    ),
    # shows that the commands run
    "tiny": Size(
        side=112,
        width=64,
        vision_layers=1,
        llm_layers=1,
        schedule=Schedule((4, 2, 2), (8,) * 3, RATES),
        few_masks=Schedule((2, 2, 2, 30), (16,) * 4, FEW_RATES),
    ),
}


def train_on_scenes(
    size: Size, data_dir: Path, output_dir: Path, seed: int, dtype: str, num_workers: int
):
    """Train a base on the scenes below `data_dir` into output_dir/base."""
    splits = (data_dir / "train", data_dir / "heldout")
    train_base(
        size.config, VOCAB_SIZE, size.schedule, *splits, output_dir, seed, dtype, num_workers
    )
