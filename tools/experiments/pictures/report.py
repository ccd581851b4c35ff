"""Says what a folder of data sets holds, and draws some of its scenes."""

from collections import Counter
from pathlib import Path

import numpy as np
from PIL import Image
from tqdm import tqdm

from rl_train.data import GraspAnyRegionDataset
from rl_train.utils.io import read_json
from tools import inspect_data
from tools.experiments.pictures.dataset import SETTINGS, TRUTH, image_file, read_truth

HASH_SIDE = 16  # a perceptual hash has HASH_SIDE^2 bits
NEAR = 0.1  # of its bits: pictures that differ in fewer are nearly the same
NUM_SHOWN, COLUMNS, SIDE = 12, 4, 448
QUANTILES = (0, 5, 50, 95, 100)


def perceptual_hash(image: Image.Image) -> np.ndarray:
    """Return (HASH_SIDE^2,) bool: which cells of a picture are brighter than those left of them."""
    grey = np.asarray(image.convert("L").resize((HASH_SIDE + 1, HASH_SIDE)), dtype=np.int64)
    return (grey[:, 1:] > grey[:, :-1]).ravel()


def num_near(first: np.ndarray, second: np.ndarray) -> int:
    """Count the pictures of hashes (n, bits) that nearly equal one of hashes (m, bits)."""
    a, b = first.astype(np.float32), second.astype(np.float32)
    differing = a.sum(1)[:, None] + b.sum(1) - 2 * a @ b.T  # (n, m) bits
    return int((differing < NEAR * first.shape[1]).any(1).sum())


def split_lines(name: str, regions: list[dict]) -> list[str]:
    """Say in lines what a split holds."""
    labels = {region["label"] for region in regions}
    captions = [region["label_caption"] for region in regions]
    words = {word for caption in captions for word in caption.split()}
    unique = np.mean([r["label"] == r["label_caption"] for r in regions])
    tagged = np.mean([bool(r["tag_caption"]) for r in regions])
    num_scenes = len({region["scene"] for region in regions})
    artists = sorted({region["artist"] for region in regions})
    lines = [
        f"{name}: {num_scenes} scenes, {len(regions)} regions by {', '.join(artists)}; "
        f"{len(labels)} concepts, {len(words)} words",
        f"  label unique in its scene {unique:.1%}; a tag of its own {tagged:.1%}; never named in "
        f"supervision {np.mean([r['unnamed'] for r in regions]):.1%} of the regions, "
        f"{len({r['label'] for r in regions if r['unnamed']})} concepts",
    ]
    for title, values in (
        ("longest side, pixels", [r["size"] for r in regions]),
        ("hidden, %", [100 * (1 - r["visible"]) for r in regions]),
        ("regions of a concept", list(Counter(r["label"] for r in regions).values())),
        ("objects in a scene", np.unique([r["scene"] for r in regions], return_counts=True)[1]),
    ):
        numbers = "  ".join(f"{np.percentile(values, q):.3g}" for q in QUANTILES)
        lines.append(f"  {title}: {numbers}  (min, 5 %, median, 95 %, max)")
    parts = sorted({region["part"] for region in regions})
    counts = {part: sum(r["part"] == part for r in regions) for part in parts}
    return [*lines, "  " + ", ".join(f"part {part}: {n} regions" for part, n in counts.items())]


def combination(region: dict) -> tuple[str, str] | None:
    """Return (label, neighbour's label) of a caption with a relation, or None."""
    label, caption = region["label"], region["label_caption"]
    return None if caption == label else (label, caption.rsplit(" the ", 1)[1])


def leaks(truth: dict[str, list[dict]]) -> dict[str, int]:
    """Count what is in two splits and should be in one, by name; all are to be 0."""
    training = [r for name in truth if name.endswith("train") for r in truth[name]]
    evaluation = [r for name in truth if not name.endswith("train") for r in truth[name]]
    supervised = [r for r in training if r["part"] == "captioned"]
    unnamed = {r["label"] for r in training + evaluation if r["unnamed"]}
    trained = {combination(r) for r in training} - {None}
    said = {r["label"] for r in supervised} | {n for r in supervised for n in combination(r) or ()}
    return {
        "unnamed concepts in captions of supervision": len(unnamed & said),
        "combinations of words in training and evaluation": len(
            trained & {combination(r) for r in evaluation}
        ),
        "artists of supervision in the split of another artist": len(
            {r["artist"] for r in supervised}
            & {r["artist"] for name in ("artist", "photographs") for r in truth.get(name, ())}
        ),
        "wallpapers in training and evaluation": len(
            {r["background"] for r in training} & {r["background"] for r in evaluation}
        ),
    }


