"""What a run is made of, built from its flags before the first step: data, model, roles, tasks, optimizer."""

import json
import math
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import Subset

from rl_train import checkpoint, distributed
from rl_train.config import check_output_dir, check_resumed, claim_output_dir
from rl_train.data import DATASETS, DamagedSamples, check_bad_fraction
from rl_train.data.loader import StepSampler, eval_loader
from rl_train.distributed import print0
from rl_train.policies.sa2va import build_policy
from rl_train.rewards import LLMJudge
from rl_train.rewards.custom import load_user_rewards
from rl_train.rewards.judge import FailureWindow
from rl_train.rewards.meteor import require_wordnet
from rl_train.roles import Roles
from rl_train.rollout import calibrate_sigma
from rl_train.sharding import Shards, held_bytes
from rl_train.tasks import TASKS

SIGMA_REGIONS = 32  # training regions that --mask_sigma auto looks at


def cosine_schedule(optimizer, num_updates: int, warmup_ratio: float):
    """Linear warm-up over the first share of updates, then cosine to 0."""
    warmup = math.ceil(num_updates * warmup_ratio)

    def factor(update):
        if update < warmup:
            return (update + 1) / (warmup + 1)
        return 0.5 * (
            1 + math.cos(math.pi * min((update - warmup) / max(num_updates - warmup, 1), 1.0))
        )

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def split_dataset(args):
    """(training set, held-out set of --eval_samples, the damaged samples of --data_dir) from --data_dir and --eval_data_dir.

    Without --eval_data_dir the last images of a fixed shuffle are held out, with all their regions, in whatever rows these are.
    """
    dataset = DATASETS[args.dataset](args.data_dir)
    print0(f"--data_dir {args.data_dir}: {dataset.report()}")
    damaged = DamagedSamples(dataset.report(), args.max_bad_fraction)
    if args.eval_data_dir:
        heldout = DATASETS[args.dataset](args.eval_data_dir)
        check_bad_fraction(heldout.report(), 0, args.max_bad_fraction)
        return dataset, Subset(heldout, range(min(args.eval_samples, len(heldout)))), damaged
    order = torch.randperm(
        int(dataset.images.max()) + 1, generator=torch.Generator().manual_seed(0)
    ).numpy()
    place = order.argsort()[dataset.images]  # of each region's image in the order
    last_first = place.argsort(kind="stable")[::-1]
    heldout = last_first[
        : args.eval_samples
    ]  # whole images, but for what of the last one is too many
    training = sorted(last_first[place[last_first] < place[heldout].min()].tolist())
    if not training:
        raise ValueError(
            f"--data_dir {args.data_dir} holds {len(dataset)} regions, too few to hold out --eval_samples {args.eval_samples}"
        )
    return Subset(dataset, training), Subset(dataset, sorted(heldout.tolist())), damaged


@dataclass
class Watch:
    """What may stop a run from outside: a judge that fails, and samples that turn out damaged."""

    damaged: DamagedSamples
    judge: LLMJudge | None
    judge_failures: FailureWindow


def build_judge(args) -> LLMJudge | None:
    """The judge that the flags ask for, if any. Raises ValueError on all ranks if it does not answer one of them."""
    if not args.use_llm_judge:
        return None
    judge = LLMJudge(
        args.llm_judge_base_url,
        args.llm_judge_model,
        args.llm_judge_mode,
        seed=args.seed,
        cache_path=Path(args.output_dir) / "judge_cache.sqlite",
    )
    faults = [fault for fault in distributed.gather_objects(judge.fault()) if fault]
    if faults:
        raise ValueError(faults[0])
    return judge


@dataclass
class Parts:
    """What a run is made of, before its first step."""

    policy: object
    roles: Roles
    tasks: list
    watch: Watch
    optimizer: torch.optim.Optimizer
    scheduler: object
    train_set: object
    heldout: object
    sampler: StepSampler
    max_steps: int
    resume: object  # checkpoint folder to continue from, or None


def mask_sigma(policy, train_set, args, resume: Path | None = None) -> float | None:
    """--mask_sigma as a number, the same on all ranks: calibrated on the base's answers to a few training captions.

    A resumed run keeps the one that its checkpoint's config.json has as calibrated_mask_sigma. None if no task samples masks.
    """
    if "caption_mask_caption" not in args.tasks or not args.caption_to_mask_weight:
        return None
    if args.mask_sigma != "auto":
        return args.mask_sigma
    if resume:
        return json.loads((resume / "config.json").read_text())["calibrated_mask_sigma"]
    few = torch.randperm(len(train_set), generator=torch.Generator().manual_seed(0))[
        :SIGMA_REGIONS
    ].tolist()
    loader = eval_loader(Subset(train_set, few), policy.inputs, args.batch_size, 0, 0, 1)
    value = calibrate_sigma(policy, loader, args.max_completion_length)
    policy.join()
    value = distributed.gather_objects(value)[0]
    print0(f"--mask_sigma auto: {value:.3g}")
    return value


