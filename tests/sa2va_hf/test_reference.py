"""The vision and language half against numbers recorded from the original Sa2VA code.

Floats are within 1e-4 of each tensor's largest value; integers, ids and masks are equal.
"""

import functools
import json
import math

import numpy as np
import pytest
import torch

from rl_train.engine import Engine
from sa2va_hf import Sa2VAConfig, Sa2VAModel, Sa2VAProcessor, checkpoint_keys
from sa2va_hf.modeling_sa2va import positions
from sa2va_hf.processing_sa2va import normalise_sam_pixels, region_grid, tile_grid
from tests.reference.backbones.subsample import unfold
from tests.runs import ROOT

REFERENCE = ROOT / "tests" / "reference"

# Weights, pixels, tiles and grids


def test_weights_are_the_recorded_ones(original, recorded):
    state = checkpoint_keys.to_original(original.state_dict())
    for key, check in recorded.facts["weight_checks"].items():
        assert list(state[key].shape) == check["shape"]
        assert torch.allclose(state[key].flatten()[:4], torch.tensor(check["first4"])), key
        assert abs(state[key].double().sum().item() - check["sum"]) < 1e-4 * max(
            1, abs(check["sum"])
        ), key


def test_tile_grids(recorded):
    for row in recorded.facts["tile_grid_max12_thumb"]:
        columns, rows = tile_grid(*row["size"], max_tiles=12)
        assert (columns, rows) == (row["cols"], row["rows"]), row["size"]
        assert columns * rows + (columns * rows > 1) == row["n_tiles"]
    print(f"tile grids: 0 of {len(recorded.facts['tile_grid_max12_thumb'])} sizes differ")


@pytest.mark.parametrize("x", ["A", "B"])
def test_tiles_and_grids(original, recorded, image, x):
    processor, one_tile = (
        Sa2VAProcessor(original.config),
        Sa2VAProcessor(original.config, max_tiles=1),
    )
    recorded.close(f"pixel_{x}_stride16", processor.tiles(image(x))[:, :, ::16, ::16])
    recorded.close(f"pixel_{x}_single_stride16", one_tile.tiles(image(x))[:, :, ::16, ::16])
    recorded.equal(
        f"pixel_{x}_thumb_u8_hwc", torch.from_numpy(np.array(processor.tile_images(image(x))[-1]))
    )
    masks = recorded[f"mask_{x}_nhw_u8"]
    recorded.equal(f"prompt16_nearest_{x}", processor.region_grid(masks))
    recorded.equal(f"prompt16_dam448_{x}", one_tile.region_grid(masks))
    recorded.equal(f"prompt16_dam1024_{x}", region_grid(masks.bool(), 16, 1024, "area"))


@pytest.mark.parametrize("x", ["A", "B"])
def test_sam_pixels(original, recorded, image, x):
    pixels = Sa2VAProcessor(original.config).sam_image(image(x))
    recorded.equal(f"sam_{x}_u8_stride16", pixels[:, ::16, ::16])
    assert int(pixels.long().sum()) == recorded.facts[f"sam_{x}_u8_sum"]
    recorded.close(f"sam_{x}_px_exactnorm_stride16", normalise_sam_pixels(pixels)[:, ::16, ::16])
    recorded.close(
        f"sam_{x}_px_stride16", normalise_sam_pixels(pixels, rounded=True)[:, ::16, ::16]
    )


# Vision and language


@pytest.fixture(scope="module")
def features(original, image):
    @functools.cache
    def build(x):
        return original.extract_feature(Sa2VAProcessor(original.config).tiles(image(x)))

    return build


@pytest.mark.parametrize("x", ["A", "B"])
def test_features_and_logits(original, recorded, image, features, x):
    single = Sa2VAProcessor(original.config, max_tiles=1).tiles(image(x))
    recorded.close(f"vit_last_{x}_single", original.vision_model(single).last_hidden_state)
    recorded.close(f"feat_{x}_single", original.extract_feature(single))
    recorded.close(f"feat_{x}", features(x))
    out = original(
        recorded[f"single_{x}_input_ids"].long(),
        recorded[f"single_{x}_attention_mask"],
        image_features=features(x),
        prompt_masks=[recorded[f"prompt16_nearest_{x}"].bool()],
        vp_overall_mask=torch.arange(len(features(x))) == len(features(x)) - 1,
    )
    recorded.close(f"single_{x}_logits_last16", out.logits[:, -16:])
    recorded.close(f"single_{x}_hidden_last16", out.hidden_states[-1][:, -16:])


