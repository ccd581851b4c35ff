"""InternLM2, InternViT-6B and InternVL3's long positions against numbers of the original code.

Floats are within 1e-4 of each tensor's largest value; ids and masks are equal.
"""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers.initialization import no_init_weights

from rl_train.engine import Engine
from sa2va_hf import Sa2VAConfig, Sa2VAModel, Sa2VAProcessor, checkpoint_keys
from sa2va_hf.processing_sa2va import upsample_masks
from sa2va_hf.prompts import PromptBuilder
from tests.internlm2 import write_internlm2
from tests.reference.backbones.subsample import unfold
from tests.runs import CHECKPOINT, ROOT
from tests.sa2va_hf.conftest import CharTokenizer, rule_weight

REFERENCE = ROOT / "tests" / "reference"
CONFIGS = json.loads((REFERENCE / "backbones" / "configs.json").read_text())
LAYOUTS = json.loads((REFERENCE / "backbones" / "layouts.json").read_text())


class InternLM2Tokenizer(CharTokenizer):
    """The recording's toy tokenizer: `<s>` stands in front of what is encoded."""

    special = CharTokenizer.special | {"<|im_start|>": 498, "<|im_end|>": 499, "<s>": 1, "</s>": 2}
    special = {text: i for text, i in special.items() if text != "<eos>"}
    pad_token_id, eos_token_id, bos_token_id, eos_token = 2, 2, 1, "</s>"

    def encode(self, text, add_special_tokens=True):
        return [1] * add_special_tokens + super().encode(text)

    def convert_tokens_to_ids(self, tokens):
        return [self.special[token] for token in tokens]


@pytest.fixture(scope="module")
def recorded():
    return load_file(REFERENCE / "backbones" / "internlm2.safetensors")


@pytest.fixture(scope="module")
def facts():
    return json.loads((REFERENCE / "backbones" / "internlm2.json").read_text())


@pytest.fixture(scope="module")
def internlm2(original):
    """The recording's model: a tiny InternLM2; its SAM2 is the other recording's."""
    with no_init_weights():
        model = Sa2VAModel(Sa2VAConfig(**CONFIGS["internlm2_tiny"]))
    model.grounding_encoder = original.grounding_encoder
    fill(model, "internlm2_tiny")
    model.bind_tokenizer(InternLM2Tokenizer())
    return model.requires_grad_(False)


@torch.no_grad()
def fill(model, name):
    """Give all but SAM2 the weights that follow from the keys of a layout."""
    layout = unfold(LAYOUTS[name], {})
    for native, tensor in model.state_dict().items():
        if not native.startswith("grounding_encoder."):
            read = lambda key: torch.from_numpy(rule_weight(key, layout[key]))  # noqa: E731
            tensor.copy_(checkpoint_keys.native_tensor(native, read, model.config.llm))


def assert_close(computed, expected, tolerance=1e-4):
    assert computed.shape == expected.shape
    deviation = (computed - expected).abs().max() / expected.abs().max()
    assert deviation < tolerance, deviation


@pytest.fixture(scope="module")
def image(recorded):
    return lambda x: Image.fromarray(recorded[f"image_{x}"].numpy())


@pytest.mark.parametrize("x", ["A", "B"])
def test_internlm2(internlm2, recorded, facts, image, x):
    """Prompt, features, logits, loss, [SEG] states and greedy tokens of one tile."""
    prompts = PromptBuilder(internlm2.tokenizer, internlm2.config.template, 256)
    ids = recorded[f"{x}_input_ids"]
    prompt = prompts.ids(facts["texts"][x], num_tiles=1)
    assert prompt + prompts.answer(facts["texts"]["answer"]) == ids[0].tolist()
    features = internlm2.extract_feature(
        Sa2VAProcessor(internlm2.config, max_tiles=1).tiles(image(x))
    )
    assert_close(features[0, ::4], recorded[f"{x}_feat_single"])
    out = internlm2(ids, torch.ones_like(ids), image_features=features)
    assert_close(out.logits[0, -32:], recorded[f"{x}_logits_last32"])
    seg = recorded[f"{x}_seg_positions"]
    assert (ids[0] == internlm2.seg_id).nonzero()[:, 0].equal(seg)
    assert_close(out.hidden_states[-1][0, seg], recorded[f"{x}_seg_hidden"])
    embeddings = internlm2.text_hidden_fcs(out.hidden_states[-1][0, seg])
    assert_close(embeddings, recorded[f"{x}_seg_emb"])
    start = len(prompt)
    loss = torch.nn.functional.cross_entropy(out.logits[0, start - 1 : -1], ids[0, start:])
    assert loss.item() == pytest.approx(facts[x]["loss"], abs=1e-4)
    prompt = ids[:, :start]
    embeds = internlm2.embed(prompt, features)
    assert greedy(internlm2, embeds, torch.ones_like(prompt)) == [facts[f"{x}_greedy"]["ids"]]


