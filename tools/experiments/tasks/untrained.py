"""Measure what untrained changes of a comparison's base gain on the same held-out samples.

`tools.experiments.tasks` runs it once for each comparison; README.md beside this file has the
figures. Each change is chosen on training samples with their labels, which favours it, by the
metric that is reported. Letters: n samples, G sampled answers of each.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from torch.utils.data import Subset
from tqdm import tqdm

from rl_train.config.flags import AT_LEAST_2
from rl_train.data.registry import opener_of
from rl_train.distributed.process_group import RankInfo
from rl_train.evaluation.best_of_n import mean_logps
from rl_train.evaluation.gcg_metrics import caption_of, grounded_prompts, phrases_of
from rl_train.export.load_policy import open_policy
from rl_train.policies.sa2va import Sa2VAPolicy
from rl_train.policies.sa2va_queries import describe
from rl_train.rewards import mask_iou, meteor
from rl_train.rewards.ablations import group_iou
from rl_train.rewards.iou import mask_confidence, on_target
from rl_train.rewards.meteor import tokenize
from rl_train.rewards.objects import match
from rl_train.tasks.base import TaskContext
from rl_train.tasks.grounded_captioning import GroundedCaptioning
from rl_train.tasks.mask_answers import MaskAnswers
from rl_train.tasks.referring import Referring
from rl_train.utils.command_line import FlagParser, run_program
from rl_train.utils.io import check_writable
from sa2va_hf.processing_sa2va import upsample_masks
from sa2va_hf.prompts import SEGMENT, THINK_FIRST
from tools.experiments.common import add_region_flags, open_regions, run_alone
from tools.experiments.gauntlet import loop1
from tools.experiments.gauntlet.loop2 import OneModel, cheap_scores, pointed, sampled
from tools.experiments.gauntlet.masks import (
    QUANTILES,
    UNCHANGED,
    Answered,
    Variant,
    answers_to,
    choose_variants,
    highest_part,
    measure_variants,
    own_answers,
    variants_of,
)
from tools.experiments.gauntlet.regions import Regions
from tools.experiments.gauntlet.samples import (
    Scores,
    choose_direction,
    join_batches,
    measures_of_picked,
)
from tools.experiments.gauntlet.table import Measures, Rival
from tools.experiments.gauntlet.words import (
    TableSearch,
    mistakes,
    rewordings,
    substitute,
    table_candidates,
)
from tools.experiments.scalar_baseline import GRIDS
from tools.experiments.tasks.arms import COMPARISONS

NONE_QUANTILES = tuple(tenth / 10 for tenth in range(1, 10))  # of a score of training masks
THRESHOLDS = GRIDS["threshold"][0]


def best_of_samples(
    training: Scores, heldout: Scores, true: str, measures: list[str]
) -> list[Rival]:
    """Return a rival for each cheap score: the best of G samples by it.

    Args:
        true: name of the true reward, by which the direction is chosen on training samples; the
            best by it is the last of the rivals, and not cheap.
        measures: names of what is measured, so of no cheap score.
    """
    rivals = []
    for name in training:
        if name in (true, *measures):
            continue
        pick = choose_direction(name, training[name], training[true])
        values = measures_of_picked(heldout, pick.preference(heldout[name]), measures)
        rivals.append(Rival(f"best of G by {name}", pick.direction, "greedy", values))
    values = measures_of_picked(heldout, heldout[true], measures)
    ceiling = Rival("best of G by the true reward", "largest", "greedy", values, cheap=False)
    return [*rivals, ceiling]


# Masks of phrases


def highest_logit(logits: torch.Tensor) -> float:
    return logits.max().item()


def confidence(logits: torch.Tensor) -> float:
    # -inf, of an answer without [SEG], would make NaN.
    return mask_confidence(logits[None].clamp(min=-100)).item()


def area(logits: torch.Tensor) -> float:
    return (logits > 0).float().mean().item()


MASK_SCORES = {"highest logit": highest_logit, "confidence": confidence, "area": area}


def none_below(score: Callable[[torch.Tensor], float], least: float, threshold: float) -> Variant:
    """Return the variant without a mask where a score of its logits is below `least`."""

    def shifted(logits: torch.Tensor) -> torch.Tensor:
        is_sure = score(logits) >= least
        return logits - threshold if is_sure else torch.full_like(logits, -torch.inf)

    return lambda answered: [shifted(logits) for logits in answered.logits]


def none_variants(training: Regions) -> dict[str, dict[str, Variant]]:
    """Return {cause: {what is chosen: variant}} that answer some phrases with no mask."""
    logits = [
        logits
        for part in range(len(training.parts))
        for logits in own_answers(training, part).logits
    ]
    causes = {"no mask at all": {"": none_below(highest_logit, torch.inf, 0.0)}}
    for name, score in MASK_SCORES.items():
        scores = torch.tensor([score(each) for each in logits], dtype=torch.float64)
        leasts = {q: scores.quantile(q).item() for q in NONE_QUANTILES}
        causes[f"no mask below a {name}"] = {
            f"{least:.4g}": none_below(score, least, 0.0) for least in leasts.values()
        }
        causes[f"no mask below a {name}, and a threshold"] = {
            f"{least:.4g}, {threshold:g}": none_below(score, least, threshold)
            for least in leasts.values()
            for threshold in THRESHOLDS
        }
    return causes


def without_thoughts(answered: Answered) -> list[torch.Tensor]:
    """Return the logits of the question that does not ask for thoughts."""
    return answers_to(answered.regions, answered.part, answered.captions, SEGMENT).logits


def sampled_masks(regions: Regions, task: MaskAnswers, num_generations: int) -> Scores:
    """Return measures and cheap scores of G sampled masks of each phrase."""
    parts = []
    for batch, features in tqdm(regions.parts, desc="sampled masks", leave=False, disable=None):
        rollout = sampled(task, batch, features, num_generations)
        masks, device = rollout.latents.masks, regions.policy.device
        targets = rollout.repeat_for_rows([mask.to(device) for mask in batch.masks])
        measures = dict(iou=mask_iou(masks, targets, 1.0).cpu())
        measures["pointed"] = pointed(regions, rollout, features)
        if batch.distractors is not None:
            measures["found"] = on_target(masks, batch.masks, batch.distractors)
        rows = rollout.repeat_for_rows(list(range(len(batch))))
        replies = describe(regions.policy, features, rows, masks, regions.tokens)
        of_replies = meteor(rollout.repeat_for_rows(batch.captions), replies)
        measures |= {"METEOR of the mask's caption, loop 2's reward": of_replies}
        parts.append(measures | cheap_scores(regions, rollout, features))
    regions.check()
    return join_batches(parts, num_generations)


def of_masks(
    name: str, training: Regions, open_heldout: Callable[[], Regions], num_generations: int
) -> tuple[Measures, list[Rival]]:
    """Return measures of the base's own masks, and the rivals of `referring`."""
    thinks = training.wording == THINK_FIRST
    task = Referring(
        Referring.Options(mask_loss_coef=0.0, think=thinks),
        TaskContext(training.policy, OneModel(), training.tokens),
    )
    task.action.calibrate([batch for batch, _ in training.parts], training.tokens)
    causes = variants_of(training)
    if name == "several":
        causes |= none_variants(training)
    if thinks:
        causes["asked without thoughts"] = {"": without_thoughts}
    variants = {f"{cause}: {k}": v for cause, of in causes.items() for k, v in of.items()}
    names = {cause: [f"{cause}: {k}" for k in of] for cause, of in causes.items()}
    best = choose_variants(measure_variants(training, variants), names)
    training_scores = sampled_masks(training, task, num_generations)
    table = phrase_table(training) if name == "referring" else None

    heldout = open_heldout()
    measured = measure_variants(heldout, {of: variants[of] for of in best.values()})
    greedy = measured[UNCHANGED]
    rivals = [
        Rival(cause, of.partition(": ")[2], "greedy", measured[of]) for cause, of in best.items()
    ]
    if table is not None:
        texts = [substitute(text, table) for text in heldout.references]
        heard = loop1.measures_of(heldout.listen(list(enumerate(texts))))
        rivals.append(Rival("table of words in the phrase", table, "greedy", heard))
    scores = sampled_masks(heldout, task, num_generations)
    return greedy, rivals + best_of_samples(training_scores, scores, "iou", list(greedy))


