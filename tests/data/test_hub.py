"""Names of hub data sets become folders; the hub is a fake here, `datasets` is the real one."""

import json
import shutil
import sys

import huggingface_hub
import numpy as np
import pytest
import torch
from huggingface_hub.errors import HfHubHTTPError
from PIL import Image

from rl_train.data import DescribeAnythingDataset, GraspAnyRegionDataset
from rl_train.data.hub import resolve
from rl_train.export.load_policy import open_policy
from sa2va_hf import Sa2VAModel
from sa2va_hf.hub import model_folder
from sa2va_hf.tokenizer import load_tokenizer
from tests.data.dam_splits import PNGS, region
from tests.data.dam_splits import write as write_dam
from tests.policies.tiny_points import write_qwen, write_sam
from tests.runs import CHECKPOINT, run, unmeasured, weights
from tools import evaluate, export, inspect_data
from tools.experiments import cross_play
from tools.gar_writer import encode_mask, write_gar

datasets = pytest.importorskip("datasets", reason="datasets is not installed (extra: test)")

# The library by which the hub is asked: its errors go through.
HTTP = sys.modules[HfHubHTTPError.__bases__[0].__module__.partition(".")[0]]
MASK = np.eye(20, dtype=bool)
ROW = {
    "image": Image.new("RGB", (20, 20), "red"),
    "mask": MASK,
    "caption": "A line.",
    "category": "line",
}


def test_a_folder_is_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: 1 / 0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert str(resolve("owner/name", [])) == "owner/name"
    assert resolve(tmp_path, []) == tmp_path


def test_a_repository_of_shards_is_taken_as_it_is(tmp_path, monkeypatch):
    asked = []

    def fetch(name, repo_type, allow_patterns, ignore_patterns):
        asked.append((name, repo_type, allow_patterns))
        write_gar([ROW], tmp_path / "snapshot")
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    dataset = GraspAnyRegionDataset("some-owner/Some.Name_1")
    assert asked == [("some-owner/Some.Name_1", "dataset", ["*.arrow"])]
    assert dataset[0]["caption"] == "A line."


class Repository:
    """A repository on the hub, of which files that match are fetched into a folder."""

    def __init__(self, source, cache, monkeypatch):
        self.source, self.cache, self.fetched = source, cache, []
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.download)

    def download(self, name, repo_type, allow_patterns, ignore_patterns=None):
        files = [str(p.relative_to(self.source)) for p in self.source.rglob("*") if p.is_file()]
        how = dict(allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        self.fetched = sorted(huggingface_hub.utils.filter_repo_objects(files, **how))
        for file in self.fetched:
            (self.cache / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.source / file, self.cache / file)
        self.cache.mkdir(exist_ok=True)
        return str(self.cache)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    return Repository(tmp_path / "repository", tmp_path / "cache", monkeypatch)


def test_of_parts_nothing_else_is_fetched(repository):
    for part in ("Fine-Part1", "Fine-Part2", "Seed"):
        write_gar([ROW], repository.source / part)
    (repository.source / "Seed" / "notes.json").write_text("{}")
    dataset = GraspAnyRegionDataset("owner/name", ["Fine-Part2"])
    assert [file.split("/")[0] for file in repository.fetched] == ["Fine-Part2"]
    assert dataset.image_id(0).startswith("Fine-Part2/")
    GraspAnyRegionDataset("owner/name")  # now there are all of them
    folders = {file.split("/")[0] for file in repository.fetched}
    assert folders == {"Fine-Part1", "Fine-Part2", "Seed"}
    assert all(file.endswith(".arrow") for file in repository.fetched)
    assert len(GraspAnyRegionDataset("owner/name", ["Seed"])) == 1


def test_of_a_part_that_there_is_not_nothing_is_fetched(repository):
    write_gar([ROW], repository.source / "Seed")
    with pytest.raises(
        ValueError,
        match="--data_dir .* holds no data-.* --dataset dam, .* sa2va, coco, folders",
    ):
        GraspAnyRegionDataset("owner/name", ["Sead"])
    assert repository.fetched == []


def test_of_a_split_of_describe_anything_neither(repository):
    for split in ("LVIS", "PACO"):
        write_dam(repository.source / split, {"x": region()}, [("x.png", PNGS[0])])
        (repository.source / split / "x.pickle").write_bytes(b"")
    dataset = DescribeAnythingDataset("owner/name", ["PACO"])
    assert len(dataset) == 1 and "PACO/annotations.json" in repository.fetched
    assert all(file.startswith("PACO/") for file in repository.fetched)
    assert not [file for file in repository.fetched if file.endswith("pickle")]


def test_a_model_is_fetched_without_programs_and_pickles(repository):
    kept = ["config.json", "model.safetensors", "tokenizer.json", "merges.txt", "README.md"]
    others = [
        "modeling_x.py",
        "pytorch_model.bin",
        "onnx/config.json",
        "a.safetensors/b",
    ]
    for name in kept + others:
        (repository.source / name).parent.mkdir(parents=True, exist_ok=True)
        (repository.source / name).write_text("")
    assert model_folder("--model_path", "owner/name") == repository.cache
    assert repository.fetched == sorted(kept)
    assert model_folder("--model_path", repository.cache) == repository.cache
    with pytest.raises(ValueError, match="--sam_path /no/such: no such folder, nor .*owner/name"):
        model_folder("--sam_path", "/no/such")


def test_a_run_and_its_evaluation_from_a_model_on_the_hub(repository, data, tmp_path, monkeypatch):
    """config.json keeps the name, by which the checkpoint finds its base again."""
    for _ in unmeasured(monkeypatch):
        shutil.copytree(CHECKPOINT, repository.source)
        how = dict(model_path="owner/tiny", max_steps=1, loop2_weight=0)
        output = run(data, tmp_path / "run", **how)
        assert json.loads((output / "config.json").read_text())["model_path"] == "owner/tiny"
        policy = open_policy(output / "checkpoint_step_1", None, "policy", torch.device("cpu"))
        trained = weights(output, 1)
        assert all(torch.equal(p, trained[name]) for name, p in policy.trainable.items())


def test_names_on_the_hub_wherever_a_model_is_given(repository, data, monkeypatch, capsys):
    """`Sa2VAModel`, `load_tokenizer`, tools.evaluate and an experiment take them."""
    shutil.copytree(CHECKPOINT, repository.source)
    model = Sa2VAModel.from_pretrained("owner/tiny", dtype="auto")
    assert model.folder == repository.cache and model.dtype == torch.bfloat16
    model.require_tokenizer()
    assert len(load_tokenizer("owner/tiny")) == len(load_tokenizer(CHECKPOINT))
    how = ["--data_dir", str(data / "heldout"), "--num_samples", "2", "--dtype", "float32"]
    how += ["--max_completion_length", "8", "--num_workers", "0"]
    for _ in unmeasured(monkeypatch):
        evaluate.main(["--model_path", "owner/tiny", *how])
        assert "seg_iou" in capsys.readouterr().out
        players = ["--speakers", "owner/tiny", "--listeners", "owner/tiny"]
        cross_play.main([*players, *how])
        assert "owner/tiny -> owner/tiny" in capsys.readouterr().out


def test_a_sam2_on_the_hub_and_the_base_of_an_export(data, tmp_path, monkeypatch):
    """Both names stay in config.json, and the export finds both again."""
    sources = dict(qwen=write_qwen(tmp_path / "qwen"), sam=write_sam(tmp_path / "sam"))

    def fetch(name, repo_type, allow_patterns, ignore_patterns):
        return str(sources[name.removeprefix("owner/")])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    points = dict(tasks="point_segmentation", answer_style="points", image_size=56)
    points |= dict(latent_std=None, max_completion_length=4)
    for _ in unmeasured(monkeypatch):
        how = dict(model_path="owner/qwen", sam_path="owner/sam", max_steps=1, **points)
        output = run(data, tmp_path / "run", **how)
    flags = json.loads((output / "config.json").read_text())
    assert (flags["model_path"], flags["sam_path"]) == ("owner/qwen", "owner/sam")
    checkpoint = output / "checkpoint_step_1"
    words = ["--checkpoint", str(checkpoint), "--output", str(tmp_path / "new"), "--role", "policy"]
    export.main([*words, "--model_path", "owner/qwen"])
    config = (sources["qwen"] / "config.json").read_bytes()
    assert (tmp_path / "new" / "config.json").read_bytes() == config


def test_a_data_set_on_the_hub_is_inspected(tmp_path, monkeypatch, capsys):
    write_gar([ROW], tmp_path / "snapshot")
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path / "snapshot")
    )
    inspect_data.main(["--data_dir", "owner/set", "--num_workers", "0"])
    assert "1 rows" in capsys.readouterr().out


