"""Flags as TRL's GRPOConfig (1.16) and this project's forerunners call them, put as ours.

What means the same is taken for ours. What means another thing here, or nothing, is refused with a
sentence that names ours. The tables of docs/coming_from.md are made of these.
"""

from rl_train.foreign import Foreign, so_anyway

BOTH, TRL, EARLIER = "TRL, earlier scripts", "TRL", "earlier scripts"


def _share(value: str) -> tuple[str, ...] | None:
    """transformers 5 takes a number below 1 for a share of the steps, as ours is."""
    is_share = value.replace(".", "", 1).isdigit() and float(value) < 1
    return ("--warmup_ratio", value) if is_share else None


WEIGHTS = "a weight follows a colon: --reward module:function=WEIGHT; the tasks' own have flags"
OWN_SAMPLER = "answers are sampled by the project's own engine, by the weights that are trained"
NO_EXPERTS = "no model here is a mixture of experts"
LAUNCHER = "run_rl_train.sh starts the ranks, NPROC of them"
NO_TOOLS = "no answer calls a tool"
WHOLE = "answers are drawn from the whole distribution that is scored, of --temperature alone"
SHARDED = "--shard_base shares a base that is too large for a GPU out over all (FSDP2)"
REFERENCE = "the reference stays the base; what follows the policy is the teacher (--ema_half_life)"
LENGTH = "an answer's tokens cost by --length_weight (--target_length), or --overlong_buffer"
ADAPTIVE = "--entropy_coef stays what it is during a run"
UPLOAD = "nothing is uploaded; --export_final writes a folder, which `hf upload` takes"
TENSORBOARD = "TensorBoard's curves are always written, and --wandb mirrors them"
PIXELS = "Sa2VA sees --max_tiles tiles; Qwen2.5-VL --image_side, --max_image_tokens"
OF_LOSS = "it belongs to a loss that is not here; --loss_type has which there are"
ONE_BASE = "the base is held in --dtype float32 or bfloat16; --shard_base shares it out"
ONE_OPTIMIZER = "the optimizer is AdamW with betas .9 and .999; --learning_rate, --weight_decay"
ROLLOUTS = "every rollout is a line in --output_dir, rollouts/rank*.jsonl"
EACH_STEP = "every step is written to TensorBoard; there is nothing to choose, leave it out"

