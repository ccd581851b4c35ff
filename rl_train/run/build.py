"""Build a run from its config in stages, each given what it needs of the config."""

import math
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TextIO

import torch
from torch.utils.data import Subset

from rl_train.checkpoint import save_load
from rl_train.checkpoint.fingerprint import fingerprint_of
from rl_train.checkpoint.record import DataFacts, RunRecord, adopt, read_record
from rl_train.cli import check_nothing_in_the_way, check_output_dir, check_same
from rl_train.config.grpo_config import Config, DataConfig, OptimConfig, PolicyConfig, RewardConfig
from rl_train.data import DamagedSamples
from rl_train.data.base import RegionDataset
from rl_train.data.dataset_flags import dataset_openers
from rl_train.data.digest import data_facts, digest
from rl_train.data.distractors import unwrap_subset
from rl_train.data.loader import Batches, StepSampler, eval_loader
from rl_train.data.mixture import MixtureSampler
from rl_train.data.split import split_dataset
from rl_train.distributed import process_group
from rl_train.distributed.process_group import RankInfo, print0
from rl_train.loggers.phases import PhaseRecorder
from rl_train.loggers.text_log import TextLog
from rl_train.loggers.wandb import start_wandb
from rl_train.policies.base import Policy
from rl_train.policies.lora import parameter_counts
from rl_train.policies.registry import FAMILIES, build_policy, check_model, family_of
from rl_train.rewards import LLMJudge, UserReward
from rl_train.rewards.ablations import AblationReward
from rl_train.rewards.attributes import AttributePhrases, load_attributes
from rl_train.rewards.custom import load_named, overlong_penalty
from rl_train.rewards.judge import FailureWindow
from rl_train.rewards.meteor import require_wordnet
from rl_train.roles import COPIES, Roles, ema_decay_at
from rl_train.rollout import Batch, Preprocessor
from rl_train.run import messages
from rl_train.run.consistency import (
    check_same_data,
    check_same_on_all_ranks,
    check_same_start,
    check_same_weights,
)
from rl_train.run.lr_schedule import cosine_schedule, follow_new_length
from rl_train.run.memory_estimate import standing_memory
from rl_train.tasks.ablated import AblatedTask
from rl_train.tasks.base import Task, TaskContext
from rl_train.utils.io import lock, read_json, wrap_write_errors, write_json
from rl_train.utils.rng import RowRNG
from sa2va_hf import hub

CALIBRATION_SAMPLES = 32  # training samples that an action's `calibrate` looks at


@dataclass
class Run:
    """A run before its first step: its config and all that was built from it."""

    config: Config
    flags: dict[str, object]  # as config.json has them
    ranks: RankInfo
    state: save_load.RunState
    judge: LLMJudge | None
    judge_failures: FailureWindow
    damaged: DamagedSamples
    train_set: RegionDataset
    eval_set: RegionDataset
    sampler: StepSampler
    max_steps: int
    phases: PhaseRecorder
    lock: TextIO | None = None  # on the output folder, from `claim_output_dir` on
    num_rollout_files: int = 1  # of its ranks and those of its earlier sessions
    attribute_phrases: AttributePhrases = field(default_factory=dict)  # of --attributes

    def teacher_decay(self, iteration: int) -> float:
        """Return the teacher's decay at an update of the step in progress.

        All updates before it count, as in the learning rate's schedule, also those of steps that
        skipped them.
        """
        optim = self.config.optim
        if optim.ema_decay is not None:
            return optim.ema_decay
        # --ema_half_life is a fraction of the run's updates.
        half_life_updates = optim.ema_half_life * self.max_steps * optim.num_iterations
        update = self.state.step * optim.num_iterations + iteration
        return ema_decay_at(update, half_life_updates)

    @property
    def component_group_size(self) -> int | None:
        """Size of the groups in which reward components are normalised; None: they are not."""
        config = self.config
        return config.rollout.num_generations if config.reward.scale_components else None

    def rng(self, task: Task, batch: Batch) -> RowRNG:
        """Return the random numbers of a task's rollout of a batch in the step in progress."""
        number, G = self.state.tasks.index(task), self.config.rollout.num_generations
        return RowRNG(self.config.run.seed, self.state.step, number, batch.index, G)


