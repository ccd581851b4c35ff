"""Sa2VA of Qwen2.5-VL and Qwen3-VL against numbers recorded from the original code.

Floats are within 1e-4 of each tensor's largest value; integers, ids and masks are equal.
"""

import functools
import json
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from transformers.initialization import no_init_weights

from rl_train.engine import Engine
from sa2va_hf import Sa2VAConfig, Sa2VAModel, Sa2VAProcessor, checkpoint_keys
from sa2va_hf.processing_sa2va import normalise_sam_pixels, upsample_masks
from tests.reference.subsample_qwen import FAMILIES, LARGE, SIZES, expand, levels, rows
from tests.sa2va_hf.conftest import REFERENCE, Recording, fill_by_rule
from tests.sa2va_hf.qwen_training import training_example

SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"


def read(name):
    return json.loads((REFERENCE / name).read_text())


class ByteTokenizer:
    """The recording's toy tokenizer: byte b has id b, special tokens follow; and its template."""

    bos_token_id, name_or_path, chat_template = None, "toy", "as below"

    def __init__(self, ids: dict[str, int], system: str):
        self.ids, self.system = ids, system
        self.pad_token_id, self.eos_token_id = ids["<|endoftext|>"], ids["<|im_end|>"]

    def encode(self, text, add_special_tokens=True):
        pieces = re.split(f"({'|'.join(map(re.escape, self.ids))})", text)
        return [
            i for p in pieces for i in ([self.ids[p]] if p in self.ids else list(p.encode("utf-8")))
        ]

    def decode(self, ids, skip_special_tokens=False):
        names = {i: name for name, i in self.ids.items()}
        return b"".join(names[i].encode() if i in names else bytes([i]) for i in ids).decode()

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        ((role, content),) = [(m["role"], m["content"]) for m in messages]
        image = "<|vision_start|><|image_pad|><|vision_end|>"
        text = "".join(image if c["type"] == "image" else c["text"] for c in content)
        return f"{self.system}<|im_start|>{role}\n{text}<|im_end|>\n<|im_start|>assistant\n"


class Setting:
    """A family's recording with the model that it is of, its tokenizer and its images."""

    def __init__(self, family, sam2):
        self.family = family
        self.recorded = Recording(f"{family}.safetensors", f"{family}_facts.json", LARGE)
        self.config = Sa2VAConfig(**read(f"{family}_configs.json")["tiny"])
        with no_init_weights():
            self.model = Sa2VAModel(self.config)
        # The same weights under the same names: SAM2 is as large in all recordings.
        self.model.grounding_encoder = sam2
        layout = expand(read(f"{family}_layouts.json")["tiny"], read("tiny_layout.json"))
        state = self.model.state_dict()
        fill_by_rule({k: v for k, v in state.items() if "grounding_encoder" not in k}, layout)
        self.model.requires_grad_(False)
        system = SYSTEM if family == "qwen25vl" else ""
        self.tokenizer = ByteTokenizer(self.recorded.facts["token_ids"], system)
        self.model.bind_tokenizer(self.tokenizer)

    @functools.cache
    def features(self, x):
        grid = self.recorded[f"{x}_image_grid_thw"].long()
        return self.model.extract_feature(
            rows(self.recorded[f"{x}_pixel_values"], self.family), grid
        ), grid

    def inputs(self, name):
        """ids, features and grids of a recorded sequence."""
        ids = self.recorded[f"{name}_input_ids"].long()
        if name == "text":
            return ids, None, None
        features, grids = zip(*[self.features(x) for x in name])
        return ids, torch.cat(features), torch.cat(grids)


@pytest.fixture(scope="module", params=FAMILIES)
def setting(request, original):
    return Setting(request.param, original.grounding_encoder)


@pytest.fixture(scope="module")
def images():
    numbers = Recording("qwen25vl.safetensors", "qwen25vl_facts.json", LARGE).numbers
    return {x: Image.fromarray(numbers[f"image_{x}"].numpy()) for x in "AB"}


