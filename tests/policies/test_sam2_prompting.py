"""SAM2's masks of boxes and points: each row as if alone, and as SAM2 called by hand."""

import pytest
import torch

from rl_train.data.loader import Batches
from rl_train.points.parser import PointPrompt
from rl_train.policies import sam2_prompting
from rl_train.policies.sam2_prompting import (
    best_masks,
    decode,
    point_masks,
    sam_features,
    split_by_box,
)
from sa2va_hf.processing_sa2va import normalise_sam_pixels
from tests.policies.tiny_points import SAM_SIDE, samples

BOX, OTHER = (5.0, 8.0, 60.0, 50.0), (40.0, 10.0, 88.0, 55.0)
P, Q, R = (20.0, 20.0), (70.0, 30.0), (33.5, 41.25)
SIZES = [(60, 90), (120, 64)]
RAGGED = [  # (image, answer)
    (0, PointPrompt((BOX,), (P,), (Q,))),
    (1, PointPrompt((), (P, R))),
    (1, PointPrompt((BOX,), (P, Q), (R,))),
    (0, PointPrompt((BOX,))),
    (0, PointPrompt((BOX,), (R,), (Q,))),
    (1, PointPrompt((), (P,), (Q, R))),
    (0, PointPrompt((), (Q,))),
]


@pytest.fixture(scope="module")
def model(points):
    return points.model.sam


@pytest.fixture(scope="module")
def pixels(points):
    return Batches(samples(SIZES), points.preprocessor(8))[[0, 1]].inputs.sam_pixels


@pytest.fixture(scope="module")
def features(model, pixels):
    with torch.no_grad():
        return sam_features(model, pixels)


def split(pairs):
    """(image of each prompt, prompts of at most one box)."""
    rows = [(image, one) for image, answer in pairs for one in split_by_box(answer)]
    return [image for image, _ in rows], [prompt for _, prompt in rows]


def by_hand(model, pixels, image, answer, before=None):
    """(S/4, S/4) logits by transformers' own forward of image and prompt."""
    return forward_by_hand(model, pixels, image, answer, before).pred_masks[0, 0, 0]


@torch.no_grad()
def forward_by_hand(model, pixels, image, answer, before=None, multimask_output=False):
    """transformers' own output for an image and a prompt."""
    height, width = SIZES[image]
    scale = torch.tensor([SAM_SIDE / width, SAM_SIDE / height])
    points = torch.tensor([*answer.positive, *answer.negative]).view(-1, 2) * scale
    labels = [1] * len(answer.positive) + [0] * len(answer.negative)
    boxes = torch.tensor(answer.boxes).view(-1, 4) * scale.repeat(2)
    how = dict(input_points=points[None, None], input_labels=torch.tensor([[labels]]))
    return model(
        pixel_values=normalise_sam_pixels(pixels[image : image + 1]),
        input_boxes=boxes[None] if len(boxes) else None,
        input_masks=before,
        multimask_output=multimask_output,
        **(how if labels else {}),
    )


def test_as_sam_called_by_hand(model, pixels, features):
    expected = torch.stack([by_hand(model, pixels, *pair) for pair in RAGGED])
    with torch.no_grad():
        found = decode(model, features, SIZES, *split(RAGGED))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert expected.std() > 0.1 and expected.min() < 0 < expected.max()


def test_two_passes_as_by_hand(model, pixels, features):
    image, answer = RAGGED[0]
    first = by_hand(model, pixels, image, PointPrompt(answer.boxes, answer.positive))
    second = by_hand(model, pixels, image, answer, first[None, None])
    once = by_hand(model, pixels, image, answer)
    final, without = (
        point_masks(model, features, SIZES, [image], [answer], passes=2)[i][0] for i in (0, 1)
    )
    size = dict(size=SIZES[image], mode="bilinear")
    for logits, mask in ((second, final), (first, without)):
        native = torch.nn.functional.interpolate(logits[None, None], **size)[0, 0]
        assert torch.equal(native > 0, mask)
    assert (second - once).abs().max() > 1e-2  # the logits go in
    single = point_masks(model, features, SIZES, [image], [answer], 1)
    for logits, found in zip((once, first), single[2][0], strict=True):
        inside = logits[logits > 0].sigmoid()
        assert found == pytest.approx(inside.mean().item() if len(inside) else 0, abs=1e-5)
    native = torch.nn.functional.interpolate(once[None, None], **size)[0, 0]
    assert torch.equal(native > 0, single[0][0]) and torch.equal(single[1][0], without)


@pytest.mark.parametrize("passes", [1, 2])
def test_a_row_is_what_it_is_alone(model, features, passes):
    image, answers = zip(*RAGGED)
    together = point_masks(model, features, SIZES, list(image), answers, passes)
    for row, (i, answer) in enumerate(RAGGED):
        alone = point_masks(model, features, SIZES, [i], [answer], passes)
        for kind in (0, 1):
            assert together[kind][row].shape == SIZES[i]
            assert (together[kind][row] != alone[kind][0]).float().mean() < 1e-3, row
        if not answer.negative:
            assert torch.equal(together[0][row], together[1][row])


