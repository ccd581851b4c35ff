"""ReasonSeg by Seg-Zero's and VisionReasoner's protocol, against a computation by hand."""

import io
import json

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Sam2Model

from rl_train.evaluation import published_points
from rl_train.policies.qwen_vl import QwenVLPolicy
from sa2va_hf.processing_sa2va import normalise_sam_pixels, planes
from tests.data.test_reasonseg import write
from tests.policies.tiny_points import SAM_SIDE, write_qwen, write_sam
from tests.runs import on_one_core
from tools import evaluate

one_core = pytest.fixture(autouse=True)(on_one_core)
SIDE = 56  # of the language model's image, in place of 840
W, H = 90, 60
TEXTS = ["What is it?", '"The Cup!', "the thing in a corner.", "Which one"]
# Of VisionReasoner, in pixels of SIDE: two boxes, of which the first's point is nearer to the
# second's middle; a pixel beyond the frame; none; what cannot be read.
ITEMS = [
    [([4, 4, 40, 40], [30, 30]), ([20, 20, 50, 50], [45, 45])],
    [([10, 10, 57, 57], [57, 20])],
    [],
    None,
]
SEGZERO = [
    dict(bbox=[4, 4, 40, 40], points_1=[30, 30], points_2=[8, 9]),
    dict(bbox=[10, 10, 57, 57], points_1=[57, 20], points_2=[20, 57]),
    dict(bbox=[1, 1, 9, 9]),
    None,
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A Qwen2.5-VL, a SAM2 and a ReasonSeg of four rows."""
    folder = tmp_path_factory.mktemp("protocol")
    rng, rows = np.random.default_rng(0), []
    for k, text in enumerate(TEXTS):
        pixels = rng.integers(0, 256, (8, 12, 3), dtype=np.uint8)
        image = Image.fromarray(pixels).resize((W, H))
        mask = np.zeros((H, W), dtype=bool)
        mask[5 * k : 30 + 5 * k, 10:60] = True
        data = io.BytesIO()
        image.save(data, "PNG")
        rows.append(dict(image=dict(bytes=data.getvalue(), path=None), text=text))
        rows[-1] |= dict(mask=mask.tolist(), image_id=str(k), ann_id="0")
    sam = write_sam(folder / "sam")
    # Else SAM2 itself takes the best of its masks where its single one is unstable.
    config = json.loads((sam / "config.json").read_text())
    config["mask_decoder_config"]["dynamic_multimask_via_stability"] = False
    (sam / "config.json").write_text(json.dumps(config))
    return dict(
        model_path=write_qwen(folder / "qwen"),
        sam_path=sam,
        data_dir=write(folder / "data", rows),
        rows=rows,
    )


def answers_of(style: str) -> list[str]:
    """Answers that the model is made to give to each row."""
    if style == "segzero":
        return [f"So: {json.dumps(answer)}" if answer else "so" for answer in SEGZERO]
    return [
        "so"
        if items is None
        else f"<answer>{json.dumps([dict(bbox_2d=b, point_2d=p) for b, p in items])}</answer>"
        for items in ITEMS
    ]


def evaluated(folders, tmp_path, **changes) -> dict:
    values = {name: folders[name] for name in ("model_path", "sam_path", "data_dir")}
    values |= dict(dataset="reasonseg", protocol="visionreasoner", answer_style="visionreasoner")
    values |= dict(image_size=SIDE, max_completion_length=4, max_prompt_length=64, num_workers=0)
    values |= dict(dtype="float32", batch_size=4, output=tmp_path / "out.json") | changes
    words = [(f"--{n}", str(v)) for n, v in values.items() if v is not None]
    evaluate.main([word for pair in words for word in pair])
    return json.loads((tmp_path / "out.json").read_text())


@torch.no_grad()
def mask_by_hand(sam: Sam2Model, image: Image.Image, box: list[int], points: list) -> np.ndarray:
    """SAM2's best mask of three by its score, of a box and points in pixels of the image."""
    pixels = planes(image.resize((SAM_SIDE, SAM_SIDE), Image.Resampling.BILINEAR))
    scale = torch.tensor([SAM_SIDE / W, SAM_SIDE / H])
    out = sam(
        pixel_values=normalise_sam_pixels(pixels[None]),
        input_points=(torch.tensor(points) * scale)[None, None],
        input_labels=torch.ones(1, 1, len(points), dtype=torch.long),
        input_boxes=(torch.tensor(box) * scale.repeat(2))[None, None],
        multimask_output=True,
    )
    best = int(out.iou_scores[0, 0].argmax())
    logits = out.pred_masks[:, 0, best : best + 1]
    native = torch.nn.functional.interpolate(logits, (H, W), mode="bilinear")
    return (native[0, 0] > 0).numpy()


def whole(values: list[int], style: str) -> list[int]:
    """Whole pixels of the image, as each of the two rounds them."""
    scales = [(W, H)[k % 2] / SIDE for k in range(len(values))]
    if style == "segzero":
        return [round(int(value) * scale) for value, scale in zip(values, scales)]
    return [int(value * scale + 0.5) for value, scale in zip(values, scales)]


def prompts_by_hand(style: str) -> list[list]:
    """[(box, points), ..] of each row."""
    if style == "segzero":
        both = [(a["bbox"], [a["points_1"], a["points_2"]]) for a in SEGZERO[:2]]
        return [[pair] for pair in both] + [[], []]
    return [[(box, [point]) for box, point in items or []] for items in ITEMS]


@pytest.mark.parametrize("style", ["visionreasoner", "segzero"])
def test_the_figures_are_those_of_a_computation_by_hand(
    folders, tmp_path, monkeypatch, capsys, style
):
    said, asked, seen = iter(answers_of(style)), [], []
    monkeypatch.setattr(QwenVLPolicy, "completion_text", lambda self, ids: next(said))
    ask, encode = QwenVLPolicy.point_questions, QwenVLPolicy.encode

    def record_questions(self, images, image, questions):
        asked.extend(questions)
        return ask(self, images, image, questions)

    def record_pixels(self, batch):
        seen.extend(batch.inputs.pixels)
        return encode(self, batch)

    monkeypatch.setattr(QwenVLPolicy, "point_questions", record_questions)
    monkeypatch.setattr(QwenVLPolicy, "encode", record_pixels)
    found = evaluated(folders, tmp_path, answer_style=style)

    sam, intersections, unions = Sam2Model.from_pretrained(folders["sam_path"]).eval(), [], []
    for row, prompts, pixels in zip(folders["rows"], prompts_by_hand(style), seen, strict=True):
        image = Image.open(io.BytesIO(row["image"]["bytes"])).convert("RGB")
        assert torch.equal(pixels, planes(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR)))
        mask, target = np.zeros((H, W), dtype=bool), np.array(row["mask"])
        for box, points in prompts:
            points = [whole(point, style) for point in points]
            mask |= mask_by_hand(sam, image, whole(box, style), points)
        intersections.append(int((mask & target).sum()))
        unions.append(int((mask | target).sum()))
    assert found["values"]["seg_intersection"] == pytest.approx(intersections, abs=3)
    assert found["values"]["seg_union"] == pytest.approx(unions, abs=3)
    assert intersections[0] > 0 and intersections[2:] == [0, 0]
    ious = [i / u for i, u in zip(intersections, unions)]
    assert found["means"]["seg_iou"] == pytest.approx(sum(ious) / 4, abs=2e-3)
    assert found["means"]["seg_ciou"] == pytest.approx(sum(intersections) / sum(unions), abs=2e-3)
    unread = 1 if style == "visionreasoner" else 2  # no object is an answer; no point is none
    printed = capsys.readouterr().out
    assert f"protocol, answers of {style}, reasonseg: 4 questions, gIoU" in printed
    assert f"{unread} answers that their code cannot read" in printed

    assert not any("negative" in question for question in asked)
    stripped = dict(
        visionreasoner=["what is it", "the cup", "the thing in a corner", "which one"],
        segzero=["what is it?", '"the cup!', "the thing in a corner", "which one"],
    )
    quote = '"' if style == "visionreasoner" else "'"
    for question, phrase in zip(asked, stripped[style], strict=True):
        assert question.startswith(f"Please find {quote}{phrase}{quote} with bbox")


