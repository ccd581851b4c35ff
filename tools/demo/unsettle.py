"""The end of the demo's warm start: a disturbed prompt head, and masks decided all the same.

Masks end where objects end, and a third of them lie on a wrong object.

    python -m rl_train.sft --tasks tools.demo.unsettle:Decided --distractors ..
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.utils.data import Subset
from tqdm import tqdm

from rl_train.config.flags import WEIGHT, flag
from rl_train.data import GraspAnyRegionDataset
from rl_train.data.loader import eval_loader
from rl_train.policies.sa2va_queries import row_masks
from rl_train.rewards.iou import mask_iou, on_target
from rl_train.rollout import Batch
from rl_train.tasks.base import TaskContext
from rl_train.tasks.sft_tasks import Examples, SFTTask
from sa2va_hf.losses import resize_masks, resized_mask_loss
from sa2va_hf.prompts import FORCED_ANSWER
from tools.demo.mistakes import mistaken

if TYPE_CHECKING:
    from rl_train.engine.engine import ScoreOutput
    from rl_train.policies.sa2va import Sa2VAPolicy
    from sa2va_hf.batches import ImageFeatures


HIT_TARGET = 0.57  # fraction of phrases whose mask lies on the right object; `Decided` adds to it
LARGEST_NOISE, BISECTIONS = 32.0, 10  # of the prompt head's weights' standard deviation
SCALES = [2 ** (k / 2) for k in range(-4, 5)]  # tried for the disturbed head's output
REGIONS, BATCH = 256, 32
DECIDED = 0.3  # least IoU of a mask with the object that it is trained to become


@torch.no_grad()
def unsettle(policy: "Sa2VAPolicy", data: Path, seed: int, target: float = HIT_TARGET):
    """Add noise to text_hidden_fcs until only a fraction `target` of its masks hit.

    The fraction falls as the noise grows, so the largest noise that leaves `target` is found by
    bisection. Then the prompt embeddings get the scale whose masks are best.

    Raises:
        RuntimeError: fewer hit even undisturbed.
    """
    examples = list(phrases(policy, data, seed))
    last = policy.model.text_hidden_fcs[2]
    learnt, generator = last.weight.clone(), torch.Generator().manual_seed(seed)
    noise = torch.randn(learnt.shape, generator=generator).to(learnt) * learnt.std()
    low, high = 0.0, LARGEST_NOISE
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        last.weight.copy_(learnt + middle * noise)
        hit_fraction = measure_masks(policy, examples, 1.0)[1]
        low, high = (middle, high) if hit_fraction >= target else (low, middle)
    if low == 0:
        raise RuntimeError(f"not {target} of the masks hit, even undisturbed: train longer")
    if high == LARGEST_NOISE:
        raise RuntimeError(f"{target} of the masks hit, however disturbed the prompt head is")
    last.weight.copy_(learnt + low * noise)
    of_scale = {scale: measure_masks(policy, examples, scale) for scale in SCALES}
    best = max(SCALES, key=lambda scale: of_scale[scale][0])
    last.weight.mul_(best)
    last.bias.mul_(best)
    iou, hit_fraction = of_scale[best]
    tqdm.write(
        f"prompt head: noise of {low:.2f} standard deviations, scaled by {best:.2f}: of its "
        f"masks {hit_fraction:.2f} hit, IoU {iou:.2f}"
    )


def phrases(policy: "Sa2VAPolicy", data: Path, seed: int):
    """Yield (batch, features, (B, C) hidden states at [SEG] of its captions) of some regions."""
    dataset = GraspAnyRegionDataset(data)
    # 11: apart from the other uses of the seed.
    order = np.random.default_rng([seed, 11]).permutation(len(dataset))
    few = Subset(dataset, order[:REGIONS].tolist())
    for batch in eval_loader(few, policy.preprocessor(1), BATCH, 0, distractors=True):
        features = policy.encode(batch)
        prompts = policy.segment_prompts(features, list(range(len(batch))), batch.captions)
        forced = [policy.prompts.forced_answer] * len(prompts)
        yield batch, features, policy.read(features, prompts.followed_by(forced))[:, 0]


def measure_masks(
    policy: "Sa2VAPolicy", examples: list[tuple], scale: float
) -> tuple[float, float]:
    """Return (mean IoU, fraction on the right object) of the masks of `phrases` at a scale."""
    ious, right = [], []
    for batch, features, hidden in examples:
        rows = list(range(len(batch)))
        with policy.autocast():
            prompts = scale * policy.model.text_hidden_fcs(hidden).float()
        masks = row_masks(policy, features, rows, rows, prompts).masks
        targets = [mask.to(policy.device) for mask in batch.masks]
        ious.append(mask_iou(masks, targets).cpu())
        right.append(on_target(masks, batch.masks, batch.distractors))
    return torch.cat(ious).mean().item(), torch.cat(right).double().mean().item()


class Decided(SFTTask):
    """A phrase -> one whole object: the one that the mask was most of when training began.

    By SAM2's hypernetworks alone, so that which objects the disturbed head finds changes little.
    """

    name = "decided"
    family, asks_reference = "sa2va", True

    @dataclass(frozen=True)
    class Options:
        weight: float = flag(1.0, "of the decided masks", name="decided_weight", type=WEIGHT)
        trainable_modules = ("hypernetworks",)

    def __init__(self, options: Options, context: TaskContext):
        self.context, self.loss_weight = context, options.weight

    def examples(self, batch: Batch, features: "ImageFeatures", rngs: list[np.random.Generator]):
        policy, rows = self.context.policy, list(range(len(batch)))
        chosen_captions = [
            text if r.random() < 0.5 else mistaken(text, r) for text, r in zip(batch.captions, rngs)
        ]
        answers = [policy.prompts.answer(FORCED_ANSWER)] * len(batch)
        return policy.segment_prompts(features, rows, chosen_captions), answers

    def loss_terms(
        self, examples: Examples, features: "ImageFeatures", scores: "ScoreOutput", rows: float
    ):
        policy, batch, image = self.context.policy, examples.batch, list(range(len(examples.ids)))
        if batch.distractors is None:
            raise ValueError("--tasks tools.demo.unsettle:Decided: needs --distractors")
        # Detached: the prompt head stays disturbed, only the hypernetworks learn.
        prompts = policy.scored_mask_embeddings(scores, examples.ids, examples.valid).detach()
        with self.context.roles.use("reference"):
            before = policy.decode_masks(features, image, prompts) > 0
        logits = policy.decode_masks(features, image, prompts)
        best, wholes, is_target = [], [], []
        for k, (mask, others) in enumerate(zip(batch.masks, batch.distractors, strict=True)):
            objects = resize_masks([mask, *others], logits)  # (1 + K, h, w)
            iou, nearest = all_ious(before[k : k + 1], objects > 0)[0].max(0)
            best, wholes = [*best, iou], [*wholes, objects[nearest]]
            is_target.append(nearest == 0)
        decided = torch.stack(best) > DECIDED  # (B,)
        losses = resized_mask_loss(logits, torch.stack(wholes))
        loss = (losses * decided).sum() / rows
        counts = dict(hits=(torch.stack(is_target) & decided).sum(), decided=decided.sum())
        return [loss], dict(mask_loss=loss.detach()) | {
            name: (count, len(decided)) for name, count in counts.items()
        }


def all_ious(masks: torch.Tensor, areas: torch.Tensor) -> torch.Tensor:
    """Return the IoU (n, m) of each mask (n, h, w) bool with each area (m, h, w), none empty."""
    masks, areas = (x.flatten(1).double() for x in (masks, areas))
    both = masks @ areas.T
    return both / (masks.sum(1)[:, None] + areas.sum(1) - both)
