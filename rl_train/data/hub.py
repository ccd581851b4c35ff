"""Data sets by their name on the Hugging Face hub."""

from glob import escape
from pathlib import Path

from rl_train.utils.hub import HUB_NAME, fetch


def folder_of(data_dir: str | Path) -> Path:
    """Return `data_dir` as a path. Raises ValueError that names --data_dir if it is no folder."""
    if not Path(data_dir).is_dir():
        raise ValueError(f"--data_dir {data_dir} is not a folder.")
    return Path(data_dir)


def resolve(data_dir: str | Path, patterns: list[str], parts: list[str] | None = None) -> Path:
    """Return the local folder of `data_dir`.

    It is `data_dir` itself if that is a folder. Otherwise the data set "owner/name" is fetched into
    the hub's cache.

    Args:
        patterns: files to fetch, as the hub reads patterns: a star stands for slashes too.
        parts: names of folders, at any depth, to which fetching is limited; None or empty for all.

    Raises:
        ValueError: neither a folder nor a hub name, or the fetch failed; names --data_dir.
    """
    if Path(data_dir).is_dir():
        return Path(data_dir)
    if not HUB_NAME.fullmatch(str(data_dir)):
        raise ValueError(
            f"--data_dir {data_dir} is neither a folder nor the name of a hub data set "
            "(owner/name)."
        )
    folders = [
        prefix for part in parts or [] for prefix in (f"{escape(part)}/", f"*/{escape(part)}/")
    ]
    allowed = [folder + pattern for folder in folders or [""] for pattern in patterns]
    return fetch("--data_dir", str(data_dir), "dataset", allowed)
