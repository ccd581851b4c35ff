"""Sheets of fixed samples before and after, as a user makes them."""

import re

import pytest

from tests.runs import CHECKPOINT, on_one_core
from tools.experiments import sheet

one_core = pytest.fixture(autouse=True)(on_one_core)


def test_a_sheet_shows_fixed_samples_with_both_models(data, tmp_path, capsys):
    file = tmp_path / "new" / "sheet.html"
    argv = ["--before", str(CHECKPOINT), "--after", str(CHECKPOINT), "--output", str(file)]
    argv += ["--data_dir", str(data / "heldout"), "--num_samples", "3", "--num_workers", "0"]
    argv += "--dtype float32 --max_completion_length 16 --batch_size 2".split()
    sheet.main(argv)
    first = file.read_text()
    assert "3 samples" in capsys.readouterr().out
    assert first.count("data:image/jpeg;base64,") == first.count("<figure>") == 3
    assert "http" not in first  # no links
    captions = re.findall(r"(?:before|after): (.*?) \(IoU ([\d.]+)\)", first)
    assert len(captions) == 6 and captions[::2] == captions[1::2]  # of one model
    sheet.main(argv)
    assert file.read_text() == first  # the same samples again
    with pytest.raises(SystemExit, match="sheet: --after nowhere: no such folder"):
        sheet.main([*argv, "--after", "nowhere"])
