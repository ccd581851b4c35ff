"""TensorBoard metrics and pictures of a run, and its rollouts as JSON lines."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.utils.tensorboard import SummaryWriter

from rl_train.distributed.process_group import RankInfo
from rl_train.grpo import group_std
from rl_train.loggers.pictures import (
    EvalAnswer,
    evaluation_picture,
    rollout_picture,
    small_mask,
)
from rl_train.loss import ScoredRollout
from rl_train.policies.base import Policy
from rl_train.rollout import RewardOutput
from rl_train.utils.io import DamagedFile, wrap_write_errors

NUM_EVAL_PICTURES = 4  # evaluated samples that are drawn at every evaluation, always the same


class RunLogger:
    """TensorBoard events, pictures and rollouts of a run; on other ranks only rollouts.

    Raises CannotWrite at a full disk.

    Args:
        start: steps that are done. TensorBoard shows no later point that a killed run left, and
            later lines are cut from the rollouts. DamagedFile is raised, and the file stays as it
            is, if a line cannot be read.
        num_files: of rollouts that are this run's: of its ranks, and of more ranks that it once
            had; files beyond that are the user's. Default: one a rank.
    """

    def __init__(
        self, output_dir: str | Path, ranks: RankInfo, start: int, num_files: int | None = None
    ):
        folder, self.start = Path(output_dir) / "rollouts", start
        self.folder, self.writer = Path(output_dir) / "tensorboard", None
        self.rollout_file, self.jsonl = folder / f"rank{ranks.rank}.jsonl", None
        with wrap_write_errors(folder):
            for number in range(ranks.rank, num_files or ranks.world_size, ranks.world_size):
                file = folder / f"rank{number}.jsonl"
                if file.is_file():
                    os.truncate(file, end_of_lines_before(start, file))
        if ranks.is_main:
            with wrap_write_errors(self.folder):
                # Points of step `start` stay: its checkpoint was saved after them.
                self.writer = SummaryWriter(str(self.folder), purge_step=start + 1 if start else 0)

    def scalars(self, values: dict[str, float], step: int):
        """Log {metric: value} of a step; all of it is in the file when this returns.

        TensorBoard has the steps before `start` already: a resume measures step 0 again.
        """
        if self.writer and step >= self.start:
            with wrap_write_errors(self.folder):
                for name, value in values.items():
                    self.writer.add_scalar(name, value, step)
                self.writer.flush()

    def rollouts(self, step: int, scored: ScoredRollout):
        """Write one JSON line per row, group by group; a reward that is NaN is null.

        Masks, last in a line, are `small_mask`s.
        """
        rollout, outcome = scored.rollout, scored.outcome
        image_ids = rollout.repeat_for_rows(rollout.batch.image_ids)
        captions = rollout.repeat_for_rows(rollout.batch.captions)
        lines = []
        for row, text in enumerate(rollout.texts):
            line = dict(
                step=step,
                task=scored.task.name,
                image_id=image_ids[row],
                caption=captions[row],
                completion=text,
                reward=_json_number(scored.reward[row]),
                advantage=round(scored.advantages[row].item(), 4),
            )
            line |= {name: _json_number(values[row]) for name, values in outcome.rewards.items()}
            line |= {"reply": outcome.replies[row]} if outcome.replies else {}
            line |= {"unparsed": reason for reason, rows in outcome.unparsed.items() if rows[row]}
            line |= _masks(outcome, row)
            lines.append(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
        with wrap_write_errors(self.rollout_file):
            if self.jsonl is None:  # supervised training has no rollouts
                self.jsonl = self._open_rollouts()
            self.jsonl.write("".join(lines).encode(errors="backslashreplace"))  # lone surrogates
            self.jsonl.flush()  # nothing waits in a buffer: these lines outlive a kill

    def _open_rollouts(self) -> BinaryIO:
        self.rollout_file.parent.mkdir(parents=True, exist_ok=True)
        return self.rollout_file.open("ab")

    def pictures(self, step: int, scored: ScoredRollout, policy: Policy, count: int = 3):
        """Log pictures of the first `count` rows of the group whose rewards differ most."""
        if self.writer:
            size = scored.rollout.num_generations
            first = group_std(scored.reward, size).argmax().item() * size
            image = policy.picture(scored.rollout.batch, first // size)
            for k in range(min(count, size)):
                picture = rollout_picture(image, scored, first + k)
                name = f"{scored.task.name}/rollout_{k}"
                with wrap_write_errors(self.folder):
                    self.writer.add_image(name, picture, step, dataformats="HWC")

    def evaluated_sample(
        self,
        step: int,
        number: int,
        sample: dict[str, Any],
        caption: str,
        answers: Sequence[EvalAnswer],
    ):
        """Log the picture of an evaluated sample.

        Args:
            number: of the sample in the evaluation split; each has a picture of its own.
            sample: as a `RegionDataset` reads it.
            caption: the true one.
            answers: to show side by side.
        """
        if self.writer and step >= self.start:
            target = torch.from_numpy(sample["mask"])
            picture = evaluation_picture(sample["image"], target, caption, answers)
            with wrap_write_errors(self.folder):
                self.writer.add_image(f"eval/sample_{number}", picture, step, dataformats="HWC")

    def overview(self, tasks: Sequence[str], samples_answers: bool):
        """Write the layout of TensorBoard's page "Custom scalars", see `overview_layout`."""
        if self.writer:
            with wrap_write_errors(self.folder):
                self.writer.add_custom_scalars(overview_layout(tasks, samples_answers))

    def close(self):
        """Write the rest."""
        if self.writer:
            with wrap_write_errors(self.folder):
                self.writer.close()
        if self.jsonl:
            with wrap_write_errors(self.rollout_file):  # tries again what a full disk has refused
                self.jsonl.close()


