"""The flags of supervised training that are not those of reinforcement learning."""

from dataclasses import dataclass

from rl_train.config import DataConfig, PolicyConfig, RunConfig, UpdatesConfig
from rl_train.flags import COUNT, flag


@dataclass(frozen=True, kw_only=True)
class ExamplesConfig:
    """examples, of supervised training"""

    batch_size: int = flag(4, "samples per rank, forward and backward (B)", type=COUNT)
    regions_per_image: int = flag(
        1,
        "regions of an image that a batch holds beside each other, as far as they go: its features "
        "are made once, and of one image they teach what tells them apart",
        type=COUNT,
    )
    max_completion_length: int = flag(
        512, "tokens of an answer (T): a longer one is cut, held out none is sampled", type=COUNT
    )
    train: list[str] = flag(
        [],
        "what trains, in place of what the tasks name: lora, mlp1, text_hidden_fcs, sam2 (its mask "
        "decoder); all weights of language_model (without a LoRA), embeddings (and lm_head), "
        "vision, sam2_encoder; hypernetworks, of sam2",
        metavar="GROUP",
    )


@dataclass(frozen=True, kw_only=True)
class SupervisedRunConfig(RunConfig):
    """run"""

    export_final: str = flag(
        "policy",
        "at the end the last checkpoint is merged into its base: --output_dir/final_model, which "
        "rl_train.train takes as --model_path",
        choices=["policy"],
    )


# Of supervised training, which samples no group, has no reward and no loss of a choice.
SUPERVISED_PARTS = dict(
    policy=PolicyConfig,
    data=DataConfig,
    rollout=ExamplesConfig,
    optim=UpdatesConfig,
    run=SupervisedRunConfig,
)
