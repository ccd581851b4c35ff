"""Cheap causes of loop 2 that change a mask alike for all regions, whatever the phrase means.

A threshold, a scale of the prompt embedding, one area for all, the half of the image that the
phrase names by its position, and the mask of a phrase that names nothing ("the most salient
object").
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from tqdm import tqdm

from rl_train.data.text import phrase
from rl_train.policies.sa2va_queries import segment_by_own_answer
from rl_train.rewards import mask_iou
from rl_train.rewards.ablations import SALIENT
from rl_train.rewards.iou import on_target
from rl_train.rewards.positions import named_part
from sa2va_hf.prompts import SEGMENT
from tools.experiments.gauntlet.regions import Regions
from tools.experiments.gauntlet.table import Measures
from tools.experiments.scalar_baseline import GRIDS, row_logits

UNCHANGED = "unchanged"
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)  # of the areas of true training regions
BONUSES = (2.0, 3.0, 4.0, 5.0, 8.0)  # logits, inside the named part against outside
PEAK = "peak of the mask in the part that a phrase names"
BELOW_HIGHEST = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)  # logits, thresholds inside the named part
SALIENT_PHRASES = (SALIENT, "the object", "the largest object")
MAX_FREQUENT = 4  # phrases of the data that are tried for all regions


@dataclass
class Answered:
    """The base's own answers to the true captions of a batch of B regions."""

    regions: Regions
    part: int  # of the regions, whose batch it is
    seg_rows: list[int]  # rows of the M [SEG]
    embeddings: torch.Tensor  # (M, D)
    logits: list[torch.Tensor]  # B (H, W), -inf without [SEG]; the mask is where they are above 0

    @property
    def captions(self) -> list[str]:
        return self.regions.parts[self.part][0].captions


Variant = Callable[[Answered], list[torch.Tensor]]  # B logits (H, W) in place of the base's


def threshold(value: float) -> Variant:
    return lambda answered: [logits - value for logits in answered.logits]


def scale(value: float) -> Variant:
    def scaled(answered: Answered) -> list[torch.Tensor]:
        policy, (_, features) = answered.regions.policy, answered.regions.parts[answered.part]
        return row_logits(policy, features, answered.seg_rows, value * answered.embeddings)

    return scaled


def one_area(fraction: float) -> Variant:
    """Return the variant whose masks are the highest logits of a fraction of the image."""

    def shifted(logits: torch.Tensor) -> torch.Tensor:
        lowest = lowest_of_highest(logits, fraction)
        # The next smaller number, so that the lowest one is above 0 too.
        below = torch.nextafter(lowest, torch.full_like(lowest, -torch.inf))
        return logits - below if lowest.isfinite() else logits

    return lambda answered: [shifted(logits) for logits in answered.logits]


def highest_part(logits: torch.Tensor, fraction: float) -> torch.Tensor:
    """Return the mask (H, W) of the highest of logits (H, W), a fraction of the image.

    It is larger where logits are equal.
    """
    return (logits >= lowest_of_highest(logits, fraction)) & logits.isfinite()


def lowest_of_highest(logits: torch.Tensor, fraction: float) -> torch.Tensor:
    """Return the lowest () of the highest logits (H, W), a fraction of the image."""
    count = max(round(fraction * logits.numel()), 1)
    return logits.flatten().topk(count).values[-1]


def in_named_part(bonus: float) -> Variant:
    """Return the variant that favours the part that the phrase names; inf: nothing else."""

    def favoured(logits: torch.Tensor, caption: str) -> torch.Tensor:
        part = named_part(caption, tuple(logits.shape))
        if part is None:
            return logits
        part = part.to(logits.device)
        if bonus == torch.inf:
            return logits.masked_fill(~part, -torch.inf)
        return torch.where(part, logits + bonus, logits - bonus)

    return lambda answered: [
        favoured(logits, caption) for logits, caption in zip(answered.logits, answered.captions)
    ]


def peak_in_named_part(below: float) -> Variant:
    """Return the variant that takes a mask's peak inside the part that the phrase names.

    All logits there that are above 0, or less than `below` under the highest of them.
    """

    def peak(logits: torch.Tensor, caption: str) -> torch.Tensor:
        part = named_part(caption, tuple(logits.shape))
        part = torch.ones_like(logits, dtype=torch.bool) if part is None else part
        inside = logits.masked_fill(~part.to(logits.device), -torch.inf)
        highest = inside.max().item()
        return inside - min(0.0, highest - below) if highest > -torch.inf else inside

    return lambda answered: [
        peak(logits, caption) for logits, caption in zip(answered.logits, answered.captions)
    ]


