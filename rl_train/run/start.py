"""Start a run: check its folders, open its data, build it, and restore or calibrate it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Subset

from rl_train.checkpoint import save_load
from rl_train.checkpoint.record import DataFacts, RunRecord, adopt, read_record
from rl_train.cli import check_nothing_in_the_way, check_output_dir, check_same
from rl_train.config.grpo_config import Config, PolicyConfig
from rl_train.data.loader import Batches, eval_loader
from rl_train.distributed import process_group
from rl_train.distributed.fsdp import check_ranks_of_host
from rl_train.distributed.process_group import RankInfo, print0
from rl_train.engine.quantize import require_library
from rl_train.loggers.text_log import TextLog
from rl_train.loggers.wandb import start_wandb
from rl_train.policies.lora import parameter_counts
from rl_train.policies.registry import check_model
from rl_train.rewards.ablations import AblationReward
from rl_train.rewards.meteor import require_wordnet
from rl_train.run import messages
from rl_train.run.build import Run, all_flags, build, build_rewards, families_of
from rl_train.run.consistency import check_same_data, check_same_start, check_same_weights
from rl_train.run.lr_schedule import follow_new_length
from rl_train.run.memory_estimate import standing_memory
from rl_train.run.open_data import build_sampler, open_data
from rl_train.run.provenance import read_starts, record_start
from rl_train.tasks.ablated import AblatedTask
from rl_train.utils.io import lock, read_json, wrap_write_errors, write_json
from sa2va_hf import hub

CALIBRATION_SAMPLES = 32  # training samples that an action's `calibrate` looks at


def start_run(config: Config, ranks: RankInfo) -> Run:
    """Return a run before its first step, or before the next step of the checkpoint it resumes.

    Cheap checks come first. The output folder is only read: see `claim_output_dir`.

    Raises:
        ValueError: names the flag or file that is wrong.
    """
    print0(messages.machine(ranks))
    if config.taken:
        print0(config.taken.sentence)
    messages.print_warning(messages.unused_gpu(ranks))
    config = replace(config, policy=download_models(config.policy))
    check_model(config.policy, families_of(config.task_classes))
    if config.policy.fsdp:
        check_ranks_of_host()
    if "adamw_8bit" in config.optim.low_memory:
        require_library("--low_memory adamw_8bit")
    has_begun = check_folder(config, ranks)
    resume = save_load.find_resume_checkpoint(config.run.resume, config.run.output_dir)
    require_wordnet()  # now, not after the first rollout
    rewards = build_rewards(config.reward, config.rollout.max_completion_length, config.run.seed)
    data = open_data(config.data, config.task_classes)
    # No rank goes on before the output folder is known to be free.
    check_same_start(config, resume, ranks, data.facts)
    if resume or has_begun:
        check_data_of_run(config, resume, data.facts)
    sampler = build_sampler(config, data.train_set, ranks)
    run = build(config, ranks, data, sampler, rewards)
    print_sizes(config, run.state, ranks)
    if sampler.mixture:
        print0(sampler.mixture.describe(sampler.prompts_per_step, run.max_steps))
    if resume:
        restore(run, resume)
    else:
        calibrate_actions(run)
    sampler.start, sampler.stop = run.state.step, run.max_steps
    check_same_weights(run.state, ranks)
    replace_rewards_by_ablation(run)
    return run


def check_folder(config: Config, ranks: RankInfo) -> bool:
    """Return whether the output folder holds a run that --resume goes on with.

    Raises:
        ValueError: it holds another run, or files that this one would write over.
    """
    if ranks.is_main:
        check_output_dir(config, all_flags(config, ranks))
    has_begun = (Path(config.run.output_dir) / "config.json").is_file()
    if not process_group.gather_objects(has_begun)[0] and not ranks.is_main:
        check_nothing_in_the_way(config)  # on a disk of this machine
    return has_begun


def download_models(config: PolicyConfig) -> PolicyConfig:
    """Replace models' names on the hub by the folders that they were downloaded to."""
    model_path = str(hub.model_folder("--model_path", config.model_path))
    sam_path = config.sam_path and str(hub.model_folder("--sam_path", config.sam_path))
    return replace(config, model_path=model_path, sam_path=sam_path)


def print_sizes(config: Config, state: save_load.RunState, ranks: RankInfo):
    """Print what the model is, how many parameters train, and the memory that the run holds."""
    policy = state.policy
    messages.print_warning(policy.summary())
    counts = parameter_counts(policy.model, policy.group_of)
    print0(messages.parameters(counts))
    messages.print_warning(messages.large_on_cpu(counts.total(), ranks))
    sizes = standing_memory(policy, state.roles.copies, config.optim.low_memory)
    print0(messages.memory(sizes, ranks))


