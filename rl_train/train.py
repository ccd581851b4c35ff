"""Train a policy by reinforcement learning in closed cycles.

    bash run_rl_train.sh                                                 # the demo, anywhere
    python -m rl_train.train --model_path M --data_dir D --output_dir O  # one process
    NPROC=8 bash run_rl_train.sh --model_path M ...                      # eight GPUs

This is GRPO (arXiv 2402.03300) with these deviations: the default loss divides by the tokens of the
whole step (DAPO); the reward is computed by an EMA teacher of the policy itself; a task may draw an
action beside the text and add terms of its own to the loss. See docs/algorithm.md.
"""

import math
from collections import Counter
from contextlib import closing
from pathlib import Path

import torch
from tqdm import tqdm

from rl_train import checkpoint, cli, distributed, memory
from rl_train.checkpoint import RunState
from rl_train.curves import Clock, Tally, check_first_answers, curves
from rl_train.data.loader import shared_memory_warning, steps, train_loader
from rl_train.data.workers import explaining
from rl_train.distributed import GradientAverage, gather_objects, gradient_norms, print0
from rl_train.draws import Draws
from rl_train.endings import Endings
from rl_train.evaluation import BATCHES, Evaluator, HeldOut
from rl_train.export import export_final
from rl_train.grpo import group_advantages
from rl_train.objective import (
    MicroBatchLoss,
    Work,
    check_answers,
    divide_by_batch,
    micro_batches_of,
    score_all,
    step_totals,
)
from rl_train.parts import Parts, begin, build
from rl_train.rewards.components import combine, scaled
from rl_train.rewards.judge import failure_sentence
from rl_train.statistics import before_after_table
from rl_train.stops import Stopped, Stops
from rl_train.tb import Log


def train(parts: Parts, loader, end_of_step, average=None):
    """The loop. Letters: B prompts per batch, G samples each, N = B*G rows, T tokens.

    Args:
        average: in place of `GradientAverage`.
    """
    state, config = parts.state, parts.config
    policy, roles, optim, seed = state.policy, state.roles, config.optim, config.run.seed
    scale, skips = config.loss.scale, config.loss.skip_zero_variance
    scale_of_group = "none" if scale == "batch" else scale  # a batch's comes when all is there
    G, T = config.rollout.num_generations, config.rollout.max_completion_length
    average = average or GradientAverage
    objective = average(MicroBatchLoss(policy, config.loss, T), policy.trainable)
    for batches in steps(loader, optim.gradient_accumulation_steps):
        if state.step >= parts.max_steps:
            break
        clock, tally, work = Clock(policy.device), Tally(), []
        for batch in batches:  # B samples
            features = policy.encode(batch)  # for all rows, tasks and roles
            clock("encode")
            for number, task in enumerate(state.tasks):
                draws = Draws(seed, state.step, number, batch.index, G)
                prompts = task.prompts(batch, features)  # B
                with roles.use("policy"):
                    rollout = policy.sample(batch, features, prompts, G, T, draws.uniforms(T))  # N
                    if task.action:
                        rollout.action = task.action.draw(rollout, draws)
                clock("rollout")
                outcome = task.judge(rollout)  # {component: (N,)}
                turn = (state.step, number)  # --control: another reward counts
                outcome, weights = parts.control(task, rollout, outcome, turn)
                reward = combine(outcome.rewards, weights)  # (N,)
                counted = reward
                if config.reward.scale_components:
                    counted = combine(scaled(outcome.rewards, weights, G), weights)
                advantages = group_advantages(counted, G, scale_of_group).to(policy.device)  # (N,)
                clock("teacher")
                reference = None
                if config.loss.kl_coef:
                    with roles.use("reference"):  # (N, T)
                        reference = score_all(policy, task, rollout, optim.micro_batch_size)
                masked = ~rollout.stopped if config.loss.mask_truncated else None
                more = dict(not_finite=policy.not_finite(), counted=counted, masked=masked)
                work.append(Work(task, rollout, outcome, reward, advantages, reference, **more))
                clock("reference")
        if scale == "batch":
            divide_by_batch(work)
        totals, learnable = step_totals(work, parts.ranks.world_size)
        for iteration in range(optim.num_iterations if learnable else 0):
            for w, rows, last in micro_batches_of(work, optim.micro_batch_size, skips):
                with objective.averaging(last):
                    loss, statistics = objective(w, rows, totals[w.task.name], last=last)
                    loss.backward()  # gradients add up over rows and tasks
                tally.add_update(w.task.name, statistics, on_policy=iteration == 0)
            update(state, objective, tally, optim.max_grad_norm)
            roles.update_teacher(parts.teacher_decay(iteration))
        end_of_step(state, work, tally, clock)


