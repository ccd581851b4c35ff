"""A base for loop 2: it has learnt captions of all regions that may be named, and few masks.

A Sa2VA of random weights learns to see and to find as a base for loop 1 does (`train_base`), then
to find for longer with its vision model frozen. LLM and text_hidden_fcs then begin anew from random
weights, and vision model and SAM2 stay as they are: captions of all regions, and masks of those
alone that are in part `captioned` of the scenes.

Masks of such a base are cut to one connected piece (`one_piece_masks` of config.json). Without the
cut a third of a mask's pixels lay apart from that piece, and captions of such masks said little.

Letters: B samples, D width of a prompt embedding.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rl_train.config.flags import flag
from rl_train.tasks.base import TaskContext
from rl_train.tasks.sft_tasks import Examples, ReferringSegmentation
from sa2va_hf import Sa2VAModel
from sa2va_hf.losses import resize_masks, resized_mask_loss
from sa2va_hf.tokenizer import load_tokenizer
from tools.demo.model import initialise
from tools.demo.new_folder import complete_or_absent
from tools.demo.warm_start import PARTS, TrainingRuns, train_parts
from tools.experiments.base.train import VOCAB_SIZE, Size
from tools.experiments.pictures.dataset import CAPTIONED, SEGMENTED, TRUTH, read_truth

if TYPE_CHECKING:
    from rl_train.engine.engine import ScoreOutput
    from sa2va_hf.batches import ImageFeatures

NEW = ("language_model.", "text_hidden_fcs.")  # names of the weights that begin anew
# Flags of the parts before the new LLM, in order, and of the part with it.
BEFORE = {part: PARTS[part] for part in ("see", "find")} | {
    "find_longer": f"--subsets {SEGMENTED} --tasks referring_segmentation --one_answer "
    "--trainable_modules language_model embeddings text_hidden_fcs sam2 sam2_encoder"
}
FEW_MASKS = (
    f"--subsets {SEGMENTED} --tasks region_captions tools.experiments.base.few_masks:FewMasks "
    "--one_answer --trainable_modules language_model embeddings text_hidden_fcs"
)


class FewMasks(ReferringSegmentation):
    """`ReferringSegmentation` whose masks are taught of the regions of part `captioned` alone."""

    name = "few_masks"

    @dataclass(frozen=True)
    class Options(ReferringSegmentation.Options):
        truth: str = flag("", "truth.jsonl of the scenes, which says which regions are taught")

    def __init__(self, options: Options, context: TaskContext):
        super().__init__(options, context)
        # In the order of the part `segmented`.
        named = [r for r in read_truth(Path(options.truth).parent) if not r["unnamed"]]
        self.is_taught = [region["part"] == CAPTIONED for region in named]
        self.fraction = sum(self.is_taught) / len(self.is_taught)

    def loss_terms(
        self, examples: Examples, features: "ImageFeatures", scores: "ScoreOutput", rows: float
    ):
        """Return the masks' loss of the taught regions, as large as if all were taught."""
        policy, batch = self.context.policy, examples.batch
        taught = [i for i, index in enumerate(batch.index) if self.is_taught[index]]
        if not taught:
            zero = scores.logp.new_zeros(())
            return [], dict(mask_loss=zero)
        prompts = policy.scored_mask_embeddings(scores, examples.ids, examples.valid)  # (B, D)
        logits = policy.decode_masks(features, taught, prompts[taught])
        resized = resize_masks([batch.masks[i] for i in taught], logits)
        loss = resized_mask_loss(logits, resized).sum() / self.fraction / rows
        return [loss], dict(mask_loss=loss.detach())


def train_few_masks(
    size: Size, data_dir: Path, output_dir: Path, seed: int, dtype: str, num_workers: int
):
    """Train a base for loop 2 on the scenes below `data_dir` into output_dir/base."""
    train, heldout = data_dir / "train", data_dir / "heldout"
    runs = TrainingRuns(train, heldout, output_dir, seed, dtype, num_workers)
    model_path = train_parts(size.config, VOCAB_SIZE, BEFORE, size.loop2, runs)
    begin = output_dir / "begin"
    if not begin.exists():
        with complete_or_absent(begin) as unfinished:
            with_new_llm(model_path, seed).save_pretrained(unfinished, torch.float32)
            load_tokenizer(model_path).save_pretrained(unfinished)
    flags = f"{FEW_MASKS} --truth {train / TRUTH}"
    runs.save_base(runs.train("few_masks", begin, flags, **size.loop2.flags(len(BEFORE))))


def with_new_llm(base: Path, seed: int) -> Sa2VAModel:
    """Return a base's model, float32, with random weights of NEW and masks of one piece."""
    model = Sa2VAModel.from_pretrained(base).float()
    torch.manual_seed(seed)
    drawn = Sa2VAModel(model.config)
    initialise(drawn)
    new = {name: value for name, value in drawn.state_dict().items() if name.startswith(NEW)}
    model.load_state_dict(model.state_dict() | new)
    model.config.raw["one_piece_masks"] = True
    return model
