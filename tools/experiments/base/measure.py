"""Measure a base: accuracy, a confusion table, and a probe of its features.

Letters: n regions, C width of a feature.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Subset
from tqdm import tqdm

from rl_train.data import GraspAnyRegionDataset
from rl_train.data.loader import eval_loader
from rl_train.data.split import sample_regions
from rl_train.data.text import phrase
from rl_train.policies.sa2va import Sa2VAPolicy
from rl_train.rollout import Batch
from sa2va_hf.batches import ImageFeatures
from tools.demo.seen_masks import ImageRegions, label_in, region_means, token_map
from tools.experiments.gauntlet.regions import Regions
from tools.experiments.pictures.dataset import TRUTH, read_truth

EVALUATION = ("heldout", "artist", "photographs")
NUM_CONFUSIONS = 20  # in a table
PROBE_STEPS, PROBE_DECAY = 300, 1e-3
GROUPS = ("named", "unnamed", "fluent", "noto", "openmoji", "photograph")


@dataclass(frozen=True)
class Asked:
    """Regions of a part, with all that is known of them, and the dataset of their order."""

    truth: list[dict]
    dataset: Subset


def regions_of(folder: Path, part: str, num_samples: int) -> Asked:
    """Return regions of a part of a split, spread over images. Raises ValueError."""
    if not (folder / TRUTH).is_file():
        raise ValueError(f"--data_dir {folder.parent}: has no split {folder.name} that is finished")
    dataset = GraspAnyRegionDataset(folder, [part])
    truth = [region for region in read_truth(folder) if region["part"] == part]
    if len(truth) != len(dataset):
        raise ValueError(f"{folder}/{part}: {len(dataset)} usable regions, not {len(truth)}")
    chosen = sample_regions(dataset.image_keys, num_samples)
    return Asked([truth[i] for i in chosen], Subset(dataset, chosen))


def token_means(policy: Sa2VAPolicy, batch: Batch, features: ImageFeatures) -> torch.Tensor:
    """Return (B, C): the mean of the LLM's image tokens in each region, on the CPU."""
    rows = torch.arange(len(batch), device=policy.device)
    masks = torch.stack(batch.masks).to(policy.device).float()
    regions = ImageRegions(rows, torch.zeros_like(rows), masks)
    return region_means(token_map(policy, features), regions).cpu()


@torch.no_grad()
def features_of(policy: Sa2VAPolicy, asked: Asked, args) -> torch.Tensor:
    """Return (n, C): the means of the LLM's image tokens in each region, on the CPU."""
    inputs = policy.preprocessor(args.max_completion_length, args.max_prompt_length)
    loader = eval_loader(asked.dataset, inputs, args.batch_size, args.num_workers)
    batches = tqdm(loader, desc="features", leave=False, disable=None)
    return torch.cat([token_means(policy, batch, policy.encode(batch)) for batch in batches])


def probe(features: torch.Tensor, labels: Sequence[str]) -> "Probe":
    """Fit a linear classifier of labels to features (n, C), with weight decay."""
    names = sorted(set(labels))
    truth = torch.tensor([names.index(label) for label in labels])
    mean, std = features.mean(0), features.std(0).clamp(min=1e-6)
    inputs = (features - mean) / std
    weights = torch.zeros(inputs.shape[1], len(names), requires_grad=True)
    bias = torch.zeros(len(names), requires_grad=True)
    optimizer = torch.optim.Adam([weights, bias], lr=0.02, weight_decay=PROBE_DECAY)
    for _ in range(PROBE_STEPS):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(inputs @ weights + bias, truth).backward()
        optimizer.step()
    return Probe(names, mean, std, weights.detach(), bias.detach())


