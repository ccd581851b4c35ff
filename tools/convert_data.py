"""Make data to train on (the layout of Grasp-Any-Region) of COCO's JSON, or of images and masks.

    python -m tools.convert_data coco --annotations instances.json --image_root images --output D
    python -m tools.convert_data folders --image_root images --mask_root masks --output D

coco: each annotation with a "segmentation" (polygons or run lengths) is a region. Its caption is
the annotation's own "caption" or "description"; with --category_captions, else the category's name.

folders: the regions of images/NAME.jpg are masks/NAME.png, or all masks/NAME/*.png: pictures of the
image's size, not black inside. The caption of masks/X.png is the text in masks/X.txt.

Image files are stored as they are. Look at the result with `python -m tools.inspect_data`, and
train on it with --data_dir D.
"""

import argparse
import io
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from pycocotools import mask as coco_mask
from tqdm import tqdm

from rl_train.data.text import clean_caption
from rl_train.utils.command_line import FlagParser, run_program
from rl_train.utils.io import check_writable, read_json
from tools.gar_writer import write_gar

CAPTION_KEYS = ("caption", "description")  # of a COCO annotation, the first that it has
IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp")


def build_parser() -> FlagParser:
    parser = FlagParser(
        prog="python -m tools.convert_data",
        description=__doc__,
    )
    sources = parser.add_subparsers(dest="source", required=True)
    coco = sources.add_parser("coco", help="COCO's instances JSON", allow_abbrev=False)
    coco.add_argument("--annotations", required=True, type=Path, help="JSON file")
    coco.add_argument(
        "--category_captions",
        action="store_true",
        help="take the category's name where an annotation has no caption",
    )
    folders = sources.add_parser("folders", help="image and mask files", allow_abbrev=False)
    folders.add_argument("--mask_root", required=True, type=Path, help="folder of masks")
    for source in (coco, folders):
        source.add_argument("--image_root", required=True, type=Path, help="folder of images")
        source.add_argument(
            "--output", required=True, type=Path, help="folder to write; must be empty or absent"
        )
    return parser


def read_image(path: Path) -> tuple[bytes, Image.Image]:
    """Return an image file and what it holds. Raises ValueError that names it."""
    try:
        data = path.read_bytes()
        image = Image.open(io.BytesIO(data))
        image.load()
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{path} is no picture that can be read: {error}") from error
    return data, image


def row(path: Path, image: tuple[bytes, Image.Image], mask: np.ndarray, caption: str, name: str):
    """Return what `write_gar` takes of a region, whose mask comes from the file `path`."""
    data, picture = image
    if mask.shape != (picture.height, picture.width):
        size = f"{mask.shape[1]} x {mask.shape[0]}"
        raise ValueError(f"{path} is {size} pixels, its image {picture.width} x {picture.height}")
    return dict(image=picture, image_bytes=data, mask=mask, caption=caption, category=name)


def coco_rows(args: argparse.Namespace, skipped: Counter) -> Iterator[dict]:
    """Yield the regions of COCO's JSON; count in `skipped` what cannot be one."""
    file = args.annotations
    content = read_json(file)
    if missing := {"images", "annotations"} - content.keys():
        raise ValueError(f"--annotations {file}: has no {' and '.join(sorted(missing))}")
    names = {c["id"]: c["name"] for c in content.get("categories", [])}
    of_image = defaultdict(list)
    for number, annotation in enumerate(content["annotations"]):
        of_image[annotation["image_id"]].append((number, annotation))
    for entry in tqdm(content["images"], desc="images", unit="image"):
        if entry["id"] not in of_image:
            continue
        path = args.image_root / entry["file_name"]
        if not path.is_file():
            raise ValueError(f"--image_root {args.image_root}: has no {entry['file_name']}")
        image = read_image(path)
        for number, annotation in of_image[entry["id"]]:
            place, name = f"{file} annotation {number}", names.get(annotation.get("category_id"))
            captions = [annotation[key] for key in CAPTION_KEYS if annotation.get(key)]
            captions += [name] if args.category_captions and name else []
            if not captions or not clean_caption(captions[0]):
                skipped["without a caption"] += 1
            elif not annotation.get("segmentation"):
                skipped["without a segmentation"] += 1
            else:
                mask = decode(annotation["segmentation"], entry, place)
                yield row(Path(place), image, mask, captions[0], name or "")


def decode(segmentation: list | dict, image: dict, place: str) -> np.ndarray:
    """Return the (H, W) bool mask of polygons or run lengths. Raises ValueError."""
    height, width = image["height"], image["width"]
    try:
        rle = segmentation
        if isinstance(segmentation, list) or isinstance(segmentation["counts"], list):
            rle = coco_mask.frPyObjects(segmentation, height, width)
        rle = coco_mask.merge(rle) if isinstance(rle, list) else rle
        return coco_mask.decode(rle).astype(bool)
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise ValueError(f"{place}: its segmentation cannot be read: {error!r}") from error


def folder_rows(args: argparse.Namespace, skipped: Counter) -> Iterator[dict]:
    """Yield the regions of image and mask files; count in `skipped` what cannot be one."""
    for root in (args.image_root, args.mask_root):
        if not root.is_dir():
            raise ValueError(f"{root}: no such folder")
    images = sorted(p for p in args.image_root.iterdir() if p.suffix.lower() in IMAGE_ENDINGS)
    for path in tqdm(images, desc="images", unit="image"):
        whole = args.mask_root / f"{path.stem}.png"
        masks = [whole] * whole.is_file() + sorted((args.mask_root / path.stem).glob("*.png"))
        if not masks:
            skipped["images without a mask"] += 1
            continue
        image = read_image(path)
        for file in masks:
            text = file.with_suffix(".txt")
            caption = text.read_text(encoding="utf-8") if text.is_file() else ""
            mask = np.asarray(read_image(file)[1].convert("RGB")).any(-1)
            if not clean_caption(caption):
                skipped["without a caption"] += 1
            elif not mask.any():
                skipped["empty masks"] += 1
            else:
                yield row(file, image, mask, caption, "")


def convert(args: argparse.Namespace):
    """Write the data set. Raises ValueError that names a flag or file."""
    output, skipped = args.output, Counter()
    check_writable("--output", output)
    if output.exists() and any(output.iterdir()):
        raise ValueError(f"--output {output} is not empty: name another folder")
    rows = (coco_rows if args.source == "coco" else folder_rows)(args, skipped)
    num_regions = 0

    def counted() -> Iterator[dict]:
        nonlocal num_regions
        for region in rows:
            num_regions += 1
            yield region

    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as unfinished:
        write_gar(counted(), Path(unfinished) / "data")
        if num_regions:  # whole, or not there
            (Path(unfinished) / "data").rename(output)
    reasons = ", ".join(f"{reason}: {count}" for reason, count in skipped.items())
    if not num_regions:
        remedy = (
            "annotations need a caption, or --category_captions"
            if args.source == "coco"
            else "the caption of --mask_root's X.png is the text in X.txt"
        )
        raise ValueError(f"no region can be used ({reasons or 'there is none'}): {remedy}")
    print(f"{output}: {num_regions} regions" + (f"; skipped: {reasons}" if reasons else ""))
    print(f"look at them: python -m tools.inspect_data --data_dir {output} --output sheet.png")


def main(argv: Sequence[str] | None = None):
    args = build_parser().parse_args(argv)
    try:
        convert(args)
    except ValueError as error:
        raise SystemExit(f"convert_data: {error}") from error


if __name__ == "__main__":
    run_program(main)
