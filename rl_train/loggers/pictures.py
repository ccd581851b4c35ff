"""Pictures of rollouts and of evaluated samples for people to look at."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw

from rl_train.data.rle import RLE, encode_mask
from rl_train.loss import ScoredRollout
from rl_train.points.parser import PointPrompt

# Contours of the target and of a model's mask: far from every colour of the demos' scenes, and told
# apart by the colour-blind.
REGION, PREDICTED = (0, 255, 105), (255, 0, 255)
BOX, POSITIVE, NEGATIVE = (0, 120, 255), (0, 190, 0), (230, 0, 0)  # colours of a mask's prompt
RADIUS = 4  # of a point, in pixels
PICTURE_WIDTH, PICTURE_HEIGHT = 420, 840  # of one panel, in pixels, at most
GAP = 8  # between panels, in pixels
CONTOUR = 2  # width in pixels
OUTSIDE = 0.4  # brightness that is left of the pixels outside a mask
SMALL_MASK_SIDE = 256  # longer side in pixels of a mask that is kept to be looked at
CHARACTERS_OF_PANEL = 50  # in a line of text
FONT_SIZE, LINE_HEIGHT = 16, 21  # in pixels


def rollout_picture(image: Image.Image, scored: ScoredRollout, row: int) -> np.ndarray:
    """Return (H, W, 3) uint8: the target (green), the model's mask (magenta), text below.

    A box and points that prompt the mask are drawn too: points green, negative ones red.

    Args:
        image: image of the row's sample, in any size and shape; it gets the mask's shape.
    """
    batch, i = scored.rollout.batch, row // scored.rollout.num_generations
    image = fit_panel(image, batch.sizes[i])
    prompt = scored.outcome.point_prompts[row] if scored.outcome.point_prompts else None
    lines = [f"answer: {scored.rollout.texts[row]}", f"true caption: {batch.captions[i]}"]
    if scored.outcome.replies:
        lines.append(f"teacher's reply: {scored.outcome.replies[row]}")
    lines.append(f"reward {scored.reward[row]:.3f}  advantage {scored.advantages[row]:+.2f}")
    target = overlay(image, batch.masks[i], REGION, prompt)
    predicted = overlay(image, scored.outcome.masks[row], PREDICTED, prompt)
    return side_by_side([target, predicted], texts=(), below=lines)


@dataclass(frozen=True)
class EvalAnswer:
    """Answer about a held-out sample, as a picture shows it."""

    title: str  # whose it is
    mask: torch.Tensor  # (h, w) bool, of any resolution
    iou: float  # of the mask with the target
    text: str


def evaluation_picture(
    image: Image.Image, target: torch.Tensor, caption: str, answers: Sequence[EvalAnswer]
) -> np.ndarray:
    """Return (H, W, 3) uint8: the target (green) and each answer's mask (magenta), texts below.

    Args:
        target: (H, W) bool; the image gets its shape.
        caption: the true one.
        answers: for instance the base's and the policy's.
    """
    image = fit_panel(image, tuple(target.shape))
    panels = [overlay(image, target, REGION)]
    texts = [["true region and caption", caption]]
    for answer in answers:
        panels.append(overlay(image, answer.mask, PREDICTED))
        texts.append([f"{answer.title}, IoU {answer.iou:.2f}", answer.text])
    return side_by_side(panels, texts)


def fit_panel(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Resize an image to the shape of a mask's `size` (H, W), as large as a panel allows."""
    height, width = size
    scale = min(PICTURE_WIDTH / width, PICTURE_HEIGHT / height)
    return image.resize((max(round(width * scale), 1), max(round(height * scale), 1)))


