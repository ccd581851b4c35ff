"""Mutated run lengths and Arrow shards: an error that names the file, or samples that are whole;
never a crash or a hang.

    FUZZ_EXAMPLES=10000 python -m pytest tests/data/test_fuzz.py      # of each kind
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from pycocotools import mask as coco

from rl_train.data.rle import decode_mask, rle_runs
from tools.gar_writer import encode_mask

pytest.importorskip("hypothesis", reason="hypothesis is not installed (extra: test)")
from hypothesis import HealthCheck, example, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

ROOT = Path(__file__).parents[2]
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", 300))
TIMEOUT = max(200, EXAMPLES)  # seconds of a subprocess
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
            mask = decode_mask({"counts": counts, "size": list(size)})
        except ValueError:
            continue
        assert mask.shape == size
        assert np.array_equal(coco.decode({"counts": counts, "size": size}), mask)


@settings(
    max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(st.lists(st.one_of(numbers, st.none(), st.floats(), st.booleans()), max_size=6), sizes)
def test_uncompressed_runs(counts, size):
    try:
        mask = decode_mask({"counts": counts, "size": list(size)})
    except ValueError:
        return
    assert mask.shape == size


def test_arrow_shards(tmp_path):
    """Run in a process of its own, so that a crash in pyarrow or pillow is but a failure."""
    start = time.monotonic()
    script = [sys.executable, "-X", "faulthandler", "-m", "tests.campaigns.fuzz_shards"]
    done = subprocess.run(
        [*script, str(tmp_path), str(EXAMPLES)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    opened, errors, samples, damaged = map(int, done.stdout.split())
    assert opened + errors == EXAMPLES and min(opened, errors, samples) > EXAMPLES // 20
    print(
        f"{EXAMPLES} shards in {time.monotonic() - start:.0f} s: {opened} opened, "
        f"{errors} refused, {samples} samples, {damaged} damaged"
    )


@pytest.mark.parametrize("counts", ["1" * 100_000, "o" * 100_000 + "0", "0" * 1_000_000])
def test_long_strings_end_soon(counts):
    start = time.process_time()
    with pytest.raises(ValueError):
        rle_runs({"counts": counts, "size": [1000, 1000]})
    assert time.process_time() - start < 1


def test_whole_samples():
    """Rows of all formats, from their files to the tiny model; 20,000 of them by hand:

    python -m tests.campaigns.fuzz_samples --samples 20000
    """
    script = [sys.executable, "-X", "faulthandler", "-m", "tests.campaigns.fuzz_samples"]
    number = ["--samples", str(EXAMPLES)]
    done = subprocess.run(
        [*script, *number], capture_output=True, text=True, cwd=ROOT, timeout=TIMEOUT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout)
    print(seen)
    counts = seen["counts"]
    assert seen["samples"] == EXAMPLES and counts["whole"] > EXAMPLES // 4
    assert counts["forward"] == counts["whole"] // 10 and len(counts) > 12
