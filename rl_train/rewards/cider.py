"""CIDEr-D between captions and the true captions of their regions, 0 to 10.

Source: Vedantam et al. 2015, as `cider/cider_scorer.py` of tylin/coco-caption (pycocoevalcap)
computes it: n-grams of 1 to 4 words, clipped counts, a Gaussian penalty of sigma 6 on the
difference of the lengths. The words are those of `tokenizer/ptbtokenizer.py` beside it, which runs
Stanford's PTBTokenizer in Java and leaves punctuation out; `coco_words` does without Java. On 9,000
example sentences and definitions of WordNet it divides all but about 10 as the original does.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_train.rewards.meteor import check_lists

ORDERS = (1, 2, 3, 4)  # words of an n-gram
SIGMA = 6.0
SCALE = 10.0
# Words

PLAIN_QUOTES = str.maketrans("‘’“”–—", "''\"\"--")
PUNCTUATION = set("'' ' `` ` \" . .. ... ? ! , : - -- ;".split())
# The original looks for -LRB- in words of lower case, so brackets stay.
BRACKETS = dict(zip("()[]{}", "-lrb- -rrb- -lsb- -rsb- -lcb- -rcb-".split()))
COMPOUND = re.compile(
    r"\b(can(?=not\b)|gon(?=na\b)|wan(?=na\b)|got(?=ta\b)|lem(?=me\b)|gim(?=me\b))"
)
CONTRACTION = re.compile(r"(?<=\w)(n't|'(?:s|m|d|ll|re|ve))\b")
WORD = re.compile(
    r"""
    (?:[^\W\d_]\.){2,}                                         # u.s.
    | (?:mr|mrs|ms|dr|st|jr|sr|vs|[b-hj-z])\.(?=\s+\w)         # within a sentence
    | etc\.
    | (?<!\w)(?:n't|'(?:s|m|d|ll|re|ve)\b|'n')                 # ends of contractions
    | \d+(?:[,:.]\d+)+                                         # 1,000 5:30
    | [^\W_]+(?:[-_./'][^\W_]+)*                               # t-shirt and/or o'clock
    | \.{2,} | -{2,} | [?!]+ | [^\w\s]
    """,
    re.VERBOSE,
)


def coco_words(text: str) -> list[str]:
    """Return the words of a caption as the COCO caption code counts them.

    They are in lower case, without punctuation; "the man's t-shirt." is the, man, 's, t-shirt.
    """
    divided = COMPOUND.sub(r"\1 ", text.lower().translate(PLAIN_QUOTES))
    divided = CONTRACTION.sub(r" \1", divided)
    words = (BRACKETS.get(word, word) for word in WORD.findall(divided))
    return [word for word in words if word not in PUNCTUATION]


# Scores

NGrams = Counter[tuple[str, ...]]


@dataclass(frozen=True)
class DocumentFrequencies:
    """Number of regions, and of those whose true captions hold an n-gram."""

    num_documents: int
    counts: NGrams


def document_frequencies(references: Iterable[Sequence[str]]) -> DocumentFrequencies:
    """Count the n-grams of the true captions of regions, one or several captions each."""
    num_documents, counts = 0, Counter()
    for captions in references:
        num_documents += 1
        counts.update({ngram for caption in captions for ngram in ngrams(caption)})
    return DocumentFrequencies(num_documents, counts)


def cider(
    references: Sequence[Sequence[str]],
    hypotheses: Sequence[str],
    frequencies: DocumentFrequencies | None = None,
) -> Tensor:
    """Return the CIDEr-D of N captions, (N,) float64 in [0, 10].

    Args:
        references: N lists of true captions.
        hypotheses: N generated captions, paired by index.
        frequencies: of the true captions that weights are counted on; None: of `references`, as an
            evaluation does. A reward of few samples needs those of its data set, since the only
            region of a set has no frequencies, and scores 0.

    Raises:
        TypeError: `hypotheses` or an item of `references` is a single str.
        ValueError: the two sides differ in length.
    """
    for captions in references:
        check_lists("cider", captions, hypotheses)
    frequencies = frequencies or document_frequencies(references)
    scores = []
    for captions, hypothesis in zip(references, hypotheses, strict=True):
        weights = weigh(ngrams(hypothesis), frequencies)
        similarities = [
            similarity(weights, weigh(ngrams(caption), frequencies)) for caption in captions
        ]
        scores.append(SCALE * sum(similarities) / len(similarities))
    return torch.tensor(scores, dtype=torch.float64)  # (N,)


def ngrams(caption: str) -> NGrams:
    """Count the n-grams of a caption."""
    words = coco_words(caption)
    return Counter(
        tuple(words[start : start + n]) for n in ORDERS for start in range(len(words) - n + 1)
    )


@dataclass
class Weighted:
    """TF-IDF weights of a caption's n-grams by their order, and its number of pairs of words."""

    weights: dict[int, dict[tuple[str, ...], float]]
    num_pairs: int  # what the original calls the length

    def norm(self, n: int) -> float:
        return math.sqrt(sum(weight**2 for weight in self.weights[n].values()))


def weigh(counts: NGrams, frequencies: DocumentFrequencies) -> Weighted:
    """Weigh n-grams by their count and by the logarithm of 1 / document frequency."""
    log_documents = math.log(frequencies.num_documents)
    weights = {n: {} for n in ORDERS}
    for ngram, count in counts.items():
        log_frequency = math.log(max(1, frequencies.counts[ngram]))
        weights[len(ngram)][ngram] = count * (log_documents - log_frequency)
    return Weighted(weights, sum(count for ngram, count in counts.items() if len(ngram) == 2))


def similarity(hypothesis: Weighted, reference: Weighted) -> float:
    """Return the mean over the orders of the clipped cosines, with the penalty on lengths."""
    penalty = math.exp(-((hypothesis.num_pairs - reference.num_pairs) ** 2) / (2 * SIGMA**2))
    cosines = []
    for n in ORDERS:
        true = reference.weights[n]
        product = sum(
            min(weight, true[ngram]) * true[ngram]
            for ngram, weight in hypothesis.weights[n].items()
            if ngram in true
        )
        norms = hypothesis.norm(n) * reference.norm(n)
        cosines.append(product / norms if norms else 0.0)
    return penalty * sum(cosines) / len(cosines)
