"""Checkpoint folders: both directions, bit for bit, and every way in which a file can be wrong."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from sa2va_hf import Sa2VAConfig, Sa2VAModel
from sa2va_hf.checkpoint_keys import original_shapes, to_original
from tools.demo.make_demo import SHIPPED_CHECKPOINT


@pytest.fixture(scope="module")
def model():
    return Sa2VAModel.from_pretrained(SHIPPED_CHECKPOINT)


@pytest.fixture(scope="module")
def file():
    return load_file(SHIPPED_CHECKPOINT / "model.safetensors")


@pytest.fixture
def folder(tmp_path):
    """A copy of the demo checkpoint to be damaged."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(SHIPPED_CHECKPOINT / name, tmp_path)
    return tmp_path


# Both directions


def test_the_file_comes_back_bit_for_bit(model, file):
    saved = {k: v.to(file[k].dtype) for k, v in to_original(model.state_dict()).items()}
    assert set(saved) == set(file)
    assert all(torch.equal(saved[k], file[k]) for k in file)


@pytest.mark.parametrize("shard", ["5GB", "1MB"])
def test_save_and_load(model, tmp_path, shard):
    with torch.no_grad():
        moved = Sa2VAModel.from_pretrained(SHIPPED_CHECKPOINT)
        for p in moved.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.1)
    moved.save_pretrained(tmp_path, max_shard_size=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "1MB")
    again = Sa2VAModel.from_pretrained(tmp_path).state_dict()
    state = moved.state_dict()
    assert set(again) == set(state) and all(torch.equal(again[n], state[n]) for n in state)
    assert any(not torch.equal(again[n], t) for n, t in model.state_dict().items())
    # What transformers' dtype="auto" goes by follows the file.
    assert json.loads((tmp_path / "config.json").read_text()) == json.loads(
        (SHIPPED_CHECKPOINT / "config.json").read_text()
    ) | {"torch_dtype": "float32"}


def test_no_tensor_stays_uninitialised(model, file):
    """Every parameter and buffer of the state is finite and stems from the file."""
    assert all(t.isfinite().all() for t in model.state_dict().values())
    assert original_shapes(model.state_dict()) == {k: tuple(v.shape) for k, v in file.items()}


def test_a_model_with_adapter_is_not_saved(policy, tmp_path):
    with pytest.raises(ValueError, match="LoRA adapter: merge it first"):
        policy().model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


# Wrong files


