import pytest
import torch

from rl_train.rewards import mask_iou
from rl_train.rewards.iou import best_objects, mask_confidence, on_target


def mask(*rows: str) -> torch.Tensor:
    """Return the (H, W) bool mask drawn by rows of "#" and "."."""
    return torch.tensor([[pixel == "#" for pixel in row] for row in rows])


def test_one_pixel_mask_with_itself_is_one():
    one = torch.zeros(1, 1080, 1920, dtype=torch.bool)
    one[0, 1079, 1919] = True
    assert mask_iou(one, one.clone()).tolist() == [1.0]


def test_hand_counted_overlaps_of_a_batch():
    pred = torch.stack(
        [mask("##..", "...."), mask("####", "...."), mask("#...", "...."), mask("##..", "##..")]
    )
    target = torch.stack(
        [mask(".##.", "...."), mask("##..", "...."), mask("...#", "...."), mask("####", "####")]
    )
    iou = mask_iou(pred, target)
    assert iou.dtype == torch.float32
    torch.testing.assert_close(iou, torch.tensor([1 / 3, 1 / 2, 0.0, 4 / 8]))


def test_large_counts_are_exact():
    # 5000 x 5000 = 25,000,000 pixels, beyond the integers of float32; one pixel is missing.
    target = torch.ones(1, 5000, 5000, dtype=torch.bool)
    pred = target.clone()
    pred[0, 0, 0] = False
    assert (
        mask_iou(pred, target).item()
        == torch.tensor(24_999_999 / 25_000_000, dtype=torch.float64).float().item()
    )
    assert mask_iou(pred, target).item() < 1.0


def test_empty_masks():
    empty, full = torch.zeros(2, 3, 3, dtype=torch.bool), torch.ones(2, 3, 3, dtype=torch.bool)
    assert mask_iou(empty, empty).tolist() == [0.0, 0.0]
    assert mask_iou(empty, empty, empty_value=1.0).tolist() == [1.0, 1.0]
    # One empty side is a plain miss, whatever the value of empty pairs.
    assert mask_iou(empty, full, empty_value=1.0).tolist() == [0.0, 0.0]
    assert mask_iou(full, empty, empty_value=1.0).tolist() == [0.0, 0.0]


def test_list_of_differently_sized_masks():
    pred = [mask("##", ".."), mask("#.#.#"), mask("..")]
    target = [mask("#.", "#."), mask("#.#.#"), mask("..")]
    iou = mask_iou(pred, target, empty_value=1.0)
    torch.testing.assert_close(iou, torch.tensor([1 / 3, 1.0, 1.0]))


def test_confidence_is_of_the_mask_alone():
    """sigmoid(ln 3) = 3/4 and sigmoid(ln 9) = 9/10 inside; what is outside does not count."""
    three, nine = torch.tensor([3.0, 9.0]).log()
    logits = torch.full((3, 2, 2), -50.0)
    logits[0, 0, 0], logits[0, 1, 1], logits[1, 0, 1], logits[1, 0, 0] = three, nine, nine, 0.0
    assert mask_confidence(logits).tolist() == pytest.approx([0.825, 0.9, 0])
    assert mask_confidence(torch.zeros(0, 2, 2)).shape == (0,)


def test_no_samples():
    assert mask_iou([], []).shape == (0,)
    none = torch.zeros(0, 4, 4, dtype=torch.bool)
    assert mask_iou(none, none).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.int64])
def test_masks_that_are_not_bool_raise(dtype):
    good = torch.ones(1, 2, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match=str(dtype)):
        mask_iou(good.to(dtype), good)
    with pytest.raises(ValueError, match=str(dtype)):
        mask_iou([good[0]], [good[0].to(dtype)])


def test_shapes_that_differ_raise_and_are_named():
    with pytest.raises(ValueError, match=r"\(1, 2, 3\) and \(1, 3, 2\)"):
        mask_iou(torch.ones(1, 2, 3, dtype=torch.bool), torch.ones(1, 3, 2, dtype=torch.bool))
    # Would broadcast.
    with pytest.raises(ValueError, match=r"\(1, 2, 2\) and \(5, 2, 2\)"):
        mask_iou(torch.ones(1, 2, 2, dtype=torch.bool), torch.ones(5, 2, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"\(2, 2\) and \(2, 2\)"):
        mask_iou(torch.ones(2, 2, dtype=torch.bool), torch.ones(2, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        mask_iou([mask("#"), mask("#")], [mask("#")])


def test_a_list_and_a_tensor():
    assert mask_iou([mask("#.")], mask("##")[None]).tolist() == [0.5]


def test_arguments_are_not_written():
    pred, target = mask("#.")[None], mask("##")[None]
    mask_iou(pred, target)
    assert pred.tolist() == [[[True, False]]] and target.tolist() == [[[True, True]]]


def test_the_object_that_a_mask_lies_on_by_hand():
    """Two samples of two masks each; objects of 2, 2 and 4 pixels, then one alone in its image."""
    target, right, below = mask("##..", "...."), mask("..##", "...."), mask("....", "####")
    masks = [mask("###.", "...."), mask("#...", "####"), mask("#...", "...."), mask("....", "...#")]
    others = [torch.stack([right, below]), torch.zeros(0, 2, 4, dtype=torch.bool)]
    targets = [target, target]
    assert best_objects(masks, targets, others).tolist() == [0, 2, 0, -1]
    assert on_target(masks, targets, others).tolist() == [1, 0, 1, 0]
    between = [mask(".##.", "....")]  # a pixel of each of two, whose IoU is the same
    assert best_objects(between, targets[:1], others[:1]).tolist() == [-1]
    empty = [torch.zeros(2, 4, dtype=torch.bool)]
    assert best_objects(empty, targets[:1], others[:1]).tolist() == [-1]
