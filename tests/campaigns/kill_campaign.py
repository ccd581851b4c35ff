"""Runs that SIGKILL ends at random moments and at single file operations, then resumed to the end.

    python -m tests.campaigns.kill_campaign --kills 100            # one process
    # two by gloo, of which one is killed
    python -m tests.campaigns.kill_campaign --kills 20 --ranks 2
    # four tasks over two data sets
    python -m tests.campaigns.kill_campaign --kills 20 --ranks 2 --four_tasks
    # signals that ask a run to stop, to one rank
    python -m tests.campaigns.kill_campaign --kills 0 --stops 20
    # a disk that is full (root: mounts tmpfs)
    python -m tests.campaigns.kill_campaign --kills 0 --full 20
    # in pieces: what is done stands in the file, and a second call goes on
    python -m tests.campaigns.kill_campaign --kills 60 --state kills.json --minutes 5

Every trial is compared with the run that nobody disturbed: weights, EMA, optimizer, best
checkpoint, rollouts, every TensorBoard point and picture, the list of files. So that a trial costs
seconds, each run is a fork of this process, which has done the imports and built the policy, and
evaluations and pictures are drawn from the weights instead of being measured.
"""

import argparse
import json
import mmap
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tqdm import tqdm

from rl_train import cli, train
from rl_train.checkpoint import save_load
from rl_train.distributed import process_group
from rl_train.evaluation import evaluate
from rl_train.loggers import tensorboard
from rl_train.run import build
from rl_train.run.signals import EXIT_INTERRUPTED, SIGNALS
from tests.data.test_questions import ROWS, write_questions
from tests.runs import draw_data, flags, measure, picture, rollouts

PHASES = ("start", "evaluation", "step", "log", "checkpoint", "end")
RUN = dict(max_steps=4, save_steps=2, save_total_limit=1, eval_steps=2, eval_samples=1)
# Whole captions, and METEOR beside the IoU, which is 0 of most captions of the demo's base: where
# two captions earn the same, a step learns nothing. At this seed all four learn.
RUN |= dict(batch_size=2, max_completion_length=9, learning_rate=1e-3, tasks="mask_caption_mask")
RUN |= dict(reward_weights=["loop1.iou=1", "loop1.meteor=1"], seed=1)
# Both loops and both direct tasks; a step has as many samples of each data set.
FOUR_TASKS = dict(
    tasks=["mask_caption_mask", "caption_mask_caption", "referring", "captioning"],
    reward_weights=["loop1.meteor=.5", "referring.centre=.5", "captioning.cider=1"],
    latent_std=1,
)
DEADLINE = 60  # seconds in which every process of a run must have ended, also if its peer is gone
# Seconds after which torchrun kills the ranks that outlive another: gloo does not tell a send that
# has begun of a closed connection (tests/distributed/test_process_group.py).
PATIENCE = 30
KILLED = -signal.SIGKILL


class Board:
    """Numbers that a run shows to the process that forked it.

    They are its phase, its file operations, and 1 when its ranks have met.
    """

    def __init__(self):
        self.memory = mmap.mmap(-1, 16)  # shared with forks

    def __getitem__(self, place: int) -> int:
        return int.from_bytes(self.memory[place * 4 : place * 4 + 4], "little")

    def __setitem__(self, place: int, value: int):
        self.memory[place * 4 : place * 4 + 4] = value.to_bytes(4, "little")

    @property
    def phase(self) -> str:
        return PHASES[self[0]]


def show_phases(board: Board):
    """Make this process tell the board where it is."""

    def during(phase, function, afterwards=None):
        def wrapped(*args, **kwargs):
            before, board[0] = board[0], PHASES.index(phase)
            try:
                return function(*args, **kwargs)
            finally:
                board[0] = PHASES.index(afterwards) if afterwards else before

        return wrapped

    init_group = process_group.init

    def meet():
        ranks = init_group()
        board[2] = 1
        return ranks

    board[0], process_group.init = 0, meet
    train.train = during("step", train.train, afterwards="end")
    evaluate.evaluate = during("evaluation", evaluate.evaluate)
    save_load.write = during("checkpoint", save_load.write)
    save_load.remove_oldest = during("checkpoint", save_load.remove_oldest)
    tensorboard.RunLogger.rollouts = during("log", tensorboard.RunLogger.rollouts)
    tensorboard.RunLogger.scalars = during("log", tensorboard.RunLogger.scalars)


