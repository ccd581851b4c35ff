"""The command line of a run: parse flags to a `Config`, and check the output folder."""

import argparse
import math
import os
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rl_train.checkpoint.record import find_in_the_way
from rl_train.config.flags import add_flags, flag_fields, flag_name, has_flag, read_flags
from rl_train.config.grpo_config import CONFIG_CLASSES, Config
from rl_train.config.saved import ADDED, NOT_TAKEN, REMOVED, Taken, read_saved, take_saved
from rl_train.data.dataset_flags import dataset_openers, eval_entry
from rl_train.distributed.process_group import (
    RankError,
    fail_together,
    only_local_rank0,
)
from rl_train.rewards.ablations import ANY_OBJECT, check_ablation
from rl_train.rewards.iou import ON_TARGET
from rl_train.rewards.weights import check_weights
from rl_train.tasks import DEFAULT_TASKS, TASKS, load_task
from rl_train.utils.command_line import FlagParser
from rl_train.utils.io import check_writable, lock, read_json
from sa2va_hf import hub

# Flags whose product stays the same at a resume: a step's samples depend on it.
PROMPTS_PER_STEP_FACTORS = ("batch_size", "gradient_accumulation_steps", "world_size")


@dataclass(frozen=True)
class EntryPoint:
    """A way to train: the name of its command line, its configs and its tasks."""

    name: str
    description: str
    configs: dict[str, type]  # those whose flags it has; the others keep their defaults
    tasks: dict[str, type]
    default_tasks: tuple[str, ...]  # the default of --tasks
    output: str = "--output_dir O"  # as its usage names it
    prefix: str = "rl_train"  # of its errors
    # Whether the program does not train: it ignores training flags in the file of --config
    leaves_out_training: bool = False


GRPO = EntryPoint(
    "python -m rl_train.train",
    "Reinforcement learning by closed cycles; one process per GPU (torchrun).",
    CONFIG_CLASSES,
    TASKS,
    DEFAULT_TASKS,
)


def build_parser(tasks: dict[str, type], program: EntryPoint = GRPO) -> FlagParser:
    """Return the parser of the flags of a run with these `tasks` {name: class}."""
    families = {task.family for task in tasks.values()}
    parser = FlagParser(
        program.name,
        usage=f"{program.name} --model_path M --data_dir D {program.output} [flags below]",
        parents=[tasks_parser(program)],
        description=program.description,
        epilog="The flags of another task are listed by --tasks TASK --help.",
        elsewhere=flags_elsewhere(tasks, program),
    )
    for config_class, title in config_classes(tasks, program).items():
        add_flags(parser, config_class, title, families)
    if program.leaves_out_training:
        instead = "is of training alone, leave it out"
        parser.elsewhere |= {f"--{name}": instead for name in training_flags(parser)}
    return parser


def flags_elsewhere(tasks: dict[str, type], program: EntryPoint) -> dict[str, str]:
    """Return {flag with dashes: what to give instead, or which --tasks have it}.

    Of flags that a run of `tasks` lacks.
    """
    families = {task.family for task in tasks.values()}
    owners = {}  # {flag: names of tasks}
    for name, task in program.tasks.items():
        fields = flag_fields(task.Options)
        for config_class in program.configs.values():
            of_config = flag_fields(config_class)
            fields += [f for f in of_config if f.metadata["family"] == task.family]
        for field in fields:
            for flag in (flag_name(field), *field.metadata["aliases"]):
                owners.setdefault(flag, []).append(name)
    known = {
        flag
        for config_class in config_classes(tasks, program)
        for field in flag_fields(config_class)
        if has_flag(field, families)
        for flag in (flag_name(field), *field.metadata["aliases"])
    }
    elsewhere = {
        f"--{flag}": f"only with --tasks {' or '.join(names)}"
        for flag, names in owners.items()
        if flag not in known
    }
    # Supervised training never had the other removed flags.
    removed = REMOVED if "reward_weights" in known else {"seg_state": REMOVED["seg_state"]}
    for flag, (_, instead) in removed.items():
        elsewhere[f"--{flag}"] = f"no such flag, {instead}"
    return elsewhere


def config_classes(tasks: dict[str, type], program: EntryPoint) -> dict[type, str | None]:
    """Return {class whose fields are flags: their title in --help; None: the class's docstring}."""
    options = {task.Options: f"task {name}" for name, task in tasks.items()}  # may be shared
    return dict.fromkeys(program.configs.values()) | options


def tasks_parser(program: EntryPoint) -> FlagParser:
    """Return the parser of --tasks and --config, on which the other flags depend."""
    parser = FlagParser(program.name, add_help=False)
    group = parser.group("tasks, and flags from a file")
    group.add_argument(
        "--tasks",
        nargs="+",
        default=list(program.default_tasks),
        metavar="TASK",
        help=f"tasks to train, of {', '.join(program.tasks)}, or module:Class of your own "
        "(docs/extending.md); each adds its flags",
    )
    group.add_argument(
        "--config",
        metavar="FILE",
        help="take flags from another run's folder or config.json, or from YAML of `flag: value`; "
        f"those of the command line win. Not taken: {', '.join(NOT_TAKEN)}",
    )
    return parser


