"""Files of a run: read if damaged, written whole or not at all, with a sentence if they cannot."""

import fcntl
import json
import os
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

from safetensors import SafetensorError

LOCK = ".lock"


class DamagedFile(ValueError):
    """A file of a run or of a checkpoint is missing or damaged; the sentence names it."""

    def __init__(self, file: Path, reason):
        super().__init__(f"{file} is missing or damaged: {reason}")


class CannotWrite(Exception):
    """A file or folder of a run cannot be written; the sentence names it."""


@contextmanager
def writing(place: Path):
    """A context in which faults of the disk become CannotWrite, whose sentence names `place`."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        hidden = error.__context__  # torch.save raises a RuntimeError of its own over it
        reason = hidden if isinstance(hidden, OSError) else error
        if not isinstance(reason, (OSError, SafetensorError)):
            raise
        words = reason.strerror if isinstance(reason, OSError) else reason
        raise CannotWrite(f"{place} cannot be written: {words or reason}") from error


class Appended:
    """A file that grows by whole pieces. Raises CannotWrite, of one that has been removed too.

    Nothing waits in a buffer: what `write` has returned from outlives a kill, what `sync` has
    returned from a loss of power.
    """

    def __init__(self, path: Path):
        self.path = path
        with writing(path):
            self.file = path.open("ab", buffering=0)

    def write(self, piece: bytes):
        with writing(self.path):
            self.path.stat()
            rest = memoryview(piece)
            while rest:
                rest = rest[self.file.write(rest) :]

    def sync(self):
        with writing(self.path):
            os.fsync(self.file.fileno())

    def close(self):
        self.file.close()


def sync(place: Path):
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(place, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
    unfinished = file.with_suffix(".tmp")
    with writing(file):
        file.parent.mkdir(exist_ok=True)  # without parents: one that was removed stays away
        unfinished.write_text(json.dumps(value, indent=indent) + "\n")
        sync(unfinished)
        unfinished.replace(file)
        sync(file.parent)


def claim(folder: Path):
    """An open file that keeps other runs out of `folder` until it is closed or its process ends.

    The lock is of POSIX, which a DataLoader's worker that outlives its trainer does not inherit.
    Only one may be open in a process: closing another gives the lock up.

    Raises:
        ValueError: another process holds it.
        CannotWrite: the disk knows no locks, or no file can be made there.
    """
    with writing(folder / LOCK):
        file = (folder / LOCK).open("a")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            file.close()
            raise ValueError(f"--output_dir {folder}: another run is writing into it") from error
    return file


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