def greedy(model, embeds, mask):
    engine = Engine(model.language_model, pad_id=0)
    sampled = engine.generate(embeds, mask, num_generations=1, max_new_tokens=12, stop=None)
    return sampled.ids.tolist()


@pytest.mark.parametrize("name", ["e2e_A", "e2e_B_vp"])
def test_predict_forward(internlm2, recorded, facts, image, name, monkeypatch):
    """Image, text and regions give masks at the image's size, the recorded answer forced.

    SAM2 runs in one of the two: at its full size it costs more than all the rest.
    """
    seen, forced = {}, iter(facts[name]["generated"])
    x, regions = name[4], None
    if name == "e2e_B_vp":
        shape = facts["B_prompt_masks_shape"]
        bits = np.unpackbits(recorded["B_prompt_masks_packbits"].numpy())
        regions = [bits[: np.prod(shape)].reshape(shape)]

    def force(module, args, logits):
        token = torch.tensor(next(forced))
        return torch.nn.functional.one_hot(token, logits.shape[-1]).float().expand_as(logits)

    def embed(ids, *rest):
        seen["prompt"] = ids
        return type(internlm2).embed(internlm2, ids, *rest)

    def decode_masks(features, rows, prompts):
        seen["prompts"] = prompts
        seen["logits"] = type(internlm2).decode_masks(internlm2, features, rows, prompts)
        return seen["logits"]

    monkeypatch.setattr(internlm2, "embed", embed)
    monkeypatch.setattr(internlm2, "decode_masks", decode_masks)
    if name == "e2e_A":
        blank = [torch.zeros(1, 256, size, size) for size in (256, 128, 64)]
        monkeypatch.setattr(internlm2, "sam_features", lambda pixels: blank)
    hook = internlm2.language_model.lm_head.register_forward_hook(force)
    words = facts["texts"][x] if regions is None else "What is region1? And segment it."
    try:
        result = internlm2.predict_forward(
            image(x), text=f"<image>{words}", mask_prompts=regions, rounded_normalisation=True
        )
    finally:
        hook.remove()
    assert seen["prompt"].tolist() == recorded[f"{name}_input_ids"].tolist()
    assert result["prediction"] == facts[name]["prediction"]
    assert_close(seen["prompts"], recorded[f"{name}_seg_emb"])
    masks, size = result["prediction_masks"], image(x).size[::-1]
    assert [mask.shape for mask in masks] == [(1, *size)] * len(facts[name]["mask_sums"])
    if name == "e2e_B_vp":
        logits = upsample_masks(seen["logits"], 1024, size)[:1, ::3, ::3]
        assert_close(logits, recorded[f"{name}_logits_orig_0_stride3"])
        bits = recorded[f"{name}_mask_0_packbits"].numpy()
        assert np.array_equal(np.packbits(masks[0]), bits)


def test_left_padded_batch(internlm2, recorded, facts):
    ids, mask = (recorded[f"text_batch_{name}"] for name in ("input_ids", "attention_mask"))
    out = internlm2(ids, mask)
    assert_close(out.logits[:, -24:], recorded["text_batch_logits_last24"])
    assert greedy(internlm2, internlm2.embed(ids, None), mask) == facts["text_batch_greedy"]


