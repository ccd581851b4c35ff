"""Write a GAR and a DAM folder of drawn scenes with every edge case planted at a known count.

    python -m tests.campaigns.messy_data --output_dir /tmp/messy [--num_rows 2000]

Prints what a correct reader must report of each: rows, kept, skipped by reason, damaged when
decoded. `tools.inspect_data` must find the same.
"""

import argparse
import base64
import io
import json
import pickle
import tarfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
from pycocotools import mask as coco_mask

from tests.campaigns.messy_cases import (
    Bomb,
    Planted,
    counted_cases,
    empty,
    good,
    plant,
    regions,
    runs_of,
)
from tools.gar_writer import INSTRUCTION, SCHEMA, encode_image, encode_mask

RLE_TYPE = SCHEMA.field("mask_rle").type


def write_messy_gar(folder: Path, num_rows: int, seed: int = 0) -> dict:
    """Facts that a reader must report of `num_rows` rows, written in six parts of other schemas."""
    planted, source, rng = Planted(), regions(seed), np.random.default_rng(seed)
    each = max(4, num_rows // 100)
    write_relations(folder, source, each, planted)
    write_whole_images(folder, source, each, planted)
    write_other_counts(folder, source, each, planted)
    rows = [_gar_row(*plant(name, next(source), planted)) for name in counted_cases(num_rows)]
    rows += _own_gar_rows(folder, source, each, planted)
    rows += [
        _gar_row(*plant(None, region, planted))
        for region in islice(source, num_rows - planted.rows - len(rows))
    ]
    planted.rows += len(rows)
    rows = [rows[k] for k in rng.permutation(len(rows))]
    for number, start in enumerate(range(0, len(rows), 400)):
        _write_shard(
            folder / "Fine-Grained-Dataset-Part1" / f"data-{number:05d}-of-00100.arrow",
            rows[start : start + 400],
            SCHEMA,
        )
    _write_shard(folder / "Fine-Grained-Dataset-Part2" / "data-00000-of-00001.arrow", [], SCHEMA)
    return planted.report()


def write_relations(folder: Path, source: Iterator[tuple], num_rows: int, planted: Planted):
    """Rows with a list of masks: two good ones, and by turns none, an empty one or null more.

    Every fourth has no mask at all.
    """
    rows = []
    for k in range(num_rows):
        image, mask, text, shape = next(source)
        more, reason = [
            ([], None),
            ([encode_mask(empty(mask))], "empty mask"),
            ([None], "no mask"),
        ][k % 3]
        rles = [encode_mask(mask), *more, encode_mask(~mask)] if k % 4 else []
        for why in [None, None] + ([reason] if reason else []) if rles else ["no mask"]:
            planted.add(why)
        rows.append(_gar_row(good(image, mask, text), shape) | {"mask_rle": rles})
    planted.rows += len(rows)
    _write_shard(
        folder / "Relation" / "data-00000-of-00001.arrow",
        rows,
        SCHEMA.set(1, pa.field("mask_rle", pa.list_(RLE_TYPE))),
    )


def write_whole_images(folder: Path, source: Iterator[tuple], num_rows: int, planted: Planted):
    """Rows without a column of masks, of which some have no answer."""
    rows = []
    for k in range(num_rows):
        row = _gar_row(*plant(None if k % 3 else "blank caption", next(source), planted))
        rows.append({name: value for name, value in row.items() if name != "mask_rle"})
    planted.rows += len(rows)
    _write_shard(folder / "Whole" / "data-00000-of-00001.arrow", rows, SCHEMA.remove(1))


def write_other_counts(folder: Path, source: Iterator[tuple], num_rows: int, planted: Planted):
    """Uncompressed counts and counts of bytes, every third damaged, columns in another order."""
    for part, kind, encode in (
        ("Uncompressed", pa.list_(pa.int32()), runs_of),
        ("Bytes", pa.binary(), lambda m: coco_mask.encode(np.asfortranarray(m, dtype=np.uint8))),
    ):
        rows = []
        for k in range(num_rows):
            region = next(source)
            rle = encode(region[1])
            planted.add(None if k % 3 else "bad mask RLE")
            rle = rle if k % 3 else rle | {"counts": rle["counts"][:-1]}
            rows.append(_gar_row(good(*region[:3]), region[3]) | {"mask_rle": rle, "id": k})
        planted.rows += len(rows)
        schema = SCHEMA.set(
            1, pa.field("mask_rle", pa.struct([("counts", kind), ("size", pa.list_(pa.int64()))]))
        )
        _write_shard(
            folder / part / "data-00000-of-00001.arrow",
            rows,
            pa.schema([("id", pa.int64()), *reversed(list(schema))]),
        )


def _own_gar_rows(folder: Path, source, num_each: int, planted: Planted) -> list[dict]:
    """Rows whose edge case only GAR's columns have: conversations, and images by path."""
    (folder / "Fine-Grained-Dataset-Part1" / "images").mkdir(parents=True)
    rows = []
    for k in range(num_each):
        for said, reason in (
            (None, "blank caption"),
            ([], "blank caption"),
            (["human"], "blank caption"),
            (["human", "assistant", "human", "gpt"], None),
        ):
            region = next(source)
            planted.add(reason)
            said = said and [{"from": who, "value": region[2]} for who in said]
            rows.append(_gar_row(good(*region[:3]), region[3]) | {"conversations": said})
        for place in ("file", "no file", "data"):
            image, mask, text, shape = next(source)
            path = (
                f"images/{k}.png"
                if place != "data"
                else f"data:image/png;base64,{base64.b64encode(encode_image(image)).decode()}"
            )
            if place == "file":
                (folder / "Fine-Grained-Dataset-Part1" / path).write_bytes(encode_image(image))
            planted.add("no image" if place == "no file" else None)
            rows.append(
                _gar_row(good(image, mask, text), shape)
                | {"image": {"bytes": None, "path": "no/" * (place == "no file") + path}}
            )
    return rows


def write_messy_dam(folder: Path, num_rows: int, seed: int = 1) -> dict:
    """Facts that a reader must report of `num_rows` regions, written as four splits.

    Each has another form of annotations.
    """
    planted, source = Planted(), regions(seed)
    names = counted_cases(num_rows)
    names = [names[k] for k in np.random.default_rng(seed).permutation(len(names))] + [None] * (
        num_rows - len(names)
    )
    for split, start in zip(
        ("SAV", "COCOStuff", "LVIS", "PACO"), range(0, 4 * -(-num_rows // 4), -(-num_rows // 4))
    ):
        _write_split(folder / split, names[start : start + -(-num_rows // 4)], source, planted)
    return planted.report()


def _write_split(folder: Path, names: list, source, planted: Planted):
    """One split: a sample for each case, in the split's own form."""
    (folder / "images").mkdir(parents=True)
    annotations = {"nothing": []}
    planted.rows += 1
    planted.add("no region")
    with tarfile.open(folder / "images" / "000.tar", "w") as tar:
        for name in ("../escape.jpg", "/tmp/absolute.jpg"):
            _add_member(tar, name, b"outside")
        link = tarfile.TarInfo("link.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
        for number, name in enumerate(names):
            region, shape = plant(name, next(source), planted)
            found = {"caption": region["caption"], "mask_rle": region["rle"]}
            name_of_list = ("regions", "items", "objects", "annotations", "list")[number % 5]
            forms = {
                "SAV": found,
                "COCOStuff": [found],
                "LVIS": {name_of_list: [found]},
                "PACO": {"7": found},
            }
            sample = f"{folder.name.lower()}_{number:06d}"
            annotations[sample] = forms[folder.name]
            if region["image"] is not None:
                if folder.name == "SAV":  # a later frame first, which must not be taken
                    _add_member(tar, f"{sample}.10.jpg", b"not the first frame")
                _add_member(
                    tar, f"{sample}{'.0' if folder.name == 'SAV' else ''}.jpg", region["image"]
                )
            _add_member(tar, f"{sample}.pickle", pickle.dumps(Bomb()))
    planted.rows += len(names)
    (folder / "annotations.json").write_text(json.dumps(annotations, ensure_ascii=False))


def _gar_row(region: dict, shape: str) -> dict:
    return {
        "image": {"bytes": region["image"], "path": None},
        "mask_rle": region["rle"],
        "conversations": [
            {"from": "human", "value": INSTRUCTION},
            {"from": "gpt", "value": region["caption"]},
        ],
        "catagory": [shape],
    }


def _write_shard(path: Path, rows: list[dict], schema: pa.Schema, new_writer=pa.ipc.new_stream):
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_writer(str(path), schema) as writer:
        writer.write_table(pa.Table.from_pylist(rows, schema=schema), max_chunksize=100)


def _add_member(tar: tarfile.TarFile, name: str, data: bytes):
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--output_dir", type=Path, required=True, help="receives the folders gar and dam"
    )
    parser.add_argument(
        "--num_rows", type=int, default=2000, help="rows of GAR, regions of DAM; at least 300"
    )
    args = parser.parse_args(argv)
    if args.num_rows < 300:
        parser.error(
            f"--num_rows {args.num_rows}: at least 300, so that every edge case finds room"
        )
    for dataset, write in (("gar", write_messy_gar), ("dam", write_messy_dam)):
        print(json.dumps({dataset: write(args.output_dir / dataset, args.num_rows)}, indent=1))


if __name__ == "__main__":
    main()
