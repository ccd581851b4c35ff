"""The command line of a run: from flags to a `Config`, and whose output folder it is."""

import argparse
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from rl_train import hub
from rl_train.checkpoint import list_checkpoints
from rl_train.config import PARTS, Config
from rl_train.data.opening import readers
from rl_train.distributed import (
    LAUNCHED,
    SENTENCE,
    Refused,
    once_a_machine,
    restarted,
    stop_together,
)
from rl_train.files import check_writable, claim, read_json
from rl_train.flags import add_flags, read_flags
from rl_train.tasks import CYCLES, TASKS, load_task
from rl_train.tasks.cycle_measures import check_choosing
from rl_train.translate_flags import translate
from rl_train.wandb_mirror import check_project

# Flags that may differ when a run is resumed; all others must be those that it was started with.
FREE_ON_RESUME = {
    *("resume", "output_dir", "model_path", "sam_path", "data_dir", "eval_data_dir"),
    *("num_workers", "image_root"),
    *("save_steps", "save_total_limit", "eval_steps", "micro_batch_size", "shard_base"),
    *("gradient_checkpointing", "llm_judge_base_url", "max_judge_failures", "max_bad_fraction"),
    *("batch_size", "gradient_accumulation_steps", "world_size", "attributes", "other_regions"),
    *("wandb", "export_final"),
}
PROMPTS_PER_STEP = ("batch_size", "gradient_accumulation_steps", "world_size")  # fixed product


@dataclass(frozen=True)
class Program:
    """A way to train, by its command line."""

    name: str
    description: str
    parts: dict[str, type]  # configs whose flags it has; of others the defaults hold
    tasks: dict[str, type]
    usual: tuple[str, ...]  # tasks, if --tasks names none


REINFORCE = Program(
    "python -m rl_train.train",
    "Reinforcement learning by closed cycles; one process per GPU (torchrun).",
    PARTS,
    TASKS,
    CYCLES,
)


def run_program(main):
    """Run `main`; print the sentence that it may end with, and exit with status 2."""
    try:
        main()
    except SystemExit as stopped:
        if not isinstance(stopped.code, str):
            raise
        sys.exit(print(stopped.code, file=sys.stderr) or SENTENCE)


def build_parser(tasks: dict[str, type], program=REINFORCE) -> argparse.ArgumentParser:
    """The parser of all flags, those of the `tasks` {name: class} among them."""
    how = dict(formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False)
    epilog = "Flags of TRL's GRPOConfig mean the same or are refused by name: docs/coming_from.md."
    parser = argparse.ArgumentParser(
        program.name, description=program.description, epilog=epilog, **how
    )
    add_tasks_flag(parser, program)
    for part in program.parts.values():
        add_flags(parser, part)
    options = {task.Options: name for name, task in tasks.items()}  # one may inherit another's
    for kind, name in options.items():
        add_flags(parser, kind, f"task {name}")
    return parser


def add_tasks_flag(parser, program: Program):
    known = f"of {', '.join(program.tasks)}, or module:Class of your own (docs/adding_a_task.md)"
    usual = list(program.usual)
    parser.add_argument("--tasks", nargs="+", default=usual, metavar="TASK", help=known)


def parse(argv=None, program=REINFORCE) -> Config:
    """The checked config of a command line; a wrong value ends the program with one sentence."""
    parser = argparse.ArgumentParser(program.name, add_help=False, allow_abbrev=False)
    add_tasks_flag(parser, program)
    argv = sys.argv[1:] if argv is None else argv
    names = parser.parse_known_args(argv)[0].tasks
    try:
        tasks = program.tasks | {name: load_task(name, program.tasks) for name in names}
        parser = build_parser(tasks, program)
        args = parser.parse_args(translate(argv, known_flags(parser)))
        return checked(args, {name: tasks[name] for name in names}, program)
    except (ValueError, argparse.ArgumentError) as error:
        parser.error(str(error))


def known_flags(parser: argparse.ArgumentParser) -> set[str]:
    """All flags of a parser, with both forms of those that can be switched off."""
    return {flag for action in parser._actions for flag in action.option_strings}


def parse_together(argv=None, program=REINFORCE) -> Config:
    """`parse`, of which a fault on one rank ends all. The next collective is `gather_objects`."""
    try:
        with stop_together():
            return parse(argv, program)
    except Refused as error:
        raise SystemExit(once_a_machine(f"rl_train: {error}")) from error


