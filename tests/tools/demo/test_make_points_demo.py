"""The demo of points: what its scenes are, what its models are taught, and two steps on it."""

import json
from collections import Counter

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from rl_train.points.parser import PointPrompt
from rl_train.policies.qwen_vl import QwenVLPolicy
from rl_train.policies.qwen_vl_model import load_qwen, load_sam
from sa2va_hf.qwen_images import patches
from tests.runs import on_one_core, rollouts, run
from tools.demo.clump_scenes import RADIUS, SIDE, inside, make_scene
from tools.demo.make_points_demo import SHIPPED, main
from tools.demo.points_drawing import (
    ELSEWHERE,
    ENCODER,
    MEANT,
    OTHER_CLUMPS,
    OUTSIDE,
    DrawingStart,
    clump_loss,
    mask_iou,
)
from tools.demo.points_model import PREPROCESSOR, SEEN, form, make_tokenizer, new_qwen, new_sam
from tools.demo.points_warm_start import (
    NEAR,
    SHOWN,
    SLOPPY,
    PointingStart,
    draw,
    mode_of,
    negative_point,
    seen_point,
    where,
)
from tools.demo.scenes import HELDOUT
from tools.experiments.sweep_table import measures

one_core = pytest.fixture(autouse=True)(on_one_core)


@pytest.fixture(scope="module")
def scenes():
    return [draw(0, i) for i in range(3)]


@pytest.fixture(scope="module")
def pointing(scenes):
    tokenizer = make_tokenizer()
    return PointingStart(new_qwen(tokenizer), tokenizer, scenes, 0, "cpu")


@pytest.fixture(scope="module")
def drawing(scenes):
    torch.manual_seed(0)
    return DrawingStart(new_sam(), scenes, 0, "cpu")


def test_a_phrase_names_one_member_and_its_clump_alone_is_beside_it():
    for index in range(6):
        scene = make_scene(1, 0, index)
        again = make_scene(1, 0, index)
        assert np.array_equal(scene.image, again.image)
        assert len({m.caption for m in scene.members}) == len(scene.members)
        assert len({m.color for m in scene.members}) == 3
        for k, member in enumerate(scene.members):
            near = scene.neighbours(k)
            assert 1 <= len(near) <= 2
            assert {scene.members[n].color for n in near} == {member.color}
            x, y = member.centre
            assert member.mask[int(y), int(x)]
            for n, other in enumerate(scene.members):
                assert not (member.mask & other.mask).any() or n == k
                gap = np.hypot(*np.subtract(member.centre, other.centre)) - 2 * RADIUS[1]
                assert (gap < 0) == (n in near or n == k)
            # Two digits wherever a point may be.
            rows, columns = np.nonzero(member.mask)
            assert min(rows.min(), columns.min()) * SEEN / SIDE >= 8
            points = inside(np.random.default_rng(0), member.mask, 20)
            assert member.mask[points[:, 1], points[:, 0]].all()
            assert all(10 <= v < SEEN for point in points for v in seen_point(point))


def test_answers_of_the_warm_start_point_at_the_member_and_help_as_often_as_said(pointing, scenes):
    """600 answers about each member of a scene can be read."""
    rng, modes = np.random.default_rng(0), Counter()
    scene = scenes[0]
    for k in range(len(scene.members)):
        for _ in range(600):
            text = pointing.answer(scene, k, True, SLOPPY, rng)
            said = form(True).parse_in_pixels(text, (SEEN, SEEN), (SIDE, SIDE)).prompt
            assert [where(scene, point) for point in said.positive] == [1 + k]
            modes[mode_of(scene, k, said.negative)] += 1
    assert SHOWN.keys() == SLOPPY.keys() >= modes.keys()
    assert sum(SHOWN.values()) == pytest.approx(1)
    shares = {mode: count / modes.total() for mode, count in modes.items()}
    assert shares == pytest.approx(SLOPPY, abs=0.03)
    assert pointing.answer(scene, 0, False, SLOPPY, rng).startswith('{"points": [[')


@pytest.fixture(scope="module")
def negatives():
    """Draw {mode: (n, 5)}: x, y from the member, distances to it and to the middle, if as said."""
    rng, rows = np.random.default_rng(0), {mode: [] for mode in SLOPPY if mode != "none"}
    for scene in (draw(0, i) for i in range(60)):
        for k, (*_, centre) in enumerate(scene.members):
            for mode, of_mode in rows.items():
                point = negative_point(scene, k, mode, rng)
                in_pixels = [v * SIDE / SEEN for v in seen_point(point)]
                away, from_middle = np.subtract(point, centre), np.subtract(point, (SIDE - 1) / 2)
                as_said = mode_of(scene, k, [in_pixels]) == mode
                of_mode.append([*away, np.hypot(*away), np.hypot(*from_middle), as_said])
    return {mode: np.array(of_mode) for mode, of_mode in rows.items()}


def test_useless_negative_points_lie_where_their_mode_says(negatives):
    """As whole pixels of the seen image: an edge may be missed by rounding, but hardly ever is."""
    assert negatives.keys() == {"background_near", "other_clump", "own_edge", "neighbour"}
    for mode, rows in negatives.items():
        assert rows[:, 4].mean() >= (0.99 if mode == "own_edge" else 1), mode
    assert negatives["background_near"][:, 2].max() < NEAR < negatives["other_clump"][:, 2].mean()