@dataclass(frozen=True)
class Probe:
    """A linear classifier of features (n, C)."""

    names: list[str]
    mean: torch.Tensor
    std: torch.Tensor
    weights: torch.Tensor
    bias: torch.Tensor

    def read(self, features: torch.Tensor) -> list[str]:
        scores = (features - self.mean) / self.std @ self.weights + self.bias
        return [self.names[i] for i in scores.argmax(1).tolist()]


def figures(said: list[str], truth: list[dict], columns: dict[str, list[float]]) -> dict:
    """Return the count of regions, the fraction of labels said rightly, and means of columns.

    Also the fraction that would be right by chance, with what is said shuffled over the regions,
    and the fraction of each label's words that are said.
    """
    labels = [region["label"] for region in truth]
    times_said = Counter(said)
    hits = sum(times_said[label] * count for label, count in Counter(labels).items())
    words = [
        len(set(label.split()) & set(each.split())) / len(set(label.split()))
        for label, each in zip(labels, said)
    ]
    return dict(
        regions=len(truth),
        label=float(np.mean([a == b for a, b in zip(said, labels)])),
        label_by_chance=hits / len(labels) ** 2,
        words=float(np.mean(words)),
    ) | {name: float(np.mean(values)) for name, values in columns.items()}


def confusions(said: list[str], truth: list[dict]) -> list[dict]:
    """Return what is said for which label, the most frequent mistakes first, with their counts."""
    counts = Counter(
        (region["label"], each) for region, each in zip(truth, said) if region["label"] != each
    )
    total = Counter(region["label"] for region in truth)
    return [
        dict(label=label, said=each, times=times, regions=total[label])
        for (label, each), times in counts.most_common()
    ]


def by_group(said: list[str], truth: list[dict], columns: dict[str, list[float]]) -> dict:
    """Return `figures` of all regions, of those named or never named in training, by artist."""
    members = {"all": list(range(len(truth)))}
    for group in GROUPS:
        members[group] = [
            i
            for i, region in enumerate(truth)
            if group in (region["artist"], "unnamed" if region["unnamed"] else "named")
        ]
    return {
        group: figures(
            [said[i] for i in rows],
            [truth[i] for i in rows],
            {name: [values[i] for i in rows] for name, values in columns.items()},
        )
        for group, rows in members.items()
        if rows
    }


def by_concept(said: list[str], truth: list[dict], columns: dict[str, list[float]]) -> dict:
    """Return `figures` of each label."""
    rows: dict[str, list[int]] = {}
    for i, region in enumerate(truth):
        rows.setdefault(region["label"], []).append(i)
    return {
        label: figures(
            [said[i] for i in own],
            [truth[i] for i in own],
            {name: [values[i] for i in own] for name, values in columns.items()},
        )
        for label, own in sorted(rows.items())
    }


@torch.no_grad()
def split_record(policy: Sa2VAPolicy, asked: Asked, probes: dict[str, Probe], args) -> dict:
    """Return what the base says, finds and holds of the regions of an evaluation split."""
    regions = Regions(
        policy,
        asked.dataset,
        args.max_completion_length,
        args.max_prompt_length,
        args.batch_size,
        args.num_workers,
    )
    captions = [phrase(caption) for caption in regions.greedy_captions()]
    said = [label_in(caption) for caption in captions]
    own = regions.listen(list(enumerate(captions)))
    true = regions.listen(list(enumerate(regions.references)))
    columns = dict(
        cycle_iou=[each.iou for each in own],
        cycle_found=[each.found for each in own],
        seg_iou=[each.iou for each in true],
        seg_found=[each.found for each in true],
        other_objects=[1 / (1 + len(b)) for batch, _ in regions.parts for b in batch.distractors],
    )
    features = torch.cat([token_means(policy, batch, f) for batch, f in regions.parts])
    labels = [region["label"] for region in asked.truth]
    for name, each in probes.items():
        columns[name] = [float(a == b) for a, b in zip(each.read(features), labels)]
    return dict(
        groups=by_group(said, asked.truth, columns),
        confusions=confusions(said, asked.truth),
        concepts=by_concept(said, asked.truth, columns),
        examples=[[r["caption"], c] for r, c in zip(asked.truth, captions)][:40],
    )


