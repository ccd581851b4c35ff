"""Train a base by `rl_train.sft` from random weights: three parts, each after the one before."""

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
from tools.experiments.base.model import config_of
from tools.experiments.pictures.dataset import SEGMENTED, TRUTH, read_truth

MAX_ANSWER_TOKENS = 24
VOCAB_SIZE = 900  # of the tokenizer at most, without special tokens
ALL = "vision mlp1 language_model embeddings text_hidden_fcs sam2 sam2_encoder"
# Flags of the parts beside those of `Size`, in order. Captions are in the last alone.
PARTS = dict(
    see=f"--subsets {SEGMENTED} --tasks tools.experiments.base.words:SeenMasks --one_answer "
    f"--distractors --trainable_modules {ALL}",
    find=f"--subsets {SEGMENTED} --tasks referring_segmentation --one_answer "
    f"--trainable_modules {ALL}",
    say="--subsets captioned --tasks region_captions referring_segmentation --one_answer "
    "--trainable_modules language_model embeddings text_hidden_fcs",
)


@dataclass(frozen=True)
class Size:
    """A base's sizes, and how long it is trained.

    Attributes:
        side: pixels of the image that the vision model sees.
        steps: of each part.
        rates: peak learning rate of each part.
    """

    side: int
    width: int
    vision_layers: int
    llm_layers: int
    batch_size: int
    steps: tuple[int, int, int]
    rates: tuple[float, float, float]


SIZES = {
    "small": Size(336, 256, 4, 3, 64, (600, 100, 300), (1.5e-3, 4e-4, 6e-4)),
    "tiny": Size(112, 64, 1, 1, 8, (4, 2, 2), (1e-3, 4e-4, 6e-4)),  # shows that the commands run
}


def train_base(
    size: Size, data_dir: Path, output_dir: Path, seed: int, dtype: str, num_workers: int
):
    """Train a base on the scenes below `data_dir` into output_dir/base, bf16 numbers.

    A part's run is output_dir/PART; one that is done is not done again.
    """
    base = output_dir / "random"
    if not base.exists():
        torch.manual_seed(seed)
        truth = read_truth(data_dir / "train")
        captions = (region["caption"] for region in truth if not region["unnamed"])
        tokenizer = tokenizer_of(captions, VOCAB_SIZE)
        config = config_of(size.side, size.width, size.vision_layers, size.llm_layers)
        config["llm_config"]["vocab_size"] = len(tokenizer)
        model = Sa2VAModel(Sa2VAConfig(**config))
        initialise(model)
        with complete_or_absent(base) as unfinished:
            model.save_pretrained(unfinished, torch.float32)
            tokenizer.save_pretrained(unfinished)
    for number, part in enumerate(PARTS):
        run, began = output_dir / part, time.perf_counter()
        if not (run / "final_model").exists():
            flags = dict(model_path=base, data_dir=data_dir / "train", output_dir=run, seed=seed)
            flags |= dict(eval_data_dir=data_dir / "heldout", eval_steps=0, eval_samples=8)
            flags |= dict(max_steps=size.steps[number], save_steps=size.steps[number])
            flags |= dict(batch_size=size.batch_size, learning_rate=size.rates[number])
            flags |= dict(dtype=dtype, num_workers=num_workers, weight_decay=0.02)
            flags |= dict(max_completion_length=MAX_ANSWER_TOKENS, resume="auto")
            if part == "see":
                flags |= dict(truth=data_dir / "train" / TRUTH)
            argv = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
            run_training(
                [*argv, "--no-gradient_checkpointing", *PARTS[part].split()], sft.SFT, sft.train
            )
        base = run / "final_model"
        print(f"{part}: {time.perf_counter() - began:.0f} s", flush=True)
    if not (output_dir / "base").exists():
        model, tokenizer = Sa2VAModel.from_pretrained(base), load_tokenizer(base)
        with complete_or_absent(output_dir / "base") as unfinished:
            save(model, tokenizer, unfinished)
