"""Held-out measures of a model folder or of a run's checkpoint, with 95 % intervals.

A base, or an exported folder; a checkpoint, compared with that; RefCOCO (D/refcocog/instances.json
..); samples, and with --shard_base the base, shared by 8 GPUs:

    python -m tools.evaluate --model_path M --data_dir D --output before.json
    python -m tools.evaluate --model_path O/checkpoint_step_N --data_dir D --before before.json
    python -m tools.evaluate --model_path M --data_dir D --dataset refcocog --split test
    python -m tools.evaluate ... --dataset refcocog --split test --protocol sa2va
    torchrun --nproc_per_node 8 -m tools.evaluate ... [--shard_base]

More measures: what captions state of attributes, which region a mask lies on, and what is gained by
choosing among 8 sampled captions, by an oracle or by what the model itself makes of them:

    python -m tools.evaluate ... --attributes D/attributes.json --other_regions --best_of 8

Qwen2.5-VL, which answers with box and points, and SAM2; of a checkpoint its run's flags hold:

    python -m tools.evaluate --model_path Q --sam_path S --answer_style segzero --data_dir D
    python -m tools.evaluate --model_path O/checkpoint_step_N --data_dir D --dataset reasonseg

The latter measures cIoU and gIoU as Sa2VA's own evaluation does (docs/data.md): its question, up to
12 tiles, its rounding of SAM2's mean and std. Else pixels are normalised as in training, phrases
are asked and cleaned as there, and captions and cycles are measured too.

A checkpoint's base is the one that its config.json names; if that has moved, give the base as
--model_path and the checkpoint as --checkpoint. Decoding is greedy, so two runs on the same number
of processes write the same file.
"""

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Subset

from rl_train import distributed
from rl_train.data.opening import reader
from rl_train.data.refcoco import NAMES
from rl_train.data.split import sample_regions
from rl_train.data.text import clean_caption
from rl_train.data.workers import explaining
from rl_train.distributed import print0
from rl_train.evaluation import HeldOut, Measured, evaluate, record
from rl_train.files import check_writable
from rl_train.flags import read_flags
from rl_train.policies.sa2va import Sa2VAPolicy
from rl_train.rewards.attributes import load_attributes
from rl_train.rewards.meteor import meteor, require_wordnet, tokenize
from rl_train.sharding import Shards
from rl_train.statistics import before_after_table, metrics_of
from rl_train.tasks import refer_measures
from rl_train.tasks.point_segmentation import PointSegmentation
from rl_train.tasks.protocol import Context
from rl_train.trained_policy import open_policy, untrained
from tools.evaluate_flags import NOT_SAVED, OF_POINTS, build_parser, flags_of_run


def measures_of(policy, args) -> dict:
    """`HeldOut`'s measure and measure_samples of the policy, if not those of `cycle_measures`.

    Raises ValueError if a flag is of another family of models.
    """
    if args.protocol:
        captions = ("best_of", "attributes", "legacy_cleaner", "other_regions")
        if given := [name for name in captions if getattr(args, name)]:
            raise ValueError(f"--{given[0]}: not with --protocol {args.protocol}, of masks alone")
        if policy.family != Sa2VAPolicy.family:
            raise ValueError(f"--protocol {args.protocol}: --model_path is of points")
        policy.rounded_normalisation = True
        return dict(measure=refer_measures.measure)
    if policy.family == Sa2VAPolicy.family:
        return {}
    captions = ("attributes", "legacy_cleaner", "shard_base")
    if given := [name for name in captions if getattr(args, name)]:
        raise ValueError(f"--{given[0]}: of Sa2VA's captions, and --model_path is of points")
    options = read_flags(args, PointSegmentation.Options)
    context = Context(policy, None, args.max_completion_length)
    task = PointSegmentation(options, context)
    return dict(measure=task.measure, measure_samples=task.measure_samples)


