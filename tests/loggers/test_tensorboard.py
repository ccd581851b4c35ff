"""Pictures of rollouts: of any shape of image, on a canvas that the text fits; and their lines."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from rl_train.data.rle import decode_mask
from rl_train.distributed.process_group import RankInfo
from rl_train.loggers.pictures import (
    BOX,
    CONTOUR,
    LINE_HEIGHT,
    NEGATIVE,
    OUTSIDE,
    POSITIVE,
    PREDICTED,
    REGION,
    EvalAnswer,
    evaluation_picture,
    rollout_picture,
    small_mask,
)
from rl_train.loggers.tensorboard import RunLogger, overview_layout
from rl_train.loss import ScoredRollout
from rl_train.points.parser import PointPrompt
from rl_train.rollout import Batch, RewardOutput, Rollout
from tools.demo.make_demo import TRAIN
from tools.demo.scenes import make_scene


@pytest.mark.parametrize(
    "width, height, drawn_width, drawn_height",
    [
        (320, 240, 420, 315),
        (100, 300, 280, 840),
        (1000, 2, 420, 1),
        (2, 1000, 2, 840),
        (1, 1, 420, 420),
        (300, 1000, 252, 840),
    ],
)
@pytest.mark.parametrize("loop", [1, 2])
def test_a_picture_of_any_shape(loop, width, height, drawn_width, drawn_height):
    region = torch.ones(height, width, dtype=torch.bool)
    batch = Batch([0], [region], ["a cup"], ["id"], [], None)
    rollout = Rollout(batch, None, None, ["a mug"], 1, *[None] * 5)
    outcome = RewardOutput({}, [~region], replies=["a cup"] if loop == 2 else [])
    work = ScoredRollout(None, rollout, outcome, torch.ones(1), torch.ones(1), None)
    picture = rollout_picture(Image.new("RGB", (1024, 1024), (200, 200, 200)), work, 0)
    lines = loop + 2
    assert picture.dtype == np.uint8
    assert picture.shape == (drawn_height + LINE_HEIGHT * lines + 8, 848, 3)
    left, right = picture[:drawn_height, :428], picture[:drawn_height, 428:]
    inner = left[CONTOUR:, CONTOUR:][
        : drawn_height - 2 * CONTOUR, : max(drawn_width - 2 * CONTOUR, 0)
    ]
    assert (left[0, :drawn_width] == REGION).all() and (inner == 200).all()
    assert (left[:, drawn_width:] == 255).all()
    assert (right[:, :drawn_width] == int(200 * OUTSIDE)).all()
    assert not (picture == PREDICTED).all(-1).any()


def test_an_answer_s_box_and_points_are_drawn():
    """A mask of 20 x 10 (W, H), drawn at 420 x 210, on grey: both panels."""
    region = torch.zeros(10, 20, dtype=torch.bool)
    found, without = region.clone(), torch.ones_like(region)
    found[:5] = True
    batch = Batch([0], [region], ["a cup"], ["id"], [], None)
    rollout = Rollout(batch, None, None, ["{}", "no"], 2, *[None] * 5)
    answer = PointPrompt(((4, 2, 10, 9),), ((5, 7),), ((15, 8),))
    drawn = dict(point_prompts=[answer, None], masks_without_negatives=[without, region])
    outcome = RewardOutput({}, [found, region], **drawn)
    work = ScoredRollout(None, rollout, outcome, torch.ones(2), torch.ones(2), None)
    grey = Image.new("RGB", (64, 64), (200, 200, 200))
    picture = rollout_picture(grey, work, 0)
    assert picture.shape[1] == 2 * 428 - 8
    for left in (0, 428):  # (x, y) in a picture = 21 times that in the mask
        assert tuple(picture[7 * 21, left + 5 * 21]) == POSITIVE
        assert tuple(picture[8 * 21, left + 15 * 21]) == NEGATIVE
        assert tuple(picture[2 * 21, left + 7 * 21]) == BOX
    outside = int(200 * OUTSIDE)
    for left, at_top, below in ((0, outside, outside), (428, 200, outside)):
        assert (picture[18, left + 350] == at_top).all()
        assert (picture[192, left + 350] == below).all()
    refused = rollout_picture(grey, work, 1)
    assert (refused[:210, :420] == outside).all() and refused.shape == picture.shape


@pytest.mark.parametrize("color", [PREDICTED, (147, 60, 180), (0, 0, 0), (255, 255, 255)])
def test_a_mask_is_seen_on_any_color(color):
    """The inside has the image's own colour; contour, rim or outside differ from it."""
    target = torch.zeros(60, 60, dtype=torch.bool)
    target[20:40, 20:40] = True
    image = Image.new("RGB", (60, 60), color)
    answers = [EvalAnswer("base", target, 1.0, "a"), EvalAnswer("policy", ~target, 0.0, "b")]
    picture = evaluation_picture(image, target, "a square", answers).astype(int)
    assert picture.shape == (420 + 2 * LINE_HEIGHT + 8, 3 * 420 + 2 * 8, 3)
    for left, contour in ((0, REGION), (428, PREDICTED)):
        panel = picture[:420, left : left + 420]
        assert (panel[210, 210] == color).all()  # inside
        assert (panel[120, 210] == (np.array(color) * OUTSIDE).astype(int)).all()
        assert (panel[141, 210] == contour).all() and (panel[139, 210] == 0).all()  # contour, rim
    panel = picture[:420, 2 * 428 :]  # the policy's mask is all but the square
    assert (panel[210, 210] == (np.array(color) * OUTSIDE).astype(int)).all()
    assert (panel[100, 210] == color).all()


