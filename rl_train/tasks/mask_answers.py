"""What the tasks share that answer a phrase with a sampled mask: flags, question and action."""

from dataclasses import dataclass

from rl_train.config.flags import WEIGHT, flag
from rl_train.data.text import phrase
from rl_train.rollout import Batch, Rollout
from rl_train.tasks.base import Task, TaskContext
from rl_train.tasks.latent_mask import LatentMaskAction
from sa2va_hf.batches import ImageFeatures, Prompts
from sa2va_hf.prompts import SEGMENT


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

    @property
    def trainable_modules(self) -> tuple[str, ...]:
        # The policy term reaches text_hidden_fcs, the mask term SAM2's decoder too.
        prompt = ("text_hidden_fcs",) if self.latent_std != 0 or self.mask_loss_coef else ()
        return ("lora", "mlp1", *prompt, *(("sam2",) if self.mask_loss_coef else ()))


class MaskAnswers(Task):
    """Base of loop 2 and of `Referring`: the policy answers a caption with a sampled mask."""

    family = "sa2va"

    def __init__(self, options: MaskOptions, context: TaskContext):
        self.options, self.context, self.loss_weight = options, context, options.weight
        self.action = LatentMaskAction(context.policy, options.latent_std, options.mask_loss_coef)

    def prompts(self, batch: Batch, images: ImageFeatures) -> Prompts:
        """Return the question for the mask of each sample's caption."""
        policy = self.context.policy
        return policy.segment_prompts(images, list(range(len(batch))), batch.captions)

    def questions(self, rollout: Rollout) -> list[str]:
        """Return the N texts of the prompts."""
        captions = rollout.of_rows(rollout.batch.captions)
        return [SEGMENT.replace("{x}", phrase(text)) for text in captions]
