"""The one parser of answers: what it reads, and why it refuses the rest."""

import json
import random

import pytest

from rl_train.points import parser
from rl_train.points.parser import AnswerFormat, AnswerParseError, ParsedAnswer, PointPrompt

pytest.importorskip("hypothesis", reason="hypothesis is not installed (extra: test)")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

SEGZERO = '{"bbox": [10, 20, 200, 210], "points_1": [30, 110], "points_2": [35, 180]%s}'
ITEM = '{"bbox_2d": [10, 20, 200, 210], "point_2d": [30, 110]}'
NEG = ', "negative_points": %s'
BOX, P1, P2 = (10.0, 20.0, 200.0, 210.0), (30.0, 110.0), (35.0, 180.0)
TWO = PointPrompt((BOX,), (P1, P2))


def tagged(text: str, think: bool = True) -> str:
    return "<think>It is left.</think>" * think + f"<answer>{text}</answer>"


def with_negatives(text: str) -> str:
    return tagged(SEGZERO % (NEG % text))


def read(text: str, style="segzero", negative="optional", limits=(840, 840), max_points=8):
    """The answer, or the reason why there is none."""
    try:
        return AnswerFormat(style, negative, max_points=max_points).parse(text, limits)
    except AnswerParseError as refused:
        assert str(refused) in parser.REASONS
        return str(refused)


def deep(text: str) -> str:
    return "[" * 100_000 + text + "]" * 100_000


# Segzero_plus's nine cases, in its base's keys.
NINE = {
    "with thoughts": (with_negatives("[[250, 150]]"), PointPrompt((BOX,), (P1, P2), ((250, 150),))),
    "without thoughts": (
        tagged(SEGZERO % (NEG % "[[250, 150]]"), think=False),
        PointPrompt((BOX,), (P1, P2), ((250, 150),)),
    ),
    "several negatives": (
        with_negatives("[[1, 2], [3, 4], [5, 6]]"),
        PointPrompt((BOX,), (P1, P2), ((1, 2), (3, 4), (5, 6))),
    ),
    "none, where they are optional": (tagged(SEGZERO % ""), TWO),
    "broken JSON": (tagged((SEGZERO % "")[:-1]), parser.NO_JSON),
    "no tag": (SEGZERO % "", TWO),
    "out of range": (with_negatives("[[883, 1]]"), parser.OUTSIDE),
    "without a box": (tagged('{"points_1": [1, 2], "points_2": [3, 4]}'), parser.WRONG_KEYS),
}
TABLE = NINE | {
    "single quotes, as in the published example": (
        tagged((SEGZERO % "").replace('"', "'")),
        parser.NO_JSON,
    ),
    "floats": (
        with_negatives("[[1.5, 2.25e1]]"),
        PointPrompt((BOX,), (P1, P2), ((1.5, 22.5),)),
    ),
    "NaN": (with_negatives("[[NaN, 1]]"), parser.OUTSIDE),
    "infinity": (with_negatives("[[-Infinity, 1]]"), parser.OUTSIDE),
    "more than a float holds": (with_negatives("[[1e999, 1]]"), parser.OUTSIDE),
    "a bool": (with_negatives("[[true, 1]]"), parser.NO_NUMBERS),
    "null": (with_negatives("[[null, 1]]"), parser.NO_NUMBERS),
    "a string": (with_negatives('[["1", 1]]'), parser.NO_NUMBERS),
    "an integer of 400 digits": (with_negatives(f"[[1{'0' * 400}, 1]]"), parser.OUTSIDE),
    "an integer of 9,000 digits": (with_negatives(f"[[1{'0' * 9000}, 1]]"), parser.NO_JSON),
    "nested points": (with_negatives("[[[1, 2]]]"), parser.NO_NUMBERS),
    "a flat list": (with_negatives("[1, 2]"), parser.NO_NUMBERS),
    "no list": (with_negatives("5"), parser.WRONG_KEYS),
    "nested lists without end": (tagged(deep("1")), parser.TOO_MANY),
    "10,000 points": (with_negatives(json.dumps([[k % 800, 1] for k in range(10_000)])),)
    + (parser.TOO_MANY,),
    "nine points of eight": (
        with_negatives("[[1, 1], [2, 1], [3, 1], [4, 1], [5, 1], [6, 1]]"),
        parser.TOO_MANY,
    ),
    "a point of three numbers": (with_negatives("[[1, 2, 3]]"), parser.NO_NUMBERS),
    "a box of three numbers": (tagged((SEGZERO % "").replace(", 210]", "]")), parser.NO_NUMBERS),
    "x1 > x2": (
        tagged((SEGZERO % "").replace("[10, 20", "[201, 20")),
        PointPrompt(((200, 20, 201, 210),), (P1, P2)),
    ),
    "y1 > y2": (
        tagged((SEGZERO % "").replace("[10, 20", "[10, 211")),
        PointPrompt(((10, 210, 200, 211),), (P1, P2)),
    ),
    "a pixel beyond the frame": (
        with_negatives("[[841, -0.5]]"),
        PointPrompt((BOX,), (P1, P2), ((840, 0),)),
    ),
    "far below 0": (with_negatives("[[-43, 1]]"), parser.OUTSIDE),
    "on the border": (
        with_negatives("[[840, 0]]"),
        PointPrompt((BOX,), (P1, P2), ((840, 0),)),
    ),
    "braces in thoughts": ("<think>{1} [2]</think><answer>" + SEGZERO % "" + "</answer>", TWO),
    "an answer in thoughts": (
        "<think>As <answer>{}</answer>?</think><answer>" + SEGZERO % "" + "</answer>",
        TWO,
    ),
    "two answers": (tagged(SEGZERO % "") + tagged(SEGZERO % "", False), parser.TWO_ANSWERS),
    "without its end": (tagged(SEGZERO % "")[:-9], TWO),
    "truncated": (tagged(SEGZERO % "")[:-12], parser.NO_JSON),
    "thoughts without end": ("<think>so " + SEGZERO % "", parser.NO_ANSWER),
    "in a code fence": (tagged("```json\n" + SEGZERO % "" + "\n```"), TWO),
    "in a code fence without tags": (f"Here:\n```\n{SEGZERO % ''}\n```", TWO),
    "words around it": (tagged("The box is " + SEGZERO % "" + "."), TWO),
    "an object in a list": (tagged(f"[{SEGZERO % ''}]"), TWO),
    "empty": ("", parser.NO_ANSWER),
    "nothing in the tags": (tagged(""), parser.NO_JSON),
    "no object": (tagged("[]"), parser.WRONG_KEYS),
    "a program": (tagged("__import__('os').system('true')"), parser.NO_JSON),
    "a key twice": (tagged(SEGZERO % ', "bbox": [0, 0, 1, 1]'), parser.WRONG_KEYS),
    "other keys": (tagged(SEGZERO % ', "label": "cup"'), TWO),
    "a point twice": (
        with_negatives("[[5, 6], [5.0, 6]]"),
        PointPrompt((BOX,), (P1, P2), ((5, 6),)),
    ),
    "blanks and lines": (tagged("\n " + SEGZERO % "" + "\n"), TWO),
    "half a character": (tagged('{"bbox": "\ud83d"}'), parser.WRONG_KEYS),
}


