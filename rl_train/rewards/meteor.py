"""METEOR between a generated and a reference caption, the reward of loop 2.

Source: Lavie and Agarwal 2007, in NLTK's implementation (`nltk.translate.meteor_score`).
With m matched words in c chunks, P = m / |hypothesis| and R = m / |reference|:
score = PR / (0.9 P + 0.1 R) * (1 - 0.5 (c / m)^3), so identical captions of m words score
1 - 0.5 / m^3. Words match exactly, by Porter stem, or as WordNet synonyms; a synonym is looked
up already stemmed, so car/auto match and large/big ("larg") do not.
"""

import functools
import re
from collections.abc import Sequence
from types import SimpleNamespace

import torch
from nltk.corpus import wordnet
from nltk.stem.porter import PorterStemmer
from nltk.translate.meteor_score import single_meteor_score
from torch import Tensor

from rl_train.utils.io import UserFault

# One synonym pair per part of speech, because NLTK opens each data file at its first use.
_SYNONYMS = {"car": "auto", "buy": "purchase", "big": "large", "quickly": "rapidly"}
# Limits on a text and on a word: older versions of NLTK align in quadratic time.
MAX_WORDS, MAX_LETTERS = 1000, 100


def tokenize(text: str) -> list[str]:
    """Return the lower-cased words of `text`, without punctuation: the first MAX_WORDS, cut.

    Words are runs of letters and digits. Punctuation separates words and is dropped, not kept
    as tokens: "A dog." against "a dog" is then 1 - 0.5 / 2^3 = .9375, where a token "." would
    count as a wrong word (.8929) and NLTK's bare split would not match "dog." at all (.25).
    """
    return [word[:MAX_LETTERS] for word in re.findall(r"[^\W_]+", text.lower())[:MAX_WORDS]]


def meteor(references: Sequence[str], hypotheses: Sequence[str]) -> Tensor:
    """Return the METEOR score of every caption pair, as (N,) float32 in [0, 1).

    A pair with no word on either side scores 0. Missing WordNet never becomes a score: NLTK's
    LookupError or OSError passes through. Call `require_wordnet` before a run starts.

    Args:
        references: N ground-truth captions.
        hypotheses: N generated captions, paired by index.

    Raises:
        TypeError: one side is a single str.
        ValueError: the two sides differ in length.
    """
    check_lists("meteor", references, hypotheses)
    # Equal captions, common in a group, are cut into words once.
    words = {text: tokenize(text) for text in {*references, *hypotheses}}
    scores = [
        single_meteor_score(
            words[reference], words[hypothesis], str, _CACHED_STEMMER, _CACHED_WORDNET
        )
        for reference, hypothesis in zip(references, hypotheses, strict=True)
    ]
    return torch.tensor(scores, dtype=torch.float32)  # (N,)


def check_lists(name: str, references: Sequence[str], hypotheses: Sequence[str]):
    """Raise TypeError, naming the function, if one side is a single str: a sequence of letters."""
    if isinstance(references, str) or isinstance(hypotheses, str):
        raise TypeError(f"{name} takes two lists of captions, not a single str")


@functools.lru_cache(maxsize=2**15)
def _synsets(word: str) -> list[SimpleNamespace]:
    """Return the synonyms of a word for NLTK, each once, as if they were one synset.

    Several synsets of a word share synonyms. Synonyms of two or more words match no word.
    """
    lemmas = {
        lemma.name(): lemma
        for synset in wordnet.synsets(word)
        for lemma in synset.lemmas()
        if "_" not in lemma.name()
    }
    return [SimpleNamespace(lemmas=lemmas.values)]


# `single_meteor_score` looks each word up again and again.
_CACHED_WORDNET = SimpleNamespace(synsets=_synsets)
_CACHED_STEMMER = SimpleNamespace(stem=functools.lru_cache(maxsize=2**15)(PorterStemmer().stem))


class MissingWordNet(UserFault):
    """NLTK cannot use WordNet; the sentence names the command that installs it."""


def require_wordnet() -> None:
    """Check that NLTK finds one known synonym for each part of speech.

    Raises:
        MissingWordNet: WordNet is missing or incomplete; its cause says what NLTK did not find.
    """
    fix = "METEOR needs WordNet and NLTK cannot use it: run `python -m tools.fetch_wordnet`"
    try:
        usable = all(
            synonym in {name for synset in wordnet.synsets(word) for name in synset.lemma_names()}
            for word, synonym in _SYNONYMS.items()
        )
    except (LookupError, OSError) as error:
        raise MissingWordNet(fix) from error
    if not usable:
        raise MissingWordNet(fix)
