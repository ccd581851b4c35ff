"""tools/benchmark.py data at a tiny size: the figures that it must give, none of their values."""
import json

import pytest

from tools import benchmark


def test_data(tmp_path, capsys):
    benchmark.main(["data", "--num_workers", "1", "--num_images", "8", "--width", "320", "--height", "240", "--num_batches", "4",
                    "--rounds", "1", "--num_rows", "300", "--output", str(tmp_path / "data.json")])
    found = json.loads((tmp_path / "data.json").read_text())
    assert found == json.loads(capsys.readouterr().out)
    loader, opening = found["loader"], found["opening"]
    assert loader["ratio"] == pytest.approx(loader["loader_samples_per_second"] / loader["bare_samples_per_second"]) and loader["ratio"] > 0
    assert loader["cpu_ratio"] > 0 and loader["image"] == "320x240"
    assert opening["rows"] == 300 and opening["seconds"] > 0 and 0 < opening["peak_memory_increase_mib"] < 300
    assert opening["jpeg_bytes"] > 10_000 and opening["mask_characters"] > 300
