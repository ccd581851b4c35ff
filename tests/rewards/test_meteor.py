import random
import subprocess
import sys
import time

import nltk
import numpy as np
import pytest
import torch
from nltk.translate.meteor_score import single_meteor_score

from rl_train.rewards import meteor
from rl_train.rewards.meteor import _CACHED_WORDNET, MissingWordNet, require_wordnet, tokenize


def score(reference: str, hypothesis: str) -> float:
    """Return the METEOR score of one caption pair."""
    return meteor([reference], [hypothesis]).item()


@pytest.fixture
def no_wordnet(monkeypatch, tmp_path):
    """NLTK as on a machine without WordNet: nothing loaded and nothing to find."""
    nltk.corpus.wordnet._unload()
    _CACHED_WORDNET.synsets.cache_clear()
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    yield tmp_path
    nltk.corpus.wordnet._unload()
    _CACHED_WORDNET.synsets.cache_clear()


def test_identical_captions_score_one_minus_half_over_m_cubed():
    captions = ["dog", "a dog", "a small dog on red grass"]
    scores = meteor(captions, captions)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, torch.tensor([0.5, 0.9375, 0.9976852]))


def test_hand_worked_precision_recall_and_chunks():
    # m = 2, P = 1, R = 2/3, F = (2/3) / (.9 + .1 * 2/3) = 20/29, one chunk: * (1 - .5/8).
    assert score("a dog runs", "a dog") == pytest.approx(20 / 29 * 0.9375)
    # The sides are not interchangeable: P = 2/3, R = 1, F = (2/3) / (.6 + .1) = 20/21.
    assert score("a dog", "a dog runs") == pytest.approx(20 / 21 * 0.9375)
    # Four matches in four chunks.
    assert score("red green blue pink", "red blue green pink") == pytest.approx(0.5)
    assert score("dog", "cat") == 0.0


def test_stem_and_synonym_stages():
    assert score("dogs", "dog") == pytest.approx(0.5)
    assert score("car", "auto") == pytest.approx(0.5)
    assert score("kid", "child") == pytest.approx(0.5)
    # Irregular form, needs WordNet's *.exc files.
    assert score("man", "men") == pytest.approx(0.5)
    # Looked up as the stems "larg" and "automobil", which are no words.
    assert score("large", "big") == 0.0
    assert score("car", "automobile") == 0.0


def test_cached_words_score_as_wordnets_own():
    """NLTK alone, which is given every synset, makes the same of words with many."""
    reference = "a white dog sets a light ball down beside the running man in a big car"
    hypothesis = "one light canine put the white ball by a man who ran in the big auto"
    alone = single_meteor_score(tokenize(reference), tokenize(hypothesis))
    assert score(reference, hypothesis) == np.float32(alone) and alone > 0.4
    words = (reference + " " + hypothesis + " kid child auto car runs set small little").split()
    texts = [" ".join(random.Random(i).choices(words, k=1 + i % 30)) for i in range(200)]
    pairs = list(zip(texts, texts[::-1]))
    alone = [single_meteor_score(tokenize(a), tokenize(b)) for a, b in pairs]
    assert torch.equal(meteor(*zip(*pairs)), torch.tensor(alone, dtype=torch.float32))


def test_punctuation_is_split_off_and_dropped():
    assert tokenize("A dog.") == ["a", "dog"]
    assert tokenize("(two dogs), one\ncat: grey-brown; snake_case!") == [
        "two", "dogs", "one", "cat", "grey", "brown", "snake", "case",
    ]  # fmt: skip
    assert tokenize("Région 10") == ["région", "10"]
    assert score("A dog.", "a dog") == pytest.approx(0.9375)
    assert score("a dog", "A dog.") == pytest.approx(0.9375)


def test_long_texts_are_cut_and_others_are_not():
    words = [f"w{i}" for i in range(1200)]
    assert (
        tokenize(" ".join(words)) == words[:1000] and tokenize(" ".join(words[:999])) == words[:999]
    )
    assert tokenize("a" * 100 + " " + "b" * 101) == ["a" * 100, "b" * 100]
    text = " ".join(words[:1000])
    assert score(text, f"{text} and more") == score(text, text) == pytest.approx(1)
    # 999 of 1000 words match, in one chunk: not cut, not 1.
    assert score(text, " ".join(words[:999])) == pytest.approx(
        0.999 / (0.9 + 0.1 * 0.999), abs=1e-6
    )


def test_long_texts_are_scored_in_time():
    def text(seed):
        return " ".join(f"w{i}" for i in np.random.default_rng(seed).integers(10**9, size=5000))

    started = time.process_time()  # of this process: others may keep the machine busy
    assert meteor([text(0)] * 4, [text(i) for i in range(4)]).tolist()[0] > 0.99
    meteor(["a" * 10**6] * 4, ["ing" * 10**6] * 4)
    assert time.process_time() - started < 10  # NLTK 3.9.1 takes 8 s for one such pair unbounded


def test_empty_side_scores_zero():
    assert meteor(["a dog", "", "", "a dog"], ["", "a dog", "", " . , !"]).tolist() == [0.0] * 4
    assert meteor([], []).shape == (0,)


def test_misused_arguments_raise():
    with pytest.raises(TypeError, match="single str"):
        meteor("a dog", "a dog")
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        meteor(["a", "b"], ["a"])


def test_wordnet_is_usable():
    require_wordnet()


def test_missing_wordnet_raises_and_is_never_a_zero(no_wordnet):
    with pytest.raises(LookupError):
        meteor(["car"], ["auto"])
    with pytest.raises(MissingWordNet, match=r"run `python -m tools\.fetch_wordnet`") as raised:
        require_wordnet()
    assert "\n" not in str(raised.value)


def test_incomplete_wordnet_raises(no_wordnet):
    (no_wordnet / "corpora" / "wordnet").mkdir(parents=True)
    with pytest.raises(OSError):
        meteor(["car"], ["auto"])
    with pytest.raises(MissingWordNet, match="fetch_wordnet"):
        require_wordnet()


def test_imports_are_cheap():
    check = (
        "import sys, rl_train.rewards; "
        "print([m for m in ('openai', 'trl', 'datasets', 'transformers') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
