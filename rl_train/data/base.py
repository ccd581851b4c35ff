"""The protocol of a region data set, and what all its readers share."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image

from rl_train.data.errors import NUM_PLACES, BadData, DamagedSample, Report, describe_skipped
from rl_train.data.images import (
    DAMAGED,
    NOT_COCO,
    Encoded,
    ImageCheck,
    check_read,
    decode_image,
)
from rl_train.data.rle import (
    BAD_MASK,
    EMPTY_MASK,
    LOST_MASK,
    RLE,
    check_mask,
    decode_mask,
    mask_size,
    resize_nearest,
    whole_mask,
)
from rl_train.data.text import caption_fault, clean_caption

BAD_QUESTION = "blank question, or one that is no Unicode text"


class RegionDataset(Protocol):
    """A data set of n regions.

    Attributes:
        image_keys: (n,) int64 key of each sample's image; all copies of an image share it.
        coco_ids: (n,) int64 `coco_id` of each sample's image.
        content_keys: (n, 2) int64 keys of each sample's caption and of its mask.
        has_masks: False of a data set of boxes and points, whose samples' masks are empty and which
            have a "solution" (`points.published.parse_solution`) in their place.
        has_objects: True of a data set whose captions may name several regions or none: samples
            have the mask of each in "objects", and an empty mask if there is none.
        names_nothing: True if some caption names no region.
    """

    image_keys: np.ndarray
    coco_ids: np.ndarray
    content_keys: np.ndarray
    has_masks: bool
    has_objects: bool
    names_nothing: bool

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> dict:
        """Read sample i, see `read_sample`."""

    def image_id(self, i: int) -> str:
        """Return the id of sample i without reading it."""

    def caption(self, i: int) -> str:
        """Return the caption of sample i, cleaned, without reading its image."""

    def mask(self, i: int, size: tuple[int, int]) -> np.ndarray:
        """Read the mask of sample i at `size` (H, W), see `read_mask`."""

    def encoded_image(self, i: int) -> Encoded:
        """Read the image of sample i as its file holds it. Raises one of DAMAGED."""

    def report(self) -> Report:
        """Return {"kept", "rows", "skipped": {reason: regions}, "resized_masks"}.

        If any are skipped, also {"first_skipped": {reason: places of the first ones}}.
        """


@dataclass
class Region:
    """One sample before it is decoded.

    Attributes:
        read: returns the encoded image.
        rle: run-length mask; None if the whole image is the region.
        objects: masks of the regions that the caption names, whose union is `rle`; () if it names
            none; None in a data set whose captions name one region each.
        question, answer: of a task that asks it, and the true answer; None of a caption alone.
        columns: further entries that tasks and reward functions of the user receive by name.
    """

    read: Callable[[], Encoded]
    rle: RLE | None
    caption: str
    category: str = ""
    image_id: str = ""
    # Not in the repr: `content_key` of a sample without them stays what it was.
    objects: tuple[RLE, ...] | None = field(default=None, repr=False)
    question: str | None = field(default=None, repr=False)
    answer: str | None = field(default=None, repr=False)
    columns: dict[str, Any] = field(default_factory=dict, repr=False)


class Reader:
    """A `RegionDataset` of files: it calls `_add` for each region that it finds, then `_finish`.

    A reader whose samples are too many for a list of `Region` keeps another form of them, and has
    `_region` and `image_id` of its own.
    """

    has_masks = True
    has_objects = False
    names_nothing = False

    def __init__(self):
        self._num_rows, self._num_resized = 0, 0
        self._skipped = Counter()  # {reason: regions, or rows without any}
        self._first_skipped: dict[str, list[str]] = {}  # {reason: places of the first of them}
        self._samples: Sequence[Region | str | tuple[int, int, int]] = []
        # Key and COCO id of each sample's image, keys of its caption and its mask.
        self._keys: list[tuple[int, int, int, int]] = []

    def _add(
        self,
        sample: Region | str | tuple[int, int, int],
        image: ImageCheck,
        caption: str | None,
        rle: RLE | None,
        coco: int = NOT_COCO,
        question: str | None = None,
        objects: tuple[RLE, ...] | None = None,
    ):
        """Keep a region if it can be used; otherwise count the reason.

        Args:
            sample: what `_region` and `image_id` need later.
            image: result of `check_read` of its image.
            coco: `coco_id` of its image.
            question, objects: of a sample that is no `Region`, which has its own.
        """
        size, key = image
        reason, resized = caption_fault(caption), False
        objects = sample.objects if isinstance(sample, Region) else objects
        if isinstance(size, str):
            reason = size
        elif isinstance(sample, Region) and caption_fault(sample.question or "?"):
            reason = BAD_QUESTION
        elif not reason:
            # (W, H) of the image, (H, W) of the mask.
            reason, resized = check_mask(rle, size[::-1])
            if objects == () and reason == EMPTY_MASK:
                reason = None
            faults = [check_mask(mask, size[::-1])[0] for mask in objects or ()]
            reason = reason or next(filter(None, faults), None)
        if reason:
            self._skip(reason, self._place(sample))
            return
        self._num_resized += resized
        self.names_nothing |= objects == ()
        self._samples.append(sample)
        # All that a reader knows of the target counts as the mask, but not the sample's name.
        target = replace(sample, read=None, image_id="") if isinstance(sample, Region) else ""
        masks = f"{rle!r} {target!r}" + (f" {objects!r}" if objects else "")
        question_text = question
        if isinstance(sample, Region) and (sample.question or sample.answer or sample.columns):
            question_text = f"{sample.question!r} {sample.answer!r} {sample.columns!r}"
        text = caption if question_text is None else f"{caption!r} {question_text!r}"
        self._keys.append((key, coco, content_key(text), content_key(masks)))

    def _add_region(self, region: Region):
        """Keep a row that is one region if it can be used; otherwise count the reason."""
        self._num_rows += 1
        image = check_read(region.read)
        rle = whole_mask(image[0]) if region.rle is None else region.rle
        self._add(region, image, region.caption, rle)

    def _skip(self, reason: str, place: str):
        """Count a region, or a row without any, that cannot be used, and where it stands."""
        self._skipped[reason] += 1
        if self._skipped[reason] <= NUM_PLACES:
            self._first_skipped.setdefault(reason, []).append(place)

    def _finish(self, data_dir: str | Path):
        """Set the keys of the samples. Raises ValueError if there is no sample."""
        keys = np.array(self._keys, dtype=np.int64).reshape(-1, 4)  # (n, 4)
        self.image_keys, self.coco_ids = keys[:, :2].T.copy()
        self.content_keys = keys[:, 2:].copy()
        del self._keys
        if not len(self):
            reasons = describe_skipped(self.report()) or "there is none"
            raise ValueError(
                f"--data_dir {data_dir} holds no usable region: {reasons}; every region needs an "
                "image, a mask that is not empty and a caption"
            )

    def image_id(self, i: int) -> str:
        return self._samples[i].image_id

    def _place(self, sample: Region | str | tuple[int, int, int]) -> str:
        """Return where a sample stands, for a message: its file and row, or else its id."""
        return sample.image_id

    def _region(self, i: int) -> Region:
        """Return sample i without its image. Raises DamagedSample or BadData."""
        return self._samples[i]

    def __len__(self) -> int:
        return len(self.image_keys)

    def __getitem__(self, i: int) -> dict:
        return read_sample(self._region(i), self.image_id(i))

    def caption(self, i: int) -> str:
        return clean_caption(self._region(i).caption)

    def mask(self, i: int, size: tuple[int, int]) -> np.ndarray:
        region = self._region(i)
        return read_mask(region.rle, size, self.image_id(i), may_be_empty=region.objects == ())

    def encoded_image(self, i: int) -> Encoded:
        return self._region(i).read()

    def report(self) -> Report:
        """Return the counts of what opening read and kept, by name."""
        places = dict(first_skipped=self._first_skipped) if self._skipped else {}
        return dict(
            kept=len(self),
            rows=self._num_rows,
            skipped=dict(self._skipped),
            resized_masks=self._num_resized,  # of the kept, of another size than their image
            **places,
        )


def read_sample(region: Region, image_id: str) -> dict:
    """Return dict(image PIL RGB, mask (H, W) bool of its `mask_size`, caption, category, image_id).

    The caption is cleaned of special tokens. A mask of another size is resized to it by nearest
    pixel. Images are never rotated (EXIF), because masks belong to the stored pixels. Of a data set
    with `has_objects` there is also "objects", (K, H, W) bool; K is 0 if the caption names nothing.
    A region with a question also has "question" and "answer", cleaned likewise, and "columns".

    Raises:
        DamagedSample: the image or the mask does not decode, or no pixel is left of the mask.
    """
    image = read_image(region, image_id)
    size, further = mask_size(image.height, image.width), {}
    if region.objects is not None:
        masks = [read_mask(rle, size, image_id) for rle in region.objects]
        further["objects"] = np.stack(masks) if masks else np.zeros((0, *size), dtype=bool)
    texts = dict(question=region.question, answer=region.answer)
    further |= {name: clean_caption(text) for name, text in texts.items() if text is not None}
    further |= dict(columns=region.columns) if region.columns else {}
    return further | dict(
        image=image,
        mask=read_mask(region.rle, size, image_id, may_be_empty=region.objects == ()),
        caption=clean_caption(region.caption),
        category=region.category,
        image_id=image_id,
    )


def read_image(region: Region, image_id: str) -> Image.Image:
    """Return the decoded image, RGB. Raises DamagedSample if it does not decode."""
    try:
        return decode_image(region.read())
    except BadData:  # of the file, not of this sample
        raise
    except DAMAGED as error:
        raise DamagedSample(image_id, "damaged image") from error


def read_mask(
    rle: RLE | None, size: tuple[int, int], image_id: str, may_be_empty: bool = False
) -> np.ndarray:
    """Return the mask at `size` (H, W), bool. Raises DamagedSample as `read_sample` does."""
    try:
        mask = np.ones(size, dtype=bool) if rle is None else decode_mask(rle)
    except ValueError as error:  # it was good when the data set was opened
        raise DamagedSample(image_id, BAD_MASK) from error
    if mask.shape != size:
        mask = resize_nearest(mask, *size)
    if not (mask.any() or may_be_empty):
        raise DamagedSample(image_id, LOST_MASK)
    return mask


def content_key(content: str) -> int:
    """Hash a caption, or what describes a mask, to 64 bits."""
    data = content.encode(errors="backslashreplace")
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little", signed=True)


def number_images(keys: np.ndarray) -> np.ndarray:
    """Number the images of image keys (n,) by first appearance; return (n,) int64 numbers."""
    # `np.unique` numbers by value; ranks of first appearances give the order of the data set.
    _, first, image = np.unique(keys, return_index=True, return_inverse=True)
    return first.argsort().argsort()[image]
