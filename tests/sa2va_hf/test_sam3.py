"""SAM3's tracker in the place of SAM2: its keys, its numbers by the original code, and its gate.

Floats are within 1e-4 of each tensor's largest value.
"""

import functools
import json
import math
import os
import re

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import Sam3TrackerVideoConfig
from transformers.initialization import no_init_weights

from sa2va_hf import Sa2VAConfig, Sa2VAModel, Sa2VAProcessor, checkpoint_keys
from sa2va_hf.families import describe
from sa2va_hf.mask_decoder import decode_candidates, decoder_features
from sa2va_hf.processing_sa2va import normalise_sam_pixels, planes
from sa2va_hf.sam3 import ABSENT, build_sam, gate, image_features
from sa2va_hf.video import track
from tests.reference.subsample_qwen import expand
from tests.runs import ROOT
from tests.sa2va_hf.conftest import rule_weight
from tests.sa2va_hf.tiny_qwen import IDS, config, write_sam3_folder

FOLDER = ROOT / "tests" / "reference" / "backbones"
SAM = "grounding_encoder."
IMAGE = Image.new("RGB", (80, 60), (200, 30, 90))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_sam3_folder(tmp_path_factory.mktemp("sam3") / "model")


@pytest.fixture
def model(folder):
    model = Sa2VAModel.from_pretrained(folder)
    model.require_tokenizer()
    return model.requires_grad_(False)


@functools.cache
def layout() -> dict[str, tuple[int, ...]]:
    """Return {original key: shape} of the published SAM3; * stands for the number of a layer."""
    found = {}
    for pattern, (numbers, shape) in json.loads((FOLDER / "sam3_layout.json").read_text()).items():
        for number in range(numbers):
            found[pattern.replace("*", str(number), 1)] = tuple(shape)
    return found


def test_keys_of_the_published_size_both_ways():
    """Sa2VA-Qwen3-VL-4B-SAM3 is the 4B with SAM3's keys in the place of SAM2's."""
    raw = json.loads((FOLDER.parent / "qwen3vl_configs.json").read_text())["4b"]
    patterns = json.loads((FOLDER.parent / "qwen3vl_layouts.json").read_text())["4b"]
    with torch.device("meta"), no_init_weights():
        model = Sa2VAModel(Sa2VAConfig(**raw, sam3_config={}))
    state, whole = model.state_dict(), expand(patterns, layout())
    assert (len(layout()), len(whole)) == (741, 1459)
    assert sum(map(math.prod, whole.values())) == 5_306_227_842
    assert checkpoint_keys.original_shapes(state, sam3=True) == whole
    written = checkpoint_keys.to_original(state, sam3=True)
    assert {key: tuple(tensor.shape) for key, tensor in written.items()} == whole


def test_a_folder_is_told_by_its_keys_and_written_back(folder, tmp_path):
    """No config.json names SAM3. Weights that the tracker does not use are kept."""
    model = Sa2VAModel.from_pretrained(folder)
    model.save_pretrained(tmp_path)
    before, after = (load_file(f / "model.safetensors") for f in (folder, tmp_path))
    unused = f"{SAM}sam2_model.backbone.vision_backbone.convs.3.conv_1x1.weight"
    assert before.keys() == after.keys() and unused in before
    assert all(torch.equal(before[key], after[key]) for key in before)
    (tmp_path / "config.json").write_text(json.dumps(config("qwen3vl")))
    published = Sa2VAConfig.from_pretrained(tmp_path)
    assert published.has_sam3 and published.sam2.image_size == 1008
    assert "sam3_config" not in published.raw
    (tmp_path / "model.safetensors").unlink()
    assert not Sa2VAConfig.from_pretrained(tmp_path).has_sam3


def test_the_object_score_gates_masks(model):
    """A score of 0 or less: no pixel; SAM2 has no such gate."""
    pixels = Sa2VAProcessor(model.config).sam_image(IMAGE)[None]
    assert pixels.shape == (1, 3, 224, 224)
    prompts = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    features, image = model.sam_features(pixels), torch.zeros(2, dtype=torch.long)
    assert [level.shape[-1] for level in features] == [64, 32, 16]
    open_masks = model.decode_masks(features, image, prompts)
    assert open_masks.shape == (2, 64, 64) and open_masks.abs().max() < 1000
    assert not torch.equal(open_masks[0], open_masks[1])
    model.grounding_encoder.mask_decoder.pred_obj_score_head.proj_out.bias.fill_(-100.0)
    assert (model.decode_masks(features, image, prompts) == ABSENT).all()
    mask, score = torch.ones(3, 2, 2), torch.tensor([[0.1], [0.0], [-0.1]])
    assert gate(model.grounding_encoder, mask, score)[:, 0, 0].tolist() == [1, ABSENT, ABSENT]
    assert gate(torch.nn.Identity(), mask, score) is mask