def parse(argv: list[str] | None = None, program: EntryPoint = GRPO) -> Config:
    """Return the checked config of a command line; a wrong value exits with one sentence."""
    argv = sys.argv[1:] if argv is None else argv
    first, taken = tasks_parser(program).parse_known_args(argv)[0], None
    try:
        saved = read_saved(first.config) if first.config else None
        names = first.tasks
        if saved and "--tasks" not in {word.partition("=")[0] for word in argv}:
            names = saved.task_names() or names
            taken = Taken(saved.file, ("tasks",), "")
        tasks = {name: load_task(name, program.tasks) for name in names}
        parser = build_parser(tasks, program)
        without_use = training_flags(parser) if program.leaves_out_training else set()
        taken = take_saved(parser, saved, argv, without_use) if saved else None
        args = parser.parse_args(argv)
        del args.config
        return replace(checked(args, tasks, program), taken=taken)
    except ValueError as error:
        raise SystemExit(f"{program.prefix}: {with_origin(str(error), taken)}") from error


def training_flags(parser: FlagParser) -> set[str]:
    """Return the names of the flags of `rl_train.train` that a parser does not have."""
    fields = [field for config in CONFIG_CLASSES.values() for field in flag_fields(config)]
    return {f.name for f in fields} - {action.dest for action in parser._actions}


def with_origin(sentence: str, taken: Taken | None) -> str:
    """Return a sentence about a flag, with the file that the flag's value is of."""
    flag = re.match(r"--(\w+)", sentence)
    is_taken = taken and flag and flag[1] in taken.names
    return f"{sentence} (--{flag[1]} is of --config {taken.file})" if is_taken else sentence


def parse_together(argv: list[str] | None = None, program: EntryPoint = GRPO) -> Config:
    """Call `parse`; an error on one rank ends all. The next collective is `gather_objects`."""
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(argv):
        return parse(argv, program)  # exits on all ranks alike
    try:
        with fail_together():
            return parse(argv, program)
    except RankError as error:
        raise SystemExit(only_local_rank0(f"{program.prefix}: {error}")) from error


def checked(args: argparse.Namespace, tasks: dict[str, type], program: EntryPoint) -> Config:
    """Return the config of parsed flags. Raises ValueError, naming the flag, for a wrong value.

    Args:
        tasks: {name: class} of --tasks.
    """
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)):  # torchrun may start this again
        args.resume = args.resume or "auto"
        if args.resume not in ("latest", "auto"):
            raise ValueError(
                f"--resume {args.resume}: a restart would begin there again, --max_restarts needs "
                "--resume auto"
            )
    # Code reads every config, also those whose flags a program does not have.
    defaults = CONFIG_CLASSES.keys() - program.configs.keys()
    configs = {name: CONFIG_CLASSES[name]() for name in defaults}
    configs |= {name: read_flags(args, config) for name, config in program.configs.items()}
    options = {name: read_flags(args, task.Options) for name, task in tasks.items()}
    # A task of weight 0 is left out: it would only cost time.
    active = {name: option for name, option in options.items() if option.weight > 0}
    config = Config(
        **configs,
        task_classes={name: tasks[name] for name in active},
        tasks=active,
        flags=vars(args),
        declared_in=tuple(config_classes(tasks, program)),
    )
    check_flag_combinations(config, tasks)
    dataset_openers(config.data)  # refuses what a data set does not have
    paths = {name: config.flags.get(name) for name in ("model_path", "sam_path", "data_dir")}
    evaluated = eval_entry(config.data)
    paths["eval_data_dir"] = evaluated and evaluated.folder
    for name, path in paths.items():
        if path is not None and not Path(path).is_dir() and not hub.HUB_NAME.fullmatch(path):
            raise ValueError(f"--{name} {path}: no such folder")
    return config