def build(config: Config, ranks: RankInfo) -> Run:
    """Build a run. Raises ValueError, naming the flag or file that is wrong."""
    print0(messages.machine(ranks))
    print_warning(messages.unused_gpu(ranks))
    config = replace(config, policy=download_models(config.policy))
    check_model(config.policy, families_of(config))
    flags = config.flags | dict(world_size=ranks.world_size)
    if ranks.is_main:
        check_output_dir(config, flags)
    has_begun = (Path(config.run.output_dir) / "config.json").is_file()
    if not process_group.gather_objects(has_begun)[0] and not ranks.is_main:
        check_nothing_in_the_way(config)  # on a disk of this machine
    resume = save_load.find_resume_checkpoint(config.run.resume, config.run.output_dir)
    # Now, not after the first rollout.
    require_wordnet()
    attribute_phrases = load_attributes(config.data.attributes) if config.data.attributes else {}
    max_tokens = config.rollout.max_completion_length
    user_rewards = build_rewards(config.reward, max_tokens)
    judge = build_judge(config.reward, config.run.seed)
    # Of the fresh LoRA's weights; rollouts have random numbers of their own.
    torch.manual_seed(config.run.seed)
    train_set, eval_set, damaged = open_data(config.data)
    has_masks = check_masks(config, train_set, eval_set)
    data = dict(training=data_facts(train_set), evaluation=data_facts(eval_set))
    # No rank goes on before the output folder is known to be free.
    check_same_start(config, resume, ranks, data)
    if resume or has_begun:
        check_data_of_run(config, resume, data)
    policy, roles = build_model(config, ranks)
    context = TaskContext(policy, roles, max_tokens, judge, user_rewards, has_masks)
    tasks = [config.task_classes[name](options, context) for name, options in config.tasks.items()]
    if config.reward.reward_only:
        for task in tasks:
            task.reward_weights = context.user_weights
    mixture = MixtureSampler(train_set, config.run.seed) if config.data.data_mixture else None
    sampler = build_sampler(config, train_set, mixture, ranks)
    steps_of_epochs = math.ceil(config.optim.num_train_epochs * sampler.steps_per_epoch)
    max_steps = config.optim.max_steps or steps_of_epochs
    if mixture:
        print0(mixture.describe(sampler.prompts_per_step, max_steps))
    judge_failures = FailureWindow(config.reward.max_judge_failures)
    state = build_state(config, policy, roles, tasks, max_steps)
    state.fault_counts = dict(judge_failures=judge_failures, damaged=damaged)
    state.data = data
    preprocessor = policy.preprocessor(max_tokens, config.data.max_prompt_length)
    if resume:
        load_state(resume, state, config, flags, ranks)
        follow_max_steps(resume, state, config, max_steps)
    else:
        calibrate_actions(tasks, train_set, preprocessor, config.rollout.batch_size, max_tokens)
    sampler.start, sampler.stop = state.step, max_steps
    check_same_weights(state, ranks)
    ablation = build_ablation(config.reward, config.run.seed, train_set, preprocessor)
    if ablation:
        state.tasks = [
            # A default argument binds the number now, not at the call.
            AblatedTask(task, ablation, lambda number=number: (state.step, number))
            for number, task in enumerate(tasks)
        ]
    return Run(
        config=config,
        flags=flags,
        ranks=ranks,
        state=state,
        judge=judge,
        judge_failures=judge_failures,
        damaged=damaged,
        train_set=train_set,
        eval_set=eval_set,
        sampler=sampler,
        max_steps=max_steps,
        phases=PhaseRecorder(ranks.device),
        attribute_phrases=attribute_phrases,
    )


def check_data_of_run(config: Config, resume: Path | None, data: DataFacts):
    """Raise ValueError if a resumed run has other data; see `check_same_data`.

    It is compared with the checkpoint's, or without one with what the output folder says.
    """
    if resume:
        check_same_data(config, save_load.read_data(resume), data, resume)
    else:
        record = read_record(Path(config.run.output_dir)) or RunRecord()
        check_same_data(config, record.data, data, config.run.output_dir)


def download_models(config: PolicyConfig) -> PolicyConfig:
    """Replace models' names on the hub by the folders that they were downloaded to."""
    model_path = str(hub.model_folder("--model_path", config.model_path))
    sam_path = config.sam_path and str(hub.model_folder("--sam_path", config.sam_path))
    return replace(config, model_path=model_path, sam_path=sam_path)


def families_of(config: Config) -> dict[str, str]:
    """Return {task: the family of models that it needs}."""
    return {name: task.family for name, task in config.task_classes.items()}


def build_rewards(config: RewardConfig, max_tokens: int) -> tuple[UserReward, ...]:
    """Load what is added to every task's reward. Raises ValueError, naming --reward."""
    rewards = tuple(map(UserReward.parse, config.reward))
    if not config.overlong_buffer:
        return rewards
    return *rewards, overlong_penalty(max_tokens, config.overlong_buffer)


def build_judge(config: RewardConfig, seed: int) -> LLMJudge | None:
    """Connect to the LLM judge, if one is used. Raises ValueError if it does not answer."""
    if not config.use_llm_judge:
        return None
    judge = LLMJudge(
        config.llm_judge_base_url, config.llm_judge_model, config.llm_judge_mode, seed=seed
    )
    if fault := judge.fault():
        raise ValueError(fault)
    return judge


