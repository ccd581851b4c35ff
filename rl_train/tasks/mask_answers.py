"""Flags, question and action of the tasks that answer a phrase with a sampled mask."""

from dataclasses import dataclass
from functools import partial

import torch

from rl_train.config.flags import WEIGHT, flag
from rl_train.data.text import phrase
from rl_train.evaluation.cycle_metrics import measure_phrases
from rl_train.rewards.objects import matched_rewards, with_no_target_reward
from rl_train.rewards.thinking import thinking_rewards
from rl_train.rollout import Batch, Rollout
from rl_train.tasks.base import Task, TaskContext
from rl_train.tasks.latent_mask import LatentMaskAction
from sa2va_hf.batches import ImageFeatures, Prompts
from sa2va_hf.prompts import SEGMENT, THINK_FIRST
from sa2va_hf.to_device import to_device

FORMAT_WEIGHT = 0.1  # of the form of an answer that thinks first, as for points
FORM_REWARDS = ("matched", "format")  # components of loop 2 and of `Referring` beside their own


@dataclass(frozen=True)
class MaskOptions:
    """Flags of the sampled masks. Tasks of one run share them."""

    latent_std: float | str = flag(
        "auto",
        "standard deviation of the noise on the embedding that prompts SAM2, by which masks "
        "are sampled; auto: sampled masks have a mean IoU of 0.5 with the mask without noise; "
        "0: no noise, text is the only action",
        metavar="STD",
        type=lambda text: text if text == "auto" else WEIGHT(text),
    )
    mask_loss_coef: float = flag(
        0.1,
        "weight of a supervised loss, BCE + Dice, on the sampled masks; 0: policy gradient only",
        type=WEIGHT,
    )
    think: bool = flag(
        False,
        "ask for thoughts in <think> tags before the answer with [SEG], and reward this form: "
        f"component format, of weight {FORMAT_WEIGHT} unless --reward_weights says another",
    )

    @property
    def trainable_modules(self) -> tuple[str, ...]:
        # The policy term reaches text_hidden_fcs, the mask term SAM2's decoder too.
        prompt = ("text_hidden_fcs",) if self.latent_std != 0 or self.mask_loss_coef else ()
        return ("lora", "mlp1", *prompt, *(("sam2",) if self.mask_loss_coef else ()))


class MaskAnswers(Task):
    """Base of the tasks whose action is a sampled mask.

    They are loop 2, `Referring` and `GroundedCaptioning`.
    """

    family = "sa2va"

    def __init__(self, options: MaskOptions, context: TaskContext):
        self.options, self.context, self.loss_weight = options, context, options.weight
        self.action = LatentMaskAction(context.policy, options.latent_std, options.mask_loss_coef)
        self.wording = THINK_FIRST if options.think else SEGMENT
        if options.think:  # evaluations ask the same question
            self.measure = partial(measure_phrases, wording=self.wording)

    def set_reward_weights(self, weights: dict[str, float]):
        if self.options.think:
            weights = {"format": FORMAT_WEIGHT} | weights
        super().set_reward_weights(weights)
        self.action.one_by_one = "matched" in self.weighted_components

    def add_form_rewards(
        self, rollout: Rollout, rewards: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return rewards {component: (N,)} of masks with those of FORM_REWARDS that have a weight.

        "matched" compares the masks of the [SEG] one by one with the regions that the caption
        names, see `matched_rewards`, which counts "missing" and "surplus" ones; "format" is
        `thinking_rewards`. Where the caption names nothing each component but these counts and the
        format is 1 of an empty mask and 0 of another one.
        """
        batch, latents, counts = rollout.batch, rollout.latents, {}
        if "matched" in self.weighted_components:
            device = self.context.policy.device
            regions = rollout.repeat_for_rows([to_device(masks, device) for masks in batch.regions])
            counts = matched_rewards(latents.seg_masks, regions)
            rewards = rewards | {"matched": counts.pop("matched")}
        no_target = rollout.repeat_for_rows(batch.no_target)
        rewards = with_no_target_reward(rewards, latents.masks, no_target) | counts
        if "format" in self.weighted_components:
            rewards["format"] = thinking_rewards(rollout.texts)
        return rewards

    def prompts(self, batch: Batch, features: ImageFeatures) -> Prompts:
        """Return the question for the mask of each sample's caption."""
        policy = self.context.policy
        rows, wordings = list(range(len(batch))), [self.wording] * len(batch)
        return policy.segment_prompts(features, rows, batch.captions, wordings)

    def questions(self, rollout: Rollout) -> list[str]:
        """Return the N texts of the prompts."""
        captions = rollout.repeat_for_rows(rollout.batch.captions)
        return [self.wording.replace("{x}", phrase(text)) for text in captions]
