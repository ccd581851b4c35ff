"""Print what cheap causes gain on a demo's base without training, beside what a run gained.

    python -m tools.demo.rivals --run outputs/demo_run

The causes are of `tools.experiments.gauntlet`: for loop 1 tables of words and sampled captions
picked by a cheap score of their mask or of themselves; for loop 2 one threshold, one area, the part
around a mask's peak, and sampled masks picked by area or by SAM2's confidence; for points all. They
are chosen on training regions and measured on the run's own held-out ones. All gains are counted
from the base's greedy answers. Where one of them gains as much as the run, the run shows that the
loop works, not that the model learnt to see.

Letters: n held-out regions, G samples of each.
"""

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import Subset

from rl_train.config.flags import read_flags
from rl_train.data import DATASETS
from rl_train.data.split import sample_regions, split_dataset
from rl_train.distributed import process_group
from rl_train.distributed.process_group import print0
from rl_train.evaluation.best_of_n import pick_best
from rl_train.evaluation.bootstrap import paired_difference
from rl_train.export.load_policy import open_policy
from rl_train.policies.qwen_vl import QwenVLPolicy
from rl_train.rewards import mask_iou
from rl_train.tasks.base import TaskContext
from rl_train.tasks.caption_mask_caption import CaptionMaskCaption
from rl_train.tasks.point_segmentation import PointSegmentation
from rl_train.utils.command_line import FlagParser, run_program
from rl_train.utils.io import read_json
from tools.experiments.gauntlet import loop1, loop2, masks, points, words
from tools.experiments.gauntlet.regions import Regions
from tools.experiments.gauntlet.samples import choose_direction
from tools.experiments.gauntlet.table import Rival
from tools.experiments.sweep_table import evaluations

NUM_REGIONS = 96  # of the training data, to choose on
G = 8
NUM_SHOWN = 3  # strongest causes of a metric
CAPTION_SCORES = ("area", "confidence", "own likelihood", "majority")
MASK_SCORES = ("area", "confidence")
VARIANTS = ("threshold of the mask", "one area for all", masks.PEAK)  # of `masks.variants_of`
TITLES = {"cycle_iou": "cycle IoU", "seg_iou": "IoU of a true caption's mask"}
LEARNT = """What this shows: more than these causes give, in {}. Not among them are cheap rewards,
trained on, and more supervised steps on the base's data (docs/results.md, docs/points.md)."""
WORKS = "What this shows: the loop working, not learning, as a cheap cause gains as much."
SHOWS_NOTHING = "What this shows: nothing yet, no metric is shown to rise."
FILE = "rivals.txt"  # in the run's folder


@dataclass(frozen=True)
class Gain:
    """A gain on n held-out regions, and what it is counted from."""

    name: str
    before: torch.Tensor  # (n,)
    after: torch.Tensor  # (n,)

    def change(self) -> float:
        return (self.after - self.before).mean().item()

    def line(self) -> str:
        change, low, high = paired_difference(self.before, self.after)
        numbers = f"{self.before.mean():7.4f} {self.after.mean():7.4f} {change:+8.4f}"
        return f"  {self.name:52s} {numbers}   [{low:+.4f}, {high:+.4f}]"

    def is_gain(self) -> bool:
        """Return whether the mean change is above 0 by its 95 % interval."""
        return paired_difference(self.before, self.after)[1] > 0

    def exceeds(self, other: "Gain") -> bool:
        """Return whether this gain is larger, by a paired 95 % interval above 0."""
        own, rival = self.after - self.before, other.after - other.before
        return paired_difference(rival, own)[1] > 0


def gain(name: str, before: list[float], after: list[float]) -> Gain:
    return Gain(name, *(torch.tensor(v, dtype=torch.float64) for v in (before, after)))


def picked(
    scores: dict[str, torch.Tensor],
    heldout_scores: dict[str, torch.Tensor],
    names: tuple[str, ...],
    greedy: list[float],
) -> list[Gain]:
    """Return what the best of G samples by each of these scores gains in IoU on greedy answers.

    Args:
        scores, heldout_scores: {score: (n, G)} of samples, with "iou" among them; the direction of
            a score is chosen on the first.
    """
    gains = []
    for name in names:
        pick = choose_direction(name, scores[name], scores["iou"])
        after = pick_best(heldout_scores["iou"], pick.preference(heldout_scores[name]))
        gains.append(gain(f"best of {G} by {name} ({pick.direction})", greedy, after))
    return gains


