"""Replies of a judge, kept in memory or in a sqlite3 file that several ranks may share."""

import sqlite3
from pathlib import Path
from threading import Lock

from tqdm import tqdm

LOCK_SECONDS = 20  # that an access waits for other processes


class ReplyCache:
    """Replies that were understood, in memory or in a sqlite3 file that several ranks may share.

    The file is opened at the first use. Where it cannot be used (any more), one sentence with its
    name is printed and replies are kept in memory from then on: no run waits or ends for it.
    """

    def __init__(self, path: str | Path | None):
        self.path = None if path is None else Path(path)
        self.connection, self.lock = None, Lock()

    def repair(self):
        """Set a damaged file aside, as FILE.damaged, and say so; for one process, before others.

        What only cannot be read or written at the moment stays in its place.
        """
        if self.path is None or not self.path.is_file():
            return
        try:
            reason = self._damage()
            if not reason:
                return
            self.path.replace(f"{self.path}.damaged")
        except (sqlite3.OperationalError, OSError):  # locked, read-only: the first use says so
            return
        tqdm.write(f"{self.path} is damaged ({reason}): set aside as {self.path}.damaged")

    def _damage(self) -> str | None:
        """Return what is wrong with the file's contents, None if nothing is."""
        connection = sqlite3.connect(self.path, timeout=LOCK_SECONDS)
        try:
            (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            return None if found == "ok" else " ".join(found.split())
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError as error:
            return str(error)
        finally:
            connection.close()

    def _open(self) -> sqlite3.Connection:
        if self.connection is None:
            if self.path is not None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            self.connection = sqlite3.connect(
                self.path or ":memory:",
                timeout=LOCK_SECONDS,
                isolation_level=None,
                check_same_thread=False,
            )
            self.connection.execute(
                "CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT NOT NULL)"
            )
        return self.connection

    def _or_in_memory(self, access):
        """Return access(connection); by one in memory if the file fails."""
        with self.lock:
            try:
                return access(self._open())
            except (sqlite3.Error, OSError) as error:
                if self.path is None:
                    raise
                tqdm.write(
                    f"{self.path} cannot be used ({error}): "
                    "the judge's replies are kept in memory from here on"
                )
                if self.connection is not None:
                    self.connection.close()
                self.path = self.connection = None
                return access(self._open())

    def get(self, key: str) -> str | None:
        select = "SELECT reply FROM replies WHERE key = ?"
        row = self._or_in_memory(lambda connection: connection.execute(select, (key,)).fetchone())
        return row and row[0]

    def put(self, replies: dict[str, str]):
        """Store several replies in one transaction, which waits for other processes."""

        def store(connection):
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany("INSERT OR REPLACE INTO replies VALUES (?, ?)", replies.items())
            connection.execute("COMMIT")

        self._or_in_memory(store)
