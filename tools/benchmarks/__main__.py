"""Measure what a run's speed depends on: prints figures, as JSON last, which --output writes down.

python -m tools.benchmarks COMMAND --help
"""

import json
from pathlib import Path

import torch

from rl_train import cli
from rl_train.config.flags import add_flags, read_flags
from rl_train.utils.command_line import FlagParser, run_program
from tools.benchmarks import data, decode, head, logprob, memory, profile, scale, step, workload

MODULES = (data, decode, head, logprob, step, profile, memory, scale)
COMMANDS = {module.__name__.rpartition(".")[2]: module for module in MODULES}


def main(argv: list[str] | None = None):
    parser = FlagParser(
        prog="python -m tools.benchmarks",
        description=__doc__,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=module.__doc__.splitlines()[0],
            description=module.__doc__,
        )
        command.add_argument("--output", type=Path, help="JSON file for the figures")
        add_flags(command, module.Options)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    module = COMMANDS[args.command]
    options = read_flags(args, module.Options)
    if isinstance(options, workload.Options):
        check_flags(options, commands.choices[args.command])
    measured = module.measure(options)
    if measured is None:  # a rank that has nothing to say
        return
    print(json.dumps(measured, indent=1))
    if args.output:
        args.output.write_text(json.dumps(measured, indent=1))


def check_flags(options: workload.Options, command: FlagParser):
    """End the program now, not after a warm-up, if --flags took what rl_train.train does not."""
    words = {word.partition("=")[0] for word in options.flags}
    if taken := sorted(words & set(command._option_string_actions)):
        command.error(f"{' '.join(taken)}: behind --flags, which takes all: must be before it")
    cli.parse([*workload.base_flags(options), *options.flags])


if __name__ == "__main__":
    run_program(main)
