"""Attributes (size, colour, ..) that a caption mentions, by a vocabulary of phrases.

A vocabulary is {attribute: {value: [phrases]}}, such as {"color": {"red": ["red", "crimson"]}}; the
file of --attributes holds it as JSON.
"""

import json
import re
from pathlib import Path

import torch

AttributePhrases = dict[str, dict[str, list[str]]]
FORM = '{"attribute": {"value": ["phrase", ..], ..}, ..}'


def load_attributes(file: Path | str) -> AttributePhrases:
    """Return the vocabulary that a JSON file holds.

    Raises:
        ValueError: no such file, no JSON, or wrong contents; names --attributes.
    """
    try:
        attribute_phrases = json.loads(Path(file).read_text())
        # sum raises TypeError unless every value has a list
        lists = [sum(values.values(), []) for values in attribute_phrases.values()]
        phrases = [_words(phrase) for phrase in sum(lists, [])]
        valid = all(re.fullmatch("[a-z0-9]+", name) for name in attribute_phrases) and all(
            values and all(values.values()) for values in attribute_phrases.values()
        )
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"--attributes {file} does not hold {FORM}: {error}") from error
    if not valid or not phrases or "" in phrases or len(set(phrases)) < len(phrases):
        raise ValueError(
            f"--attributes {file} does not hold {FORM}, none of them empty, attributes of a-z and "
            "0-9, and each phrase once"
        )
    return attribute_phrases


def _words(text: str) -> str:
    """Return the words of `text` in lower case, with one blank between them."""
    return " ".join(re.findall(r"\w+", text.lower()))


def parse_attributes(text: str, attribute_phrases: AttributePhrases) -> dict[str, set[str]]:
    """Return {attribute: its values that `text` mentions} of every attribute.

    Phrases are matched as whole words, the longest first, and matched words are used once: "top
    left" does not mention "left" as well.
    """
    rest, mentioned = _words(text), {name: set() for name in attribute_phrases}
    phrases = [
        (_words(phrase), name, value)
        for name, values in attribute_phrases.items()
        for value, phrases in values.items()
        for phrase in phrases
    ]
    for phrase, name, value in sorted(phrases, key=lambda item: -len(item[0])):
        # no phrase reaches over the bar that stands for matched words
        rest, count = re.subn(rf"(?<!\S){phrase}(?!\S)", "|", rest)
        if count:
            mentioned[name].add(value)
    return mentioned


def attribute_values(
    references: list[str], captions: list[str], attribute_phrases: AttributePhrases
) -> dict[str, torch.Tensor]:
    """Return {metric: (n,) float64, 0 or 1} of n captions against the true ones.

    For each attribute: `{attribute}_known`: the true caption mentions one value of it. Of these
    `_said`: the caption mentions any value of it; `_right`: that one and no other.
    """
    columns = {
        f"{name}_{part}": [] for name in attribute_phrases for part in ("known", "said", "right")
    }
    for reference, caption in zip(references, captions, strict=True):
        true, claimed = (parse_attributes(text, attribute_phrases) for text in (reference, caption))
        for name in attribute_phrases:
            # A true caption with two values of an attribute has no single right one.
            known = len(true[name]) == 1
            columns[f"{name}_known"].append(known)
            columns[f"{name}_said"].append(known and len(claimed[name]) > 0)
            columns[f"{name}_right"].append(known and claimed[name] == true[name])
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in columns.items()}
