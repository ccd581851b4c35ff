"""Evaluation: n samples, in their order, measured by all ranks together."""

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Subset
from tqdm import tqdm

from rl_train.checkpoint import save_load
from rl_train.config.grpo_config import RunConfig
from rl_train.data.base import RegionDataset
from rl_train.data.loader import eval_loader
from rl_train.data.rle import RLE, decode_mask
from rl_train.distributed.process_group import (
    RankInfo,
    gather_objects,
    print0,
    raise_on_any_rank,
)
from rl_train.evaluation.bootstrap import bootstrap, means, rows_of
from rl_train.evaluation.cycle_metrics import (
    WITHOUT_INTERVAL,
    measure,
    measure_samples,
    measure_texts,
    selection_score,
)
from rl_train.evaluation.gcg_metrics import average_precision
from rl_train.evaluation.table import MAIN_METRICS, main_figures
from rl_train.loggers.metrics import MAIN
from rl_train.loggers.pictures import EvalAnswer
from rl_train.loggers.tensorboard import NUM_EVAL_PICTURES, RunLogger
from rl_train.policies.base import Features, Policy
from rl_train.rewards.attributes import AttributePhrases
from rl_train.roles import Roles
from rl_train.rollout import Batch
from rl_train.run.signals import SignalHandler
from rl_train.utils.io import DamagedFile, read_json, write_json
from rl_train.utils.text import counted

# An evaluation has one answer a prompt and no gradient, so its batches can be larger.
TRAIN_BATCHES_PER_EVAL_BATCH = 2


@dataclass(frozen=True)
class EvalSpec:
    """Samples, metrics and batch size of an evaluation."""

    dataset: RegionDataset | Subset
    batch_size: int
    max_new_tokens: int
    num_workers: int
    max_prompt_length: int | None = None  # see `Sa2VAPreprocessor`
    distractors: bool = False  # also measure whether a mask lies on the right region
    best_of: int = 0  # answers that are sampled of each region; 0 = none
    # Phrases of attributes, see `measure_texts`
    attribute_phrases: AttributePhrases = field(default_factory=dict)
    # {column: B values} of (policy, batch, features, new tokens); None: `cycle_metrics.measure`
    measure: Callable[[Policy, Batch, Features, int], dict[str, list]] | None = None
    # The same of `best_of` answers, the last argument
    measure_samples: Callable[[Policy, Batch, Features, int, int], dict[str, list]] = (
        measure_samples
    )


@dataclass
class EvalResult:
    """Columns and answers of n samples."""

    values: dict[str, torch.Tensor]  # {column: (n,) float64}; see `measure`
    image_ids: list[str]
    references: list[str]  # true captions
    captions: list[str]  # of the regions
    num_damaged: int  # stand-ins among them, for samples that did not decode or fit
    # Of each in the data set; of the stand-in, for a damaged one
    index: list[int] = field(default_factory=list)
    # The model's, see `small_mask`; empty if `measure` has no column "mask"
    masks: list[RLE] = field(default_factory=list)


@torch.no_grad()
def evaluate(
    policy: Policy,
    spec: EvalSpec,
    ranks: RankInfo,
    names: Sequence[str] = ("policy",),
    roles: Roles | None = None,
    signals: SignalHandler | None = None,
) -> dict[str, EvalResult]:
    """Measure all samples on all ranks together: {role: its result}.

    Images are read once for all roles, and encoded once if no encoder trains. After a signal a rank
    leaves when its batch ends, and the result is empty on all ranks.

    Args:
        names: roles, whose weights are those of `roles`; without `roles` the weights in use count.

    Raises:
        FloatingPointError: on all ranks, if a model's outputs are not finite.
    """
    policy.unshard_base(vision=True)  # ranks may have different numbers of batches
    tokens = spec.max_new_tokens
    columns, faults = {name: [] for name in names}, set()
    loader = eval_loader(
        spec.dataset,
        policy.preprocessor(tokens, spec.max_prompt_length),
        spec.batch_size,
        spec.num_workers,
        rank=ranks.rank,
        world_size=ranks.world_size,
        distractors=spec.distractors,
    )
    # disable=None: no bar where the output is no terminal
    disable_bar = None if ranks.is_main else True
    for batch in tqdm(loader, desc="evaluation", leave=False, disable=disable_bar):
        features = None
        for name in names:
            with roles.use(name) if roles else nullcontext():
                if features is None or policy.encoders_train:  # else equal for all roles
                    features = policy.encode(batch)
                values = (spec.measure or measure)(policy, batch, features, tokens)
                if spec.best_of:
                    values |= spec.measure_samples(policy, batch, features, tokens, spec.best_of)
                columns[name].append(values)
            not_finite = policy.nan_watcher.take().names()
            faults |= {f"evaluation of the {name}: {output}" for output in not_finite}
        if signals and signals.received:
            break
    raise_on_any_rank(sorted(faults))
    if signals and signals.agree(gather_objects(signals.received)):
        return {}
    return {name: _merge(gather_objects(batches), spec) for name, batches in columns.items()}


