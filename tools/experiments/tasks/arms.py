"""Bases and arms of the comparisons: flags of `rl_train.train` and `rl_train.sft`."""

from dataclasses import dataclass

RATES = ("1e-4", "3e-4", "1e-3")  # tried of every arm that is tuned
LORA = "--dtype float32 --lora_r 16 --lora_alpha 32 --no-gradient_checkpointing --num_workers 0"
# A step of both trainings sees 8 samples: as many labels, whatever it does with them.
RL = f"{LORA} --batch_size 8 --num_generations 8 --micro_batch_size 64 --kl_coef 0.06"
SFT = f"{LORA} --batch_size 8"
POLICY_TERM = "--mask_loss_coef 0"  # without the supervised mask term
MASKS = "--tasks referring_segmentation --one_answer"
THINKING = "tools.experiments.tasks.thinking"
# The demo's base has never seen the tokens <p> and </p>, or thoughts.
NEW_WORDS = "--trainable_modules language_model embeddings mlp1 text_hidden_fcs sam2"


@dataclass(frozen=True)
class Arm:
    """A way to train from a comparison's base."""

    flags: str
    supervised: bool = False

    @property
    def module(self) -> str:
        return "rl_train.sft" if self.supervised else "rl_train.train"

    @property
    def words(self) -> list[str]:
        return f"{SFT if self.supervised else RL} {self.flags}".split()


@dataclass(frozen=True)
class Base:
    """A model that arms begin from: the demo's checkpoint, trained shortly by `rl_train.sft`."""

    flags: str
    steps: int


@dataclass(frozen=True)
class Comparison:
    """Arms of one base and one data set, with as many steps of as many samples.

    Attributes:
        data: folder below the data; flags: of all arms; tokens: longest answer.
        metrics: of the held-out regions; the first chooses the learning rate.
        rates: tried of every arm.
        own: the arm that untrained changes of the base are compared with; "": they are not tried.
    """

    data: str
    flags: str
    tokens: int
    metrics: tuple[str, ...]
    arms: dict[str, Arm]
    base: str = ""  # of BASES; "": the demo's checkpoint
    rates: tuple[str, ...] = RATES
    eval_steps: int = 0
    own: str = ""

    @property
    def dataset_words(self) -> list[str]:
        """Return the flags that name its reader."""
        words = self.flags.split()
        return words if "--dataset" in words else []

    @property
    def uses_ranking(self) -> bool:
        """Return whether its arms train on samples that `tools.rank_samples` ranked."""
        return self.arms is RANKING_ARMS