@pytest.fixture(scope="module")
def sam_pyramid(original, images):
    """SAM2's features of image A by the original's inference: a pass costs as much as all else."""
    pixels = Sa2VAProcessor(original.config).sam_image(images["A"])
    return original.sam_features(normalise_sam_pixels(pixels, rounded=True)[None])


def test_weights_are_the_recorded_ones(setting):
    state = checkpoint_keys.to_original(setting.model.state_dict())
    for key, check in setting.recorded.facts["weight_checks"].items():
        assert torch.allclose(state[key].flatten()[:4], torch.tensor(check["first4"])), key
        total = state[key].double().sum().item()
        assert abs(total - check["sum"]) < 1e-4 * max(1, abs(check["sum"])), key


@pytest.mark.parametrize("family, size", [(f, s) for f in FAMILIES for s in ("tiny", *SIZES[f])])
def test_layouts_are_the_original(family, size):
    """Loaded strictly and written back key by key, also in the published sizes."""
    raw = read(f"{family}_configs.json")[size]
    with torch.device("meta"):
        model = Sa2VAModel(Sa2VAConfig(**raw))
    layout = expand(read(f"{family}_layouts.json")[size], read("sa2va_4b_layout.json"))
    state = model.state_dict()
    assert checkpoint_keys.original_shapes(state) == layout
    written = checkpoint_keys.to_original(state)
    assert {key: tuple(tensor.shape) for key, tensor in written.items()} == layout
    assert model.config.raw == raw
    assert len(layout) == {"3b": 1729, "7b": 1633, "2b": 1530, "4b": 1618}.get(size, len(layout))


# Vision and language


@pytest.mark.parametrize("x", ["A", "B"])
def test_image_features(setting, x):
    width = setting.config.llm.hidden_size
    embeds, *deepstack = setting.features(x)[0].split(width, dim=1)
    setting.recorded.close(f"{x}_image_embeds", embeds)
    assert len(deepstack) == {"qwen25vl": 0, "qwen3vl": 3}[setting.family]
    if deepstack:
        setting.recorded.close(f"{x}_deepstack", torch.stack(deepstack))


@pytest.mark.parametrize("name", ["A", "B", "AB", "text"])
def test_positions_logits_and_seg_states(setting, name):
    model, recorded = setting.model, setting.recorded
    ids, features, grids = setting.inputs(name)
    positions = model.positions(ids, torch.ones_like(ids), grids)
    recorded.equal(f"{name}_position_ids", positions)
    out = model(ids, torch.ones_like(ids), image_grid_thw=grids, image_features=features)
    recorded.close(f"{name}_logits_last32", out.logits[0, -32:])
    seg = out.hidden_states[-1][ids == model.seg_id]
    recorded.close(f"{name}_seg_hidden", seg)
    recorded.close(f"{name}_seg_emb", model.text_hidden_fcs(seg))


def test_left_padded_batch_and_greedy_tokens(setting):
    model, recorded = setting.model, setting.recorded
    ids, mask = recorded["batch_input_ids"].long(), recorded["batch_attention_mask"].long()
    features, grids = zip(*[setting.features(x) for x in "AB"])
    features, grids = torch.cat(features), torch.cat(grids)
    positions = model.positions(ids, mask, grids)
    attended = mask.bool().expand(3, -1, -1)
    assert torch.equal(positions[attended], recorded["batch_position_ids"].long()[attended])
    out = model(ids, mask, image_grid_thw=grids, image_features=features)
    recorded.close("batch_logits_last32", out.logits[:, -32:])
    # The sampler of the trainer, greedy: its logits too are behind the final norm.
    ids = recorded["batch_gen_input_ids"].long()
    mask = (ids != model.tokenizer.pad_token_id).long()
    language_model = model.language_model
    engine = Engine(language_model, pad_id=0, head_norm=language_model.head_norm)
    completions = engine.generate(
        model.embed(ids, features),
        mask,
        num_generations=1,
        max_new_tokens=12,
        stop=None,
        position_ids=model.positions(ids, mask, grids),
    )
    recorded.equal("batch_greedy_ids", completions.ids)
    assert completions.ids[:1].tolist() == recorded["A_greedy_ids"].tolist()


