"""tools/predict.py: an answer about a picture, by the model's own predict_forward."""

import json

import numpy as np
import pytest
from PIL import Image

from rl_train.data.rle import decode_mask
from rl_train.export.load_policy import open_policy
from rl_train.utils.command_line import SEE_HELP
from sa2va_hf import Sa2VAModel
from sa2va_hf.tokenizer import load_tokenizer
from tests.runs import CHECKPOINT, run, unmeasured
from tools import predict
from tools.demo.make_points_demo import SHIPPED as POINTS
from tools.picture_model import PictureModel
from tools.record_original import draw_scene

one_core = pytest.fixture(autouse=True)(unmeasured)
CLICK = (8, 8)  # where the demo's SAM2, which was not trained on points, finds any region at all


@pytest.fixture
def picture(tmp_path, scenes):
    """(file of an image, file of a region in it, the region's caption)"""
    sample = scenes[0]
    files = tmp_path / "image.png", tmp_path / "region.png"
    sample["image"].save(files[0])
    Image.fromarray(sample["mask"]).save(files[1])
    return *files, sample["caption"]


def answer(capsys, *argv) -> list[str]:
    """The lines that are printed."""
    predict.main([str(word) for word in argv])
    return capsys.readouterr().out.splitlines()


def test_a_mask_is_drawn(picture, tmp_path, capsys):
    image, _, caption = picture
    text, output = (
        f"Please segment {caption.lower()[:-1]} in this image.",
        tmp_path / "new" / "o.png",
    )
    argv = ("--model_path", CHECKPOINT, "--image", image, "--text", text, "--output", output)
    said, mask, written = answer(capsys, *argv)
    model = Sa2VAModel.from_pretrained(CHECKPOINT)
    expected = model.predict_forward(
        image=Image.open(image), text=f"<image>\n{text}", tokenizer=load_tokenizer(CHECKPOINT)
    )
    (drawn,) = expected["prediction_masks"]
    assert f"{said}<|end|>" == expected["prediction"] and "[SEG]" in said
    assert mask == f"mask 1: {drawn.sum():,d} of {drawn.size:,d} pixels"
    changed = np.asarray(Image.open(output)) != np.asarray(Image.open(image))
    assert np.array_equal(changed.any(-1), drawn[0])
    assert written == f"{output}: {image} with 1 mask of the answer"


def test_a_region_is_described(picture, capsys):
    image, region, _ = picture
    said, no_mask = answer(capsys, "--model_path", CHECKPOINT, "--image", image, "--region", region)
    assert len(said.split()) > 3 and "[SEG]" not in said and "<|end|>" not in said
    assert no_mask == "the answer has no mask"


def test_a_checkpoint_of_a_run(picture, data, tmp_path, capsys):
    image, region, _ = picture
    output = run(data, tmp_path / "run", max_steps=1, learning_rate=1e-9)
    argv = ("--image", image, "--region", region, "--role", "teacher")
    capsys.readouterr()
    trained = answer(capsys, "--model_path", output / "checkpoint_step_1", *argv)
    base = answer(capsys, "--model_path", CHECKPOINT, *argv[:-2])
    assert [line for line in trained if line in base] == base


def test_points(picture, tmp_path, capsys):
    """The shipped tiny models of points answer with box, points and a mask, or say why not."""
    image, _, caption = picture
    models = ("--model_path", POINTS / "qwen", "--sam_path", POINTS / "sam", "--image_size", 96)
    argv = (*models, "--answer_style", "points", "--image", image, "--text", caption)
    said = answer(capsys, *argv, "--output", tmp_path / "o.png")
    assert (
        said[-1].endswith((" 1 mask of the answer", " 0 masks of the answer"))
        and (tmp_path / "o.png").is_file()
    )
    assert said[-2].startswith(("mask 1", "the answer has no mask"))


