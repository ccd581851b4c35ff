"""Facts of a data set by which a run knows its data again. No image is decoded for them.

They cover the number and the order of the samples, each sample's caption and mask as the files hold
them, each image's length and its first and last KiB, and all bytes of a few images. They do not see
where files lie or what they are called. In other images they do not see a change in the middle that
keeps the length.
"""

import hashlib
from collections.abc import Iterable, Iterator

import numpy as np
from torch.utils.data import Subset

from rl_train.data.base import RegionDataset
from rl_train.data.distractors import unwrap_subset
from rl_train.data.images import DAMAGED

NUM_WHOLE_IMAGES = 32  # evenly spread, of which all bytes count

Facts = dict[str, int | str]


def digest(chunks: Iterable[bytes]) -> str:
    """Return twelve hexadecimal digits that depend on every bit of the chunks."""
    sha256 = hashlib.sha256()
    for chunk in chunks:
        sha256.update(chunk)
    return sha256.hexdigest()[:12]


def data_facts(samples: RegionDataset | Subset) -> Facts:
    """Return {"rows", "images": numbers, "pictures", "captions", "masks": digests} of samples."""
    dataset, indices = unwrap_subset(samples)
    keys, contents = dataset.image_keys[indices], dataset.content_keys[indices]
    spread = np.linspace(0, len(indices) - 1, min(NUM_WHOLE_IMAGES, len(indices))).astype(int)
    pictures = digest([keys.tobytes(), *_images(dataset, indices[spread])])
    captions, masks = (digest([np.ascontiguousarray(column).tobytes()]) for column in contents.T)
    return dict(
        rows=len(indices),
        images=len(np.unique(keys)),
        pictures=pictures,
        captions=captions,
        masks=masks,
    )


def _images(dataset: RegionDataset, indices: np.ndarray) -> Iterator[bytes]:
    """Yield the encoded images of samples; one that cannot be read is empty."""
    for i in indices.tolist():
        try:
            yield dataset.encoded_image(i)
        except DAMAGED:  # it was there when the data set was opened; training replaces the sample
            yield b""


def changes(before: Facts, now: Facts) -> str:
    """Return what differs between the facts of two data sets in words; "" if nothing does."""
    differences = [
        f"{name} {before.get(name)} -> {now[name]}"
        for name in ("rows", "images")
        if before.get(name) != now[name]
    ]
    others = [name for name in ("pictures", "captions", "masks") if before.get(name) != now[name]]
    if not differences and others:
        differences = [f"{now['rows']} rows as before, but other {' and '.join(others)}"]
    return ", ".join(differences)
