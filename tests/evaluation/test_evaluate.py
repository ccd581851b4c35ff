"""Evaluations of a run: roles measured apart, files and curves of them, and the best checkpoint."""

import json
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rl_train.checkpoint import save_load
from rl_train.checkpoint.record import RECORD, RunRecord, read_record
from rl_train.checkpoint.save_load import RunState
from rl_train.distributed.process_group import RankInfo
from rl_train.evaluation import cycle_metrics, evaluate
from rl_train.evaluation.cycle_metrics import METRICS
from rl_train.evaluation.evaluate import EvalSpec
from rl_train.export.merge import preferred_role
from rl_train.roles import Roles
from rl_train.run.lr_schedule import cosine_schedule
from rl_train.utils.io import UserFault, read_json
from tests.runs import SAMPLED, on_one_core, run
from tools.demo.scenes import PATTERNS

one_core = pytest.fixture(autouse=True)(on_one_core)
ALONE = RankInfo(0, 1, torch.device("cpu"))


# The model


def test_roles_are_measured_apart_and_in_order(policy, scenes):
    model = policy()
    roles = Roles(model.trainable)
    samples = [*scenes, scenes[0] | {"image_id": "again"}]
    heldout = EvalSpec(samples, batch_size=2, max_new_tokens=12, num_workers=0)
    alone = evaluate.evaluate(model, heldout, ALONE)["policy"]
    assert alone.image_ids == [scene["image_id"] for scene in samples] and alone.references == [
        scene["caption"] for scene in samples
    ]
    assert (
        alone.values["cycle_iou"][0] == alone.values["cycle_iou"][4]
        and alone.captions[0] == alone.captions[4]
    )
    assert alone.values["seg_iou"].mean() > 0.2 and all(
        len(values) == 5 for values in alone.values.values()
    )
    for tensor in roles.copies["teacher"].values():
        tensor.zero_()
    both = evaluate.evaluate(model, heldout, ALONE, ("policy", "teacher"), roles)
    assert all(
        torch.equal(both["policy"].values[name], alone.values[name]) for name in alone.values
    )
    assert both["teacher"].values["seg_iou"].mean() < alone.values["seg_iou"].mean()
    next(iter(roles.copies["teacher"].values())).fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="rank 0: evaluation of the teacher: log-probs of"):
        evaluate.evaluate(model, heldout, ALONE, ("policy", "teacher"), roles)


def test_ranks_are_merged_in_the_dataset_s_order():
    def columns(*samples):
        return dict(
            cycle_iou=[s / 10 for s in samples],
            image_id=[f"i{s}" for s in samples],
            reference=["r"] * len(samples),
            caption=["c"] * len(samples),
            index=list(samples),
        )

    spec = EvalSpec([None] * 7, 2, 12, 0, measure=lambda: None)
    ranks = [[columns(0, 3), columns(6)], [columns(1, 4)], [columns(2, 9)]]
    merged = evaluate._merge(ranks, spec)
    assert (
        merged.image_ids == ["i0", "i1", "i2", "i3", "i4", "i9", "i6"] and merged.num_damaged == 1
    )
    assert merged.values["cycle_iou"].tolist() == [0, 0.1, 0.2, 0.3, 0.4, 0.9, 0.6]
    alone = EvalSpec([None], 2, 12, 0, measure=lambda: None)
    assert evaluate._merge([[columns(0)], []], alone).image_ids == ["i0"]  # more ranks than samples


# The best checkpoint of a run


@pytest.fixture(scope="module")
def three_steps(data, tmp_path_factory):
    monkeypatch = pytest.MonkeyPatch()
    attributes = tmp_path_factory.mktemp("words") / "attributes.json"
    attributes.write_text(json.dumps({"pattern": {p: [p] for p in PATTERNS}}))
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
            attributes=attributes,
            distractors="",
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
    of_attributes = {"pattern_accuracy", "pattern_stated"}
    for metric in (set(METRICS) - SAMPLED - {"caption_cider"}) | of_attributes:
        assert list(found[f"eval/{metric}"]) == list(found[f"eval_ema/{metric}"]) == [0, 1, 2, 3]
        assert found[f"eval/{metric}"][0] == found[f"eval_ema/{metric}"][0]
    assert any(
        found[f"eval/{m}"][3] != found[f"eval_ema/{m}"][3]
        for m in ("cycle_iou", "seg_iou", "cycle_meteor", "caption_meteor")
    )
    assert found["eval/pattern_stated"][0] >= found["eval/pattern_accuracy"][0]
    for curve in ("loop1/on_target", "loop2/on_target", "loop2/objects_frac"):
        assert list(found[curve]) == [1, 2, 3] and 0 <= min(found[curve].values())


