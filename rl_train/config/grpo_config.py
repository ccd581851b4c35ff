"""Every flag of a run but the tasks' own, its help beside it, as small frozen configs.

What computes is given the one config that concerns it, never all flags. Tasks declare theirs alike.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from rl_train.config.flags import (
    COUNT,
    COUNT_OR_0,
    FRACTION,
    FRACTION_BELOW_1,
    GROUP,
    POSITIVE,
    SEED,
    WEIGHT,
    flag,
    flags_with,
)
from rl_train.data import DATASETS, EVAL_DATASETS
from rl_train.grpo import LOSSES, SCALES, clip_window
from rl_train.rewards.ablations import ABLATION_REWARDS
from rl_train.rewards.judge import FAILURE_WINDOW, MODES


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """model"""

    model_path: str = flag(
        help="Sa2VA folder in the original layout, or one of Qwen2.5-VL",
        aliases=("model_name_or_path",),
        free_on_resume=True,
        of_machine=True,
    )
    sam_path: str | None = flag(
        None, "SAM2 folder, which Qwen2.5-VL needs beside it", free_on_resume=True, of_machine=True
    )
    image_side: int = flag(
        840,
        "pixels to which Qwen2.5-VL's images are resized, whatever their shape, as those that "
        "Seg-Zero and VisionReasoner were trained on; 0 = each keeps its shape",
        type=COUNT_OR_0,
    )
    max_image_tokens: int = flag(
        1280, "of an image that keeps its shape, of Qwen2.5-VL: larger ones are reduced", type=COUNT
    )
    dtype: str = flag(
        "bfloat16", "of the frozen base", choices=["float32", "bfloat16"], aliases=("torch_dtype",)
    )
    max_tiles: int = flag(
        1,
        "tiles of an image: 1 = all of it at 448 px, .. 12",
        type=COUNT,
        lowers_memory_of=("encode",),
    )
    max_masks_per_answer: int = flag(
        8,
        "[SEG] that are decoded; further ones stay text",
        type=COUNT,
        lowers_memory_of=("update",),
    )
    temperature: float = flag(1.0, "of sampling and of every log-prob", type=POSITIVE)
    gradient_checkpointing: bool = flag(
        True, "recompute LLM layers in the backward pass", free_on_resume=True
    )
    lora_r: int = flag(128, "rank of the LoRA on the LLM", type=COUNT, aliases=("lora_rank",))
    lora_alpha: int = flag(256, "its scale is alpha / r", type=COUNT)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """data"""

    data_dir: str = flag(
        help="folder of training regions, or owner/name of a data set on the hub",
        aliases=("dataset_name", "local_data_dir"),
        free_on_resume=True,
        of_machine=True,
    )
    dataset: str = flag("gar", "its format (docs/data.md)", choices=list(DATASETS))
    parts: list[str] = flag(
        [],
        "folders of --data_dir that are read, and fetched from the hub (gar, dam); default all",
        metavar="PART",
    )
    split: str | None = flag(None, "of RefCOCO; default train")
    image_root: str | None = flag(
        None,
        "RefCOCO's images (COCO train2014, or above it); default: looked for in --data_dir",
        free_on_resume=True,
        of_machine=True,
    )
    mix: list[str] = flag(
        [],
        "more training data, drawn as often as its weight says beside the 1 of --data_dir; PART as "
        "in --parts, of RefCOCO its split",
        metavar="NAME[/PART,..]:FOLDER[=WEIGHT]",
    )
    max_bad_fraction: float = flag(
        0.01, "of a data set, above which the run stops", type=FRACTION, free_on_resume=True
    )
    eval_data_dir: str | None = flag(
        None,
        "held-out regions; default: some images of --data_dir",
        free_on_resume=True,
        of_machine=True,
    )
    eval_dataset: str | None = flag(
        None,
        "format of --eval_data_dir; default --dataset",
        choices=list(EVAL_DATASETS),
        needs="eval_data_dir",
    )
    eval_parts: list[str] = flag(
        [], "as --parts, of --eval_data_dir", metavar="PART", needs="eval_data_dir"
    )
    eval_split: str | None = flag(
        None, "as --split, of --eval_data_dir; default RefCOCO's val", needs="eval_data_dir"
    )
    eval_samples: int = flag(
        64,
        "held-out regions in an evaluation: always the same ones, spread over images",
        type=COUNT,
    )
    shared_images: str = flag(
        "refuse",
        "that are in --data_dir or --mix and in --eval_data_dir: refuse, or drop from what is "
        "trained on, or keep there",
        choices=["refuse", "drop", "keep"],
    )
    attributes: str | None = flag(
        None,
        "JSON file of the phrases that state an attribute's values, of which captions' accuracy "
        "and precision are measured held out (docs/algorithm.md)",
        free_on_resume=True,
        of_machine=True,
    )
    other_regions: bool = flag(
        False,
        "read them with each region: is it the one that a mask lies on? (measures alone)",
        free_on_resume=True,
    )
    order: str | None = flag(
        None,
        "function of your own (dataset, epoch, generator) -> the indices of an epoch, in place of "
        "a random order (docs/adding_a_task.md)",
        metavar="MODULE:FUNCTION",
    )
    num_workers: int = flag(
        2,
        "DataLoader workers per rank",
        type=COUNT_OR_0,
        aliases=("dataloader_num_workers",),
        free_on_resume=True,
        of_machine=True,
        out_of_model_card=True,
    )
    max_caption_length: int = flag(
        512, "text tokens of a caption's prompt; longer ones are left out", type=COUNT
    )


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """rollouts"""

    train: ClassVar[tuple] = ()  # groups of weights, in place of what the tasks name

    batch_size: int = flag(
        4,
        "prompts per rank and rollout (B)",
        type=COUNT,
        aliases=("per_device_batch_size",),
        free_on_resume=True,
        lowers_memory_of=("calibration", "evaluation", "encode", "rollout", "teacher"),
    )
    num_generations: int = flag(
        8, "samples per prompt (G), at least 2", type=GROUP, lowers_memory_of=("rollout", "teacher")
    )
    max_completion_length: int = flag(
        128,
        "new tokens per sample (T)",
        type=COUNT,
        lowers_memory_of=("rollout", "teacher", "reference", "update"),
    )


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """rewards"""

    use_llm_judge: bool = flag(False, "ask one; loop 1's reward gains 0.25 METEOR + 0.75 judge")
    llm_judge_base_url: str = flag(
        "http://localhost:9100/v1",
        "OpenAI-compatible server",
        aliases=("llm_judge_api_base", "llm_server_url"),
        free_on_resume=True,
        of_machine=True,
        out_of_model_card=True,
    )
    llm_judge_model: str = flag(
        "meta-llama/Meta-Llama-3.1-8B-Instruct", "its name at that server", aliases=("llm_model",)
    )
    llm_judge_mode: str = flag("score", "rating, verdict A..E or questions", choices=tuple(MODES))
    max_judge_failures: float = flag(
        0.2,
        f"of the last {FAILURE_WINDOW} captions, above which the run stops",
        type=FRACTION,
        free_on_resume=True,
    )
    control: str = flag(
        "none",
        "train on these in place of the tasks' rewards, which stay measured. No one sees which "
        "region is meant: shuffled in each group; constant; length = -|words - n| / n, n the mean "
        "of the batch's true captions (loop 2: shares of the image, n of the true regions); fixed "
        "= one caption of the data set is the true one of all (loop 1: METEOR with it); other = "
        "the region and caption of another sample of the batch are the true ones",
        choices=ABLATION_REWARDS,
    )
    scale_components: bool = flag(
        False,
        "divide each component by its std inside the group, before the weighted sum that the "
        "advantages are of",
    )
    overlong_buffer: int = flag(
        0,
        "component overlong: 0 up to this many tokens below --max_completion_length, from there "
        "linearly down to -1 (DAPO's soft punishment); 0 = none",
        type=COUNT_OR_0,
    )
    reward: list[str] = flag(
        [], "functions of your own (docs/adding_a_task.md)", metavar="MODULE:FUNCTION[=WEIGHT]"
    )


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """loss"""

    loss_type: str = flag(
        "dapo", "how token losses are averaged (dr_grpo: no std either)", choices=LOSSES
    )
    scale_rewards: str | None = flag(
        None,
        "advantages are divided by the std of: the group's rewards, the batch's (of the task, all "
        "rows of the step on all ranks), or none; default none for dr_grpo, else group",
        choices=SCALES,
    )
    mask_truncated: bool = flag(
        False,
        "answers cut at --max_completion_length leave the loss; their rewards still count in the "
        "mean and std of their group",
        aliases=("mask_truncated_completions",),
    )
    entropy_coef: float = flag(
        0.0, "weight of the mean entropy of tokens, which the loss then rewards", type=WEIGHT
    )
    clip_range: float | None = flag(
        None,
        "ratio clip, lower side; default 0.2, of gspo {} and {} above. Without effect while the "
        "ratio is 1: at --num_iterations 1, but for --dtype bfloat16's rounding".format(
            *LOSSES["gspo"].clip_range
        ),
        type=POSITIVE,
        aliases=("epsilon",),
    )
    clip_range_high: float | None = flag(
        None,
        "ratio clip, upper side; default --clip_range",
        type=POSITIVE,
        aliases=("epsilon_high",),
    )
    kl_coef: float = flag(
        0.02,
        "weight of the KL to the frozen reference, which is not asked at 0",
        type=WEIGHT,
        aliases=("beta",),
    )

    @property
    def scale(self) -> str:
        """Divisor of advantages, an argument of `group_advantages`."""
        return self.scale_rewards or LOSSES[self.loss_type].advantage_scale

    @property
    def clip(self) -> dict[str, float]:
        """Window of the ratio, arguments of `grpo_loss`."""
        low, high = clip_window(self.loss_type, self.clip_range, self.clip_range_high)
        return dict(clip_range=low, clip_range_high=high)


@dataclass(frozen=True, kw_only=True)
class UpdatesConfig:
    """optimisation"""

    num_iterations: ClassVar[int] = 1  # updates of a step

    max_steps: int = flag(0, "rollouts, then updates; 0 = --num_epochs", type=COUNT_OR_0)
    num_epochs: float = flag(
        1.0,
        "passes over the data, if --max_steps is 0",
        type=POSITIVE,
        aliases=("num_train_epochs",),
    )
    gradient_accumulation_steps: int = flag(
        1, "batches of samples per step and rank", type=COUNT, free_on_resume=True
    )
    learning_rate: float = flag(1e-5, "peak, of AdamW (betas .9 .999)", type=POSITIVE)
    prompt_learning_rate: float | None = flag(
        None, "of text_hidden_fcs, which prompts SAM2; default --learning_rate", type=POSITIVE
    )
    weight_decay: float = flag(0.05, "of AdamW")
    warmup_ratio: float = flag(0.05, "of updates, linear; then cosine to 0", type=FRACTION_BELOW_1)
    max_grad_norm: float = flag(1.0, "gradient clipping by global norm", type=POSITIVE)


@dataclass(frozen=True, kw_only=True)
class OptimConfig(UpdatesConfig):
    """optimisation"""

    num_iterations: int = flag(1, "optimizer updates on the same rollouts", type=COUNT)
    micro_batch_size: int = flag(
        32,
        "rows per forward and backward of the update",
        type=COUNT,
        free_on_resume=True,
        lowers_memory_of=("reference", "update"),
    )
    ema_half_life: float = flag(
        0.1,
        "share of the run's updates after which half of a change has reached the teacher",
        only_one_of="teacher",
        type=POSITIVE,
    )
    ema_decay: float | None = flag(
        None,
        "of the teacher, instead of a half-life; 0 = the policy, 1 = the base",
        only_one_of="teacher",
        type=FRACTION,
    )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """run"""

    output_dir: str = flag(
        help="receives config.json, TensorBoard logs, rollouts and checkpoints",
        free_on_resume=True,
        of_machine=True,
        out_of_model_card=True,
    )
    save_steps: int = flag(
        100, "steps between checkpoints; the last is always saved", type=COUNT, free_on_resume=True
    )
    save_total_limit: int = flag(
        3, "checkpoints kept, oldest removed; 0 = all", type=COUNT_OR_0, free_on_resume=True
    )
    resume: str | None = flag(
        None,
        "from a folder or the latest; auto: from the latest if any",
        nargs="?",
        const="latest",
        aliases=("resume_from_checkpoint",),
        free_on_resume=True,
        of_machine=True,
        out_of_model_card=True,
    )
    eval_steps: int = flag(
        100, "between evaluations; 0 = before and after", type=COUNT_OR_0, free_on_resume=True
    )
    best_by: list[str] = flag(
        [],
        "held-out measures whose mean chooses checkpoint_best, and the role that tools.export "
        "takes; none: seg_iou and caption_meteor, of points seg_iou (docs/algorithm.md)",
        type=lambda name: name.removeprefix("eval/"),
        metavar="MEASURE",
    )
    seed: int = flag(0, "of everything", type=SEED)
    wandb: str | None = flag(
        None,
        "mirror the curves, pictures and flags of TensorBoard as a run of this project of Weights "
        "& Biases (extra: wandb); WANDB_MODE=offline keeps it on this machine",
        metavar="PROJECT",
        nargs="?",
        const="rl-sa2va",
        aliases=("wandb_project",),
        free_on_resume=True,
        out_of_model_card=True,
    )
    export_final: str | None = flag(
        None,
        "at the end write the last checkpoint merged into its base to --output_dir/final_model, as "
        "tools.export does: auto = policy or teacher, whichever is better on the evaluation split",
        nargs="?",
        const="auto",
        choices=["auto", "policy", "teacher"],
        free_on_resume=True,
        out_of_model_card=True,
    )


@dataclass(frozen=True)
class Config:
    """The flags of a run: one frozen config for each part, and the options of its tasks."""

    policy: PolicyConfig
    data: DataConfig
    rollout: RolloutConfig
    reward: RewardConfig
    loss: LossConfig
    optim: OptimConfig
    run: RunConfig
    kinds: dict[str, type]  # {name in --tasks: its class}, those of weight 0 left out
    tasks: dict[str, object]  # {the same name: its Options}
    flags: dict[str, object]  # every flag, as config.json has them
    declared_in: tuple[type, ...]  # the config classes of these flags, in order

    @property
    def samples(self) -> bool:
        """True if answers are sampled and rewarded; in supervised training they are given."""
        return "num_generations" in self.flags

    def flags_with(self, fact: str) -> dict[str, Any]:
        """{flag: value} of the flags that declare a value of `fact`, an argument of `flag`."""
        return flags_with(fact, self.declared_in)


CONFIG_CLASSES = {
    n: kind for n, kind in Config.__annotations__.items() if dataclasses.is_dataclass(kind)
}
