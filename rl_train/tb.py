"""What a person sees of a run: TensorBoard curves and pictures, and the rollouts as readable JSON lines."""

import json
import textwrap
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFilter, ImageFont
from torch.utils.tensorboard import SummaryWriter

from rl_train.files import DamagedFile
from rl_train.grpo import group_std
from rl_train.guards import has_digit, is_whole, repeats

REGION, FOUND = (255, 196, 0), (255, 0, 200)  # colours of the given region and of a model's mask
PICTURE_WIDTH, PICTURE_HEIGHT = 240, 720  # of one side, in pixels, at most
FONT_SIZE, LINE_CHARACTERS = 14, 66  # of the text below


def rollout_sums(
    rollout, rewards: dict[str, torch.Tensor], reward: torch.Tensor
) -> dict[str, float]:
    """Sums over this rank's rows, to be added over ranks and divided by `scalars`."""
    scored = ~reward.isnan()
    values = reward[scored].double()
    captions = rollout.replies or rollout.texts  # what describes: in loop 2 the teacher's replies
    sums = dict(
        rows=len(reward),
        scored=scored.sum(),
        reward=values.sum(),
        reward_squares=(values**2).sum(),
        groups=len(reward) // rollout.num_generations,
        zero_std=(group_std(reward, rollout.num_generations) == 0).sum(),
        length=rollout.valid.sum(),
        truncated=(~rollout.stopped).sum(),
        empty=sum(not text for text in rollout.texts),
        repeats=sum(map(repeats, captions)),
        digits=sum(map(has_digit, captions)),
        whole=sum(map(is_whole, rollout.masks)),
    )
    for name, component in rewards.items():
        sums[f"component/{name}"] = component.nansum()
        sums[f"rows_with/{name}"] = (~component.isnan()).sum()
    if rollout.has_mask:
        groups = [
            rollout.masks[i : i + rollout.num_generations]
            for i in range(0, len(rollout), rollout.num_generations)
        ]
        sums["mask_spread"] = sum(_spread(torch.stack(group)) for group in groups)
        sums["no_seg"] = len(rollout) - len(rollout.seg_rows.unique())
    return {name: float(value) for name, value in sums.items()}


def _spread(masks: torch.Tensor) -> float:
    """1 - mean pairwise IoU of (G, H, W) bool masks; two empty masks are alike."""
    flat = masks.flatten(1).float()
    inter = flat @ flat.T
    area = flat.sum(1)
    union = area[:, None] + area[None] - inter
    iou = torch.where(union > 0, inter / union.clamp(min=1), 1.0)
    off_diagonal = ~torch.eye(len(masks), dtype=torch.bool, device=masks.device)
    return 1 - iou[off_diagonal].mean().item()


def scalars(s: dict[str, float]) -> dict[str, float]:
    """A task's curves from its summed counts; names as TRL's where TRL has them."""
    mean = s["reward"] / max(s["scored"], 1)
    variance = max(s["reward_squares"] - s["scored"] * mean**2, 0) / max(s["scored"] - 1, 1)
    out = dict(
        reward_mean=mean,
        reward_std=variance**0.5,
        frac_zero_std=s["zero_std"] / s["groups"],
        completion_length=s["length"] / s["rows"],
        truncated_frac=s["truncated"] / s["rows"],
        empty_frac=s["empty"] / s["rows"],
        unscored_frac=1 - s["scored"] / s["rows"],
        repeats_frac=s["repeats"] / s["rows"],
        digits_frac=s["digits"] / s["rows"],
        whole_mask_frac=s["whole"] / s["rows"],
    )
    if "loss" in s:  # there was an update
        tokens = max(s["tokens"], 1)
        out |= dict(
            loss=s["loss"],
            policy_loss=s["policy_loss"],
            kl_div=s["kl"] / tokens,
            entropy=s["entropy"] / tokens,
            clip_frac=s["clipped"] / tokens,
        )
    if not s["scored"]:  # no reward was obtained, which is not a reward of 0
        del out["reward_mean"], out["reward_std"]
    for name, value in s.items():
        if name.startswith("component/"):
            component = name.removeprefix("component/")
            if s[f"rows_with/{component}"]:
                out[component] = value / s[f"rows_with/{component}"]
    if "mask_spread" in s:
        out |= dict(mask_spread=s["mask_spread"] / s["groups"], no_seg_frac=s["no_seg"] / s["rows"])
        if "loss" in s:
            out |= dict(
                latent_kl=s["latent_kl"] / max(s["latents"], 1),
                latent_loss=s["latent_loss"],
                mask_loss=s["mask_loss"],
            )
    return out


