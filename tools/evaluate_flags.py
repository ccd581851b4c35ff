"""The flags of `tools.evaluate`, those of the samples also of other tools."""

from dataclasses import fields
from pathlib import Path

from rl_train.config.flags import COUNT, COUNT_OR_0, POSITIVE, add_flags
from rl_train.config.grpo_config import DataConfig, PolicyConfig
from rl_train.config.saved import REMOVED
from rl_train.data import EVAL_DATASETS
from rl_train.data.registry import eval_dataset_name
from rl_train.tasks.point_segmentation import PointSegmentation
from rl_train.utils.command_line import FlagParser
from rl_train.utils.io import read_json

# Flags of models that answer with box and points.
POINT_FLAGS = ("sam_path", "image_size", "max_image_tokens")
POINT_FLAGS += tuple(f.metadata["name"] or f.name for f in fields(PointSegmentation.Options))
NOT_SAVED = ("output", "before", "num_workers")  # flags that change no number


def build_parser(description: str) -> FlagParser:
    """Build the parser of all flags, with the module's own description."""
    parser = FlagParser(
        prog="python -m tools.evaluate",
        description=description,
        elsewhere={
            "--compare": "only with --run",
            "--seg_state": f"no such flag, {REMOVED['seg_state'][1]}",
        },
    )
    add = parser.add_argument
    add(
        "--model_path",
        required=True,
        type=Path,
        help="Sa2VA folder in the original layout, or a checkpoint folder of a run",
    )
    add_data_flags(parser)
    add(
        "--checkpoint",
        type=Path,
        help="checkpoint_step_N folder of a run that started from --model_path",
    )
    add(
        "--role",
        choices=["policy", "teacher"],
        default="policy",
        help="weights to take of a checkpoint",
    )
    add(
        "--legacy_cleaner",
        action="store_true",
        help="caption_meteor of captions without the boilerplate that published region-caption "
        "numbers were cleaned of; training scores captions as they are",
    )
    add(
        "--attributes",
        type=Path,
        help="JSON file {attribute: {value: [phrases]}}: accuracy and precision of what captions "
        "state (docs/evaluation.md)",
    )
    ways = ["tokens", "outline", "box", "coordinates"]
    add("--region_prompt", choices=ways, help="how regions are asked about, as in training")
    add(
        "--think",
        action="store_true",
        help="ask for thoughts before the answer, as in training, and measure the masks of true "
        "captions alone; default: as the checkpoint's run",
    )
    add("--sam_path", help="SAM2 folder, which Qwen-VL needs beside it")
    add(
        "--image_size",
        type=COUNT_OR_0,
        default=PolicyConfig.image_size,
        help="side in pixels of the square to which images are resized, for Qwen-VL; 0 keeps their "
        "shape (default: the run's, else 840; with Qwen3-VL 832)",
    )
    add(
        "--max_image_tokens",
        type=COUNT,
        default=PolicyConfig.max_image_tokens,
        help="largest number of tokens of an image that keeps its shape, for Qwen-VL",
    )
    add_flags(parser, PointSegmentation.Options, "answers of Qwen-VL, as in training")
    add("--best_of", type=COUNT_OR_0, default=0, help="answers G to sample of each region too")
    add(
        "--protocol",
        choices=["sa2va", "sa2va_captions", "visionreasoner"],
        help="ask and count as others do, and measure nothing else: sa2va = Sa2VA's own evaluation "
        "of RefCOCO, sa2va_captions = that of captions of RefCOCOg's regions, --max_tiles is then "
        "12 by default; visionreasoner = that of Seg-Zero and VisionReasoner, --image_size is then "
        "840 and --max_completion_length 1,024 by default",
    )
    add(
        "--train_eval_overlap",
        choices=["refuse", "drop", "keep"],
        help="regions on images that the checkpoint's run was trained on, whose data sets are "
        "opened again for it; default: nobody looks",
    )
    add("--temperature", type=POSITIVE, default=1.0, help="temperature of the sampled answers")
    add(
        "--output",
        type=Path,
        help="JSON file for means, intervals, per-sample values, captions and flags",
    )
    add(
        "--before",
        type=Path,
        help="--output of an earlier run on the same samples: print the paired differences to it",
    )
    return parser


def add_data_flags(parser: FlagParser):
    """Add the flags that name the samples, and how they and models are read."""
    add = parser.add_argument
    add("--data_dir", required=True, help="folder of held-out regions")
    add(
        "--dataset",
        type=eval_dataset_name,
        default="gar",
        metavar="NAME",
        help=f"layout of the data: {', '.join(EVAL_DATASETS)}, or module:Class of your own reader",
    )
    add(
        "--subsets",
        nargs="+",
        default=[],
        metavar="SUBSET",
        help="folders of --data_dir to read (gar, dam; default: all), or the split (default: val)",
    )
    add(
        "--image_root",
        help="folder of the images that a file names (RefCOCO: COCO's train2014, or one that holds "
        "it); default: looked for in --data_dir",
    )
    add("--num_samples", type=COUNT, help="regions to measure, spread over images; default all")
    add(
        "--distractors",
        action="store_true",
        help="read all regions of an image: does a mask lie on the right one?",
    )
    add("--batch_size", type=COUNT, default=8, help="regions at a time on each process")
    add("--max_completion_length", type=COUNT, default=128, help="longest answer, tokens")
    add(
        "--max_prompt_length",
        type=COUNT,
        default=DataConfig.max_prompt_length,
        help="largest number of tokens of a caption in a prompt",
    )
    add("--max_tiles", type=COUNT, default=1, help="largest number of tiles of an image (Sa2VA)")
    add("--num_workers", type=COUNT_OR_0, default=2, help="processes that read images")
    add(
        "--dtype",
        choices=["float32", "bfloat16"],
        default="bfloat16",
        help="type of the frozen weights",
    )


def flags_of_run(folder: Path) -> dict:
    """Return {flag: value} of --think and POINT_FLAGS by a checkpoint's run; else {}."""
    if not (folder / "training_state.pt").is_file():
        return {}
    return {
        name: value
        for name, value in read_json(folder / "config.json").items()
        if name in (*POINT_FLAGS, "think")
    }
