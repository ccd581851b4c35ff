"""Files of a run: one sentence if they are damaged or cannot be written; written whole."""

import fcntl
import json
import os
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import TextIO

from safetensors import SafetensorError

LOCK = ".lock"


class UserFault(ValueError):
    """A fault that the user can mend; the run ends with its sentence alone."""


class DamagedFile(UserFault):
    """A file of a run or of a checkpoint is missing or damaged; the sentence names it."""

    def __init__(self, file: Path, reason: Exception | str):
        super().__init__(f"{file} is missing or damaged: {reason}")


class CannotWrite(Exception):
    """A file or folder of a run cannot be written; the sentence names it."""


@contextmanager
def wrap_write_errors(path: str | Path):
    """Context that turns errors of the disk into CannotWrite, whose sentence names `path`."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        # torch.save raises a RuntimeError of its own over the OSError.
        reason = error.__context__ if isinstance(error, RuntimeError) else error
        if not isinstance(reason, (OSError, SafetensorError)):
            raise
        raise CannotWrite(f"{path} cannot be written: {reason}") from error


def fsync(path: Path):
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(file: Path) -> dict:
    """Return the object in a JSON file. Raises DamagedFile if there is none."""
    try:
        value = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise DamagedFile(file, error) from error
    if not isinstance(value, dict):
        raise DamagedFile(file, f"it holds {value!r:.40}, not an object")
    return value


def write_json(file: Path, value: dict | list, indent: int | None = None):
    """Write a JSON file whole: under another name first, and make its folder."""
    unfinished = file.with_suffix(".tmp")
    with wrap_write_errors(file):
        file.parent.mkdir(exist_ok=True)  # without parents: one that was removed stays away
        unfinished.write_text(json.dumps(value, indent=indent) + "\n")
        # Content first, then the name: after a power cut the file is the old one or the new one.
        fsync(unfinished)
        unfinished.replace(file)
        fsync(file.parent)


def lock(folder: Path) -> TextIO:
    """Return an open file that keeps other runs out of `folder` until it or its process ends.

    The lock is of POSIX, which a DataLoader's worker that outlives its trainer does not inherit.
    Only one may be open in a process: closing another gives the lock up.

    Raises:
        ValueError: another process holds it.
        CannotWrite: the disk knows no locks, or no file can be made there.
    """
    with wrap_write_errors(folder / LOCK):
        file = (folder / LOCK).open("a")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            file.close()
            raise ValueError(f"--output_dir {folder}: another run is writing into it") from error
    return file


def check_writable(flag: str, path: Path, is_file: bool = False):
    """Raise ValueError, beginning with `flag`, if folder or file `path` cannot be written."""
    nearest = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
    try:
        (path.open("a") if is_file and nearest == path else TemporaryFile(dir=nearest)).close()
    except OSError as error:
        raise ValueError(f"{flag} {path} cannot be written: {nearest}: {error.strerror}") from error
