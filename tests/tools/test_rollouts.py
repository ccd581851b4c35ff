"""The page of a run's rollouts: its data, what it makes of hostile text, and in a browser."""

import base64
import io
import json
import math
import re
import shutil
import subprocess
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image

from rl_train.data import GraspAnyRegionDataset
from rl_train.data.rle import decode_mask
from rl_train.distributed.process_group import RankInfo
from rl_train.loggers.pictures import PREDICTED, REGION, small_mask
from rl_train.loggers.tensorboard import RunLogger
from rl_train.loss import ScoredRollout
from rl_train.points.parser import PointPrompt
from rl_train.rollout import Batch, RewardOutput, Rollout
from tools import rollouts
from tools.gar_writer import write_gar
from tools.rollouts import (
    curves,
    page,
    page_data,
    read_groups,
    short_names,
    steps_to_show,
    thumbnail,
)

G = 4
WIDTH, HEIGHT = 64, 48  # of the images
HOSTILE = [
    '</script><script>document.title="stolen"</script>',
    '<img src=x onerror="document.title=1">',
    "<!--<script>",
    "\u2028'\"`\\${document.title} &lt;b&gt; \ud800",
]
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
in_browser = pytest.mark.skipif(BROWSER is None, reason="there is no chromium")


def rectangle(left, top, right, bottom) -> torch.Tensor:
    mask = torch.zeros(HEIGHT, WIDTH, dtype=torch.bool)
    mask[top:bottom, left:right] = True
    return mask


def write_regions(folder, image, masks, captions):
    """A data set of the regions of one image."""
    pairs = zip(masks, captions, strict=True)
    write_gar([dict(image=image, mask=m, caption=c, category="") for m, c in pairs], folder)