def supervision_line(truth: dict[str, list[dict]]) -> str:
    """Say how many concepts supervision names, and of how many others it says every word."""
    regions = [region for name in truth for region in truth[name]]
    supervised = [region for region in regions if region["part"] == "captioned"]
    named = {region["label"] for region in supervised}
    words = {word for region in supervised for word in region["caption"].split()}
    unnamed = {region["label"] for region in regions if region["unnamed"]}
    said = sum(set(label.split()) <= words for label in unnamed)
    return (
        f"supervision: {len(supervised)} captions name {len(named)} concepts in {len(words)} words;"
        f" of {len(unnamed)} concepts that it never names it says all words of {said}"
    )


def report(data_dir: Path, library: Path | None, output: Path | None):
    """Print what the data sets below `data_dir` hold; draw scenes into `output`.

    Raises:
        ValueError: the folder holds none.
    """
    folders = sorted(file.parent for file in data_dir.glob(f"*/{TRUTH}"))
    if not folders:
        raise ValueError(f"--data_dir {data_dir} holds no data set that scenes finished")
    truth = {folder.name: read_truth(folder) for folder in folders}
    tqdm.write(", ".join(f"{k} {v}" for k, v in read_json(data_dir / SETTINGS).items()))
    hashes, datasets = {}, {}
    for folder in folders:
        regions = truth[folder.name]
        tqdm.write("\n" + "\n".join(split_lines(folder.name, regions)))
        for part in ("all", "captioned"):  # those with captions and masks, by the real reader
            if (folder / part).is_dir():
                dataset = datasets[folder.name] = GraspAnyRegionDataset(folder, [part])
                sizes, damaged, _ = inspect_data.measure(dataset, num_workers=0)
                tqdm.write(inspect_data.table(dataset.report(), damaged, sizes))
        scenes = sorted({region["scene"] for region in regions})
        hashes[folder.name] = np.stack(
            [
                perceptual_hash(Image.open(image_file(folder, scene)))
                for scene in tqdm(scenes, desc="hashes", unit="scene", leave=False)
            ]
        )
    tqdm.write("\n" + supervision_line(truth))
    tqdm.write("\nto be 0:")
    for name, count in leaks(truth).items():
        tqdm.write(f"  {name}: {count}")
    for i, first in enumerate(hashes):
        for second in list(hashes)[i + 1 :]:
            count = num_near(hashes[first], hashes[second])
            tqdm.write(f"  scenes of {first} that nearly equal one of {second}: {count}")
    if library and (library / "LICENCES.txt").is_file():
        tqdm.write("\n" + (library / "LICENCES.txt").read_text(encoding="utf-8"))
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        contact_sheet(list(datasets.values())).save(output)
        tqdm.write(f"contact sheet: {output}")


def contact_sheet(datasets: list[GraspAnyRegionDataset]) -> Image.Image:
    """Draw NUM_SHOWN scenes, from each data set as many, with one region of each outlined.

    It is the region of the longest caption in every other scene, which may name a neighbour.
    """
    samples = []
    for k, dataset in enumerate(datasets):
        number = NUM_SHOWN // len(datasets) + (k < NUM_SHOWN % len(datasets))
        first = np.sort(np.unique(dataset.image_keys, return_index=True)[1])
        spread = first[np.linspace(0, len(first) - 1, number).round().astype(int)]
        for i in spread.tolist():
            regions = np.flatnonzero(dataset.image_keys == dataset.image_keys[i]).tolist()
            scene = [dataset[region] for region in regions]
            longest = max(scene, key=lambda sample: len(sample["caption"]))
            samples.append(longest if len(samples) % 2 else scene[0])
    return inspect_data.contact_sheet(samples, COLUMNS, SIDE)
