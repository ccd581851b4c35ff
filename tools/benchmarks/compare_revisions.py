"""Compare the speed of two revisions on one device, in alternating runs.

    git worktree add --detach ../old REVISION
    python -m tools.benchmarks.compare_revisions ../old . --output comparison.json

One worker process per source tree imports that tree's own modules. Both stay alive and take turns:
a run of A, a run of B, a run of A, .. So a device that becomes slower or faster does so for both.
Models have random weights of published shapes, and both must fit into the device's memory.

Works: step = a whole training step of both loops, step_13_tiles = with answers up to 512 tokens,
step_qwen = of Qwen2.5-VL-7B with points; decode = 128 new tokens for each of 32 rows, decode_128 =
of 128 rows; logprob = forward and backward of the update's log-probs, 32 rows.

The script imports neither tree in its own process, and a tree needs no .git and no installation.
"""

import argparse
import importlib
import importlib.util
import json
import os
import random
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

NUM_RESAMPLES = 10_000
GIB = 2**30
REPLY_SECONDS = 1800  # most that a request may take; the first run of a work compiles
EXIT_SECONDS = 60  # most that a worker may take to exit after it closed its output

# Names under which a revision may have a module, of tools.benchmarks or (engine) of rl_train.
BENCHMARKS, LIBRARY = "tools.benchmarks", "rl_train"
WORKLOAD = ("workload", "work")

NUM_PROMPTS = 4  # of decode and logprob, with 8 rows each by default
# Options of each work at the published sizes.
TILES = dict(num_tiles=13, prompt_length=3472, width=1920, height=1080)
TILES |= dict(answer_lengths=(200.0, 120.0), caption_lengths=(100.0, 60.0))
OPTIONS = dict(
    step={},
    step_13_tiles=TILES | dict(flags=("--max_completion_length", "512")),
    step_qwen=dict(sizes="qwen-7b", prompt_length=1100),
    decode=dict(num_prompts=(NUM_PROMPTS,)),
    decode_128=dict(num_prompts=(16,)),
    logprob=dict(num_prompts=NUM_PROMPTS),
)
# Those for --sizes tiny, which tries the code on a CPU.
TINY_FLAGS = (
    "--batch_size 2 --num_generations 3 --max_completion_length 6 --lora_r 4 --micro_batch_size 3"
)
TINY_STEP = dict(prompt_length=200, answer_tokens=4, flags=tuple(TINY_FLAGS.split()))
TINY_ANSWERS = dict(prompt_length=16, num_tokens=8, lora_r=4, num_generations=2)
TINY = dict(
    step=TINY_STEP,
    step_13_tiles=TINY_STEP | dict(answer_lengths=(3.0, 1.0)),
    step_qwen=dict(
        sizes="qwen-tiny", prompt_length=130, flags=(*TINY_FLAGS.split(), "--image_size", "48")
    ),
    decode=TINY_ANSWERS | dict(num_prompts=(NUM_PROMPTS,)),
    decode_128=TINY_ANSWERS | dict(num_prompts=(16,)),
    logprob=TINY_ANSWERS | dict(num_prompts=NUM_PROMPTS),
)


# The worker: runs in a process of its own, with one tree on its path.


def load(package: str, *names: str):
    """Import a module of this worker's tree under the first of its names that exists."""
    for name in names:
        if importlib.util.find_spec(f"{package}.{name}") is not None:
            return importlib.import_module(f"{package}.{name}")
    raise ModuleNotFoundError(f"{package}: no module {' or '.join(names)}")


def prepare_step(options: dict) -> Callable[[], object]:
    """Build a function that runs one whole training step."""
    workload = load(BENCHMARKS, *WORKLOAD)
    return workload.build(workload.Options(**options)).step


def prepare_decode(options: dict) -> Callable[[], object]:
    """Build a function that samples answers to prompts."""
    import torch

    decode, common = load(BENCHMARKS, "decode"), load(BENCHMARKS, "common")
    chosen = decode.Options(**options)
    engine = load(LIBRARY, "engine").Engine(common.random_llm(chosen), pad_id=0)
    sample = decode.samplers(engine, chosen.num_prompts[0], chosen)["decoder"]

    def run():
        with torch.no_grad(), torch.autocast(torch.device(chosen.device).type, torch.bfloat16):
            sample(chosen.num_tokens)

    return run


