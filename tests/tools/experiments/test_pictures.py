"""tools/experiments/pictures: scenes of cut-outs that the test draws, and what may not leak."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw

from rl_train.data import GraspAnyRegionDataset
from tools.experiments.pictures import __main__ as pictures
from tools.experiments.pictures import dataset, packages
from tools.experiments.pictures.captions import Named, by_label, by_tag
from tools.experiments.pictures.concepts import (
    OWN,
    PHOTOGRAPH,
    Concept,
    fault_of_words,
    name_in,
    read_library,
    with_hypernyms,
    write_library,
)
from tools.experiments.pictures.dataset import NO_CAPTION, read_truth
from tools.experiments.pictures.report import leaks, num_near, perceptual_hash
from tools.experiments.pictures.splits import fraction_of, unnamed_concepts

TONES = {"red": (220, 30, 40), "blue": (40, 60, 230), "white": (250, 250, 250)}
SHAPES = {"ball": 40, "box": 4, "arrow": 3, "gem": 6, "nut": 5}  # corners; 40 look round
SIZE = 128  # of a scene
ARGV = ["--image_size", str(SIZE), "--num_train", "16", "--num_artist_train", "4"]
ARGV += ["--num_eval", "6", "--caption_fraction", "0.3"]


def draw_cutout(path: Path, tone: tuple[int, int, int], corners: int):
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.new("RGBA", (64, 64))
    draw = ImageDraw.Draw(image)
    draw.regular_polygon((32, 32, 28), corners, fill=(*tone, 255))
    draw.line((20, 40, 44, 40), fill=(20, 20, 20, 255), width=4)
    image.save(path)


def draw_backgrounds(folder: Path):
    folder.mkdir()
    for number in range(4):
        pixels = np.random.default_rng(number).integers(90, 150, size=(6, 6, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((150, 150)).save(folder / f"wall{number}.png")


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """Cut-outs of 15 names by three artists, one of whom is held out, and wallpapers."""
    root = tmp_path_factory.mktemp("source")
    lines = ["file,name,tags,artist"]
    for artist, shift in (("anna", 0), ("ben", 15), ("openmoji", -25)):
        for tone_name, tone in TONES.items():
            for shape, corners in SHAPES.items():
                file = f"{artist}/{tone_name}_{shape}.png"
                own = tuple(int(np.clip(value + shift, 0, 255)) for value in tone)
                draw_cutout(root / "cutouts" / file, own, corners)
                lines.append(f"{file},{tone_name} {shape},{shape}s;toy,{artist}")
    (root / "names.csv").write_text("\n".join(lines))
    draw_backgrounds(root / "walls")
    return root


def argv_of(source: Path, output: Path, *more: str) -> list[str]:
    argv = ["scenes", "--cutouts", str(source / "cutouts"), "--names", str(source / "names.csv")]
    argv += ["--backgrounds", str(source / "walls"), "--output_dir", str(output)]
    return [*argv, *ARGV, *more]


@pytest.fixture(scope="module")
def written(source, tmp_path_factory) -> Path:
    """Data sets of all splits that the source allows."""
    output = tmp_path_factory.mktemp("written") / "lab"
    pictures.main(argv_of(source, output))
    return output


def truth_of(folder: Path) -> dict[str, list[dict]]:
    return {path.parent.name: read_truth(path.parent) for path in folder.glob("*/truth.jsonl")}


def scenes_of(regions: list[dict]) -> list[list[dict]]:
    numbers = sorted({region["scene"] for region in regions})
    return [[r for r in regions if r["scene"] == number] for number in numbers]


def is_true(caption: str, region: dict, scene: list[dict]) -> bool:
    """Tell whether somebody might use the caption of the region, by its boxes alone."""
    sides = {"left of": (0, -1), "right of": (0, 1), "above": (1, -1), "below": (1, 1)}
    for words, (axis, sign) in sides.items():
        name, found, neighbour = caption.partition(f" {words} the ")
        if found:
            (other,) = [r for r in scene if r["label"] == neighbour]
            middle = sum(other["box"][axis::2]) / 2
            return region["label"] == name and sign * (sum(region["box"][axis::2]) / 2 - middle) > 0
    return region["label"] == caption or caption in region["tags"] + region["also"]


def test_every_caption_is_true_of_its_region_and_of_no_other(written):
    num_relations = 0
    for regions in truth_of(written).values():
        for scene in scenes_of(regions):
            for region in scene:
                for caption in filter(None, (region["label_caption"], region["tag_caption"])):
                    true_of = [r["region"] for r in scene if is_true(caption, r, scene)]
                    assert true_of == [region["region"]], (caption, scene)
                num_relations += region["label_caption"] != region["label"]
    assert num_relations > 10


def test_a_relation_that_fits_two_is_not_said():
    def at(label: str, x: int, y: int, *tags: str) -> Named:
        return Named(label, tags, (x, y), (x - 5, y - 5, x + 5, y + 5))

    def always(label: str, neighbour: str) -> bool:
        return True

    violin, owl, second = at("violin", 50, 50), at("owl", 20, 50), at("owl", 80, 52)
    assert by_label([violin, owl, second], 1, 100, always) == "owl left of the violin"
    assert by_label([violin, owl, second], 2, 100, always) == "owl right of the violin"
    assert by_label([violin, owl, second], 0, 100, always) == "violin"
    # Both are left of it, and neither is clearly above or below.
    beside = at("owl", 30, 54)
    assert by_label([violin, owl, beside], 1, 100, always) is None
    # An owl is a bird, and a black cat a cat.
    bird, owl = at("bird", 80, 50), at("owl", 20, 50, "bird", "wise")
    assert by_label([violin, owl, bird], 2, 100, always) == "bird right of the violin"
    assert by_label([at("cat", 9, 9), at("black cat", 90, 9)], 0, 100, always) is None
    assert by_tag([violin, owl, bird], 1, {"bird": 5, "wise": 9}.get) == "wise"
    assert by_tag([violin, bird, at("hen", 5, 5, "bird")], 2, {"bird": 5}.get) is None


def test_occlusion_and_sizes_are_within_limits(written):
    hidden = []
    for split, regions in truth_of(written).items():
        data = GraspAnyRegionDataset(written / split, ["all"] if split in EVALUATION else None)
        for scene in scenes_of(regions):
            assert 4 <= len(scene) <= 8
            hidden += [1 - region["visible"] for region in scene]
            lengths = [region["size"] * 448 / SIZE for region in scene]
            assert min(lengths) > 36 and max(lengths) < 204  # rounded to pixels of SIZE
        if split in EVALUATION:  # masks do not overlap, and are what the truth says
            for scene in scenes_of(regions):
                masks = [data[region["row"]]["mask"] for region in scene]
                assert np.sum(masks, axis=0).max() == 1
                for region, mask in zip(scene, masks):
                    rows, cols = np.nonzero(mask)
                    box = [cols.min(), rows.min(), cols.max() + 1, rows.max() + 1]
                    assert region["box"] == box
    assert 0.05 < max(hidden) <= 0.3


EVALUATION = ("heldout", "artist")


def test_the_real_reader_sees_what_each_part_may_show(written):
    truth = truth_of(written)
    assert set(truth) == {"train", "artist_train", "heldout", "artist"}
    regions = truth["train"]
    captioned = GraspAnyRegionDataset(written / "train", ["captioned"])
    assert 0.3 <= len(captioned) / len(regions) < 0.45
    assert [r["caption"] for r in regions if r["part"] == "captioned"] == [
        sample["caption"] for sample in captioned
    ]
    rest = GraspAnyRegionDataset(written / "train", ["regions"])
    assert {(s["caption"], s["category"]) for s in rest} == {(NO_CAPTION, "")}
    segmented = GraspAnyRegionDataset(written / "train", ["segmented"])
    named = [region for region in regions if not region["unnamed"]]
    assert [s["caption"] for s in segmented] == [region["caption"] for region in named]
    assert not any(s["mask"].all() for s in segmented)
    phrases = GraspAnyRegionDataset(written / "train", ["phrases"])
    assert len(phrases) == len(rest) == len(regions) - len(captioned)
    assert all(s["mask"].all() and s["caption"] != NO_CAPTION for s in phrases)
    # No image of supervision is whole without captions, except for what is never named.
    unnamed = {r["label"] for r in regions if r["unnamed"]}
    scenes = {r["scene"] for r in regions if r["part"] == "captioned"}
    assert {
        r["label"] for r in regions if r["scene"] in scenes and r["part"] == "regions"
    } <= unnamed


def test_nothing_leaks_between_splits(written):
    truth = truth_of(written)
    assert set(leaks(truth).values()) == {0}
    said = " | ".join(r["caption"] for r in truth["train"] if r["part"] == "captioned")
    unnamed = {r["label"] for regions in truth.values() for r in regions if r["unnamed"]}
    assert unnamed and not any(label in said for label in unnamed)
    words = {word for caption in said.split(" | ") for word in caption.split()}
    assert all(set(label.split()) <= words for label in unnamed)
    assert {r["artist"] for r in truth["train"]} == {"anna", "ben"}
    assert {r["artist"] for r in truth["artist"]} == {"openmoji"}
    # And what would leak is counted.
    truth["train"][0] |= dict(part="captioned", artist="openmoji", unnamed=True)
    truth["train"][0]["background"] = truth["artist"][0]["background"]
    relation = next(r for r in truth["heldout"] if r["label_caption"] != r["label"])
    truth["train"].append(relation | dict(part="regions"))
    assert min(leaks(truth).values()) > 0


def test_what_was_interrupted_ends_bit_for_bit_the_same(written, source, tmp_path, monkeypatch):
    output, drawn = tmp_path / "lab", []
    draw_scene, write_gar = dataset.draw_scene, dataset.write_gar

    def interrupted_drawing(*args):
        drawn.append(args)
        if len(drawn) == 7:
            raise KeyboardInterrupt
        return draw_scene(*args)

    def interrupted_writing(rows, folder, part):
        list(zip(range(3), rows))
        raise KeyboardInterrupt

    monkeypatch.setattr(dataset, "draw_scene", interrupted_drawing)
    with pytest.raises(KeyboardInterrupt):
        pictures.main(argv_of(source, output))
    monkeypatch.setattr(dataset, "write_gar", interrupted_writing)
    with pytest.raises(KeyboardInterrupt):
        pictures.main(argv_of(source, output))
    monkeypatch.setattr(dataset, "write_gar", write_gar)
    pictures.main(argv_of(source, output))
    num_scenes = 16 + 4 + 6 + 6
    assert len(drawn) == num_scenes + 1  # none was drawn twice but the one that was interrupted
    files = sorted(p.relative_to(written) for p in written.rglob("*") if p.is_file())
    assert files == sorted(p.relative_to(output) for p in output.rglob("*") if p.is_file())
    for file in files:
        assert (written / file).read_bytes() == (output / file).read_bytes(), file


def test_a_folder_of_ones_own_is_named_by_its_files(source, tmp_path, capsys):
    folder = tmp_path / "mine"
    for number, path in enumerate(sorted((source / "cutouts" / "anna").glob("*.png"))):
        folder.mkdir(exist_ok=True)
        (folder / f"{path.stem}-{number}.png").write_bytes(path.read_bytes())
    output = tmp_path / "lab"
    argv = ["scenes", "--cutouts", str(folder), "--backgrounds", str(source / "walls")]
    argv += ["--output_dir", str(output), "--image_size", "128", "--num_train", "3"]
    pictures.main([*argv, "--num_eval", "2", "--caption_fraction", "1"])
    truth = truth_of(output)
    assert set(truth) == {"train", "heldout"}
    names = {f"{tone} {shape}" for tone in TONES for shape in SHAPES}
    assert {r["label"] for r in truth["train"]} <= names
    sheet = tmp_path / "sheet.png"
    pictures.main(["report", "--data_dir", str(output), "--output", str(sheet)])
    printed = capsys.readouterr().out
    assert "of 2 concepts that it never names it says all words of" in printed
    assert "train: 3 scenes" in printed and "nearly equal one of train: 0" in printed
    with Image.open(sheet) as image:
        assert image.width == 4 * 448


def test_a_second_wording_is_a_tag(source, tmp_path):
    output = tmp_path / "lab"
    pictures.main(argv_of(source, output, "--wording", "tag", "--num_eval", "0"))
    regions = truth_of(output)["train"]
    tags = {f"{shape}s" for shape in SHAPES} | {"toy"}
    assert {r["caption"] for r in regions if r["tag_caption"]} <= tags
    assert any(r["tag_caption"] for r in regions)
    assert all(r["caption"] == (r["tag_caption"] or r["label_caption"]) for r in regions)


def test_bad_input_ends_with_a_sentence(source, written, tmp_path):
    def sentence(*argv: str) -> str:
        with pytest.raises(SystemExit) as ending:
            pictures.main([str(word) for word in argv])
        assert isinstance(ending.value.code, str) and "Traceback" not in ending.value.code
        return ending.value.code

    output = tmp_path / "out"
    own = ("scenes", "--cutouts", source / "cutouts", "--output_dir", output)
    walls = ("--backgrounds", source / "walls")
    assert "--backgrounds None: must be a folder" in sentence(*own)
    assert "there is no such file" in sentence(*own, *walls, "--names", tmp_path / "n.csv")
    (tmp_path / "n.csv").write_text("file,name\nnone.png,a nut\n")
    assert "line 2" in sentence(*own, *walls, "--names", tmp_path / "n.csv")
    assert "at least 96" in sentence(*own, *walls, "--image_size", "20")
    assert "only with --cutouts" in sentence(
        "scenes", "--library", output, "--names", "n.csv", "--output_dir", output
    )
    assert "make it with" in sentence("scenes", "--library", tmp_path, "--output_dir", output)
    few = ("scenes", "--cutouts", tmp_path / "few", *walls, "--output_dir", output)
    assert "holds no PNG file" in sentence(*few)
    (tmp_path / "few").mkdir()
    Image.new("RGB", (9, 9)).save(tmp_path / "few" / "a.png")
    assert "is no cut-out" in sentence(*few)
    draw_cutout(tmp_path / "few" / "a.png", (200, 0, 0), 3)
    assert "are too few" in sentence(*few)
    (tmp_path / "few" / "a.png").write_text("text")
    assert "no picture that can be read" in sentence(*few)
    (tmp_path / "one").mkdir()
    Image.new("RGB", (99, 99)).save(tmp_path / "one" / "w.png")
    assert "two different pictures" in sentence(
        *own[:-1], tmp_path / "out2", "--backgrounds", tmp_path / "one"
    )
    assert "holds scenes of --seed 0, not 1" in sentence(*argv_of(source, written, "--seed", "1"))
    assert "is not empty" in sentence(*argv_of(source, tmp_path))
    assert "holds no data set" in sentence("report", "--data_dir", tmp_path)
    fetch = ("fetch", "--output_dir", tmp_path / "library", "--package_dirs")
    assert "must be NAME=FOLDER" in sentence(*fetch, "openmoji")
    assert "must be one of" in sentence(*fetch, "nothing=/")


def test_an_archive_of_another_content_is_refused(tmp_path):
    archive = tmp_path / "openmoji-17.0.0.tgz"
    archive.write_bytes(b"other")
    with pytest.raises(ValueError, match="is not openmoji 17.0.0 .* by its SHA-256: remove it"):
        packages.unpacked(packages.OPENMOJI, tmp_path)
    assert archive.read_bytes() == b"other"


def test_a_missing_or_failing_client_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="there is no npm here; .*--package_dirs"):
        packages.unpacked(packages.OPENMOJI, tmp_path / "packages")
    npm = tmp_path / "npm"
    npm.write_text("#!/bin/sh\necho no network >&2\nexit 3\n")
    npm.chmod(0o755)
    with pytest.raises(ValueError, match=r"npm ends with status 3 \(no network\)"):
        packages.unpacked(packages.OPENMOJI, tmp_path / "packages")


def test_packages_that_are_there_become_a_library(tmp_path, monkeypatch):
    """Nine concepts, of which one looks like another, one is a clock and one a smiley."""
    folders = {
        package.name: tmp_path / packages.folder_name(package) for package in packages.PACKAGES
    }
    words = folders["emojibase-data"]
    (words / "en").mkdir(parents=True)
    (words / "meta").mkdir()
    groups = dict(groups={"0": "smileys-emotion", "3": "objects"}, subgroups={"7": "tool"})
    (words / "meta" / "groups.json").write_text(json.dumps(groups))
    labels = ["Saw", "nut", "gem", "bolt", "one o’clock", "grin", "axe", "pin", "twin of axe"]
    entries = [
        dict(label=label, hexcode=f"1F40{i}-FE0F", tags=["x"], group=0 if i == 5 else 3, subgroup=7)
        for i, label in enumerate(labels)
    ]
    (words / "en" / "data.json").write_text(json.dumps(entries))
    fluent, noto = folders[packages.FLUENT.name], folders[packages.NOTO.name]
    svg = folders["openmoji"] / "color" / "svg"
    for folder in (fluent / "assets", noto, svg):
        folder.mkdir(parents=True)
    icons, codes = {}, {}
    for i, entry in enumerate(entries):
        tone = (0, 200, 0) if i in (6, 8) else (25 * i, 0, 250 - 25 * i)
        draw_cutout(fluent / "assets" / f"1f40{i}.png", tone, 12 if i in (6, 8) else 3 + i)
        (fluent / "assets" / f"1f40{i}.png").rename(fluent / "assets" / f"1f40{i}.webp")
        icons[f"name-{i}"], codes[f"1f40{i}"] = dict(body=f"corners {3 + i}"), f"name-{i}"
        (svg / f"1F40{i}.svg").write_text(f"corners {12 if i in (6, 8) else 3 + i}")
    icons["name-8"] = icons["name-6"]
    (noto / "icons.json").write_text(
        json.dumps(dict(icons=icons, aliases={}, width=128, height=128))
    )
    (noto / "chars.json").write_text(json.dumps(codes))
    stamps = folders["tuxpaint-stamps-default"] / "stamps" / "animals"
    stamps.mkdir(parents=True)
    grain = np.random.default_rng(0).integers(256, size=(120, 100, 4), dtype=np.uint8)
    grain[..., 3] = 255 * (np.indices((120, 100)).sum(0) > 60)
    for name, sentence in (("tiger", "A tiger."), ("greens", "Eat your greens!")):
        Image.fromarray(grain).save(stamps / f"{name}.png")
        (stamps / f"{name}.txt").write_text(f"{sentence}\naf.utf8=..\n")
    draw_cutout(stamps / "drawn.png", (200, 0, 0), 5)
    (stamps / "drawn.txt").write_text("A drawing.\n")
    for name in ("gnome-backgrounds", "mate-backgrounds"):
        (folders[name] / "backgrounds").mkdir(parents=True)
        Image.new("RGB", (20, 10)).save(folders[name] / "backgrounds" / "plain.png")
        Image.new("RGBA", (20, 10)).save(folders[name] / "backgrounds" / "glass.png")
    folders["resvg-py"].mkdir()
    (folders["resvg-py"] / "resvg_py.py").write_text(
        "import io, re\nfrom pathlib import Path\nfrom PIL import Image, ImageDraw\n\n"
        "def svg_to_bytes(svg_string=None, svg_path=None, width=None, height=None):\n"
        "    text = svg_string or Path(svg_path).read_text()\n"
        "    image, file = Image.new('RGBA', (width, height)), io.BytesIO()\n"
        "    corners = int(re.search(r'corners (\\d+)', text)[1])\n"
        "    tone = (37 * corners % 256, 200 * (corners % 2), 90 * (corners % 3))\n"
        "    ImageDraw.Draw(image).regular_polygon((128, 128, 90), corners, fill=tone)\n"
        "    image.save(file, 'PNG')\n    return file.getvalue()\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "resvg_py", raising=False)
    output = tmp_path / "library"
    dirs = [f"{name}={folder}" for name, folder in folders.items()]
    pictures.main(["fetch", "--output_dir", str(output), "--package_dirs", *dirs])
    sys.modules.pop("resvg_py")
    concepts = {concept.label: concept for concept in read_library(output)}
    assert set(concepts) == {"saw", "nut", "gem", "bolt", "axe", "pin", "tiger"}
    assert concepts["saw"].tags == ("x",) and concepts["saw"].theme == "tool"
    assert set(concepts["saw"].pictures) == {"fluent", "noto", "openmoji"}
    assert concepts["tiger"].sentence == "A tiger."
    assert all((output / p).is_file() for c in concepts.values() for (p,) in c.pictures.values())
    assert json.loads((output / "dropped.json").read_text()) == {
        "one o'clock": "clock face",
        "grin": "group smileys-emotion",
        "twin of axe": "alike axe",
    }
    assert sorted(p.name for p in (output / "backgrounds").iterdir()) == [
        "gnome-plain.jpg",
        "mate-plain.jpg",
    ]
    licences = (output / "LICENCES.txt").read_text()
    assert all(package.name in licences for package in packages.PACKAGES)


def test_a_rooster_is_a_chicken_too():
    concepts = [Concept(label) for label in ("rooster", "chicken", "key", "fox")]
    also = {concept.label: concept.also for concept in with_hypernyms(concepts)}
    assert also == {"rooster": ("chicken",), "chicken": (), "key": (), "fox": ()}
    places = [(20, 50), (80, 50), (50, 50)]
    rooster, chicken, key = (
        Named(label, (), (x, y), (x - 5, y - 5, x + 5, y + 5), also[label])
        for label, (x, y) in zip(("rooster", "chicken", "key"), places)
    )
    scene = [rooster, chicken, key]
    assert by_label(scene, 0, 100, lambda label, other: True) == "rooster"
    assert by_label(scene, 1, 100, lambda label, other: True) == "chicken right of the key"


def test_words_that_name_an_object():
    assert name_in("A tiger.") == "tiger" and name_in("The Red Gazania.") == "red gazania"
    assert name_in("Eat your broccoli!") is None
    assert fault_of_words("objects", "key") is None
    assert fault_of_words("flags", "flag") and fault_of_words("travel-places", "six-thirty")
    assert fault_of_words("objects", "closed mailbox with raised flag")


def test_pictures_that_are_nearly_the_same_are_counted():
    rng = np.random.default_rng(0)
    one, other = (Image.fromarray(rng.integers(256, size=(50, 50), dtype=np.uint8)) for _ in "ab")
    brighter = one.point(lambda value: min(255, value + 2))
    hashes = np.stack([perceptual_hash(picture) for picture in (one, other)])
    assert num_near(hashes[:1], hashes[1:]) == 0
    assert num_near(np.stack([perceptual_hash(brighter)]), hashes) == 1


def test_the_words_of_what_is_never_named_occur_elsewhere():
    labels = [f"{tone} {shape}" for tone in TONES for shape in SHAPES] + ["key"]
    concepts = [Concept(label, pictures={"own": [""]}) for label in labels]
    unnamed = unnamed_concepts(concepts)
    assert len(unnamed) == 2 and "key" not in unnamed
    rest = {word for label in set(labels) - unnamed for word in label.split()}
    assert all(set(label.split()) <= rest for label in unnamed)
    assert fraction_of("a") == fraction_of("a") != fraction_of("b")


def test_a_smaller_library_keeps_concepts_that_share_words(source, tmp_path):
    concepts = [
        Concept(label, (), "", {OWN: [f"anna/red_{shape}.png"]}, also=("moon", "red key"))
        for label, shape in zip(("moon", "red key", "blue key", "red ball"), SHAPES)
    ]
    photograph = Concept("key", pictures={PHOTOGRAPH: ["anna/red_ball.png"]})
    library, smaller = tmp_path / "library", tmp_path / "smaller"
    shutil.copytree(source / "cutouts", library)
    shutil.copytree(source / "walls", library / "backgrounds")
    write_library(library, [photograph, *concepts])
    argv = ["subset", "--library", str(library), "--output_dir", str(smaller)]
    pictures.main([*argv, "--num_concepts", "3", "--side", "32"])
    kept = read_library(smaller)
    assert [concept.label for concept in kept] == ["red key", "blue key", "red ball"]
    assert all(concept.also == ("red key",) for concept in kept)
    for concept in kept:
        (file,) = concept.pictures[OWN]
        assert Image.open(smaller / file).size == (32, 32)
    with pytest.raises(SystemExit, match="is there already, name another folder"):
        pictures.main(argv)
