"""Train Sa2VA by reinforcement learning in two closed cycles.

    bash run_rl_train.sh                                                   # the demo, on any machine
    python -m rl_train.train --model_path M --data_dir D --output_dir O    # one process
    torchrun --nproc_per_node 8 -m rl_train.train --model_path M ...       # eight GPUs

This is GRPO (arXiv 2402.03300) with these deviations: the default loss divides by the tokens of the whole step (DAPO);
the reward is computed by an EMA teacher of the policy itself; in loop 2 the action holds, beside the text, a sampled
prompt embedding for SAM2; and `--mask_loss_coef` adds a supervised term on the sampled masks. See docs/algorithm.md.
"""

import json
import math
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from rl_train import checkpoint, distributed
from rl_train.config import parse_args
from rl_train.data import BadData
from rl_train.data.loader import steps, train_loader
from rl_train.distributed import print0
from rl_train.evaluation import SCORES, before_after_table, evaluate_roles, means, record
from rl_train.files import DamagedFile
from rl_train.grpo import combine, control_rewards, group_advantages, group_std
from rl_train.objective import Totals, micro_batches, rollout_loss, token_logps
from rl_train.parts import Parts, build
from rl_train.rewards.custom import BadReward
from rl_train.rewards.judge import JudgeFailed
from rl_train.rollout import Rollout, noise, sample
from rl_train.tb import Log, rollout_sums, scalars

EVAL_BATCHES = (
    2  # training batches in one of an evaluation, which holds one answer a prompt and no gradient
)


@dataclass
class Work:
    """One task's rollouts of one batch, with all that the update needs."""

    task: object
    rollout: Rollout
    rewards: dict[str, torch.Tensor]  # {component: (N,)}
    reward: torch.Tensor  # (N,) NaN = not scored
    advantages: torch.Tensor  # (N,)
    reference: list[torch.Tensor]  # [logp (N, T), latent mean (M, D)]


def train(
    args,
    ranks,
    policy,
    roles,
    tasks,
    watch,
    loader,
    optimizer,
    scheduler,
    log,
    start,
    max_steps,
    evaluate_now,
):
    """The loop: steps, and what is seen and kept of them."""
    progress = tqdm(total=max_steps, initial=start, desc="training", disable=not ranks.is_main)
    for step, batches in enumerate(steps(loader, args.gradient_accumulation_steps), start):
        if step >= max_steps:
            break
        clock, rate = Clock(ranks.device), scheduler.get_last_lr()[0]
        work, sums, norms = train_step(
            args, ranks, policy, roles, tasks, optimizer, scheduler, batches, step, clock
        )
        if step == start and clock.peaks:
            print0(
                "peak memory of the first step, GiB: "
                + ", ".join(f"{phase} {peak:.1f}" for phase, peak in clock.peaks.items())
            )
        done = step + 1
        report(args, ranks, roles, watch, log, progress, step, work, sums, norms, rate, clock)
        if args.eval_steps and done % args.eval_steps == 0 or done == max_steps:
            for w in work[-len(tasks) :]:
                log.pictures(done, w.task, w.rollout, w.reward, w.advantages)
            evaluate_now(done)
        if done % args.save_steps == 0 or done == max_steps:
            checkpoint.save(
                args.output_dir, done, policy, roles, optimizer, scheduler, args, ranks.is_main
            )
    progress.close()