@pytest.mark.parametrize("name", TABLE)
def test_an_answer_is_read_or_refused_with_a_reason(name):
    text, expected = TABLE[name]
    assert read(text) == expected


def test_negative_points_may_be_asked_for_or_left_unread():
    none = tagged(SEGZERO % "")
    assert read(none, negative="required") == parser.NO_NEGATIVE  # the ninth case
    assert read(with_negatives("[]"), negative="required") == parser.NO_NEGATIVE
    assert read(with_negatives("[[1, 2]]"), negative="required").negative == ((1.0, 2.0),)
    assert read(with_negatives("[[9999, true]]"), negative="off") == TWO


OTHER_STYLES = {
    "two objects": (
        "visionreasoner",
        tagged(f'[{ITEM}, {{"bbox_2d": [0, 0, 9, 9], "point_2d": [4, 5]}}]'),
        PointPrompt((BOX, (0, 0, 9, 9)), (P1, (4, 5))),
    ),
    "negatives of an object": (
        "visionreasoner",
        tagged(f"[{ITEM[:-1]}{NEG % '[[1, 2]]'}}}]"),
        PointPrompt((BOX,), (P1,), ((1, 2),)),
    ),
    "no object": ("visionreasoner", tagged("[]"), PointPrompt()),
    "no list": ("visionreasoner", tagged(ITEM), parser.WRONG_KEYS),
    "an item without a point": (
        "visionreasoner",
        tagged('[{"bbox_2d": [1, 2, 3, 4]}]'),
        parser.WRONG_KEYS,
    ),
    "no object, without tags": ("visionreasoner", "[]", PointPrompt()),
    "an object without tags": (
        "visionreasoner",
        f"As [1] says: [{ITEM}]",
        PointPrompt((BOX,), (P1,)),
    ),
    "an empty point": ("visionreasoner", tagged('{"point_2d": []}'), parser.WRONG_KEYS),
    "the same point of two boxes": (
        "visionreasoner",
        tagged(f'[{ITEM}, {ITEM}, {{"bbox_2d": [0, 0, 40, 200], "point_2d": [30, 110]}}]'),
        PointPrompt((BOX, (0, 0, 40, 200)), (P1, P1)),
    ),
    "bare points": ("points", '{"points": [[1, 2], [3, 4]]}', PointPrompt((), ((1, 2), (3, 4)))),
    "bare points and a box": (
        "points",
        '{"points": [], "bbox": [1, 2, 3, 4], "negative_points": [[5, 6]]}',
        PointPrompt(((1, 2, 3, 4),), (), ((5, 6),)),
    ),
    "nothing at all": ("points", '{"points": []}', parser.WRONG_KEYS),
    "words before": ("points", 'It is {"points": [[1, 2]]}', parser.NO_JSON),
    "words behind": ("points", '{"points": [[1, 2]]} it is', parser.NO_JSON),
    "bare points in a code fence": (
        "points",
        '```json\n{"points": [[1, 2]]}\n```',
        PointPrompt((), ((1, 2),)),
    ),
}


