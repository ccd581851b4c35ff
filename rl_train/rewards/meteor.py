"""METEOR between a generated and a reference caption, the reward of loop 2.

Source: Lavie and Agarwal 2007, in NLTK's implementation (`nltk.translate.meteor_score`).
With m matched words in c chunks, P = m / |hypothesis| and R = m / |reference|:
score = PR / (0.9 P + 0.1 R) * (1 - 0.5 (c / m)^3), so identical captions of m words score
1 - 0.5 / m^3. Words match exactly, by Porter stem, or as WordNet synonyms; a synonym is looked
up already stemmed, so car/auto match and large/big ("larg") do not.
"""

import functools
import itertools
import re
from collections.abc import Sequence
from types import SimpleNamespace

import torch
from nltk.corpus import wordnet
from nltk.stem.porter import PorterStemmer
from nltk.translate.meteor_score import single_meteor_score
from torch import Tensor

# One synonym pair per part of speech, because NLTK opens each data file at its first use.
_SYNONYMS = {"car": "auto", "buy": "purchase", "big": "large", "quickly": "rapidly"}


# What METEOR looks at of a text and of a word: older versions of NLTK align in quadratic time, and
# words are remembered.
MAX_WORDS, MAX_LETTERS = 1000, 100


def tokenize(text: str) -> list[str]:
    """Return the lower-cased words of `text`, without punctuation: the first MAX_WORDS, cut.

    Words are runs of letters and digits. Punctuation separates words and is dropped, not kept
    as tokens: "A dog." against "a dog" is then 1 - 0.5 / 2^3 = .9375, where a token "." would
    count as a wrong word (.8929) and NLTK's bare split would not match "dog." at all (.25).
    """
    words = itertools.islice(re.finditer(r"[^\W_]+", text.lower()), MAX_WORDS)
    return [word[0][:MAX_LETTERS] for word in words]


# "region1: ", "region1 is ", "The region shows ": only at the start, and only as whole words.
_BOILERPLATE = re.compile(
    r"\A\s*(?:region1(?![\w'’])\s*[:,]?\s*(?:(?:is|shows|contains)\s+)?"
    r"|(?:the|this)\s+(?:marked\s+)?region1?\s*(?::|(?:is|shows|contains)\s)\s*)",
    re.IGNORECASE,
)


def legacy_clean(text: str) -> str:
    """Return `text` up to the stop text <|end|>, without the boilerplate that it may begin with.

    Published region-caption numbers were computed on answers cleaned in this way ("The region is a
    dog." -> "a dog."). Nothing else is touched: "this is an island", "region10" and line breaks
    stay. Rewards never use it.
    """
    return _BOILERPLATE.sub("", text.split("<|end|>")[0]).strip()


def meteor(
    references: Sequence[str], hypotheses: Sequence[str], legacy_cleaner: bool = False
) -> Tensor:
    """Return the METEOR score of every caption pair, as (N,) float32 in [0, 1).

    A pair with no word on either side scores 0. Missing WordNet never becomes a score: NLTK's
    LookupError or OSError passes through. Call `require_wordnet` before a run starts.

    Args:
        references: N ground-truth captions.
        hypotheses: N generated captions, paired by index.
        legacy_cleaner: score `legacy_clean(hypothesis)`, to compare with published numbers;
            training scores what was sampled.

    Raises:
        TypeError: one side is a single str.
        ValueError: the two sides differ in length.
    """
    if isinstance(references, str) or isinstance(hypotheses, str):
        raise TypeError("meteor takes two lists of captions, not a single str")
    if len(references) != len(hypotheses):
        raise ValueError(
            f"meteor got {len(references)} references and {len(hypotheses)} hypotheses"
        )
    if legacy_cleaner:
        hypotheses = [legacy_clean(hypothesis) for hypothesis in hypotheses]
    words = {text: tokenize(text) for text in {*references, *hypotheses}}
    scores = [
        single_meteor_score(words[reference], words[hypothesis], str, _Remembering, _Remembering)
        for reference, hypothesis in zip(references, hypotheses)
    ]
    return torch.tensor(scores, dtype=torch.float32)  # (N,)


class _Name(str):
    """A lemma of WordNet's, of which `single_meteor_score` wants the name alone."""

    name = str.__str__


class _Remembering:
    """WordNet and stemmer for `single_meteor_score`, which asks for each word again and again."""

    @staticmethod
    @functools.lru_cache(maxsize=2**15)
    def synsets(word: str) -> list[SimpleNamespace]:
        """All of a word's synsets as one, in which each synonym of one word stands once."""
        names = {name for synset in wordnet.synsets(word) for name in synset.lemma_names()}
        lemmas = tuple(_Name(name) for name in names if "_" not in name)
        return [SimpleNamespace(lemmas=lambda: lemmas)]

    stem = staticmethod(functools.lru_cache(maxsize=2**15)(PorterStemmer().stem))


def require_wordnet() -> None:
    """Return None if METEOR's synonym stage works; look up one known synonym per part of speech.

    Raises:
        RuntimeError: WordNet is missing or incomplete; its cause says what NLTK could not find.
    """
    fix = "METEOR needs WordNet and NLTK cannot use it: run `python -m tools.fetch_wordnet`."
    try:
        synonyms = {
            word: {name for s in wordnet.synsets(word) for name in s.lemma_names()}
            for word in _SYNONYMS
        }
    except (LookupError, OSError) as error:
        raise RuntimeError(fix) from error
    if any(synonym not in synonyms[word] for word, synonym in _SYNONYMS.items()):
        raise RuntimeError(fix)
