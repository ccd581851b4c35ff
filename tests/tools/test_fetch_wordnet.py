import os
import subprocess
from pathlib import Path

import pytest
from nltk.corpus import wordnet

from tools import fetch_wordnet
from tools.fetch_wordnet import FILES, LEXNAMES, install, lexnames_text, main, wordnet_fault

CATEGORY = {"noun": 1, "verb": 2, "adj": 3, "adv": 4}


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A directory with the files of this environment's WordNet, be that a directory or a zip."""
    wordnet.ensure_loaded()
    directory = tmp_path_factory.mktemp("wordnet")
    for name in FILES:
        with wordnet.abspath(name).open() as file:
            (directory / name).write_bytes(file.read())
    return directory


@pytest.fixture
def missing_wordnet(monkeypatch):
    """WordNet not found on NLTK's own path; an installed copy is still judged for real."""
    monkeypatch.setattr(
        fetch_wordnet,
        "wordnet_fault",
        lambda data_dir=None: wordnet_fault(data_dir) if data_dir else "missing",
    )


def synsets(path: Path) -> list[tuple[str, str]]:
    """Return (lexicographer file number, first word) of every synset in a WordNet data file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [
        (fields[1], fields[4])
        for fields in (line.split(maxsplit=5) for line in lines if line[0] != " ")
    ]


def test_lexnames_has_the_45_rows_of_the_manual_page():
    assert [number for number, _, _ in LEXNAMES] == list(range(45))
    assert all(CATEGORY[name.split(".")[0]] == category for _, name, category in LEXNAMES)
    lines = lexnames_text().splitlines(keepends=True)
    assert (
        lines[0] == "00\tadj.all\t3\n"
        and lines[5] == "05\tnoun.animal\t1\n"
        and lines[44] == "44\tadj.ppl\t3\n"
    )


@pytest.mark.parametrize("pos", CATEGORY)
def test_lexnames_agrees_with_the_numbers_in_the_data_files(installed, pos):
    used = {int(number) for number, _ in synsets(installed / f"data.{pos}")}
    assert used == {number for number, _, category in LEXNAMES if category == CATEGORY[pos]}


def test_lexnames_of_known_synsets(installed):
    names = {(f"{number:02d}", name) for number, name, _ in LEXNAMES}
    number_of = {
        word: number for number, word in reversed(synsets(installed / "data.noun"))
    }  # first synset
    assert (number_of["dog"], "noun.animal") in names
    assert (number_of["apple"], "noun.food") in names
    assert wordnet.synset("dog.n.01").lexname() == "noun.animal"
    assert wordnet.synset("run.v.01").lexname() == "verb.motion"
    assert wordnet.synset("quickly.r.01").lexname() == "adv.all"


def test_install_writes_fresh_private_files_over_old_links(tmp_path):
    source, old = tmp_path / "source", tmp_path / "old"
    source.mkdir()
    for name in FILES:
        (source / name).write_text(f"new {name}")
        (source / name).chmod(0o666)
    old.write_text("old")
    target = tmp_path / "out" / "corpora" / "wordnet"
    target.mkdir(parents=True)
    (target / "data.noun").symlink_to(old)

    umask = os.umask(0o002)
    try:
        install(source, tmp_path / "out")
    finally:
        os.umask(umask)

    assert old.read_text() == "old"
    assert {path.name for path in target.iterdir()} == {*FILES, "lexnames"}
    assert (target / "data.noun").read_text() == "new data.noun"
    assert all(not path.is_symlink() and path.stat().st_nlink == 1 for path in target.iterdir())
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in target.iterdir())


def test_does_nothing_when_wordnet_works(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(fetch_wordnet, "wordnet_fault", lambda data_dir=None: "")
    monkeypatch.setattr(fetch_wordnet, "FETCHERS", {})
    assert main(["--output_dir", str(tmp_path / "out")]) == 0
    assert "already works" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_every_reason_is_reported_when_all_sources_fail(
    monkeypatch, missing_wordnet, capsys, tmp_path
):
    def offline(scratch):
        raise ValueError("no route")

    def slow(scratch):
        raise subprocess.TimeoutExpired("apt-get", 120)

    def incomplete(scratch):
        return scratch  # holds no file

    monkeypatch.setattr(
        fetch_wordnet, "FETCHERS", {"first": offline, "second": slow, "third": incomplete}
    )
    assert main(["--output_dir", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "- first: ValueError: no route" in out
    assert "- second: TimeoutExpired" in out and "120 seconds" in out
    assert "- third: FileNotFoundError" in out and "index.sense" in out


def test_files_that_do_not_work_are_a_failure(monkeypatch, missing_wordnet, capsys, tmp_path):
    def empty_files(scratch):
        for name in FILES:
            (scratch / name).touch()
        return scratch

    monkeypatch.setattr(fetch_wordnet, "FETCHERS", {"empty": empty_files})
    assert main(["--output_dir", str(tmp_path)]) == 1
    assert "METEOR cannot use it" in capsys.readouterr().out


def test_next_source_is_tried_and_the_installed_copy_works(
    monkeypatch, missing_wordnet, capsys, tmp_path, installed
):
    def offline(scratch):
        raise ValueError("no route")

    monkeypatch.setattr(
        fetch_wordnet, "FETCHERS", {"first": offline, "second": lambda scratch: installed}
    )
    assert main(["--output_dir", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert f"set NLTK_DATA={tmp_path / 'out'}" in out
    assert (tmp_path / "out" / "corpora" / "wordnet" / "lexnames").read_text() == lexnames_text()


def test_a_failing_command_is_named_with_its_last_words(tmp_path):
    with pytest.raises(RuntimeError, match="sh exited 3: gone"):
        fetch_wordnet._run(("sh", "-c", "echo gone >&2; exit 3"), tmp_path)


def test_a_defect_of_the_tool_itself_is_not_swallowed(monkeypatch, missing_wordnet, tmp_path):
    monkeypatch.setattr(fetch_wordnet, "FETCHERS", {"broken": lambda: None})
    with pytest.raises(TypeError):
        main(["--output_dir", str(tmp_path)])
