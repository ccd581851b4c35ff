"""Lines that a run of two steps prints and logs, as a newcomer reads them."""

import re
import shlex
import shutil
import warnings
from pathlib import Path

import pytest
from tqdm import tqdm

from rl_train import train
from rl_train.run import messages
from tests.runs import flags, on_one_core, run
from tools import evaluate, rollouts

one_core = pytest.fixture(autouse=True)(on_one_core)
SMALL = dict(num_generations=4, eval_samples=4, seed=1, tasks="mask_caption_mask", save_steps=1)


def log_of(output: Path) -> list[str]:
    return (output / "train.log").read_text().split("\n")


def test_a_run_says_what_it_does(data, tmp_path, capsys, monkeypatch):
    """It warns of a GPU that is not used and of a model that is large for a CPU."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(shutil, "which", {"nvidia-smi": "/bin/nvidia-smi"}.get)
    monkeypatch.setattr(messages, "LARGE_FOR_A_CPU", 1000)
    of_bar = []
    monkeypatch.setattr(tqdm, "set_postfix_str", lambda bar, text: of_bar.append(text))
    output = run(data, tmp_path / "run", **SMALL, logging_steps=1, merge_at_end="auto")
    printed = capsys.readouterr().out.splitlines()
    expected = [
        r"device: CPU, 1 thread; 1 process",
        r"warning: an NVIDIA GPU seems to be there, but training uses the CPU: .*",
        r"training data, .*/train: 84 regions of 84 rows; none skipped",
        r"evaluation data, .*/heldout: 16 regions of 16 rows; none skipped",
        r"model: family sa2va, .*/checkpoint, frozen weights in float32",
        r"trainable parameters: [\d,]+ of [\d,]+ \(\d+\.\d\d%\): lora .*",
        r"warning: 0\.0 billion parameters are about to be trained on a CPU; .*",
        r"memory expected per process, without activations: .* MiB \(frozen base .*\)",
        r"evaluation before training, 4 samples: cycle_iou 0\.\d{4}, .*",
        r"step 1/2 \| loss .* \| loop1 reward 0\.\d+ \(iou\) policy_loss .* kl .*"
        r" \| learning rate 5\.00e-05 \| \d+\.\d s per step",
        rf"saved {output}/checkpoint_step_1",
        r"step 2/2 \| .*",
        r"evaluation after step 2, 4 samples: cycle_iou .*",
        rf"saved {output}/checkpoint_step_2",
        rf"final model: {output}/final_model \(the \w+ of checkpoint_step_2, .*",
        r"evaluation split, n = 4: before and after, the policy \(the teacher's are in "
        rf"{output}/evaluation/step_2.json\)",
        r"next, in .*:",
    ]
    remaining = iter(printed)
    for pattern in expected:
        assert any(re.fullmatch(pattern, line) for line in remaining), pattern
    header, *lines, end = log_of(output)
    assert lines == printed and end == "" and header.startswith("-- 2")
    assert "\r" not in (output / "train.log").read_text()
    assert len(of_bar) == 2 and all(re.fullmatch(r"loop1 reward 0\.\d{3}", text) for text in of_bar)


def test_the_commands_at_the_end_work(data, tmp_path, capsys):
    """They are run as printed, but for TensorBoard's server, whose folder must exist."""
    output = run(data, tmp_path / "run", **SMALL | dict(eval_samples=16))  # some cycle IoU is not 0
    printed = capsys.readouterr().out
    commands = [shlex.split(line) for line in printed.splitlines() if " -m t" in line]
    assert [words[2] for words in commands] == [
        "tensorboard.main",
        "tools.rollouts",
        "tools.evaluate",
    ]
    curves, page, measure = commands
    assert list(Path(curves[-1]).glob("events.out.tfevents.*"))
    rollouts.main(page[3:])
    assert (output / "rollouts.html").is_file()
    evaluate.main(measure[3:])
    (cycle_iou,) = re.findall(r"\ncycle_iou +(\S+) ", capsys.readouterr().out)
    after = [line for line in printed.splitlines() if line.startswith("  cycle_iou ")]
    assert cycle_iou == after[0].split()[2]


def test_without_evaluation_data_the_command_measures_what_was_not_trained_on(
    data, tmp_path, capsys
):
    run(data, tmp_path / "run", **SMALL, eval_data_dir=None)
    (words,) = [
        shlex.split(line)
        for line in capsys.readouterr().out.splitlines()
        if " -m tools.evaluate" in line
    ]
    evaluate.main(words[3:])
    assert re.search(r"\nn = \d+ ", capsys.readouterr().out)


def test_a_resume_appends_to_the_log(data, tmp_path):
    changes = SMALL | dict(save_total_limit=0)
    output = run(data, tmp_path / "run", **changes)
    first = log_of(output)
    run(data, output, **changes, resume=output / "checkpoint_step_2")
    again = log_of(output)
    assert again[: len(first) - 1] == first[:-1]
    assert f"resuming from {output / 'checkpoint_step_2'}" in again[len(first) :]


def test_the_reason_of_an_end_is_in_the_log(data, tmp_path, monkeypatch):
    (tmp_path / "broken_reward.py").write_text(
        "def broken(completions, **kwargs):\n    return [0.5]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit) as ended:
        run(data, tmp_path / "run", **SMALL, reward="broken_reward:broken")
    assert log_of(tmp_path / "run")[-2] == ended.value.code


def test_steps_that_learn_nothing_are_said_in_words(data, tmp_path, capsys):
    """A constant reward: once at the first step, with its count at the end, without a warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train.main(flags(data, tmp_path / "run", **SMALL, ablation_reward="constant", max_steps=3))
    printed = capsys.readouterr().out
    assert not [w for w in caught if "lr_scheduler" in str(w.message)]
    assert printed.count("\nstep 1: all answers to each prompt got the same reward, so") == 1
    assert "\n3 of 3 steps changed no weight: all answers to each prompt got the" in printed
    assert printed.count("all answers to each prompt got the same reward") == 2
    assert printed.count("--temperature") == 1 and "| no update |" in printed
