"""Train on a demo, then print the run's gains beside those of cheap causes: what the launcher runs.

python -m tools.demo.train [flags of rl_train.train]
"""

from pathlib import Path

from rl_train import cli
from rl_train.train import main as run_training
from rl_train.utils.command_line import run_program
from tools.demo.rivals import print_rivals


def main(argv: list[str] | None = None):
    """Train as the command line `argv` says, and compare."""
    run_training(argv)
    print_rivals(Path(cli.parse(argv).run.output_dir))


if __name__ == "__main__":
    run_program(main)
