"""Concepts: what cut-out pictures are called, and which of them are pictures of an object.

A library is a folder with `concepts.json`, the pictures it names, and `backgrounds/`. `fetch` makes
one of packages; `read_own` takes a folder of the user's own cut-outs in its place.
"""

import csv
import re
import shutil
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
from nltk.corpus import wordnet
from PIL import Image

from rl_train.rewards.meteor import require_wordnet
from rl_train.utils.io import read_json, write_json

CONCEPTS_FILE, LICENCES_FILE = "concepts.json", "LICENCES.txt"
PHOTOGRAPH = "photograph"  # the artist of Tux Paint's photographs
OWN = "own"  # the artist of a user's folder
OPAQUE = 128  # alpha from which a pixel belongs to the object

# Groups of Unicode whose emoji are objects; the others are smileys, people, symbols and flags.
OBJECT_GROUPS = ("animals-nature", "food-drink", "travel-places", "activities", "objects")
CLOCK_FACE = re.compile(r"o'clock$|-thirty$")
MAX_WORDS = 4
NUM_SENSES = 2  # of a word in WordNet, the most frequent ones
MIN_FILL = 0.12  # least opaque fraction of the square around a picture; below it is a line
# A picture of a place fills its box, at least so much of it, and the box is nearly a square.
PLACE_GROUPS, PLACE_FILL, PLACE_SIDES = ("travel-places", "activities"), 0.9, (0.8, 1.25)
ALIKE = 13.0  # of 255: mean difference below which an artist's two pictures look alike
SIDE_OF_LOOK = 24  # pixels of the small copies that are compared

# A sentence that names one thing: "A tiger." and not "Eat your broccoli!".
SENTENCE = re.compile(r"(?:an?|the) ([\w -]+)\.", re.IGNORECASE)
MIN_PHOTOGRAPH = 96  # pixels of the longer side
MAX_FLAT = 0.13  # fraction of equal neighbours above which a picture is drawn
# Folders of drawings; halloween holds graves under six names that mean the same.
NO_PHOTOGRAPHS = "symbols cartoon roadsigns flags planets easter clothes halloween".split()


@dataclass(frozen=True)
class Concept:
    """A name and its cut-outs.

    Attributes:
        tags: second wordings; other concepts may have them too.
        theme: the family that distractors come from, as "animal-bird".
        pictures: {artist: paths below the library}.
        sentence: what the artist says of it, "" if nothing.
        also: labels of other concepts that are true of it too, as "chicken" of a rooster.
    """

    label: str
    tags: tuple[str, ...] = ()
    theme: str = ""
    pictures: dict[str, list[str]] = field(default_factory=dict)
    sentence: str = ""
    also: tuple[str, ...] = ()


def plain(text: str) -> str:
    """Return a label in lower case and ASCII: "Piñata" -> "pinata", "woman’s hat" with "'"."""
    text = unicodedata.normalize("NFKD", text.replace("’", "'"))
    text = "".join(c for c in text if not unicodedata.combining(c)).lower()
    return " ".join(re.sub(r"[^\x20-\x7e]", "", text).split())


def write_library(folder: Path, concepts: Iterable[Concept]):
    write_json(folder / CONCEPTS_FILE, dict(concepts=[asdict(c) for c in concepts]), indent=1)


def read_library(folder: Path) -> list[Concept]:
    """Return the concepts of a folder that `fetch` wrote. Raises ValueError."""
    if not (folder / CONCEPTS_FILE).is_file():
        raise ValueError(
            f"--library {folder} has no {CONCEPTS_FILE}: make it with "
            f"python -m tools.experiments.pictures fetch --output_dir {folder}"
        )
    content = read_json(folder / CONCEPTS_FILE)
    return [
        Concept(**c | dict(tags=tuple(c["tags"]), also=tuple(c["also"])))
        for c in content["concepts"]
    ]


