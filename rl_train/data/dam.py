"""The Describe-Anything dataset (nvidia/describe-anything-dataset): annotations.json beside images in tar files.

`{root}/{SPLIT}/annotations.json` holds {sample_id: region | [region, ..] | {"regions" (or "items", "objects",
"annotations", "list"): [..]} | {k: region}} with region = {"caption": .., "mask_rle": {"size": [H, W], "counts": ..}}.
The image of sample `id` is the member `{id}.jpg` of one of `{root}/{SPLIT}/images/*.tar`, or the first frame
`{id}.{t}.jpg` of a video (SAV). In the hub's form uncompressed Arrow shards `*.arrow` anywhere in the split stand in
for the tar files, with `__key__` and a column `jpg` (or `{t}.jpg`). A `pickle` member or column is never opened.
"""

import json
import mmap
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa

from rl_train.data.arrow import natural
from rl_train.data.checks import LOST_MASK, check_rles, lost_at, number_images
from rl_train.data.errors import DamagedSample
from rl_train.data.hub import resolve
from rl_train.data.images import (
    DAMAGED,
    MAX_PIXELS,
    NO_IMAGE,
    check_image,
    decode_image,
    image_key,
    map_file,
)
from rl_train.data.masks import compress_runs, decode_runs, is_int, resize_nearest, rle_runs
from rl_train.data.packed import find_images
from rl_train.data.text import clean_caption, is_blank

REGION_LISTS = ("regions", "items", "objects", "annotations", "list")
REGION_FIELDS = {"caption", "mask_rle"}
REGIONS_AT_ONCE = 2000  # that a scan holds in memory


