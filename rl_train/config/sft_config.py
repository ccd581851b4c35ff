"""The flags of supervised training that are not those of reinforcement learning."""

from dataclasses import dataclass

from rl_train.config.flags import COUNT, flag
from rl_train.config.grpo_config import (
    CONFIG_CLASSES,
    DataConfig,
    PolicyConfig,
    RunConfig,
    UpdatesConfig,
)

# Every phase of a step: fewer samples take less memory in each.
PHASES = ("calibration", "evaluation", "encode", "rollout", "teacher", "reference", "update")


@dataclass(frozen=True, kw_only=True)
class SFTExamplesConfig:
    """examples"""

    batch_size: int = flag(
        4,
        "number of samples per rank and forward and backward pass",
        type=COUNT,
        aliases=("per_device_batch_size",),
        free_on_resume=True,
        lowers_memory_of=PHASES,
    )
    max_completion_length: int = flag(
        512,
        "largest number of tokens of an answer, a longer one is cut; also in evaluations",
        type=COUNT,
        lowers_memory_of=("rollout", "teacher", "reference", "update"),
    )
    trainable_modules: list[str] = flag(
        [],
        "groups of weights to train: lora, mlp1, text_hidden_fcs, sam2 (its mask decoder), "
        "hypernetworks (of sam2), or all weights of language_model (without a LoRA), embeddings "
        "(and lm_head), vision, sam2_encoder",
        default_is="what the tasks name: lora, mlp1, for masks also text_hidden_fcs and sam2",
        metavar="GROUP",
    )


# Of supervised training, which samples no group, has no reward and no loss of a choice.
SFT_CONFIG_CLASSES = dict(
    policy=PolicyConfig,
    data=DataConfig,
    rollout=SFTExamplesConfig,
    optim=UpdatesConfig,
    run=RunConfig,
)
ALL_CONFIG_CLASSES = tuple(dict.fromkeys([*CONFIG_CLASSES.values(), *SFT_CONFIG_CLASSES.values()]))
