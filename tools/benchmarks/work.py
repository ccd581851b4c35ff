"""The work of every figure of a whole step: a model of random weights, one batch, and forced lengths.

Random weights never stop, never say [SEG], and find masks that are empty or whole. So that they do the work of trained ones, each
answer goes on to its full length, the answers of loop 2 get a [SEG], and the masks that the teacher describes are replaced; all of it
behind the project's own functions (`forced`), which have done their work by then.

Letters: B prompts, G samples each, N = B*G rows, L prompt length, T tokens of a caption, A tokens of an answer with a mask.
"""

import argparse
import itertools
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch

from rl_train import distributed, train
from rl_train.config import parse_args
from rl_train.parts import build_optimizer, build_tasks
from rl_train.policies.sa2va import Policy, make_policy
from rl_train.policies.sa2va_inputs import BatchInputs
from rl_train.roles import Roles
from rl_train.types import Batch
from tools.random_checkpoint import ADDED, CONFIG_4B, random_model, tokenizer

CONFIG_TINY = CONFIG_4B | dict(  # for the tests, on a CPU
    vision_config=CONFIG_4B["vision_config"]
    | dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32),
    llm_config=CONFIG_4B["llm_config"]
    | dict(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=96,
        vocab_size=256 + 26 + 26**2 + 26**3 + len(ADDED),
    ),
    sam2_config=dict(
        image_size=256,
        hidden_size=64,
        mask_decoder_mlp_dim=64,
        mask_decoder_heads=4,
        memory_channels=64,
        memory_layers=1,
        memory_mlp_dim=64,
        memory_fuser_dim=64,
        backbone=dict(
            hidden_size=24,
            num_attention_heads=1,
            blocks_per_stage=[1, 1, 2, 1],
            embed_dim_per_stage=[24, 48, 96, 192],
            num_attention_heads_per_stage=[1, 2, 4, 8],
            window_size_per_stage=[8, 4, 8, 4],
            global_attention_blocks=[3],
            window_positional_embedding_background_size=[7, 7],
        ),
    ),
)
CONFIGS = {"4b": CONFIG_4B, "tiny": CONFIG_TINY}
WORDS = "a red cup and an old hat on top of the big box by the sea".split()  # one token each
HEIGHT, WIDTH = 960, 1280  # of an image: multiples of the region grid's 16 cells
SIGMA = 1.0  # --mask_sigma
FIXED = dict(
    teacher_answer="forced",
    gradient_accumulation_steps=1,
    num_iterations=1,
    shard_base=False,
    mask_sigma=SIGMA,
    tasks=["mask_caption_mask", "caption_mask_caption"],
    mask_to_caption_weight=1.0,
    caption_to_mask_weight=1.0,
)  # flags of the step
LORA_B_STD = 0.01
SEG_AT = 2  # place of [SEG] in an answer


class Order:
    """A reward that differs between the rows of a group, so that there is something to learn whatever the masks are."""

    name, weight = "order", 1.0

    def __call__(self, completions, **_) -> torch.Tensor:
        return torch.arange(len(completions)) % 7 / 7


@dataclass
class Work:
    """All that `train_step` takes, of random weights, and what is forced."""

    args: argparse.Namespace  # of rl_train.train
    ranks: distributed.Ranks
    policy: Policy
    roles: Roles
    tasks: list
    optimizer: torch.optim.Optimizer
    scheduler: object
    batch: Batch
    masks: list[torch.Tensor]  # N (H, W) bool, what loop 2 "finds"
    prompt_length: int
    answer_tokens: int

    @property
    def num_rows(self) -> int:
        return self.args.batch_size * self.args.num_generations

    def step(self, number: int) -> list[tuple[str, float, int]]:
        """One step by the training's own code: its laps, as in `train.Clock`, repeated phases numbered by loop."""
        clock = train.Clock(self.ranks.device)
        with forced(self):
            done, _, norms = train.train_step(
                self.args,
                self.ranks,
                self.policy,
                self.roles,
                self.tasks,
                self.optimizer,
                self.scheduler,
                [self.batch],
                number,
                clock,
            )
        captions, answers = (w.rollout for w in done)
        assert (
            captions.ids.shape == (self.num_rows, self.args.max_completion_length)
            and captions.valid.all()
        ), "loop 1's lengths"
        assert answers.ids.shape == (self.num_rows, self.answer_tokens) and answers.valid.all(), (
            "loop 2's lengths"
        )
        assert (
            len(answers.seg_rows) == self.num_rows
            and len(answers.replies) == self.num_rows
            and norms
        ), "a part of the step did nothing"
        times, seen = Counter(phase for phase, _, _ in clock.laps), Counter()
        laps = []
        for phase, seconds, peak in clock.laps:
            seen[phase] += 1
            laps.append((f"{phase}{seen[phase]}" if times[phase] > 1 else phase, seconds, peak))
        return laps


