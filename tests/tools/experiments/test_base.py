"""tools/experiments/base: the codes of words, a base of few steps, and what is measured of it."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from rl_train.export.load_policy import open_policy
from rl_train.policies.sa2va import Sa2VAPolicy
from sa2va_hf import Sa2VAModel
from tests.runs import ROOT, on_one_core
from tests.tools.experiments.test_pictures import argv_of, source  # noqa: F401
from tools.demo.seen_masks import (
    ImageRegions,
    WordCodes,
    alike,
    choices,
    label_in,
    region_means,
)
from tools.experiments.base import __main__ as base
from tools.experiments.base.few_masks import NEW
from tools.experiments.base.measure import by_concept, by_group, confusions, probe
from tools.experiments.pictures import __main__ as pictures
from tools.experiments.pictures.dataset import CAPTIONED, read_truth

one_core = pytest.fixture(autouse=True)(on_one_core)


def test_the_label_in_a_caption_is_without_the_neighbour():
    assert label_in("hammer and pick left of the owl") == "hammer and pick"
    assert label_in("statue of liberty") == "statue of liberty"


def test_codes_of_labels_share_the_vectors_of_their_words():
    codes = WordCodes(512, "cpu")
    labels = ["black cat", "cat", "owl"]
    black_cat, cat, owl = codes(labels)
    assert torch.cosine_similarity(black_cat, cat, dim=0) > 0.5
    assert torch.cosine_similarity(black_cat, owl, dim=0).abs() < 0.2
    assert torch.equal(WordCodes(512, "cpu")(["owl"])[0], owl)  # of any process
    loss, right = codes.reading(codes(labels), labels)
    assert right == 3 and loss < 1e-3
    assert codes.reading(codes(["owl", "owl", "owl"]), labels)[1] == 1


def two_images() -> ImageRegions:
    """Regions of two images of 4 x 4 pixels: a left and a right half, and a whole one."""
    masks = torch.zeros(3, 4, 4)
    masks[0, :, :2] = masks[1, :, 2:] = masks[2] = 1
    return ImageRegions(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 0]), masks)


def test_region_means_are_over_each_region_alone():
    features = torch.arange(8.0).view(2, 1, 2, 2)  # of cells of 2 x 2 pixels
    assert region_means(features, two_images()).flatten().tolist() == [1.0, 2.0, 5.5]


def test_a_mask_chooses_among_the_regions_of_its_own_image():
    regions = two_images()
    areas = regions.padded(regions.masks, 2)[regions.image]
    logits, place = 10 * regions.masks - 5, regions.place
    same = alike(["cat", "dog", "dog"], regions, 2)
    assert same.tolist() == [[True, False], [False, True], [True, False]]
    loss, hits = choices(logits, areas, same, place)
    assert hits == 3 and loss < 0.01
    assert choices(logits[[1, 0, 2]], areas, same, place)[1] == 1
    twins = alike(["cat", "cat", "dog"], regions, 2)  # neither is wrong for the other
    assert choices(logits[[1, 0, 2]], areas, twins, place)[1] == 3


def test_a_probe_reads_what_features_hold():
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(3, 8, generator=generator)
    rows = torch.arange(60) % 3
    features = centres[rows] + 0.1 * torch.randn(60, 8, generator=generator)
    labels = [("cat", "dog", "owl")[i] for i in rows]
    assert probe(features[:30], labels[:30]).read(features[30:]) == labels[30:]


def test_accuracy_by_group_and_confusions_by_hand():
    rows = [("black cat", True), ("cat", False), ("cat", False), ("owl", False)]
    truth = [dict(label=label, unnamed=u, artist="noto") for label, u in rows]
    said = ["cat", "owl", "owl", "owl"]
    groups = by_group(said, truth, dict(seg_iou=[1.0, 0.0, 0.5, 0.5]))
    assert groups["all"] == groups["noto"]
    # Of the 16 pairs of what is said and a label, cat with cat twice and owl with owl three times.
    all_four = dict(label=0.25, label_by_chance=5 / 16, words=0.375)
    assert groups["all"] == dict(regions=4, seg_iou=0.5) | all_four
    one = dict(label=0.0, label_by_chance=0.0, words=0.5)
    assert groups["unnamed"] == dict(regions=1, seg_iou=1.0) | one
    assert confusions(said, truth)[0] == dict(label="cat", said="owl", times=2, regions=2)


@pytest.fixture(scope="module")
def lab(source, tmp_path_factory):  # noqa: F811
    folder = tmp_path_factory.mktemp("base") / "lab"
    pictures.main(argv_of(source, folder))
    return folder


def shared_flags(lab) -> list[str]:
    return ["--data_dir", str(lab), "--dtype", "float32", "--num_workers", "0"]


def train(lab, folder):
    base.main(["train", *shared_flags(lab), "--size", "tiny", "--output_dir", str(folder)])


@pytest.fixture(scope="module")
def trained(lab, tmp_path_factory):
    """Folder of a base of few steps."""
    folder = tmp_path_factory.mktemp("base") / "0"
    with pytest.MonkeyPatch.context() as monkeypatch:
        for _ in on_one_core(monkeypatch):
            train(lab, folder)
    return folder


def test_one_command_trains_a_base_and_one_measures_it(lab, trained, tmp_path):
    """The base is complete, and names nothing that is not to be named."""
    made = (trained / "base/model.safetensors").read_bytes()
    train(lab, trained)  # all of it is done
    assert (trained / "base/model.safetensors").read_bytes() == made
    assert open_policy(trained / "base", None, "policy", "cpu", 8, dtype="float32")
    measured = ["--model_path", str(trained / "base"), "--num_samples", "8"]
    measured += ["--probe_samples", "12", "--output", str(tmp_path / "measures.json")]
    base.main(["measure", *shared_flags(lab), *measured])
    (record,) = json.loads((tmp_path / "measures.json").read_text()).values()
    assert set(record) == {"heldout", "artist"}
    figures = record["heldout"]["groups"]["all"]
    assert figures["regions"] == 8 and 0 <= figures["probe_all"] <= 1
    text = (tmp_path / "measures.md").read_text()
    assert "| openmoji |" in text
    concepts = record["heldout"]["concepts"]
    assert sum(of["regions"] for of in concepts.values()) == 8
    assert all(f"| {label} | {of['regions']} |" in text for label, of in concepts.items())


def test_measures_of_several_bases_are_one_table(tmp_path):
    def record(said):
        truth = [dict(label=label, unnamed=False, artist="noto") for label in ("cat", "cat", "owl")]
        groups, concepts = (of(said, truth, {}) for of in (by_group, by_concept))
        return dict(
            heldout=dict(groups=groups, concepts=concepts, confusions=confusions(said, truth))
        )

    files = [tmp_path / "0.json", tmp_path / "1.json"]
    for file, said in zip(files, (["owl", "cat", "owl"], ["owl", "owl", "dog"])):
        file.write_text(json.dumps({file.stem: record(said)}))
    base.main(["table", *map(str, files), "--output", str(tmp_path / "table.md")])
    lines = (tmp_path / "table.md").read_text().splitlines()
    rightly, by_chance = "0.333 (0.000 to 0.667)", "0.333 (0.222 to 0.444)"  # 4 and 2 of 9 pairs
    assert f"| all | 3 | {rightly} | {by_chance} | {rightly} |" in lines
    assert f"| cat | 2 |{3 * ' 0.250 (0.000 to 0.500) |'}" in lines
    assert lines.index("| cat | owl | 3 | 4 |") < lines.index("| owl | dog | 1 | 2 |")
    files[0].write_text(files[0].read_text().replace('"regions": 2', '"regions": 3'))
    with pytest.raises(SystemExit, match="base: the bases were not measured on the same regions"):
        base.main(["table", *map(str, files), "--output", str(tmp_path / "table.md")])


FAKE_PYTHON = """#!/bin/bash
# In python's place: makes what a command makes; the base of seed 1 fails once.
echo "$@" >>"$0.calls"
[[ "$*" == *" train "*"--seed 1 "* && ! -e "$0.failed" ]] && touch "$0.failed" && exit 3
while (($# > 1)); do
    case $1 in
    --output_dir) mkdir -p "$2/base" && touch "$2/table.md" ;;
    --output) touch "$2" ;;
    esac
    shift