def test_the_best_step_is_kept(three_steps):
    found = curves(three_steps)
    scores = {
        step: (found["eval/seg_iou"][step] + found["eval/caption_meteor"][step]) / 2
        for step in (1, 2, 3)
    }
    best = three_steps / "checkpoint_best"
    kept = json.loads((best / "eval.json").read_text())
    assert kept["step"] == save_load.read_state(best)["step"] == max(scores, key=scores.get)
    assert kept["score"] == pytest.approx(scores[kept["step"]], abs=1e-6)
    assert kept["metrics"]["seg_ciou"] == pytest.approx(
        found["eval/seg_ciou"][kept["step"]], abs=1e-6
    )
    print(f"scores {scores}")


def test_the_files_hold_the_teacher_beside_the_policy(three_steps):
    found = curves(three_steps)
    for step in (1, 2, 3):
        measured = read_json(three_steps / "evaluation" / f"step_{step}.json")
        teacher = measured["teacher"]
        assert set(teacher) == {"means", "intervals", "values", "captions"}
        assert set(teacher["means"]) - set(teacher["intervals"]) == {"caption_distinct"}
        for metric, mean in teacher["means"].items():
            assert mean == pytest.approx(found[f"eval_ema/{metric}"][step], abs=1e-6)
            if metric in teacher["intervals"]:
                assert teacher["intervals"][metric][0] <= mean <= teacher["intervals"][metric][1]
        assert [len(values) for values in teacher["values"].values()] == [4] * len(
            teacher["values"]
        )
        assert teacher["values"] != measured["values"] and len(teacher["captions"]) == 4
    assert "teacher" not in read_json(three_steps / "evaluation" / "step_0.json")
    kept = read_json(three_steps / "checkpoint_best" / "eval.json")
    teacher, step = kept["metrics"]["teacher"], kept["step"]
    assert teacher["score"] == pytest.approx((teacher["seg_iou"] + teacher["caption_meteor"]) / 2)
    assert teacher["seg_iou"] == pytest.approx(found["eval_ema/seg_iou"][step], abs=1e-6)


def test_export_takes_the_role_of_the_better_measures(three_steps, capsys):
    """A step has the run's evaluation of it, checkpoint_best its own."""
    for name, step in (("checkpoint_step_3", 3), ("checkpoint_best", None)):
        step = step or read_json(three_steps / name / "eval.json")["step"]
        measured = read_json(three_steps / "evaluation" / f"step_{step}.json")
        scores = {
            role: (means["seg_iou"] + means["caption_meteor"]) / 2
            for role, means in (
                ("policy", measured["means"]),
                ("teacher", measured["teacher"]["means"]),
            )
        }
        role = preferred_role(three_steps / name)
        assert scores["policy"] != scores["teacher"] and role == max(scores, key=scores.get)
        printed = capsys.readouterr().out
        assert f"merging the {role}," in printed and "seg_iou and caption_meteor" in printed
        assert all(f"{name} {value:.4f}" in printed for name, value in scores.items())


def test_the_limit_leaves_it_and_latest_passes_it_over(three_steps):
    assert sorted(folder.name for folder in three_steps.glob("checkpoint*")) == [
        "checkpoint_best",
        "checkpoint_step_3",
    ]
    best, last = (
        {file.name for file in (three_steps / name).iterdir()}
        for name in ("checkpoint_best", "checkpoint_step_3")
    )
    assert best == last | {"eval.json"} and "data.json" in last
    assert save_load.find_resume_checkpoint("latest", three_steps).name == "checkpoint_step_3"
    assert (
        save_load.find_resume_checkpoint(str(three_steps / "checkpoint_best"), three_steps).name
        == "checkpoint_best"
    )


@pytest.fixture
def keep(policy, tmp_path):
    """Function of (step, score): `save_if_best` of the demo model into tmp_path."""
    model = policy()
    optimizer = torch.optim.AdamW(model.trainable.values())
    schedule = cosine_schedule(optimizer, 1, 0)
    state = RunState(model, Roles(model.trainable), [], optimizer, schedule)
    RunRecord().write(tmp_path)

    def save(step, score, data=None):
        state.step, state.data = step, data or {}
        save_load.save_if_best(tmp_path, state, {}, dict(cycle_iou=score, score=score), True)

    return save


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
            save_load.read_state(best)["step"]
            == json.loads((best / "eval.json").read_text())["step"]
            == expected
        )
    assert sorted(p.name for p in tmp_path.iterdir()) == [RECORD, "checkpoint_best"]


