"""The work of every figure of a whole step: a model of random weights, one batch, forced lengths.

Random weights never stop, never say [SEG], and find masks that are empty or whole. So that they do
the work of trained ones, each answer goes on to its full length, the answers of loop 2 get a [SEG],
and the masks that the teacher describes are replaced: by a policy and an action of this file, whose
own work is done by then. The steps themselves are those of `rl_train.train.train`.

Letters: B prompts, G samples each, N = B*G rows, L prompt length, T tokens of a caption, A tokens
of an answer with a mask.
"""

import argparse
import contextlib
import itertools
import time
from dataclasses import dataclass, field, replace

import torch

from rl_train import cli, distributed
from rl_train.checkpoint import RunState
from rl_train.config import COUNT, COUNT_OR_0, flag
from rl_train.curves import Clock
from rl_train.distributed import Ranks
from rl_train.files import read_json
from rl_train.parts import Parts, build_optimizer, trained_groups
from rl_train.policies.sa2va import Sa2VAPolicy
from rl_train.policies.sa2va_inputs import BatchInputs
from rl_train.rewards.custom import load_user_rewards
from rl_train.roles import Roles
from rl_train.tasks.caption_mask_caption import CaptionMaskCaption
from rl_train.tasks.mask_caption_mask import MaskCaptionMask
from rl_train.tasks.protocol import Context
from rl_train.tasks.sampled_mask import SampledMask
from rl_train.train import train
from rl_train.types import Batch
from sa2va_hf import Sa2VAProcessor
from tools.benchmarks.common import DEMO, Timed
from tools.random_checkpoint import ADDED, CONFIG_4B, random_model, tokenizer

TINY = read_json(DEMO / "config.json")  # for the tests, on a CPU
TINY["llm_config"]["vocab_size"] = 256 + 26 + 26**2 + 26**3 + len(ADDED)  # words of three letters
CONFIGS = {"4b": CONFIG_4B, "tiny": TINY}
WORDS = "a red cup and an old hat on top of the big box by the sea".split()  # one token each
HEIGHT, WIDTH = 960, 1280  # of an image: multiples of the region grid's 16 cells
FIXED = {  # flags of rl_train.train whose other values a measured step would not follow
    "teacher_answer": "forced",
    "gradient_accumulation_steps": 1,
    "num_iterations": 1,
    "shard_base": False,
    "mask_sigma": 1.0,
    "tasks": ["mask_caption_mask", "caption_mask_caption"],
    "mask_to_caption_weight": 1.0,
    "caption_to_mask_weight": 1.0,
}
GIVEN = (
    "--model_path . --data_dir . --output_dir unused --mask_sigma 1 --likelihood_share 0".split()
)
ORDER = "tools.benchmarks.work:order"
LORA_B_STD = 0.01
SEG_AT = 2  # place of [SEG] in an answer
LOOPS = {"policy": "rollout", "reference": "reference"}  # {role: the phase that ends with its use}


@dataclass(frozen=True, kw_only=True)
class Options(Timed):
    sizes: str = flag("4b", "of the model; tiny = to try the code on a CPU", choices=list(CONFIGS))
    prompt_length: int = flag(400, "tokens (L)", type=COUNT)
    answer_tokens: int = flag(8, "of an answer with a mask (A)", type=COUNT)
    warmup: int = flag(2, "steps before those that count", type=COUNT_OR_0)
    flags: tuple = flag(
        (),
        "comes last: flags of rl_train.train, such as --micro_batch_size 16; its defaults are B 4, "
        "G 8, T 128, LoRA r 128; --likelihood_share is 0 here, as no alternative has that reward",
        type=str,
        nargs=argparse.REMAINDER,
    )


def order(completions, **_) -> list[float]:
    """A reward that differs between the rows of a group: something to learn, whatever the masks."""
    return [row % 7 / 7 for row in range(len(completions))]


class Laps:
    """The `Clock` of a step, whose phases are numbered by loop.

    Attributes:
        mark: called after each phase; its time is in none.
    """

    def __init__(self, device):
        self.device, self.mark = device, lambda: None
        self.start()

    def start(self):
        self.loop, self.clock = 1, Clock(self.device)

    def __call__(self, phase: str):
        self.clock(phase if phase in ("encode", "update") else f"{phase}{self.loop}")
        self.loop += phase == "reference"
        self.mark()
        self.clock.last = time.perf_counter()


