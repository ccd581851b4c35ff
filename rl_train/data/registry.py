"""Data sets as a command line names them: the reader of each, and several of them mixed."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rl_train.config.grpo_config import DataConfig
from rl_train.data import DATASETS, EVAL_DATASETS, check_bad_fraction
from rl_train.data.base import RegionDataset
from rl_train.data.mixture import MixtureDataset
from rl_train.data.refcoco import REFCOCO_NAMES

Opener = Callable[[str], RegionDataset]  # takes the folder
# {flag: {data set that takes it: parameter of its reader}}.
READER_PARAMETERS = {
    "parts": {"gar": "parts", "dam": "splits"},
    "split": dict.fromkeys(REFCOCO_NAMES, "split"),
    "image_root": dict.fromkeys(REFCOCO_NAMES, "image_root"),
}
ENTRY = re.compile(
    r"(?P<name>[^/:]+)(/(?P<parts>[^:]+))?:(?P<folder>.+?)(=(?P<weight>\d+\.?\d*|\.\d+))?"
)


def opener_of(
    name: str,
    parts: Sequence[str] = (),
    split: str | None = None,
    image_root: str | None = None,
    is_eval: bool = False,
    prefix: str = "--",
    folder_flag: str = "--data_dir ",
) -> Opener:
    """Return the function that opens the data set `name` in a folder.

    Args:
        parts: folders to read.
        split: default train, or val if `is_eval`.
        image_root: see `RefCOCODataset`.
        prefix: of the flags `parts` and `split` in errors.
        folder_flag: the flag that names the folder, in errors.

    Raises:
        ValueError: the data set has no such thing; names the flag.
    """
    options = dict(parts=list(parts), split=split, image_root=image_root)
    for flag, value in options.items():
        if value and name not in READER_PARAMETERS[flag]:
            words = f"{'--' if flag == 'image_root' else prefix}{flag}"
            raise ValueError(f"{words}: only for {', '.join(READER_PARAMETERS[flag])}, not {name}")
    reader_class = (EVAL_DATASETS if is_eval else DATASETS)[name]
    keywords = {READER_PARAMETERS[flag][name]: value for flag, value in options.items() if value}

    def open_folder(data_dir: str) -> RegionDataset:
        try:
            return reader_class(data_dir, **keywords)
        except ValueError as error:
            raise ValueError(str(error).replace("--data_dir ", folder_flag)) from error

    return open_folder


@dataclass(frozen=True)
class MixtureEntry:
    """One data set of --mix."""

    name: str
    parts: tuple[str, ...]
    folder: str
    weight: float

    @classmethod
    def parse(cls, text: str) -> "MixtureEntry":
        """Parse "NAME[/PART,..]:FOLDER[=WEIGHT]". Raises ValueError that names --mix."""
        match = ENTRY.fullmatch(text)
        weight = float(match["weight"] or 1) if match else 0
        if not weight or match["name"] not in DATASETS:
            raise ValueError(
                f"--mix {text}: must be NAME[/PART,..]:FOLDER[=WEIGHT], NAME of "
                f"{', '.join(DATASETS)}, WEIGHT above 0"
            )
        parts = tuple(match["parts"].split(",")) if match["parts"] else ()
        return cls(match["name"], parts, match["folder"], weight)

    def opener(self, image_root: str | None) -> Opener:
        """Return the function that opens it in its folder; a RefCOCO's part is its split."""
        has_splits = self.name in REFCOCO_NAMES
        return opener_of(
            self.name,
            parts=() if has_splits else self.parts,
            split=",".join(self.parts) if has_splits else None,
            image_root=image_root if has_splits else None,
            prefix=f"--mix {self.name}/.. ",
            folder_flag=f"--mix {self.name}:",
        )


def readers(data: DataConfig) -> tuple[Opener, Opener]:
    """Return the functions that open --data_dir, with --mix if given, and --eval_data_dir.

    Raises:
        ValueError: a flag asks for what its data set does not have.
    """
    entries = [MixtureEntry.parse(text) for text in data.mix]
    eval_name = data.eval_dataset or data.dataset
    names = [data.dataset, *(entry.name for entry in entries)]
    if data.image_root and not {eval_name, *names} & set(REFCOCO_NAMES):
        raise ValueError(f"--image_root: no data set here is one of {', '.join(REFCOCO_NAMES)}")
    roots = dict.fromkeys(REFCOCO_NAMES, data.image_root)
    train = opener_of(data.dataset, data.parts, data.split, roots.get(data.dataset))
    evaluation = opener_of(
        eval_name,
        data.eval_parts,
        data.eval_split,
        roots.get(eval_name),
        is_eval=True,
        prefix="--eval_",
        folder_flag="--eval_data_dir ",
    )
    openers = [entry.opener(data.image_root) for entry in entries]
    if not entries:
        return train, evaluation

    def open_mixture(data_dir: str) -> MixtureDataset:
        folders = [entry.folder for entry in entries]
        datasets = [train(data_dir), *(opener(f) for opener, f in zip(openers, folders))]
        labels = unique(names)
        for label, dataset in zip(labels, datasets):  # the sum would hide a small bad one
            check_bad_fraction(dataset.report(), 0, data.max_bad_fraction, f"{label}: ")
        weights = [1.0, *(entry.weight for entry in entries)]
        return MixtureDataset(dict(zip(labels, datasets)), weights)

    return open_mixture, evaluation


def unique(names: list[str]) -> list[str]:
    """Return the names; a repeated name gets .2, .3 and so on."""
    counts = [names[: k + 1].count(name) for k, name in enumerate(names)]
    return [name if count == 1 else f"{name}.{count}" for name, count in zip(names, counts)]
