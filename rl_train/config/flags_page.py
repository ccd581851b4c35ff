"""Print docs/flags.md: every flag of both trainings, from its declaration, and every curve.

python -m rl_train.config.flags_page > docs/flags.md
"""

import argparse

from rl_train.cli import GRPO, EntryPoint, build_parser, config_classes
from rl_train.config.curves_page import curves_table
from rl_train.config.flags import flags_with
from rl_train.sft import SFT
from rl_train.utils.command_line import default_note, run_program

HEAD = """# Flags and curves

What this page is for: to look up a flag, its other names and its default, or a [curve](#curves).
This page is generated, and a test compares it with the code.

`python -m rl_train.train --help` prints the flags of a run, which depend on its `--tasks`; a flag
of another task is an error. Names in brackets are other names of the same flag: TRL's, or those of
the earlier scripts. "resume": a run that is continued may be given another value.
"""
COLUMNS = "| flag | default | what it does | resume |\n|---|---|---|---|"


def render_page() -> str:
    """Return the page's text."""
    rows_of_grpo = rows(GRPO)
    known = {row for group in rows_of_grpo.values() for row in group}
    rows_of_sft = {
        title: [row for row in group if row not in known] for title, group in rows(SFT).items()
    }
    return "\n".join(
        [
            HEAD,
            "## Reinforcement learning: `python -m rl_train.train`",
            *tables(rows_of_grpo),
            "## Supervised training: `python -m rl_train.sft`",
            "It has the flags above but those of rollouts, rewards, loss and teacher, and these:\n",
            *tables(rows_of_sft),
            curves_table(),
        ]
    )


def tables(rows_of_group: dict[str, list[str]]) -> list[str]:
    """Return a heading and a table for each group that has rows."""
    return [
        "\n".join([f"### {title}\n", COLUMNS, *rows, ""])
        for title, rows in rows_of_group.items()
        if rows
    ]


def rows(program: EntryPoint) -> dict[str, list[str]]:
    """Return {title of a group of flags: a row of the table for each}, of all tasks."""
    parser = build_parser(program.tasks, program)
    free_on_resume = flags_with("free_on_resume", config_classes(program.tasks, program))
    return {
        group.title[0].upper() + group.title[1:]: [
            row(action, action.dest in free_on_resume) for action in group._group_actions
        ]
        for group in parser._action_groups
        if group.title != "options"  # --help
    }


def row(action: argparse.Action, is_free: bool) -> str:
    """Return a flag's row: names, default, help, whether a resumed run may change it."""
    name, *others = [f"`{name}`" for name in action.option_strings]
    names = f"{name} ({', '.join(others)})" if others else name
    if action.choices:
        names += f" {{{', '.join(map(str, action.choices))}}}"
    words, _, default = action.help.partition(" (default: ")
    default = default.removesuffix(")") or default_note(action)[2:-1].removeprefix("default: ")
    cells = [names, default or ("off" if action.nargs == 0 else ""), words]
    cells.append("yes" if is_free else "")
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    run_program(lambda: print(render_page(), end=""))
