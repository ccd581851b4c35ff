"""What a rank costs the others that is slow, that dies, or that hangs and comes back, in seconds.

    python -m tests.campaigns.rank_campaign --ranks 8

Four runs of the same steps by gloo on the CPU, started as the launcher starts them. In three of
them the last rank is disturbed at one step, in the middle between two checkpoints: it sleeps in
every step from there on; SIGKILL ends it, and --max_restarts starts all ranks again; SIGSTOP holds
it, and SIGCONT lets it go on. The final weights of all runs must be equal: bit for bit with two
ranks. With more a restart changes the last bit, probably because DDP sorts its buckets anew after
its first step, and so the order in which gradients are added.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.runs import ENVIRONMENT, ROOT, distance, draw_data, flags, weights

STEPS, SAVE_EVERY, DISTURBED = 16, 4, 7  # the disturbed step begins with the seventh
SLEEP, HELD = 2.0, 15.0  # seconds, of a slow rank in each step and of one that is held
ROUNDING = 1e-6  # of weights, in float32
KINDS = ("undisturbed", "slow", "dies", "comes back")
KIND, MARKER, VICTIM = "DISTURBED_KIND", "DISTURBED_MARKER", "DISTURBED_RANK"
calls = 0


def reward(completions: Sequence[str], **_) -> list[float]:
    """Return rewards that differ in each group, and disturb the victim's rank.

    It is called once in each step; after a restart its calls are counted from 0.
    """
    global calls
    calls += 1
    kind, marker = os.environ[KIND], Path(os.environ[MARKER])
    if os.environ["RANK"] == os.environ[VICTIM] and calls >= DISTURBED:
        if kind == "slow":
            time.sleep(SLEEP)
        elif kind != "undisturbed" and not marker.exists():
            marker.write_text(str(time.time()))
            if kind == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            wake = f"sleep {HELD}; kill -CONT {os.getpid()}"
            subprocess.Popen(["sh", "-c", wake], start_new_session=True)
            os.kill(os.getpid(), signal.SIGSTOP)
    return [row % 7 / 7 for row in range(len(completions))]


def run(kind: str, ranks: int, data: Path, output: Path) -> dict[int, list[float]]:
    """Run all steps and return {step: the times at which it was logged, once or twice}."""
    argv = flags(
        data,
        output,
        tasks="mask_caption_mask",
        reward="tests.campaigns.rank_campaign:reward",
        max_steps=STEPS,
        save_steps=SAVE_EVERY,
        batch_size=2,
        logging_steps=1,
        eval_data_dir=None,
        eval_steps=None,
        eval_samples=None,
    )
    command = [sys.executable, "-m", "rl_train.distributed.launch", "--max_restarts", "1"]
    own = {KIND: kind, MARKER: f"{output}.marker", VICTIM: str(ranks - 1), "NPROC": str(ranks)}
    with open(f"{output}.log", "w") as log:
        subprocess.run(
            [*command, "-m", "rl_train.train", *argv],
            cwd=ROOT,
            env=ENVIRONMENT | own,
            stdout=log,
            stderr=subprocess.STDOUT,
            check=True,
        )
    events = EventAccumulator(str(output / "tensorboard"), dict(scalars=0)).Reload()
    logged: dict[int, list[float]] = {}
    for event in events.Scalars("total_loss"):
        logged.setdefault(event.step, []).append(event.wall_time)
    return logged


def seconds(logged: dict[int, list[float]]) -> list[float]:
    """Return the seconds between the steps as they were last logged."""
    times = [logged[step][-1] for step in sorted(logged)]
    return [after - before for before, after in zip(times, times[1:])]


def main(argv: Sequence[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    ranks = parser.parse_args(argv).ranks
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        data = draw_data(root / "data")
        logged = {kind: run(kind, ranks, data, root / kind.split()[0]) for kind in KINDS}
        usual = statistics.median(seconds(logged["undisturbed"]))
        print(f"{ranks} ranks, a step takes {usual:.2f} s")
        slow = statistics.median(seconds(logged["slow"])[DISTURBED:])
        print(f"slow by {SLEEP:.0f} s in each step: a step takes {slow:.2f} s")
        for kind in ("dies", "comes back"):
            at = float(Path(f"{root / kind.split()[0]}.marker").read_text())
            times = logged[kind]
            # From the disturbance to the end of the step that it hit.
            lost = times[DISTURBED][-1] - at - usual
            print(f"{kind} in step {DISTURBED}: {lost:.1f} s until that step is done")
        whole = weights(root / "undisturbed", STEPS)
        for kind in KINDS[1:]:
            apart = distance(whole, weights(root / kind.split()[0], STEPS))
            print(f"{kind}: weights differ by {apart:.1e} at most")
            assert apart <= (0 if ranks == 2 else ROUNDING), f"{kind}: other weights"


if __name__ == "__main__":
    main()
