"""Where each millisecond of a step goes: each phase's time by class of kernel, by torch.profiler.

The step of `tools.benchmark step`. A phase ends when the GPU has done its work (`curves.Clock`); a
kernel that nothing else launches marks that on the GPU's own timeline. The profiler slows the host
down, so a phase's wall time is that of steps without it, and what the kernels leave of that is
idle. One session of the profiler, when all CUDA graphs are captured: others of the process lose
events (github.com/pytorch/pytorch/issues/192021). Without a GPU operators stand for kernels, nested
ones too, only to try the code.
"""

import json
import re
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch

from rl_train import engine
from rl_train.config import flag
from rl_train.distributed import Ranks
from tools.benchmarks import bars, work
from tools.benchmarks.bars import COLOURS
from tools.benchmarks.common import device_name
from tools.benchmarks.step import summary

KERNELS = list(COLOURS)[:-1]  # the last class is what they leave
ATTENTION = re.compile(r"flash|fmha|sdpa|attention|^_attend|^_merge", re.IGNORECASE)
PRODUCTS = re.compile(
    r"gemm|gemv|nvjet|cutlass|xmma|splitk|cublas|convol|fprop|dgrad|wgrad", re.IGNORECASE
)  # and convolutions
OURS = {
    name
    for file in Path(engine.__file__).parent.glob("*_triton.py")  # to import them needs Triton
    for name in re.findall(r"^@triton\.jit.*\ndef (\w+)", file.read_text(), re.MULTILINE)
}
MARKS = {"cuda": "spin_kernel", "cpu": "end of phase"}
SPARE_MARKS = 8  # before the first that counts: what a profiler loses, it loses at its start
CLOCK_SLACK = 0.1  # seconds by which a phase may differ between trace and host
NUM_KERNELS, NUM_PHASE_KERNELS = 25, 5


@dataclass(frozen=True, kw_only=True)
class Options(work.Options):
    """the step"""

    picture: Path | None = flag(None, "PNG file for the bars of the phases")


def measure(options: Options) -> dict:
    """{"phases": {phase: seconds, profiled_seconds, classes, kernels}, "total", "kernels"}.

    Classes are {class: seconds}, kernels the costliest ones.
    """
    w = work.build(options, Ranks(0, 1, torch.device(options.device)))
    kind_of_device = w.policy.device.type
    clocks = w.run(options.warmup + options.rounds)[options.warmup :]
    plain = summary([clock.seconds for clock in clocks])
    profiled, trace = profiled_step(w)
    parts = split(parse(trace, kind_of_device), profiled, MARKS[kind_of_device])
    measured = dict(
        device=device_name(options.device),
        flags=w.parts.flags,
        rounds=options.rounds,
        total=plain["total"],
        phases={},
        kernels=costliest(sum(parts.values(), []), NUM_KERNELS),
    )
    for phase, profiled_seconds in profiled.items():
        seconds, classes = plain["phases"][phase], attribute(parts[phase])
        classes["idle"] = max(0.0, seconds - sum(classes.values()))
        measured["phases"][phase] = dict(
            seconds=seconds,
            profiled_seconds=profiled_seconds,
            classes=classes,
            kernels=costliest(parts[phase], NUM_PHASE_KERNELS),
        )
    show(measured)
    if options.picture:
        bars.draw(measured).save(options.picture)
    return measured


def profiled_step(w: work.Work) -> tuple[dict[str, float], dict]:
    """({phase: seconds}, trace with marks where the step begins and each phase ends) of a step."""
    w.lap.mark = partial(mark, w.policy.device)
    with torch.profiler.profile() as profiler:
        for _ in range(SPARE_MARKS + 1):
            w.lap.mark()
        (clock,) = w.run(1)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        return dict(clock.seconds), json.loads(file.read_bytes())


def mark(device):
    if device.type == "cuda":
        torch.cuda._sleep(1)
        torch.cuda.synchronize(device)
    else:
        with torch.profiler.record_function(MARKS["cpu"]):
            pass


