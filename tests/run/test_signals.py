"""A signal ends the step, writes a checkpoint and leaves with status 75; --resume loses nothing."""

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.utils.data import DataLoader, Dataset

from rl_train import train
from rl_train.checkpoint import save_load
from rl_train.evaluation import evaluate
from rl_train.run import build
from rl_train.run.signals import EXIT_INTERRUPTED, SignalHandler, ignore_signals_in_worker
from tests.campaigns import kill_campaign
from tests.campaigns.kill_campaign import RUN, differences
from tests.ranks import fork, wait_for_exit
from tests.runs import ENVIRONMENT, ROOT, run, run_unmeasured, unmeasured

one_core = pytest.fixture(autouse=True)(unmeasured)


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    return run_unmeasured(data, tmp_path_factory.mktemp("run") / "whole", **RUN)


def send_before(monkeypatch, number: int, owner, name: str, call: int):
    """Make this process get a signal before the `call`-th call of a function."""
    function, calls = getattr(owner, name), []

    def called(*args, **kwargs):
        calls.append(name)
        if len(calls) == call:
            os.kill(os.getpid(), number)
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, called)


def stopped(data, output, monkeypatch, capsys, *how, **changes) -> str:
    """Return the last words of a run that a signal stops, as `send_before` has it."""
    with monkeypatch.context() as context:
        send_before(context, *how)
        with pytest.raises(SystemExit) as ended:
            run(data, output, **RUN | changes)
    assert ended.value.code == EXIT_INTERRUPTED == 75
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # the caller's handlers are back
    return [line for line in capsys.readouterr().out.split("\n") if line.startswith("rl_train")]


@pytest.mark.parametrize(
    "number, owner, name, call, step, words",
    [
        (signal.SIGTERM, train, "clip_gradients", 3, 3, "SIGTERM, after step 3"),
        # of step 2, whose checkpoint has no measures then, as the last has none
        (signal.SIGUSR1, evaluate, "measure", 2, 2, "SIGUSR1, after step 2"),
        (signal.SIGINT, train, "clip_gradients", 4, 4, "SIGINT, after step 4"),
        (signal.SIGUSR2, train, "clip_gradients", 1, 1, "SIGUSR2, after step 1"),
        (signal.SIGXCPU, train, "clip_gradients", 2, 2, "SIGXCPU, after step 2"),
        (signal.SIGHUP, train, "clip_gradients", 3, 3, "SIGHUP, after step 3"),
    ],
)
def test_a_signal_leaves_a_checkpoint_from_which_nothing_is_lost(
    data, whole, tmp_path, monkeypatch, capsys, number, owner, name, call, step, words
):
    output = tmp_path / "run"
    (said,) = stopped(data, output, monkeypatch, capsys, number, owner, name, call)
    last = output / f"checkpoint_step_{step}"
    assert said == (
        f"rl_train: stopped by {words}; the last whole checkpoint is {last}, --resume goes on "
        "from it"
    )
    assert save_load.list_checkpoints(output) == [last]
    assert not (output / "evaluation" / f"step_{step}.json").exists()
    run(data, output, resume="", **RUN)
    assert differences(whole, output) == []


def test_a_signal_in_the_first_evaluation(data, tmp_path, monkeypatch, capsys):
    how = (signal.SIGTERM, evaluate, "measure", 1)
    (said,) = stopped(data, tmp_path / "run", monkeypatch, capsys, *how)
    assert said == (
        "rl_train: stopped by SIGTERM, in an evaluation of step 0; "
        f"{tmp_path / 'run'} holds no checkpoint yet, --resume auto begins anew"
    )
    assert not (tmp_path / "run" / "evaluation" / "step_0.json").exists()


