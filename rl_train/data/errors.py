"""Bad data: one sample that turns out to be damaged, and too many bad ones."""

import pickle
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from rl_train.utils.io import UserFault

# What the libraries raise that read a file of other contents than they expect.
UNREADABLE = (
    OSError,
    EOFError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    RecursionError,
    OverflowError,
    MemoryError,
    tarfile.TarError,
    pickle.UnpicklingError,
    pa.ArrowException,
)


class DamagedSample(ValueError):
    """A sample whose image does not decode or that does not fit the model; opening cannot know."""

    def __init__(self, image_id: str, reason: str):
        super().__init__(image_id, reason)
        self.image_id, self.reason = image_id, reason

    def __str__(self):
        return f"{self.image_id}: {self.reason}"


class BadData(UserFault):
    """More of the data set is bad than --max_bad_fraction allows, or a file is unreadable."""


@contextmanager
def reading(path: Path, contents: str) -> Iterator[None]:
    """A context that reads a file; a fault in it becomes BadData that names the file.

    Args:
        contents: what the file should hold, such as "tar file".
    """
    try:
        yield
    except BadData:  # it names the file already
        raise
    except UNREADABLE as error:
        raise BadData(f"{path} is not a readable {contents}: {error!r}") from error


def check_bad_fraction(report: dict, num_damaged: int, limit: float, where: str = ""):
    """Raise BadData, with the counts by reason, if more than the share `limit` of a set is bad.

    Bad is what its `report` says was skipped and `num_damaged`, which turned out so since. The
    sentence begins with `where`.
    """
    total = report["kept"] + sum(report["skipped"].values())
    # A sum of counters leaves out what is 0.
    reasons = Counter(report["skipped"]) + Counter({"damaged when decoded": num_damaged})
    bad = reasons.total()
    if bad > limit * total:
        words = ", ".join(f"{reason}: {count}" for reason, count in reasons.most_common())
        raise BadData(
            f"{where}{bad} of {total} regions ({bad / total:.1%}) are bad, more than "
            f"--max_bad_fraction {limit:g}: {words}"
        )


class DamagedSamples:
    """The samples of a data set that turned out damaged, each once; at first none.

    Raises BadData if what opening skipped, of its `report`, is above --max_bad_fraction already.
    """

    def __init__(self, report: dict, limit: float):
        self.report, self.limit, self.names = report, limit, set()
        self.check()

    def add(self, names: Iterable[str]) -> list[str]:
        """Those of `names` that are new, in order; they are known from now on."""
        new = sorted(set(names) - self.names)
        self.names.update(new)
        return new

    def state_dict(self) -> dict:
        return dict(names=sorted(self.names))

    def load_state_dict(self, state: dict):
        self.names = set(state["names"])

    def check(self):
        """Raise BadData if there are too many in all."""
        check_bad_fraction(self.report, len(self.names), self.limit)
