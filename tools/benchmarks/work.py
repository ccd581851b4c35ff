"""The work of every figure of a whole step: a model of random weights, one batch, forced lengths.

Random weights never stop, never say [SEG], and find masks that are empty or whole. So that they do
the work of trained ones, each answer goes on to its full length, those with a mask get a [SEG], and
the masks that the teacher describes are replaced, when the work for the real ones is done.

Letters: B prompts, G samples each, N = B*G rows, L prompt length, T tokens of a caption, A tokens
of an answer with a mask.
"""

import argparse
import itertools
from dataclasses import dataclass, replace

import numpy as np
import torch
from PIL import Image

from rl_train import cli, distributed
from rl_train.checkpoint import RunState
from rl_train.curves import Clock, Tally
from rl_train.data.loader import Batches
from rl_train.distributed import GradientAverage, Ranks
from rl_train.draws import Draws
from rl_train.flags import COUNT, COUNT_OR_0, flag
from rl_train.grpo import group_advantages
from rl_train.objective import MicroBatchLoss, micro_batches_of, score_all, step_totals
from rl_train.objective import Work as TaskWork
from rl_train.parts import build_optimizer
from rl_train.policies.qwen_points import QwenPointsPolicy
from rl_train.policies.sa2va import Sa2VAPolicy
from rl_train.rewards.components import combine
from rl_train.rewards.custom import load_user_rewards
from rl_train.roles import COPIES, Roles
from rl_train.tasks.protocol import Context
from rl_train.train import update
from rl_train.types import Batch
from sa2va_hf import Sa2VAProcessor
from tools.benchmarks.common import CONFIGS, Timed, start_lora
from tools.benchmarks.qwen import SHAPES, random_points
from tools.benchmarks.work_points import HEIGHT, WIDTH, WORDS, ForcedPoints
from tools.benchmarks.work_points import make_batch as points_batch
from tools.random_checkpoint import ADDED, random_model, tokenizer

# Flags of rl_train.train that a measured step does not follow.
FIXED = "gradient_accumulation_steps num_iterations shard_base mask_sigma control tasks "
FIXED += "mask_to_caption_weight caption_to_mask_weight scale_components"
COMMON = "--model_path . --data_dir . --output_dir unused --reward tools.benchmarks.work:order "
GIVEN = COMMON + "--mask_sigma 1 --likelihood_share 0 --ema_decay 0.999"
POINTS = COMMON + "--tasks point_segmentation --sam_path . --max_completion_length 300"
SEG_AT = 2  # place of [SEG] in an answer


@dataclass(frozen=True, kw_only=True)
class Options(Timed):
    prompt_length: int = flag(400, "tokens (L)", type=COUNT)
    answer_tokens: int = flag(8, "of an answer with a mask (A)", type=COUNT)
    warmup: int = flag(2, "steps before those that count", type=COUNT_OR_0)
    flags: tuple = flag(
        (), "last: those of rl_train.train, likelihood share 0", type=str, nargs=argparse.REMAINDER
    )


def order(completions, **_) -> list[float]:
    """A reward that differs between the rows of a group: something to learn, whatever the masks."""
    return [row % 7 / 7 for row in range(len(completions))]


class ForcedPolicy(Sa2VAPolicy):
    """Sa2VA whose answers end only at their length, those with a mask at A tokens with a [SEG].

    The end is looked for as ever, and never there.
    """

    def __init__(self, *parts, answer_tokens: int):
        super().__init__(*parts)
        self.answer_tokens = answer_tokens
        self.stop.stopped, self.stop.eos_id = self.stop.table.shape[1], -1  # beyond all states

    def complete(self, images, prompts, num_generations, max_new_tokens, uniforms=None):
        if prompts.grids is not None:  # asks for a caption
            return super().complete(images, prompts, num_generations, max_new_tokens, uniforms)
        length = self.answer_tokens
        uniforms = None if uniforms is None else uniforms[:, :length]
        done, texts = super().complete(images, prompts, num_generations, length, uniforms)
        done.ids[:, SEG_AT] = self.model.seg_id
        return done, texts


