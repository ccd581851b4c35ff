"""Write each training region's best of G answers of a base as data for `rl_train.sft`.

    python -m tools.experiments.gauntlet.best --model_path M --data_dir lab/train \
        --subsets regions --loop 1 --reward_weights loop1.iou=0 loop1.on_target=1 --output_dir best1
    python -m rl_train.sft --model_path M --data_dir best1 --tasks region_captions ..

This is the rival that a loop is to beat: fine-tuning on the best of the same samples, by the loop's
own reward and without its teacher's updates. A region whose answers are all worth the same teaches
a loop nothing and is left out.

Loop 1 keeps the caption with the highest reward, of regions without captions; loop 2 the mask with
it, of phrases without masks: `rl_train.sft --tasks referring_segmentation`.

Letters: B regions of a batch, G samples of each.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Subset
from tqdm import tqdm

from rl_train.config.flags import AT_LEAST_2, COUNT, POSITIVE, SEED
from rl_train.data.loader import eval_loader
from rl_train.data.registry import opener_of
from rl_train.data.split import sample_regions
from rl_train.distributed.process_group import RankInfo, print0, raise_on_any_rank
from rl_train.export.load_policy import open_policy
from rl_train.policies.sa2va import Sa2VAPolicy
from rl_train.rewards.combine import combine
from rl_train.rewards.iou import ON_TARGET
from rl_train.rewards.meteor import require_wordnet
from rl_train.rewards.weights import ComponentWeight, weight_text
from rl_train.rollout import Batch, Rollout
from rl_train.run.build import weigh_components
from rl_train.run.start import CALIBRATION_SAMPLES
from rl_train.tasks.base import TaskContext
from rl_train.tasks.caption_mask_caption import CaptionMaskCaption
from rl_train.tasks.mask_caption_mask import MaskCaptionMask
from rl_train.utils.command_line import FlagParser, run_program
from rl_train.utils.io import check_writable
from rl_train.utils.rng import RowRNG
from tools.demo.new_folder import complete_or_absent
from tools.experiments.common import add_asking_flags, run_alone
from tools.experiments.gauntlet.loop2 import OneModel, sampled
from tools.gar_writer import write_gar

PART = "best"

Loop = MaskCaptionMask | CaptionMaskCaption


def build_parser() -> FlagParser:
    parser = FlagParser(prog="python -m tools.experiments.gauntlet.best", description=__doc__)
    add = parser.add_argument
    add("--model_path", required=True, type=Path, help="Sa2VA folder, or a checkpoint of a run")
    add("--data_dir", required=True, help="folder of training regions")
    add_asking_flags(parser, batch_size=16)
    subsets = "folders of --data_dir to read (gar, dam), or its split; default: all"
    add("--subsets", nargs="+", default=[], metavar="SUBSET", help=subsets)
    add("--loop", type=int, choices=[1, 2], required=True, help="whose reward ranks the samples")
    weights = "of the reward's components, as in rl_train.train: loop1.iou=0 loop1.on_target=1"
    add("--reward_weights", nargs="+", type=weight_text, default=[], help=weights)
    add("--output_dir", required=True, type=Path, help="receives a data set in GAR's layout")
    add("--num_samples", type=COUNT, default=2400, help="regions to ask about, over images")
    add("--num_generations", type=AT_LEAST_2, default=8, help="G, samples of each region")
    add("--temperature", type=POSITIVE, default=1.0, help="of the samples")
    add("--max_tiles", type=COUNT, default=1)
    add("--seed", type=SEED, default=0, help="of the samples")
    return parser


def loop_of(
    policy: Sa2VAPolicy, number: int, max_new_tokens: int, reward_weights: Sequence[str]
) -> Loop:
    """Return the loop with these weights of its reward; the base is the teacher too.

    Raises ValueError if a weight names an unknown component or the LLM judge.
    """
    context = TaskContext(policy, OneModel(), max_new_tokens)
    if number == 1:
        loop = MaskCaptionMask(MaskCaptionMask.Options(), context)
    else:
        require_wordnet()
        loop = CaptionMaskCaption(CaptionMaskCaption.Options(mask_loss_coef=0.0), context)
    weigh_components([loop], list(map(ComponentWeight.parse, reward_weights)))
    if loop.reward_weights.get("judge"):
        raise ValueError(f"--reward_weights {loop.name}.judge: the LLM judge is not asked here")
    return loop


@torch.no_grad()
def roll_out(
    loop: Loop, batch: Batch, num_generations: int, seed: int
) -> tuple[Rollout, torch.Tensor]:
    """Return (the rollout of a batch, its rewards (B, G))."""
    policy, G = loop.context.policy, num_generations
    rng = RowRNG(seed, 0, 0, batch.index, G)
    rollout = sampled(loop, batch, policy.encode(batch), G, rng)
    rewards = combine(loop.rewards(rollout).rewards, loop.reward_weights)
    faults = policy.nan_watcher.take().names()
    raise_on_any_rank([f"the base: {name}" for name in faults])
    return rollout, rewards.view(-1, G)


def best_rows(rewards: torch.Tensor) -> list[int | None]:
    """Return the row of each region's best answer in a rollout; None where all are worth the same.

    Args: rewards: (B, G).
    """
    G = rewards.shape[1]
    is_unequal = (rewards.max(1).values > rewards.min(1).values).tolist()
    best = rewards.argmax(1).tolist()
    return [i * G + best[i] if unequal else None for i, unequal in enumerate(is_unequal)]


class BestAnswers:
    """Data of the best answers, with what they were worth.

    Attributes:
        asked: regions; kept: of them those with a best answer.
        damaged: reasons why regions could not be asked about; they are left out.
        sum_of_means, sum_of_best: of the kept regions, of their rewards' means and of the best.
    """

    def __init__(self, loop: Loop, dataset: Subset, args: argparse.Namespace):
        self.loop, self.dataset, self.args = loop, dataset, args
        self.asked, self.kept, self.damaged = 0, 0, []
        self.sum_of_means, self.sum_of_best = 0.0, 0.0

    def loader(self, dataset: Subset):
        policy, args = self.loop.context.policy, self.args
        inputs = policy.preprocessor(args.max_completion_length, args.max_prompt_length)
        needs_distractors = bool(self.loop.reward_weights.get(ON_TARGET))
        return eval_loader(
            dataset, inputs, args.batch_size, args.num_workers, distractors=needs_distractors
        )

    def calibrate(self):
        """Fit the noise of sampled masks to the base's own, of as many phrases as a run takes."""
        if self.loop.action:
            first = Subset(self.dataset, range(min(CALIBRATION_SAMPLES, len(self.dataset))))
            self.loop.action.calibrate(list(self.loader(first)), self.args.max_completion_length)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield what `write_gar` takes, a region after the other."""
        for batch in tqdm(self.loader(self.dataset), desc="samples", disable=None):
            rollout, rewards = roll_out(self.loop, batch, self.args.num_generations, self.args.seed)
            first, self.asked = self.asked, self.asked + len(batch)
            self.damaged += batch.damaged
            for i, row in enumerate(best_rows(rewards.cpu())):
                # Another sample stands in a damaged one's place.
                is_stand_in = batch.index[i] != first + i
                if row is None or is_stand_in:
                    continue
                self.kept += 1
                self.sum_of_means += rewards[i].mean().item()
                self.sum_of_best += rewards[i].max().item()
                sample = self.dataset[batch.index[i]]
                mask, caption = batch.masks[i], rollout.texts[row].strip()
                if rollout.latents:
                    mask, caption = rollout.latents.masks[row], batch.captions[i]
                yield dict(
                    image=sample["image"],
                    mask=mask.cpu().numpy(),
                    caption=caption,
                    category="",
                )


def run(args: argparse.Namespace, ranks: RankInfo):
    """Sample, choose and write; ValueError for what is wrong in the flags and files."""
    check_writable("--output_dir", args.output_dir)
    if args.output_dir.exists():
        raise ValueError(f"--output_dir {args.output_dir}: is there already, name another folder")
    dataset = opener_of(args.dataset, args.subsets)(args.data_dir)
    chosen = Subset(dataset, sample_regions(dataset.image_keys, args.num_samples))
    tokens = args.max_completion_length
    policy = open_policy(
        args.model_path,
        None,
        "policy",
        ranks.device,
        tokens,
        max_tiles=args.max_tiles,
        dtype=args.dtype,
        temperature=args.temperature,
    )
    answers = BestAnswers(loop_of(policy, args.loop, tokens, args.reward_weights), chosen, args)
    answers.calibrate()
    with complete_or_absent(args.output_dir) as unfinished:
        for earlier in (unfinished / PART).glob("*"):  # of an interrupted command
            earlier.unlink()
        write_gar(answers.rows(), unfinished, part=PART)
        if not answers.kept:
            raise ValueError(f"none of {answers.asked} regions has answers of unequal reward")
    if answers.damaged:
        print0(
            f"{len(answers.damaged)} damaged samples are left out; the first: {answers.damaged[0]}"
        )
    print0(
        f"{args.output_dir}: {answers.kept} of {answers.asked} regions, mean reward "
        f"{answers.sum_of_means / answers.kept:.4f}, of the best "
        f"{answers.sum_of_best / answers.kept:.4f}"
    )


def main(argv: list[str] | None = None):
    run_alone(build_parser(), run, argv)


if __name__ == "__main__":
    run_program(main)
