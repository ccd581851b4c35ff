"""Evaluation metrics of a model folder or of a run's checkpoint, with 95 % intervals.

Measure a base or an exported folder; compare a checkpoint with it; measure on RefCOCO
(D/refcocog/instances.json ..); divide the samples among 8 GPUs:

    python -m tools.evaluate --model_path M --data_dir D --output before.json
    python -m tools.evaluate --model_path O/checkpoint_step_N --data_dir D --before before.json
    python -m tools.evaluate --model_path M --data_dir D --dataset refcocog --subsets test
    python -m tools.evaluate ... --dataset refcocog --subsets test --protocol sa2va
    torchrun --nproc_per_node 8 -m tools.evaluate ...

More measures: what captions state of attributes, which region a mask lies on, and what is gained by
choosing among 8 sampled captions, by an oracle or by what the model itself makes of them:

    python -m tools.evaluate ... --attributes D/attributes.json --distractors --best_of 8

Two checkpoints of a run, on its own evaluation split by its own flags (--run R --help):

    python -m tools.evaluate --run O [--compare base 120] [--output F.json]

Qwen-VL, which answers with box and points, and SAM2; of a checkpoint its run's flags hold:

    python -m tools.evaluate --model_path Q --sam_path S --answer_style segzero --data_dir D
    python -m tools.evaluate --model_path O/checkpoint_step_N --data_dir D --dataset reasonseg
    python -m tools.evaluate ... --dataset reasonseg --protocol visionreasoner

`--protocol visionreasoner` measures gIoU and cIoU as Seg-Zero's and VisionReasoner's own
evaluations do (docs/points.md). `--protocol sa2va` measures cIoU and gIoU as Sa2VA's own evaluation
does (docs/evaluation.md): its question, up to 12 tiles, its rounding of SAM2's mean and std;
`--protocol sa2va_captions` measures CIDEr and METEOR of captions of RefCOCOg's regions.
`--dataset gcg` measures grounded captions, as a run of that task does. Else
pixels are normalised as in training, phrases are asked and cleaned as there, and captions and
cycles are measured too.

A checkpoint's base is the one that its config.json names; if that has moved, give the base as
--model_path and the checkpoint as --checkpoint. Decoding is greedy, so two runs on the same number
of processes write the same file.
"""

import json
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from PIL import Image
from torch.utils.data import Dataset, Subset

from rl_train.config.flags import read_flags
from rl_train.config.grpo_config import PolicyConfig
from rl_train.data.distractors import unwrap_subset
from rl_train.data.refcoco import GREFCOCO, REFCOCO_NAMES
from rl_train.data.registry import opener_of
from rl_train.data.split import sample_regions
from rl_train.data.text import clean_caption
from rl_train.data.workers import reporting_dead_workers
from rl_train.distributed import process_group
from rl_train.distributed.process_group import RankInfo, only_local_rank0, print0
from rl_train.evaluation import (
    gcg_metrics,
    published_points,
    referring_metrics,
    region_captions,
)
from rl_train.evaluation.bootstrap import means, metrics_of
from rl_train.evaluation.cycle_metrics import measure_phrases
from rl_train.evaluation.evaluate import EvalResult, EvalSpec, evaluate, record
from rl_train.evaluation.table import before_after_table
from rl_train.export.load_policy import drop_trained_images, find_base, open_policy
from rl_train.policies.base import Policy
from rl_train.policies.qwen_vl import QwenVLPolicy
from rl_train.policies.sa2va import Sa2VAPolicy, has_tiles
from rl_train.rewards.attributes import load_attributes
from rl_train.rewards.cider import cider
from rl_train.rewards.meteor import meteor, require_wordnet
from rl_train.run.messages import data_report, machine
from rl_train.tasks.base import TaskContext
from rl_train.tasks.point_segmentation import PointSegmentation
from rl_train.utils.command_line import run_program
from rl_train.utils.io import check_writable
from sa2va_hf.prompts import THINK_FIRST
from tools import evaluate_run
from tools.evaluate_flags import NOT_SAVED, POINT_FLAGS, build_parser, flags_of_run

# {--protocol: data sets that it is about}
PROTOCOL_DATASETS = {
    "sa2va": (*REFCOCO_NAMES, "gcg"),
    "sa2va_captions": tuple(name for name in REFCOCO_NAMES if name != GREFCOCO),
    "visionreasoner": ("reasonseg", *REFCOCO_NAMES),
}

OF_SA2VA = ("sa2va", "sa2va_captions")