def train_step(
    args, ranks, policy, roles, tasks, optimizer, scheduler, batches, step, clock
) -> tuple[list[Work], dict, dict]:
    """One step: rollouts of all batches, then the updates. Letters: B prompts per batch, G samples each, N = B*G rows, T tokens.

    Returns:
        the work of each batch and task; {task: sums of loss and statistics}; {group: gradient norm}, empty if nothing could be learnt.
    """
    work = []
    for batch in batches:  # B samples, already tensors
        images = policy.encode_images(
            batch.inputs.pixel_values, batch.inputs.sam_pixels, batch.sizes
        )  # a GPU goes on while the noise is drawn
        random = [
            noise(
                args.seed,
                step,
                number,
                batch.index,
                args.num_generations,
                args.max_completion_length,
                policy.model.config.prompt_size if task.mask_sigma else 0,
            )
            for number, task in enumerate(tasks)
        ]
        clock("encode")
        for number, task in enumerate(tasks):
            with roles.use("policy"):
                rollout = sample(
                    policy,
                    batch,
                    images,
                    task.prompts(batch, images),
                    args.num_generations,
                    args.max_completion_length,
                    random[number],
                    task.mask_sigma,
                )  # N rows
            clock("rollout")
            rewards = task.rewards(rollout)  # {component: (N,)}
            reward = combine(rewards, task.weights)  # (N,)
            reward = control_rewards(
                reward, args.num_generations, args.control, (args.seed, step, number), batch.index
            )
            advantages = group_advantages(reward, args.num_generations)  # (N,)
            clock("teacher")
            with roles.use("reference"):
                reference = score_all(policy, rollout, args.micro_batch_size)  # (N, T) and (M, D)
            work.append(
                Work(task, rollout, rewards, reward, advantages.to(ranks.device), reference)
            )
            clock("reference")
    policy.join()  # of ranks that share the base out
    learnable = sum(
        (group_std(w.reward, args.num_generations) > 0).sum().item() * w.task.loss_weight
        for w in work
    )
    totals = {w.task.name: step_totals(work, w.task, ranks) for w in work}
    sums = {task.name: Counter() for task in tasks}
    norms = {}
    for iteration in range(
        args.num_iterations if distributed.all_sum({"n": learnable}, ranks.device)["n"] else 0
    ):
        for w in work:
            scored = ~w.reward.isnan().to(ranks.device)
            for rows in micro_batches(len(w.rollout), args.micro_batch_size):
                loss, stats = rollout_loss(
                    policy,
                    w.rollout,
                    rows,
                    w.advantages,
                    scored,
                    w.reference,
                    totals[w.task.name],
                    args,
                )
                (w.task.loss_weight * loss).backward()  # gradients add up over rows and tasks
                add_stats(sums[w.task.name], loss, stats, iteration)
        norms = update(args, policy, optimizer, sums)
        roles.update_teacher(args.ema_decay)
    for _ in range(args.num_iterations):
        scheduler.step()  # by time, also where nothing was learnt
    clock("update")
    return work, sums, norms


def score_all(policy, rollout, micro_batch_size) -> list[torch.Tensor]:
    """[logp (N, T), latent mean (M, D)] of a whole rollout under the role in use."""
    scores = [
        token_logps(policy, rollout, rows) for rows in micro_batches(len(rollout), micro_batch_size)
    ]
    return [torch.cat([s.logp for s in scores]), torch.cat([s.latent_mean for s in scores])]


def step_totals(work, task, ranks) -> Totals:
    """Rows, tokens and [SEG] tokens that this step scores for `task`, per rank on average (see `Totals`)."""
    mine = Counter(rows=0, tokens=0, latents=0)
    for w in work:
        if w.task is task:
            scored = ~w.reward.isnan()
            mine["rows"] += len(w.reward)
            mine["tokens"] += int(w.rollout.valid[scored.to(ranks.device)].sum())
            mine["latents"] += (
                int(scored[w.rollout.seg_rows.cpu()].sum()) if w.rollout.has_mask else 0
            )
    total = distributed.all_sum(mine, ranks.device)
    return Totals(**{name: max(count, 1) / ranks.world_size for name, count in total.items()})


def add_stats(sums, loss, stats, iteration):
    sums["loss"] += loss.item()
    for name, value in stats.items():
        if name != "sampler_gap":
            sums[name] += value.item()
        elif iteration == 0:  # later weights are not those that sampled
            sums[name] = max(sums[name], value.item())


def update(args, policy, optimizer, sums) -> dict[str, float]:
    """Average gradients over ranks, clip, step. Returns the gradient norm of each group before clipping.

    Raises:
        FloatingPointError: on all ranks, naming what was not finite on any of them; nothing has been stepped.
    """
    parameters = list(policy.trainable.values())
    faults = [
        f"{task} {name}"
        for task, values in sums.items()
        for name, value in values.items()
        if not math.isfinite(value)
    ]
    faults += [
        f"gradient of {name} (norm {norm})"
        for name, norm in gradient_norms(policy).items()
        if not math.isfinite(norm)
    ]
    distributed.raise_on_any_rank(faults)
    distributed.average_gradients(parameters)
    squares = Counter()
    for name, norm in gradient_norms(policy).items():
        squares[policy.group_of(name)] += norm**2
    torch.nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {group: math.sqrt(square) for group, square in squares.items()}


