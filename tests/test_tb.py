"""The pictures of rollouts: of any shape of image, on a canvas that the text fits."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rl_train.tb import FOUND, REGION, rollout_picture


@pytest.mark.parametrize(
    "width, height, drawn_width, drawn_height",
    [
        (320, 240, 240, 180),
        (100, 300, 240, 720),
        (1000, 2, 240, 1),
        (2, 1000, 1, 720),
        (1, 1, 240, 240),
        (300, 1000, 216, 720),
    ],
)
@pytest.mark.parametrize("loop", [1, 2])
def test_a_picture_of_any_shape(loop, width, height, drawn_width, drawn_height):
    mask = torch.zeros(height, width, dtype=torch.bool)
    batch = SimpleNamespace(
        inputs=SimpleNamespace(sam_pixels=torch.zeros(1, 3, 1024, 1024, dtype=torch.uint8)),
        masks=[~mask],
        captions=["a cup"],
    )
    rollout = SimpleNamespace(
        sample_of_row=[0],
        images=SimpleNamespace(sizes=[(height, width)]),
        batch=batch,
        masks=[mask],
        texts=["a mug"],
        replies=["a cup"],
    )
    picture = rollout_picture(
        SimpleNamespace(mask_sigma=None if loop == 1 else 1.0),
        rollout,
        0,
        torch.ones(1),
        torch.ones(1),
    )
    assert picture.dtype == np.uint8 and picture.shape == (
        drawn_height + 18 * (loop + 2) + 8,
        488,
        3,
    )
    tinted = (0.3 * np.array(REGION)).astype(np.uint8)
    assert (picture[:drawn_height, :drawn_width] == tinted).all() and (
        picture[:, drawn_width:248][:drawn_height] == 255
    ).all()
    assert (picture[:drawn_height, 248 : 248 + drawn_width] == 0).all() and not (
        picture == FOUND
    ).all(-1).any()