def measures_of(policy: Policy, args: Namespace) -> dict[str, Callable]:
    """`EvalSpec`'s measure and measure_samples of the policy, if not those of `cycle_metrics`.

    Raises ValueError if a flag is of another family of models.
    """
    if args.protocol:
        return dict(measure=measure_of_protocol(policy, args))
    if policy.family == Sa2VAPolicy.family:
        if args.dataset == "gcg":  # captions with masks, not phrases
            refuse_caption_flags(args, "--dataset gcg")
            return dict(measure=gcg_metrics.measure)
        if args.think:
            return dict(measure=partial(measure_phrases, wording=THINK_FIRST))
        return {}
    captions = ("attributes", "legacy_cleaner")
    if caption_flags := [name for name in captions if getattr(args, name)]:
        raise ValueError(
            f"--{caption_flags[0]}: of Sa2VA's captions, and --model_path is of points"
        )
    options = read_flags(args, PointSegmentation.Options)
    context = TaskContext(policy, None, args.max_completion_length)
    task = PointSegmentation(options, context)
    return dict(measure=task.measure, measure_samples=task.measure_samples)


def refuse_caption_flags(args: Namespace, owner: str):
    """Raise ValueError if a flag asks for metrics of captions beside those of the flag `owner`."""
    captions = ("best_of", "attributes", "legacy_cleaner", "distractors")
    if caption_flags := [name for name in captions if getattr(args, name)]:
        raise ValueError(f"--{caption_flags[0]}: not with {owner}, of its own metrics alone")


def measure_of_protocol(policy: Policy, args: Namespace) -> Callable:
    """Return `EvalSpec`'s measure of --protocol, and prepare the policy for it.

    Raises ValueError if a flag or the model does not belong to it.
    """
    refuse_caption_flags(args, f"--protocol {args.protocol}")
    if args.protocol in OF_SA2VA:
        if policy.family != Sa2VAPolicy.family:
            raise ValueError(f"--protocol {args.protocol}: --model_path is of points")
        if args.protocol == "sa2va_captions" and policy.region_prompt != "tokens":
            raise ValueError(
                f"--protocol sa2va_captions: --model_path knows a region by its "
                f"{policy.region_prompt}, and the original's question needs its tokens"
            )
        policy.follow_original_inference()
        if args.protocol == "sa2va_captions":
            return region_captions.measure
        return gcg_metrics.measure if args.dataset == "gcg" else referring_metrics.measure
    if policy.family != QwenVLPolicy.family:
        raise ValueError(f"--protocol {args.protocol}: --model_path does not answer with points")
    for name, value in published_points.FIXED.items():
        if getattr(args, name) != value:
            raise ValueError(f"--{name}: {value} in --protocol {args.protocol}, leave it out")
    if args.answer_style not in published_points.STRIPPED:
        styles = " or ".join(published_points.STRIPPED)
        raise ValueError(
            f"--answer_style {args.answer_style}: --protocol {args.protocol} is of {styles}"
        )
    if not args.image_size:
        raise ValueError(f"--image_size 0: in --protocol {args.protocol} images are squares")
    policy.preprocessing = replace(policy.preprocessing, resampling=Image.Resampling.BILINEAR)
    return partial(published_points.measure, style=args.answer_style)


def build_dataset(args: Namespace, protocol: str | None = None) -> Dataset:
    """Open the samples that the flags name. Raises ValueError that names the flag or file."""
    opened = opener_of(args.dataset, args.subsets, args.image_root, is_eval=True)
    dataset = opened(args.data_dir)
    print0(data_report(f"--data_dir {args.data_dir}", dataset.report()))
    if protocol == "sa2va_captions":
        dataset = region_captions.one_row_a_region(dataset)
    if not args.num_samples:
        return dataset
    whole, indices = unwrap_subset(dataset)
    chosen = sample_regions(whole.image_keys[indices], args.num_samples)
    return Subset(dataset, chosen)


def unlike_the_original(dataset: Dataset) -> str:
    """Return how the measurement of RefCOCO, or a Subset, deviates from the original's."""
    whole, _ = unwrap_subset(dataset)
    cleaned = sum(clean_caption(text) != text for text in map(whole.sentence, range(len(whole))))
    skipped = whole.report()["skipped"]
    reasons = ", ".join(f"{reason}: {count}" for reason, count in skipped.items()) or "none"
    return (
        f"of all {len(whole)} phrases {cleaned} are asked without double blanks or special tokens "
        f"that they hold; phrases that are not measured: {reasons}"
    )


def read_before(file: Path, num_samples: int) -> dict:
    """Read an earlier --output. Raises ValueError if it is none, or has other samples."""
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


def check_same_samples(before: dict, file: Path, result: EvalResult):
    """Raise ValueError, with the first difference, if `before` was measured on other samples.

    True captions count too: an image_id begins below --data_dir, so that two folders of one layout
    have the same ones.
    """
    earlier = list(zip(before["image_ids"], before["references"]))
    now = list(zip(result.image_ids, result.references))
    for i in range(len(now)):
        if earlier[i] != now[i]:
            raise ValueError(
                f"--before {file} was measured on other samples, the difference would not be "
                f"paired: sample {i} was {earlier[i]}, now {now[i]}"
            )


