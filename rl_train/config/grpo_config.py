"""Every flag of a run but the tasks' own, its help beside it, as small frozen configs.

What computes is given the one config that concerns it, never all flags. Tasks declare theirs alike.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from rl_train.config.flags import (
    AT_LEAST_2,
    COUNT,
    COUNT_OR_0,
    FRACTION,
    FRACTION_BELOW_1,
    POSITIVE,
    SEED,
    WEIGHT,
    flag,
    flags_with,
)
from rl_train.config.saved import Taken
from rl_train.data.registry import DATASETS, dataset_name
from rl_train.grpo import LOSSES, SCALES, clip_window
from rl_train.rewards.ablations import ABLATION_HELP, ABLATION_REWARDS
from rl_train.rewards.judge import MODES
from rl_train.rewards.weights import ComponentWeight, weight_text


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """model and LoRA"""

    model_path: str = flag(
        help="folder or hub name of the model to train: Sa2VA in the original layout, or "
        "Qwen2.5-VL or Qwen3-VL for the tasks of points",
        metavar="FOLDER",
        aliases=("model_name_or_path",),
        free_on_resume=True,
        may_differ_by_rank=True,
    )
    sam_path: str | None = flag(
        None,
        "folder or hub name of the SAM2 that draws the masks of the answered points; always needed",
        family="qwen_vl",
        metavar="FOLDER",
        free_on_resume=True,
        may_differ_by_rank=True,
    )
    image_size: int | None = flag(
        None,
        "side in pixels of the square to which images are resized; 0 keeps their shape",
        default_is="840; with Qwen3-VL, whose tokens have 32 pixels a side, 832",
        family="qwen_vl",
        type=COUNT_OR_0,
    )
    max_image_tokens: int = flag(
        1280,
        "largest number of tokens of an image that keeps its shape (--image_size 0)",
        family="qwen_vl",
        type=COUNT,
    )
    dtype: str = flag(
        "bfloat16",
        "number format of the frozen base's weights",
        choices=["float32", "bfloat16"],
        aliases=("torch_dtype",),
    )
    quantize_base: str | None = flag(
        None,
        "keep the LLM's linears in 4 (NF4, needs the extra `quantize`) or 8 (int8) bits, as in "
        "QLoRA: a quarter or half of their bfloat16 memory, slower steps. They are dequantised "
        "to --dtype where they are used; a GPU then recomputes layers in the backward whatever "
        "--gradient_checkpointing says. Exports and tools.evaluate read the base unquantised",
        default_is="all weights in --dtype",
        choices=["4bit", "8bit"],
    )
    fsdp: bool = flag(
        False,
        "shard the layers of the frozen LLM and vision encoder over the GPUs of each host "
        "(FSDP2): an update gathers a layer while it computes with it, sampling the whole LLM",
        family="sa2va",
        free_on_resume=True,
    )
    max_tiles: int = flag(
        1,
        "largest number of tiles into which an image is cut, up to 12; with 1 the model sees the "
        "whole image at 448 pixels",
        family="sa2va",
        type=COUNT,
        lowers_memory_of=("encode",),
    )
    region_prompt: str | None = flag(
        None,
        "how the model is asked about a region. tokens: the region's own image tokens (trained in "
        "Sa2VA of InternVL; Qwen-VL has none); outline, box: drawn in red on the image that the "
        "LLM sees; coordinates: its box in the question (no published Sa2VA was trained on these)",
        default_is="as --model_path was trained here; else tokens, or outline for Qwen-VL",
        family="sa2va",
        choices=["tokens", "outline", "box", "coordinates"],
    )
    max_masks_per_answer: int = 8  # [SEG] that are decoded to masks; further ones stay text
    temperature: float = flag(
        1.0,
        "temperature at which answers are sampled and scored; evaluations answer greedily",
        type=POSITIVE,
    )
    gradient_checkpointing: bool = flag(
        True,
        "recompute the LLM's layers in the backward pass, which takes less memory and more time. A "
        "GPU recomputes them for micro-batches of few tokens anyway, by CUDA graphs",
        free_on_resume=True,
    )
    lora_r: int = flag(
        128, "rank of the LoRA adapters on the LLM", type=COUNT, aliases=("lora_rank",)
    )
    lora_alpha: int = flag(
        256, "alpha of the LoRA adapters, which are scaled by alpha / r", type=COUNT
    )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """training and evaluation data"""

    data_dir: str = flag(
        help="folder of the training images with regions and captions, or owner/name of a data "
        "set on the hub",
        metavar="FOLDER",
        aliases=("dataset_name", "local_data_dir"),
        free_on_resume=True,
        may_differ_by_rank=True,
    )
    dataset: str = flag(
        "gar",
        f"format of the data in --data_dir: {', '.join(DATASETS)} "
        "(docs/your_checkpoint_and_data.md), or module:Class of your own reader "
        "(docs/extending.md)",
        type=dataset_name,
        metavar="NAME",
    )
    subsets: list[str] = flag(
        [],
        "folders of --data_dir to read and, from the hub, to download (gar, dam), or the split to "
        "train on",
        default_is="all folders, or train",
        metavar="SUBSET",
    )
    image_root: str | None = flag(
        None,
        "folder of the images that a file names; of RefCOCO COCO's train2014, or one above it",
        default_is="--data_dir",
        metavar="FOLDER",
        free_on_resume=True,
        may_differ_by_rank=True,
    )
    data_mixture: list[str] = flag(
        [],
        "more training data, each sampled by its weight, where --data_dir has weight 1; NAME as in "
        "--dataset, SUBSET as in --subsets",
        metavar="NAME[/SUBSET,..]:FOLDER[=WEIGHT]",
    )
    max_bad_fraction: float = flag(
        0.01,
        "fraction of bad samples (skipped, or replaced on reading) above which the run stops",
        type=FRACTION,
        free_on_resume=True,
    )
    eval_data_dir: str | None = flag(
        None,
        "data to evaluate on, in the format --dataset unless NAME says another; SUBSET as in "
        "--subsets, of RefCOCO val if none is named",
        default_is="some images of --data_dir, which are then not trained on",
        metavar="[NAME[/SUBSET,..]:]FOLDER",
        free_on_resume=True,
        may_differ_by_rank=True,
    )
    eval_samples: int = flag(
        64,
        "number of regions in an evaluation, always the same ones, spread over images",
        type=COUNT,
    )
    train_eval_overlap: str = flag(
        "refuse",
        "images that are both trained and evaluated on: refuse to start, drop them from the "
        "training data, or keep them there",
        choices=["refuse", "drop", "keep"],
    )
    attributes: str | None = flag(
        None,
        "JSON file of the phrases that state an attribute's values; evaluations then also measure "
        "how often captions state each attribute correctly (docs/evaluation.md)",
        family="sa2va",
        metavar="FILE",
        free_on_resume=True,
        may_differ_by_rank=True,
    )
    distractors: bool = flag(
        False,
        "also read the other regions of each image, to measure whether a mask lies on the right "
        "one",
        free_on_resume=True,
    )
    sampler: str | None = flag(
        None,
        "your function (dataset, epoch, generator) -> indices of an epoch, such as a curriculum "
        "(docs/extending.md)",
        default_is="a random order",
        metavar="MODULE:FUNCTION",
    )
    sample_list: str | None = flag(
        None,
        "file of the training samples to use, an image_id or a line of tools.rank_samples a row; a "
        "resumed run needs the same samples",
        default_is="all samples",
        metavar="FILE",
        free_on_resume=True,
        may_differ_by_rank=True,
    )
    num_workers: int = flag(
        2,
        "number of processes per rank that read data",
        type=COUNT_OR_0,
        aliases=("dataloader_num_workers",),
        free_on_resume=True,
        may_differ_by_rank=True,
        out_of_model_card=True,
    )
    max_prompt_length: int = flag(
        512,
        "largest number of tokens of a caption in a prompt; a sample with a longer one is replaced "
        "by another",
        type=COUNT,
    )


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """rollouts: how many answers are sampled"""

    trainable_modules: ClassVar[tuple] = ()  # groups of weights, in place of what the tasks name

    batch_size: int = flag(
        4,
        "number of samples per rank and batch, each asked every task's question",
        type=COUNT,
        aliases=("per_device_batch_size",),
        free_on_resume=True,
        lowers_memory_of=("calibration", "evaluation", "encode", "rollout", "teacher"),
    )
    num_generations: int = flag(
        8,
        "number of answers sampled per prompt, the group of GRPO, at least 2",
        type=AT_LEAST_2,
        lowers_memory_of=("rollout", "teacher"),
    )
    resample_equal_groups: int = flag(
        0,
        "largest number of rounds in which further samples replace those whose rewards are all "
        "equal, so that more of a step's groups have a signal; each round costs its rollouts",
        type=COUNT_OR_0,
    )
    max_completion_length: int = flag(
        128,
        "largest number of tokens of a sampled answer",
        type=COUNT,
        lowers_memory_of=("rollout", "teacher", "reference", "update"),
    )


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """rewards: what an answer is worth"""

    use_llm_judge: bool = flag(
        False,
        "let an LLM judge captions; loop 1's reward then gains 0.25 METEOR + 0.75 judge, "
        "loop 2's only by --reward_weights",
    )
    llm_judge_base_url: str = flag(
        "http://localhost:9100/v1",
        "address of the judge's server, which speaks OpenAI's protocol",
        aliases=("llm_judge_api_base", "llm_server_url"),
        metavar="URL",
        free_on_resume=True,
        may_differ_by_rank=True,
        out_of_model_card=True,
    )
    llm_judge_model: str = flag(
        "meta-llama/Meta-Llama-3.1-8B-Instruct",
        "name of the judge's model at that server",
        aliases=("llm_model",),
        metavar="NAME",
    )
    llm_judge_mode: str = flag(
        "score",
        "what the judge is asked for. score: a rating; mcq: a verdict A to E; qa: answers to "
        "questions about the caption",
        choices=tuple(MODES),
    )
    ablation_reward: str = flag(
        "none",
        "for ablations, train on a cheap signal in the place of the tasks' own rewards, which are "
        f"still logged. {ABLATION_HELP}",
        choices=("none", *ABLATION_REWARDS),
        aliases=("control",),
    )
    scale_components: bool = flag(
        False,
        "divide each reward component by its standard deviation in the group before the weighted "
        "sum from which advantages are computed",
    )
    overlong_buffer: int = flag(
        0,
        "punish answers that come closer than this many tokens to --max_completion_length, "
        "linearly down to -1, as DAPO does; 0: do not",
        type=COUNT_OR_0,
    )
    reward_weights: list[str] = flag(
        [],
        "weights of components in the tasks' own rewards, such as loop2.meteor=0.5 "
        "loop2.likelihood=0.5 or, with the judge, loop2.meteor=0.25 loop2.judge=0.75 "
        "(docs/algorithm.md); others keep theirs, and one of weight 0 is not computed",
        default_is="loop1.iou=1 loop2.meteor=1 referring.iou=1 captioning.meteor=1 gcg.matched=1 "
        "gcg.meteor=1 points.iou=1 points.format=0.1",
        metavar="TASK.COMPONENT=WEIGHT",
        type=weight_text,
        action="extend",  # a second --reward_weights adds to the first
    )
    reward: list[str] = flag(
        [],
        "your own reward functions, added to every task's reward; a function with an argument "
        "`task` is told which task it is: loop1, loop2, .. (docs/extending.md)",
        metavar="MODULE:FUNCTION[=WEIGHT]",
    )
    reward_only: bool = flag(
        False,
        "let the functions of --reward replace the tasks' own reward components, which are only "
        "logged",
        needs="reward",
    )

    @property
    def component_weights(self) -> list[ComponentWeight]:
        """Weights of --reward_weights."""
        return list(map(ComponentWeight.parse, self.reward_weights))

    def gives_weight(self, component: str) -> bool:
        """Return whether --reward_weights gives a component of any task a weight above 0."""
        return any(w.weight > 0 for w in self.component_weights if w.component == component)


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """loss: how rewards become a gradient"""

    loss_type: str = flag(
        "dapo",
        "how the losses of tokens are averaged (docs/algorithm.md)",
        choices=LOSSES,
    )
    scale_rewards: str | None = flag(
        None,
        "rewards by whose standard deviation advantages are divided: those of the group, of the "
        "batch (all of the task in the step, on all ranks), or none",
        default_is="none with --loss_type dr_grpo, else group",
        choices=SCALES,
    )
    mask_truncated_completions: bool = flag(
        False,
        "leave answers cut at --max_completion_length out of the loss; their rewards still count "
        "in the statistics of their group",
    )
    clip_range: float | None = flag(
        None,
        "how far below 1 the ratio of new to old probability may lie before it is clipped; at "
        "--num_iterations 1 the ratio is 1, up to rounding",
        default_is="0.2; {} with --loss_type gspo, {} with cispo".format(
            LOSSES["gspo"].clip_range[0], LOSSES["cispo"].clip_range[0]
        ),
        type=POSITIVE,
        aliases=("epsilon",),
    )
    clip_range_high: float | None = flag(
        None,
        "how far above 1 the ratio of new to old probability may lie before it is clipped",
        default_is="--clip_range; {} with --loss_type gspo, {} with cispo".format(
            LOSSES["gspo"].clip_range[1], LOSSES["cispo"].clip_range[1]
        ),
        type=POSITIVE,
        aliases=("epsilon_high",),
    )
    kl_coef: float = flag(
        0.02,
        "weight of the KL divergence from the initial model, which is not computed at 0",
        type=WEIGHT,
        aliases=("beta",),
    )

    @property
    def scale(self) -> str:
        """Divisor of advantages, an argument of `group_advantages`."""
        return self.scale_rewards or LOSSES[self.loss_type].advantage_scale

    @property
    def group_scale(self) -> str:
        """Divisor of a group's advantages when its rewards are known: the batch's comes later."""
        return "none" if self.scale == "batch" else self.scale

    @property
    def clip(self) -> dict[str, float]:
        """Window of the ratio, arguments of `grpo_loss`."""
        low, high = clip_window(self.loss_type, self.clip_range, self.clip_range_high)
        return dict(clip_range=low, clip_range_high=high)


@dataclass(frozen=True, kw_only=True)
class UpdatesConfig:
    """optimizer and schedule"""

    num_iterations: ClassVar[int] = 1  # updates of a step
    low_memory: ClassVar[tuple[str, ...]] = ()

    max_steps: int = flag(
        0,
        "number of steps, of a resumed run with those before; 0: as many as --num_train_epochs "
        "needs. A resume with another number goes on from its step, and the schedules of learning "
        "rate and teacher are those of the new length from there on",
        type=COUNT_OR_0,
        free_on_resume=True,
    )
    num_train_epochs: float = flag(
        1.0,
        "number of passes over the data, if --max_steps is 0; a resumed run may have more",
        type=POSITIVE,
        free_on_resume=True,
    )
    gradient_accumulation_steps: int = flag(
        1,
        "number of batches per rank whose gradients make one step",
        type=COUNT,
        free_on_resume=True,
    )
    learning_rate: float = flag(
        1e-5, "peak learning rate of AdamW (betas 0.9 and 0.999)", type=POSITIVE
    )
    text_hidden_fcs_lr: float | None = flag(
        None,
        "peak learning rate of text_hidden_fcs, the layers that prompt SAM2",
        default_is="--learning_rate",
        family="sa2va",
        type=POSITIVE,
    )
    weight_decay: float = flag(0.05, "weight decay of AdamW")
    warmup_ratio: float = flag(
        0.05,
        "fraction of the updates in which the learning rate rises linearly; a cosine to 0 follows",
        type=FRACTION_BELOW_1,
    )
    max_grad_norm: float = flag(
        1.0, "norm to which all gradients together are clipped", type=POSITIVE
    )


@dataclass(frozen=True, kw_only=True)
class OptimConfig(UpdatesConfig):
    """optimizer, schedule and teacher"""

    num_iterations: int = flag(
        1, "number of optimizer updates on the same sampled answers", type=COUNT
    )
    micro_batch_size: int = flag(
        32,
        "number of answers per forward and backward pass of an update",
        type=COUNT,
        free_on_resume=True,
        lowers_memory_of=("reference", "update"),
    )
    low_memory: list[str] = flag(
        [],
        "ways to take less GPU memory, which cost time. adamw_8bit: keep AdamW's state in 8 bits "
        "(the extra `quantize`); offload_roles: keep the weights of teacher and reference in CPU "
        "memory while the GPU does not use them. A resume may change offload_roles alone",
        default_is="none of them",
        choices=["adamw_8bit", "offload_roles"],
        free_on_resume=True,
    )
    ema_decay: float | None = flag(
        None,
        "decay of the teacher's moving average per update; at 0 the teacher is the policy, at 1 "
        "the initial model",
        default_is="half of a change has reached the teacher after a tenth of the run",
        type=FRACTION,
    )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """run: folder, checkpoints, evaluations, logs"""

    output_dir: str = flag(
        help="folder that receives config.json, TensorBoard logs, rollouts and checkpoints",
        metavar="FOLDER",
        free_on_resume=True,
        may_differ_by_rank=True,
        out_of_model_card=True,
    )
    save_steps: int = flag(
        100,
        "number of steps between checkpoints; the last step is always saved",
        type=COUNT,
        free_on_resume=True,
    )
    save_total_limit: int = flag(
        3,
        "number of newest checkpoints to keep; 0 keeps all",
        type=COUNT_OR_0,
        free_on_resume=True,
    )
    logging_steps: int = flag(
        10,
        "number of steps between printed lines of metrics, which are means over these steps",
        type=COUNT,
        free_on_resume=True,
        out_of_model_card=True,
    )
    resume: str | None = flag(
        None,
        "continue the run of --output_dir from this checkpoint folder; without a value from its "
        "latest; auto: from its latest if there is one, else begin",
        default_is="begin a new run",
        metavar="CHECKPOINT",
        nargs="?",
        const="latest",
        aliases=("resume_from_checkpoint",),
        free_on_resume=True,
        may_differ_by_rank=True,
        out_of_model_card=True,
    )
    allow_changed_data: bool = flag(
        False,
        "let a resumed run go on with other training or evaluation data than before",
        needs="resume",
        free_on_resume=True,
        out_of_model_card=True,
    )
    eval_steps: int = flag(
        100,
        "number of steps between evaluations; 0: only before and after training",
        type=COUNT_OR_0,
        free_on_resume=True,
    )
    metric_for_best_model: list[str] = flag(
        [],
        "evaluation metrics whose mean chooses checkpoint_best and the role that is merged "
        "(docs/evaluation.md)",
        default_is="those of seg_iou, caption_meteor and matched_box_iou that are measured",
        type=lambda name: name.removeprefix("eval/"),
        metavar="METRIC",
    )
    seed: int = flag(0, "seed of all random numbers", type=SEED)
    wandb: str | None = flag(
        None,
        "also send TensorBoard's logs and all flags to this project of Weights & Biases; "
        "WANDB_MODE=offline keeps them on this machine",
        default_is="nothing is sent; without a value to rl-sa2va",
        metavar="PROJECT",
        nargs="?",
        const="rl-sa2va",
        aliases=("wandb_project",),
        free_on_resume=True,
        out_of_model_card=True,
    )
    merge_at_end: str = flag(
        "auto",
        "role of the last checkpoint that is merged into the base, into --output_dir/final_model, "
        "which --model_path takes; auto: policy or teacher, whichever is better on the evaluation "
        "split; none: write no merged model",
        choices=["auto", "policy", "teacher", "none"],
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
    task_classes: dict[str, type]  # {name in --tasks: its class}, those of weight 0 left out
    tasks: dict[str, Any]  # {the same name: its Options}
    flags: dict[str, Any]  # every flag, as config.json has them
    declared_in: tuple[type, ...]  # the config classes of these flags, in order
    taken: Taken | None = None  # flags of --config

    @property
    def samples_answers(self) -> bool:
        """True if answers are sampled and rewarded; in supervised training they are given."""
        return "num_generations" in self.flags

    def flags_with(self, attribute: str) -> dict[str, Any]:
        """Return {flag: value} of the flags that declare `attribute`, an argument of `flag`."""
        return flags_with(attribute, self.declared_in)


CONFIG_CLASSES = {
    name: annotation
    for name, annotation in Config.__annotations__.items()
    if dataclasses.is_dataclass(annotation)
}
