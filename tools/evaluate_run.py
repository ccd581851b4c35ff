"""Two checkpoints of a run compared, on the run's own evaluation split and by its own flags.

    python -m tools.evaluate --run R                             # the base and the last checkpoint
    python -m tools.evaluate --run R --compare 60 120            # checkpoint_step_60 and _120
    python -m tools.evaluate --run R --compare base best:teacher --output F.json
    torchrun --nproc_per_node 8 -m tools.evaluate --run R ...

Differences are paired by region, with their 95 % intervals. Both are measured anew. Flags of the
training that a resume may change are given behind: --batch_size, --model_path if the base has
moved. The evaluation split must be the run's.
"""

import json
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rl_train import cli
from rl_train.checkpoint.record import BEST_CHECKPOINT, DataFacts, read_record
from rl_train.checkpoint.save_load import WEIGHT_FILES, list_checkpoints, load_weights
from rl_train.config.grpo_config import Config
from rl_train.data.workers import reporting_dead_workers
from rl_train.distributed import process_group
from rl_train.distributed.process_group import RankInfo, only_local_rank0, print0
from rl_train.evaluation.bootstrap import means, paired_difference, rows_of
from rl_train.evaluation.cycle_metrics import WITHOUT_INTERVAL
from rl_train.evaluation.evaluate import (
    TRAIN_BATCHES_PER_EVAL_BATCH,
    EvalResult,
    EvalSpec,
    evaluate,
    summary,
)
from rl_train.evaluation.table import before_after_table
from rl_train.policies.base import Policy
from rl_train.policies.registry import FAMILIES, build_policy, family_of
from rl_train.rewards.meteor import require_wordnet
from rl_train.run.build import base_fingerprint, families_of, trainable_groups
from rl_train.run.messages import machine
from rl_train.run.open_data import RunData, open_data
from rl_train.run.start import download_models
from rl_train.sft import SFT
from rl_train.tasks.base import TaskContext
from rl_train.utils.command_line import FlagParser
from rl_train.utils.io import check_writable, read_json

BASE = "base"


@dataclass(frozen=True)
class Weights:
    """Weights of a run: those it started from, or a role's in a checkpoint."""

    name: str
    folder: Path | None = None  # None: the base
    role: str = "policy"


def build_parser() -> FlagParser:
    """Build the parser of the flags that are not the training's."""
    parser = FlagParser("python -m tools.evaluate", description=__doc__)
    add = parser.add_argument
    add("--run", required=True, type=Path, metavar="R", help="output folder of a run")
    add(
        "--compare",
        nargs=2,
        default=[BASE, "last"],
        metavar="WEIGHTS",
        help="before and after: base, a step N, last, best or a checkpoint's folder name; "
        "N:teacher for the teacher's weights",
    )
    add("--output", type=Path, metavar="FILE", help="JSON of both, and of the differences")
    return parser


def find_weights(run: Path, word: str) -> Weights:
    """Return the weights that a word of --compare names. Raises ValueError if there are none."""
    name, _, role = word.partition(":")
    role = role or "policy"
    if name == BASE and role == "policy":
        return Weights("base")
    checkpoints = list_checkpoints(run)
    names = {path.name.removeprefix("checkpoint_step_"): path for path in checkpoints}
    names |= {path.name: path for path in checkpoints}
    names |= dict(last=checkpoints[-1]) if checkpoints else {}
    if (best := run / BEST_CHECKPOINT).is_dir():
        names |= {"best": best, BEST_CHECKPOINT: best}
    folder = names.get(name)
    if folder is None or role not in WEIGHT_FILES:
        known = ", ".join([BASE, *names])
        raise ValueError(f"--compare {word}: {run} has {known}; N:teacher is N's teacher")
    if not (folder / WEIGHT_FILES[role]).is_file():
        raise ValueError(f"--compare {word}: {folder} has no {role}")
    return Weights(f"{folder.name} ({role})", folder, role)


def config_of_run(run: Path, words: Sequence[str]) -> Config:
    """Return the run's config, with the flags of the command line on top.

    Raises ValueError if one of them is not free on a resume.
    """
    saved = read_json(run / "config.json")
    program = cli.GRPO if "num_generations" in saved else SFT
    argv = ["--config", str(run), "--output_dir", str(run), *words]
    config = cli.parse_together(argv, program)
    free = config.flags_with("free_on_resume")
    for name in sorted(config.flags.keys() - free.keys()):
        if name in saved and saved[name] != config.flags[name]:
            raise ValueError(
                f"--{name} {config.flags[name]}: the run of --run {run} had {saved[name]}, and is "
                "measured by its own flags; leave it out"
            )
    return config