def side_by_side(
    panels: Sequence[Image.Image], texts: Sequence[Sequence[str]], below: Sequence[str] = ()
) -> np.ndarray:
    """Return (H, W, 3) uint8: panels of one height from left to right.

    Args:
        texts: lines under each panel.
        below: lines under all of them.
    """
    columns = ["\n".join(wrapped(lines, CHARACTERS_OF_PANEL)) for lines in texts]
    footer = wrapped(below, CHARACTERS_OF_PANEL * len(panels))
    num_lines = max((text.count("\n") + 1 for text in columns if text), default=0)
    top = panels[0].height + 4
    footer_top = top + LINE_HEIGHT * num_lines
    width = len(panels) * (PICTURE_WIDTH + GAP) - GAP
    canvas = Image.new("RGB", (width, footer_top + LINE_HEIGHT * len(footer) + 4), "white")
    draw = ImageDraw.Draw(canvas)
    style = dict(fill="black", font_size=FONT_SIZE, spacing=LINE_HEIGHT - FONT_SIZE)
    for number, panel in enumerate(panels):
        left = number * (PICTURE_WIDTH + GAP)
        canvas.paste(panel, (left, 0))
        if columns:
            draw.multiline_text((left + 4, top), columns[number], **style)
    draw.multiline_text((4, footer_top), "\n".join(footer), **style)
    return np.array(canvas)


def wrapped(lines: Sequence[str], characters: int) -> list[str]:
    """Return lines of at most that many characters."""
    return [part for line in lines for part in textwrap.wrap(line, width=characters)]


def overlay(
    image: Image.Image,
    mask: torch.Tensor,
    color: tuple[int, int, int],
    prompt: PointPrompt | None = None,
) -> Image.Image:
    """Draw a mask (h, w) bool on an image, and a prompt in the mask's pixels, if any.

    The mask keeps the image's colours and what is outside of it is darkened, so that it is seen
    on a background of any colour. Its contour has a dark rim.
    """
    inside = np.array(Image.fromarray(mask.cpu().numpy()).resize(image.size, Image.NEAREST))
    pixels = np.array(image.convert("RGB"))  # (H, W, 3)
    pixels[~inside] = (OUTSIDE * pixels[~inside]).astype(np.uint8)
    # The contour lies inside the mask, its dark rim outside.
    inner = inside
    for _ in range(CONTOUR):
        inner = shrunk(inner)
    pixels[grown(inside) & ~inside] = 0
    pixels[inside & ~inner] = color
    panel = Image.fromarray(pixels)
    if prompt:
        draw = ImageDraw.Draw(panel)
        prompt = prompt.scaled(image.width / mask.shape[1], image.height / mask.shape[0])
        for box in prompt.boxes:
            draw.rectangle(box, outline=BOX, width=2)
        for points, fill in ((prompt.positive, POSITIVE), (prompt.negative, NEGATIVE)):
            for point in points:
                draw.circle(point, RADIUS, fill=fill, outline="white")
    return panel


def neighbours(mask: np.ndarray) -> list[np.ndarray]:
    """Return a mask (H, W) bool shifted by one pixel up, down, left and right, False beyond it."""
    padded = np.pad(mask, 1)
    return [padded[2:, 1:-1], padded[:-2, 1:-1], padded[1:-1, 2:], padded[1:-1, :-2]]


def shrunk(mask: np.ndarray) -> np.ndarray:
    """Return a mask (H, W) bool without the pixels that touch what is outside of it."""
    return np.logical_and.reduce([mask, *neighbours(mask)])


def grown(mask: np.ndarray) -> np.ndarray:
    """Return a mask (H, W) bool with the pixels that touch it."""
    return np.logical_or.reduce([mask, *neighbours(mask)])


def small_mask(mask: torch.Tensor) -> RLE:
    """Return COCO's compressed run lengths, {"size": [h, w], "counts": str}, of a mask (H, W) bool.

    Its longer side is SMALL_MASK_SIDE pixels at most; a smaller mask keeps its size.
    """
    scale = min(SMALL_MASK_SIDE / max(mask.shape), 1.0)
    size = [max(round(n * scale), 1) for n in mask.shape]
    small = F.interpolate(mask.to(torch.uint8)[None, None], size, mode="nearest-exact")[0, 0]
    return dict(size=size, counts=encode_mask(small.cpu().numpy())["counts"].decode())
