"""A token is drawn with its probability, and an answer ends where its text does."""

import copy

import numpy as np
import pytest
import torch
from tokenizers import AddedToken

from rl_train.engine.sampling import StopText, _token_bytes, sample_token
from sa2va_hf.prediction import StopWords
from sa2va_hf.tokenizer import load_tokenizer
from tests.engine.tiny import DEMO
from tools.benchmarks.families import CONFIGS, tokenizer_of


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(DEMO)


def drawn(p, u) -> list[int]:
    """The classes of one row of probabilities that uniforms hit."""
    logits = torch.tensor(p).log().expand(len(u), -1)
    return sample_token(logits, 1.0, torch.tensor(u, dtype=torch.float64))[0].tolist()


def test_a_low_and_a_high_uniform_hit_the_ends():
    # cumulative .2, .5, 1: u below .2 is class 0, above it already class 1
    uniforms = [0.0, 0.19, 0.21, 0.49, 0.999999999, 1 - 2**-53]
    assert drawn([0.2, 0.3, 0.5], uniforms) == [0, 0, 1, 1, 2, 2]
    # a class without probability is never drawn, not even by u = 0
    assert drawn([0.0, 1.0, 0.0], [0.0, 0.9999999, 1 - 2**-53]) == [1, 1, 1]


def test_a_class_behind_the_first_block():
    """The ends of the three blocks of 1,100 classes have .1, .2, .3, .4."""
    p = torch.zeros(1100)
    p[[511, 512, 1023, 1024]] = torch.tensor([0.1, 0.2, 0.3, 0.4])
    uniforms = [0.0, 0.09, 0.11, 0.29, 0.31, 0.59, 0.61, 1 - 2**-53]
    assert drawn(p.tolist(), uniforms) == [511, 511, 512, 512, 1023, 1023, 1024, 1024]


def test_rounding_draws_no_class_in_front_of_its_block_s_first():
    """The sum in front rounds up where u is the end of the first of two classes, 5 and 900."""
    logits = torch.full((1, 1024), float("-inf"))
    logits[0, 5], logits[0, 900] = -271 / 13, 0.0
    first = logits[0, 5].exp().double()
    assert first + 1 - 1 > first
    assert sample_token(logits, 1.0, (first / (first + 1))[None])[0].item() == 900


def test_the_likeliest_is_the_first_of_several():
    logits = torch.zeros(3, 1100)
    logits[0, [700, 699, 1050]] = 2.0
    logits[1, [30, 29]] = logits[2, 1099] = 2.0
    token, logp = sample_token(logits, 0.5, None)
    assert token.tolist() == [699, 29, 1099]
    expected = torch.log_softmax(logits / 0.5, -1).gather(1, token[:, None])[:, 0]
    torch.testing.assert_close(logp, expected)


def test_log_probs_of_what_is_drawn():
    """They are of the tempered softmax, where logits are large and some are no classes."""
    random = torch.Generator().manual_seed(0)
    logits = 1000 + 5 * torch.randn(50, 1300, generator=random)
    logits[:, ::7] = float("-inf")
    u = torch.rand(50, generator=random, dtype=torch.float64)
    token, logp = sample_token(logits, 1.7, u)
    expected = torch.log_softmax(logits.double() / 1.7, -1)
    high = expected.exp().cumsum(-1).gather(1, token[:, None])[:, 0]
    expected = expected.gather(1, token[:, None])[:, 0]
    torch.testing.assert_close(logp.double(), expected, atol=2e-4, rtol=0)
    assert (token % 7 > 0).all() and len(token.unique()) > 20
    assert ((u < high + 1e-4) & (u > high - expected.exp() - 1e-4)).all()


def test_numbers_that_are_none_give_none():
    """The run can name the tensors; and the token is one that exists."""
    logits = torch.zeros(2, 600)
    logits[0, 3], logits[1] = float("nan"), float("-inf")
    for u in (None, torch.tensor([0.5, 0.5])):
        token, logp = sample_token(logits, 1.0, u)
        assert (token < 600).all() and logp.isnan().all()


