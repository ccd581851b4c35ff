"""Sa2VA of Qwen2.5-VL and of Qwen3-VL: configurations, models and processor.

The original has one code for both; they differ in transformers' own modules. Regions are not
supported by it: it takes `mask_prompts` and ignores them.

Letters: B sequences, L their length, V vocabulary, C LLM width, n image tokens, W = C + deepstack
layers * C the width of an embedding with the features that are added behind the first layers.
"""

import copy
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.modeling_outputs import BaseModelOutputWithPast

from .configuration_sa2va import Sa2VAConfig
from .modeling_sa2va import Sa2VAModel
from .prediction import PredictionInputs, Request
from .processing_sa2va import Sa2VAProcessor, planes, region_grid, to_rgb
from .qwen_images import ImagePreprocessing, inference_size, patches
from .to_device import to_device
from .window_attention import batch_windows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VISION_START, IMAGE_PAD, VISION_END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
# Limits on the pixels of an image, hard-coded in the original for both families.
PIXEL_LIMITS = (512 * 28**2, 2048 * 28**2)
PREPROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
REGION_GRID = 128  # cells of a region's side
SEG_STATES = ("before_norm", "after_norm")


class QwenVLConfig(Sa2VAConfig):
    """The configuration of a Sa2VA that is made of Qwen2.5-VL or Qwen3-VL.

    Attributes:
        vlm: native configuration of the whole Qwen-VL; `llm` is that of its text decoder.
        pixel_limits: (smallest, largest) number of pixels of an image. A key of ours,
            `pixel_limits`, replaces the original's constants, for small models.

    Raises:
        ValueError: sliding window, a RoPE other than M-RoPE by default, no vision tokens, or an
            unknown state at [SEG].
    """

    native: ClassVar[type[PreTrainedConfig]]
    # Colours of the base's processor, where the folder has no file of it
    colours: ClassVar[dict[str, tuple[float, float, float]]]
    tokens_per_tile = 1  # images are counted in tokens

    def read(self):
        raw = self.raw
        ids = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
        if missing := [key for key in ids if not isinstance(raw.get(key), int)]:
            raise ValueError(f"config.json: {missing[0]} is missing")
        if raw["text_config"].get("use_sliding_window"):
            raise ValueError("config.json: text_config.use_sliding_window is not supported")
        # Copies: the native classes write into their arguments.
        parts = {key: copy.deepcopy(raw[key]) for key in ("text_config", "vision_config", *ids)}
        # Sa2VAModel ties embed_tokens and lm_head itself.
        parts["text_config"] = parts["text_config"] | dict(tie_word_embeddings=False)
        self.tied = bool(raw.get("tie_word_embeddings", False))
        self.vlm = self.native(**parts, tie_word_embeddings=False)
        self.llm = self.vlm.text_config
        rope = self.llm.rope_parameters
        if rope["rope_type"] != "default" or "mrope_section" not in rope:
            raise ValueError(f"config.json: text_config.rope_scaling {rope} is not supported")
        # The name of a template of ours: the original reads it in no family of Qwen-VL's.
        self.template = str(raw.get("template", "qwen_chat")).replace("-", "_")
        self.seg_state = raw.get("seg_state") or self.default_seg_state()
        if self.seg_state not in SEG_STATES:
            raise ValueError(f"seg_state {self.seg_state!r} is none of {', '.join(SEG_STATES)}")
        self.pixel_limits = tuple(raw.get("pixel_limits", PIXEL_LIMITS))

    def default_seg_state(self) -> str:
        """Return which state at [SEG] the supervised training used, one of SEG_STATES."""
        raise NotImplementedError

    def preprocessing(self, limits: tuple[int, int] | None = None) -> ImagePreprocessing:
        """Return how images are prepared: the folder's processor, within the original's limits.

        Raises:
            ValueError: the folder's processor is that of another model.
        """
        vision = self.vlm.vision_config
        min_pixels, max_pixels = limits or self.pixel_limits
        from_config = dict(patch_size=vision.patch_size, merge_size=vision.spatial_merge_size)
        from_config |= dict(temporal_patch_size=vision.temporal_patch_size)
        stored, file = self._stored_preprocessor()
        if wrong := [key for key, value in from_config.items() if stored.get(key, value) != value]:
            key = wrong[0]
            raise ValueError(
                f"{file}: {key} is {stored[key]}, config.json says {from_config[key]}: it is the "
                "processor of another model"
            )
        colours = self.colours | {key: stored[key] for key in self.colours if key in stored}
        return ImagePreprocessing(
            patch=vision.patch_size,
            merge=vision.spatial_merge_size,
            min_pixels=min_pixels,
            max_pixels=max_pixels,
            side=0,
            mean=tuple(colours["image_mean"]),
            std=tuple(colours["image_std"]),
            frames=vision.temporal_patch_size,
        )

    def _stored_preprocessor(self) -> tuple[dict, Path | None]:
        """Return the image processor's settings in the folder, and their file; {} without one."""
        for name in PREPROCESSOR_FILES:
            file = (self.folder or Path()) / name
            if self.folder and file.is_file():
                settings = json.loads(file.read_text())
                return settings.get("image_processor", settings), file
        return {}, None