def checked(args: argparse.Namespace, tasks: dict[str, type], program=REINFORCE) -> Config:
    """The config of parsed flags. Raises ValueError, naming the flag, for a wrong value."""
    chosen = f"--tasks {' '.join(args.tasks)}"
    if has_begun(args.output_dir) and (
        args.resume in (None, "latest") or list_checkpoints(args.output_dir)
    ):
        args.resume = "auto"  # not from a folder that lies before what has been done since
    parts = {name: read_flags(args, part) for name, part in program.parts.items()}
    parts |= {name: part() for name, part in PARTS.items() if name not in parts}
    options = {name: read_flags(args, task.Options) for name, task in tasks.items()}
    active = {name: option for name, option in options.items() if option.weight > 0}
    if len({task.name for task in tasks.values()}) < len(args.tasks):
        raise ValueError(f"{chosen}: names a task twice, or two whose curves have one name")
    if len(families := {task.family for task in tasks.values()}) > 1:
        asked = " and ".join(sorted(families))
        raise ValueError(f"{chosen}: ask models of {asked}, and a run has one")
    if not active:
        raise ValueError(f"{chosen}: none of them has a weight above 0")
    if program is REINFORCE:
        check_rewards(args)
    if set(args.tasks) <= set(program.tasks):  # what others measure is known when they have
        check_choosing(args.best_by, args.other_regions, args.attributes)
    for name in ("eval_dataset", "eval_parts", "eval_split"):
        if getattr(args, name) and not args.eval_data_dir:
            raise ValueError(f"--{name} {getattr(args, name)}: needs --eval_data_dir")
    readers(parts["data"])  # refuses what a data set does not have
    if args.wandb is not None:
        check_project(args.wandb)
    for name in ("model_path", "sam_path", "data_dir", "eval_data_dir"):
        path = getattr(args, name)
        on_hub = path and hub.NAME.fullmatch(path)
        if path is not None and not Path(path).is_dir() and not on_hub:
            raise ValueError(f"--{name} {path}: no such folder")
    kinds = {name: tasks[name] for name in active}
    return Config(**parts, kinds=kinds, tasks=active, flags=vars(args))


def check_rewards(args: argparse.Namespace):
    """Raise ValueError for flags of rewards and their loss that do not go together."""
    if args.use_llm_judge_loop2 and not args.use_llm_judge:
        raise ValueError("--use_llm_judge_loop2: needs --use_llm_judge, which makes the judge")
    if args.control == "other" and args.batch_size < 2:
        raise ValueError(
            "--control other: takes the target of another sample of the batch, and --batch_size "
            f"{args.batch_size} has none"
        )
    longest = args.max_completion_length
    for name in ("overlong_buffer", "target_length"):
        if (tokens := getattr(args, name)) > longest:
            raise ValueError(f"--{name} {tokens}: above --max_completion_length {longest}")
    if args.target_length and not args.length_weight:
        raise ValueError(f"--target_length {args.target_length}: needs a --length_weight above 0")
    if args.skip_zero_variance and args.shard_base:
        raise ValueError(
            "--skip_zero_variance: not with --shard_base, whose ranks make as many forwards each"
        )


# The output folder


def has_begun(output_dir) -> bool:
    """Whether this process is a restart, and what it takes the place of had begun its run there."""
    config = Path(output_dir) / "config.json"  # written anew whenever a run begins or goes on
    launched = float(os.environ.get(LAUNCHED, 0))
    return restarted() and config.is_file() and config.stat().st_mtime >= launched


def check_output_dir(config: Config, flags: dict):
    """Raise ValueError unless --output_dir is free or holds the run that --resume continues."""
    folder, resume = Path(config.run.output_dir), config.run.resume
    check_writable("--output_dir", folder)
    file = folder / "config.json"
    if file.is_file():
        claim(folder).close()  # refused before a model is loaded
        if not resume:
            raise ValueError(
                f"--output_dir {folder} already holds a run: pass --resume, or another"
            )
        check_same(file, flags, f"--output_dir {folder}")
    elif resume == "latest":
        raise ValueError(f"--resume: {file} does not exist, there is no run to continue")


def check_same(file: Path, flags: dict, place: str):
    """Raise ValueError, beginning with `place`, if the run of config `file` had other flags."""
    before = read_json(file)
    absent = object()
    fixed = sorted(set(flags) - FREE_ON_RESUME)
    differing = [name for name in fixed if before.get(name, absent) != flags[name]]
    if differing:
        pairs = [f"--{n} was {before.get(n, 'not a flag')}, now {flags[n]}" for n in differing]
        raise ValueError(f"{place} holds a run of another config: {', '.join(pairs)}")
    was, now = (math.prod(run.get(n, 1) for n in PROMPTS_PER_STEP) for run in (before, flags))
    if "world_size" in before and was != now:
        raise ValueError(
            f"{place} holds a run of {was} prompts a step, now {now}: --batch_size x "
            "--gradient_accumulation_steps x processes must stay the same"
        )
