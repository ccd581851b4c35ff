"""Every flag of a run but the tasks' own, its help beside it, as small frozen configs.

A config is a frozen dataclass whose fields are made by `flag`. What computes is given the one config
that concerns it, never all flags; the tasks declare theirs in the same way (`rl_train.tasks`).
"""

import argparse
import dataclasses
import math
import types
from collections.abc import Callable
from dataclasses import dataclass

from rl_train.data import DATASETS
from rl_train.grpo import CONTROLS, LOSS_TYPES
from rl_train.rewards.judge import FAILURE_WINDOW, MODES

REQUIRED = dataclasses.MISSING


def flag(default=REQUIRED, help: str = "", *, name=None, check=None, needs=None, **options):
    """A field of a config that is a flag of the command line.

    Args:
        name: of the flag, by default the field's; check: `at_least`, `above` or `within`.
        needs: another flag, without which this one may not be given.
        options: of `argparse.add_argument`, beside what the field's type says.
    """
    metadata = dict(help=help, name=name, check=check, needs=needs, options=options)
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


# Checks of a value: each returns what it must be, or None if it is.


def at_least(least: float) -> Callable:
    return lambda value: None if value >= least else f"at least {least}"


def above(bound: float) -> Callable:
    return lambda value: None if value > bound else f"above {bound}"


def within(low: float, high: float, closed: bool = True) -> Callable:
    interval = f"in [{low}, {high}{']' if closed else ')'}"
    return lambda value: None if low <= value < high or (closed and value == high) else interval


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """model"""

    model_path: str = flag(help="Sa2VA checkpoint folder in the original layout")
    dtype: str = flag(
        "bfloat16",
        "of the frozen base; what trains is float32",
        choices=["float32", "bfloat16"],
    )
    max_tiles: int = flag(
        1,
        "tiles per image: 1 = the whole image at 448 px, up to 12 + thumbnail",
        check=at_least(1),
    )
    temperature: float = flag(1.0, "of sampling and of every log-prob", check=above(0))
    gradient_checkpointing: bool = flag(
        True,
        "recompute LLM layers in the backward pass: 32 rows so are smaller and faster than 8 at "
        "a time without (docs/performance.md)",
    )
    shard_base: bool = flag(
        False,
        "for a model that does not fit one GPU: each rank keeps a share of every LLM and vision "
        "layer (FSDP2) and gathers a layer to compute it, at each token sampled too; needs "
        "several processes (docs/real_run.md)",
    )
    lora_r: int = flag(128, "rank of the LoRA on the LLM", check=at_least(1))
    lora_alpha: int = flag(256, "its scale numerator: scale = alpha / r", check=at_least(1))
    lora_dropout: float = flag(
        0.05,
        "recorded in the adapter for later supervised training; off during RL, where sampling "
        "and scoring must be one distribution",
    )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """data"""

    data_dir: str = flag(
        help="folder of training regions, or the name of a data set on the hub (owner/name)"
    )
    dataset: str = flag(
        "gar",
        "its format: gar = Grasp-Any-Region, Arrow shards; dam = Describe-Anything, "
        "annotations.json beside tar files (docs/data.md)",
        choices=list(DATASETS),
    )
    max_bad_fraction: float = flag(
        0.01,
        "the run stops when a larger share of the data set cannot be used",
        check=within(0, 1),
    )
    eval_data_dir: str | None = flag(
        None,
        "folder of held-out regions; default: --eval_samples regions of the last images of a "
        "fixed shuffle of --data_dir, which are then not trained on",
    )
    eval_samples: int = flag(64, "held-out regions in an evaluation", check=at_least(1))
    num_workers: int = flag(2, "DataLoader workers per rank", check=at_least(0))


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """rollouts"""

    batch_size: int = flag(4, "prompts per rank and rollout (B)", check=at_least(1))
    num_generations: int = flag(8, "samples per prompt (G), at least 2", check=at_least(2))
    max_completion_length: int = flag(128, "new tokens per sample (T)", check=at_least(1))


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """rewards"""

    use_llm_judge: bool = flag(
        False,
        "have an LLM judge: loop 1's reward becomes IoU + (0.25 METEOR + 0.75 judge) of the "
        "sampled caption against the true one",
    )
    llm_judge_base_url: str = flag(
        "http://localhost:9100/v1",
        "OpenAI-compatible server of the judge, such as vLLM's; its key, if it wants one, is read "
        "from the environment's OPENAI_API_KEY",
    )
    llm_judge_model: str = flag(
        "meta-llama/Meta-Llama-3.1-8B-Instruct", "name of the judge at that server"
    )
    llm_judge_mode: str = flag(
        "score",
        "score = a rating of 0..10, mcq = a verdict A..E, qa = questions made from the true "
        "caption, answered from the generated one",
        choices=MODES,
    )
    max_judge_failures: float = flag(
        0.2,
        f"the run stops when a larger share of the last {FAILURE_WINDOW} captions could not be "
        "judged",
        check=within(0, 1),
    )
    control: str = flag(
        "none",
        "train on rewards that cannot teach: shuffled = each group's in random order, constant = "
        "all equal; held-out metrics should then not rise, but under shuffled by the supervised "
        "--mask_loss_coef; a step without unequal rewards in any group is skipped whole, with its "
        "mask term",
        choices=CONTROLS,
    )
    reward: list[str] = flag(
        [],
        "reward functions of your own, added to the reward of each loop with their weight "
        "(default 1) and logged by name; called as TRL calls them: (completions, **kwargs) -> "
        "list of float or None",
        metavar="MODULE:FUNCTION[=WEIGHT]",
    )


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """loss"""

    loss_type: str = flag("dapo", "how token losses are averaged", choices=LOSS_TYPES)
    clip_range: float = flag(
        0.2, "ratio clip, lower side (and upper, unless --clip_range_high)", check=above(0)
    )
    clip_range_high: float | None = flag(None, "ratio clip, upper side", check=above(0))
    kl_coef: float = flag(0.02, "weight of the KL to the frozen reference", check=at_least(0))


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """optimisation"""

    max_steps: int = flag(
        0,
        "steps (each: rollouts, then --num_iterations updates); 0 = --num_epochs",
        check=at_least(0),
    )
    num_epochs: float = flag(1.0, "passes over the data, if --max_steps is 0", check=above(0))
    num_iterations: int = flag(1, "optimizer updates on the same rollouts", check=at_least(1))
    gradient_accumulation_steps: int = flag(
        1, "batches of --batch_size prompts per step and rank", check=at_least(1)
    )
    micro_batch_size: int = flag(
        32, "rows per forward and backward of the update", check=at_least(1)
    )
    learning_rate: float = flag(1e-5, "peak, of AdamW (betas .9 .999)", check=above(0))
    prompt_learning_rate: float | None = flag(
        None,
        "peak, of text_hidden_fcs, through which [SEG] prompts SAM2; default --learning_rate",
        check=above(0),
    )
    weight_decay: float = flag(0.05, "of AdamW")
    warmup_ratio: float = flag(
        0.05,
        "share of updates with linear warm-up; then cosine to 0",
        check=within(0, 1, closed=False),
    )
    max_grad_norm: float = flag(1.0, "gradient clipping by global norm", check=above(0))
    ema_decay: float = flag(
        0.999,
        "of the teacher, applied after each update; 0 = the policy is its own teacher, 1 = the "
        "teacher stays what the run started from",
        check=within(0, 1),
    )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """run"""

    output_dir: str = flag(help="receives config.json, TensorBoard logs, rollouts and checkpoints")
    save_steps: int = flag(
        100, "steps between checkpoints; the last step is always saved", check=at_least(1)
    )
    save_total_limit: int = flag(3, "checkpoints kept, oldest removed; 0 = all", check=at_least(0))
    resume: str | None = flag(
        None,
        "continue from a checkpoint folder, or from the latest one in --output_dir",
        nargs="?",
        const="latest",
    )
    eval_steps: int = flag(
        100,
        "steps between evaluations and pictures, the best of which is kept as checkpoint_best; "
        "0 = only before and after",
        check=at_least(0),
    )
    seed: int = flag(0, "of everything", check=within(0, 2**63, closed=False))