def test_long_texts_stay_under_their_panel():
    target = torch.ones(10, 10, dtype=torch.bool)
    answers = [EvalAnswer("base", target, 0.5, "word " * 40)]
    picture = evaluation_picture(Image.new("RGB", (10, 10)), target, "a", answers)
    num_lines = 1 + 4  # the title; 40 words of five letters, ten a line of 50
    assert picture.shape == (420 + num_lines * LINE_HEIGHT + 8, 848, 3)
    assert (picture[420:, 420:428] == 255).all()  # between the panels


def test_no_scene_has_a_contour_s_color():
    for index in range(40):
        scene = make_scene(0, TRAIN, index)
        pixels = np.asarray(scene.image).reshape(-1, 3).astype(int)
        for color in (REGION, PREDICTED):
            assert np.linalg.norm(pixels - color, axis=1).min() > 80, index


def test_the_overview_has_the_loops_side_by_side():
    layout = overview_layout(["loop1", "loop2"], samples_answers=True)
    assert list(layout)[:2] == ["reward", "KL to the reference"]
    assert layout["reward"] == {
        "loop1: reward": ["Multiline", ["^loop1/reward_mean$"]],
        "loop2: reward": ["Multiline", ["^loop2/reward_mean$"]],
    }
    assert list(layout["loss"]) == ["loop1: loss", "loop2: loss"]
    held_out = layout["evaluation: policy (eval) and teacher (eval_ema)"]["IoU of masks"]
    assert held_out[1][:2] == ["^eval/seg_iou$", "^eval_ema/seg_iou$"]
    supervised = overview_layout(["region_captions"], samples_answers=False)
    assert supervised["loss"] == {
        "region_captions: loss": ["Multiline", ["^region_captions/loss$"]]
    }
    assert "reward" not in str(supervised) and "eval_ema/" not in str(supervised)


def test_rollouts_are_json_whatever_they_say(tmp_path):
    odd = ["\ud800", "\u2028\x85\r\n", '"}\n{', "\x00\x1b", "狗 🐕", "a dog"]
    batch = Batch(list(range(6)), [None] * 6, odd[::-1], odd, [], None)
    rollout = Rollout(batch, None, None, odd, 1, *[None] * 5)
    rewards = torch.tensor([0.5, math.nan, 1e15, -1e-30, 0, 1])
    outcome = RewardOutput({"iou": rewards}, [], replies=odd)
    work = ScoredRollout(
        SimpleNamespace(name="loop1"), rollout, outcome, rewards, torch.zeros(6), None
    )
    log = RunLogger(tmp_path, RankInfo(1, 2, torch.device("cpu")), start=0)
    log.rollouts(0, work)
    log.close()
    text = (tmp_path / "rollouts" / "rank1.jsonl").read_text()
    lines = [json.loads(line, parse_constant=pytest.fail) for line in text.split("\n")[:-1]]
    for line, said, caption in zip(lines, odd, odd[::-1], strict=True):
        assert line["completion"] == line["reply"] == line["image_id"] == said
        assert line["caption"] == caption
    assert [line["reward"] for line in lines] == [0.5, None, pytest.approx(1e15), 0, 0, 1]
    log = RunLogger(
        tmp_path, RankInfo(1, 2, torch.device("cpu")), start=1
    )  # as a resume reads and writes
    assert (tmp_path / "rollouts" / "rank1.jsonl").read_text() == text
    rewards[0] = math.inf
    with pytest.raises(ValueError, match="not JSON compliant"):
        log.rollouts(1, work)
    log.close()


@pytest.mark.parametrize(
    "shape, size", [((3, 5), (3, 5)), ((512, 1024), (128, 256)), ((2000, 3), (256, 1))]
)
def test_a_mask_is_kept_small(shape, size):
    """Its lower half: of any shape the lower half of the kept one."""
    mask = torch.zeros(shape, dtype=torch.bool)
    mask[-(shape[0] // 2) :] = True
    kept = small_mask(mask)
    assert kept["size"] == list(size) and json.loads(json.dumps(kept)) == kept
    expected = np.zeros(size, dtype=bool)
    expected[-(size[0] // 2) :] = True
    assert (decode_mask(kept) == expected).all()


def test_lines_hold_what_was_judged(tmp_path):
    """The masks of rows and, of an answer, box and points; a refused one has none of these."""
    masks = list(torch.rand(3, 4, 6) > 0.5)
    answers = [PointPrompt(((1, 2, 3, 3.26),), ((5, 3),), ()), PointPrompt((), (), ((0, 1),)), None]
    batch = Batch([0], [masks[0]], ["a cup"], ["id"], [], None)
    rollout = Rollout(batch, None, None, ["a", "b", "c"], 3, *[None] * 5)
    outcome = RewardOutput({}, masks, point_prompts=answers, masks_without_negatives=masks[::-1])
    work = ScoredRollout(
        SimpleNamespace(name="points"), rollout, outcome, torch.ones(3), torch.zeros(3), None
    )
    log = RunLogger(tmp_path, RankInfo(1, 2, torch.device("cpu")), start=0)
    log.rollouts(0, work)
    log.close()
    lines = (tmp_path / "rollouts" / "rank1.jsonl").read_text().splitlines()
    first, second, third = map(json.loads, lines)
    for line, mask in zip((first, second, third), masks, strict=True):
        assert list(line)[-1] == "mask" and (decode_mask(line["mask"]) == mask.numpy()).all()
    assert first["sam_prompt"] == dict(boxes=[[1, 2, 3, 3.3]], positive=[[5, 3]], negative=[])
    assert second["sam_prompt"] == dict(boxes=[], positive=[], negative=[[0, 1]])
    assert (decode_mask(second["mask_without_negatives"]) == masks[1].numpy()).all()
    assert not {"sam_prompt", "mask_without_negatives"} & (set(third) | set(first) - {"sam_prompt"})