@contextmanager
def forced(work: Work):
    """Let the answers of loop 2 be A tokens with a [SEG], and replace the masks that are found by them."""
    engine = work.policy.engine
    real_sample, real_generate = train.sample, engine.generate

    def sample(policy, batch, images, prompts, num_generations, max_new_tokens, random, mask_sigma):
        if mask_sigma is None:
            return real_sample(
                policy, batch, images, prompts, num_generations, max_new_tokens, random, mask_sigma
            )
        random = [numbers[:, : work.answer_tokens] for numbers in random]
        found = real_sample(
            policy, batch, images, prompts, num_generations, work.answer_tokens, random, mask_sigma
        )
        found.masks = work.masks
        return found

    def generate(*inputs, max_new_tokens, **how):
        found = real_generate(*inputs, max_new_tokens=max_new_tokens, **how)
        if max_new_tokens == work.answer_tokens:
            found.ids[:, SEG_AT] = work.policy.model.seg_id
        return found

    with patch.object(train, "sample", sample), patch.object(engine, "generate", generate):
        yield


def build(options, ranks) -> Work:
    """The work that `add_arguments` describes, on this rank."""
    args = parse_args(
        [
            "--model_path",
            ".",
            "--data_dir",
            ".",
            "--output_dir",
            "unused",
            "--mask_sigma",
            str(SIGMA),
            "--likelihood_share",
            "0",
            *options.flags,
        ]
    )
    if options.answer_tokens >= args.max_completion_length:
        raise ValueError(
            f"--answer_tokens {options.answer_tokens}: must be below --max_completion_length {args.max_completion_length}"
        )
    for name, value in FIXED.items():
        if getattr(args, name) != value:
            raise ValueError(f"--{name} {getattr(args, name)}: a step is measured with {value}")
    config = CONFIGS[options.sizes]
    text = tokenizer(config["llm_config"]["vocab_size"] - len(ADDED))
    policy = make_policy(args, random_model(config, ranks.device, args.seed), text)
    policy.stop.stopped, policy.stop.eos_id = -1, -1  # is looked for as ever, and never there
    for name, parameter in policy.trainable.items():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=LORA_B_STD)
    roles = Roles(policy.trainable)
    optimizer = build_optimizer(args, policy)
    cells = region_cells(policy, options.prompt_length)
    index = [ranks.rank * args.batch_size + i for i in range(args.batch_size)]
    masks = [mask_of(cells.roll(row)) for row in range(args.batch_size * args.num_generations)]
    rng = torch.Generator().manual_seed(ranks.rank)
    size, sam_size = policy.processor.image_size, policy.processor.sam_size
    inputs = BatchInputs(
        [torch.randn(1, 3, size, size, generator=rng) for _ in index],
        torch.randint(256, (len(index), 3, sam_size, sam_size), dtype=torch.uint8, generator=rng),
        torch.stack([cells] * len(index)),
    )
    batch = Batch(
        index,
        [mask_of(cells) for _ in index],
        [caption_of(policy, options.prompt_length)] * len(index),
        [f"image{i}" for i in index],
        [],
        inputs,
    )
    return Work(
        args,
        ranks,
        policy,
        roles,
        build_tasks(args, policy, roles, SIGMA, None, (Order(),)),
        optimizer,
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0),
        batch,
        [mask.to(ranks.device) for mask in masks],
        options.prompt_length,
        options.answer_tokens,
    )


def region_cells(policy, length: int) -> torch.Tensor:
    """(g, g) bool region with which a prompt for its caption has `length` tokens."""
    grid = policy.processor.grid_size
    shortest = len(policy.prompts.describe(1, 1))
    count = length - shortest + 1
    if not 0 < count < grid * grid:
        raise ValueError(
            f"--prompt_length {length}: a prompt with a region has {shortest} to {shortest + grid * grid - 2} tokens"
        )
    return (torch.arange(grid * grid) < count).view(grid, grid)


def mask_of(cells: torch.Tensor) -> torch.Tensor:
    """(H, W) bool mask that covers these cells (g, g)."""
    return cells.repeat_interleave(HEIGHT // len(cells), 0).repeat_interleave(
        WIDTH // len(cells), 1
    )


def caption_of(policy, length: int) -> str:
    """A caption with which a prompt for its mask has `length` tokens."""
    words, endless = [], itertools.cycle(WORDS)
    while len(policy.prompts.segment(" ".join(words), 1)) < length:
        words.append(next(endless))
    assert len(policy.prompts.segment(" ".join(words), 1)) == length, (
        "a word of more than one token"
    )
    return " ".join(words)


def add_arguments(parser):
    parser.add_argument(
        "--sizes",
        choices=CONFIGS,
        default="4b",
        help="of the model; tiny = to try the code on a CPU",
    )
    parser.add_argument("--prompt_length", type=int, default=400, help="tokens (L)")
    parser.add_argument("--answer_tokens", type=int, default=8, help="of an answer with a mask (A)")
    parser.add_argument("--device", default="cuda", help="where")
    parser.add_argument(
        "--flags",
        nargs=argparse.REMAINDER,
        default=[],
        help="comes last: flags of rl_train.train, such as "
        "--micro_batch_size 16; its defaults are B 4, G 8, T 128, LoRA r 128; --likelihood_share is 0 here, as no "
        "alternative has that reward",
    )
