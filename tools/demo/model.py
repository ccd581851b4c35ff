"""The demo's Sa2VAs: configurations, tokenizer and random weights."""

from collections.abc import Iterable

import torch
from transformers import PreTrainedTokenizerFast

from sa2va_hf import PROMPT_TEMPLATE, Sa2VAModel
from sa2va_hf.prompts import DESCRIBE, SEGMENT_ANSWERS, SEGMENT_WORDINGS
from tools.demo.new_folder import new_config, train_tokenizer

SPECIAL_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<img>",
    "</img>",
    "<IMG_CONTEXT>",
    "[SEG]",
    "<p>",
    "</p>",
    "<vp>",
    "</vp>",
]
CONFIG = new_config(
    vision=dict(
        image_size=224,
        hidden_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=256,
    ),
    llm=dict(
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    ),
    max_dynamic_patch=1,
    sam2_config=dict(
        image_size=256,
        hidden_size=64,
        mask_decoder_mlp_dim=128,
        mask_decoder_heads=4,
        memory_channels=64,
        memory_layers=1,
        memory_mlp_dim=64,
        memory_fuser_dim=64,
        backbone=dict(
            hidden_size=24,
            num_attention_heads=1,
            blocks_per_stage=[1, 1, 2, 1],
            embed_dim_per_stage=[24, 48, 96, 192],
            num_attention_heads_per_stage=[1, 2, 4, 8],
            window_size_per_stage=[8, 4, 8, 4],
            global_attention_blocks=[3],
            window_positional_embedding_background_size=[7, 7],
        ),
    ),
)


def tokenizer_of(captions: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a tokenizer on captions and the prompts' texts.

    As in the real tokenizer, `<|end|>` is plain text whose ids depend on what precedes it.
    """
    texts = [f"{caption}<|end|>\n" for caption in captions]
    template = PROMPT_TEMPLATE["phi3_chat"]["INSTRUCTION"]
    for wording in (DESCRIBE, *SEGMENT_WORDINGS):
        question = "There are 1 part regions in the picture: region1.\n" + wording
        texts += [template.replace("{input}", question)] * 20
    texts += [f"{answer}<|end|>\n" for answer in SEGMENT_ANSWERS] * 20
    return train_tokenizer(texts, vocab_size, SPECIAL_TOKENS)


def initialise(model: Sa2VAModel):
    """Draw random weights at the scale of each layer's inputs.

    transformers' fixed std of 0.02 suits widths of a thousand; at 64 it lets the signal vanish
    within a few layers.
    """
    residual_ends = ("o_proj.weight", "down_proj.weight", "projection_layer.weight", "fc2.weight")
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            if name.endswith("bias"):
                torch.nn.init.zeros_(parameter)
        elif "embed" in name or "token" in name or "memory" in name and parameter.ndim != 4:
            torch.nn.init.normal_(parameter, std=0.1)
        else:
            fan_in = parameter[0].numel() if "upscale_conv" not in name else parameter.shape[0]
            scale = 0.5 if name.endswith(residual_ends) else 1.0
            torch.nn.init.normal_(parameter, std=scale * fan_in**-0.5)
    # Patches have a mean square of about 1; places would else be learnt long after them.
    torch.nn.init.normal_(model.vision_model.embeddings.position_embeddings, std=0.6)
    for layer in model.vision_model.encoder.layer:
        torch.nn.init.ones_(layer.lambda_1)
        torch.nn.init.ones_(layer.lambda_2)
