"""Flags as fields of dataclasses: a flag's declaration carries everything that is known of it.

Code that treats some flags specially (a resume, the comparison of ranks, the model card, the advice
when memory is used up) finds them with `flags_with`.
"""

import argparse
import dataclasses
import math
from collections.abc import Callable, Collection, Iterable
from types import UnionType
from typing import Any

from rl_train.utils.command_line import FlagParser

REQUIRED = dataclasses.MISSING
FAMILY_TITLES = {"sa2va": "Sa2VA", "qwen_vl": "Qwen-VL"}  # as `policies.registry.FAMILIES`


def flag(
    default: Any = REQUIRED,
    help: str = "",
    *,
    name: str | None = None,
    default_is: str | None = None,
    family: str | None = None,
    aliases: tuple[str, ...] = (),
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
        default_is: what an absent flag means, in words, where the default is None or empty.
        family: the only family of models whose runs have the flag; see `policies.registry`.
        aliases: names that other projects give to a flag of the same meaning (without dashes).
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
        default_is=default_is,
        family=family,
        aliases=aliases,
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

    kind = "an integer" if number_type is int else "a number"
    must_be = must_be if "number" in must_be else f"{kind} {must_be}"

    def parse(text: str) -> float:
        """Return the number of a word. Raises ArgumentTypeError for another one."""
        try:
            value = number_type(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text}: must be {must_be}") from error
        if not (math.isfinite(value) and test(value)):
            raise argparse.ArgumentTypeError(f"{text}: must be {must_be}")
        return value

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
    fields = [field for config in configs for field in flag_fields(config)]
    return {flag_name(field): value for field in fields if (value := field.metadata[attribute])}


def flag_fields(config: type) -> list[dataclasses.Field]:
    """Return the config class's fields that are flags; a field without a declaration is none."""
    return [field for field in dataclasses.fields(config) if "help" in field.metadata]


def flag_name(field: dataclasses.Field) -> str:
    """Return the flag's name for a config's field."""
    return field.metadata["name"] or field.name


# The parser


def has_flag(field: dataclasses.Field, families: Collection[str] | None) -> bool:
    """Return whether runs with models of these families have the field's flag; None: of any."""
    family = field.metadata["family"]
    return family is None or families is None or family in families


def add_flags(
    parser: FlagParser,
    config: type,
    title: str | None = None,
    families: Collection[str] | None = None,
):
    """Add a config class's flags to the parser.

    Their group is named by `title`, or by the class's docstring. The flags of one family of models
    have a group of their own, whichever class they are of.

    Args:
        families: those of the run's models; flags of others are left out. None: all.
    """
    groups = {None: parser.group(title or config.__doc__)}
    for field in flag_fields(config):
        # Options of two tasks may inherit a field: it is one flag.
        if not has_flag(field, families) or any(field is other for other in parser.fields):
            continue
        parser.fields.append(field)
        family = field.metadata["family"]
        if family not in groups:
            groups[family] = parser.group(f"{FAMILY_TITLES.get(family, family)} only")
        names = [flag_name(field), *field.metadata["aliases"]]  # the first is where its value goes
        action = groups[family].add_argument(
            *[f"--{name}" for name in names], **_argparse_options(field)
        )
        action.help = help_text(
            field
        )  # without the default that Python below 3.13 adds to a bool's


def help_text(field: dataclasses.Field) -> str:
    """Return the help of a flag: what it does, what it needs, its default if that is in words."""
    metadata = field.metadata
    needs = f"; needs --{metadata['needs']}" if metadata["needs"] else ""
    default = f" (default: {metadata['default_is']})" if metadata["default_is"] else ""
    return f"{metadata['help']}{needs}{default}"


def _argparse_options(field: dataclasses.Field) -> dict[str, Any]:
    """Return the keywords of argparse's `add_argument` for a flag, without its help."""
    value_type = field.type.__args__[0] if isinstance(field.type, UnionType) else field.type
    is_list = field.default_factory is not REQUIRED
    default = field.default_factory() if is_list else field.default
    if value_type is bool:
        options = dict(action=argparse.BooleanOptionalAction if default else "store_true")
    elif value_type is tuple or value_type == list[str]:
        # Of words, if the declaration names no other type.
        options = dict(nargs="+", type=str)
    else:
        is_number = value_type in (int, float)
        options = dict(type=number(value_type) if is_number else value_type)
        if is_number and "choices" not in field.metadata["options"]:
            options["metavar"] = "N" if value_type is int else "X"
    options |= dict(required=True) if default is REQUIRED else dict(default=default)
    return options | field.metadata["options"]


def read_flags(args: argparse.Namespace, config: type) -> Any:
    """Return the config class filled with the parsed flags; those that a run lacks by default."""
    values = vars(args)
    names = {field.name: flag_name(field) for field in flag_fields(config)}
    return config(**{name: values[flag] for name, flag in names.items() if flag in values})
