"""Held-out measures by hand: two regions, given captions and masks, guards."""

from types import SimpleNamespace

import pytest
import torch

from rl_train.evaluation import cycle_metrics
from rl_train.evaluation.bootstrap import means, metrics_of
from rl_train.evaluation.cycle_metrics import METRICS, measure_texts
from rl_train.evaluation.evaluate import EvalSpec, _merge
from rl_train.policies import sa2va_queries
from rl_train.policies.sa2va_queries import RowMasks
from rl_train.rewards import meteor
from rl_train.rollout import Batch
from rl_train.utils.rng import RowRNG
from tests.runs import ASKED, SAMPLED

UNMEASURED = ASKED | {"caption_cider", "caption_distinct"}  # the latter of all samples together


def rectangle(height, width, shape=(10, 10)):
    mask = torch.zeros(shape, dtype=torch.bool)
    mask[:height, :width] = True
    return mask


def finds(monkeypatch, masks: dict[str, torch.Tensor]):
    """Let a model find masks[text] by a caption that it wrote."""

    def segment(policy, images, image_index, captions, max_new_tokens):
        return RowMasks([masks[text] for text in captions], torch.ones(len(captions)))

    monkeypatch.setattr(sa2va_queries, "segment_generated", segment)
    monkeypatch.setattr(sa2va_queries, "truncate_captions", lambda policy, texts, _: texts)


@pytest.fixture
def measure_answers(monkeypatch):
    """Measures of two regions of 20 and 50 of 100 pixels.

    A function of captions of the regions, masks found by these, masks of the true captions, the
    rows of these with [SEG], and replies; and the other regions.
    """
    targets = [rectangle(2, 10), rectangle(5, 10)]
    batch = Batch([0, 1], targets, ["a red cup", "the dog"], ["a", "b"], [], None)
    policy = SimpleNamespace(device=torch.device("cpu"))

    def measure(captions, cycle_masks, masks, seg_rows, replies, distractors=None):
        batch.distractors = distractors
        described = iter([captions, replies])
        answer = RowMasks(masks, torch.zeros(0)), torch.tensor(seg_rows, dtype=torch.long), None
        monkeypatch.setattr(cycle_metrics, "describe", lambda *_: next(described))
        monkeypatch.setattr(cycle_metrics, "segment_by_own_answer", lambda *_: answer)
        finds(monkeypatch, dict(zip(captions, cycle_masks)))
        spec = EvalSpec([None] * 2, 2, 8, 0, measure=cycle_metrics.measure)
        images = SimpleNamespace(sizes=batch.sizes)
        return _merge([[spec.measure(policy, batch, images, 8)]], spec)

    return measure


def test_segmentation_by_hand(measure_answers):
    found = measure_answers(
        ["a cup", "dog"],
        [rectangle(2, 10), rectangle(10, 10)],
        [rectangle(4, 10), rectangle(5, 10)],
        [0, 1],
        ["a red cup", "cat"],
    )
    assert found.values["seg_intersection"].tolist() == [20, 50] and found.values[
        "seg_union"
    ].tolist() == [40, 50]
    metrics = means(found.values)
    assert metrics["seg_iou"] == pytest.approx((20 / 40 + 50 / 50) / 2)  # gIoU
    assert metrics["seg_ciou"] == pytest.approx((20 + 50) / (40 + 50))
    assert metrics["seg_p50"] == 1.0  # an IoU of exactly .5 counts
    assert metrics["cycle_iou"] == pytest.approx((1 + 0.5) / 2)
    assert metrics["cycle_meteor"] == pytest.approx((1 - 0.5 / 3**3) / 2)
    assert metrics["caption_meteor"] == pytest.approx(
        meteor(["a red cup", "the dog"], ["a cup", "dog"]).mean().item()
    )
    assert metrics["no_seg"] == metrics["mask_whole"] == 0
    assert set(metrics) == set(METRICS) - UNMEASURED
    assert (found.image_ids, found.references, found.captions, found.num_damaged) == (
        ["a", "b"],
        ["a red cup", "the dog"],
        ["a cup", "dog"],
        0,
    )


def test_an_answer_without_seg_is_an_empty_mask(measure_answers):
    found = measure_answers(
        ["a cup", "dog"],
        [rectangle(2, 10)] * 2,
        [rectangle(2, 10), rectangle(0, 0)],
        [0, 0],
        ["cup", ""],
    )
    metrics = means(found.values)
    assert metrics["no_seg"] == 0.5 and metrics["seg_iou"] == 0.5 and metrics["seg_p50"] == 0.5
    assert metrics["seg_ciou"] == pytest.approx(20 / (20 + 50))  # its region stays in the union


