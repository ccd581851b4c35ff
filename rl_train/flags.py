"""What makes a field of a dataclass a flag: its type, its help and its place in a parser."""

import argparse
import dataclasses
import math
from types import UnionType

REQUIRED = dataclasses.MISSING


def flag(default=REQUIRED, help: str = "", *, name=None, only_one_of=None, **options):
    """A field that is a flag, of `name` or its own, with more `options` of argparse.

    Of the flags with the same `only_one_of` a command line may give one.
    """
    metadata = dict(help=help, name=name, only_one_of=only_one_of, options=options)
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def number(kind: type, must_be: str = "a finite number", test=lambda value: True):
    """A type for argparse: finite numbers of `kind` that pass `test`, whose words are `must_be`."""

    def parse(text: str):
        value = kind(text)
        if not (math.isfinite(value) and test(value)):
            raise argparse.ArgumentTypeError(f"{text}: must be {must_be}")
        return value

    parse.__name__ = kind.__name__  # for argparse's own messages
    return parse


COUNT = number(int, "at least 1", lambda value: value >= 1)
COUNT_OR_0 = number(int, "at least 0", lambda value: value >= 0)
GROUP = number(int, "at least 2", lambda value: value >= 2)
SEED = number(int, "in [0, 2^63)", lambda value: 0 <= value < 2**63)
POSITIVE = number(float, "above 0", lambda value: value > 0)
WEIGHT = number(float, "at least 0", lambda value: value >= 0)
SHARE = number(float, "in [0, 1]", lambda value: 0 <= value <= 1)
SHARE_BELOW_1 = number(float, "in [0, 1)", lambda value: 0 <= value < 1)


def add_flags(parser: argparse.ArgumentParser, config: type, title: str | None = None):
    """Add a config class's flags to the parser, in a group named by its docstring or `title`."""
    group, exclusive = parser.add_argument_group(title or config.__doc__), {}
    for field in dataclasses.fields(config):
        kind = field.type.__args__[0] if isinstance(field.type, UnionType) else field.type
        if kind is bool:
            options = dict(action=argparse.BooleanOptionalAction if field.default else "store_true")
        elif kind is tuple or kind == list[str]:  # of words, if `options` name no other type
            options = dict(nargs="+", type=str)
        else:
            options = dict(type=number(kind) if kind in (int, float) else kind)
        if field.default is not REQUIRED:
            options["default"] = field.default
        elif field.default_factory is not REQUIRED:
            options["default"] = field.default_factory()
        options["required"] = "default" not in options
        options |= field.metadata["options"]
        name = field.metadata["name"] or field.name
        place, choice = group, field.metadata["only_one_of"]
        if choice:
            place = exclusive[choice] = (
                exclusive.get(choice) or group.add_mutually_exclusive_group()
            )
        place.add_argument(f"--{name}", help=field.metadata["help"], **options)


def read_flags(args: argparse.Namespace, config: type):
    """The config that the parsed flags say."""
    names = {
        field.name: field.metadata["name"] or field.name for field in dataclasses.fields(config)
    }
    return config(**{field: getattr(args, name) for field, name in names.items()})