def test_two_models_about_a_box(picture, tmp_path, capsys):
    image, region, _ = picture
    rows, columns = np.nonzero(np.asarray(Image.open(region)))
    box = (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
    other = ("--compare", CHECKPOINT, "--output", tmp_path / "o.png", "--json", tmp_path / "o.json")
    said = answer(capsys, "--model_path", CHECKPOINT, "--image", image, "--box", *box, *other)
    assert said[:3] == said[3:6] and said[0] == f"{CHECKPOINT}:" and len(said[1].split()) > 3
    records = json.loads((tmp_path / "o.json").read_text())
    assert [record["text"] for record in records] == [said[1]] * 2
    width, height = Image.open(image).size
    assert Image.open(tmp_path / "o.png").size == (2 * width, height)


def test_the_region_under_a_point(picture, tmp_path, capsys):
    """It is the region that SAM2 finds, and asked about as its mask file would be."""
    image, *_ = picture
    x, y = CLICK
    policy = open_policy(CHECKPOINT, None, "policy", "cpu", 1, dtype="float32")
    model = PictureModel("demo", policy, 1)
    model.look(Image.open(image))
    Image.fromarray(model.region_at(x, y)).save(tmp_path / "found.png")
    argv = ("--model_path", CHECKPOINT, "--image", image)
    expected = answer(capsys, *argv, "--region", tmp_path / "found.png")
    assert answer(capsys, *argv, "--point", x, y) == expected


def test_the_frames_of_a_video(tmp_path, capsys):
    """A folder's pictures in the order of their numbers, asked about as a video is."""
    folder, output = tmp_path / "frames", tmp_path / "drawn"
    folder.mkdir()
    frames = [Image.fromarray(draw_scene(circle_x)[0]) for circle_x in (180, 210, 240)]
    for number, frame in enumerate(frames, 9):  # 10 comes after 9
        frame.save(folder / f"f{number}.png")
    (folder / "notes.txt").write_text("no frame")
    text = "Please segment the red circle in this image."
    argv = ("--model_path", CHECKPOINT, "--video", folder, "--text", text, "--output", output)
    said, mask, written = answer(capsys, *argv, "--json", tmp_path / "o.json")
    expected = Sa2VAModel.from_pretrained(CHECKPOINT).predict_forward(
        video=frames, text=f"<image>\n{text}", tokenizer=load_tokenizer(CHECKPOINT)
    )
    (drawn,) = expected["prediction_masks"]  # (3, H, W)
    sizes = drawn.sum((1, 2))
    assert mask == (
        f"mask 1: in {(sizes > 0).sum()} of 3 frames, {sizes.min():,d} to {sizes.max():,d} of "
        "307,200 pixels"
    )
    (record,) = json.loads((tmp_path / "o.json").read_text())
    assert record["frames"] == [str(folder / f"f{number}.png") for number in (9, 10, 11)]
    decoded = [decode_mask(mask).astype(bool) for mask in record["masks"][0]]
    assert np.array_equal(decoded, drawn) and record["text"] == said
    names = sorted(file.name for file in output.iterdir())
    assert names == ["0001.png", "0002.png", "0003.png"]
    changed = np.asarray(Image.open(output / "0003.png")) != np.asarray(frames[2])
    assert (
        np.array_equal(changed.any(-1), drawn[2])
        and written == f"{output}: 3 frames with their masks"
    )
    argv = [*argv[:-3], "What is this?", "--output", tmp_path / "plain"]
    *_, mask, written = answer(capsys, *argv, "--max_completion_length", 1)
    assert mask == "the answer has no mask" and written.endswith(": 3 frames without a mask")


def test_a_model_that_is_asked_about_one_picture(picture, scenes):
    """The page's queries: captions of a region, their masks, the mask of a phrase, a click."""
    policy = open_policy(CHECKPOINT, None, "policy", "cpu", 24, dtype="float32")
    model = PictureModel("demo", policy, 24)
    model.look(scenes[0]["image"])
    caption, found, iou = model.describe(scenes[0]["mask"])
    union = (found | scenes[0]["mask"]).sum()
    assert iou == pytest.approx((found & scenes[0]["mask"]).sum() / union, abs=1e-6)
    greedy, sampled = (caption, iou), model.rollouts(scenes[0]["mask"], 0)
    assert len({text for text, *_ in sampled}) > 1 and len(sampled) == 4
    assert all(iou == greedy[1] for text, _, iou in sampled if text == greedy[0])
    mask, confidence = model.segment(scenes[0]["caption"])
    assert mask.shape == scenes[0]["mask"].shape and 0.5 < confidence < 1
    under_click = model.region_at(*CLICK)
    assert under_click.shape == mask.shape and under_click.any()
    before = model.features
    model.look(scenes[0]["image"])
    assert model.features is before


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (dict(text=None), "--text: needed, unless --region"),
        (
            dict(image="nothing.png"),
            "--image nothing.png is no picture that can be read: No such file or directory$",
        ),
        (dict(model_path="/nowhere"), "--model_path /nowhere: no such folder"),
        (dict(region="small.png"), "--region small.png: is 5 x 4 pixels, and --image"),
        (dict(region="black.png"), "--region black.png: is black everywhere"),
        (dict(box=[1, 2, 1, 4]), "--box 1 2 1 4: no box inside --image of"),
        (
            dict(box=[1, 2, 3, 4], region="black.png"),
            "--box: not together with --region|--region: not together with --box",
        ),
        (dict(image=None), "--image: needed, unless --video names frames or --serve"),
        (dict(video="black.png"), "--video: not together with --image|--image: not together with"),
        (dict(image=None, video="."), "--video small.png: is 5 x 4 pixels, and black.png"),
        (dict(image=None, video="empty"), "--video empty: the folder holds no picture"),
        (dict(image=None, video="black.png", region="black.png"), "--video: a region is asked"),
        (dict(image=None, video="black.png", text=None), "--text: needed, unless"),
        (dict(image=None, video="black.png", output="small.png"), "--output small.png: with --vid"),
        (dict(image=None, video="black.png", output="."), "--output . is not empty: name another"),
        (dict(point=[0, 9999]), "--point 0 9999: not inside --image of"),
        (dict(compare="/nowhere"), "--compare /nowhere: no such folder"),
        (dict(output="o.xyz"), "--output o.xyz: needs the ending of a picture"),
    ],
)
def test_bad_input(picture, tmp_path, monkeypatch, flags, sentence):
    monkeypatch.chdir(tmp_path)
    Image.new("L", (5, 4), 255).save("small.png")
    Image.new("L", Image.open(picture[0]).size).save("black.png")
    (tmp_path / "empty").mkdir()
    flags = dict(model_path=CHECKPOINT, image=picture[0], text="a") | flags
    argv = []
    for name, value in flags.items():
        values = value if isinstance(value, list) else [value]
        argv += [] if value is None else [f"--{name}", *map(str, values)]
    with pytest.raises(SystemExit, match=sentence) as ended:
        predict.main(argv)
    assert ended.value.code.removesuffix(f"\n{SEE_HELP}").count("\n") == 0
