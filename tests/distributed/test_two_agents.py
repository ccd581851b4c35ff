"""The launcher on two machines, here two torchrun agents on the loopback address."""

import subprocess
import sys

import pytest

from tests.ranks import finish, free_port
from tests.runs import ENVIRONMENT, ROOT, distance, flags, on_one_core, run, weights

one_core = pytest.fixture(autouse=True)(on_one_core)
RUN = dict(max_steps=1, seed=1, learning_rate=1e-5, loop2_weight=0)
TIMEOUT = 300


def launch(argv, nproc=1, **environment) -> subprocess.Popen:
    """`bash run_rl_train.sh`, its output in the pipe stdout."""
    where = dict(VENV="", PYTHON=sys.executable, NPROC=str(nproc), **environment)
    how = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    return subprocess.Popen(["bash", "run_rl_train.sh", *argv], env=ENVIRONMENT | where, **how)


def two_agents(*argvs):
    """[(exit status, output)] of one launcher for each of two machines' command lines."""
    where = dict(NNODES="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    agents = [launch(argv, NODE_RANK=str(node), **where) for node, argv in enumerate(argvs)]
    outputs = finish(agents, TIMEOUT)
    return [(agent.returncode, output) for agent, output in zip(agents, outputs)]


def test_two_machines_train_as_one_process(data, tmp_path):
    """They share no disk: each has its own ranks' rollouts, the first all else."""
    folders = [tmp_path / "disk0", tmp_path / "disk1"]
    two = dict(batch_size=1, **RUN)
    for status, output in two_agents(*(flags(data, folder, **two) for folder in folders)):
        assert status == 0, output
    one = run(data, tmp_path / "one", batch_size=2, **RUN)
    assert distance(weights(folders[0], 1), weights(one, 1)) < 1e-5
    assert [file.name for file in folders[1].iterdir()] == ["rollouts"]
    for folder, rank in zip(folders, "01"):
        assert [file.name for file in (folder / "rollouts").iterdir()] == [f"rank{rank}.jsonl"]
