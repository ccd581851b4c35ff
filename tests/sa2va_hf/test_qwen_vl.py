"""Folders of Sa2VA of Qwen-VL: loading, writing and bad input."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from sa2va_hf import Sa2VAConfig, Sa2VAModel, Sa2VAProcessor
from sa2va_hf.families import FAMILIES
from sa2va_hf.qwen_images import inference_size
from sa2va_hf.qwen_vl import num_deepstack
from tests.sa2va_hf.tiny_qwen import IDS, TEXT, config, write_folder

NAMES = {"qwen25vl": "Qwen2.5-VL", "qwen3vl": "Qwen3-VL"}
IMAGE = Image.fromarray(np.arange(60 * 80 * 3, dtype=np.uint8).reshape(60, 80, 3))


@pytest.fixture(scope="module", params=NAMES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp(family) / "model", family)


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "model")


def change(folder, file="config.json", **changes):
    """Change keys of a JSON file; None removes one."""
    fields = json.loads((folder / file).read_text()) | changes
    fields = {key: value for key, value in fields.items() if value is not None}
    (folder / file).write_text(json.dumps(fields))


def test_a_folder_is_read_used_and_written_back(family, folder, tmp_path):
    model = Sa2VAModel.from_pretrained(folder)
    (entry,) = [entry for entry in FAMILIES if entry.name == NAMES[family]]
    assert type(model) is entry.model and type(model.config) is entry.config
    model.require_tokenizer()
    assert (model.img_context_id, model.seg_id) == (IDS["<|image_pad|>"], IDS["[SEG]"])
    model.max_new_tokens = 6
    result = model.predict_forward(image=IMAGE, text="<image>Please segment it.")
    assert set(result) == {"prediction", "prediction_masks"}
    model.model.lm_head.weight.data[IDS["[SEG]"]] *= 100
    video = model.predict_forward(video=[IMAGE] * 7, text="<image>Please segment it.")
    assert {mask.shape for mask in video["prediction_masks"]} <= {(7, 60, 80)}
    model = Sa2VAModel.from_pretrained(folder)
    model.save_pretrained(tmp_path / "again")
    files = [load_file(path / "model.safetensors") for path in (folder, tmp_path / "again")]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(files[0][key], files[1][key]) for key in files[0])
    configs = [json.loads((p / "config.json").read_text()) for p in (folder, tmp_path / "again")]
    assert configs[0] == configs[1] and configs[0]["model_type"] == "sa2va_chat"
    for key in ("model.lm_head.weight", "model.model.language_model.embed_tokens.weight"):
        assert key in files[0]
    assert "grounding_encoder.sam2_model.no_mem_embed" in files[0]


def test_state_at_seg_follows_the_version_unless_said(family, copy):
    def states(**arguments):
        model = Sa2VAModel.from_pretrained(copy, **arguments)
        ids = torch.tensor([[1, 2, IDS["[SEG]"]]])
        out = model(ids, torch.ones_like(ids))
        return model.config.seg_state, out.hidden_states[-1], out.logits

    default, hidden, logits = states()
    assert default == {"qwen25vl": "after_norm", "qwen3vl": "before_norm"}[family]
    other = {"after_norm": "before_norm", "before_norm": "after_norm"}[default]
    said, changed, same = states(seg_state=other)
    assert said == other and torch.equal(logits, same)
    assert (hidden - changed).abs().max() > 0.1
    change(copy, transformers_version="5.23.0")
    assert states()[0] == "after_norm"


def test_a_file_without_version(family, copy):
    change(copy, transformers_version=None)
    if family == "qwen25vl":
        assert Sa2VAConfig.from_pretrained(copy).seg_state == "after_norm"
        return
    with pytest.raises(
        ValueError, match="transformers_version is missing, by which .* add seg_state to it"
    ):
        Sa2VAModel.from_pretrained(copy)
    assert Sa2VAModel.from_pretrained(copy, seg_state="before_norm").folder == copy


@pytest.mark.parametrize(
    "file, changes, words",
    [
        ("config.json", dict(seg_state="middle"), "seg_state 'middle' is none of before_norm,"),
        ("config.json", dict(image_token_id=None), "config.json: image_token_id is missing"),
        (
            "config.json",
            dict(text_config=TEXT | dict(use_sliding_window=True)),
            "text_config.use_sliding_window is not supported",
        ),
        (
            "config.json",
            dict(text_config=TEXT | dict(rope_theta=1e4)),
            "config.json: text_config.rope_scaling",
        ),
        ("preprocessor_config.json", dict(patch_size=8), "patch_size is 8, config.json says 1"),
    ],
)
def test_wrong_settings(copy, file, changes, words):
    change(copy, file, **changes)
    with pytest.raises(ValueError, match=re.escape(words)):
        Sa2VAProcessor(Sa2VAModel.from_pretrained(copy).config)


def test_weights_are_loaded_strictly(copy):
    file = copy / "model.safetensors"
    state = load_file(file)
    norm = "model.model.language_model.norm.weight"
    for changed, words in [
        ({key: value for key, value in state.items() if key != norm}, f"1 keys missing ['{norm}']"),
        (state | {"mlp1.0.weight": torch.ones(2)}, "1 unexpected ['mlp1.0.weight']"),
        (state | {norm: torch.ones(3)}, "has shape (3,), config.json asks for (64,)"),
    ]:
        save_file(changed, file)
        with pytest.raises(ValueError, match=re.escape(words)):
            Sa2VAModel.from_pretrained(copy)


def test_tokenizer_of_another_model(copy):
    change(copy, image_token_id=IDS["<|video_pad|>"])
    model = Sa2VAModel.from_pretrained(copy)
    with pytest.raises(ValueError, match="it is the tokenizer of another model"):
        model.require_tokenizer()


def test_number_of_image_tokens(folder):
    model = Sa2VAModel.from_pretrained(folder)
    features = torch.zeros(2, model.config.llm.hidden_size * (1 + num_deepstack(model.model)))
    with pytest.raises(ValueError, match="hold 1 <.image_pad.> tokens, the images give 2 features"):
        model.embed(torch.tensor([[IDS["<|image_pad|>"]]]), features)


@pytest.mark.parametrize(
    "size, resized",
    [((480, 640), (476, 644)), ((10, 1500), (28, 1512)), ((28, 28), (56, 56))],
)
def test_inference_size(size, resized):
    assert inference_size(*size) == resized


def test_past_text_needs_a_text_alone(folder):
    model = Sa2VAModel.from_pretrained(folder)
    model.require_tokenizer()
    with pytest.raises(ValueError, match="past_text of Sa2VA of Qwen-VL needs a text without"):
        model.predict_forward(image=IMAGE, text="<image>What?", past_text="Before.")


def test_the_configuration_is_not_written_to(family):
    raw = config(family)
    before = json.dumps(raw)
    assert Sa2VAConfig(**raw).raw == json.loads(before) and json.dumps(raw) == before
