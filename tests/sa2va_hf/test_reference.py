"""Numbers recorded from the original Sa2VA code (../shared/reference beside the checkout), within 1e-4 of the largest value."""

import functools
import json
import re
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from rl_train.engine.sampler import generate
from sa2va_hf import Sa2VAConfig, Sa2VAModel, Sa2VAProcessor, checkpoint_keys
from sa2va_hf.modeling_sa2va import positions
from sa2va_hf.processing_sa2va import normalise_sam_pixels, region_grid, tile_grid, upsample_masks
from sa2va_hf.video import track

REFERENCE = Path(__file__).parents[3] / "shared" / "reference"
pytestmark = pytest.mark.skipif(
    not REFERENCE.is_dir(), reason="the recorded numbers are not beside this checkout"
)
EMBEDDING = re.compile(
    r"(embed_tokens\.weight|class_embedding|position_embedding|pos_embed|pos_embed_window|maskmem_tpos_enc|no_mem_embed|"
    r"no_mem_pos_enc|no_obj_ptr|no_obj_embed_spatial|iou_token\.weight|mask_tokens\.weight|obj_score_token\.weight|"
    r"point_embeddings\.\d+\.weight|not_a_point_embed\.weight|no_mask_embed\.weight)$"
)


def rule_weight(key, shape):
    """The weight that the recording used for an original key (WEIGHTS_RULE.md)."""
    n = np.random.Generator(np.random.PCG64(zlib.crc32(key.encode()))).standard_normal(
        tuple(shape), dtype=np.float32
    )
    f = np.float32
    if key.endswith("positional_encoding_gaussian_matrix"):
        return n
    if re.search(r"\.(ls1|ls2|g_weight)$", key):
        return f(0.1) + f(0.02) * n
    if EMBEDDING.search(key):
        return f(0.5) * n
    if key.endswith(".bias"):
        return f(0.02) * n
    return (
        f(1.0) + f(0.02) * n if len(shape) == 1 else n * f(1.0 / np.sqrt(float(np.prod(shape[1:]))))
    )


@pytest.fixture(scope="module")
def recorded():
    return load_file(REFERENCE / "tiny_reference.safetensors")


@pytest.fixture(scope="module")
def facts():
    return json.loads((REFERENCE / "tiny_reference.json").read_text())


@pytest.fixture(scope="module")
def model():
    manifest = json.loads((REFERENCE / "tiny_manifest.json").read_text())
    model = Sa2VAModel(Sa2VAConfig(**json.loads((REFERENCE / "tiny_config.json").read_text())))
    for name, tensor in model.state_dict().items():
        tensor.copy_(
            checkpoint_keys.native_tensor(
                name, lambda key: torch.from_numpy(np.asarray(rule_weight(key, manifest[key])))
            )
        )
    model.img_context_id, model.seg_id = 500, 501
    return model.requires_grad_(False)


@pytest.fixture(scope="module")
def image(recorded):
    return lambda x: Image.fromarray(recorded[f"image_{x}_hwc_u8"].numpy())


@pytest.fixture(scope="module")
def pyramid(model, image):
    """Function of an image's name and the normalisation: its SAM2 features, computed once."""

    @functools.cache
    def build(x, rounded):
        return model.sam_features(
            normalise_sam_pixels(Sa2VAProcessor(model.config).sam_image(image(x)), rounded)[None]
        )

    return build


def close(name, found, expected, tolerance=1e-4):
    assert found.shape == expected.shape, name
    deviation = (
        (found.float() - expected.float()).abs().max() / expected.float().abs().max()
    ).item()
    print(f"{name}: largest deviation {deviation:.1e} of the largest value")
    assert deviation < tolerance, name


def equal(name, found, expected):
    print(f"{name}: {int((found != expected).sum())} of {expected.numel()} differ")
    assert torch.equal(found, expected), name


