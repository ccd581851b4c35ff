"""Build a run in stages, each given what it needs: rewards, model and roles, tasks, optimizer."""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, TextIO

import numpy as np
import torch
from torch.utils.data import Subset

from rl_train.checkpoint.fingerprint import BaseFingerprint, fingerprint_of
from rl_train.checkpoint.save_load import RunState
from rl_train.config.grpo_config import Config, PolicyConfig, RewardConfig, UpdatesConfig
from rl_train.data.base import RegionDataset
from rl_train.data.distractors import unwrap_subset
from rl_train.data.loader import StepSampler
from rl_train.distributed.process_group import RankInfo, gather_objects, print0
from rl_train.loggers.phases import PhaseRecorder
from rl_train.policies.base import Policy
from rl_train.policies.registry import FAMILIES, build_policy, family_of
from rl_train.rewards import LLMJudge, UserReward
from rl_train.rewards.cider import DocumentFrequencies, document_frequencies
from rl_train.rewards.custom import overlong_penalty
from rl_train.rewards.judge import FailureWindow
from rl_train.rewards.weights import ComponentWeight, check_weights, of_task
from rl_train.roles import COPIES, TEACHER_HALF_LIFE, Roles, ema_decay_at
from rl_train.rollout import Batch, Preprocessor
from rl_train.run.lr_schedule import cosine_schedule
from rl_train.run.open_data import RunData
from rl_train.tasks.base import Task, TaskContext
from rl_train.utils.rng import RowRNG

CORPUS_SIZE = 20_000  # training captions whose n-grams CIDEr counts


@dataclass(frozen=True)
class RewardSources:
    """Objects that add to the tasks' own rewards, as flags name them."""

    user_rewards: tuple[UserReward, ...]  # --reward, --overlong_buffer
    judge: LLMJudge | None
    judge_failures: FailureWindow


@dataclass
class Run:
    """A run before its first step: its config and all that was built from it."""

    config: Config
    ranks: RankInfo
    data: RunData
    sampler: StepSampler
    rewards: RewardSources
    state: RunState
    max_steps: int
    phases: PhaseRecorder
    lock: TextIO | None = None  # on the output folder, from `claim_output_dir` on
    num_rollout_files: int = 1  # of its ranks and those of its earlier sessions

    @property
    def flags(self) -> dict[str, Any]:
        """Return all flags and the number of processes, as config.json has them."""
        return all_flags(self.config, self.ranks)

    def preprocessor(self) -> Preprocessor:
        """Return what makes the policy's inputs of a sample, in workers of the loader too."""
        max_tokens = self.config.rollout.max_completion_length
        return self.state.policy.preprocessor(max_tokens, self.config.data.max_prompt_length)

    def teacher_decay(self, iteration: int) -> float:
        """Return the teacher's decay at an update of the step in progress.

        All updates before it count, as in the learning rate's schedule, also those of steps that
        skipped them.
        """
        optim = self.config.optim
        if optim.ema_decay is not None:
            return optim.ema_decay
        half_life_updates = TEACHER_HALF_LIFE * self.max_steps * optim.num_iterations
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


def all_flags(config: Config, ranks: RankInfo) -> dict[str, Any]:
    """Return the flags of a run with its number of processes."""
    return config.flags | dict(world_size=ranks.world_size)


def build(
    config: Config,
    ranks: RankInfo,
    data: RunData,
    sampler: StepSampler,
    rewards: RewardSources,
) -> Run:
    """Build a run of fresh weights at step 0. Raises ValueError, naming the flag that is wrong."""
    max_tokens = config.rollout.max_completion_length
    family = family_of(config.policy.model_path)
    quantized = config.policy.quantize_base
    print0(
        f"model: family {family}, {config.policy.model_path}, frozen weights in "
        f"{config.policy.dtype}" + (f", the LLM's linears in {quantized}" if quantized else "")
    )
    # Of the fresh LoRA's weights; rollouts have random numbers of their own.
    torch.manual_seed(config.run.seed)
    absent = FAMILIES[family].absent_groups(config.policy.model_path)
    policy = build_policy(
        config.policy,
        families_of(config.task_classes),
        trainable_groups(family, config.rollout.trainable_modules, config.tasks, absent),
        max_tokens,
        ranks.device,
    )
    if config.policy.fsdp:
        gather_objects(None)  # a rank that failed to load says so here
        policy.shard_base()
    kept_roles = roles_to_keep(config.task_classes, config.samples_answers)
    # A resumed run measures its initial weights before it forgets them: `train_and_evaluate`.
    until_evaluated = ("reference",) if config.run.resume else ()
    offload = "offload_roles" in config.optim.low_memory
    roles = Roles(policy.trainable, kept_roles or until_evaluated, offload)
    if config.run.merge_at_end == "teacher" and not roles.has_teacher:
        raise ValueError("--merge_at_end teacher: no task of --tasks has a teacher")
    needs_frequencies = config.reward.gives_weight("cider")
    context = TaskContext(
        policy=policy,
        roles=roles,
        max_reply_tokens=max_tokens,
        judge=rewards.judge,
        user_rewards=rewards.user_rewards,
        has_masks=data.has_masks,
        names_nothing=data.names_nothing,
        use_llm_judge=config.reward.use_llm_judge,
        frequencies=frequencies_of(data.train_set) if needs_frequencies else None,
    )
    tasks = [config.task_classes[name](options, context) for name, options in config.tasks.items()]
    weigh_components(tasks, config.reward.component_weights)
    if config.reward.reward_only:
        for task in tasks:  # `weighted_components` stay, so that they are computed and logged
            task.reward_weights = context.user_weights
    steps_of_epochs = math.ceil(config.optim.num_train_epochs * sampler.steps_per_epoch)
    max_steps = config.optim.max_steps or steps_of_epochs
    optimizer = build_optimizer(config.optim, policy)
    scheduler = cosine_schedule(
        optimizer, max_steps, config.optim.warmup_ratio, config.optim.num_iterations
    )
    # Without gradients this changes nothing. torch warns if the schedule moves before a first step.
    optimizer.step()
    state = RunState(
        policy,
        roles,
        tasks,
        optimizer,
        scheduler,
        fault_counts=dict(judge_failures=rewards.judge_failures, damaged=data.damaged),
        base_fingerprint=base_fingerprint(config.policy),
        data=data.facts,
    )
    phases = PhaseRecorder(ranks.device)
    return Run(config, ranks, data, sampler, rewards, state, max_steps, phases)


