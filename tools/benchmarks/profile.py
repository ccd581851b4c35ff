"""Profile a step: the time of each phase by class of kernel, by torch.profiler.

The step is that of `python -m tools.benchmarks step`. A phase ends when the GPU has done its work;
a kernel that nothing else launches marks that on the GPU's own timeline. The profiler slows the
host down, so a phase's wall time is that of steps without it, and what the kernels leave of that is
idle. The profiler runs in one session, when all CUDA graphs are captured: others of the process
lose events (github.com/pytorch/pytorch/issues/192021). Without a GPU operators stand for kernels,
nested ones too, only to try the code.
"""

import json
import re
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from rl_train import engine
from rl_train.loggers.metrics import PhaseTimer
from tools.benchmarks import common, workload
from tools.benchmarks.roofline import step_floor
from tools.benchmarks.step import summary

ATTENTION = re.compile(r"flash|fmha|sdpa|attention|^_attend|^_merge", re.IGNORECASE)
PRODUCTS = re.compile(
    r"gemm|gemv|nvjet|cutlass|xmma|splitk|cublas|convol|fprop|dgrad|wgrad", re.IGNORECASE
)  # and convolutions
OURS = {
    name
    for file in Path(engine.__file__).parent.glob("*_triton.py")  # to import them needs Triton
    for name in re.findall(r"^@triton\.jit.*\ndef (\w+)", file.read_text(), re.MULTILINE)
}
OUR_PRODUCTS = {"_int8_product"}
KERNELS = ["matrix products", "attention", "our and compiled kernels", "other kernels", "copies"]
Event = tuple[str, float, float]  # name, start and end in seconds
MARKS = {"cuda": "spin_kernel", "cpu": "end of phase"}
SPARE_MARKS = 8  # before the first that counts: what a profiler loses, it loses at its start
CLOCK_SLACK = 0.1  # seconds by which a phase may differ between trace and host


@dataclass(frozen=True, kw_only=True)
class Options(common.Ceilings, workload.Options):
    """the step"""


class MarkingClock(PhaseTimer):
    """A clock that marks in the trace where each phase ends."""

    def __call__(self, phase: str):
        super().__call__(phase)
        self.mark()

    def mark(self):
        if self.gpu:
            torch.cuda._sleep(1)
        else:
            with torch.profiler.record_function(MARKS["cpu"]):
                pass


def measure(options: Options) -> dict:
    """Return {"phases": {phase: seconds, and by class}, "total": median seconds of a step}."""
    matmul, bandwidth, ceilings = common.ceilings(options)
    w = workload.build(options)
    clocks, warmth = w.run()
    plain, least = summary([c.seconds for c in clocks]), step_floor(w, matmul, bandwidth)
    device = w.policy.device
    with torch.profiler.profile() as profiler:
        clock = MarkingClock(device)
        # The last of these marks is the start of the first phase.
        for _ in range(SPARE_MARKS + 1):
            clock.mark()
        profiled = w.step(clock).seconds
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = parse(json.loads(file.read_bytes()), device.type)
    parts = split(events, profiled, MARKS[device.type])
    phases, rows, total = {}, {}, Counter()
    for phase, seconds in plain["phases"].items():
        classes = attribute(parts[phase])
        classes["idle"] = max(0.0, seconds - sum(classes.values()))
        phases[phase] = dict(seconds=seconds, floor=least[phase], classes=classes)
        phases[phase] |= dict(profiled_seconds=profiled[phase])
        times = dict(wall=seconds, floor=least[phase], profiled=profiled[phase]) | classes
        rows[phase] = {column: 1e3 * value for column, value in times.items()}
        total.update(rows[phase])
    columns = dict.fromkeys(total, ".2f")
    common.print_table(columns, rows | {"step": total}, **ceilings, medians_of=options.rounds)
    print(f"ms; {warmth}")
    head = (
        ceilings
        | dict(shapes=options.shapes, rounds=options.rounds, flags=w.config.flags)
        | vars(warmth)
    )
    step = dict(floor=sum(least.values()), wasted_tokens=w.wasted())
    return head | dict(total=plain["total"], phases=phases) | step


def parse(trace: dict, device_type: str) -> list[Event]:
    """Return events of the device and the marks, in the order of their starts."""
    categories = ("kernel", "gpu_memcpy", "gpu_memset") if device_type == "cuda" else ("cpu_op",)
    events = [
        (event["ts"] / 1e6, event["dur"] / 1e6, event["name"])
        for event in trace["traceEvents"]
        if event.get("cat") in categories or device_type == "cpu" and event["name"] == MARKS["cpu"]
    ]
    first = min((start for start, *_ in events), default=0)
    return [(name, start - first, start - first + took) for start, took, name in sorted(events)]


def split(events: list[Event], phases: dict[str, float], mark: str) -> dict[str, list[Event]]:
    """Return {phase: its events}, by the marks.

    Raises:
        RuntimeError: the trace lacks marks, or they are not where the host's clock has seen the
            phases {name: seconds} end.
    """
    # The last marks: one at the start, one at the end of each phase.
    marks = [i for i, (name, *_) in enumerate(events) if mark in name][-len(phases) - 1 :]
    lost = "the profiler lost events:"
    if len(marks) <= len(phases):
        ends = f"{len(marks)} of {len(phases) + 1} ends of phases"
        raise RuntimeError(f"{lost} {ends} are left, among {len(events)} events")
    parts = {}
    for (phase, seconds), begin, end in zip(phases.items(), marks, marks[1:]):
        traced = events[end][1] - events[begin][2]
        if abs(traced - seconds) > CLOCK_SLACK:
            raise RuntimeError(f"{lost} {phase} took {seconds:.3f} s, in the trace {traced:.3f} s")
        parts[phase] = events[begin + 1 : end]
    return parts


@cache
def kernel_class(name: str) -> str:
    """Return the class of a kernel or of a copy, one of KERNELS."""
    if name.startswith(("Memcpy", "Memset")):
        return "copies"
    if ATTENTION.search(name):
        return "attention"
    if name in OUR_PRODUCTS:
        return "matrix products"
    if name in OURS or name.startswith("triton_"):  # so torch.compile names what it makes of ours
        return "our and compiled kernels"
    return "matrix products" if PRODUCTS.search(name) else "other kernels"


def attribute(events: list[Event]) -> dict[str, float]:
    """Return {class: seconds} in which any event ran; where they overlap, all count for less."""
    of_class, busy, until = dict.fromkeys(KERNELS, 0.0), 0.0, 0.0
    for name, start, end in events:
        of_class[kernel_class(name)] += end - start
        # Events are in the order of their starts: only what lies behind all earlier ends is new.
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    total = sum(of_class.values()) or 1.0
    return {name: seconds * busy / total for name, seconds in of_class.items()}
