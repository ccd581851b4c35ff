"""Rank the samples of a data set by a model's own rewards: which of them can be learnt from.

    python -m tools.rank_samples --model_path M --data_dir D --output ranks.jsonl
    python -m tools.rank_samples --model_path M --data_dir D --output ranks.jsonl \\
        --best best.jsonl --best_fraction 0.3
    python -m rl_train.train --model_path M --data_dir D --sample_list best.jsonl ...
    torchrun --nproc_per_node 8 -m tools.rank_samples ...               # on 8 GPUs

Each training sample is asked every task's question, and --num_generations answers are rewarded as
in a step of a run with the same flags. A line of --output is {image_id, task, mean, variance,
num_scored} of the rewards of one sample. A sample without variance teaches nothing, whether it is
too easy or too hard. The same command goes on where it was stopped.
"""

import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from tqdm import tqdm

from rl_train import cli
from rl_train.checkpoint import save_load
from rl_train.config.flags import FRACTION, SEED, flag
from rl_train.config.grpo_config import (
    Config,
    DataConfig,
    PolicyConfig,
    RewardConfig,
    RolloutConfig,
)
from rl_train.data.distractors import unwrap_subset
from rl_train.data.loader import StepSampler, batch_loader
from rl_train.distributed import process_group
from rl_train.distributed.process_group import RankInfo, gather_objects, only_local_rank0, print0
from rl_train.policies.base import Features
from rl_train.policies.registry import check_model
from rl_train.rewards.combine import combine
from rl_train.rewards.meteor import require_wordnet
from rl_train.rollout import Batch
from rl_train.run.build import Run, build, build_rewards, families_of
from rl_train.run.messages import print_warning
from rl_train.run.open_data import RunData, open_data
from rl_train.run.start import (
    calibrate_actions,
    download_models,
    replace_rewards_by_ablation,
)
from rl_train.tasks import DEFAULT_TASKS, TASKS
from rl_train.tasks.base import Task
from rl_train.utils.command_line import run_program
from rl_train.utils.io import check_writable, read_json, write_json

Line = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class RankConfig:
    """ranking"""

    resume: ClassVar[None] = None  # of the weights of a run; none here
    merge_at_end: ClassVar[str] = "none"

    output: str = flag(
        help="JSONL file of a line per sample and task; beside it FILE.settings.json says of what",
        metavar="FILE",
        free_on_resume=True,
        may_differ_by_rank=True,
    )
    checkpoint: str | None = flag(
        None,
        "checkpoint_step_N folder whose policy and teacher are asked; give its run's flags too",
        default_is="the base model in --model_path",
        metavar="FOLDER",
    )
    best: str | None = flag(
        None,
        "file to write for --sample_list: the samples whose rewards vary most",
        default_is="none is written",
        metavar="FILE",
        free_on_resume=True,
        may_differ_by_rank=True,
    )
    best_fraction: float = flag(
        0.5, "fraction of the samples that --best names", type=FRACTION, free_on_resume=True
    )
    seed: int = flag(0, "seed of the answers", type=SEED)


RANK = cli.EntryPoint(
    "python -m tools.rank_samples",
    "Rank training samples by the rewards of a model's answers. --config outputs/rl takes a run's "
    "flags. On several GPUs: torchrun.",
    dict(
        policy=PolicyConfig,
        data=DataConfig,
        rollout=RolloutConfig,
        reward=RewardConfig,
        run=RankConfig,
    ),
    TASKS,
    DEFAULT_TASKS,
    output="--output FILE",
    prefix="rank_samples",
    leaves_out_training=True,
)


def settings_of(run: Run) -> dict[str, Any]:
    """Return what a line depends on: flags, samples and base model, as JSON holds them."""
    config = run.config
    free = config.flags_with("free_on_resume")
    flags = {name: value for name, value in config.flags.items() if name not in free}
    settings = dict(flags=flags, data=run.data.facts["training"])
    settings["base"] = run.state.base_fingerprint.digest
    return json.loads(json.dumps(settings))


def read_ranks(output: Path, settings: dict[str, Any], tasks: set[str]) -> list[Line]:
    """Return the lines of an earlier --output; a last sample that a kill tore is cut off the file.

    Args:
        tasks: names of those that each sample has a line of.

    Raises:
        ValueError: the file is not of this program, or of other settings.
    """
    file = settings_file(output)
    if not output.exists():
        write_json(file, settings, indent=2)
        return []
    if not file.is_file():
        raise ValueError(f"--output {output}: exists, and no {file.name} beside it: name another")
    before = read_json(file)
    if before != settings:
        flags = settings["flags"]
        changed = [f"--{name}" for name in flags if before["flags"].get(name) != flags[name]]
        changed += [name for name in ("data", "base") if before[name] != settings[name]]
        raise ValueError(
            f"--output {output}: was begun with other {', '.join(changed)}; give the same, or name "
            "another file"
        )
    content = output.read_bytes()
    rows = content[: content.rfind(b"\n") + 1].splitlines(keepends=True)
    lines = [json.loads(row) for row in rows]
    while lines and tasks_of(lines[-len(tasks) :], lines[-1]["image_id"]) != tasks:
        del lines[-1], rows[-1]
    with output.open("r+b") as opened:
        opened.truncate(sum(map(len, rows)))
    return lines


