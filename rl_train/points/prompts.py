"""Questions for a box and points: the texts by which published checkpoints were trained.

Seg-Zero's and VisionReasoner's are to the letter, where nothing is added: their sentences follow
each other without a blank, and Seg-Zero's example has single quotes, which are no JSON. Those for
negative points are of Segzero_plus, whose own style shows letters for numbers. The image stands
directly before the question, as in both evaluations (VisionReasoner's training had a line break
between).
"""

import re

from rl_train.data.text import clean_caption
from rl_train.points.parser import ANSWER, COORDINATE_SCALES, AnswerFormat, PointPrompt

# {(style, whether negative points are asked for): question}. {x} is the phrase, {if_any} stands
# where negative points are optional, {coordinate_scale} names the coordinates, {example} is an
# answer.
_END = "{coordinate_scale}i.e., <think> thinking process here </think><answer>{example}</answer>"
_THINK = (
    "Output the thinking process in <think> </think> and final answer in <answer> </answer> tags."
)
_EXCLUDE = (
    "Identify confusing background regions{if_any} that should be excluded using negative points."
)
_QUESTIONS = {
    ("points", False): 'Please find "{x}" with points.',
    ("points", True): 'Please find "{x}" with points and negative points.',
    ("segzero", False): "Please find '{x}' with bbox and points."
    "Compare the difference between objects and find the most closely matched one."
    f"{_THINK}Output the one bbox and points of two largest inscribed circles inside the "
    f"interested object in JSON format.{_END}",
    ("segzero", True): "Please find '{x}' with bbox, points, and negative points."
    "Compare the difference between objects and find the most closely matched one."
    f"{_EXCLUDE}{_THINK}Output the one bbox, points of two largest inscribed circles inside the "
    "interested object, and negative points in confusing background regions, all in JSON format."
    f"{_END}",
    ("visionreasoner", False): 'Please find "{x}" with bboxs and points.'
    "Compare the difference between object(s) and find the most closely matched object(s)."
    f"{_THINK}Output the bbox(es) and point(s) inside the interested object(s) in JSON format."
    f"{_END}",
    ("visionreasoner", True): 'Please find "{x}" with bboxs, points, and negative points.'
    "Compare the difference between object(s) and find the most closely matched object(s)."
    f"{_EXCLUDE}{_THINK}Output the bbox(es), point(s) inside the interested object(s), and "
    "negative points in confusing background regions, all in JSON format."
    f"{_END}",
}
_QUESTIONS |= {
    ("segzero_plus", negative): _QUESTIONS["segzero", negative] for negative in (False, True)
}
_FRAME_SENTENCES = {
    "pixels": "",
    "unit": "All coordinates should be normalized to [0, 1].",
    "thousand": "All coordinates should be normalized to [0, 1000].",
}
_EXAMPLE_SIZE = (840, 840)  # (H, W) in pixels of the image that the examples are about
_EXAMPLES = {
    "points": PointPrompt((), ((30, 110),), ((250, 150),)),
    "segzero": PointPrompt(((10, 100, 200, 210),), ((30, 110), (35, 180)), ((250, 150),)),
    "visionreasoner": PointPrompt(
        ((10, 100, 200, 210), (225, 296, 706, 786)), ((30, 110), (302, 410)), ((250, 150),)
    ),
}


_SEGZERO_PLUS_EXAMPLE = (
    '{"bbox": [x1, y1, x2, y2], "points": [[x1, y1], [x2, y2]]',
    ', "negative_points": [[x1, y1]]',
    "}",
)


def point_question(caption: str, answer_format: AnswerFormat, stripped: str = ".") -> str:
    """Return the question for the object of `caption`, as the style's training asks it.

    The caption is in lower case, without the characters `stripped` at both ends. Segzero_plus asks
    it as it is.
    """
    text = clean_caption(caption)
    if answer_format.style != "segzero_plus":
        text = clean_caption(caption.lower()).strip(stripped)
    return _QUESTIONS[answer_format.style, answer_format.with_negatives].format(
        x=text,
        if_any=", if any," * (answer_format.negative_points == "optional"),
        coordinate_scale=_FRAME_SENTENCES[answer_format.coordinate_scale],
        example=example_answer(answer_format),
    )


def example_answer(answer_format: AnswerFormat) -> str:
    """Return the example of an answer that the question shows."""
    if answer_format.style == "segzero_plus":
        start, negatives, end = _SEGZERO_PLUS_EXAMPLE
        return start + negatives * answer_format.with_negatives + end
    example = _EXAMPLES[answer_format.style]
    if COORDINATE_SCALES[answer_format.coordinate_scale]:
        example = answer_format.in_frame(example, _EXAMPLE_SIZE, _EXAMPLE_SIZE)
    text = answer_format.format(example).partition(ANSWER[0])[2].removesuffix(ANSWER[1])
    # Published examples have no blank between two numbers, and Seg-Zero's has single quotes.
    text = re.sub(r"(?<=\d), (?=\d)", ",", text)
    published = answer_format.style == "segzero" and not answer_format.with_negatives
    return text.replace('"', "'") if published else text
