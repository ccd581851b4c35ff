"""docs/your_checkpoint_and_data.md: its Python runs, and its reasons are those of the readers."""

import re
import shlex
from pathlib import Path

import numpy as np
from PIL import Image

from rl_train.data import GraspAnyRegionDataset, dam, folders, image_files, images, rle, text
from tools import convert_data
from tools.demo.make_demo import SHIPPED_CHECKPOINT
from tools.gar_writer import write_gar

TEXT = (Path(__file__).parents[2] / "docs" / "your_checkpoint_and_data.md").read_text()
ASK, TEN_LINES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_own_data_in_ten_lines(tmp_path, monkeypatch):
    assert 0 < len([line for line in TEN_LINES.splitlines() if line.strip()]) <= 10
    mask = np.zeros((30, 40), dtype=np.uint8)
    mask[5:20, 8:30] = 255
    mine = tmp_path / "my_data"
    mine.mkdir()
    for number in range(2):
        Image.new("RGB", (40, 30), (90 * number, 0, 0)).save(mine / f"{number}.jpg")
        Image.fromarray(mask).save(mine / f"{number}.png")
        (mine / f"{number}.txt").write_text(f"Region {number}.\n")
    monkeypatch.chdir(tmp_path)
    exec(TEN_LINES, {})
    dataset = GraspAnyRegionDataset("my_data/regions")
    assert [dataset[i]["caption"] for i in range(len(dataset))] == ["Region 0.", "Region 1."]
    assert (
        all(np.array_equal(dataset[i]["mask"], mask > 0) for i in range(2))
        and dataset.report()["skipped"] == {}
    )


def test_the_command_holds_pictures_out_whole(tmp_path, monkeypatch):
    mask = np.arange(12).reshape(3, 4) > 5
    rows = [
        dict(image=Image.new("RGB", (4, 3), (k % 50, 0, 0)), mask=mask, caption=str(k), category="")
        for k in range(150)
    ]
    (tmp_path / "my_data").mkdir()
    write_gar(rows, tmp_path / "my_data" / "regions")
    monkeypatch.chdir(tmp_path)
    command = re.search(r"python -m tools.convert_data (.*)  #", TEXT)
    convert_data.main(shlex.split(command[1]))
    captions = [
        [sample["caption"] for sample in map(dataset.__getitem__, range(len(dataset)))]
        for dataset in map(GraspAnyRegionDataset, ("data/train", "data/heldout"))
    ]
    pictures = [{int(caption) % 50 for caption in side} for side in captions]
    assert sorted(map(int, sum(captions, []))) == list(range(150))
    assert pictures[0].isdisjoint(pictures[1]) and len(pictures[1]) == 1


def test_reasons_are_named():
    for reason in (
        rle.NO_MASK,
        rle.BAD_MASK,
        rle.EMPTY_MASK,
        rle.LOST_MASK,
        images.NO_IMAGE,
        images.BAD_HEADER,
        images.TOO_LARGE,
        images.BAD_DEPTH,
        images.OUTSIDE,
        dam.BAD_NAME,
        text.BLANK,
        text.NOT_UNICODE,
        image_files.BAD_ROW,
        folders.NO_MASK_FILE,
        "no region",
    ):
        assert f'"{reason}"' in TEXT


def test_a_model_is_asked(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "outputs" / "demo"
    folder.mkdir(parents=True)
    (folder / "checkpoint").symlink_to(SHIPPED_CHECKPOINT)
    monkeypatch.chdir(tmp_path)
    exec(ASK, {})
    assert "[SEG]" in capsys.readouterr().out
