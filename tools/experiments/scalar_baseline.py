"""Measure what one scalar gains without training: the masks' threshold or the prompt's scale.

Each is chosen on training regions, by the mean IoU of the true captions' masks, and applied to
held-out ones. It is one of the cheap causes that a gain of loop 2 must exceed (docs/results.md).

    python -m tools.experiments.scalar_baseline --model_path D/checkpoint --data_dir D/train \
        --eval_data_dir D/heldout --dtype float32 --output scalar.json

Greedy and of the model's own answers, as `seg_iou` of an evaluation, which threshold 0 and scale 1
give. --model_path may also be a checkpoint_step_N folder of a run: then of its policy.
"""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm

from rl_train.config.flags import COUNT
from rl_train.data.loader import eval_loader
from rl_train.distributed.process_group import RankInfo, print0
from rl_train.evaluation.bootstrap import paired_difference
from rl_train.export.load_policy import find_base, open_policy
from rl_train.policies.sa2va_queries import row_masks, segment_by_own_answer
from rl_train.rewards import mask_iou
from rl_train.utils.command_line import FlagParser, run_program
from rl_train.utils.io import check_writable
from sa2va_hf.processing_sa2va import upsample_masks
from tools.experiments.common import add_region_flags, open_regions, run_alone

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from rl_train.policies.sa2va import Sa2VAPolicy
    from rl_train.rollout import Batch
    from sa2va_hf.batches import ImageFeatures


# {scalar: (values tried, the one that changes nothing)}
GRIDS = dict(
    threshold=([step / 2 for step in range(-8, 9)], 0.0),
    scale=([2 ** (step / 2) for step in range(-4, 5)], 1.0),
)


def build_parser() -> FlagParser:
    parser = FlagParser(
        prog="python -m tools.experiments.scalar_baseline",
        description=__doc__,
    )
    add = parser.add_argument
    add("--model_path", required=True, type=Path, help="Sa2VA folder, or a run's checkpoint")
    add_region_flags(parser)
    add("--max_tiles", type=COUNT, default=1)
    add("--output", type=Path, required=True, help="JSON file, with the IoU of every region")
    return parser


def row_logits(
    policy: "Sa2VAPolicy", features: "ImageFeatures", seg_rows: list[int], embeddings: torch.Tensor
) -> list[torch.Tensor]:
    """Return (H, W) mask logits of each image: the largest of its [SEG], -inf without one.

    Those above 0 are `row_masks`. Args: as there.
    """
    logits_of_rows = [torch.full(size, -torch.inf, device=policy.device) for size in features.sizes]
    if seg_rows:
        for row, logits in zip(seg_rows, policy.decode_masks(features, seg_rows, embeddings)):
            size = features.sizes[row]
            upsampled = upsample_masks(logits[None], policy.processor.sam_size, size)[0]  # (H, W)
            logits_of_rows[row] = torch.maximum(logits_of_rows[row], upsampled)
    return logits_of_rows


@torch.no_grad()
def ious_of(policy: "Sa2VAPolicy", batch: "Batch", max_new_tokens: int) -> dict[str, torch.Tensor]:
    """Return {scalar: (B, K) IoU of the true caption's mask at each of its K values}."""
    images, rows = policy.encode(batch), list(range(len(batch)))
    targets = [mask.to(policy.device) for mask in batch.masks]
    _, segs, prompts = segment_by_own_answer(policy, images, rows, batch.captions, max_new_tokens)
    segs, ious_of_scalar = segs.tolist(), dict(threshold=[], scale=[])
    logits = row_logits(policy, images, segs, prompts)
    for value in GRIDS["threshold"][0]:
        ious_of_scalar["threshold"].append(mask_iou([x > value for x in logits], targets, 1.0))
    for value in GRIDS["scale"][0]:
        masks = row_masks(policy, images, rows, segs, value * prompts).masks
        ious_of_scalar["scale"].append(mask_iou(masks, targets, 1.0))
    return {scalar: torch.stack(ious, 1).double().cpu() for scalar, ious in ious_of_scalar.items()}


def all_ious(
    policy: "Sa2VAPolicy", dataset: "Dataset", args: argparse.Namespace
) -> dict[str, torch.Tensor]:
    """Return {scalar: (n, K) IoU} of all regions of a data set."""
    inputs = policy.preprocessor(args.max_completion_length, args.max_prompt_length)
    loader = eval_loader(dataset, inputs, args.batch_size, args.num_workers)
    bar = tqdm(loader, desc="masks", leave=False)
    parts = [ious_of(policy, batch, args.max_completion_length) for batch in bar]
    return {scalar: torch.cat([part[scalar] for part in parts]) for scalar in GRIDS}


def chosen(scalar: str, train: torch.Tensor, heldout: torch.Tensor) -> dict:
    """Return the value that is best on `train` (n, K), and what it gains on `heldout` (m, K).

    Of equally good ones it is the nearest to what changes nothing. gain is paired, with its 95 %
    bootstrap interval over regions.
    """
    values, neutral = GRIDS[scalar]
    before, means = values.index(neutral), train.mean(0).tolist()
    # Ties go to the value nearest to doing nothing.
    best = max(range(len(values)), key=lambda k: (means[k], -abs(k - before)))
    gain, low, high = paired_difference(heldout[:, before], heldout[:, best])
    return dict(
        best=values[best],
        gain=gain,
        interval=[low, high],
        before=heldout[:, before].mean().item(),
        after=heldout[:, best].mean().item(),
        train_gain=means[best] - means[before],
        values=values,
        train_means=means,
        train=train.tolist(),
        heldout=heldout.tolist(),
    )


def table(results: dict[str, dict]) -> str:
    """Format the scalars' best values and gains as markdown."""
    lines = [
        "| scalar | best on training regions | gain there | held out: before | after | gain |",
        "|---|---|---|---|---|---|",
    ]
    for scalar, result in results.items():
        low, high = result["interval"]
        lines.append(
            f"| {scalar} | {result['best']:g} | {result['train_gain']:+.4f} "
            f"| {result['before']:.4f} | {result['after']:.4f} "
            f"| {result['gain']:+.4f} [{low:+.4f}, {high:+.4f}] |"
        )
    return "\n".join(lines)


def run(args: argparse.Namespace, ranks: RankInfo):
    """Choose, apply, print and write; ValueError for what is wrong in the flags and files."""
    check_writable("--output", args.output, is_file=True)
    find_base(args.model_path, None, "--model_path")  # said before data are read
    chosen_on, heldout = open_regions(args)
    policy = open_policy(
        args.model_path,
        None,
        "policy",
        ranks.device,
        args.max_completion_length,
        max_tiles=args.max_tiles,
        dtype=args.dtype,
    )
    train, test = (all_ious(policy, dataset, args) for dataset in (chosen_on, heldout))
    results = {scalar: chosen(scalar, train[scalar], test[scalar]) for scalar in GRIDS}
    print0(f"chosen on {len(chosen_on)} regions, held out {len(heldout)}\n\n{table(results)}")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(results))


def main(argv: list[str] | None = None):
    run_alone(build_parser(), run, argv)


if __name__ == "__main__":
    run_program(main)
