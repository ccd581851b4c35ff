"""The published readings of answers and solutions."""

import pytest

from rl_train.points.parser import PointPrompt
from rl_train.points.published import load_answer, parse_solution, prompts_of_evaluation

ITEM = '{"bbox_2d": [10, 20, 200, 210], "point_2d": [30, 110]}'
SEGZERO = '{"bbox": [10, 20, 200, 210], "points_1": [30, 110], "points_2": [35, 180]}'
SEEN, SIZE = (840, 840), (420, 1260)  # (H, W): half as high, one and a half times as wide


def test_solutions_of_both_sets():
    assert parse_solution("<box>(1,2),(30,40)</box><points>(5,6),(7,8)</points>") == PointPrompt(
        ((1, 2, 30, 40),), ((5, 6), (7, 8))
    )
    assert parse_solution(f'[{ITEM}, {{"bbox_2d": [0, 0, 9, 9], "point_2d": [4, 5]}}]') == (
        PointPrompt(((10, 20, 200, 210), (0, 0, 9, 9)), ((30, 110), (4, 5)))
    )


@pytest.mark.parametrize(
    "text",
    ["", "[]", "a cup", ITEM, '[{"bbox_2d": [1, 2, 3], "point_2d": [1, 2]}]', "[1]", "[" * 99_999]
    + ["<box>(1,2),(30,40)</box>", '[{"bbox_2d": [1, 2, 3, 4]}]'],
)
def test_other_texts_are_no_solutions(text):
    with pytest.raises(ValueError, match="is no solution of Seg-Zero or VisionReasoner"):
        parse_solution(text)


def test_each_item_is_a_prompt_in_whole_pixels():
    """y is halved, x one and a half times as large, and both are rounded half up."""
    item = '{"bbox_2d": [1, 1, 841, 900], "point_2d": [3, 3.5]}'
    text = f"<think>so</think><answer>[{ITEM}, {item}]</answer>"
    assert prompts_of_evaluation(text, "visionreasoner", SEEN, SIZE) == [
        PointPrompt(((15, 10, 300, 105),), ((45, 55),)),
        PointPrompt(((2, 1, 1262, 450),), ((5, 2),)),  # beyond the image, as they are said
    ]
    many = f"<answer>[{', '.join([ITEM] * 50)}]</answer>"
    assert len(prompts_of_evaluation(many, "visionreasoner", SEEN, SIZE)) == 50
    assert prompts_of_evaluation("<answer>[]</answer>", "visionreasoner", SEEN, SIZE) == []


def test_seg_zero_s_evaluation_takes_the_first_object_of_the_text():
    """Coordinates are cut to whole ones before they are scaled, and rounded half to even after."""
    expected = [PointPrompt(((15, 10, 300, 105),), ((45, 55), (52, 90)))]
    for text in (SEGZERO, f"<think>{SEGZERO}</think><answer>no</answer>", f"It is {SEGZERO}!"):
        assert prompts_of_evaluation(text, "segzero", SEEN, SIZE) == expected
    other = '{"BBox": [1.9, 3, 5, 7], "points_b": [1, 1], "a": 0, "points_a": [3, 3], "points": 0}'
    assert prompts_of_evaluation(other, "segzero", SEEN, SIZE) == [
        PointPrompt(((2, 2, 8, 4),), ((2, 0), (4, 2)))
    ]


@pytest.mark.parametrize(
    "style, text",
    [
        ("visionreasoner", f"[{ITEM}]"),  # without tags
        ("visionreasoner", f"<answer>```json [{ITEM}]```</answer>"),
        ("visionreasoner", f"<answer>{ITEM}</answer>"),
        ("visionreasoner", f'<answer>[{ITEM}, {{"bbox_2d": [1, 2, 3, 4]}}]</answer>'),
        ("visionreasoner", f"<answer>[{ITEM.replace('30', 'NaN')}]</answer>"),
        ("visionreasoner", f"<answer>[{ITEM.replace('30', '1e999')}]</answer>"),
        ("visionreasoner", "<answer>" + "[" * 99_999 + "</answer>"),
        ("segzero", SEGZERO.replace('"', "'")),
        ("segzero", SEGZERO.replace("bbox", "box")),
        ("segzero", SEGZERO.replace("points_2", "point")),
        ("segzero", "so"),
    ],
)
def test_what_their_evaluation_cannot_read(style, text):
    assert prompts_of_evaluation(text, style, SEEN, SIZE) is None


def test_visionreasoner_reads_the_first_answer():
    assert load_answer(
        "<think><answer>[1]</answer></think><answer>[2]</answer>", "visionreasoner"
    ) == [1]