def update(state: RunState, objective: GradientAverage, tally: Tally, max_grad_norm: float):
    """Clip the averaged gradients and step; the norms before clipping go to the tally.

    Raises FloatingPointError, on all ranks and before a step, naming what is not finite on any.
    """
    faults = tally.not_finite()
    norms = objective.own_norms().items()
    faults += [
        f"gradient of {name} (norm {norm})" for name, norm in norms if not math.isfinite(norm)
    ]
    distributed.raise_on_any_rank(faults)
    squares = Counter()
    for name, norm in gradient_norms(state.policy.trainable).items():
        squares[state.policy.group_of(name)] += norm**2
    torch.nn.utils.clip_grad_norm_(list(state.policy.trainable.values()), max_grad_norm)
    state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)
    tally.updates += 1
    tally.points |= {f"grad_norm/{group}": math.sqrt(s) for group, s in squares.items()}


class EndOfStep:
    """What ends a step: the schedule, and curves, rollouts, evaluations, checkpoints of it.

    If a signal has come, that is a checkpoint, without an evaluation: raises Stopped on all ranks.
    """

    def __init__(self, parts: Parts, log: Log, evaluator: Evaluator, stops: Stops):
        self.parts, self.log, self.evaluator, self.stops = parts, log, evaluator, stops
        self.start, main = parts.state.step, parts.ranks.is_main
        total = dict(total=parts.max_steps, initial=self.start)
        self.progress = tqdm(**total, desc="training", disable=not main)

    def __call__(self, state: RunState, work: list[Work], tally: Tally, clock: Clock):
        run = self.parts.config.run
        num_iterations = self.parts.config.optim.num_iterations
        tally.points["learning_rate"] = state.scheduler.get_last_lr()[0]
        if state.roles.has_teacher:
            tally.points["teacher/decay"] = self.parts.teacher_decay(num_iterations - 1)
        for _ in range(num_iterations):
            state.scheduler.step()  # by time, also where nothing was learnt
        clock("update")
        state.step += 1
        if state.step == self.start + 1 and clock.peaks:
            peaks = ", ".join(f"{phase} {peak:.1f}" for phase, peak in clock.peaks.items())
            print0(f"peak memory of the first step, GiB: {peaks}")
        self.report(state, work, tally, clock)
        last, stops = state.step == self.parts.max_steps, self.stops
        if last or self.evaluator.due(state.step):
            for w in work[-len(state.tasks) :]:
                self.log.pictures(state.step, w, state.policy)
            if not stops.agreed:
                self.evaluator(state, self.log)
        if last or stops.agreed or state.step % run.save_steps == 0:
            if work:  # supervised training samples none
                check_answers(state.policy, work, self.parts.config.optim.micro_batch_size)
            self.log.sync()
            flags, main = self.parts.flags, self.parts.ranks.is_main
            checkpoint.save(run.output_dir, state, flags, run.save_total_limit, main)
        if stops.agreed:
            gather_objects(None)  # torchrun ends the others, who may be writing, when one leaves
            raise Stopped(f"{stops.agreed}, after step {state.step}")

    def report(self, state: RunState, work: list[Work], tally: Tally, clock: Clock):
        """Log the step; raises on all ranks if judge or data have failed too often, or if the first
        answers cannot be read."""
        parts, failed_frac = self.parts, "judge/failed_frac"
        for w in work:
            tally.add_rollout(w)
            self.log.rollouts(state.step - 1, w)
            tally.add_shares(parts.sampler.shares, w.rollout.batch.index)
        if parts.judge:
            tally.mean(failed_frac, *parts.judge.take_counts().values())
            tally.judge_reasons = parts.judge.take_reasons()
        tally.stop = self.stops.asked
        tallies = gather_objects(tally)
        self.stops.agree([t.stop for t in tallies])
        points = curves(tallies, {task.name: task.weight for task in state.tasks})
        if state.step == 1:
            check_first_answers(tallies, points)
        points |= clock.curves(sum(t.num_tokens for t in tallies))
        for name in parts.damaged.add(name for t in tallies for name in t.damaged):
            print0(f"left out, another sample in its place: {name}")
        points["data/damaged"] = len(parts.damaged.names)
        points |= state.roles.drift()
        self.log.scalars(points, state.step)
        names = [task.name for task in state.tasks]
        shown = "reward_mean" if work else "loss"
        self.progress.set_postfix({name: points.get(f"{name}/{shown}") for name in names})
        self.progress.update()
        if parts.judge:
            failed = sum(t.totals[failed_frac] for t in tallies)
            asked = sum(t.counts[failed_frac] for t in tallies)
            if asked and (failed == asked or failed > parts.judge_failures.limit * asked):
                reasons = sum((t.judge_reasons for t in tallies), Counter())
                print0(f"step {state.step}: {failure_sentence(failed, asked, reasons)}")
            parts.judge_failures.add(failed, asked)
        parts.damaged.check()