class Appended:
    """A file of rollouts of which each append counts, and can be torn in the middle."""

    def __init__(self, file, count):
        self.file, self.count = file, count

    def write(self, piece: bytes):
        self.count(lambda: self.half(piece))
        self.file.write(piece)

    def half(self, piece: bytes):
        self.file.write(piece[: len(piece) // 2])
        self.file.flush()

    def __getattr__(self, name):
        return getattr(self.file, name)


def die_at(operation: int, output: Path, board: Board, torn: bool):
    """Kill this process before its n-th change of the output folder, or in the middle of it.

    Changes are what Python's audit events say of files below the folder, and each append.
    """
    prefix = str(output)
    changes = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree"}

    def count(half_done=None):
        board[1] += 1
        if board[1] == operation:
            if torn and half_done:
                half_done()
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(name, args):
        opened = name == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")
        if (opened or name in changes) and str(args[0]).startswith(prefix):
            count()

    open_rollouts, board[1] = tensorboard.RunLogger._open_rollouts, 0
    tensorboard.RunLogger._open_rollouts = lambda log: Appended(open_rollouts(log), count)
    sys.addaudithook(hook)


def fork_run(
    data: Path,
    output: Path,
    board: Board,
    ranks: list[dict],
    how: dict,
    operation: int = 0,
    torn: bool = False,
) -> list[int]:
    """Return process ids of a run's ranks, the first of which dies at its n-th `operation`, if any.

    Args: how: flags of the run; `operation` 0: it dies at none.
    """
    sys.stdout.flush()
    board[2] = 0
    resume = dict(resume="") if (output / "config.json").is_file() else {}
    pids = []
    for rank, environment in enumerate(ranks):
        pid = os.fork()
        if pid == 0:
            status = 70
            try:
                log = os.open(f"{output}.log{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
                os.dup2(log, 1), os.dup2(log, 2)
                os.environ.update(environment)
                if rank == 0:
                    show_phases(board)
                    if operation:
                        die_at(operation, output, board, torn)
                size = dict(batch_size=how["batch_size"] // len(ranks))
                train.main(flags(data, output, **how | size | resume), loop=train.train)
                status = 0
            except SystemExit as end:
                print(end.code)
                status = end.code if isinstance(end.code, int) else 1
            finally:
                sys.stdout.flush(), os._exit(status)
        pids.append(pid)
    return pids


def ended(pids: list[int], deadline: float = DEADLINE) -> list[int]:
    """Exit statuses of the processes, minus a signal's number. Raises TimeoutError beyond it."""
    statuses, until = {}, time.monotonic() + deadline
    while len(statuses) < len(pids):
        for pid in set(pids) - set(statuses):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                statuses[pid] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            for pid in set(pids) - set(statuses):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            raise TimeoutError(f"ranks {statuses} ended, others not within {deadline} s")
        time.sleep(0.03)
    return [statuses[pid] for pid in pids]


def rank_environments(number: int) -> list[dict[str, str]]:
    """Variables that torchrun sets for processes of one machine; nothing for one process."""
    if number == 1:
        return [{}]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    place = dict(WORLD_SIZE=str(number), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    return [place | dict(RANK=str(r), LOCAL_RANK=str(r)) for r in range(number)]


def mount(*words):
    subprocess.run(["mount", *map(str, words)], check=True, timeout=DEADLINE)


def points(output: Path) -> dict[str, dict[int, float] | list[tuple[int, bytes]]]:
    """Return {tag: its points} of all scalars but times, and of pictures, that are shown.

    A scalar is {step: value}: a run resumed at its last step writes that evaluation again.
    """
    sizes = dict(scalars=0, images=0, tensors=0)
    log = EventAccumulator(str(output / "tensorboard"), sizes).Reload()
    tags = log.Tags()
    scalars = [tag for tag in tags["scalars"] if not tag.startswith("perf/")]
    points_of = {tag: {e.step: e.value for e in log.Scalars(tag)} for tag in scalars}
    for tag in tags["images"]:
        points_of[tag] = [(e.step, e.encoded_image_string) for e in log.Images(tag)]
    return points_of


def names(output: Path) -> list[str]:
    """Every file of a run, the session's part of an event file's name left away."""
    found = {str(p.relative_to(output)) for p in output.rglob("*")}
    return sorted({n.split("tfevents")[0] for n in found})


def differences(whole: Path, output: Path) -> list[str]:
    """Return the differences between two finished runs."""
    found = []
    for folder in (f"checkpoint_step_{RUN['max_steps']}", save_load.BEST_CHECKPOINT):
        for file in ("trainables.safetensors", "ema.safetensors"):
            one, two = (load_file(o / folder / file) for o in (whole, output))
            if any(not torch.equal(one[name], two[name]) for name in one):
                found.append(f"{folder}/{file}")
        states = [save_load.read_state(o / folder) for o in (whole, output)]
        for part in ("step", "optimizer", "scheduler", "tasks", "counters"):
            if repr(states[0][part]) != repr(states[1][part]):
                found.append(f"{folder}/{part}")
    for file in sorted(whole.glob("rollouts/*")):
        if file.read_bytes() != (output / "rollouts" / file.name).read_bytes():
            found.append(f"rollouts/{file.name}")
    for step in range(0, RUN["max_steps"] + 1, RUN["eval_steps"]):
        file = f"evaluation/step_{step}.json"
        one, two = (json.loads((o / file).read_text()) for o in (whole, output))
        if any(one[k] != two[k] for k in set(one) - {"flags"}):
            found.append(file)
    one, two = points(whole), points(output)
    found += [
        f"curve {tag}" for tag in sorted(one.keys() | two.keys()) if one.get(tag) != two.get(tag)
    ]
    found += [f"file {name}" for name in sorted(set(names(whole)) ^ set(names(output)))]
    return found


class Campaign:
    """Trials against one undisturbed run, in a temporary folder."""

    def __init__(self, root: Path, ranks: int, seed: int = 0, four_tasks: bool = False):
        self.root, self.ranks, self.board = root, ranks, Board()
        self.how, modules = dict(RUN), ["lora", "mlp1"]
        if four_tasks:
            own = write_questions(root / "own", ROWS)
            mixture = dict(data_mixture=f"tests.data.test_questions:Questions:{own}")
            self.how |= FOUR_TASKS | mixture
            modules += ["text_hidden_fcs", "sam2"]
        self.random, self.moments, self.failures = random.Random(seed), Counter(), []
        self.last, self.slowest = "", 0.0  # phase of the last kill; seconds until all ranks ended
        self.data, self.whole = draw_data(root / "data"), root / "whole"
        # What a first run imports and reads is then in all forks; on the CPU it starts no thread.
        tqdm.monitor_interval = 0
        evaluate.measure, tensorboard.rollout_picture = measure, picture
        with open(root / "warm.log", "w") as log, redirect_stdout(log), redirect_stderr(log):
            train.main(flags(self.data, root / "warm", **self.how | dict(max_steps=1)))
            config = cli.parse(flags(self.data, root / "warm", **self.how))
            cpu = torch.device("cpu")
            built = build.build_policy(config.policy, {}, modules, 3, cpu)
        build.build_policy = lambda *_: built
        begin = time.monotonic()
        # Counts all operations, and dies at none.
        pids = fork_run(*self._here(self.whole), operation=2**31)
        assert set(ended(pids)) == {0}, Path(f"{self.whole}.log0").read_text()
        if four_tasks:  # of two data sets each
            lines = rollouts(self.whole)
            trained = {(line["task"], line["image_id"].split(":")[0]) for line in lines}
            assert len(trained) == 8, trained
        self.seconds, self.operations = time.monotonic() - begin, self.board[1]
        # In pages: what it takes with one checkpoint more, which is removed at the end.
        sizes = [-(-p.stat().st_size // 4096) for p in self.whole.rglob("*") if p.is_file()]
        self.size, self.stopped = int(1.2 * sum(sizes)), Counter()

    def _here(self, output: Path):
        return self.data, output, self.board, rank_environments(self.ranks), self.how

    def trial(self, operation: int = 0, torn: bool = False):
        """One run that is killed once at an operation, or 1 to 3 times at random, and resumed."""
        output = self._fresh()
        if operation:
            self._killed(fork_run(*self._here(output), operation, torn), victim=0)
        else:
            for _ in range(self.random.randint(1, 3)):
                pids = fork_run(*self._here(output))
                # Before ranks have met, a lost one ends the others by torchrun alone.
                while self.ranks > 1 and not self.board[2]:
                    time.sleep(0.01)
                time.sleep(self.random.uniform(0, self.seconds))
                victim = self.random.randrange(self.ranks)
                os.kill(pids[victim], signal.SIGKILL)
                self._killed(pids, victim)
        self._finish(output, f"operation {operation}{' torn' * torn}" if operation else "random")

    def stop(self):
        """One run that a signal asks to stop at a random moment, and the resumed one."""
        output = self._fresh()
        pids = fork_run(*self._here(output))
        time.sleep(self.random.uniform(0, self.seconds))
        number = self.random.choice(SIGNALS)
        self.last = self.board.phase
        late = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        os.kill(self.random.choice(pids), number)
        statuses = set(ended(pids))
        if late:  # a rank had ended by then: no signal reached a run
            assert statuses == {0}, f"undisturbed ({self.last}): ended {statuses}"
            return
        early = self.last == "start" and statuses <= {
            EXIT_INTERRUPTED,
            1,
            -number,
        }  # it had nothing to save
        if not early and statuses not in ({EXIT_INTERRUPTED}, {0}):
            self.failures.append(f"{number.name} ({self.last}): ended {statuses}")
        self.stopped[f"{self.last} {sorted(statuses)}"] += 1
        self._finish(output, number.name)

    def full(self):
        """One run on a disk that becomes full, and the resumed one after there is room again."""
        output = self._fresh()
        output.mkdir()
        room = self.random.randint(1, self.size)
        mount("-t", "tmpfs", "-o", f"size={room * 4}k", "none", output)
        try:
            statuses = ended(fork_run(*self._here(output)))
            log = Path(f"{output}.log0").read_text()
            # TensorBoard's own thread may tell of the disk before the run does.
            log = re.sub(r"Exception in thread .*?OSError: [^\n]*", "", log, flags=re.DOTALL)
            said = re.findall("rl_train: .*", log)  # a bar may stand before it
            if "Traceback" in log or statuses[0] == 0 or len(said) != 1:
                self.failures.append(f"{room * 4} KiB: ended {statuses}: {log[-1500:]}")
            else:
                place = said[0].split(" cannot be written")[0].split("/")[-1]
                self.stopped[re.sub(r"\d+", "N", place)] += 1
            mount("-o", "remount,size=1g", output)
            self._finish(output, f"{room * 4} KiB, {said}")
        finally:
            subprocess.run(["umount", output], check=True, timeout=DEADLINE)

    def _finish(self, output, words):
        """Resume a run to its end and compare it."""
        statuses = ended(fork_run(*self._here(output)))
        if set(statuses) != {0}:
            text = Path(f"{output}.log0").read_text()[-1500:]
            self.failures.append(f"{words} ({self.last}): resume ended {statuses}: {text}")
        elif found := differences(self.whole, output):
            self.failures.append(f"{words} ({self.last}): {found}")

    def _fresh(self) -> Path:
        output = self.root / "trial"
        shutil.rmtree(output, ignore_errors=True)
        for log in self.root.glob("trial.log*"):
            log.unlink()
        return output

    def _killed(self, pids, victim):
        begin = time.monotonic()
        try:
            statuses = ended(pids, PATIENCE if self.ranks > 1 else DEADLINE)
        except TimeoutError:  # by now it is killed, as by torchrun
            self.last = f"{self.board.phase}, the other rank waited"
            self.moments[self.last] += 1
            return
        self.slowest = max(self.slowest, time.monotonic() - begin)
        if statuses[victim] == KILLED:  # else it had just finished
            self.last = self.board.phase
            self.moments[self.last] += 1

    @property
    def kills(self) -> int:
        return sum(self.moments.values())

    def read(self, file: Path):
        """Go on from what earlier calls with the same file have done."""
        if file.exists():
            done = json.loads(file.read_text())
            assert done["ranks"] == self.ranks, f"{file} is of --ranks {done['ranks']}"
            assert done["tasks"] == self.how["tasks"], f"{file} is of {done['tasks']}"
            self.moments, self.stopped = Counter(done["kills"]), Counter(done["stops"])
            self.failures, self.slowest = done["failures"], done["slowest_seconds"]
        # Other moments than those of the earlier calls.
        self.random.seed(f"{self.kills} {self.stopped.total()} {self.random.random()}")

    def write(self, file: Path):
        done = dict(
            ranks=self.ranks, tasks=self.how["tasks"], kills=self.moments, stops=self.stopped
        )
        done |= dict(failures=self.failures, slowest_seconds=self.slowest)
        file.write_text(json.dumps(done, indent=2) + "\n")


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--stops", type=int, default=0)
    parser.add_argument("--full", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--four_tasks", action="store_true", help="over two data sets")
    parser.add_argument("--state", type=Path, help="file of what is done, to go on from")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="at most, in this call")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:
        campaign = Campaign(Path(root), args.ranks, args.seed, args.four_tasks)
        print(f"a run: {campaign.seconds:.1f} s, {campaign.operations} file operations", flush=True)
        if args.state:
            campaign.read(args.state)
        until = time.monotonic() + 60 * args.minutes

        def goes_on(is_left: bool) -> bool:
            print(campaign.kills, dict(campaign.moments), dict(campaign.stopped), flush=True)
            print(f"{len(campaign.failures)} differ", flush=True)
            if args.state:
                campaign.write(args.state)
            return is_left and time.monotonic() < until

        while goes_on(campaign.kills < args.kills):
            # By turns at a file operation, half of them torn, and at a random moment.
            if campaign.kills % 2:
                campaign.trial()
            else:
                operation = campaign.random.randint(1, campaign.operations)
                campaign.trial(operation, torn=campaign.random.random() < 0.5)
        while goes_on(campaign.stopped.total() < args.stops):
            campaign.stop()
        for _ in range(args.full):
            campaign.full()
            goes_on(True)
    print(f"kills by moment: {dict(campaign.moments)}; ranks ended within {campaign.slowest:.1f} s")
    print(f"stops: {dict(campaign.stopped)}")
    raise SystemExit("\n".join(campaign.failures) or None)


if __name__ == "__main__":
    main()