class Log:
    """TensorBoard events, pictures and rollouts of a run; on ranks other than the first only its rollouts.

    Args:
        start: steps already done; lines and points beyond it, left by a killed run, are dropped.

    Raises:
        DamagedFile: one of the lines that are there cannot be read; the file stays as it is.
    """

    def __init__(self, output_dir, ranks, start: int):
        folder = Path(output_dir) / "rollouts"
        folder.mkdir(parents=True, exist_ok=True)
        for file in folder.glob("rank*.jsonl"):
            if (
                int(file.stem.removeprefix("rank")) % ranks.world_size == ranks.rank
            ):  # of a run on more ranks too
                kept, new = lines_before(start, file), file.with_suffix(".tmp")
                new.write_text("".join(kept))
                new.replace(file)
        self.jsonl = (folder / f"rank{ranks.rank}.jsonl").open("a")
        self.writer = (
            SummaryWriter(Path(output_dir) / "tensorboard", purge_step=start + 1)
            if ranks.is_main
            else None
        )

    def scalars(self, values: dict[str, float], step: int):
        if self.writer:
            for name, value in values.items():
                self.writer.add_scalar(name, value, step)

    def hparams(self, args):
        """The run's flags, as text (hparams events would open a run of their own)."""
        if self.writer:
            self.writer.add_text(
                "hparams", "\n".join(f"    {k} = {v}" for k, v in sorted(vars(args).items())), 0
            )

    def rollouts(self, step: int, task, rollout, rewards, reward, advantages):
        """One JSON line per row; null is a reward that could not be obtained."""
        for row, text in enumerate(rollout.texts):
            i = rollout.sample_of_row[row]
            line = dict(
                step=step,
                task=task.name,
                image_id=rollout.batch.image_ids[i],
                caption=rollout.batch.captions[i],
                completion=text,
                reward=_number(reward[row]),
                advantage=round(advantages[row].item(), 4),
                **{name: _number(value[row]) for name, value in rewards.items()},
            )
            if rollout.replies:
                line["reply"] = rollout.replies[row]
            self.jsonl.write(json.dumps(line, ensure_ascii=False) + "\n")
        self.jsonl.flush()

    def pictures(self, step: int, task, rollout, reward, advantages, count: int = 3):
        """`count` rows of the group whose rewards differ most: region, mask found, what was said and earned."""
        if self.writer:
            first = (
                group_std(reward, rollout.num_generations).argmax().item() * rollout.num_generations
            )
            for k in range(min(count, rollout.num_generations)):
                picture = rollout_picture(task, rollout, first + k, reward, advantages)
                self.writer.add_image(f"{task.name}/rollout_{k}", picture, step, dataformats="HWC")

    def close(self):
        self.jsonl.close()
        if self.writer:
            self.writer.close()


def lines_before(start: int, file: Path) -> list[str]:
    """Lines of the steps before `start`, without a last one that a kill cut off. Raises DamagedFile, naming the line."""
    number, kept = 1, []
    try:
        for number, line in enumerate(file.read_text().split("\n")[:-1], 1):
            if json.loads(line)["step"] < start:
                kept.append(line + "\n")
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedFile(file, f"line {number}: {error}") from error
    return kept


def _number(value: torch.Tensor) -> float | None:
    """A reward as JSON can hold it: None where it is NaN."""
    return None if value.isnan() else round(value.item(), 8)


def rollout_picture(task, rollout, row: int, reward, advantages) -> np.ndarray:
    """(H, W, 3) uint8: the region (outlined yellow) at the left, the rollout's mask (magenta) at the right, text below."""
    i = rollout.sample_of_row[row]
    height, width = rollout.images.sizes[i]
    scale = min(PICTURE_WIDTH / width, PICTURE_HEIGHT / height)
    size = (max(round(width * scale), 1), max(round(height * scale), 1))
    image = Image.fromarray(rollout.batch.inputs.sam_pixels[i].permute(1, 2, 0).numpy()).resize(
        size
    )
    sides = [
        _overlay(image, rollout.batch.masks[i], REGION),
        _overlay(image, rollout.masks[row].cpu(), FOUND),
    ]
    if task.mask_sigma is None:
        words = [
            f"sampled caption: {rollout.texts[row]}",
            f"true caption: {rollout.batch.captions[i]}",
        ]
    else:
        words = [
            f"prompt: {rollout.batch.captions[i]}",
            f"answer: {rollout.texts[row]}",
            f"teacher's caption': {rollout.replies[row]}",
        ]
    words.append(f"reward {reward[row]:.3f}  advantage {advantages[row]:+.2f}")
    lines = [line for word in words for line in textwrap.wrap(word, LINE_CHARACTERS)]
    canvas = Image.new("RGB", (2 * PICTURE_WIDTH + 8, size[1] + 18 * len(lines) + 8), "white")
    canvas.paste(sides[0], (0, 0))
    canvas.paste(sides[1], (PICTURE_WIDTH + 8, 0))
    draw = ImageDraw.Draw(canvas)
    for k, line in enumerate(lines):
        draw.text(
            (4, size[1] + 4 + 18 * k), line, fill="black", font=ImageFont.load_default(FONT_SIZE)
        )
    return np.array(canvas)


def _overlay(image: Image.Image, mask: torch.Tensor, color) -> Image.Image:
    """The image with the mask tinted and outlined in `color`."""
    pixels = np.array(image).astype(np.float32)
    stencil = Image.fromarray(mask.numpy().astype(np.uint8) * 255).resize(image.size, Image.NEAREST)
    inside, around = np.array(stencil) > 0, np.array(stencil.filter(ImageFilter.MaxFilter(5))) > 0
    pixels[inside] = 0.7 * pixels[inside] + 0.3 * np.array(color)
    pixels[around & ~inside] = color
    return Image.fromarray(pixels.astype(np.uint8))
