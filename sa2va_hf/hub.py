"""Find models and data sets: a folder, or a name on the Hugging Face hub that is downloaded."""

import re
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
# Weights, tokenizer, card and licence of a model, all in its repository's top folder. No program,
# no pickle.
MODEL_FILES = ["*.safetensors", "*.json", "merges.txt", "vocab.txt", "tokenizer.model", "*.jinja"]
MODEL_FILES += ["README.md", "LICENSE*"]
# Files and folders of a run of `rl_train`, by which a run is told from a model.
CHECKPOINT_FILE, FINAL_MODEL = "training_state.pt", "final_model"
# Errors of a download without connection, name or access. The last is the base of all errors of
# the HTTP library below huggingface_hub, such as a proxy's refusal; not all of them are OSErrors.
DOWNLOAD_ERRORS = (OSError, ValueError, RuntimeError, HfHubHTTPError.__bases__[0])


def model_folder(flag: str, path: str | Path) -> Path:
    """Return the local folder of a model, see `local_folder`.

    Raises:
        ValueError: also if it is a run's output folder or one of its checkpoints; gives the command
            that makes a model of it.
    """
    folder = local_folder(flag, path, MODEL_FILES, ignore_patterns=["*/*"])
    refuse_run(flag, folder)
    return folder


def refuse_run(flag: str, folder: Path):
    """Raise ValueError if `folder` is a checkpoint or the output folder of a run.

    A checkpoint holds what was trained, without the base that it changes.
    """
    is_checkpoint = (folder / CHECKPOINT_FILE).is_file()
    run = folder.resolve().parent if is_checkpoint else folder
    checkpoints = [file.parent for file in folder.glob(f"checkpoint_*/{CHECKPOINT_FILE}")]
    if not is_checkpoint and (not checkpoints or (folder / "model.safetensors").is_file()):
        return
    newest = max(checkpoints, key=lambda path: path.stat().st_mtime, default=folder)
    checkpoint = folder if is_checkpoint else newest
    what = "a checkpoint of a run" if is_checkpoint else "the output folder of a run"
    merged_hint = ""
    if (final := run / FINAL_MODEL).is_dir():
        merged_hint = f"give the model that the run merged at its end, {final}, or "
    raise ValueError(
        f"{flag} {folder} is {what}, not a model: {merged_hint}make one: python -m tools.export "
        f"--checkpoint {checkpoint} --output {run / 'exported'}"
    )


def local_folder(
    flag: str,
    path: str | Path,
    patterns: list[str],
    repo_type: str = "model",
    ignore_patterns: list[str] | None = None,
) -> Path:
    """Return `path` if it is a folder, else download that repository into the hub's cache.

    Args:
        flag: the flag whose value `path` is.
        patterns: files to download, as the hub reads patterns: a star stands for slashes too.
        repo_type: "model" or "dataset".

    Raises:
        ValueError: `path` is neither a folder nor a name, or the download failed; names the flag.
    """
    if Path(path).is_dir():
        return Path(path)
    if not HUB_NAME.fullmatch(str(path)):
        raise ValueError(
            f"{flag} {path}: no such folder, nor is it a {repo_type}'s name (owner/name)"
        )
    try:
        folder = huggingface_hub.snapshot_download(
            str(path), repo_type=repo_type, allow_patterns=patterns, ignore_patterns=ignore_patterns
        )
    except DOWNLOAD_ERRORS as error:
        raise ValueError(
            f"{flag} {path} is not a folder here and could not be fetched from the hub; "
            "download it on a machine that reaches the hub and give its folder: "
            + " ".join(str(error).split())
        ) from error
    return Path(folder)
