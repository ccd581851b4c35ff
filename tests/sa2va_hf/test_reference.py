"""Numbers recorded from the original Sa2VA code (../shared/reference beside the checkout), within 1e-4 of the largest value."""
import json
import re
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from sa2va_hf import Sa2VAConfig, Sa2VAModel, Sa2VAProcessor, checkpoint_keys

REFERENCE = Path(__file__).parents[3] / "shared" / "reference"
pytestmark = pytest.mark.skipif(not REFERENCE.is_dir(), reason="the recorded numbers are not beside this checkout")
EMBEDDING = re.compile(
    r"(embed_tokens\.weight|class_embedding|position_embedding|pos_embed|pos_embed_window|maskmem_tpos_enc|no_mem_embed|"
    r"no_mem_pos_enc|no_obj_ptr|no_obj_embed_spatial|iou_token\.weight|mask_tokens\.weight|obj_score_token\.weight|"
    r"point_embeddings\.\d+\.weight|not_a_point_embed\.weight|no_mask_embed\.weight)$")


def rule_weight(key, shape):
    """The weight that the recording used for an original key (WEIGHTS_RULE.md)."""
    n = np.random.Generator(np.random.PCG64(zlib.crc32(key.encode()))).standard_normal(tuple(shape), dtype=np.float32)
    f = np.float32
    if key.endswith("positional_encoding_gaussian_matrix"):
        return n
    if re.search(r"\.(ls1|ls2|g_weight)$", key):
        return f(0.1) + f(0.02) * n
    if EMBEDDING.search(key):
        return f(0.5) * n
    if key.endswith(".bias"):
        return f(0.02) * n
    return f(1.0) + f(0.02) * n if len(shape) == 1 else n * f(1.0 / np.sqrt(float(np.prod(shape[1:]))))


@pytest.fixture(scope="module")
def recorded():
    return load_file(REFERENCE / "tiny_reference.safetensors")


@pytest.fixture(scope="module")
def model():
    manifest = json.loads((REFERENCE / "tiny_manifest.json").read_text())
    model = Sa2VAModel(Sa2VAConfig(**json.loads((REFERENCE / "tiny_config.json").read_text())))
    for name, tensor in model.state_dict().items():
        tensor.copy_(checkpoint_keys.native_tensor(name, lambda key: torch.from_numpy(np.asarray(rule_weight(key, manifest[key])))))
    model.img_context_id, model.seg_id = 500, 501
    return model.requires_grad_(False)


def close(name, found, expected):
    deviation = ((found.float() - expected.float()).abs().max() / expected.float().abs().max()).item()
    print(f"{name}: largest deviation {deviation:.1e} of the largest value")
    assert deviation < 1e-4, name


@pytest.mark.parametrize("x", ["A", "B"])
def test_preprocessing_features_and_logits(model, recorded, x):
    processor = Sa2VAProcessor(model.config)
    image, masks = Image.fromarray(recorded[f"image_{x}_hwc_u8"].numpy()), recorded[f"mask_{x}_nhw_u8"].numpy()
    tiles = processor.tiles(image)
    close(f"tiles {x}", tiles[:, :, ::16, ::16], recorded[f"pixel_{x}_stride16"])
    grid = processor.region_grid(masks)
    assert torch.equal(grid, recorded[f"prompt16_nearest_{x}"].bool())
    assert torch.equal(Sa2VAProcessor(model.config, 1).region_grid(masks), recorded[f"prompt16_dam448_{x}"].bool())
    features = model.extract_feature(tiles)
    close(f"features {x}", features, recorded[f"feat_{x}"])
    last = torch.arange(len(tiles)) == len(tiles) - 1
    out = model(recorded[f"single_{x}_input_ids"].long(), recorded[f"single_{x}_attention_mask"], image_features=features,
                prompt_masks=[grid], vp_overall_mask=last)
    close(f"logits {x}", out.logits[:, -16:], recorded[f"single_{x}_logits_last16"])
    close(f"hidden {x}", out.hidden_states[-1][:, -16:], recorded[f"single_{x}_hidden_last16"])


def test_left_padded_batch(model, recorded):
    processor = Sa2VAProcessor(model.config, max_tiles=1)
    tiles = torch.cat([processor.tiles(Image.fromarray(recorded[f"image_{x}_hwc_u8"].numpy())) for x in "AB"])
    grids = [recorded["prompt16_nearest_A"][:1].bool(), recorded["prompt16_nearest_B"].bool()]
    out = model(recorded["batch2_input_ids"].long(), recorded["batch2_attention_mask"], pixel_values=tiles, prompt_masks=grids,
                vp_overall_mask=torch.tensor([True, True]))
    close("padded batch logits", out.logits[:, -16:], recorded["batch2_logits_last16"])


@pytest.mark.parametrize("x", ["A", "B"])
def test_mask_logits_from_a_language_embedding(model, recorded, x):
    pixels = Sa2VAProcessor(model.config).sam_image(Image.fromarray(recorded[f"image_{x}_hwc_u8"].numpy()))
    assert torch.equal(pixels[:, ::16, ::16], recorded[f"sam_{x}_u8_stride16"])
    close(f"mask logits {x}", model.mask_logits(pixels[None], recorded["lang_emb"][:1])[0], recorded[f"sam_{x}_inject256_exact"])


def test_text_hidden_fcs(model, recorded):
    close("text_hidden_fcs", model.text_hidden_fcs(recorded["thf_in"]), recorded["thf_out"])


@pytest.mark.parametrize("size", ["tiny", "sa2va_4b"])
def test_layout_is_the_original(size):
    manifest = json.loads((REFERENCE / f"{size}_manifest.json").read_text())
    with torch.device("meta"):
        state = Sa2VAModel(Sa2VAConfig(**json.loads((REFERENCE / f"{size}_config.json").read_text()))).state_dict()
    assert checkpoint_keys.original_shapes(state) == {key: tuple(shape) for key, shape in manifest.items()}
    written = {key: tuple(tensor.shape) for key, tensor in checkpoint_keys.to_original(state).items()}
    assert written == {key: tuple(shape) for key, shape in manifest.items()}