def changed_captions(training: Regions, heldout: Regions) -> list[Gain]:
    """Return what tables of words and picks by cheap scores gain in cycle IoU."""
    heard = heldout.listen(list(enumerate(heldout.greedy_captions())))
    scores, heldout_scores = (loop1.sample_scores(regions, G) for regions in (training, heldout))
    picks = picked(scores, heldout_scores, CAPTION_SCORES, [each.iou for each in heard])
    return table_of_words(training, heldout) + picks


def table_of_words(training: Regions, heldout: Regions) -> list[Gain]:
    """Return what substitutions of words gain in cycle IoU, without a look at an image."""
    captions = training.greedy_captions()
    search = words.TableSearch(captions, lambda pairs: [h.iou for h in training.listen(pairs)])
    counts = words.mistakes(captions, training.references, with_neighbours=True)
    table = search.greedy(words.table_candidates(counts))
    sets = words.confusable_sets(words.mistakes(captions, training.references))
    tables = {f"table of {len(table)} words": table}
    tables["one word for each set of confused words"] = search.constants(sets)
    greedy, gains = heldout.greedy_captions(), []
    before = [each.iou for each in heldout.listen(list(enumerate(greedy)))]
    for name, each in tables.items():
        texts = [words.substitute(text, each) for text in greedy]
        after = [heard.iou for heard in heldout.listen(list(enumerate(texts)))]
        gains.append(gain(name, before, after))
    return gains


@torch.no_grad()
def mask_scores(regions: Regions, task: CaptionMaskCaption) -> dict[str, torch.Tensor]:
    """Return {score: (n, G)} of sampled masks: IoU, confidence and area."""
    scores = dict(iou=[], confidence=[], area=[])
    for batch, features in regions.parts:
        latents = loop2.sampled(task, batch, features, G).latents
        targets = [mask.to(regions.policy.device) for mask in batch.masks for _ in range(G)]
        scores["iou"] += mask_iou(latents.masks, targets).tolist()
        scores["confidence"] += list(latents.confidence)
        scores["area"] += [mask.float().mean().item() for mask in latents.masks]
    return {name: torch.tensor(values).double().view(-1, G) for name, values in scores.items()}


def changed_masks(training: Regions, heldout: Regions, latent_std: float | str) -> list[Gain]:
    """Return what changed thresholds and picks by cheap scores gain in IoU of the mask."""
    variants = masks.variants_of(training)
    named = {f"{c}: {name}": v for c in VARIANTS for name, v in variants[c].items()}
    names = {cause: [f"{cause}: {name}" for name in variants[cause]] for cause in VARIANTS}
    best = masks.choose_variants(masks.measure_variants(training, named), names)
    measured = masks.measure_variants(heldout, {name: named[name] for name in best.values()})
    before = measured.pop(masks.UNCHANGED)["iou"]
    gains = [gain(name, before, values["iou"]) for name, values in measured.items()]
    options = CaptionMaskCaption.Options(latent_std=latent_std, mask_loss_coef=0.0)
    context = TaskContext(training.policy, loop2.OneModel(), training.tokens)
    task = CaptionMaskCaption(options, context)
    task.action.calibrate([batch for batch, _ in training.parts], training.tokens)
    scores, heldout_scores = mask_scores(training, task), mask_scores(heldout, task)
    return gains + picked(scores, heldout_scores, MASK_SCORES, before)


def moved_points(
    policy: QwenVLPolicy, training: Subset, heldout: Subset, flags: Namespace
) -> list[Gain]:
    """Return what habits of negative points gain in IoU of the mask."""
    options, tokens = read_flags(flags, PointSegmentation.Options), flags.max_completion_length
    task = PointSegmentation(options, TaskContext(policy, None, tokens))
    settings = Namespace(**vars(flags) | dict(num_generations=G))
    result = points.result_of(task, training, heldout, settings)

    def as_gain(rival: Rival) -> Gain:
        name = rival.name.replace("best of G", f"best of {G}")
        return gain(name, result.greedy["iou"], rival.values["iou"])

    return [as_gain(rival) for rival in result.rivals]


