"""docs/flags.md: its table of curves has every curve that a run writes, and no other."""

import itertools
import json
import re
import sys
from types import ModuleType

import pytest

from rl_train.config.curves_page import CURVES
from rl_train.points.parser import REASONS, REPAIRS
from rl_train.policies.qwen_vl import QwenVLPolicy
from rl_train.tasks import TASKS
from rl_train.tasks.sft_tasks import SFT_TASKS
from tests import supervised
from tests.data.image_file_sets import write_gcg
from tests.data.parquet_rows import row, visionreasoner_solution, write_parquet
from tests.judge_server import JudgeServer
from tests.policies.tiny_points import write_qwen, write_sam
from tests.runs import ROOT, events, on_one_core, run
from tools.demo.refcoco_writer import drawn_scenes, write_refcoco

# What stands for a word in capitals of a row.
PLACEHOLDERS = {
    "TASK": "|".join(task.name for task in (*TASKS.values(), *SFT_TASKS.values())),
    "GROUP": "lora|mlp1|text_hidden_fcs|sam2",
    "PHASE": "data|encode|rollout|reference|teacher|update",
    "NAME": r"[^/]+",
    "REASON": "|".join(REASONS),
    "REPAIR": "|".join(REPAIRS),
    "ATTRIBUTE": "color",
    "METRIC": r"\w+",
    "FUNCTION": "num_letters",
}
# {row: its literal in the code} of those that need a GPU or a damaged sample.
IN_CODE = {
    "perf/peak_memory_gib": '"perf/peak_memory_gib"',
    "perf/peak_memory_gib/PHASE": 'f"perf/peak_memory_gib/{',
    "data/damaged": '"data/damaged"',
}
OF_BOTH_LOOPS = (
    "always",
    "RL",
    "RL but points",
    "RL: component of the reward",
    "both loops",
    "RL of sampled masks: loop 2, referring, grounded captions",
    "Sa2VA",
)
ROWS = {curve for curves in CURVES.values() for curve in curves}


def pattern(curve: str) -> re.Pattern[str]:
    words = re.split(f"({'|'.join(PLACEHOLDERS)})", curve)
    return re.compile("".join(f"({PLACEHOLDERS[w]})" if w in PLACEHOLDERS else w for w in words))


def missing(tags: set[str], rows: set[str]) -> tuple[list[str], list[str]]:
    """(Tags that no row stands for, rows that stand for no tag)."""
    patterns = {row: pattern(row) for row in rows}
    without_row = [t for t in tags if not any(p.fullmatch(t) for p in patterns.values())]
    without_tag = [r for r, p in patterns.items() if not any(map(p.fullmatch, tags))]
    return sorted(without_row), sorted(without_tag)


def tags_of(output) -> set[str]:
    return set(events(output).Tags()["scalars"])


@pytest.fixture(scope="module")
def one_core():
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield from on_one_core(monkeypatch)


@pytest.fixture(scope="module")
def both_loops(data, one_core, tmp_path_factory) -> set[str]:
    return tags_of(run(data, tmp_path_factory.mktemp("both") / "run", max_steps=1))


def test_a_run_of_both_loops_has_exactly_these_curves(both_loops):
    rows = {curve for when in OF_BOTH_LOOPS for curve in CURVES[when]}
    assert missing(both_loops, rows) == ([], [])


def of_many_flags(data, folder):
    attributes = folder / "attributes.json"
    attributes.write_text(json.dumps({"color": {c: [c] for c in ("red", "green", "blue")}}))
    weights = ["loop2.meteor=.25", "loop2.judge=.75", "loop2.likelihood=.5", "loop2.cider=.5"]
    with JudgeServer() as server:
        flags = dict(
            distractors="",
            attributes=attributes,
            data_mixture=f"gar:{data / 'heldout'}",
            train_eval_overlap="keep",
            reward="letters:num_letters",
            reward_weights=weights,
            llm_judge_base_url=server.url,
            resample_equal_groups=1,
            overlong_buffer=4,
            eval_samples=8,
        )
        return run(data, folder / "run", max_steps=1, **flags)


