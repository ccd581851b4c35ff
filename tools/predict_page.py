"""A page on which to try a Sa2VA: click a region and read its caption, write a phrase and see it.

`python -m tools.predict --model_path M --serve` opens it on this machine (extra `app`: gradio).
"""

import time

import gradio as gr
import numpy as np
from PIL import Image

from rl_train.loggers.pictures import REGION
from tools.picture_model import PictureModel, box_region
from tools.predict_cards import LARGE, Card, answer_cards, draw, figure, heading

BOX, CLICK = "a box: click two corners", "what SAM2 finds under a click"
HELP = "Click in the picture, or write a phrase."


class Page:
    """Actions of the page's events. Two models answer side by side, or one."""

    def __init__(self, models: list[PictureModel]):
        self.models = models

    def click(
        self,
        image: Image.Image | None,
        way: str,
        corner: tuple[int, int] | None,
        event: gr.SelectData,
    ) -> list:
        """Answer a click at (x, y): return [first corner, note, region, answers of each model]."""
        point = tuple(map(int, event.index))
        if way == BOX and corner is None:
            return [point, "Click the opposite corner.", *self.nothing()]
        image, began = image.convert("RGB"), time.perf_counter()
        for model in self.models:
            model.look(image)
        if way == BOX:
            both = np.array([corner, point])
            region = box_region([*both.min(0), *both.max(0)], image.size)
        else:
            region = self.models[0].region_at(*point)
        if not region.any():
            return [None, "There is no region: click again.", *self.nothing()]
        shown = [self.describe(model, image, region) for model in self.models]
        asked = figure(draw(image, region, REGION), "the region", "", LARGE)
        return [None, took(began), asked, *shown]

    def describe(self, model: PictureModel, image: Image.Image, region: np.ndarray) -> str:
        """Return a model's greedy caption of a region and sampled ones, with what each finds."""
        caption, found, iou = model.describe(region)
        sampled = [
            Card(found, f"IoU {iou:.2f}", text) for text, found, iou in model.rollouts(region, 0)
        ]
        return answer_cards(
            model.name, image, Card(found, f"IoU {iou:.2f}, greedy", caption), sampled
        )

    def segment(self, image: Image.Image | None, words: str) -> list:
        """Answer a phrase: return [first corner, note, region, answers of each model]."""
        if image is None or not words.strip():
            return [None, "Choose a picture and write a phrase.", *self.nothing()]
        image, began, shown = image.convert("RGB"), time.perf_counter(), []
        for model in self.models:
            model.look(image)
            mask, confidence = model.segment(words)
            size = f"{mask.mean():.1%} of the picture" if mask.any() else "no mask"
            greedy = Card(mask, f"confidence {confidence:.2f}", size)
            shown.append(answer_cards(model.name, image, greedy, []))
        return [None, took(began), "", *shown]

    def nothing(self) -> list[str]:
        """Return no region, and of each model no answer."""
        return ["", *(heading(model.name) for model in self.models)]

    def build(self, image: Image.Image | None = None) -> gr.Blocks:
        """Return the page, with a first picture if one is given."""
        # Without analytics gradio sends nothing to its servers.
        with gr.Blocks(title="Sa2VA", analytics_enabled=False) as page, gr.Row():
            with gr.Column(min_width=320):
                sources = ["upload", "clipboard"]
                picture = gr.Image(image, type="pil", sources=sources, show_label=False)
                way = gr.Radio([BOX, CLICK], value=BOX, label="a region is")
                words = gr.Textbox(label="phrase", placeholder="the red circle", submit_btn=True)
                note = gr.Textbox(HELP, show_label=False, interactive=False)
                asked, corner = gr.HTML(), gr.State(None)
            answers = []
            for model in self.models:
                with gr.Column(min_width=320):
                    answers.append(gr.HTML(heading(model.name)))
            outputs = [corner, note, asked, *answers]
            # One at a time: a model keeps the features of one picture.
            alone = dict(outputs=outputs, concurrency_limit=1, concurrency_id="models")
            picture.select(self.click, [picture, way, corner], **alone)
            words.submit(self.segment, [picture, words], **alone)
            picture.change(lambda: None, None, corner)
        return page


def took(began: float) -> str:
    """Return how long an answer took since `began`, for people."""
    return f"Answered in {time.perf_counter() - began:.1f} seconds."


def serve(models: list[PictureModel], image: Image.Image | None, port: int, share: bool):
    """Serve the page on this machine until it is interrupted.

    Args:
        image: first picture of the page.
        share: let gradio make a public address of its own servers, through which pictures go.

    Raises ValueError that names the flag if the port is taken.
    """
    page = Page(models).build(image)
    try:
        # What gradio prints names its own arguments, which are no flags here.
        _, address, public = page.launch(
            server_name="127.0.0.1",
            server_port=port,
            share=share,
            quiet=True,
            prevent_thread_lock=True,
        )
    except OSError as error:
        raise ValueError(f"--port {port}: is taken, name another one") from error
    print(f"the page: {address}" + (f", {public}" if public else "") + " (Ctrl+C ends it)")
    page.block_thread()