def gradient_norms(policy) -> dict[str, float]:
    """Of each parameter that has a gradient; one copy from the GPU for all."""
    there = {name: p.grad for name, p in policy.trainable.items() if p.grad is not None}
    return (
        dict(zip(there, torch.stack(torch._foreach_norm(list(there.values()))).tolist()))
        if there
        else {}
    )


def report(args, ranks, roles, watch, log, progress, step, work, sums, norms, rate, clock):
    """Curves, progress bar and JSON lines of one step; raises on all ranks if judge or data have failed too often.

    A step that could learn nothing has no curves of the update.
    """
    values, show, tokens = {}, {}, 0
    for name in sums:
        mine = [w for w in work if w.task.name == name]
        counts = Counter(sums[name])
        for w in mine:
            counts.update(rollout_sums(w.rollout, w.rewards, w.reward))
            log.rollouts(step, w.task, w.rollout, w.rewards, w.reward, w.advantages)
        keys = (
            "loss",
            "policy_loss",
            "tokens",
            "kl",
            "clipped",
            "entropy",
            "latent_loss",
            "latent_kl",
            "latents",
            "mask_loss",
        )
        gap = max(distributed.gather_objects(counts.pop("sampler_gap", 0.0)))
        total = distributed.all_sum(
            {**dict.fromkeys(keys if norms else (), 0.0), **counts}, ranks.device
        )
        if norms:
            for averaged in ("loss", "policy_loss", "latent_loss", "mask_loss"):
                total[averaged] /= ranks.world_size * args.num_iterations
            values |= {
                f"{name}/sampler_gap": gap,
                "total_loss": values.get("total_loss", 0.0)
                + mine[0].task.loss_weight * total["loss"],
            }
        curves = scalars(total)
        tokens += total["length"]
        values |= {f"{name}/{key}": value for key, value in curves.items()}
        if mine[0].task.mask_sigma:
            values[f"{name}/mask_sigma"] = mine[0].task.mask_sigma
        show[name] = f"{curves.get('reward_mean', math.nan):.3f}"
    values |= {f"grad_norm/{group}": norm for group, norm in norms.items()}
    values |= {
        "teacher/drift": roles.distance("teacher", "reference"),
        "teacher/lag": roles.distance("teacher", "policy"),
    }
    values |= {f"perf/{phase}_seconds": seconds for phase, seconds in clock.seconds.items()}
    values |= {
        "learning_rate": rate,
        "perf/step_seconds": sum(clock.seconds.values()),
        "perf/rollout_tokens_per_second": tokens / clock.seconds["rollout"],
    }
    if clock.peaks:
        values |= {f"perf/peak_memory_gib/{phase}": peak for phase, peak in clock.peaks.items()}
        values["perf/peak_memory_gib"] = max(clock.peaks.values())
    if watch.judge:
        judged = distributed.all_sum(watch.judge.take_counts(), ranks.device)
        values["judge/failed_frac"] = judged["failed"] / max(judged["asked"], 1)
        show["judge_failed"] = f"{values['judge/failed_frac']:.0%}"
    mine = [name for w in work for name in w.rollout.batch.damaged]
    for name in watch.damaged.add(
        name for names in distributed.gather_objects(mine) for name in names
    ):
        print0(f"left out, another sample in its place: {name}")
    values["data/damaged"] = len(watch.damaged.names)
    log.scalars(values, step + 1)
    progress.set_postfix(show)
    progress.update()
    if watch.judge:
        watch.judge_failures.add(**judged)
    watch.damaged.check()