def test_no_distance_and_no_direction_tells_neighbours_from_useless_points(negatives):
    near = negatives["neighbour"]
    _, _, from_member, from_middle = range(4)
    assert 0.35 < larger(near, negatives["background_near"], from_member) < 0.65
    # A threshold on the distance from the member leaves useless points on both sides of it.
    assert larger(near, negatives["own_edge"], from_member) > 0.9
    assert larger(near, negatives["other_clump"], from_member) < 0.1
    for mode, rows in negatives.items():
        assert 0.35 < larger(near, rows, from_middle) < 0.65, mode
        for x_or_y in (0, 1):
            assert 0.4 < (rows[:, x_or_y] > 0).mean() < 0.6, mode


def larger(rows, others, column: int) -> float:
    """Return the probability that a value of `rows` is the larger one (AUC); ties count half."""
    a, b = rows[:, None, column], others[None, :, column]
    equal = np.abs(a - b) < 1e-6
    return float(((a > b) & ~equal).mean() + equal.mean() / 2)


def test_the_likeliest_answer_about_most_members_is_of_no_use(pointing):
    """Read off digit by digit, as greedy decoding reads it, from 400 answers about each member."""
    rng, modes = np.random.default_rng(0), Counter()
    for scene in (draw(0, i) for i in range(12)):
        k = int(rng.integers(len(scene.members)))
        texts = [pointing.answer(scene, k, True, SLOPPY, rng) for _ in range(400)]
        for at in range(max(map(len, texts))):
            most = Counter(text[at : at + 1] for text in texts).most_common(1)[0][0]
            texts = [text for text in texts if text[at : at + 1] == most]
        said = form(True).parse_in_pixels(texts[0], (SEEN, SEEN), (SIDE, SIDE)).prompt
        modes[mode_of(scene, k, said.negative)] += 1
    assert modes["neighbour"] <= 3 and modes.most_common(1)[0][0] == "background_near"


def test_what_sam_is_taught_a_negative_point_in_a_neighbour_means_the_member(drawing, scenes):
    rng, meant = np.random.default_rng(0), Counter()
    for _ in range(400):
        k, (positive,), _, members = drawing.row(scenes[0], 1, 0, rng)
        assert where(scenes[0], positive) == 1 + k and k in members
        meant["member" if members == [k] else "clump"] += 1
        k, points, labels, members = drawing.row(scenes[0], 1, 1, rng)
        near = where(scenes[0], points[1]) - 1 in scenes[0].neighbours(k)
        assert labels == [1, 0] and (members == [k]) == near
        meant["near" if near else "elsewhere"] += 1
    assert meant["member"] / 400 == pytest.approx(0.5, abs=0.07)
    assert meant["elsewhere"] / 400 == pytest.approx(ELSEWHERE, abs=0.07)


def test_the_loss_of_a_clump_by_hand():
    """A pixel is meant, one its neighbour, one of another clump, one background."""
    masks = [torch.arange(4)[None, None] < n for n in (1, 2, 3)]
    flat = clump_loss(torch.zeros(1, 1, 4), *masks, 0.3)
    dice = 1 - (2 * 0.5 + 1) / (2 + 1 + 1)
    assert flat == pytest.approx((MEANT + 0.3 + OTHER_CLUMPS + OUTSIDE) * np.log(2) + dice)
    wrong = torch.tensor([[[9.0, 9.0, -9.0, -9.0]]])
    assert clump_loss(wrong, *masks, 0.3) == pytest.approx(9 * 0.3 + 1 - 3 / 4, abs=0.01)


@torch.no_grad()
def test_the_quick_forward_is_transformers_own(pointing):
    """All images at once, rows padded on the right; tokens by pieces are the whole's."""
    said = form(True).format(PointPrompt((), ((12, 34),), ((45, 67),)))
    assert pointing.ids(said) == pointing.tokenizer.encode(said, add_special_tokens=False)
    rows = [pointing.prompt("the red circle", True) + pointing.ids(said)]
    rows.append(pointing.prompt("the blue square", False))
    seen = pointing.seen[:2]
    quick = pointing.logits(rows, pointing.vision(seen))
    side = SEEN // PREPROCESSOR["patch_size"]
    for image, row, logits in zip(seen, rows, quick):
        ids = torch.tensor([row])
        whole = pointing.vlm(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            pixel_values=patches(image, pointing.preprocessing),
            image_grid_thw=torch.tensor([[1, side, side]]),
            mm_token_type_ids=(ids == pointing.image_token).int(),
        )
        assert torch.allclose(logits[: len(row)], whole.logits[0], atol=1e-4)


def test_one_step_of_each_teaches_every_part(pointing, drawing):
    """All weights that an answer or a mask of points depends on get a gradient."""
    assert pointing.step(0.0, 2)["text"] > 0
    left = [name for name, p in pointing.vlm.named_parameters() if p.grad is None]
    assert left == []
    assert drawing.step(0.0, 2)["read"] > 0
    got = {name for name, p in drawing.sam.named_parameters() if p.grad is not None}
    for name in ("vision_encoder.backbone.pos_embed", "prompt_encoder.point_embed.weight"):
        assert name in got


