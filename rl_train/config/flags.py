"""Flags as fields of dataclasses: a flag's declaration carries everything that is known of it.

Code that treats some flags specially (a resume, the comparison of ranks, the model card, the advice
when memory is used up) finds them with `flags_with`.
"""

import argparse
import dataclasses
import difflib
import math
from collections.abc import Callable, Iterable
from types import UnionType
from typing import Any

REQUIRED = dataclasses.MISSING


def flag(
    default: Any = REQUIRED,
    help: str = "",
    *,
    name: str | None = None,
    aliases: tuple[str, ...] = (),
    only_one_of: str | None = None,
    needs: str | None = None,
    free_on_resume: bool = False,
    may_differ_by_rank: bool = False,
    out_of_model_card: bool = False,
    lowers_memory_of: tuple[str, ...] = (),
    **options: Any,
) -> Any:
    """Declare a field that is a flag.

    Args:
        name: of the flag, if it is not the field's.
        aliases: names that other projects give to a flag of the same meaning (without dashes).
        only_one_of: group of flags of which a command line may give one.
        needs: flag without which this one has no effect, so that it is refused.
        free_on_resume: a resumed run may have another value.
        may_differ_by_rank: each rank may have its own value, since machines need not share a disk.
        out_of_model_card: the settings that a model card lists leave it out.
        lowers_memory_of: phases of a step that take less memory at a lower value.
        options: more options of argparse's `add_argument`.
    """
    metadata = dict(
        help=help,
        name=name,
        aliases=aliases,
        only_one_of=only_one_of,
        needs=needs,
        free_on_resume=free_on_resume,
        may_differ_by_rank=may_differ_by_rank,
        out_of_model_card=out_of_model_card,
        lowers_memory_of=lowers_memory_of,
        options=options,
    )
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def number(
    number_type: type[int] | type[float],
    must_be: str = "a finite number",
    test: Callable[[float], bool] = lambda value: True,
) -> Callable[[str], float]:
    """Return a type for argparse: finite numbers that pass `test`, which `must_be` describes."""

    def parse(text: str) -> float:
        """Return the number of a word. Raises ArgumentTypeError for another one."""
        value = number_type(text)
        if not (math.isfinite(value) and test(value)):
            raise argparse.ArgumentTypeError(f"{text}: must be {must_be}")
        return value

    parse.__name__ = number_type.__name__  # for argparse's own messages
    return parse


COUNT = number(int, "at least 1", lambda value: value >= 1)
COUNT_OR_0 = number(int, "at least 0", lambda value: value >= 0)
AT_LEAST_2 = number(int, "at least 2", lambda value: value >= 2)
SEED = number(int, "in [0, 2^63)", lambda value: 0 <= value < 2**63)
POSITIVE = number(float, "above 0", lambda value: value > 0)
WEIGHT = number(float, "at least 0", lambda value: value >= 0)
FRACTION = number(float, "in [0, 1]", lambda value: 0 <= value <= 1)
FRACTION_BELOW_1 = number(float, "in [0, 1)", lambda value: 0 <= value < 1)


# A declaration, read


def flags_with(attribute: str, configs: Iterable[type]) -> dict[str, Any]:
    """Return {flag: value} of the config classes' flags that declare `attribute`, in order."""
    fields = [field for config in configs for field in dataclasses.fields(config)]
    return {flag_name(field): value for field in fields if (value := field.metadata[attribute])}


def flag_name(field: dataclasses.Field) -> str:
    """Return the flag's name for a config's field."""
    return field.metadata["name"] or field.name


# The parser


def add_flags(parser: argparse.ArgumentParser, config: type, title: str | None = None):
    """Add a config class's flags to the parser, in a group named by its docstring or `title`."""
    groups = {None: parser.add_argument_group(title or config.__doc__)}
    for field in dataclasses.fields(config):
        group = field.metadata["only_one_of"]
        if group not in groups:
            groups[group] = groups[None].add_mutually_exclusive_group()
        names = [flag_name(field), *field.metadata["aliases"]]  # the first is where its value goes
        groups[group].add_argument(*[f"--{name}" for name in names], **_argparse_options(field))


def _argparse_options(field: dataclasses.Field) -> dict[str, Any]:
    """Return the keywords of argparse's `add_argument` for a flag."""
    value_type = field.type.__args__[0] if isinstance(field.type, UnionType) else field.type
    is_list = field.default_factory is not REQUIRED
    default = field.default_factory() if is_list else field.default
    if value_type is bool:
        options = dict(action=argparse.BooleanOptionalAction if default else "store_true")
    elif value_type is tuple or value_type == list[str]:
        # Of words, if the declaration names no other type.
        options = dict(nargs="+", type=str)
    else:
        options = dict(type=number(value_type) if value_type in (int, float) else value_type)
    options |= dict(required=True) if default is REQUIRED else dict(default=default)
    needs = f"; needs --{field.metadata['needs']}" if field.metadata["needs"] else ""
    return options | dict(help=field.metadata["help"] + needs) | field.metadata["options"]


def parse_all(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """Parse a command line. Raises ValueError, with similar flags' names, for an unknown word."""
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        known = sorted(parser._option_string_actions)  # with the --no- forms
        flags = [word.partition("=")[0] for word in unknown if word.startswith("--")]
        similar = [near for flag in flags for near in difflib.get_close_matches(flag, known, 1)]
        advice = f"; did you mean {', '.join(similar)}?" if similar else ""
        raise ValueError(f"unrecognized arguments: {' '.join(unknown)}{advice}")
    return args


def read_flags(args: argparse.Namespace, config: type) -> Any:
    """Return the config class filled with the parsed flags."""
    fields = dataclasses.fields(config)
    return config(**{field.name: getattr(args, flag_name(field)) for field in fields})
