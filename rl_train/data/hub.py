"""Data sets by their name on the Hugging Face hub."""

import os
import re
from pathlib import Path

PATTERNS = ["*.arrow", "*.json", "*.tar"]  # what the readers read
NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def folder_of(data_dir) -> Path:
    """The local folder of `data_dir`. Raises ValueError that names --data_dir if it is none."""
    if not Path(data_dir).is_dir():
        raise ValueError(f"--data_dir {data_dir} is not a folder.")
    return Path(data_dir)


def resolve(data_dir) -> Path:
    """The local folder of `data_dir`: itself if it is one, else that of the data set "owner/name",
    fetched into the hub's cache.

    A data set whose repository holds Arrow shards or annotations.json is taken as it is
    (`huggingface_hub`); any other is loaded by `datasets`, which writes Arrow shards into its
    cache; its split "train" is taken.

    Raises:
        ValueError: names --data_dir; neither a folder nor a hub name, a missing library, or the
            fetch failed.
    """
    name = str(data_dir)
    if Path(name).is_dir():
        return Path(name)
    if not NAME.fullmatch(name):
        raise ValueError(
            f"--data_dir {name} is neither a folder nor the name of a hub data set (owner/name)."
        )
    try:
        import datasets
        import huggingface_hub
    except ImportError as error:
        raise ValueError(
            f"--data_dir {name} is not a folder, and fetching it from the hub needs {error.name}: "
            "pip install -e '.[hub]', or give a folder."
        ) from error
    try:
        folder = Path(
            huggingface_hub.snapshot_download(name, repo_type="dataset", allow_patterns=PATTERNS)
        )
        if any(folder.rglob("*.arrow")) or any(folder.rglob("annotations.json")):
            return folder
        loaded = datasets.load_dataset(name, split="train")
    except (OSError, ValueError, RuntimeError) as error:  # no connection, name, access or split
        raise ValueError(
            f"--data_dir {name} is not a folder here and could not be fetched from the hub; "
            f"download it on a machine that reaches the hub and give its folder: {error}"
        ) from error
    if not loaded.cache_files:
        raise ValueError(f"--data_dir {name}: the hub data set holds no file.")
    # Links to this split's shards alone: the folder that they lie in holds those of every split.
    cache = Path(datasets.config.HF_DATASETS_CACHE)
    folder = cache / "train_splits" / name.replace("/", "--")
    folder.mkdir(parents=True, exist_ok=True)
    for k, file in enumerate(loaded.cache_files):
        link = folder / f"data-{k:05d}.arrow.{os.getpid()}"
        link.symlink_to(file["filename"])
        link.replace(folder / f"data-{k:05d}.arrow")  # of several ranks the last one stays
    return folder
