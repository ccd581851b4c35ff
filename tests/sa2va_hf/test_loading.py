"""The original's lines that load and ask a model mean here what they mean there."""

import copy
import json
import shutil

import pytest
import torch
from transformers import GenerationConfig

from sa2va_hf import Sa2VAConfig, Sa2VAModel, loading
from sa2va_hf.processing_sa2va import normalise_tiles
from tests.runs import CHECKPOINT

ITS_LINE = dict(low_cpu_mem_usage=True, use_flash_attn=True, trust_remote_code=True)


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(CHECKPOINT, tmp_path / "model")


def set_field(folder, **fields):
    file = folder / "config.json"
    config = {k: v for k, v in json.loads(file.read_text()).items() if k != "torch_dtype"}
    file.write_text(json.dumps(config | fields))


def test_the_scripts_line(folder, caplog):
    model = Sa2VAModel.from_pretrained(folder, torch_dtype=torch.bfloat16, **ITS_LINE).eval()
    assert model.dtype == torch.bfloat16 and model.device == torch.device("cpu")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert [record.message for record in caplog.records] == [
        "from_pretrained ignores low_cpu_mem_usage, trust_remote_code, use_flash_attn"
    ]
    embedding = model.language_model.model.embed_tokens
    assert model.get_input_embeddings() is embedding and embedding.num_embeddings == 471


@pytest.mark.parametrize(
    "given, expected",
    [
        (dict(), torch.float32),
        (dict(dtype="bfloat16"), torch.bfloat16),
        (dict(torch_dtype="torch.float16"), torch.float16),
        (dict(dtype="auto"), torch.bfloat16),
        (dict(torch_dtype="auto", dtype="auto", load_in_8bit=False), torch.bfloat16),
        (dict(device_map="cpu"), torch.float32),
        (dict(device_map={"": "cpu"}), torch.float32),
        (dict(device_map=torch.device("cpu"), weights_only=True), torch.float32),
        (dict(device_map={"vision_model": "cpu", "language_model": "cpu"}), torch.float32),
    ],
    ids=str,
)
def test_dtype_and_device(given, expected):
    model = Sa2VAModel.from_pretrained(CHECKPOINT, **given)
    assert (model.dtype, model.device.type) == (expected, "cpu")


@pytest.mark.parametrize(
    "fields, expected",
    [
        (dict(torch_dtype="float16"), torch.float16),
        (dict(dtype="float32", torch_dtype="float16"), torch.float32),  # transformers 5's key
        (dict(), torch.bfloat16),  # of the files
    ],
    ids=str,
)
def test_auto_is_what_the_folder_says(folder, fields, expected):
    set_field(folder, **fields)
    model = Sa2VAModel.from_pretrained(folder, dtype="auto")
    assert model.dtype == expected
    model.save_pretrained(folder, dtype=torch.float32)
    kept = json.loads((folder / "config.json").read_text())
    assert {kept[key] for key in fields} <= {"float32"} and "float32" in str(
        Sa2VAModel.from_pretrained(folder, dtype="auto").dtype
    )


@pytest.mark.parametrize(
    "given, named",
    [
        (dict(load_in_8bit=True), "load_in_8bit; weights are float32, bfloat16 or float16"),
        (dict(load_in_4bit=True, low_cpu_mem_usage=True), "not support load_in_4bit; weights"),
        (dict(subfolder="x"), "does not support subfolder$"),
        (dict(device_map={"": "disk"}), "device_map must name one device"),
        (dict(device_map={"": "cpu", "mlp1": "disk"}), "must name one device"),
        (dict(quantization_config={"bits": 4}, revision="main"), "quantization_config, revision"),
        (dict(device_map={"vision_model": 0, "language_model": 1}), "device_map"),
        (dict(dtype="float31"), "float31"),
        (dict(dtype=torch.float32, torch_dtype=torch.bfloat16), "torch_dtype"),
    ],
    ids=str,
)
def test_what_would_mean_another_model_is_refused_by_name(given, named):
    with pytest.raises(ValueError, match=named):
        Sa2VAModel.from_pretrained(CHECKPOINT, **given)


@pytest.mark.parametrize("count, accepted", [(0, True), (2, False)])
def test_auto_device_map_is_for_one_device(monkeypatch, count, accepted):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if accepted:
        assert Sa2VAModel.from_pretrained(CHECKPOINT, device_map="auto").device.type == "cpu"
    else:
        with pytest.raises(ValueError, match="device_map must name one device"):
            Sa2VAModel.from_pretrained(CHECKPOINT, device_map="auto")