def tasks_of(lines: list[Line], image_id: str) -> set[str]:
    """Return the tasks of a sample's lines."""
    return {line["task"] for line in lines if line["image_id"] == image_id}


def settings_file(output: Path) -> Path:
    return output.with_name(f"{output.name}.settings.json")


@torch.no_grad()
def roll_out(run: Run, task: Task, batch: Batch, features: Features) -> torch.Tensor:
    """Return the (B, G) rewards of a task's rollout of a batch, as a step has them; NaN: none."""
    policy, rollout_config = run.state.policy, run.config.rollout
    G, T = rollout_config.num_generations, rollout_config.max_completion_length
    rng = run.rng(task, batch)
    prompts = task.prompts(batch, features)
    with run.state.roles.use("policy"):
        rollout = policy.sample(batch, features, prompts, G, T, rng.uniforms(T))
        if task.action:
            rollout.latents = task.action.draw(rollout, rng)
    rewards = combine(task.rewards(rollout).rewards, task.reward_weights)
    faults = policy.nan_watcher.take().names()
    if faults:
        raise FloatingPointError(f"{task.name}: not finite: {', '.join(faults)}")
    return rewards.view(-1, G)


def line_of(image_id: str, task: str, rewards: torch.Tensor) -> Line:
    """Return a sample's line, of its G rewards; None where fewer than one or two are scored."""
    scored = rewards[~rewards.isnan()].double()
    return dict(
        image_id=image_id,
        task=task,
        mean=scored.mean().item() if len(scored) else None,
        variance=scored.var().item() if len(scored) > 1 else None,
        num_scored=len(scored),
    )


def lines_of_batches(run: Run, index_lists: list[list[int]]) -> Iterator[list[Line]]:
    """Yield the lines of each list of samples; a damaged sample has lines without rewards."""
    policy, data = run.state.policy, run.config.data
    dataset, index = unwrap_subset(run.data.train_set)
    preprocessor = run.preprocessor()
    loader = batch_loader(
        run.data.train_set, preprocessor, index_lists, data.num_workers, data.distractors
    )
    for indices, batch in zip(index_lists, loader, strict=True):
        features = policy.encode(batch)
        rewards = {task.name: roll_out(run, task, batch, features) for task in run.state.tasks}
        lines = []
        for k, i in enumerate(indices):
            image_id = dataset.image_id(int(index[i]))
            for task, of_batch in rewards.items():  # (B, G)
                of_sample = of_batch[k] if batch.index[k] == i else of_batch[k] * math.nan
                lines.append(line_of(image_id, task, of_sample))
        yield lines


def rank(run: Run, output: Path) -> list[Line]:
    """Roll out the samples that `output` lacks, and append their lines; return all, on rank 0."""
    ranks, B = run.ranks, run.config.rollout.batch_size
    names = {task.name for task in run.state.tasks}
    with process_group.fail_together():
        done = read_ranks(output, settings_of(run), names) if ranks.is_main else []
    ids_done = {line["image_id"] for line in gather_objects(done)[0]}
    dataset, index = unwrap_subset(run.data.train_set)
    ids = [dataset.image_id(i) for i in index.tolist()]
    missing = [i for i, name in enumerate(ids) if name not in ids_done]
    # Each chunk has B samples for every rank; the last ranks of the last one may have none.
    size = B * ranks.world_size
    chunks = [missing[start : start + size] for start in range(0, len(missing), size)]
    rank_chunks = [chunk[ranks.rank * B : (ranks.rank + 1) * B] for chunk in chunks]
    batches = lines_of_batches(run, [indices for indices in rank_chunks if indices])
    G = run.config.rollout.num_generations
    print0(
        f"{len(missing):,d} of {len(ids):,d} samples to ask, {G} answers each for every task; if "
        "you stop it, the same command continues"
    )
    hidden = None if ranks.is_main else True  # None: no bar where there is no terminal
    began, num_asked = time.perf_counter(), 0
    with tqdm(total=len(ids), initial=len(ids) - len(missing), disable=hidden) as progress:
        for chunk, indices in zip(chunks, rank_chunks, strict=True):
            lines_of_ranks = gather_objects(next(batches) if indices else [])
            progress.update(len(chunk))
            num_asked += len(chunk)
            if ranks.is_main and is_tenth(num_asked, len(chunk), len(missing)):
                minutes = (
                    (time.perf_counter() - began) / num_asked * (len(missing) - num_asked) / 60
                )
                tqdm.write(f"{num_asked:,d} of {len(missing):,d}, {minutes:.0f} minutes left")
            lines = [line for lines in lines_of_ranks for line in lines]
            done += lines
            if ranks.is_main:
                with output.open("a") as file:
                    file.writelines(json.dumps(line) + "\n" for line in lines)
    return done


