"""What a caption states of each attribute (size, colour, ..), by a vocabulary of phrases.

A vocabulary is {attribute: {value: [phrases]}}, such as {"color": {"red": ["red", "crimson"]}}; the
file of --attributes holds it as JSON.
"""

import json
import re
from collections import Counter
from pathlib import Path

import torch

Vocabulary = dict[str, dict[str, list[str]]]
FORM = '{"attribute": {"value": ["phrase", ..], ..}, ..}'


def load_attributes(file: Path | str) -> Vocabulary:
    """The vocabulary that a JSON file holds.

    Raises:
        ValueError: no such file, no JSON, another form, an attribute that is no word of lower-case
            letters and digits, or a phrase without words or of two values; names --attributes.
    """
    place = f"--attributes {file}"
    try:
        vocabulary = json.loads(Path(file).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{place} is not a readable JSON file: {error}") from error
    if not _is_vocabulary(vocabulary):
        raise ValueError(f"{place} does not hold {FORM}, none of them empty")
    for name in vocabulary:
        if not re.fullmatch(r"[a-z0-9]+", name):  # it begins the names of measures
            raise ValueError(f"{place}: attribute {name!r} has other than a-z and 0-9")
    phrases = [_words(phrase) for *_, phrase in _phrases(vocabulary)]
    if "" in phrases:
        raise ValueError(f"{place}: a phrase without a word")
    twice, count = Counter(phrases).most_common(1)[0]
    if count > 1:
        raise ValueError(f"{place}: the phrase {twice!r} is there {count} times")
    return vocabulary


def _is_vocabulary(value) -> bool:
    def holds(kind, items) -> bool:
        return isinstance(items, kind) and len(items) > 0

    return holds(dict, value) and all(
        holds(dict, values)
        and all(
            holds(list, phrases) and all(isinstance(phrase, str) for phrase in phrases)
            for phrases in values.values()
        )
        for values in value.values()
    )


def _phrases(vocabulary: Vocabulary) -> list[tuple[str, str, str]]:
    """(attribute, value, phrase) of all."""
    return [
        (name, value, phrase)
        for name, values in vocabulary.items()
        for value, phrases in values.items()
        for phrase in phrases
    ]


def _words(text: str) -> str:
    """The words of `text` in lower case, with one blank between them."""
    return " ".join(re.findall(r"\w+", text.lower()))


def stated(text: str, vocabulary: Vocabulary) -> dict[str, set[str]]:
    """{attribute: the values of it that `text` states}, of every attribute.

    Phrases are looked for as whole words, the longest first, and what one has matched is no part
    of another: "top left" does not state "left" as well.
    """
    rest, found = _words(text), {name: set() for name in vocabulary}
    longest_first = sorted(_phrases(vocabulary), key=lambda item: -len(_words(item[2])))
    for name, value, phrase in longest_first:
        # no phrase reaches over the bar that stands for what was matched
        rest, count = re.subn(rf"(?<!\S){_words(phrase)}(?!\S)", "|", rest)
        if count:
            found[name].add(value)
    return found


def attribute_values(
    references: list[str], captions: list[str], vocabulary: Vocabulary
) -> dict[str, torch.Tensor]:
    """{measure: (n,) float64, 0 or 1} of n captions against the true ones, for each attribute.

    `{attribute}_known`: the true caption states one value of it. Of these `_said`: the caption
    states any value of it; `_right`: that one and no other.
    """
    columns = {f"{name}_{part}": [] for name in vocabulary for part in ("known", "said", "right")}
    for reference, caption in zip(references, captions, strict=True):
        true, claimed = stated(reference, vocabulary), stated(caption, vocabulary)
        for name in vocabulary:
            known = len(true[name]) == 1
            columns[f"{name}_known"].append(known)
            columns[f"{name}_said"].append(known and len(claimed[name]) > 0)
            columns[f"{name}_right"].append(known and claimed[name] == true[name])
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in columns.items()}