def test_no_number_of_points_is_too_many(folders, tmp_path, monkeypatch):
    item = '{"bbox_2d": [4, 4, 40, 40], "point_2d": [30, 30]}'
    text = f"<answer>[{', '.join([item] * 40)}]</answer>"
    monkeypatch.setattr(QwenVLPolicy, "completion_text", lambda self, ids: text)
    found = evaluated(folders, tmp_path)
    assert found["values"]["parsable"] == [1, 1, 1, 1]


def test_the_protocol_sets_the_defaults(folders):
    words = ["--model_path", folders["model_path"], "--data_dir", folders["data_dir"]]
    parser = evaluate.build_parser("")
    parser.set_defaults(**published_points.DEFAULTS, **published_points.FIXED)
    args = parser.parse_args(list(map(str, words)))
    assert (args.image_size, args.max_completion_length) == (840, 1024)
    assert (args.negative_points, args.sam_passes) == ("off", 1)


def test_what_the_protocol_refuses(folders, tmp_path):
    def refused(words, **changes):
        with pytest.raises(SystemExit, match=words):
            evaluated(folders, tmp_path, **changes)

    refused("--protocol visionreasoner: of reasonseg, refcoco", dataset="gar")
    refused("--best_of: not with --protocol visionreasoner", best_of=2)
    refused("--negative_points: off in --protocol visionreasoner", negative_points="required")
    refused("--sam_passes: 1 in --protocol visionreasoner", sam_passes=2)
    refused("--answer_style points: --protocol visionreasoner is of", answer_style="points")
    refused("--image_size 0: in --protocol visionreasoner", image_size=0, max_image_tokens=24)
