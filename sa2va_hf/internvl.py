"""Sa2VA of InternVL: configuration, model and processor of Sa2VA-1B, 4B, 8B, 26B and InternVL3's.

Image and region tokens go into the LLM's embeddings at `<IMG_CONTEXT>`.

Letters: B sequences, L their length, V vocabulary, C LLM width, t tiles, n regions.
"""

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import (
    GenerationConfig,
    InternVLVisionConfig,
    InternVLVisionModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from .configuration_sa2va import Sa2VAConfig
from .modeling_sa2va import Sa2VAModel, positions
from .prediction import PredictionInputs, Request
from .processing_sa2va import (
    Sa2VAProcessor,
    normalise_tiles,
    planes,
    region_grid,
    tile_grid,
    to_rgb,
)
from .templates import (
    IMAGE_STRINGS,
    IMG_CONTEXT_TOKEN,
    SPECIAL_TOKENS,
    chat_template,
    image_string,
    region_string,
)
from .to_device import to_device
from .visual_tokens import context_features, pixel_shuffle

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The original's LLMs, and the native configuration and model that compute what they do.
LLMS = {
    "Qwen2ForCausalLM": (Qwen2Config, Qwen2ForCausalLM),
    "InternLM2ForCausalLM": (LlamaConfig, LlamaForCausalLM),
}
# What the original takes where a file has no such key. Tiling is what its `predict_forward` does
# whatever the file says.
_DEFAULTS = dict(
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


class InternVLConfig(Sa2VAConfig):
    """The configuration of a Sa2VA that is made of InternVL.

    A missing key of vision_config has the original's default, which is InternViT-6B's.

    Attributes:
        vision: native `InternVLVisionConfig`.
        llm: native `Qwen2Config`, or `LlamaConfig` for InternLM2.

    Raises:
        ValueError: another LLM or vision encoder, `ps_version` v1, another feature layer, sliding
            window, RoPE that is scaled in another way than dynamically, or no template.
    """

    defaults = Sa2VAConfig.defaults | _DEFAULTS

    def read(self):
        self.vision_raw = {**_VISION_DEFAULTS, **self.raw["vision_config"]}
        self._check()
        self.template = self.raw["template"].replace("-", "_")
        self.image_size = self.raw["force_image_size"] or self.vision_raw["image_size"]
        self.downsample_ratio = self.raw["downsample_ratio"]
        self.vision = self._vision()
        # Sa2VAModel ties embed_tokens and lm_head itself: transformers' own tying depends on how a
        # model is built and loaded.
        self.tied = bool(self.raw["llm_config"].get("tie_word_embeddings", False))
        self.llm = self._llm()

    def _check(self):
        llms = self.raw["llm_config"].get("architectures") or ["missing"]
        if llms[0] not in LLMS:
            raise ValueError(
                f"config.json: llm_config.architectures is {llms[0]}; supported: "
                f"{', '.join(LLMS)} (Sa2VA-1B, 4B, 8B, 26B and the InternVL3-based ones)"
            )
        if self.raw.get("seg_state", "after_norm") != "after_norm":
            raise ValueError("seg_state: only a Sa2VA of Qwen-VL has another than after_norm")
        # What the modules here compute; another value would give other numbers without an error.
        expected = dict(ps_version="v2", select_layer=-1, downsample_ratio=0.5)
        for key, value in expected.items():
            if self.raw[key] != value:
                raise ValueError(
                    f"config.json: {key} is {self.raw[key]!r}; only {value!r} is supported"
                )
        if self.raw["llm_config"].get("use_sliding_window"):
            raise ValueError("config.json: llm_config.use_sliding_window is not supported")
        rope = self.raw["llm_config"].get("rope_scaling") or {}
        rope_type = _rope_type(rope)
        # Not a factor <= 1: it would shrink positions.
        if rope_type not in ("default", "dynamic") or (
            rope_type == "dynamic" and not rope.get("factor", 0) > 1
        ):
            raise ValueError(
                f"config.json: llm_config.rope_scaling {rope} is not supported; known: none, or "
                "type 'dynamic' with a factor above 1"
            )
        if not isinstance(self.raw.get("template"), str):
            raise ValueError("config.json: 'template', the name of a chat template, is missing")
        # Without `architectures` the original leaves the whole vision_config unread.
        encoder = (self.raw["vision_config"].get("architectures") or ["missing"])[0]
        if encoder != "InternVisionModel":
            raise ValueError(
                f"config.json: vision_config.architectures is {encoder}; supported: "
                "InternVisionModel"
            )
        if self.vision_raw["norm_type"] not in ("layer_norm", "rms_norm"):
            raise ValueError(
                f"config.json: vision_config.norm_type is {self.vision_raw['norm_type']!r}; "
                "supported: layer_norm, rms_norm"
            )
        # The native norms of queries and keys have this eps whatever the config says.
        eps = self.vision_raw["layer_norm_eps"]
        if self.vision_raw["qk_normalization"] and eps != 1e-6:
            raise ValueError(
                f"config.json: vision_config.layer_norm_eps is {eps}; with qk_normalization only "
                "1e-06 is supported"
            )

    def _vision(self) -> InternVLVisionConfig:
        v = self.vision_raw
        # use_mean_pooling=True means "no LayerNorm after the last layer", as in the original.
        return InternVLVisionConfig(
            attention_bias=v["qkv_bias"],
            # InternViT-6B normalises queries and keys over the whole width, before the heads split.
            use_qk_norm=v["qk_normalization"],
            use_mean_pooling=True,
            use_mask_token=False,
            use_absolute_position_embeddings=True,
            **{
                k: v[k]
                for k in (
                    "norm_type",
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

    def _llm(self) -> Qwen2Config | LlamaConfig:
        raw = self.raw["llm_config"]
        native, _ = LLMS[raw["architectures"][0]]
        fields = {key: raw[key] for key in _LLM_FIELDS if key in raw}
        if native is LlamaConfig:
            # What the original takes where a file has no such key.
            fields["attention_bias"] = raw.get("bias", True)
            fields.setdefault("vocab_size", 103168)
            heads, kv_heads = raw.get("num_attention_heads", 32), raw.get("num_key_value_heads")
            if heads % (kv_heads or heads):
                raise ValueError(
                    f"config.json: llm_config.num_attention_heads {heads} is not a multiple of "
                    f"num_key_value_heads {kv_heads}"
                )
        rope = raw.get("rope_scaling") or {}
        if _rope_type(rope) == "dynamic":
            # Sequences longer than max_position_embeddings stretch the rotation; shorter ones are
            # computed as without it.
            fields["rope_parameters"] = dict(
                rope_type="dynamic",
                rope_theta=float(fields.pop("rope_theta", 10000.0)),
                factor=float(rope["factor"]),
            )
        return native(**fields, tie_word_embeddings=False)

    @property
    def tokens_per_tile(self) -> int:
        """Number of `<IMG_CONTEXT>` tokens of one tile: 256 for 448 px."""
        return self.grid_size**2

    @property
    def grid_size(self) -> int:
        """Side of the region grid in cells: 16 for 448 px tiles, patch 14 and pixel shuffle 0.5."""
        return int(self.image_size // self.vision_raw["patch_size"] * self.downsample_ratio)


def _rope_type(rope: dict) -> str:
    """Return the kind of scaled RoPE by either of transformers' keys."""
    return rope.get("rope_type", rope.get("type", "default"))


# Fields of the original llm_config that decide what the LLM computes; the rest of that dictionary
# is transformers 4's generation defaults.
_LLM_FIELDS = (
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


class InternVLModel(Sa2VAModel):
    """Sa2VA of InternVL: a vision encoder of tiles, the projector `mlp1` and a language model."""

    image_token, special_tokens = IMG_CONTEXT_TOKEN, SPECIAL_TOKENS
    image_strings = IMAGE_STRINGS
    region_prompts = ("tokens", "outline", "box", "coordinates")
    box_text, relative_boxes = "<box>[[{}, {}, {}, {}]]</box>", True
    embed_tokens_key = "language_model.model.embed_tokens.weight"
    lm_head_key = "language_model.lm_head.weight"

    def build(self, config: InternVLConfig):
        # Pixel shuffle joins 2 x 2 patches, so a token is four times as wide as a patch.
        vit = config.vision.hidden_size * int(1 / config.downsample_ratio) ** 2
        width = config.llm.hidden_size
        self.vision_model = InternVLVisionModel(config.vision)
        self.mlp1 = nn.Sequential(
            nn.LayerNorm(vit), nn.Linear(vit, width), nn.GELU(), nn.Linear(width, width)
        )
        _, language_model = LLMS[config.raw["llm_config"]["architectures"][0]]
        self.language_model = language_model(config.llm)
        if config.tied:
            self.language_model.lm_head.weight = self.language_model.model.embed_tokens.weight

    def vision_features(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Return features (t, tokens, 4 * ViT width) of tiles, after pixel shuffle, before `mlp1`.

        Args:
            pixel_values: (t, 3, S, S), normalised. Tokens are row-major.
        """
        dtype = self.vision_model.embeddings.cls_token.dtype
        # Patch tokens (t, 1024, ViT width) for 448 px; the class token is dropped.
        x = self.vision_model(pixel_values.to(dtype)).last_hidden_state[:, 1:]
        return pixel_shuffle(x)

    def encode_images(self, pixels: list[torch.Tensor]) -> tuple[torch.Tensor, list[int], None]:
        """Return (`vision_features` of images, tiles of each, None).

        Args:
            pixels: (t, 3, S, S) uint8 tiles of each. Sent as uint8, a quarter of float32.
        """
        tiles = to_device(torch.cat(pixels), self.device)
        return self.vision_features(normalise_tiles(tiles)), list(map(len, pixels)), None

    def project(self, vision: torch.Tensor) -> torch.Tensor:
        """Return the LLM's image tokens (t, tokens, C) of `vision_features`."""
        return self.mlp1(vision)

    def extract_feature(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Return image tokens (t, 256, C) for the LLM of normalised tiles (t, 3, 448, 448)."""
        return self.project(self.vision_features(pixel_values))

    def embed(
        self,
        input_ids: torch.Tensor,
        image_features: torch.Tensor,
        prompt_masks: list[torch.Tensor] | None = None,
        vp_overall_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return token embeddings (B, L, C), with image and region features at `<IMG_CONTEXT>`.

        Args:
            input_ids: (B, L). If they, and prompt_masks, are on the CPU, nothing waits for the GPU.
            image_features: (t, tokens, C), all tiles of all samples in batch order, or None for
                text alone.
            prompt_masks: list over the flagged tiles of (n, 16, 16) bool regions.
            vp_overall_mask: (t,) bool, the tile of each sample (its last) that regions refer to.

        Raises:
            ValueError: the number of `<IMG_CONTEXT>` ids differs from the number of features (the
                original prints a line and then computes without any image, or repeats features);
                no tokenizer is known.
        """
        ids = to_device(input_ids, self.device)
        embeds = self.language_model.get_input_embeddings()(ids)  # (B, L, C)
        if image_features is None:
            return embeds
        self.require_tokenizer()
        features = context_features(image_features, prompt_masks, vp_overall_mask)
        # Slots of the whole batch in order, as `features` are: (slots,), (slots, C).
        slots = (input_ids == self.img_context_id).flatten().nonzero()[:, 0]
        if len(slots) != len(features):
            raise ValueError(
                f"the prompts hold {len(slots)} {IMG_CONTEXT_TOKEN} tokens, the tiles and "
                f"regions give {len(features)} features"
            )
        slots, flat = to_device(slots, self.device), embeds.flatten(0, 1)
        # Not in place: autograd follows features and embeddings.
        return flat.index_copy(0, slots, features.to(embeds.dtype)).view(embeds.shape)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        pixel_values: torch.Tensor | None = None,
        prompt_masks: list[torch.Tensor] | None = None,
        vp_overall_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        *,
        image_features: torch.Tensor | None = None,
    ):
        """Return logits and last hidden states of full sequences.

        Args:
            input_ids, attention_mask: (B, L), padded on either side.
            pixel_values: (t, 3, 448, 448) tiles of all samples in batch order.
            prompt_masks, vp_overall_mask: see `embed`.
            position_ids: (B, L); default counts the attended tokens.
            image_features: (t, tokens, C) from `extract_feature`, instead of pixel_values.

        Returns:
            .logits (B, L, V); .hidden_states, a tuple of one: (B, L, C) after the final RMSNorm.
        """
        if pixel_values is not None:
            image_features = self.extract_feature(pixel_values)
        embeds = self.embed(input_ids, image_features, prompt_masks, vp_overall_mask)
        if position_ids is None:
            position_ids = positions(attention_mask)
        hidden = self.language_model.model(
            inputs_embeds=embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=False,
        ).last_hidden_state
        return SimpleNamespace(logits=self.language_model.lm_head(hidden), hidden_states=(hidden,))

    @torch.no_grad()
    def generate(
        self,
        pixel_values: torch.Tensor | None = None,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        visual_features: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        prompt_masks: list[torch.Tensor] | None = None,
        vp_overall_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ):
        """Return what transformers' `generate` of the LLM returns for prompts with images.

        Args:
            pixel_values: (t, 3, S, S) tiles of all prompts in batch order, or a list of
                (n, 3, S, S) or (3, S, S); tiles of zeros are no image. None for text alone.
            input_ids: (B, L), padded on the left; attention_mask: (B, L), all ones if None.
            visual_features: (t, tokens, C) of these tiles, in place of `extract_feature`.
            prompt_masks, vp_overall_mask: see `embed`.
            return_dict: ignored, as in the original.
            kwargs: of the LLM's `generate`.

        Raises:
            ValueError: as `embed`, where the original computes without the image.

        Source: `generate` in the original's `modeling_sa2va_chat.py`.
        """
        ids, features = input_ids.to(self.device), None
        if pixel_values is not None:
            if isinstance(pixel_values, list):
                pixel_values = torch.cat([p[None] if p.ndim == 3 else p for p in pixel_values])
            elif pixel_values.ndim == 5:
                pixel_values = pixel_values.flatten(0, 1)
            tiles = pixel_values.to(self.device)
            features = self.extract_feature(tiles) if visual_features is None else visual_features
            shown = tiles.flatten(1).any(1)  # (t,): not a tile of zeros
            features = features[shown.to(features.device)]
            if vp_overall_mask is not None:
                vp_overall_mask = vp_overall_mask.bool()[shown.to(vp_overall_mask.device)]
        mask = torch.ones_like(ids) if attention_mask is None else attention_mask.to(self.device)
        return self.language_model.generate(
            inputs_embeds=self.embed(ids, features, prompt_masks, vp_overall_mask),
            attention_mask=mask,
            generation_config=generation_config,
            output_hidden_states=output_hidden_states,
            use_cache=True,
            **kwargs,
        )

    # Prediction

    def record_states(self, states: list[torch.Tensor]) -> RemovableHandle:
        """Append the last position's state after the final norm (C,) of each forward to come."""
        return self.language_model.model.register_forward_hook(
            lambda module, args, out: states.append(out.last_hidden_state[0, -1])
        )

    def prediction_inputs(
        self, request: Request, tokenizer: "PreTrainedTokenizerBase"
    ) -> PredictionInputs:
        """Return the prompt of `predict_forward`; ValueError if its words do not fit the image."""
        _check(request)
        config, processor = self.config, Sa2VAProcessor(self.config)
        template = chat_template(config.template)
        tiles, grids, image_tokens = None, None, ""
        if request.frames and request.is_image:
            tiles = processor.tiles(request.frames[0])  # (t, 3, S, S)
            image_tokens = image_string(len(tiles), config.tokens_per_tile)
        elif request.frames:
            one_tile = Sa2VAProcessor(config, max_tiles=1)
            tiles = torch.cat([one_tile.tiles(frame) for frame in request.frames])
            image_tokens = "\n".join([image_string(1, config.tokens_per_tile)] * len(tiles))
        if request.mask_prompts is not None:
            grids = _region_grids(processor, request.mask_prompts)  # (n, g, g)
            image_tokens += region_string(grids.flatten(1).sum(1).tolist())
        prompt = request.past_text + template["INSTRUCTION"].replace(
            "{input}", request.text.replace("<image>", image_tokens)
        )
        ids = torch.tensor([tokenizer.encode(prompt)], device=self.device)  # (1, L)
        features = None if tiles is None else self.extract_feature(tiles.to(self.device))
        # Regions refer to the thumbnail, or the only tile: the last.
        flags = None if grids is None else torch.arange(len(tiles)) == len(tiles) - 1
        embeds = self.embed(ids, features, None if grids is None else [grids], flags)
        mask = torch.ones(embeds.shape[:2], dtype=torch.long, device=embeds.device)
        return PredictionInputs(
            self.language_model.generate,
            dict(inputs_embeds=embeds, attention_mask=mask),
            template.get("STOP_WORDS", []),
        )


def _check(request: Request):
    """Raise ValueError if regions, image and text of a request do not fit each other."""
    has_image, mask_prompts = request.is_image and request.frames, request.mask_prompts
    if mask_prompts is not None and (not has_image or request.past_text):
        raise ValueError("mask_prompts need an image and no past_text")
    if mask_prompts is not None and len(mask_prompts) != 1:
        raise ValueError(
            "mask_prompts is a list of one (n, H, W) array for the one image, "
            f"got {len(mask_prompts)}"
        )
    if "<image>" in request.text and request.past_text:
        raise ValueError(
            "<image> belongs to the first turn: text holds it although past_text is not empty"
        )
    if (
        request.frames
        and "<image>" not in request.text
        and IMG_CONTEXT_TOKEN not in request.past_text
    ):
        raise ValueError(
            "an image or video was given, but text has no <image> and past_text no image tokens"
        )


def _region_grids(processor, mask_prompts) -> torch.Tensor:
    """Return the regions' cells (n, g, g) bool; ValueError names a region without a pixel."""
    masks = mask_prompts[0]
    masks = (
        masks.cpu() if isinstance(masks, torch.Tensor) else torch.as_tensor(np.asarray(masks))
    ).bool()
    if masks.ndim != 3 or len(masks) == 0:
        raise ValueError(f"mask_prompts[0] must be (n, H, W) with n >= 1, got {tuple(masks.shape)}")
    empty = (~masks.flatten(1).any(1)).nonzero()[:, 0].tolist()
    if empty:
        raise ValueError(f"mask_prompts: region{empty[0] + 1} has no pixel")
    return region_grid(masks, processor.grid_size, processor.image_size, "nearest")


class InternVLProcessor(Sa2VAProcessor):
    """Turns PIL images and masks into tiles of 448 pixels and the cells of regions in them.

    Args:
        config: `InternVLConfig`.
        max_tiles: 1 = the whole image as one tile (describe-anything training); up to 12 tiles plus
            a thumbnail as in `predict_forward`. Default: the config's `max_dynamic_patch`.
    """

    max_aspect = None  # images of every shape are cut into tiles

    def __init__(self, config: InternVLConfig, max_tiles: int | None = None):
        super().__init__(config)
        self.max_tiles = config.raw["max_dynamic_patch"] if max_tiles is None else max_tiles
        self.image_size, self.grid_size = config.image_size, config.grid_size
        # Each of the two trainings has its rule, and its number of tiles.
        self.rule = "area" if self.max_tiles == 1 else "nearest"

    @property
    def max_pieces(self) -> int:
        """Largest number of tiles of an image, with the thumbnail."""
        return self.max_tiles + (self.max_tiles > 1)

    def tile_images(self, image: Image.Image) -> list[Image.Image]:
        """Return the tiles in row-major order; then, if there is more than one, the thumbnail."""
        image, s = to_rgb(image), self.image_size
        columns, rows = tile_grid(
            image.width, image.height, self.max_tiles, s, self.config.raw["min_dynamic_patch"]
        )
        whole = image.resize((columns * s, rows * s))  # the aspect ratio may change, as in InternVL
        tiles = [
            whole.crop((c * s, r * s, (c + 1) * s, (r + 1) * s))
            for r in range(rows)
            for c in range(columns)
        ]
        if len(tiles) > 1 and self.config.raw["use_thumbnail"]:
            tiles.append(image.resize((s, s)))
        return tiles

    def tiles(self, image: Image.Image) -> torch.Tensor:
        """Return the tiles (t, 3, S, S) as float32, ImageNet-normalised.

        The last tile is the whole image, the one that regions refer to.
        """
        return normalise_tiles(self.tile_pixels(image))

    def tile_pixels(self, image: Image.Image) -> torch.Tensor:
        """Return the tiles (t, 3, S, S) as uint8, which `normalise_tiles` makes `tiles` of."""
        return torch.stack([planes(tile) for tile in self.tile_images(image)])

    def region_grid(self, mask: np.ndarray | torch.Tensor) -> torch.Tensor:
        """Return cells (g, g) bool of a mask (H, W), or (n, g, g) of (n, H, W): `region_grid`."""
        mask = torch.as_tensor(mask).bool()
        grid = region_grid(
            mask if mask.ndim == 3 else mask[None], self.grid_size, self.image_size, self.rule
        )
        return grid if mask.ndim == 3 else grid[0]
