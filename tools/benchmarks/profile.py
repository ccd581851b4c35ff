"""Where each millisecond of a step goes: the time of each phase by class of kernel, from one step under torch.profiler.

The step of `tools.benchmark step`. A phase ends when the GPU has done its work (`train.Clock`); a kernel that nothing else launches
marks that on the GPU's own timeline. The profiler slows the host down, so a phase's wall time is that of steps without it, and what the
kernels leave of that is idle. One session of the profiler, when all CUDA graphs are captured: others of the process lose events
(github.com/pytorch/pytorch/issues/192021). Without a GPU operators stand for kernels, nested ones too, only to try the code.
"""

import json
import re
import tempfile
import time
from collections import Counter
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from unittest.mock import patch

import torch
from PIL import Image, ImageDraw, ImageFont

from rl_train import train
from rl_train.distributed import Ranks
from tools.benchmarks import work
from tools.benchmarks.common import device_name
from tools.benchmarks.step import rounds

COLOURS = {
    "matrix products": "#4c78a8",
    "attention": "#f2a541",
    "our kernels": "#5fa55a",
    "other kernels": "#c8553d",
    "copies": "#8e6bad",
    "idle": "#e3e3e3",
}  # of the classes, in the order of table and bars
KERNELS = list(COLOURS)[:-1]
ATTENTION = re.compile(r"flash|fmha|sdpa|attention|^_attend|^_merge", re.IGNORECASE)
PRODUCTS = re.compile(
    r"gemm|gemv|nvjet|cutlass|xmma|splitk|cublas|convol|fprop|dgrad|wgrad", re.IGNORECASE
)  # and convolutions
OURS = {
    name
    for file in Path(train.__file__).parent.glob("engine/*_triton.py")  # to import them needs Triton
    for name in re.findall(r"^@triton\.jit.*\ndef (\w+)", file.read_text(), re.MULTILINE)
}
MARKS = {"cuda": "spin_kernel", "cpu": "end of phase"}
SPARE_MARKS = 8  # before the first that counts: what a profiler loses, it loses at its start
CLOCK_SLACK = 0.1  # seconds by which a phase may differ between trace and host
NUM_KERNELS, NUM_PHASE_KERNELS = 25, 5


def measure(args) -> dict:
    """{"phases": {phase: seconds, profiled_seconds, classes: {class: seconds}, kernels}, "total" seconds, "kernels": the costliest}."""
    w = work.build(args, Ranks(0, 1, torch.device(args.device)))
    steps = iter(range(10**6))  # each its own random numbers
    plain = rounds(w, nullcontext, args.rounds, args.warmup, steps)
    with profiled(w.ranks.device) as profiler:
        laps = [(phase, seconds) for phase, seconds, _ in w.step(next(steps))]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = parse(json.loads(file.read_bytes()), w.ranks.device.type)
    parts = split(events, laps, MARKS[w.ranks.device.type])
    found = dict(
        device=device_name(args.device),
        flags=vars(w.args),
        rounds=args.rounds,
        total=plain["total"],
        phases={},
        kernels=costliest(sum(parts.values(), []), NUM_KERNELS),
    )
    for phase, profiled_seconds in laps:
        seconds, classes = plain["phases"][phase], attribute(parts[phase])
        found["phases"][phase] = dict(
            seconds=seconds,
            profiled_seconds=profiled_seconds,
            classes=classes | dict(idle=max(0.0, seconds - sum(classes.values()))),
            kernels=costliest(parts[phase], NUM_PHASE_KERNELS),
        )
    show(found)
    if args.picture:
        draw(found).save(args.picture)
    return found


@contextmanager
def profiled(device):
    """Profile a step, and mark in the trace where it begins and where each phase ends."""
    lap = train.Clock.__call__

    def marked(clock, phase):
        lap(clock, phase)
        mark(device)
        clock.last = time.perf_counter()

    with torch.profiler.profile() as profiler, patch.object(train.Clock, "__call__", marked):
        for _ in range(SPARE_MARKS + 1):
            mark(device)
        yield profiler


def mark(device):
    if device.type == "cuda":
        torch.cuda._sleep(1)
        torch.cuda.synchronize(device)
    else:
        with torch.profiler.record_function(MARKS["cpu"]):
            pass


def parse(trace: dict, device_type: str) -> list[tuple[str, float, float]]:
    """(name, start, end) of what ran on the device, and of the marks, by start; seconds since the first."""
    kinds = ("kernel", "gpu_memcpy", "gpu_memset") if device_type == "cuda" else ("cpu_op",)
    events = [
        e
        for e in trace["traceEvents"]
        if e.get("cat") in kinds or device_type == "cpu" and e["name"] == MARKS["cpu"]
    ]
    first = min((e["ts"] for e in events), default=0)
    return sorted(
        [(e["name"], (e["ts"] - first) / 1e6, (e["ts"] - first + e["dur"]) / 1e6) for e in events],
        key=lambda event: event[1],
    )


def split(events, laps, mark: str) -> dict[str, list[tuple[str, float, float]]]:
    """{phase: its events}, by the marks.

    Raises:
        RuntimeError: the trace lacks marks, or they are not where the host's clock has seen the phases end.
    """
    marks = [i for i, (name, *_) in enumerate(events) if mark in name][-len(laps) - 1 :]
    if len(marks) <= len(laps):
        raise RuntimeError(
            f"the profiler lost events: {len(marks)} of {len(laps) + 1} ends of phases are left, among {len(events)} events"
        )
    found = {}
    for (phase, seconds), begin, end in zip(laps, marks, marks[1:]):
        traced = events[end][1] - events[begin][2]
        if abs(traced - seconds) > CLOCK_SLACK:
            raise RuntimeError(
                f"the profiler lost events: {phase} took {seconds:.3f} s, in the trace {traced:.3f} s"
            )
        found[phase] = events[begin + 1 : end]
    return found