# "region1: ", "region1 is ", "The region shows ": only at the start, and only as whole words.
BOILERPLATE = re.compile(
    r"\A\s*(?:region1(?![\w'’])\s*[:,]?\s*(?:(?:is|shows|contains)\s+)?"
    r"|(?:the|this)\s+(?:marked\s+)?region1?\s*(?::|(?:is|shows|contains)\s)\s*)",
    re.IGNORECASE,
)


def legacy_clean(text: str) -> str:
    """Return `text` up to the stop text <|end|>, without the boilerplate that it may begin with.

    Published region-caption numbers were computed on answers cleaned in this way ("The region is a
    dog." -> "a dog."). Nothing else is touched: "this is an island", "region10" and line breaks
    stay. Rewards never use it.
    """
    return BOILERPLATE.sub("", text.split("<|end|>")[0]).strip()


def add_caption_columns(result: EvalResult, legacy_cleaner: bool):
    """Add the columns of captions that only this tool has."""
    if legacy_cleaner:
        cleaned = [legacy_clean(caption) for caption in result.captions]
        result.values["caption_meteor"] = meteor(result.references, cleaned).double()
    one_each = [[reference] for reference in result.references]
    result.values["caption_cider"] = cider(one_each, result.captions)


def table(result_json: dict, leave_out: Container[str] = ()) -> str:
    """Means and intervals of a `record`, as text, without the metrics `leave_out`."""
    lines = [f"{'n = ' + str(result_json['num_samples']):20s} {'mean':>8s}   95 % interval"]
    descriptions = metrics_of(result_json["values"])
    for metric, mean in result_json["means"].items():
        if metric in leave_out:
            continue
        interval = result_json["intervals"].get(metric)
        words = "[{:.4f}, {:.4f}]".format(*interval) if interval else ""
        lines.append(f"{metric:20s} {mean:8.4f}   {words:20s} {descriptions[metric]}")
    return "\n".join(lines)


def policy_of(args: Namespace, ranks: RankInfo) -> Policy:
    """Open the policy that the flags name. Raises ValueError that names the flag."""
    most_masks = PolicyConfig.max_masks_per_answer
    # Not given, it is that of a checkpoint's run, or the model's.
    overrides = dict(region_prompt=args.region_prompt) if args.region_prompt else {}
    return open_policy(
        args.model_path,
        args.checkpoint,
        args.role,
        ranks.device,
        args.max_completion_length,
        dtype=args.dtype,
        max_tiles=args.max_tiles,
        temperature=args.temperature,
        sam_path=args.sam_path,
        image_size=args.image_size,
        max_image_tokens=args.max_image_tokens,
        **overrides,
        # In the protocol all that an answer can hold.
        max_masks_per_answer=args.max_completion_length if args.protocol else most_masks,
    )


def run(args: Namespace, ranks: RankInfo):
    """Measure, print, write and compare; ValueError for what is wrong in the flags and files."""
    if args.output:
        check_writable("--output", args.output, is_file=True)
    if args.protocol and args.dataset not in PROTOCOL_DATASETS[args.protocol]:
        known = ", ".join(PROTOCOL_DATASETS[args.protocol])
        raise ValueError(f"--protocol {args.protocol}: of {known}, not of --dataset {args.dataset}")
    print0(machine(ranks))
    find_base(args.model_path, args.checkpoint, "--model_path")  # said before data are read
    dataset = build_dataset(args, args.protocol)
    if args.train_eval_overlap:
        dataset = drop_trained_images(
            dataset, args.checkpoint or args.model_path, args.train_eval_overlap
        )
    before = read_before(args.before, len(dataset)) if args.before else None
    attribute_phrases = load_attributes(args.attributes) if args.attributes else {}
    policy = policy_of(args, ranks)
    spec = EvalSpec(
        dataset,
        args.batch_size,
        args.max_completion_length,
        args.num_workers,
        max_prompt_length=args.max_prompt_length,
        distractors=args.distractors,
        best_of=args.best_of,
        attribute_phrases=attribute_phrases,
    )
    measures = measures_of(policy, args)
    spec = replace(spec, **measures)
    result = reporting_dead_workers(args.num_workers, evaluate, policy, spec, ranks)["policy"]
    if not ranks.is_main:
        return
    if "caption_meteor" in result.values:
        add_caption_columns(result, args.legacy_cleaner)
    if args.protocol == "sa2va_captions":
        whole, _ = unwrap_subset(dataset)
        result.values |= region_captions.score(whole, result.image_ids, result.captions)
    flags = flags_that_count(args, policy.family)
    result_json = record(result, flags)
    # Metrics that --before has too stand in the table of differences alone.
    in_table = means(before["values"]) if before else ()
    print_result(result_json, result, dataset, args, in_table)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(result_json))
    if before:
        check_same_samples(before, args.before, result)
        print0(f"\nagainst {args.before}\n{comparison(before, result, flags)}")


