"""Ask a model about a picture of your own: print its answer, and draw the masks that it gives.

A phrase to segment; the frames of a video; a region to describe (a picture of the same size that
is not black inside, a box, or what SAM2 finds under a point); a checkpoint of a run beside its
base; Qwen2.5-VL or Qwen3-VL, which answers with box and points, and SAM2:

    python -m tools.predict --model_path M --image photo.jpg --text "Please segment the dog." \\
        --output dog.png
    python -m tools.predict --model_path M --image photo.jpg --region mask.png  # or --box, --point
    python -m tools.predict --model_path M --video frames/ --text "Please segment the dog." \\
        --output masks/
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
from rl_train.utils.text import counted
from sa2va_hf.prompts import DESCRIBE
from tools.evaluate_flags import flags_of_run
from tools.gar_writer import encode_mask
from tools.picture_model import PictureModel
from tools.predict_inputs import (
    check_outputs,
    chosen_region,
    frame_files,
    open_image,
    read_frames,
    region_at_point,
)

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
    pictures = parser.add_mutually_exclusive_group().add_argument
    pictures("--image", type=Path, help="picture to ask about, or with which the page begins")
    pictures(
        "--video",
        type=Path,
        nargs="+",
        help="frames to ask about in place of --image: pictures of one size, or a folder of them "
        "(Sa2VA, which sees the first five and tracks the masks through the others)",
    )
    add("--compare", type=Path, help="second model or checkpoint, asked the same")
    add("--serve", action="store_true", help="serve a page to try a Sa2VA on (extra app)")
    add("--port", type=COUNT, default=7860, help="port of the page")
    add("--share", action="store_true", help="public address of the page too, by gradio's servers")
    add("--text", help=f'question or instruction; with --region its default is "{DESCRIBE}"')
    region = parser.add_mutually_exclusive_group().add_argument
    region("--region", type=Path, help="picture of a region: not black inside (Sa2VA)")
    corners = ("LEFT", "TOP", "RIGHT", "BOTTOM")
    region("--box", type=int, nargs=4, metavar=corners, help="region to ask about, in pixels")
    region(
        "--point",
        type=int,
        nargs=2,
        metavar=("X", "Y"),
        help="pixel: the region to ask about is what the model's SAM2 finds under it",
    )
    add(
        "--output",
        type=Path,
        help="picture to write: --image with the answer's masks on it; of --video a new folder",
    )
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


@dataclass
class Question:
    """A question's subject: an image or the frames of a video, and a region (H, W) bool, if any."""

    frames: list[Image.Image]
    is_video: bool
    region: np.ndarray | None = None


@dataclass
class Answer:
    """Answer of a model: its text, its masks (F, H, W) bool, and the prompts of SAM2, if any.

    F is the number of frames, of an image 1.
    """

    text: str
    masks: list[np.ndarray]
    prompts: list[PointPrompt] = field(default_factory=list)


def ask_sa2va(policy: Sa2VAPolicy, asked: Question, args: argparse.Namespace) -> Answer:
    """Ask Sa2VA --text, or for a description of a region."""
    model, regions, text = policy.model, None, args.text
    if asked.region is not None and policy.region_prompt != "tokens":
        return Answer(describe_drawn(policy, asked.frames[0], asked.region, args), [])
    if asked.region is not None:
        regions = [torch.from_numpy(asked.region[None])]
        text = text or DESCRIBE
    model.preparing_for_generation(policy.tokenizer, args.max_completion_length)
    # Behind an image stand its regions, or else a line break, as in training.
    text = f"<image>\n{text}" if regions is None else f"<image>{text}"
    seen = dict(video=asked.frames) if asked.is_video else dict(image=asked.frames[0])
    answer = model.predict_forward(**seen, text=text, mask_prompts=regions)
    words = answer["prediction"]
    for end in policy.prompts.ends:
        words = end.split(words, 1)[0]
    return Answer(words.strip(), answer["prediction_masks"])


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
    if args.region or args.box or args.point:
        raise ValueError(
            f"--region, --box, --point: {policy.family} takes none, name the region by --text"
        )
    if args.video:
        raise ValueError(f"--video: {policy.family} is asked about one --image")
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
    return Answer(texts[0], [masks[0][None].cpu().numpy()], prompts)


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