class Qwen25Sa2VAConfig(QwenVLConfig):
    """Configuration of a Sa2VA of Qwen2.5-VL."""

    native = Qwen2_5_VLConfig
    colours = dict(
        image_mean=(0.48145466, 0.4578275, 0.40821073),
        image_std=(0.26862954, 0.26130258, 0.27577711),
    )

    def default_seg_state(self) -> str:
        return "after_norm"  # in every version of transformers


class Qwen3Sa2VAConfig(QwenVLConfig):
    """Configuration of a Sa2VA of Qwen3-VL."""

    native = Qwen3VLConfig
    colours = dict(image_mean=(0.5, 0.5, 0.5), image_std=(0.5, 0.5, 0.5))

    def default_seg_state(self) -> str:
        """Return it by the file's transformers_version: 4's last hidden state has no final norm."""
        version = self.raw.get("transformers_version")
        if not isinstance(version, str) or not version.split(".")[0].isdigit():
            raise ValueError(
                "config.json: transformers_version is missing, by which it is known whether [SEG] "
                "prompts SAM2 by its state before the final norm (4.57) or after it (5); add "
                f"seg_state to it, one of {', '.join(SEG_STATES)}"
            )
        return "before_norm" if int(version.split(".")[0]) < 5 else "after_norm"


class TextDecoder:
    """The text decoder of a Qwen-VL, called as transformers call one, with the states at [SEG].

    Embeddings may be wider than C: what follows in (B, L, W) is added to the states behind the
    first layers (deepstack). The last hidden states are those before the final norm if
    `before_norm`.
    """

    def __init__(self, text: nn.Module, before_norm: bool):
        self.text, self.before_norm = text, before_norm
        self.config, self.layers, self.embed_tokens = text.config, text.layers, text.embed_tokens
        self.norm, self.rotary_emb = text.norm, text.rotary_emb
        self.parameters, self.named_parameters = text.parameters, text.named_parameters
        self.gradient_checkpointing_enable = text.gradient_checkpointing_enable
        # Its name from transformers 5.23 on.
        self.activation_checkpointing_enable = getattr(
            text, "activation_checkpointing_enable", None
        )

    def __call__(
        self, inputs_embeds: torch.Tensor, past_key_values: Any | None = None, **others: Any
    ) -> BaseModelOutputWithPast:
        embeds, *deepstack = inputs_embeds.split(self.config.hidden_size, dim=-1)
        # Tokens behind a prompt are no image.
        begins = past_key_values is None or past_key_values.get_seq_length() == 0
        if deepstack and begins:
            of_image = deepstack[0].any(-1)  # (B, L)
            others |= dict(
                visual_pos_masks=of_image,
                deepstack_visual_embeds=[layer[of_image] for layer in deepstack],
            )
        states = []
        handle = self.text.norm.register_forward_pre_hook(lambda norm, args: states.append(args[0]))
        try:
            out = self.text(inputs_embeds=embeds, past_key_values=past_key_values, **others)
        finally:
            handle.remove()
        if self.before_norm:
            out.last_hidden_state = states[0]
        return out


