"""A page on which to try a Sa2VA: click a region and read its caption, write a phrase and see it.

`python -m tools.predict --model_path M --serve` opens it on this machine (extra `app`: gradio).
"""

import time

import gradio as gr
import numpy as np
import torch
from PIL import Image

from rl_train.loggers.pictures import PREDICTED, REGION, overlay
from tools.picture_model import PictureModel, box_region

BOX, CLICK = "a box of two clicks", "what SAM2 finds under a click"


def draw(image: Image.Image, mask: np.ndarray, color: tuple[int, int, int]) -> Image.Image:
    """Return the image with a mask; as it is if the mask is empty."""
    return overlay(image, torch.from_numpy(mask), color) if mask.any() else image


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
    ):
        """Answer a click at (x, y) of the picture: return (first corner, region, seconds, ..)."""
        point = tuple(map(int, event.index))
        if way == BOX and corner is None:
            return point, None, "Click the opposite corner.", *[None] * 2 * len(self.models)
        image = image.convert("RGB")
        for model in self.models:
            model.look(image)
        if way == BOX:
            both = np.array([corner, point])
            region = box_region([*both.min(0), *both.max(0)], image.size)
        else:
            region = self.models[0].region_at(*point)
        if not region.any():
            nothing = "There is no region: click again."
            return None, None, nothing, *[None] * 2 * len(self.models)
        return None, draw(image, region, REGION), *self.describe(image, region)

    def describe(self, image: Image.Image, region: np.ndarray) -> list:
        """Return [seconds, picture of the 1st model, its table, ..]."""
        began, shown = time.perf_counter(), []
        for model in self.models:
            caption, found, iou = model.describe(region)
            rows = [["greedy", f"{iou:.2f}", caption]]
            rows += [["sampled", f"{iou:.2f}", text] for text, iou in model.rollouts(region, 0)]
            shown += [draw(image, found, PREDICTED), rows]
        return [f"{time.perf_counter() - began:.1f} seconds", *shown]

    def segment(self, image: Image.Image | None, words: str) -> list:
        """Return [seconds, picture of the 1st model, its sentence, ..]."""
        if image is None or not words.strip():
            return ["Choose a picture and write a phrase.", *[None] * 2 * len(self.models)]
        image, began, shown = image.convert("RGB"), time.perf_counter(), []
        for model in self.models:
            model.look(image)
            mask, confidence = model.segment(words)
            sentence = f"confidence {confidence:.2f}, {mask.mean():.1%} of the picture"
            shown += [draw(image, mask, PREDICTED), sentence if mask.any() else "no mask"]
        return [f"{time.perf_counter() - began:.1f} seconds", *shown]

    def build(self) -> gr.Blocks:
        """Return the page."""
        with gr.Blocks(title="Sa2VA") as page:
            gr.Markdown("# Try a checkpoint\n" + " beside ".join(m.name for m in self.models))
            picture = gr.Image(type="pil", label="picture: click in it", height=400)
            with gr.Tab("Region: what is it?"):
                way = gr.Radio([BOX, CLICK], value=BOX, label="a region is")
                corner, note = gr.State(None), gr.Textbox(label="last answer took")
                chosen = gr.Image(label="region", height=300)
                outputs = [corner, chosen, note]
                with gr.Row():
                    for model in self.models:
                        with gr.Column():
                            label = f"{model.name}: where its caption leads"
                            outputs.append(gr.Image(label=label, height=300))
                            outputs.append(
                                gr.Dataframe(
                                    headers=["answer", "IoU", "caption"],
                                    column_widths=["20%", "15%", "65%"],
                                    label=f"{model.name}: captions, and IoU of the mask they find",
                                    wrap=True,
                                )
                            )
                picture.select(self.click, [picture, way, corner], outputs)
            with gr.Tab("Phrase: where is it?"):
                words = gr.Textbox(label="phrase, such as: the red circle")
                outputs = [gr.Textbox(label="last answer took")]
                with gr.Row():
                    for model in self.models:
                        with gr.Column():
                            outputs.append(gr.Image(label=model.name, height=300))
                            outputs.append(gr.Textbox(label="mask"))
                words.submit(self.segment, [picture, words], outputs)
        return page


def serve(models: list[PictureModel], port: int, share: bool):
    """Serve the page on this machine until it is interrupted.

    Args:
        share: let gradio make a public address of its own servers, through which pictures go.
    """
    Page(models).build().launch(server_name="127.0.0.1", server_port=port, share=share)
