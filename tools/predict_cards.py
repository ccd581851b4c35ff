"""HTML of one model's answers on the page of tools.predict: pictures with masks, text below."""

from dataclasses import dataclass
from html import escape

import numpy as np
import torch
from PIL import Image

from rl_train.loggers.pictures import PREDICTED, overlay
from tools.rollouts import thumbnail

LARGE, SMALL = (
    640,
    320,
)  # longest side in pixels of the picture of a greedy answer, of a sampled one
STYLE = "margin: 0 0 .6em 0; min-width: 0; overflow-wrap: anywhere"
GRID = "display: grid; grid-template-columns: 1fr 1fr; gap: .6em"


@dataclass
class Card:
    """One answer: its mask (H, W) bool, a short title such as its reward, and its text."""

    mask: np.ndarray
    title: str
    text: str = ""


def draw(image: Image.Image, mask: np.ndarray, color: tuple[int, int, int]) -> Image.Image:
    """Return the image with a mask; as it is if the mask is empty."""
    return overlay(image, torch.from_numpy(mask), color) if mask.any() else image


def figure(image: Image.Image, title: str, text: str, side: int) -> str:
    """Return a picture with a title in bold and a text below; both may hold any characters."""
    source = thumbnail(image, side)
    below = f"<b>{escape(title)}</b><br>{escape(text)}"
    return (
        f'<figure style="{STYLE}"><img src="{source}" style="width: 100%" alt="">'
        f"<figcaption>{below}</figcaption></figure>"
    )


def answer_cards(name: str, image: Image.Image, greedy: Card, sampled: list[Card]) -> str:
    """Return the column of a model: its greedy answer large, sampled ones two a row below."""
    large = figure(draw(image, greedy.mask, PREDICTED), greedy.title, greedy.text, LARGE)
    small = [
        figure(draw(image, card.mask, PREDICTED), card.title, card.text, SMALL) for card in sampled
    ]
    rows = f'<div style="{GRID}">{"".join(small)}</div>' if small else ""
    return f"{heading(name)}{large}{rows}"


def heading(name: str) -> str:
    """Return the heading of a model's column: the last two parts of its path."""
    short = "/".join(name.rstrip("/").split("/")[-2:])
    return f'<h3 title="{escape(name)}" style="margin: 0 0 .4em 0">{escape(short)}</h3>'