class CharTokenizer:
    """The toy tokenizer of the recording: one id a character, single ids for the special tokens."""

    special = {
        "<IMG_CONTEXT>": 500,
        "[SEG]": 501,
        "<img>": 502,
        "</img>": 503,
        "<vp>": 504,
        "</vp>": 505,
        "<eos>": 2,
    }
    pad_token_id, eos_token_id, bos_token_id, name_or_path = 0, 2, None, "toy"

    def encode(self, text, add_special_tokens=True):
        pieces = re.findall("|".join(map(re.escape, self.special)) + "|.", text, re.DOTALL)
        return [self.special.get(piece, 3 + ord(piece[0]) % 480) for piece in pieces]

    def decode(self, ids, skip_special_tokens=False):
        names = {i: name for name, i in self.special.items()}
        return "".join(names.get(i, chr(i - 3) if i > 2 else "") for i in ids)


# Weights, pixels, tiles and grids


def test_weights_are_the_recorded_ones(model, facts):
    state = checkpoint_keys.to_original(model.state_dict())
    for key, check in facts["weight_checks"].items():
        assert list(state[key].shape) == check["shape"]
        assert torch.allclose(state[key].flatten()[:4], torch.tensor(check["first4"])), key
        assert abs(state[key].double().sum().item() - check["sum"]) < 1e-4 * max(
            1, abs(check["sum"])
        ), key


def test_tile_grids(facts):
    for row in facts["tile_grid_max12_thumb"]:
        columns, rows = tile_grid(*row["size"], max_tiles=12)
        assert (columns, rows) == (row["cols"], row["rows"]), row["size"]
        assert columns * rows + (columns * rows > 1) == row["n_tiles"]
    print(f"tile grids: 0 of {len(facts['tile_grid_max12_thumb'])} sizes differ")


@pytest.mark.parametrize("x", ["A", "B"])
def test_tiles_and_grids(model, recorded, image, x):
    processor, one_tile = Sa2VAProcessor(model.config), Sa2VAProcessor(model.config, max_tiles=1)
    close(
        f"tiles {x}", processor.tiles(image(x))[:, :, ::16, ::16], recorded[f"pixel_{x}_stride16"]
    )
    close(
        f"single tile {x}",
        one_tile.tiles(image(x))[:, :, ::16, ::16],
        recorded[f"pixel_{x}_single_stride16"],
    )
    equal(
        f"thumbnail {x}",
        torch.from_numpy(np.array(processor.tile_images(image(x))[-1])),
        recorded[f"pixel_{x}_thumb_u8_hwc"],
    )
    masks = recorded[f"mask_{x}_nhw_u8"]
    equal(
        f"grid nearest {x}", processor.region_grid(masks), recorded[f"prompt16_nearest_{x}"].bool()
    )
    equal(f"grid area {x}", one_tile.region_grid(masks), recorded[f"prompt16_dam448_{x}"].bool())
    equal(
        f"grid area through 1024 {x}",
        region_grid(masks.bool(), 16, 1024, "area"),
        recorded[f"prompt16_dam1024_{x}"].bool(),
    )


@pytest.mark.parametrize("x", ["A", "B"])
def test_sam_pixels(model, recorded, facts, image, x):
    pixels = Sa2VAProcessor(model.config).sam_image(image(x))
    equal(f"SAM2 pixels {x}", pixels[:, ::16, ::16], recorded[f"sam_{x}_u8_stride16"])
    assert int(pixels.long().sum()) == facts[f"sam_{x}_u8_sum"]
    close(
        f"SAM2 pixels {x}, exact normalisation",
        normalise_sam_pixels(pixels)[:, ::16, ::16],
        recorded[f"sam_{x}_px_exactnorm_stride16"],
    )
    close(
        f"SAM2 pixels {x}, rounded",
        normalise_sam_pixels(pixels, rounded=True)[:, ::16, ::16],
        recorded[f"sam_{x}_px_stride16"],
    )


# Vision and language


@pytest.fixture(scope="module")
def features(model, image):
    @functools.cache
    def build(x):
        return model.extract_feature(Sa2VAProcessor(model.config).tiles(image(x)))

    return build