@dataclass
class Work:
    """A run on one batch, again and again."""

    config: cli.Config
    ranks: Ranks
    state: RunState
    average: GradientAverage
    batch: Batch
    # N (H, W) bool that the teacher describes; None: those drawn, or there is no teacher
    masks: list[torch.Tensor] | None
    options: Options
    scores_old: bool = False  # score what was sampled once more, as the old log-probs

    @property
    def policy(self) -> ForcedPolicy | ForcedPoints:
        return self.state.policy

    @property
    def num_rows(self) -> int:
        return self.config.rollout.batch_size * self.config.rollout.num_generations

    def run(self) -> list[Clock]:
        """The clocks of the steps that count, after those of the warm-up."""
        first = self.options.warmup
        return [self.step() for _ in range(first + self.options.rounds)][first:]

    def step(self, clock: Clock | None = None) -> Clock:
        """One step of `rl_train.train.train`, by the same calls, with the loops' phases apart."""
        state, optim, batch, work = self.state, self.config.optim, self.batch, []
        policy, roles, rollouts = state.policy, state.roles, self.config.rollout
        G, T = rollouts.num_generations, rollouts.max_completion_length
        scale = self.config.loss.scale
        distributed.gather_objects(None)  # all ranks begin together
        clock, tally = clock or Clock(policy.device), Tally()
        features = policy.encode(batch)
        clock("encode")
        for number, task in enumerate(state.tasks):
            draws = Draws(self.config.run.seed, state.step, number, batch.index, G)
            prompts = task.prompts(batch, features)
            with roles.use("policy"):
                rollout = policy.sample(batch, features, prompts, G, T, draws.uniforms(T))
                if task.action:
                    drawn = task.action.draw(rollout, draws)
                    rollout.action = replace(drawn, masks=self.masks or drawn.masks)
                clock(f"rollout{number + 1}")
                if self.scores_old:
                    rollout.logp = score_all(policy, task, rollout, optim.micro_batch_size).logp
                    clock(f"old{number + 1}")
            reference = None
            if self.config.loss.kl_coef:
                with roles.use("reference"):
                    reference = score_all(policy, task, rollout, optim.micro_batch_size)
            clock(f"reference{number + 1}")
            outcome = task.judge(rollout)
            reward = combine(outcome.rewards, task.weights)
            advantages = group_advantages(reward, G, scale)
            work.append(TaskWork(task, rollout, outcome, reward, advantages, reference))
            clock(f"teacher{number + 1}")
        totals, _ = step_totals(work, self.ranks.world_size)
        for w, rows, last in micro_batches_of(work, optim.micro_batch_size):
            with self.average.averaging(last):
                loss, statistics = self.average(w, rows, totals[w.task.name], last=last)
                loss.backward()
            tally.add_update(w.task.name, statistics, on_policy=True)
        update(state, self.average, tally, optim.max_grad_norm)
        roles.update_teacher(optim.ema_decay)
        clock("update")
        state.step += 1
        self._check(*work)
        return clock

    def _check(self, *work: TaskWork):
        """Assert that the step was as long as it is said to be."""
        for w in work:
            length = self.config.rollout.max_completion_length
            if w.task.action:
                length = self.options.answer_tokens
                assert len(w.rollout.action.rows) == self.num_rows, "answers without [SEG]"
                assert len(w.outcome.replies) == self.num_rows, "masks without a description"
            assert w.rollout.valid.shape == (self.num_rows, length) and w.rollout.valid.all()
            refused = [reason for reason, rows in w.outcome.refused.items() if rows.any()]
            assert not refused, f"answers that cannot be read: {refused}"


def given(options: Options) -> list[str]:
    """The flags of rl_train.train before those that the options name."""
    return (POINTS if options.sizes in SHAPES else GIVEN).split()


def build(options: Options, ranks=None, policy_class=None, more=()) -> Work:
    """The work that the options describe, with `more` flags, on this rank."""
    config = cli.parse([*given(options), *more, *options.flags])
    fixed = cli.parse(given(options)).flags
    for name in FIXED.split():
        if config.flags[name] != fixed[name]:
            raise ValueError(f"--{name} {config.flags[name]}: measured with {fixed[name]}")
    ranks = ranks or Ranks(0, 1, torch.device(options.device))
    state = random_state(config, options, policy_class)
    policy, tokens = state.policy, config.rollout.max_completion_length
    average = GradientAverage(MicroBatchLoss(policy, config.loss, tokens), policy.trainable)
    if options.sizes in SHAPES:
        how = (policy, tokens, config.rollout.batch_size, ranks.rank)
        batch = points_batch(*how)
        return Work(config, ranks, state, average, batch, None, options)
    cells = region_cells(policy, options.prompt_length)
    batch = make_batch(policy, cells, options.prompt_length, config.rollout.batch_size, ranks.rank)
    work = Work(config, ranks, state, average, batch, None, options)
    work.masks = [mask_of(cells.roll(row)).to(ranks.device) for row in range(work.num_rows)]
    return work