def test_many_rows_are_decoded_in_parts(model, features, monkeypatch):
    some = split(RAGGED * 2)
    with torch.no_grad():
        whole = decode(model, features, SIZES, *some)
        monkeypatch.setattr(sam2_prompting, "MASKS_AT_ONCE", 2)
        parts = decode(model, features, SIZES, *some)
    torch.testing.assert_close(whole, parts, atol=1e-4, rtol=0)


def test_order_and_repeats_do_not_matter(model, features):
    one = PointPrompt((BOX,), (P, R), (Q,))
    same = PointPrompt((BOX, BOX), (R, P, R), (Q, Q))
    (a,), (b,) = split_by_box(one), split_by_box(same)
    assert (a.boxes, a.negative, sorted(a.positive)) == (b.boxes, b.negative, sorted(b.positive))
    with torch.no_grad():
        found = decode(model, features, SIZES, [0, 0], [a, b])
        twice = decode(model, features, SIZES, [0], [PointPrompt((BOX,), (P, R), (Q, Q))])
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=0)
    assert (found[0] - twice[0]).abs().max() > 1e-2  # to SAM2 a repeated point is another prompt


def test_the_label_matters(model, features):
    with torch.no_grad():
        yes, no = decode(
            model,
            features,
            SIZES,
            [0, 0],
            [PointPrompt((BOX,), (P, Q)), PointPrompt((BOX,), (P,), (Q,))],
        )
    assert (yes - no).abs().max() > 1e-2


def test_boxes_are_united_and_each_has_its_own_point(model, features):
    """The first point lies in the other box too, nearer to its centre; the pairs stay."""
    far = (42.0, 30.0)
    answer = PointPrompt((BOX, OTHER, BOX), (far, (95.0, 57.0), far), (R,))
    found = split_by_box(answer)
    assert found == [
        PointPrompt((BOX,), (far,), (R,)),
        PointPrompt((OTHER,), ((95.0, 57.0),), (R,)),
    ]
    both = point_masks(model, features, SIZES, [0], [answer])[0][0]
    with torch.no_grad():
        each = decode(model, features, SIZES, [0, 0], found)
    native = torch.nn.functional.interpolate(each[None], SIZES[0], mode="bilinear")[0] > 0
    assert torch.equal(both, native.any(0)) and native[0].any() and native[1].any()
    with pytest.raises(AssertionError, match="2 boxes have 1 points"):
        split_by_box(PointPrompt((BOX, OTHER), (far,)))


def test_the_best_of_three_masks_as_by_hand(model, pixels, features, monkeypatch):
    """Each prompt's mask of the best score; no other prompt of an image takes part in it."""
    groups = [[PointPrompt((BOX,), (P,)), PointPrompt((OTHER,), (Q,))], [], [PointPrompt((), (R,))]]
    image, expected, singles = [0, 1, 1], [], []
    for i, group in zip(image, groups):
        union = torch.zeros(SIZES[i], dtype=torch.bool)
        for prompt in group:
            out = forward_by_hand(model, pixels, i, prompt, multimask_output=True)
            best = int(out.iou_scores[0, 0].argmax())
            logits = out.pred_masks[:, 0, best : best + 1]
            size = dict(size=SIZES[i], mode="bilinear")
            union |= torch.nn.functional.interpolate(logits, **size)[0, 0] > 0
            singles.append((best, out.iou_scores[0, 0].tolist()))
        expected.append(union)
    found = best_masks(model, features, SIZES, image, groups)
    for mask, union in zip(found, expected, strict=True):
        assert (mask != union).float().mean() < 1e-3
    assert not found[1].any() and all(len(scores) == 3 for _, scores in singles)
    assert {best for best, _ in singles} != {0}  # the first one is not always the best
    # Unless its mask is stable SAM2 chooses among the three anyway, as its config says.
    monkeypatch.setattr(model.mask_decoder, "dynamic_multimask_via_stability", False)
    with torch.no_grad():
        single = decode(model, features, SIZES, [0, 0], groups[0])
        of_three = decode(model, features, SIZES, [0, 0], groups[0], best_of_three=True)
    assert (single - of_three).abs().max() > 1e-2


def test_an_answer_of_nothing_draws_nothing(model, features):
    image, empty = [0, 1, 0], [PointPrompt(), PointPrompt((), (), (P,)), PointPrompt((BOX,))]
    masks, without, confidence = point_masks(model, features, SIZES, image, empty, passes=2)
    assert confidence[:2] == [(0.0, 0.0)] * 2 and min(confidence[2]) > 0.5
    assert [mask.shape for mask in masks] == [SIZES[i] for i in image]
    assert not masks[0].any() and not masks[1].any() and not without[1].any() and masks[2].any()


def test_no_answers_are_no_masks(model, features):
    assert point_masks(model, features, SIZES, [], []) == ([], [], [])


def test_the_image_is_encoded_once(points, features, monkeypatch):
    def encode(*_):
        raise AssertionError("encoded again")

    monkeypatch.setattr(points.model.sam.vision_encoder, "forward", encode)
    image, answers = zip(*RAGGED)
    point_masks(points.model.sam, features, SIZES, list(image), answers, passes=2)
