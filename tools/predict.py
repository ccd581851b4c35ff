"""Ask a model about a picture of your own: print its answer, and draw the masks that it gives.

A phrase to segment, a region to describe (a picture of the same size, not black inside), a
checkpoint of a run beside its base; Qwen2.5-VL or Qwen3-VL, which answers with box and points, and
SAM2:

    python -m tools.predict --model_path M --image photo.jpg --text "Please segment the dog." \\
        --output dog.png
    python -m tools.predict --model_path M --image photo.jpg --region mask.png  # or --box X Y X Y
    python -m tools.predict --model_path O/checkpoint_step_N --compare M --image photo.jpg ...
    python -m tools.predict --model_path M --serve                       # a page in a browser
    python -m tools.predict --model_path Q --sam_path S --answer_style segzero --image photo.jpg \\
        --text "the dog" --output dog.png

The answer is greedy. Sa2VA is asked the text as it stands (`Sa2VAModel.predict_forward`);
Qwen-VL is asked for box and points of what the text names.
"""

import argparse
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
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
from rl_train.points.parser import PointPrompt
from rl_train.policies.base import Policy
from rl_train.policies.qwen_vl import QwenVLPolicy
from rl_train.policies.sa2va import Sa2VAPolicy
from rl_train.rollout import Batch
from rl_train.tasks.base import TaskContext
from rl_train.tasks.point_segmentation import PointSegmentation
from rl_train.utils.command_line import FlagParser, run_program
from rl_train.utils.io import check_writable
from sa2va_hf.prompts import DESCRIBE
from tools.evaluate_flags import flags_of_run
from tools.gar_writer import encode_mask
from tools.picture_model import PictureModel, box_region

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
    add("--image", type=Path, help="picture to ask about (required, unless --serve)")
    add("--compare", type=Path, help="second model or checkpoint, asked the same")
    add("--serve", action="store_true", help="serve a page to try a Sa2VA on (extra app)")
    add("--port", type=COUNT, default=7860, help="port of the page")
    add("--share", action="store_true", help="public address of the page too, by gradio's servers")
    add("--text", help=f'question or instruction; with --region its default is "{DESCRIBE}"')
    add("--region", type=Path, help="picture of a region to ask about: not black inside (Sa2VA)")
    add(
        "--box",
        type=int,
        nargs=4,
        metavar=("LEFT", "TOP", "RIGHT", "BOTTOM"),
        help="region to ask about, in pixels, in place of --region",
    )
    add("--output", type=Path, help="picture to write: --image with the answer's masks on it")
    add("--json", type=Path, help="file to write: the answer and its masks as COCO's run lengths")
    add(
        "--role",
        choices=["policy", "teacher"],
        default="policy",
        help="weights to take of a checkpoint",
    )
    add("--device", default="cuda" if on_gpu else "cpu", help="device that the model runs on")
    add(
        "--dtype",
        choices=["float32", "bfloat16"],
        default="bfloat16" if on_gpu else "float32",
        help="type of the weights (default: bfloat16, on the CPU float32)",
    )
    add(
        "--max_completion_length",
        type=COUNT,
        default=256,
        help="longest answer, tokens",
    )
    add("--sam_path", help="SAM2 folder, which Qwen-VL needs beside it")
    add(
        "--image_size",
        type=COUNT_OR_0,
        default=PolicyConfig.image_size,
        help="side in pixels of the square to which images are resized, for Qwen-VL; 0 keeps their "
        "shape (default: 840; with Qwen3-VL 832)",
    )
    add(
        "--max_image_tokens",
        type=COUNT,
        default=PolicyConfig.max_image_tokens,
        help="largest number of tokens of an image that keeps its shape, for Qwen-VL",
    )
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


def chosen_region(args: argparse.Namespace, size: tuple[int, int]) -> np.ndarray | None:
    """Return the (H, W) bool region of --region or --box in a picture of `size` (W, H), if any.

    Raises ValueError.
    """
    if args.region and args.box:
        raise ValueError(f"--box {args.box}: not together with --region")
    if args.region:
        return read_region(args.region, size)
    if not args.box:
        return None
    left, top, right, bottom = args.box
    if not (0 <= left < right <= size[0] and 0 <= top < bottom <= size[1]):
        corners = " ".join(map(str, args.box))
        raise ValueError(f"--box {corners}: no box inside --image of {size[0]} x {size[1]} pixels")
    return box_region(args.box, size)


@dataclass
class Answer:
    """Answer of a model: its text, its masks (H, W) bool, and the prompts of SAM2, if any."""

    text: str
    masks: list[np.ndarray]
    prompts: list[PointPrompt] = field(default_factory=list)


def ask_sa2va(
    policy: Sa2VAPolicy, image: Image.Image, region: np.ndarray | None, args: argparse.Namespace
) -> Answer:
    """Ask Sa2VA --text, or for a description of a region."""
    model, regions, text = policy.model, None, args.text
    if region is not None and policy.region_prompt != "tokens":
        return Answer(describe_drawn(policy, image, region, args), [])
    if region is not None:
        regions = [torch.from_numpy(region[None])]
        text = text or DESCRIBE
    model.preparing_for_generation(policy.tokenizer, args.max_completion_length)
    # Behind an image stand its regions, or else a line break, as in training.
    text = f"<image>\n{text}" if regions is None else f"<image>{text}"
    answer = model.predict_forward(image=image, text=text, mask_prompts=regions)
    words = answer["prediction"]
    for end in policy.prompts.ends:
        words = end.split(words, 1)[0]
    return Answer(words.strip(), [mask[0] for mask in answer["prediction_masks"]])