def weigh_components(tasks: list[Task], weights: list[ComponentWeight]):
    """Give the tasks' reward components the weights of --reward_weights; others keep theirs.

    Raises ValueError, naming the flag, if a component does not exist or a task keeps none.
    """
    if not weights:  # tasks of supervised training have no rewards
        return
    names = {
        task.name: {**task.reward_weights, **dict.fromkeys(task.reward_components)}
        for task in tasks
    }
    check_weights(weights, names)
    for task in tasks:
        if new_weights := of_task(weights, task.name):
            users = task.context.user_weights
            before = {n: w for n, w in task.reward_weights.items() if n not in users}
            task.set_reward_weights(before | new_weights)
            if not task.reward_weights:
                raise ValueError(f"--reward_weights: leaves {task.name} no component with a weight")


def frequencies_of(samples: RegionDataset | Subset) -> DocumentFrequencies:
    """Count the n-grams of at most CORPUS_SIZE captions, spread evenly over a data set."""
    dataset, indices = unwrap_subset(samples)
    spread = np.linspace(0, len(indices) - 1, min(CORPUS_SIZE, len(indices))).astype(int)
    return document_frequencies([dataset.caption(i)] for i in indices[spread].tolist())


def families_of(task_classes: dict[str, type]) -> dict[str, str]:
    """Return {task: the family of models that it needs}."""
    return {name: task.family for name, task in task_classes.items()}


def build_rewards(config: RewardConfig, max_tokens: int, seed: int) -> RewardSources:
    """Load --reward and connect to the judge. Raises ValueError, naming the flag that is wrong."""
    user_rewards = tuple(map(UserReward.parse, config.reward))
    if config.overlong_buffer:
        user_rewards += (overlong_penalty(max_tokens, config.overlong_buffer),)
    return RewardSources(user_rewards, build_judge(config, seed), FailureWindow())


def build_judge(config: RewardConfig, seed: int) -> LLMJudge | None:
    """Connect to the LLM judge, if one is used. Raises ValueError if it does not answer."""
    if not (config.use_llm_judge or config.gives_weight("judge")):
        return None
    judge = LLMJudge(
        config.llm_judge_base_url, config.llm_judge_model, config.llm_judge_mode, seed=seed
    )
    if fault := judge.fault():
        raise ValueError(fault)
    return judge


def trainable_groups(
    family: str,
    trainable_modules: Collection[str],
    tasks: dict[str, Any],
    absent: Collection[str] = (),
) -> list[str]:
    """Return the groups of weights that --trainable_modules names, or else the tasks.

    Args:
        tasks: {name in --tasks: its options}.
        absent: groups of the family of which this model has no weights.

    Raises:
        ValueError: the model lacks a group, or no task's loss reaches it, so that it would only
            decay.
    """
    requested, spec = set(trainable_modules), FAMILIES[family]
    if missing := sorted(requested & set(absent)):
        raise ValueError(
            f"--trainable_modules {' '.join(missing)}: the model in --model_path has no such "
            "weights"
        )
    of_tasks = {group for options in tasks.values() for group in options.trainable_modules}
    idle = [
        group
        for group in sorted(requested & set(spec.group_patterns))
        if spec.gradient_via.get(group, group) not in of_tasks
    ]
    if idle:
        raise ValueError(
            f"--trainable_modules {' '.join(idle)}: no loss of --tasks {' '.join(tasks)} reaches it"
        )
    return sorted((requested or of_tasks) - set(absent))


def roles_to_keep(task_classes: dict[str, type], samples_answers: bool) -> tuple[str, ...]:
    """Return the roles beside the policy that a run keeps.

    Teacher and reference if a task asks the teacher. Else reinforcement learning keeps the
    reference alone, and supervised training neither.
    """
    if any(task.asks_teacher for task in task_classes.values()):
        return COPIES
    return ("reference",) if samples_answers else ()


def build_optimizer(config: UpdatesConfig, policy: Policy) -> torch.optim.Optimizer:
    """Build AdamW of everything that trains; text_hidden_fcs has a learning rate of its own."""
    rates = dict(text_hidden_fcs=config.text_hidden_fcs_lr or config.learning_rate)
    groups = {}  # {learning rate: parameter group}
    for name, parameter in policy.trainable.items():
        rate = rates.get(policy.group_of[name], config.learning_rate)
        groups.setdefault(rate, dict(params=[], lr=rate))["params"].append(parameter)
    if "adamw_8bit" in config.low_memory:
        from bitsandbytes.optim import AdamW8bit  # of an extra

        return AdamW8bit(list(groups.values()), weight_decay=config.weight_decay)
    fused = policy.device.type == "cuda"
    return torch.optim.AdamW(groups.values(), weight_decay=config.weight_decay, fused=fused)


def base_fingerprint(config: PolicyConfig) -> BaseFingerprint:
    """Return the fingerprint of the frozen weights that a run starts from."""
    return fingerprint_of(*filter(None, (config.model_path, config.sam_path)))
