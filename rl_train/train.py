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
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from rl_train import cli
from rl_train.checkpoint import save_load
from rl_train.checkpoint.record import FINAL_MODEL
from rl_train.data.loader import batch_loader
from rl_train.data.workers import reporting_dead_workers
from rl_train.distributed import process_group
from rl_train.distributed.process_group import (
    distributed_data_parallel,
    gather_objects,
    print0,
    sync_gradients,
)
from rl_train.evaluation.evaluate import TRAIN_BATCHES_PER_EVAL_BATCH, EvalSpec, Evaluator
from rl_train.evaluation.table import before_after_table
from rl_train.export.merge import export
from rl_train.grpo import group_advantages
from rl_train.loggers.metrics import StepMetrics
from rl_train.loggers.tensorboard import RunLogger
from rl_train.loggers.text_log import TextLog
from rl_train.loss import MicroBatchLoss, join_other_ranks, reference_scores
from rl_train.rewards.combine import combine
from rl_train.run.build import Run, roles_to_keep
from rl_train.run.error_report import ErrorReporter
from rl_train.run.messages import measured_role, next_commands
from rl_train.run.resample import Resampler
from rl_train.run.signals import Interrupted, SignalHandler
from rl_train.run.start import claim_output_dir, start_run
from rl_train.run.step import Step
from rl_train.run.step_callback import StepCallback
from rl_train.utils.command_line import run_program


def train(run: Run, loader: DataLoader, end_step: StepCallback):
    """Train on all batches of the loader. B prompts a batch, G samples each, N = B*G, T tokens."""
    config, state, policy, roles = run.config, run.state, run.state.policy, run.state.roles
    optim, num_ranks = config.optim, run.ranks.world_size
    G, T = config.rollout.num_generations, config.rollout.max_completion_length
    ddp = distributed_data_parallel(MicroBatchLoss(policy, config.loss, T))
    step = Step(config.loss, num_ranks)
    resampler = Resampler(run.sampler, loader, state, config.rollout.resample_equal_groups)
    for loader_batch in loader:  # B samples
        # They stand in for pixel_values: computed once per image, for all rows, tasks and roles.
        features = policy.encode(loader_batch)
        policy.unshard_base(vision=config.rollout.resample_equal_groups > 0)  # with --fsdp
        # All tasks at once. With --resample_equal_groups one task a round, each followed by rounds
        # of samples in the place of those whose rewards are all equal.
        for task_batches in resampler.rounds(step, loader_batch, features):
            pending_rollouts = []
            # Loop 2 comes first: the captions that it asks of the teacher are then sampled together
            # with those of loop 1.
            for task, batch, image_features in reversed(task_batches):
                rng = run.rng(task, batch)  # from (seed, step, task, sample, generation) alone
                prompts = task.prompts(batch, image_features)  # B
                uniforms = rng.uniforms(T)
                with roles.use("policy"):  # no_grad, as every role
                    rollout = policy.sample(batch, image_features, prompts, G, T, uniforms)  # N
                    if task.action:  # beside the text
                        rollout.latents = task.action.draw(rollout, rng)
                reference = None
                if config.loss.kl_coef:
                    with roles.use("reference"):
                        reference = reference_scores(policy, task, rollout, optim.micro_batch_size)
                pending_rollouts.append(step.ask(task, rollout, reference))  # asks the teacher
            # In the order asked: while the first task's captions are scored, a GPU still computes
            # the masks that the last one asked for.
            outcomes = [pending.rewards() for pending in pending_rollouts]
            with_outcomes = list(zip(pending_rollouts, outcomes))
            for pending, outcome in reversed(with_outcomes):  # the first task first
                weights = pending.task.reward_weights
                training_reward = combine(outcome.rewards, weights, run.component_group_size)
                advantages = group_advantages(training_reward, G, config.loss.group_scale)  # (N,)
                step.add(pending, outcome, training_reward, advantages)
        if step.num_batches < optim.gradient_accumulation_steps:
            continue
        if step.prepare_update():  # False if all rewards of each group are equal
            for iteration in range(optim.num_iterations):
                num_micro_batches = step.count_micro_batches(optim.micro_batch_size)
                join_other_ranks(ddp, policy, num_micro_batches)  # with --fsdp
                for micro_batch in step.micro_batches(optim.micro_batch_size):
                    with sync_gradients(ddp, micro_batch.is_last):  # else ddp.no_sync()
                        # Log-probs with gradient, by a full forward: `Policy.score`.
                        loss, micro_batch.statistics = ddp(micro_batch)
                        loss.backward()
                clip_gradients(state, step.metrics, optim.max_grad_norm)
                state.optimizer.step()
                state.optimizer.zero_grad(set_to_none=True)
                roles.update_teacher(run.teacher_decay(iteration))
        state.scheduler.step()
        end_step(state, step.rollouts, step.metrics)
        step = Step(config.loss, num_ranks)


