"""The work of every figure of a whole step: a model of random weights, one batch, forced lengths.

Random weights never stop, never say [SEG], and find masks that are empty or whole. So that they do
the work of trained ones, each answer goes on to its full length, those with a mask get one [SEG],
and the masks that the teacher describes are replaced, when the work for the real ones is done. With
--answer_lengths captions end at lengths of their own (`tools.benchmarks.lengths`).

Letters: B prompts, G samples each, N = B*G rows, L prompt length, T tokens of a caption, A tokens
of an answer with a mask.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rl_train import cli
from rl_train.checkpoint.save_load import RunState
from rl_train.config.flags import COUNT, POSITIVE, flag
from rl_train.distributed import process_group
from rl_train.distributed.process_group import RankInfo, distributed_data_parallel, sync_gradients
from rl_train.engine import Completions, DelayedCompletions
from rl_train.engine.quantize import quantize_linears
from rl_train.grpo import group_advantages
from rl_train.loggers.metrics import PhaseTimer, StepMetrics
from rl_train.loss import (
    MicroBatchLoss,
    count_micro_batches,
    iter_micro_batches,
    join_other_ranks,
    loss_denominators,
    reference_scores,
)
from rl_train.loss import ScoredRollout as TaskWork
from rl_train.policies.qwen_vl import QwenVLPolicy
from rl_train.policies.sa2va import Sa2VAPolicy
from rl_train.rewards.combine import combine
from rl_train.rewards.custom import UserReward
from rl_train.roles import Roles
from rl_train.rollout import Batch
from rl_train.run.build import build_optimizer, roles_to_keep, weigh_components
from rl_train.run.memory_estimate import GIB
from rl_train.tasks.base import TaskContext
from rl_train.train import clip_gradients
from rl_train.utils.rng import RowRNG
from sa2va_hf import Sa2VAProcessor
from sa2va_hf.batches import ImageFeatures, Prompts
from sa2va_hf.qwen_vl import QwenVLModel, text_model
from tools.benchmarks.common import GarbageTimer, Timed, Warmth, start_lora, warm_up
from tools.benchmarks.families import CONFIGS, tokenizer_of
from tools.benchmarks.lengths import Lengths, Request, check_lengths, wasted_fraction
from tools.benchmarks.qwen import SHAPES, random_points
from tools.benchmarks.random_checkpoint import random_model
from tools.benchmarks.workload_points import ForcedPoints
from tools.benchmarks.workload_points import make_batch as points_batch
from tools.benchmarks.workload_sa2va import make_batch, mask_of, num_pieces, region_cells

# Flags of rl_train.train that a measured step does not follow.
FIXED = "gradient_accumulation_steps num_iterations latent_std ablation_reward tasks max_tiles "
FIXED += "loop1_weight loop2_weight scale_components"
COMMON = "--model_path . --data_dir . --output_dir unused --reward tools.benchmarks.workload:order "
SA2VA_FLAGS = COMMON + "--latent_std 1 --ema_decay 0.999"
POINTS_FLAGS = COMMON + "--tasks point_segmentation --sam_path . --max_completion_length 300"
SEG_AT = 2  # index of [SEG] in an answer
NOT_SEG = 1  # token that stands for a [SEG] sampled elsewhere: neither [SEG] nor `lengths.END`


@dataclass(frozen=True, kw_only=True)
class Options(Timed):
    prompt_length: int = flag(400, "tokens (L)", type=COUNT)
    answer_tokens: int = flag(8, "of an answer with a mask (A)", type=COUNT)
    answer_lengths: tuple = flag(
        (),
        "tokens of captions that policy and teacher say, log-normal, cut at T; default: all T",
        type=POSITIVE,
        nargs=2,
        metavar=("MEAN", "STD"),
    )
    caption_lengths: tuple = flag(
        (),
        "words of the true captions, likewise; default: as many as make prompts of L tokens",
        type=POSITIVE,
        nargs=2,
        metavar=("MEAN", "STD"),
    )
    num_tiles: int = flag(
        1, "of an image, with the thumbnail: 1, or as 13 = --max_tiles 12", type=COUNT
    )
    width: int = flag(1280, "of an image and its masks, pixels", type=COUNT)
    height: int = flag(960, "of an image and its masks, pixels", type=COUNT)
    budget_gib: float | None = flag(
        None, "of a GPU, of which torch takes no more: to play a smaller one", type=POSITIVE
    )
    flags: tuple = flag((), "last: those of rl_train.train", nargs=argparse.REMAINDER)

    @property
    def shapes(self) -> dict:
        """Sizes, which are written down with the figures."""
        names = "sizes prompt_length answer_tokens answer_lengths caption_lengths num_tiles width "
        return {name: getattr(self, name) for name in (names + "height budget_gib").split()}


def order(completions: list[str], **_) -> list[float]:
    """Return rewards that differ within a group: something to learn, whatever the masks."""
    return [row % 7 / 7 for row in range(len(completions))]


class ForcedPolicy(Sa2VAPolicy):
    """Sa2VA whose answers end only at their length, those with a mask at A tokens with a [SEG].

    The end is looked for as ever, and found only there. `requests` keeps its calls.
    """

    def __init__(self, *parts: Any, answer_tokens: int, lengths: Lengths):
        super().__init__(*parts)
        self.answer_tokens, self.lengths, self.requests = answer_tokens, lengths, []
        lengths.set_end(self.stop)

    def generate(
        self,
        features: ImageFeatures,
        prompts: Prompts,
        num_generations: int,
        max_new_tokens: int,
        uniforms: torch.Tensor | None = None,
        delay: bool = False,
    ):
        describes, length = prompts.prompt_masks is not None, max_new_tokens
        if describes:
            num_rows = len(prompts) * num_generations
            uniforms = self.lengths.forced_uniforms(num_rows, length, uniforms)
        else:
            length = self.answer_tokens
            # An answer with a mask has its own length, A.
            uniforms = None if uniforms is None else uniforms[:, :length]
            uniforms = self.lengths.without_end(uniforms)
        completions = super().generate(features, prompts, num_generations, length, uniforms, delay)
        if delay:
            return Recorded(self, prompts, completions)
        if not describes:
            # Random weights do sample [SEG], rarely: such a row would have two masks.
            completions.ids[completions.ids == self.model.seg_id] = NOT_SEG
            completions.ids[:, SEG_AT] = self.model.seg_id
        self.requests.append(Request(prompts, completions.valid))
        return completions

    def last_hidden_states(self, features: ImageFeatures, prompts: Prompts, num_last: int = 1):
        self.requests.append(Request(prompts))
        return super().last_hidden_states(features, prompts, num_last)


@dataclass
class Recorded:
    """Delayed completions, of which the policy keeps the call once they are read."""

    policy: ForcedPolicy
    prompts: Prompts
    delayed: DelayedCompletions

    def read(self) -> Completions:
        completions = self.delayed.read()
        self.policy.requests.append(Request(self.prompts, completions.valid))
        return completions


@dataclass
class Work:
    """A run on one batch, again and again."""

    config: cli.Config
    ranks: RankInfo
    state: RunState
    ddp: torch.nn.Module
    batch: Batch
    # N (H, W) bool that the teacher describes; None: those drawn, or there is no teacher
    masks: list[torch.Tensor] | None
    options: Options
    scores_old: bool = False  # score what was sampled once more, as the old log-probs
    # {phase: calls of the policy and its roles in the last step}
    requests: dict[str, list[Request]] = field(default_factory=dict)
    peak: float = 0.0  # GiB at most in any step
    garbage: GarbageTimer = field(default_factory=GarbageTimer)  # counts while entered
    # of each step {phase: seconds of garbage collection}: of the host, which a GPU may be behind
    pauses: list[dict[str, float]] = field(default_factory=list)

    @property
    def policy(self) -> ForcedPolicy | ForcedPoints:
        return self.state.policy

    @property
    def num_rows(self) -> int:
        return self.config.rollout.batch_size * self.config.rollout.num_generations

    def run(self) -> tuple[list[PhaseTimer], Warmth]:
        """Return (clocks of the steps that count, how the warm-up before them ended)."""
        warmth = self.warm_up()
        return [self.step() for _ in range(self.options.rounds)], warmth

    def warm_up(self) -> Warmth:
        """Run steps until they take as long as each other; return how that ended."""
        return warm_up(lambda: dict(step=sum(self.step().seconds.values())), self.options)

    def wasted(self) -> dict[str, float]:
        """Return {phase: fraction of the last step's decoded tokens that are no answer's}."""
        fractions = {phase: wasted_fraction(made) for phase, made in self.requests.items()}
        return {phase: value for phase, value in fractions.items() if value is not None}

    def step(self, clock: PhaseTimer | None = None) -> PhaseTimer:
        """Run a step of `rl_train.train.train` by the same calls, with phases by loop."""
        state, optim, batch, work = self.state, self.config.optim, self.batch, []
        policy, roles, rollouts = state.policy, state.roles, self.config.rollout
        G, T = rollouts.num_generations, rollouts.max_completion_length
        scale = self.config.loss.scale
        process_group.gather_objects(None)  # all ranks begin together
        clock, metrics = clock or PhaseTimer(policy.device), StepMetrics()
        self.pauses.append({})
        self.garbage.take()

        def end(phase: str):
            clock(phase)
            self.pauses[-1][phase] = self.garbage.take()
            self.requests[phase], policy.requests = policy.requests, []

        features = policy.encode(batch)
        end("encode")
        if policy.sharded_vision is not None:
            policy.unshard_base()
            end("gather")
        asked = []
        for number, task in reversed([*enumerate(state.tasks)]):
            rng = RowRNG(self.config.run.seed, state.step, number, batch.index, G)
            prompts = task.prompts(batch, features)
            with roles.use("policy"):
                rollout = policy.sample(batch, features, prompts, G, T, rng.uniforms(T))
                if task.action:
                    latents = task.action.draw(rollout, rng)
                    # Masks of random weights are empty or whole: replaced after they are computed.
                    rollout.latents = replace(latents, masks=self.masks or latents.masks)
                end(f"rollout{number + 1}")
                if self.scores_old:
                    rollout.logp = reference_scores(
                        policy, task, rollout, optim.micro_batch_size
                    ).logp
                    end(f"old{number + 1}")
            reference = None
            if self.config.loss.kl_coef:
                with roles.use("reference"):
                    reference = reference_scores(policy, task, rollout, optim.micro_batch_size)
            end(f"reference{number + 1}")
            asked.append((number, task, rollout, reference, task.begin_rewards(rollout)))
            end(f"ask{number + 1}")
        for number, task, rollout, reference, rewards in asked:
            outcome = rewards()
            reward = combine(outcome.rewards, task.reward_weights)
            advantages = group_advantages(reward, G, scale)
            work.insert(0, TaskWork(task, rollout, outcome, reward, advantages, reference))
            end(f"teacher{number + 1}")
        totals, _ = loss_denominators(work, self.ranks.world_size)
        num_micro_batches = count_micro_batches(work, optim.micro_batch_size)
        join_other_ranks(self.ddp, policy, num_micro_batches)
        for micro_batch in iter_micro_batches(work, optim.micro_batch_size, totals):
            with sync_gradients(self.ddp, micro_batch.is_last):
                loss, statistics = self.ddp(micro_batch)
                loss.backward()
            metrics.add_update(micro_batch.scored.task.name, statistics, on_policy=True)
        clip_gradients(state, metrics, optim.max_grad_norm)
        state.optimizer.step()
        state.optimizer.zero_grad(set_to_none=True)
        roles.update_teacher(optim.ema_decay)
        end("update")
        state.step += 1
        _ = clock.seconds  # the training waits for them too, before its next step
        self.peak = max([self.peak, *clock.peaks.values()])
        self._check(*work)
        return clock

    def _check(self, *work: TaskWork):
        """Assert that the step was as long as it is said to be."""
        lengths = self.policy.lengths
        for w in work:
            expected = lengths.of(self.num_rows, self.config.rollout.max_completion_length)
            if w.task.action:
                expected = [self.options.answer_tokens] * self.num_rows
                rows, replies = w.rollout.latents.rows, w.outcome.replies
                assert rows.tolist() == list(range(self.num_rows)), f"[SEG] in rows {rows.tolist()}"
                assert len(replies) == self.num_rows, f"{len(replies)} masks are described"
            check_lengths(w.rollout.valid, expected)
            unparsed = [reason for reason, rows in w.outcome.unparsed.items() if rows.any()]
            assert not unparsed, f"answers that cannot be parsed: {unparsed}"


def base_flags(options: Options) -> list[str]:
    """Return the flags of rl_train.train that come before those of the options."""
    if options.sizes in SHAPES:
        return POINTS_FLAGS.split()
    return [*SA2VA_FLAGS.split(), "--max_tiles", str(max(1, options.num_tiles - 1))]


def build(
    options: Options,
    ranks: RankInfo | None = None,
    policy_class: type[ForcedPolicy] | type[ForcedPoints] | None = None,
    extra_flags: Sequence[str] = (),
) -> Work:
    """Build the work that the options describe, with `extra_flags`, on this rank."""
    config = cli.parse([*base_flags(options), *extra_flags, *options.flags])
    # Flags that this step leaves out must have the values that it assumes.
    fixed = cli.parse(base_flags(options)).flags
    for name in FIXED.split():
        if config.flags.get(name) != fixed.get(name):
            value, measured = config.flags.get(name), fixed.get(name)
            raise ValueError(f"--{name} {value}: measured with {measured}")
    points = options.sizes in SHAPES
    tiled = not points and "llm_config" in CONFIGS[options.sizes]
    if options.num_tiles == 2 or options.num_tiles > 1 and not tiled:
        raise ValueError(f"--num_tiles {options.num_tiles}: no image of {options.sizes} has them")
    if points and options.caption_lengths:
        raise ValueError(
            f"--caption_lengths: not with {options.sizes}, whose prompts have L tokens"
        )
    ranks = ranks or RankInfo(0, 1, torch.device(options.device))
    hold_to(options.budget_gib, ranks.device)
    state = random_state(config, options, policy_class, ranks)
    policy, tokens = state.policy, config.rollout.max_completion_length
    ddp = distributed_data_parallel(MicroBatchLoss(policy, config.loss, tokens))
    size = (options.height, options.width)
    if points:
        batch = points_batch(policy, tokens, config.rollout.batch_size, size, ranks.rank)
        return Work(config, ranks, state, ddp, batch, None, options)
    cells = region_cells(policy, options.prompt_length, num_pieces(policy, options))
    batch = make_batch(policy, cells, config, options, ranks.rank)
    work = Work(config, ranks, state, ddp, batch, None, options)
    # A region of the given size for each row, shifted so that no two are equal.
    work.masks = [
        mask_of(cells.roll(row), options.height, options.width).to(ranks.device)
        for row in range(work.num_rows)
    ]
    return work


def hold_to(budget_gib: float | None, device: torch.device):
    """Limit what torch may take of a GPU; the memory of a CPU is not limited."""
    if budget_gib is None or device.type != "cuda":
        return
    has = torch.cuda.get_device_properties(device).total_memory / GIB
    if budget_gib > has:
        raise ValueError(f"--budget_gib {budget_gib}: the GPU has {has:.1f}")
    torch.cuda.set_per_process_memory_fraction(budget_gib / has, device.index)  # None: current


def random_state(
    config: cli.Config,
    options: Options,
    policy_class: type[ForcedPolicy] | type[ForcedPoints] | None = None,
    ranks: RankInfo | None = None,
) -> RunState:
    """Build what a run of these flags begins with, on random weights."""
    ranks = ranks or RankInfo(0, 1, torch.device(options.device))
    tokens = config.rollout.max_completion_length
    random_policy = random_points_policy if options.sizes in SHAPES else random_sa2va_policy
    lengths = Lengths(options.answer_lengths, ranks.rank)
    policy = random_policy(config, options, policy_class, lengths)
    start_lora(policy.trainable)
    if config.policy.fsdp:
        policy.shard_base()
    task_classes = config.task_classes
    kept_roles = roles_to_keep(task_classes, config.samples_answers)
    offload = "offload_roles" in config.optim.low_memory
    roles = Roles(policy.trainable, kept_roles, offload)
    rewards = tuple(map(UserReward.parse, config.reward.reward))
    context = TaskContext(policy, roles, tokens, user_rewards=rewards)
    tasks = [task_classes[name](options, context) for name, options in config.tasks.items()]
    weigh_components(tasks, config.reward.component_weights)
    optimizer = build_optimizer(config.optim, policy)
    return RunState(policy, roles, tasks, optimizer, scheduler=None)


def random_sa2va_policy(
    config: cli.Config,
    options: Options,
    policy_class: type[ForcedPolicy] | None,
    lengths: Lengths,
) -> Sa2VAPolicy:
    """Build Sa2VA of random weights."""
    sizes = CONFIGS[options.sizes]
    model = random_model(sizes, torch.device(options.device), config.run.seed)
    quantize_base(model.language_model, config, options)
    tiles = {} if isinstance(model, QwenVLModel) else dict(max_tiles=config.policy.max_tiles)
    return (policy_class or ForcedPolicy)(
        model,
        Sa2VAProcessor(model.config, **tiles),
        tokenizer_of(sizes),
        config.policy,
        sorted({group for task in config.tasks.values() for group in task.trainable_modules}),
        answer_tokens=options.answer_tokens,
        lengths=lengths,
    )


def quantize_base(language_model: torch.nn.Module, config: cli.Config, options: Options):
    """Quantise the layers' linears if --quantize_base says so, as loading a checkpoint does."""
    if config.policy.quantize_base:
        quantize_linears(language_model.model.layers, config.policy.quantize_base, options.device)


def random_points_policy(
    config: cli.Config,
    options: Options,
    policy_class: type[ForcedPoints] | None,
    lengths: Lengths,
) -> QwenVLPolicy:
    """Build Qwen2.5-VL and SAM2 of random weights."""
    shapes = SHAPES[options.sizes]
    model = random_points(shapes, torch.device(options.device), config.run.seed)
    quantize_base(text_model(model.vlm), config, options)
    return (policy_class or ForcedPoints)(
        model,
        shapes.tokenizer(),
        shapes.preprocessing(config.policy.image_size),
        config.policy,
        prompt_length=options.prompt_length,
        lengths=lengths,
    )
