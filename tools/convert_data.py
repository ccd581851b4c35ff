"""Convert a data set of any layout to shards in the layout of Grasp-Any-Region.

    python -m tools.convert_data --dataset coco --data_dir D --output my_regions
    python -m tools.convert_data --dataset sa2va --data_dir D --output O --heldout_fraction .05

With --heldout_fraction there are two folders in --output, train and heldout, that share no image.
Image files are stored as they are. What cannot be used is counted by its reason, and named. Where
it was stopped the same command goes on.

Look at the result with `python -m tools.inspect_data`, and train on it with --data_dir my_regions.
"""

from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from tqdm import tqdm

from rl_train.config.flags import FRACTION
from rl_train.data import DATASETS, EVAL_DATASETS, DamagedSample, check_bad_fraction
from rl_train.data.base import RegionDataset, number_images
from rl_train.data.digest import data_facts
from rl_train.data.errors import NUM_PLACES, describe_skipped
from rl_train.data.images import NOT_COCO
from rl_train.data.registry import eval_dataset_name, opener_of
from rl_train.data.split import picture_keys
from rl_train.run.messages import data_report
from rl_train.utils.command_line import FlagParser, run_program
from rl_train.utils.io import check_writable, read_json, write_json
from rl_train.utils.text import counted
from tools.gar_writer import write_shard

ROWS_PER_SHARD = 500
PROGRESS = "progress.json"  # in the unfinished folder


@dataclass
class Progress:
    """Contents of an unfinished folder.

    Attributes:
        source: flags and facts of the data set; another one is another conversion.
        damaged: of each finished shard {reason: image_ids of its samples that were left out}.
    """

    file: Path
    source: dict
    damaged: dict[str, dict[str, list[str]]] = field(default_factory=dict)

    @classmethod
    def open(cls, file: Path, source: dict, output: Path) -> "Progress":
        """Read the file, if there is one. Raises ValueError if it is of another conversion."""
        progress = cls(file, source)
        if file.is_file():
            before = read_json(file)
            if before.get("source") != source:
                raise ValueError(
                    f"--output {output}: {file.parent} is an unfinished conversion of other data "
                    "or flags; name another folder, or remove that one"
                )
            progress.damaged = before["damaged"]
        return progress

    def add(self, shard: str, damaged: dict[str, list[str]]):
        """Note that a shard is whole."""
        self.damaged[shard] = damaged
        write_json(self.file, {k: v for k, v in asdict(self).items() if k != "file"})

    def reasons(self) -> Counter:
        """Return {reason: number of samples that were left out}."""
        each = (
            Counter({reason: len(ids) for reason, ids in d.items()}) for d in self.damaged.values()
        )
        return sum(each, Counter())


def build_parser() -> FlagParser:
    parser = FlagParser(prog="python -m tools.convert_data", description=__doc__)
    add = parser.add_argument
    add(
        "--dataset",
        required=True,
        type=eval_dataset_name,
        metavar="NAME",
        help=f"layout of the data: {', '.join(EVAL_DATASETS)}, or module:Class of your own reader",
    )
    add("--data_dir", required=True, help="folder of regions, or the name of a data set on the hub")
    add("--output", required=True, type=Path, help="folder to write; must be empty or absent")
    add(
        "--subsets",
        nargs="+",
        default=[],
        metavar="SUBSET",
        help="folders of --data_dir, or the split, as in training",
    )
    add("--image_root", help="folder of the images, if they do not lie in --data_dir")
    add(
        "--heldout_fraction",
        type=FRACTION,
        default=0.0,
        help="fraction of the images whose regions go to a folder of their own",
    )
    add(
        "--max_bad_fraction",
        type=FRACTION,
        default=0.01,
        help="fraction of regions that cannot be used above which this stops",
    )
    return parser


def split_by_image(dataset: RegionDataset, heldout_fraction: float) -> dict[str, np.ndarray]:
    """Return {folder: indices of its samples}: "" of all, or "train" and "heldout".

    Raises ValueError if the fraction holds no image or all.
    """
    if not heldout_fraction:
        return {"": np.arange(len(dataset))}
    (keys,) = picture_keys(dataset)
    images = number_images(keys)  # (n,)
    num_images = int(images.max()) + 1
    num_heldout = round(heldout_fraction * num_images)
    if not 0 < num_heldout < num_images:
        if num_images < 2:
            remedy = "leave the flag out"
        else:
            remedy = f"choose one from {1 / num_images:.2g} to {1 - 1 / num_images:.2g}"
        raise ValueError(
            f"--heldout_fraction {heldout_fraction}: of {num_images} images these are "
            f"{num_heldout}; {remedy}"
        )
    # A fixed seed, so that a resumed conversion splits as before.
    heldout = np.isin(images, np.random.default_rng(0).permutation(num_images)[:num_heldout])
    return {"train": np.flatnonzero(~heldout), "heldout": np.flatnonzero(heldout)}


