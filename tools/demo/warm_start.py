"""Supervised training of a small Sa2VA from random weights: it learns to see, to find, to say.

Three runs of `rl_train.sft`, each beginning with the model of the one before. Captions are in the
last alone and of few regions, and it ends early. No wrong word is taught: the mistakes that are
left are those of too little data.

The data's folder has the subsets `segmented`, of all regions that may be named, and `captioned`,
and truth.jsonl, which says of each region of `segmented`, in its order, its scene and its label.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from rl_train import sft
from rl_train.train import main as run_training
from sa2va_hf import Sa2VAConfig, Sa2VAModel
from sa2va_hf.tokenizer import load_tokenizer
from tools.demo.model import initialise, tokenizer_of
from tools.demo.new_folder import complete_or_absent, save
from tools.experiments.pictures.dataset import CAPTIONED, SEGMENTED, TRUTH, read_truth

MAX_ANSWER_TOKENS = 24
ALL = "vision mlp1 language_model embeddings text_hidden_fcs sam2 sam2_encoder"
# Flags of the parts beside those of `Schedule`, in order.
PARTS = dict(
    see=f"--subsets {SEGMENTED} --tasks tools.demo.seen_masks:SeenMasks --one_answer "
    f"--distractors --trainable_modules {ALL}",
    find=f"--subsets {SEGMENTED} --tasks referring_segmentation --one_answer "
    f"--trainable_modules {ALL}",
    say=f"--subsets {CAPTIONED} --tasks region_captions referring_segmentation --one_answer "
    "--trainable_modules language_model embeddings text_hidden_fcs",
)


@dataclass(frozen=True)
class Schedule:
    """Lengths, batch sizes and peak learning rates of a base's parts."""

    steps: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    rates: tuple[float, ...]

    def flags(self, part: int) -> dict[str, float]:
        """Return {flag of `rl_train.sft`: its value} for a part, by its number."""
        return dict(
            max_steps=self.steps[part],
            batch_size=self.batch_sizes[part],
            learning_rate=self.rates[part],
        )


def train_base(
    config: dict,
    vocab_size: int,
    schedule: Schedule,
    data_dir: Path,
    eval_data_dir: Path,
    output_dir: Path,
    seed: int,
    dtype: str,
    num_workers: int,
):
    """Train a base into output_dir/base, bf16 numbers.

    Args: see `train_parts`.
    """
    runs = TrainingRuns(data_dir, eval_data_dir, output_dir, seed, dtype, num_workers)
    runs.save_base(train_parts(config, vocab_size, PARTS, schedule, runs))


def train_parts(
    config: dict,
    vocab_size: int,
    parts: dict[str, str],
    schedule: Schedule,
    runs: "TrainingRuns",
) -> Path:
    """Train a model of random weights, one part after the other; return the trained one.

    The run of a part is output_dir/PART. A part that is done is not done again.

    Args:
        config: config.json of the model, whose LLM's vocabulary becomes the tokenizer's.
        vocab_size: of the tokenizer at most, without special tokens.
        parts: {name: flags of `rl_train.sft` beside those of the schedule}.
    """
    model_path, truth_file = runs.output_dir / "random", runs.data_dir / TRUTH
    if not model_path.exists():
        torch.manual_seed(runs.seed)
        truth = read_truth(runs.data_dir)
        captions = (region["caption"] for region in truth if not region["unnamed"])
        tokenizer = tokenizer_of(captions, vocab_size)
        llm = config["llm_config"] | {"vocab_size": len(tokenizer)}
        model = Sa2VAModel(Sa2VAConfig(**config | {"llm_config": llm}))
        initialise(model)
        with complete_or_absent(model_path) as unfinished:
            model.save_pretrained(unfinished, torch.float32)
            tokenizer.save_pretrained(unfinished)
    for number, (part, flags) in enumerate(parts.items()):
        if part == "see":
            flags += f" --truth {truth_file}"
        model_path = runs.train(part, model_path, flags, **schedule.flags(number))
    return model_path


@dataclass(frozen=True)
class TrainingRuns:
    """Runs of `rl_train.sft` by which a base is made, one after the other.

    Attributes:
        output_dir: receives a folder for each run, and base/.
        seed, dtype, num_workers: of each run.
    """

    data_dir: Path
    eval_data_dir: Path
    output_dir: Path
    seed: int
    dtype: str
    num_workers: int

    def train(self, part: str, model_path: Path, part_flags: str, **numbers: float) -> Path:
        """Train a model into output_dir/`part` unless that is done; return the trained one.

        Args:
            part_flags: of `rl_train.sft`, which tell this part from others.
            numbers: max_steps, batch_size and learning_rate.
        """
        run, began = self.output_dir / part, time.perf_counter()
        if not (run / "final_model").exists():
            flags = dict(model_path=model_path, data_dir=self.data_dir, output_dir=run)
            flags |= dict(eval_data_dir=self.eval_data_dir, eval_steps=0, eval_samples=8)
            flags |= numbers | dict(save_steps=numbers["max_steps"], seed=self.seed)
            flags |= dict(dtype=self.dtype, num_workers=self.num_workers, weight_decay=0.02)
            flags |= dict(max_completion_length=MAX_ANSWER_TOKENS, resume="auto")
            argv = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
            run_training(
                [*argv, "--no-gradient_checkpointing", *part_flags.split()], sft.SFT, sft.train
            )
        print(f"{part}: {time.perf_counter() - began:.0f} s", flush=True)
        return run / "final_model"

    def save_base(self, model_path: Path):
        """Write a trained model as output_dir/base, bf16 numbers, unless it is there."""
        if not (self.output_dir / "base").exists():
            model, tokenizer = Sa2VAModel.from_pretrained(model_path), load_tokenizer(model_path)
            with complete_or_absent(self.output_dir / "base") as unfinished:
                save(model, tokenizer, unfinished)