def standing_memory(policy) -> dict[str, int]:
    """{part: bytes} that a run holds on each GPU whatever its batch; gradients from the first backward of a step to its end."""
    weights = sum(parameter.nbytes for parameter in policy.trainable.values())
    everything = sum(parameter.nbytes for parameter in policy.model.parameters())
    return {
        "frozen base": everything - weights,
        "trainable weights": weights,
        "teacher and reference": 2 * weights,
        "optimizer": 2 * weights,
        "gradients": weights,
    }


def build_tasks(args, policy, roles, sigma: float | None, judge=None, user_rewards=()) -> list:
    """The tasks of --tasks that have a weight; sigma: --mask_sigma as a number."""
    resolved = Namespace(**vars(args) | dict(mask_sigma=sigma))
    tasks = [TASKS[name](policy, roles, resolved, judge, user_rewards) for name in args.tasks]
    return [task for task in tasks if task.loss_weight > 0]


def build_optimizer(args, policy) -> torch.optim.AdamW:
    """AdamW of everything that trains; text_hidden_fcs has a rate of its own."""
    rates = dict.fromkeys(policy.trainable, args.learning_rate)
    rates |= {
        name: args.prompt_learning_rate
        for name in rates
        if policy.group_of(name) == "text_hidden_fcs"
    }
    groups = [
        dict(params=[p for n, p in policy.trainable.items() if rates[n] == rate], lr=rate)
        for rate in dict.fromkeys(rates.values())
    ]
    return torch.optim.AdamW(
        groups, weight_decay=args.weight_decay, fused=policy.device.type == "cuda"
    )


def build(args, ranks) -> Parts:
    """Read everything that the flags name. Raises ValueError, naming the flag or file, if something there is wrong."""
    vars(args)["world_size"] = ranks.world_size  # for config.json, beside the flags
    shards = Shards(ranks) if args.shard_base else None
    if ranks.is_main:
        check_output_dir(args)
    distributed.gather_objects(None)  # nobody goes on before the folder is known to be free
    require_wordnet()
    user_rewards = load_user_rewards(args.reward)
    judge = build_judge(args)
    torch.manual_seed(args.seed)
    train_set, heldout, damaged = split_dataset(args)
    policy = build_policy(args, ranks.device, shards)
    print0("parameters:\n" + policy.parameter_table())
    held = standing_memory(policy)
    print0(
        "memory before activations, GiB: "
        + ", ".join(f"{part} {size / 2**30:.1f}" for part, size in held.items())
    )
    if shards:
        held, whole = held_bytes(policy.model)
        print0(
            f"--shard_base: {held / 2**20:.1f} MiB of {whole / 2**20:.1f} MiB of parameters on each of {ranks.world_size} ranks"
        )
    roles = Roles(policy.trainable)
    resume = checkpoint.find(args.resume, args.output_dir) if args.resume else None
    start = 0
    if resume:
        check_resumed(resume, args)
        start = checkpoint.check(resume, policy.trainable, args.output_dir)
    sigma = mask_sigma(policy, train_set, args, resume)
    if args.mask_sigma == "auto":
        vars(args)["calibrated_mask_sigma"] = sigma  # for config.json, beside the flags
    tasks = build_tasks(args, policy, roles, sigma, judge, user_rewards)
    sampler = StepSampler(
        len(train_set),
        args.batch_size,
        args.gradient_accumulation_steps,
        args.seed,
        ranks.rank,
        ranks.world_size,
        start,
    )
    max_steps = args.max_steps or math.ceil(args.num_epochs * sampler.steps_per_epoch)
    optimizer = build_optimizer(args, policy)
    scheduler = cosine_schedule(optimizer, max_steps * args.num_iterations, args.warmup_ratio)
    if ranks.is_main:
        claim_output_dir(args)  # last, so that bad input uses up no folder
    watch = Watch(damaged, judge, FailureWindow(args.max_judge_failures))
    return Parts(
        policy,
        roles,
        tasks,
        watch,
        optimizer,
        scheduler,
        train_set,
        heldout,
        sampler,
        max_steps,
        resume,
    )
