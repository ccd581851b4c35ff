"""What a run is made of, built from its config before the first step."""

import math
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch.utils.data import Subset

from rl_train import checkpoint, distributed, hub
from rl_train.agreement import (
    agree,
    agree_on_inputs,
    agree_on_start,
    agree_on_weights,
    digest,
)
from rl_train.base import base_of
from rl_train.checkpoint import RunState
from rl_train.cli import check_output_dir, check_same
from rl_train.config import Config, DataConfig, OptimConfig, PolicyConfig
from rl_train.data import DamagedSamples
from rl_train.data.loader import Batches, StepSampler, eval_loader
from rl_train.data.mix import Shares
from rl_train.data.neighbours import image_keys
from rl_train.data.opening import readers
from rl_train.data.split import split_dataset
from rl_train.distributed import Ranks, print0
from rl_train.export import lacking
from rl_train.files import claim, write_json, writing
from rl_train.memory import GIB, standing_memory
from rl_train.policies.families import build_policy
from rl_train.policies.lora import parameter_table
from rl_train.policies.sa2va import BESIDE, GROUPS
from rl_train.rewards import LLMJudge
from rl_train.rewards.attributes import Vocabulary, load_attributes
from rl_train.rewards.controls import Control
from rl_train.rewards.custom import load_named, load_user_rewards
from rl_train.rewards.judge import FailureWindow
from rl_train.rewards.length import length_terms
from rl_train.rewards.meteor import require_wordnet
from rl_train.roles import COPIES, Roles, half_life_decay
from rl_train.sharding import Shards, held_bytes, whole_base
from rl_train.tasks.protocol import Context
from rl_train.wandb_mirror import Mirror

CALIBRATION_SAMPLES = 32  # training samples that an action's `calibrate` looks at


@dataclass
class Parts:
    """What a run is made of, before its first step."""

    config: Config
    flags: dict[str, object]  # as config.json has them
    ranks: Ranks
    state: RunState
    judge: LLMJudge | None
    judge_failures: FailureWindow
    damaged: DamagedSamples
    train_set: object
    heldout: object
    sampler: StepSampler
    max_steps: int
    control: Control = field(default_factory=Control)  # what counts of the tasks' rewards
    claim: object = None  # on the output folder, as long as it lives; see `begin`
    mirror: Mirror | None = None  # of --wandb, on the first rank; see `begin`
    announced: str = ""  # memory of the worst step, if that was measured
    vocabulary: Vocabulary = field(default_factory=dict)  # of --attributes

    def teacher_decay(self, iteration: int) -> float:
        """The teacher's decay at an update of the step in progress; all updates before it count,
        as in the learning rate's schedule, also those of steps in which nothing was learnt."""
        optim = self.config.optim
        if optim.ema_decay is not None:
            return optim.ema_decay
        half_life = optim.ema_half_life * self.max_steps * optim.num_iterations
        return half_life_decay(self.state.step * optim.num_iterations + iteration, half_life)


def cosine_schedule(optimizer, num_updates: int, warmup_ratio: float):
    """Linear warm-up over the first share of updates, then cosine to 0."""
    warmup = math.ceil(num_updates * warmup_ratio)

    def factor(update):
        if update < warmup:
            return (update + 1) / (warmup + 1)
        done = min((update - warmup) / max(num_updates - warmup, 1), 1.0)
        return 0.5 * (1 + math.cos(math.pi * done))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def build_judge(config: Config, ranks: Ranks) -> LLMJudge | None:
    """The judge that the flags ask for. Raises ValueError on all ranks if one gets no answer."""
    flags = config.reward
    if not flags.use_llm_judge:
        return None
    who = (flags.llm_judge_base_url, flags.llm_judge_model, flags.llm_judge_mode)
    cache = Path(config.run.output_dir) / "judge_cache.sqlite"
    judge = LLMJudge(*who, seed=config.run.seed, cache_path=cache)
    if ranks.is_main:
        judge.cache.repair()  # before any rank opens it
    faults = [fault for fault in distributed.gather_objects(judge.fault()) if fault]
    if faults:
        raise ValueError(faults[0])
    return judge


def open_data(data: DataConfig) -> tuple[object, object, DamagedSamples]:
    """(regions to train on, held-out ones, the count of damaged ones); says what was read."""
    where = (data.data_dir, data.eval_data_dir, data.eval_samples, data.max_bad_fraction)
    opened, opened_heldout = readers(data)
    sets = split_dataset(opened, *where, data.shared_images, opened_heldout, print0)
    report = sets[2].report
    for name, of_one in report.get("of_each", {data.dataset: report}).items():
        print0(f"--data_dir {data.data_dir}: {of_one}" if not data.mix else f"{name}: {of_one}")
    return sets


