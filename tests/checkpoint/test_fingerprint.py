"""A checkpoint knows its base: onto another of the same shapes it does not load."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_train.checkpoint import save_load
from rl_train.checkpoint.fingerprint import fingerprint_of
from tests.runs import CHECKPOINT, run, run_unmeasured, unmeasured
from tools import evaluate, export
from tools.experiments import cross_play

one_core = pytest.fixture(autouse=True)(unmeasured)
RUN = dict(max_steps=1, loop2_weight=0)


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """A checkpoint of one step."""
    return run_unmeasured(data, tmp_path_factory.mktemp("run"), **RUN) / "checkpoint_step_1"


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A base of the demo's shapes, of which one tensor differs."""
    folder = shutil.copytree(CHECKPOINT, tmp_path_factory.mktemp("other") / "base")
    weights = load_file(folder / "model.safetensors")
    name = "language_model.model.layers.0.mlp.up_proj.weight"
    weights[name] = -weights[name]
    save_file(weights, folder / "model.safetensors")
    return folder


def test_another_base_is_refused_wherever_a_checkpoint_is_loaded(data, trained, other, tmp_path):
    def refused(main, *argv):
        with pytest.raises(SystemExit) as stopped:
            main([*map(str, argv)])
        said = str(stopped.value)
        assert f"{trained} was trained on another base than the one in {other}:" in said
        assert str(CHECKPOINT) in said and "\n" not in said

    refused(
        export.main,
        "--checkpoint",
        trained,
        "--output",
        tmp_path / "e",
        "--role",
        "policy",
        "--model_path",
        other,
    )
    where = ("--data_dir", data / "heldout", "--num_samples", 1, "--num_workers", 0)
    refused(evaluate.main, "--model_path", other, "--checkpoint", trained, *where)
    with pytest.raises(SystemExit, match=f"{trained} was trained on another base than .* {other}:"):
        run(data, tmp_path / "run", resume=trained, model_path=other, **RUN)
    moved = shutil.copytree(trained, tmp_path / "moved")  # whose config.json names another base
    flags = json.loads((moved / "config.json").read_text()) | dict(model_path=str(other))
    (moved / "config.json").write_text(json.dumps(flags))
    with pytest.raises(SystemExit, match="moved was trained on another base"):
        cross_play.main([*map(str, ("--speakers", moved, "--listeners", moved, *where))])


def test_how_the_base_lies_on_disk_does_not_matter(trained, tmp_path):
    """Another folder, and other files: the tensors are the same."""
    weights, halves = load_file(CHECKPOINT / "model.safetensors"), ({}, {})
    for place, (name, tensor) in enumerate(weights.items()):
        halves[place % 2][name] = tensor
    for number, half in enumerate(halves):
        save_file(half, tmp_path / f"model-{number}.safetensors")
    of_file = {n: f"model-{k}.safetensors" for k, half in enumerate(halves) for n in half}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps(dict(weight_map=of_file)))
    base = fingerprint_of(tmp_path)
    assert base.digest == fingerprint_of(CHECKPOINT).digest and base.folders == str(tmp_path)
    for file in save_load.WEIGHT_FILES.values():
        weights = load_file(trained / file)
        save_load.load_weights(trained, weights, file, base)


@pytest.mark.parametrize("size", [1, 63, 65, 1000])
def test_numbers_names_shapes_types_and_order_of_folders_count(tmp_path, size):
    def digest(tensor, name="w", folder="one"):
        (tmp_path / folder).mkdir(exist_ok=True)
        save_file({name: tensor}, tmp_path / folder / "model.safetensors")
        return fingerprint_of(tmp_path / folder).digest

    ones = torch.ones(size)
    ended = torch.ones(size)
    ended[-1] = 2  # its ends are always read
    shaped = ones.reshape(1, size)
    found = [digest(ones), digest(ended), digest(ones, "v"), digest(shaped), digest(ones.int())]
    assert len(set(found)) == 5 and digest(ones) == found[0]
    digest(ended, folder="two")
    both = [tmp_path / "one", tmp_path / "two"]
    assert fingerprint_of(*both).digest != fingerprint_of(*both[::-1]).digest
    assert fingerprint_of(*both).folders == f"{both[0]} and {both[1]}"
