"""The gauntlet as a user runs it, and that held-out regions are read when all is chosen."""

import json
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import Subset

from rl_train.evaluation.cycle_metrics import measure_captions
from rl_train.policies.sa2va_queries import blank_features
from tests.runs import CHECKPOINT, on_one_core
from tools.experiments.gauntlet import __main__ as gauntlet
from tools.experiments.gauntlet import loop2, samples
from tools.experiments.gauntlet.regions import Regions
from tools.experiments.gauntlet.samples import PickBy
from tools.experiments.scalar_baseline import GRIDS

one_core = pytest.fixture(autouse=True)(on_one_core)


class Scenes(list):
    """Samples as a data set of one region an image."""

    def __init__(self, samples):
        super().__init__(samples)
        self.image_keys = torch.arange(len(self)).numpy()

    def mask(self, i, size):
        return self[i]["mask"]


def argv(data, output, *more) -> list[str]:
    flags = dict(model_path=CHECKPOINT, data_dir=data / "train", eval_data_dir=data / "heldout")
    flags |= dict(dtype="float32", max_completion_length=16, num_workers=0, output_dir=output)
    flags |= dict(num_samples=4, eval_samples=3, num_generations=2)
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))] + [*more]


def test_as_a_user_runs_it(data, tmp_path, capsys, monkeypatch):
    for name in GRIDS:
        monkeypatch.setitem(GRIDS, name, ([0.5, 1.0], 1.0))
    twice = ["--model_path", str(CHECKPOINT), str(CHECKPOINT), "--latent_std", "1"]
    gauntlet.main(argv(data, tmp_path / "out", *twice))
    printed, text = capsys.readouterr().out, (tmp_path / "out" / "table.md").read_text()
    assert text in printed and "chosen on 4 training regions, measured on 3 held-out" in text
    found = json.loads((tmp_path / "out" / "table.json").read_text())
    for loop in gauntlet.LOOPS:
        rows, values = found[f"loop{loop}"]["rows"], found[f"loop{loop}"]["values"]
        best, *_ = rows[0]["measures"].values()
        assert best["fraction"] in (None, pytest.approx(1)) and len(rows) > 9
        assert all(len(of["iou"]) == 3 for of in values[0].values())
        assert len(values) == 2 and values[0] == values[1]  # of one model
        assert all(row["measures"]["iou"]["checkpoints"]["half"] == 0 for row in rows)
    assert "± checkpoints" in text
    with pytest.raises(SystemExit, match="gauntlet: --output_dir .*: holds a table, name another"):
        gauntlet.main(argv(data, tmp_path / "out"))
    with pytest.raises(SystemExit, match="gauntlet: --num_generations 1: "):
        gauntlet.main(argv(data, tmp_path / "a", "--num_generations", "1"))
    shared = argv(data, tmp_path / "b", "--eval_data_dir", str(data / "train"))
    with pytest.raises(SystemExit, match="gauntlet: --data_dir .* share images"):
        gauntlet.main(shared)


def test_an_interruption_keeps_the_checkpoints_that_are_measured(data, tmp_path, monkeypatch):
    paths, opened = [CHECKPOINT, CHECKPOINT], []

    def open_policy(*args, **settings):
        if len(opened) == 1:
            raise KeyboardInterrupt
        opened.append(args)
        return gauntlet.open_policy(*args, **settings)

    args = gauntlet.build_parser().parse_args(argv(data, tmp_path / "out", "--loops", "1"))
    args.model_path = paths
    ranks = SimpleNamespace(device=torch.device("cpu"))
    with pytest.raises(KeyboardInterrupt):
        gauntlet.run(args, ranks, open_policy)
    assert (tmp_path / "out" / "table.md").read_text().startswith("1 of 2 checkpoint(s), chosen")
    (values,) = json.loads((tmp_path / "out" / "table.json").read_text())["loop1"]["values"]
    assert len(values["greedy"]["iou"]) == 3


def test_loop_1_is_measured_by_the_object_found_where_that_is_its_reward(data, tmp_path):
    """The rows' first measure is the one that fractions and the best of G are by."""
    asked = "--loops 1 --loop1_reward found --eval_samples 12 --num_generations 4"
    gauntlet.main(argv(data, tmp_path / "out", *asked.split()))
    found = json.loads((tmp_path / "out" / "table.json").read_text())["loop1"]
    assert all(list(row["measures"]) == ["found", "iou"] for row in found["rows"])
    text = (tmp_path / "out" / "table.md").read_text()
    assert 0 < text.index("object found") < text.index("cycle IoU")
    (values,) = found["values"]
    picks = [of["found"] for name, of in values.items() if name.startswith("best of G by ")]
    assert len(picks) > 4 and set(values["best"]["found"]) == {0, 1}
    assert f"best of G by {samples.ANY_OBJECT}" in values
    assert all(max(of) <= best for best, *of in zip(values["best"]["found"], *picks))