def log_step(log, step, dataset, task, texts, reward, advantages, **more):
    """Write what a rollout of the whole data set gave, G rows a sample."""
    samples = [dataset[i] for i in range(len(dataset))]
    ids, captions = ([sample[key] for sample in samples] for key in ("image_id", "caption"))
    masks = [torch.from_numpy(sample["mask"]) for sample in samples]
    batch = Batch(list(range(len(samples))), masks, captions, ids, [], None)
    rollout = Rollout(batch, None, None, texts, G, *[None] * 5)
    more = dict(masks=[rectangle(40, 12, 60, 36)] * len(texts)) | more
    outcome = RewardOutput({"iou": reward}, **more)
    log.rollouts(
        step, ScoredRollout(SimpleNamespace(name=task), rollout, outcome, reward, advantages, None)
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's folder: three steps of loop 1, in the last loop 2 and points too; hostile text."""
    folder = tmp_path_factory.mktemp("run")
    image = Image.new("RGB", (WIDTH, HEIGHT), (20, 40, 20))
    regions = [rectangle(4, 12, 24, 36).numpy(), rectangle(0, 0, 64, 6).numpy()]
    write_regions(folder / "data", image, regions, ["a cup </script>", "a rim"])
    dataset = GraspAnyRegionDataset(folder / "data")
    flags = dict(num_generations=G, data_dir=str(folder / "data"), dataset="gar")
    (folder / "config.json").write_text(json.dumps(flags))
    log = RunLogger(
        folder, RankInfo(1, 2, torch.device("cpu")), start=0
    )  # a rank that is not the main one
    first = torch.tensor([0.1, 0.9, math.nan, 0.5, 0.25, 0.25, 0.25, 0.25])
    for step in range(3):
        log_step(log, step, dataset, "loop1", HOSTILE * 2, first, first.nan_to_num() - 0.5)
    log_step(log, 2, dataset, "loop2", ["ok"] * 8, first, torch.zeros(8), replies=HOSTILE * 2)
    answer = PointPrompt(((4, 2, 10, 9),), ((5, 7),), ((15, 8),))
    prompted = dict(
        point_prompts=[answer] * 7 + [None], masks_without_negatives=[rectangle(0, 0, 8, 8)] * 8
    )
    unparsed = dict(unparsed={"no_json": torch.arange(8) == 7})
    log_step(log, 2, dataset, "points", ["{}"] * 8, first, torch.zeros(8), **prompted, **unparsed)
    log.close()
    (folder / "evaluation").mkdir()
    for step in (0, 4, 8):
        write_evaluation(folder, step, [dataset.image_id(i) for i in range(2)])
    return folder


def write_evaluation(folder, step, image_ids):
    """An evaluation's file: hostile captions, the mask of each sample a rectangle of its own."""
    masks = [small_mask(rectangle(k, 0, k + 4 + step, 8)) for k in range(len(image_ids))]
    values = dict(seg_iou=[0.25, 0.5], cycle_iou=[0.125, step / 8], other=[1, 2])
    evaluation = dict(
        image_ids=image_ids, references=["a cup", "a rim"], captions=HOSTILE[:2], values=values
    )
    file = folder / "evaluation" / f"step_{step}.json"
    file.write_text(json.dumps(evaluation | dict(masks=masks)))


def data_of(run, data_dir=None, steps=None, limit=2000, side=32) -> dict:
    return page_data(run, data_dir, steps, limit, side)


def test_what_the_page_is_given(run):
    data = data_of(run)
    assert (data["run"], data["name"], data["total"]) == (str(run), run.name, 40)
    assert len(data["groups"]) == 10 + 2  # and two held-out samples
    assert len(data["images"]) == 1 + 1  # both regions are of one image; again as a held-out one
    head, encoded = data["images"][0].split(",")
    assert head == "data:image/webp;base64"
    assert Image.open(io.BytesIO(base64.b64decode(encoded))).size == (32, 24)
    dataset = GraspAnyRegionDataset(run / "data")
    for i, sample in enumerate(data["samples"][:2]):
        assert (sample["id"], sample["image"]) == (dataset.image_id(i), 0)
        assert sample["name"] == dataset.image_id(i).split("/")[-1] == str(i)
        assert sample["size"] == (HEIGHT, WIDTH)
        assert (decode_mask(sample["region"]) == dataset[i]["mask"]).all()
    assert [group["step"] for group in data["groups"]] == [0, 0, 1, 1] + [2] * 6 + [None] * 2
    one, other = data["groups"][:2]
    assert (one["task"], one["sample"], one["flat"]) == ("loop1", 0, False)
    assert one["caption"] == "a cup </script>"
    assert (other["caption"], other["sample"], other["flat"]) == ("a rim", 1, True)
    assert [row["completion"] for row in one["rows"]] == HOSTILE
    assert [row["reward"] for row in one["rows"]] == pytest.approx([0.1, 0.9, None, 0.5])
    assert [row["advantage"] for row in one["rows"]] == pytest.approx([-0.4, 0.4, -0.5, 0])
    assert one["rows"][0]["parts"] == {"iou": 0.1} and one["rows"][2]["parts"] == {"iou": None}
    found = decode_mask(one["rows"][0]["mask"])
    assert (found == rectangle(40, 12, 60, 36).numpy()).all()
    replies = [row["texts"] for row in data["groups"][6]["rows"]]
    assert replies == [{"reply": text} for text in HOSTILE]


def test_the_base_s_answer_stands_beside_the_policy_s(run):
    data = data_of(run)
    first, second = (group for group in data["groups"] if group["task"] == "held out")
    assert [row["title"] for row in first["rows"]] == ["base", "step 4", "step 8"]
    assert (first["caption"], first["held_out"], second["caption"]) == ("a cup", True, "a rim")
    assert [row["completion"] for row in second["rows"]] == [HOSTILE[1]] * 3
    assert [row["reward"] for row in second["rows"]] == [0.5] * 3
    assert [row["parts"] for row in second["rows"]] == [
        dict(cycle_iou=cycle_iou, seg_iou=0.5) for cycle_iou in (0, 0.5, 1)
    ]
    assert decode_mask(second["rows"][2]["mask"]).sum() == 8 * 12
    sample = data["samples"][second["sample"]]
    assert sample["image"] == 1 and sample["region"] == data["samples"][1]["region"]


def test_evaluations_without_the_base_s_masks_are_left_out(run, tmp_path, capsys):
    copy = shutil.copytree(run, tmp_path / "run")
    base = copy / "evaluation" / "step_0.json"
    content = json.loads(base.read_text())
    base.write_text(json.dumps({k: v for k, v in content.items() if k != "masks"}))
    assert len(data_of(copy)["groups"]) == 10  # of an earlier version
    base.write_text(json.dumps(content))
    flags = json.loads((copy / "config.json").read_text())
    gone = dict(eval_data_dir=str(tmp_path / "gone"))
    (copy / "config.json").write_text(json.dumps(flags | gone))
    assert len(data_of(copy)["groups"]) == 10
    assert "the held-out samples are left out: --eval_data_dir " in capsys.readouterr().err


def test_names_are_as_short_as_they_tell_samples_apart():
    assert short_names(["a/b/1", "a/b/2"]) == ["1", "2"]
    assert short_names(["a/b/1", "a/c/1", "a/c/1"]) == ["b/1", "c/1", "c/1"]
    assert short_names(["1", "a/1"]) == ["1", "a/1"] and short_names([]) == []


def test_an_answer_of_points_is_given(run):
    rows = data_of(run)["groups"][9]["rows"]
    prompt = dict(boxes=[[4, 2, 10, 9]], positive=[[5, 7]], negative=[[15, 8]])
    assert [row.get("sam_prompt") for row in rows] == [prompt] * 3 + [None]
    assert (
        decode_mask(rows[0]["mask_without_negatives"])[:8, :8].all()
        and "mask_without_negatives" not in rows[3]
    )
    assert rows[3]["texts"] == {"unparsed": "no_json"} and rows[0]["texts"] == {}


def test_steps_and_numbers_choose(run):
    def shown(**how):
        groups = data_of(run, **how)["groups"]
        return [group["step"] for group in groups if group["task"] != "held out"]

    assert shown(steps=[0, 1]) == [0, 0, 1, 1]
    assert shown(limit=24) == [2] * 6
    assert shown(limit=9) == [2, 2]  # whole groups of a step that is larger
    assert shown(limit=1) == [2]


@pytest.mark.parametrize(
    "limit, expected", [(40, [0, 3, 5, 9]), (39, [0, 5, 9]), (20, [0, 9]), (19, [9]), (3, [9])]
)
def test_steps_are_spread_evenly(limit, expected):
    assert steps_to_show({9: 10, 0: 10, 5: 10, 3: 10}, limit) == expected


def test_curves_by_hand():
    """Mean and std of all scored rows; two groups of two, one of them without variance."""
    nan = math.nan
    rewards = {("b", 3): [0.0, 1.0, 0.5, 0.5], ("a", 3): [nan, nan], ("a", 1): [nan, 0.25]}
    assert curves(rewards, 2, [3]) == {
        "a": [(1, 0.25, None, 1.0), (3, None, None, 1.0)],
        "b": [(3, 0.5, 0.4082, 0.5)],
    }
    many = curves({("a", step): [0.0, 1.0] for step in range(1200)}, 2, [7, 1199])["a"]
    assert [point[0] for point in many[:5]] == [0, 3, 6, 7, 9] and len(many) == 402


def test_what_is_being_written_is_left_out(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    file = copy / "rollouts" / "rank1.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:9]) + lines[9][:20])
    assert [len(group) for group in read_groups(copy, G)] == [G, G]
    assert data_of(copy)["total"] == 8


def test_a_new_data_dir_is_taken(run, tmp_path):
    (tmp_path / "moved").symlink_to(run / "data")
    copy = moved_run(run, tmp_path)
    assert len(data_of(copy, data_dir=tmp_path / "moved")["images"]) == 2


def moved_run(run, tmp_path):
    """A run's copy whose data set is not where its flags say."""
    copy = shutil.copytree(run, tmp_path / "copy", ignore=lambda *_: ["data"])
    flags = json.loads((run / "config.json").read_text()) | dict(data_dir=str(tmp_path / "gone"))
    (copy / "config.json").write_text(json.dumps(flags))
    return copy


def complaint(*argv) -> str:
    with pytest.raises(SystemExit) as stopped:
        rollouts.main(list(map(str, argv)))
    return str(stopped.value)


def test_what_is_wrong_is_named(run, tmp_path):
    output = ("--output", tmp_path / "page.html")
    assert "gone/config.json is missing" in complaint("--run", tmp_path / "gone", *output)
    (tmp_path / "supervised").mkdir()
    (tmp_path / "supervised" / "config.json").write_text('{"caption_weight": 1.0}')
    said = complaint("--run", tmp_path / "supervised", *output)
    assert "supervised: it was trained by supervised examples, it has no rollouts" in said
    copy = moved_run(run, tmp_path)
    said = complaint("--run", copy, *output)
    assert f"--data_dir {tmp_path / 'gone'}, as {copy / 'config.json'} has it" in said
    assert "if it has moved, give its folder as --data_dir" in said
    other = tmp_path / "other"
    write_regions(other, Image.new("RGB", (8, 8)), [np.ones((8, 8), bool)], ["a"])
    said = complaint("--run", copy, "--data_dir", other, *output)
    assert f"--data_dir {other} has no sample " in said and "(1 of 2 are not there)" in said
    said = complaint("--run", run, "--steps", 7, 9, *output)
    assert "--steps 7 9: there is no rollout" in said and "steps 0 to 2" in said
    said = complaint("--run", run, "--output", "/dev/null/page.html")
    assert "--output /dev/null/page.html cannot be written" in said
    file = copy / "rollouts" / "rank1.jsonl"
    lines = file.read_text().split("\n")
    file.write_text("\n".join([*lines[:2], *lines[4:]]))  # two rows are lost
    said = complaint("--run", copy, *output)
    assert f"{file} is missing or damaged: lines 1 to 3: no group of --num_generations 4" in said
    file.write_text('{"step": 0}\n')
    assert f"{file} is missing or damaged: line 1: KeyError" in complaint("--run", copy, *output)
    file.unlink()
    assert f"--run {copy}: there are no rollouts" in complaint("--run", copy, *output)
    assert not (tmp_path / "page.html").exists()


def test_an_image_that_is_damaged_by_now_is_named(run, tmp_path):
    file = next(shutil.copytree(run / "data", tmp_path / "data").rglob("*.arrow"))
    content = file.read_bytes()
    at = content.index(b"IDAT") + 4  # of the first row's PNG, which keeps its header and end
    file.write_bytes(content[:at] + bytes(16) + content[at + 16 :])
    said = complaint("--run", run, "--data_dir", tmp_path / "data", "--output", tmp_path / "p.html")
    assert said.startswith(f"rollouts: --data_dir {tmp_path / 'data'} can be read no more: ")
    assert said.endswith("/0: damaged image")


@pytest.mark.parametrize("wrong", [("--max_rollouts", 0), ("--image_size", 0), ("--steps", -1, 2)])
def test_a_wrong_number_is_refused(run, wrong):
    said = complaint("--run", run, "--output", "page.html", *wrong)
    assert f"{wrong[0]} {wrong[1]}: must be an integer at least" in said


def test_no_text_is_markup(run):
    data = data_of(run)
    text = page(data)
    template = rollouts.TEMPLATE.read_text()
    for tag, images in (("<script", 2), ("</script", 2), ("<img", 0), ("<!--", 0)):
        assert text.lower().count(tag) == template.lower().count(tag) + images
    stated = re.search(r'id="data">(.*?)</script>', text, re.S)[1]
    kept = json.dumps(data | dict(images=2)).replace("\\ud800", "?")
    assert json.loads(stated) == json.loads(kept)
    assert not set("<>&\ud800") & set(stated)
    for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert sink not in template
    assert not re.search(r"(https?:)?//(?!www\.w3\.org/2000/svg)[a-z]+\.", template)


def browse(file, *flags) -> str:
    """Return the output of headless Chromium."""
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,800"]
    command += [f"--user-data-dir={file.parent / 'profile'}", "--virtual-time-budget=3000", *flags]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=file.parent, timeout=120)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@in_browser
def test_the_browser_shows_hostile_text_as_text(run, tmp_path):
    file = tmp_path / "page.html"
    rollouts.main(["--run", str(run), "--output", str(file)])
    shown = browse(file, "--dump-dom", f"{file.as_uri()}#task=loop1&step=1&min=0.3")
    found, body = shown.split('<script type="application/json"')[0], shown.split("<body>")[1]
    assert (
        f"<title>Rollouts of {run.name}</title>" in found and "<img" not in body.split("<script")[0]
    )
    assert "2 answers in 1 of 12 groups" in found
    assert '&lt;/script&gt;&lt;script&gt;document.title="stolen"&lt;/script&gt;' in found
    assert found.count('class="row') - found.count('class="rows') == 4
    assert len(re.findall('class="row [a-z ]*aside', found)) == 2  # not scored, and below
    assert "not scored" in found and "+0.40" in found and "iou 0.90" in found


@in_browser
def test_the_browser_draws_region_and_mask(run, tmp_path):
    """A row's picture is 120 pixels wide for 64: region 4..24, mask 40..60; 12..36 high."""
    file, picture = tmp_path / "page.html", tmp_path / "page.png"
    rollouts.main(["--run", str(run), "--output", str(file)])
    browse(file, f"--screenshot={picture}", f"{file.as_uri()}#task=loop1&step=1&groups=differ")
    pixels = np.array(Image.open(picture).convert("RGB")).astype(int)[180:]  # below the legend
    box = {}
    for name, color in (("region", (0, 255, 105)), ("mask", (255, 0, 255))):
        y, x = np.nonzero((abs(pixels - color) < 40).all(-1))
        left = 311  # of the rows' pictures; the large one shows no mask
        y, x = y[x > left], x[x > left]
        first = x < left + 140  # in the first column
        top = y[first].min()
        of_one = first & (y < top + 60)
        box[name] = (x[of_one].min(), x[of_one].max(), top, y[of_one].max())
    scale = 120 / 64
    for name in box:
        left, right, top, bottom = box[name]
        assert right - left == pytest.approx(20 * scale, abs=2)
        assert bottom - top == pytest.approx(24 * scale, abs=2)
    assert box["mask"][0] - box["region"][0] == pytest.approx(36 * scale, abs=2)
    assert box["mask"][2] == pytest.approx(box["region"][2], abs=2)


def test_contours_have_the_colors_of_the_other_pictures():
    """Of which test_tensorboard.py shows that no scene has them."""
    text = rollouts.TEMPLATE.read_text()
    const = re.search(r'^const REGION = "#(\w{6})", FOUND = "#(\w{6})"', text, re.MULTILINE)
    assert [tuple(bytes.fromhex(color)) for color in const.groups()] == [REGION, PREDICTED]


@in_browser
def test_two_thousand_rollouts_open_within_a_second(run, tmp_path):
    data, file = data_of(run), tmp_path / "page.html"
    groups = [dict(group, step=k) for k in range(50) for group in data["groups"][:10]]
    noise = np.random.default_rng(0).integers(256, size=(150, 200, 3), dtype=np.uint8)
    images = [thumbnail(Image.fromarray(noise), 320)] * 125  # 20 kB each
    file.write_text(page(data | dict(groups=groups, images=images)))
    shown = browse(file, "--dump-dom", file.as_uri())
    assert "2000 answers in 500 of 500 groups" in shown
    milliseconds = int(re.search(r'data-shown="(\d+)"', shown)[1])
    assert 0 < milliseconds < 1000


# In place of the browser's download: the page's title becomes what would be saved.
SAVED = """
<script nonce="page">
HTMLAnchorElement.prototype.click = () => {};
URL.createObjectURL = (blob) => {
  const reader = new FileReader();
  reader.onload = () => { document.title = reader.result; };
  reader.readAsDataURL(blob);
  return "#";
};
addEventListener("DOMContentLoaded", () => {
  const buttons = [...document.querySelectorAll(".export button")];
  buttons.find((one) => one.textContent === "KIND").click();
});
</script>
</body>"""


def saved(run, folder, kind: str, view: str) -> bytes:
    """The file that the first group's button gives."""
    file = folder / "page.html"
    rollouts.main(["--run", str(run), "--output", str(file)])
    text = file.read_text()
    assert text.count("</body>") == 1
    file.write_text(text.replace("</body>", SAVED.replace("KIND", kind)))
    shown = browse(file, "--dump-dom", f"{file.as_uri()}#{view}")
    return base64.b64decode(
        re.search(r"<title>data:image/[a-z+]*;base64,([^<]*)</title>", shown)[1]
    )


@in_browser
def test_a_group_is_saved_as_svg(run, tmp_path):
    """One panel of the region, and one of each row that passes the filter; texts are texts."""
    svg = ElementTree.fromstring(saved(run, tmp_path, "SVG", "task=loop1&step=1&min=0.3"))
    space = "{http://www.w3.org/2000/svg}"
    panels = svg.findall(f"{space}g")
    texts = [[text.text for text in panel.findall(f"{space}text")] for panel in panels]
    assert [lines[0] for lines in texts] == [
        "true region",
        "reward 0.900, advantage +0.40",
        "reward 0.500, advantage 0.00",
    ]
    assert "".join(texts[0][1:]).replace(" ", "") == "acup</script>"
    assert "".join(texts[1][1:]).replace(" ", "") == HOSTILE[1].replace(" ", "")
    [image] = svg.iter(f"{space}image")  # once, however many panels show it
    assert image.get("href").startswith("data:image/png;base64,")
    assert (image.get("width"), float(image.get("height"))) == ("300", 300 * HEIGHT / WIDTH)
    magenta = [p for p in panels[1].iter(f"{space}path") if p.get("stroke") == "#ff00ff"]
    [outline] = magenta
    x = [float(pair.split()[0]) for pair in outline.get("d").strip("MZ").split("L")]
    assert (min(x), max(x)) == pytest.approx((40 * 300 / WIDTH, 60 * 300 / WIDTH))
    assert not [p for p in panels[0].iter(f"{space}path") if p.get("stroke") == "#ff00ff"]


@in_browser
def test_a_group_is_saved_as_png(run, tmp_path):
    picture = Image.open(io.BytesIO(saved(run, tmp_path, "PNG", "task=held out")))
    assert picture.width == 3 * (4 * 300 + 3 * 14)  # region, base, two steps
    pixels = np.asarray(picture.convert("RGB")).astype(int)
    for color, in_first in (((0, 255, 105), True), ((255, 0, 255), False)):
        is_color = (abs(pixels - color) < 40).all(-1)
        assert is_color[:, :900].any() == in_first and is_color[:, 900:].any()
    assert (pixels[-1] == 255).all()