def check_split(run: Path, now: DataFacts):
    """Raise ValueError if the evaluation split is not the one that the run was measured on."""
    record = read_record(run)
    before = record.data.get("evaluation") if record else None
    if before and before != now["evaluation"]:
        changed = [f"{k} {v} -> {now['evaluation'].get(k)}" for k, v in before.items()]
        raise ValueError(
            f"--run {run}: its evaluation split is another one now: {', '.join(changed)}; name the "
            "former data with --data_dir and --eval_data_dir"
        )


def open_policy_of_run(config: Config, ranks: RankInfo) -> Policy:
    """Return the policy as the run began with it; a fresh LoRA adds nothing to the base."""
    family = family_of(config.policy.model_path)
    absent = FAMILIES[family].absent_groups(config.policy.model_path)
    return build_policy(
        config.policy,
        families_of(config.task_classes),
        trainable_groups(family, config.rollout.trainable_modules, config.tasks, absent),
        config.rollout.max_completion_length,
        ranks.device,
    )


def spec_of_run(config: Config, policy: Policy, data: RunData) -> EvalSpec:
    """Return the run's own evaluation."""
    name, options = next(iter(config.tasks.items()))
    context = TaskContext(policy, None, config.rollout.max_completion_length)
    return EvalSpec(
        data.eval_set,
        TRAIN_BATCHES_PER_EVAL_BATCH * config.rollout.batch_size,
        config.rollout.max_completion_length,
        config.data.num_workers,
        config.data.max_prompt_length,
        distractors=config.data.distractors,
        attribute_phrases=data.attribute_phrases,
        measure=config.task_classes[name](options, context).measure,
    )


def differences(before: EvalResult, after: EvalResult) -> dict[str, dict]:
    """Return {metric: its values before and after, the change and its 95 % interval}."""
    values = means(before.values), means(after.values)
    by_metric = {}
    for metric in (metric for metric in values[0] if metric in values[1]):
        rows = rows_of(before.values, metric), rows_of(after.values, metric)
        start, end = (v[metric] for v in values)
        by_metric[metric] = dict(before=start, after=end, change=end - start)
        if metric not in WITHOUT_INTERVAL:
            by_metric[metric]["interval"] = paired_difference(*rows)[1:]
    return by_metric


def compare(args: Namespace, words: Sequence[str], ranks: RankInfo):
    """Measure both, print the table and write --output. Raises ValueError for bad input."""
    if args.output:
        check_writable("--output", args.output, is_file=True)
    chosen = [find_weights(args.run, word) for word in args.compare]
    config = config_of_run(args.run, words)
    print0(machine(ranks))
    config = replace(config, policy=download_models(config.policy))
    data = open_data(config.data, config.task_classes)
    check_split(args.run, data.facts)
    policy = open_policy_of_run(config, ranks)
    spec = spec_of_run(config, policy, data)
    initial = {name: p.detach().cpu().clone() for name, p in policy.trainable.items()}
    results = []
    for weights in chosen:
        if weights.folder is None:
            with torch.no_grad():
                for name, parameter in policy.trainable.items():
                    parameter.copy_(initial[name])
        else:
            file = WEIGHT_FILES[weights.role]
            fingerprint = base_fingerprint(config.policy)
            load_weights(weights.folder, policy.trainable, file, fingerprint)
        measured = reporting_dead_workers(spec.num_workers, evaluate, policy, spec, ranks)
        results.append(measured["policy"])
    if not ranks.is_main:
        return
    before, after = results
    print0(f"before: {chosen[0].name}; after: {chosen[1].name}")
    split = f"evaluation split of {args.run}"
    print0(before_after_table(before.values, after.values, split))
    if args.output:
        record = dict(
            run=str(args.run),
            compared=[weights.name for weights in chosen],
            flags=config.flags,
            num_samples=len(before.image_ids),
            image_ids=before.image_ids,
            references=before.references,
            differences=differences(before, after),
            before=summary(before),
            after=summary(after),
        )
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(record))


def main(argv: Sequence[str]):
    """Compare as the command line says; words that are not flags here are the training's."""
    args, words = build_parser().parse_known_args(argv)
    require_wordnet()
    ranks = process_group.init()
    try:
        compare(args, words, ranks)
    except ValueError as error:
        raise SystemExit(only_local_rank0(f"evaluate: {error}")) from error
    finally:
        process_group.close()
