"""Files of a run: one sentence if they are damaged or cannot be written; written whole."""

import errno
import fcntl
import json
import os
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import TextIO

from safetensors import SafetensorError
from tqdm import tqdm

LOCK = ".lock"
# Errors of a disk that lacks an operation, such as some network and FUSE disks.
NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL}
NO_FSYNC = {errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
_warned: set[str] = set()  # subjects of `warn_once`


class UserFault(ValueError):
    """A fault that the user can mend; the run ends with its sentence alone."""


class DamagedFile(UserFault):
    """A file of a run or of a checkpoint is missing or damaged; the sentence names it."""

    def __init__(self, file: Path, reason: Exception | str):
        if isinstance(reason, OSError) and reason.strerror:
            reason = reason.strerror  # without the file's name, which stands before it
        super().__init__(f"{file} is missing or damaged: {reason}")


class CannotWrite(Exception):
    """A file or folder of a run cannot be written; the sentence names it."""


def warn(sentence: str):
    """Print a warning without breaking a progress bar; the run goes on."""
    tqdm.write(f"rl_train: warning: {sentence}", file=sys.stderr)


def warn_once(subject: str, sentence: str):
    """Print a warning, but only the first one of its subject in this process."""
    if subject not in _warned:
        _warned.add(subject)
        warn(sentence)


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
    """Wait until a file's content, or a folder's list of names, is on the disk.

    A disk that cannot be waited for is named in a warning.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NO_FSYNC:
            raise
        warn_once(
            "fsync",
            f"the disk of {path} cannot be waited for (fsync: {error.strerror}): after a loss of "
            "power the last files may be missing there",
        )
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
    unfinished = file.with_name(f".{file.name}.rl_train_unfinished")  # no name of a user's file
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
    Only one may be open in a process: closing another gives the lock up. A disk without locks is
    named in a warning, and nothing keeps other runs out then.

    Raises:
        ValueError: another process holds it.
        CannotWrite: no file can be made there.
    """
    with wrap_write_errors(folder / LOCK):
        file = (folder / LOCK).open("a")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            file.close()
            raise ValueError(f"--output_dir {folder}: another run is writing into it") from error
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            warn_once(
                "lock",
                f"the disk of --output_dir {folder} has no locks ({error.strerror}): nothing keeps "
                "a second run out of the folder, make sure that none writes into it",
            )
    return file


def remove_folder(folder: Path):
    """Remove a folder with all that is in it; what cannot be removed is named in a warning.

    On a network disk a file that somebody reads keeps its folder from being removed.
    """
    try:
        shutil.rmtree(folder)
    except OSError as error:
        warn(f"{folder} cannot be removed now ({error}); the next --resume removes it")


def check_writable(flag: str, path: Path, is_file: bool = False):
    """Raise ValueError, beginning with `flag`, if folder or file `path` cannot be written."""
    nearest = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
    try:
        (path.open("a") if is_file and nearest == path else TemporaryFile(dir=nearest)).close()
    except OSError as error:
        raise ValueError(f"{flag} {path} cannot be written: {nearest}: {error.strerror}") from error
