"""A page of a run's rollouts to look at: image, region, what a group said and drew, its rewards.

    python -m tools.rollouts --run outputs/run1 --output outputs/run1/rollouts.html
    python -m tools.rollouts --run outputs/run1 --output page.html --steps 400 500
    python -m tools.rollouts --run outputs/run1 --output page.html --data_dir /where/it/is/now

One file that a browser opens by itself: no server, no network. Groups are filtered by step, task,
reward and text, masks drawn when they come into view. Of more rollouts than --max_rollouts it shows
whole steps, spread evenly, the first and the last among them; mean reward, its std and the fraction
of groups without variance are those of every step. A run that goes on can be looked at too.

"held out" shows samples of the evaluation split: the base's answer, from the evaluation before
training, beside those of the policy. A group's buttons save it as a figure, SVG or PNG; a larger
--image_size makes its picture sharper.
"""

import base64
import io
import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm

from rl_train.config.flags import COUNT, COUNT_OR_0
from rl_train.config.grpo_config import DataConfig
from rl_train.data import DamagedSample
from rl_train.data.dataset_flags import dataset_openers
from rl_train.evaluation.table import MAIN_METRICS
from rl_train.grpo import group_std
from rl_train.loggers.pictures import small_mask
from rl_train.utils.command_line import FlagParser, run_program
from rl_train.utils.io import DamagedFile, check_writable, read_json, warn

if TYPE_CHECKING:
    from torch.utils.data import Dataset


TEMPLATE = Path(__file__).with_name("rollouts_page.html")
OF_GROUP = ("step", "task", "image_id", "caption")  # the same in all lines of a group
OF_ROW = ("completion", "reward", "advantage")
OPTIONAL = ("mask", "mask_without_negatives", "sam_prompt")
NUMBER = float | int | None
CURVE_POINTS = 500  # steps of a curve, at most
HELD_OUT = "held out"  # in the place of a task's name
MAX_HELD_OUT, MAX_EVALUATIONS = 32, 8  # samples of the evaluation split, and answers to each


def read_groups(run: Path, size: int) -> Iterator[list[dict]]:
    """Yield the groups of a run, each the `size` lines of one prompt's answers, file by file.

    Lines that do not make a whole group yet, at the end of a file, are left out.

    Raises:
        ValueError: the run has no rollouts.
        DamagedFile: lines that cannot be read, or that are no group.
    """
    folder = run / "rollouts"
    files = sorted(folder.glob("rank*.jsonl"), key=lambda file: (len(file.name), file.name))
    if not files:
        raise ValueError(f"--run {run}: there are no rollouts, {folder} has no rank*.jsonl")
    for file in files:
        group = []
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):  # it is being written, or a kill tore it
                    break
                try:
                    group.append(json.loads(line))
                    same = {key: group[-1][key] == group[0][key] for key in OF_GROUP}
                    [group[-1][key] for key in OF_ROW]
                except (ValueError, KeyError, TypeError) as error:
                    raise DamagedFile(file, f"line {number}: {error!r}") from error
                if not all(same.values()):
                    lines_of_group = f"lines {number - len(group) + 1} to {number}"
                    raise DamagedFile(
                        file, f"{lines_of_group}: no group of --num_generations {size}"
                    )
                if len(group) == size:
                    yield group
                    group = []