def build_rewards(config: Config) -> tuple:
    """What is added to every task's reward. Raises ValueError, naming --reward."""
    flags = config.reward
    lengths = (flags.overlong_buffer, flags.length_weight, flags.target_length)
    terms = length_terms(config.rollout.max_completion_length, *lengths)
    return *load_user_rewards(flags.reward, [term.name for term in terms]), *terms


def build_sampler(config: Config, train_set, shares: Shares | None, ranks: Ranks) -> StepSampler:
    """What says which samples a step holds. Raises ValueError, naming the flag that is wrong.

    Args:
        shares: of --mix, which has an order of its own.
    """
    prompts, per_image = config.rollout.batch_size, config.rollout.regions_per_image
    if shares and (per_image > 1 or config.data.order):
        other = "--order" if config.data.order else f"--regions_per_image {per_image}"
        raise ValueError(f"{other}: not with --mix, whose weights say what a step holds")
    if prompts % per_image:
        raise ValueError(f"--regions_per_image {per_image}: does not divide --batch_size {prompts}")
    together = (per_image, image_keys(train_set)) if per_image > 1 else None
    order = config.data.order and load_named("--order", config.data.order, "function", callable)
    order = order and partial(order, train_set)
    how = (prompts, config.optim.gradient_accumulation_steps, config.run.seed, ranks.rank)
    how = (len(train_set), *how, ranks.world_size)
    sampler = StepSampler(*how, together=together, order=order, shares=shares)
    if order:  # what is wrong with it is said before the first step
        first = digest(torch.from_numpy(sampler.indices(0)))
        agree({"--order of the first epoch": first}, "Draw from the generator that it is given.")
    return sampler


def build_control(config: Config, train_set, inputs) -> Control:
    """The control that the flags ask for; the caption of "fixed" is that of the first sample."""
    kind, caption = config.reward.control, ""
    if kind == "fixed":
        caption = Batches(train_set, inputs)[[0]].captions[0]
        print0(f"--control fixed: {caption}")
    return Control(kind, config.run.seed, caption)


def build_optimizer(config: OptimConfig, policy) -> torch.optim.AdamW:
    """AdamW of everything that trains; text_hidden_fcs has a rate of its own."""
    groups, rates = {}, dict(text_hidden_fcs=config.prompt_learning_rate or config.learning_rate)
    for name, parameter in policy.trainable.items():
        rate = rates.get(policy.group_of(name), config.learning_rate)
        groups.setdefault(rate, dict(params=[], lr=rate))["params"].append(parameter)
    fused = policy.device.type == "cuda"
    return torch.optim.AdamW(groups.values(), weight_decay=config.weight_decay, fused=fused)


def fetched(policy: PolicyConfig) -> PolicyConfig:
    """The config with folders in place of the models' names on the hub."""
    names = {name: getattr(policy, name) for name in ("model_path", "sam_path")}
    found = {n: str(hub.model_folder(f"--{n}", path)) for n, path in names.items() if path}
    return replace(policy, **found)


def groups_that_train(config: Config) -> list[str]:
    """The groups of weights that --train names, or else the tasks.

    Raises ValueError for one that no task's loss reaches: it would only decay.
    """
    asked = set(config.rollout.train)
    named = {group for options in config.tasks.values() for group in options.trains}
    if idle := sorted(g for g in asked & set(GROUPS) if BESIDE.get(g, g) not in named):
        raise ValueError(
            f"--train {' '.join(idle)}: no loss of --tasks {' '.join(config.tasks)} reaches it"
        )
    return sorted(asked or named)


def kept_copies(config: Config) -> tuple[str, ...]:
    """The roles beside the policy that a run keeps.

    Teacher and reference, by which its drift is told, if a task asks the teacher. Else the
    reference alone: always in reinforcement learning, in supervised training if a task's class says
    `asks_reference`.
    """
    kinds = config.kinds.values()
    if any(kind.asks_teacher for kind in kinds):
        return COPIES
    reads = config.samples or any(getattr(kind, "asks_reference", False) for kind in kinds)
    return ("reference",) if reads else ()


def print_sizes(policy, roles: Roles, shards: Shards | None):
    """Say what trains and what memory it takes."""
    print0(f"parameters:\n{parameter_table(policy.model, policy.trainable, policy.group_of)}")
    held = ", ".join(
        f"{part} {n / GIB:.1f}" for part, n in standing_memory(policy, roles.banks).items()
    )
    print0(f"memory before activations, GiB: {held}")
    if shards:
        mine, whole = (f"{size / 2**20:.1f} MiB" for size in held_bytes(policy.model))
        print0(f"--shard_base: {mine} of {whole} of parameters on each rank")


