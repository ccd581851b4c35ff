"""The original's encoding of a sample of supervised training, for a Sa2VA of Qwen-VL."""

import torch

from sa2va_hf.qwen_vl import IMAGE_PAD, VISION_END, VISION_START, QwenVLProcessor
from sa2va_hf.templates import chat_template, template_map, video_lisa_encode_fn

FRAME_LIMITS = (128 * 28**2, 512 * 28**2)  # pixels of a frame of a video


def training_example(processor, frames, turns, tokenizer) -> dict[str, torch.Tensor]:
    """Return a sample of (question, answer) turns about frames, as the original encodes it.

    Images stand at the beginning of the first turn, each followed by a newline. There is no system
    prompt. A single image is within the config's limits, the frames of a video within FRAME_LIMITS.

    Returns:
        input_ids and labels (1, L), labels -100 without loss; pixel_values, image_grid_thw.
    """
    limits = processor.config.pixel_limits if len(frames) == 1 else FRAME_LIMITS
    rows, grids = QwenVLProcessor(processor.config, limits).pixel_values(frames)
    images = f"{VISION_START}{IMAGE_PAD}{VISION_END}\n" * len(frames)
    conversation = [dict(input=question, output=answer) for question, answer in turns]
    conversation[0]["input"] = processor.expand_images(images, grids) + conversation[0]["input"]
    example = template_map(dict(conversation=conversation), chat_template("qwen_chat"))
    encoded = video_lisa_encode_fn(example, tokenizer, 8192)
    ids, labels = (torch.tensor([encoded[key]]) for key in ("input_ids", "labels"))
    return dict(input_ids=ids, labels=labels, pixel_values=rows, image_grid_thw=grids)