def random_state(config, options: Options, policy_class=None) -> RunState:
    """What a run of these flags begins with, on random weights."""
    tokens = config.rollout.max_completion_length
    random_policy = random_points_policy if options.sizes in SHAPES else random_sa2va_policy
    policy = random_policy(config, options, policy_class)
    start_lora(policy.trainable)
    kinds = config.kinds
    asked = any(kind.asks_teacher for kind in kinds.values())
    roles = Roles(policy.trainable, COPIES if asked else ("reference",))
    rewards = tuple(load_user_rewards(config.reward.reward))
    context = Context(policy, roles, tokens, user_rewards=rewards)
    tasks = [kinds[name](asked, context) for name, asked in config.tasks.items()]
    optimizer = build_optimizer(config.optim, policy)
    return RunState(policy, roles, tasks, optimizer, scheduler=None)


def random_sa2va_policy(config, options: Options, policy_class=None) -> Sa2VAPolicy:
    """Sa2VA of random weights."""
    sizes = CONFIGS[options.sizes]
    model = random_model(sizes, torch.device(options.device), config.run.seed)
    return (policy_class or ForcedPolicy)(
        model,
        Sa2VAProcessor(model.config, config.policy.max_tiles),
        tokenizer(sizes["llm_config"]["vocab_size"] - len(ADDED)),
        config.policy,
        sorted({group for asked in config.tasks.values() for group in asked.trains}),
        answer_tokens=options.answer_tokens,
    )


def random_points_policy(config, options: Options, policy_class=None) -> QwenPointsPolicy:
    """Qwen2.5-VL and SAM2 of random weights."""
    shapes = SHAPES[options.sizes]
    model = random_points(shapes, torch.device(options.device), config.run.seed)
    parts = (model, shapes.tokenizer(), shapes.seen(config.policy.image_side), config.policy)
    return (policy_class or ForcedPoints)(*parts, prompt_length=options.prompt_length)


def make_batch(policy, cells, prompt_length: int, size: int, rank: int) -> Batch:
    """`size` images of noise, each with the region `cells` and a caption of the same length."""
    pixels = np.random.default_rng(rank).integers(256, size=(HEIGHT, WIDTH, 3), dtype=np.uint8)
    sample = dict(image=Image.fromarray(pixels), mask=mask_of(cells).numpy(), image_id="image")
    samples = [sample | dict(caption=caption_of(policy, prompt_length))] * size
    batch = Batches(samples, policy.inputs(policy.answer_tokens))[list(range(size))]
    return replace(batch, index=[rank * size + i for i in range(size)])


def region_cells(policy, length: int) -> torch.Tensor:
    """(g, g) bool region with which a prompt for its caption has `length` tokens."""
    grid, shortest = policy.processor.grid_size, len(policy.prompts.describe(1, 1))
    if not shortest <= length < shortest + grid * grid - 1:
        raise ValueError(f"--prompt_length {length}: must be {shortest} to that + {grid**2 - 2}")
    return (torch.arange(grid * grid) <= length - shortest).view(grid, grid)


def mask_of(cells: torch.Tensor) -> torch.Tensor:
    """(H, W) bool mask that covers these cells (g, g)."""
    rows = cells.repeat_interleave(HEIGHT // len(cells), 0)
    return rows.repeat_interleave(WIDTH // len(cells), 1)


def caption_of(policy, length: int) -> str:
    """A caption with which a prompt for its mask has `length` tokens."""
    num_words = length + 1 - len(policy.prompts.segment(WORDS[0], 1))
    caption = " ".join(itertools.islice(itertools.cycle(WORDS), num_words))
    assert len(policy.prompts.segment(caption, 1)) == length, "a word of several tokens"
    return caption
