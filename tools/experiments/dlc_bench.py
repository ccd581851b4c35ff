"""DLC-Bench: a model's captions of its regions, and what a judge says of them.

    python -m tools.experiments.dlc_bench caption --data_dir DLC-bench --model_path M \
        --captions captions.json
    torchrun --nproc_per_node 8 -m tools.experiments.dlc_bench caption .. # the same, shared out
    vllm serve meta-llama/Meta-Llama-3.1-8B-Instruct --port 9100     # or any other server
    python -m tools.experiments.dlc_bench judge --data_dir DLC-bench --captions captions.json \
        --output O.json

The folder is that of the data set nvidia/DLC-Bench: annotations.json (COCO), images/, qa.json and
class_names.json. The captions are {annotation id: text}, as those of other programs may be. Scores,
prompts and the reading of replies: tools/experiments/dlc_questions.py; what differs from the
original: docs/evaluation.md.

The judge is asked every question, at temperature 0. If it stops answering, so does the program,
with a sentence, and nothing is written. A reply that means none of the choices leaves its region
without a score: it counts in no mean and is reported.
"""

import argparse
import asyncio
import json
import math
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from rl_train.config.flags import COUNT, COUNT_OR_0, POSITIVE
from rl_train.config.grpo_config import RewardConfig
from rl_train.data.base import Region, read_sample
from rl_train.data.errors import DamagedSample
from rl_train.data.images import check_read, map_file
from rl_train.data.loader import eval_loader
from rl_train.data.polygons import encode_segmentation
from rl_train.data.refcoco import read_instances
from rl_train.data.rle import check_mask
from rl_train.data.workers import reporting_dead_workers
from rl_train.distributed import process_group
from rl_train.distributed.process_group import print0
from rl_train.evaluation.bootstrap import bootstrap
from rl_train.evaluation.cycle_metrics import sample_captions
from rl_train.export.load_policy import find_base, open_policy
from rl_train.policies.sa2va import Sa2VAPolicy
from rl_train.policies.sa2va_queries import describe
from rl_train.rewards import LLMJudge
from rl_train.rewards.judge import NoReply
from rl_train.utils.command_line import FlagParser, run_program
from rl_train.utils.io import check_writable
from sa2va_hf.prompts import DESCRIBE
from tools.experiments.dlc_questions import (
    MAX_REPLY_TOKENS,
    Score,
    prompt,
    read_captions,
    read_class_names,
    read_questions,
    recognition,
    score,
)


