"""What is asked for a box and points: the texts by which published checkpoints were trained.

Seg-Zero's and VisionReasoner's to the letter, where nothing is added: their sentences follow each
other without a blank, and Seg-Zero's example has single quotes, which are no JSON. Those for
negative points are of Segzero_plus. The image stands directly before the question, as in both
evaluations (VisionReasoner's training had a line break between).
"""

import re

from rl_train.data.text import clean_caption
from rl_train.points.parser import ANSWER, FRAMES, AnswerFormat, PointPrompt

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
_EXCLUDE = "that should be excluded using negative points."
_SCHEMA = "i.e., <think> thinking process here </think><answer>{}</answer>"
_EXAMPLES = {
    "segzero": PointPrompt(((10, 100, 200, 210),), ((30, 110), (35, 180)), ((250, 150),)),
    "visionreasoner": PointPrompt(
        ((10, 100, 200, 210), (225, 296, 706, 786)), ((30, 110), (302, 410)), ((250, 150),)
    ),
}
_FRAME = {
    "pixels": "",
    "unit": "All coordinates should be normalized to [0, 1].",
    "thousand": "All coordinates should be normalized to [0, 1000].",
}


def point_question(caption: str, form: AnswerFormat) -> str:
    """The question for what `caption` refers to, which is lower case without final stops in it."""
    x = clean_caption(caption.lower()).strip(".")
    if form.style == "points":
        return f'Please find "{x}" with points{" and negative points" * form.with_negatives}.'
    one = form.style == "segzero"
    boxes, quoted = ("bbox", f"'{x}'") if one else ("bboxs", f'"{x}"')
    wanted = "the bbox(es){} point(s) inside the interested object(s)"
    if one:
        wanted = "the one bbox{} points of two largest inscribed circles inside the interested "
        wanted += "object"
    parts = [f"Please find {quoted} with {boxes} and points.", _COMPARE[form.style]]
    parts += [_THINK, f"Output {wanted.format(' and')} in JSON format."]
    if form.with_negatives:
        maybe = ", if any," * (form.negative_points == "optional")
        parts = [f"Please find {quoted} with {boxes}, points, and negative points."]
        parts += [_COMPARE[form.style], f"Identify confusing background regions{maybe} {_EXCLUDE}"]
        parts += [_THINK, f"Output {wanted.format(',')}, and negative points in confusing "]
        parts += ["background regions, all in JSON format."]
    return "".join([*parts, _FRAME[form.frame], _SCHEMA.format(example_answer(form))])


def example_answer(form: AnswerFormat) -> str:
    """The example of an answer that the question shows."""
    shown, largest = _EXAMPLES[form.style], FRAMES[form.frame]
    if largest:
        shown = form.in_frame(shown, (_SIDE, _SIDE), (_SIDE, _SIDE))
    text = NUMBERS.sub(",", form.format(shown).partition(ANSWER[0])[2].removesuffix(ANSWER[1]))
    return text if form.style == "visionreasoner" or form.with_negatives else text.replace('"', "'")
