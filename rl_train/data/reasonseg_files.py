"""ReasonSeg as its authors publish it: `{data_dir}/{split}/NAME.jpg` and NAME.json beside it.

The JSON holds {"text": [question, ..], "is_sentence", "shapes": [{"label", "points": [[x, y],
..]}, ..]}. As in utils/data_processing.py of dvlab-research/LISA shapes are drawn with their
outlines, the largest first; one labelled "ignore" removes what lies below it, "flag" is left out.
There OpenCV draws; masks drawn here agree with its to an IoU of .995 or more.
"""

import json
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from rl_train.data.errors import reading
from rl_train.data.image_files import ImageFileReader, JsonValue
from rl_train.data.polygons import MAX_SIDE, encode_segmentation
from rl_train.data.rle import DAMAGED_RLE, RLE, decode_mask, encode_mask

Points = list[tuple[int, int]]  # (x, y)


class ReasonSegFilesDataset(ImageFileReader):
    """The questions of a split's images, less the unusable ones.

    [i] -> see `read_sample`; image_id is "split/name/k", k the number of the question.

    Args:
        data_dir: folder that holds the folder `split`.

    Raises:
        ValueError: no such folder, or an unreadable file in it; no usable row.
        DamagedSample: on access, an image with a good header that does not decode.
    """

    def __init__(self, data_dir: str | Path, split: str = "train"):
        folder = Path(data_dir) / split
        super().__init__(folder)
        files = sorted(folder.glob("*.json"))
        if not files:
            splits = sorted({path.parent.name for path in Path(data_dir).glob("*/*.json")})
            raise ValueError(f"--data_dir {data_dir} has no split {split!r}; it has {splits}")
        for path in files:
            content, name = read_shapes(path), f"{path.stem}.jpg"
            _, (size_or_reason, _) = self._check_image(name)
            rle = (
                None
                if isinstance(size_or_reason, str)
                else draw(content.get("shapes"), size_or_reason[::-1])
            )
            texts = content.get("text")
            for k, text in enumerate(texts if isinstance(texts, list) and texts else [texts]):
                self._add_mask(name, rle, text, f"{split}/{path.stem}/{k}")
        self._finish(data_dir)


def read_shapes(path: Path) -> dict:
    """Return the object in a JSON file, of UTF-8 or else of code page 1252, as in LISA."""
    with reading(path, "JSON file of shapes"):
        data = path.read_bytes()
        try:
            text = data.decode()
        except UnicodeDecodeError:
            text = data.decode("cp1252")
        return dict(json.loads(text).items())  # AttributeError if it is no object


def draw(shapes: JsonValue, size: tuple[int, int]) -> RLE | None:
    """Return the mask of shapes at `size` (H, W).

    It is None if there is no shape, and DAMAGED_RLE if one is none.
    """
    if not isinstance(shapes, list) or not shapes:
        return None
    masks = []  # of (mask, whether it is the target)
    for shape in shapes:
        label = shape.get("label") if isinstance(shape, dict) else None
        points = integer_points(shape.get("points")) if isinstance(label, str) else None
        if not points:
            return DAMAGED_RLE
        if label.lower() != "flag":
            masks.append((draw_polygon(points, size), "ignore" not in label.lower()))
    target = np.zeros(size, dtype=bool)
    for mask, is_target in sorted(masks, key=lambda drawn: -drawn[0].sum()):
        target[mask] = is_target
    return encode_mask(target)


def integer_points(points: JsonValue) -> Points | None:
    """Return the corners of a polygon, without their fractions; None if they are none."""
    corners = [tuple(p) for p in points if isinstance(p, list)] if isinstance(points, list) else []
    numbers = [n for corner in corners for n in corner]
    is_number = all(type(n) in (int, float) and abs(n) <= MAX_SIDE for n in numbers)
    if not corners or len(corners) != len(points) or not is_number or set(map(len, corners)) != {2}:
        return None
    return [(int(x), int(y)) for x, y in corners]


def draw_polygon(points: Points, size: tuple[int, int]) -> np.ndarray:
    """Return the pixels (H, W) bool inside a polygon and on its outline."""
    height, width = size
    outline = Image.new("1", (width, height))
    ImageDraw.Draw(outline).line([*points, points[0]], fill=1)
    mask = np.array(outline)
    if len(points) >= 3:
        centres = [n + 0.5 for point in points for n in point]
        mask |= decode_mask(encode_segmentation([centres], height, width))
    return mask
