"""Data sets by their name on the Hugging Face hub."""

import secrets
from glob import escape
from pathlib import Path

from rl_train.hub import NAME, faults, fetch, missing, not_fetched


def folder_of(data_dir) -> Path:
    """The local folder of `data_dir`. Raises ValueError that names --data_dir if it is none."""
    if not Path(data_dir).is_dir():
        raise ValueError(f"--data_dir {data_dir} is not a folder.")
    return Path(data_dir)


def resolve(data_dir, patterns: list[str], parts=None, split: str | None = None) -> Path:
    """The local folder of `data_dir`: itself if it is one, else that of the data set "owner/name",
    fetched into the hub's cache.

    A data set whose repository holds Arrow shards or annotations.json is taken as it is
    (`huggingface_hub`); any other is loaded by `datasets`, which writes Arrow shards of all its
    splits into its cache; one of them is taken.

    Args:
        patterns: of the files that the reader reads, no others are fetched; parts: names of folders
            of which alone they are, None for all.
        split: of a set that `datasets` loads, default train.

    Raises:
        ValueError: names --data_dir; neither a folder nor a hub name, a missing library, the fetch
            failed, or parts or a split of what has none.
    """
    name = str(data_dir)
    if Path(name).is_dir():
        if split:
            raise ValueError(
                f"--split {split}: --data_dir {name} is a folder, and all of it is read"
            )
        return Path(name)
    if not NAME.fullmatch(name):
        raise ValueError(
            f"--data_dir {name} is neither a folder nor the name of a hub data set (owner/name)."
        )
    try:
        import datasets
    except ImportError as error:
        raise missing("--data_dir", name, error) from error
    folder = fetch("--data_dir", name, "dataset", within(parts, patterns))
    if any(folder.rglob("*.arrow")) or any(folder.rglob("annotations.json")):
        return folder
    if parts:
        raise ValueError(f"--parts {' '.join(parts)}: no such folder of shards in the hub's {name}")
    split = split or "train"
    if not split.isidentifier():  # a slice of one: `datasets` writes the whole
        raise ValueError(f"--split {split}: must be the name of a split")
    try:
        loaded = datasets.load_dataset(name, split=split)
    except faults() as error:  # of an unknown split too
        raise not_fetched("--data_dir", name, error) from error
    if not loaded.cache_files:
        raise ValueError(f"--data_dir {name}: the hub data set holds no file.")
    # Links to this split's shards alone: the folder that they lie in holds those of every split.
    cache = Path(datasets.config.HF_DATASETS_CACHE)
    folder = cache / f"{split}_splits" / name.replace("/", "--")
    folder.mkdir(parents=True, exist_ok=True)
    for k, file in enumerate(loaded.cache_files):
        link = folder / f"data-{k:05d}.arrow.{secrets.token_hex(4)}"
        link.symlink_to(file["filename"])
        link.replace(folder / f"data-{k:05d}.arrow")  # of several ranks the last one stays
    kept = len(loaded.cache_files)  # what the hub had when there were more
    for old in [place for place in folder.glob("data-*.arrow") if int(place.stem[5:]) >= kept]:
        old.unlink(missing_ok=True)
    return folder


def within(parts, patterns: list[str]) -> list[str]:
    """The patterns of files in folders of these names, at any depth; as they are without names.

    As the hub reads them: a star stands for slashes too.
    """
    if not parts:
        return patterns
    places = [place for part in parts for place in (f"{escape(part)}/", f"*/{escape(part)}/")]
    return [place + pattern for place in places for pattern in patterns]