def clip_gradients(state: save_load.RunState, metrics: StepMetrics, max_norm: float):
    """Clip the averaged gradients to a global norm, and log the norms before clipping.

    Raises:
        FloatingPointError: on all ranks, naming what is not finite on any: losses or gradients.
    """
    trainable = state.policy.trainable
    norms = process_group.gradient_norms(trainable.values())  # one for each trainable
    faults = metrics.not_finite()
    for name, norm in zip(trainable, norms.tolist()):
        if not math.isfinite(norm):
            faults.append(f"gradient of {name} (norm {norm})")
    process_group.raise_on_any_rank(faults)
    squares = Counter()
    for name, norm in zip(trainable, norms.tolist()):
        squares[state.policy.group_of[name]] += norm**2
    total_norm = torch.linalg.vector_norm(norms)
    torch.nn.utils.clip_grads_with_norm_(trainable.values(), max_norm, total_norm)
    metrics.updates += 1
    metrics.same_on_ranks |= {f"grad_norm/{group}": math.sqrt(s) for group, s in squares.items()}


def train_and_evaluate(run: Run, signals: SignalHandler, loop: Callable = train):
    """Evaluate, train by `loop`, evaluate again, print both. Raises Interrupted after a signal."""
    signals.immediate = False
    config, state, data = run.config, run.state, run.config.data
    max_tokens = config.rollout.max_completion_length
    spec = EvalSpec(
        dataset=run.data.eval_set,
        batch_size=TRAIN_BATCHES_PER_EVAL_BATCH * config.rollout.batch_size,
        max_new_tokens=max_tokens,
        num_workers=data.num_workers,
        max_prompt_length=data.max_prompt_length,
        distractors=data.distractors,
        attribute_phrases=run.data.attribute_phrases,
        measure=state.tasks[0].measure,
    )
    with closing(
        RunLogger(config.run.output_dir, run.ranks, state.step, run.num_rollout_files)
    ) as logger:
        logger.overview([task.name for task in state.tasks], config.samples_answers)
        evaluator = Evaluator(
            spec, config.run, run.ranks, run.flags, signals, config.samples_answers
        )
        evaluator.measure_base(state, logger)
        if not roles_to_keep(config.task_classes, config.samples_answers):
            state.roles.copies.clear()  # the initial weights of a resumed run
        if state.step == run.max_steps:
            print0(f"nothing is left to train: the run is at step {state.step} of {run.max_steps}")
        if not signals.agreed and evaluator.missing(state.step):
            evaluator(state, logger)
        if not signals.agreed:
            loader = batch_loader(
                run.data.train_set,
                run.preprocessor(),
                run.sampler,
                data.num_workers,
                data.distractors,
                turns=max(task.turns for task in state.tasks),
            )
            end_step = StepCallback(run, logger, evaluator, signals)
            run.phases.time_calls(state.policy, state.tasks)
            with closing(end_step.progress):  # what is printed at the end stands below the bar
                run.phases.begin_step()
                loop(run, loader, end_step)
            if run.max_steps not in evaluator.values:  # resumed after its last step
                evaluator(state, logger)
        if signals.agreed:
            raise Interrupted(f"{signals.agreed}, in an evaluation of step {state.step}")
    output_dir = Path(config.run.output_dir)
    last, role = output_dir / f"checkpoint_step_{run.max_steps}", "policy"
    if config.run.merge_at_end != "none" and run.ranks.is_main:
        final = output_dir / FINAL_MODEL
        role = export(last, final, config.run.merge_at_end)
        print0(f"final model: {final} (the {role} of {last.name}, merged into its base)")
    file = output_dir / "evaluation" / f"step_{run.max_steps}.json"
    measured = measured_role(state.roles.has_teacher, file)
    before, after = evaluator.values[0], evaluator.values[run.max_steps]
    print0(before_after_table(before, after, role=measured))
    if sentence := end_step.summary():
        print0(sentence)
    print0(next_commands(config, last, role))
    gather_objects(None)  # torchrun may end the first rank, which exports, when others leave


def main(argv: list[str] | None = None, program: cli.EntryPoint = cli.GRPO, loop: Callable = train):
    """Train as the command line `argv` says, by the loop of a program."""
    ranks = process_group.init()
    config = cli.parse_together(argv, program)
    signals, reporter = SignalHandler(ranks.is_main), ErrorReporter(config, ranks)
    try:
        with TextLog() as text_log, reporter, signals.listening():
            with process_group.fail_together():
                run = start_run(config, ranks)
                claim_output_dir(run, text_log)
            reporter.run = run
            reporting_dead_workers(config.data.num_workers, train_and_evaluate, run, signals, loop)
    finally:
        process_group.close()


if __name__ == "__main__":
    run_program(main)
