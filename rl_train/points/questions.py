"""What is asked for a box and points: the texts by which published checkpoints were trained.

Seg-Zero's and VisionReasoner's to the letter, where nothing is added: their sentences follow each
other without a blank, and Seg-Zero's example has single quotes, which are no JSON. Those for
negative points are of Segzero_plus. The image stands directly before the question, as in both
evaluations (VisionReasoner's training had a line break between).
"""

import re

from rl_train.data.text import clean_caption
from rl_train.points.answers import ANSWER, Answer, Form

# The frame of coordinates: the largest x and y, or None = the image's size as the model sees it.
FRAMES = {"pixels": None, "unit": 1.0, "thousand": 1000.0}
NUMBERS = re.compile(r"(?<=\d), (?=\d)")  # of which the examples have no blank between
_SIDE = 840  # of the image that the examples' pixels are of
_COMPARE = {
    "segzero": "Compare the difference between objects and find the most closely matched one.",
    "visionreasoner": "Compare the difference between object(s) and find the most closely matched "
    "object(s).",
}
_THINK = (
    "Output the thinking process in <think> </think> and final answer in <answer> </answer> tags."
)
_SCHEMA = "i.e., <think> thinking process here </think><answer>{}</answer>"
_EXAMPLES = {
    "segzero": Answer(((10, 100, 200, 210),), ((30, 110), (35, 180)), ((250, 150),)),
    "visionreasoner": Answer(
        ((10, 100, 200, 210), (225, 296, 706, 786)), ((30, 110), (302, 410)), ((250, 150),)
    ),
}
_FRAME = {
    "pixels": "",
    "unit": "All coordinates should be normalized to [0, 1].",
    "thousand": "All coordinates should be normalized to [0, 1000].",
}


def question(caption: str, form: Form, frame: str = "pixels") -> str:
    """The question for what `caption` refers to, which is lower case without final stops in it."""
    x = clean_caption(caption.lower()).strip(".")
    if form.style == "points":
        return f'Please find "{x}" with points{" and negative points" * _negative(form)}.'
    return "".join([_asked(x, form), _FRAME[frame], _SCHEMA.format(example(form, frame))])


def _asked(x: str, form: Form) -> str:
    negative, maybe = _negative(form), ", if any," * (form.negative_points == "optional")
    if form.style == "segzero":
        what = "bbox, points, and negative points" if negative else "bbox and points"
        parts = [f"Please find '{x}' with {what}."]
        wanted = "the one bbox and points of two largest inscribed circles inside the interested "
        wanted += "object in JSON format."
        if negative:
            wanted = "the one bbox, points of two largest inscribed circles inside the interested "
            wanted += "object, and negative points in confusing background regions, all in JSON "
            wanted += "format."
    else:
        what = "bboxs, points, and negative points" if negative else "bboxs and points"
        parts = [f'Please find "{x}" with {what}.']
        wanted = "the bbox(es) and point(s) inside the interested object(s) in JSON format."
        if negative:
            wanted = "the bbox(es) and point(s) inside the interested object(s), and negative "
            wanted += "points in confusing background regions, all in JSON format."
    parts.append(_COMPARE[form.style])
    if negative:
        parts.append(
            f"Identify confusing background regions{maybe} that should be excluded using negative "
            "points."
        )
    return "".join([*parts, _THINK, f"Output {wanted}"])


def example(form: Form, frame: str = "pixels") -> str:
    """The example of an answer that the question shows."""
    shown = _EXAMPLES[form.style]
    if FRAMES[frame]:
        scaled = shown.scaled(*[FRAMES[frame] / _SIDE] * 2)
        digits = 0 if FRAMES[frame] > 1 else 3
        kinds = (scaled.boxes, scaled.positive, scaled.negative)
        shown = Answer(
            *(tuple(tuple(round(n, digits) for n in one) for one in kind) for kind in kinds)
        )
    text = NUMBERS.sub(",", form.format(shown).partition(ANSWER[0])[2].removesuffix(ANSWER[1]))
    return text if form.style == "visionreasoner" or _negative(form) else text.replace('"', "'")


def _negative(form: Form) -> bool:
    return form.negative_points != "off"
