"""Folders by their name on the Hugging Face hub, and models; data sets: `rl_train.data.hub`."""

import re
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
# Of a model: weights and the tokenizer, all in its repository's own folder. No program, no pickle.
MODEL_FILES = ["*.safetensors", "*.json", "merges.txt", "vocab.txt", "tokenizer.model", "*.jinja"]


def model_folder(flag: str, path: str | Path) -> Path:
    """The local folder of `path`: itself if it is one, else that of the model "owner/name", fetched
    into the hub's cache.

    Raises ValueError: neither, or it could not be fetched; names the flag.
    """
    if Path(path).is_dir():
        return Path(path)
    if not HUB_NAME.fullmatch(str(path)):
        raise ValueError(f"{flag} {path}: no such folder, nor is it a model's name (owner/name)")
    return fetch(flag, str(path), None, MODEL_FILES, ignore_patterns=["*/*"])


def fetch(
    flag: str,
    name: str,
    kind: str | None,
    patterns: list[str],
    ignore_patterns: list[str] | None = None,
) -> Path:
    """The folder in the hub's cache of the repository `name` with its files that match `patterns`.

    Args:
        kind: "dataset", or None for a model.

    Raises:
        ValueError: names the flag; the fetch failed.
    """
    try:
        folder = huggingface_hub.snapshot_download(
            name, repo_type=kind, allow_patterns=patterns, ignore_patterns=ignore_patterns
        )
        return Path(folder)
    except faults() as error:
        raise not_fetched(flag, name, error) from error


def faults() -> tuple[type[Exception], ...]:
    """What a fetch raises without connection, name or access."""
    # Its first base is that of all errors of the HTTP library below, as of a proxy that refuses,
    # which are no OSErrors in each of them.
    return OSError, ValueError, RuntimeError, HfHubHTTPError.__bases__[0]


def not_fetched(flag: str, name: str, error: Exception) -> ValueError:
    """What says why a fetch failed."""
    return ValueError(
        f"{flag} {name} is not a folder here and could not be fetched from the hub; "
        f"download it on a machine that reaches the hub and give its folder: {error}"
    )