# Images


def test_sizes(setting):
    once = Sa2VAProcessor(setting.config)
    frame = Sa2VAProcessor(setting.config, limits=(128 * 28**2, 512 * 28**2))
    for row in setting.recorded.facts["grids"]:
        image = Image.new("RGB", row["size_wh"])
        assert list(once.grid(once.pixels(image, twice=True))) == row["grid_inference"]
        assert list(once.grid(once.pixels(image))) == row["grid_training_single"]
        assert list(frame.grid(frame.pixels(image))) == row["grid_training_video"]


@pytest.mark.parametrize("x", ["A", "B"])
def test_pixels_are_the_slow_processors(setting, images, x):
    recorded, processor = setting.recorded, Sa2VAProcessor(setting.config)
    frame = Sa2VAProcessor(setting.config, limits=(128 * 28**2, 512 * 28**2))
    for name, pixels in {
        f"slow_e2e_{x}_pixel_values": processor.pixel_values([images[x]], twice=True)[0],
        f"slow_pix{x}_training": processor.pixel_values([images[x]])[0],
        f"slow_pix{x}_training_video": frame.pixel_values([images[x]])[0],
    }.items():
        recorded.equal(f"{name}_rows_stride97", levels(pixels[::97], setting.family))


# SAM2


def test_masks(setting, sam_pyramid):
    prompts, first = setting.recorded["A_seg_emb"][:1], torch.zeros(1, dtype=torch.long)
    setting.recorded.close("sam_A_low", setting.model.decode_masks(sam_pyramid, first, prompts)[0])


# The whole way


@pytest.fixture
def predict(setting, sam_pyramid, monkeypatch):
    """Function: `predict_forward` with an answer forced; returns its result and what it saw.

    SAM2 sees image A.
    """
    model, seen = setting.model, {}

    def run(answer, **request):
        forced = iter(setting.tokenizer.encode(answer))

        def force(module, args, logits):
            one_hot = F.one_hot(torch.tensor(next(forced)), setting.config.llm.vocab_size)
            return one_hot.float().expand_as(logits)

        def ids_of(module, args, arguments):
            seen.setdefault("ids", arguments["input_ids"])

        decode = type(model).decode_masks

        def decode_masks(features, index, prompts):
            seen["prompts"], seen["logits"] = prompts, decode(model, features, index, prompts)
            return seen["logits"]

        monkeypatch.setattr(model, "decode_masks", decode_masks)
        monkeypatch.setattr(model, "sam_features", lambda pixels: sam_pyramid)
        hooks = [
            model.model.lm_head.register_forward_hook(force),
            model.model.register_forward_pre_hook(ids_of, with_kwargs=True),
            model.text_hidden_fcs.register_forward_hook(
                lambda module, args, out: seen.update(emb=out)
            ),
        ]
        result = model.predict_forward(
            tokenizer=setting.tokenizer, rounded_normalisation=True, **request
        )
        for hook in hooks:
            hook.remove()
        return result, seen

    return run


@pytest.mark.parametrize("x", ["A", "B"])
def test_predict_forward(setting, images, predict, x):
    recorded = setting.recorded
    text = "<image>" + recorded.facts["texts"][x]
    answer = recorded.facts["texts"]["answer"] + "<|im_end|>"
    result, seen = predict(answer, image=images[x], text=text)
    facts = recorded.facts[f"slow_e2e_{x}"]
    assert result["prediction"] == facts["prediction"] and len(result["prediction_masks"]) == 2
    recorded.equal(f"slow_e2e_{x}_input_ids", seen["ids"])
    recorded.close(f"slow_e2e_{x}_seg_emb", seen["emb"])
    if x == "B":
        return
    size = images[x].size[::-1]
    original_size = upsample_masks(seen["logits"][:1], 1024, size)[:, ::3, ::3]
    recorded.close(f"slow_e2e_{x}_logits_orig_0_stride3", original_size)
    for k, mask in enumerate(result["prediction_masks"]):
        bits = torch.from_numpy(np.packbits(mask.flatten()))
        assert [int(frame.sum()) for frame in mask] == facts["mask_sums"][k]
        assert torch.equal(recorded[f"slow_e2e_{x}_mask_{k}_packbits"], bits)