def check_question(args: argparse.Namespace):
    """Raise ValueError, naming the flag, if something is missing or does not go together."""
    if not (args.image or args.video):
        raise ValueError("--image: needed, unless --video names frames or --serve opens a page")
    if args.region or args.box or args.point:
        if args.video:
            raise ValueError("--video: a region is asked about in an --image alone")
    elif not args.text:
        raise ValueError("--text: needed, unless --region, --box or --point names what to describe")


def predict(args: argparse.Namespace):
    """Answer, print, draw and write. Raises ValueError that names the flag."""
    check_question(args)
    check_outputs(args)
    files = frame_files(args.video) if args.video else [args.image]
    if args.video:
        asked = Question(read_frames(files), is_video=True)
    else:
        image = open_image("--image", args.image).convert("RGB")
        asked = Question([image], False, chosen_region(args, image.size))
    models, answers = [path for path in (args.model_path, args.compare) if path], []
    for path in models:
        policy = open_model(path, args)
        if policy.family != Sa2VAPolicy.family:
            answers.append(ask_for_points(policy, asked.frames[0], args))
        else:
            if args.point and asked.region is None:
                asked.region = region_at_point(policy, asked.frames[0], args.point)
            answers.append(ask_sa2va(policy, asked, args))
        if args.compare:
            print(f"{path}:")
        print_answer(answers[-1])
    if args.json:
        write_answers(args.json, models, answers, files if args.video else None)
    if args.output and args.video:
        save_frames(args.output, asked, answers)
    elif args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        draw_frame(asked, answers, 0).save(args.output)
        masks = f"{counted(len(answers[0].masks), 'mask')} of the answer"
        masks = "the masks of both" if args.compare else masks
        print(f"{args.output}: {args.image} with {masks}")


def print_answer(answer: Answer):
    """Print what a model says, and how large each of its masks is."""
    print(answer.text)
    for number, mask in enumerate(answer.masks, 1):
        sizes = mask.sum((1, 2))  # (F,)
        if len(sizes) == 1:
            print(f"mask {number}: {sizes[0]:,d} of {mask.size:,d} pixels")
        else:
            print(
                f"mask {number}: in {(sizes > 0).sum()} of {len(sizes)} frames, "
                f"{sizes.min():,d} to {sizes.max():,d} of {mask[0].size:,d} pixels"
            )
    if not answer.masks:
        print("the answer has no mask")


def write_answers(path: Path, models: list[Path], answers: list[Answer], frames: list[Path] | None):
    """Write the answers as JSON; of a video each mask is a list, one of each frame."""
    records = []
    for model, answer in zip(models, answers):
        masks = [[encode_mask(frame) for frame in mask] for mask in answer.masks]
        record = dict(model=str(model), text=answer.text)
        if frames is None:
            records.append(record | dict(masks=[mask[0] for mask in masks]))
        else:
            records.append(record | dict(frames=[str(frame) for frame in frames], masks=masks))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(records, indent=1) + "\n")


def draw_frame(asked: Question, answers: list[Answer], frame: int) -> Image.Image:
    """Return a frame with the masks of each answer, from left to right."""
    image = asked.frames[frame]
    image = image if asked.region is None else tint(image, asked.region, REGION)
    masks = [[mask[frame] for mask in answer.masks] for answer in answers]
    return beside([draw(image, own, answer.prompts) for own, answer in zip(masks, answers)])


def save_frames(folder: Path, asked: Question, answers: list[Answer]):
    """Write each frame of a video with its masks as 0001.png and so on."""
    folder.mkdir(parents=True, exist_ok=True)
    for frame in range(len(asked.frames)):
        draw_frame(asked, answers, frame).save(folder / f"{frame + 1:04d}.png")
    masks = "with their masks" if any(answer.masks for answer in answers) else "without a mask"
    print(f"{folder}: {len(asked.frames)} frames {masks}")


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

    for name in ("text", "video", "region", "box", "point", "output", "json"):
        if getattr(args, name):
            raise ValueError(f"--{name}: not together with --serve")
    image = args.image and open_image("--image", args.image).convert("RGB")
    models = []
    for path in filter(None, (args.model_path, args.compare)):
        print(f"loading {path}", flush=True)
        policy = open_model(path, args)
        if policy.family != Sa2VAPolicy.family:
            raise ValueError(f"--serve: the page asks a Sa2VA, and {path} is of {policy.family}")
        models.append(PictureModel(str(path), policy, args.max_completion_length))
    predict_page.serve(models, image, args.port, args.share)


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