def run(parts: Parts, stops: Stops, loop=train):
    """Measure, train by `loop`, measure again, print both. Raises Stopped after a signal."""
    stops.at_once = False
    config, state, start = parts.config, parts.state, parts.state.step
    tokens, workers = config.rollout.max_completion_length, config.data.num_workers
    longest, others = config.data.max_caption_length, config.data.other_regions
    size = BATCHES * config.rollout.batch_size
    how = dict(other_regions=others, vocabulary=parts.vocabulary, measure=state.tasks[0].measure)
    heldout = HeldOut(parts.heldout, size, tokens, workers, longest, **how)
    with closing(Log(config.run.output_dir, parts.ranks, start, parts.mirror)) as log:
        log.hparams(parts.flags)
        how = (config.run, parts.ranks, parts.flags, stops, config.samples)
        evaluator = Evaluator(heldout, *how)
        evaluator.base(state, log)
        if not stops.agreed and evaluator.missing(start):
            evaluator(state, log)
        if not stops.agreed:
            inputs = state.policy.inputs(tokens, longest)
            loader = train_loader(parts.train_set, inputs, parts.sampler, workers, others)
            held = config.optim.gradient_accumulation_steps
            if warning := shared_memory_warning(loader, held, heldout.batch_size):
                print0(warning)
            end_of_step = EndOfStep(parts, log, evaluator, stops)
            with closing(end_of_step.progress):  # what the run ends with is said below it
                loop(parts, loader, end_of_step)
            if parts.max_steps not in evaluator.measured:  # resumed after its last step
                evaluator(state, log)
        if stops.agreed:
            raise Stopped(f"{stops.agreed}, in an evaluation of step {state.step}")
    if config.run.export_final and parts.ranks.is_main:
        folder = Path(config.run.output_dir)
        last, output = folder / f"checkpoint_step_{parts.max_steps}", folder / checkpoint.FINAL
        role = export_final(last, output, config.run.export_final)
        print0(f"{output}: {role} of {last}, merged")
    print0(before_after_table(evaluator.measured[0], evaluator.measured[parts.max_steps]))
    print0(f"curves and pictures: tensorboard --logdir {config.run.output_dir}/tensorboard")
    gather_objects(None)  # torchrun may end the first, who exports, when others leave


def main(argv=None, program=cli.REINFORCE, loop=train):
    """Train as `argv` says, by the loop of a program."""
    ranks = distributed.init()
    config = cli.parse_together(argv, program)
    stops, endings = Stops(ranks.is_main), Endings(config, ranks)
    try:
        with endings, stops.listening():
            with distributed.stop_together():
                parts = build(config, ranks)
                parts.announced = memory.announce(parts, loop)
                begin(parts)
            endings.parts = parts
            explaining(config.data.num_workers, run, parts, stops, loop)
    finally:
        distributed.close()


if __name__ == "__main__":
    cli.run_program(main)