def is_tenth(num_asked: int, num_new: int, num_all: int) -> bool:
    """Return whether the newest samples are the first ones, or complete another tenth of all."""
    num_before = num_asked - num_new
    return not num_before or 10 * num_asked // num_all > 10 * num_before // num_all


def write_best(lines: list[Line], file: Path, fraction: float):
    """Write the samples with the largest variance, summed over tasks; at least one."""
    variances = defaultdict(float)
    for line in lines:
        variances[line["image_id"]] += line["variance"] or 0.0
    by_variance = sorted(variances, key=variances.get, reverse=True)  # equal ones in their order
    best = by_variance[: max(math.floor(fraction * len(by_variance)), 1)]
    rows = [json.dumps(dict(image_id=name, variance=variances[name])) for name in best]
    file.write_text("\n".join(rows) + "\n")
    print0(
        f"{file}: {len(best)} of {len(variances)} samples, those whose variances have the largest "
        f"sum over tasks; without variance {equal_groups(lines, best)}"
    )


def equal_groups(lines: list[Line], image_ids: list[str]) -> str:
    """Return how many of some samples have no variance in each task: "loop1 1 of 5, .."."""
    num_equal, listed = Counter(), set(image_ids)
    for line in lines:
        num_equal[line["task"]] += line["image_id"] in listed and not line["variance"]
    return ", ".join(f"{task} {number} of {len(image_ids)}" for task, number in num_equal.items())


def build_run(config: Config, ranks: RankInfo) -> Run:
    """Build what rolls out as a run's first step does, or as the step after --checkpoint."""
    if config.taken:
        print0(config.taken.sentence)
    config = replace(config, policy=download_models(config.policy))
    check_model(config.policy, families_of(config.task_classes))
    require_wordnet()
    rewards = build_rewards(config.reward, config.rollout.max_completion_length, config.run.seed)
    data: RunData = open_data(config.data, config.task_classes)
    sampler = StepSampler(len(data.train_set), 1, 1, config.run.seed)  # of no use here
    run = build(config, ranks, data, sampler, rewards)
    print_warning(run.state.policy.summary())
    if config.run.checkpoint:
        load_checkpoint(Path(config.run.checkpoint), run.state)
    else:
        calibrate_actions(run)
    replace_rewards_by_ablation(run)
    return run


def load_checkpoint(folder: Path, state: save_load.RunState):
    """Load the weights of a checkpoint's roles and its tasks' actions. Raises ValueError."""
    if not (folder / "training_state.pt").is_file():
        raise ValueError(f"--checkpoint {folder}: it has no training_state.pt, it is no checkpoint")
    for role, weights in state.weights().items():
        file = save_load.WEIGHT_FILES[role]
        save_load.load_weights(folder, weights, file, state.base_fingerprint)
    actions = save_load.read_state(folder)["tasks"]
    for task in state.tasks:
        if task.action and task.name not in actions:
            raise ValueError(f"--checkpoint {folder}: its run did not train {task.name} of --tasks")
        if task.action:
            task.action.load_state_dict(actions[task.name])


def main(argv: list[str] | None = None):
    ranks = process_group.init()
    config = cli.parse_together(argv, RANK)
    output, best = Path(config.run.output), config.run.best and Path(config.run.best)
    try:
        with process_group.fail_together():
            check_writable("--output", output, is_file=True)
            if best and best.exists():
                raise ValueError(f"--best {best}: exists already, name another file")
            run = build_run(config, ranks)
        lines = rank(run, output)
        if not ranks.is_main:
            return
        ids = list(dict.fromkeys(line["image_id"] for line in lines))
        print0(f"{output}: without variance {equal_groups(lines, ids)} samples")
        if best:
            write_best(lines, best, config.run.best_fraction)
    except ValueError as error:  # the user's input: one sentence, no traceback
        raise SystemExit(only_local_rank0(f"rank_samples: {error}")) from error
    finally:
        process_group.close()


if __name__ == "__main__":
    run_program(main)
