"""Damaged JSON, and outputs that cannot be written: one sentence; a check leaves nothing behind."""

import pytest

from rl_train.utils.io import DamagedFile, check_writable, read_json


@pytest.mark.parametrize("content", [b"", b'{"step": 1', b"[1]", b"null", b"\xff\xfe{}", None])
def test_json_that_is_damaged_names_the_file(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(DamagedFile) as raised:
        read_json(tmp_path / "config.json")
    assert str(raised.value).startswith(
        f"{tmp_path / 'config.json'} is missing or damaged: "
    ) and "\n" not in str(raised.value)


def test_a_missing_file_is_named_once(tmp_path):
    with pytest.raises(DamagedFile) as raised:
        read_json(tmp_path / "config.json")
    file = tmp_path / "config.json"
    assert str(raised.value) == f"{file} is missing or damaged: No such file or directory"


def test_json_that_is_whole(tmp_path):
    (tmp_path / "config.json").write_text('{"step": 1}')
    assert read_json(tmp_path / "config.json") == {"step": 1}


def test_what_can_be_written_is_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.json").write_text("kept")
    for path in (
        tmp_path,
        tmp_path / "a" / "b",
        tmp_path.relative_to(tmp_path),
        (tmp_path / "a" / "b").relative_to(tmp_path),
    ):
        check_writable("--output", path)
    for name in ("old.json", "new.json", "a/new.json"):
        check_writable("--output", tmp_path / name, is_file=True)
    assert [path.name for path in tmp_path.iterdir()] == ["old.json"] and (
        tmp_path / "old.json"
    ).read_text() == "kept"


def test_what_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    for path in (tmp_path / "file", tmp_path / "file" / "run", tmp_path / "gone" / "run"):
        with pytest.raises(
            ValueError,
            match=f"^--output {path} cannot be written: .*(Not a directory|No such file)",
        ):
            check_writable("--output", path)
    with pytest.raises(ValueError, match="Is a directory"):
        check_writable("--output", tmp_path, is_file=True)
    with pytest.raises(ValueError, match="Not a directory"):
        check_writable("--output", tmp_path / "file" / "new.json", is_file=True)