class Evaluator:
    """Evaluations of a run: measure its roles, log the metrics, keep the best checkpoint.

    Args:
        samples_answers: True if training also samples answers; if not, the sampler's memory is
            freed after each evaluation.
    """

    def __init__(
        self,
        spec: EvalSpec,
        config: RunConfig,
        ranks: RankInfo,
        flags: dict[str, object],
        signals: SignalHandler,
        samples_answers: bool = True,
    ):
        self.spec, self.ranks, self.flags, self.signals = spec, ranks, flags, signals
        self.folder, self.eval_steps = Path(config.output_dir), config.eval_steps
        self.metric_for_best_model = config.metric_for_best_model
        self.merges_the_better = config.merge_at_end == "auto"
        self.samples_answers = samples_answers
        self.values = {}  # {step: columns of the policy}
        self.base: EvalResult | None = None  # of the run's initial weights

    def measure_base(self, state: save_load.RunState, log: RunLogger):
        """Measure the run's initial weights: the base, to which a fresh LoRA adds nothing.

        These are the reference's; without one the policy's, which has not moved yet. A run that
        goes on from a checkpoint reads what it measured at its start, if that was of the same
        samples, base and settings.
        """
        file, measured = self._file(0), None
        if self.ranks.is_main and state.step:
            measured = self._read(file, self._settings(state))
        if base := gather_objects(measured)[0]:
            self.base, self.values[0] = base, base.values
            metrics = means(base.values)
            if self.eval_steps:  # shows whether --metric_for_best_model is measured
                selection_score(metrics, self.metric_for_best_model)
            print0(f"evaluation before training, from {file}: {main_figures(metrics)}")
            return
        role = "reference" if "reference" in state.roles.copies else "policy"
        self._measure(0, state, (role,), log)

    def __call__(self, state: save_load.RunState, log: RunLogger):
        """Measure the policy and the teacher, if any. After a signal nothing is logged."""
        teacher = ("teacher",) if state.roles.has_teacher else ()
        self._measure(state.step, state, ("policy", *teacher), log)

    def due(self, step: int) -> bool:
        """Return whether an evaluation follows this step."""
        return self.eval_steps > 0 and step % self.eval_steps == 0

    def missing(self, step: int) -> bool:
        """Return whether an evaluation was due after this step but a signal prevented it.

        Rank 0 decides, since it alone has the file; all ranks must call this.
        """
        lacks_file = step > 0 and self.due(step) and not self._file(step).is_file()
        return gather_objects(lacks_file)[0]

    def _file(self, step: int) -> Path:
        return self.folder / "evaluation" / f"step_{step}.json"

    def _settings(self, state: save_load.RunState) -> dict[str, Any]:
        """Return what an evaluation depends on beside the weights: samples, base, options.

        Flags that a resume may not change are left out: they are the same in the whole run.
        """
        return dict(
            samples=state.data.get("evaluation"),
            base=state.base_fingerprint.digest if state.base_fingerprint else None,
            attributes=self.spec.attribute_phrases,
            distractors=self.spec.distractors,
        )

    def _read(self, file: Path, settings: dict[str, Any]) -> EvalResult | None:
        """Return what an evaluation's file holds, None if there is none of these settings."""
        if not file.is_file():
            return None
        try:
            evaluation = read_json(file)
        except DamagedFile:  # by the user; it is measured again
            return None
        if evaluation.get("settings") != json.loads(json.dumps(settings)):
            return None
        columns = evaluation["values"].items()
        return EvalResult(
            {name: torch.tensor(column, dtype=torch.float64) for name, column in columns},
            evaluation["image_ids"],
            evaluation["references"],
            evaluation["captions"],
            evaluation["num_damaged"],
            masks=evaluation.get("masks", []),  # absent in a file of an earlier version
        )

    def _measure(
        self, step: int, state: save_load.RunState, names: tuple[str, ...], log: RunLogger
    ):
        """Log the roles `names`; keep the first one's columns, and the state if it is the best."""
        results = evaluate(state.policy, self.spec, self.ranks, names, state.roles, self.signals)
        if not self.samples_answers:
            state.policy.engine.free_cache()
        if not results:
            return
        policy, *teacher = results.values()
        self.values[step] = policy.values
        metrics = [means(result.values) for result in results.values()]
        when = f"after step {step}" if step else "before training"
        samples = counted(len(policy.image_ids), "sample")
        print0(f"evaluation {when}, {samples}: {main_figures(metrics[0])}")
        if teacher:
            print0(f"evaluation {when}, the teacher: {main_figures(metrics[1])}")
        if not step:
            self.base = policy
        self._render(step, policy, log)
        log.scalars({f"eval/{name}": value for name, value in metrics[0].items()}, step)
        first = {name: metrics[0][name] for name in MAIN_METRICS if name in metrics[0]}
        log.scalars({f"{MAIN}/eval_{name}": value for name, value in first.items()}, step)
        if state.roles.has_teacher:  # at step 0 it is the base too
            log.scalars({f"eval_ema/{name}": value for name, value in metrics[-1].items()}, step)
        chooses_role = self.merges_the_better and state.roles.has_teacher
        if self.eval_steps or chooses_role:
            # At step 0 too, which shows whether --metric_for_best_model is measured.
            scores = [
                role | dict(score=selection_score(role, self.metric_for_best_model))
                for role in metrics
            ]
            if step and self.eval_steps:
                best = scores[0] | {"teacher": role for role in scores[1:]}
                save_load.save_if_best(self.folder, state, self.flags, best, self.ranks.is_main)
        if self.ranks.is_main:  # last: the file says that the evaluation is done
            evaluation = record(policy, self.flags, *teacher) | dict(masks=policy.masks)
            write_json(self._file(step), dict(settings=self._settings(state)) | evaluation)

    def _render(self, step: int, result: EvalResult, log: RunLogger):
        """Log pictures of the first samples, the same ones at every evaluation.

        The base's answers stand beside the policy's.
        """
        results = {"base": self.base} | ({f"policy, step {step}": result} if step else {})
        for number in range(len(result.masks[:NUM_EVAL_PICTURES]) if log.writer else 0):
            answers = [
                EvalAnswer(
                    title,
                    torch.from_numpy(decode_mask(shown.masks[number])),
                    shown.values["seg_iou"][number].item(),
                    f"answer: {shown.captions[number]}",
                )
                for title, shown in results.items()
                if shown.masks
            ]
            sample = self.spec.dataset[result.index[number]]
            log.evaluated_sample(step, number + 1, sample, result.references[number], answers)


