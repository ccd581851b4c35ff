"""A damaged or foreign checkpoint ends a resume with one sentence, before an evaluation."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import save_file

from rl_train.checkpoint import save_load
from rl_train.distributed.process_group import RankInfo
from rl_train.evaluation import evaluate
from rl_train.loggers.tensorboard import RunLogger
from rl_train.utils.io import DamagedFile
from tests.runs import run, run_unmeasured, unmeasured, weights

one_core = pytest.fixture(autouse=True)(unmeasured)
RUN = dict(max_steps=4, save_steps=1, save_total_limit=0, num_generations=4)
WEIGHT_FILES = ("trainables.safetensors", "ema.safetensors")


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """A run of four steps."""
    return run_unmeasured(data, tmp_path_factory.mktemp("whole"), **RUN)


def test_weights_of_other_names_are_refused(whole):
    parameters = {name: torch.nn.Parameter(value) for name, value in weights(whole, 4).items()}
    gone = sorted(parameters)[0]
    del parameters[gone]
    with pytest.raises(ValueError, match="names or shapes differ") as raised:
        save_load.load_weights(whole / "checkpoint_step_4", parameters)
    assert gone in str(raised.value) and "trainables.safetensors" in str(raised.value)


@pytest.mark.parametrize("change", [lambda t: t[:1], lambda t: t.flatten()[:1]])
def test_weights_of_another_shape_are_refused(whole, change):
    """Also those that a copy would spread over the parameter."""
    found = weights(whole, 4)
    parameters = {name: torch.nn.Parameter(value) for name, value in found.items()}
    name = next(name for name, value in found.items() if value.ndim == 2 and len(value) > 1)
    folder = whole / "spoilt"
    folder.mkdir(exist_ok=True)
    save_file(found | {name: change(found[name]).contiguous()}, folder / WEIGHT_FILES[0])
    with pytest.raises(ValueError, match=f"{folder}/trainables.*: names or shapes.*{name}"):
        save_load.load_weights(folder, parameters)


def test_files_have_the_mode_of_the_umask(whole):
    files = [file for file in (whole / "checkpoint_step_4").rglob("*") if file.is_file()]
    umask = os.umask(0)
    os.umask(umask)
    assert len(files) > 5 and {file.stat().st_mode & 0o777 for file in files} == {0o666 & ~umask}


@pytest.mark.parametrize("damage", ["missing", "empty", "halved"])
@pytest.mark.parametrize(
    "file", [*WEIGHT_FILES, "training_state.pt", "config.json", "eval.json", "../config.json"]
)
def test_a_damaged_file_ends_a_resume_before_its_first_evaluation(
    data, whole, tmp_path, monkeypatch, file, damage
):
    output = shutil.copytree(whole, tmp_path / "run")
    place = output / "checkpoint_step_4"
    if file == "eval.json":
        place = shutil.copytree(place, output / save_load.BEST_CHECKPOINT)
        (place / file).write_text(json.dumps(dict(step=4, score=0.5, metrics={})))
    spoilt = (place / file).resolve()
    content = spoilt.read_bytes()
    spoilt.unlink()
    if damage != "missing":
        spoilt.write_bytes(b"" if damage == "empty" else content[: len(content) // 2])
    monkeypatch.setattr(evaluate, "evaluate", None)
    with pytest.raises(SystemExit) as stopped:
        run(data, output, resume="", **RUN)
    reason = (
        "is missing or damaged: "
        if (file, damage) != ("../config.json", "missing")
        else "does not exist"
    )
    assert f"{spoilt} {reason}" in str(stopped.value) and "\n" not in str(stopped.value)


def test_a_damaged_line_of_rollouts_is_named(data, whole, tmp_path, monkeypatch):
    file = shutil.copytree(whole, tmp_path / "run") / "rollouts" / "rank0.jsonl"
    spoilt = file.read_bytes().replace(
        b'{"step": 2, "task": "loop1"', b'{"st', 1
    )  # 16 lines a step
    file.write_bytes(spoilt)
    monkeypatch.setattr(evaluate, "evaluate", None)
    with pytest.raises(SystemExit, match=f"^rl_train: {file} is missing or damaged: line 33: "):
        run(data, tmp_path / "run", resume="", **RUN)
    assert file.read_bytes() == spoilt


WRONG_STATES = {
    "a list": lambda state: [1, 2],
    "weights": lambda state: {"weight": torch.zeros(2)},
    "no counters": lambda state: {k: v for k, v in state.items() if k != "counters"},
    "an optimizer of other groups": lambda state: (
        state | dict(optimizer=dict(state=state["optimizer"]["state"], param_groups=[]))
    ),
    "an optimizer without groups": lambda state: state | dict(optimizer={}),
    "moments of another shape": lambda state: (
        state
        | dict(
            optimizer=state["optimizer"]
            | dict(
                state={
                    i: moments | dict(exp_avg=torch.zeros(1))
                    for i, moments in state["optimizer"]["state"].items()
                }
            )
        )
    ),
    "a schedule that is none": lambda state: state | dict(scheduler=None),
    "no state of a task": lambda state: state | dict(tasks={}),
    "counters of others": lambda state: state | dict(counters=dict(other=1)),
    "random numbers that are none": lambda state: state | dict(rng=[torch.zeros(3)]),
}


@pytest.mark.parametrize("case", WRONG_STATES)
def test_a_state_of_something_else_is_named(data, whole, tmp_path, case):
    """It loads, and does not fit."""
    output = shutil.copytree(whole, tmp_path / "run")
    file = output / "checkpoint_step_4" / "training_state.pt"
    torch.save(WRONG_STATES[case](torch.load(file, weights_only=True)), file)
    with pytest.raises(SystemExit) as stopped:
        run(data, output, resume="", **RUN)
    sentence = str(stopped.value)
    assert sentence.startswith(f"rl_train: {file} is missing or damaged: it ")
    assert sentence.endswith(
        "; --resume with the folder of an earlier checkpoint, and another --output_dir"
    )
    assert "\n" not in sentence


@pytest.mark.parametrize("content", [b"", b"hello", bytes(1000), b"PK\x03\x04" + bytes(1000)])
def test_a_state_that_is_none(tmp_path, content):
    (tmp_path / "training_state.pt").write_bytes(content)
    with pytest.raises(
        DamagedFile, match="training_state.pt is missing or damaged: torch.load cannot read it"
    ):
        save_load.read_state(tmp_path)


@pytest.mark.parametrize("separator", ["\u2028", "\x85", "\u2029"])
def test_rollouts_with_odd_line_separators_survive_a_resume(tmp_path, separator):
    """So do those of a rank that there no longer is, if its turn is this rank's."""
    (tmp_path / "rollouts").mkdir()
    lines = [f'{{"step": {step}, "completion": "a{separator}b"}}\n' for step in range(3)]
    for rank in range(4):
        (tmp_path / "rollouts" / f"rank{rank}.jsonl").write_text("".join(lines))
    RunLogger(tmp_path, RankInfo(1, 2, torch.device("cpu")), start=2, num_files=4).close()
    for rank in range(4):
        assert (tmp_path / "rollouts" / f"rank{rank}.jsonl").read_text() == "".join(
            lines[:2] if rank % 2 else lines
        )