@dataclass
class LanguageModel:
    """The text decoder of a Qwen-VL in the form of a causal language model of transformers."""

    model: nn.Module | TextDecoder
    lm_head: nn.Linear
    head_norm: nn.Module | None  # between the model's last states and lm_head
    num_deepstack: int  # features that follow an embedding

    @property
    def config(self) -> PreTrainedConfig:
        return self.model.config

    def get_input_embeddings(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the embedding (..) -> (.., W) of text tokens, whose deepstack features are 0."""
        if not self.num_deepstack:
            return self.model.embed_tokens
        extra = self.num_deepstack * self.config.hidden_size
        return lambda ids: F.pad(self.model.embed_tokens(ids), (0, extra))


def num_deepstack(vlm: PreTrainedModel) -> int:
    """Return behind how many decoder layers a Qwen-VL adds image features."""
    return len(getattr(vlm.config.vision_config, "deepstack_visual_indexes", ()))


def text_model(vlm: PreTrainedModel, before_norm: bool = False) -> LanguageModel:
    """Return the text decoder of a Qwen-VL; see `TextDecoder` for `before_norm`."""
    text, head, levels = vlm.model.language_model, vlm.lm_head, num_deepstack(vlm)
    if not before_norm and not levels:
        return LanguageModel(text, head, None, 0)
    norm = text.norm if before_norm else None
    return LanguageModel(TextDecoder(text, before_norm), head, norm, levels)


def image_features(
    vlm: PreTrainedModel, pixel_values: torch.Tensor, image_grid_thw: torch.Tensor
) -> torch.Tensor:
    """Return a Qwen-VL's features (n, W) of images; see `QwenVLModel.vision_features`."""
    batch_windows(vlm.model.visual)
    out = vlm.get_image_features(pixel_values, image_grid_thw)
    levels = [out.pooler_output]
    if num_deepstack(vlm):
        levels += out.deepstack_features
    # transformers splits a level by images, or (before 5.23) leaves the deepstack's whole.
    levels = [level if isinstance(level, torch.Tensor) else torch.cat(level) for level in levels]
    return torch.cat(levels, dim=-1)


class QwenVLModel(Sa2VAModel):
    """Sa2VA of a Qwen-VL: transformers' own conditional generation model is `model`.

    So its native keys are the original's.
    """

    image_token = IMAGE_PAD
    image_strings = (VISION_START, IMAGE_PAD, VISION_END)
    # None was trained.
    region_prompts = ("outline", "box", "coordinates")
    box_text = '{{"bbox_2d": [{}, {}, {}, {}]}}'
    special_tokens = (IMAGE_PAD, VISION_START, VISION_END, "<|im_start|>", "<|im_end|>", "[SEG]")
    embed_tokens_key = "model.model.language_model.embed_tokens.weight"
    lm_head_key = "model.lm_head.weight"
    native: ClassVar[type[PreTrainedModel]]

    def build(self, config: QwenVLConfig):
        self.model = self.native(config.vlm)
        if config.tied:
            self.model.lm_head.weight = self.get_input_embeddings().weight

    @property
    def language_model(self) -> LanguageModel:
        return text_model(self.model, self.config.seg_state == "before_norm")

    def get_input_embeddings(self) -> nn.Embedding:
        return self.model.get_input_embeddings()

    def bind_tokenizer(self, tokenizer: "PreTrainedTokenizerBase"):
        """Take the ids of the image token and `[SEG]` from a tokenizer, and keep it.

        Raises:
            ValueError: a token of Sa2VA's is not a single one there, or lies beyond the vocabulary,
                or an image has another id than in config.json.
        """
        super().bind_tokenizer(tokenizer)
        expected = self.config.vlm.image_token_id
        if self.img_context_id != expected:
            raise ValueError(
                f"the tokenizer in {tokenizer.name_or_path!r} has {IMAGE_PAD} at "
                f"{self.img_context_id}, config.json says image_token_id {expected}: it is the "
                "tokenizer of another model"
            )

    # Vision and language

    def vision_features(
        self, pixel_values: torch.Tensor, image_grid_thw: torch.Tensor
    ) -> torch.Tensor:
        """Return features (n, W) of images, all images' tokens in order.

        Args:
            pixel_values: rows of patches of all images; image_grid_thw: (images, 3) their grids, in
                patches. Both as transformers' processors return them.
        """
        return image_features(self.model, pixel_values, image_grid_thw.to(pixel_values.device))

    extract_feature = vision_features

    def encode_images(
        self, pixels: list[torch.Tensor]
    ) -> tuple[torch.Tensor, list[int], list[tuple[int, int, int]]]:
        """Return (`vision_features` of images, tokens of each, (1, rows, columns) in patches).

        Args:
            pixels: (3, H', W') uint8 of each, in whole tokens. Sent as uint8, a quarter of float32.
        """
        settings = self.config.preprocessing()
        sent = [to_device(image, self.device) for image in pixels]
        rows = torch.cat([patches(image, settings) for image in sent])
        sizes = [image.shape[1:] for image in pixels]
        grids = [(1, h // settings.patch, w // settings.patch) for h, w in sizes]
        tokens = [rows * columns // settings.merge**2 for _, rows, columns in grids]
        return self.vision_features(rows, torch.tensor(grids)), tokens, grids

    def project(self, vision: torch.Tensor) -> torch.Tensor:
        """Return the features: no module stands between them and the LLM."""
        return vision

    def embed(
        self,
        input_ids: torch.Tensor,
        image_features: torch.Tensor | None,
        prompt_masks: None = None,
        vp_overall_mask: None = None,
    ) -> torch.Tensor:
        """Return token embeddings (B, L, W), with image features (n, W) at `<|image_pad|>`.

        Args:
            input_ids: (B, L). If they are on the CPU, nothing waits for the GPU.
            prompt_masks, vp_overall_mask: None; regions are not supported.

        Raises:
            ValueError: the number of `<|image_pad|>` differs from the number of features.
        """
        embeds = self.language_model.get_input_embeddings()(to_device(input_ids, self.device))
        if image_features is None:
            return embeds
        slots = (input_ids == self.config.vlm.image_token_id).flatten().nonzero()[:, 0]
        if len(slots) != len(image_features):
            raise ValueError(
                f"the prompts hold {len(slots)} {IMAGE_PAD} tokens, the images give "
                f"{len(image_features)} features"
            )
        slots, flat = to_device(slots, self.device), embeds.flatten(0, 1)
        return flat.index_copy(0, slots, image_features.to(embeds.dtype)).view(embeds.shape)

    def positions(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        image_grid_thw: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return M-RoPE's positions (3, B, L): time, height and width.

        Args:
            image_grid_thw: (images, 3) in patches, all images in order; None for text alone.
        """
        if image_grid_thw is None or not len(image_grid_thw):
            counted = (attention_mask.long().cumsum(-1) - 1).masked_fill(attention_mask == 0, 1)
            return counted.expand(3, -1, -1)
        types = (input_ids == self.config.vlm.image_token_id).int()
        return self.model.model.get_rope_index(
            input_ids, types, image_grid_thw=image_grid_thw, attention_mask=attention_mask
        )[0]

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        pixel_values: torch.Tensor | None = None,
        image_grid_thw: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        *,
        image_features: torch.Tensor | None = None,
    ) -> SimpleNamespace:
        """Return logits and the states that prompt SAM2, of full sequences.

        Args:
            input_ids, attention_mask: (B, L), padded on either side.
            pixel_values, image_grid_thw: see `vision_features`.
            position_ids: (3, B, L); default `positions`.
            image_features: (n, W) from `extract_feature`, instead of pixel_values.

        Returns:
            .logits (B, L, V); .hidden_states, a tuple of one: (B, L, C), before or after the final
            norm as the config's `seg_state` says.
        """
        if pixel_values is not None:
            image_features = self.vision_features(pixel_values, image_grid_thw)
        if position_ids is None:
            position_ids = self.positions(input_ids, attention_mask, image_grid_thw)
        language_model = self.language_model
        hidden = language_model.model(
            inputs_embeds=self.embed(input_ids, image_features),
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=False,
        ).last_hidden_state
        norm = language_model.head_norm or nn.Identity()
        return SimpleNamespace(logits=self.model.lm_head(norm(hidden)), hidden_states=(hidden,))

    # Prediction

    def record_states(self, states: list[torch.Tensor]) -> RemovableHandle:
        """Append the last position's state (C,) at [SEG] of each forward to come."""
        norm = self.model.model.language_model.norm
        if self.config.seg_state == "before_norm":
            return norm.register_forward_pre_hook(lambda norm, args: states.append(args[0][0, -1]))
        return norm.register_forward_hook(lambda norm, args, out: states.append(out[0, -1]))

    def prediction_inputs(
        self, request: Request, tokenizer: "PreTrainedTokenizerBase"
    ) -> PredictionInputs:
        """Return the prompt of `predict_forward`, by the chat template of the tokenizer.

        As in the original, images stand before the text, from which `<image>` is deleted, and are
        resized twice: to multiples of 28 pixels, then to whole tokens.

        Raises:
            ValueError: past_text with an image (the original ignores it), or no chat template.
        """
        if request.mask_prompts is not None:
            logging.getLogger(__name__).warning(
                "mask_prompts are ignored: Sa2VA of Qwen-VL was not trained on region prompts"
            )
        if request.past_text and request.frames:
            raise ValueError("past_text of Sa2VA of Qwen-VL needs a text without image and video")
        if tokenizer.chat_template is None:
            raise ValueError(f"the tokenizer in {tokenizer.name_or_path!r} has no chat template")
        text = dict(type="text", text=request.text.replace("<image>", ""))
        content = [dict(type="image") for _ in request.frames] + [text]
        prompt = request.past_text + tokenizer.apply_chat_template(
            [dict(role="user", content=content)], tokenize=False, add_generation_prompt=True
        )
        arguments = {}
        if request.frames:
            processor = Sa2VAProcessor(self.config)
            rows, grids = processor.pixel_values(request.frames, twice=True)
            prompt = processor.expand_images(prompt, grids)
            arguments |= dict(pixel_values=rows.to(self.device, self.model.dtype))
            arguments |= dict(image_grid_thw=grids.to(self.device))
        ids = torch.tensor([tokenizer.encode(prompt)], device=self.device)  # (1, L)
        types = (ids == self.config.vlm.image_token_id).int()
        arguments |= dict(
            input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=types
        )
        return PredictionInputs(self.model.generate, arguments, [], ids.shape[1])


class Qwen25Sa2VAModel(QwenVLModel):
    """Sa2VA of Qwen2.5-VL."""

    native, relative_boxes = Qwen2_5_VLForConditionalGeneration, False


class Qwen3Sa2VAModel(QwenVLModel):
    """Sa2VA of Qwen3-VL."""

    native, relative_boxes = Qwen3VLForConditionalGeneration, True


class QwenVLProcessor(Sa2VAProcessor):
    """Turns PIL images into patches of whole tokens, with pillow alone.

    Args:
        config: `QwenVLConfig`.
        limits: (smallest, largest) number of pixels of an image; default the config's.
    """

    max_aspect = 200  # of an image's longer side to its shorter one, as transformers' processor

    def __init__(self, config: QwenVLConfig, limits: tuple[int, int] | None = None):
        super().__init__(config)
        self.preprocessing, self.grid_size = config.preprocessing(limits), REGION_GRID

    @property
    def max_pieces(self) -> int:
        """Largest number of tokens of an image."""
        return self.preprocessing.max_tokens

    def tile_pixels(self, image: Image.Image) -> torch.Tensor:
        """Return `pixels`, resized once as in the supervised training unless `resize_twice`."""
        return self.pixels(image, self.resize_twice)

    def region_grid(self, mask: np.ndarray | torch.Tensor) -> torch.Tensor:
        """Return cells (g, g) bool of a mask (H, W), from which a region is drawn or named.

        Or (n, g, g) of (n, H, W).
        """
        mask = torch.as_tensor(mask).bool()
        masks = mask if mask.ndim == 3 else mask[None]
        grids = region_grid(masks, self.grid_size, 4 * self.grid_size, "nearest")
        return grids if mask.ndim == 3 else grids[0]

    def pixels(self, image: Image.Image, twice: bool = False) -> torch.Tensor:
        """Return an image (3, H', W') uint8 whose sides are multiples of a token's.

        Args:
            twice: resized to multiples of 28 pixels before, as in the original's inference; its
                training resizes once.
        """
        image = to_rgb(image)
        if twice:
            height, width = inference_size(image.height, image.width)
            image = image.resize((width, height))
        height, width = self.preprocessing.resized(image.height, image.width)
        return planes(image.resize((width, height), self.preprocessing.resampling))

    def grid(self, pixels: torch.Tensor) -> tuple[int, int, int]:
        """Return (1, rows, columns) in patches of an image (3, H', W')."""
        patch = self.preprocessing.patch
        return 1, pixels.shape[1] // patch, pixels.shape[2] // patch

    def pixel_values(
        self, images: list[Image.Image], twice: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (patches of all images, grids (images, 3)), as transformers' processors do."""
        pixels = [self.pixels(image, twice) for image in images]
        rows = torch.cat([patches(image, self.preprocessing) for image in pixels])
        return rows, torch.tensor([self.grid(image) for image in pixels])

    def expand_images(self, text: str, grids: torch.Tensor) -> str:
        """Repeat each `<|image_pad|>` of a text for the tokens of its image."""
        first, *others = text.split(IMAGE_PAD)
        tokens = (grids.prod(1) // self.preprocessing.merge**2).tolist()
        pieces = [IMAGE_PAD * n + piece for n, piece in zip(tokens, others, strict=True)]
        return first + "".join(pieces)