class ForcedPolicy(Sa2VAPolicy):
    """Sa2VA whose answers end only at their length, those with a mask at A tokens with a [SEG].

    The end is looked for as ever, and never there.
    """

    def __init__(self, *parts, answer_tokens: int, lap: Laps):
        super().__init__(*parts)
        self.answer_tokens, self.lap = answer_tokens, lap
        self.stop.stopped = self.stop.eos_id = -1

    def encode(self, batch):
        images = super().encode(batch)
        self.lap("encode")
        return images

    def complete(self, images, prompts, num_generations, max_new_tokens, uniforms=None):
        if prompts.grids is not None:  # asks for a caption
            return super().complete(images, prompts, num_generations, max_new_tokens, uniforms)
        uniforms = None if uniforms is None else uniforms[:, : self.answer_tokens]
        done, texts = super().complete(
            images, prompts, num_generations, self.answer_tokens, uniforms
        )
        done.ids[:, SEG_AT] = self.model.seg_id
        return done, texts


class TimedRoles(Roles):
    """Roles whose use by the loop ends a phase."""

    def __init__(self, trainable, lap: Laps):
        super().__init__(trainable)
        self.lap = lap

    @contextlib.contextmanager
    def use(self, name: str):
        with super().use(name):
            yield
        if name in LOOPS:
            self.lap(LOOPS[name])


class TimedJudging:
    """Of a task whose judging ends a phase."""

    def judge(self, rollout):
        outcome = super().judge(rollout)
        self.context.policy.lap("teacher")
        return outcome


class Loop1(TimedJudging, MaskCaptionMask):
    pass


class Loop2(TimedJudging, CaptionMaskCaption):
    """Loop 2, whose teacher describes given masks in place of those that were drawn."""

    def __init__(self, options, context, masks):
        super().__init__(options, context)
        self.action = GivenMasks(self.action, masks)


class GivenMasks(SampledMask):
    """Draws and decodes masks as ever, and hands on N others (H, W) bool."""

    def __init__(self, action: SampledMask, masks: list[torch.Tensor]):
        super().__init__(action.policy, action.sigma, action.mask_loss_coef)
        self.masks = masks

    def draw(self, rollout, draws):
        return replace(super().draw(rollout, draws), masks=self.masks)


@dataclass
class Work:
    """A run of random weights on one batch, and what is forced in it."""

    parts: Parts
    batch: Batch
    prompt_length: int
    answer_tokens: int
    lap: Laps
    clocks: list[Clock] = field(default_factory=list)  # of each step done

    @property
    def policy(self) -> ForcedPolicy:
        return self.parts.state.policy

    @property
    def rollout(self):
        """The sizes B, G, T."""
        return self.parts.config.rollout

    @property
    def num_rows(self) -> int:
        return self.rollout.batch_size * self.rollout.num_generations

    def run(self, num_steps: int) -> list[Clock]:
        """The clocks of more steps by the training's own loop."""
        self.parts.max_steps = self.parts.state.step + num_steps
        train(self.parts, self._batches(), self._end_of_step)
        return self.clocks[-num_steps:]

    def _batches(self):
        while True:
            distributed.gather_objects(None)  # all ranks begin together
            self.lap.start()
            yield self.batch

    def _end_of_step(self, state, work, tally, clock):
        self.lap("update")
        self.clocks.append(self.lap.clock)
        state.step += 1
        lengths = (self.rollout.max_completion_length, self.answer_tokens)
        for w, length in zip(work, lengths, strict=True):
            assert w.rollout.ids.shape == (self.num_rows, length), f"{w.task.name}'s lengths"
            assert w.rollout.valid.all(), f"{w.task.name}'s answers ended early"
        answers = work[1]
        assert len(answers.rollout.action.rows) == self.num_rows, "answers without [SEG]"
        assert len(answers.outcome.replies) == self.num_rows, "masks without a description"
        assert tally.updates == 1, "no update"


