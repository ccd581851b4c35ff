"""Contents of the splits: artists, backgrounds, combinations of words, and who is named.

Nothing here depends on a seed: all data sets made of a library share its splits.
"""

import re
from collections import Counter
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from tools.experiments.pictures.concepts import PHOTOGRAPH, Concept

NUM_UNNAMED, MAX_UNNAMED = 100, 0.15  # concepts, and at most this fraction of all
HELDOUT_COMBINATIONS = 1 / 3  # fraction of the pairs (label, label of the neighbour)
EVAL_BACKGROUNDS = 1 / 3  # fraction of the families of wallpapers
HELDOUT_ARTIST = "openmoji"


@dataclass(frozen=True)
class Split:
    """One set of scenes.

    Attributes:
        number: seeds its scenes.
        artists: whose pictures it shows; with none that has a picture it is not made.
        is_eval: it has the backgrounds and the combinations of words that no training set has.
        has_captions: some of its scenes have captions for supervision.
    """

    name: str
    number: int
    artists: tuple[str, ...]
    is_eval: bool
    has_captions: bool = False


def splits_of(concepts: list[Concept]) -> list[Split]:
    """Return the splits that the concepts' artists allow, training sets first."""
    artists = {artist for concept in concepts for artist in concept.pictures}
    seen = tuple(sorted(artists - {HELDOUT_ARTIST, PHOTOGRAPH}))
    splits = (
        Split("train", 0, seen, is_eval=False, has_captions=True),
        Split("artist_train", 1, (HELDOUT_ARTIST,), is_eval=False),
        Split("heldout", 2, seen, is_eval=True),
        Split("artist", 3, (HELDOUT_ARTIST,), is_eval=True),
        Split("photographs", 4, (PHOTOGRAPH,), is_eval=True),
    )
    return [split for split in splits if artists & set(split.artists)]


def fraction_of(*words: str) -> float:
    """Return a fixed number in [0, 1) for these words."""
    digest = blake2b("\n".join(words).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def is_heldout(label: str, neighbour: str) -> bool:
    """Tell whether no training caption names `label` by its place beside `neighbour`."""
    return fraction_of("combination", label, neighbour) < HELDOUT_COMBINATIONS


def unnamed_concepts(concepts: list[Concept]) -> set[str]:
    """Return labels that supervision never names, though every word of them occurs in others.

    They are labels of two words or more, about NUM_UNNAMED of them.
    """
    labels = sorted({c.label for c in concepts if c.pictures.keys() - {PHOTOGRAPH}})
    count = Counter(word for label in labels for word in set(label.split()))
    unnamed: set[str] = set()
    limit = min(NUM_UNNAMED, int(MAX_UNNAMED * len(labels)))
    for label in sorted(labels, key=lambda label: fraction_of("unnamed", label)):
        words = set(label.split())
        if len(words) > 1 and len(unnamed) < limit and all(count[word] > 1 for word in words):
            unnamed.add(label)
            count.subtract(words)
    return unnamed


def backgrounds_of(folder: Path, is_eval: bool) -> list[Path]:
    """Return the wallpapers of training or evaluation; variants of one picture stay together.

    Raises:
        ValueError: there are not two different ones.
    """
    files = sorted(p for p in folder.iterdir() if p.suffix.lower() in (".jpg", ".jpeg", ".png"))
    families = sorted({family(path) for path in files}, key=lambda name: fraction_of("wall", name))
    if len(families) < 2:
        raise ValueError(
            f"--backgrounds {folder}: must hold two different pictures or more, for training and "
            "for evaluation"
        )
    num_eval = max(1, round(EVAL_BACKGROUNDS * len(families)))
    chosen = set(families[:num_eval] if is_eval else families[num_eval:])
    return [path for path in files if family(path) in chosen]


def family(path: Path) -> str:
    """Return the words of a file name before its size and variant: "gnome-adwaita-d" without -d."""
    return re.sub(
        r"[-_](d|l|light|dark|warm|cold|radioactive|\d+x\d+|no-logo)\b.*", "", path.stem.lower()
    )
