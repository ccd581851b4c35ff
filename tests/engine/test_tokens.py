"""A token is drawn with its probability, and an answer ends where its text does."""

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from rl_train.engine.tokens import StopText, _token_bytes, inverse_cdf
from tests.engine.tiny import DEMO


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO)


def test_a_low_and_a_high_uniform_hit_the_ends():
    # p = .2, .3, .5; cumulative .2, .5, 1: u below .2 is class 0, exactly .2 already class 1
    logp = torch.tensor([[0.2, 0.3, 0.5]]).double().log().expand(5, -1)
    assert inverse_cdf(
        logp, torch.tensor([0.0, 0.19, 0.21, 0.49, 0.999999999]).double()
    ).tolist() == [0, 0, 1, 1, 2]
    # a class without probability is never drawn, not even by u = 0
    certain = torch.tensor([[0.0, 1.0, 0.0]]).log()
    assert (
        inverse_cdf(certain, torch.tensor([0.0])).item() == 1
        and inverse_cdf(certain, torch.tensor([0.9999999])).item() == 1
    )


def test_frequencies_are_the_softmax():
    """Chi-square of 20,000 draws over 12 classes: 11 degrees of freedom, 31.3 is its 0.1 % tail."""
    logp = torch.log_softmax(torch.randn(12, generator=torch.Generator().manual_seed(0)) * 1.5, -1)
    u = torch.rand(20000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    counts = inverse_cdf(logp.expand(20000, -1), u).bincount(minlength=12)
    expected = logp.exp() * 20000
    assert ((counts - expected) ** 2 / expected).sum() < 31.3


# The stop text


def ends(stop, ids: list[int]) -> list[bool]:
    """Does the answer end with each token?"""
    state, done = stop.start(1), []
    for token in ids:
        state, ended = stop.step(state, torch.tensor([token]))
        done.append(ended.item())
    return done


@pytest.mark.parametrize(
    "ending",
    ["dog<|end|>", "dog.<|end|>", "dog!<|end|>", 'dog"<|end|>', "[SEG].<|end|>", "<|end|>"],
)
def test_stop_text_after_any_character(tokenizer, ending):
    """The ids of <|end|> depend on what precedes it, so they are not searched for."""
    stop = StopText(tokenizer, ["<|end|>"], len(tokenizer))
    ids = tokenizer.encode(ending, add_special_tokens=False)
    assert ends(stop, ids) == [False] * (len(ids) - 1) + [True]


def test_eos_stops_too(tokenizer):
    stop = StopText(
        tokenizer, ["<|end|>"], len(tokenizer) + 9
    )  # more rows in the model than tokens
    assert ends(stop, [5, tokenizer.eos_token_id, 5]) == [False, True, False]
    assert ends(stop, [5, len(tokenizer) + 3]) == [False, False]


def by_decoding(tokenizer, stop_texts, ids: list[int]) -> bool:
    """The end by its definition: the newest token is EOS or completes a stop text in the answer."""

    def found(some):
        return any(text in tokenizer.decode(some) for text in stop_texts)

    return ids[-1] == tokenizer.eos_token_id or (found(ids) and not found(ids[:-1]))


@pytest.mark.parametrize(
    "stop_texts",
    [["<|end|>"], ["<|im_end|>", "<|endoftext|>"], ["aab", "ab<", "<|end|>"], ["d."], ["ä!"], []],
    ids=str,
)
def test_stop_text_is_found_as_in_the_decoded_answer(tokenizer, stop_texts):
    """Random ids: that touch the stop texts, special tokens, pieces that reach beyond the end."""
    stop = StopText(tokenizer, stop_texts, len(tokenizer) + 5)
    rng = np.random.default_rng(0)
    pieces = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    near = [
        i
        for i, piece in enumerate(pieces)
        if set(piece) & set("".join(stop_texts)) or piece.startswith("<")
    ]
    num_ends = 0
    for trial in range(150):
        pool = near if near and trial % 3 else range(len(tokenizer) + 5)
        ids = rng.choice(pool, 6).tolist()
        if stop_texts and trial % 2:  # the text cut at random places, each part encoded by itself
            text = str(rng.choice(stop_texts))
            cuts = sorted(rng.integers(0, len(text) + 1, 3))
            parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
            ids += [i for part in parts for i in tokenizer.encode(part, add_special_tokens=False)]
            ids += tokenizer.encode(
                str(rng.choice(["\n", "|", "<", "end", ">>"])), add_special_tokens=False
            )
        for t, done in enumerate(ends(stop, ids), 1):
            expected = by_decoding(tokenizer, stop_texts, ids[:t])
            assert done == expected, (ids[:t], tokenizer.decode(ids[:t]))
            num_ends += expected
            if expected:
                break
    assert num_ends > 20 or not stop_texts


@pytest.mark.parametrize(
    "pieces",
    [
        ["<|", "end", "|>Ċ"],
        ["<", "|", "e", "n", "d", "|", ">"],
        [".<|", "end", "|", ">"],
        ["<|", "<|", "end", "|", ">"],
    ],
)
def test_stop_text_over_given_pieces(tokenizer, pieces):
    stop = StopText(tokenizer, ["<|end|>"], len(tokenizer))
    ids = tokenizer.convert_tokens_to_ids(pieces)
    assert None not in ids
    assert ends(stop, ids) == [False] * (len(ids) - 1) + [True]


def test_every_byte_of_the_alphabet(tokenizer):
    """What a token adds to the text is what decoding says, for every token."""
    pieces = _token_bytes(tokenizer, len(tokenizer) + 2)
    assert [piece.decode(errors="replace") for piece in pieces[:-2]] == [
        tokenizer.decode([i]) for i in range(len(tokenizer))
    ]
    assert pieces[-2:] == [b"", b""]
