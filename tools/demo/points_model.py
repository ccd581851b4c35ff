"""The demo's tiny Qwen2.5-VL and SAM2: configurations, tokenizer and random weights."""

import json
from pathlib import Path

import torch
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Sam2Config,
    Sam2Model,
)

from rl_train.points.parser import AnswerFormat, PointPrompt
from rl_train.points.prompts import point_question
from rl_train.policies.qwen_vl import AFTER_IMAGE, AFTER_QUESTION, chat_start
from rl_train.policies.qwen_vl_model import SHARED_EMBEDDINGS, VERSIONS
from tools.demo.clump_scenes import COLORS, SHAPES, SIDE
from tools.demo.new_folder import train_tokenizer

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"]
SPECIAL += ["<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
SEEN = 96  # pixels of the side of an image as Qwen2.5-VL sees it: all coordinates have two digits
PREPROCESSOR = dict(
    min_pixels=SEEN**2,
    max_pixels=SEEN**2,
    patch_size=6,
    temporal_patch_size=2,
    merge_size=2,
    image_mean=[0.48145466, 0.4578275, 0.40821073],
    image_std=[0.26862954, 0.26130258, 0.27577711],
    image_processor_type="Qwen2VLImageProcessor",
)
TEXT = dict(
    hidden_size=128,
    intermediate_size=192,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=1024,
    # Low, and much of it for height and width: sixty-four tokens of an image are to be told apart.
    rope_parameters=dict(rope_type="default", rope_theta=20.0, mrope_section=[2, 7, 7]),
    tie_word_embeddings=True,
    bos_token_id=None,
)
VISION = dict(
    depth=2,
    hidden_size=96,
    intermediate_size=192,
    num_heads=4,
    out_hidden_size=128,
    patch_size=PREPROCESSOR["patch_size"],
    window_size=48,
    fullatt_block_indexes=[0, 1],
)
WIDTH = 64  # of SAM2's decoder
SAM = dict(
    vision_config=dict(
        backbone_config=dict(
            model_type="sam2_hiera_det_model",
            hidden_size=16,
            num_attention_heads=1,
            blocks_per_stage=[1, 1, 2, 1],
            embed_dim_per_stage=[16, 32, 64, 128],
            num_attention_heads_per_stage=[1, 2, 4, 8],
            window_size_per_stage=[8, 4, 8, 4],
            global_attention_blocks=[3],
            image_size=[SIDE, SIDE],
            window_positional_embedding_background_size=[7, 7],
        ),
        backbone_channel_list=[128, 64, 32, 16],
        backbone_feature_sizes=[[64, 64], [32, 32], [16, 16]],
        fpn_hidden_size=WIDTH,
    ),
    prompt_encoder_config=dict(hidden_size=WIDTH, image_size=SIDE, mask_input_channels=8),
    # One head and no reduction, with which a point finds its place.
    mask_decoder_config=dict(
        hidden_size=WIDTH,
        num_attention_heads=1,
        attention_downsample_rate=1,
        mlp_dim=128,
        iou_head_hidden_dim=WIDTH,
        dynamic_multimask_via_stability=False,
    ),
)


def form(negatives: bool) -> AnswerFormat:
    """Return the format of the demo model's answers."""
    return AnswerFormat("points", "optional" if negatives else "off", "pixels")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Train a tokenizer with Qwen2.5-VL's special tokens on the demo's questions and answers."""
    captions = [f"the {color} {shape}" for color in COLORS for shape in SHAPES]
    prompts = [PointPrompt((), ((10, 10),), negative) for negative in ((), ((10, 10),))]
    texts = [chat_start(VERSIONS["qwen2_5_vl"]), AFTER_IMAGE, AFTER_QUESTION]
    for answer_format in (form(True), form(False)):
        texts += [point_question(caption, answer_format) for caption in captions]
        texts += [answer_format.format(answer) for answer in prompts]
    return train_tokenizer(texts, 512, SPECIAL)


def new_qwen(tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLForConditionalGeneration:
    """Build a Qwen2.5-VL of random weights, at the scale of each layer's inputs."""
    token_id = tokenizer.convert_tokens_to_ids
    config = Qwen2_5_VLConfig(
        text_config=TEXT
        | dict(
            vocab_size=len(tokenizer),
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        ),
        vision_config=VISION,
        tie_word_embeddings=True,
        image_token_id=token_id("<|image_pad|>"),
        video_token_id=token_id("<|video_pad|>"),
        vision_start_token_id=token_id("<|vision_start|>"),
        vision_end_token_id=token_id("<|vision_end|>"),
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            scale = 0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            std = 0.1 if "embed_tokens" in name else scale * parameter[0].numel() ** -0.5
            torch.nn.init.normal_(parameter, std=std)
    return model


def new_sam() -> Sam2Model:
    """Build a SAM2 of random weights whose attention to the image begins as search by position."""
    model = Sam2Model(Sam2Config(**SAM))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            continue
        if name.startswith("vision_encoder.backbone.pos_embed") or "no_m" in name:
            torch.nn.init.normal_(parameter, std=0.1)
        elif "token" in name or "not_a_point" in name:
            torch.nn.init.normal_(parameter, std=0.3)
        elif "point_embed" in name:
            torch.nn.init.normal_(parameter)
        else:
            fan_in = parameter[0].numel() if "upscale_conv" not in name else parameter.shape[0]
            torch.nn.init.normal_(parameter, std=fan_in**-0.5)
        if "image" in name and name.endswith(("q_proj.weight", "k_proj.weight")):
            # Queries and keys begin as positional embeddings: equal positions attend to each other.
            torch.nn.init.eye_(parameter)
            parameter.data.add_(0.02 * torch.randn_like(parameter))
    frequencies = torch.randn(2, WIDTH // 2)
    for name in SHARED_EMBEDDINGS:
        model.get_submodule(name).positional_embedding.copy_(frequencies)
    return model


def save_qwen(
    model: Qwen2_5_VLForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, folder: Path
):
    """Write Qwen2.5-VL's folder: weights in bfloat16, tokenizer, image preprocessing."""
    _save(model, folder)
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    fields = json.loads(file.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    file.write_text(json.dumps(fields, indent=2) + "\n")
    text = json.dumps(PREPROCESSOR, indent=2) + "\n"
    (folder / "preprocessor_config.json").write_text(text)


def save_sam(model: Sam2Model, folder: Path):
    """Write SAM2's folder, with weights in bfloat16."""
    _save(model, folder)


def _save(model, folder: Path):
    """Write a model's weights in bfloat16 and its configuration; the model is not changed."""
    state = {name: value.to(torch.bfloat16) for name, value in model.state_dict().items()}
    state.pop("lm_head.weight", None)  # Qwen2.5-VL's, tied to its embeddings
    model.save_pretrained(folder, state_dict=state)
