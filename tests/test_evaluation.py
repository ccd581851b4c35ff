"""Held-out metrics by hand: two masks, two captions, known intervals, guards; and what a run keeps by them."""

import json
from argparse import Namespace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rl_train import checkpoint, evaluation
from rl_train.distributed import Ranks
from rl_train.evaluation import METRICS, bootstrap, cider, means, paired_difference, rows_of
from rl_train.parts import cosine_schedule
from rl_train.rewards import meteor
from rl_train.roles import Roles
from rl_train.types import Batch
from tests.runs import draw_data, on_one_core, run

one_core = pytest.fixture(autouse=True)(on_one_core)
ALONE = Ranks(0, 1, torch.device("cpu"))


def rectangle(height, width, shape=(10, 10)):
    mask = torch.zeros(shape, dtype=torch.bool)
    mask[:height, :width] = True
    return mask


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return draw_data(tmp_path_factory.mktemp("demo"))


@pytest.fixture
def measure_answers(monkeypatch):
    """`measure` of two regions of 20 and 50 of 100 pixels, for given captions of the regions, masks, rows with [SEG] and replies."""
    targets = [rectangle(2, 10), rectangle(5, 10)]
    batch = Batch([0, 1], targets, ["a red cup", "the dog"], ["a", "b"], [], None)
    policy = SimpleNamespace(device=torch.device("cpu"))

    def measure(captions, cycle_masks, masks, seg_rows, replies):
        described, answered = (
            iter([captions, replies]),
            iter([(cycle_masks, [0, 1]), (masks, seg_rows)]),
        )

        def answer(*_):
            found, rows = next(answered)
            return SimpleNamespace(masks=found, seg_rows=torch.tensor(rows, dtype=torch.long))

        monkeypatch.setattr(evaluation, "describe", lambda *_: next(described))
        monkeypatch.setattr(evaluation, "answer", answer)
        columns = evaluation.measure(policy, batch, None, 8)
        return evaluation._merged([[columns]], 2)

    return measure


# Metrics


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
    assert set(metrics) == set(METRICS) - {"caption_cider"}
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


def test_cider_by_hand():
    pytest.importorskip("pycocoevalcap")  # of the extra `eval`, 104 MB
    # Document frequency 1 of 2 everywhere: equal captions of one word have cosine 1 for n = 1 of 4, times 10.
    assert cider(["cup", "dog"], ["Cup!", "cat"]).tolist() == pytest.approx([10 / 4, 0])
    scores = cider(
        ["a red cup on the table", "a large dog"], ["a red cup on the table", "a red cup"]
    )
    assert (
        scores[0].item() == pytest.approx(10) and scores[1].item() == 0
    )  # "a" is in both references: no weight
    assert cider(["a cup"], ["a cup"]).tolist() == [0]  # one sample has no document frequencies


# Statistics


def test_bootstrap_of_a_known_case():
    values = torch.from_numpy(np.random.default_rng(1).normal(3, 2, 400))
    low, high = bootstrap(values)
    half = 1.96 * values.std().item() / 400**0.5
    assert low == pytest.approx(values.mean().item() - half, abs=0.03) and high == pytest.approx(
        values.mean().item() + half, abs=0.03
    )
    assert bootstrap(values) == (low, high) != bootstrap(values, seed=1)
    assert bootstrap(torch.full((5,), 0.25)) == (0.25, 0.25)
    low, high = bootstrap(
        torch.tensor([0.0] * 50 + [1.0] * 50), num_resamples=5000
    )  # binomial: standard deviation .05
    assert low == pytest.approx(0.40, abs=0.011) and high == pytest.approx(0.60, abs=0.011)


def test_bootstrap_of_ciou_resamples_samples():
    equal = torch.tensor([[1.0, 2.0]] * 10)
    assert bootstrap(equal) == (0.5, 0.5)
    low, high = bootstrap(torch.tensor([[0.0, 1.0], [90.0, 100.0]]))
    assert (low, high) == (0.0, 0.9)  # both draws are one sample in a quarter of the cases each
    assert evaluation.statistic(torch.tensor([[0.0, 1.0], [90.0, 100.0]])) == pytest.approx(
        90 / 101
    )