done
exit 0
"""


def test_bases_sh_does_again_what_failed_and_no_more(tmp_path):
    python, output = tmp_path / "python", tmp_path / "bases"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    command = ["bash", "tools/experiments/base/bases.sh", "library", str(output), "0 1 2"]
    environment = os.environ | dict(PYTHON=str(python), CUDA_VISIBLE_DEVICES="", LOOPS="1")

    def run() -> tuple[subprocess.CompletedProcess, list[str]]:
        """Return the finished command and the subcommands that it called."""
        calls = Path(f"{python}.calls")
        calls.write_text("")
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        return done, [" ".join(line.split()[2:3]) for line in calls.read_text().splitlines()]

    first, calls = run()
    assert first.returncode == 1 and calls.count("train") == 3 and "measure" not in calls
    log = output / "loop1/train-1.log"
    assert first.stderr.strip().endswith(f"run the same command again: {log}")
    second, calls = run()
    assert second.returncode == 0, second.stderr
    assert calls.count("train") == 1 and calls.count("measure") == 3 and calls.count("table") == 1
    third, calls = run()
    assert third.returncode == 0 and calls == ["scenes", "table"]
    command[-1] = "0 1"
    other, calls = run()
    assert other.returncode == 1 and not calls
    assert "was begun with SEEDS=0 1 2 " in other.stderr and "name another folder" in other.stderr


def test_a_base_for_loop_2_keeps_what_sees_and_learns_masks_of_captioned_regions(
    lab, tmp_path, monkeypatch
):
    taught, decode_masks = [], Sa2VAPolicy.decode_masks

    def decoding(policy, images, image_index, embeddings):
        taught.append(len(image_index))
        return decode_masks(policy, images, image_index, embeddings)

    monkeypatch.setattr(Sa2VAPolicy, "decode_masks", decoding)
    few = ["few_masks", *shared_flags(lab), "--size", "tiny", "--output_dir", str(tmp_path)]
    base.main([*few, "--steps", "1", "1", "1", "1"])
    found, longer, begin, after = (
        Sa2VAModel.from_pretrained(tmp_path / folder).float().state_dict()
        for folder in ("find/final_model", "find_longer/final_model", "begin", "base")
    )
    for name, value in longer.items():
        if name.startswith(NEW):
            assert value.ndim < 2 or not begin[name].equal(value), name
        else:
            assert begin[name].equal(value), name
            assert after[name].equal(value.bfloat16().float()), name
        if name.startswith(("vision_model.", "mlp1.")):
            assert value.equal(found[name]), name
    sam2 = [name for name in found if name.startswith("grounding_encoder.")]
    assert any(not longer[name].equal(found[name]) for name in sam2)
    assert Sa2VAModel.from_pretrained(tmp_path / "base").config.one_piece_masks
    named = [r for r in read_truth(lab / "train") if not r["unnamed"]]
    captioned = sum(r["part"] == CAPTIONED for r in named)
    assert 0 < captioned < len(named) / 2
    # Of the 16 regions of a batch all in `find` and `find_longer`, then those with captions alone.
    assert taught.count(16) == 2 and max(taught) == 16


def test_a_folder_without_scenes_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="holds no scenes, make them with"):
        base.main(["train", "--data_dir", str(tmp_path), "--output_dir", str(tmp_path / "o")])
