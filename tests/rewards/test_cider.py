"""rl_train/rewards/cider.py: by hand, and against what the COCO caption code computes."""

import random

import pytest

from rl_train.rewards.cider import cider, coco_words, document_frequencies

REFERENCES = [
    ["A man's red T-shirt.", "the t-shirt (red) on the left"],
    ["the dog isn't on the couch"],
    ["half-eaten sandwich, on a plate", "a sandwich"],
    ["woman w/ black/white cup"],
    ["the 2nd man from the left"],
]
CAPTIONS = [
    "the man's red t-shirt",
    "a dog is on the couch",
    "a half-eaten sandwich on a white plate",
    "woman with cup",
    "second man from left",
]
# Of pycocoevalcap 1.2 with its PTBTokenizer, which needs Java.
ORIGINAL_SCORES = [4.168562463542277, 3.788761922694946, 3.132215185717735]
ORIGINAL_SCORES += [1.2212284230877053, 2.0278674053365098]
# Of the same PTBTokenizer.
ORIGINAL_WORDS = {
    "A man's dog doesn't like the T-shirt.": "a man 's dog does n't like the t-shirt",
    "3.5 inch, $5 bill (left) of 10%": "3.5 inch $ 5 bill -lrb- left -rrb- of 10 %",
    'red/white bus #12 & "stop" sign': "red/white bus # 12 & stop sign",
    "second from the left...": "second from the left",
    "don't cannot gonna it's they're I'd": "do n't can not gon na it 's they 're i 'd",
    "Mr. Smith's U.S. flag; no player!": "mr. smith 's u.s. flag no player",
    "half-eaten sandwich -- w/ a plate": "half-eaten sandwich w / a plate",
    "top left corner?? yes!!": "top left corner ?? yes !!",
    "the dogs' bowl 'quoted' 5:30 a*b": "the dogs bowl quoted 5:30 a * b",
    "café “smart” ‘quotes’ – dash o'clock": "café smart quotes dash o'clock",
    "man,woman": "man woman",
    " .": "",
}


def test_by_hand():
    # Document frequency 1 of 2 everywhere: equal captions of one word have cosine 1 for n = 1 of
    # 4, times 10.
    assert cider([["cup"], ["dog"]], ["Cup!", "cat"]).tolist() == pytest.approx([10 / 4, 0])
    references = [["a red cup on the table"], ["a large dog"]]
    equal, other = cider(references, ["a red cup on the table", "a red cup"]).tolist()
    assert equal == pytest.approx(10)
    assert other == 0  # "a" is in both references: no weight


@pytest.mark.parametrize("text", ORIGINAL_WORDS)
def test_words_are_the_originals(text):
    assert coco_words(text) == ORIGINAL_WORDS[text].split()


def test_scores_are_the_originals():
    assert cider(REFERENCES, CAPTIONS).tolist() == pytest.approx(ORIGINAL_SCORES, abs=1e-12)


def test_frequencies_of_a_data_set():
    """A reward scores one sample at a time, by the frequencies of its data set."""
    frequencies = document_frequencies(REFERENCES)
    scores = [
        cider([captions], [caption], frequencies).item()
        for captions, caption in zip(REFERENCES, CAPTIONS)
    ]
    assert scores == pytest.approx(ORIGINAL_SCORES, abs=1e-12)
    # A set of one region has no frequencies: no word has weight.
    assert cider([["a cup"]], ["a cup"]).tolist() == [0]


def test_a_single_text_is_refused():
    with pytest.raises(TypeError, match="cider takes two lists"):
        cider(["a cup"], ["a cup"])


def test_random_captions_against_pycocoevalcap():
    scorer = pytest.importorskip("pycocoevalcap.cider.cider")  # of the extra `oracle`, 104 MB
    rng = random.Random(3)
    words = "a the man's woman red t-shirt (left) dog, on couch. isn't 2 cup".split()

    def caption():
        return " ".join(rng.choices(words, k=rng.randint(1, 9)))

    references = [[caption() for _ in range(rng.randint(1, 3))] for _ in range(100)]
    captions = [rng.choice([caption(), true[0]]) for true in references]
    mean, scores = scorer.Cider().compute_score(
        {i: [" ".join(coco_words(text)) for text in true] for i, true in enumerate(references)},
        {i: [" ".join(coco_words(text))] for i, text in enumerate(captions)},
    )
    ours = cider(references, captions)
    assert mean > 1 and ours.tolist() == pytest.approx(scores.tolist(), abs=1e-12)
