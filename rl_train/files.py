"""Files of a run: reading those that may be damaged, and whether one can be written."""

import json
import os
from pathlib import Path
from tempfile import TemporaryFile


class DamagedFile(ValueError):
    """A file of a run or of a checkpoint is missing or damaged; the sentence names it."""

    def __init__(self, file: Path, reason):
        super().__init__(f"{file} is missing or damaged: {reason}")


def read_json(file: Path) -> dict:
    """The object in a JSON file. Raises DamagedFile if there is none."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise DamagedFile(file, error) from error
    if not isinstance(found, dict):
        raise DamagedFile(file, f"it holds {found!r:.40}, not an object")
    return found


def write_json(file: Path, value, indent: int | None = None):
    """Write a JSON file whole: under another name first, and make its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".tmp")
    unfinished.write_text(json.dumps(value, indent=indent) + "\n")
    unfinished.replace(file)


def give_usual_mode(folder: Path):
    """Give all files of a new folder the mode of any new file; safetensors makes its own 0600."""
    mode = folder.stat().st_mode & 0o666  # the folder's is by the umask
    for file in folder.rglob("*"):
        if file.is_file():
            file.chmod(mode)


def check_writable(flag: str, path: Path, is_file: bool = False):
    """Raise ValueError, beginning with `flag`, if folder or file `path` cannot be written."""
    nearest = next(place for place in (path, *path.parents) if os.path.lexists(place))
    try:
        (path.open("a") if is_file and nearest == path else TemporaryFile(dir=nearest)).close()
    except OSError as error:
        raise ValueError(f"{flag} {path} cannot be written: {nearest}: {error.strerror}") from error