def _merge(columns_of_rank: list[list[dict]], spec: EvalSpec) -> EvalResult:
    """Join the batches of all R ranks; rank r measured samples r, r + R, .."""
    merged, world_size = {}, len(columns_of_rank)
    for rank, batches in enumerate(columns_of_rank):
        for name in batches[0] if batches else ():
            column = merged.setdefault(name, [None] * len(spec.dataset))
            column[rank::world_size] = [value for batch in batches for value in batch[name]]
    image_ids, references, captions = map(merged.pop, ("image_id", "reference", "caption"))
    index, masks, mask_pairs = (merged.pop(name, []) for name in ("index", "mask", "mask_pairs"))
    num_damaged = sum(position != i for i, position in enumerate(index))
    values = {name: torch.tensor(v, dtype=torch.float64) for name, v in merged.items()}
    if mask_pairs:  # AP50 is of all samples together, so each sample gets the same value
        ap50 = average_precision(*zip(*mask_pairs))
        values["gcg_ap50"] = torch.full((len(index),), ap50, dtype=torch.float64)
    if spec.measure is None and "caption_meteor" in values:
        values |= measure_texts(references, captions, spec.attribute_phrases)
    return EvalResult(values, image_ids, references, captions, num_damaged, index, masks)


def record(result: EvalResult, flags: dict[str, object], teacher: EvalResult | None = None) -> dict:
    """Return metrics, intervals and columns as JSON, which `tools.evaluate --before` reads.

    Those of the teacher, on the same samples, are under "teacher".
    """
    policy = dict(
        flags=flags,
        num_samples=len(result.image_ids),
        image_ids=result.image_ids,
        references=result.references,
        num_damaged=result.num_damaged,
    ) | summary(result)
    return policy | (dict(teacher=summary(teacher)) if teacher else {})


def summary(result: EvalResult) -> dict:
    """Return metrics, intervals, columns and answers of a role as JSON."""
    metrics = means(result.values)
    intervals = {
        metric: bootstrap(rows_of(result.values, metric))
        for metric in metrics
        if metric not in WITHOUT_INTERVAL
    }
    values = {name: column.tolist() for name, column in result.values.items()}
    return dict(means=metrics, intervals=intervals, values=values, captions=result.captions)