def check_data_of_run(config: Config, resume: Path | None, data: DataFacts):
    """Raise ValueError if a resumed run has other data; see `check_same_data`.

    It is compared with the checkpoint's, or without one with what the output folder says.
    """
    if resume:
        check_same_data(config, save_load.read_data(resume), data, resume)
    else:
        record = read_record(Path(config.run.output_dir)) or RunRecord()
        check_same_data(config, record.data, data, config.run.output_dir)


def restore(run: Run, checkpoint: Path):
    """Load a checkpoint of a run with the same flags; only its end may have moved.

    Raises:
        ValueError: it is of other flags, damaged, or beyond the run's last step.
    """
    print0(f"resuming from {checkpoint}")
    check_same(checkpoint / "config.json", run.config, run.flags, f"--resume {checkpoint}")
    save_load.load(checkpoint, run.state, run.config.run.output_dir, run.ranks.rank)
    follow_max_steps(checkpoint, run.state, run.config.flags, run.max_steps)


def follow_max_steps(
    folder: Path, state: save_load.RunState, flags: dict[str, Any], max_steps: int
):
    """Let a resumed run end at another step than it was to; print what becomes of its schedules.

    Raises ValueError if the checkpoint in `folder` is beyond that step.
    """
    if state.step > max_steps:
        raise ValueError(
            f"--max_steps {max_steps}: {folder} is at step {state.step} already; give a larger one"
        )
    before = read_json(folder / "config.json")
    names = ("max_steps", "num_train_epochs")
    changed = [name for name in names if before.get(name) != flags[name]]
    if not changed:
        return
    rate = state.scheduler.get_last_lr()[0]
    follow_new_length(state.scheduler)
    values = ", ".join(f"--{name} was {before.get(name)}" for name in changed)
    print0(
        f"{values}: the run now ends at step {max_steps} and goes on from step {state.step}; the "
        "learning rate and the teacher's half-life are from here on those of a run of "
        f"{max_steps} steps (learning rate {state.scheduler.get_last_lr()[0]:.3g}, was {rate:.3g})"
    )


def calibrate_actions(run: Run):
    """Fit each task's action to the base on a few training samples, the same on all ranks."""
    train_set, config = run.data.train_set, run.config.rollout
    order = torch.randperm(len(train_set), generator=torch.Generator().manual_seed(0))
    samples = Subset(train_set, order[:CALIBRATION_SAMPLES].tolist())
    run.state.policy.unshard_base(vision=True)
    for task in run.state.tasks:
        if task.action:
            batches = eval_loader(samples, run.preprocessor(), config.batch_size, num_workers=0)
            task.action.calibrate(batches, config.max_completion_length)
            # The first rank's is taken: another kind of GPU rounds otherwise.
            first = process_group.gather_objects(task.action.state_dict())[0]
            task.action.load_state_dict(first)


def replace_rewards_by_ablation(run: Run):
    """Let every task train on --ablation_reward, if one is chosen, in place of its own reward."""
    name, caption = run.config.reward.ablation_reward, ""
    if name == "none":
        return
    if name == "fixed":  # every caption is compared with the first sample's
        caption = Batches(run.data.train_set, run.preprocessor())[[0]].captions[0]
        print0(f"--ablation_reward fixed: {caption}")
    ablation, state = AblationReward(name, run.config.run.seed, caption), run.state
    state.tasks = [
        # A default argument binds the number now, not at the call.
        AblatedTask(task, ablation, lambda number=number: (state.step, number))
        for number, task in enumerate(state.tasks)
    ]


def claim_output_dir(run: Run, text_log: TextLog):
    """Lock the output folder, which holds this run from now on, and open its text log there.

    It comes last, so that bad input uses up no folder.
    """
    folder, record = Path(run.config.run.output_dir), RunRecord()
    if run.ranks.is_main:
        check_output_dir(run.config, run.flags)  # again: another run may have begun meanwhile
        with wrap_write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        run.lock = lock(folder)
        earlier_starts = read_starts(folder)
        record = write_record(folder, run)
        save_load.clean_output_dir(folder, run.state.step, run.config.run.save_total_limit)
        if (project := run.config.run.wandb) is not None:
            start_wandb(folder, project, run.flags)
        write_json(folder / "config.json", run.flags, indent=2)  # last: the folder holds a run
        record_start(folder, earlier_starts, run)
        text_log.open(folder)
    # Nobody goes on if the folder has been taken.
    run.num_rollout_files = process_group.gather_objects(record.num_ranks)[0]


def write_record(folder: Path, run: Run) -> RunRecord:
    """Write the record of the output folder anew; what it says of earlier sessions stays."""
    record = read_record(folder)
    if record is None and (folder / "config.json").is_file():
        record = adopt(folder)
        if record.folders:
            print0(
                f"{folder} is of an earlier version: {', '.join(record.folders)} are taken for "
                "this run's own"
            )
    record = record or RunRecord()
    record.num_ranks = max(record.num_ranks, run.ranks.world_size)
    record.data = run.state.data
    record.write(folder)
    return record
