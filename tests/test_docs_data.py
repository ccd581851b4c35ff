"""docs/data.md: its ten lines work, and its reasons are those that the readers give."""
import re
from pathlib import Path

import numpy as np
from PIL import Image

from rl_train.data import GraspAnyRegionDataset
from rl_train.data import checks, images

TEXT = (Path(__file__).parent.parent / "docs" / "data.md").read_text()


def test_own_data_in_ten_lines(tmp_path, monkeypatch):
    [code] = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert 0 < len([line for line in code.splitlines() if line.strip()]) <= 10
    mask = np.zeros((30, 40), dtype=np.uint8)
    mask[5:20, 8:30] = 255
    (tmp_path / "mine").mkdir()
    for number in range(2):
        Image.new("RGB", (40, 30), (90 * number, 0, 0)).save(tmp_path / "mine" / f"{number}.jpg")
        Image.fromarray(mask).save(tmp_path / "mine" / f"{number}.png")
        (tmp_path / "mine" / f"{number}.txt").write_text(f"Region {number}.\n")
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    dataset = GraspAnyRegionDataset("my_regions")
    assert [dataset[i]["caption"] for i in range(len(dataset))] == ["Region 0.", "Region 1."]
    assert all(np.array_equal(dataset[i]["mask"], mask > 0) for i in range(2)) and dataset.report()["skipped"] == {}


def test_reasons_are_named():
    for reason in (checks.NO_MASK, checks.BAD_MASK, checks.EMPTY_MASK, checks.LOST_MASK, images.NO_IMAGE, images.BAD_HEADER,
                   images.TRUNCATED, images.TOO_LARGE, "no conversation", "no assistant turn", "blank caption", "no region"):
        assert f'"{reason}"' in TEXT
