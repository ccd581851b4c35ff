"""The questions: published ones to the letter, and what is added for negative points."""

import pytest

from rl_train.points.parser import AnswerFormat
from rl_train.points.prompts import example_answer, point_question


def test_seg_zero_to_the_letter():
    assert point_question("The Red Cup.", AnswerFormat("segzero")) == (
        "Please find 'the red cup' with bbox and points.Compare the difference between objects and "
        "find the most closely matched one.Output the thinking process in <think> </think> and "
        "final answer in <answer> </answer> tags.Output the one bbox and points of two largest "
        "inscribed circles inside the interested object in JSON format.i.e., <think> thinking "
        "process here </think><answer>{'bbox': [10,100,200,210], 'points_1': [30,110], "
        "'points_2': [35,180]}</answer>"
    )


def test_vision_reasoner_to_the_letter():
    assert point_question("cups", AnswerFormat("visionreasoner")) == (
        'Please find "cups" with bboxs and points.Compare the difference between object(s) and '
        "find the most closely matched object(s).Output the thinking process in <think> </think> "
        "and final answer in <answer> </answer> tags.Output the bbox(es) and point(s) inside the "
        "interested object(s) in JSON format.i.e., <think> thinking process here </think><answer>"
        '[{"bbox_2d": [10,100,200,210], "point_2d": [30,110]}, {"bbox_2d": [225,296,706,786], '
        '"point_2d": [302,410]}]</answer>'
    )


def test_negative_points_add_a_key_and_their_sentences():
    text = point_question("the cup", AnswerFormat("segzero", "required"))
    assert text.startswith("Please find 'the cup' with bbox, points, and negative points.Compare")
    assert (
        "one.Identify confusing background regions that should be excluded using negative points."
        "Output the thinking process" in text
    )
    assert (
        "Output the one bbox, points of two largest inscribed circles inside the interested "
        "object, and negative points in confusing background regions, all in JSON format." in text
    )
    assert text.endswith('"points_2": [35,180], "negative_points": [[250,150]]}</answer>')
    many = point_question("cups", AnswerFormat("visionreasoner", "required"))
    assert 'Please find "cups" with bboxs, points, and negative points.Compare' in many
    assert (
        "Output the bbox(es), point(s) inside the interested object(s), and negative points in "
        "confusing background regions, all in JSON format.i.e.," in many
    )
    maybe = point_question("the cup", AnswerFormat("segzero", "optional"))
    assert "background regions, if any, that should be" in maybe


@pytest.mark.parametrize("style", ["segzero", "visionreasoner"])
@pytest.mark.parametrize("negative", ["off", "optional", "required"])
@pytest.mark.parametrize(
    "coordinate_scale, limit", [("pixels", 840), ("unit", 1), ("thousand", 1000)]
)
def test_the_example_is_an_answer_in_the_questions_frame(style, negative, coordinate_scale, limit):
    form = AnswerFormat(style, negative, coordinate_scale)
    shown = example_answer(form)
    assert f"<answer>{shown}</answer>" in point_question("a", form)
    assert (f"[0, {limit}]." in point_question("a", form)) == (coordinate_scale != "pixels")
    answer = form.parse(f"<answer>{shown.replace(chr(39), chr(34))}</answer>", (limit, limit))
    assert answer.boxes[0][2] == pytest.approx(200 / 840 * limit, abs=0.002 * limit)
    assert bool(answer.negative) == (negative != "off")


def test_a_phrase_cannot_hold_the_tokens_of_a_turn():
    text = point_question(
        "A cup<|im_end|> <|image_pad|>of tea...", AnswerFormat("points", "optional")
    )
    assert text == 'Please find "a cup of tea" with points and negative points.'


def test_segzero_plus_to_the_letter():
    form = AnswerFormat("segzero_plus", "required", "unit")
    assert point_question("The Red Cup.", form) == (
        "Please find 'The Red Cup.' with bbox, points, and negative points.Compare the difference "
        "between objects and find the most closely matched one.Identify confusing background "
        "regions that should be excluded using negative points.Output the thinking process in "
        "<think> </think> and final answer in <answer> </answer> tags.Output the one bbox, points "
        "of two largest inscribed circles inside the interested object, and negative points in "
        "confusing background regions, all in JSON format.All coordinates should be normalized to "
        "[0, 1].i.e., <think> thinking process here </think><answer>"
        '{"bbox": [x1, y1, x2, y2], "points": [[x1, y1], [x2, y2]], "negative_points": [[x1, y1]]}'
        "</answer>"
    )
    assert '"points": [[x1, y1], [x2, y2]]}</answer>' in point_question(
        "a", AnswerFormat("segzero_plus", "off", "unit")
    )


def test_the_published_evaluation_strips_more_than_the_training():
    form = AnswerFormat("visionreasoner")
    assert 'find "what is it?" with' in point_question("What is it?", form)
    assert 'find "what is it" with' in point_question('"What is it?!"', form, stripped='."?!')
