"""Cheap causes of loop 1 that change a caption's words without a look at any image.

Tables of substitutions, one constant word for each set of confused words, one caption for all, and
the region's position by name. All are chosen by the listener's reward on training regions.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import numpy as np
import torch

from rl_train.data.text import phrase

MAX_PHRASE = 3  # words of a phrase that is substituted
MIN_COUNT = 2  # times that a mistake is seen before it is a candidate
MAX_CANDIDATES = 60  # substitutions that are tried for a table
MAX_FIXED = 16  # captions that are tried as the one caption of all regions
VERTICAL = {2: ("top", "bottom"), 3: ("top", "middle", "bottom")}
HORIZONTAL = {2: ("left", "right"), 3: ("left", "center", "right")}
POSITION_FORMS = ("the object in the {position}", "{position}", "{caption} in the {position}")

Table = dict[str, str]  # {phrase said: phrase that takes its place}
# Rewards of (row of a region, caption) pairs, by the base as the listener.
Listener = Callable[[list[tuple[int, str]]], list[float]]


@dataclass(frozen=True)
class Rewording:
    """A cheap cause as it was chosen: its name, what was chosen, and how it captions a region."""

    name: str
    chosen: Any  # JSON
    caption: Callable[[str, torch.Tensor], str]  # (the base's caption, region (H, W)) -> caption


def words_of(text: str) -> list[str]:
    """Return the words of a text, in lower case and without punctuation."""
    return re.findall(r"\w+", text.lower())


def replacements(said: str, true: str, with_neighbours: bool) -> set[tuple[str, str]]:
    """Return the pairs (phrase of `said`, phrase of `true` in its place) by which two texts differ.

    Args:
        with_neighbours: also return each pair together with the word before, and with that behind,
            if both texts have it, so that "left" of "top left" is told from that of "bottom left".
    """
    said_words, true_words, spans, neighbours = words_of(said), words_of(true), [], []
    matcher = SequenceMatcher(None, said_words, true_words, autojunk=False)
    for tag, a, a_end, b, b_end in matcher.get_opcodes():
        if tag != "replace":
            continue
        if a_end - a == b_end - b:  # word by word
            spans += [(a + k, a + k + 1, b + k, b + k + 1) for k in range(a_end - a)]
        elif max(a_end - a, b_end - b) <= MAX_PHRASE:
            spans.append((a, a_end, b, b_end))
    for a, a_end, b, b_end in spans if with_neighbours else ():
        if a and b and said_words[a - 1] == true_words[b - 1]:
            neighbours.append((a - 1, a_end, b - 1, b_end))
        if said_words[a_end : a_end + 1] == true_words[b_end : b_end + 1] != []:
            neighbours.append((a, a_end + 1, b, b_end + 1))
    return {
        (" ".join(said_words[a:a_end]), " ".join(true_words[b:b_end]))
        for a, a_end, b, b_end in spans + neighbours
    }


def mistakes(
    captions: Sequence[str], references: Sequence[str], with_neighbours: bool = False
) -> Counter:
    """Return {(said, true): number of captions with this mistake} of those that recur."""
    counts = Counter()
    for said, true in zip(captions, references, strict=True):
        counts.update(sorted(replacements(said, true, with_neighbours)))
    return Counter({pair: count for pair, count in counts.items() if count >= MIN_COUNT})


def table_candidates(counts: Counter) -> list[Table]:
    """Return tables of one substitution each, or of two that swap two phrases.

    The most frequent mistakes come first, of equally frequent ones the shorter phrase.
    """
    pairs = sorted(counts, key=lambda pair: (-counts[pair], len(pair[0])))[:MAX_CANDIDATES]
    swaps = [(a, b) for a, b in pairs if (b, a) in counts and (a < b or (b, a) not in pairs)]
    return [{a: b, b: a} for a, b in swaps] + [{a: b} for a, b in pairs]


def confusable_sets(counts: Counter) -> list[tuple[str, ...]]:
    """Return the sets of phrases that are taken for each other, the most frequent mistakes first.

    Each phrase is joined to the one that is most often true in its place.
    """
    set_of, partnered = {}, set()
    for (said, true), _ in counts.most_common():
        if said in partnered:
            continue
        partnered.add(said)
        joined = set_of.get(said, {said: None}) | set_of.get(true, {true: None})  # in order
        for member in joined:
            set_of[member] = joined
    return list(dict.fromkeys(tuple(members) for members in set_of.values()))


def substitute(text: str, table: Table) -> str:
    """Return the phrase of a caption with all substitutions made at once, the longest first."""
    if not table:
        return phrase(text)
    longest_first = sorted(table, key=lambda words: (-len(words), words))
    pattern = re.compile(rf"\b(?:{'|'.join(map(re.escape, longest_first))})\b")
    return pattern.sub(lambda match: table[match[0]], phrase(text))


class TableSearch:
    """Rewards of captions under tables of substitutions, of the training regions alone."""

    def __init__(self, captions: Sequence[str], listen: Listener):
        self.captions, self.listen = captions, listen

    def rewards(self, table: Table) -> np.ndarray:
        """Return the reward (n,) of each region's caption after the substitutions."""
        texts = [substitute(text, table) for text in self.captions]
        return np.array(self.listen(list(enumerate(texts))))

    def gain(self, table: Table, current: np.ndarray) -> float:
        """Return the mean gain over rewards `current` (n,); 0 unless it exceeds its std error."""
        differences = self.rewards(table) - current
        error = np.sqrt((differences**2).sum()) / len(differences)
        return float(differences.mean()) if differences.mean() > error else 0.0

    def greedy(self, candidates: Sequence[Table]) -> Table:
        """Return the table that a greedy search finds: the best of the candidates first.

        Candidates are measured again, with the table so far, in the order of their last gains
        (lazy greedy search); before it ends, all of them are.
        """
        table, current = {}, self.rewards({})
        gains = {k: self.gain(candidate, current) for k, candidate in enumerate(candidates)}
        fresh = set(gains)  # measured with the present table
        while gains:
            best = max(gains, key=gains.get)
            if gains[best] <= 0:  # as far as it is known
                best = next((k for k in gains if k not in fresh), None)
                if best is None:
                    break
            extended = table | candidates[best]
            if best not in fresh:
                gains[best] = self.gain(extended, current)
                fresh.add(best)
                continue
            table, current, fresh = extended, self.rewards(extended), set()
            # A phrase has one substitute.
            gains = {k: gain for k, gain in gains.items() if table.keys().isdisjoint(candidates[k])}
        return table

    def constants(self, sets: Iterable[tuple[str, ...]]) -> Table:
        """Return the table that says one word for each set, the best one, or none if all lose."""
        table, current = {}, self.rewards({})
        for members in sets:
            tables = [table | {said: word for said in members if said != word} for word in members]
            best = max(tables, key=lambda each: self.rewards(each).mean())
            if self.rewards(best).mean() > current.mean():
                table, current = best, self.rewards(best)
        return table


