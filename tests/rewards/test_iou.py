import pytest
import torch

from rl_train.rewards import iou as of_iou
from rl_train.rewards import mask_iou
from rl_train.rewards.iou import (
    best_object_iou,
    best_objects,
    mask_confidence,
    mask_spread,
    on_target,
    rows_by_size,
)
from tests.pretend import Gpu, There


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
    assert best_object_iou(masks, targets, others).tolist() == pytest.approx(
        [2 / 3, 4 / 5, 1 / 2, 0]
    )


# Masks of one size are compared together


SIZES = [(9, 20), (20, 9), (9, 20), (60, 3), (9, 20), (20, 9)]  # of as many pixels, mixed


@pytest.fixture(params=[1, 180, 500, 2**25], ids=lambda pixels: f"{pixels} pixels at once")
def several(request, monkeypatch):
    """Two masks, a target and 0 to 3 other objects of each size; some masks are empty."""
    monkeypatch.setattr(of_iou, "PIXELS_AT_ONCE", request.param)
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.rand(shape, generator=generator) < 0.4

    masks = [drawn(*size) for size in SIZES for _ in range(2)]
    targets = [drawn(*size) for size in SIZES]
    others = [drawn(k, *size) for k, size in zip([2, 0, 3, 1, 0, 2], SIZES)]
    masks[3] = torch.zeros_like(masks[3])
    masks[8] = targets[4] = torch.zeros_like(targets[4])  # of a sample without other objects
    masks[4], masks[7], masks[11] = others[2][2], targets[3], targets[5]
    others[5][1] = targets[5]  # a tie
    return masks, targets, others


def test_rows_by_size():
    assert rows_by_size(SIZES) == {(9, 20): [0, 2, 4], (20, 9): [1, 5], (60, 3): [3]}
    assert rows_by_size([]) == {}


@pytest.mark.parametrize("empty_value", [0.0, 1.0])
def test_ious_together_are_those_of_each_alone(several, empty_value):
    masks, targets, _ = several
    pred, target = masks[::2], targets
    together = mask_iou(pred, target, empty_value)
    alone = [mask_iou(p[None], t[None], empty_value) for p, t in zip(pred, target)]
    assert torch.equal(together, torch.cat(alone)) and len(together.unique()) == len(SIZES)


@pytest.mark.parametrize("measure", [best_objects, best_object_iou, on_target])
def test_samples_together_are_measured_as_each_mask_alone(several, measure):
    """Samples have several sizes and numbers of objects."""
    masks, targets, others = several
    together = measure(masks, targets, others)
    alone = [measure([m], [targets[r // 2]], [others[r // 2]]) for r, m in enumerate(masks)]
    assert torch.equal(together, torch.cat(alone)) and together.device.type == "cpu"
    if measure is best_objects:
        assert together[[4, 7, 11]].tolist() == [3, 0, -1] and len(together.unique()) == 5
    if measure is on_target:
        assert together[[4, 7, 8, 11]].tolist() == [0, 1, 1, 0]


def test_spread_of_a_group_is_that_of_its_pairs(several):
    masks = torch.stack(several[0][:2] + several[0][4:6])  # (4, 9, 20)
    pairs = [(a, b) for a in range(4) for b in range(4) if a != b]
    ious = [mask_iou([masks[a]], [masks[b]], 1.0) for a, b in pairs]
    assert mask_spread(masks) == 1 - torch.cat(ious).mean().item()


def test_a_gpu_is_waited_for_once_for_all_masks(several):
    """Regions are on the CPU: each sample's are moved there once, and the results come back."""
    masks, targets, others = several
    gpu = Gpu()
    with gpu:
        there = [There(mask, gpu) for mask in masks]
        mask_iou(there[::2], [There(target, gpu) for target in targets])
        assert not gpu.waits
        found = best_objects(there, targets, others)
    assert torch.equal(found, best_objects(masks, targets, others))
    assert [place for _, place in gpu.waits] == ["iou:_object_iou"] * len(SIZES) + [
        "iou:best_objects"
    ]


@pytest.mark.parametrize("measure", [best_objects, best_object_iou, on_target])
def test_objects_that_are_not_bool_or_of_another_size_raise(measure):
    one, other = mask("#."), mask("##")
    with pytest.raises(ValueError, match="torch.uint8"):
        measure([one], [other], [other[None].to(torch.uint8)])
    with pytest.raises(ValueError, match=r"equal shapes .* \(1, 1, 3\) and \(1, 1, 2\)"):
        measure([mask("#..")], [other], [other[None]])