FOREIGN = {
    # The same, whatever the value
    "--model_name_or_path": Foreign(TRL, "--model_path"),
    "--dataset_name": Foreign(BOTH, "--data_dir"),
    "--local_data_dir": Foreign(EARLIER, "--data_dir"),
    "--per_device_batch_size": Foreign(EARLIER, "--batch_size"),
    "--num_train_epochs": Foreign(TRL, "--num_epochs"),
    "--beta": Foreign(BOTH, "--kl_coef"),
    "--epsilon": Foreign(TRL, "--clip_range"),
    "--epsilon_high": Foreign(TRL, "--clip_range_high"),
    "--lora_rank": Foreign(EARLIER, "--lora_r"),
    "--torch_dtype": Foreign(TRL, "--dtype"),
    "--dataloader_num_workers": Foreign(TRL, "--num_workers"),
    "--wandb_project": Foreign(EARLIER, "--wandb"),
    "--loop1_weight": Foreign(EARLIER, "--mask_to_caption_weight"),
    "--loop2_weight": Foreign(EARLIER, "--caption_to_mask_weight"),
    "--llm_judge_api_base": Foreign(EARLIER, "--llm_judge_base_url"),
    "--llm_server_url": Foreign(EARLIER, "--llm_judge_base_url"),
    "--llm_model": Foreign(EARLIER, "--llm_judge_model"),
    # By the value
    "--bf16": Foreign(
        BOTH,
        values={"true": ("--dtype", "bfloat16"), "false": ("--dtype", "float32")},
        why="--dtype bfloat16 or float32, of the frozen base; what trains is float32",
    ),
    "--fp16": Foreign(
        BOTH,
        values=so_anyway("false"),
        why="float16 would need a loss scale; --dtype bfloat16 or float32",
    ),
    "--warmup_steps": Foreign(
        BOTH,
        why="--warmup_ratio is the share of all updates: these steps / all steps",
        also=_share,
        example="0.05",
    ),
    "--resume_from_checkpoint": Foreign(
        TRL,
        values={"true": ("--resume",), "false": ()},
        also=lambda folder: ("--resume", folder),
        example="FOLDER",
    ),
    "--lr_scheduler_type": Foreign(
        TRL,
        values=so_anyway("cosine"),
        why="the rate rises over --warmup_ratio, then falls by a cosine to 0",
    ),
    "--optim": Foreign(
        TRL, values=so_anyway("adamw_torch", "adamw_torch_fused"), why=ONE_OPTIMIZER
    ),
    "--adam_beta1": Foreign(TRL, values=so_anyway("0.9"), why=ONE_OPTIMIZER),
    "--adam_beta2": Foreign(TRL, values=so_anyway("0.999"), why=ONE_OPTIMIZER),
    "--adam_epsilon": Foreign(TRL, values=so_anyway("1e-08"), why=ONE_OPTIMIZER),
    "--top_p": Foreign(TRL, values=so_anyway("1"), why=WHOLE),
    "--top_k": Foreign(TRL, values=so_anyway("0", "-1"), why=WHOLE),
    "--min_p": Foreign(TRL, values=so_anyway("0"), why=WHOLE),
    "--repetition_penalty": Foreign(TRL, values=so_anyway("1"), why=WHOLE),
    "--use_vllm": Foreign(TRL, values=so_anyway("false"), why=OWN_SAMPLER),
    "--sync_ref_model": Foreign(TRL, values=so_anyway("false"), why=REFERENCE),
    "--importance_sampling_level": Foreign(
        TRL,
        values=so_anyway("token"),
        why="ratios of whole answers are those of --loss_type gspo",
    ),
    "--multi_objective_aggregation": Foreign(
        TRL,
        values=so_anyway("sum_then_normalize")
        | {"normalize_then_sum": ("--scale_components", "--scale_rewards", "batch")},
        why="--scale_components divides each component by its std inside the group",
    ),
    "--mask_truncated_completions": Foreign(
        TRL,
        values={"true": ("--mask_truncated",), "false": ()},
        why="--mask_truncated or nothing",
    ),
    "--use_adaptive_entropy": Foreign(TRL, values=so_anyway("false"), why=ADAPTIVE),
    "--top_entropy_quantile": Foreign(
        TRL, values=so_anyway("1"), why="all tokens of an answer count, by --loss_type"
    ),
    "--use_bias_correction_kl": Foreign(
        TRL,
        values=so_anyway("false"),
        why="the KL of --kl_coef is not multiplied by the ratio (docs/algorithm.md)",
    ),
    "--disable_dropout": Foreign(
        TRL,
        values=so_anyway("true"),
        why="it is off, since sampled and scored are one distribution (see --lora_dropout)",
    ),
    "--cast_lm_head_to_fp32": Foreign(
        TRL, values=so_anyway("false"), why="log-probs are float32, whatever --dtype"
    ),
    "--use_peft": Foreign(
        TRL, values=so_anyway("true"), why="the language model trains by LoRA alone: --lora_r"
    ),
    "--lora_target_modules": Foreign(
        TRL,
        values=so_anyway("all-linear"),
        why="all attention and MLP matrices of the language model, of rank --lora_r",
    ),
    "--load_in_8bit": Foreign(TRL, values=so_anyway("false"), why=ONE_BASE),
    "--load_in_4bit": Foreign(TRL, values=so_anyway("false"), why=ONE_BASE),
    "--trust_remote_code": Foreign(
        TRL, values=so_anyway("false"), why="no code of a --model_path is ever run, none is needed"
    ),
    "--report_to": Foreign(
        BOTH,
        values={"tensorboard": (), "wandb": ("--wandb",)},
        why=TENSORBOARD,
    ),
    "--log_completions": Foreign(TRL, values=so_anyway("true"), why=ROLLOUTS),
    "--log_multimodal": Foreign(
        TRL, values=so_anyway("true"), why="pictures of rollouts are drawn every --eval_steps"
    ),
    "--log_steps": Foreign(EARLIER, values=so_anyway("1"), why=EACH_STEP),
    "--logging_steps": Foreign(BOTH, values=so_anyway("1"), why=EACH_STEP),
    "--logging_strategy": Foreign(TRL, values=so_anyway("steps"), why=EACH_STEP),
    "--save_strategy": Foreign(
        TRL, values=so_anyway("steps"), why="checkpoints are written every --save_steps"
    ),
    "--eval_strategy": Foreign(
        TRL,
        values=so_anyway("steps"),
        why="--eval_steps between evaluations; 0 = before and after the run alone",
    ),
    "--shuffle_dataset": Foreign(
        TRL, values=so_anyway("true"), why="each pass has an order of its own, by --seed"
    ),
    "--push_to_hub": Foreign(TRL, values=so_anyway("false"), why=UPLOAD),
    # Another meaning, or none
    "--per_device_train_batch_size": Foreign(
        TRL,
        why="it counts answers, --batch_size prompts: divide it by --num_generations",
    ),
    "--per_device_eval_batch_size": Foreign(
        TRL, why="an evaluation reads twice --batch_size at a time"
    ),
    "--steps_per_generation": Foreign(
        TRL,
        why="each step samples anew; --gradient_accumulation_steps batches are sampled for an "
        "update, --num_iterations updates reuse them",
    ),
    "--generation_batch_size": Foreign(
        TRL,
        why="a step samples --batch_size x --gradient_accumulation_steps prompts on each GPU",
    ),
    "--max_prompt_length": Foreign(
        BOTH,
        why="a prompt is never cut; --max_caption_length leaves out what is too long",
    ),
    "--num_generations_eval": Foreign(TRL, why="held-out answers are greedy (--eval_steps)"),
    "--dataset_config": Foreign(TRL, why="--dataset is the format of --data_dir (docs/data.md)"),
    "--dataset_train_split": Foreign(TRL, why="--split says it of --data_dir (docs/data.md)"),
    "--dataset_test_split": Foreign(TRL, why="--eval_split says it of --eval_data_dir"),
    "--cache_dir": Foreign(EARLIER, why="HF_HOME says where the hub's downloads for --data_dir go"),
    "--config": Foreign(
        BOTH, why="every setting is a flag; those of a run are in --output_dir, config.json"
    ),
    "--model_revision": Foreign(TRL, why="--model_path is a folder: download the revision first"),
    "--attn_implementation": Foreign(
        TRL, why="the device decides (docs/performance.md); --gradient_checkpointing saves memory"
    ),
    "--ema_alpha": Foreign(
        EARLIER,
        why="some call the old share so and some the new: --ema_decay is the old one, that stays "
        "(.999), --ema_half_life follows the run's length",
    ),
    "--ref_model_sync_steps": Foreign(TRL, why=REFERENCE),
    "--ref_model_mixup_alpha": Foreign(TRL, why=REFERENCE),
    "--delta": Foreign(TRL, why="--clip_range, --clip_range_high are the only bounds of the ratio"),
    "--off_policy_mask_threshold": Foreign(
        TRL, why="answers are never older than --num_iterations updates, and all of them count"
    ),
    "--reward_funcs": Foreign(
        TRL, why="--reward module:function, which is called as docs/adding_a_task.md says"
    ),
    "--reward_weights": Foreign(TRL, why=WEIGHTS),
    "--reward_model_name_or_path": Foreign(
        TRL, why="--use_llm_judge asks a model behind --llm_judge_base_url"
    ),
    "--caption_min_length": Foreign(EARLIER, why=LENGTH),
    "--length_penalty_lambda": Foreign(EARLIER, why=LENGTH),
    "--generation_kwargs": Foreign(TRL, why=WHOLE),
    "--chat_template_kwargs": Foreign(
        TRL, why="prompts are those of the checkpoint's supervised training; --tasks asks others"
    ),
    "--cache_implementation": Foreign(TRL, why=OWN_SAMPLER),
    "--use_transformers_*": Foreign(TRL, why=OWN_SAMPLER),
    "--transformers_*": Foreign(TRL, why=OWN_SAMPLER),
    "--pad_to_multiple_of": Foreign(TRL, why=OWN_SAMPLER),
    "--max_tool_calling_iterations": Foreign(TRL, why=NO_TOOLS),
    "--router_aux_loss_coef": Foreign(TRL, why=NO_EXPERTS),
    "--model_init_kwargs": Foreign(
        TRL, why="--dtype, --max_tiles, --shard_base, .. say how the model of --model_path is read"
    ),
    "--vllm_*": Foreign(TRL, why=OWN_SAMPLER),
    "--entropy_coef_*": Foreign(TRL, why=ADAPTIVE),
    "--entropy_target": Foreign(TRL, why=ADAPTIVE),
    "--sapo_*": Foreign(TRL, why=OF_LOSS),
    "--vespo_*": Foreign(TRL, why=OF_LOSS),
    "--min_pixels": Foreign(EARLIER, why=PIXELS),
    "--max_pixels": Foreign(EARLIER, why=PIXELS),
    "--num_completions_to_print": Foreign(TRL, why=ROLLOUTS),
    "--log_unique_prompts": Foreign(TRL, why=ROLLOUTS),
    "--log_completions_hub_repo": Foreign(TRL, why=UPLOAD),
    "--deepspeed": Foreign(BOTH, why=SHARDED),
    "--ds3_gather_for_generation": Foreign(TRL, why=SHARDED),
    "--fsdp": Foreign(TRL, why=SHARDED),
    "--fsdp_config": Foreign(TRL, why=SHARDED),
    "--local_rank": Foreign(TRL, why=LAUNCHER),
    "--run_name": Foreign(TRL, why="a run has the name of its --output_dir"),
    "--wandb_run_name": Foreign(EARLIER, why="a run of --wandb has the name of its --output_dir"),
    "--hub_*": Foreign(TRL, why=UPLOAD),
}

