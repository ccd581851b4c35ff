"""Run-length masks: hand-worked strings, agreement with pycocotools, and every kind of damage."""

import numpy as np
import pytest
from pycocotools import mask as coco_mask

from rl_train.data.rle import (
    MASK_PIXELS,
    decode_mask,
    mask_size,
    resize_nearest,
    rle_runs,
)
from tools.gar_writer import encode_mask


def test_hand_worked_string():
    # 2x3 mask, down the columns 0 1 | 1 1 | 0 0: runs 1, 3, 2; one character each, chr(48 + run)
    runs, height, width = rle_runs({"counts": "132", "size": [2, 3]})
    assert runs.tolist() == [1, 3, 2] and (height, width) == (2, 3) and runs[1::2].sum() == 3
    assert decode_mask({"counts": "132", "size": [2, 3]}).tolist() == [
        [False, True, False],
        [True, True, False],
    ]


def test_hand_worked_differences_and_two_characters():
    # runs 40, 2, 18, 1, 3 of a 8x8: 40 = 01000 + 32*1 -> 'X' (48+8+32), '1'; 18 = 10010 + 32*0 ->
    # 'b', '0' (its sign bit needs a second character); 1 - 2 = -1 -> 48 + 31 = 'O'; 3 - 18 = -15 =
    # 10001 -> 48 + 17 = 'A'
    assert rle_runs({"counts": "X12b0OA", "size": [8, 8]})[0].tolist() == [40, 2, 18, 1, 3]


@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (64, 48), (300, 500)])
def test_decodes_like_pycocotools(shape):
    rng = np.random.default_rng(0)
    for share in (0.0, 0.02, 0.5, 1.0):
        mask = rng.random(shape) < share
        if shape[0] > 20:
            mask[5:15, 3:40] = True
        rle = encode_mask(mask)
        for counts in (rle["counts"], rle["counts"].encode(), rle_runs(rle)[0].tolist()):
            form = {"counts": counts, "size": rle["size"]}
            assert np.array_equal(decode_mask(form), mask)
            assert rle_runs(form)[0][1::2].sum() == mask.sum()
        uncompressed = {"counts": rle_runs(rle)[0].tolist(), "size": rle["size"]}
        assert np.array_equal(coco_mask.decode(coco_mask.frPyObjects(uncompressed, *shape)), mask)


@pytest.mark.parametrize("text", ["132", b"132", [1, 3, 2]])
def test_sizes_out_of_range_are_bad(text):
    assert rle_runs({"counts": text, "size": [2, 3]})[0].tolist() == [1, 3, 2]
    for size in ([0, 3], [-2, -3], [2**40, 2**40], [3 * 10**8 + 1, 1], [2, 4], [True, 6], "23"):
        with pytest.raises(ValueError):
            rle_runs({"counts": text, "size": size})


def test_strings_of_many_masks():
    """Good ones decode to pycocotools' area; each kind of damage is seen."""
    rng = np.random.default_rng(1)
    for i in range(60):
        shape = rng.integers(1, 60, 2).tolist()
        mask = rng.random(shape) < rng.choice([0, 0.02, 0.5, 1])
        good = encode_mask(mask)["counts"].encode()
        assert rle_runs({"counts": good, "size": shape})[0][1::2].sum() == mask.sum()
        cut, more, wide = good[:-1], good + b"0", b"XXXXXXXX1" + good
        for bad in (b"", b"~" + good, good + b"X", wide, b"\x00", cut if cut else b"", more):
            if bad == more and len(rle_runs({"counts": good, "size": shape})[0]) % 2 == 0:
                continue
            try:
                runs = rle_runs({"counts": bad, "size": shape})[0]
            except ValueError:
                continue
            assert runs.min() >= 0 and runs.sum() == shape[0] * shape[1]


@pytest.mark.parametrize(
    "counts, size",
    [
        ("132", [3, 3]),  # sum 6, not 9
        ("", [2, 3]),
        (b"", [2, 3]),
        ([], [2, 3]),
        ("13X", [2, 3]),  # cut off: the last character says "continues"
        ("1 2", [2, 3]),
        ("1\x7f2", [2, 3]),
        ("1é2", [2, 3]),
        ("XXXXXXXX1", [2, 3]),  # a run longer than any mask
        ("O7", [2, 3]),  # runs -1, 7 sum to 6
        ([7, -1], [2, 3]),
        ([1, None, 5], [2, 3]),
        (None, [2, 3]),
        ("132", None),
        ("132", [6]),
        ("132", [2, 3, 1]),
        ("132", [-2, -3]),
        ("132", [2, None]),
        ("0", [0, 5]),
        ("132", [10**5, 10**5]),
        ([3, 3.0], [2, 3]),
        ([2**70, 1], [2, 3]),
    ],
)
def test_damaged_rle_is_refused(counts, size):
    with pytest.raises(ValueError):
        rle_runs({"counts": counts, "size": size})


def test_resize_nearest():
    mask = np.array([[1, 0], [0, 0]], dtype=bool)
    assert resize_nearest(mask, 4, 6).nonzero()[0].tolist() == [0, 0, 0, 1, 1, 1]
    assert resize_nearest(mask, 4, 6).nonzero()[1].tolist() == [0, 1, 2, 0, 1, 2]
    big = np.zeros((4, 4), dtype=bool)
    big[1, 3] = True  # 2x2 takes pixels 1 and 3 of each axis
    assert resize_nearest(big, 2, 2).tolist() == [[False, True], [False, False]]


@pytest.mark.parametrize("size", [(1, 1), (2048, 2048), (20, 20_000), (1, 65_535)])
def test_masks_up_to_the_bound_keep_their_size(size):
    assert mask_size(*size) == size


@pytest.mark.parametrize("size", [(2048, 2049), (8000, 8000), (65_535, 100), (3000, 30_000)])
def test_masks_above_it_keep_their_shape(size):
    height, width = mask_size(*size)
    assert 0.98 * MASK_PIXELS < height * width <= MASK_PIXELS
    assert height / width == pytest.approx(size[0] / size[1], rel=0.1)
