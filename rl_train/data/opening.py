"""Data sets as a command line names them: which rows of a folder, and several of them mixed."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rl_train.data import DATASETS, HELDOUT_DATASETS, check_bad_fraction
from rl_train.data.mix import Mix
from rl_train.data.refcoco import NAMES
from rl_train.hub import NAME

PARTS_OF = {"gar": "parts", "dam": "splits"}  # the reader's own word for a folder of its rows


def reader(
    name: str, parts=(), split: str | None = None, image_root=None, heldout=False, flag="--{}"
) -> Callable:
    """A function that opens the data set `name` of a folder: these rows of it.

    Args:
        parts: folders to read, of gar and dam; split: of RefCOCO (default train, or val if
            `heldout`), or of a set on the hub, see `hub.resolve`.
        image_root: see `RefCOCODataset`; flag: how the others are called on the command line.

    Raises:
        ValueError: the data set has no such thing; names the flag.
    """
    how = dict(split=split) if split else {}
    if parts and name not in PARTS_OF:
        words = " ".join(parts)
        raise ValueError(f"{flag.format('parts')} {words}: of {' and '.join(PARTS_OF)}, not {name}")
    if parts:
        how[PARTS_OF[name]] = list(parts)
    if split and name in ("dam", "reasonseg"):
        raise ValueError(f"{flag.format('split')} {split}: {name} has none")
    if image_root and name not in NAMES:
        raise ValueError(f"--image_root {image_root}: of {', '.join(NAMES)}, not {name}")
    if image_root:
        how["image_root"] = image_root
    return partial((HELDOUT_DATASETS if heldout else DATASETS)[name], **how)


def naming(opened: Callable, own: dict[str, str]) -> Callable:
    """The same function of a folder, whose errors name the flag that it was given by.

    Args:
        own: {words of the readers, which know one command line: words in their place}.
    """

    def opening(data_dir):
        try:
            return opened(data_dir)
        except ValueError as error:
            words = str(error)
            for usual, flag in own.items():
                words = words.replace(usual, flag)
            raise ValueError(words) from error

    return opening


@dataclass(frozen=True)
class Ingredient:
    """One data set of --mix."""

    name: str
    parts: tuple[str, ...]
    folder: str
    weight: float

    @classmethod
    def parse(cls, text: str) -> "Ingredient":
        """Of "NAME[/PART,..]:FOLDER[=WEIGHT]". Raises ValueError that names --mix."""
        head, _, place = text.partition(":")
        name, _, parts = head.partition("/")
        folder, equals, weight = place.rpartition("=") if "=" in place else (place, "", "1")
        if name not in DATASETS or not folder:
            known = ", ".join(DATASETS)
            raise ValueError(f"--mix {text}: must be NAME:FOLDER[=WEIGHT], NAME of {known}")
        try:
            value = float(weight)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise ValueError(f"--mix {text}: the weight {weight!r} is no number above 0")
        return cls(name, tuple(filter(None, parts.split(","))), folder, value)

    def reader(self, image_root) -> Callable:
        """See `reader`. Raises ValueError that names --mix."""
        names, flag = self.name in NAMES, f"--mix {self.name}/.. {{}}"
        if names and len(self.parts) > 1:
            raise ValueError(f"--mix {self.name}/{','.join(self.parts)}: one split of it at a time")
        which = dict(split=self.parts[0] if self.parts else None) if names else {}
        which |= {} if names else dict(parts=self.parts)
        return reader(self.name, **which, image_root=image_root if names else None, flag=flag)

    def open(self, read: Callable):
        """The data set, by what `reader` returned. Raises ValueError that names --mix."""
        own = {"--data_dir ": f"--mix {self.name}:", "--parts ": f"--mix {self.name}/.. parts "}
        return naming(read, own)(self.folder)


def readers(data) -> tuple[Callable, Callable]:
    """(what opens --data_dir, with --mix if there is one; what opens --eval_data_dir).

    Args:
        data: `config.DataConfig`.

    Raises:
        ValueError: a flag asks for what its data set does not have.
    """
    ingredients = list(map(Ingredient.parse, data.mix))
    for one in ingredients:
        if not Path(one.folder).is_dir() and not NAME.fullmatch(one.folder):
            raise ValueError(f"--mix {one.name}:{one.folder}: no such folder")
    heldout = data.eval_dataset or data.dataset
    if data.image_root and not {data.dataset, heldout, *(i.name for i in ingredients)} & set(NAMES):
        raise ValueError(
            f"--image_root {data.image_root}: no data set here is of {', '.join(NAMES)}"
        )

    def root(name):
        return data.image_root if name in NAMES else None

    first = reader(data.dataset, data.parts, data.split, root(data.dataset))
    more = (data.eval_parts, data.eval_split, root(heldout), True, "--eval_{}")
    own = {f"--{name} ": f"--eval_{name} " for name in ("data_dir", "parts", "split")}
    last = naming(reader(heldout, *more), own)
    opened = [i.reader(data.image_root) for i in ingredients]
    if not ingredients:
        return first, last

    def mixed(data_dir):
        sets = [first(data_dir), *(i.open(read) for read, i in zip(opened, ingredients))]
        labels = unique([data.dataset, *(i.name for i in ingredients)])
        for label, dataset in zip(labels, sets):  # the whole may hide what a small one is like
            check_bad_fraction(dataset.report(), 0, data.max_bad_fraction, f"{label}: ")
        return Mix(dict(zip(labels, sets)), [1.0, *(i.weight for i in ingredients)])

    return mixed, last


def unique(names: list[str]) -> list[str]:
    """The names, the second of two alike with .2 behind it."""
    seen, found = Counter(), []
    for name in names:
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name}.{seen[name]}")
    return found