@pytest.mark.parametrize("name", OTHER_STYLES)
def test_the_other_styles(name):
    style, text, expected = OTHER_STYLES[name]
    assert read(text, style) == expected


def test_limits_are_of_each_axis():
    text = '{"points": [[%s, %s]]}'
    assert read(text % (20, 10), "points", limits=(20, 10)).positive == ((20.0, 10.0),)
    assert read(text % (10, 11), "points", limits=(20, 10)) == parser.OUTSIDE
    assert read(text % (0.5, 1.06), "points", limits=(1, 1)) == parser.OUTSIDE
    assert read(text % (0.5, 1.01), "points", limits=(1, 1)).positive == ((0.5, 1.0),)


# (what is said, what is put right, whether the form is still the published one)
REPAIRED = {
    "as published": (tagged(SEGZERO % ""), ()),
    "841": (tagged((SEGZERO % "").replace("35", "841")), (parser.CLIPPED,)),
    "corners": (tagged((SEGZERO % "").replace("[10, 20", "[201, 20")), (parser.SWAPPED,)),
    "tags": (SEGZERO % "", (parser.NO_TAGS,)),
    "fence": (tagged(f"```json\n{SEGZERO % ''}\n```"), (parser.CODE_FENCE,)),
    "words": (tagged(f"So: {SEGZERO % ''}!"), (parser.TEXT_AROUND,)),
    "all": (
        "Well ```" + (SEGZERO % "").replace("[10, 20", "[860, 20") + "```",
        (parser.NO_TAGS, parser.TEXT_AROUND, parser.CLIPPED, parser.SWAPPED),
    ),
}


@pytest.mark.parametrize("name", REPAIRED)
def test_repairs_are_told(name):
    text, repairs = REPAIRED[name]
    parsed = AnswerFormat("segzero").parse_in_pixels(text, (840, 840), (840, 840))
    assert parsed.prompt and parsed.reason == "" and parsed.repairs == repairs


# Segzero_plus's own nine cases, in its keys and its frame.
PLUS = '{"bbox": [0.1, 0.2, 0.5, 0.6], "points": [[0.2, 0.3], [0.4, 0.5]]%s}'
PLUS_BOX, PLUS_POINTS = ((0.1, 0.2, 0.5, 0.6),), ((0.2, 0.3), (0.4, 0.5))
PLUS_NINE = {
    "with thoughts": (
        tagged(PLUS % (NEG % "[[0.7, 0.8]]")),
        PointPrompt(PLUS_BOX, PLUS_POINTS, ((0.7, 0.8),)),
    ),
    "without thoughts": (
        tagged(PLUS % (NEG % "[[0.7, 0.8]]"), think=False),
        PointPrompt(PLUS_BOX, PLUS_POINTS, ((0.7, 0.8),)),
    ),
    "several negatives": (
        tagged(PLUS % (NEG % "[[0.7, 0.8], [0, 1]]")),
        PointPrompt(PLUS_BOX, PLUS_POINTS, ((0.7, 0.8), (0.0, 1.0))),
    ),
    "none, where they are required": (tagged(PLUS % ""), parser.NO_NEGATIVE),
    "an empty list of them": (tagged(PLUS % (NEG % "[]")), parser.NO_NEGATIVE),
    "broken JSON": (tagged((PLUS % "")[:-1]), parser.NO_JSON),
    "out of range": (tagged(PLUS % (NEG % "[[1.5, 0.2]]")), parser.OUTSIDE),
    "no point": (tagged('{"bbox": [0, 0, 1, 1], "points": []}'), parser.WRONG_KEYS),
    "without a box": (tagged('{"points": [[0.1, 0.1]]}'), parser.WRONG_KEYS),
}


@pytest.mark.parametrize("name", PLUS_NINE)
def test_the_normalised_answers_of_the_earlier_points_system(name):
    text, expected = PLUS_NINE[name]
    assert read(text, "segzero_plus", "required", limits=(1, 1)) == expected


