"""Look at a data set before training: what is kept and skipped, distributions, a contact sheet.

    python -m tools.inspect_data --data_dir D [--dataset NAME] [--output sheet.png]

Decodes every sample. Exit status 2, with one sentence, if more than --max_bad_fraction of the
regions are skipped or damaged.
"""

import textwrap
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from rl_train.data import DATASETS, EVAL_DATASETS, DamagedSample, check_bad_fraction
from rl_train.data.base import RegionDataset
from rl_train.data.registry import eval_dataset_name, opener_of
from rl_train.data.workers import reporting_dead_workers
from rl_train.utils.command_line import FlagParser, run_program
from rl_train.utils.io import check_writable
from sa2va_hf.processing_sa2va import region_grid

GRID, TILE = 16, 448  # of one tile of Sa2VA, see region_grid
QUANTILES = {"min": 0, "5%": 5, "50%": 50, "95%": 95, "max": 100}
# Of the contact sheet: cells, and pixels of a picture and of the text below it.
COLUMNS, ROWS, SIDE, TEXT = 5, 4, 300, 96
INK, REGION = (20, 20, 20), (255, 32, 96)


class Measured(Dataset):
    """Per sample, measured in workers: (numbers of MEASURES, None) or (None, why it is damaged)."""

    def __init__(self, dataset: RegionDataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, i: int):
        try:
            sample = self.dataset[i]
        except DamagedSample as error:
            return None, error.reason
        mask = torch.from_numpy(np.ascontiguousarray(sample["mask"]))
        cells = int(region_grid(mask[None], GRID, TILE, "area").sum())
        width, height = sample["image"].size
        return (
            100 * mask.float().mean().item(),
            cells,
            len(sample["caption"].split()),
            width,
            height,
        ), None


MEASURES = (
    "region area, % of the image",
    f"grid cells K of {GRID * GRID}",
    "caption length, words",
    "image width, pixels",
    "image height, pixels",
)


def measure(dataset: RegionDataset, num_workers: int) -> tuple[np.ndarray, Counter, list[int]]:
    """Return (MEASURES (n, 5) of samples that decode, {reason: number that do not}, n indices)."""
    loader = DataLoader(Measured(dataset), batch_size=16, num_workers=num_workers, collate_fn=list)
    sizes, damaged, good = [], Counter(), []
    each = (sample for batch in loader for sample in batch)
    for i, (values, reason) in enumerate(
        tqdm(each, total=len(dataset), desc="decoding", leave=False)
    ):
        if reason is None:
            sizes.append(values)
            good.append(i)
        else:
            damaged[reason] += 1
    return np.array(sizes, dtype=np.float64).reshape(-1, len(MEASURES)), damaged, good


def table(report: dict, damaged: Counter, sizes: np.ndarray) -> str:
    """Format counts by reason and quantiles."""
    lines = [
        f"{report['rows']:9d} rows",
        f"{len(sizes):9d} regions kept, of which {report['resized_masks']} masks had "
        "another size than their image",
        f"{sum(report['skipped'].values()):9d} skipped",
    ]
    for reason, n in sorted(report["skipped"].items(), key=lambda item: (-item[1], item[0])):
        places = report.get("first_skipped", {}).get(reason, [])
        more = ", .." if n > len(places) else ""
        lines.append(f"{n:18d} {reason}" + (f": {', '.join(places)}{more}" if places else ""))
    lines += [f"{sum(damaged.values()):9d} damaged when decoded"] + [
        f"{n:18d} {reason}" for reason, n in sorted(damaged.items())
    ]
    if len(sizes):
        lines += ["", f"{'':28s}" + "".join(f"{name:>10s}" for name in QUANTILES)]
        for name, values in zip(MEASURES, sizes.T):
            lines.append(
                f"{name:28s}"
                + "".join(f"{np.percentile(values, q):10.4g}" for q in QUANTILES.values())
            )
    return "\n".join(lines)