def open_data(config: DataConfig) -> tuple[RegionDataset, RegionDataset, DamagedSamples]:
    """Open (training regions, evaluation regions, count of damaged samples); print the reports."""
    print0(f"reading {config.data_dir}")
    open_train, open_eval = dataset_openers(config)
    train_set, eval_set, damaged = split_dataset(
        open_train,
        config.data_dir,
        config.eval_data_dir,
        config.eval_samples,
        config.max_bad_fraction,
        config.train_eval_overlap,
        open_eval,
        print0,
    )
    reports = damaged.report.get("of_each", {config.dataset: damaged.report})
    for name, report in reports.items():
        label = name if config.data_mixture else config.data_dir
        print0(messages.data_report(f"training data, {label}", report))
    if config.eval_data_dir:
        report = unwrap_subset(eval_set)[0].report()
        print0(messages.data_report(f"evaluation data, {config.eval_data_dir}", report))
    print0(f"samples: {len(train_set):,d} to train on, {len(eval_set):,d} to evaluate")
    return train_set, eval_set, damaged


def check_masks(config: Config, train_set: RegionDataset, eval_set: RegionDataset) -> bool:
    """Return whether the training samples have masks; without, boxes and points are the target.

    Raises ValueError, naming the flag, if a task or a flag needs masks that the data do not have.
    """
    folders = {"--data_dir": train_set, "--eval_data_dir": eval_set}
    has_masks = {flag: unwrap_subset(dataset)[0].has_masks for flag, dataset in folders.items()}
    need_masks = [name for name, task in config.task_classes.items() if not task.takes_boxes]
    for flag in [flag for flag in folders if not has_masks[flag]]:
        if need_masks or config.data.distractors:
            needs = f"--tasks {need_masks[0]}" if need_masks else "--distractors"
            raise ValueError(
                f"{flag}: its samples have boxes and points and no masks (a folder masks of one "
                f"{{id}}.png for each row), which {needs} needs"
            )
    return has_masks["--data_dir"]


def build_model(config: Config, ranks: RankInfo) -> tuple[Policy, Roles]:
    """Load the policy, choose what trains, copy it for the other roles; print the sizes."""
    family = FAMILIES[family_of(config.policy.model_path)]
    print0(
        f"model: family {family.name}, {config.policy.model_path}, frozen weights in "
        f"{config.policy.dtype}"
    )
    policy = build_policy(
        config.policy,
        families_of(config),
        trainable_groups(config),
        config.rollout.max_completion_length,
        ranks.device,
    )
    # A resumed run measures its initial weights before it forgets them: `train_and_evaluate`.
    until_evaluated = ("reference",) if config.run.resume else ()
    roles = Roles(policy.trainable, roles_to_keep(config) or until_evaluated)
    if config.run.merge_at_end == "teacher" and not roles.has_teacher:
        raise ValueError("--merge_at_end teacher: no task of --tasks has a teacher")
    counts = parameter_counts(policy.model, policy.group_of)
    print0(messages.parameters(counts))
    print_warning(messages.large_on_cpu(counts.total(), ranks))
    print0(messages.memory(standing_memory(policy, roles.copies), ranks))
    return policy, roles


def print_warning(sentence: str | None):
    """Print a warning, if there is one."""
    if sentence:
        print0(sentence)


def trainable_groups(config: Config) -> list[str]:
    """Return the groups of weights that --trainable_modules names, or else the tasks.

    Raises ValueError for a group that no task's loss reaches: it would only decay.
    """
    requested = set(config.rollout.trainable_modules)
    spec = FAMILIES[family_of(config.policy.model_path)]
    of_tasks = {group for options in config.tasks.values() for group in options.trainable_modules}
    idle = [
        group
        for group in sorted(requested & set(spec.group_patterns))
        if spec.gradient_via.get(group, group) not in of_tasks
    ]
    if idle:
        raise ValueError(
            f"--trainable_modules {' '.join(idle)}: no loss of --tasks {' '.join(config.tasks)} "
            "reaches it"
        )
    return sorted(requested or of_tasks)


def roles_to_keep(config: Config) -> tuple[str, ...]:
    """Return the roles beside the policy that a run keeps.

    Teacher and reference if a task asks the teacher. Else the reference alone: always in
    reinforcement learning, in supervised training if a task `asks_reference`.
    """
    task_classes = config.task_classes.values()
    if any(task.asks_teacher for task in task_classes):
        return COPIES
    needs_reference = config.samples_answers or any(task.asks_reference for task in task_classes)
    return ("reference",) if needs_reference else ()