def build_dataset(args):
    """The samples that the flags name. Raises ValueError, naming the flag or file."""
    which = (args.parts, args.split, args.image_root)
    dataset = reader(args.dataset, *which, heldout=True)(args.data_dir)
    print0(f"--data_dir {args.data_dir}: {dataset.report()}")
    if not args.num_samples:
        return dataset
    return Subset(dataset, sample_regions(dataset.image_keys, args.num_samples))


def unlike_the_original(dataset) -> str:
    """What of a RefCOCO data set, or a Subset of it, is measured otherwise than by the original."""
    whole = dataset
    while isinstance(whole, Subset):
        whole = whole.dataset
    cleaned = sum(clean_caption(text) != text for text in map(whole.sentence, range(len(whole))))
    skipped = whole.report()["skipped"]
    reasons = ", ".join(f"{reason}: {count}" for reason, count in skipped.items()) or "none"
    return (
        f"of all {len(whole)} phrases {cleaned} are asked without double blanks or special tokens "
        f"that they hold; phrases that are not measured: {reasons}"
    )


def read_before(file: Path, num_samples: int) -> dict:
    """An earlier --output. Raises ValueError if it is none, or of another number of samples."""
    try:
        before = json.loads(file.read_text())
        num_before = min(len(before["image_ids"]), len(before["references"]))
        before["flags"] = dict(before["flags"])
        before["values"] = {
            name: torch.tensor(values, dtype=torch.float64)
            for name, values in before["values"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"--before {file} is not an --output of this program: {error!r}"
        ) from error
    if num_before != num_samples:
        raise ValueError(
            f"--before {file} holds {num_before} samples, this data set {num_samples}: "
            "the difference would not be paired"
        )
    return before


def check_same_samples(before: dict, file: Path, measured: Measured):
    """Raise ValueError, with the first difference, if `before` was measured on other samples.

    True captions count too: an image_id begins below --data_dir, so that two folders of one layout
    have the same ones.
    """
    earlier = list(zip(before["image_ids"], before["references"]))
    now = list(zip(measured.image_ids, measured.references))
    for place in range(len(now)):
        if earlier[place] != now[place]:
            raise ValueError(
                f"--before {file} was measured on other samples, the difference would not be "
                f"paired: sample {place} was {earlier[place]}, now {now[place]}"
            )


def cider(references: list[str], captions: list[str]) -> torch.Tensor:
    """(n,) float64 CIDEr-D of each caption, with document frequencies of the n references.

    By pycocoevalcap (extra "eval"), on the words of `rewards.meteor.tokenize`: lower case, without
    punctuation. Published numbers are of the PTB tokenizer, which needs Java, and of several
    references for a sample.
    """
    from pycocoevalcap.cider.cider import Cider

    words = [
        {i: [" ".join(tokenize(text))] for i, text in enumerate(texts)}
        for texts in (references, captions)
    ]
    return torch.from_numpy(np.asarray(Cider().compute_score(*words)[1], dtype=np.float64))


def measure_captions(measured: Measured, legacy_cleaner: bool):
    """Add to what was measured what only this tool does of captions, each by itself."""
    if legacy_cleaner:
        measured.values["caption_meteor"] = meteor(
            measured.references, measured.captions, legacy_cleaner=True
        ).double()
    if find_spec("pycocoevalcap"):
        measured.values["caption_cider"] = cider(measured.references, measured.captions)
    else:
        print0("caption_cider is left out: pip install 'rl-sa2va[eval]'")


def table(found: dict) -> str:
    """Means and intervals of a `record`, as text."""
    lines = [f"{'n = ' + str(found['num_samples']):20s} {'mean':>8s}   95 % interval"]
    descriptions = metrics_of(found["values"])
    for metric, mean in found["means"].items():
        interval = found["intervals"].get(metric)
        words = "[{:.4f}, {:.4f}]".format(*interval) if interval else ""
        lines.append(f"{metric:20s} {mean:8.4f}   {words:20s} {descriptions[metric]}")
    return "\n".join(lines)


def policy_of(args, ranks):
    """The policy that the flags name. Raises ValueError, naming the flag."""
    how = dict(dtype=args.dtype, max_tiles=args.max_tiles, temperature=args.temperature)
    how |= {name: getattr(args, name) for name in ("sam_path", "image_side", "max_image_tokens")}
    if args.protocol:  # all that an answer can hold
        how["max_masks_per_answer"] = args.max_completion_length
    shards = Shards(ranks) if args.shard_base else None
    whose = (args.model_path, args.checkpoint, args.role)
    return open_policy(*whose, ranks.device, args.max_completion_length, shards, **how)


def run(args, ranks):
    """Measure, print, write and compare; ValueError for what is wrong in the flags and files."""
    if args.output:
        check_writable("--output", args.output, is_file=True)
    if args.protocol and args.dataset not in NAMES:
        known = ", ".join(NAMES)
        raise ValueError(f"--protocol {args.protocol}: of {known}, not of --dataset {args.dataset}")
    dataset = build_dataset(args)
    if args.shared_images:
        dataset = untrained(dataset, args.checkpoint or args.model_path, args.shared_images)
    before = read_before(args.before, len(dataset)) if args.before else None
    vocabulary = load_attributes(args.attributes) if args.attributes else {}
    policy = policy_of(args, ranks)
    lengths = (args.max_completion_length, args.num_workers, args.max_caption_length)
    measures = measures_of(policy, args)
    asked = (args.other_regions, args.best_of, vocabulary)
    heldout = HeldOut(dataset, args.batch_size, *lengths, *asked, **measures)
    measured = explaining(args.num_workers, evaluate, policy, heldout, ranks)["policy"]
    if not ranks.is_main:
        return
    if not measures:
        measure_captions(measured, args.legacy_cleaner)
    flags = flags_that_count(args, policy.family)
    found = record(measured, flags)
    say(found, measured, dataset, args)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(found))
    if before:
        check_same_samples(before, args.before, measured)
        print0(f"\nagainst {args.before}\n{compared(before, measured, flags)}")