def test_paired_difference_is_narrower_than_its_parts():
    before = torch.from_numpy(np.random.default_rng(0).random(200))
    after = before + 0.01
    assert paired_difference(before, after) == pytest.approx((0.01, 0.01, 0.01))
    low, high = bootstrap(before)
    assert high - low > 0.05
    change, low, high = paired_difference(
        torch.tensor([[10.0, 20.0]] * 4), torch.tensor([[15.0, 20.0]] * 4)
    )
    assert (change, low, high) == (0.25, 0.25, 0.25)


def test_table_has_the_difference_and_its_interval():
    values = {name: torch.zeros(3) for name in ("cycle_iou", "seg_intersection")} | {
        "seg_union": torch.ones(3),
        "seg_iou": torch.zeros(3),
    }
    lines = evaluation.before_after_table(
        values, values | {"cycle_iou": torch.full((3,), 0.5), "mask_whole": torch.ones(3)}
    ).split("\n")
    assert [line.split()[0] for line in lines] == [
        "held",
        "cycle_iou",
        "seg_iou",
        "seg_ciou",
        "seg_p50",
    ]
    assert lines[1].split() == ["cycle_iou", "0.0000", "0.5000", "+0.5000", "[+0.5000,", "+0.5000]"]
    assert rows_of(values, "seg_ciou").tolist() == [[0, 1]] * 3


# The model


def test_roles_are_measured_apart_and_in_order(policy, scenes):
    model = policy()
    roles = Roles(model.trainable)
    samples = [*scenes, scenes[0] | {"image_id": "again"}]
    alone = evaluation.evaluate(model, samples, 2, 12, 0, ALONE)
    assert alone.image_ids == [scene["image_id"] for scene in samples] and alone.references == [
        scene["caption"] for scene in samples
    ]
    assert (
        alone.values["cycle_iou"][0] == alone.values["cycle_iou"][4]
        and alone.captions[0] == alone.captions[4]
    )
    assert alone.values["seg_iou"].mean() > 0.3 and all(
        len(values) == 5 for values in alone.values.values()
    )
    for tensor in roles.banks["teacher"].values():
        tensor.zero_()
    both = evaluation.evaluate_roles(
        model, roles.use, ("policy", "teacher"), samples, 2, 12, 0, ALONE
    )
    assert all(
        torch.equal(both["policy"].values[name], alone.values[name]) for name in alone.values
    )
    assert both["teacher"].values["seg_iou"].mean() < alone.values["seg_iou"].mean()


def test_ranks_are_merged_in_the_dataset_s_order():
    def columns(*samples):
        return dict(
            cycle_iou=[s / 10 for s in samples],
            image_id=[f"i{s}" for s in samples],
            reference=["r"] * len(samples),
            caption=["c"] * len(samples),
            index=list(samples),
        )

    merged = evaluation._merged([[columns(0, 3), columns(6)], [columns(1, 4)], [columns(2, 9)]], 7)
    assert (
        merged.image_ids == ["i0", "i1", "i2", "i3", "i4", "i9", "i6"] and merged.num_damaged == 1
    )
    assert merged.values["cycle_iou"].tolist() == [0, 0.1, 0.2, 0.3, 0.4, 0.9, 0.6]
    assert evaluation._merged([[columns(0)], []], 1).image_ids == ["i0"]  # more ranks than samples


# The best checkpoint of a run


@pytest.fixture(scope="module")
def three_steps(data, tmp_path_factory):
    monkeypatch = pytest.MonkeyPatch()
    for _ in on_one_core(monkeypatch):
        output = run(
            data,
            tmp_path_factory.mktemp("best"),
            max_steps=3,
            eval_steps=1,
            save_steps=1,
            save_total_limit=1,
            learning_rate=3e-3,
            ema_decay=0.5,
            warmup_ratio=0,
            eval_samples=4,
        )
    monkeypatch.undo()
    return output


