"""The demo's Sa2VAs: configurations, tokenizer and random weights."""

from functools import partial

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from sa2va_hf import PROMPT_TEMPLATE, Sa2VAModel
from sa2va_hf.prompts import DESCRIBE, SEGMENT_ANSWERS, SEGMENT_WORDINGS
from tools.demo.new_folder import new_config, new_tokenizer
from tools.demo.scenes import TINY, WARM_START, Kind, in_order, make_scene

QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
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
MID_CONFIG = new_config(  # 63 M weights
    vision=dict(
        image_size=448,
        hidden_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        intermediate_size=2048,
    ),
    llm=dict(
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
    ),
    max_dynamic_patch=1,
    sam2_config=dict(
        image_size=512,
        hidden_size=256,
        mask_decoder_mlp_dim=512,
        mask_decoder_heads=8,
        memory_channels=64,
        memory_layers=1,
        memory_mlp_dim=256,
        memory_fuser_dim=256,
        backbone=dict(
            hidden_size=64,
            num_attention_heads=1,
            blocks_per_stage=[1, 2, 4, 1],
            embed_dim_per_stage=[64, 128, 256, 512],
            num_attention_heads_per_stage=[1, 2, 4, 8],
            window_size_per_stage=[8, 4, 8, 8],
            global_attention_blocks=[4, 6],
            window_positional_embedding_background_size=[7, 7],
        ),
    ),
)


def make_tokenizer(seed: int, kind: Kind = TINY, workers: int = 0) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE with Qwen2's pre-tokenisation on the demo's texts.

    As in the real tokenizer, `<|end|>` is plain text whose ids depend on what precedes it.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    scenes = in_order(partial(make_scene, seed, WARM_START, kind=kind), 300, workers)
    texts = [obj.caption + "<|end|>\n" for scene in scenes for obj in scene.objects]
    template = PROMPT_TEMPLATE["phi3_chat"]["INSTRUCTION"]
    for wording in (DESCRIBE, *SEGMENT_WORDINGS):
        question = "There are 1 part regions in the picture: region1.\n" + wording
        texts += [template.replace("{input}", question)] * 20
    texts += [answer + "<|end|>\n" for answer in SEGMENT_ANSWERS] * 20
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=640,
            special_tokens=[],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return new_tokenizer(tokenizer, SPECIAL_TOKENS)


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