def one_phrase(text: str) -> Variant:
    def of_phrase(answered: Answered) -> list[torch.Tensor]:
        texts = [text] * len(answered.captions)
        return answers_to(answered.regions, answered.part, texts, SEGMENT).logits

    return of_phrase


def variants_of(training: Regions) -> dict[str, dict[str, Variant]]:
    """Return {cause: {what is chosen: variant}}, made of the training regions alone."""
    areas = torch.tensor([mask.float().mean().item() for mask in training.masks])
    quantiles = {q: areas.quantile(q).item() for q in QUANTILES}
    frequent = [text for text, _ in Counter(map(phrase, training.references)).most_common()]
    phrases = [*SALIENT_PHRASES, *frequent[:MAX_FREQUENT]]
    bonuses = {**{f"bonus {bonus:g}": bonus for bonus in BONUSES}, "cut": torch.inf}
    return {
        "threshold of the mask": {
            f"{value:g}": threshold(value) for value in GRIDS["threshold"][0]
        },
        "scale of the prompt": {f"{value:g}": scale(value) for value in GRIDS["scale"][0]},
        "one area for all": {
            f"{area:.4f} of the image": one_area(area) for area in quantiles.values()
        },
        "part named in the phrase": {name: in_named_part(bonus) for name, bonus in bonuses.items()},
        PEAK: {f"{b:g}": peak_in_named_part(b) for b in BELOW_HIGHEST},
        "most salient object": {text: one_phrase(text) for text in dict.fromkeys(phrases)},
    }


def own_answers(regions: Regions, part: int) -> Answered:
    """Return the base's greedy answers to the captions of a part of the regions."""
    return answers_to(regions, part, regions.parts[part][0].captions, regions.wording)


@torch.no_grad()
def answers_to(regions: Regions, part: int, texts: list[str], wording: str) -> Answered:
    """Return the base's greedy answers to a phrase for each region of a part."""
    policy, (_, features) = regions.policy, regions.parts[part]
    _, seg_rows, embeddings = segment_by_own_answer(
        policy, features, range(len(texts)), texts, regions.tokens, wording
    )
    rows = seg_rows.tolist()
    return Answered(regions, part, rows, embeddings, row_logits(policy, features, rows, embeddings))


def points_at(logits: torch.Tensor, target: torch.Tensor) -> float:
    """Return 1 if the highest of logits (H, W) lies on the target (H, W) bool, else 0.

    The "pointing game" of Zhang et al. (https://arxiv.org/abs/1608.00507): no threshold, and no
    area of the mask, changes it. 0 without [SEG]. An empty target is pointed at by an empty mask.
    """
    if not target.any():
        return float(not (logits > 0).any())
    highest = logits.argmax()
    return float(logits.flatten()[highest].isfinite() and target.flatten()[highest])


@torch.no_grad()
def measure_variants(regions: Regions, variants: dict[str, Variant]) -> dict[str, Measures]:
    """Return {variant: its measures on all regions}, with the base's own masks as UNCHANGED.

    Measures are "iou", 1 where mask and region are empty, "pointed" (`points_at`), and "found" if
    other objects are known.
    """
    measured = {name: defaultdict(list) for name in (UNCHANGED, *variants)}
    for part, (batch, _) in enumerate(tqdm(regions.parts, desc="masks", leave=False, disable=None)):
        answered = own_answers(regions, part)
        targets = [mask.to(regions.policy.device) for mask in batch.masks]
        for name, values in measured.items():
            logits = answered.logits if name == UNCHANGED else variants[name](answered)
            masks = [each > 0 for each in logits]
            values["iou"] += mask_iou(masks, targets, 1.0).tolist()
            values["pointed"] += [points_at(*pair) for pair in zip(logits, targets)]
            if batch.distractors is not None:
                values["found"] += on_target(masks, batch.masks, batch.distractors).tolist()
    regions.check()
    return {name: dict(values) for name, values in measured.items()}


def choose_variants(
    measured: dict[str, Measures], names: dict[str, Sequence[str]], measure: str = "iou"
) -> dict[str, str]:
    """Return {cause: the variant whose mean of a measure is highest} of {cause: variants}."""
    return {
        cause: max(variants, key=lambda name: sum(measured[name][measure]))
        for cause, variants in names.items()
    }