def parse(trace: dict, device_type: str) -> list[tuple[str, float, float]]:
    """(name, start, end) of what ran on the device, and of the marks, by start.

    In seconds since the first.
    """
    kinds = ("kernel", "gpu_memcpy", "gpu_memset") if device_type == "cuda" else ("cpu_op",)
    events = [
        e
        for e in trace["traceEvents"]
        if e.get("cat") in kinds or device_type == "cpu" and e["name"] == MARKS["cpu"]
    ]
    first = min((e["ts"] for e in events), default=0)
    times = [(e["name"], e["ts"] - first, e["ts"] - first + e["dur"]) for e in events]
    return sorted([(n, a / 1e6, b / 1e6) for n, a, b in times], key=lambda event: event[1])


def split(events, phases: dict[str, float], mark: str) -> dict[str, list]:
    """{phase: its events}, by the marks.

    Raises:
        RuntimeError: the trace lacks marks, or they are not where the host's clock has seen the
            phases {name: seconds} end.
    """
    marks = [i for i, (name, *_) in enumerate(events) if mark in name][-len(phases) - 1 :]
    if len(marks) <= len(phases):
        raise RuntimeError(
            f"the profiler lost events: {len(marks)} of {len(phases) + 1} ends of phases are left, "
            f"among {len(events)} events"
        )
    parts = {}
    for (phase, seconds), begin, end in zip(phases.items(), marks, marks[1:]):
        traced = events[end][1] - events[begin][2]
        if abs(traced - seconds) > CLOCK_SLACK:
            raise RuntimeError(
                f"the profiler lost events: {phase} took {seconds:.3f} s, in the trace "
                f"{traced:.3f} s"
            )
        parts[phase] = events[begin + 1 : end]
    return parts


@cache
def kind(name: str) -> str:
    """The class of a kernel, or of a copy."""
    if name.startswith(("Memcpy", "Memset")):
        return "copies"
    if ATTENTION.search(name):
        return "attention"
    if name in OURS:
        return "our kernels"
    return "matrix products" if PRODUCTS.search(name) else "other kernels"


def attribute(events) -> dict[str, float]:
    """{class: seconds}, which add up to the time in which any event ran.

    Where events overlap, all count for less.
    """
    of_class, busy, until = dict.fromkeys(KERNELS, 0.0), 0.0, 0.0
    for name, start, end in events:
        of_class[kind(name)] += end - start
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    total = sum(of_class.values())
    return {name: seconds * busy / total if total else 0.0 for name, seconds in of_class.items()}


def costliest(events, count: int) -> list[dict]:
    """The names that take most time: {"name", "class", "calls", "seconds"}."""
    calls, seconds = Counter(name for name, *_ in events), Counter()
    for name, start, end in events:
        seconds[name] += end - start
    return [
        {"name": short(name), "class": kind(name), "calls": calls[name], "seconds": total}
        for name, total in seconds.most_common(count)
    ]


def short(name: str) -> str:
    """At most 60 characters of it, without the namespaces that all share."""
    return re.sub(r"^void |at::native::|\(anonymous namespace\)::", "", name)[:60]


def show(measured):
    phases = measured["phases"]
    print(
        f"{measured['device']}: milliseconds of a step, medians of {measured['rounds']}; its "
        "kernels from one more step, under the profiler"
    )
    print(f"{'phase':12}{'wall':>10}{'profiled':>10}" + "".join(f"{name:>17}" for name in COLOURS))
    rows = {
        phase: (p["seconds"], p["profiled_seconds"], p["classes"]) for phase, p in phases.items()
    }
    profiled = sum(p["profiled_seconds"] for p in phases.values())
    rows["step"] = (measured["total"], profiled, bars.totals(measured))
    for name, (wall, profiled, classes) in rows.items():
        cells = "".join(f"{classes[kind] * 1e3:>17.2f}" for kind in COLOURS)
        print(f"{name:12}{wall * 1e3:>10.1f}{profiled * 1e3:>10.1f}{cells}")
    kernels = {"step": measured["kernels"]} | {p: of["kernels"] for p, of in phases.items()}
    for name, costly in kernels.items():
        title = f"{name}, its costliest kernels"
        print(f"\n{title:60} {'class':16}{'calls':>8}{'ms':>10}{'mean us':>10}")
        for k in costly:
            print(
                f"{k['name']:60} {k['class']:16}{k['calls']:>8}{k['seconds'] * 1e3:>10.2f}"
                f"{k['seconds'] / k['calls'] * 1e6:>10.1f}"
            )
