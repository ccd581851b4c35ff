"""Folders of a tiny Sa2VA of Qwen2.5-VL and of Qwen3-VL, with random weights, as published."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from sa2va_hf import Sa2VAConfig, Sa2VAModel
from tests.runs import CHECKPOINT

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"]
SPECIAL += ["<|image_pad|>", "<|video_pad|>", "[SEG]", "<p>", "</p>", "<vp>", "</vp>"]
IDS = {token: 256 + i for i, token in enumerate(SPECIAL)}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.content %}"
    "{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ c.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = dict(
    vocab_size=256 + len(SPECIAL),
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=2048,
    rms_norm_eps=1e-6,
    eos_token_id=IDS["<|im_end|>"],
)
VISION = dict(depth=3, hidden_size=32, intermediate_size=64, num_heads=2, out_hidden_size=64)
PARTS = {
    "qwen25vl": dict(
        text_config=TEXT
        | dict(rope_theta=1e4, rope_scaling=dict(type="default", mrope_section=[2, 3, 3])),
        vision_config=VISION | dict(patch_size=14, window_size=56, fullatt_block_indexes=[1]),
    ),
    "qwen3vl": dict(
        text_config=TEXT
        | dict(
            head_dim=16,
            rope_theta=1e4,
            rope_scaling=dict(rope_type="default", mrope_interleaved=True, mrope_section=[2, 3, 3]),
        ),
        vision_config=VISION
        | dict(patch_size=16, num_position_embeddings=64, deepstack_visual_indexes=[0, 2]),
    ),
}


def config(family: str) -> dict:
    """config.json as the original writes it, with our keys for a small SAM2 and small images."""
    sam2 = json.loads((CHECKPOINT / "config.json").read_text())["sam2_config"]
    return PARTS[family] | dict(
        model_type="sa2va_chat",
        architectures=["Sa2VAChatModelQwen"],
        dtype="float32",
        image_token_id=IDS["<|image_pad|>"],
        video_token_id=IDS["<|video_pad|>"],
        vision_start_token_id=IDS["<|vision_start|>"],
        vision_end_token_id=IDS["<|vision_end|>"],
        template="qwen_chat",
        tie_word_embeddings=False,
        transformers_version="4.57.1",
        sam2_config=sam2,
        pixel_limits=[9 * 28**2, 25 * 28**2],
    )


def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes and Qwen's special tokens, with a chat template."""
    letters = bytes_to_unicode()
    built = Tokenizer(models.BPE({letters[b]: b for b in range(256)}, []))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=built,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        chat_template=TEMPLATE,
    )


# Keyword arguments of the native configuration: 4 windows, a global layer, masks of 64 x 64.
SAM3 = dict(
    image_size=224,
    vision_config=dict(
        model_type="sam3_vision_model",
        fpn_hidden_size=64,
        backbone_config=dict(
            model_type="sam3_vit_model",
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=224,
            pretrain_image_size=112,
            window_size=8,
            global_attn_indexes=[1],
        ),
    ),
    prompt_encoder_config=dict(hidden_size=64, image_size=224),
    mask_decoder_config=dict(
        hidden_size=64, num_attention_heads=2, mlp_dim=48, iou_head_hidden_dim=64
    ),
    memory_attention_hidden_size=64,
    memory_attention_feed_forward_hidden_size=32,
    memory_attention_num_layers=1,
    memory_encoder_hidden_size=64,
    memory_encoder_output_channels=64,  # as the native memory attention takes them
    memory_attention_rope_feat_sizes=[16, 16],
    mask_downsampler_embed_dim=64,
    memory_fuser_embed_dim=64,
    memory_fuser_intermediate_dim=64,
)


def write_sam3_folder(folder: Path, seed: int = 0) -> Path:
    """Write a Qwen3-VL with SAM3, of random weights by which every object is present."""
    torch.manual_seed(seed)
    raw = {key: value for key, value in config("qwen3vl").items() if key != "sam2_config"}
    model = Sa2VAModel(Sa2VAConfig(**raw, sam3_config=SAM3))
    torch.nn.init.normal_(model.model.lm_head.weight, std=0.3)
    model.model.lm_head.weight.data[IDS["[SEG]"]] *= 3
    for parameter in model.grounding_encoder.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    model.grounding_encoder.mask_decoder.pred_obj_score_head.proj_out.bias.data.fill_(100.0)
    return finish(model, folder, "qwen3vl")


def write_folder(folder: Path, family: str, seed: int = 0) -> Path:
    """Write a model of `family` with random weights into `folder`."""
    torch.manual_seed(seed)
    model = Sa2VAModel(Sa2VAConfig(**config(family)))
    # Answers of random weights are noise, with [SEG] in some of them.
    torch.nn.init.normal_(model.model.lm_head.weight, std=0.3)
    model.model.lm_head.weight.data[IDS["[SEG]"]] *= 3
    # SAM2 is the demo's, whose masks differ by their prompts.
    demo = Sa2VAModel.from_pretrained(CHECKPOINT).grounding_encoder
    model.grounding_encoder.load_state_dict(demo.state_dict())
    for block in model.modules():
        if isinstance(block, torch.nn.Linear) and block.bias is not None:
            torch.nn.init.normal_(block.bias, std=0.02)
    return finish(model, folder, family)


def finish(model: Sa2VAModel, folder: Path, family: str) -> Path:
    """Write a model with its tokenizer and its image processor's settings."""
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    patch = PARTS[family]["vision_config"]["patch_size"]
    settings = dict(image_processor_type="Qwen2VLImageProcessor", patch_size=patch, merge_size=2)
    settings |= dict(temporal_patch_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder
