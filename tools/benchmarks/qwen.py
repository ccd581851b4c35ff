"""Qwen2.5-VL or Qwen3-VL and SAM2 of random weights, at published shapes, and tiny ones."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import Sam2Config, Sam2Model

from rl_train.policies.qwen_vl_model import VERSIONS, PointModel, QwenVL, TextModel
from sa2va_hf.configuration_sa2va import HIERA_L
from sa2va_hf.qwen_images import ImagePreprocessing
from sa2va_hf.weights import default_dtype
from tools.benchmarks.random_tokenizer import NUM_TEXT_TOKENS, tokenizer
from tools.demo import points_model

ROPE = dict(rope_type="default", rope_theta=1e6, mrope_section=[16, 24, 24])
QWEN_7B = dict(
    text_config=dict(
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=152064,
        max_position_embeddings=128000,
        rms_norm_eps=1e-6,
        rope_parameters=ROPE,
    ),
    vision_config=dict(
        depth=32,
        hidden_size=1280,
        intermediate_size=3420,
        num_heads=16,
        out_hidden_size=3584,
        patch_size=14,
        window_size=112,
        fullatt_block_indexes=[7, 15, 23, 31],
    ),
)
QWEN3_4B = dict(
    text_config=dict(
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=262144,
        rms_norm_eps=1e-6,
        rope_parameters=dict(rope_type="default", rope_theta=5e6, mrope_section=[24, 20, 20]),
    ),
    vision_config=dict(
        depth=24,
        hidden_size=1024,
        intermediate_size=4096,
        num_heads=16,
        out_hidden_size=2560,
        patch_size=16,
        num_position_embeddings=2304,
        deepstack_visual_indexes=[5, 11, 17],
    ),
)
SAM2_LARGE = dict(
    vision_config=dict(
        backbone_config=HIERA_L["backbone"]
        | dict(model_type="sam2_hiera_det_model", image_size=[1024, 1024]),
        backbone_channel_list=[1152, 576, 288, 144],
        backbone_feature_sizes=[[256, 256], [128, 128], [64, 64]],
        fpn_hidden_size=256,
    ),
    prompt_encoder_config=dict(hidden_size=256, image_size=1024),
    mask_decoder_config=dict(
        hidden_size=256, iou_head_hidden_dim=256, mlp_dim=2048, num_attention_heads=8
    ),
)
TINY_TEXT_TOKENS = 256 + 26 + 26**2 + 26**3  # words of up to three letters
TINY = dict(
    text_config=points_model.TEXT
    # three rows behind the tokenizer's last, as published vocabularies are padded
    | dict(vocab_size=TINY_TEXT_TOKENS + len(points_model.SPECIAL) + 3, tie_word_embeddings=False),
    vision_config=points_model.VISION,
)
TINY3 = dict(
    text_config=TINY["text_config"] | dict(head_dim=32),
    vision_config=dict(
        depth=2,
        hidden_size=96,
        intermediate_size=192,
        num_heads=4,
        out_hidden_size=128,
        patch_size=8,
        num_position_embeddings=64,
        deepstack_visual_indexes=[0, 1],
    ),
)
MEAN, STD = (0.481, 0.458, 0.408), (0.269, 0.261, 0.276)


@dataclass(frozen=True)
class Shapes:
    """Sizes of a model of random weights."""

    version: str  # a key of VERSIONS
    qwen: dict
    sam: dict
    num_text_tokens: int  # of the tokenizer, before its special ones

    def tokenizer(self):
        return tokenizer(self.num_text_tokens, points_model.SPECIAL)

    def preprocessing(self, side: int | None) -> ImagePreprocessing:
        """Return the preprocessing of images into squares of `side` pixels; None: the default."""
        side = VERSIONS[self.version].image_size if side is None else side
        patch, merge = self.qwen["vision_config"]["patch_size"], 2
        if side < 1 or side % (patch * merge):
            raise ValueError(f"--image_size {side}: must be a multiple of {patch * merge}")
        return ImagePreprocessing(patch, merge, side**2, side**2, side, MEAN, STD)


SHAPES = {
    "qwen-7b": Shapes("qwen2_5_vl", QWEN_7B, SAM2_LARGE, NUM_TEXT_TOKENS),
    "qwen-tiny": Shapes("qwen2_5_vl", TINY, points_model.SAM, TINY_TEXT_TOKENS),
    "qwen3-4b": Shapes("qwen3_vl", QWEN3_4B, SAM2_LARGE, NUM_TEXT_TOKENS),
    "qwen3-tiny": Shapes("qwen3_vl", TINY3, points_model.SAM, TINY_TEXT_TOKENS),
}


def random_qwen(shapes: Shapes, device: torch.device | str, seed: int = 0) -> QwenVL:
    """Build a Qwen-VL of random bfloat16 weights, with the special tokens of `shapes`."""
    model_class = VERSIONS[shapes.version].model_class
    id_of = {name: shapes.num_text_tokens + i for i, name in enumerate(points_model.SPECIAL)}
    config = model_class.config_class(
        text_config=shapes.qwen["text_config"] | dict(eos_token_id=id_of["<|im_end|>"]),
        vision_config=shapes.qwen["vision_config"],
        tie_word_embeddings=False,
        image_token_id=id_of["<|image_pad|>"],
        video_token_id=id_of["<|video_pad|>"],
        vision_start_token_id=id_of["<|vision_start|>"],
        vision_end_token_id=id_of["<|vision_end|>"],
    )
    torch.manual_seed(seed)
    with default_dtype(torch.bfloat16), torch.device(device):
        return model_class(config).eval()


def random_points(shapes: Shapes, device: torch.device | str, seed: int = 0) -> PointModel:
    """Build both models of random weights in the dtypes of a run: SAM2's decoder is float32."""
    vlm = random_qwen(shapes, device, seed)
    with torch.device(device):
        sam = Sam2Model(Sam2Config(**shapes.sam)).eval()
    # As in a run: the mask decoder stays in float32.
    sam.vision_encoder.to(torch.bfloat16)
    return PointModel(vlm, sam)


@dataclass
class TextOf(TextModel):
    """The decoder of a Qwen-VL, which transformers samples by the whole model."""

    vlm: QwenVL

    def generate(self, **inputs: Any):
        return self.vlm.generate(**inputs)
