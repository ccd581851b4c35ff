"""DLC-Bench's questions about captions: their files, the judge's prompt, its replies, the scores.

Strings in, numbers out. What is here does what evaluation/eval_model_outputs.py of
NVlabs/describe-anything (arXiv 2504.16072) does, written anew; its prompts are the judge's input
and therefore word for word (Apache-2.0). See docs/evaluation.md for what was compared with it.

`qa.json` holds {annotation id: [question, ..]}, a question being {"question": str, "choices":
[[text, points], ..], "type": "positive" or "negative"}; `class_names.json` {annotation id: name}.
Before these questions each region has one of its own, whether the caption's object is of that
class: where it is not, no question gives more than 0 points.
"""

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

TYPES = ("positive", "negative")
LETTERS = "abcde"
MAX_REPLY_TOKENS = 300
PROMPT = """Answer the multiple-choice question based on the text description of an object in an \
image. You need to follow these rules:
1. Do not output any reasoning. Do not perform correction. Please output exactly one answer from \
the choices for each question. Do not repeat the question.
2. There is no need for exact matching. Please choose the closest option based on the description.

The description is:
{caption}

From the description above, please answer the following question with one of the choices:
{question}
"""
RECOGNITION_CHOICES = ("Yes", "No")
RECOGNISED = "Is it likely that the {things} or {kind} of a similar type? Again, It does not have "
RECOGNISED += "to be an exact match."


@dataclass(frozen=True)
class Question:
    """A question of qa.json."""

    text: str
    choices: list[str]
    points: list[float]  # of each choice
    type: str


@dataclass(frozen=True)
class Score:
    """Score the replies about one region's caption; NaN where one could not be read."""

    positive: float  # mean points of the positive questions
    negative: float | None  # None: it has no such question
    recognised: bool | None  # None: the reply could not be read
    points: list[float]  # of each question of qa.json
    num_unreadable: int  # replies, that to the first question among them


def read_questions(folder: Path) -> dict[str, list[Question]]:
    """Return {annotation id: questions} of qa.json. Raises ValueError that names the file."""
    file = folder / "qa.json"
    questions_of = {}
    for key, entries in read_object(file).items():
        if not isinstance(entries, list):
            raise ValueError(f"{file}: {key} holds no list of questions")
        questions_of[key] = [
            _question(entry, f"{file}: question {k} of {key}") for k, entry in enumerate(entries)
        ]
        if not any(question.type == "positive" for question in questions_of[key]):
            raise ValueError(f"{file}: {key} has no positive question")
    if not questions_of:
        raise ValueError(f"{file} holds no questions")
    return questions_of


def read_class_names(folder: Path, keys: Iterable[str]) -> dict[str, str]:
    """Return {annotation id: name} of class_names.json. Raises ValueError if a key lacks."""
    file = folder / "class_names.json"
    names = read_object(file)
    for key in keys:
        if not isinstance(names.get(key), str) or not names[key].strip():
            raise ValueError(f"{file} has no name of {key}, which qa.json asks about")
    return names


def read_captions(file: Path, keys: Iterable[str]) -> dict[str, str]:
    """Return {annotation id: caption} of `keys`, of a JSON file that may hold more.

    Raises ValueError if one of `keys` lacks, is no text or one of the original's "Error:".
    """
    captions = read_object(file)
    for key in keys:
        if not isinstance(captions.get(key), str) or captions[key].startswith("Error:"):
            raise ValueError(f"--captions {file} has no caption of {key}, which qa.json asks about")
    return {key: captions[key] for key in keys}


def read_object(file: Path) -> dict:
    """Read a JSON object. Raises ValueError that names the file."""
    try:
        value = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not a readable JSON file: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} holds no JSON object")
    return value


