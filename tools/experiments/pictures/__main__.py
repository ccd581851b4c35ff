"""A lab of pictures and words that nobody here made: cut-outs by several artists, on wallpapers.

    python -m tools.experiments.pictures fetch --output_dir LIBRARY
    python -m tools.experiments.pictures subset --library LIBRARY --output_dir SMALLER
    python -m tools.experiments.pictures scenes --library LIBRARY --output_dir D
    python -m tools.experiments.pictures scenes --cutouts FOLDER --backgrounds FOLDER --output_dir D
    python -m tools.experiments.pictures report --data_dir D [--output sheet.png]

fetch: downloads the packages by npm, apt-get and pip, renders them, and names their licences.
subset: writes a smaller library, of concepts whose words are in other labels too.
scenes: writes data sets in the layout of Grasp-Any-Region, to train on with --data_dir D/train.
report: says what is in them, and draws twelve scenes. Each command goes on where it stopped.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from rl_train.config.flags import COUNT, COUNT_OR_0, FRACTION, SEED, number
from rl_train.utils.command_line import FlagParser, run_program
from rl_train.utils.io import CannotWrite, check_writable
from tools.demo.new_folder import complete_or_absent
from tools.experiments.pictures.concepts import (
    read_library,
    read_own,
    with_hypernyms,
    write_subset,
)
from tools.experiments.pictures.dataset import Settings, write_datasets
from tools.experiments.pictures.fetch import fetch
from tools.experiments.pictures.packages import PACKAGES
from tools.experiments.pictures.report import report

IMAGE_SIZE = number(int, "at least 96", lambda value: value >= 96)  # the smallest object: 8 pixels


def build_parser() -> FlagParser:
    parser = FlagParser(prog="python -m tools.experiments.pictures", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    library = commands.add_parser("fetch", help="make the library of cut-outs")
    library.add_argument("--output_dir", required=True, type=Path, help="folder of the library")
    library.add_argument(
        "--package_dirs",
        nargs="+",
        default=[],
        metavar="NAME=FOLDER",
        help=f"packages that are there unpacked, of {', '.join(p.name for p in PACKAGES)}",
    )
    subset = commands.add_parser("subset", help="make a smaller library of one")
    subset.add_argument("--library", required=True, type=Path, help="folder that fetch wrote")
    subset.add_argument("--num_concepts", type=COUNT, default=60, help="that are kept")
    subset.add_argument("--side", type=COUNT, default=160, help="pixels of its largest cut-outs")
    subset.add_argument("--output_dir", required=True, type=Path, help="folder of the new library")
    scenes = commands.add_parser("scenes", help="draw scenes and write data sets")
    add = scenes.add_argument
    source = scenes.add_mutually_exclusive_group(required=True)
    source.add_argument("--library", type=Path, help="folder that fetch wrote")
    source.add_argument("--cutouts", type=Path, help="folder of your own PNG files with alpha")
    add("--names", type=Path, help="CSV file for --cutouts: file,name[,tags][,artist]")
    add(
        "--backgrounds",
        type=Path,
        help="folder of wallpapers (default: the library's; must be given with --cutouts)",
    )
    add("--output_dir", required=True, type=Path, help="folder of the data sets")
    add("--wording", choices=["label", "tag"], default="label", help="words of the captions")
    add(
        "--caption_fraction",
        type=FRACTION,
        default=0.1,
        help="fraction of the training regions that have captions for supervision",
    )
    add("--num_train", type=COUNT, default=2000, help="scenes of the split train")
    add("--num_artist_train", type=COUNT_OR_0, default=1000, help="scenes of artist_train")
    add("--num_eval", type=COUNT_OR_0, default=200, help="scenes of each split of evaluation")
    add("--image_size", type=IMAGE_SIZE, default=448, help="pixels of a scene's side")
    add("--seed", type=SEED, default=0, help="of the scenes; the splits do not depend on it")
    add("--num_workers", type=COUNT_OR_0, default=0, help="processes that draw")
    shown = commands.add_parser("report", help="say what the data sets hold")
    shown.add_argument("--data_dir", required=True, type=Path, help="folder that scenes wrote")
    shown.add_argument("--library", type=Path, help="folder that fetch wrote, for its licences")
    shown.add_argument("--output", type=Path, help="PNG file for twelve scenes")
    return parser


def run_fetch(args: argparse.Namespace):
    pairs = [entry.partition("=") for entry in args.package_dirs]
    for name, sign, folder in pairs:
        if not sign or not folder:
            raise ValueError(f"--package_dirs {name}: must be NAME=FOLDER")
    check_writable("--output_dir", args.output_dir)
    fetch(args.output_dir, {name: Path(folder) for name, _, folder in pairs})


def run_subset(args: argparse.Namespace):
    check_writable("--output_dir", args.output_dir)
    if args.output_dir.exists():
        raise ValueError(f"--output_dir {args.output_dir}: is there already, name another folder")
    with complete_or_absent(args.output_dir) as unfinished:
        write_subset(args.library, args.num_concepts, args.side, unfinished)


def run_scenes(args: argparse.Namespace):
    if args.names and not args.cutouts:
        raise ValueError(f"--names {args.names}: only with --cutouts")
    if args.library:
        root, concepts = args.library, read_library(args.library)
    else:
        root, concepts = args.cutouts, with_hypernyms(read_own(args.cutouts, args.names))
    backgrounds = args.backgrounds or (args.library and args.library / "backgrounds")
    if not backgrounds or not backgrounds.is_dir():
        raise ValueError(f"--backgrounds {backgrounds}: must be a folder of wallpapers")
    check_writable("--output_dir", args.output_dir)
    settings = Settings(
        source=str(root.resolve()),
        backgrounds=str(backgrounds.resolve()),
        wording=args.wording,
        caption_fraction=args.caption_fraction,
        num_train=args.num_train,
        num_artist_train=args.num_artist_train,
        num_eval=args.num_eval,
        image_size=args.image_size,
        seed=args.seed,
    )
    write_datasets(settings, args.output_dir, root, concepts, args.num_workers)


def main(argv: Sequence[str] | None = None):
    args = build_parser().parse_args(argv)
    try:
        if args.command == "fetch":
            run_fetch(args)
        elif args.command == "subset":
            run_subset(args)
        elif args.command == "scenes":
            run_scenes(args)
        else:
            if args.output:
                check_writable("--output", args.output, is_file=True)
            report(args.data_dir, args.library, args.output)
    except (ValueError, CannotWrite) as error:
        raise SystemExit(f"pictures: {error}") from error


if __name__ == "__main__":
    run_program(main)
