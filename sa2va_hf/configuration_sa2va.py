"""The configuration of Sa2VA: the original `config.json` (model_type `sa2va_chat`), kept as it is.

Native transformers configurations of the three parts are derived from it, with the settings by
which the native modules compute what the original code does (`tests/sa2va_hf/test_reference*.py`).
"""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from transformers import InternVLVisionConfig, Qwen2Config, Sam2VideoConfig, Sam2VisionConfig
from transformers.models.sam2_video.configuration_sam2_video import (
    Sam2VideoMaskDecoderConfig,
    Sam2VideoPromptEncoderConfig,
)

SUPPORTED_LLMS = ("Qwen2ForCausalLM",)

# SAM 2.0 Hiera-L at 1024: the original code hard-codes it, no published config.json mentions it.
HIERA_L = dict(
    image_size=1024,
    hidden_size=256,
    mask_decoder_mlp_dim=2048,
    mask_decoder_heads=8,
    memory_channels=64,
    memory_layers=4,
    memory_mlp_dim=2048,
    memory_fuser_dim=1024,
    backbone=dict(
        hidden_size=144,
        num_attention_heads=2,
        blocks_per_stage=[2, 6, 36, 4],
        embed_dim_per_stage=[144, 288, 576, 1152],
        num_attention_heads_per_stage=[2, 4, 8, 16],
        window_size_per_stage=[8, 4, 16, 8],
        global_attention_blocks=[23, 33, 43],
        window_positional_embedding_background_size=[7, 7],
    ),
)

# What the original takes where a file has no such key. Tiling is what its `predict_forward` does
# whatever the file says.
_DEFAULTS = dict(
    model_type="sa2va_chat",
    downsample_ratio=0.5,
    force_image_size=None,  # vision_config's image_size
    ps_version="v1",
    select_layer=-1,
    use_thumbnail=True,
    min_dynamic_patch=1,
    max_dynamic_patch=12,
)
_VISION_DEFAULTS = dict(
    hidden_size=3200,
    num_hidden_layers=48,
    num_attention_heads=25,
    intermediate_size=12800,
    image_size=224,
    patch_size=14,
    layer_norm_eps=1e-6,
    hidden_act="gelu",
    qkv_bias=False,
    qk_normalization=True,
    norm_type="rms_norm",
)