def _question(entry, location: str) -> Question:
    """Return the question of an entry of qa.json. Raises ValueError that begins with `location`."""
    if not isinstance(entry, dict) or not isinstance(entry.get("question"), str):
        raise ValueError(f"{location} has no text")
    if entry.get("type") not in TYPES:
        raise ValueError(f"{location} is of type {entry.get('type')!r}, none of {', '.join(TYPES)}")
    choices = entry.get("choices")
    fine = isinstance(choices, list) and 2 <= len(choices) <= len(LETTERS)
    fine = fine and all(isinstance(choice, list) and len(choice) == 2 for choice in choices)
    fine = fine and all(
        isinstance(text, str) and type(points) in (int, float) and math.isfinite(points)
        for text, points in choices
    )
    if not fine:
        raise ValueError(f"{location} has no 2 to {len(LETTERS)} choices [text, points]")
    texts, points = zip(*choices)
    return Question(entry["question"], list(texts), list(points), entry["type"])


def recognition(class_name: str) -> Question:
    """Return the question whether a caption is of an object of a class; its first choice is yes.

    Raises ValueError if inflect, by whose rules it says "a", "an" or the plural, is missing.
    """
    try:
        import inflect
    except ImportError as error:
        raise ValueError("DLC-Bench needs inflect: pip install -e '.[eval]'") from error
    engine = inflect.engine()
    plural = class_name != "bus" and engine.singular_noun(class_name) is not False
    if plural:
        things, kind = f"objects in the description are {class_name}", "objects"
    else:
        things, kind = f"object in the description is {engine.a(class_name)}", "an object"
    return Question(
        RECOGNISED.format(things=things, kind=kind), list(RECOGNITION_CHOICES), [1, 0], "class"
    )


def prompt(question: Question, caption: str) -> str:
    """Return the question to the judge, as the one message of the user."""
    lines = [f"{letter}. {choice}" for letter, choice in zip("ABCDE", question.choices)]
    text = "\n".join([question.text, *lines]).strip()
    return PROMPT.format(caption=caption, question=text)


def chosen(reply: str, choices: list[str]) -> int | None:
    """Return the index of the choice that a reply means, None if it means none.

    By the first rule that holds, letters aside: the reply is a choice, its letter or both; it
    holds one choice; it begins with a letter and a full stop; of the choices that it holds the one
    that begins last, of several there the longest; the longest choice that it is a part of; it
    begins with a letter on a line of its own.
    """
    answer, texts = reply.strip().lower(), [choice.strip().lower() for choice in choices]
    letters = LETTERS[: len(texts)]
    for k, text in enumerate(texts):
        if answer in (text, f"{letters[k]}. {text}", letters[k]):
            return k
    if len(answer) < 2:
        return None
    # Where in the reply each choice begins that it holds.
    held = {k: answer.index(text) for k, text in enumerate(texts) if text in answer}
    if len(held) == 1:
        return next(iter(held))
    if label := re.match(r"([a-e])\.", answer):
        choice_index = letters.find(label[1])
        return choice_index if choice_index >= 0 else None
    if held:
        return max(held, key=lambda k: (held[k], len(texts[k])))
    holding = [k for k, text in enumerate(texts) if answer in text]
    if holding:
        return max(holding, key=lambda k: len(texts[k]))
    label = re.match(r"([a-e])\n", answer)
    choice_index = letters.find(label[1]) if label else -1
    return choice_index if choice_index >= 0 else None


def score(questions: list[Question], replies: list[str]) -> Score:
    """Return the score of a region by the replies to `recognition` and then to its questions."""
    first = chosen(replies[0], RECOGNITION_CHOICES)
    recognised = None if first is None else first == 0
    chosen_choices = [
        chosen(reply, question.choices)
        for reply, question in zip(replies[1:], questions, strict=True)
    ]
    points = [
        worth(question, choice_index, recognised)
        for question, choice_index in zip(questions, chosen_choices)
    ]
    scores = {
        question_type: [
            value for value, question in zip(points, questions) if question.type == question_type
        ]
        for question_type in TYPES
    }
    positive, negative = (sum(p) / len(p) if p else None for p in scores.values())
    num_unreadable = sum(choice_index is None for choice_index in (first, *chosen_choices))
    return Score(positive, negative, recognised, points, num_unreadable)


def worth(question: Question, choice_index: int | None, recognised: bool | None) -> float:
    """Return the points of the chosen choice; NaN if a reply could not be read."""
    if choice_index is None or recognised is None:
        return math.nan
    points = question.points[choice_index]
    return points if recognised else min(0, points)