def test_a_signal_while_the_model_is_read_ends_at_once(data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(build, "build_policy", lambda *_: time.sleep(9))  # not reached
    how = (signal.SIGINT, build, "build_policy", 1)
    (said,) = stopped(data, tmp_path / "run", monkeypatch, capsys, *how)
    assert said == (
        "rl_train: stopped by SIGINT before the first step; "
        f"{tmp_path / 'run'} holds no checkpoint yet, --resume auto begins anew"
    )
    assert not (tmp_path / "run").exists()


def test_nohup_keeps_a_run_alive():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        handler = SignalHandler()
        with handler.listening():
            os.kill(os.getpid(), signal.SIGHUP)
            assert handler.received is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_terminal_that_is_closed_leaves_the_run_its_step():
    """Its output then goes nowhere; a progress bar would end the run by an error."""
    script = (
        "import os, sys, time\nfrom rl_train.run.signals import SignalHandler\n"
        "handler = SignalHandler()\nhandler.immediate = False\n"
        "with handler.listening():\n"
        "    print('ready', flush=True)\n"
        "    while not handler.received:\n        time.sleep(0.01)\n"
        "    print('step', flush=True)\n    print('bar', file=sys.stderr, flush=True)\n"
        "    os._exit(7)\n"
    )
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(ROOT)
        os.execve(sys.executable, [sys.executable, "-c", script], ENVIRONMENT)
    said = b""
    while b"ready" not in said:
        said += os.read(terminal, 1000)
    os.close(terminal)  # the kernel sends SIGHUP
    assert wait_for_exit(child, 60) == 7


def test_any_rank_s_signal_is_every_rank_s():
    stops = SignalHandler()
    assert not stops.agree([None, None]) and stops.agreed is None
    stops.received = "SIGINT"  # came after the ranks had told each other: of the next time
    assert not stops.agree([None, None])
    assert stops.agree([None, "SIGTERM"]) and stops.agreed == "SIGTERM"
    assert stops.agree([None, None])


@pytest.mark.parametrize(
    "torchrun, status", [({"TORCHELASTIC_RUN_ID": "1"}, 0), ({}, -signal.SIGINT)]
)
def test_a_second_ctrl_c_ends_at_once(torchrun, status):
    """But not the same one, that torchrun hands on."""
    script = (
        "import os, signal\nfrom rl_train.run.signals import SignalHandler\n"
        "stops = SignalHandler()\n"
        "stops.immediate = False\nwith stops.listening():\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n    assert stops.received == 'SIGINT'\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
    )
    how = dict(cwd=ROOT, env=ENVIRONMENT | torchrun, capture_output=True, text=True)
    ended = subprocess.run([sys.executable, "-c", script], timeout=120, **how)
    assert ended.returncode == status and "Traceback" not in ended.stderr
    assert ended.stderr.count("SIGINT: leaving with a checkpoint after this step") == 1
    assert ("a second Ctrl-C" in ended.stderr) == (not torchrun)


class Pids(Dataset):
    def __getitem__(self, _):
        time.sleep(0.05)
        return os.getpid()


def pid_loader(num_workers: int) -> DataLoader:
    """50 process ids of workers that are set up as `batch_loader`'s."""
    return DataLoader(
        Pids(),
        batch_size=None,
        sampler=[0] * 50,
        num_workers=num_workers,
        worker_init_fn=ignore_signals_in_worker,
    )


def test_a_worker_leaves_signals_to_the_trainer():
    with SignalHandler().listening():
        batches = iter(pid_loader(num_workers=1))
        pid = next(batches)
        assert pid != os.getpid()
        # Not by the trainer, which may end its workers.
        for name in ("INT", "TERM", "USR1", "USR2", "XCPU", "HUP"):
            subprocess.run(["bash", "-c", f"kill -{name} {pid}"], check=True, timeout=60)
        assert list(batches) == [pid] * 49


def test_a_trainer_that_ends_with_its_loader_in_use_ends_its_workers():
    """Python sends them SIGTERM at its exit and waits, which once lasted for ever."""
    script = (
        "import threading\nfrom tests.run.test_signals import pid_loader\n"
        "threading.held = iter(pid_loader(num_workers=2))\n"
        "print(next(threading.held))\nraise SystemExit(3)\n"
    )
    how = dict(cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    ended = subprocess.run([sys.executable, "-c", script], timeout=120, **how)
    assert ended.returncode == 3 and not Path("/proc", ended.stdout.strip()).exists()


def test_a_campaign_of_kills(tmp_path):
    """A kill at a file operation, and a run killed at random moments; by hand more, see there."""
    status, output = fork(tmp_path, lambda: kill_campaign.main(["--kills", "2", "--seed", "1"]))
    assert status == 0 and "kills by moment" in output, output