# {section: metric}. A section has the metric's chart of each task, side by side.
ROLLOUT_CHARTS = {
    "reward": "reward_mean",
    "KL to the reference": "kl_div",
    "groups whose rewards are all equal": "frac_zero_std",
    "answers cut at the limit": "truncated_frac",
    "largest gap of sampler and scorer": "sampler_gap",
    "loss": "loss",
}
SFT_CHARTS = {"loss": "loss", "loss of the text": "text_loss"}


def overview_layout(tasks: Sequence[str], samples_answers: bool) -> dict[str, dict[str, list]]:
    """Return {section: {chart: ["Multiline", its tags as regular expressions]}}.

    Args:
        samples_answers: False in supervised training, which has neither rewards nor a teacher.
    """

    def chart(*tags: str) -> list:
        return ["Multiline", [f"^{tag}$" for tag in tags]]

    def eval_chart(*metrics: str) -> list:
        roles = ("eval", "eval_ema") if samples_answers else ("eval",)
        return chart(*[f"{role}/{metric}" for metric in metrics for role in roles])

    charts = ROLLOUT_CHARTS if samples_answers else SFT_CHARTS
    side_by_side = {
        title: {f"{task}: {title}": chart(f"{task}/{metric}") for task in tasks}
        for title, metric in charts.items()
    }
    return side_by_side | {
        "evaluation: policy (eval) and teacher (eval_ema)": {
            "IoU of masks": eval_chart("seg_iou", "cycle_iou"),
            "METEOR of captions": eval_chart("caption_meteor", "cycle_meteor"),
        },
        "all tasks together": {
            "losses": chart("total_loss", *[f"{task}/loss" for task in tasks]),
            "gradient norms": chart("grad_norm/.*"),
            "learning rate": chart("learning_rate"),
            "seconds of a step": chart("perf/.*_seconds"),
        },
    }


def end_of_lines_before(start: int, file: Path) -> int:
    """Return the length in bytes of the whole lines of steps before `start`. Raises DamagedFile.

    Steps never decrease in a file, since each resume cuts it.
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


def _json_number(value: torch.Tensor) -> float | None:
    """Return a reward as JSON can hold it: None for NaN."""
    return None if value.isnan() else round(value.item(), 8)


def _masks(outcome: RewardOutput, row: int) -> dict:
    """Return the rewarded mask of a row, and the prompt that made it, for its JSON line.

    Coordinates are pixels of the sample's mask. "mask_without_negatives" is the mask without
    the negative points, if there are any.
    """
    fields, prompt = {}, outcome.point_prompts[row] if outcome.point_prompts else None
    if prompt:
        fields["sam_prompt"] = {
            name: [[round(value, 1) for value in coordinates] for coordinates in boxes_or_points]
            for name, boxes_or_points in vars(prompt).items()
        }
        if prompt.negative:
            fields["mask_without_negatives"] = small_mask(outcome.masks_without_negatives[row])
    return fields | ({"mask": small_mask(outcome.masks[row])} if outcome.masks else {})