def test_frequencies_are_the_softmax():
    """Chi-square of 20,000 draws over 12 classes: 11 degrees of freedom, 31.3 is its 0.1 % tail."""
    logits = torch.randn(12, generator=torch.Generator().manual_seed(0)) * 1.5
    u = torch.rand(20000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    counts = sample_token(logits.expand(20000, -1), 1.0, u)[0].bincount(minlength=12)
    expected = torch.softmax(logits, -1) * 20000
    assert ((counts - expected) ** 2 / expected).sum() < 31.3


# The stop text


def ends(stop, ids: list[int]) -> list[bool]:
    """Does the answer end with each token?"""
    state, done = torch.zeros(1, dtype=torch.long), []
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


def differences(tokenizer, stop_texts, trials: int, seed: int = 0) -> tuple[int, int]:
    """(where training and `predict_forward` disagree about an answer's end, number of ends).

    Of answers of random ids into which stop texts are planted: cut into parts that are encoded by
    themselves, with line breaks, special tokens and other text in and around them.
    """
    stop = StopText(tokenizer, stop_texts, len(tokenizer) + 5)
    words, rng = StopWords(tokenizer, stop_texts), np.random.default_rng(seed)
    pieces = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    letters = set("".join(stop_texts))
    near = [i for i, piece in enumerate(pieces) if set(piece) & letters or piece.startswith("<")]
    between = [""] * 4 + ["\n", "\r\n", "\n\n", "\r", " ", "|", "<", "end", ">>", "a dog.", "ä"]
    wrong = ends_seen = 0
    for trial in range(trials):
        pool = near if near and trial % 3 else range(len(tokenizer) + 5)
        ids = rng.choice(pool, rng.integers(0, 7)).tolist()
        for _ in range(rng.integers(0, 3) if stop_texts else 0):
            text = str(rng.choice(stop_texts))
            cuts = sorted(rng.integers(0, len(text) + 1, rng.integers(0, 4)))
            parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
            text = [part + str(rng.choice(between)) for part in parts]
            for part in text if trial % 2 else ["".join(text)]:
                ids += tokenizer.encode(part, add_special_tokens=False)
        for t, done in enumerate(ends(stop, ids), 1):
            expected = ids[t - 1] == tokenizer.eos_token_id
            expected |= words(torch.tensor([ids[:t]]), None).item()
            wrong += done != expected
            ends_seen += expected
    return wrong, ends_seen


@pytest.mark.parametrize(
    "stop_texts",
    [
        ["<|end|>"],
        ["<|im_end|>", "<|endoftext|>"],
        ["aab", "ab<", "xaaby", "<|end|>"],
        ["d."],
        ["ä!"],
        [],
    ],
    ids=str,
)
def test_an_answer_ends_where_predict_forward_ends_it(tokenizer, stop_texts):
    wrong, ends_seen = differences(tokenizer, stop_texts, 300)
    assert wrong == 0 and (ends_seen > 20 or not stop_texts)


def test_a_large_vocabulary_ends_answers_there_too(tokenizer):
    """The random 4B's has tokens into which a stop text's parts are merged."""
    merged = ["<|end|>a", "nd|>\n\n", ".<|end|>\r\n", "<|e\nnd|>", "|>\nb", "<\n|", "\n<|end|>"]
    for planted in (copy.deepcopy(tokenizer), tokenizer_of(CONFIGS["4b"])):
        planted.add_tokens([AddedToken(text, normalized=False) for text in merged])
        wrong, ends_seen = differences(planted, ["<|end|>"], 300)
        assert wrong == 0 and ends_seen > 20


@pytest.mark.parametrize(
    "answer, end",
    [
        ("a dog.<|end|>", True),
        ("a dog.<|end|>\n", True),  # within one token too: |>\n
        ("a dog.<|e\nnd|\r\n>", True),
        ("a dog.<|end|> and", False),
        ("a dog.<|end|", False),
    ],
)
def test_what_ends_an_answer(tokenizer, answer, end):
    stop = StopText(tokenizer, ["<|end|>"], len(tokenizer))
    assert ends(stop, tokenizer.encode(answer, add_special_tokens=False))[-1] == end


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
    """A token adds to the text what decoding says, for every token."""
    pieces = _token_bytes(tokenizer, len(tokenizer) + 2)
    assert [piece.decode(errors="replace") for piece in pieces[:-2]] == [
        tokenizer.decode([i]) for i in range(len(tokenizer))
    ]
    assert pieces[-2:] == [b"", b""]