def phrase_table(training: Regions) -> dict[str, str]:
    """Return the best table of words to replace in the phrases that the base is asked for."""
    # The base asked in the words that it says itself.
    counts = mistakes(training.references, training.greedy_captions(), with_neighbours=True)
    search = TableSearch(
        training.references, lambda queries: [each.iou for each in training.listen(queries)]
    )
    return search.greedy(table_candidates(counts))


# Captions of regions


def sampled_caption_scores(regions: Regions, num_generations: int) -> Scores:
    """Return METEOR and cheap scores of G sampled captions of each region."""
    groups, _ = regions.sampled_captions(num_generations)
    references = [text for text in regions.references for _ in range(num_generations)]
    values = meteor(references, [text for group in groups for text in group])
    scores = loop1.sample_scores(regions, num_generations)
    scores["cycle IoU, loop 1's reward"] = scores.pop("iou")
    del scores["found"]
    return scores | dict(meteor=values.double().view(-1, num_generations))


def of_captions(
    name: str, training: Regions, open_heldout: Callable[[], Regions], num_generations: int
) -> tuple[Measures, list[Rival]]:
    """Return METEOR of the base's own captions, and the rivals of `captioning`."""

    def rewards(queries: list[tuple[int, str]]) -> list[float]:
        texts = [text for _, text in queries]
        return meteor([training.references[row] for row, _ in queries], texts).tolist()

    chosen = rewordings(training.greedy_captions(), training.references, training.masks, rewards)
    training_scores = sampled_caption_scores(training, num_generations)

    heldout = open_heldout()
    captions, rivals = heldout.greedy_captions(), []
    for rewording in chosen:
        texts = [rewording.caption(*pair) for pair in zip(captions, heldout.masks)]
        values = dict(meteor=meteor(heldout.references, texts).tolist())
        rivals.append(Rival(rewording.name, rewording.chosen, "greedy", values))
    scores = sampled_caption_scores(heldout, num_generations)
    greedy = dict(meteor=meteor(heldout.references, captions).tolist())
    return greedy, rivals + best_of_samples(training_scores, scores, "meteor", ["meteor"])