class Clock:
    """Seconds and peak GPU memory of each phase of a step; waits for the GPU, so that work is booked where it was asked for.

    Attributes:
        laps: (phase, seconds, bytes) of each phase that has ended, in order; 0 bytes without a GPU.
    """

    def __init__(self, device):
        self.gpu, self.laps = device if device.type == "cuda" else None, []
        if self.gpu:
            torch.cuda.reset_peak_memory_stats(self.gpu)
        self.last = time.perf_counter()

    def __call__(self, phase: str):
        peak = 0
        if self.gpu:
            torch.cuda.synchronize(self.gpu)
            peak = torch.cuda.max_memory_allocated(self.gpu)
            torch.cuda.reset_peak_memory_stats(self.gpu)
        now = time.perf_counter()
        self.laps.append((phase, now - self.last, peak))
        self.last = now

    @property
    def seconds(self) -> Counter:
        """{phase: seconds}, of all its laps together."""
        found = Counter()
        for phase, seconds, _ in self.laps:
            found[phase] += seconds
        return found

    @property
    def peaks(self) -> dict[str, float]:
        """{phase: GiB at most}, empty without a GPU."""
        return (
            {
                phase: max(peak for name, _, peak in self.laps if name == phase) / 2**30
                for phase in self.seconds
            }
            if self.gpu
            else {}
        )


def run(args, ranks, p: Parts):
    """Measure, train, measure again, and print both."""
    measured, start = {}, p.sampler.start

    def evaluate_now(step):
        roles = ("policy", "teacher") if step else ("policy",)  # alike before the first step
        found = evaluate_roles(
            p.policy,
            p.roles.use,
            roles,
            p.heldout,
            EVAL_BATCHES * args.batch_size,
            args.max_completion_length,
            args.num_workers,
            ranks,
        )
        measured[step] = found["policy"].values
        metrics, file = (
            means(measured[step]),
            Path(args.output_dir) / "evaluation" / f"step_{step}.json",
        )
        if (
            step > start or not file.is_file()
        ):  # else its points are there, of the run that is resumed
            log.scalars({f"eval/{metric}": value for metric, value in metrics.items()}, step)
            log.scalars(
                {
                    f"eval_ema/{metric}": value
                    for metric, value in means(found[roles[-1]].values).items()
                },
                step,
            )
        if ranks.is_main:
            file.parent.mkdir(exist_ok=True)
            file.with_suffix(".tmp").write_text(json.dumps(record(found["policy"], vars(args))))
            file.with_suffix(".tmp").replace(file)
        if step and args.eval_steps:
            score = sum(metrics[name] for name in SCORES) / len(SCORES)
            checkpoint.save_if_best(
                args.output_dir,
                step,
                score,
                metrics,
                p.policy,
                p.roles,
                p.optimizer,
                p.scheduler,
                args,
                ranks.is_main,
            )

    if p.resume:
        print0(f"resuming from {p.resume}")
    with closing(Log(args.output_dir, ranks, start)) as log:
        log.hparams(args)
        evaluate_now(0)  # the base: a fresh LoRA adds nothing
        if p.resume:
            checkpoint.load(p.resume, p.policy, p.roles, p.optimizer, p.scheduler, ranks.rank)
        loader = train_loader(p.train_set, p.policy.inputs, p.sampler, args.num_workers)
        train(
            args,
            ranks,
            p.policy,
            p.roles,
            p.tasks,
            p.watch,
            loader,
            p.optimizer,
            p.scheduler,
            log,
            start,
            p.max_steps,
            evaluate_now,
        )
        if p.max_steps not in measured:  # resumed after its last step
            evaluate_now(p.max_steps)
    print0(before_after_table(measured[0], measured[p.max_steps]))
    print0(f"curves and pictures: tensorboard --logdir {args.output_dir}/tensorboard")


def main(argv=None):
    args = parse_args(argv)
    ranks = distributed.init()
    try:
        try:
            parts = build(args, ranks)
        except ValueError as error:  # the user's input: one sentence, no traceback
            raise SystemExit(f"rl_train: {error}") from error
        try:
            run(args, ranks, parts)
        except (DamagedFile, BadReward) as error:
            raise SystemExit(f"rl_train: {error}") from error
        except JudgeFailed as error:
            raise SystemExit(
                f"rl_train: --llm_judge_base_url {args.llm_judge_base_url}: {error}"
            ) from error
        except BadData as error:
            sentence = str(error).splitlines()[
                -1
            ]  # from a worker it comes with the worker's traceback
            raise SystemExit(f"rl_train: --data_dir {args.data_dir}: {sentence}") from error
    finally:
        distributed.close()


if __name__ == "__main__":
    main()