def check_flag_combinations(config: Config, chosen: dict[str, type]):
    """Raise ValueError for flags that do not go together.

    Args:
        chosen: tasks {name: class} that --tasks names, those of weight 0 too.
    """
    names, families = config.flags["tasks"], sorted({task.family for task in chosen.values()})
    tasks_flag = f"--tasks {' '.join(names)}"
    if len({task.name for task in chosen.values()}) < len(names):
        raise ValueError(f"{tasks_flag}: names a task twice, or two whose metrics have one name")
    if len(families) > 1:
        raise ValueError(f"{tasks_flag}: ask models of {' and '.join(families)}, and a run has one")
    if not config.tasks:
        raise ValueError(f"{tasks_flag}: none of them has a weight above 0")
    for name, needed in config.flags_with("needs").items():
        if config.flags.get(name) and not config.flags.get(needed):
            raise ValueError(f"--{name} {config.flags[name]}: needs --{needed}")
    if config.policy.fsdp:
        check_fsdp(config)
    if weights := config.reward.component_weights:
        if config.reward.reward_only:
            raise ValueError(
                "--reward_weights: not with --reward_only, which leaves the tasks' own components "
                "no weight"
            )
        active = [chosen[name] for name in config.tasks]
        check_weights(weights, {task.name: task.reward_components for task in active})
        if config.reward.gives_weight(ON_TARGET) and not config.data.distractors:
            raise ValueError(
                f"--reward_weights loop1.{ON_TARGET}: needs --distractors, which reads the other "
                "regions"
            )
    if config.reward.ablation_reward != "none":
        check_ablation(config.reward.ablation_reward, [chosen[name].name for name in config.tasks])
    takes_others = ("other", "length")  # rewards by other samples of the batch
    if config.reward.ablation_reward in takes_others and config.flags.get("resample_equal_groups"):
        raise ValueError(
            f"--resample_equal_groups {config.rollout.resample_equal_groups}: not with "
            f"--ablation_reward {config.reward.ablation_reward}, which takes other samples of the "
            "batch, and a round may have one alone"
        )
    if config.reward.ablation_reward == ANY_OBJECT and not config.data.distractors:
        raise ValueError(
            f"--ablation_reward {ANY_OBJECT}: needs --distractors, which reads the other regions"
        )
    if config.reward.ablation_reward == "other" and config.rollout.batch_size < 2:
        raise ValueError(
            "--ablation_reward other: takes the target of another sample of the batch, and "
            f"--batch_size {config.rollout.batch_size} has none"
        )


def check_fsdp(config: Config):
    """Raise ValueError for flags that do not go together with --fsdp."""
    policy = config.policy
    if policy.quantize_base:
        raise ValueError(
            f"--fsdp: not with --quantize_base {policy.quantize_base}, which makes the base fit "
            "one GPU: leave one of them out"
        )
    if not policy.gradient_checkpointing:
        raise ValueError(
            "--fsdp: not with --no-gradient_checkpointing, as a layer's weights do not stay for "
            "its backward: leave one of them out"
        )
    if trained := sorted({"language_model", "vision"} & set(config.rollout.trainable_modules)):
        raise ValueError(
            f"--fsdp: shards layers that are frozen, and --trainable_modules {' '.join(trained)} "
            "trains them: leave one of them out"
        )


def check_output_dir(config: Config, flags: dict[str, Any]):
    """Raise ValueError unless --output_dir is free or holds the run that --resume continues."""
    folder, resume = Path(config.run.output_dir), config.run.resume
    check_writable("--output_dir", folder)
    file = folder / "config.json"
    if file.is_file():
        lock(folder).close()  # refused before a model is loaded
        if not resume:
            raise ValueError(
                f"--output_dir {folder} already holds a run: pass --resume to continue it, "
                "or name another folder"
            )
        check_same(file, config, flags, f"--output_dir {folder}")
    elif resume == "latest":
        raise ValueError(f"--resume: {file} does not exist, there is no run to continue")
    else:
        check_nothing_in_the_way(config)


def check_nothing_in_the_way(config: Config):
    """Raise ValueError if a new run would write over something in --output_dir."""
    folder = Path(config.run.output_dir)
    if name := find_in_the_way(folder, with_checkpoints=config.run.resume != "auto"):
        raise ValueError(
            f"--output_dir {folder} holds {name} and no config.json of a run: name another folder, "
            "or move it away"
        )


def check_same(file: Path, config: Config, flags: dict[str, Any], flag: str):
    """Raise ValueError, beginning with `flag`, if the run of config `file` had other flags.

    Args:
        flags: of `config`, with the number of processes ("world_size") if that is known.
    """
    before, absent = ADDED | read_json(file), object()
    fixed = sorted(set(flags) - {"world_size"} - config.flags_with("free_on_resume").keys())
    differing = [name for name in fixed if before.get(name, absent) != flags[name]]
    pairs = [f"--{n} was {before.get(n, 'not a flag')}, now {flags[n]}" for n in differing]
    pairs += [
        f"--{name} was {before[name]}, which is a flag no more ({instead})"
        for name, (without_effect, instead) in REMOVED.items()
        if before.get(name, without_effect) != without_effect
    ]
    if pairs:
        raise ValueError(
            f"{flag} holds a run of another config: {', '.join(pairs)}; give the earlier values, "
            "or another --output_dir"
        )
    was, now = (
        math.prod(run.get(n, 1) for n in PROMPTS_PER_STEP_FACTORS) for run in (before, flags)
    )
    if "world_size" in before and was != now:
        raise ValueError(
            f"{flag} holds a run of {was} prompts a step, now {now}: --batch_size x "
            "--gradient_accumulation_steps x processes must stay the same"
        )