class DescribeAnythingDataset:
    """The captioned regions of all splits below `root`; unusable ones are left out at the start and counted.

    [i] -> dict(image PIL RGB, mask (H,W) bool of the image's size, caption str without special tokens, category "",
    image_id str), as `GraspAnyRegionDataset`. image_id is "SPLIT/sample_id/k", with k the region's place in its list or
    its key (0 for a lone region). Held in memory are positions in the files: captions and masks are read from
    annotations.json on access, images from the tar files, both memory-mapped in each process.

    Args:
        root: folder of splits, one split's folder, or a hub name, see `resolve`.
        splits: names of folders to read; None reads all.

    Raises:
        ValueError: no annotations.json, an unknown split, an unreadable file, or not one usable region.
        DamagedSample: on access, an image that passed the checks of its header and end but does not decode.
    """

    def __init__(self, root, splits: list[str] | None = None):
        self._files, self._maps = [], {}  # paths; number of file -> map, in each process
        self._skipped, self._num_samples, self._num_resized, self._num_ignored = Counter(), 0, 0, 0
        samples, regions, self._splits = [], [], _splits(resolve(root), splits)
        for split, folder in enumerate(self._splits):
            for sample, found in self._scan(split, folder):
                regions += [(len(samples), k) for k in found]
                samples.append(sample)
        self._samples = np.array(samples, dtype=np.int64).reshape(
            -1, 8
        )  # split, annotation file, start, end, image file, start, end, key
        self._regions = np.array(regions, dtype=np.int64).reshape(
            -1, 2
        )  # sample, place in its list
        self._maps.clear()
        if not regions:
            raise ValueError(f"--data_dir {root} holds no usable region: {self.report()}")

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_maps": {}}

    def __len__(self) -> int:
        return len(self._regions)

    @property
    def images(self) -> np.ndarray:
        """(n,) int64 number of each sample's image, the same for all samples, of whatever split, that have a copy of it."""
        return number_images(self._samples[self._regions[:, 0], 7])

    def report(self) -> dict:
        """{"rows": samples read, "kept": regions, "skipped": {reason: regions or samples}, "resized_masks": of the kept, other
        size than the image, "ignored_members": of tar files: links and names that lead out of the folder}."""
        return {
            "rows": self._num_samples,
            "kept": len(self),
            "skipped": dict(self._skipped),
            "resized_masks": self._num_resized,
            "ignored_members": self._num_ignored,
        }

    def __getitem__(self, i: int) -> dict:
        sample, place = self._regions[i].tolist()
        split, annotation_file, *entry, image_file, start, end, _ = self._samples[sample].tolist()
        [(sample_id, value)] = json.loads(
            b"{%s}" % self._map(annotation_file)[slice(*entry)]
        ).items()
        k, region = regions_of(value)[place]
        image_id = f"{self._splits[split].name}/{sample_id}/{k}"
        try:
            image = decode_image(self._map(image_file)[start:end])
        except DAMAGED as error:
            raise DamagedSample(image_id, "damaged image") from error
        mask = decode_runs(*rle_runs(region["mask_rle"]))  # (H, W) of the RLE
        if mask.shape != (image.height, image.width):
            mask = resize_nearest(mask, image.height, image.width)  # (H, W) of the image
        return {
            "image": image,
            "mask": mask,
            "caption": clean_caption(region["caption"]),
            "category": "",
            "image_id": image_id,
        }

    def _add(self, path: Path) -> int:
        """The number of a file from now on."""
        self._files.append(path)
        return len(self._files) - 1

    def _map(self, file: int) -> mmap.mmap:
        if file not in self._maps:
            self._maps[file] = map_file(self._files[file])
        return self._maps[file]

    def _scan(self, split: int, folder: Path):
        """Yields (row of `_samples`, places of its usable regions) of one split; counts the rest by reason."""
        annotation_file = self._add(folder / "annotations.json")
        images, num_ignored = find_images(folder)
        self._num_ignored += num_ignored
        numbers = {
            file: self._add(file) for file in sorted({image[0] for image in images.values()})
        }
        waiting, num_regions = [], 0
        for sample_id, start, end, value in read_entries(self._files[annotation_file]):
            self._num_samples += 1
            regions = regions_of(value)
            if not regions:
                self._skipped["no region"] += 1
                continue
            image, size = (0, 0, 0, 0), NO_IMAGE
            if sample_id in images:
                file, *span = images[sample_id]
                data = memoryview(self._map(numbers[file]))[slice(*span)]
                image, size = (numbers[file], *span, image_key(data)), check_image(data)
            waiting.append(
                (
                    (split, annotation_file, start, end, *image),
                    size,
                    [region for _, region in regions],
                )
            )
            num_regions += len(regions)
            if num_regions >= REGIONS_AT_ONCE:
                yield from self._usable(waiting)
                waiting, num_regions = [], 0
        yield from self._usable(waiting)

    def _usable(self, waiting: list[tuple]):
        """Yields (row, places of usable regions) of (row, image size or reason, regions) triples, without those that have none."""
        flat = [region for _, _, regions in waiting for region in regions]
        reasons, sizes = (values.tolist() for values in check_rles(_rles(flat)))
        at = 0
        for row, size, regions in waiting:
            usable = []
            for place, region in enumerate(regions):
                reason, mask_size = reasons[at], sizes[at]
                at += 1
                if is_blank(_caption(region)):
                    reason = "blank caption"
                elif isinstance(size, str):
                    reason = size
                elif reason is None and lost_at(size[::-1], mask_size, lambda: region["mask_rle"]):
                    reason = LOST_MASK
                if reason is None:
                    self._num_resized += mask_size != [size[1], size[0]]
                    usable.append(place)
                else:
                    self._skipped[reason] += 1
            if usable:
                yield row, usable
        for mapping in self._maps.values():
            mapping.madvise(mmap.MADV_DONTNEED)  # pages read so far