def build(options: Options, ranks: Ranks, policy_class=ForcedPolicy, loop1=Loop1) -> Work:
    """The work that the options describe, on this rank."""
    config = cli.parse([*GIVEN, "--reward", ORDER, *options.flags])
    tokens = config.rollout.max_completion_length
    if options.answer_tokens >= tokens:
        raise ValueError(
            f"--answer_tokens {options.answer_tokens}: must be below --max_completion_length "
            f"{tokens}"
        )
    for name, value in FIXED.items():
        if config.flags[name] != value:
            raise ValueError(f"--{name} {config.flags[name]}: a step is measured with {value}")
    sizes, lap = CONFIGS[options.sizes], Laps(ranks.device)
    model = random_model(sizes, ranks.device, config.run.seed)
    policy = policy_class(
        model,
        Sa2VAProcessor(model.config, config.policy.max_tiles),
        tokenizer(sizes["llm_config"]["vocab_size"] - len(ADDED)),
        config.policy,
        trained_groups(config.tasks),
        answer_tokens=options.answer_tokens,
        lap=lap,
    )
    for name, parameter in policy.trainable.items():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=LORA_B_STD)
    roles, rewards = TimedRoles(policy.trainable, lap), load_user_rewards(config.reward.reward)
    cells = region_cells(policy, options.prompt_length)
    rows = range(config.rollout.batch_size * config.rollout.num_generations)
    masks = [mask_of(cells.roll(row)).to(ranks.device) for row in rows]
    context = Context(policy, roles, tokens, user_rewards=tuple(rewards))
    first, second = config.tasks.values()
    tasks = [loop1(first, context), Loop2(second, context, masks)]
    optimizer = build_optimizer(config.optim, policy)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    state = RunState(policy, roles, tasks, optimizer, schedule)
    unused = dict(watch=None, train_set=None, heldout=None, sampler=None)
    parts = Parts(config, config.flags, ranks, state, max_steps=0, **unused)
    batch = make_batch(policy, cells, options.prompt_length, config.rollout.batch_size, ranks.rank)
    return Work(parts, batch, options.prompt_length, options.answer_tokens, lap)


def make_batch(policy, cells, prompt_length: int, size: int, rank: int) -> Batch:
    """`size` images of noise, each with the region `cells` and a caption of the same length."""
    rng, index = torch.Generator().manual_seed(rank), [rank * size + i for i in range(size)]
    side, sam_side = policy.processor.image_size, policy.processor.sam_size
    inputs = BatchInputs(
        [torch.randn(1, 3, side, side, generator=rng) for _ in index],
        torch.randint(256, (size, 3, sam_side, sam_side), dtype=torch.uint8, generator=rng),
        torch.stack([cells] * size),
    )
    captions = [caption_of(policy, prompt_length)] * size
    names = [f"image{i}" for i in index]
    return Batch(index, [mask_of(cells) for _ in index], captions, names, [], inputs)


def region_cells(policy, length: int) -> torch.Tensor:
    """(g, g) bool region with which a prompt for its caption has `length` tokens."""
    grid = policy.processor.grid_size
    shortest = len(policy.prompts.describe(1, 1))
    count = length - shortest + 1
    if not 0 < count < grid * grid:
        most = shortest + grid * grid - 2
        raise ValueError(
            f"--prompt_length {length}: a prompt with a region has {shortest} to {most} tokens"
        )
    return (torch.arange(grid * grid) < count).view(grid, grid)


def mask_of(cells: torch.Tensor) -> torch.Tensor:
    """(H, W) bool mask that covers these cells (g, g)."""
    rows = cells.repeat_interleave(HEIGHT // len(cells), 0)
    return rows.repeat_interleave(WIDTH // len(cells), 1)


def caption_of(policy, length: int) -> str:
    """A caption with which a prompt for its mask has `length` tokens."""
    words, endless = [], itertools.cycle(WORDS)
    while len(policy.prompts.segment(" ".join(words), 1)) < length:
        words.append(next(endless))
    assert len(policy.prompts.segment(" ".join(words), 1)) == length, "a word of several tokens"
    return " ".join(words)
