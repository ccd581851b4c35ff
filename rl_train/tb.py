"""What a person sees of a run: TensorBoard curves and pictures, rollouts as JSON lines."""

import json
import os
import textwrap
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFilter, ImageFont
from torch.utils.tensorboard.summary import image as image_summary
from torch.utils.tensorboard.summary import scalar, text

from rl_train.data.masks import encode_mask
from rl_train.events import Events
from rl_train.files import Appended, DamagedFile, writing
from rl_train.foreign_curves import curves_table
from rl_train.grpo import group_std
from rl_train.objective import Work
from rl_train.points.answers import Answer
from rl_train.types import Outcome
from rl_train.wandb_mirror import Mirror

REGION, FOUND = (255, 196, 0), (255, 0, 200)  # colours of the given region and of a model's mask
BOX, POSITIVE, NEGATIVE = (0, 120, 255), (0, 190, 0), (230, 0, 0)  # of what prompts a mask
RADIUS = 4  # of a point, in pixels
PICTURE_WIDTH, PICTURE_HEIGHT = 240, 720  # of one side, in pixels, at most
FONT_SIZE, LINE_CHARACTERS = 14, 66  # of the text below
MASK_SIDE = 256  # of a mask in the rollouts, in pixels, at most


class Log:
    """TensorBoard events, pictures and rollouts of a run; on other ranks only rollouts.

    Lines and points beyond the step `start`, left by a killed run, are dropped. Raises DamagedFile
    if one of the lines cannot be read, and the file stays as it is; CannotWrite at a full disk.

    Args:
        mirror: gets the same points and pictures; on the first rank.
    """

    def __init__(self, output_dir, ranks, start: int, mirror: Mirror | None = None):
        folder, self.start = Path(output_dir) / "rollouts", start
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for file in folder.glob("rank*.jsonl"):
                number = int(file.stem.removeprefix("rank"))  # also of a run on more ranks
                if number % ranks.world_size == ranks.rank:
                    os.truncate(file, end_of_lines_before(start, file))
        self.jsonl = Appended(folder / f"rank{ranks.rank}.jsonl")
        self.events = Events(Path(output_dir) / "tensorboard", start) if ranks.is_main else None
        self.mirror = mirror

    def scalars(self, values: dict[str, float], step: int):
        if self.events:
            self.events.add([scalar(name, value) for name, value in values.items()], step)
        if self.mirror:
            self.mirror.scalars(values, step)

    def hparams(self, flags: dict):  # as text: hparams events would open a run of their own
        if self.events:
            table = "\n".join(f"    {name} = {value}" for name, value in sorted(flags.items()))
            self.events.add([text("hparams", table)], self.start)
            self.events.add([text("curves", curves_table())], self.start)

    def rollouts(self, step: int, work: Work):
        """One JSON line per row, groups one behind the other; null is a reward that could not be
        obtained. Masks, last in a line, are `small_mask`s."""
        rollout, outcome = work.rollout, work.outcome
        image_ids, captions = map(
            rollout.of_rows, (rollout.batch.image_ids, rollout.batch.captions)
        )
        lines = []
        for row, answer in enumerate(rollout.texts):
            line = dict(step=step, task=work.task.name, image_id=image_ids[row])
            line |= dict(caption=captions[row], completion=answer, reward=_number(work.reward[row]))
            line["advantage"] = round(work.advantages[row].item(), 4)
            line |= {name: _number(values[row]) for name, values in outcome.rewards.items()}
            line |= {"reply": outcome.replies[row]} if outcome.replies else {}
            line |= {"refused": reason for reason, rows in outcome.refused.items() if rows[row]}
            line |= _judged(outcome, row)
            lines.append(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
        self.jsonl.write("".join(lines).encode(errors="backslashreplace"))  # surrogates as \ud800

    def pictures(self, step: int, work: Work, policy, count: int = 3):
        """Draw `count` rows of the group whose rewards differ most."""
        if self.events:
            size = work.rollout.num_generations
            first = group_std(work.reward, size).argmax().item() * size
            image = policy.picture(work.rollout.batch, first // size)
            for k in range(min(count, size)):
                picture = rollout_picture(image, work, first + k)
                name = f"{work.task.name}/rollout_{k}"
                self.events.add([image_summary(name, picture, dataformats="HWC")], step)
                if self.mirror:
                    self.mirror.picture(name, picture, step)

    def sync(self):
        """Wait until all is on the disk, before a checkpoint that counts on it."""
        self.jsonl.sync()
        if self.events:
            self.events.file.sync()

    def close(self):
        self.jsonl.close()
        if self.events:
            self.events.file.close()
        if self.mirror:
            self.mirror.close()


def end_of_lines_before(start: int, file: Path) -> int:
    """Where the lines of steps before `start` end, or one that a kill tore. Raises DamagedFile.

    Steps never fall in a file, since each resume cuts it.
    """
    number, end = 1, 0
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n") or json.loads(line)["step"] >= start:
                    break
                end += len(line)
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedFile(file, f"line {number}: {error}") from error
    return end


def _number(value: torch.Tensor) -> float | None:
    """A reward as JSON can hold it: None where it is NaN."""
    return None if value.isnan() else round(value.item(), 8)


def _judged(outcome: Outcome, row: int) -> dict:
    """What a line has of the mask that was judged, and of the box and points that prompted it.

    Coordinates are of the sample's mask, in pixels; "mask_without" is that without the negative
    points, where there are any.
    """
    found, answer = {}, outcome.answers[row] if outcome.answers else None
    if answer:
        kinds = dict(boxes=answer.boxes, positive=answer.positive, negative=answer.negative)
        found["prompt"] = {
            kind: [[round(value, 1) for value in one] for one in some]
            for kind, some in kinds.items()
        }
        if answer.negative:
            found["mask_without"] = small_mask(outcome.masks_without[row])
    return found | ({"mask": small_mask(outcome.masks[row])} if outcome.masks else {})


def small_mask(mask: torch.Tensor) -> dict:
    """{"size": [h, w], "counts": str}, COCO's compressed run lengths, of a mask (H, W) bool.

    Its longer side is MASK_SIDE pixels at most; a smaller mask keeps its size.
    """
    scale = min(MASK_SIDE / max(mask.shape), 1.0)
    size = [max(round(n * scale), 1) for n in mask.shape]
    pixels = mask.to(torch.uint8)[None, None]
    small = F.interpolate(pixels, size, mode="nearest-exact")[0, 0]  # where the mask lies
    return dict(size=size, counts=encode_mask(small.cpu().numpy())["counts"].decode())


def rollout_picture(image: Image.Image, work: Work, row: int) -> np.ndarray:
    """(H, W, 3) uint8: the region (yellow) left, the judged mask (magenta) right, text below.

    Of an answer that prompts a mask its box and points too (green; negative ones red), and at the
    right the mask that it makes without the negative points.

    Args:
        image: of the row's sample, in any size and shape: it is drawn in the mask's shape.
    """
    batch, i = work.rollout.batch, row // work.rollout.num_generations
    height, width = batch.sizes[i]
    scale = min(PICTURE_WIDTH / width, PICTURE_HEIGHT / height)
    size = (max(round(width * scale), 1), max(round(height * scale), 1))
    image, outcome = image.resize(size), work.outcome
    panels = [_overlay(image, batch.masks[i], REGION), _overlay(image, outcome.masks[row], FOUND)]
    if outcome.answers:
        panels.append(_overlay(image, outcome.masks_without[row], FOUND))
        shape = (size[0] / width, size[1] / height)
        for panel in panels:
            _prompt(panel, outcome.answers[row], *shape)
    words = [f"answer: {work.rollout.texts[row]}", f"true caption: {batch.captions[i]}"]
    if outcome.answers:
        words.append("masks: of the whole answer, and without its negative points")
    if outcome.replies:
        words.append(f"teacher's reply: {outcome.replies[row]}")
    words.append(f"reward {work.reward[row]:.3f}  advantage {work.advantages[row]:+.2f}")
    lines = [line for word in words for line in textwrap.wrap(word, LINE_CHARACTERS)]
    across = len(panels) * (PICTURE_WIDTH + 8) - 8
    canvas = Image.new("RGB", (across, size[1] + 18 * len(lines) + 8), "white")
    for k, panel in enumerate(panels):
        canvas.paste(panel, (k * (PICTURE_WIDTH + 8), 0))
    draw, font = ImageDraw.Draw(canvas), ImageFont.load_default(FONT_SIZE)
    for k, line in enumerate(lines):
        draw.text((4, size[1] + 4 + 18 * k), line, fill="black", font=font)
    return np.array(canvas)


def _overlay(image: Image.Image, mask: torch.Tensor, color) -> Image.Image:
    """The image with the mask tinted and outlined in `color`."""
    pixels = np.array(image).astype(np.float32)
    stencil = Image.fromarray(mask.cpu().numpy().astype(np.uint8) * 255).resize(
        image.size, Image.NEAREST
    )
    inside, around = np.array(stencil) > 0, np.array(stencil.filter(ImageFilter.MaxFilter(5))) > 0
    pixels[inside] = 0.7 * pixels[inside] + 0.3 * np.array(color)
    pixels[around & ~inside] = color
    return Image.fromarray(pixels.astype(np.uint8))


def _prompt(image: Image.Image, answer: Answer | None, x: float, y: float):
    """Draw an answer's box and points into the image, which is x, y times the mask's size."""
    if answer is None:
        return
    draw, answer = ImageDraw.Draw(image), answer.scaled(x, y)
    for box in answer.boxes:
        draw.rectangle(box, outline=BOX, width=2)
    for points, color in ((answer.positive, POSITIVE), (answer.negative, NEGATIVE)):
        for point in points:
            draw.circle(point, RADIUS, fill=color, outline="white")
