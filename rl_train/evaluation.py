"""Held-out evaluation: n samples, in their order, measured by all ranks together."""

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from rl_train import checkpoint
from rl_train.config import RunConfig
from rl_train.data.loader import eval_loader
from rl_train.distributed import Ranks, gather_objects
from rl_train.files import write_json
from rl_train.roles import Roles
from rl_train.statistics import bootstrap, means, rows_of
from rl_train.tasks.cycle_measures import SCORES, measure

BATCHES = 2  # training batches in one of an evaluation: one answer a prompt and no gradient


@dataclass(frozen=True)
class HeldOut:
    """What is measured, and how much of it at a time."""

    dataset: object
    batch_size: int
    max_new_tokens: int
    num_workers: int
    max_caption_length: int | None = None  # see `Sa2VAInputs`


@dataclass
class Measured:
    """What was measured of n samples."""

    values: dict[str, torch.Tensor]  # {measure: (n,) float64}; see `measure`
    image_ids: list[str]
    references: list[str]  # true captions
    captions: list[str]  # of the regions
    num_damaged: int  # stand-ins among them, for samples that did not decode or fit


@torch.no_grad()
def evaluate(
    policy, heldout: HeldOut, ranks: Ranks, names=("policy",), roles: Roles | None = None
) -> dict[str, Measured]:
    """{role: its measures}, of all ranks together; images are read and encoded once for all roles.

    The roles are `names`, their weights those of `roles`, or without it the weights in use.
    """
    inputs = policy.inputs(heldout.max_new_tokens, heldout.max_caption_length)
    columns = {name: [] for name in names}
    how = (heldout.batch_size, heldout.num_workers, ranks.rank, ranks.world_size)
    loader = eval_loader(heldout.dataset, inputs, *how)
    for batch in tqdm(loader, desc="evaluation", leave=False, disable=not ranks.is_main):
        features = policy.encode(batch)
        for name in names:
            with roles.use(name) if roles else nullcontext():
                columns[name].append(measure(policy, batch, features, heldout.max_new_tokens))
    size = len(heldout.dataset)
    return {name: _merged(gather_objects(mine), size) for name, mine in columns.items()}


class Evaluator:
    """Evaluations of a run that goes on from step `start`: measured, logged, and the best kept."""

    def __init__(self, heldout: HeldOut, config: RunConfig, ranks: Ranks, flags, start: int):
        self.heldout, self.ranks, self.flags, self.start = heldout, ranks, flags, start
        self.folder, self.keep_best = Path(config.output_dir), config.eval_steps > 0
        self.measured = {}  # {step: values of the policy}

    def base(self, state: checkpoint.RunState, log):
        """Measure what the run began with: the base, to which a fresh LoRA adds nothing."""
        self._measure(0, state, ("reference",), log)

    def __call__(self, state: checkpoint.RunState, log):
        """Measure policy and teacher as they are."""
        metrics = self._measure(state.step, state, ("policy", "teacher"), log)
        if self.keep_best:
            metrics["score"] = sum(metrics[name] for name in SCORES) / len(SCORES)
            checkpoint.save_if_best(self.folder, state, self.flags, metrics, self.ranks.is_main)

    def _measure(self, step: int, state, names: tuple[str, ...], log) -> dict[str, float]:
        """The metrics of the first of the roles `names`."""
        found = evaluate(state.policy, self.heldout, self.ranks, names, state.roles)
        first, last = (found[names[i]] for i in (0, -1))
        self.measured[step] = first.values
        metrics, file = means(first.values), self.folder / "evaluation" / f"step_{step}.json"
        if step > self.start or not file.is_file():  # else the resumed run has logged its points
            log.scalars({f"eval/{name}": value for name, value in metrics.items()}, step)
            teacher = means(last.values)
            log.scalars({f"eval_ema/{name}": value for name, value in teacher.items()}, step)
        if self.ranks.is_main:
            write_json(file, record(first, self.flags))
        return metrics


def _merged(columns_of_rank: list[list[dict]], num_samples: int) -> Measured:
    """One Measured of all ranks' batches; rank r of R measured samples r, r + R, .."""
    merged = {}
    for rank, batches in enumerate(columns_of_rank):
        for name in batches[0] if batches else ():
            column = merged.setdefault(name, [None] * num_samples)
            values = [value for batch in batches for value in batch[name]]
            column[rank :: len(columns_of_rank)] = values
    texts = [merged.pop(name) for name in ("image_id", "reference", "caption")]
    num_damaged = sum(i != place for place, i in enumerate(merged.pop("index")))
    values = {name: torch.tensor(mine, dtype=torch.float64) for name, mine in merged.items()}
    return Measured(values, *texts, num_damaged)


def record(measured: Measured, flags: dict) -> dict:
    """All that was measured, with means and intervals, as `tools.evaluate --before` reads it."""
    summary, num_samples = means(measured.values), len(measured.image_ids)
    intervals = {metric: bootstrap(rows_of(measured.values, metric)) for metric in summary}
    head = dict(flags=flags, num_samples=num_samples, means=summary, intervals=intervals)
    values = {name: values.tolist() for name, values in measured.values.items()}
    return head | vars(measured) | dict(values=values)
