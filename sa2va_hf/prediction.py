"""`predict_forward`: an image or video and a text in, the answer's text and its masks out.

Letters: t tiles or frames, n regions, M [SEG] tokens of the answer, F frames, H W image height and
width, C LLM width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from .processing_sa2va import Sa2VAProcessor, normalise_sam_pixels, upsample_masks
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


@dataclass
class Request:
    """Arguments of `predict_forward`, beside the model."""

    text: str
    frames: list[Image.Image]  # the image, or the frames that the LLM sees; [] for text alone
    is_image: bool  # not a video
    past_text: str
    mask_prompts: list[np.ndarray | torch.Tensor] | None


@dataclass
class PredictionInputs:
    """One prompt as a family gives it to its language model."""

    generate: Callable[..., torch.Tensor]  # of transformers
    arguments: dict[str, torch.Tensor]  # of `generate`
    stop_words: list[str]
    num_returned: int = 0  # tokens of the prompt that `generate` returns before the answer


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
    _check(image, video, text, tokenizer)
    frames = [image] if image is not None else list(video or [])
    request = Request(text, frames[:LLM_FRAMES], image is not None, past_text, mask_prompts)
    answer, hidden = _generate(model, model.prediction_inputs(request, tokenizer), tokenizer)
    # A [SEG] as last token has no hidden state.
    seg = hidden[answer[:-1] == model.seg_id]  # (M, C)
    masks = []
    if frames and len(seg):
        processor = Sa2VAProcessor(model.config)
        masks = _masks(model, processor, frames, model.text_hidden_fcs(seg), rounded_normalisation)
    return {
        "prediction": tokenizer.decode(answer.tolist(), skip_special_tokens=False).strip(),
        "prediction_masks": masks,
    }


def _check(image, video, text, tokenizer):
    if text is None or tokenizer is None:
        raise ValueError(f"predict_forward needs {'text' if text is None else 'a tokenizer'}")
    if image is not None and video is not None:
        raise ValueError("predict_forward takes an image or a video, not both")
    if video is not None and len({frame.size for frame in video}) != 1:
        raise ValueError(
            "the frames of a video must have one size, "
            f"got {sorted({frame.size for frame in video})}"
        )


def _generate(model, inputs, tokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """Return greedy tokens (T,) after a prompt, and their [SEG] states (T-1, C).

    These are at all tokens but the last, which is never an input.
    """
    states = []
    # A hook: `output_hidden_states` would keep all layers'.
    handle = model.record_states(states)
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    config = GenerationConfig(
        max_new_tokens=model.max_new_tokens,
        do_sample=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=pad,
    )
    try:
        answer = inputs.generate(
            **inputs.arguments,
            generation_config=config,
            stopping_criteria=StoppingCriteriaList([StopWords(tokenizer, inputs.stop_words)]),
        )[0, inputs.num_returned :]
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