class Sa2VAConfig:
    """One Sa2VA checkpoint's configuration.

    A key that is missing means what it means to the original, whose defaults are InternViT-6B's.

    Attributes:
        raw: the original dictionary; fields that this code does not read are kept and written back
            unchanged, as the original's `PretrainedConfig` does.
        template: name of the chat template in `sa2va_hf.templates.PROMPT_TEMPLATE`; files may have
            - for _.
        vision, llm, sam2: native `InternVLVisionConfig`, `Qwen2Config`, `Sam2VideoConfig`.
        tied: embed_tokens and lm_head are one tensor (`llm_config.tie_word_embeddings`; the file
            may still hold two).

    Raises:
        ValueError: the file describes a model that this code would compute wrongly (another LLM or
            vision encoder, `ps_version` v1, another feature layer, query-key normalisation in the
            vision encoder, sliding window, scaled RoPE), or names no template.
    """

    def __init__(self, **raw: Any):
        self.raw = {**_DEFAULTS, **copy.deepcopy(raw)}
        self._check_family()
        self.vision_raw = {**_VISION_DEFAULTS, **self.raw["vision_config"]}
        self._check()
        self.template = self.raw["template"].replace("-", "_")
        self.image_size = self.raw["force_image_size"] or self.vision_raw["image_size"]
        self.downsample_ratio = self.raw["downsample_ratio"]
        self.vision = self._vision()
        # Sa2VAModel ties embed_tokens and lm_head itself: transformers' own tying depends on how a
        # model is built and loaded.
        self.tied = bool(self.raw["llm_config"].get("tie_word_embeddings", False))
        self.llm = Qwen2Config(
            **{k: v for k, v in self.raw["llm_config"].items() if k in _QWEN2_FIELDS},
            tie_word_embeddings=False,
        )
        self.sam2 = self._sam2()

    def _check_family(self):
        """Raise ValueError if the file is of another kind of model than an InternVL's Sa2VA."""
        if (model_type := self.raw["model_type"]) != "sa2va_chat":
            raise ValueError(
                f"config.json: model_type is {model_type!r}; only 'sa2va_chat', Sa2VA's, is "
                "supported"
            )
        for key in ("vision_config", "llm_config"):
            if not isinstance(self.raw.get(key), dict):
                parts = [name for name in self.raw if name.endswith("_config")]
                raise ValueError(
                    f"config.json: '{key}' is missing; a Sa2VA that is made of InternVL has "
                    "vision_config and llm_config, and this file has "
                    f"{' and '.join(parts) or 'neither'} (Sa2VA of Qwen2.5-VL and Qwen3-VL is not "
                    "supported)"
                )

    def _check(self):
        llms = self.raw["llm_config"].get("architectures") or ["missing"]
        if llms[0] not in SUPPORTED_LLMS:
            raise ValueError(
                f"config.json: llm_config.architectures is {llms[0]}; supported: "
                f"{', '.join(SUPPORTED_LLMS)} (Sa2VA-1B, Sa2VA-4B and the InternVL3-based ones "
                "whose LLM is Qwen2.5)"
            )
        # What the modules here compute; another value would give other numbers without an error.
        expected = dict(ps_version="v2", select_layer=-1, downsample_ratio=0.5)
        for key, value in expected.items():
            if self.raw[key] != value:
                raise ValueError(
                    f"config.json: {key} is {self.raw[key]!r}; only {value!r} is supported"
                )
        if self.raw["llm_config"].get("use_sliding_window"):
            raise ValueError("config.json: llm_config.use_sliding_window is not supported")
        # "dynamic" (InternVL3) changes nothing within max_position_embeddings, which prompts are
        # checked against.
        rope = self.raw["llm_config"].get("rope_scaling") or {}
        if rope.get("rope_type", rope.get("type", "default")) not in ("default", "dynamic"):
            raise ValueError(f"config.json: llm_config.rope_scaling {rope} is not supported")
        if not isinstance(self.raw.get("template"), str):
            raise ValueError("config.json: 'template', the name of a chat template, is missing")
        # Without `architectures` the original leaves the whole vision_config unread.
        encoder = (self.raw["vision_config"].get("architectures") or ["missing"])[0]
        if encoder != "InternVisionModel":
            raise ValueError(
                f"config.json: vision_config.architectures is {encoder}; supported: "
                "InternVisionModel"
            )
        if self.vision_raw["qk_normalization"] or self.vision_raw["norm_type"] != "layer_norm":
            raise ValueError(
                "config.json: vision_config with qk_normalization or another norm_type than "
                "layer_norm (InternViT-6B, and what missing keys mean) is not supported"
            )

    def _vision(self) -> InternVLVisionConfig:
        v = self.vision_raw
        # use_mean_pooling=True means "no LayerNorm after the last layer", as in the original.
        return InternVLVisionConfig(
            attention_bias=v["qkv_bias"],
            use_qk_norm=False,
            use_mean_pooling=True,
            use_mask_token=False,
            use_absolute_position_embeddings=True,
            norm_type="layer_norm",
            **{
                k: v[k]
                for k in (
                    "hidden_size",
                    "num_hidden_layers",
                    "num_attention_heads",
                    "intermediate_size",
                    "image_size",
                    "patch_size",
                    "layer_norm_eps",
                    "hidden_act",
                )
            },
        )

    def _sam2(self) -> Sam2VideoConfig:
        # A key of ours, for small models: the original's files have none.
        s = {**HIERA_L, **self.raw.get("sam2_config", {})}
        size, hidden = s["image_size"], s["hidden_size"]
        backbone = dict(model_type="sam2_hiera_det_model", image_size=[size, size], **s["backbone"])
        vision = Sam2VisionConfig(
            backbone_config=backbone,
            # From the coarsest level to the finest.
            backbone_channel_list=backbone["embed_dim_per_stage"][::-1],
            fpn_hidden_size=hidden,
            # Strides 4, 8 and 16.
            backbone_feature_sizes=[[size // 4] * 2, [size // 8] * 2, [size // 16] * 2],
        )
        return Sam2VideoConfig(
            vision_config=vision,
            image_size=size,
            prompt_encoder_config=Sam2VideoPromptEncoderConfig(hidden_size=hidden, image_size=size),
            mask_decoder_config=Sam2VideoMaskDecoderConfig(
                hidden_size=hidden,
                iou_head_hidden_dim=hidden,
                mlp_dim=s["mask_decoder_mlp_dim"],
                num_attention_heads=s["mask_decoder_heads"],
            ),
            # SAM 2.0, not 2.1: these two came later.
            enable_occlusion_spatial_embedding=False,
            enable_temporal_pos_encoding_for_object_pointers=False,
            memory_attention_hidden_size=hidden,
            memory_attention_num_layers=s["memory_layers"],
            memory_attention_feed_forward_hidden_size=s["memory_mlp_dim"],
            memory_attention_rope_feat_sizes=[size // 16] * 2,
            memory_encoder_hidden_size=hidden,
            memory_encoder_output_channels=s["memory_channels"],
            mask_downsampler_embed_dim=hidden,
            memory_fuser_embed_dim=hidden,
            memory_fuser_intermediate_dim=s["memory_fuser_dim"],
        )

    @property
    def tokens_per_tile(self) -> int:
        """Number of `<IMG_CONTEXT>` tokens of one tile: 256 for 448 px."""
        return self.grid_size**2

    @property
    def grid_size(self) -> int:
        """Side of the region grid in cells: 16 for 448 px tiles, patch 14 and pixel shuffle 0.5."""
        return int(self.image_size // self.vision_raw["patch_size"] * self.downsample_ratio)

    @property
    def prompt_size(self) -> int:
        """Width of SAM2's prompt embedding (256 in every published model)."""
        return self.sam2.prompt_encoder_config.hidden_size

    @classmethod
    def from_pretrained(cls, path: str | Path) -> "Sa2VAConfig":
        """Read the configuration in `path/config.json`; ValueError if it is absent or no JSON."""
        file = Path(path) / "config.json"
        if not file.is_file():
            raise ValueError(f"{file} does not exist: {path} is not a Sa2VA checkpoint folder")
        try:
            raw = json.loads(file.read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{file} is not valid JSON: {error}") from error
        return cls(**raw)

    @property
    def dtype_name(self) -> str | None:
        """Name of the dtype that the file gives the weights, by either of transformers' keys."""
        return self.raw.get("dtype") or self.raw.get("torch_dtype")

    def save_pretrained(self, path: str | Path, dtype: torch.dtype | None = None):
        """Write `path/config.json` in the original's form, with the weights' torch.dtype if given.

        That goes into whichever of its two keys the file has, if any.
        """
        Path(path).mkdir(parents=True, exist_ok=True)
        name = str(dtype).removeprefix("torch.")
        changed = {key: name for key in ("dtype", "torch_dtype") if dtype and key in self.raw}
        (Path(path) / "config.json").write_text(json.dumps(self.raw | changed, indent=2) + "\n")


# Fields of the original llm_config that decide what Qwen2 computes; the rest of that dictionary is
# transformers 4's generation defaults.
_QWEN2_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "rope_theta",
    "attention_dropout",
    "bos_token_id",
    "eos_token_id",
)