@pytest.mark.parametrize("x", ["A", "B"])
def test_features_and_logits(model, recorded, image, features, x):
    single = Sa2VAProcessor(model.config, max_tiles=1).tiles(image(x))
    close(
        f"vision encoder {x}",
        model.vision_model(single).last_hidden_state,
        recorded[f"vit_last_{x}_single"],
    )
    close(f"features single {x}", model.extract_feature(single), recorded[f"feat_{x}_single"])
    close(f"features {x}", features(x), recorded[f"feat_{x}"])
    out = model(
        recorded[f"single_{x}_input_ids"].long(),
        recorded[f"single_{x}_attention_mask"],
        image_features=features(x),
        prompt_masks=[recorded[f"prompt16_nearest_{x}"].bool()],
        vp_overall_mask=torch.arange(len(features(x))) == len(features(x)) - 1,
    )
    close(f"logits {x}", out.logits[:, -16:], recorded[f"single_{x}_logits_last16"])
    close(f"hidden {x}", out.hidden_states[-1][:, -16:], recorded[f"single_{x}_hidden_last16"])


def test_logits_without_regions(model, recorded, features):
    out = model(
        recorded["novp_B_input_ids"].long(),
        recorded["novp_B_attention_mask"],
        image_features=features("B"),
    )
    close("logits without regions", out.logits[:, -16:], recorded["novp_B_logits_last16"])


@pytest.mark.parametrize("x", ["A", "B"])
def test_greedy_tokens(model, recorded, facts, features, x):
    """The trainer's sampler, greedy and without a stop, and a full forward over what it sampled."""
    ids = recorded[f"single_{x}_input_ids"].long()
    regions = dict(
        prompt_masks=[recorded[f"prompt16_nearest_{x}"].bool()],
        vp_overall_mask=torch.arange(len(features(x))) == len(features(x)) - 1,
    )
    found = greedy(model, model.embed(ids, features(x), **regions), torch.ones_like(ids))
    equal(f"greedy ids {x}", found, torch.tensor([facts[f"single_{x}"]["generate_12_ids"]]))
    whole = torch.cat([ids, found], dim=1)
    logits = model(whole, torch.ones_like(whole), image_features=features(x), **regions).logits[
        0, ids.shape[1] - 1 : -1
    ]
    close(f"logits of the greedy tokens {x}", logits, recorded[f"single_{x}_generate_logits"])


def greedy(model, embeds, mask):
    return generate(
        model.language_model,
        embeds,
        mask,
        num_generations=1,
        max_new_tokens=12,
        pad_id=0,
        stop=None,
    ).ids


def test_left_padded_batch(model, recorded, facts, image):
    processor = Sa2VAProcessor(model.config, max_tiles=1)
    features = model.extract_feature(torch.cat([processor.tiles(image(x)) for x in "AB"]))
    grids = [recorded["prompt16_nearest_A"][:1].bool(), recorded["prompt16_nearest_B"].bool()]
    ids, mask, flags = (
        recorded["batch2_input_ids"].long(),
        recorded["batch2_attention_mask"],
        torch.tensor([True, True]),
    )
    equal(
        "padded batch position ids",
        positions(mask)[mask.bool()],
        recorded["batch2_position_ids"].long()[mask.bool()],
    )
    out = model(ids, mask, image_features=features, prompt_masks=grids, vp_overall_mask=flags)
    close("padded batch logits", out.logits[:, -16:], recorded["batch2_logits_last16"])
    close("padded batch hidden", out.hidden_states[-1][:, -16:], recorded["batch2_hidden_last16"])
    equal(
        "padded batch greedy ids",
        greedy(model, model.embed(ids, features, grids, flags), mask.long()),
        torch.tensor(facts["batch2"]["generate_12_ids"]),
    )


# SAM2


