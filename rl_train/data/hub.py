"""Download data sets by their name on the Hugging Face hub."""

from glob import escape
from pathlib import Path


def resolve(data_dir: str | Path, patterns: list[str], parts: list[str] | None = None) -> Path:
    """Return the local folder of a data set, see `local_folder`.

    Args:
        patterns: files to download, as the hub reads patterns: a star stands for slashes too.
        parts: names of folders, at any depth, to which the download is limited; None or empty for
            all.

    Raises:
        ValueError: neither a folder nor a hub name, or the download failed; names --data_dir.
    """
    if Path(data_dir).is_dir():
        return Path(data_dir)
    from sa2va_hf.hub import local_folder  # here: it brings torch, which readers do without

    folders = [
        prefix for part in parts or [] for prefix in (f"{escape(part)}/", f"*/{escape(part)}/")
    ]
    allowed = [folder + pattern for folder in folders or [""] for pattern in patterns]
    return local_folder("--data_dir", data_dir, allowed, repo_type="dataset")
