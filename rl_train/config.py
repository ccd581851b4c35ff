"""Every flag of a run, with its help. The resolved values are saved as config.json in --output_dir."""

import argparse
import json
import math
from pathlib import Path

from rl_train.data import DATASETS, hub
from rl_train.files import check_writable, read_json
from rl_train.grpo import CONTROLS, LOSS_TYPES
from rl_train.rewards.judge import FAILURE_WINDOW, MODES

# Flags that may differ when a run is resumed; all others must be those that it was started with.
FREE_ON_RESUME = {
    "resume",
    "output_dir",
    "model_path",
    "data_dir",
    "eval_data_dir",
    "num_workers",
    "save_steps",
    "save_total_limit",
    "eval_steps",
    "micro_batch_size",
    "gradient_checkpointing",
    "shard_base",
    "llm_judge_base_url",
    "max_judge_failures",
    "max_bad_fraction",
    "batch_size",
    "gradient_accumulation_steps",
    "world_size",
}
PROMPTS_PER_STEP = (
    "batch_size",
    "gradient_accumulation_steps",
    "world_size",
)  # whose product may not differ


def sigma(text: str) -> float | str:
    """--mask_sigma: "auto" or a number of at least 0."""
    if text == "auto":
        return text
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError
    return value


def build_parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m rl_train.train",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        description="Reinforcement learning of Sa2VA by closed mask-caption cycles. One process per GPU under torchrun.",
    )
    add = p.add_argument

    g = p.add_argument_group("model and data")
    add = g.add_argument
    add("--model_path", required=True, help="Sa2VA checkpoint folder in the original layout")
    add(
        "--data_dir",
        required=True,
        help="folder of training regions, or the name of a data set on the hub (owner/name)",
    )
    add(
        "--dataset",
        choices=list(DATASETS),
        default="gar",
        help="its format: gar = Grasp-Any-Region, Arrow shards; dam = "
        "Describe-Anything, annotations.json beside tar files (docs/data.md)",
    )
    add(
        "--max_bad_fraction",
        type=float,
        default=0.01,
        help="the run stops when a larger share of the data set cannot be used",
    )
    add(
        "--eval_data_dir",
        help="folder of held-out regions; default: --eval_samples regions of the last images of a "
        "fixed shuffle of --data_dir, which are then not trained on",
    )
    add(
        "--output_dir",
        required=True,
        help="receives config.json, TensorBoard logs, rollouts and checkpoints",
    )
    add(
        "--dtype",
        choices=["float32", "bfloat16"],
        default="bfloat16",
        help="of the frozen base; what trains is float32",
    )
    add(
        "--max_tiles",
        type=int,
        default=1,
        help="tiles per image: 1 = the whole image at 448 px, up to 12 + thumbnail",
    )
    add("--num_workers", type=int, default=2, help="DataLoader workers per rank")

    add = p.add_argument_group("tasks and rollouts").add_argument
    add(
        "--tasks",
        nargs="+",
        choices=["mask_caption_mask", "caption_mask_caption"],
        default=["mask_caption_mask", "caption_mask_caption"],
        help="loop 1 and loop 2",
    )
    add(
        "--mask_to_caption_weight",
        type=float,
        default=1.0,
        help="loss weight of loop 1 (mask -> caption -> mask')",
    )
    add(
        "--caption_to_mask_weight",
        type=float,
        default=1.0,
        help="loss weight of loop 2 (caption -> mask -> caption')",
    )
    add("--batch_size", type=int, default=4, help="prompts per rank and rollout (B)")
    add("--num_generations", type=int, default=8, help="samples per prompt (G), at least 2")
    add("--max_completion_length", type=int, default=128, help="new tokens per sample (T)")
    add("--temperature", type=float, default=1.0, help="of sampling and of every log-prob")
    add(
        "--mask_sigma",
        type=sigma,
        default="auto",
        help="std of the Gaussian over SAM2's prompt embedding in loop 2; auto = the one "
        "whose masks have a mean IoU of 0.8 with the mask of the mean, found at the start; 0 = no sampled mask, the text is the "
        "only action",
    )
    add(
        "--teacher_answer",
        choices=["forced", "sampled"],
        default="forced",
        help="how loop 1's teacher comes to its mask: forced = the "
        'answer "Sure, [SEG]" is given to it, one forward; sampled = it answers for itself, greedily so that the reward has no noise of '
        "its own, and without [SEG] finds nothing; held-out metrics do not depend on it, there the model always answers for itself",
    )

    add = p.add_argument_group("rewards").add_argument
    add(
        "--use_llm_judge",
        action="store_true",
        help="have an LLM judge: loop 1's reward becomes IoU + (0.25 METEOR + 0.75 judge) "
        "of the sampled caption against the true one",
    )
    add(
        "--use_llm_judge_loop2",
        action="store_true",
        help="loop 2's reward becomes 0.25 METEOR + 0.75 judge instead of METEOR; "
        "needs --use_llm_judge",
    )
    add(
        "--llm_judge_base_url",
        default="http://localhost:9100/v1",
        help="OpenAI-compatible server of the judge, such as vLLM's; "
        "its key, if it wants one, is read from the environment's OPENAI_API_KEY",
    )
    add(
        "--llm_judge_model",
        default="meta-llama/Meta-Llama-3.1-8B-Instruct",
        help="name of the judge at that server",
    )
    add(
        "--llm_judge_mode",
        choices=MODES,
        default="score",
        help="score = a rating of 0..10, mcq = a verdict A..E, qa = questions "
        "made from the true caption, answered from the generated one",
    )
    add(
        "--max_judge_failures",
        type=float,
        default=0.2,
        help=f"the run stops when a larger share of the last {FAILURE_WINDOW} captions "
        "could not be judged",
    )
    add(
        "--likelihood_share",
        type=float,
        help="share, in loop 2's reward, of the likelihood per token that the teacher gives the prompt's "
        "caption as a description of the sampled mask; METEOR (with the judge) has the rest. It tells masks apart whose captions are the "
        "same; default 0.5, with --use_llm_judge_loop2 0",
    )
    add(
        "--control",
        choices=CONTROLS,
        default="none",
        help="train on rewards that cannot teach: shuffled = each group's in random "
        "order, constant = all equal; held-out metrics should then not rise, but under shuffled by the supervised --mask_loss_coef; a step "
        "without unequal rewards in any group is skipped whole, with its mask term",
    )
    add(
        "--reward",
        nargs="+",
        default=[],
        metavar="MODULE:FUNCTION[=WEIGHT]",
        help="reward functions of your own, added to the reward "
        "of each loop with their weight (default 1) and logged by name; called as TRL calls them: (completions, **kwargs) -> "
        "list of float or None",
    )

    add = p.add_argument_group("loss").add_argument
    add("--loss_type", choices=LOSS_TYPES, default="dapo", help="how token losses are averaged")
    add(
        "--clip_range",
        type=float,
        default=0.2,
        help="ratio clip, lower side (and upper, unless --clip_range_high)",
    )
    add("--clip_range_high", type=float, help="ratio clip, upper side")
    add("--kl_coef", type=float, default=0.02, help="weight of the KL to the frozen reference")
    add(
        "--mask_loss_coef",
        type=float,
        default=0.1,
        help="weight of the supervised BCE + Dice term on loop 2's sampled "
        "masks; 0 = policy gradient only, and SAM2's decoder stays frozen",
    )

    add = p.add_argument_group("optimisation").add_argument
    add(
        "--max_steps",
        type=int,
        default=0,
        help="steps (each: rollouts, then --num_iterations updates); 0 = --num_epochs",
    )
    add("--num_epochs", type=float, default=1.0, help="passes over the data, if --max_steps is 0")
    add("--num_iterations", type=int, default=1, help="optimizer updates on the same rollouts")
    add(
        "--gradient_accumulation_steps",
        type=int,
        default=1,
        help="batches of --batch_size prompts per step and rank",
    )
    add(
        "--micro_batch_size",
        type=int,
        default=32,
        help="rows per forward and backward of the update",
    )
    add("--learning_rate", type=float, default=1e-5, help="peak, of AdamW (betas .9 .999)")
    add(
        "--prompt_learning_rate",
        type=float,
        help="peak, of text_hidden_fcs, through which [SEG] prompts SAM2; default --learning_rate",
    )
    add("--weight_decay", type=float, default=0.05, help="of AdamW")
    add(
        "--warmup_ratio",
        type=float,
        default=0.05,
        help="share of updates with linear warm-up; then cosine to 0",
    )
    add("--max_grad_norm", type=float, default=1.0, help="gradient clipping by global norm")
    add(
        "--ema_decay",
        type=float,
        default=0.999,
        help="of the teacher, applied after each update; 0 = the policy is its own teacher, "
        "1 = the teacher stays what the run started from",
    )
    add(
        "--gradient_checkpointing",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="recompute LLM layers in the backward pass: "
        "32 rows so are smaller and faster than 8 at a time without (docs/performance.md)",
    )
    add(
        "--shard_base",
        action="store_true",
        help="for a model that does not fit one GPU: each rank keeps a share of every LLM and vision "
        "layer (FSDP2) and gathers a layer to compute it, at each token sampled too; needs several processes (docs/real_run.md)",
    )

    add = p.add_argument_group("LoRA on the LLM").add_argument
    add("--lora_r", type=int, default=128, help="rank")
    add("--lora_alpha", type=int, default=256, help="scale numerator: scale = alpha / r")
    add(
        "--lora_dropout",
        type=float,
        default=0.05,
        help="recorded in the adapter for later supervised training; off during "
        "RL, where sampling and scoring must be one distribution",
    )

    add = p.add_argument_group("run").add_argument
    add(
        "--save_steps",
        type=int,
        default=100,
        help="steps between checkpoints; the last step is always saved",
    )
    add("--save_total_limit", type=int, default=3, help="checkpoints kept, oldest removed; 0 = all")
    add(
        "--resume",
        nargs="?",
        const="latest",
        help="continue from a checkpoint folder, or from the latest one in --output_dir",
    )
    add(
        "--eval_steps",
        type=int,
        default=100,
        help="steps between evaluations and pictures, the best of which is kept as "
        "checkpoint_best; 0 = only before and after",
    )
    add("--eval_samples", type=int, default=64, help="held-out regions in an evaluation")
    add("--seed", type=int, default=0, help="of everything")
    return p


