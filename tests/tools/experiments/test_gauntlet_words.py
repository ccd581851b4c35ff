"""Cheap causes of loop 1 on toy bases: found where they were planted, and nowhere else."""

from collections import Counter

import numpy as np
import pytest
import torch

from tools.experiments.gauntlet.words import (
    TableSearch,
    confusable_sets,
    mistakes,
    position_of,
    replacements,
    rewordings,
    substitute,
    table_candidates,
)

COLORS = ("red", "orange", "green", "blue")
SHAPES = ("circle", "square")
SWAPPED = dict(zip(("red", "orange"), ("orange", "red")))


def drawn(seed: int, count: int = 80) -> list[tuple[str, str, torch.Tensor]]:
    """(colour, shape, region) of `count` objects; regions lie in one of four corners."""
    rng, objects = np.random.default_rng(seed), []
    for _ in range(count):
        region = torch.zeros(8, 8, dtype=torch.bool)
        y, x = rng.integers(0, 2, 2) * 5
        region[y : y + 2, x : x + 2] = True
        objects.append((str(rng.choice(COLORS)), str(rng.choice(SHAPES)), region))
    return objects


class ToyBase:
    """A base and its listener: a caption finds the object of which it is the very caption."""

    def __init__(self, seed: int, say, truth=lambda color, shape, region: f"A {color} {shape}."):
        rng, objects = np.random.default_rng(seed + 100), drawn(seed)
        self.references = [truth(*each) for each in objects]
        self.captions = [f"A {say(color, rng)} {shape}." for color, shape, _ in objects]
        self.regions = [region for *_, region in objects]

    def listen(self, queries: list[tuple[int, str]]) -> list[float]:
        return [
            float(text.lower().rstrip(".") == self.references[row].lower().rstrip("."))
            for row, text in queries
        ]

    def score(self, caption) -> float:
        texts = [caption(text, region) for text, region in zip(self.captions, self.regions)]
        return float(np.mean(self.listen(list(enumerate(texts)))))


def chosen(base: ToyBase) -> dict:
    causes = rewordings(base.captions, base.references, base.regions, base.listen)
    return {cause.name: cause for cause in causes}


def test_a_table_takes_the_whole_gain_of_a_swapped_pair():
    training, heldout = (ToyBase(seed, lambda c, _: SWAPPED.get(c, c)) for seed in (0, 1))
    table = chosen(training)["table of words"]
    assert table.chosen == SWAPPED
    assert heldout.score(lambda text, _: text) < 0.7 and heldout.score(table.caption) == 1


def test_a_table_takes_nothing_where_mistakes_follow_no_rule():
    """The same number of mistakes, each colour now taken for any other one."""

    def say(color, rng):
        return str(rng.choice(COLORS)) if rng.random() < 0.6 else color

    training, heldout = (ToyBase(seed, say) for seed in (0, 1))
    table, before = chosen(training)["table of words"], heldout.score(lambda text, _: text)
    assert 0.4 < before < 0.7
    assert heldout.score(table.caption) - before < 0.25 * (1 - before)


def test_one_word_per_set_is_the_best_one_or_none():
    """Three of four regions are pink, whatever is said; no other set gains by a constant."""
    captions = ["a red cat", "a pink cat", "a red dog", "a red dog"]
    true = ["a pink cat", "a pink cat", "a pink dog", "a red dog"]
    search = TableSearch(captions, lambda queries: [text == true[row] for row, text in queries])
    assert search.constants([("red", "pink"), ("cat", "dog")]) == {"red": "pink"}
    assert search.constants([("cat", "dog")]) == {}


def test_a_position_and_one_caption_for_all_are_found_where_they_are_the_truth():
    by_place = [
        ToyBase(seed, lambda c, _: "grey", lambda *each: position_of(each[2], 2)) for seed in (0, 1)
    ]
    position = chosen(by_place[0])["position by name"]
    assert position.chosen == "{position}, 2 x 2 cells" and by_place[1].score(position.caption) == 1
    alike = [
        ToyBase(seed, lambda c, r: str(r.choice(COLORS)), lambda *_: "a red circle")
        for seed in (0, 1)
    ]
    fixed = chosen(alike[0])["one caption for all"]
    assert fixed.chosen == "a red circle" and alike[1].score(fixed.caption) == 1


def test_replacements_by_hand():
    pairs = replacements("A ruled blue cross.", "A striped red cross", with_neighbours=False)
    assert pairs == {("ruled", "striped"), ("blue", "red")}
    pairs = replacements("the top left", "the top right", with_neighbours=True)
    assert pairs == {("left", "right"), ("top left", "top right")}
    assert replacements("a dog", "a big dog", True) == set()  # nothing is in its place
    longer = replacements("a polar bear here", "a dog here", True)
    assert longer == {("polar bear", "dog"), ("a polar bear", "a dog")} | {
        ("polar bear here", "dog here")
    }


def test_mistakes_recur_and_make_sets():
    said = ["a red dog", "a red dog", "a tan dog", "a tan dog", "a red cat"]
    true = ["a tan dog", "a tan cow", "a red dog", "a red dog", "a sly cat"]
    counts = mistakes(said, true)
    assert counts == {("red", "tan"): 2, ("tan", "red"): 2}  # once: a sly cat, a cow
    assert confusable_sets(counts) == [("red", "tan")]
    assert table_candidates(counts)[0] == {"red": "tan", "tan": "red"}
    chain = Counter({("a", "b"): 5, ("c", "b"): 4, ("a", "d"): 3, ("e", "f"): 2})
    # "b" is most often true where "a" is said, so "d" is not joined to it.
    assert [set(members) for members in confusable_sets(chain)] == [{*"abc"}, {*"ef"}]


@pytest.mark.parametrize(
    "text, expected",
    [
        ("A Red dog.", "a orange dog"),
        ("an infrared red", "an infrared orange"),
        ("orange red", "red orange"),
        ("a red fox", "a tan fox"),
    ],
)
def test_substitutions_are_made_at_once_on_whole_words(text, expected):
    table = {"red": "orange", "orange": "red", "red fox": "tan fox"}
    assert substitute(text, table) == expected


def test_positions_by_hand():
    region = torch.zeros(9, 9, dtype=torch.bool)
    region[0, 4] = True
    assert position_of(region, 3) == "top center" and position_of(region, 2) == "top left"
    region[8, 8] = True
    assert position_of(region, 3) == "middle right"