# Grounded captions


class GroundedAnswers:
    """The base's own grounded captions of n images."""

    @torch.no_grad()
    def __init__(self, regions: Regions):
        self.references, self.texts = regions.references, []
        self.logits: list[list[torch.Tensor]] = []  # n of M (H, W)
        self.targets: list[torch.Tensor] = []  # n (K, H, W) bool
        policy = regions.policy
        for batch, features in tqdm(regions.parts, desc="answers", leave=False, disable=None):
            prompts = grounded_prompts(policy, features)
            completions, texts = policy.complete(features, prompts, 1, regions.tokens)
            seg_rows, embeddings = policy.mask_embeddings(completions)
            logits = [[] for _ in texts]
            rows = seg_rows.tolist()
            for row, low in zip(rows, policy.decode_masks(features, rows, embeddings)):
                size = features.sizes[row]
                logits[row].append(upsample_masks(low[None], policy.processor.sam_size, size)[0])
            self.texts += texts
            self.logits += logits
            self.targets += [masks.to(policy.device) for masks in batch.regions]
        regions.check()

    def captions(self) -> list[str]:
        return [caption_of(text) for text in self.texts]

    def meteor(self, captions: list[str]) -> list[float]:
        return meteor(self.references, captions).tolist()

    def matched(self, mask: Callable[[torch.Tensor], torch.Tensor]) -> list[float]:
        """Return the matched IoU of each answer, its masks made of their logits by `mask`."""
        return [
            matched_reward([mask(each) for each in own], true)
            for own, true in zip(self.logits, self.targets)
        ]

    def once(self) -> Measures:
        """Return the measures if an answer says each phrase once, with its first mask."""
        rewards, captions = [], []
        for text, own, true in zip(self.texts, self.logits, self.targets):
            phrases = phrases_of(text)
            first = list(dict.fromkeys(phrases))
            if len(phrases) == len(own):
                own = [own[phrases.index(each)] for each in first]
            rewards.append(matched_reward([logits > 0 for logits in own], true))
            captions.append(" and ".join(first) or caption_of(text))
        return dict(matched=rewards, meteor=self.meteor(captions))


def matched_reward(masks: list[torch.Tensor], true: torch.Tensor) -> float:
    """Return the matched IoU of masks (H, W) with true ones (K, H, W)."""
    return match(torch.stack(masks) if masks else true[:0], true).reward


def grounded_scores(regions: Regions, task: GroundedCaptioning, num_generations: int) -> Scores:
    """Return measures and cheap scores of G sampled grounded captions of each image."""
    G, parts = num_generations, []
    for batch, features in tqdm(regions.parts, desc="sampled answers", leave=False, disable=None):
        rollout = sampled(task, batch, features, G)
        rewards, masks = task.rewards(rollout).rewards, rollout.latents.masks
        captions = [caption_of(text) for text in rollout.texts]
        columns = dict(
            matched=rewards["matched"],
            meteor=rewards["meteor"],
            confidence=torch.tensor(rollout.latents.confidence),
            area=torch.tensor([mask.float().mean().item() for mask in masks]),
            majority=group_iou(masks, G),
            words=torch.tensor([float(len(tokenize(text))) for text in captions]),
            phrases=torch.tensor([float(len(set(phrases_of(text)))) for text in rollout.texts]),
        )
        parts.append(columns | {"own likelihood": mean_logps(rollout, G).flatten()})
    regions.check()
    return join_batches(parts, G)


