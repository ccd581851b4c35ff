"""Captions lose markers and special tokens and nothing else."""

import pytest

from rl_train.data.text import SPECIAL_TOKENS, clean_caption


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
        ("this is an island (a [small] one) <b>", "this is an island (a [small] one) <b>"),
    ],
)
def test_clean_caption(text, cleaned):
    assert clean_caption(text) == cleaned


def test_every_special_token_goes():
    assert clean_caption("x".join(SPECIAL_TOKENS)) == " ".join("x" * (len(SPECIAL_TOKENS) - 1))


def test_long_runs_take_no_time():
    assert clean_caption("a" + " " * 100_000 + "<vp> " * 100_000 + "b") == "a b"