def test_predict_forward_draws_masks_of_an_image_and_of_a_video(model):
    forced = torch.zeros(1, model.config.llm.vocab_size)
    forced[0, IDS["[SEG]"]] = 50.0
    model.model.lm_head.register_forward_hook(lambda head, args, out: out + forced)
    model.max_new_tokens = 3
    said = model.predict_forward(image=IMAGE, text="<image>Please segment it.")
    assert [mask.shape for mask in said["prediction_masks"]] == [(1, 60, 80)] * 2
    said = model.predict_forward(video=[IMAGE] * 7, text="<image>Please segment it.")
    assert [mask.shape for mask in said["prediction_masks"]] == [(7, 60, 80)] * 2
    assert "SAM3 at 224 pixels" in describe(model, "outline")


def test_later_frames_of_a_video_are_tracked_by_its_memory(model):
    """Prompted frames are single images; a later one depends on them; the gate counts in all."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.rand(4, 3, 224, 224, generator=generator)
    levels = [model.sam_features(pixels[i : i + 1]) for i in range(4)]
    prompts = torch.randn(2, 64, generator=generator)
    logits = track(model, levels[:3], prompts, num_prompted=2)
    assert logits.shape == (2, 3, 64, 64) and logits.isfinite().all()
    for frame in range(2):
        alone = model.decode_masks(levels[frame], torch.zeros(2, dtype=torch.long), prompts)
        assert torch.allclose(logits[:, frame], alone, atol=1e-4)
    other = track(model, [levels[0], levels[3], levels[2]], prompts, num_prompted=2)
    assert torch.equal(other[:, 0], logits[:, 0])
    assert not torch.allclose(other[:, 2], logits[:, 2])
    model.grounding_encoder.mask_decoder.pred_obj_score_head.proj_out.bias.fill_(-100.0)
    assert (track(model, levels[:3], prompts, num_prompted=2) == ABSENT).all()


@pytest.mark.full_size
@pytest.mark.skipif("FULL_SIZE_TESTS" not in os.environ, reason="2 GB and a minute")
@torch.no_grad()
def test_mask_logits_of_the_original():
    """The published size, weights by the rule; the score's bias is raised where masks are."""
    recorded = load_file(FOLDER / "sam3.safetensors")

    @functools.lru_cache(4)
    def read(key):
        return torch.as_tensor(rule_weight(key, layout()[key]))

    with no_init_weights():
        sam = build_sam(Sam3TrackerVideoConfig()).eval()
    for name, tensor in sam.state_dict().items():
        tensor.copy_(checkpoint_keys.native_tensor(f"{SAM}{name}", read, sam3=True))

    def assert_close(computed, name):
        expected = recorded[name]
        deviation = (computed.view_as(expected) - expected).abs().max() / expected.abs().max()
        assert deviation < 1e-4, (name, deviation)

    pixels = planes(Image.fromarray(recorded["image_A"].numpy()).resize((1008, 1008)))
    for rounding in ("exact", "hf"):
        normalised = normalise_sam_pixels(pixels, rounding == "hf")[None]
        levels = decoder_features(sam, image_features(sam, normalised))
        if rounding == "exact":
            no_memory = sam.no_memory_embedding.view(1, -1, 1, 1)
            for number, level in enumerate((*levels[:2], levels[2] - no_memory)):
                assert_close(level[:, ::8, ::8, ::8], f"A_fpn{number}_exact_c8_hw8")
        for seg in (0, 1) if rounding == "exact" else (0,):
            prompt = recorded["A_seg_emb"][seg : seg + 1]
            masks, iou, _, score = decode_candidates(sam, levels[:2], levels[2], prompt)
            best = masks[:, iou[0].argmax()]
            name = f"A_{rounding}_{'seg2_' if seg else ''}present"
            (low,) = (key for key in recorded if re.match(rf"{name}_low_stride\d$", key))
            stride = int(low[-1])
            assert_close(best[0, ::stride, ::stride], low)
            assert_close(iou, f"{name}_ious")
            assert_close(score + 100, f"{name}_object_score")
            if name == "A_exact_present":
                closed = gate(sam, best, score)[0, ::8, ::8]
                assert torch.equal(closed, recorded["A_exact_asis_low_stride8"])