# From configs to a parser and back


def flag_name(field: dataclasses.Field) -> str:
    return field.metadata["name"] or field.name


def add_flags(parser: argparse.ArgumentParser, config_class: type, title: str | None = None):
    """Add the flags of a config class to the parser, in a group named by its docstring or `title`."""
    group = parser.add_argument_group(title or config_class.__doc__)
    for field in dataclasses.fields(config_class):
        options = dict(field.metadata["options"])
        kind = field.type.__args__[0] if isinstance(field.type, types.UnionType) else field.type
        if kind is bool:
            on = argparse.BooleanOptionalAction if field.default else "store_true"
            options["action"] = on
        elif field.type == list[str]:
            options["nargs"] = "+"
        else:
            options.setdefault("type", kind)
        if field.default_factory is not REQUIRED:
            options["default"] = field.default_factory()
        elif field.default is REQUIRED:
            options["required"] = True
        else:
            options["default"] = field.default
        group.add_argument(f"--{flag_name(field)}", help=field.metadata["help"], **options)


def read_flags(args: argparse.Namespace, config_class: type):
    """The config that the parsed flags say. Raises ValueError, naming a flag, if one has a wrong value."""
    values = {
        field.name: getattr(args, flag_name(field)) for field in dataclasses.fields(config_class)
    }
    config = config_class(**values)
    check_flags(config)
    return config


def check_flags(config):
    """Raise ValueError, naming the flag, if a number is not finite or fails its field's check."""
    for field in dataclasses.fields(config):
        value, check = getattr(config, field.name), field.metadata["check"]
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"--{flag_name(field)} {value}: must be a finite number")
        if check and isinstance(value, (int, float)) and (must_be := check(value)):
            raise ValueError(f"--{flag_name(field)} {value}: must be {must_be}")


def needed_flags(*parts):
    """Pairs (flag, the flag that it needs) of the flags in these configs that are given."""
    for config in parts:
        for field in dataclasses.fields(config):
            if field.metadata["needs"] and getattr(config, field.name):
                yield flag_name(field), field.metadata["needs"]


def flag_values(config) -> dict[str, object]:
    """{flag: value} of a config, as config.json has them."""
    return {flag_name(field): getattr(config, field.name) for field in dataclasses.fields(config)}
