"""Pictures, frames and regions that the flags of tools.predict name."""

import argparse
import re
from pathlib import Path

import numpy as np
from PIL import Image

from rl_train.policies.sa2va import Sa2VAPolicy
from rl_train.utils.io import check_writable
from tools.picture_model import PictureModel, box_region


def open_image(flag: str, path: Path) -> Image.Image:
    """Read a picture. Raises ValueError that names the flag."""
    try:
        with Image.open(path) as image:
            image.load()
            return image
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        reason = error.strerror if isinstance(error, FileNotFoundError) else error
        raise ValueError(f"{flag} {path} is no picture that can be read: {reason}") from error


def frame_files(paths: list[Path]) -> list[Path]:
    """Return the files of --video: as given, or a folder's pictures in the order of their numbers.

    Raises ValueError.
    """
    if len(paths) > 1 or not paths[0].is_dir():
        return paths
    endings = Image.registered_extensions()
    files = [file for file in paths[0].iterdir() if file.suffix.lower() in endings]
    if not files:
        raise ValueError(f"--video {paths[0]}: the folder holds no picture")

    def numbers_and_text(file: Path) -> list[tuple[int, str]]:
        # frame_9 comes before frame_10
        parts = re.split(r"(\d+)", file.name)
        return [(int(part), "") if part.isdecimal() else (0, part) for part in parts]

    return sorted(files, key=numbers_and_text)


def read_frames(files: list[Path]) -> list[Image.Image]:
    """Read the frames of a video. Raises ValueError if they are not of one size."""
    frames = [open_image("--video", file).convert("RGB") for file in files]
    for file, frame in zip(files, frames):
        if frame.size != frames[0].size:
            raise ValueError(
                f"--video {file}: is {frame.width} x {frame.height} pixels, and {files[0]} "
                f"{frames[0].width} x {frames[0].height}"
            )
    return frames


def read_region(path: Path, size: tuple[int, int]) -> np.ndarray:
    """Return the (H, W) bool region of a picture of `size` (W, H). Raises ValueError."""
    image = open_image("--region", path)
    if image.size != size:
        raise ValueError(
            f"--region {path}: is {image.width} x {image.height} pixels, and --image "
            f"{size[0]} x {size[1]}"
        )
    region = np.asarray(image.convert("RGB")).any(-1)
    if not region.any():
        raise ValueError(f"--region {path}: is black everywhere, so that no region is named")
    return region


def chosen_region(args: argparse.Namespace, size: tuple[int, int]) -> np.ndarray | None:
    """Return the (H, W) bool region of --region or --box in a picture of `size` (W, H), if any.

    Raises ValueError, also for a --point outside of the picture.
    """
    if args.region:
        return read_region(args.region, size)
    if args.point:
        x, y = args.point
        if not (0 <= x < size[0] and 0 <= y < size[1]):
            raise ValueError(f"--point {x} {y}: not inside --image of {size[0]} x {size[1]} pixels")
    if not args.box:
        return None
    left, top, right, bottom = args.box
    if not (0 <= left < right <= size[0] and 0 <= top < bottom <= size[1]):
        corners = " ".join(map(str, args.box))
        raise ValueError(f"--box {corners}: no box inside --image of {size[0]} x {size[1]} pixels")
    return box_region(args.box, size)


def region_at_point(policy: Sa2VAPolicy, image: Image.Image, point: list[int]) -> np.ndarray:
    """Return the (H, W) bool region that a model's SAM2 finds under --point. Raises ValueError."""
    model = PictureModel("", policy, max_new_tokens=1)
    model.look(image)
    region = model.region_at(*point)
    if not region.any():
        raise ValueError(f"--point {point[0]} {point[1]}: the model's SAM2 finds no region there")
    return region


def check_outputs(args: argparse.Namespace):
    """Raise ValueError, naming the flag, if --output or --json cannot be written."""
    if args.json:
        check_writable("--json", args.json, is_file=True)
    if not args.output:
        return
    if args.video and args.output.is_file():
        raise ValueError(f"--output {args.output}: with --video a folder, and this is a file")
    check_writable("--output", args.output, is_file=not args.video)
    if args.video and args.output.is_dir() and any(args.output.iterdir()):
        raise ValueError(f"--output {args.output} is not empty: name another folder")
    if not args.video and args.output.suffix.lower() not in Image.registered_extensions():
        raise ValueError(f"--output {args.output}: needs the ending of a picture, such as .png")
