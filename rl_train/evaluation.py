"""Held-out measures of both cycles and both directions, greedy and without sampled latents; their intervals; guards.

Letters: n samples of the held-out dataset, in its order.
"""

from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from tqdm import tqdm

from rl_train.data.loader import eval_loader
from rl_train.distributed import Ranks, gather_objects
from rl_train.guards import WHOLE, has_digit, is_whole, repeats
from rl_train.policies.sa2va import Policy
from rl_train.policies.sa2va_prompts import phrase
from rl_train.rewards import mask_iou, meteor
from rl_train.rewards.meteor import tokenize
from rl_train.rollout import answer, describe

# What is reported. "True caption" is the dataset's, "caption" the model's greedy one of the region.
METRICS = {
    "cycle_iou": "region -> caption -> mask', IoU with the region",
    "cycle_meteor": "true caption -> mask -> caption', METEOR",
    "seg_iou": "mask of the true caption: mean IoU (gIoU)",
    "seg_ciou": "same: summed intersections / summed unions (cIoU)",
    "seg_p50": "same: share with IoU >= 0.5",
    "caption_meteor": "caption of the region, METEOR",
    "caption_cider": "same, CIDEr-D (0 to 10)",
    "caption_words": "guard: words of the caption",
    "caption_repeats": "guard: captions that say three words twice",
    "caption_digits": "guard: captions with a digit, as coordinates have",
    "mask_whole": f"guard: masks of more than {WHOLE:.0%} of the image",
    "no_seg": "guard: true captions answered without [SEG]",
}
SCORES = ("cycle_iou", "cycle_meteor")  # whose mean decides which checkpoint is the best
PARTS = {
    "seg_ciou": ("seg_intersection", "seg_union"),
    "seg_p50": ("seg_iou",),
}  # measures behind a metric of another name


@dataclass
class Measured:
    """What was measured of n samples."""

    values: dict[str, torch.Tensor]  # {measure: (n,) float64}; see `measure`
    image_ids: list[str]
    references: list[str]  # true captions
    captions: list[str]  # of the regions
    num_damaged: (
        int  # samples that did not decode or fit and in whose place another one was measured
    )


def evaluate(
    policy: Policy, dataset, batch_size: int, max_new_tokens: int, num_workers: int, ranks: Ranks
) -> Measured:
    """Per-sample measures of a held-out dataset by the weights in use, of all ranks together, in the dataset's order."""
    found = evaluate_roles(
        policy,
        lambda role: nullcontext(),
        ("policy",),
        dataset,
        batch_size,
        max_new_tokens,
        num_workers,
        ranks,
    )
    return found["policy"]


@torch.no_grad()
def evaluate_roles(
    policy: Policy,
    use,
    roles: tuple[str, ...],
    dataset,
    batch_size: int,
    max_new_tokens: int,
    num_workers: int,
    ranks: Ranks,
) -> dict[str, Measured]:
    """{role: what `evaluate` returns} for several roles; images are read and encoded once for all of them.

    Args:
        use: `Roles.use`.
    """
    loader = eval_loader(
        dataset, policy.inputs, batch_size, num_workers, ranks.rank, ranks.world_size
    )
    found = {role: [] for role in roles}
    for batch in tqdm(loader, desc="evaluation", leave=False, disable=not ranks.is_main):
        images = policy.encode_images(
            batch.inputs.pixel_values, batch.inputs.sam_pixels, batch.sizes
        )
        for role in roles:
            with use(role):
                found[role].append(measure(policy, batch, images, max_new_tokens))
    policy.join()
    return {role: _merged(gather_objects(columns), len(dataset)) for role, columns in found.items()}


def measure(policy: Policy, batch, images, max_new_tokens: int) -> dict[str, list]:
    """{column: B values} of one batch: the measures, and the strings and index that `Measured` is made of.

    An answer without [SEG] is an empty mask, and an empty caption finds nothing, as in training.
    """
    targets = [mask.to(policy.device) for mask in batch.masks]
    rows = list(range(len(batch)))
    captions = describe(policy, batch, images, rows, targets, max_new_tokens)
    cycle = mask_iou(
        answer(policy, batch, images, rows, captions, max_new_tokens).masks, targets, 1.0
    ).cpu()
    direct = answer(policy, batch, images, rows, batch.captions, max_new_tokens)
    replies = describe(policy, batch, images, rows, direct.masks, max_new_tokens)
    with_seg = set(direct.seg_rows.tolist())
    return dict(
        cycle_iou=(cycle * torch.tensor([bool(phrase(text)) for text in captions])).tolist(),
        cycle_meteor=meteor(batch.captions, replies).tolist(),
        seg_iou=mask_iou(direct.masks, targets, 1.0).tolist(),
        seg_intersection=[
            (mask & target).sum().item() for mask, target in zip(direct.masks, targets)
        ],
        seg_union=[(mask | target).sum().item() for mask, target in zip(direct.masks, targets)],
        caption_meteor=meteor(batch.captions, captions).tolist(),
        caption_words=[len(tokenize(text)) for text in captions],
        caption_repeats=[repeats(text) for text in captions],
        caption_digits=[has_digit(text) for text in captions],
        mask_whole=[is_whole(mask) for mask in direct.masks],
        no_seg=[row not in with_seg for row in rows],
        image_id=batch.image_ids,
        reference=batch.captions,
        caption=captions,
        index=batch.index,
    )