def of_grounded(
    name: str, training: Regions, open_heldout: Callable[[], Regions], num_generations: int
) -> tuple[Measures, list[Rival]]:
    """Return measures of the base's own grounded captions, and the rivals of the task."""
    answers = GroundedAnswers(training)
    captions = answers.captions()

    def rewards(queries: list[tuple[int, str]]) -> list[float]:
        texts = [text for _, text in queries]
        return meteor([answers.references[row] for row, _ in queries], texts).tolist()

    chosen = rewordings(captions, answers.references, training.masks, rewards)
    best_threshold = max(
        THRESHOLDS, key=lambda value: sum(answers.matched(lambda logits: logits > value))
    )
    areas = torch.tensor([m.float().mean().item() for each in answers.targets for m in each])
    fractions = [areas.quantile(q).item() for q in QUANTILES]
    best_area = max(
        fractions, key=lambda value: sum(answers.matched(lambda x: highest_part(x, value)))
    )
    options = GroundedCaptioning.Options(mask_loss_coef=0.0)
    task = GroundedCaptioning(options, TaskContext(training.policy, OneModel(), training.tokens))
    task.action.calibrate([batch for batch, _ in training.parts], training.tokens)
    training_scores = grounded_scores(training, task, num_generations)

    heldout = open_heldout()
    answers = GroundedAnswers(heldout)
    captions = answers.captions()
    greedy = dict(
        matched=answers.matched(lambda logits: logits > 0), meteor=answers.meteor(captions)
    )

    def masks(cause: str, value: float, mask: Callable[[torch.Tensor], torch.Tensor]) -> Rival:
        return Rival(cause, value, "greedy", greedy | dict(matched=answers.matched(mask)))

    rivals = [
        masks("threshold of the mask", best_threshold, lambda x: x > best_threshold),
        masks("one area for all", best_area, lambda x: highest_part(x, best_area)),
        Rival("each phrase once", "", "greedy", answers.once()),
    ]
    for rewording in chosen:
        texts = [rewording.caption(*pair) for pair in zip(captions, heldout.masks)]
        values = greedy | dict(meteor=answers.meteor(texts))
        rivals.append(Rival(rewording.name, rewording.chosen, "greedy", values))
    scores = grounded_scores(heldout, task, num_generations)
    return greedy, rivals + best_of_samples(training_scores, scores, "matched", list(greedy))


KINDS = dict(
    referring=of_masks,
    several=of_masks,
    thinking=of_masks,
    captioning=of_captions,
    grounded=of_grounded,
)


def build_parser() -> FlagParser:
    parser = FlagParser(prog="python -m tools.experiments.tasks.untrained", description=__doc__)
    add = parser.add_argument
    add("--comparison", required=True, choices=list(KINDS))
    add("--model_path", required=True, type=Path, help="the comparison's base")
    add("--output", required=True, type=Path, help="JSON file")
    add("--num_generations", type=AT_LEAST_2, default=8, help="G, samples of each")
    add_region_flags(parser)
    return parser


@torch.no_grad()
def run(args: argparse.Namespace, ranks: RankInfo):
    check_writable("--output", args.output)
    name = args.comparison
    distractors = "--distractors" in COMPARISONS[name].flags
    wording = THINK_FIRST if name == "thinking" else SEGMENT
    chosen_on, heldout = open_regions(args, opener_of(args.dataset, ()))
    policy: Sa2VAPolicy = open_policy(
        args.model_path, None, "policy", ranks.device, args.max_completion_length, dtype=args.dtype
    )

    def opened(dataset: Subset) -> Regions:
        return Regions(
            policy,
            dataset,
            args.max_completion_length,
            args.max_prompt_length,
            args.batch_size,
            args.num_workers,
            distractors,
            wording,
        )

    training, opened_heldout = opened(chosen_on), []

    def open_heldout() -> Regions:
        opened_heldout.append(opened(heldout))
        return opened_heldout[0]

    greedy, rivals = KINDS[name](name, training, open_heldout, args.num_generations)
    record = dict(
        references=opened_heldout[0].references,
        greedy=greedy,
        rivals=[asdict(rival) for rival in rivals],
    )
    args.output.parent.mkdir(parents=True, exist_ok=True)
    unfinished = args.output.with_suffix(".part")
    unfinished.write_text(json.dumps(record, indent=1, default=str) + "\n")
    unfinished.rename(args.output)


def main(argv: list[str] | None = None):
    run_alone(build_parser(), run, argv)


if __name__ == "__main__":
    run_program(main)