def flags_that_count(args, family: str) -> dict:
    """{flag: value} of all that the numbers depend on, as JSON holds them."""
    of_points = family != Sa2VAPolicy.family
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(args).items()
        if name not in NOT_SAVED and (of_points or name not in OF_POINTS)
    }


def say(found: dict, measured: Measured, dataset, args):
    """Print what was measured, and of which samples."""
    print0(table(found))
    if args.protocol:
        what = f"Sa2VA's protocol, {args.dataset} {args.split or 'val'}"
        print0(refer_measures.sentence(what, measured.values, found["means"]))
        print0(unlike_the_original(dataset))
    if measured.num_damaged:
        print0(
            f"{measured.num_damaged} samples did not decode or fit; "
            "others were measured in their place"
        )


def compared(before: dict, measured: Measured, flags: dict) -> str:
    """Flags that differ from those of `before`, and the table of differences, as text."""
    changed = [
        f"--{name} was {before['flags'].get(name)}, now {value}"
        for name, value in flags.items()
        if before["flags"].get(name) != value
    ]
    return "\n".join([*changed, before_after_table(before["values"], measured.values)])


def main(argv=None):
    parser = build_parser(__doc__)
    args = parser.parse_args(argv)
    require_wordnet()
    ranks = distributed.init()
    try:
        parser.set_defaults(**flags_of_run(args.checkpoint or args.model_path))
        if args.protocol:
            parser.set_defaults(max_tiles=refer_measures.MAX_TILES)
        run(parser.parse_args(argv), ranks)
    except ValueError as error:  # the user's input: one sentence, no traceback
        raise SystemExit(f"evaluate: {error}") from error
    finally:
        distributed.close()


if __name__ == "__main__":
    main()
