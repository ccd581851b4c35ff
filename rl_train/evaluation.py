"""Held-out evaluation: n samples, in their order, measured by all ranks together."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

from rl_train import checkpoint
from rl_train.config import RunConfig
from rl_train.data.loader import eval_loader
from rl_train.distributed import Ranks, gather_objects, raise_on_any_rank
from rl_train.files import write_json
from rl_train.rewards.attributes import Vocabulary
from rl_train.roles import Roles
from rl_train.sharding import whole_base
from rl_train.statistics import bootstrap, means, rows_of
from rl_train.stops import Stops
from rl_train.tasks.cycle_measures import (
    WITHOUT_INTERVAL,
    measure,
    measure_samples,
    measure_texts,
    score,
)

BATCHES = 2  # training batches in one of an evaluation: one answer a prompt and no gradient


@dataclass(frozen=True)
class HeldOut:
    """What is measured, and how much of it at a time."""

    dataset: object
    batch_size: int
    max_new_tokens: int
    num_workers: int
    max_caption_length: int | None = None  # see `Sa2VAInputs`
    other_regions: bool = False  # whether it is measured which region a mask lies on
    best_of: int = 0  # answers that are sampled of each region; 0 = none
    vocabulary: Vocabulary = field(default_factory=dict)  # of attributes; see `measure_texts`
    measure: Callable | None = None  # see `tasks.protocol.Task`
    measure_samples: Callable = measure_samples  # (.., G) as measure: of `best_of` answers


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
    policy,
    heldout: HeldOut,
    ranks: Ranks,
    names=("policy",),
    roles: Roles | None = None,
    stops: Stops | None = None,
) -> dict[str, Measured]:
    """{role: its measures}, of all ranks together; images are read once for all roles, and encoded
    once where no encoder trains.

    The roles are `names`, their weights those of `roles`, or without it the weights in use.
    Empty if a signal has asked any rank to stop, which then leaves after its batch.

    Raises FloatingPointError, on all ranks, if a model's outputs are not finite.
    """
    tokens = heldout.max_new_tokens
    inputs = policy.inputs(tokens, heldout.max_caption_length)
    columns, faults = {name: [] for name in names}, set()
    how = (heldout.batch_size, heldout.num_workers, ranks.rank, ranks.world_size)
    loader = eval_loader(heldout.dataset, inputs, *how, heldout.other_regions)
    with whole_base(policy):
        for batch in tqdm(loader, desc="evaluation", leave=False, disable=not ranks.is_main):
            features = None
            for name in names:
                with roles.use(name) if roles else nullcontext():
                    if features is None or policy.encoders_train:  # else alike for all roles
                        features = policy.encode(batch)
                    found = (heldout.measure or measure)(policy, batch, features, tokens)
                    if heldout.best_of:
                        asked = (policy, batch, features, tokens, heldout.best_of)
                        found |= heldout.measure_samples(*asked)
                    columns[name].append(found)
                not_finite = policy.watch.take().names()
                faults |= {f"evaluation of the {name}: {fault}" for fault in not_finite}
            if stops and stops.asked:
                break
    raise_on_any_rank(sorted(faults))
    if stops and stops.agree(gather_objects(stops.asked)):
        return {}
    measured = {}
    for name, mine in columns.items():
        measured[name] = whole = _merged(gather_objects(mine), len(heldout.dataset))
        if heldout.measure is None:
            whole.values |= measure_texts(whole.references, whole.captions, heldout.vocabulary)
    return measured


class Evaluator:
    """Evaluations of a run: measured, logged, and the best kept.

    Args:
        samples: whether training samples too; else the sampler's memory is freed each time.
    """

    def __init__(
        self, heldout: HeldOut, config: RunConfig, ranks: Ranks, flags, stops: Stops, samples=True
    ):
        self.heldout, self.ranks, self.flags, self.stops = heldout, ranks, flags, stops
        self.folder, self.eval_steps = Path(config.output_dir), config.eval_steps
        self.best_by, self.samples = config.best_by, samples
        self.measured = {}  # {step: values of the policy}

    def base(self, state: checkpoint.RunState, log):
        """Measure what the run began with: the base, to which a fresh LoRA adds nothing.

        That is the reference; where none is kept the policy, which has not moved yet, or in a
        resumed run its first weights, `state.began`.
        """
        lent = nullcontext()
        if state.began is not None:
            lent, state.began = state.roles.lent("reference", state.began), None
        with lent:
            role = "reference" if "reference" in state.roles.banks else "policy"
            self._measure(0, state, (role,), log)

    def __call__(self, state: checkpoint.RunState, log):
        """Measure the policy, and the teacher if there is one. A signal leaves the step without."""
        names = ("policy", "teacher") if state.roles.has_teacher else ("policy",)
        self._measure(state.step, state, names, log)

    def due(self, step: int) -> bool:
        return self.eval_steps > 0 and step % self.eval_steps == 0

    def missing(self, step: int) -> bool:
        """Whether the measures of a step are due, but a signal has kept a run from them.

        By rank 0's disk, on which they are written; all ranks ask.
        """
        mine = step > 0 and self.due(step) and not self._file(step).is_file()
        return gather_objects(mine)[0]

    def _file(self, step: int) -> Path:
        return self.folder / "evaluation" / f"step_{step}.json"

    def _measure(self, step: int, state, names: tuple[str, ...], log):
        """Log the roles `names`; keep the first one's measures, and the state if they are best."""
        how = (self.ranks, names, state.roles, self.stops)
        found = list(evaluate(state.policy, self.heldout, *how).values())
        if not self.samples:
            state.policy.engine.forget()
        if not found:
            return
        self.measured[step] = found[0].values
        metrics = [means(measured.values) for measured in found]
        places = ("eval", "eval_ema")[: 1 + state.roles.has_teacher]
        for place, role in zip(places, (metrics[0], metrics[-1])):
            log.scalars({f"{place}/{name}": value for name, value in role.items()}, step)
        scored = []
        if self.eval_steps:  # at step 0 too, where it is known whether --best_by is measured
            scored = [role | dict(score=score(role, self.best_by)) for role in metrics]
        if step and scored:
            both = scored[0] | {"teacher": role for role in scored[1:]}
            checkpoint.save_if_best(self.folder, state, self.flags, both, self.ranks.is_main)
        if self.ranks.is_main:  # last: it says that the step is done
            write_json(self._file(step), record(found[0], self.flags, *found[1:]))


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


def record(measured: Measured, flags: dict, teacher: Measured | None = None) -> dict:
    """All that was measured, with means and intervals, as `tools.evaluate --before` reads it.

    The teacher's on the same samples are under "teacher".
    """
    head = dict(flags=flags, num_samples=len(measured.image_ids))
    of_teacher = dict(teacher=summary(teacher) | dict(captions=teacher.captions)) if teacher else {}
    return head | vars(measured) | summary(measured) | of_teacher


def summary(measured: Measured) -> dict:
    """The means, intervals and values of a role. A metric of all samples has no interval."""
    metrics = means(measured.values)
    intervals = {
        metric: bootstrap(rows_of(measured.values, metric))
        for metric in metrics
        if metric not in WITHOUT_INTERVAL
    }
    values = {name: values.tolist() for name, values in measured.values.items()}
    return dict(means=metrics, intervals=intervals, values=values)
