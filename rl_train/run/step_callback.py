"""End of a training step: schedule, metrics, rollout files, evaluation, checkpoint, signals."""

import time
from collections import Counter

from tqdm import tqdm

from rl_train.checkpoint import save_load
from rl_train.distributed.process_group import gather_objects, print0
from rl_train.evaluation.evaluate import Evaluator
from rl_train.loggers.metrics import (
    PhaseTimer,
    StepMetrics,
    main_metrics,
    reduce_metrics,
)
from rl_train.loggers.tensorboard import RunLogger
from rl_train.loss import ScoredRollout, check_finite_log_probs
from rl_train.rewards.judge import failure_sentence
from rl_train.run.build import Run
from rl_train.run.messages import (
    EQUAL_REWARDS,
    NO_UPDATE,
    mean_values,
    no_group_has_signal,
    step_line,
)
from rl_train.run.signals import Interrupted, SignalHandler


class StepCallback:
    """End each step: advance the schedule, log, evaluate, save.

    After a signal the step ends with a checkpoint and without an evaluation, and `Interrupted` is
    raised on all ranks.
    """

    def __init__(self, run: Run, logger: RunLogger, evaluator: Evaluator, signals: SignalHandler):
        self.run, self.logger, self.evaluator, self.signals = run, logger, evaluator, signals
        self.first_step = run.state.step
        self.learning_rate = run.state.scheduler.get_last_lr()[0]  # of the step in progress
        self.num_without_update = 0  # steps since `first_step` in which no group's rewards differ
        self.unlogged: list[dict[str, float]] = []  # metrics of the steps since the last line
        self.unlogged_seconds, self.step_began = 0.0, time.perf_counter()
        self.progress = tqdm(
            total=run.max_steps,
            initial=self.first_step,
            desc="training",
            disable=None if run.ranks.is_main else True,  # None: no bar where there is no terminal
        )

    def __call__(
        self,
        state: save_load.RunState,
        scored: list[ScoredRollout],
        metrics: StepMetrics,
    ):
        """End the step in progress.

        Raises:
            Interrupted: a signal reached any rank; after a checkpoint.
            FloatingPointError: the newest weights are spoilt; before a checkpoint.
            UserFault: the judge or the data failed too often.
        """
        timer = self.run.phases.end_step()
        run_config = self.run.config.run
        num_iterations = self.run.config.optim.num_iterations
        metrics.same_on_ranks["learning_rate"] = self.learning_rate
        if state.roles.has_teacher:
            metrics.same_on_ranks["teacher/decay"] = self.run.teacher_decay(num_iterations - 1)
        # Before it `state.step` is the step in progress, from now on the steps that are done.
        state.step += 1
        if state.step == self.first_step + 1 and timer.peaks:
            peaks = ", ".join(f"{phase} {peak:.1f}" for phase, peak in timer.peaks.items())
            print0(f"peak memory of the first step, GiB: {peaks}")
        self.report(state, scored, metrics, timer)
        is_last, signals = state.step == self.run.max_steps, self.signals
        if is_last or self.evaluator.due(state.step):
            # Of an accumulated step the last batch is shown.
            for scored_rollout in {rollout.task.name: rollout for rollout in scored}.values():
                self.logger.pictures(state.step, scored_rollout, state.policy)
            if not signals.agreed:
                self.evaluator(state, self.logger)
        if is_last or signals.agreed or state.step % run_config.save_steps == 0:
            if scored:  # empty in supervised training
                check_finite_log_probs(state.policy, scored, self.run.config.optim.micro_batch_size)
            save_load.save(
                run_config.output_dir,
                state,
                self.run.flags,
                run_config.save_total_limit,
                self.run.ranks.is_main,
            )
        if signals.agreed:
            # When one rank exits, torchrun ends the others, which may still be writing.
            gather_objects(None)
            raise Interrupted(f"{signals.agreed}, after step {state.step}")
        self.learning_rate = state.scheduler.get_last_lr()[0]
        self.run.phases.begin_step()
        self.step_began = time.perf_counter()  # evaluations and checkpoints are in no step's time

    def report(
        self,
        state: save_load.RunState,
        scored: list[ScoredRollout],
        metrics: StepMetrics,
        timer: PhaseTimer,
    ):
        """Log the step. Raises UserFault on all ranks if the judge or the data failed too often."""
        run, failed_frac = self.run, "judge/failed_frac"
        for scored_rollout in scored:
            metrics.add_rollout(scored_rollout, self.run.config.rollout.resample_equal_groups > 0)
            self.logger.rollouts(state.step - 1, scored_rollout)
            metrics.add_mixture(run.sampler.mixture, scored_rollout.rollout.batch.index)
        if run.rewards.judge:
            num_asked, metrics.judge_reasons = run.rewards.judge.take_failures()
            metrics.add_mean(failed_frac, metrics.judge_reasons.total(), num_asked)
        metrics.interrupt = self.signals.received
        # Signals travel with the metrics, so they need no collective of their own.
        all_metrics = gather_objects(metrics)
        self.signals.agree([m.interrupt for m in all_metrics])
        values = reduce_metrics(all_metrics, {task.name: task.loss_weight for task in state.tasks})
        values |= timer.metrics(sum(m.num_tokens for m in all_metrics))
        for name in run.data.damaged.add(name for m in all_metrics for name in m.damaged):
            print0(f"left out, another sample in its place: {name}")
        if run.data.damaged.names:
            values["data/damaged"] = len(run.data.damaged.names)
        values |= state.roles.drift()
        first = main_metrics(values, [task.name for task in state.tasks], bool(scored))
        self.logger.scalars(values | first, state.step)
        self.show(state, scored, values)
        if run.rewards.judge:
            failed = sum(m.mean_totals[failed_frac] for m in all_metrics)
            num_judged = sum(m.mean_counts[failed_frac] for m in all_metrics)
            if failed:
                reasons = sum((m.judge_reasons for m in all_metrics), Counter())
                print0(f"step {state.step}: {failure_sentence(failed, num_judged, reasons)}")
            run.rewards.judge_failures.add(failed, num_judged)
        run.data.damaged.check()

    def show(
        self, state: save_load.RunState, scored: list[ScoredRollout], values: dict[str, float]
    ):
        """Advance the bar; print a line each --logging_steps, and a step without a signal."""
        # {task: {reward component: whether it counts}}
        components = {task.name: {} for task in state.tasks}
        for each in scored:
            components[each.task.name] = {
                name: bool(each.task.reward_weights.get(name)) for name in each.outcome.rewards
            }
        words = {"reward": "reward_mean"} if scored else {"loss": "loss"}
        figures = [
            f"{task} {word} {values[f'{task}/{metric}']:.3f}"
            for task in components
            for word, metric in words.items()
            if f"{task}/{metric}" in values
        ]
        self.progress.set_postfix_str(", ".join(figures))
        self.progress.update()
        self.unlogged.append(values)
        self.unlogged_seconds += time.perf_counter() - self.step_began
        if state.step % self.run.config.run.logging_steps == 0 or state.step == self.run.max_steps:
            means = mean_values(self.unlogged) | dict(learning_rate=values["learning_rate"])
            seconds = self.unlogged_seconds / len(self.unlogged)
            print0(step_line(state.step, self.run.max_steps, means, components, seconds))
            self.unlogged, self.unlogged_seconds = [], 0.0
        # Told once: later steps count, and the summary says how many.
        if no_group_has_signal(values, components):
            self.num_without_update += 1
            if self.num_without_update == 1:
                print0(f"step {state.step}: {NO_UPDATE}")

    def summary(self) -> str | None:
        """Return a sentence on the steps in which no group's rewards differed; None without any."""
        if not self.num_without_update:
            return None
        num_steps = self.run.state.step - self.first_step
        return f"{self.num_without_update} of {num_steps} steps changed no weight: {EQUAL_REWARDS}"
