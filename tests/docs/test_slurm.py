"""docs/examples/slurm.sh with stand-ins for Slurm's commands and for the launcher."""

import os
import shutil
import signal
import subprocess
import time

import pytest

from tests.runs import ROOT

SCRIPT = ROOT / "docs" / "examples" / "slurm.sh"
# Runs the command once for each node, beside each other; its status is the highest.
SRUN = """[ "$1" = --kill-on-bad-exit=0 ] && shift
for node in $(seq 0 $((NNODES - 1))); do SLURM_NODEID=$node "$@" & pids="${pids-} $!"; done
highest=0
for pid in $pids; do wait $pid || { s=$?; [ $s -gt $highest ] && highest=$s; }; done
exit $highest"""
SCONTROL = """if [ "$1" = show ]; then printf 'node0\\nnode1\\n'; else echo "$@" >>requeued; fi"""
LAUNCHER = """touch "started$NODE_RANK"
while [ -f hold ]; do sleep .1; done
printf '%s\\n' "$NNODES $MASTER_ADDR $MASTER_PORT" "$@" >"node$NODE_RANK"
exit "$(cat "status$NODE_RANK")" """


@pytest.fixture
def job(tmp_path):
    """Function that starts the script as a job of nodes with these statuses, in `tmp_path`."""

    def start(*statuses, state="RUNNING"):
        commands = tmp_path / "bin"
        commands.mkdir()
        written = dict(srun=SRUN, scontrol=SCONTROL, squeue=f"echo {state}")
        for name, text in written.items():
            (commands / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
            (commands / name).chmod(0o755)
        (tmp_path / "tools").mkdir()
        (tmp_path / "tools" / "environment.sh").write_text("echo made >>environments\n")
        (tmp_path / "run_rl_train.sh").write_text(LAUNCHER)
        for node, status in enumerate(statuses):
            (tmp_path / f"status{node}").write_text(str(status))
        environment = os.environ | dict(
            PATH=f"{commands}:{os.environ['PATH']}",
            SLURM_SUBMIT_DIR=str(tmp_path),
            SLURM_JOB_ID="41234",
            SLURM_JOB_NUM_NODES=str(len(statuses)),
            SLURM_JOB_NODELIST="node[0-1]",
        )
        command = ["bash", str(SCRIPT), "--model_path", "a folder", "--output_dir", "O"]
        return subprocess.Popen(command, env=environment, cwd="/")

    return start


def test_each_node_is_told_its_number_and_where_to_meet(job, tmp_path):
    assert job(0, 0).wait(60) == 0
    words = ["2 node0 21234", "--model_path", "a folder", "--output_dir", "O", "--resume", "auto"]
    for node in ("node0", "node1"):
        assert (tmp_path / node).read_text().splitlines() == words
    assert (tmp_path / "environments").read_text() == "made\n"
    assert not (tmp_path / "requeued").exists()


@pytest.mark.parametrize(
    "statuses, state, requeued",
    [
        ((75,), "RUNNING", True),
        ((75, 75), "RUNNING", True),
        ((75,), "COMPLETING", False),  # cancelled by the user
        ((2,), "RUNNING", False),
        ((1, 75), "RUNNING", True),
        ((137,), "RUNNING", False),
    ],
)
def test_a_stop_with_a_checkpoint_is_requeued(job, tmp_path, statuses, state, requeued):
    assert job(*statuses, state=state).wait(60) == max(statuses)
    found = tmp_path / "requeued"
    assert (found.read_text() if found.exists() else "") == "requeue 41234\n" * requeued


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_the_script_waits_for_the_checkpoint(job, tmp_path, number):
    (tmp_path / "hold").touch()
    running = job(75)
    for _ in range(600):
        if (tmp_path / "started0").exists():
            break
        time.sleep(0.1)
    running.send_signal(number)
    time.sleep(0.5)
    assert running.poll() is None
    (tmp_path / "hold").unlink()
    assert running.wait(60) == 75 and (tmp_path / "requeued").exists()


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="no shellcheck")
def test_shellcheck_finds_nothing():
    subprocess.run(["shellcheck", SCRIPT], check=True)