def test_logits_without_regions(original, recorded, features):
    out = original(
        recorded["novp_B_input_ids"].long(),
        recorded["novp_B_attention_mask"],
        image_features=features("B"),
    )
    recorded.close("novp_B_logits_last16", out.logits[:, -16:])


@pytest.mark.parametrize("x", ["A", "B"])
def test_greedy_tokens(original, recorded, features, x):
    """The trainer's sampler, greedy and without a stop, and a full forward over what it sampled."""
    ids = recorded[f"single_{x}_input_ids"].long()
    regions = dict(
        prompt_masks=[recorded[f"prompt16_nearest_{x}"].bool()],
        vp_overall_mask=torch.arange(len(features(x))) == len(features(x)) - 1,
    )
    sampled = greedy(original, original.embed(ids, features(x), **regions), torch.ones_like(ids))
    assert sampled.tolist() == [recorded.facts[f"single_{x}"]["generate_12_ids"]]
    whole = torch.cat([ids, sampled], dim=1)
    logits = original(whole, torch.ones_like(whole), image_features=features(x), **regions).logits[
        0, ids.shape[1] - 1 : -1
    ]
    recorded.close(f"single_{x}_generate_logits", logits)


def greedy(original, embeds, mask):
    engine = Engine(original.language_model, pad_id=0)
    return engine.generate(embeds, mask, num_generations=1, max_new_tokens=12, stop=None).ids


def test_left_padded_batch(original, recorded, image):
    processor = Sa2VAProcessor(original.config, max_tiles=1)
    features = original.extract_feature(torch.cat([processor.tiles(image(x)) for x in "AB"]))
    grids = [recorded["prompt16_nearest_A"][:1].bool(), recorded["prompt16_nearest_B"].bool()]
    ids, mask, flags = (
        recorded["batch2_input_ids"].long(),
        recorded["batch2_attention_mask"],
        torch.tensor([True, True]),
    )
    recorded_positions = recorded["batch2_position_ids"].long()
    assert torch.equal(positions(mask)[mask.bool()], recorded_positions[mask.bool()])
    out = original(ids, mask, image_features=features, prompt_masks=grids, vp_overall_mask=flags)
    recorded.close("batch2_logits_last16", out.logits[:, -16:])
    recorded.close("batch2_hidden_last16", out.hidden_states[-1][:, -16:])
    sampled = greedy(original, original.embed(ids, features, grids, flags), mask.long())
    assert sampled.tolist() == recorded.facts["batch2"]["generate_12_ids"]


@pytest.mark.parametrize("size", ["tiny", "sa2va_4b"])
def test_layout_is_the_original(size):
    layout = json.loads((REFERENCE / f"{size}_layout.json").read_text())
    raw = json.loads((REFERENCE / f"{size}_config.json").read_text())
    assert_layout(raw, {key: tuple(shape) for key, shape in layout.items()}, "phi3_chat")


@pytest.mark.parametrize(
    "size, template, keys, numbers",
    [
        ("sa2va_internvl3_2b", "qwen_chat", 1589, 2_316_157_490),
        ("sa2va_internvl3_8b", "qwen_chat", 1589, 8_182_606_386),
        ("sa2va_internvl3_14b", "qwen_chat", 1829, 15_369_268_786),
        ("sa2va_8b", "internlm2_chat", 1477, 8_317_666_866),
        ("sa2va_26b", "internlm2_chat", 1838, 25_778_005_938),
    ],
)
def test_layouts_of_the_other_backbones(size, template, keys, numbers):
    folder = REFERENCE / "backbones"
    folded = json.loads((folder / "layouts.json").read_text())[size]
    layout = unfold(folded, json.loads((REFERENCE / "tiny_layout.json").read_text()))
    assert (len(layout), sum(map(math.prod, layout.values()))) == (keys, numbers)
    assert_layout(json.loads((folder / "configs.json").read_text())[size], layout, template)


def assert_layout(raw, expected, template):
    """A model of the configuration reads and writes the keys `expected`, in their shapes."""
    with torch.device("meta"):
        model = Sa2VAModel(Sa2VAConfig(**raw))
    config, state = model.config, model.state_dict()
    assert (config.tokens_per_tile, config.grid_size, config.prompt_size) == (256, 16, 256)
    assert config.template == template
    assert checkpoint_keys.original_shapes(state, config.llm) == expected
    written = checkpoint_keys.to_original(state, config.llm)
    assert {key: tuple(tensor.shape) for key, tensor in written.items()} == expected