def most_related(concepts: list[Concept], number: int) -> list[Concept]:
    """Return `number` of the drawn concepts: those whose words most other labels have, in order.

    So each word is said of several concepts, as "black" and "cat" of "black cat".
    """
    drawn = [concept for concept in concepts if concept.pictures.keys() - {PHOTOGRAPH}]
    count = Counter(word for concept in drawn for word in set(concept.label.split()))

    def num_related(concept: Concept) -> int:
        return sum(count[word] - 1 for word in set(concept.label.split()))

    chosen = sorted(drawn, key=lambda concept: (-num_related(concept), concept.label))[:number]
    labels = {concept.label for concept in chosen}
    return [
        replace(
            concept,
            pictures={a: files for a, files in concept.pictures.items() if a != PHOTOGRAPH},
            also=tuple(label for label in concept.also if label in labels),
        )
        for concept in chosen
    ]


def write_subset(library: Path, number: int, side: int, output_dir: Path):
    """Write a smaller library: `most_related` concepts, without photographs, and its wallpapers.

    Args:
        side: pixels of the longer side of its cut-outs, at most.
    """
    concepts = most_related(read_library(library), number)
    for file in (file for c in concepts for files in c.pictures.values() for file in files):
        image = read_picture(library / file)
        image.thumbnail((side, side), Image.Resampling.LANCZOS)
        (output_dir / file).parent.mkdir(parents=True, exist_ok=True)
        image.save(output_dir / file, optimize=True)
    shutil.copytree(library / "backgrounds", output_dir / "backgrounds", dirs_exist_ok=True)
    if (library / LICENCES_FILE).is_file():
        shutil.copy(library / LICENCES_FILE, output_dir)
    write_library(output_dir, concepts)


def with_hypernyms(concepts: list[Concept]) -> list[Concept]:
    """Return the concepts with the labels that are true of them by WordNet, in `also`.

    A label is true of a concept if one of its first NUM_SENSES senses is a sense of the concept, or
    stands above one. Raises UserFault if WordNet is not there.
    """
    require_wordnet()
    labels = {concept.label for concept in concepts}
    senses = {label: wordnet.synsets(label.replace(" ", "_"), "n")[:NUM_SENSES] for label in labels}
    labels_of = defaultdict(set)
    for label, own in senses.items():
        for sense in own:
            labels_of[sense].add(label)
    result = []
    for concept in concepts:
        above = set(senses[concept.label])
        for sense in senses[concept.label]:
            above |= set(sense.closure(lambda lower: lower.hypernyms()))
        also = set().union(*(labels_of[sense] for sense in above if sense in labels_of))
        result.append(replace(concept, also=tuple(sorted(also - {concept.label}))))
    return result


def read_own(folder: Path, names: Path | None) -> list[Concept]:
    """Return the concepts of a user's folder of PNG files with alpha. Raises ValueError.

    Args:
        names: CSV file with the columns file and name, and maybe tags (joined by ";") and artist;
            None: a file is called by its name, "red_car-2.png" by "red car".
    """
    rows = [dict(file=str(p.relative_to(folder))) for p in sorted(folder.rglob("*.png"))]
    if not rows:
        raise ValueError(f"--cutouts {folder} holds no PNG file")
    if names:
        if not names.is_file():
            raise ValueError(f"--names {names}: there is no such file")
        with names.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        if not rows or not {"file", "name"} <= rows[0].keys():
            raise ValueError(f"--names {names}: must be a CSV file with the columns file and name")
    concepts: dict[str, Concept] = {}
    for number, row in enumerate(rows, start=2):
        path = folder / row["file"]
        if not path.is_file():
            raise ValueError(f"--names {names} line {number}: {folder} has no {row['file']}")
        label = plain(
            row.get("name") or re.sub(r"[_\s]+", " ", re.sub(r"[-_ ]*\d*$", "", path.stem))
        )
        if not label:
            raise ValueError(f"{path} has no name: rename it, or name it in --names")
        mask = opaque(read_picture(path))
        if not mask.any() or mask.all():
            raise ValueError(f"{path} is no cut-out: its alpha must be the mask of the object")
        tags = tuple(plain(tag) for tag in (row.get("tags") or "").split(";") if plain(tag))
        known = concepts.setdefault(label, Concept(label, tags, "-".join(tags[:1])))
        artist = row.get("artist") or OWN
        known.pictures.setdefault(artist, []).append(row["file"])
    return list(concepts.values())


