"""Data sets as flags name them: --dataset, --data_mixture, --eval_data_dir, --subsets."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from rl_train.config.grpo_config import DataConfig
from rl_train.data.base import RegionDataset
from rl_train.data.errors import check_bad_fraction
from rl_train.data.mixture import MixtureDataset
from rl_train.data.registry import (
    DATASETS,
    EVAL_DATASETS,
    WITH_IMAGE_ROOT,
    Opener,
    opener_of,
)

ENTRY = re.compile(r"(?P<name>[^/:]+)(/(?P<subsets>[^:]+))?:(?P<folder>.+)")
# Its data set is read by module:Class of the user.
OWN_ENTRY = re.compile(r"(?P<name>[\w.]+:[A-Za-z_]\w*)(/(?P<subsets>[^:]+))?:(?P<folder>.+)")
WEIGHTED_ENTRY = re.compile(r"(?P<entry>.+?)(=(?P<weight>\d+\.?\d*|\.\d+))?")


@dataclass(frozen=True)
class MixtureEntry:
    """A data set named by one word: an entry of --data_mixture, or --eval_data_dir."""

    name: str
    subsets: tuple[str, ...]
    folder: str
    weight: float = 1.0

    @classmethod
    def parse(cls, text: str) -> "MixtureEntry":
        """Parse "NAME[/SUBSET,..]:FOLDER[=WEIGHT]". Raises ValueError that names --data_mixture."""
        weighted = WEIGHTED_ENTRY.fullmatch(text)
        match = weighted and match_entry(weighted["entry"], DATASETS)
        weight = float(weighted["weight"] or 1) if match else 0
        if not weight:
            raise ValueError(
                f"--data_mixture {text}: must be NAME[/SUBSET,..]:FOLDER[=WEIGHT], NAME of "
                f"{', '.join(DATASETS)} or module:Class, WEIGHT above 0"
            )
        return cls(match["name"], split_subsets(match["subsets"]), match["folder"], weight)

    @classmethod
    def parse_eval(cls, text: str, default_name: str) -> "MixtureEntry":
        """Parse "[NAME[/SUBSET,..]:]FOLDER". Raises ValueError that names --eval_data_dir.

        Args:
            default_name: of the data set if the text is only a folder.
        """
        match = match_entry(text, EVAL_DATASETS)
        if match and (match["name"] in EVAL_DATASETS or not Path(text).is_dir()):
            return cls(match["name"], split_subsets(match["subsets"]), match["folder"])
        if ENTRY.fullmatch(text) and not Path(text).is_dir():
            raise ValueError(
                f"--eval_data_dir {text}: must be [NAME[/SUBSET,..]:]FOLDER, NAME of "
                f"{', '.join(EVAL_DATASETS)} or module:Class"
            )
        return cls(default_name, (), text)

    def opener(self, image_root: str | None, is_eval: bool = False) -> Opener:
        """Return the function that opens it in its folder."""
        flag = "--eval_data_dir" if is_eval else "--data_mixture"
        named = f"{flag} " if is_eval else f"{flag} {self.name}:"
        return opener_of(
            self.name,
            subsets=self.subsets,
            image_root=image_root if self.name in WITH_IMAGE_ROOT else None,
            is_eval=is_eval,
            subsets_flag=f"{flag} {self.name}/{','.join(self.subsets)}",
            folder_flag=named,
            name_flag=flag,
        )


def match_entry(text: str, known: Collection[str]) -> re.Match | None:
    """Return the match of NAME[/SUBSET,..]:FOLDER, NAME among the `known` or module:Class."""
    match = ENTRY.fullmatch(text)
    return match if match and match["name"] in known else OWN_ENTRY.fullmatch(text)


def split_subsets(text: str | None) -> tuple[str, ...]:
    """Return the subsets of "SUBSET,..", none of None."""
    return tuple(text.split(",")) if text else ()


def eval_entry(data: DataConfig) -> MixtureEntry | None:
    """Return what --eval_data_dir names, or None without the flag."""
    return MixtureEntry.parse_eval(data.eval_data_dir, data.dataset) if data.eval_data_dir else None


def dataset_openers(data: DataConfig) -> tuple[Opener, Opener]:
    """Return the functions that open --data_dir, with --data_mixture if given, and --eval_data_dir.

    Raises:
        ValueError: a flag asks for what its data set does not have.
    """
    entries = [MixtureEntry.parse(text) for text in data.data_mixture]
    names = [data.dataset, *(entry.name for entry in entries)]
    evaluation = eval_entry(data)
    all_names = {*names, evaluation.name} if evaluation else set(names)
    if data.image_root and not all_names & set(WITH_IMAGE_ROOT):
        raise ValueError(f"--image_root: no data set here is one of {', '.join(WITH_IMAGE_ROOT)}")
    image_root = data.image_root if data.dataset in WITH_IMAGE_ROOT else None
    train = opener_of(data.dataset, data.subsets, image_root)
    if evaluation:
        evaluation.opener(data.image_root, is_eval=True)  # refuses what it does not have

    def open_eval(eval_data_dir: str) -> RegionDataset:
        entry = MixtureEntry.parse_eval(str(eval_data_dir), data.dataset)
        return entry.opener(data.image_root, is_eval=True)(entry.folder)

    openers = [entry.opener(data.image_root) for entry in entries]
    if not entries:
        return train, open_eval

    def open_mixture(data_dir: str) -> MixtureDataset:
        folders = [entry.folder for entry in entries]
        datasets = [train(data_dir), *(opener(f) for opener, f in zip(openers, folders))]
        labels = number_repeats(names)
        for label, dataset in zip(labels, datasets):  # the sum would hide a small bad one
            check_bad_fraction(dataset.report(), 0, data.max_bad_fraction, f"{label}: ")
        weights = [1.0, *(entry.weight for entry in entries)]
        return MixtureDataset(dict(zip(labels, datasets)), weights)

    return open_mixture, open_eval


def number_repeats(names: list[str]) -> list[str]:
    """Return the names; a repeated name gets .2, .3 and so on."""
    counts = [names[: k + 1].count(name) for k, name in enumerate(names)]
    return [name if count == 1 else f"{name}.{count}" for name, count in zip(names, counts)]
