"""Table of every curve of a run, for docs/flags.md: what TensorBoard shows, and what it means.

A test trains tiny runs and compares their curves with this table, in both directions.
"""

import re
from collections.abc import Mapping

from rl_train.evaluation import cycle_metrics, gcg_metrics, mask_columns, point_metrics

# Metrics of `tools.evaluate` alone: of sampled answers, and of all captions together.
ONLY_IN_THE_TOOL = re.compile(r"(best_of_G|by_cycle|by_logp|sampled)_.*|caption_cider")
HEAD = """## Curves

Every curve of TensorBoard. Words in capitals stand for names: TASK for `loop1`, `loop2`, `points`
or another task. Fractions lie in 0 to 1; values are means over the answers of a step, unless the
row says otherwise.

| curve | what it shows | when |
|---|---|---|
"""


def eval_curves(metrics: Mapping[str, str]) -> dict[str, str]:
    """Return {curve: meaning} of the metrics that a run's evaluations measure."""
    return {
        f"eval/{name}": meaning
        for name, meaning in metrics.items()
        if not ONLY_IN_THE_TOOL.fullmatch(name)
    }


ON_TARGET = {name for name in cycle_metrics.METRICS if name.endswith("_on_target")}
# {when there are such curves: {curve: meaning}}
CURVES: dict[str, dict[str, str]] = {
    "always": {
        "Main/eval_METRIC": "main metrics of an evaluation, as `eval/METRIC`",
        "total_loss": "sum of the tasks' losses by their weights, of steps that made an update",
        "learning_rate": "learning rate of the step",
        "grad_norm/GROUP": "norm of the gradient of a group of weights before clipping",
        "perf/step_seconds": "seconds of a step, without evaluations and checkpoints",
        "perf/PHASE_seconds": "seconds of a phase: data (wait for the loader), encode, rollout "
        "(on a GPU also the captions of loop 2's teacher), reference, teacher (rewards), update",
        "TASK/loss": "loss of the task before its weight",
        "TASK/entropy": "entropy of the model at the answers' tokens, nats",
    },
    "RL": {
        "Main/reward_TASK": "`TASK/reward_mean`",
        "Main/kl_TASK": "`TASK/kl_div`",
        "Main/sampler_gap": "largest `sampler_gap` of the tasks",
        "TASK/reward_mean": "mean reward of the sampled answers",
        "TASK/reward_std": "standard deviation of the reward over all answers of a step",
        "TASK/frac_zero_std": "fraction of groups whose rewards are all equal: they teach nothing",
        "TASK/policy_loss": "clipped policy-gradient term of the loss",
        "TASK/kl_div": "KL from the policy to the reference, nats per token (k3 estimate)",
        "TASK/clip_frac": "fraction of tokens whose ratio is clipped",
        "TASK/sampler_gap": "largest difference of a token's log-prob between sampler and scorer",
        "TASK/sampler_gap_mean": "mean of these differences",
        "TASK/sampler_k3": "KL from sampler to scorer (k3 estimate)",
        "TASK/completion_length": "tokens of an answer",
        "TASK/truncated_frac": "fraction of answers cut at `--max_completion_length`",
        "TASK/empty_frac": "fraction of answers without text",
        "TASK/whole_mask_frac": "fraction of masks that cover nearly the whole image",
        "perf/rollout_tokens_per_second": "tokens that the policy sampled per second of the "
        "rollout, of all processes",
    },
    "RL but points": {
        "TASK/repeats_frac": "fraction of captions that say three words twice",
        "TASK/digits_frac": "fraction of captions with a digit",
    },
    "RL: component of the reward": {
        "TASK/iou": "IoU of the mask with the region",
        "TASK/meteor": "METEOR of the caption with the true caption",
    },
    "both loops": {
        "teacher/distance_to_reference": "RMS difference to the reference's weights, relative",
        "teacher/distance_to_policy": "RMS difference to the policy's weights, relative",
        "teacher/decay": "decay of the moving average in this step",
        "eval_ema/METRIC": "`eval/METRIC` of the teacher",
    },
    "RL of sampled masks: loop 2, referring, grounded captions": {
        "TASK/mask_spread": "1 - mean IoU of two masks of a group",
        "TASK/no_seg_frac": "fraction of answers without [SEG], so without a mask",
        "TASK/capped_frac": "fraction of answers with more [SEG] than are decoded",
        "TASK/latent_std": "standard deviation of the noise on the embedding that prompts SAM2",
        "TASK/latent_loss": "clipped policy-gradient term of the sampled masks, and its KL",
        "TASK/latent_joint_kl": "KL of a mask's embedding from policy to reference, nats",
        "TASK/latent_clip_frac": "fraction of sampled masks whose ratio is clipped",
        "TASK/mask_loss": "supervised BCE + Dice on the masks (`--mask_loss_coef`; SFT)",
    },
    "Sa2VA": eval_curves({k: v for k, v in cycle_metrics.METRICS.items() if k not in ON_TARGET}),
    "`--distractors`": {
        "TASK/on_target": "fraction of masks that lie on the region and on no other",
        "TASK/objects_frac": "fraction of groups whose masks lie on two objects or more",
    }
    | eval_curves({name: cycle_metrics.METRICS[name] for name in sorted(ON_TARGET)}),
    "`--attributes`": {
        f"eval/ATTRIBUTE_{name}": text.format("value")
        for name, text in cycle_metrics.ATTRIBUTE_METRICS.items()
    },
    "some runs": {
        "data/fraction/NAME": "fraction of the samples from a data set of `--data_mixture`",
        "data/damaged": "samples that could not be read so far; others took their place",
        "judge/failed_frac": "fraction of captions on which the LLM judge failed",
        "TASK/unscored_frac": "fraction of answers without a reward (judge, `--reward`)",
        "TASK/judge": "verdict of the LLM judge, 0 to 1",
        "TASK/cider": "CIDEr-D / 10 of the caption (`--reward_weights`)",
        "TASK/likelihood": "likelihood of the true caption given the mask (`--reward_weights`)",
        "TASK/frac_replaced": "fraction of groups that `--resample_equal_groups` replaced",
        "TASK/frac_useful": "of the groups kept, the fraction whose rewards differ",
        "TASK/overlong": "cost of long answers (`--overlong_buffer`)",
        "TASK/FUNCTION": "value of a function of `--reward`",
        "TASK/ablation_reward": "the reward that `--ablation_reward` puts in the task's place",
        "perf/peak_memory_gib": "peak of GPU memory in a step",
        "perf/peak_memory_gib/PHASE": "peak of GPU memory in a phase",
    },
    "RL: component of the reward, by `--reward_weights`": {
        "TASK/box_iou": "IoU of the boxes around mask and region",
        "TASK/centre": "closeness of the centres of the boxes of mask and region",
        "TASK/format": "form of the answer: thoughts in their tags (`--think`), keys of points",
        "TASK/matched": "IoU of masks and regions one by one, over the larger number",
        "TASK/missing": "regions without a mask",
        "TASK/surplus": "masks without a region",
    },
    "points": {
        "TASK/unparsed_frac": "fraction of answers that cannot be read",
        "TASK/unparsed/REASON": "fraction of answers that cannot be read for one reason",
        "TASK/repaired/REPAIR": "fraction of answers that needed a repair",
        "TASK/negatives": "reward of the negative points",
        "TASK/iou_without": "IoU of the same answers without their negative points",
        "TASK/gain": "`iou` - `iou_without`",
        "TASK/points_in_target": "fraction of positive points in the target",
        "TASK/neg_in_target": "fraction of negative points in the target",
        "TASK/neg_in_confused": "fraction of negative points in what SAM2 confuses with the target",
        "TASK/num_positive": "positive points of an answer",
        "TASK/num_negative": "negative points of an answer",
        "TASK/matched_box_iou": "IoU of boxes, best assignment (data without masks)",
        "TASK/points_in_boxes": "fraction of positive points in a true box (data without masks)",
        "TASK/thinking_format": "published reward: thoughts and answer in their tags",
        "TASK/segmentation_format": "published reward: the answer's keys",
        "TASK/non_repeat": "published reward: no sentence twice (VisionReasoner)",
        "TASK/bbox_iou": "published reward: IoU of boxes above 0.5",
        "TASK/bbox_l1": "published reward: sides of boxes within 10 pixels",
        "TASK/point_l1": "published reward: points near the true ones",
    }
    | eval_curves(point_metrics.METRICS),
    "grounded captions; phrases of several objects or none": eval_curves(
        gcg_metrics.METRICS | mask_columns.METRICS
    ),
    "SFT": {
        "Main/loss_TASK": "`TASK/loss`",
        "TASK/text_loss": "cross-entropy of the answers' tokens",
        "TASK/mask_iou": "IoU of the masks that the answers' [SEG] prompt",
    },
}


def curves_table() -> str:
    """Return the section with the table of all curves."""
    rows = [
        f"| `{curve}` | {meaning} | {when} |"
        for when, curves in CURVES.items()
        for curve, meaning in curves.items()
    ]
    return HEAD + "\n".join(rows) + "\n"