def test_coordinates_are_read_in_the_checkpoint_s_frame():
    """A model that sees an image of 40 x 20 pixels (W, H) at 560 x 280."""
    seen, size, text = (280, 560), (20, 40), '{"points": [[%s, %s]]}'
    for coordinate_scale, right in dict(
        pixels=(280, 70), unit=(0.5, 0.25), thousand=(500, 250)
    ).items():
        form = AnswerFormat("points", coordinate_scale=coordinate_scale)
        parsed = form.parse_in_pixels(text % right, seen, size)
        assert parsed == ParsedAnswer(PointPrompt(positive=((20.0, 5.0),)))
        outside = form.parse_in_pixels(text % (1051, 1), seen, size)
        assert outside == ParsedAnswer(None, parser.OUTSIDE)
    assert form.parse_in_pixels("", seen, size) == ParsedAnswer(None, parser.NO_JSON)


def test_scaled_is_into_another_frame():
    answer = PointPrompt(((1, 2, 3, 4),), ((5, 6),), ((7, 8),)).scaled(2, 10)
    assert answer == PointPrompt(((2, 20, 6, 40),), ((10, 60),), ((14, 80),))


def test_tags_with_nothing_around_them():
    form = AnswerFormat("segzero")
    assert form.is_well_formed(tagged("{}")) and form.is_well_formed(
        " <think>a</think>\n<answer>b</answer> "
    )
    for text in (
        tagged("{}", think=False),
        tagged("{}") + "!",
        "Well " + tagged("{}"),
        "<think>a</think> so <answer>b</answer>",
        tagged("{}") + tagged("{}", think=False),
        tagged("{}")[:-1],
    ):
        assert not form.is_well_formed(text), text
    assert AnswerFormat("points").is_well_formed("{}")


number = st.one_of(st.integers(0, 840), st.floats(0, 840))
point = st.tuples(number, number)
points = st.lists(point, unique=True, max_size=2).map(tuple)
box = st.tuples(number, number, number, number).map(
    lambda b: (min(b[0], b[2]), min(b[1], b[3]), max(b[0], b[2]), max(b[1], b[3]))
)
pairs = st.lists(st.tuples(box, point), unique_by=(lambda p: p[0], lambda p: p[1]), max_size=3)
one_box = st.lists(box, max_size=1).map(tuple)
segzero = st.builds(
    PointPrompt,
    box.map(lambda b: (b,)),
    st.lists(point, unique=True, min_size=2, max_size=2),
    points,
)
visionreasoner = st.builds(
    lambda items, negative: PointPrompt(*zip(*items), negative) if items else PointPrompt(),
    pairs,
    points,
)
segzero_plus = st.builds(
    PointPrompt,
    box.map(lambda b: (b,)),
    st.lists(point, unique=True, min_size=1, max_size=4),
    points,
)
bare = st.builds(PointPrompt, one_box, st.lists(point, unique=True, min_size=1, max_size=3), points)
stated = st.one_of(
    *(
        st.tuples(st.just(style), answer)
        for style, answer in dict(
            segzero=segzero,
            visionreasoner=visionreasoner,
            segzero_plus=segzero_plus,
            points=bare,
        ).items()
    )
)


@settings(max_examples=150, deadline=None)
@given(stated)
def test_what_is_formatted_is_read_again(case):
    style, answer = case
    answer = PointPrompt(answer.boxes, tuple(answer.positive), answer.negative)
    form = AnswerFormat(style, "optional", max_points=8)
    assert form.parse(form.format(answer, "left {of} [it]"), (840, 840)) == answer


def test_5000_damaged_answers_are_refused_or_read():
    """Cut, doubled, with characters of JSON in wrong places: none crashes."""
    rng, counts = random.Random(0), {}
    kinds = {"segzero": with_negatives("[[250, 150]]"), "points": '{"points": [[1, 2]]}'}
    kinds["visionreasoner"] = tagged(f"[{ITEM}, {ITEM}]")
    for _ in range(5000):
        style = rng.choice(list(kinds))
        text = list(kinds[style])
        for _ in range(rng.randint(1, 3)):
            place, length = rng.randrange(len(text) + 1), rng.choice([0, 0, 1, 1, 5])
            new = rng.choice(["", "", "[", "]", "{", "}", ",", "9", "-", "e", '"', "NaN", ".5"])
            text[place : place + length] = new
        found = read("".join(text), style)
        counts[type(found).__name__] = counts.get(type(found).__name__, 0) + 1
        if isinstance(found, PointPrompt):
            flat = [
                n for kind in (found.boxes, found.positive, found.negative) for p in kind for n in p
            ]
            assert all(type(n) is float and 0 <= n <= 840 for n in flat)
    assert min(counts["str"], counts["PointPrompt"]) > 300
