"""Loop 2, caption -> mask -> caption': the policy samples a mask, the teacher describes it."""

from dataclasses import dataclass

from rl_train.config.flags import FRACTION, WEIGHT, flag
from rl_train.data.text import phrase
from rl_train.policies.sa2va_queries import caption_likelihood, describe, region_grids
from rl_train.rewards import mask_iou, meteor
from rl_train.rewards.combine import JUDGE_WEIGHT, METEOR_WEIGHT
from rl_train.rewards.objects import with_none_reward
from rl_train.rollout import Batch, RewardOutput, Rollout
from rl_train.tasks.base import Task, TaskContext, with_measurements
from rl_train.tasks.latent_mask import LatentMaskAction
from sa2va_hf.batches import ImageFeatures, Prompts
from sa2va_hf.prompts import SEGMENT
from sa2va_hf.to_device import to_device


class CaptionMaskCaption(Task):
    """Loop 2, with the agreement of the teacher's caption of a mask with the prompt's as reward."""

    name = "loop2"
    family, asks_teacher, takes_no_target = "sa2va", True, True

    @dataclass(frozen=True)
    class Options:
        weight: float = flag(
            1.0,
            "weight of loop 2's loss; 0 leaves the loop out",
            name="loop2_weight",
            aliases=("caption_to_mask_weight",),
            type=WEIGHT,
        )
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
            "weight of a supervised loss, BCE + Dice, on loop 2's masks; 0: policy gradient only",
            type=WEIGHT,
        )
        likelihood_weight: float = flag(
            0.0,
            "weight of the true caption's likelihood in loop 2's reward; METEOR (with "
            "--use_llm_judge_loop2: 0.25 METEOR + 0.75 judge) has the rest",
            type=FRACTION,
        )
        use_llm_judge_loop2: bool = flag(
            False,
            "let the judge score loop 2 too: 0.25 METEOR + 0.75 judge in place of METEOR",
            needs="use_llm_judge",
        )

        @property
        def trainable_modules(self) -> tuple[str, ...]:
            # The policy term reaches text_hidden_fcs, the mask term SAM2's decoder too.
            prompt = ("text_hidden_fcs",) if self.latent_std != 0 or self.mask_loss_coef else ()
            return ("lora", "mlp1", *prompt, *(("sam2",) if self.mask_loss_coef else ()))

    def __init__(self, options: Options, context: TaskContext):
        self.context, self.loss_weight, use_judge = (
            context,
            options.weight,
            options.use_llm_judge_loop2,
        )
        likelihood_weight = options.likelihood_weight
        if use_judge and likelihood_weight == 1:
            raise ValueError("--use_llm_judge_loop2: --likelihood_weight 1 leaves the judge none")
        self.llm_judge = context.judge if use_judge else None
        self.action = LatentMaskAction(context.policy, options.latent_std, options.mask_loss_coef)
        text = {"meteor": METEOR_WEIGHT, "judge": JUDGE_WEIGHT} if use_judge else {"meteor": 1.0}
        weights = {name: (1 - likelihood_weight) * weight for name, weight in text.items()}
        weights["likelihood"] = likelihood_weight
        # A component of weight 0 is not computed.
        self.reward_weights = {
            k: weight for k, weight in weights.items() if weight
        } | context.user_weights

    def prompts(self, batch: Batch, images: ImageFeatures) -> Prompts:
        """Return the question for the mask of each sample's caption."""
        policy = self.context.policy
        return policy.segment_prompts(images, list(range(len(batch))), batch.captions)

    def rewards(self, rollout: Rollout) -> RewardOutput:
        """Return {"meteor", "iou", "likelihood": (N,)} of the sampled masks.

        Where the caption names nothing, each is 1 of an empty mask and 0 of another one.

        The likelihood is computed unless its weight is 0.

        METEOR compares the teacher's caption of each mask with the prompt's caption; the likelihood
        is the teacher's, of the prompt's caption as a description of the mask. The IoU with the
        region is a measurement that the reward does not see. With --use_llm_judge_loop2 "judge"
        scores the same pair as METEOR; a row that it gives NaN is not scored at all. See
        `with_measurements` for "on_target" and the user's rewards, which see the sampled masks and
        the teacher's replies.
        """
        context, policy = self.context, self.context.policy
        captions, masks = rollout.of_rows(rollout.batch.captions), rollout.latents.masks
        features, image, tokens = (
            rollout.features,
            rollout.prompts.image_index,
            context.max_reply_tokens,
        )
        # Computed once, for captions and likelihoods.
        grids, rewards = region_grids(policy, masks), {}
        with context.roles.use("teacher"):
            replies = describe(policy, features, image, masks, tokens, grids)
            if "likelihood" in self.reward_weights:  # a GPU still computes it during METEOR
                rewards["likelihood"] = caption_likelihood(
                    policy, features, image, masks, captions, tokens, grids
                )
        targets = rollout.of_rows([to_device(mask, policy.device) for mask in rollout.batch.masks])
        rewards |= {"meteor": meteor(captions, replies), "iou": mask_iou(masks, targets)}
        if self.llm_judge:
            rewards["judge"] = self.llm_judge.score(captions, replies)
        rewards = with_none_reward(
            rewards, rewards, masks, rollout.of_rows(rollout.batch.no_target)
        )
        rewards = with_measurements(
            self,
            rollout,
            rewards,
            [SEGMENT.replace("{x}", phrase(text)) for text in captions],
            masks,
            targets,
            replies=replies,
            mask_confidence=rollout.latents.confidence,
        )
        return RewardOutput(rewards, masks, replies, rollout.latents.confidence)
