"""Forward and backward of the update's log-probs: the plain way against this project's.

On one language model of random weights. Letters: P prompts, G rows of each, N = P*G rows, n of
them, L prompt length, T completion tokens, V vocabulary.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch._dynamo.utils import counters

from rl_train.config.flags import COUNT, flag
from rl_train.engine import Engine
from tools.benchmarks import common
from tools.benchmarks.qwen import TextOf
from tools.benchmarks.roofline import LanguageModel
from tools.benchmarks.trl_style import FullEngine

# In the last two, rows share their prompt's forward and layers are compiled; the last: the default.
WAYS = ("plain", "packed", "packed, checkpoints")
COLUMNS = dict(seconds=".3f", times_faster=".2f", lowest=".2f", highest=".2f")
COLUMNS |= dict(fraction_of_ceiling=".1%", peak_gib=".2f")
COLUMNS |= dict(ratio_to_floor=".2f", gradient_error=".2e", logp_error=".2e")
COLUMNS |= dict(first_seconds=".1f", graphs="d", warmup_rounds="d", settled="")


@dataclass(frozen=True, kw_only=True)
class Options(common.Answers):
    """sizes"""

    num_prompts: int = flag(4, "prompts in a batch", type=COUNT)
    ways: tuple = flag(WAYS, "of this project and the plain one", choices=WAYS)

    @property
    def num_rows(self) -> int:
        return self.num_prompts * self.num_generations


class MicroBatch:
    """P random prompts, N random completions, the derivative of a loss by each log-prob."""

    def __init__(self, model: nn.Module | TextOf, options: Options):
        torch.manual_seed(0)
        self.model, self.group = model, options.num_generations
        # What has the parameters; the decoder of a Qwen-VL is no module of its own.
        self.module = model.vlm if isinstance(model, TextOf) else model
        self.embeds, self.mask = common.random_prompts(options.num_prompts, model.config, options)
        self.embeds.requires_grad_()  # mlp1 trains
        size = (options.num_rows, options.num_tokens)
        self.ids = torch.randint(model.config.vocab_size, size, device=options.device)
        self.slope = torch.randn(size, device=options.device)
        self.engine = Engine(model, pad_id=0, gradient_checkpointing=True)
        self.full = FullEngine(model, pad_id=0)

    def run(self, way: str, lengths: torch.Tensor | None = None) -> torch.Tensor:
        """Return (N, T) log-probs; their gradients replace the last ones.

        lengths: (N,) of the answers, default T.
        """
        self.module.zero_grad()
        self.embeds.grad = None
        with torch.autocast(self.embeds.device.type, torch.bfloat16):
            logp = self.plain() if way == "plain" else self.ours(way, lengths)
        logp.backward(self.slope)
        return logp.detach()

    def run_lengths(self, way: str, number: int = 5) -> dict:
        """Count graphs compiled for `number` steps of other lengths; time the first step."""
        random, seconds = torch.Generator().manual_seed(0), []
        before = counters["stats"]["unique_graphs"]
        size = len(self.ids), self.ids.shape[1]
        for _ in range(number):
            start = time.perf_counter()
            self.run(way, torch.randint(1, size[1] + 1, size[:1], generator=random))
            common.synchronize(self.ids.device)
            seconds.append(time.perf_counter() - start)
        graphs = counters["stats"]["unique_graphs"] - before
        print(way, "seconds by length", [f"{s:.2f}" for s in seconds], graphs, flush=True)
        return dict(first_seconds=seconds[0], graphs=graphs)

    def run_in_float32(self) -> torch.Tensor:
        """Compute log-probs the plain way in float32, row by row. The model stays in float32."""
        # Fused matrices are views of the weights, which are cast next.
        self.engine.release()
        self.module.float()
        self.embeds = self.embeds.detach().float().requires_grad_()
        self.module.zero_grad()
        logps = []
        for row, slope in enumerate(self.slope):
            logps.append(self.plain(slice(row, row + 1)))
            logps[-1].backward(slope[None])
        return torch.cat(logps).detach()

    def ours(self, way: str, lengths: torch.Tensor | None) -> torch.Tensor:
        """Return (N, T) as in training."""
        prompt = torch.arange(len(self.ids), device=self.ids.device) // self.group
        valid = torch.ones_like(self.ids, dtype=torch.bool)
        if lengths is not None:
            valid = valid.cumsum(1) <= lengths.to(valid.device)[:, None]
        self.engine.gradient_checkpointing = way.endswith("checkpoints")
        return self.engine.score(self.embeds, self.mask, prompt, self.ids, valid).logp

    def plain(self, rows: slice = slice(None)) -> torch.Tensor:
        """Return (n, T) by a full sequence per row, with the logits of the completions."""
        prompts = (t.repeat_interleave(self.group, 0)[rows] for t in (self.embeds, self.mask))
        ids = self.ids[rows]
        return self.full.score(*prompts, None, ids, torch.ones_like(ids, dtype=torch.bool)).logp

    def gradient(self) -> torch.Tensor:
        """Return the gradients of the LoRA and, last, of the prompts, as one vector on the CPU."""
        grads = [p.grad for p in self.module.parameters() if p.requires_grad] + [self.embeds.grad]
        return torch.cat([grad.flatten().double().cpu() for grad in grads])

    def peak(self, way: str) -> float:
        """Return the GiB that a run holds beyond weights and gradients; NaN where not counted."""
        if self.embeds.device.type != "cuda":
            return float("nan")
        self.run(way)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.run(way)
        return (torch.cuda.max_memory_allocated() - before) / 2**30


def operations(model: nn.Module, ways: Sequence[str], options: Options) -> dict[str, float]:
    """Return {way: operations that it cannot do without}, with attention where it is causal."""
    costs, length, new = LanguageModel(model), options.prompt_length, options.num_tokens
    answers, needed = options.num_rows * new, {}
    for way in ways:
        prompts = options.num_rows if way == "plain" else options.num_prompts
        # Causal: an answer's token sees its prompt and, on average, half of the answer.
        pairs = answers * (length + new / 2) + prompts * length**2 / 2
        needed[way] = costs.forward(prompts * length + answers, pairs, answers, backward=True)
    return needed


def measure(options: Options) -> dict:
    """Measure seconds and memory of all ways, and their errors against float32."""
    limit, bandwidth, ceilings = common.ceilings(options)
    batch = MicroBatch(common.random_llm(options), options)
    names = options.ways
    needed, ways, logps, gradients = operations(batch.model, names, options), {}, {}, {}
    lengths = {way: batch.run_lengths(way) for way in names if way != "plain"}
    runs = {way: partial(batch.run, way) for way in names}
    # Bound by operations, or by reading all weights once.
    floor = max(min(needed.values()) / limit, LanguageModel(batch.model).read(0) / bandwidth)
    timings = common.timings_in_turns(runs, options)
    for name, timing in timings.items():
        logps[name], gradients[name] = batch.run(name), batch.gradient()
        faster = common.ratios(timings[names[0]].of_rounds, timing.of_rounds)
        ways[name] = vars(timing) | dict(
            times_faster=faster.pop("ratio"),
            **faster,
            tflop=needed[name] / 1e12,
            fraction_of_ceiling=needed[name] / timing.seconds / limit,
            ratio_to_floor=timing.seconds / floor,
            peak_gib=batch.peak(name),
            **lengths.get(name, {}),
        )
    logp, gradient = batch.run_in_float32(), batch.gradient()
    for name, way in ways.items():
        way["gradient_error"] = ((gradients[name] - gradient).norm() / gradient.norm()).item()
        way["logp_error"] = (logps[name] - logp).abs().max().item()
    rows = {"floor": dict(seconds=floor)} | ways
    common.print_table(COLUMNS, rows, **ceilings, num_rows=options.num_rows)
    return ceilings | dict(floor_seconds=floor, ways=ways)