def contact_sheet(samples: list[dict], columns: int = COLUMNS, side: int = SIDE) -> Image.Image:
    """Draw samples in a grid: image with its region outlined, id and caption below.

    Args:
        side: pixels of a cell's side, without the text.
    """
    sheet = Image.new("RGB", (columns * side, -(-len(samples) // columns) * (side + TEXT)), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(12)
    for k, sample in enumerate(samples):
        left, top = k % columns * side, k // columns * (side + TEXT)
        picture = outlined(sample["image"], sample["mask"], side - 8)
        sheet.paste(
            picture, (left + (side - picture.width) // 2, top + (side - picture.height) // 2)
        )
        lines = [
            f"..{sample['image_id'][-40:]}" if len(sample["image_id"]) > 42 else sample["image_id"]
        ]
        lines += textwrap.wrap(sample["caption"], 46, max_lines=5, placeholder=" ..")
        draw.multiline_text(
            (left + 6, top + side), "\n".join(lines), fill=INK, font=font, spacing=3
        )
    return sheet


def outlined(image: Image.Image, mask: np.ndarray, side: int) -> Image.Image:
    """Return the image at most `side` pixels wide and high, with the region's border drawn."""
    scale = side / max(image.size)
    size = tuple(max(1, round(n * scale)) for n in image.size)
    resampling = Image.Resampling.BOX if scale < 1 else Image.Resampling.NEAREST
    coverage = np.asarray(Image.fromarray(mask.astype(np.float32)).resize(size, resampling))
    small = coverage > min(0.5, coverage.max() / 2)  # a region below a pixel stays visible
    pixels = np.array(image.resize(size))
    padded = np.pad(small, 2)
    # Pixels whose 5 x 5 neighbourhood is in the region; the rest of it is the border.
    inside = np.logical_and.reduce(
        [padded[dy : dy + size[1], dx : dx + size[0]] for dy in range(5) for dx in range(5)]
    )
    pixels[small & ~inside] = REGION
    return Image.fromarray(pixels)


def main(argv: list[str] | None = None):
    parser = FlagParser(
        prog="python -m tools.inspect_data",
        description=__doc__,
    )
    parser.add_argument(
        "--data_dir", required=True, help="folder of regions, or the name of a data set on the hub"
    )
    parser.add_argument(
        "--dataset",
        type=eval_dataset_name,
        default="gar",
        metavar="NAME",
        help=f"its format: {', '.join(EVAL_DATASETS)}, or module:Class of your own reader",
    )
    parser.add_argument(
        "--subsets",
        nargs="+",
        default=[],
        metavar="SUBSET",
        help="folders of --data_dir to read (gar, dam; default: all), or the split "
        "(default: train)",
    )
    parser.add_argument("--image_root", help="folder of the images that a file names")
    parser.add_argument("--output", type=Path, help="PNG file for the contact sheet")
    parser.add_argument("--num_workers", type=int, default=2)
    parser.add_argument(
        "--max_bad_fraction",
        type=float,
        default=0.01,
        help="fraction of skipped and damaged regions above which this fails",
    )
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    try:
        if args.output:
            check_writable("--output", args.output, is_file=True)
        opener = opener_of(
            args.dataset,
            args.subsets,
            args.image_root,
            is_eval=args.dataset not in DATASETS,
        )
        dataset = opener(args.data_dir)
        workers = args.num_workers
        sizes, damaged, good = reporting_dead_workers(workers, measure, dataset, workers)
        tqdm.write(table(dataset.report(), damaged, sizes))
        if args.output and good:
            shown = np.unique(np.linspace(0, len(good) - 1, COLUMNS * ROWS).round().astype(int))
            args.output.parent.mkdir(parents=True, exist_ok=True)
            contact_sheet([dataset[good[i]] for i in shown]).save(args.output)
            tqdm.write(f"\ncontact sheet: {args.output}")
        check_bad_fraction(dataset.report(), damaged.total(), args.max_bad_fraction)
    except ValueError as error:
        raise SystemExit(f"inspect_data: {error}") from error


if __name__ == "__main__":
    run_program(main)
