"""`predict_forward`: an image or video and a text in, the answer's text and its masks out.

Letters: t tiles or frames, n regions, M [SEG] tokens of the answer, F frames, H W image height and
width, C LLM width.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from .processing_sa2va import Sa2VAProcessor, normalise_sam_pixels, region_grid, upsample_masks
from .templates import chat_template, image_string, region_string
from .video import track

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .modeling_sa2va import Sa2VAModel


MAX_NEW_TOKENS = 2048
LLM_FRAMES = 5  # of a video the LLM sees and the language embedding prompts; later ones are tracked
MASKS_AT_ONCE = 32  # a runaway answer may hold hundreds of [SEG]


class StopWords(StoppingCriteria):
    """Ends each row by itself where its decoded text, without line breaks, ends in a stop word.

    (The original looks at row 0 alone and stops the whole batch with it.) In training
    `rl_train.engine.StopText` computes the same.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", words: list[str]):
        self.tokenizer, self.words = tokenizer, tuple(words)

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        texts = [
            self.tokenizer.decode(row).replace("\r", "").replace("\n", "")
            for row in input_ids.tolist()
        ]
        return torch.tensor([text.endswith(self.words) for text in texts], device=input_ids.device)


@torch.no_grad()
def generate(
    model: "Sa2VAModel",
    pixel_values: torch.Tensor | None = None,
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    visual_features: torch.Tensor | None = None,
    generation_config: "GenerationConfig | None" = None,
    output_hidden_states: bool | None = None,
    return_dict: bool | None = None,
    prompt_masks: list[torch.Tensor] | None = None,
    vp_overall_mask: torch.Tensor | None = None,
    **kwargs: Any,
):
    """Return what transformers' `generate` of the LLM returns for prompts with images.

    Args:
        model: `Sa2VAModel`, whose tokenizer is known.
        pixel_values: (t, 3, S, S) tiles of all prompts in batch order, or a list of (n, 3, S, S) or
            (3, S, S); tiles of zeros are no image. None for text alone.
        input_ids: (B, L), padded on the left; attention_mask: (B, L), all ones if None.
        visual_features: (t, tokens, C) of these tiles, in place of `extract_feature`.
        prompt_masks, vp_overall_mask: see `Sa2VAModel.embed`.
        return_dict: ignored, as in the original.
        kwargs: of the LLM's `generate`.

    Raises:
        ValueError: as `Sa2VAModel.embed`, where the original computes without the image.

    Source: `generate` in the original's `modeling_sa2va_chat.py`.
    """
    ids, features = input_ids.to(model.device), None
    if pixel_values is not None:
        if isinstance(pixel_values, list):
            pixel_values = torch.cat([p[None] if p.ndim == 3 else p for p in pixel_values])
        elif pixel_values.ndim == 5:
            pixel_values = pixel_values.flatten(0, 1)
        tiles = pixel_values.to(model.device)
        features = model.extract_feature(tiles) if visual_features is None else visual_features
        shown = tiles.flatten(1).any(1)  # (t,): not a tile of zeros
        features = features[shown.to(features.device)]
        if vp_overall_mask is not None:
            vp_overall_mask = vp_overall_mask.bool()[shown.to(vp_overall_mask.device)]
    mask = torch.ones_like(ids) if attention_mask is None else attention_mask.to(model.device)
    return model.language_model.generate(
        inputs_embeds=model.embed(ids, features, prompt_masks, vp_overall_mask),
        attention_mask=mask,
        generation_config=generation_config,
        output_hidden_states=output_hidden_states,
        use_cache=True,
        **kwargs,
    )


