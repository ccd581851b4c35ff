"""The pictures of rollouts: of any shape of image, on a canvas that the text fits."""

import numpy as np
import pytest
import torch
from PIL import Image

from rl_train.objective import Work
from rl_train.tb import FOUND, REGION, rollout_picture
from rl_train.types import Batch, Outcome, Rollout


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
    region = torch.ones(height, width, dtype=torch.bool)
    batch = Batch([0], [region], ["a cup"], ["id"], [], None)
    rollout = Rollout(batch, None, None, ["a mug"], 1, *[None] * 5)
    outcome = Outcome({}, [~region], ["a cup"] if loop == 2 else [])
    work = Work(None, rollout, outcome, torch.ones(1), torch.ones(1), None)
    picture = rollout_picture(Image.new("RGB", (1024, 1024)), work, 0)
    lines = loop + 2
    assert picture.dtype == np.uint8
    assert picture.shape == (drawn_height + 18 * lines + 8, 488, 3)
    tinted = (0.3 * np.array(REGION)).astype(np.uint8)
    left, right = picture[:drawn_height, :248], picture[:drawn_height, 248:]
    assert (left[:, :drawn_width] == tinted).all() and (left[:, drawn_width:] == 255).all()
    assert (right[:, :drawn_width] == 0).all()
    assert not (picture == FOUND).all(-1).any()
