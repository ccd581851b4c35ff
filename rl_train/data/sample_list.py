"""The training samples that a file lists, such as those that `tools.rank_samples` finds useful."""

import json
from pathlib import Path

from torch.utils.data import Subset

from rl_train.data.base import RegionDataset
from rl_train.data.distractors import unwrap_subset


def read_sample_list(file: str | Path) -> dict[str, int]:
    """Return {image_id: first row that names it, from 1 on} of a --sample_list.

    A row is an image_id, or a JSON object that has one; empty rows are skipped.

    Raises:
        ValueError: the file cannot be read or names nothing, or a row is a damaged object.
    """
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--sample_list {file}: cannot be read: {error}") from error
    row_of = {}
    for number, line in enumerate(text.split("\n"), 1):
        if not (name := line.strip()):
            continue
        if name.startswith("{"):
            try:
                name = str(json.loads(name)["image_id"])
            except (ValueError, KeyError) as error:
                raise ValueError(
                    f"--sample_list {file}, row {number}: is no JSON object with an image_id; "
                    "write an image_id, or a row of tools.rank_samples"
                ) from error
        row_of.setdefault(name, number)
    if not row_of:
        raise ValueError(
            f"--sample_list {file}: names no sample; leave the flag out to train on all"
        )
    return row_of


def listed_samples(samples: RegionDataset | Subset, file: str | Path) -> Subset:
    """Return the samples whose image_id the file lists, in the order of the data set.

    Raises ValueError, with the first row that names none of the samples.
    """
    row_of, indices, listed_ids = read_sample_list(file), [], set()
    dataset, index = unwrap_subset(samples)
    for position, i in enumerate(index.tolist()):
        if (name := dataset.image_id(i)) in row_of:
            indices.append(position)
            listed_ids.add(name)
    if missing := row_of.keys() - listed_ids:
        name = min(missing, key=row_of.get)
        raise ValueError(
            f"--sample_list {file}, row {row_of[name]}: no training sample has the image_id {name} "
            f"({len(missing)} of {len(row_of)} are not there); take the row out, or rank this data"
        )
    return Subset(samples, indices)
