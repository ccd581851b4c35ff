"""Pictures of a rollout's rows for people to look at."""

import textwrap

import numpy as np
import torch
from PIL import Image, ImageDraw

from rl_train.loss import ScoredRollout
from rl_train.points.parser import PointPrompt

REGION, PREDICTED = (255, 196, 0), (255, 0, 200)  # colours of the target and of a model's mask
BOX, POSITIVE, NEGATIVE = (0, 120, 255), (0, 190, 0), (230, 0, 0)  # colours of a mask's prompt
RADIUS = 4  # of a point, in pixels
PICTURE_WIDTH, PICTURE_HEIGHT = 240, 720  # of one panel, in pixels, at most


def rollout_picture(image: Image.Image, scored: ScoredRollout, row: int) -> np.ndarray:
    """Return (H, W, 3) uint8: the target (yellow), the model's mask (magenta), text below.

    A box and points that prompt the mask are drawn too: points green, negative ones red.

    Args:
        image: image of the row's sample, in any size and shape; it gets the mask's shape.
    """
    batch, i = scored.rollout.batch, row // scored.rollout.num_generations
    height, width = batch.sizes[i]
    scale = min(PICTURE_WIDTH / width, PICTURE_HEIGHT / height)
    image = image.resize((max(round(width * scale), 1), max(round(height * scale), 1)))
    prompt = scored.outcome.point_prompts[row] if scored.outcome.point_prompts else None
    lines = [f"answer: {scored.rollout.texts[row]}", f"true caption: {batch.captions[i]}"]
    if scored.outcome.replies:
        lines.append(f"teacher's reply: {scored.outcome.replies[row]}")
    lines.append(f"reward {scored.reward[row]:.3f}  advantage {scored.advantages[row]:+.2f}")
    lines = [part for line in lines for part in textwrap.wrap(line, width=66)]
    size = (2 * PICTURE_WIDTH + 8, image.height + 18 * len(lines) + 8)
    canvas = Image.new("RGB", size, "white")
    canvas.paste(overlay(image, batch.masks[i], REGION, prompt))
    canvas.paste(
        overlay(image, scored.outcome.masks[row], PREDICTED, prompt), (PICTURE_WIDTH + 8, 0)
    )
    below = (4, image.height + 4)
    ImageDraw.Draw(canvas).multiline_text(below, "\n".join(lines), fill="black", font_size=14)
    return np.array(canvas)


def overlay(
    image: Image.Image,
    mask: torch.Tensor,
    color: tuple[int, int, int],
    prompt: PointPrompt | None = None,
) -> Image.Image:
    """Tint the pixels of a mask (H, W) bool, and draw a prompt in the mask's pixels, if any."""
    stencil = Image.fromarray(mask.cpu().numpy()).resize(image.size, Image.NEAREST)
    tinted = Image.blend(image, Image.new("RGB", image.size, color), 0.3)
    panel = Image.composite(tinted, image, stencil)
    if prompt:
        draw = ImageDraw.Draw(panel)
        prompt = prompt.scaled(image.width / mask.shape[1], image.height / mask.shape[0])
        for box in prompt.boxes:
            draw.rectangle(box, outline=BOX, width=2)
        for points, fill in ((prompt.positive, POSITIVE), (prompt.negative, NEGATIVE)):
            for point in points:
                draw.circle(point, RADIUS, fill=fill, outline="white")
    return panel