def of_referring(data, folder):
    write_refcoco(drawn_scenes("grefcoco", 3, 4, 1), folder / "data", "grefcoco")
    weights = [f"referring.{name}=1" for name in ("iou", "matched", "box_iou", "centre")]
    places = dict.fromkeys(("data_dir", "eval_data_dir"), folder / "data")
    flags = places | dict(dataset="grefcoco", train_eval_overlap="keep", max_bad_fraction=1)
    flags |= dict(tasks="referring", think="", reward_weights=weights, eval_samples=16)
    return run(data, folder / "run", max_steps=1, latent_std=1, **flags)


def of_grounded_captions(data, folder):
    write_gcg(folder / "data")
    flags = dict(dataset="gcg", data_dir=folder / "data", eval_data_dir=folder / "data")
    flags |= dict(tasks="grounded_captioning", train_eval_overlap="keep", max_bad_fraction=1)
    return run(data, folder / "run", max_steps=1, latent_std=1, eval_samples=2, **flags)


def of_an_ablation(data, folder):
    return run(data, folder / "run", max_steps=1, ablation_reward="fixed", tasks="captioning")


def of_supervised_training(data, folder):
    return supervised.run(data, folder / "run", max_steps=1)


def of_points(data, folder, answer: str, **flags):
    """A run whose answers are every other time `answer`, and unreadable the other times."""
    models = dict(model_path=write_qwen(folder / "qwen"), sam_path=write_sam(folder / "sam"))
    flags |= dict(tasks="point_segmentation", image_size=56, latent_std=None, sam_passes=1)
    number = itertools.count()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(
            QwenVLPolicy, "completion_text", lambda *_: "so" if next(number) % 2 else answer
        )
        return run(data, folder / "run", max_steps=1, max_completion_length=4, **models, **flags)


def of_points_one_by_one(data, folder):
    answer = '{"points": [[20, 20]], "negative_points": [[40, 40]]}'
    weights = ["points.iou=1", "points.matched=1"]
    return of_points(data, folder, answer, answer_style="points", reward_weights=weights)


def of_published_points(data, folder):
    train = write_parquet(folder / "train", [row(k, visionreasoner_solution(k)) for k in range(8)])
    heldout = [row(k, visionreasoner_solution(k)) for k in range(20, 26)]
    answer = json.dumps([dict(bbox_2d=[7, 13, 33, 40], point_2d=[20, 27])])
    flags = dict(data_dir=train, eval_data_dir=write_parquet(folder / "heldout", heldout))
    flags |= dict(dataset="segzero", answer_style="visionreasoner", negative_points="off")
    answer = f"<think>so</think><answer>{answer}</answer>"
    return of_points(data, folder, answer, reward_set="visionreasoner", **flags)


def test_every_row_is_a_curve_of_some_run(data, one_core, both_loops, tmp_path, monkeypatch):
    letters = ModuleType("letters")
    letters.num_letters = lambda completions: [float(len(text)) for text in completions]
    monkeypatch.setitem(sys.modules, "letters", letters)
    runs = (
        of_many_flags,
        of_referring,
        of_grounded_captions,
        of_an_ablation,
        of_supervised_training,
        of_points_one_by_one,
        of_published_points,
    )
    tags = both_loops.union()
    for make in runs:
        folder = tmp_path / make.__name__
        folder.mkdir()
        tags |= tags_of(make(data, folder))
    code = "".join(path.read_text() for path in (ROOT / "rl_train" / "run").glob("*.py"))
    code += (ROOT / "rl_train" / "loggers" / "metrics.py").read_text()
    assert all(literal in code for literal in IN_CODE.values())
    assert missing(tags, ROWS - set(IN_CODE)) == ([], [])
