"""Loop 1 with several listeners: the reward is the fraction of models that find the region.

    python -m tools.experiments.sweep --arms loop1 --lab bases/loop1/lab --demos bases/loop1/0 \
        --output outputs/ensemble -- --tasks tools.experiments.ensemble:EnsembleLoop1 \
        --listeners bases/loop1/1/base bases/loop1/2/base

A speaker and its own teacher may agree on words that nobody else understands. Listeners that were
trained apart, and that are not trained here, have no part in such an agreement.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from rl_train.config.flags import flag
from rl_train.export.load_policy import open_policy
from rl_train.policies.sa2va import Sa2VAPolicy
from rl_train.policies.sa2va_queries import segment_model_captions
from rl_train.rewards.iou import on_target
from rl_train.rollout import RewardOutput, Rollout
from rl_train.tasks.base import TaskContext
from rl_train.tasks.mask_caption_mask import MaskCaptionMask
from rl_train.utils.io import UserFault

FOUND = "found_by_ensemble"


class EnsembleLoop1(MaskCaptionMask):
    """Loop 1 whose reward is the fraction of its teacher and of other models that find the region.

    A model has found it if its mask lies on the region and on no other object, see `on_target`.
    """

    mask_components = (*MaskCaptionMask.mask_components, FOUND)
    reward_components = (FOUND, *MaskCaptionMask.reward_components)

    @dataclass(frozen=True)
    class Options(MaskCaptionMask.Options):
        listeners: list[str] | None = flag(
            None, "folders of models that listen too; needs --distractors", metavar="FOLDER"
        )

    def __init__(self, options: Options, context: TaskContext):
        super().__init__(options, context)
        if not options.listeners:
            raise ValueError("--listeners: name the folders of models that listen too")
        self.listeners = [self._open(folder) for folder in options.listeners]
        self.set_reward_weights({FOUND: 1.0})

    def _open(self, folder: str) -> Sa2VAPolicy:
        return open_policy(
            Path(folder),
            None,
            "policy",
            self.context.policy.device,
            self.context.max_reply_tokens,
            flag="--listeners",
            family=self.family,
            dtype=str(self.context.policy.base_dtype).removeprefix("torch."),
        )

    def own_rewards(self, rollout: Rollout) -> RewardOutput:
        """Return the teacher's IoU, "found_by_ensemble" (N,), and the teacher's masks."""
        batch = rollout.batch
        if batch.distractors is None:
            raise UserFault(
                "--listeners needs --distractors, to tell whether a mask is on its region"
            )
        outcome = super().own_rewards(rollout)
        if FOUND not in self.weighted_components:
            return outcome
        heard = [outcome.masks, *(self._masks_of(listener, rollout) for listener in self.listeners)]
        found = [on_target(masks, batch.masks, batch.distractors) for masks in heard]
        outcome.rewards[FOUND] = torch.stack(found).mean(0)
        return outcome

    @torch.no_grad()
    def _masks_of(self, listener: Sa2VAPolicy, rollout: Rollout) -> list[torch.Tensor]:
        """Return the masks (H, W) bool that a listener finds by each of the N captions."""
        images = listener.encode(rollout.batch)
        index, tokens = rollout.prompts.image_index, self.context.max_reply_tokens
        forced = self.options.teacher_answer == "forced"
        return segment_model_captions(
            listener, images, index, rollout.texts, tokens, forced=forced
        ).masks
