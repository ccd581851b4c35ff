"""Mutated run lengths and Arrow shards: an error that names the file, or samples that are whole; never a crash or a hang.

FUZZ_EXAMPLES=10000 python -m pytest tests/data/test_fuzz.py      # of each kind; the ordinary run has a few hundred
"""

import os
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pycocotools import mask as coco

from rl_train.data.masks import decode_runs, rle_runs
from tools.gar_writer import encode_mask

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", 300))
MASK = np.random.default_rng(0).random((30, 40)) < 0.1
GOOD = encode_mask(MASK)["counts"].encode()

mutated = st.tuples(
    st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), max_size=4),
    st.integers(0, len(GOOD)),
    st.binary(max_size=3),
).map(lambda m: mutate(GOOD, *m))
numbers = st.one_of(st.integers(-5, 60), st.sampled_from([2**31, 2**62, 2**63 - 1, -(2**63)]))
sizes = st.one_of(st.just((30, 40)), st.tuples(numbers, numbers))


def mutate(data: bytes, changes, cut: int, more: bytes) -> bytes:
    data = bytearray(data)
    for place, value in changes:
        data[place] = value
    return bytes(data[:cut] + more + data[cut:])


@settings(
    max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(
    st.lists(
        st.tuples(
            st.one_of(
                st.binary(max_size=40), mutated, st.text("01OX?n~", max_size=30).map(str.encode)
            ),
            sizes,
        ),
        min_size=1,
        max_size=3,
    )
)
@example([(GOOD, (30, 40))])
def test_run_lengths(items):
    """A mask that is accepted has the size that it states, and pycocotools decodes the same."""
    for counts, size in items:
        try:
            runs, height, width = rle_runs({"counts": counts, "size": list(size)})
        except ValueError:
            continue
        mask = decode_runs(runs, height, width)
        assert mask.shape == size
        assert np.array_equal(coco.decode({"counts": counts, "size": size}), mask)


@settings(
    max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(st.lists(st.one_of(numbers, st.none(), st.floats(), st.booleans()), max_size=6), sizes)
def test_uncompressed_runs(counts, size):
    try:
        runs, height, width = rle_runs({"counts": counts, "size": list(size)})
    except ValueError:
        return
    assert decode_runs(runs, height, width).shape == size


# A process of its own, so that a crash in pyarrow or pillow is a failure and not the end of the tests.
SHARDS = """
import faulthandler, io, random, sys
from pathlib import Path
import numpy as np, pyarrow as pa
from PIL import Image
from rl_train.data import DamagedSample, GraspAnyRegionDataset
from tools.gar_writer import SCHEMA, encode_image, encode_mask
faulthandler.dump_traceback_later(60, exit=True)                                     # a hang
folder, start, end = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (12, 16, 3), dtype=np.uint8))
rows = [{"image": {"bytes": encode_image(image, kind), "path": None}, "mask_rle": encode_mask(np.eye(12, 16, dtype=bool)),
         "conversations": [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "A line."}], "catagory": ["line"]}
        for kind in ("PNG", "JPEG")]
def listed(schema):
    return schema.set(1, pa.field("mask_rle", pa.list_(schema.field("mask_rle").type)))
originals = []
for schema, table in ((SCHEMA, rows), (listed(SCHEMA), [row | {"mask_rle": [row["mask_rle"]] * 2} for row in rows])):
    for new, options in ((pa.ipc.new_stream, {}), (pa.ipc.new_file, {}), (pa.ipc.new_stream, {"compression": "zstd"})):
        sink = io.BytesIO()
        with new(sink, schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
            writer.write_table(pa.Table.from_pylist(table, schema=schema))
        originals.append(sink.getvalue())
opened = errors = samples = damaged = 0
for number in range(start, end):
    rng = random.Random(number)
    data = bytearray(rng.choice(originals))
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        place = rng.randrange(len(data)) if rng.random() < 0.5 else rng.randrange(min(len(data), 1600))   # metadata lies first
        change = rng.random()
        if change < 0.4: data[place] ^= 1 << rng.randrange(8)
        elif change < 0.7: data[place] = rng.choice((0, 1, 127, 128, 255))
        elif change < 0.8: data[place:place + 8] = rng.choice((2 ** 31 - 1, 2 ** 40, 2 ** 63 - 1, 2 ** 64 - 1, 0)).to_bytes(8, "little")
        elif change < 0.9: del data[place:place + rng.randrange(1, 9)]
        else: data[place:place] = rng.randbytes(rng.randrange(1, 9))
    (folder / "data-0.arrow").write_bytes(data)
    faulthandler.dump_traceback_later(60, exit=True)
    try:
        dataset = GraspAnyRegionDataset(folder)
    except ValueError:
        errors += 1
        continue
    opened += 1
    for i in range(len(dataset)):
        try:
            sample = dataset[i]
        except DamagedSample:
            damaged += 1
            continue
        samples += 1
        assert sample["mask"].shape == (sample["image"].height, sample["image"].width) and sample["mask"].dtype == bool, number
        assert sample["caption"] and isinstance(sample["category"], str), number
print(opened, errors, samples, damaged)
"""


def test_arrow_shards(tmp_path):
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", SHARDS, str(tmp_path), "0", str(EXAMPLES)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    opened, errors, samples, damaged = map(int, done.stdout.split())
    assert opened + errors == EXAMPLES and min(opened, errors, samples) > EXAMPLES // 20
    print(
        f"{EXAMPLES} shards in {time.monotonic() - start:.0f} s: {opened} opened, {errors} refused, {samples} samples, {damaged} damaged"
    )


@pytest.mark.parametrize("counts", ["1" * 100_000, "o" * 100_000 + "0", "0" * 1_000_000])
def test_long_strings_end_soon(counts):
    start = time.process_time()
    with pytest.raises(ValueError):
        rle_runs({"counts": counts, "size": [1000, 1000]})
    assert time.process_time() - start < 1