# Answers every phrase with [SEG], as a published Sa2VA does: see README.md.
NAMED = (
    f"{MASKS} --max_completion_length 40 {NEW_WORDS} --learning_rate 5e-4 --sample_list {{named}}"
)
BASES = {
    "several": Base(NAMED, 6),
    # Its masks of phrases that name something cannot gain much: many groups have no variance.
    "ranking": Base(NAMED, 60),
    "grounded": Base(
        f"--tasks grounded_captions --dataset gcg --max_completion_length 64 {NEW_WORDS} "
        "--learning_rate 1e-3",
        80,
    ),
    "thinking": Base(
        f"--tasks {THINKING}:HalfThinking --one_answer --max_completion_length 48 {NEW_WORDS} "
        "--learning_rate 5e-4",
        60,
    ),
}
REFERRING = f"--tasks referring {POLICY_TERM}"
# The prompt of SAM2 learns faster than the answer's text, which a higher rate breaks.
WITH_MASK_TERM = "--tasks referring --text_hidden_fcs_lr 1e-3"
ONE_OR_NONE = f"{WITH_MASK_TERM} {POLICY_TERM}"
GROUNDED = f"--tasks grounded_captioning {POLICY_TERM}"
THINK = f"{REFERRING} --think"
RANKING_ARMS = {  # {some}: ranked samples; {best}: the better half of them
    "all samples": Arm(f"{REFERRING} --sample_list {{some}}"),
    "--sample_list": Arm(f"{REFERRING} --sample_list {{best}}"),
    "--resample_equal_groups 2": Arm(
        f"{REFERRING} --resample_equal_groups 2 --sample_list {{some}}"
    ),
}
COMPARISONS = {
    "referring": Comparison(
        data="demo",
        flags="--distractors",
        tokens=24,
        metrics=("seg_iou", "seg_on_target", "cycle_iou"),
        own="referring",
        arms={
            "referring": Arm(REFERRING),
            "loop2": Arm(f"--tasks caption_mask_caption {POLICY_TERM}"),
            "supervised": Arm(MASKS, supervised=True),
            "referring_confidence": Arm(f"{REFERRING} --ablation_reward confidence"),
            "referring_length": Arm(f"{REFERRING} --ablation_reward length"),
            "referring_majority": Arm(f"{REFERRING} --ablation_reward majority"),
            "referring_position": Arm(f"{REFERRING} --ablation_reward position"),
            "referring_salient": Arm(f"{REFERRING} --ablation_reward salient"),
            "referring_other": Arm(f"{REFERRING} --ablation_reward other"),
            "referring_shuffled": Arm(f"{REFERRING} --ablation_reward shuffled"),
        },
    ),
    "captioning": Comparison(
        data="demo",
        flags="--distractors",
        tokens=24,
        metrics=("caption_meteor", "cycle_iou", "caption_distinct"),
        own="captioning",
        arms={
            "captioning": Arm("--tasks captioning"),
            "loop1": Arm("--tasks mask_caption_mask"),
            "supervised": Arm("--tasks region_captions", supervised=True),
            "captioning_length": Arm("--tasks captioning --ablation_reward length"),
            "captioning_majority": Arm("--tasks captioning --ablation_reward majority"),
        },
    ),
    "several": Comparison(
        data="several",
        flags="",
        tokens=40,
        base="several",
        rates=("3e-4",),
        metrics=("seg_iou", "seg_matched", "n_acc", "t_acc"),
        own="referring, mask term",
        arms={
            "referring": Arm(ONE_OR_NONE),
            "referring, mask term": Arm(WITH_MASK_TERM),
            # Equal rewards would leave out the step, and the term with it.
            "mask term, shuffled reward": Arm(f"{WITH_MASK_TERM} --ablation_reward shuffled"),
            "mask term, confidence": Arm(f"{WITH_MASK_TERM} --ablation_reward confidence"),
            "mask term, majority": Arm(f"{WITH_MASK_TERM} --ablation_reward majority"),
            "supervised": Arm(MASKS, supervised=True),
            "referring_confidence": Arm(f"{ONE_OR_NONE} --ablation_reward confidence"),
            "referring_matched": Arm(
                f"{ONE_OR_NONE} --reward_weights referring.matched=1 referring.iou=0"
            ),
            "referring_majority": Arm(f"{ONE_OR_NONE} --ablation_reward majority"),
        },
    ),
    "grounded": Comparison(
        data="grounded",
        flags="--dataset gcg",
        tokens=64,
        base="grounded",
        rates=("3e-4", "1e-3"),
        metrics=("gcg_matched", "gcg_miou", "gcg_meteor", "gcg_recall"),
        own="grounded_captioning",
        arms={
            "grounded_captioning": Arm(GROUNDED),
            "supervised": Arm("--tasks grounded_captions", supervised=True),
            "grounded_length": Arm(f"{GROUNDED} --ablation_reward length"),
            "grounded_fixed": Arm(f"{GROUNDED} --ablation_reward fixed"),
            "grounded_confidence": Arm(f"{GROUNDED} --ablation_reward confidence"),
            "grounded_majority": Arm(f"{GROUNDED} --ablation_reward majority"),
            "grounded_shuffled": Arm(f"{GROUNDED} --ablation_reward shuffled"),
        },
    ),
    "thinking": Comparison(
        data="demo",
        flags="",
        tokens=48,
        base="thinking",
        rates=("3e-4", "1e-3"),
        metrics=("seg_iou", "form"),
        own="referring --think",
        arms={
            "referring --think": Arm(THINK),
            "form alone": Arm(f"{THINK} --reward_weights referring.iou=0"),
            "confidence": Arm(f"{THINK} --ablation_reward confidence"),
            "supervised": Arm(f"--tasks {THINKING}:ThinkingMasks --one_answer", supervised=True),
        },
    ),
    "ranking": Comparison(
        data="several",
        flags="",
        tokens=40,
        base="ranking",
        rates=("3e-4",),
        metrics=("seg_iou", "n_acc", "t_acc"),
        eval_steps=10,
        arms=RANKING_ARMS,
    ),
    "ranking_demo": Comparison(
        data="demo",
        flags="--distractors",
        tokens=24,
        rates=("3e-4",),
        metrics=("seg_iou", "seg_on_target"),
        eval_steps=10,
        arms=RANKING_ARMS,
    ),
}
UNTRAINED = "--dtype float32 --num_workers 0"
RANK = f"{LORA} --batch_size 16 --num_generations 8 {REFERRING}"