def build(config: Config, ranks: Ranks) -> Parts:
    """Read all that the flags name. Raises ValueError, naming the flag or file that is wrong."""
    config = replace(config, policy=fetched(config.policy))
    flags = config.flags | dict(world_size=ranks.world_size)
    output_dir, tokens = config.run.output_dir, config.rollout.max_completion_length
    shards = Shards(ranks) if config.policy.shard_base else None
    if ranks.is_main:
        check_output_dir(config, flags)
        places = Path(config.policy.model_path), Path(output_dir)
        if config.run.export_final and (lack := lacking(*places)):
            raise ValueError(f"--export_final: on the disk of --output_dir {output_dir} {lack}")
    resume = checkpoint.find(config.run.resume, output_dir)
    agree_on_start(config, resume)  # and nobody goes on before the folder is known to be free
    require_wordnet()
    vocabulary = load_attributes(config.data.attributes) if config.data.attributes else {}
    user_rewards = build_rewards(config)
    judge = build_judge(config, ranks)
    torch.manual_seed(config.run.seed)
    data = config.data
    train_set, heldout, damaged = open_data(data)
    agree_on_inputs(config, ranks, training=train_set, heldout=heldout)
    kinds = config.kinds
    families = {name: kind.family for name, kind in kinds.items()}
    how = (families, groups_that_train(config), tokens, ranks.device, shards)
    policy = build_policy(config.policy, *how)
    asked = any(kind.asks_teacher for kind in kinds.values())
    if config.run.export_final == "ema" and not asked:
        raise ValueError("--export_final ema: no task of --tasks has a teacher")
    roles = Roles(policy.trainable, kept_copies(config))
    print_sizes(policy, roles, shards)
    if shards:
        shards.decide(policy)
    context = Context(policy, roles, tokens, judge, user_rewards)
    tasks = [kinds[name](options, context) for name, options in config.tasks.items()]
    inputs = policy.inputs(tokens, data.max_caption_length)
    optim, prompts = config.optim, config.rollout.batch_size
    shares = Shares(train_set, config.run.seed) if data.mix else None
    sampler = build_sampler(config, train_set, shares, ranks)
    max_steps = optim.max_steps or math.ceil(optim.num_epochs * sampler.steps_per_epoch)
    if shares:
        print0(shares.describe(sampler.prompts_per_step, max_steps))
    optimizer = build_optimizer(optim, policy)
    schedule = cosine_schedule(optimizer, max_steps * optim.num_iterations, optim.warmup_ratio)
    failures = FailureWindow(config.reward.max_judge_failures)
    watched = dict(judge_failures=failures, damaged=damaged)
    base = base_of(*filter(None, (config.policy.model_path, config.policy.sam_path)))
    state = RunState(policy, roles, tasks, optimizer, schedule, watched=watched, base=base)
    if resume:
        print0(f"resuming from {resume}")
        check_same(resume / "config.json", flags, f"--resume {resume}")
        if "reference" not in roles.banks:
            state.began = {n: p.detach().to("cpu", copy=True) for n, p in policy.trainable.items()}
        checkpoint.load(resume, state, output_dir, ranks.rank)
    else:
        order = torch.randperm(len(train_set), generator=torch.Generator().manual_seed(0))
        few = Subset(train_set, order[:CALIBRATION_SAMPLES].tolist())  # the same on all ranks
        for task in tasks:
            if task.action:
                with whole_base(policy):
                    task.action.calibrate(eval_loader(few, inputs, prompts, 0), tokens)
                first = distributed.gather_objects(task.action.state_dict())[0]
                task.action.load_state_dict(first)  # another kind of GPU rounds otherwise
    sampler.start = state.step
    agree_on_weights(state, ranks)
    sets = (train_set, heldout, sampler)
    control = build_control(config, train_set, inputs)
    how = (*sets, max_steps, control)
    return Parts(config, flags, ranks, state, judge, failures, damaged, *how, vocabulary=vocabulary)


def begin(parts: Parts):
    """Claim the output folder, which from now on holds this run.

    Last, so that bad input uses up no folder.
    """
    folder, start = Path(parts.config.run.output_dir), parts.state.step
    if parts.ranks.is_main:
        check_output_dir(parts.config, parts.flags)  # again: another run may have begun meanwhile
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        parts.claim = claim(folder)
        checkpoint.tidy(folder, start, parts.config.run.save_total_limit)
        if (project := parts.config.run.wandb) is not None:
            parts.mirror = Mirror(folder, project, parts.flags)
        write_json(folder / "config.json", parts.flags, indent=2)
    distributed.gather_objects(None)  # nobody goes on if the folder has been taken
