"""Splits of Describe-Anything for the tests: a good region, images, and how they are written."""

import io
import json
import tarfile

import numpy as np
from PIL import Image

from tools.gar_writer import encode_image, encode_mask

W, H = 40, 30


MASK = np.zeros((H, W), dtype=bool)


MASK[5:20, 10:35] = True


IMAGES = [
    Image.fromarray(np.random.default_rng(i).integers(0, 256, (H, W, 3), dtype=np.uint8))
    for i in range(3)
]


PNGS = [encode_image(image) for image in IMAGES]


def region(text="A cup.", mask=MASK, **changes):
    return {"caption": text, "mask_rle": encode_mask(mask)} | changes


def add(tar, name, data=b"", **changes):
    member = tarfile.TarInfo(name)
    member.size = len(data)
    for key, value in changes.items():
        setattr(member, key, value)
    tar.addfile(member, io.BytesIO(data))


def write(folder, annotations, members, tar="000.tar"):
    (folder / "images").mkdir(parents=True, exist_ok=True)
    (folder / "annotations.json").write_text(
        annotations if isinstance(annotations, str) else json.dumps(annotations)
    )
    with tarfile.open(folder / "images" / tar, "w") as file:
        for name, data in members:
            add(file, name, data)
    return folder / "images" / tar


def samples(dataset):
    return [(dataset[i]["image_id"], dataset[i]["caption"]) for i in range(len(dataset))]