@cache
def kind(name: str) -> str:
    """The class of a kernel, or of a copy."""
    if name.startswith(("Memcpy", "Memset")):
        return "copies"
    if ATTENTION.search(name):
        return "attention"
    return (
        "our kernels"
        if name in OURS
        else "matrix products"
        if PRODUCTS.search(name)
        else "other kernels"
    )


def attribute(events) -> dict[str, float]:
    """{class: seconds}, which add up to the time in which any event ran: where they overlap, all count for less."""
    found, busy, until = dict.fromkeys(KERNELS, 0.0), 0.0, 0.0
    for name, start, end in events:
        found[kind(name)] += end - start
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    total = sum(found.values())
    return {name: seconds * busy / total if total else 0.0 for name, seconds in found.items()}


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


def show(found):
    phases = found["phases"]
    print(
        f"{found['device']}: milliseconds of a step, medians of {found['rounds']}; its kernels from one more step, under the profiler"
    )
    print(f"{'phase':12}{'wall':>10}{'profiled':>10}" + "".join(f"{name:>17}" for name in COLOURS))
    for phase, p in phases.items():
        print(
            f"{phase:12}{p['seconds'] * 1e3:>10.1f}{p['profiled_seconds'] * 1e3:>10.1f}"
            + "".join(f"{p['classes'][name] * 1e3:>17.2f}" for name in COLOURS)
        )
    print(
        f"{'step':12}{found['total'] * 1e3:>10.1f}{sum(p['profiled_seconds'] for p in phases.values()) * 1e3:>10.1f}"
        + "".join(f"{seconds * 1e3:>17.2f}" for seconds in totals(found).values())
    )
    for title, kernels in {
        "step": found["kernels"],
        **{phase: p["kernels"] for phase, p in phases.items()},
    }.items():
        print(
            f"\n{title + ', its costliest kernels':60} {'class':16}{'calls':>8}{'ms':>10}{'mean us':>10}"
        )
        for k in kernels:
            print(
                f"{k['name']:60} {k['class']:16}{k['calls']:>8}{k['seconds'] * 1e3:>10.2f}{k['seconds'] / k['calls'] * 1e6:>10.1f}"
            )


def totals(found) -> dict[str, float]:
    """{class: seconds} of all phases together."""
    return {name: sum(p["classes"][name] for p in found["phases"].values()) for name in COLOURS}


def draw(found) -> Image.Image:
    """A bar for each phase, as long as its wall time, of the classes' times; in milliseconds."""
    phases = found["phases"]
    left, right, top, width, height, pitch = 190, 1290, 130, 1400, 38, 54  # pixels
    bottom = top + pitch * len(phases)
    longest = 1e3 * max(max(p["seconds"], sum(p["classes"].values())) for p in phases.values())
    scale = (right - left) / longest
    image = Image.new("RGB", (width, bottom + 50), "white")
    pen, text, title = ImageDraw.Draw(image), ImageFont.load_default(19), ImageFont.load_default(25)
    pen.text(
        (24, 36),
        f"{found['device']}: a step of {found['total'] * 1e3:,.0f} ms, and what the GPU does in it",
        "black",
        title,
        "lm",
    )
    x = 24
    for name, seconds in totals(found).items():
        pen.rectangle((x, 76, x + 20, 96), COLOURS[name])
        label = f"{name} {seconds * 1e3:,.0f} ms"
        pen.text((x + 28, 86), label, "black", text, "lm")
        x += 28 + pen.textlength(label, text) + 30
    step = next(
        size
        for power in range(-2, 9)
        for size in (10**power, 2 * 10**power, 5 * 10**power)
        if longest / size <= 9
    )
    for tick in range(int(longest / step) + 1):
        x = left + tick * step * scale
        pen.line((x, top - 10, x, bottom), "#d0d0d0")
        pen.text(
            (x, bottom + 8),
            f"{tick * step:,g}" + (" ms" if tick == 0 else ""),
            "#555555",
            text,
            "ma",
        )
    for row, (phase, p) in enumerate(phases.items()):
        x, y = left, top + pitch * row
        pen.text(
            (left - 14, y + height / 2), re.sub(r"(\d)$", r", loop \1", phase), "black", text, "rm"
        )
        for name, seconds in p["classes"].items():
            end, label = x + seconds * 1e3 * scale, f"{seconds * 1e3:,.0f}"
            if round(end) > round(x):
                pen.rectangle((round(x), y, round(end) - 1, y + height), COLOURS[name])
            if end - x > pen.textlength(label, text) + 8:
                pen.text(
                    ((x + end) / 2, y + height / 2),
                    label,
                    "black" if name in ("idle", "attention") else "white",
                    text,
                    "mm",
                )
            x = end
        pen.text(
            (x + 10, y + height / 2),
            f"{p['seconds'] * 1e3:,.0f} ms",
            "black",
            text,
            "lm",
            stroke_width=4,
            stroke_fill="white",
        )
    return image


def add_arguments(parser):
    parser.add_argument(
        "--rounds",
        type=int,
        default=5,
        help="steps without the profiler; the median of each phase counts",
    )
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--picture", type=Path, help="PNG file for the bars of the phases")
    work.add_arguments(parser)