def test_a_kill_while_writing_leaves_the_old_one(keep, tmp_path, monkeypatch):
    keep(1, 0.5)
    with monkeypatch.context() as context:
        context.setattr(save_load, "save_file", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            keep(2, 0.6)
    assert save_load.read_state(tmp_path / "checkpoint_best")["step"] == 1
    # and a kill while the old one was removed
    replaced = f".checkpoint_best.{read_record(tmp_path).run_id}.0.replaced"
    (tmp_path / replaced / "adapter").mkdir(parents=True)
    keep(3, 0.7)
    assert save_load.read_state(tmp_path / "checkpoint_best")["step"] == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == [RECORD, "checkpoint_best"]


def test_a_score_of_other_regions_is_not_compared(keep, tmp_path):
    keep(1, 0.9, dict(training={}, evaluation=dict(rows=1)))
    keep(2, 0.8, dict(training={}, evaluation=dict(rows=1)))
    assert save_load.read_state(tmp_path / "checkpoint_best")["step"] == 1
    keep(3, 0.1, dict(training={}, evaluation=dict(rows=2)))
    assert save_load.read_state(tmp_path / "checkpoint_best")["step"] == 3
    assert json.loads((tmp_path / "checkpoint_best" / "data.json").read_text()) == dict(
        training={}, evaluation=dict(rows=2)
    )


def test_what_best_by_names_decides(tmp_path, monkeypatch):
    """It decides for policy and teacher alike; here measures are made up, in order of steps."""
    made = {
        0: [[0.1, 0.2, 0.0]],
        1: [[0.5, 0.1, 0.3], [0.1, 0.5, 0.0]],
        2: [[0.3, 0.4, 0.1], [0.1, 0.1, 0.1]],
    }  # of each role: segmentation IoU, METEOR, hits
    roles = SimpleNamespace(has_teacher=True, copies=dict(reference={}))
    state = SimpleNamespace(roles=roles, step=0, policy=None, data={}, base_fingerprint=None)
    spec, kept = SimpleNamespace(attribute_phrases={}, distractors=False), []
    log = SimpleNamespace(scalars=lambda points, step: None, writer=None)

    def measured(policy, heldout, ranks, names, *_):
        measures = zip(names, made[state.step], strict=True)
        of = ("seg_iou", "caption_meteor", "seg_on_target")
        return {
            name: evaluate.EvalResult(
                {one: torch.tensor([v], dtype=torch.float64) for one, v in zip(of, values)},
                *(["i"], ["r"], ["c"], 0),
            )
            for name, values in measures
        }

    monkeypatch.setattr(evaluate, "evaluate", measured)
    monkeypatch.setattr(save_load, "save_if_best", lambda *args: kept.append(args[3]))

    def scores(metric_for_best_model, eval_steps=1):
        kept.clear()
        config = SimpleNamespace(
            output_dir=tmp_path,
            eval_steps=eval_steps,
            metric_for_best_model=metric_for_best_model,
            merge_at_end="none",
        )
        evaluator = evaluate.Evaluator(spec, config, ALONE, {}, None)
        for state.step in made:
            evaluator.measure_base(state, log) if state.step == 0 else evaluator(state, log)
        return [round(v, 6) for found in kept for v in (found["score"], found["teacher"]["score"])]

    (tmp_path / "evaluation").mkdir()
    assert scores([]) == [0.3, 0.3, 0.35, 0.1]
    assert scores(["seg_on_target"]) == [0.3, 0, 0.1, 0.1]
    assert scores(["seg_iou", "seg_on_target"]) == [0.4, 0.05, 0.2, 0.1]
    assert scores([], eval_steps=0) == scores(["cycle_iou"], eval_steps=0) == []
    with pytest.raises(
        UserFault, match="--metric_for_best_model cycle_iou: this run measures .*seg_iou"
    ):
        scores(["cycle_iou"])
    assert state.step == 0  # before anything was trained

    with pytest.raises(
        UserFault, match="--metric_for_best_model is needed to choose checkpoint_best: .* cac"
    ):
        cycle_metrics.selection_score(dict(cac=1.0))


def test_no_evaluation_steps_keep_no_best(data, tmp_path):
    run(data, tmp_path, max_steps=1)
    assert [p.name for p in tmp_path.glob("checkpoint*")] == ["checkpoint_step_1"]


def test_whether_measures_are_missing_is_what_the_first_ranks_disk_says(tmp_path, monkeypatch):
    """They are written there alone; a rank that asked its own disk would evaluate by itself."""
    config = SimpleNamespace(
        output_dir=tmp_path, eval_steps=2, metric_for_best_model=[], merge_at_end="none"
    )
    evaluator = evaluate.Evaluator(None, config, None, {}, None)
    monkeypatch.setattr(evaluate, "gather_objects", lambda mine: [False, mine])
    assert not evaluator.missing(2)
    monkeypatch.setattr(evaluate, "gather_objects", lambda mine: [mine, False])
    assert evaluator.missing(2) and not evaluator.missing(1) and not evaluator.missing(0)
