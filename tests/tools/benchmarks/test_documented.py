"""Every benchmark command that a page names runs: at tiny sizes, on the CPU and on a GPU.

The command is the page's own; flags behind it make it small, since the last of two counts.
"""

import re
import shlex
from pathlib import Path

import pytest
import torch

from tests.runs import ROOT
from tools.benchmarks import __main__, scale

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
COMMAND = re.compile(r"python -m tools\.benchmarks(?:\.__main__)? ((?:[^`\n\\#]|\\\n)+)")
OTHERS = re.compile(r"python -m tools\.benchmarks\.(?!__main__)(\w+)")
ROUNDS = "--rounds 1 --warmup 1"
CEILINGS = f"{ROUNDS} --matmul_size 64 --copy_mib 1"
ANSWERS = f"{CEILINGS} --num_generations 2 --lora_r 4 --num_prompts 2 --prompt_length 5"
STEP = f"{ROUNDS} --answer_tokens 4 --width 160 --height 120"
SMALL = dict(
    data="--num_images 8 --width 320 --height 240 --num_batches 4 --rounds 1 --num_workers 1",
    head=f"{CEILINGS} --num_tokens 70 --width 32 --vocabulary 100",
    decode=f"{ANSWERS} --num_tokens 4",
    logprob=f"{ANSWERS} --num_tokens 4",
    step=f"{CEILINGS} {STEP}",
    profile=f"{CEILINGS} {STEP}",
    memory=STEP,
    scale=f"{CEILINGS} {STEP} --num_processes 1",
)
RUN = "--batch_size 2 --num_generations 3 --max_completion_length 6 --lora_r 4 --micro_batch_size 3"
TILE_TOKENS, PROMPT = 64, 200  # of the tiny model
GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
)


def commands() -> list[str]:
    """Return the commands of all pages without their comments, each once."""
    found = [match for page in PAGES for match in COMMAND.findall(page.read_text())]
    return sorted({" ".join(command.replace("\\\n", " ").split()) for command in found})


def tiny(command: str, device: str) -> list[str]:
    """Return the words of a command with flags behind it that make it small."""
    words, _, run_flags = command.partition(" --flags ")
    words = shlex.split(words)
    name = words[0]
    words += shlex.split(SMALL[name])
    if name != "data":
        words += ["--device", device]
    if name not in ("data", "head"):
        is_qwen = "--sizes" in words and words[words.index("--sizes") + 1].startswith("qwen")
        words += ["--sizes", "qwen-tiny" if is_qwen else "tiny"]
        if name not in ("decode", "logprob"):
            num_tiles = int(words[words.index("--num_tiles") + 1]) if "--num_tiles" in words else 1
            words += ["--prompt_length", str(PROMPT + (num_tiles - 1) * TILE_TOKENS)]
            image = " --image_size 48" if is_qwen else ""
            words += ["--flags", *shlex.split(f"{run_flags} {RUN}{image}")]
    return words


def test_pages_name_benchmarks():
    assert any("--alternatives trl" in command for command in commands())
    assert {command.split()[0] for command in commands()} >= {"step", "decode", "memory", "scale"}


def in_this_process(command: list[str], **how):
    """Do what `scale` has a process of its own do."""
    __main__.main(command[command.index("tools.benchmarks.__main__") + 1 :])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("command", commands())
def test_a_command_of_a_page(command, device, tmp_path, monkeypatch, capsys):
    if device == "cpu" and "--alternatives" in command:
        pytest.skip("test_benchmark.py measures both ways on the CPU")
    monkeypatch.chdir(ROOT)  # `scale` starts processes that import the package
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    if device == "cpu":  # `scale`'s one process is this one: see test_benchmark.py
        monkeypatch.setattr(scale.subprocess, "run", in_this_process)
    figures = tmp_path / "figures.json"
    words = tiny(command, device)
    at = words.index("--flags") if "--flags" in words else len(words)
    __main__.main([*words[:at], "--output", str(figures), *words[at:]])
    assert figures.stat().st_size and figures.read_text().strip() in capsys.readouterr().out


def test_modules_that_pages_name_have_tests_of_their_own():
    names = {name for page in PAGES for name in OTHERS.findall(page.read_text())}
    assert not [n for n in names if not Path(__file__).with_name(f"test_{n}.py").is_file()]
