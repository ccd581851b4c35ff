"""The configuration of Sa2VA: the original `config.json` (model_type `sa2va_chat`), kept as it is.

Native transformers configurations of the parts are derived from it, with the settings by which the
native modules compute what the original code does (`tests/sa2va_hf/test_reference*.py`).
"""

import copy
import json
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import (
    PreTrainedConfig,
    Sam2VideoConfig,
    Sam2VisionConfig,
    Sam3TrackerVideoConfig,
)
from transformers.models.sam2_video.configuration_sam2_video import (
    Sam2VideoMaskDecoderConfig,
    Sam2VideoPromptEncoderConfig,
)

from .weights import holds_sam3

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


class Sa2VAConfig:
    """One Sa2VA checkpoint's configuration, with the parts that all families share.

    `Sa2VAConfig(**raw)` returns the class of the file's family (`families.FAMILIES`), as
    `pathlib.Path` returns that of the platform. A key that is missing means what it means to the
    original.

    Attributes:
        raw: the original dictionary; fields that this code does not read are kept and written back
            unchanged, as the original's `PretrainedConfig` does.
        folder: where it was read, whose other files belong to it; None without one.
        template: name of the chat template in `sa2va_hf.templates.PROMPT_TEMPLATE`; files may have
            - for _.
        llm, sam2: native configurations of the language model and of SAM2, or of SAM3 in its place.
        seg_state: which last hidden state at [SEG] prompts SAM2, "before_norm" or "after_norm".
        tied: embed_tokens and lm_head are one tensor; the file may still hold two.
        tokens_per_tile: tokens in a prompt of one of the pieces in which images are counted.

    Raises:
        ValueError: the file is of no known family, or describes a model that this code would
            compute wrongly.
    """

    defaults: ClassVar[dict[str, Any]] = dict(model_type="sa2va_chat")  # of missing keys
    folder: Path | None = None
    template: str
    llm: PreTrainedConfig
    tied: bool
    seg_state: str = "after_norm"
    tokens_per_tile: int

    def __new__(cls, **raw: Any) -> "Sa2VAConfig":
        if cls is Sa2VAConfig:
            from .families import family_of  # the table of families names subclasses of this class

            cls = family_of(raw).config
        return super().__new__(cls)

    def __init__(self, **raw: Any):
        self.raw = {**self.defaults, **copy.deepcopy(raw)}
        self.read()
        # A key of ours, for small models: no original file says that its model has SAM3.
        self.sam2 = self._sam3() if "sam3_config" in self.raw else self._sam2()

    def read(self):
        """Derive the family's attributes from `raw`; ValueError if they are not supported."""
        raise NotImplementedError

    def _sam3(self) -> Sam3TrackerVideoConfig:
        # The native defaults are the original's.
        return Sam3TrackerVideoConfig(**copy.deepcopy(self.raw.get("sam3_config", {})))

    @property
    def has_sam3(self) -> bool:
        """True if the masks are drawn by SAM3 and not by SAM2."""
        return isinstance(self.sam2, Sam3TrackerVideoConfig)

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
    def prompt_size(self) -> int:
        """Width of SAM2's prompt embedding (256 in every published model)."""
        return self.sam2.prompt_encoder_config.hidden_size

    @classmethod
    def from_pretrained(cls, path: str | Path, **changes: Any) -> "Sa2VAConfig":
        """Read the configuration in `path/config.json`, with some keys changed.

        Raises ValueError if the file is absent, no JSON or not supported.
        """
        file = Path(path) / "config.json"
        if not file.is_file():
            raise ValueError(f"{file} does not exist: {path} is not a Sa2VA checkpoint folder")
        try:
            raw = json.loads(file.read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{file} is not valid JSON: {error}") from error
        config = cls(**(raw | changes))
        config.folder = Path(path)
        if holds_sam3(config.folder):
            config.sam2 = config._sam3()
        return config

    @property
    def dtype_name(self) -> str | None:
        """Name of the dtype that the file gives the weights, by either of transformers' keys."""
        return self.raw.get("dtype") or self.raw.get("torch_dtype")

    @property
    def one_piece_masks(self) -> bool:
        """True if masks of images, not of videos, keep one connected piece; the key is ours."""
        return self.raw.get("one_piece_masks", False)

    def save_pretrained(self, path: str | Path, dtype: torch.dtype | None = None):
        """Write `path/config.json` in the original's form, with the weights' torch.dtype if given.

        That goes into whichever of its two keys the file has, if any.
        """
        Path(path).mkdir(parents=True, exist_ok=True)
        name = str(dtype).removeprefix("torch.")
        changed = {key: name for key in ("dtype", "torch_dtype") if dtype and key in self.raw}
        (Path(path) / "config.json").write_text(json.dumps(self.raw | changed, indent=2) + "\n")
