"""Write a sheet of fixed held-out samples before and after, to be looked at.

    python -m tools.experiments.sheet --before outputs/demo/checkpoint \
        --after outputs/demo_run/checkpoint_step_240 --data_dir outputs/demo/heldout \
        --output outputs/sheet.html --dtype float32 --max_completion_length 24

Each sample shows the image with its region (yellow), the captions of both models with the masks
that they find by their own caption, and the masks of the true caption (magenta). The samples are
the same ones for every pair of models, spread over images; nothing is chosen by what it shows. The
page is one HTML file without links.
"""

import argparse
import base64
import html
import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Subset
from tqdm import tqdm

from rl_train.config.flags import COUNT, COUNT_OR_0
from rl_train.config.grpo_config import DataConfig
from rl_train.data import EVAL_DATASETS
from rl_train.data.base import RegionDataset
from rl_train.data.loader import eval_loader
from rl_train.data.registry import opener_of
from rl_train.data.split import sample_regions
from rl_train.distributed.process_group import RankInfo, print0
from rl_train.export.load_policy import find_base, open_policy
from rl_train.loggers.pictures import PREDICTED, REGION, fit_panel, overlay, side_by_side
from rl_train.policies.sa2va import Sa2VAPolicy
from rl_train.policies.sa2va_queries import describe, segment_model_captions
from rl_train.rewards import mask_iou
from rl_train.utils.command_line import FlagParser, run_program
from rl_train.utils.io import check_writable
from tools.experiments.common import run_alone

STYLE = "body{font-family:sans-serif;margin:1em} figure{margin:1em 0} figcaption{font-size:14px}"


@dataclass
class Shown:
    """Captions and masks of a model for n samples."""

    captions: list[str]
    heard: list[torch.Tensor]  # masks (H, W) bool by its own captions
    found: list[torch.Tensor]  # masks of the true captions
    heard_iou: list[float]
    found_iou: list[float]


def build_parser() -> FlagParser:
    parser = FlagParser(prog="python -m tools.experiments.sheet", description=__doc__)
    add = parser.add_argument
    add("--before", required=True, type=Path, help="Sa2VA folder, or a run's checkpoint")
    add("--after", required=True, type=Path, help="the same of the other model")
    add("--data_dir", required=True, help="folder of held-out regions")
    add("--dataset", choices=list(EVAL_DATASETS), default="gar", help="its format")
    add("--num_samples", type=COUNT, default=50, help="spread over images, always the same ones")
    add("--batch_size", type=COUNT, default=8)
    add("--max_completion_length", type=COUNT, default=128)
    add("--max_prompt_length", type=COUNT, default=DataConfig.max_prompt_length)
    add("--max_tiles", type=COUNT, default=1)
    add("--num_workers", type=COUNT_OR_0, default=2)
    add("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    add("--output", required=True, type=Path, help="HTML file")
    return parser


@torch.no_grad()
def shown_by(policy: Sa2VAPolicy, dataset: Subset, args: argparse.Namespace) -> Shown:
    """Return a model's greedy captions and masks of all samples."""
    shown, tokens = Shown([], [], [], [], []), args.max_completion_length
    inputs = policy.preprocessor(tokens, args.max_prompt_length)
    loader = eval_loader(dataset, inputs, args.batch_size, args.num_workers)
    for batch in tqdm(loader, desc="samples", leave=False, disable=None):
        features, rows = policy.encode(batch), list(range(len(batch)))
        targets = [mask.to(policy.device) for mask in batch.masks]
        captions = describe(policy, features, rows, targets, tokens)
        shown.captions += captions
        for texts, masks, ious in (
            (captions, shown.heard, shown.heard_iou),
            (batch.captions, shown.found, shown.found_iou),
        ):
            segmented = segment_model_captions(policy, features, rows, texts, tokens).masks
            masks += [mask.cpu() for mask in segmented]
            ious += mask_iou(segmented, targets).tolist()
    return shown


def figure(number: int, sample: dict, before: Shown, after: Shown) -> str:
    """Return the HTML of one sample: five panels and their texts."""
    mask = torch.from_numpy(np.ascontiguousarray(sample["mask"]))
    image = fit_panel(sample["image"], tuple(mask.shape))
    masks = [before.heard[number], after.heard[number], before.found[number], after.found[number]]
    panels = [overlay(image, mask, REGION)] + [overlay(image, each, PREDICTED) for each in masks]
    buffer = io.BytesIO()
    Image.fromarray(side_by_side(panels, [])).save(buffer, "JPEG", quality=85)
    picture = base64.b64encode(buffer.getvalue()).decode()
    lines = [
        f"{number + 1}. {sample['image_id']}, true caption: {sample['caption']}",
        f"before: {before.captions[number]} (IoU {before.heard_iou[number]:.2f})",
        f"after: {after.captions[number]} (IoU {after.heard_iou[number]:.2f})",
        f"masks of the true caption, before {before.found_iou[number]:.2f}, after "
        f"{after.found_iou[number]:.2f}",
    ]
    text = "<br>".join(map(html.escape, lines))
    source = f"data:image/jpeg;base64,{picture}"
    return f'<figure><img src="{source}"><figcaption>{text}</figcaption></figure>'


def page(title: str, figures: list[str]) -> str:
    """Return the page as one HTML text."""
    panels = (
        "Panels: the region; masks by the models' own captions, before and after; masks of the "
        "true caption, before and after."
    )
    head = f"<meta charset='utf-8'><title>{html.escape(title)}</title><style>{STYLE}</style>"
    return f"<!doctype html>{head}<h1>{html.escape(title)}</h1><p>{panels}</p>" + "".join(figures)


def run(args: argparse.Namespace, ranks: RankInfo):
    """Ask both models and write the page; ValueError for what is wrong in the flags and files."""
    check_writable("--output", args.output, is_file=True)
    for flag, path in (("--before", args.before), ("--after", args.after)):
        find_base(path, None, flag, Sa2VAPolicy.family)  # said before data are read
    regions: RegionDataset = opener_of(args.dataset, [], None, is_eval=True)(args.data_dir)
    dataset = Subset(regions, sample_regions(regions.image_keys, args.num_samples))
    shown = []
    for flag, path in (("--before", args.before), ("--after", args.after)):
        policy = open_policy(
            path,
            None,
            "policy",
            ranks.device,
            args.max_completion_length,
            flag=flag,
            max_tiles=args.max_tiles,
            dtype=args.dtype,
        )
        shown.append(shown_by(policy, dataset, args))
    figures = [figure(i, dataset[i], *shown) for i in range(len(dataset))]
    title = f"{len(dataset)} samples: {args.before} and {args.after}"
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(page(title, figures), encoding="utf-8")
    print0(f"{len(dataset)} samples: {args.output}")


def main(argv: list[str] | None = None):
    run_alone(build_parser(), run, argv)


if __name__ == "__main__":
    run_program(main)
