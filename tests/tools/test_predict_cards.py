"""tools/predict_cards.py: a model's answers as HTML, pictures inside."""

import base64
import io
import re

import numpy as np
from PIL import Image

from rl_train.loggers.pictures import PREDICTED
from tools.predict_cards import Card, answer_cards, draw, figure

GREY = Image.new("RGB", (40, 30), (128, 128, 128))


def square() -> np.ndarray:
    """A mask (30, 40) of 10 x 10 pixels."""
    mask = np.zeros((30, 40), dtype=bool)
    mask[10:20, 5:15] = True
    return mask


def pictures(html: str) -> list[np.ndarray]:
    """The pictures (H, W, 3) in a page."""
    sources = re.findall(r"data:image/webp;base64,([^\"]+)", html)
    files = [io.BytesIO(base64.b64decode(source)) for source in sources]
    return [np.asarray(Image.open(file).convert("RGB")) for file in files]


def test_each_answer_has_its_mask_and_its_text():
    cards = [Card(np.zeros_like(square()), f"IoU 0.{n}", f"answer {n}") for n in range(3)]
    html = answer_cards("a/b/checkpoint_step_7", GREY, Card(square(), "IoU 0.9", "best"), cards)
    greedy, *sampled = pictures(html)
    assert greedy.shape == (30, 40, 3) and len(sampled) == 3
    assert greedy[25, 30].max() < 80 < greedy[15, 10].min()  # what is outside is darkened
    assert all(abs(picture.astype(int) - 128).max() < 8 for picture in sampled)
    assert [html.index(f"answer {n}") for n in range(3)] == sorted(
        html.index(f"answer {n}") for n in range(3)
    )
    assert ">b/checkpoint_step_7<" in html and 'title="a/b/checkpoint_step_7"' in html


def test_an_empty_mask_leaves_the_picture():
    assert draw(GREY, np.zeros_like(square()), PREDICTED) is GREY


def test_an_answer_is_text_and_no_html():
    html = figure(GREY, "IoU <1", '<img src=x onerror="alert(1)"> & more', 20)
    assert "<img src=x" not in html and "IoU &lt;1" in html and "&amp; more" in html
    assert pictures(html)[0].shape == (15, 20, 3)
