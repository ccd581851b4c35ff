"""Tiny Qwen-VLs and a tiny SAM2 of random weights, as folders, and the policy of both."""

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Sam2VideoConfig,
    Sam2VideoModel,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.sam2_video.configuration_sam2_video import Sam2VideoMaskDecoderConfig

from rl_train.config.grpo_config import PolicyConfig
from rl_train.policies.qwen_vl import build_policy
from tests.export.tiny_sizes import (
    MROPE_SECTION,
    ROPE_THETA,
    SAM_MASK_DECODER,
    SAM_PROMPT_ENCODER,
    SAM_SIDE,
    SAM_VISION,
    SAM_WIDTH,
    SPECIAL,
    TEXT,
    VISION,
)

VOCAB = 256 + len(SPECIAL) + 3  # the model has more rows than its tokenizer tokens, as published
IDS = {token: 256 + i for i, token in enumerate(SPECIAL)}
QWEN = dict(
    text_config=TEXT
    | dict(
        vocab_size=VOCAB,
        rope_parameters=dict(
            rope_type="default", rope_theta=ROPE_THETA, mrope_section=MROPE_SECTION
        ),
        bos_token_id=None,
        eos_token_id=IDS["<|im_end|>"],
    ),
    vision_config=VISION,
    image_token_id=IDS["<|image_pad|>"],
    video_token_id=IDS["<|video_pad|>"],
    vision_start_token_id=IDS["<|vision_start|>"],
    vision_end_token_id=IDS["<|vision_end|>"],
)
QWEN3 = QWEN | dict(
    text_config=QWEN["text_config"] | dict(head_dim=16),
    vision_config=dict(
        depth=3,
        hidden_size=32,
        intermediate_size=64,
        num_heads=2,
        out_hidden_size=64,
        patch_size=16,
        num_position_embeddings=36,
        deepstack_visual_indexes=[0, 1],
        initializer_range=0.1,
    ),
)
PREPROCESSOR = dict(  # as published
    min_pixels=3136,
    max_pixels=12845056,
    patch_size=14,
    temporal_patch_size=2,
    merge_size=2,
    image_mean=[0.48145466, 0.4578275, 0.40821073],
    image_std=[0.26862954, 0.26130258, 0.27577711],
    image_processor_type="Qwen2VLImageProcessor",
)
PREPROCESSOR3 = dict(
    size=dict(shortest_edge=4096, longest_edge=16777216),  # published: from 65536
    patch_size=16,
    temporal_patch_size=2,
    merge_size=2,
    image_mean=[0.5, 0.5, 0.5],
    image_std=[0.5, 0.5, 0.5],
    image_processor_type="Qwen2VLImageProcessorFast",
)
SAM = dict(
    vision_config=SAM_VISION,
    prompt_encoder_config=SAM_PROMPT_ENCODER,
    mask_decoder_config=SAM_MASK_DECODER,
)
SAM_MEMORY = dict(  # of the model for videos, as which SAM2 is published
    image_size=SAM_SIDE,
    memory_attention_hidden_size=SAM_WIDTH,
    memory_attention_feed_forward_hidden_size=SAM_WIDTH,
    memory_attention_num_layers=1,
    memory_attention_num_attention_heads=1,
    memory_attention_rope_feat_sizes=[8, 8],
    memory_encoder_hidden_size=SAM_WIDTH,
    memory_encoder_output_channels=8,
    mask_downsampler_embed_dim=SAM_WIDTH,
    memory_fuser_embed_dim=SAM_WIDTH,
    memory_fuser_intermediate_dim=SAM_WIDTH,
    memory_fuser_num_layers=1,
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and the special tokens of Qwen2.5-VL."""
    alphabet = {character: i for i, character in enumerate(bytes_to_unicode().values())}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    assert fast.convert_tokens_to_ids(SPECIAL) == list(IDS.values())
    return fast


def write_qwen(folder: Path, seed=0, **changes) -> Path:
    """`folder` with a Qwen2.5-VL of random weights."""
    torch.manual_seed(seed)
    model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**QWEN | changes))
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    return folder


def write_qwen3(folder: Path, seed=0, **changes) -> Path:
    """`folder` with a Qwen3-VL of random weights, whose norms have weights of their own."""
    torch.manual_seed(seed)
    model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(**QWEN3 | changes))
    for name, parameter in model.named_parameters():
        if "norm" in name and name.endswith("weight"):
            torch.nn.init.normal_(parameter, mean=1, std=0.3)
    torch.nn.init.normal_(model.model.visual.pos_embed.weight, std=0.3)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR3))
    return folder


WRITERS = dict(qwen2_5_vl=write_qwen, qwen3_vl=write_qwen3)


def write_sam(folder: Path, seed=0) -> Path:
    """`folder` with a SAM2 for videos, of random weights that heed what they are given."""
    torch.manual_seed(seed)
    # transformers 5.17 makes another part's configuration of a dictionary.
    decoder = Sam2VideoMaskDecoderConfig(**SAM_MASK_DECODER)
    sizes = SAM | SAM_MEMORY | dict(mask_decoder_config=decoder)
    model = Sam2VideoModel(Sam2VideoConfig(**sizes))
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and "norm" not in name:
            torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    shared = torch.randn(2, SAM_WIDTH // 2)
    model.shared_image_embedding.positional_embedding.copy_(shared)
    model.prompt_encoder.shared_embedding.positional_embedding.copy_(shared)
    model.save_pretrained(folder)
    return folder


def tiny_policy(qwen: Path, sam: Path, seed=0, temperature=1.0, std=0.05, **how):
    """A float32 policy of the folders; `std` of its LoRA's B, 0: outputs are the base's."""
    torch.manual_seed(seed)
    how = dict(dtype="float32", lora_r=4, lora_alpha=8, image_size=0, max_image_tokens=24) | how
    config = PolicyConfig(model_path=str(qwen), sam_path=str(sam), temperature=temperature, **how)
    policy = build_policy(config, ["lora"], 32, torch.device("cpu"))
    for name, parameter in policy.trainable.items():
        if std and "lora_B" in name:
            torch.nn.init.normal_(parameter, std=std)
    return policy


def samples(sizes, seed=0) -> list[dict]:
    """Noise of sizes (H, W), of which a corner is meant."""
    random, found = np.random.default_rng(seed), []
    for number, (height, width) in enumerate(sizes):
        pixels = random.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
        mask = np.zeros((height, width), dtype=bool)
        mask[: height // 2, : width // 2] = True
        image = Image.fromarray(pixels).resize((width, height))
        words = dict(caption=f"thing {number}", category="", image_id=f"noise{number}")
        found.append(dict(image=image, mask=mask, **words))
    return found