def test_loop_2_is_measured_by_its_highest_logits_and_its_reward_is_the_one_asked_for(
    data, tmp_path, monkeypatch
):
    for name in GRIDS:
        monkeypatch.setitem(GRIDS, name, ([0.5, 1.0], 1.0))
    kept, sample_scores = [], loop2.sample_scores

    def keeping(*args):
        kept.append(sample_scores(*args))
        return kept[-1]

    monkeypatch.setattr(loop2, "sample_scores", keeping)
    # A direction that training regions would choose; the oracle's is not chosen.
    monkeypatch.setattr(samples, "choose_direction", lambda name, *_: PickBy(name, "smallest", 0.0))
    asked = "--loops 2 --loop2_reward likelihood --loop2_measure pointed --latent_std 1"
    gauntlet.main(argv(data, tmp_path / "out", *asked.split()))
    table = json.loads((tmp_path / "out" / "table.json").read_text())["loop2"]
    assert all(list(row["measures"]) == ["pointed", "iou", "found"] for row in table["rows"])
    names = [row["name"] for row in table["rows"]]
    assert "best of G by METEOR" in names
    assert not any("likelihood with the image" in name for name in names)
    scores = kept[-1]  # of the held-out regions
    best = scores["iou"].gather(1, scores["likelihood"].argmax(1, keepdim=True))[:, 0]
    assert table["values"][0]["best"]["iou"] == pytest.approx(best.tolist())
    assert set(scores["pointed"].unique().tolist()) <= {0, 1} and 0 < scores["pointed"].mean()
    rows = {row["name"].removeprefix("best of G by "): row for row in table["rows"]}
    assert rows["area"]["chosen"] == ["smallest"]
    assert rows[samples.ANY_OBJECT]["chosen"] == ["largest"]
    (values,) = table["values"]  # a threshold moves no highest logit
    assert values["threshold of the mask"]["pointed"] == values["greedy"]["pointed"]


def test_phrases_that_name_a_place_are_left_out():
    captions = ["owl left of the violin", "owl", "sun behind cloud", "owl above the violin"]
    kept = gauntlet.without_places(Subset([dict(caption=text) for text in captions], range(4)))
    assert [sample["caption"] for sample in kept] == ["owl", "sun behind cloud"]
    with pytest.raises(ValueError, match="--without_places: each phrase of the data names a place"):
        gauntlet.without_places(Subset([dict(caption=captions[0])], [0]))


def test_held_out_regions_are_read_when_all_is_chosen(monkeypatch):
    """Choosing is given training regions alone; at that time nobody has opened the others."""
    order = []

    def opened(policy, dataset, *_):
        order.append(f"open {dataset}")
        return dataset

    def loop(name):
        return SimpleNamespace(
            choose=lambda regions, _, *how: (
                order.append(f"{name} chooses on {regions} by {how}") or name
            ),
            measure=lambda regions, chosen, _: order.append(f"{chosen} measured on {regions}"),
        )

    monkeypatch.setattr(gauntlet, "Regions", opened)
    for number in (1, 2):
        monkeypatch.setattr(gauntlet, f"loop{number}", loop(str(number)))
        monkeypatch.setitem(gauntlet.LOOPS, number, ("", loop(str(number))))
    flags = dict.fromkeys("max_prompt_length batch_size num_workers num_generations".split())
    flags |= dict(max_completion_length=8, loop1_reward="found", latent_std=0.5)
    flags |= dict(loop2_reward="likelihood", loop2_measure="found")
    args = Namespace(loops=[1, 2], **flags)
    gauntlet.results_of(None, "training", "heldout", args)
    assert order == [
        "open training",
        "1 chooses on training by ('found',)",
        "2 chooses on training by (0.5, 'likelihood', 'found')",
        "open heldout",
        "1 measured on heldout",
        "2 measured on heldout",
    ]


@pytest.fixture(scope="module")
def regions(model, scenes) -> Regions:
    return Regions(model, Scenes(scenes), 16, 100, batch_size=3, num_workers=0)


def test_the_listener_is_the_evaluation_s(regions, model, batch, images):
    """Each pair is asked once; an empty caption finds nothing."""
    for captions in (regions.greedy_captions(), regions.references):
        heard = regions.listen(list(enumerate(captions)))
        with torch.no_grad():
            expected = measure_captions(model, batch, images, captions, 16)["cycle_iou"]
        assert [each.iou for each in heard] == pytest.approx(expected, abs=1e-5)
    assert min(expected) > 0.5 and all(each.confidence > 0.5 for each in heard)
    asked = []
    regions._ask, ask = lambda part, pairs: asked.extend(pairs), regions._ask
    assert regions.listen([(0, captions[0])]) == heard[:1] and not asked
    regions._ask = ask
    assert regions.listen([(1, "")])[0].iou == 0


def test_likelihood_without_image_depends_on_the_text_alone(regions, model):
    texts = ["a red circle", "zebra zebra zebra", "a red circle"]
    found = regions.likelihood_without_image(texts)
    (odd,) = regions.likelihood_without_image([f"{texts[0]}<IMG_CONTEXT>"])  # that a base sampled
    assert odd == pytest.approx(found[0], rel=1e-5)
    assert found[0] == found[2] > found[1] and 0 < found[1] < 1
    features = blank_features(model, 16)
    assert features.prompt_masks.all() and len(features.sizes) == 1
