"""The file of a judge's replies: damaged, locked, read-only, or no room for it."""

import os
import resource
import sqlite3

import pytest

from rl_train.rewards import judge_cache
from rl_train.rewards.judge_cache import ReplyCache

REPLIES = {f"key {i}": f"reply {i}" * 20 for i in range(200)}


@pytest.fixture
def file(tmp_path):
    """A cache file of some pages."""
    path = tmp_path / "judge_cache.sqlite"
    ReplyCache(path).put(REPLIES)
    assert path.stat().st_size > 5 * 4096
    return path


def works(cache: ReplyCache):
    cache.put({"new": "1"})
    assert cache.get("new") == "1" and cache.get("unknown") is None


def garbage(path):
    path.write_bytes(b"garbage" * 3000)


def truncated(path):
    os.truncate(path, path.stat().st_size // 2)


def overwritten(path):
    with path.open("r+b") as raw:
        raw.seek(100)
        raw.write(b"\xff" * (path.stat().st_size - 100))


@pytest.mark.parametrize("damage", [garbage, truncated, overwritten])
def test_a_damaged_file_is_set_aside(file, damage, capsys):
    damage(file)
    was = file.read_bytes()
    cache = ReplyCache(file)
    cache.repair()
    (said,) = capsys.readouterr().out.splitlines()
    assert said.startswith(f"{file} is damaged (") and said.endswith(f"aside as {file}.damaged")
    assert [path.name for path in file.parent.iterdir()] == [f"{file.name}.damaged"]
    assert (file.parent / f"{file.name}.damaged").read_bytes() == was
    works(cache)
    assert ReplyCache(file).get("new") == "1" and not capsys.readouterr().out


@pytest.mark.parametrize("damage", [garbage, truncated, overwritten])
def test_damage_that_comes_later_is_left_for_memory(file, damage, capsys):
    cache = ReplyCache(file)
    assert cache.get("key 7") == REPLIES["key 7"]
    damage(file)
    for key in REPLIES:
        assert cache.get(key) in (None, REPLIES[key])
    works(cache)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1 and said[0].startswith(f"{file} cannot be used (")
    assert said[0].endswith("the judge's replies are kept in memory from here on")
    assert file.exists() and cache.path is None


def test_a_good_file_or_none_is_left_alone(file, capsys):
    was = file.read_bytes()
    for path in (file, file.parent / "none.sqlite", file.parent, None):
        ReplyCache(path).repair()
    assert file.read_bytes() == was and sorted(file.parent.iterdir()) == [file]
    assert not capsys.readouterr().out
    assert ReplyCache(file).get("key 7") == REPLIES["key 7"]


def locked(path, monkeypatch):
    monkeypatch.setattr(judge_cache, "LOCK_SECONDS", 0.2)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    return other, path


def read_only(path, monkeypatch):
    """A connection that may not write, as to a file without the right to (root has it always)."""
    connect = sqlite3.connect

    def connect_read_only(database, **kwargs):
        if database == path:
            return connect(f"{path.as_uri()}?mode=ro", uri=True, **kwargs)
        return connect(database, **kwargs)

    monkeypatch.setattr(judge_cache.sqlite3, "connect", connect_read_only)
    return None, path


def no_room(path, monkeypatch):
    """Files end where this one does, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, limits[1]))
    return limits, path


def a_folder(path, monkeypatch):
    return None, path.parent


def no_folder(path, monkeypatch):
    return None, path / "a file is no folder" / "judge_cache.sqlite"


def of_another_shape(path, monkeypatch):
    other = sqlite3.connect(path)
    other.execute("ALTER TABLE replies RENAME COLUMN reply TO answer")
    return other, path


@pytest.mark.parametrize(
    "fault", [locked, read_only, no_room, a_folder, no_folder, of_another_shape]
)
def test_a_file_that_cannot_be_used_is_left_for_memory(file, fault, monkeypatch, capsys):
    held, path = fault(file, monkeypatch)
    cache = ReplyCache(path)
    try:
        cache.repair()
        assert cache.get("unknown") is None
        cache.put(REPLIES | {f"more {i}": "reply" * 200 for i in range(200)})
    finally:
        if fault is no_room:
            resource.setrlimit(resource.RLIMIT_FSIZE, held)
    assert cache.get("more 7") == "reply" * 200
    works(cache)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1 and said[0].startswith(f"{path} cannot be used (")
    assert file.exists() and cache.path is None
    if fault in (no_room, read_only):
        monkeypatch.undo()
        assert ReplyCache(file).get("key 7") == REPLIES["key 7"]  # as it was