def read_picture(path: Path) -> Image.Image:
    """Return a picture, RGBA. Raises ValueError that names its file."""
    try:
        with Image.open(path) as image:
            return image.convert("RGBA")
    except OSError as error:
        raise ValueError(f"{path} is no picture that can be read: {error}") from error


def opaque(image: Image.Image) -> np.ndarray:
    """Return the (H, W) bool mask of a cut-out's opaque pixels."""
    return np.asarray(image.convert("RGBA"))[..., 3] >= OPAQUE


def fault_of_words(group: str, label: str) -> str | None:
    """Return why the words of an emoji name no object to be found, or None."""
    if group not in OBJECT_GROUPS:
        return f"group {group or 'component'}"
    if CLOCK_FACE.search(label):
        return "clock face"
    if len(label.split()) > MAX_WORDS:
        return f"label of more than {MAX_WORDS} words"
    return None


def fault_of_pictures(group: str, pictures: dict[str, Image.Image]) -> str | None:
    """Return why an emoji's pictures {artist: RGBA} show no object to be found, or None."""
    num_places = 0
    for image in pictures.values():
        mask = opaque(image)
        rows, cols = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        if not len(rows):
            return "an empty picture"
        height, width = np.ptp(rows) + 1, np.ptp(cols) + 1
        if mask.sum() < MIN_FILL * max(height, width) ** 2:
            return "thin as a line"
        full = mask.sum() > PLACE_FILL * height * width
        num_places += full and PLACE_SIDES[0] < width / height < PLACE_SIDES[1]
    if group in PLACE_GROUPS and num_places >= 2:
        return "a place that fills its square"
    return None


def look(image: Image.Image) -> np.ndarray:
    """Return a small copy of a cut-out, cropped, on grey, with its alpha, as a float vector."""
    mask = opaque(image)
    rows, cols = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    box = (cols[0], rows[0], cols[-1] + 1, rows[-1] + 1)
    small = image.crop(box).resize((SIDE_OF_LOOK, SIDE_OF_LOOK))
    pixels = np.asarray(small, dtype=np.float64)
    alpha = pixels[..., 3:] / 255
    seen = pixels[..., :3] * alpha + 128 * (1 - alpha)
    return np.concatenate([seen, 255 * alpha], axis=-1).ravel()


def alike(looks: list[dict[str, np.ndarray]]) -> dict[int, int]:
    """Return {concept: an earlier one it looks like}, by the second smallest difference of artists.

    Args:
        looks: per concept {artist: `look`}, the same artists for each.
    """
    artists = list(looks[0])
    stacked = {a: np.stack([entry[a] for entry in looks]).astype(np.float32) for a in artists}
    taken: dict[int, int] = {}
    for i in range(1, len(looks)):
        earlier = [j for j in range(i) if j not in taken]
        differences = np.sort(
            [np.abs(stacked[a][earlier] - stacked[a][i]).mean(-1) for a in artists], axis=0
        )  # (artists, earlier)
        second = differences[min(1, len(artists) - 1)]
        if second.min() < ALIKE:
            taken[i] = earlier[int(second.argmin())]
    return taken


def is_photograph(folder: str, image: Image.Image) -> bool:
    """Tell whether a stamp is a photograph: no drawing has so few equal neighbours.

    Args:
        folder: of the stamp, as "animals/birds".
    """
    if set(folder.split("/")) & set(NO_PHOTOGRAPHS) or max(image.size) < MIN_PHOTOGRAPH:
        return False
    mask = opaque(image)
    grey = np.asarray(image.convert("RGB"), dtype=np.int64).sum(-1)
    pairs = mask[:, 1:] & mask[:, :-1]
    return bool(pairs.any()) and (np.diff(grey, axis=1)[pairs] == 0).mean() < MAX_FLAT


def name_in(sentence: str) -> str | None:
    """Return what a sentence such as "A tiger." names, or None for another sentence."""
    match = SENTENCE.fullmatch(sentence.strip())
    name = plain(match[1]) if match else ""
    return name if 0 < len(name.split()) <= MAX_WORDS else None
