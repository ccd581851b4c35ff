"""The table of how well each way to be asked about a region is learnt."""

import json
import shutil

import pytest

from tools.experiments import region_prompts
from tools.experiments.region_prompts import METRICS, main


@pytest.fixture
def demo(tmp_path):
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "config.json").write_text("{}")
    return tmp_path


def finished(output, way, seed, value):
    """A run whose metrics rise from 0 to `value`."""
    run = output / way / f"seed{seed}"
    (run / "evaluation").mkdir(parents=True)
    (run / "config.json").write_text(json.dumps(dict(max_steps=5)))
    for step, mean in ((0, 0.0), (5, value)):
        record = dict(values={name: [mean] * 2 for name in METRICS}, means={})
        (run / "evaluation" / f"step_{step}.json").write_text(json.dumps(record))


def test_the_table_of_runs_that_are_complete(demo, tmp_path, capsys):
    for way, base in (("outline", 0.5), ("box", 0.3)):
        for seed in (0, 1):
            finished(tmp_path / "runs", way, seed, base + 0.1 * seed)
    line = f"--demo {demo} --output {tmp_path}/runs --ways outline box --seeds 0 1"
    main(line.split())
    rows = [row for row in capsys.readouterr().out.split("\n") if row.startswith("| `")]
    # Student's t of 1 degree of freedom is 12.7, the standard error .05.
    assert rows[0].startswith("| `outline` | 0.000, 0.550 ± 0.635 |")
    assert rows[1].startswith("| `box` | 0.000, 0.350 ± 0.635 |")


def test_a_run_that_fails_is_named_with_its_log(demo, tmp_path, monkeypatch):
    monkeypatch.setattr(region_prompts.sys, "executable", shutil.which("false"))
    line = f"--demo {demo} --output {tmp_path}/runs --ways box --seeds 7"
    with pytest.raises(ValueError, match="box, seed 7: exit status 1, see .*seed7.log"):
        main(line.split())
    (tmp_path / "runs" / "box" / "seed7").mkdir()
    with pytest.raises(ValueError, match="seed7: an unfinished run, remove it"):
        main(line.split())
    with pytest.raises(SystemExit, match="no checkpoint in it, make it by"):
        main(f"--demo {tmp_path}/nowhere --output {tmp_path}/runs".split())