def build_sampler(
    config: Config, train_set: RegionDataset, mixture: MixtureSampler | None, ranks: RankInfo
) -> StepSampler:
    """Build the sampler of a step's samples. Raises ValueError, naming the wrong flag."""
    if mixture and config.data.sampler:
        raise ValueError("--sampler: not with --data_mixture, whose weights say what a step holds")
    order = config.data.sampler and load_named(
        "--sampler", config.data.sampler, "function", callable
    )
    order = order and partial(order, train_set)
    sampler = StepSampler(
        len(train_set),
        config.rollout.batch_size,
        config.optim.gradient_accumulation_steps,
        config.run.seed,
        ranks.rank,
        ranks.world_size,
        order=order,
        mixture=mixture,
    )
    if order:  # what is wrong with the user's function is said before the first step
        first_epoch = digest([sampler.indices(0).tobytes()])
        check_same_on_all_ranks({"--sampler of the first epoch": first_epoch})
    return sampler


def build_optimizer(config: OptimConfig, policy: Policy) -> torch.optim.AdamW:
    """Build AdamW of everything that trains; text_hidden_fcs has a learning rate of its own."""
    rates = dict(text_hidden_fcs=config.text_hidden_fcs_lr or config.learning_rate)
    groups = {}  # {learning rate: parameter group}
    for name, parameter in policy.trainable.items():
        rate = rates.get(policy.group_of[name], config.learning_rate)
        groups.setdefault(rate, dict(params=[], lr=rate))["params"].append(parameter)
    fused = policy.device.type == "cuda"
    return torch.optim.AdamW(groups.values(), weight_decay=config.weight_decay, fused=fused)


def build_state(
    config: Config, policy: Policy, roles: Roles, tasks: list[Task], max_steps: int
) -> save_load.RunState:
    """Build all that a checkpoint saves: optimizer, schedule, and the base's fingerprint."""
    optimizer = build_optimizer(config.optim, policy)
    scheduler = cosine_schedule(
        optimizer, max_steps, config.optim.warmup_ratio, config.optim.num_iterations
    )
    # Without gradients this changes nothing. torch warns if the schedule moves before a first step.
    optimizer.step()
    base = fingerprint_of(*filter(None, (config.policy.model_path, config.policy.sam_path)))
    return save_load.RunState(policy, roles, tasks, optimizer, scheduler, base_fingerprint=base)


def load_state(
    folder: Path,
    state: save_load.RunState,
    config: Config,
    flags: dict[str, object],
    ranks: RankInfo,
):
    """Load a checkpoint that was made with the same flags. Raises ValueError otherwise."""
    print0(f"resuming from {folder}")
    check_same(folder / "config.json", config, flags, f"--resume {folder}")
    save_load.load(folder, state, config.run.output_dir, ranks.rank)


def follow_max_steps(folder: Path, state: save_load.RunState, config: Config, max_steps: int):
    """Let a resumed run end at another step than it was to; print what becomes of its schedules.

    Raises ValueError if the checkpoint in `folder` is beyond that step.
    """
    if state.step > max_steps:
        raise ValueError(
            f"--max_steps {max_steps}: {folder} is at step {state.step} already; give a larger one"
        )
    before = read_json(folder / "config.json")
    names = ("max_steps", "num_train_epochs")
    changed = [name for name in names if before.get(name) != config.flags[name]]
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


def calibrate_actions(
    tasks: list[Task],
    train_set: RegionDataset,
    preprocessor: Preprocessor,
    batch_size: int,
    max_tokens: int,
):
    """Fit each task's action to the base on a few training samples, the same on all ranks."""
    order = torch.randperm(len(train_set), generator=torch.Generator().manual_seed(0))
    samples = Subset(train_set, order[:CALIBRATION_SAMPLES].tolist())
    for task in tasks:
        if task.action:
            task.action.calibrate(eval_loader(samples, preprocessor, batch_size, 0), max_tokens)
            # The first rank's is taken: another kind of GPU rounds otherwise.
            first = process_group.gather_objects(task.action.state_dict())[0]
            task.action.load_state_dict(first)


def build_ablation(
    config: RewardConfig, seed: int, train_set: RegionDataset, preprocessor: Preprocessor
) -> AblationReward | None:
    """Build the ablation reward, if one is used; "fixed" takes the first sample's caption."""
    if config.ablation_reward == "none":
        return None
    caption = ""
    if config.ablation_reward == "fixed":
        caption = Batches(train_set, preprocessor)[[0]].captions[0]
        print0(f"--ablation_reward fixed: {caption}")
    return AblationReward(config.ablation_reward, seed, caption)


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
        record = write_record(folder, run)
        save_load.clean_output_dir(folder, run.state.step, run.config.run.save_total_limit)
        if (project := run.config.run.wandb) is not None:
            start_wandb(folder, project, run.flags)
        write_json(folder / "config.json", run.flags, indent=2)  # last: the folder holds a run
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