def rows_for_datasets():
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "mask_rle": {
                "counts": datasets.Value("string"),
                "size": datasets.List(datasets.Value("int64")),
            },
            "conversations": datasets.List(
                {"from": datasets.Value("string"), "value": datasets.Value("string")}
            ),
            "catagory": datasets.List(datasets.Value("string")),
        }
    )
    row = {
        "image": ROW["image"],
        "mask_rle": encode_mask(MASK),
        "catagory": ["line"],
        "conversations": [
            {"from": "human", "value": "<image>"},
            {"from": "gpt", "value": "A line."},
        ],
    }
    return datasets.Dataset.from_list([row, row], features=features)


def check(dataset, num):
    assert len(dataset) == num and dataset.report()["skipped"] == {}
    for i in range(num):
        sample = dataset[i]
        assert np.array_equal(sample["image"], ROW["image"]) and np.array_equal(
            sample["mask"], MASK
        )
        assert (sample["caption"], sample["category"]) == ("A line.", "line")


def test_save_to_disk(tmp_path):
    rows = rows_for_datasets()
    rows.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "two")
    check(GraspAnyRegionDataset(tmp_path / "one"), 2)
    check(GraspAnyRegionDataset(tmp_path / "two"), 4)
    check(GraspAnyRegionDataset(tmp_path / "two", parts=["train"]), 2)


@pytest.mark.parametrize("name", ["missing", "a/b/c", "/no/such/folder", "../x", "owner/na me"])
def test_neither_folder_nor_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ValueError,
        match=r"--data_dir .*: no such folder, nor is it a dataset's name \(owner/name\)",
    ):
        GraspAnyRegionDataset(name)


@pytest.mark.parametrize(
    "error",
    [
        OSError("no route"),
        ConnectionError("refused"),
        huggingface_hub.errors.LocalEntryNotFoundError("not\ncached"),
        HTTP.ProxyError("403 Forbidden"),
    ],
)
def test_no_network(monkeypatch, error):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(
        ValueError,
        match="--data_dir owner/name is not a folder here and could not be fetched from the hub; "
        "download it",
    ) as refused:
        GraspAnyRegionDataset("owner/name")
    assert "\n" not in str(refused.value)