def check_at_least(parser, args, at_least: dict[str, int]):
    """End the program with one sentence if a flag of `at_least` is below its number; one that was not given may be None."""
    for name, least in at_least.items():
        if getattr(args, name) is not None and getattr(args, name) < least:
            parser.error(f"--{name} {getattr(args, name)}: must be at least {least}")


def parse_args(argv=None) -> argparse.Namespace:
    """Parsed and checked flags; a wrong value ends the program with one sentence that names the flag."""
    parser = build_parser()
    args = parser.parse_args(argv)
    for name, value in vars(args).items():
        if isinstance(value, float) and not math.isfinite(value):
            parser.error(f"--{name} {value}: must be a finite number")
    check_at_least(
        parser,
        args,
        dict(
            num_generations=2,
            batch_size=1,
            max_completion_length=1,
            num_iterations=1,
            gradient_accumulation_steps=1,
            micro_batch_size=1,
            lora_r=1,
            lora_alpha=1,
            max_tiles=1,
            eval_samples=1,
            max_steps=0,
            num_workers=0,
            save_steps=1,
            eval_steps=0,
            save_total_limit=0,
            mask_loss_coef=0,
            kl_coef=0,
            mask_to_caption_weight=0,
            caption_to_mask_weight=0,
            seed=0,
        ),
    )
    if args.seed >= 2**63:
        parser.error(f"--seed {args.seed}: must be below 2^63")
    if args.likelihood_share is None:
        args.likelihood_share = 0.0 if args.use_llm_judge_loop2 else 0.5
    if args.prompt_learning_rate is None:
        args.prompt_learning_rate = args.learning_rate
    for name in (
        "temperature",
        "learning_rate",
        "prompt_learning_rate",
        "clip_range",
        "clip_range_high",
        "max_grad_norm",
        "num_epochs",
    ):
        if getattr(args, name) is not None and getattr(args, name) <= 0:
            parser.error(f"--{name} {getattr(args, name)}: must be above 0")
    if len(set(args.tasks)) < len(args.tasks):
        parser.error(f"--tasks {' '.join(args.tasks)}: names a task twice")
    weights = dict(
        mask_caption_mask=args.mask_to_caption_weight,
        caption_mask_caption=args.caption_to_mask_weight,
    )
    if not any(weights[task] > 0 for task in args.tasks):
        parser.error(
            "--mask_to_caption_weight, --caption_to_mask_weight: one of the chosen --tasks must have a weight above 0"
        )
    if args.use_llm_judge_loop2 and args.likelihood_share == 1:
        parser.error(
            "--use_llm_judge_loop2: with --likelihood_share 1 the judge would have no share in the reward"
        )
    if args.use_llm_judge_loop2 and not args.use_llm_judge:
        parser.error(
            "--use_llm_judge_loop2: needs --use_llm_judge, which makes the judge available"
        )
    for name in ("max_judge_failures", "max_bad_fraction", "ema_decay", "likelihood_share"):
        if not 0 <= getattr(args, name) <= 1:
            parser.error(f"--{name} {getattr(args, name)}: must be in [0, 1]")
    if not 0 <= args.warmup_ratio < 1:
        parser.error(f"--warmup_ratio {args.warmup_ratio}: must be in [0, 1)")
    for name in ("model_path", "data_dir", "eval_data_dir"):
        path = getattr(args, name)
        if (
            path is not None
            and not Path(path).is_dir()
            and (name == "model_path" or not hub.NAME.fullmatch(path))
        ):
            parser.error(f"--{name} {path}: no such folder")
    return args