def rivals_of(
    flags: Namespace, training: Subset, heldout: Subset, device: torch.device
) -> dict[str, list[Gain]]:
    """Return {metric: gains of cheap causes} on the base of a run with these flags."""
    of_points = "sam_path" in vars(flags)  # a flag of its model family
    settings = dict(sam_path=flags.sam_path, image_size=flags.image_size) if of_points else {}
    settings |= dict(dtype=flags.dtype, temperature=flags.temperature)
    tokens = flags.max_completion_length
    policy = open_policy(Path(flags.model_path), None, "policy", device, tokens, **settings)
    if of_points:
        return {"seg_iou": moved_points(policy, training, heldout, flags)}
    opened = [
        Regions(policy, each, tokens, flags.max_prompt_length, flags.batch_size, 0)
        for each in (training, heldout)
    ]
    # Loop 1 alone has no --latent_std, and without noise (0) all samples are equal.
    latent_std = vars(flags).get("latent_std") or "auto"
    return {"cycle_iou": changed_captions(*opened), "seg_iou": changed_masks(*opened, latent_std)}


def compared(run: Path, device: torch.device) -> str:
    """Return the table of a finished run and of the strongest causes, and what it shows."""
    flags = Namespace(**read_json(run / "config.json"))
    before, after = (read_json(file)["values"] for file in evaluations(run))
    training, heldout, _ = split_dataset(
        DATASETS[flags.dataset], flags.data_dir, flags.eval_data_dir, flags.eval_samples, 1.0
    )
    chosen_on = Subset(training, sample_regions(training.image_keys, NUM_REGIONS))
    # Other tasks (--tasks) measure other metrics.
    rivals = {
        metric: gains
        for metric, gains in rivals_of(flags, chosen_on, heldout, device).items()
        if metric in before
    }
    own = {metric: gain("this run", before[metric], after[metric]) for metric in rivals}
    head = (
        f"the run beside untrained changes of its base, chosen on {len(chosen_on)} training "
        f"regions, measured on {len(heldout)} held-out ones"
    )
    return "\n".join([head, *table(own, rivals), *verdict(own, rivals)])


def table(own: dict[str, Gain], rivals: dict[str, list[Gain]]) -> list[str]:
    """Return lines: of each metric the run's gain and the largest gains of cheap causes."""
    lines = [f"{'':54s}  before   after   change   95 % interval"]
    for metric, gains in rivals.items():
        strongest = sorted(gains, key=Gain.change, reverse=True)[:NUM_SHOWN]
        lines += [TITLES[metric], own[metric].line(), *(each.line() for each in strongest)]
    return lines


def verdict(own: dict[str, Gain], rivals: dict[str, list[Gain]]) -> list[str]:
    """Return sentences: of each metric whether it rises above all cheap causes; what that shows."""
    lines, learnt, shows = [], [], SHOWS_NOTHING
    for metric, gains in rivals.items():
        equal = [each for each in gains if not own[metric].exceeds(each)]
        if not own[metric].is_gain():
            lines.append(f"{TITLES[metric]} is not shown to rise.")
        elif equal:
            strongest = max(equal, key=Gain.change)
            lines.append(f"{TITLES[metric]} rises, not shown to exceed: {strongest.name}.")
            shows = WORKS
        else:
            lines.append(f"{TITLES[metric]} rises by more than these untrained causes.")
            learnt.append(TITLES[metric])
    if learnt:
        shows = LEARNT.format(" and ".join(learnt))
    return [*lines, shows]


def print_rivals(run: Path):
    """Print the table of a finished run, and write it into its folder."""
    ranks = process_group.init()
    print0(
        "measuring what untrained changes of the base gain, about a minute; the noise of their "
        "sampled masks is fitted anew, to the training regions that choose the changes"
    )
    try:
        text = compared(run, ranks.device)
    finally:
        process_group.close()
    (run / FILE).write_text(f"{text}\n")
    print0(text)


def main(argv: list[str] | None = None):
    parser = FlagParser(prog="python -m tools.demo.rivals", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="finished run of a demo")
    args = parser.parse_args(argv)
    if not (args.run / "config.json").is_file() or len(evaluations(args.run)) < 2:
        parser.error(f"--run {args.run}: holds no finished run")
    print_rivals(args.run)


if __name__ == "__main__":
    run_program(main)