def rows(
    dataset: RegionDataset, indices: np.ndarray, damaged: dict[str, list[str]], bar: tqdm
) -> Iterator[dict]:
    """Yield what `write_shard` takes of samples; note those that cannot be used in `damaged`."""
    for i in indices.tolist():
        bar.update()
        try:
            sample = dataset[i]
        except DamagedSample as error:
            damaged.setdefault(error.reason, []).append(error.image_id)
            continue
        image, mask, coco = sample["image"], sample["mask"], int(dataset.coco_ids[i])
        if mask.shape != (image.height, image.width):  # that of a large image is smaller
            mask = dataset.mask(i, (image.height, image.width))
        # An image that the reader gave another shape is encoded anew.
        data = None if "stored_image" in sample else bytes(dataset.encoded_image(i))
        # By its name the image is known as COCO's.
        name = dict(image_path=f"{coco:012d}.jpg") if data and coco != NOT_COCO else {}
        yield sample | name | dict(image_bytes=data, mask=mask)


def write_shards(
    dataset: RegionDataset, parts: dict[str, np.ndarray], progress: Progress, limit: float
):
    """Write the shards that are missing. Raises BadData if too many samples are damaged."""
    unfinished = progress.file.parent
    check_bad_fraction(dataset.report(), progress.reasons().total(), limit)
    with tqdm(total=len(dataset), desc="converting", unit="region") as bar:
        for folder, indices in parts.items():
            starts = range(0, len(indices), ROWS_PER_SHARD)
            for number, start in enumerate(starts):
                chunk = indices[start : start + ROWS_PER_SHARD]
                shard = f"{folder}/data-{number:05d}-of-{len(starts):05d}.arrow".removeprefix("/")
                if shard in progress.damaged:
                    bar.update(len(chunk))
                    continue
                (unfinished / folder).mkdir(exist_ok=True)
                damaged = {}
                write_shard(rows(dataset, chunk, damaged, bar), unfinished / shard)
                progress.add(shard, damaged)
                check_bad_fraction(dataset.report(), progress.reasons().total(), limit)


def convert(args: Namespace):
    """Write the data set. Raises ValueError that names a flag or file."""
    output = args.output
    check_writable("--output", output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(
            f"--output {output} is not empty: name another folder (a conversion that was stopped "
            f"lies in {output}.unfinished, a finished one in {output})"
        )
    is_eval = args.dataset not in DATASETS
    dataset = opener_of(args.dataset, args.subsets, args.image_root, is_eval)(args.data_dir)
    report = dataset.report()
    tqdm.write(data_report(f"--data_dir {args.data_dir}", report))
    if report["skipped"]:
        tqdm.write(f"skipped: {describe_skipped(report)}")
    if not dataset.has_masks:
        raise ValueError(f"--data_dir {args.data_dir} holds boxes and points, and no masks")
    check_bad_fraction(report, 0, args.max_bad_fraction)
    parts = split_by_image(dataset, args.heldout_fraction)

    unfinished = output.with_name(f"{output.name}.unfinished")
    flags = {name: vars(args)[name] for name in ("dataset", "subsets", "heldout_fraction")}
    unfinished.mkdir(parents=True, exist_ok=True)
    progress = Progress.open(unfinished / PROGRESS, flags | data_facts(dataset), output)
    if progress.damaged:
        tqdm.write(f"{unfinished} holds {len(progress.damaged)} shards: going on")
    write_shards(dataset, parts, progress, args.max_bad_fraction)
    progress.file.unlink()
    unfinished.rename(output)  # whole, or not there
    for reason, count in progress.reasons().items():
        ids = [name for damaged in progress.damaged.values() for name in damaged.get(reason, [])]
        more = ", .." if count > NUM_PLACES else ""
        tqdm.write(f"left out: {reason}: {count} ({', '.join(ids[:NUM_PLACES])}{more})")
    num_regions = len(dataset) - progress.reasons().total()
    sizes = ", ".join(f"{name} {len(part)}" for name, part in parts.items() if name)
    tqdm.write(f"{output}: {counted(num_regions, 'region')}" + (f" (of {sizes})" if sizes else ""))
    folder = output / "train" if args.heldout_fraction else output
    tqdm.write(
        f"look at them: python -m tools.inspect_data --data_dir {folder} --output outputs/sheet.png"
    )


def main(argv: Sequence[str] | None = None):
    args = build_parser().parse_args(argv)
    try:
        convert(args)
    except ValueError as error:
        raise SystemExit(f"convert_data: {error}") from error


if __name__ == "__main__":
    run_program(main)