def prepare_logprob(options: dict) -> Callable[[], object]:
    """Build a function that scores the same number of answers, forward and backward."""
    logprob, common = load(BENCHMARKS, "logprob"), load(BENCHMARKS, "common")
    chosen = logprob.Options(**options)
    batch = logprob.MicroBatch(common.random_llm(chosen), chosen)
    return lambda: batch.run("packed, checkpoints")


WORKS = dict(
    step=prepare_step,
    step_13_tiles=prepare_step,
    step_qwen=prepare_step,
    decode=prepare_decode,
    decode_128=prepare_decode,
    logprob=prepare_logprob,
)


def serve(device: str, sizes: str, requests: TextIO, replies: TextIO):
    """Answer requests, one JSON value a line.

    "prepare WORK" builds a work and frees the last one; "run" runs it once. The reply to both is
    {"seconds", "peak_gib"}.
    """
    import gc

    import torch

    torch.set_num_threads(1)
    cuda = torch.device(device).type == "cuda"
    work = None
    for line in requests:
        request = line.split()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
        start = time.perf_counter()
        if request[0] == "prepare":
            work = None
            gc.collect()
            if cuda:
                torch.cuda.empty_cache()
            chosen = (TINY if sizes == "tiny" else OPTIONS)[request[1]]
            work = WORKS[request[1]](dict(device=device, sizes=sizes) | chosen)
        else:
            work()
        if cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        peak = torch.cuda.max_memory_allocated() / GIB if cuda else 0.0
        print(json.dumps(dict(seconds=seconds, peak_gib=peak)), file=replies, flush=True)


def run_worker(tree: Path, device: str, sizes: str):
    """Serve on standard input and output; whatever the tree prints goes to standard error."""
    import rl_train

    assert Path(rl_train.__file__).is_relative_to(tree.resolve()), (
        f"{rl_train.__file__} is not of {tree}"
    )
    with os.fdopen(os.dup(1), "w") as replies:
        # Replies have a descriptor of their own, which prints cannot disturb.
        os.dup2(2, 1)
        serve(device, sizes, sys.stdin, replies)


# The controller.


class Worker:
    """A process that runs the works of one source tree."""

    def __init__(self, tree: Path, device: str, sizes: str):
        self.tree = tree.resolve()
        if not (self.tree / "rl_train").is_dir():
            raise ValueError(f"{tree}: no source tree, it holds no folder rl_train")
        # -P: the script's own folder is not on the path, so a worker imports its tree alone.
        command = [sys.executable, "-P", str(Path(__file__).resolve()), "--worker"]
        command += ["--device", device, "--sizes", sizes, str(self.tree)]
        # The tree comes first; folders of other packages stay behind it.
        paths = filter(None, (str(self.tree), os.environ.get("PYTHONPATH")))
        self.process = subprocess.Popen(
            command,
            cwd=self.tree,
            env=os.environ | dict(PYTHONPATH=os.pathsep.join(paths)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, request: str):
        """Send a request without waiting for its reply."""
        try:
            self.process.stdin.write(request + "\n")
            self.process.stdin.flush()
        except BrokenPipeError as error:
            raise RuntimeError(f"worker of {self.tree}: {self._status()}") from error

    def reply(self) -> dict[str, float]:
        """Wait for the reply to the oldest request.

        Raises:
            RuntimeError: the worker ended, with its error on standard error.
            TimeoutError: it did not reply within REPLY_SECONDS.
        """
        # Replies are read one line at a time, so none is left in Python's buffer, unseen by select.
        ready, _, _ = select.select([self.process.stdout], [], [], REPLY_SECONDS)
        if not ready:
            raise TimeoutError(f"worker of {self.tree}: no reply after {REPLY_SECONDS} s")
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"worker of {self.tree}: {self._status()}")
        return json.loads(line)

    def _status(self) -> str:
        try:
            return f"ended with status {self.process.wait(EXIT_SECONDS)}; its error is above"
        except subprocess.TimeoutExpired:
            return f"closed its output and did not exit in {EXIT_SECONDS} s"

    def run(self) -> dict[str, float]:
        """Run the prepared work once and wait for it."""
        self.ask("run")
        return self.reply()

    def close(self):
        """End the process."""
        self.process.kill()
        self.process.wait()