def curves(output) -> dict[str, dict[int, float]]:
    """{tag: {step: value}} of the scalars."""
    log = EventAccumulator(str(output / "tensorboard"), {"scalars": 0})
    log.Reload()
    return {tag: {e.step: e.value for e in log.Scalars(tag)} for tag in log.Tags()["scalars"]}


def test_policy_and_teacher_have_curves_of_every_metric(three_steps):
    found = curves(three_steps)
    for metric in set(METRICS) - {"caption_cider"}:
        assert list(found[f"eval/{metric}"]) == list(found[f"eval_ema/{metric}"]) == [0, 1, 2, 3]
        assert found[f"eval/{metric}"][0] == found[f"eval_ema/{metric}"][0]
    assert any(
        found[f"eval/{m}"][3] != found[f"eval_ema/{m}"][3]
        for m in ("cycle_iou", "seg_iou", "cycle_meteor", "caption_meteor")
    )


def test_the_best_step_is_kept(three_steps):
    found = curves(three_steps)
    scores = {
        step: (found["eval/cycle_iou"][step] + found["eval/cycle_meteor"][step]) / 2
        for step in (1, 2, 3)
    }
    best = three_steps / "checkpoint_best"
    kept = json.loads((best / "eval.json").read_text())
    assert kept["step"] == checkpoint.read_state(best)["step"] == max(scores, key=scores.get)
    assert kept["score"] == pytest.approx(scores[kept["step"]], abs=1e-6)
    assert kept["metrics"]["seg_ciou"] == pytest.approx(
        found["eval/seg_ciou"][kept["step"]], abs=1e-6
    )
    print(f"scores {scores}")


def test_the_limit_leaves_it_and_latest_passes_it_over(three_steps):
    assert sorted(folder.name for folder in three_steps.glob("checkpoint*")) == [
        "checkpoint_best",
        "checkpoint_step_3",
    ]
    best, last = (
        {file.name for file in (three_steps / name).iterdir()}
        for name in ("checkpoint_best", "checkpoint_step_3")
    )
    assert best == last | {"eval.json"}
    assert checkpoint.find("latest", three_steps).name == "checkpoint_step_3"
    assert (
        checkpoint.find(str(three_steps / "checkpoint_best"), three_steps).name == "checkpoint_best"
    )


@pytest.fixture
def keep(policy, tmp_path):
    """Function of (step, score): `save_if_best` of the demo model into tmp_path."""
    model = policy()
    roles = Roles(model.trainable)
    optimizer = torch.optim.AdamW(model.trainable.values())
    scheduler = cosine_schedule(optimizer, 1, 0)
    return lambda step, score: checkpoint.save_if_best(
        tmp_path,
        step,
        score,
        {"cycle_iou": score},
        model,
        roles,
        optimizer,
        scheduler,
        Namespace(save_total_limit=1),
        True,
    )


def test_only_a_better_score_replaces_it(keep, tmp_path):
    best = tmp_path / "checkpoint_best"
    for step, score, expected in (
        (1, -0.5, 1),
        (2, -0.6, 1),
        (3, 0.9, 3),
        (4, 0.9, 3),
        (5, 0.1, 3),
    ):
        keep(step, score)
        assert (
            checkpoint.read_state(best)["step"]
            == json.loads((best / "eval.json").read_text())["step"]
            == expected
        )
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint_best"]


def test_a_kill_while_writing_leaves_the_old_one(keep, tmp_path, monkeypatch):
    keep(1, 0.5)
    with monkeypatch.context() as context:
        context.setattr(checkpoint, "save_file", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            keep(2, 0.6)
    assert checkpoint.read_state(tmp_path / "checkpoint_best")["step"] == 1
    (tmp_path / "checkpoint_best.old" / "adapter").mkdir(
        parents=True
    )  # and a kill while the old one was removed
    keep(3, 0.7)
    assert checkpoint.read_state(tmp_path / "checkpoint_best")["step"] == 3 and [
        p.name for p in tmp_path.iterdir()
    ] == ["checkpoint_best"]


def test_no_evaluation_steps_keep_no_best(data, tmp_path):
    run(data, tmp_path, max_steps=1)
    assert [p.name for p in tmp_path.glob("checkpoint*")] == ["checkpoint_step_1"]