# {our flag: {a value that others write there: what says it here}}
OURS = {
    "--scale_rewards": {
        "true": ("--scale_rewards", "group"),
        "false": ("--scale_rewards", "none"),
    },
    "--max_steps": {"-1": ("--max_steps", "0")},
    "--gradient_checkpointing": {
        "true": ("--gradient_checkpointing",),
        "false": ("--no-gradient_checkpointing",),
    },
}

# {our flag: (TRL's name of it, its default there)} of what both have, and mean alike.
DEFAULTS = {
    "--learning_rate": ("--learning_rate", 1e-6),
    "--warmup_ratio": ("--warmup_steps", 0),
    "--weight_decay": ("--weight_decay", 0.0),
    "--max_grad_norm": ("--max_grad_norm", 1.0),
    "--kl_coef": ("--beta", 0.0),
    "--loss_type": ("--loss_type", "dapo"),
    "--scale_rewards": ("--scale_rewards", "group"),
    "--entropy_coef": ("--entropy_coef", 0.0),
    "--temperature": ("--temperature", 1.0),
    "--num_generations": ("--num_generations", 8),
    "--max_completion_length": ("--max_completion_length", 512),
    "--num_iterations": ("--num_iterations", 1),
    "--gradient_accumulation_steps": ("--gradient_accumulation_steps", 1),
    "--num_epochs": ("--num_train_epochs", 3.0),
    "--max_steps": ("--max_steps", -1),
    "--gradient_checkpointing": ("--gradient_checkpointing", True),
    "--lora_r": ("--lora_r", 16),
    "--lora_alpha": ("--lora_alpha", 32),
    "--lora_dropout": ("--lora_dropout", 0.05),
    "--save_steps": ("--save_steps", 500),
    "--save_total_limit": ("--save_total_limit", "all"),
    "--eval_steps": ("--eval_steps", "never"),
    "--seed": ("--seed", 42),
}