def build_parser() -> FlagParser:
    parser = FlagParser(
        prog="python -m tools.experiments.dlc_bench",
        description=__doc__,
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb, text in dict(caption="write a model's captions", judge="score captions").items():
        add = verbs.add_parser(verb, help=text).add_argument
        add("--data_dir", type=Path, required=True, help="folder of the benchmark")
        captions = dict(caption="JSON file to write", judge="JSON file {annotation id: caption}")
        add("--captions", type=Path, required=True, help=captions[verb])
        if verb == "caption":
            add("--model_path", type=Path, required=True, help="as of tools.evaluate")
            add("--checkpoint", type=Path, help="as of tools.evaluate")
            add("--role", choices=["policy", "teacher"], default="policy")
            add("--batch_size", type=COUNT, default=8)
            add("--max_completion_length", type=COUNT, default=512, help="the original's")
            add("--max_tiles", type=COUNT, default=1)
            best = "keep that of N sampled captions by which the model itself finds the region best"
            add("--best_of", type=COUNT_OR_0, default=0, metavar="N", help=best)
            add("--temperature", type=POSITIVE, default=1.0, help="of the sampled captions")
            add("--num_workers", type=COUNT_OR_0, default=2)
            add("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
        else:
            add("--output", type=Path, required=True, help="JSON file for means, scores, replies")
            add("--llm_judge_base_url", default=RewardConfig.llm_judge_base_url)
            add("--llm_judge_model", default=RewardConfig.llm_judge_model)
    return parser


class BenchRegions:
    """The regions of annotations.json, in its order; [i] -> see `read_sample`, caption "".

    image_id is the annotation's id, by which qa.json asks.

    Raises ValueError if the file or a region of it is unusable.
    """

    def __init__(self, folder: Path):
        images, annotations = read_instances(folder / "annotations.json")
        self.regions = []
        for key, (image, segmentation, category, _) in annotations.items():
            if image not in images:
                raise ValueError(f"{folder}: annotation {key} is of image {image}, there is none")
            file_name, size = images[image]
            path = folder / "images" / file_name
            try:
                rle = encode_segmentation(segmentation, *size)
            except ValueError as error:
                raise ValueError(f"{folder}: annotation {key} of {path}: {error}") from error
            read = partial(map_file, path)
            image_size, _ = check_read(read)
            fault = image_size
            if not isinstance(image_size, str):
                fault, _ = check_mask(rle, image_size[::-1])
            if fault:
                raise ValueError(f"{folder}: annotation {key} of {path}: {fault}")
            self.regions.append(Region(read, rle, "", category, str(key)))

    def __len__(self):
        return len(self.regions)

    def __getitem__(self, i: int) -> dict:
        return read_sample(self.regions[i], self.regions[i].image_id)


@torch.no_grad()
def caption_all(
    policy: "Sa2VAPolicy",
    dataset: "BenchRegions",
    args: argparse.Namespace,
    ranks: process_group.RankInfo,
) -> dict[str, str]:
    """Return {annotation id: caption} of all regions, described by all ranks together.

    A caption is greedy, or with --best_of the sampled one of the highest cycle IoU.

    Raises:
        DamagedSample: a region does not decode or fit.
        FloatingPointError: the model's outputs are not finite.
    """
    captions, faults, tokens, N = {}, set(), args.max_completion_length, args.best_of
    loader = eval_loader(
        dataset,
        policy.preprocessor(tokens),
        args.batch_size,
        args.num_workers,
        ranks.rank,
        ranks.world_size,
    )
    for batch in tqdm(loader, desc="captions", leave=False, disable=not ranks.is_main):
        for fault in batch.damaged:  # another region stands in for it
            raise DamagedSample(*fault.split(": ", 1))
        features, rows = policy.encode(batch), range(len(batch))
        if N:
            sampled, iou, _ = sample_captions(policy, batch, features, tokens, N)
            texts = [
                sampled[N * row + generation]
                for row, generation in enumerate(iou.argmax(1).tolist())
            ]
        else:
            masks = [mask.to(policy.device) for mask in batch.masks]
            texts = describe(policy, features, rows, masks, tokens)
        faults |= set(policy.nan_watcher.take().names())
        captions |= dict(zip(batch.image_ids, texts))
    process_group.raise_on_any_rank(sorted(faults))
    of_ranks = process_group.gather_objects(captions)
    return {key: text for texts_of_rank in of_ranks for key, text in texts_of_rank.items()}


def caption(args: argparse.Namespace):
    """Write the captions of a model. Raises ValueError for what is wrong in flags and files."""
    check_writable("--captions", args.captions, is_file=True)
    find_base(args.model_path, args.checkpoint, "--model_path", Sa2VAPolicy.family)
    dataset, ranks = BenchRegions(args.data_dir), process_group.init()
    policy = open_policy(
        args.model_path,
        args.checkpoint,
        args.role,
        ranks.device,
        args.max_completion_length,
        dtype=args.dtype,
        max_tiles=args.max_tiles,
        temperature=args.temperature,
        family=Sa2VAPolicy.family,  # others describe no region
    )
    captions = reporting_dead_workers(args.num_workers, caption_all, policy, dataset, args, ranks)
    if not ranks.is_main:
        return
    names = [region.image_id for region in dataset.regions]
    captions = {name: captions[name] for name in names}  # in the file's order
    args.captions.parent.mkdir(parents=True, exist_ok=True)
    args.captions.write_text(json.dumps(captions | dict(query=DESCRIBE), indent=1))
    print0(f"{args.captions}: {len(captions)} captions")


async def ask_all(judge: LLMJudge, prompts: list[str]) -> list[str]:
    """Return the judge's reply to each prompt. Raises NoReply."""
    bar = tqdm(total=len(prompts), desc="questions", leave=False)

    async def ask_one(text: str) -> str:
        """Return the reply to one prompt, and move the bar."""
        reply = await ask([dict(role="user", content=text)], str, MAX_REPLY_TOKENS)
        bar.update()
        return reply

    with bar:
        async with judge.connect() as ask:
            return await asyncio.gather(*map(ask_one, prompts))


def judge_captions(args: argparse.Namespace):
    """Score captions and write the result.

    Raises:
        ValueError: a flag or a file is wrong, or the judge stops answering.
    """
    check_writable("--output", args.output, is_file=True)
    questions = read_questions(args.data_dir)
    names = read_class_names(args.data_dir, questions)
    captions = read_captions(args.captions, questions)
    prompts = {
        key: [prompt(question, captions[key]) for question in (recognition(names[key]), *asked)]
        for key, asked in questions.items()
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    judge = LLMJudge(args.llm_judge_base_url, args.llm_judge_model)
    try:
        # One list for all regions, so that their requests run together; taken apart in order.
        replies = iter(asyncio.run(ask_all(judge, sum(prompts.values(), []))))
    except NoReply as error:
        raise ValueError(f"--llm_judge_base_url {args.llm_judge_base_url}: {error}") from error
    replies_of = {key: [next(replies) for _ in sent] for key, sent in prompts.items()}
    scores = {key: score(questions[key], replies_of[key]) for key in questions}
    summarised = summary(scores)
    flags = {name: str(value) for name, value in vars(args).items() if name != "output"}
    regions = {
        key: dict(caption=captions[key], replies=replies_of[key], **asdict(region_score))
        for key, region_score in scores.items()
    }
    written = without_nan(dict(flags=flags, **summarised, regions=regions))
    args.output.write_text(json.dumps(written, indent=1, allow_nan=False))
    print0(table(summarised))


def summary(scores: dict[str, Score]) -> dict:
    """Return the means over regions, their 95 % intervals and the counts behind them.

    A region of which a reply could not be read counts in no mean: NaN if that leaves none.
    """
    readable = [score for score in scores.values() if not score.num_unreadable]
    parts = dict(
        positive=[score.positive for score in readable],
        negative=[score.negative for score in readable if score.negative is not None],
    )
    means = {name: float(np.mean(part)) if part else math.nan for name, part in parts.items()}
    intervals = {name: bootstrap(torch.tensor(part)) for name, part in parts.items() if part}
    return dict(
        means=means | dict(average=(means["positive"] + means["negative"]) / 2),
        intervals=intervals,
        num_regions={name: len(part) for name, part in parts.items()},
        num_not_recognised=sum(not score.recognised for score in readable),
        num_unscored=len(scores) - len(readable),
        num_unreadable=sum(score.num_unreadable for score in scores.values()),
    )


def without_nan(value: dict | list | str | float | None):
    """Return `value` with None for every NaN in it, as JSON has no NaN."""
    if isinstance(value, dict):
        return {name: without_nan(item) for name, item in value.items()}
    if isinstance(value, list):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def table(summarised: dict) -> str:
    """Return what `summary` returns, as text."""
    lines = [f"{'DLC-Bench':12s} {'mean':>8s}   95 % interval"]
    for name, mean in summarised["means"].items():
        low_high = summarised["intervals"].get(name)
        words = "[{:.4f}, {:.4f}]".format(*low_high) if low_high else ""
        count = (
            f", {summarised['num_regions'][name]} regions"
            if name in summarised["num_regions"]
            else ""
        )
        lines.append(f"{name:12s} {mean:8.4f}   {words}{count}")
    lines.append(f"of another class by the judge: {summarised['num_not_recognised']} regions")
    if summarised["num_unscored"]:
        lines.append(
            f"{summarised['num_unscored']} regions have no score and count in no mean: "
            f"{summarised['num_unreadable']} replies mean none of the choices"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None):
    args = build_parser().parse_args(argv)
    try:
        dict(caption=caption, judge=judge_captions)[args.verb](args)
    except ValueError as error:  # the user's input: one sentence, no traceback
        raise SystemExit(f"dlc_bench: {error}") from error
    finally:
        process_group.close()


if __name__ == "__main__":
    run_program(main)
