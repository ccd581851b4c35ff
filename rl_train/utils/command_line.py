"""Command lines of all programs: short errors with the nearest flag, true defaults in --help."""

import argparse
import dataclasses
import difflib
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, TextIO

EXIT_BAD_INPUT = 2  # exit status of a program that ends with a sentence about its input
SEE_HELP = "run with --help for all flags"


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help texts end with "(required)" or the default, unless they state the default themselves."""

    def _get_help_string(self, action: argparse.Action) -> str:
        return f"{action.help or ''}{default_note(action)}"


def default_note(action: argparse.Action) -> str:
    """Return " (required)", " (default: ..)" or "", to follow the help text of a flag."""
    if action.required:
        return " (required)"
    default = action.default
    is_empty = default is None or default is False or default in ([], argparse.SUPPRESS)
    if is_empty or "(default: " in (action.help or ""):
        return ""
    if default is True:
        default = "on"
    elif isinstance(default, (list, tuple)):
        default = " ".join(map(str, default))
    return f" (default: {default})"


class FlagParser(argparse.ArgumentParser):
    """A parser whose errors are a sentence and a hint, raised as SystemExit with that text.

    Args:
        elsewhere: {flag with dashes: reason} of flags that exist, but not in this program's run.
    """

    def __init__(self, *args: Any, elsewhere: dict[str, str] | None = None, **options: Any):
        options = dict(allow_abbrev=False, formatter_class=HelpFormatter) | options
        super().__init__(*args, **options)
        self.elsewhere = elsewhere or {}
        self.fields: list[dataclasses.Field] = []  # whose flags it has, see `config.flags`

    @property
    def short_name(self) -> str:
        """The program's name as its errors begin: rl_train, or that of the tool."""
        module = self.prog.removeprefix("python -m ").removesuffix(".py")
        return "rl_train" if module.startswith("rl_train.") else module.split(".")[-1]

    def group(self, title: str) -> argparse._ArgumentGroup:
        """Return the group of flags with this title, a new one if there is none."""
        groups = {group.title: group for group in self._action_groups}
        return groups.get(title) or self.add_argument_group(title)

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        action = super().add_argument(*names, **options)
        if isinstance(action, argparse.BooleanOptionalAction):
            action.help = options.get("help")  # Python below 3.13 adds a default of its own
        return action

    def parse_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse all words. An unknown flag is an error that names the nearest, missing ones later.

        Words behind "--", or behind a flag that takes all the rest (argparse.REMAINDER), are not
        looked at.
        """
        words = list(sys.argv[1:] if args is None else args)
        self._refuse_unknown(words)
        parsed, rest = self.parse_known_args(words, namespace)
        if rest:
            self.error(f"{' '.join(rest)}: neither a flag nor the value of one")
        return parsed

    def _refuse_unknown(self, words: list[str]):
        """End the program if one of the words is a flag that the parser, or its command, lacks."""
        for action in self._actions:
            if action.nargs == argparse.REMAINDER:
                return
            if isinstance(action, argparse._SubParsersAction):
                commands = [word for word in words if word in action.choices]
                if commands:
                    after = words[words.index(commands[0]) + 1 :]
                    action.choices[commands[0]]._refuse_unknown(after)
                elif not words:
                    self.error(f"one of {', '.join(action.choices)} must be given")
                return
        own = words[: words.index("--")] if "--" in words else words
        flags = [word.partition("=")[0] for word in own if word.startswith("--")]
        unknown = [flag for flag in flags if flag not in self._option_string_actions]
        if unknown:
            self.error("; ".join(map(self.unknown_flag, dict.fromkeys(unknown))))

    def print_help(self, file: TextIO | None = None):
        """Print the help, on a machine's first rank alone."""
        if os.environ.get("LOCAL_RANK", "0") == "0":
            super().print_help(file)

    def unknown_flag(self, flag: str) -> str:
        """Return a sentence about a word that is no flag here, with the nearest one."""
        if flag in self.elsewhere:
            return f"{flag}: {self.elsewhere[flag]}"
        similar = difflib.get_close_matches(flag, sorted(self._option_string_actions), 1)
        advice = f", did you mean {similar[0]}?" if similar else ""
        return f"{flag}: no such flag{advice}"

    def error(self, message: str):
        raise SystemExit(f"{self.short_name}: {plain(message)}\n{SEE_HELP}")


def plain(message: str) -> str:
    """Return an error of argparse as "--flag value: what is wrong"."""
    required = re.fullmatch(r"the following arguments are required: (.*)", message)
    if required:
        names = [name.split("/")[0] for name in required[1].split(", ")]
        return f"{' and '.join(names)} must be given"
    of_flag = re.fullmatch(r"argument ([^/:\s]+)[^:]*: (.*)", message, re.DOTALL)
    if not of_flag:
        return message
    flag, problem = of_flag.groups()
    other = re.fullmatch(r"not allowed with argument ([^/]+).*", problem)
    if other:
        return f"{flag}: not together with {other[1]}"
    choice = re.fullmatch(r"invalid choice: '?(.*?)'? \(choose from (.*)\)", problem)
    if choice:
        allowed = choice[2].replace("'", "")
        return f"{flag} {choice[1]}: must be one of {allowed}"
    by_type = re.fullmatch(r"invalid (\w+) value: '(.*)'", problem, re.DOTALL)
    if by_type:
        kinds = dict(int="an integer", float="a number")
        return f"{flag} {by_type[2]}: must be {kinds.get(by_type[1], by_type[1])}"
    if problem.startswith("expected "):
        return f"{flag}: {problem.replace('argument', 'value')}"
    return f"{flag} {problem}"


def run_program(main: Callable[[], Any]):
    """Run `main`; if it exits with a text, print it and exit with status 2."""
    try:
        main()
    except SystemExit as ending:
        if not isinstance(ending.code, str):
            raise
        print(ending.code, file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