@pytest.mark.parametrize("x", ["A", "B"])
def test_sam_masks(model, recorded, facts, pyramid, x):
    raw = pyramid(x, True)
    fine, middle, coarse = model.decoder_features(raw)
    close(f"SAM2 level 0 {x}", fine[0, :, ::16, ::16], recorded[f"sam_{x}_fpn0_s0_stride16"])
    close(f"SAM2 level 1 {x}", middle[0, :, ::8, ::8], recorded[f"sam_{x}_fpn1_s1_stride8"])
    close(f"SAM2 level 2 {x}", raw[2][0, :, ::4, ::4], recorded[f"sam_{x}_fpn2_stride4"])
    masks, iou, _, score = model.decode_candidates([fine, middle], coarse, recorded["lang_emb"][:1])
    close(f"candidate masks {x}", masks[0], recorded[f"sam_{x}_multimask"])
    close(f"predicted IoU {x}", iou[0], recorded[f"sam_{x}_iou"])
    close(f"object score {x}", score[0], recorded[f"sam_{x}_objscore"])
    first = torch.zeros(1, dtype=torch.long)
    logits = model.decode_masks(raw, first, recorded["lang_emb"][:1])
    close(f"mask logits {x}", logits[0], recorded[f"sam_{x}_inject256"])
    close(f"mask logits at 1024 {x}", at_1024(logits)[0], recorded[f"sam_{x}_langinf1024_stride4"])
    logits = model.decode_masks(pyramid(x, False), first, recorded["lang_emb"][:1])
    close(f"mask logits, exact normalisation {x}", logits[0], recorded[f"sam_{x}_inject256_exact"])
    close(
        f"mask logits at 1024, exact {x}",
        at_1024(logits)[0],
        recorded[f"sam_{x}_langinf1024_exact_stride4"],
    )


def at_1024(logits):
    return upsample_masks(logits, 1024, (1024, 1024))[:, ::4, ::4]


def test_prompts_of_sam(model, recorded):
    sam = model.grounding_encoder
    sparse, _ = sam.prompt_encoder(
        input_points=torch.zeros(1, 1, 1, 2),
        input_labels=-torch.ones(1, 1, 1, dtype=torch.int32),
        input_boxes=None,
        input_masks=None,
    )
    close(
        "sparse prompt",
        torch.cat([sparse[0, 0], recorded["lang_emb"][:1]]),
        recorded["sam_sparse_prompt"],
    )
    close(
        "image positional embedding",
        sam.get_image_wide_positional_embeddings()[0, :, ::8, ::8],
        recorded["sam_image_pe_stride8"],
    )


def test_two_prompts_of_one_image(model, recorded, pyramid):
    logits = model.decode_masks(
        pyramid("A", True), torch.zeros(2, dtype=torch.long), recorded["lang_emb"]
    )
    close("two prompts, first", logits[0], recorded["sam_A_inject256"])
    close("two prompts, second", logits[1], recorded["sam_A_inject256_obj1"])


def test_candidate_is_picked_by_predicted_iou(model, recorded, facts, pyramid):
    fine, middle, coarse = model.decoder_features(pyramid("A", True))
    masks, iou, _, score = model.decode_candidates(
        [fine, middle], coarse, recorded["samx_arg_emb"][None]
    )
    close("other prompt: candidates", masks[0, :, ::4, ::4], recorded["samx_arg_multimask_stride4"])
    close("other prompt: predicted IoU", iou[0], recorded["samx_arg_iou"])
    close("other prompt: object score", score[0], recorded["samx_arg_obj"])
    assert iou[0].argmax() == facts["samx_arg"]["argmax"] == 0
    logits = model.decode_masks(
        pyramid("A", True), torch.zeros(1, dtype=torch.long), recorded["samx_arg_emb"][None]
    )
    close("other prompt: mask logits", logits[0], recorded["samx_arg_inject256"])


def test_text_hidden_fcs(model, recorded):
    close("text_hidden_fcs", model.text_hidden_fcs(recorded["thf_in"]), recorded["thf_out"])