def damage(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def refused(folder, *words):
    with pytest.raises(ValueError) as error:
        Sa2VAModel.from_pretrained(folder)
    for word in (str(folder), *words):
        assert word in str(error.value)


def test_missing_key(folder):
    damage(folder, lambda t: t.pop("mlp1.3.bias"))
    refused(folder, "1 keys missing ['mlp1.3.bias']", "0 unexpected")


def test_unexpected_key(folder):
    damage(folder, lambda t: t.update({"mlp1.9.bias": torch.zeros(1)}))
    refused(folder, "0 keys missing", "1 unexpected ['mlp1.9.bias']")


def test_missing_part_of_a_joined_tensor(folder):
    key = "grounding_encoder.sam2_model.sam_prompt_encoder.point_embeddings.2.weight"
    damage(folder, lambda t: t.pop(key))
    refused(folder, key)


def test_wrong_shape(folder):
    damage(folder, lambda t: t.update({"mlp1.3.bias": torch.zeros(1)}))  # would broadcast in a copy
    refused(folder, "model.safetensors", "mlp1.3.bias has shape (1,)", "(128,)")


def test_truncated_file(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    refused(folder, "model.safetensors is damaged or truncated")


def test_weights_that_are_no_floats(folder):
    """A copy would turn them into some."""
    damage(folder, lambda t: t.update({"mlp1.3.bias": torch.zeros(128, dtype=torch.int64)}))
    refused(folder, "model.safetensors", "mlp1.3.bias is of I64")


@pytest.mark.parametrize("offsets", [[0, 2**60], [0, 512]])
def test_a_header_that_lies_about_sizes(folder, offsets):
    """The sizes are the file's, and those that its shape needs."""
    path = folder / "model.safetensors"
    size, data = int.from_bytes(path.read_bytes()[:8], "little"), path.read_bytes()
    header = json.loads(data[8 : 8 + size])
    header["mlp1.3.bias"] |= dict(shape=[2**40, 2**40], data_offsets=offsets)
    new = json.dumps(header).encode()
    path.write_bytes(len(new).to_bytes(8, "little") + new + data[8 + size :])
    refused(folder, "model.safetensors is damaged or truncated")


@pytest.mark.parametrize("mode", [0o022, 0o077])
def test_files_have_the_mode_of_the_umask(model, tmp_path, mode):
    """safetensors makes its own 0600."""
    before = os.umask(mode)
    try:
        model.save_pretrained(tmp_path / "new", max_shard_size="5MB")
    finally:
        os.umask(before)
    files = list((tmp_path / "new").iterdir())
    assert len(files) > 3 and {file.stat().st_mode & 0o777 for file in files} == {0o666 & ~mode}


def test_missing_shard(model, tmp_path):
    model.save_pretrained(tmp_path, max_shard_size="1MB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    refused(tmp_path, shard.name)


@pytest.mark.parametrize(
    "text",
    [
        '{"weight_map": {"mlp1',
        "{}",
        "[]",
        '{"weight_map": {"a": 3}}',
        '{"weight_map": {"a": "../model.safetensors"}}',
    ],
)
def test_damaged_index(folder, text):
    (folder / "model.safetensors.index.json").write_text(text)
    refused(folder, "model.safetensors.index.json is damaged")


def test_no_weights(folder):
    (folder / "model.safetensors").unlink()
    refused(folder, "neither model.safetensors nor model.safetensors.index.json")


def test_adapter_folder(tmp_path):
    """A LoRA adapter saved by peft, without and with a config.json beside it."""
    (tmp_path / "adapter_config.json").write_text("{}")
    save_file({"x": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    refused(tmp_path, "config.json")
    shutil.copy(SHIPPED_CHECKPOINT / "config.json", tmp_path)
    refused(tmp_path, "LoRA adapter, not a Sa2VA model")


def test_no_or_broken_config(folder):
    (folder / "config.json").write_text("{")
    refused(folder, "config.json is not valid JSON")
    (folder / "config.json").unlink()
    refused(folder, "config.json does not exist")


# Tied embeddings

EMBED, HEAD = "language_model.model.embed_tokens.weight", "language_model.lm_head.weight"


def tie(folder, change):
    """Make the demo checkpoint in `folder` one whose config ties embed_tokens and lm_head."""
    config = json.loads((folder / "config.json").read_text())
    config["llm_config"]["tie_word_embeddings"] = True
    (folder / "config.json").write_text(json.dumps(config))
    damage(folder, change)


@pytest.mark.parametrize("absent", [HEAD, EMBED])
def test_tied_embeddings_come_back(folder, tmp_path_factory, file, absent):
    tie(folder, lambda t: t.pop(absent))
    model = Sa2VAModel.from_pretrained(folder)
    llm = model.language_model
    assert llm.lm_head.weight is llm.model.embed_tokens.weight
    assert torch.equal(llm.lm_head.weight, file[EMBED if absent == HEAD else HEAD].float())
    saved = tmp_path_factory.mktemp("tied")
    model.save_pretrained(saved)
    assert set(load_file(saved / "model.safetensors")) == set(file) - {absent}
    again = Sa2VAModel.from_pretrained(saved)
    assert again.language_model.lm_head.weight is again.language_model.model.embed_tokens.weight
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values())
    )


def test_tied_in_name_only(folder, tmp_path_factory, file):
    """Two different tensors under a config that ties them are kept; two equal ones are tied."""
    tie(folder, lambda t: None)
    model = Sa2VAModel.from_pretrained(folder)
    assert torch.equal(model.language_model.lm_head.weight, file[HEAD].float())
    assert torch.equal(model.language_model.model.embed_tokens.weight, file[EMBED].float())
    saved = tmp_path_factory.mktemp("both")
    model.save_pretrained(saved)
    assert set(load_file(saved / "model.safetensors")) == set(file)
    damage(folder, lambda t: t.update({HEAD: t[EMBED].clone()}))
    model = Sa2VAModel.from_pretrained(folder)
    assert model.language_model.lm_head.weight is model.language_model.model.embed_tokens.weight
    model.save_pretrained(saved / "equal")
    assert set(load_file(saved / "equal" / "model.safetensors")) == set(file)


def test_tied_without_either(folder):
    tie(folder, lambda t: (t.pop(HEAD), t.pop(EMBED)))
    refused(folder, "2 keys missing", HEAD)


def test_untied_needs_both(folder):
    damage(folder, lambda t: t.pop(HEAD))
    refused(folder, f"1 keys missing ['{HEAD}']")


# The config


def test_unknown_fields_are_kept(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text()) | {
        "a_field_of_tomorrow": [1, {"x": None}],
        "auto_map": {"AutoModel": "a.B"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    Sa2VAConfig.from_pretrained(folder).save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == config


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(use_sliding_window=True), "use_sliding_window"),
        (dict(rope_scaling={"type": "linear", "factor": 4.0}), "rope_scaling"),
        (dict(rope_scaling={"type": "dynamic"}), "'dynamic' with a factor above 1"),
    ],
)
def test_an_llm_that_would_be_computed_wrongly_is_refused(change, message):
    config = json.loads((SHIPPED_CHECKPOINT / "config.json").read_text())
    Sa2VAConfig(
        **config
        | {
            "llm_config": config["llm_config"]
            | {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "use_sliding_window": False}
        }
    )
    with pytest.raises(ValueError, match=message):
        Sa2VAConfig(**config | {"llm_config": config["llm_config"] | change})


@pytest.mark.parametrize("llm", ["Phi3ForCausalLM", "LlamaForCausalLM"])
def test_other_llms_are_refused(folder, llm):
    config = json.loads((folder / "config.json").read_text())
    config["llm_config"]["architectures"] = [llm]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"{llm}; supported: Qwen2ForCausalLM, InternLM2"):
        Sa2VAModel.from_pretrained(folder)
