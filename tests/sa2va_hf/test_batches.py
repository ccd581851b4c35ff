"""Prompts of a batch: padding and the rows that answer them."""

from sa2va_hf.batches import Prompts, pad_left


def test_pad_left():
    ids, mask = pad_left([[1, 2, 3], [4]], 9)
    assert ids.tolist() == [[1, 2, 3], [9, 9, 4]] and mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def test_prompts_repeat_by_row_index():
    prompts = Prompts([[1], [2]], [0, 1], None).repeat(3)
    assert prompts.ids == [[1], [1], [1], [2], [2], [2]] and prompts.image_index == [
        0,
        0,
        0,
        1,
        1,
        1,
    ]