def test_tracked_video(model, recorded, pyramid):
    logits = track(
        model, [pyramid("A", True), pyramid("B", True)], recorded["lang_emb"][:1], num_prompted=1
    )[0]
    close("video, prompted frame", logits[0], recorded["sam_A_inject256"])
    close(
        "video, tracked frame",
        at_1024(logits)[1],
        recorded["video_A_then_B_tracked_frame1_stride4"],
    )


# The whole way


@pytest.mark.parametrize("x", ["A", "B"])
def test_predict_forward(model, recorded, facts, image, pyramid, monkeypatch, x):
    """From image, text and regions to the masks at the image's size, with the recorded answer forced through generation."""
    forced = iter(recorded[f"e2e_{x}_answer_ids"].tolist())
    seen, raw = {}, pyramid(x, True)  # test_sam_masks compares these features

    def force(module, args, logits):
        return (
            torch.nn.functional.one_hot(torch.tensor(next(forced)), 512).float().expand_as(logits)
        )

    def embed(ids, *rest):
        seen["prompt"] = ids
        return type(model).embed(model, ids, *rest)

    def decode_masks(features, rows, prompts):
        seen["prompts"] = prompts
        seen["logits"] = type(model).decode_masks(model, features, rows, prompts)
        return seen["logits"]

    monkeypatch.setattr(model, "embed", embed)
    monkeypatch.setattr(model, "decode_masks", decode_masks)
    monkeypatch.setattr(model, "sam_features", lambda pixels: raw)
    hooks = [
        model.language_model.lm_head.register_forward_hook(force),
        model.text_hidden_fcs.register_forward_pre_hook(
            lambda module, args: seen.update(hidden=args[0])
        ),
    ]
    regions = {"A": [recorded["mask_A_nhw_u8"].numpy()], "B": None}[x]
    text = {"A": "<image>Please segment region1.", "B": "<image>\nPlease segment it."}[x]
    result = model.predict_forward(
        image=image(x),
        text=text,
        mask_prompts=regions,
        tokenizer=CharTokenizer(),
        rounded_normalisation=True,
    )
    for hook in hooks:
        hook.remove()

    equal(f"prompt ids {x}", seen["prompt"], recorded[f"e2e_{x}_prompt_ids"].long().view(1, -1))
    assert result["prediction"] == facts[f"e2e_{x}"]["prediction"]
    close(f"hidden at [SEG] {x}", seen["hidden"], recorded[f"e2e_{x}_seg_hidden"])
    close(f"language embeddings {x}", seen["prompts"], recorded[f"e2e_{x}_seg_lang_emb"])
    for k in range(2):
        close(
            f"mask logits at 1024 {x}{k}",
            at_1024(seen["logits"])[k],
            recorded[f"e2e_{x}_logits1024_{k}_stride4"],
        )
        equal(
            f"mask {x}{k}",
            torch.from_numpy(result["prediction_masks"][k]),
            recorded[f"e2e_{x}_mask_{k}"].bool()[None],
        )
    close(
        f"mask logits at the image's size {x}",
        upsample_masks(seen["logits"], 1024, image(x).size[::-1])[0],
        recorded[f"e2e_{x}_logits_orig_0"],
    )


@pytest.mark.parametrize("size", ["tiny", "sa2va_4b"])
def test_layout_is_the_original(size):
    manifest = json.loads((REFERENCE / f"{size}_manifest.json").read_text())
    with torch.device("meta"):
        model = Sa2VAModel(
            Sa2VAConfig(**json.loads((REFERENCE / f"{size}_config.json").read_text()))
        )
    config, state = model.config, model.state_dict()
    assert (config.tokens_per_tile, config.grid_size, config.prompt_size, config.template) == (
        256,
        16,
        256,
        "phi3_chat",
    )
    expected = {key: tuple(shape) for key, shape in manifest.items()}
    read = checkpoint_keys.original_shapes(state)
    print(
        f"{size} layout: {len(expected)} keys, {len(set(expected) - set(read))} missing, {len(set(read) - set(expected))} unexpected"
    )
    assert read == expected
    assert {
        key: tuple(tensor.shape) for key, tensor in checkpoint_keys.to_original(state).items()
    } == expected