def check_output_dir(args):
    """Check that --output_dir is free, or holds the run that --resume is to continue.

    Raises:
        ValueError: the folder cannot be written, or holds a run of another config, or a run while --resume was not given.
    """
    check_writable("--output_dir", Path(args.output_dir))
    file = Path(args.output_dir) / "config.json"
    values = vars(args)
    if file.is_file():
        if not args.resume:
            raise ValueError(
                f"--output_dir {args.output_dir} already holds a run: pass --resume to continue it, or another folder"
            )
        check_same(file, values, f"--output_dir {args.output_dir}")
    elif args.resume == "latest":
        raise ValueError(
            f"--resume: {file} does not exist, there is no run to continue in --output_dir"
        )


def check_resumed(folder, args):
    """Raise ValueError if the checkpoint in `folder` was written by a run of other flags."""
    check_same(Path(folder) / "config.json", vars(args), f"--resume {folder}")


def check_same(file: Path, values: dict, place: str):
    """Raise ValueError, beginning with `place`, if the config in `file` differs from the flags `values` in what may not differ."""
    before = read_json(file)
    differing = sorted(
        k for k in values if k not in FREE_ON_RESUME and (k not in before or before[k] != values[k])
    )
    if differing:
        raise ValueError(
            f"{place} holds a run of another config: "
            + ", ".join(
                f"--{k} was {before[k]}, now {values[k]}"
                if k in before
                else f"--{k} did not exist then"
                for k in differing
            )
        )
    was, now = (
        math.prod(config.get(name, 1) for name in PROMPTS_PER_STEP) for config in (before, values)
    )
    if "world_size" in before and was != now:
        raise ValueError(
            f"{place} holds a run of {was} prompts a step, now {now}: --batch_size x --gradient_accumulation_steps x processes "
            f"must stay the same"
        )


def claim_output_dir(args):
    """Write config.json to --output_dir, from where on the folder belongs to this run."""
    file = Path(args.output_dir) / "config.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(vars(args), indent=2) + "\n")