@pytest.mark.parametrize("place", ["cuda:1", 1, {"": 1}, {"": "cuda:1", "mlp1": 1}], ids=str)
def test_a_device_is_named_as_transformers_has_it(monkeypatch, place):
    """A GPU by its number too. One that is not there is told before anything is read."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    arguments = (CHECKPOINT, None, None, None, place, {})
    assert loading.resolve(*arguments) == (torch.float32, torch.device("cuda:1"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="no cuda:1 here, of 1 GPUs"):
        Sa2VAModel.from_pretrained("/nowhere", device_map=place)


# The config


def test_a_template_is_found_by_its_other_spelling(folder):
    set_field(folder, template="phi3-chat")
    config = Sa2VAConfig.from_pretrained(folder)
    assert (config.template, config.raw["template"]) == ("phi3_chat", "phi3-chat")


def without(config, *path):
    config = copy.deepcopy(config)
    inner = config
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return config


@pytest.mark.parametrize(
    "path, message",
    [
        (("vision_config", "architectures"), "vision_config.architectures is missing"),
        (("template",), "template"),
        (("ps_version",), "ps_version is 'v1'"),
    ],
    ids=str,
)
def test_a_missing_key_means_what_it_means_to_the_original(path, message):
    config = json.loads((CHECKPOINT / "config.json").read_text())
    assert Sa2VAConfig(**config).vision.attention_bias is True
    with pytest.raises(ValueError, match=message):
        Sa2VAConfig(**without(config, *path))


def test_defaults_of_the_original():
    config = json.loads((CHECKPOINT / "config.json").read_text())
    assert not Sa2VAConfig(**without(config, "vision_config", "qkv_bias")).vision.attention_bias
    assert Sa2VAConfig(**without(config, "vision_config", "qk_normalization")).vision.use_qk_norm
    vision = Sa2VAConfig(**without(config, "vision_config", "norm_type")).vision
    assert vision.norm_type == "rms_norm"
    config["vision_config"]["image_size"] = 336
    assert Sa2VAConfig(**without(config, "force_image_size")).image_size == 336
    norms = dict(qk_normalization=True, layer_norm_eps=1e-5)
    with pytest.raises(ValueError, match="layer_norm_eps is 1e-05; with qk_normalization only"):
        Sa2VAConfig(**config | dict(vision_config=config["vision_config"] | norms))
    config["vision_config"]["norm_type"] = "batch_norm"
    with pytest.raises(ValueError, match="vision_config.norm_type is 'batch_norm'; supported"):
        Sa2VAConfig(**config)


# generate


@pytest.fixture(scope="module")
def model():
    model = Sa2VAModel.from_pretrained(CHECKPOINT)
    model.require_tokenizer()
    return model


def test_generate_continues_prompts_with_images(model, batch, policy):
    """`predict_forward` of the original calls it, for one prompt with a region, and several."""
    built = policy()
    images = built.encode(batch)
    tiles, grids = normalise_tiles(batch.inputs.tiles[0]), list(batch.inputs.prompt_masks[:2])
    prompts = built.describe_prompts(images, [0, 1], [grid[None] for grid in grids])
    _, texts = built.complete(images, prompts, 1, 6)
    config = GenerationConfig(max_new_tokens=6, do_sample=False, pad_token_id=0)
    for row, grid in enumerate(grids):
        ids = torch.tensor(prompts.ids[row])[None]
        given = dict(input_ids=ids, attention_mask=torch.ones_like(ids, dtype=torch.bool))
        given |= dict(prompt_masks=[grid[None].float()], vp_overall_mask=torch.tensor([1.0]))
        given |= dict(generation_config=config, position_ids=None, labels=None, return_dict=None)
        tile = normalise_tiles(batch.inputs.tiles[row])
        answer = model.generate(pixel_values=tile, **given)
        assert built.prompts.completion_text(answer[0].tolist()) == texts[row]
        features = model.extract_feature(tile)
        for same in (
            dict(pixel_values=[tile[0]]),
            dict(pixel_values=tile[None]),
            dict(pixel_values=tile, visual_features=features),
        ):
            assert torch.equal(model.generate(**same, **given), answer)
        padded = torch.cat([tile, torch.zeros_like(tile)])  # a tile of zeros is no image
        flags = given | dict(vp_overall_mask=torch.tensor([1.0, 0.0]))
        assert torch.equal(model.generate(pixel_values=padded, **flags), answer)
    with pytest.raises(ValueError, match="prompts hold"):
        model.generate(pixel_values=tiles.repeat(3, 1, 1, 1), input_ids=ids)


def test_generate_of_text_alone(model):
    ids = torch.tensor([model.tokenizer.encode("<|user|>\nWho?<|end|>\n<|assistant|>\n")])
    found = model.generate(
        input_ids=ids,
        max_new_tokens=3,
        do_sample=False,
        output_hidden_states=True,
        return_dict_in_generate=True,
    )
    alone = model.language_model.generate(
        inputs_embeds=model.get_input_embeddings()(ids),
        attention_mask=torch.ones_like(ids),
        max_new_tokens=3,
        do_sample=False,
    )
    assert torch.equal(found.sequences, alone)
    assert len(found.hidden_states) == 3 and found.hidden_states[1][-1].shape[:2] == (1, 1)
