"""Loop 2, caption -> mask -> caption': the policy samples a mask, the teacher describes it."""

from dataclasses import dataclass

from rl_train.data.text import phrase
from rl_train.flags import POSITIVE, SHARE, WEIGHT, flag
from rl_train.policies.segment_describe import caption_likelihood, describe, region_grids
from rl_train.rewards import mask_iou, meteor
from rl_train.rewards.caption import JUDGE_WEIGHT, METEOR_WEIGHT, without_rows
from rl_train.rewards.custom import user_components, with_components
from rl_train.rewards.iou import hits
from rl_train.tasks.protocol import Context
from rl_train.tasks.sampled_mask import SampledMask
from rl_train.types import Batch, Outcome, Rollout
from sa2va_hf.batches import Images, Prompts
from sa2va_hf.prompts import SEGMENT
from sa2va_hf.transfer import send


class CaptionMaskCaption:
    name = "loop2"
    family, asks_teacher, measure = "sa2va", True, None

    @dataclass(frozen=True)
    class Options:
        weight: float = flag(1.0, "of loop 2's loss", name="caption_to_mask_weight", type=WEIGHT)
        mask_sigma: float | str = flag(
            "auto",
            "std of the Gaussian over SAM2's prompt embedding, root mean square over dimensions; "
            "auto = masks so drawn have a mean IoU of 0.5 with the mean's; 0 = none is drawn, the "
            "text is the only action",
            type=lambda text: text if text == "auto" else WEIGHT(text),
        )
        mask_loss_coef: float = flag(
            0.1, "of the supervised BCE + Dice on the masks; 0 = policy gradient only", type=WEIGHT
        )
        latent_clip_range: float = flag(
            0.2,
            "ratio clip of the drawn embedding, the log-ratio being the mean over its D = 256 "
            "dimensions; 0.2 / D = 8e-4 clips the joint ratio at 0.2",
            type=POSITIVE,
        )
        latent_kl_weight: float = flag(
            1.0,
            "times --kl_coef, of the drawn embedding's KL, the mean over D; D = of the joint KL",
            type=WEIGHT,
        )
        likelihood_share: float | None = flag(
            None,
            "of the true caption's likelihood in the reward, METEOR has the rest; default 0.5, "
            "with --use_llm_judge_loop2 0",
            type=SHARE,
        )
        use_llm_judge_loop2: bool = flag(
            False, "0.25 METEOR + 0.75 judge in place of METEOR; needs --use_llm_judge"
        )

        @property
        def trains(self) -> tuple[str, ...]:
            prompt = ("text_hidden_fcs",) if self.mask_sigma != 0 or self.mask_loss_coef else ()
            return ("lora", "mlp1", *prompt, *(("sam2",) if self.mask_loss_coef else ()))

    def __init__(self, options: Options, context: Context):
        self.context, self.weight, judged = context, options.weight, options.use_llm_judge_loop2
        share = options.likelihood_share
        if share is None:
            share = 0.0 if judged else 0.5
        if judged and share == 1:
            raise ValueError("--use_llm_judge_loop2: --likelihood_share 1 leaves the judge none")
        assert context.judge or not judged, "the command line refuses this"
        self.llm_judge = context.judge if judged else None
        how = (options.mask_sigma, options.mask_loss_coef)
        latent = (options.latent_clip_range, options.latent_kl_weight)
        self.action = SampledMask(context.policy, *how, *latent)
        parts = {"meteor": METEOR_WEIGHT, "judge": JUDGE_WEIGHT} if judged else {"meteor": 1.0}
        self.weights = {name: (1 - share) * part for name, part in parts.items() if share < 1}
        self.weights |= {"likelihood": share} if share else {}
        self.weights |= {reward.name: reward.weight for reward in context.user_rewards}

    def prompts(self, batch: Batch, images: Images) -> Prompts:
        """The question for the mask of each sample's caption."""
        policy = self.context.policy
        return policy.segment_prompts(images, list(range(len(batch))), batch.captions)

    def judge(self, rollout: Rollout) -> Outcome:
        """{"meteor", "iou" and, unless its share is 0, "likelihood": (N,)} of the sampled masks.

        METEOR of the teacher's caption of each mask against the prompt's caption, and the
        likelihood that the teacher gives the prompt's caption as a description of it. The IoU with
        the region is a measurement that the reward does not see. With --use_llm_judge_loop2 "judge"
        scores the same pair as METEOR; where it gives NaN the row is not scored at all. The user's
        own rewards see the sampled masks and the teacher's replies: see `user_components`. With
        --other_regions "hit" is a measurement too: see `hits`.
        """
        context, policy = self.context, self.context.policy
        captions, masks = rollout.of_rows(rollout.batch.captions), rollout.action.masks
        question = (policy, rollout.features, rollout.prompts.image, masks)
        grids, rewards = region_grids(policy, masks), {}
        with context.roles.use("teacher"):
            replies = describe(*question, context.max_new_tokens, grids)
            if "likelihood" in self.weights:
                asked = (captions, context.max_new_tokens, grids)
                likelihood = caption_likelihood(*question, *asked)
                rewards["likelihood"] = likelihood  # which a GPU computes during what follows
        regions = [send(mask, policy.device) for mask in rollout.batch.masks]
        targets = rollout.of_rows(regions)
        rewards |= {"meteor": meteor(captions, replies), "iou": mask_iou(masks, targets)}
        if rollout.batch.others is not None:
            rewards["hit"] = hits(masks, rollout.batch.masks, rollout.batch.others)
        if self.llm_judge:
            rewards["judge"] = self.llm_judge.score(captions, replies)
        rewards = {name: values.cpu() for name, values in rewards.items()}
        prompts = [SEGMENT.replace("{x}", phrase(text)) for text in captions]
        common = (context.user_rewards, rollout, prompts, masks, targets)
        more = dict(replies=replies, mask_confidence=rollout.action.confidence)
        rewards = with_components(rewards, user_components(*common, **more))
        if self.llm_judge:
            rewards = without_rows(rewards, self.weights, rewards["judge"].isnan())
        return Outcome(rewards, masks, replies)