def test_positions_beyond_the_limit(internlm2, recorded, facts):
    """They stretch as the original's; a short text later is computed as before, unlike there."""
    config = json.loads(json.dumps(CONFIGS["internlm2_tiny"]))
    config["llm_config"]["max_position_embeddings"] = facts["ntk"]["max_position_embeddings"]
    with torch.device("meta"):
        model = Sa2VAModel(Sa2VAConfig(**config))
    model.language_model = type(model.language_model)(model.config.llm)
    model.language_model.load_state_dict(internlm2.language_model.state_dict())
    model.language_model.requires_grad_(False).eval()
    ids = recorded["ntk_input_ids"]
    for length, name in ((50, "ntk_len50"), (100, "ntk_len100"), (50, "ntk_len50")):
        logits = model.language_model(input_ids=ids[:, :length]).logits
        assert_close(logits[0, -16:], recorded[f"{name}_logits_last16"])
    engine = Engine(model.language_model, pad_id=0)
    embeds = model.language_model.get_input_embeddings()(ids)
    with pytest.raises(ValueError, match="100 tokens .* max_position_embeddings of 64"):
        engine.last_hidden_states(embeds, torch.ones_like(ids))
    with pytest.raises(ValueError, match="80 tokens of prompt and answer"):
        engine.generate(
            embeds[:, :60],
            torch.ones_like(ids[:, :60]),
            num_generations=1,
            max_new_tokens=20,
            stop=None,
        )


def test_internvit_6b(recorded, image):
    """Query and key norms over the whole width, RMSNorm, no bias of q, k and v."""
    raw = json.loads((CHECKPOINT / "config.json").read_text())
    raw["vision_config"] = CONFIGS["internvit6b_tiny"]
    with no_init_weights():
        model = Sa2VAModel(Sa2VAConfig(**raw | dict(force_image_size=448)))
    layout = {**unfold(LAYOUTS["internvit6b_tiny"], {})}
    shapes = checkpoint_keys.original_shapes(model.state_dict(), model.config.llm)
    assert {k: v for k, v in shapes.items() if k.startswith("vision_model.")} == layout
    with torch.no_grad():
        for name, tensor in model.vision_model.state_dict(prefix="vision_model.").items():
            read = lambda key: torch.from_numpy(rule_weight(key, layout[key]))  # noqa: E731
            tensor.copy_(checkpoint_keys.native_tensor(name, read))
        tiles = Sa2VAProcessor(model.config, max_tiles=1).tiles(image("A"))
        hidden = model.vision_model(tiles).last_hidden_state
    assert_close(hidden[0, ::8], recorded["vit26_A_last_hidden_stride8"])


# InternVL3


