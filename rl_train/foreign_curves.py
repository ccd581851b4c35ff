"""What TRL's GRPOTrainer (1.16) and this project's forerunners call the curves of a run."""

# {ours: (TRL's name, an earlier script's name, what differs)}; loop*/ stands for every task's.
CURVES = {
    "loop*/reward_mean": ("reward", "Loop1/reward, Reward/final", "of one task"),
    "loop*/reward_std": (
        "reward_std",
        "Metrics/reward_std",
        "of all rows, as TRL's; earlier: of groups",
    ),
    "loop*/frac_zero_std": ("frac_reward_zero_std", "", ""),
    "loop*/iou": ("rewards/NAME/mean", "Loop1/mean_iou", "a reward is a curve by its name"),
    "loop2/meteor": ("rewards/NAME/mean", "Loop2/mean_meteor", ""),
    "loop1/judge": ("rewards/NAME/mean", "Reward/llm", "with --use_llm_judge"),
    "loop*/loss": ("loss", "Loss/loop1, Loss/loop2", "with the KL and the task's own terms"),
    "total_loss": ("loss", "Loss/total", "the tasks' losses by their weights"),
    "loop*/policy_loss": ("policy_loss", "", "without the KL"),
    "loop*/kl_div": ("kl", "", "TRL's is times the ratio, unless told otherwise"),
    "loop*/entropy": ("entropy", "", ""),
    "loop*/clip_frac": ("clip_ratio/region_mean", "", ""),
    "loop*/completion_length": ("completions/mean_length", "Loop1/completion_length", "in tokens"),
    "loop*/truncated_frac": ("completions/clipped_ratio", "", ""),
    "loop*/sampler_gap": ("sampling/sampling_logp_difference/max", "", ""),
    "loop*/sampler_gap_mean": ("sampling/sampling_logp_difference/mean", "", ""),
    "loop2/mask_loss": ("", "Loop2/bce_loss, Loop2/dice_loss", "2 x one + 0.5 x the other"),
    "eval/caption_words": ("", "Metrics/caption_length", "held out, in words"),
    "grad_norm/lora": ("grad_norm", "", "by part; its norm is the root of their squares' sum"),
    "learning_rate": ("learning_rate", "", ""),
    "perf/step_seconds": ("step_time", "", ""),
    "perf/rollout_tokens_per_second": ("num_tokens", "", "a rate, not a count"),
}


def curves_table() -> str:
    """Markdown of all names, for the document and for TensorBoard."""
    rows = [
        f"| `{ours}` | {_names(t)} | {_names(e)} | {note} |"
        for ours, (t, e, note) in CURVES.items()
    ]
    return "\n".join(["| here | TRL | earlier scripts | |", "|---|---|---|---|", *rows])


def _names(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split(", ") if name)