@dataclass
class Comparison:
    """Seconds of alternating runs of one work by trees A and B."""

    work: str
    a: list[float] = field(default_factory=list)
    b: list[float] = field(default_factory=list)
    peak_gib: tuple[float, float] = (0.0, 0.0)

    def figures(self) -> dict[str, object]:
        """Return the medians, and the median of the paired ratios B / A with its interval."""
        ratios = [b / a for a, b in zip(self.a, self.b, strict=True)]
        return dict(
            seconds_a=self.a,
            seconds_b=self.b,
            median_a=statistics.median(self.a),
            median_b=statistics.median(self.b),
            ratio=statistics.median(ratios),
            interval=median_interval(ratios),
            peak_gib=self.peak_gib,
        )


def median_interval(values: list[float]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the median: each value is one pair's ratio."""
    rng = random.Random(0)
    medians = sorted(
        statistics.median(rng.choices(values, k=len(values))) for _ in range(NUM_RESAMPLES)
    )
    return medians[int(0.025 * NUM_RESAMPLES)], medians[int(0.975 * NUM_RESAMPLES) - 1]


def compare(work: str, a: Worker, b: Worker, pairs: int, warmup: int) -> Comparison:
    """Prepare a work in both workers, warm it up, and time `pairs` runs of each in turns.

    Both prepare at the same time, and the first run, which compiles, is at the same time too.
    """
    for request in (f"prepare {work}", "run"):
        for worker in (a, b):
            worker.ask(request)
        first = [worker.reply()["seconds"] for worker in (a, b)]
        print(f"{work}: {request}: A {first[0]:.1f} s, B {first[1]:.1f} s", flush=True)
    for _ in range(warmup - 1):
        a.run()
        b.run()
    comparison = Comparison(work)
    for _ in range(pairs):
        of_a, of_b = a.run(), b.run()
        comparison.a.append(of_a["seconds"])
        comparison.b.append(of_b["seconds"])
        comparison.peak_gib = of_a["peak_gib"], of_b["peak_gib"]
    return comparison


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command line, and of the workers'."""
    # argparse's own: a parser of `rl_train` would import one tree's modules for both.
    result = argparse.ArgumentParser(
        prog="python -m tools.benchmarks.compare_revisions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("trees", nargs="+", type=Path, help="source trees A and B")
    result.add_argument(
        "--works", nargs="+", default=["step", "decode", "logprob"], choices=list(WORKS)
    )
    result.add_argument("--pairs", type=int, default=12, help="timed runs of each tree")
    result.add_argument("--warmup", type=int, default=4, help="runs of each before, at least 1")
    result.add_argument("--device", default="cuda")
    result.add_argument("--sizes", default="4b", choices=["4b", "tiny"], help="tiny: for a CPU")
    result.add_argument("--output", type=Path, help="JSON file for the figures")
    result.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return result


def main(argv: list[str] | None = None):
    args = parser().parse_args(argv)
    if args.worker:
        run_worker(args.trees[0], args.device, args.sizes)
        return
    if len(args.trees) != 2:
        parser().error("give two source trees, A and B")
    if args.pairs < 2 or args.warmup < 1:
        parser().error("--pairs must be at least 2, --warmup at least 1")
    workers: list[Worker] = []
    figures: dict[str, dict] = {}
    try:
        for tree in args.trees:
            workers.append(Worker(tree, args.device, args.sizes))
        a, b = workers
        for work in args.works:
            result = compare(work, a, b, args.pairs, args.warmup).figures()
            figures[work] = result
            low, high = result["interval"]
            print(
                f"{work}: A {result['median_a']:.4f} s, B {result['median_b']:.4f} s, "
                f"B / A {result['ratio']:.4f} [{low:.4f}, {high:.4f}] (median of {args.pairs} "
                f"pairs, 95 % bootstrap), peak GiB A {result['peak_gib'][0]:.2f}, "
                f"B {result['peak_gib'][1]:.2f}",
                flush=True,
            )
            if args.output:  # after each work: what is measured is not lost to a later failure
                args.output.write_text(json.dumps(figures, indent=1))
    finally:
        for worker in workers:
            worker.close()


if __name__ == "__main__":
    main()