@torch.no_grad()
def predict_forward(
    model: "Sa2VAModel",
    image: Image.Image | None = None,
    video: list[Image.Image] | None = None,
    text: str | None = None,
    past_text: str = "",
    mask_prompts: list[np.ndarray | torch.Tensor] | None = None,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    processor: Any | None = None,
    *,
    rounded_normalisation: bool = False,
) -> dict:
    """Return the model's greedy answer to `text`, and one mask for each [SEG] in it.

    Args:
        model: `Sa2VAModel`.
        image: PIL image of any mode and size, tiled up to the config's `max_dynamic_patch` and a
            thumbnail.
        video: list of PIL frames of one size, instead of an image. The LLM sees the first 5, one
            tile each.
        text: the user's words; `<image>` stands where the image or video goes (without either it is
            removed).
        past_text: earlier turns, as they went into the model (template and image tokens included).
        mask_prompts: [(n, H, W)]: n regions of the image, non-zero inside, introduced to the model
            behind the image.
        tokenizer: Sa2VA's; needed at the first call, later ones keep it.
        processor: ignored; the original has it for other models.
        rounded_normalisation: SAM2's mean and std rounded to bfloat16 as in the original's
            inference code; the default is what Sa2VA's supervised training had (see
            `normalise_sam_pixels`).

    Returns:
        {"prediction": str, at most 2048 new tokens (see `preparing_for_generation`), special tokens
         and the stop text `<|end|>` included,
         "prediction_masks": list over [SEG] tokens of (F, H, W) bool arrays; F = 1 for an image}.
        An answer without [SEG] has no masks, one with two has two. A [SEG] that is the very last
        token (no stop text after it) has no hidden state and is dropped, as in the original;
        without image and video there are none.

    Raises:
        ValueError: text or tokenizer is missing; image and video together; either without `<image>`
            here or its tokens in past_text; frames of different sizes; an empty region;
            mask_prompts with a video or with past_text. (The original asserts some of these and
            computes without the image in others.)

    Differences from the original: SAM2's mean and std are exact unless asked otherwise; tiles
    follow the config's `max_dynamic_patch` (the original has a constant 12); images of mode L, P,
    CMYK and RGBA are converted instead of failing; a region too small for every cell of the grid
    gets the cell it covers most instead of no token; the image is encoded by SAM2 once and not once
    per [SEG]. Frames of a video beyond the fifth are tracked by `sa2va_hf.video.track`.

    Source: `predict_forward` in the original's `modeling_sa2va_chat.py`.
    """
    if tokenizer is not None and model.img_context_id is None:
        model.bind_tokenizer(tokenizer)
    model.tokenizer = tokenizer = model.tokenizer if tokenizer is None else tokenizer
    _check(image, video, text, past_text, mask_prompts, tokenizer)
    config = model.config
    processor = Sa2VAProcessor(config)
    template = chat_template(config.template)
    frames = [image] if image is not None else list(video or [])

    tiles, grids, image_tokens = None, None, ""
    if image is not None:
        tiles = processor.tiles(image)  # (t, 3, S, S)
        image_tokens = image_string(len(tiles), config.tokens_per_tile)
    elif video:
        tiles = torch.cat(
            [Sa2VAProcessor(config, max_tiles=1).tiles(frame) for frame in frames[:LLM_FRAMES]]
        )
        image_tokens = "\n".join([image_string(1, config.tokens_per_tile)] * len(tiles))
    if mask_prompts is not None:
        grids = _region_grids(processor, mask_prompts)  # (n, g, g)
        image_tokens += region_string(grids.flatten(1).sum(1).tolist())
    prompt = past_text + template["INSTRUCTION"].replace(
        "{input}", text.replace("<image>", image_tokens)
    )
    ids = torch.tensor([tokenizer.encode(prompt)], device=model.device)  # (1, L)

    features = None if tiles is None else model.extract_feature(tiles.to(model.device))
    # Regions refer to the thumbnail, or the only tile: the last.
    flags = None if grids is None else torch.arange(len(tiles)) == len(tiles) - 1
    embeds = model.embed(ids, features, None if grids is None else [grids], flags)
    answer, hidden = _generate(
        model.language_model,
        embeds,
        tokenizer,
        template.get("STOP_WORDS", []),
        model.max_new_tokens,
    )
    # A [SEG] as last token has no hidden state.
    seg = hidden[answer[:-1] == model.seg_id]  # (M, C)
    masks = []
    if frames and len(seg):
        masks = _masks(model, processor, frames, model.text_hidden_fcs(seg), rounded_normalisation)
    return {
        "prediction": tokenizer.decode(answer.tolist(), skip_special_tokens=False).strip(),
        "prediction_masks": masks,
    }


def _check(image, video, text, past_text, mask_prompts, tokenizer):
    if text is None or tokenizer is None:
        raise ValueError(f"predict_forward needs {'text' if text is None else 'a tokenizer'}")
    if image is not None and video is not None:
        raise ValueError("predict_forward takes an image or a video, not both")
    if video is not None and len({frame.size for frame in video}) != 1:
        raise ValueError(
            "the frames of a video must have one size, "
            f"got {sorted({frame.size for frame in video})}"
        )
    if mask_prompts is not None and (image is None or past_text):
        raise ValueError("mask_prompts need an image and no past_text")
    if mask_prompts is not None and len(mask_prompts) != 1:
        raise ValueError(
            "mask_prompts is a list of one (n, H, W) array for the one image, "
            f"got {len(mask_prompts)}"
        )
    if "<image>" in text and past_text:
        raise ValueError(
            "<image> belongs to the first turn: text holds it although past_text is not empty"
        )
    if (
        (image is not None or video is not None)
        and "<image>" not in text
        and "<IMG_CONTEXT>" not in past_text
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


def _generate(
    language_model, embeds, tokenizer, stop_words, max_new_tokens
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return greedy tokens (T,) after the prompt (1, L, C), and their hidden states (T-1, C).

    These are of the last layer, at all tokens but the last, which is never an input.
    """
    states = []
    # A hook after the final norm: `output_hidden_states` would keep all layers'.
    handle = language_model.model.register_forward_hook(
        lambda module, args, out: states.append(out.last_hidden_state[0, -1])
    )
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=pad,
    )
    try:
        answer = language_model.generate(
            inputs_embeds=embeds,
            attention_mask=torch.ones(embeds.shape[:2], dtype=torch.long, device=embeds.device),
            generation_config=config,
            stopping_criteria=StoppingCriteriaList([StopWords(tokenizer, stop_words)]),
        )[0]
    finally:
        handle.remove()
    # State 0 is of the prompt's last position, state k of token k-1.
    return answer, torch.stack(states)[1:]


def _masks(model, processor, frames, embeddings, rounded) -> list[np.ndarray]:
    """Return a mask (F, H, W) bool for each language embedding (M, 256)."""
    features = (
        model.sam_features(
            normalise_sam_pixels(processor.sam_image(frame).to(model.device), rounded)[None]
        )
        for frame in frames
    )
    # A generator: one frame's features at a time are in memory.
    if len(frames) == 1:
        features = next(features)
        logits = torch.cat(
            [
                model.decode_masks(
                    features, torch.zeros(len(chunk), dtype=torch.long, device=model.device), chunk
                )
                for chunk in embeddings.split(MASKS_AT_ONCE)
            ]
        )[:, None]  # (M, 1, 256, 256)
    else:
        logits = track(model, features, embeddings, LLM_FRAMES)  # (M, F, 256, 256)
    size = frames[0].height, frames[0].width
    # One at a time: at the image's own size a mask of logits takes 4 bytes a pixel.
    return [(upsample_masks(mask, processor.sam_size, size) > 0).cpu().numpy() for mask in logits]
