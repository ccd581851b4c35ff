"""The text log of a run: what its first rank prints, in output_dir/train.log."""

import shlex
import sys
import traceback
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import TextIO

from rl_train.distributed.process_group import also_printed_to
from rl_train.utils.io import CannotWrite, wrap_write_errors

FILE = "train.log"


class TextLog(AbstractContextManager):
    """Context in which what `print0` prints also goes to a file, once `open` has named it.

    Texts from before `open` are kept and written then. The file is never cut: a resumed run
    appends to it. The error that ends the context is written too.
    """

    def __init__(self):
        self.path: Path | None = None
        self.file: TextIO | None = None
        self.pending: list[str] = []
        self.listening = also_printed_to(self.write)

    def __enter__(self):
        self.listening.__enter__()
        return self

    def open(self, folder: Path):
        """Append to the log in `folder` from now on. Raises CannotWrite."""
        self.path = folder / FILE
        with wrap_write_errors(self.path):
            self.file = self.path.open("a", encoding="utf-8", errors="backslashreplace")
        command = shlex.join([sys.executable, *sys.argv])
        self.write(f"-- {datetime.now():%Y-%m-%d %H:%M:%S} {command}", first=True)

    def write(self, text: str, first: bool = False):
        """Write a text on a line of its own; it is in the file when this returns."""
        self.pending.insert(0 if first else len(self.pending), text)
        if self.file:
            with wrap_write_errors(self.path):
                self.file.write("\n".join([*self.pending, ""]))
                self.file.flush()
            self.pending = []

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ):
        self.listening.__exit__(error_type, error, trace)
        if not self.file:
            return
        # An error that ends the run goes on, even if a full disk does not take it.
        with suppress(CannotWrite) if error else nullcontext(), wrap_write_errors(self.path):
            if isinstance(error, SystemExit):
                if isinstance(error.code, str):  # a sentence; a number has been explained before it
                    self.write(error.code)
            elif error:
                self.write("".join(traceback.format_exception(error)).rstrip())
            self.file.close()
