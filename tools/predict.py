"""Ask a model about a picture of your own: print its answer, and draw the masks that it gives.

A phrase to segment, a region to describe (a picture of the same size, not black inside), a
checkpoint of a run; Qwen2.5-VL or Qwen3-VL, which answers with box and points, and SAM2:

    python -m tools.predict --model_path M --image photo.jpg --text "Please segment the dog." \\
        --output dog.png
    python -m tools.predict --model_path M --image photo.jpg --region mask.png
    python -m tools.predict --model_path O/checkpoint_step_N --image photo.jpg --text "..." ...
    python -m tools.predict --model_path Q --sam_path S --answer_style segzero --image photo.jpg \\
        --text "the dog" --output dog.png

The answer is greedy. Sa2VA is asked the text as it stands (`Sa2VAModel.predict_forward`);
Qwen-VL is asked for box and points of what the text names.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from rl_train.config.flags import COUNT, COUNT_OR_0, add_flags, read_flags
from rl_train.config.grpo_config import PolicyConfig
from rl_train.data.loader import Batches
from rl_train.evaluation.point_metrics import segment_points
from rl_train.export.load_policy import open_policy
from rl_train.loggers.pictures import PREDICTED, REGION, overlay
from rl_train.policies.qwen_vl import QwenVLPolicy
from rl_train.policies.sa2va import Sa2VAPolicy
from rl_train.rollout import Batch
from rl_train.tasks.base import TaskContext
from rl_train.tasks.point_segmentation import PointSegmentation
from rl_train.utils.command_line import FlagParser, run_program
from rl_train.utils.io import check_writable
from sa2va_hf.prompts import DESCRIBE
from tools.evaluate_flags import flags_of_run

# Colours of the masks of an answer, one after the other.
COLORS = (PREDICTED, (0, 160, 255), (0, 200, 80), (255, 120, 0), (150, 80, 255))


def build_parser() -> FlagParser:
    parser = FlagParser(
        prog="python -m tools.predict",
        description=__doc__,
    )
    on_gpu = torch.cuda.is_available()
    add = parser.add_argument
    add("--model_path", required=True, type=Path, help="model folder, or checkpoint of a run")
    add("--image", required=True, type=Path, help="picture to ask about")
    add("--text", help=f'question or instruction; with --region its default is "{DESCRIBE}"')
    add("--region", type=Path, help="picture of a region to ask about: not black inside (Sa2VA)")
    add("--output", type=Path, help="picture to write: --image with the answer's masks on it")
    add(
        "--role",
        choices=["policy", "teacher"],
        default="policy",
        help="whose weights of a checkpoint",
    )
    add("--device", default="cuda" if on_gpu else "cpu", help="default: %(default)s")
    add(
        "--dtype",
        choices=["float32", "bfloat16"],
        default="bfloat16" if on_gpu else "float32",
        help="type of the weights; default: bfloat16, on the CPU float32",
    )
    add(
        "--max_completion_length",
        type=COUNT,
        default=256,
        help="longest answer, tokens; default: %(default)s",
    )
    add("--sam_path", help="SAM2 folder, which Qwen-VL needs beside it")
    add("--image_size", type=COUNT_OR_0, default=PolicyConfig.image_size)
    add("--max_image_tokens", type=COUNT, default=PolicyConfig.max_image_tokens)
    add_flags(parser, PointSegmentation.Options, "answers of Qwen-VL, as in training")
    return parser


def open_image(flag: str, path: Path) -> Image.Image:
    """Read a picture. Raises ValueError that names the flag."""
    try:
        with Image.open(path) as image:
            image.load()
            return image
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        reason = error.strerror if isinstance(error, FileNotFoundError) else error
        raise ValueError(f"{flag} {path} is no picture that can be read: {reason}") from error


def read_region(path: Path, size: tuple[int, int]) -> np.ndarray:
    """Return the (H, W) bool region of a picture of `size` (W, H). Raises ValueError."""
    image = open_image("--region", path)
    if image.size != size:
        raise ValueError(
            f"--region {path}: is {image.width} x {image.height} pixels, and --image "
            f"{size[0]} x {size[1]}"
        )
    region = np.asarray(image.convert("RGB")).any(-1)
    if not region.any():
        raise ValueError(f"--region {path}: is black everywhere, so that no region is named")
    return region


def ask_sa2va(
    policy: Sa2VAPolicy, image: Image.Image, args: argparse.Namespace
) -> tuple[str, list[np.ndarray]]:
    """Return Sa2VA's answer and its masks (H, W) bool."""
    model, regions, text = policy.model, None, args.text
    if args.region and policy.region_prompt != "tokens":
        return describe_drawn(policy, image, args), []
    if args.region:
        regions = [torch.from_numpy(read_region(args.region, image.size)[None])]
        text = text or DESCRIBE
    model.preparing_for_generation(policy.tokenizer, args.max_completion_length)
    # Behind an image stand its regions, or else a line break, as in training.
    text = f"<image>{text}" if args.region else f"<image>\n{text}"
    answer = model.predict_forward(image=image, text=text, mask_prompts=regions)
    words = answer["prediction"]
    for end in policy.prompts.ends:
        words = end.split(words, 1)[0]
    return words.strip(), [mask[0] for mask in answer["prediction_masks"]]