def test_points_are_learnt_anew_on_a_frozen_encoder(drawing):
    """The encoder stays what it is; behind its steps the rest goes on from what it began as."""
    drawing.step(0.0, 2)
    begun = drawing.anew["prompt_encoder.point_embed.weight"].clone()
    point_embed = drawing.sam.prompt_encoder.point_embed.weight
    encoder = drawing.sam.vision_encoder.state_dict()
    encoder = {name: value.clone() for name, value in encoder.items()}
    with torch.no_grad():
        point_embed.add_(1.0)
    drawing.step(ENCODER, 2)
    rate = drawing.drawing.learning_rate
    assert 0 < (point_embed - begun).abs().max() < rate
    assert torch.equal(begun, drawing.anew["prompt_encoder.point_embed.weight"])
    after = drawing.sam.vision_encoder.state_dict()
    assert all(torch.equal(encoder[name], value) for name, value in after.items())


def test_what_is_measured_of_untrained_models(drawing, pointing):
    assert drawing.evaluate(drawing.scenes[:1]).keys() >= {"clump", "alone", "neighbour"}
    assert pointing.evaluate(pointing.scenes, tokens=2)["parsable"] == 0.0


def test_masks_of_members_and_their_iou(drawing, scenes):
    at = torch.from_numpy(scenes[0].of_member[None].astype(int)).expand(2, -1, -1)
    masks = drawing._masks(at, [[0], [0, 1]])
    assert torch.equal(masks[0], at[0] == 1)
    assert torch.equal(masks[1], (at[0] == 1) | (at[0] == 2))
    share = masks[0].sum() / masks[1].sum()
    assert mask_iou(masks, masks[[1, 1]]) == pytest.approx((1 + share.item()) / 2)


def test_what_ships_points_at_the_member_and_draws_it_for_a_right_negative_point(tmp_path):
    """Copied by the demo: a greedy negative point is of no use, one in a neighbour would be."""
    main(["--output_dir", str(tmp_path), "--train_scenes", "1", "--heldout_scenes", "1"])
    held = [draw(0, index, HELDOUT) for index in range(6)]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "qwen")
    said = PointingStart(load_qwen(tmp_path / "qwen"), tokenizer, held, 0, "cpu").evaluate(held)
    assert said["parsable"] == 1 and said["positive_hits"] >= 0.8 and said["neighbour"] <= 0.2
    iou = DrawingStart(load_sam(tmp_path / "sam"), held, 0, "cpu").evaluate(held)
    assert iou["clump"] > 0.7 and iou["neighbour"] > iou["alone"] + 0.15
    for useless in ("background", "background_near", "other_clump", "own_edge"):
        assert iou[useless] < iou["alone"] + 0.1, useless


def test_two_steps_on_the_demo_that_is_made(tmp_path, monkeypatch):
    """Models of one step load strictly; the right negative point's gain is what is measured."""
    demo = tmp_path / "demo"
    few = "--train_scenes 3 --heldout_scenes 1 --warm_start_steps 1 1 --warm_start_scenes 3"
    main(["--output_dir", str(demo), "--train_checkpoint", "--device", "cpu", *few.split()])
    weights = [demo / name / "model.safetensors" for name in ("qwen", "sam")]
    assert sum(file.stat().st_size for file in weights) < 3e6
    said = form(True).format(PointPrompt((), ((40, 40),), ((50, 50),)))
    monkeypatch.setattr(QwenVLPolicy, "completion_text", lambda policy, ids: said)
    points = dict(sam_path=demo / "sam", tasks="point_segmentation", answer_style="points")
    points |= dict(model_path=demo / "qwen", image_size=SEEN, latent_std=None, eval_steps=1)
    output = run(demo, tmp_path / "run", **points, max_completion_length=4)
    lines = rollouts(output)
    assert len(lines) == 2 * 4 and {line["num_negative"] for line in lines} == {1.0}
    file = output / "evaluation" / "step_2.json"
    values, means = json.loads(file.read_text())["values"], measures(file)
    gains = [a - b for a, b in zip(values["seg_iou"], values["seg_iou_without"])]
    assert gains == pytest.approx(values["gain_negative"]) and means["num_negative"] == 1


def test_one_model_is_trained_and_the_other_one_is_what_ships(tmp_path, capsys):
    few = "--train_scenes 1 --heldout_scenes 1 --warm_start_steps 1 1 --warm_start_scenes 2"
    flags = ["--train_checkpoint", "--models", "qwen", "--device", "cpu", *few.split()]
    main(["--output_dir", str(tmp_path), *flags])
    for name, ships in (("qwen", False), ("sam", True)):
        file = f"{name}/model.safetensors"
        assert ((tmp_path / file).read_bytes() == (SHIPPED / file).read_bytes()) == ships
    output = capsys.readouterr().out
    assert "Qwen2.5-VL, greedy" in output and "SAM2, IoU" not in output