def read_entries(path: Path):
    """Yields (key, start, end, value) of each entry of a file that holds one JSON object; `"key": value` is at [start:end] of its bytes.

    Raises:
        ValueError: naming the file, which is not such a file.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
        decoder = json.JSONDecoder()
        skip = json.decoder.WHITESPACE.match
        shift = (
            3 if path.open("rb").read(3) == b"\xef\xbb\xbf" else 0
        )  # bytes before character `counted`,
        counted, ascii_only = 0, text.isascii()  # less the number of characters
        at = skip(text, 0).end()
        if text[at : at + 1] != "{":
            raise ValueError("it holds no JSON object")
        at = skip(text, at + 1).end()
        separator = "}" if text[at : at + 1] == "}" else ","
        while separator == ",":
            start = at
            key, at = decoder.raw_decode(text, at)
            at = skip(text, at).end()
            if not isinstance(key, str) or text[at : at + 1] != ":":
                raise ValueError(f"key and colon expected at character {at}")
            value, at = decoder.raw_decode(text, skip(text, at + 1).end())
            if ascii_only:
                yield key, start + shift, at + shift, value
            else:
                first = start + shift + len(text[counted:start].encode()) - (start - counted)
                last = first + len(text[start:at].encode())
                counted, shift = at, last - at
                yield key, first, last, value
            at = skip(text, at).end()
            separator, at = text[at : at + 1], skip(text, at + 1).end()
        if separator != "}":
            raise ValueError(f"comma or brace expected at character {at}")
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a readable annotations.json: {error}") from error


def regions_of(value) -> list[tuple[str, object]]:
    """(key or place, region) of the value of one sample, in any of its forms; empty if it has none of them."""
    if isinstance(value, dict) and not REGION_FIELDS & value.keys():
        value = next((value[name] for name in REGION_LISTS if name in value), value)
    if isinstance(value, dict):
        return [("0", value)] if REGION_FIELDS & value.keys() else list(value.items())
    return [(str(k), region) for k, region in enumerate(value)] if isinstance(value, list) else []


def _splits(root: Path, names: list[str] | None) -> list[Path]:
    """The split folders in natural order. Raises ValueError if there is none, or a name in `names` has none."""
    folders = (
        [root.resolve()]
        if (root / "annotations.json").is_file()
        else sorted(
            (path.parent for path in root.glob("*/annotations.json")),
            key=lambda folder: natural(folder.name),
        )
    )
    if not folders:
        raise ValueError(
            f"--data_dir {root} holds no annotations.json, in it or in a folder of it."
        )
    for name in names or []:
        if name not in [folder.name for folder in folders]:
            raise ValueError(
                f"--data_dir {root} has no split {name!r}; it has {', '.join(folder.name for folder in folders)}."
            )
    return [folder for folder in folders if names is None or folder.name in names]


def _caption(region) -> str | None:
    caption = region.get("caption") if isinstance(region, dict) else None
    return caption if isinstance(caption, str) else None


def _rles(regions: list) -> pa.Array:
    """The regions' masks as a column for `check_rles`; what is no run-length mask becomes one that it refuses."""
    rles = [region.get("mask_rle") if isinstance(region, dict) else None for region in regions]
    rles = [rle if isinstance(rle, dict) else {} for rle in rles]
    return pa.StructArray.from_arrays(
        [
            pa.array([_counts(rle.get("counts")) for rle in rles], pa.large_string()),
            pa.array([_size(rle.get("size")) for rle in rles], pa.list_(pa.int64())),
        ],
        ["counts", "size"],
    )


def _counts(counts) -> str | None:
    if isinstance(counts, list):
        return (
            compress_runs(counts)
            if all(is_int(run) and 0 <= run <= MAX_PIXELS for run in counts)
            else ""
        )
    return counts if counts is None or isinstance(counts, str) and counts.isascii() else ""


def _size(size) -> list[int]:
    return (
        size
        if isinstance(size, list)
        and len(size) == 2
        and all(is_int(n) and 0 < n <= MAX_PIXELS for n in size)
        else [0, 0]
    )