def describe_drawn(policy: Sa2VAPolicy, image: Image.Image, args: argparse.Namespace) -> str:
    """Return the description of --region by a model that sees it drawn on the image.

    Raises ValueError for a question of one's own: `predict_forward` takes no such region.
    """
    if args.text:
        raise ValueError(
            f"--text {args.text}: with --region this model is asked for a description alone"
        )
    region = read_region(args.region, image.size)
    sample = dict(image=image, mask=region, caption="", category="", image_id=str(args.image))
    inputs = policy.preprocessor(args.max_completion_length)
    inputs = inputs.collate([inputs.prepare(sample)])
    batch = Batch([0], [torch.from_numpy(region)], [""], [str(args.image)], [], inputs)
    features = policy.encode(batch)
    prompts = policy.describe_prompts(features, [0], inputs.prompt_masks)
    return policy.complete(features, prompts, 1, args.max_completion_length)[1][0]


def ask_for_points(
    policy: QwenVLPolicy, image: Image.Image, args: argparse.Namespace
) -> tuple[str, list[np.ndarray], list]:
    """Return Qwen-VL's answer, the mask (H, W) bool that SAM2 draws, and its prompt."""
    if args.region:
        raise ValueError(f"--region {args.region}: {policy.family} takes none, name it by --text")
    task = PointSegmentation(
        read_flags(args, PointSegmentation.Options),
        TaskContext(policy, None, args.max_completion_length),
    )
    whole = np.ones((image.height, image.width), dtype=bool)
    sample = dict(image=image, mask=whole, caption=args.text, category="", image_id=str(args.image))
    batch = Batches([sample], policy.preprocessor(args.max_completion_length))[[0]]
    features = policy.encode(batch)
    _, texts = policy.complete(
        features, task.prompts(batch, features), 1, args.max_completion_length
    )
    (answer,) = task.parse(texts, features, [0])
    if answer.prompt is None:
        return f"{texts[0]}\n(no box and points: {answer.reason})", [], []
    prompts = [answer.prompt]
    masks, *_ = segment_points(policy, features, [0], prompts, task.options.sam_passes)
    return texts[0], [masks[0].cpu().numpy()], prompts


def draw(image: Image.Image, masks: list[np.ndarray], prompts: list) -> Image.Image:
    """Return the image with each mask tinted in a colour of its own; a prompt with its one mask."""
    if prompts:
        return overlay(image, torch.from_numpy(masks[0]), COLORS[0], prompts[0])
    for number, mask in enumerate(masks):
        image = tint(image, mask, COLORS[number % len(COLORS)])
    return image


def tint(image: Image.Image, mask: np.ndarray, color: tuple[int, int, int]) -> Image.Image:
    """Return the image with a mask (H, W) bool in a colour, through which it is seen."""
    tinted = Image.blend(image, Image.new("RGB", image.size, color), 0.4)
    return Image.composite(tinted, image, Image.fromarray(mask))


def predict(args: argparse.Namespace):
    """Answer, print and draw. Raises ValueError that names the flag."""
    if not (args.text or args.region):
        raise ValueError("--text: needed, unless --region names what to describe")
    if args.output:
        check_writable("--output", args.output, is_file=True)
        if args.output.suffix.lower() not in Image.registered_extensions():
            raise ValueError(f"--output {args.output}: needs the ending of a picture, such as .png")
    image = open_image("--image", args.image).convert("RGB")
    policy = open_policy(
        args.model_path,
        None,
        args.role,
        args.device,
        args.max_completion_length,
        dtype=args.dtype,
        sam_path=args.sam_path,
        image_size=args.image_size,
        max_image_tokens=args.max_image_tokens,
    )
    prompts = []
    if policy.family == Sa2VAPolicy.family:
        answer, masks = ask_sa2va(policy, image, args)
    else:
        answer, masks, prompts = ask_for_points(policy, image, args)
    print(answer)
    for number, mask in enumerate(masks):
        print(f"mask {number + 1}: {mask.sum():,d} of {mask.size:,d} pixels")
    if not masks:
        print("the answer has no mask")
    if not args.output:
        return
    if args.region:
        image = tint(image, read_region(args.region, image.size), REGION)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    draw(image, masks, prompts).save(args.output)
    print(
        f"{args.output}: {args.image} with {len(masks)} mask{'s' * (len(masks) != 1)} of the answer"
    )


def main(argv: Sequence[str] | None = None):
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        parser.set_defaults(**flags_of_run(args.model_path))
        predict(parser.parse_args(argv))
    except ValueError as error:
        raise SystemExit(f"predict: {error}") from error


if __name__ == "__main__":
    run_program(main)
