"""Captions lose markers and special tokens and nothing else."""

import pytest

from rl_train.data.text import (
    BLANK,
    NOT_UNICODE,
    SPECIAL_TOKENS,
    caption_fault,
    clean_caption,
)


@pytest.mark.parametrize(
    "text, cleaned",
    [
        ("A red cup.", "A red cup."),
        ("<image>\nA red\n\n cup\t.", "A red cup ."),
        ("The cup <Prompt0> near <Prompt12>, on a table", "The cup near, on a table"),
        ("A dog [SEG].", "A dog."),
        ("a[SEG]b<IMG_CONTEXT><IMG_CONTEXT>c", "a b c"),
        ("<p> a dog </p> [SEG] runs<|end|>", "a dog runs"),
        ('He said "hi" {0} {caption} it\'s 5 < 6', 'He said "hi" {0} {caption} it\'s 5 < 6'),
        (" <|im_start|><|assistant|> \n", ""),
        ("a <IMG> dog <Vp>, <|END|>!", "a dog,!"),
        ("a [S\x00EG] d\x1b[31mog\x9f \x7f.", "a d[31mog ."),
        ("a [S<img>EG] dog <|vision_start|>", "a [S EG] dog"),
        ("a \uff3bSEG\uff3d [S\u200bEG] \u202ecup", "a \uff3bSEG\uff3d [S\u200bEG] \u202ecup"),
        ("this is an island (a [small] one) <b>", "this is an island (a [small] one) <b>"),
    ],
)
def test_clean_caption(text, cleaned):
    assert clean_caption(text) == cleaned


def test_every_special_token_goes():
    assert clean_caption("x".join(SPECIAL_TOKENS)) == " ".join("x" * (len(SPECIAL_TOKENS) - 1))


@pytest.mark.parametrize("text", [None, 3, "", " \n", "\x00", "\x00 [SEG]", "<img>", "[S\x00EG]"])
def test_blank_captions(text):
    assert caption_fault(text) == BLANK


@pytest.mark.parametrize("text", ["a", "\x00a", "[a]", "[SEG]a", "\u200f\u05d0"])
def test_captions(text):
    assert caption_fault(text) is None and clean_caption(text)


@pytest.mark.parametrize("half", ["\ud83d", "\ude00", "\udcff"])
def test_half_a_surrogate_pair_is_no_caption(half):
    assert caption_fault(f"a cup {half}.") == NOT_UNICODE


def test_long_runs_take_no_time():
    assert clean_caption("a" + " " * 100_000 + "<vp> " * 100_000 + "b") == "a b"
