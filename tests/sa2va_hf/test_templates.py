"""The encoding rule of the supervised training, on the demo tokenizer."""

import copy

import pytest

from sa2va_hf.prompts import DESCRIBE, PromptBuilder
from sa2va_hf.templates import (
    IGNORE_INDEX,
    PROMPT_TEMPLATE,
    chat_template,
    template_map,
    video_lisa_encode_fn,
)
from sa2va_hf.tokenizer import load_tokenizer
from tools.demo.make_demo import SHIPPED_CHECKPOINT

PHI3, VICUNA = PROMPT_TEMPLATE["phi3_chat"], PROMPT_TEMPLATE["vicuna"]
MAX = 8192


class Characters:
    """A tokenizer whose ids are code points, with a BOS, 1, and an EOS, 2."""

    bos_token_id, eos_token_id = 1, 2

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        return [ord(c) for c in text]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(SHIPPED_CHECKPOINT)


def turn(question, answer, **options):
    return dict(input=question, output=answer, **options)


def ids_of(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def test_worked_example(tokenizer):
    """One tile, a region of 3 cells, the caption "A red dog."."""
    question = PromptBuilder(tokenizer, "phi3_chat", 64).question(DESCRIBE, 1, [3])
    data = video_lisa_encode_fn(
        template_map({"conversation": [turn(question, "A red dog.")]}, PHI3), tokenizer, MAX
    )
    text = (
        "<|user|>\n<img>"
        + "<IMG_CONTEXT>" * 64
        + "</img>\nThere are 1 part regions in the picture: region1<vp>"
        + "<IMG_CONTEXT>" * 3
        + "</vp>.\nPlease generate a detailed description for the given image region."
        + "<|end|>\n<|assistant|>\n"
    )
    prompt, answer, sep = (
        ids_of(tokenizer, text),
        ids_of(tokenizer, "A red dog.<|end|>"),
        ids_of(tokenizer, "\n"),
    )
    assert data["input_ids"] == prompt + answer + sep
    assert data["labels"] == [-100] * len(prompt) + answer + [-100]
    assert (
        len(sep) == 1 and tokenizer.eos_token_id not in data["input_ids"]
    )  # phi3_chat's suffix is its EOS
    assert data["input_ids"].count(tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>")) == 64 + 3
    assert prompt == PromptBuilder(tokenizer, "phi3_chat", 64).describe(
        1, 3
    )  # what RL asks is what was trained
    # the full stop and `<|` are one token, so the answer is encoded with its suffix in one piece
    assert [tokenizer.decode([i]) for i in answer][-4:] == [".<|", "end", "|", ">"]


def test_pieces_are_encoded_apart():
    """input, output and separator in turn; only outputs carry loss; no BOS after a turn without
    EOS."""
    data = video_lisa_encode_fn(
        template_map({"conversation": [turn("q", "a"), turn("r", "b")]}, PHI3), Characters(), MAX
    )
    first, second = "<|user|>\nq<|end|>\n<|assistant|>\n", "<|user|>\nr<|end|>\n<|assistant|>\n"
    assert data["input_ids"] == [
        1,
        *map(ord, first + "a<|end|>" + "\n" + second + "b<|end|>" + "\n"),
    ]
    n, end = IGNORE_INDEX, [ord(c) for c in "<|end|>"]
    assert data["labels"] == [
        n,
        *[n] * len(first),
        ord("a"),
        *end,
        n,
        *[n] * len(second),
        ord("b"),
        *end,
        n,
    ]


def test_vicuna_adds_eos_and_bos():
    """No suffix: each answer ends in the tokenizer's EOS, with loss, and the next turn starts with
    a BOS, without."""
    data = video_lisa_encode_fn(
        template_map({"conversation": [turn("q", "a"), turn("r", "b")]}, VICUNA), Characters(), MAX
    )
    text = [[ord(c) for c in f"USER: {x} ASSISTANT:"] for x in "qr"]
    assert data["input_ids"] == [1, *text[0], ord("a"), 2, 10, 1, *text[1], ord("b"), 2, 10]
    n = IGNORE_INDEX
    assert data["labels"] == [
        n,
        *[n] * len(text[0]),
        ord("a"),
        2,
        n,
        n,
        *[n] * len(text[1]),
        ord("b"),
        2,
        n,
    ]


def test_no_bos_without_one(tokenizer):
    assert tokenizer.bos_token_id is None
    data = video_lisa_encode_fn(
        {"conversation": [turn("Please", "A", need_eos_token=True)]}, tokenizer, MAX
    )
    assert data["input_ids"] == ids_of(tokenizer, "Please") + ids_of(tokenizer, "A") + [
        tokenizer.eos_token_id
    ]


def test_an_output_without_loss():
    data = video_lisa_encode_fn(
        {"conversation": [turn("q", "ab", output_with_loss=False, need_eos_token=False)]},
        Characters(),
        MAX,
    )
    assert data == {"input_ids": [1, *map(ord, "qab")], "labels": [IGNORE_INDEX] * 4}


def test_truncation_cuts_on_the_right():
    example = template_map({"conversation": [turn("q", "answer")]}, PHI3)
    whole = video_lisa_encode_fn(example, Characters(), MAX)
    cut = video_lisa_encode_fn(example, Characters(), 35)
    assert len(whole["input_ids"]) > 35
    assert cut == {"input_ids": whole["input_ids"][:35], "labels": whole["labels"][:35]}


def test_prompt_alone():
    example = template_map({"conversation": [turn("q", "a")]}, PHI3)
    data = video_lisa_encode_fn(example, Characters(), MAX, input_ids_with_output=False)
    assert data["input_ids"] == [1, *map(ord, "<|user|>\nq<|end|>\n<|assistant|>\n")]
    assert set(data["labels"]) == {IGNORE_INDEX} and len(data["labels"]) == len(data["input_ids"])


def test_an_output_without_loss_has_an_eos_without_loss():
    turns = [dict(input="a", output="b", output_with_loss=False), dict(input="c", output="d")]
    found = video_lisa_encode_fn({"conversation": turns}, Characters(), MAX, with_image_token=True)
    a, b, c, d = (Characters().encode(letter, add_special_tokens=False)[0] for letter in "abcd")
    bos, eos = [i for i in [Characters().bos_token_id] if i is not None], Characters().eos_token_id
    assert found["input_ids"] == [*bos, a, b, eos, *bos, c, d, eos]
    assert found["labels"] == [-100] * (len(bos) + 3 + len(bos) + 1) + [d, eos]


def test_several_turns_need_their_outputs():
    example = template_map({"conversation": [turn("q", "a"), turn("r", "b")]}, PHI3)
    with pytest.raises(ValueError, match="input_ids_with_output=True"):
        video_lisa_encode_fn(example, Characters(), MAX, input_ids_with_output=False)


def test_braces_in_a_question_stay():
    """The text is put in by one replacement: a caption's braces are no fields."""
    example = {"conversation": [turn("a {system} {0} {input}", "{b}")], "image": "x"}
    before = copy.deepcopy(example)
    mapped = template_map(example, PHI3)
    assert (
        mapped["conversation"][0]["input"]
        == "<|user|>\na {system} {0} {input}<|end|>\n<|assistant|>\n"
    )
    assert mapped["conversation"][0]["output"] == "{b}<|end|>" and mapped["image"] == "x"
    assert (
        mapped["conversation"][0]["need_eos_token"] is False
        and mapped["conversation"][0]["sep"] == "\n"
    )
    assert example == before


def test_unknown_template_is_named():
    with pytest.raises(ValueError, match="'phi4'.*phi3_chat"):
        chat_template("phi4")