@pytest.fixture(scope="module")
def internvl3(tmp_path_factory):
    """The demo's checkpoint with what config.json of an InternVL3 says otherwise."""
    folder = tmp_path_factory.mktemp("internvl3")
    for file in CHECKPOINT.iterdir():
        (folder / file.name).symlink_to(file)
    raw = json.loads((CHECKPOINT / "config.json").read_text()) | dict(template="qwen_chat")
    raw["llm_config"] |= dict(rope_scaling=dict(type="dynamic", factor=2.0))
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def test_internvl3_positions_beyond_the_limit(internvl3):
    """Dynamic NTK: theta (f L / limit - (f - 1)) ** (D / (D - 2)) for L > limit positions."""
    raw = json.loads((internvl3 / "config.json").read_text())
    raw["llm_config"]["max_position_embeddings"] = 32
    llm = raw["llm_config"] | dict(rope_scaling=None)
    size = llm["hidden_size"] // llm["num_attention_heads"]
    llm["rope_theta"] *= (2 * 48 / 32 - 1) ** (size / (size - 2))
    stretched, plain = (
        Sa2VAModel(Sa2VAConfig(**raw | dict(llm_config=config))).language_model
        for config in (raw["llm_config"], llm)
    )
    plain.load_state_dict(stretched.state_dict())
    ids = torch.randint(llm["vocab_size"], (1, 48), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert_close(stretched(input_ids=ids).logits, plain(input_ids=ids).logits, 1e-5)
        rotary = stretched.model.rotary_emb
        assert not torch.allclose(rotary.inv_freq, rotary.original_inv_freq)
        stretched(input_ids=ids[:, :30])
        assert torch.equal(rotary.inv_freq, rotary.original_inv_freq)


@pytest.mark.parametrize("end", ["<|im_end|>", "<|endoftext|>"])
def test_internvl3_answers_in_qwen_chat(internvl3, end, monkeypatch):
    model = Sa2VAModel.from_pretrained(internvl3)
    model.require_tokenizer()
    forced = iter(model.tokenizer.encode(f"It is [SEG].{end} and more"))
    seen = {}

    def force(module, args, logits):
        token = torch.tensor(next(forced))
        return torch.nn.functional.one_hot(token, logits.shape[-1]).float().expand_as(logits)

    def embed(ids, *rest):
        seen["prompt"] = model.tokenizer.decode(ids[0])
        return type(model).embed(model, ids, *rest)

    monkeypatch.setattr(model, "embed", embed)
    model.language_model.lm_head.register_forward_hook(force)
    region = torch.zeros(1, 96, 128)
    region[:, 20:80, 30:90] = 1
    answer = model.predict_forward(
        Image.new("RGB", (128, 96)), text="<image>Who is it?", mask_prompts=[region.numpy()]
    )
    start, finish = "<|im_start|>user\n<img>", "Who is it?<|im_end|>\n<|im_start|>assistant\n"
    assert seen["prompt"].startswith(start) and seen["prompt"].endswith(f"</vp>.\n{finish}")
    assert answer["prediction"] == f"It is [SEG].{end}"
    assert [mask.shape for mask in answer["prediction_masks"]] == [(1, 96, 128)]


def test_internvl3_is_written_as_it_was_read(internvl3, tmp_path):
    Sa2VAModel.from_pretrained(internvl3, dtype=torch.bfloat16).save_pretrained(tmp_path)
    before, after = (load_file(f / "model.safetensors") for f in (internvl3, tmp_path))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    raw = [json.loads((folder / "config.json").read_text()) for folder in (internvl3, tmp_path)]
    assert raw[0] == raw[1]


# Folders of InternLM2 that are wrong


@pytest.fixture(scope="module")
def tiny_internlm2(tmp_path_factory):
    return write_internlm2(tmp_path_factory.mktemp("internlm2"))


@pytest.fixture
def folder(tiny_internlm2, tmp_path):
    shutil.copytree(tiny_internlm2, tmp_path / "model")
    return tmp_path / "model"


def change(folder, change_tensors=None, **llm):
    """Write the folder's weights or llm_config anew."""
    if change_tensors:
        tensors = load_file(folder / "model.safetensors")
        change_tensors(tensors)
        save_file(tensors, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    raw["llm_config"] |= llm
    (folder / "config.json").write_text(json.dumps(raw))


WQKV = "language_model.model.layers.1.attention.wqkv.weight"
EMBED, HEAD = "language_model.model.tok_embeddings.weight", "language_model.output.weight"


@pytest.mark.parametrize(
    "tensors, llm, message",
    [
        (lambda t: t.pop(WQKV), {}, r"1 keys missing \['.*layers.1.attention.wqkv.weight'\], 0 un"),
        (
            lambda t: t.update({EMBED.replace("tok_", "embed_"): t[EMBED].clone()}),
            {},
            "0 keys missing .*1 unexpected",
        ),
        (
            lambda t: t.update({WQKV: t[WQKV][:-2].clone()}),
            {},
            r"wqkv.weight has shape \(254, 128\), config.json asks for \(256, 128\)",
        ),
        (None, dict(bias=True), r"8 keys missing \['.*attention.wo.bias', "),
        (None, dict(num_key_value_heads=3), "num_attention_heads 4 is not a multiple of num_key"),
        (None, dict(rope_scaling=dict(type="linear", factor=2.0)), "rope_scaling .* not supported"),
    ],
)
def test_wrong_folders(folder, tensors, llm, message):
    change(folder, tensors, **llm)
    with pytest.raises(ValueError, match=message):
        Sa2VAModel.from_pretrained(folder)


def test_a_tokenizer_beyond_the_embedding(folder):
    cut = lambda t: t.update({key: t[key][:525].clone() for key in (EMBED, HEAD)})  # noqa: E731
    change(folder, cut, vocab_size=525)
    model = Sa2VAModel.from_pretrained(folder)
    with pytest.raises(ValueError, match="has ids beyond the model's vocabulary of 525"):
        model.require_tokenizer()


@pytest.mark.parametrize("absent", [EMBED, HEAD])
def test_tied_embeddings_come_back(folder, tmp_path, absent):
    change(folder, lambda t: t.pop(absent), tie_word_embeddings=True)
    model = Sa2VAModel.from_pretrained(folder)
    assert model.language_model.lm_head.weight is model.get_input_embeddings().weight
    model.save_pretrained(tmp_path / "again", dtype=torch.bfloat16)
    before, after = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