def position_of(region: torch.Tensor, cells: int) -> str:
    """Return the name of the cell, of cells x cells (2 or 3), in which a region's centre lies."""
    height, width = region.shape
    y, x = region.nonzero().double().mean(0).tolist()
    row, column = int(y / height * cells), int(x / width * cells)
    return f"{VERTICAL[cells][row]} {HORIZONTAL[cells][column]}"


def best_form(
    name: str,
    forms: dict[str, Callable[[str, torch.Tensor], str]],
    captions: Sequence[str],
    regions: Sequence[torch.Tensor],
    listen: Listener,
) -> Rewording:
    """Return the one of `forms` ({what is chosen: caption}) with the highest training reward."""

    def reward(form: str) -> float:
        texts = [forms[form](text, region) for text, region in zip(captions, regions)]
        return float(np.mean(listen(list(enumerate(texts)))))

    best = max(forms, key=reward)
    return Rewording(name, best, forms[best])


def rewordings(
    captions: Sequence[str],
    references: Sequence[str],
    regions: Sequence[torch.Tensor],
    listen: Listener,
) -> list[Rewording]:
    """Choose all of this file's causes on n training regions.

    Args:
        captions: the base's; references: the true ones, from which only mistakes are counted.
        regions: n (H, W) bool.
    """
    search = TableSearch(captions, listen)
    table = search.greedy(table_candidates(mistakes(captions, references, with_neighbours=True)))
    constants = search.constants(confusable_sets(mistakes(captions, references)))
    frequent = Counter(map(phrase, [*captions, *references])).most_common(MAX_FIXED)
    fixed = {text: lambda caption, region, text=text: text for text, _ in frequent}

    def by_position(form: str, cells: int) -> Callable[[str, torch.Tensor], str]:
        return lambda caption, region: form.format(
            caption=phrase(caption), position=position_of(region, cells)
        )

    positions = {
        f"{form}, {cells} x {cells} cells": by_position(form, cells)
        for form in POSITION_FORMS
        for cells in VERTICAL
    }
    return [
        Rewording("table of words", table, lambda caption, _: substitute(caption, table)),
        Rewording(
            "one word for each set of confused words",
            constants,
            lambda c, _: substitute(c, constants),
        ),
        best_form("one caption for all", fixed, captions, regions, listen),
        best_form("position by name", positions, captions, regions, listen),
    ]