def protocol_sentence(
    subject: str, values: dict[str, torch.Tensor], metrics: dict[str, float]
) -> str:
    """Figures that others report of `subject`, from all samples' columns and their metrics."""
    sums = [int(values[name].sum()) for name in ("seg_intersection", "seg_union", "no_seg")]
    answered = metrics.get("seg_ciou_answered")
    return (
        f"{subject}: {len(values['no_seg'])} phrases, cIoU {metrics['seg_ciou']:.4f} "
        f"(intersections {sums[0]}, unions {sums[1]} pixels), gIoU {metrics['seg_iou']:.4f}; "
        f"{sums[2]} answers without [SEG] count as empty masks"
        + (f", without them cIoU {answered:.4f}" if sums[2] and answered is not None else "")
        + (f"; N-acc. {metrics['n_acc']:.4f}" if "n_acc" in metrics else "")
        + (f"; T-acc. {metrics['t_acc']:.4f}" if "t_acc" in metrics else "")
    )


def points_protocol_sentence(
    args: Namespace, values: dict[str, torch.Tensor], metrics: dict[str, float]
) -> str:
    """Return the figures that Seg-Zero and VisionReasoner report."""
    num_samples, num_read = len(values["parsable"]), int(values["parsable"].sum())
    sums = [int(values[name].sum()) for name in ("seg_intersection", "seg_union")]
    return (
        f"VisionReasoner's protocol, answers of {args.answer_style}, {args.dataset}: {num_samples} "
        f"questions, gIoU {metrics['seg_iou']:.4f}, cIoU {metrics['seg_ciou']:.4f} (intersections "
        f"{sums[0]}, unions {sums[1]} pixels); {num_samples - num_read} answers that their code "
        "cannot read count as empty masks"
    )


def flags_that_count(args: Namespace, family: str) -> dict:
    """Return {flag: value} of all that the numbers depend on, as JSON holds them."""
    of_points = family != Sa2VAPolicy.family
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(args).items()
        if name not in NOT_SAVED and (of_points or name not in POINT_FLAGS)
    }


def print_result(
    result_json: dict,
    result: EvalResult,
    dataset: Dataset,
    args: Namespace,
    leave_out: Container[str],
):
    """Print the metrics but those to leave out, and notes on the samples."""
    if not result_json["means"].keys() <= set(leave_out):
        print0(table(result_json, leave_out))
    if args.protocol == "visionreasoner":
        print0(points_protocol_sentence(args, result.values, result_json["means"]))
    elif args.protocol == "sa2va" and args.dataset != "gcg":  # whose table has all its figures
        subject = f"Sa2VA's protocol, {args.dataset} {args.subsets[0] if args.subsets else 'val'}"
        print0(protocol_sentence(subject, result.values, result_json["means"]))
        print0(unlike_the_original(dataset))
    if result.num_damaged:
        print0(
            f"{result.num_damaged} samples did not decode or fit; "
            "others were measured in their place"
        )


def comparison(before: dict, result: EvalResult, flags: dict) -> str:
    """Flags that differ from those of `before`, and the table of differences, as text."""
    changed = [
        f"--{name} was {before['flags'].get(name)}, now {value}"
        for name, value in flags.items()
        if before["flags"].get(name) != value
    ]
    samples = str(flags["data_dir"])
    return "\n".join([*changed, before_after_table(before["values"], result.values, samples)])


def main(argv: Sequence[str] | None = None):
    words = sys.argv[1:] if argv is None else argv
    if "--run" in {word.partition("=")[0] for word in words}:
        evaluate_run.main(words)
        return
    parser = build_parser(__doc__)
    args = parser.parse_args(argv)
    require_wordnet()
    ranks = process_group.init()
    try:
        parser.set_defaults(**flags_of_run(args.checkpoint or args.model_path))
        if args.protocol in OF_SA2VA:
            base, _ = find_base(args.model_path, args.checkpoint, "--model_path")
            if has_tiles(base):
                parser.set_defaults(max_tiles=referring_metrics.MAX_TILES)
        elif args.protocol:
            parser.set_defaults(**published_points.DEFAULTS, **published_points.FIXED)
        run(parser.parse_args(argv), ranks)
    except ValueError as error:  # the user's input: one sentence, no traceback
        raise SystemExit(only_local_rank0(f"evaluate: {error}")) from error
    finally:
        process_group.close()


if __name__ == "__main__":
    run_program(main)
