"""Errors of data: a damaged sample, an unreadable file, too many bad regions."""

import csv
import pickle
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from rl_train.utils.io import UserFault

# {"kept", "rows", "resized_masks": counts; "skipped": {reason: regions}; "first_skipped": {reason:
# where the first of them stand}} of a data set
Report = dict[str, int | dict[str, int] | dict[str, list[str]]]
NUM_PLACES = 3  # that are named for each reason
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
    csv.Error,
)


class DamagedSample(ValueError):
    """A sample whose image does not decode, or that does not fit the model; found on access."""

    def __init__(self, image_id: str, reason: str):
        super().__init__(image_id, reason)
        self.image_id, self.reason = image_id, reason

    def __str__(self):
        return f"{self.image_id}: {self.reason}"


class BadData(UserFault):
    """Error of data worse than --max_bad_fraction allows, or of an unreadable file."""


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


def describe_skipped(report: Report, num_damaged: int = 0) -> str:
    """Return the reasons why regions are bad, their counts and where the first of them stand."""
    # A sum of counters leaves out what is 0.
    reasons = Counter(report["skipped"]) + Counter({"damaged when decoded": num_damaged})
    words = []
    for reason, count in reasons.most_common():
        places = report.get("first_skipped", {}).get(reason, [])[:NUM_PLACES]
        more = ", .." if count > len(places) else ""
        words.append(f"{reason}: {count}" + (f" ({', '.join(places)}{more})" if places else ""))
    return ", ".join(words)


def check_bad_fraction(report: Report, num_damaged: int, limit: float, where: str = ""):
    """Raise BadData, with the counts by reason, if more than the fraction `limit` of a set is bad.

    Args:
        report: of the data set; the regions that opening skipped are bad.
        num_damaged: samples that turned out to be damaged since; they are bad too.
        where: begins the error's sentence.
    """
    total = report["kept"] + sum(report["skipped"].values())
    bad = sum(report["skipped"].values()) + num_damaged
    if bad > limit * total:
        raise BadData(
            f"{where}{bad} of {total} regions ({bad / total:.1%}) are bad, more than "
            f"--max_bad_fraction {limit:g}: {describe_skipped(report, num_damaged)}; mend them, or "
            "raise the flag to skip them"
        )


class DamagedSamples:
    """The names of the samples that turned out to be damaged; at first none.

    Args:
        report: of the data set.
        limit: --max_bad_fraction.

    Raises:
        BadData: opening skipped more than `limit` already.
    """

    def __init__(self, report: Report, limit: float):
        self.report, self.limit, self.names = report, limit, set()
        self.check()

    def add(self, names: Iterable[str]) -> list[str]:
        """Add `names`; return those that are new, in order."""
        new = sorted(set(names) - self.names)
        self.names.update(new)
        return new

    def state_dict(self) -> dict:
        return dict(names=sorted(self.names))

    def load_state_dict(self, state: dict[str, list[str]]):
        self.names = set(state["names"])

    def check(self):
        """Raise BadData if skipped and damaged samples together are too many."""
        check_bad_fraction(self.report, len(self.names), self.limit)