def steps_to_show(num_rows: dict[int, int], limit: int) -> list[int]:
    """Return the steps whose rollouts are shown, of {step: its rows}: all, or some evenly spread.

    With room for one step alone that is the last.
    """
    steps = sorted(num_rows)
    if sum(num_rows.values()) <= limit:
        return steps
    count = max(limit // max(num_rows.values()), 1)
    return steps[-1:] if count == 1 else evenly_spaced(steps, count)


def rewards_of(group: list[dict]) -> list[float]:
    """Return the rewards of a group, NaN where there is none."""
    return [float("nan") if row["reward"] is None else row["reward"] for row in group]


def curves(rewards: dict[tuple[str, int], list], size: int, shown: list[int]) -> dict[str, list]:
    """Return {task: [(step, mean reward, std, fraction of groups without variance), ..]}.

    They are those of TensorBoard; None where no row is scored. Of many steps some are kept, spread
    evenly, and those that are `shown`.

    Args:
        rewards: {(task, step): rewards, NaN = not scored}; size: rows of a group.
    """
    curve_of, steps = {}, sorted({step for _, step in rewards})
    kept = {*steps[:: -(-len(steps) // CURVE_POINTS)], *shown}
    for (task, step), values in sorted(rewards.items()):
        if step in kept:
            values = torch.tensor(values)
            scored = values[~values.isnan()]
            mean = scored.mean().item() if len(scored) else None
            std = scored.std().item() if len(scored) > 1 else None
            flat = (group_std(values, size) == 0).float().mean().item()
            curve_of.setdefault(task, []).append((step, *map(rounded, (mean, std, flat))))
    return curve_of


def rounded(value: NUMBER) -> NUMBER:
    """Round to four digits; None stays None."""
    return None if value is None else round(value, 4)


def row_of(line: dict) -> dict:
    """Return the fields of a line that the page shows: its own, components and texts by name."""
    rest = {key: line[key] for key in line.keys() - {*OF_GROUP, *OF_ROW, *OPTIONAL}}
    row = {key: line[key] for key in (*OF_ROW, *OPTIONAL) if key in line}
    order = [key for key in line if key in rest]  # as the run wrote them
    row["parts"] = {key: rounded(rest[key]) for key in order if isinstance(rest[key], NUMBER)}
    row["texts"] = {key: rest[key] for key in order if isinstance(rest[key], str)}
    return row


def evenly_spaced(values: list[int], count: int) -> list[int]:
    """Return at most `count` (2 or more) of the values, the first and the last among them."""
    if len(values) <= count:
        return values
    return [values[i] for i in np.linspace(0, len(values) - 1, count).round().astype(int).tolist()]


def read_evaluations(run: Path) -> dict[int, dict]:
    """Return {step: evaluation} of those with masks that the page shows; empty without the base's.

    Files of an earlier version have no masks. Raises DamagedFile.
    """
    folder = run / "evaluation"
    steps = [int(file.stem.removeprefix("step_")) for file in folder.glob("step_*.json")]
    shown = evenly_spaced(sorted(steps), MAX_EVALUATIONS)
    evaluations = {step: read_json(folder / f"step_{step}.json") for step in shown}
    with_masks = {step: values for step, values in evaluations.items() if values.get("masks")}
    return with_masks if 0 in with_masks else {}


def eval_groups(evaluations: dict[int, dict]) -> list[dict]:
    """Return a group of each held-out sample: the base's answer first, then those of later steps.

    A sample that could not be measured in any of the evaluations has no group.
    """
    if not evaluations:
        return []
    base, groups = evaluations[0], []
    for k, image_id in enumerate(base["image_ids"][:MAX_HELD_OUT]):
        rows = []
        for step, evaluation in evaluations.items():
            values = {name: evaluation["values"].get(name) for name in MAIN_METRICS}
            rows.append(
                dict(
                    title=f"step {step}" if step else "base",
                    completion=evaluation["captions"][k],
                    reward=rounded(evaluation["values"]["seg_iou"][k]),
                    advantage=0.0,
                    mask=evaluation["masks"][k],
                    parts={n: rounded(column[k]) for n, column in values.items() if column},
                    texts={},
                )
            )
        about = dict(step=None, task=HELD_OUT, caption=base["references"][k])
        groups.append(about | dict(image_id=image_id, held_out=True, flat=False, rows=rows))
    return groups


def short_names(ids: list[str]) -> list[str]:
    """Return the last parts of each id's path, as many as tell it from the other ids."""
    parts = [name.split("/") for name in ids]
    for count in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(words[-count:]) for words in parts]
        if len(set(names)) == len(set(ids)):
            return names
    return ids


def thumbnail(image: Image.Image, side: int) -> str:
    """Return the image as a data URI, `side` pixels wide and high at most."""
    small, file = image.convert("RGB"), io.BytesIO()
    small.thumbnail((side, side))
    small.save(file, "WEBP", quality=80)
    return f"data:image/webp;base64,{base64.b64encode(file.getvalue()).decode()}"


def read_samples(
    dataset: "Dataset", image_ids: list[str], side: int, what: str
) -> tuple[list[str], list[dict]]:
    """Return (images as data URIs, each once; dict(image, size, region) of each id).

    `image` is the index of a sample's image among the images. `what` names the progress bar.

    Raises:
        ValueError: the data set lacks an id, or its image is damaged.
    """
    wanted, index_of = set(image_ids), {}
    for i in range(len(dataset)):
        name = dataset.image_id(i)
        if name in wanted:
            index_of[name] = i
    missing = [name for name in image_ids if name not in index_of]
    if missing:
        raise ValueError(
            f"has no sample {missing[0]}, of which the rollouts tell "
            f"({len(missing)} of {len(image_ids)} are not there)"
        )
    images, samples, index_of_key, keys = [], [], {}, dataset.image_keys
    for name in tqdm(image_ids, desc=what, leave=False):
        key = int(keys[index_of[name]])
        try:
            sample = dataset[index_of[name]]
        except DamagedSample as error:
            raise ValueError(f"can be read no more: {error}") from error
        if key not in index_of_key:
            index_of_key[key] = len(images)
            images.append(thumbnail(sample["image"], side))
        mask = sample["mask"]
        region = small_mask(torch.from_numpy(np.ascontiguousarray(mask)))
        samples.append(dict(image=index_of_key[key], size=mask.shape, region=region))
    return images, samples


def data_config(flags: dict) -> DataConfig:
    """Return the part of a run's flags that is about data."""
    known = {field.name for field in fields(DataConfig)} & set(flags)
    return DataConfig(**{name: flags[name] for name in known})


def open_eval_samples(flags: dict, data_dir: str | None, image_ids: list[str], side: int):
    """Return `read_samples` of the evaluation split; without samples if it cannot be read.

    The page is of the rollouts, which need only the training data.

    Args:
        data_dir: of the training data, if it has moved; it holds the evaluation split of a run
            without --eval_data_dir.
    """
    open_train, open_eval = dataset_openers(data_config(flags))
    where = flags.get("eval_data_dir")
    try:
        dataset = open_eval(where) if where else open_train(data_dir or flags["data_dir"])
        return read_samples(dataset, image_ids, side, "held-out images")
    except ValueError as error:
        warn(f"the held-out samples are left out: {error}")
        return [], []


def open_samples(run: Path, flags: dict, data_dir: str | None, image_ids: list[str], side: int):
    """Return `read_samples` of a run's data set. Raises ValueError that names --data_dir."""
    where = data_dir or flags["data_dir"]
    opened, _ = dataset_openers(data_config(flags))
    try:
        return read_samples(opened(where), image_ids, side, "images of rollouts")
    except ValueError as error:
        words = str(error).removeprefix(f"--data_dir {where} ")
        if data_dir:
            raise ValueError(f"--data_dir {where} {words}") from error
        raise ValueError(
            f"--data_dir {where}, as {run / 'config.json'} has it, {words}; if it has moved, give "
            "its folder as --data_dir"
        ) from error


def page_data(
    run: Path, data_dir: str | None, steps: list[int] | None, limit: int, side: int
) -> dict:
    """Return all that a page shows of a run.

    Args:
        data_dir: of the images, or None: the one that the run was started with.
        steps: [first, last], or None: all; limit: of the rollouts; side: of the images, in pixels.
    """
    flags = read_json(run / "config.json")
    if "num_generations" not in flags:
        raise ValueError(f"--run {run}: it was trained by supervised examples, it has no rollouts")
    size = flags["num_generations"]
    first, last = steps or (0, float("inf"))
    rewards, rows = {}, {}
    for group in read_groups(run, size):
        step, task = group[0]["step"], group[0]["task"]
        rewards.setdefault((task, step), []).extend(rewards_of(group))
        if first <= step <= last:
            rows[step] = rows.get(step, 0) + size
    if not rows:
        among = f"--steps {first} {last}" if steps else f"--run {run}"
        known = [step for _, step in rewards]
        has = f"steps {min(known)} to {max(known)}" if known else "no whole group"
        raise ValueError(f"{among}: there is no rollout; the run has {has}")
    shown = steps_to_show(rows, limit)
    groups = [group for group in read_groups(run, size) if group[0]["step"] in set(shown)]
    groups.sort(key=lambda group: group[0]["step"])
    groups = groups[: max(limit // size, 1)]  # of a single step that is larger
    ids = list(dict.fromkeys(group[0]["image_id"] for group in groups))
    images, samples = open_samples(run, flags, data_dir, ids, side)
    sample_of = {name: k for k, name in enumerate(ids)}
    shown_groups = [
        dict(
            {key: group[0][key] for key in ("step", "task", "caption")},
            sample=sample_of[group[0]["image_id"]],
            flat=bool(group_std(torch.tensor(rewards_of(group)), size) == 0),
            rows=list(map(row_of, group)),
        )
        for group in groups
    ]
    held_out = eval_groups(read_evaluations(run))
    held_out_ids = [group.pop("image_id") for group in held_out]
    held_out_images, held_out_samples = open_eval_samples(flags, data_dir, held_out_ids, side)
    for k, (group, sample) in enumerate(zip(held_out, held_out_samples)):
        sample["image"] += len(images)
        shown_groups.append(group | dict(sample=len(ids) + k))
    for names, of_split in ((ids, samples), (held_out_ids, held_out_samples)):
        for name, short, sample in zip(names, short_names(names), of_split):
            sample |= dict(id=name, name=short)
    return dict(
        run=str(run),
        name=run.resolve().name,
        total=sum(map(len, rewards.values())),
        images=images + held_out_images,
        samples=samples + held_out_samples,
        curves=curves(rewards, size, shown),
        groups=shown_groups,
    )


def page(data: dict) -> str:
    """Return the page as HTML.

    Whatever a model said is data in it: no text ends the element or starts another, and the script
    shows it as text alone. Surrogates alone, which no file holds, are "?".
    """
    shown = data | dict(images=len(data["images"]))
    stated = json.dumps(shown, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    stated = stated.encode(errors="replace").decode()
    for character in "<>&":
        stated = stated.replace(character, f"\\u{ord(character):04x}")
    images = "\n".join(
        f'<script type="text/plain" id="image{k}">{uri}</script>'
        for k, uri in enumerate(data["images"])
    )
    head, tail = TEMPLATE.read_text(encoding="utf-8").split("__DATA__")
    return head + stated + tail.replace("__IMAGES__", images)


def main(argv: list[str] | None = None):
    parser = FlagParser(
        prog="python -m tools.rollouts",
        description=__doc__,
    )
    parser.add_argument("--run", type=Path, required=True, help="output folder of a run")
    parser.add_argument("--output", type=Path, required=True, help="HTML file to write")
    parser.add_argument("--data_dir", help="of the run's images; default: where its flags say")
    parser.add_argument(
        "--steps", type=COUNT_OR_0, nargs=2, metavar=("FIRST", "LAST"), help="to show; default all"
    )
    parser.add_argument("--max_rollouts", type=COUNT, default=2000, help="that are shown")
    parser.add_argument("--image_size", type=COUNT, default=320, help="of the images, in pixels")
    args = parser.parse_args(argv)
    try:
        check_writable("--output", args.output, is_file=True)
        data = page_data(args.run, args.data_dir, args.steps, args.max_rollouts, args.image_size)
    except ValueError as error:
        raise SystemExit(f"rollouts: {error}") from error
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(page(data), encoding="utf-8")
    shown = sum(len(group["rows"]) for group in data["groups"] if group["task"] != HELD_OUT)
    megabytes = args.output.stat().st_size / 1e6
    tqdm.write(f"{args.output}: {shown} of {data['total']} rollouts, {megabytes:.1f} MB")


if __name__ == "__main__":
    run_program(main)
