"""Planted faults are found, by reading and by the tool; the contact sheet shows them."""

import json
import re
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from rl_train.data import DATASETS, DamagedSample
from tests.campaigns import messy_data
from tests.data.counts import counts
from tests.data.image_file_sets import LAYOUTS
from tools import inspect_data
from tools.inspect_data import REGION, contact_sheet, outlined


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("messy")
    return folder, {
        "gar": messy_data.write_messy_gar(folder / "gar", 300),
        "dam": messy_data.write_messy_dam(folder / "dam", 300),
    }


@pytest.mark.parametrize("name", ["gar", "dam"])
def test_a_reader_reports_what_was_planted(planted, name):
    folder, expected = planted
    dataset, damaged = DATASETS[name](folder / name), Counter()
    for i in range(len(dataset)):
        try:
            sample = dataset[i]
            assert (
                sample["mask"].any()
                and sample["mask"].shape == sample["image"].size[::-1]
                and sample["image"].mode == "RGB"
            )
            assert sample["caption"] and not re.search(
                r"\[SEG\]|<image>|<Prompt|IMG_CONTEXT|\n", sample["caption"]
            )
        except DamagedSample as error:
            damaged[error.reason] += 1
    assert counts(dataset) | {"damaged": damaged} == expected[name]
    assert len(expected[name]["skipped"]) >= 6 and len(damaged) == 2


@pytest.mark.parametrize("name, num_workers", [("gar", "2"), ("dam", "0")])
def test_the_tool_prints_what_was_planted(planted, name, num_workers, capsys, tmp_path):
    folder, expected = planted
    inspect_data.main(
        [
            "--data_dir",
            str(folder / name),
            "--dataset",
            name,
            "--num_workers",
            num_workers,
            "--max_bad_fraction",
            "0.5",
            "--output",
            str(tmp_path / "sheet.png"),
        ]
    )
    out = capsys.readouterr().out
    expected = expected[name]
    # Behind a colon stand the places of the first ones.
    lines = re.findall(r"^ {9,}(\d+) ([^\d:][^:\n]*)(?:: .*)?$", out, re.MULTILINE)
    counts = {reason: int(n) for n, reason in lines}
    assert counts == expected["skipped"] | expected["damaged"]
    assert (
        f"{expected['rows']} rows\n" in out
        and f"{sum(expected['skipped'].values())} skipped\n" in out
    )
    num_good = expected["kept"] - sum(expected["damaged"].values())
    assert (
        f"{num_good} regions kept, of which {expected['resized_masks']} masks had another size"
        in out
    )
    cells = re.search(r"grid cells K of 256 +(\S+) +\S+ +\S+ +\S+ +(\S+)\n", out)
    assert cells.groups() == ("1", "256")  # the pixel and the full mask
    assert Image.open(tmp_path / "sheet.png").size == (5 * 300, 4 * 396)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_faults_of_files_that_name_images_are_told_by_file_and_row(tmp_path, capsys, layout):
    name, write = LAYOUTS[layout]
    write(tmp_path)
    words = f"--data_dir {tmp_path} --dataset {name} --num_workers 0 --max_bad_fraction"
    inspect_data.main([*words.split(), "1"])
    printed = capsys.readouterr().out
    assert "5 rows\n" in printed and "3 skipped\n" in printed
    for reason, places in DATASETS[name](tmp_path).report()["first_skipped"].items():
        assert f" 1 {reason}: {places[0]}\n" in printed
    with pytest.raises(SystemExit, match="3 of 5 regions .* more than --max_bad_fraction 0.5: "):
        inspect_data.main([*words.split(), "0.5"])


def test_too_much_bad_data_ends_with_one_sentence(planted):
    folder, expected = planted
    bad = sum(expected["dam"]["skipped"].values()) + sum(expected["dam"]["damaged"].values())
    with pytest.raises(
        SystemExit,
        match=f"^inspect_data: {bad} of .* more than --max_bad_fraction 0.01: .*blank caption: ",
    ) as caught:
        inspect_data.main(
            ["--data_dir", str(folder / "dam"), "--dataset", "dam", "--num_workers", "0"]
        )
    assert "\n" not in str(caught.value)
    with pytest.raises(SystemExit, match="^inspect_data: --data_dir /nowhere/at/all: "):
        inspect_data.main(["--data_dir", "/nowhere/at/all"])


def test_an_output_that_cannot_be_written_is_told_before_measuring(planted, tmp_path, monkeypatch):
    def sheet(output):
        inspect_data.main(
            [
                "--data_dir",
                str(planted[0] / "gar"),
                "--num_workers",
                "0",
                "--max_bad_fraction",
                "0.5",
                "--output",
                str(output),
            ]
        )

    sheet(tmp_path / "new" / "folder" / "sheet.png")
    assert Image.open(tmp_path / "new" / "folder" / "sheet.png").size == (5 * 300, 4 * 396)
    monkeypatch.setattr(inspect_data, "measure", None)
    for output in (tmp_path, tmp_path / "new" / "folder" / "sheet.png" / "sheet.png"):
        with pytest.raises(
            SystemExit, match=f"^inspect_data: --output {output} cannot be written: "
        ):
            sheet(output)


def test_messy_data_prints_its_counts(tmp_path, capsys, planted):
    messy_data.main(["--output_dir", str(tmp_path), "--num_rows", "300"])
    printed = json.loads("[" + capsys.readouterr().out.replace("}\n{", "},{") + "]")
    assert {name: counts for one in printed for name, counts in one.items()} == planted[1]
    with pytest.raises(SystemExit):
        messy_data.main(["--output_dir", str(tmp_path), "--num_rows", "10"])


def test_outline_is_the_border_of_the_region():
    mask = np.zeros((60, 90), dtype=bool)
    mask[10:40, 20:70] = True
    pixels = np.array(outlined(Image.new("RGB", (90, 60)), mask, 90))
    marked = (pixels == REGION).all(-1)
    assert (
        marked.sum() == 30 * 50 - 26 * 46
        and not marked[~mask].any()
        and marked[10, 20]
        and not marked[12, 22]
    )
    dot = np.zeros((1000, 1000), dtype=bool)
    dot[500, 500] = True
    assert (np.array(outlined(Image.new("RGB", (1000, 1000)), dot, 100)) == REGION).all(
        -1
    ).sum() == 1


def test_contact_sheet_has_a_cell_for_each_sample():
    sample = dict(
        image=Image.new("RGB", (64, 64), "blue"),
        mask=np.ones((64, 64), dtype=bool),
        caption="word " * 100,
        image_id="part/file/" + "9" * 60,
    )
    sheet = np.array(contact_sheet([sample] * 6))
    assert sheet.shape == (2 * 396, 1500, 3)
    text = (sheet[396 + 300 :, :300] < 100).all(-1)
    assert text.any() and not (sheet[396:, 300:] != 255).any()  # caption below, empty cells white