def _merged(columns_of_rank: list[list[dict]], num_samples: int) -> Measured:
    """One Measured of all ranks' batches; rank r of R measured samples r, r + R, .."""
    merged = {}
    for rank, batches in enumerate(columns_of_rank):
        for name in batches[0] if batches else ():
            column = merged.setdefault(name, [None] * num_samples)
            column[rank :: len(columns_of_rank)] = [
                value for batch in batches for value in batch[name]
            ]
    image_ids, references, captions, index = (
        merged.pop(name) for name in ("image_id", "reference", "caption", "index")
    )
    return Measured(
        {name: torch.tensor(column, dtype=torch.float64) for name, column in merged.items()},
        image_ids,
        references,
        captions,
        sum(i != place for place, i in enumerate(index)),
    )


def cider(references: list[str], captions: list[str]) -> torch.Tensor:
    """(n,) float64 CIDEr-D of each caption against its one reference, with document frequencies of these n references.

    By pycocoevalcap (extra "eval"), on the words of `rewards.meteor.tokenize`: lower case, without punctuation. Published numbers
    are of the PTB tokenizer, which needs Java, and of several references for a sample.
    """
    from pycocoevalcap.cider.cider import Cider

    words = [
        {i: [" ".join(tokenize(text))] for i, text in enumerate(texts)}
        for texts in (references, captions)
    ]
    return torch.from_numpy(np.asarray(Cider().compute_score(*words)[1], dtype=np.float64))


# Statistics


def rows_of(values: dict[str, torch.Tensor], metric: str) -> torch.Tensor:
    """What a metric is computed from: (n,) values whose mean it is, or (n, 2) intersections and unions."""
    parts = [values[name] for name in PARTS.get(metric, (metric,))]
    return (
        (parts[0] >= 0.5).double()
        if metric == "seg_p50"
        else parts[0]
        if len(parts) == 1
        else torch.stack(parts, 1)
    )


def statistic(rows) -> float:
    """The mean of (n,) values; of (n, 2) intersections and unions the ratio of their sums."""
    return float(rows.mean() if rows.ndim == 1 else rows[:, 0].sum() / rows[:, 1].sum())


def means(values: dict[str, torch.Tensor]) -> dict[str, float]:
    """{metric: its value over all samples}, of the METRICS whose measures are there."""
    return {
        metric: statistic(rows_of(values, metric))
        for metric in METRICS
        if set(PARTS.get(metric, (metric,))) <= set(values)
    }


def bootstrap(
    values: torch.Tensor, num_resamples: int = 2000, seed: int = 0, statistic=statistic
) -> tuple[float, float]:
    """(low, high) of the 95 % percentile interval of `statistic` when the n rows of `values` are drawn anew with replacement.

    Rows count as independent; where many share an image, the interval is too narrow.
    """
    rng, values = np.random.default_rng(seed), np.asarray(values, dtype=np.float64)
    drawn = [
        statistic(values[rng.integers(len(values), size=len(values))]) for _ in range(num_resamples)
    ]
    low, high = np.percentile(drawn, (2.5, 97.5))
    return float(low), float(high)


def paired_difference(before: torch.Tensor, after: torch.Tensor) -> tuple[float, float, float]:
    """(after - before, low, high): the difference of a metric on the same samples with its 95 % interval.

    Args:
        before, after: `rows_of` the metric.
    """

    def difference(pairs):
        return statistic(pairs[..., 1]) - statistic(pairs[..., 0])

    pairs = torch.stack([before, after], dim=-1)
    return (difference(pairs), *bootstrap(pairs, statistic=difference))


def record(measured: Measured, flags: dict) -> dict:
    """All that was measured, with means and intervals, as JSON can hold it and `tools.evaluate --before` reads it."""
    summary = means(measured.values)
    return dict(
        flags=flags,
        num_samples=len(measured.image_ids),
        num_damaged=measured.num_damaged,
        means=summary,
        intervals={metric: bootstrap(rows_of(measured.values, metric)) for metric in summary},
        values={name: values.tolist() for name, values in measured.values.items()},
        image_ids=measured.image_ids,
        references=measured.references,
        captions=measured.captions,
    )


def before_after_table(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> str:
    """Metrics before and after, and the paired difference with its 95 % interval, as text."""
    lines = [
        f"{'held out, n = ' + str(len(after['cycle_iou'])):20s} {'before':>8s} {'after':>8s} {'change':>8s}   95 % interval"
    ]
    ends = means(after)
    for metric, start in means(before).items():
        if metric in ends:
            change, low, high = paired_difference(rows_of(before, metric), rows_of(after, metric))
            lines.append(
                f"{metric:20s} {start:8.4f} {ends[metric]:8.4f} {change:+8.4f}   [{low:+.4f}, {high:+.4f}]"
            )
    return "\n".join(lines)