def test_guards_by_hand(measure_answers):
    found = measure_answers(
        ["", "at 120, 34: a dog a dog a dog"],
        [rectangle(2, 10)] * 2,
        [rectangle(10, 10), rectangle(9, 10)],
        [0, 1],
        ["x", "x"],
    )
    values = found.values
    assert values["caption_words"].tolist() == [0, 9] and values["caption_digits"].tolist() == [
        0,
        1,
    ]
    assert values["caption_repeats"].tolist() == [0, 1]
    assert values["mask_whole"].tolist() == [1, 0]  # 100 and 90 of 100 pixels
    assert values["cycle_iou"][0] == 0  # no caption finds nothing, whatever the model drew


def test_whether_a_mask_lies_on_the_region_by_hand(measure_answers):
    """The regions are the first 2 and 5 of 10 rows, the others the last 5 and 2."""
    below = ~rectangle(5, 10), ~rectangle(8, 10)
    found = measure_answers(
        ["", "dog"],
        [rectangle(2, 10), rectangle(9, 10)],
        [rectangle(10, 10), rectangle(1, 1)],
        [0, 1],
        ["x", "x"],
        distractors=[torch.stack([below[0]]), torch.stack([below[1]])],
    )
    assert found.values["cycle_on_target"].tolist() == [0, 1]  # no caption, no hit
    assert found.values["seg_on_target"].tolist() == [0, 1]
    assert means(found.values)["seg_on_target"] == 0.5


def test_measures_of_all_captions_together():
    values = measure_texts(["red"] * 4, ["red", "a", "red", "b"], {"color": {"red": ["red"]}})
    assert values["caption_distinct"].tolist() == [1, 1, 0, 1]
    metrics = means(values)
    assert metrics == dict(
        caption_distinct=0.75, color_accuracy=0.5, color_precision=1, color_stated=0.5
    )
    assert list(metrics_of(values)) == list(metrics)
    assert metrics_of(values)["color_stated"] == (
        "captions that state any color, of all whose true caption states one"
    )


def test_the_best_of_sampled_captions_by_hand(monkeypatch):
    """Two of each region: IoU 1 and .5; one without words (though its mask is right) and .4.

    The true captions are "a red cup" and "the dog". Of the mean log-probs -.4 and -.3, -.1 and -.2
    the second and the first are the likelier, though its sum is the lower in the first pair.
    """
    logp = torch.tensor([[-0.4, -9.0], [-0.1, -0.5], [-0.1, -0.1], [-0.3, -0.1]])
    done = SimpleNamespace(logp=logp, valid=logp > -9)
    targets = [rectangle(2, 10), rectangle(5, 10)]
    batch = Batch([3, 8], targets, ["a red cup", "the dog"], ["a", "b"], [], None)
    asked = []

    def complete(features, prompts, num_generations, num_tokens, uniforms):
        asked.append((prompts, num_generations, uniforms))
        return done, ["a cup", "cup", " ", "dog"]

    policy = SimpleNamespace(
        device=torch.device("cpu"),
        describe_prompts=lambda images, image, grids: (list(image), grids),
        complete=complete,
    )
    rows = {"a cup": 2, "cup": 4, " ": 5, "dog": 2}
    finds(monkeypatch, {text: rectangle(n, 10) for text, n in rows.items()})
    images = SimpleNamespace(prompt_masks=["g", "h"], sizes=batch.sizes)
    found = cycle_metrics.measure_samples(policy, batch, images, 6, 2)
    assert found["best_of_G_cycle_iou"] == pytest.approx([1, 0.4])
    assert found["sampled_cycle_iou"] == pytest.approx([0.75, 0.2])
    assert found["by_logp_cycle_iou"] == pytest.approx([0.5, 0])
    two = meteor(["a red cup"] * 2 + ["the dog"], ["a cup", "cup", "dog"]).tolist()
    assert two[0] > two[1] > 0 < two[2]
    assert found["best_of_G_meteor"] == found["by_cycle_meteor"] == [two[0], two[2]]
    assert found["by_logp_meteor"] == [two[1], 0]
    assert found["sampled_meteor"] == pytest.approx([(two[0] + two[1]) / 2, two[2] / 2])
    assert set(found) == SAMPLED
    [(prompts, G, uniforms)] = asked
    assert (prompts, G) == (([0, 1], ["g", "h"]), 2)
    assert torch.equal(uniforms, RowRNG(0, 0, 0, [3, 8], 2).uniforms(6))