def test_predict_forward_of_text_and_of_a_video(setting, images, predict):
    """The video was recorded with the other image processor, whose pixels differ a little.

    SAM2 sees its first frame twice here.
    """
    recorded = setting.recorded
    result, seen = predict("I am a toy.<|im_end|>", text="Hello, who are you?")
    assert result == dict(prediction="I am a toy.<|im_end|>", prediction_masks=[])
    recorded.equal("e2e_text_input_ids", seen.pop("ids"))
    frames = [images["A"], ImageOps.mirror(images["A"])]
    text = "<image>" + recorded.facts["texts"]["A"]
    result, seen = predict("Sure, [SEG].<|im_end|>", video=frames, text=text)
    recorded.equal("e2e_video2_input_ids", seen["ids"])
    recorded.close("e2e_video2_seg_emb", seen["emb"], tolerance=1e-3)
    (mask,) = result["prediction_masks"]
    bits = np.unpackbits(recorded["e2e_video2_mask_0_packbits"].numpy()).reshape(mask.shape)
    assert (mask[0] != bits[0]).mean() < 1e-3 and np.array_equal(mask[0], mask[1])
    # A [SEG] that is the last token of the longest answer has no state.
    setting.model.max_new_tokens = 1
    result, _ = predict("[SEG]", text="Hello, who are you?")
    setting.model.max_new_tokens = 2048
    assert result == dict(prediction="[SEG]", prediction_masks=[])


def test_mask_prompts_are_ignored_and_said(images, predict, caplog):
    masks = [np.ones((1, 150, 200), bool)]
    result, _ = predict(
        "I am a toy.<|im_end|>", image=images["A"], text="<image>What?", mask_prompts=masks
    )
    assert result["prediction"] == "I am a toy.<|im_end|>"
    assert "mask_prompts are ignored" in caplog.text


# Supervised training


@pytest.mark.parametrize("name", ["train_A", "train_video"])
def test_training_encoding(setting, images, name):
    model, recorded = setting.model, setting.recorded
    frames, turns = {
        "train_A": (
            [images["A"]],
            [
                ("Please segment the red box in this image.", "Sure, it is [SEG]."),
                ("Please segment sky in this image.", "[SEG]."),
            ],
        ),
        "train_video": (
            [images["A"], ImageOps.mirror(images["A"])],
            [("Please segment the red box in this image.", "Sure, [SEG].")],
        ),
    }[name]
    processor = Sa2VAProcessor(setting.config)
    sample = training_example(processor, frames, turns, setting.tokenizer)
    recorded.equal(f"{name}_input_ids", sample["input_ids"])
    recorded.equal(f"{name}_labels", sample["labels"])
    recorded.equal(f"{name}_image_grid_thw", sample["image_grid_thw"])
    ids, labels = sample["input_ids"], sample["labels"]
    out = model(
        ids, torch.ones_like(ids), sample["pixel_values"], image_grid_thw=sample["image_grid_thw"]
    )
    # Recorded with the other image processor, whose pixels differ a little.
    loss = F.cross_entropy(out.logits[0, :-1], labels[0, 1:])
    assert abs(loss.item() - recorded.facts[name]["loss"]) < 1e-3
    seg = out.hidden_states[-1][ids == model.seg_id]
    recorded.close(f"{name}_seg_hidden", seg, tolerance=1e-3)
    recorded.close(f"{name}_logits_last32", out.logits[0, -32:], tolerance=1e-3)