def fit_probes(policy: Sa2VAPolicy, args) -> dict[str, Probe]:
    """Fit probes to the labels of training regions.

    They are those with captions, or all, also those that no training names.
    """
    training = args.data_dir / "train"
    captioned = regions_of(training, "captioned", args.probe_samples)
    others = regions_of(training, "regions", args.probe_samples)
    features = [features_of(policy, each, args) for each in (captioned, others)]
    labels = [[region["label"] for region in each.truth] for each in (captioned, others)]
    return dict(
        probe_captioned=probe(features[0], labels[0]),
        probe_all=probe(torch.cat(features), labels[0] + labels[1]),
    )


def measure_base(policy: Sa2VAPolicy, args) -> dict:
    """Return {split: record} of one base, with `fit_probes` of its frozen features."""
    probes = fit_probes(policy, args) if args.probe_samples else {}
    record = {}
    for split in EVALUATION:
        if (args.data_dir / split / TRUTH).is_file():
            asked = regions_of(args.data_dir / split, "all", args.num_samples)
            record[split] = split_record(policy, asked, probes, args)
    if not record:
        raise ValueError(f"--data_dir {args.data_dir}: has no split to measure on")
    return record


def markdown(records: list[dict]) -> str:
    """Return the tables of several bases: means, and the lowest and highest.

    Raises ValueError if they were not measured on as many regions of each group and concept.
    """
    if not records or any(regions_in(record) != regions_in(records[0]) for record in records):
        raise ValueError("the bases were not measured on the same regions")
    lines = []
    for split in records[0]:
        of_split = [record[split] for record in records]
        lines += [f"## {split}, {len(records)} bases", ""]
        lines += figures_table("regions of", [each["groups"] for each in of_split])
        lines += ["", "Mistakes of all bases together, the most frequent:", ""]
        lines += confusion_table([each["confusions"] for each in of_split])
        lines += ["", "By concept:", ""]
        lines += figures_table("concept", [each["concepts"] for each in of_split])
        lines.append("")
    return "\n".join(lines)


def regions_in(record: dict) -> dict:
    """Return how many regions a base's record has of each (split, groups or concepts, name)."""
    return {
        (split, kind, name): figures["regions"]
        for split, of_split in record.items()
        for kind in ("groups", "concepts")
        for name, figures in of_split[kind].items()
    }


def figures_table(title: str, figures_by_base: list[dict[str, dict]]) -> list[str]:
    """Return the lines of a table with a row for each group of regions.

    Args: figures_by_base: of each base {group: its `figures`}.
    """
    columns = list(next(iter(figures_by_base[0].values())))
    lines = [f"| {title} | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for group in figures_by_base[0]:
        values = [[figures[group][name] for name in columns] for figures in figures_by_base]
        means, low, high = (f(values, axis=0) for f in (np.mean, np.min, np.max))
        cells = [
            f"{m:.0f}" if name == "regions" else f"{m:.3f} ({a:.3f} to {b:.3f})"
            for name, m, a, b in zip(columns, means, low, high)
        ]
        lines.append(f"| {group} | {' | '.join(cells)} |")
    return lines


def confusion_table(confusions_by_base: list[list[dict]]) -> list[str]:
    """Return the lines of a table of the mistakes of several bases, of the same regions."""
    times, regions = Counter(), {}
    for row in (row for rows in confusions_by_base for row in rows):
        times[row["label"], row["said"]] += row["times"]
        regions[row["label"]] = row["regions"] * len(confusions_by_base)
    lines = ["| label | said | times | of regions |", "|---|---|---|---|"]
    return lines + [
        f"| {label} | {said} | {count} | {regions[label]} |"
        for (label, said), count in times.most_common(NUM_CONFUSIONS)
    ]
