"""--config FILE: flags of another run, or of a file that the user wrote, below the command line's.

JSON as in a run's config.json, or YAML of `flag: value`.
"""

import argparse
import json
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rl_train.utils.command_line import FlagParser, plain

# Keys that are of one run alone: its folder, how it was continued, its number of processes.
NOT_TAKEN = ("output_dir", "resume", "allow_changed_data", "world_size")

# Flags of earlier versions: {name: (value without effect, what to give instead)}.
REMOVED = {
    "likelihood_weight": (
        0.0,
        "give weights such as --reward_weights loop2.meteor=0.5 loop2.likelihood=0.5",
    ),
    "use_llm_judge_loop2": (
        False,
        "give weights such as --reward_weights loop2.meteor=0.25 loop2.judge=0.75",
    ),
    "ema_half_life": (0.1, "give --ema_decay, the decay per update"),
    "entropy_coef": (0.0, "a larger --kl_coef or --temperature keeps answers varied"),
    "seg_state": (None, "add the key seg_state to the model's config.json"),
}
# {flag: what runs did before there was the flag}
ADDED = {"quantize_base": None}


@dataclass(frozen=True)
class SavedFlags:
    """Flags in a file: {name of a flag: value}."""

    file: Path
    values: dict[str, Any]

    def task_names(self) -> list[str] | None:
        """Return the value of `tasks`, None if there is none. Raises ValueError for another."""
        names = self.values.get("tasks")
        names = [names] if isinstance(names, str) else names
        if names is None or isinstance(names, list) and all(isinstance(n, str) for n in names):
            return names
        raise ValueError(f"--config {self.file}: --tasks {names}: must be names of tasks")


@dataclass(frozen=True)
class Taken:
    """Flags that a command line takes from a file.

    Attributes:
        names: flags whose values are the file's.
        sentence: how many these are, and what was left out.
    """

    file: Path
    names: tuple[str, ...]
    sentence: str


def read_saved(path: str) -> SavedFlags:
    """Read a run's folder, its config.json, or YAML. Raises ValueError that names the file."""
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        text = file.read_text()
        if file.suffix == ".json":
            pairs = json.loads(text, object_pairs_hook=lambda pairs: pairs)
            values = json.loads(text)
            keys = [key for key, _ in pairs] if isinstance(values, dict) else []
        else:
            values, node = yaml.safe_load(text), yaml.compose(text, yaml.SafeLoader)
            keys = [key.value for key, _ in node.value] if isinstance(values, dict) else []
    except OSError as error:
        raise ValueError(f"--config {file}: {error.strerror}") from error
    except (ValueError, yaml.YAMLError) as error:
        problem = " ".join(str(error).split())
        raise ValueError(f"--config {file}: neither JSON (*.json) nor YAML: {problem}") from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ValueError(
            f"--config {file}: must hold flags and their values, as a run's config.json"
        )
    if twice := [key for key in values if keys.count(key) > 1]:
        raise ValueError(f"--config {file}: --{twice[0]} is given twice")
    return SavedFlags(file, values)


def given_flags(parser: FlagParser, argv: Sequence[str]) -> set[str]:
    """Return the flags on a command line."""
    words = {word.partition("=")[0] for word in argv}
    return {a.dest for name, a in parser._option_string_actions.items() if name in words}


def take_saved(
    parser: FlagParser, saved: SavedFlags, argv: Sequence[str], without_use: Container[str] = ()
) -> Taken:
    """Let a file's values be the defaults of the parser, where the command line has no other.

    Args:
        without_use: flags of a run that this program does not have, and that it leaves out.

    Raises:
        ValueError: a key is no flag, or a value is wrong; names the file and the flag.
    """
    actions = {
        name.removeprefix("--"): action
        for name, action in parser._option_string_actions.items()
        if action.dest not in ("help", "config") and not name.startswith("--no-")
    }
    given = given_flags(parser, argv)
    values, keys, left_out, faults = {}, {}, [], []
    num_without_use = 0
    for key, value in saved.values.items():
        if key in NOT_TAKEN:
            left_out += [f"{key} {value}"] if value not in (None, False) else []
        elif key in actions:
            action = actions[key]
            if action.dest in values:
                faults.append(f"--{key}: the same flag as --{keys[action.dest]}, give one of them")
            keys[action.dest] = key
            try:
                values[action.dest] = parse_value(parser, action, value)
            except (argparse.ArgumentError, ValueError) as error:
                faults.append(plain(str(error)))
        elif key in REMOVED and value == REMOVED[key][0]:
            continue
        elif key in without_use:
            num_without_use += 1
        elif "tasks" in given and f"--{key}" in parser.elsewhere and key not in REMOVED:
            left_out.append(f"{key} (of another task)")
        elif key.removeprefix("no-") in actions:
            faults.append(f"--{key}: write {key.removeprefix('no-')}: false")
        else:
            faults.append(parser.unknown_flag(f"--{key}"))
    if faults:
        raise ValueError(f"--config {saved.file}: {'; '.join(faults)}")
    taken = {name: value for name, value in values.items() if name not in given}
    for action in parser._actions:
        action.required = action.required and action.dest not in taken
    parser.set_defaults(**taken)
    replaced = [f"--{name}" for name in values if name in given]
    sentence = f"--config {saved.file}: {len(taken)} flags are its"
    sentence += f"; of the command line: {', '.join(replaced)}" if replaced else ""
    sentence += f"; not taken: {', '.join(left_out)}" if left_out else ""
    sentence += f"; {num_without_use} of training alone are left out" if num_without_use else ""
    return Taken(saved.file, tuple(taken), sentence)


def parse_value(parser: FlagParser, action: argparse.Action, value: Any) -> Any:
    """Return what a flag with this value has after parsing.

    Raises:
        ValueError, argparse.ArgumentError: it cannot have the value; names the flag.
    """
    flag = action.option_strings[0]
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ValueError(f"{flag} {value}: must be true or false")
        return value
    if action.nargs == "?" and isinstance(value, bool):
        return action.const if value else action.default
    if value is None and action.default is None and not action.required or value == []:
        return action.default
    words = value if isinstance(value, list) and action.nargs == "+" else [value]
    # A number may be quoted: YAML reads 1e-4, without a dot, as text.
    if not all(type(word) in (str, int, float) for word in words):
        raise ValueError(f"{flag} {json.dumps(value, default=str)}: must be text or a number")
    return parser._get_values(action, list(map(str, words)))