def describe_drawn(
    policy: Sa2VAPolicy, image: Image.Image, region: np.ndarray, args: argparse.Namespace
) -> str:
    """Return the description of a region by a model that sees it drawn on the image.

    Raises ValueError for a question of one's own: `predict_forward` takes no such region.
    """
    if args.text:
        raise ValueError(
            f"--text {args.text}: with --region this model is asked for a description alone"
        )
    sample = dict(image=image, mask=region, caption="", category="", image_id=str(args.image))
    inputs = policy.preprocessor(args.max_completion_length)
    inputs = inputs.collate([inputs.prepare(sample)])
    batch = Batch([0], [torch.from_numpy(region)], [""], [str(args.image)], [], inputs)
    features = policy.encode(batch)
    prompts = policy.describe_prompts(features, [0], inputs.prompt_masks)
    return policy.complete(features, prompts, 1, args.max_completion_length)[1][0]


def ask_for_points(policy: QwenVLPolicy, image: Image.Image, args: argparse.Namespace) -> Answer:
    """Ask Qwen-VL for box and points of --text, of which SAM2 draws the mask."""
    if args.region or args.box:
        raise ValueError(
            f"--region {args.region or args.box}: {policy.family} takes none, name it by --text"
        )
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
        return Answer(f"{texts[0]}\n(no box and points: {answer.reason})", [])
    prompts = [answer.prompt]
    masks, *_ = segment_points(policy, features, [0], prompts, task.options.sam_passes)
    return Answer(texts[0], [masks[0].cpu().numpy()], prompts)


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


def open_model(path: Path, args: argparse.Namespace) -> Policy:
    """Open --model_path or --compare. Raises ValueError that names the flag."""
    return open_policy(
        path,
        None,
        args.role if path == args.model_path else "policy",
        args.device,
        args.max_completion_length,
        flag="--model_path" if path == args.model_path else "--compare",
        dtype=args.dtype,
        sam_path=args.sam_path,
        image_size=args.image_size,
        max_image_tokens=args.max_image_tokens,
    )


def predict(args: argparse.Namespace):
    """Answer, print, draw and write. Raises ValueError that names the flag."""
    if args.image is None:
        raise ValueError("--image: needed, unless --serve opens a page")
    if not (args.text or args.region or args.box):
        raise ValueError("--text: needed, unless --region or --box names what to describe")
    for flag, file in (("--output", args.output), ("--json", args.json)):
        if file:
            check_writable(flag, file, is_file=True)
    if args.output and args.output.suffix.lower() not in Image.registered_extensions():
        raise ValueError(f"--output {args.output}: needs the ending of a picture, such as .png")
    image = open_image("--image", args.image).convert("RGB")
    region = chosen_region(args, image.size)
    drawn = image if region is None else tint(image, region, REGION)
    pictures, records = [], []
    for path in filter(None, (args.model_path, args.compare)):
        policy = open_model(path, args)
        if policy.family == Sa2VAPolicy.family:
            answer = ask_sa2va(policy, image, region, args)
        else:
            answer = ask_for_points(policy, image, args)
        if args.compare:
            print(f"{path}:")
        print_answer(answer)
        pictures.append(draw(drawn, answer.masks, answer.prompts))
        masks = [encode_mask(mask) for mask in answer.masks]
        records.append(dict(model=str(path), text=answer.text, masks=masks))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(records, indent=1) + "\n")
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        beside(pictures).save(args.output)
        count = len(answer.masks)
        masks = f"{count} mask{'s' * (count != 1)} of the answer"
        masks = "the masks of both" if args.compare else masks
        print(f"{args.output}: {args.image} with {masks}")


def print_answer(answer: Answer):
    """Print what a model says, and how large each of its masks is."""
    print(answer.text)
    for number, mask in enumerate(answer.masks, 1):
        print(f"mask {number}: {mask.sum():,d} of {mask.size:,d} pixels")
    if not answer.masks:
        print("the answer has no mask")


def beside(pictures: list[Image.Image]) -> Image.Image:
    """Return pictures of one size from left to right."""
    width, height = pictures[0].size
    row = Image.new("RGB", (width * len(pictures), height))
    for number, picture in enumerate(pictures):
        row.paste(picture, (number * width, 0))
    return row


def serve(args: argparse.Namespace):
    """Serve the page of one model or two. Raises ValueError that names the flag."""
    if importlib.util.find_spec("gradio") is None:
        raise ValueError('--serve: needs gradio: pip install -e ".[app]"')
    from tools import predict_page  # gradio is an extra

    models = []
    for path in filter(None, (args.model_path, args.compare)):
        policy = open_model(path, args)
        if policy.family != Sa2VAPolicy.family:
            raise ValueError(f"--serve: the page asks a Sa2VA, and {path} is of {policy.family}")
        models.append(PictureModel(str(path), policy, args.max_completion_length))
    predict_page.serve(models, args.port, args.share)


def main(argv: Sequence[str] | None = None):
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        parser.set_defaults(**flags_of_run(args.model_path))
        args = parser.parse_args(argv)
        serve(args) if args.serve else predict(args)
    except ValueError as error:
        raise SystemExit(f"predict: {error}") from error


if __name__ == "__main__":
    run_program(main)
