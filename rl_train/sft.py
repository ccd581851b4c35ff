"""Train a model by supervised examples, in the prompts in which it is then reinforced.

    python -m rl_train.sft --model_path M --data_dir D --output_dir O   # one process
    NPROC=8 bash run_rl_train.sh supervised --model_path M ...          # eight GPUs
    python -m rl_train.sft --tasks point_answers --model_path QWEN --sam_path SAM ...

As Sa2VA's own: cross-entropy of the answers and 2.0 BCE + 0.5 Dice of the masks that they prompt,
on the same prompts, encoding, LoRA and weights as in reinforcement learning. With these deviations:
cross-entropy is the mean of all answers' tokens of a step (not of each process's), masks count with
all their pixels, a sample is one turn about one region unless --turns says 5, no dropout, and the
LLM's embeddings train only if --trainable_modules names them. See docs/your_checkpoint_and_data.md.

Evaluations, checkpoints, --resume, metrics and signals are those of `rl_train.train`.
"""

import itertools
from collections import Counter

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from rl_train.cli import EntryPoint
from rl_train.config.sft_config import SFT_CONFIG_CLASSES
from rl_train.data.loader import steps
from rl_train.distributed import process_group
from rl_train.distributed.process_group import distributed_data_parallel, sync_gradients
from rl_train.loggers.metrics import StepMetrics
from rl_train.policies.base import Features, Policy
from rl_train.rollout import Batch
from rl_train.run.build import Run
from rl_train.run.step_callback import StepCallback
from rl_train.tasks.sft_tasks import SFT_TASKS, Conversation, Examples
from rl_train.train import clip_gradients, main
from rl_train.utils.command_line import run_program
from sa2va_hf.to_device import to_device

SFT = EntryPoint(
    "python -m rl_train.sft",
    "Supervised training of captions and masks, or of points; one process per GPU (torchrun).",
    SFT_CONFIG_CLASSES,
    SFT_TASKS,
    ("region_captions", "referring_segmentation"),
)


def train(run: Run, loader: DataLoader, end_step: StepCallback):
    """Train on all batches of the loader.

    Letters: B samples per batch, one example of each a task, T tokens of an answer.
    """
    state, policy, optim = run.state, run.state.policy, run.config.optim
    ddp = distributed_data_parallel(SFTLoss(policy))
    for batches in steps(loader, optim.gradient_accumulation_steps):
        metrics, step_examples = StepMetrics(), []
        # One batch is encoded with gradient at once; of several, only in its own turn below.
        accumulates = len(batches) > 1
        for batch in batches:  # B samples
            with torch.set_grad_enabled(not accumulates):
                features = policy.encode(batch)  # with gradient, if an encoder trains
            step_examples.append(build_examples(run, batch, features))
            metrics.damaged += batch.damaged
            metrics.add_mixture(run.sampler.mixture, batch.index)
        run.phases.enter("update", waited_in="encode")
        totals = step_totals(step_examples, run.ranks.world_size)
        for number, examples in enumerate(step_examples, 1):
            is_last, features = number == len(step_examples), examples[0].features
            if accumulates and policy.encoders_train:
                # Encode again, now with gradient: the activations of one batch are held at a time.
                features = policy.encode(examples[0].batch)
            with sync_gradients(ddp, is_last):
                loss, statistics = ddp(features, examples, totals, last=is_last)
                loss.backward()
            for task_name, task_statistics in statistics.items():
                metrics.add_update(task_name, task_statistics, on_policy=False)
        clip_gradients(state, metrics, optim.max_grad_norm)
        state.optimizer.step()
        state.optimizer.zero_grad(set_to_none=True)
        state.scheduler.step()
        end_step(state, [], metrics)


def build_examples(run: Run, batch: Batch, features: Features) -> list[Examples]:
    """Build every task's examples; random numbers follow from (seed, step, task, sample)."""
    state, policy, all_examples = run.state, run.state.policy, []
    max_tokens = run.config.rollout.max_completion_length
    for number, task in enumerate(state.tasks):
        rngs = [
            np.random.default_rng([run.config.run.seed, state.step, number, index])
            for index in batch.index
        ]
        with torch.no_grad():
            prompts, answers = task.examples(batch, features, rngs)
        # Cut as a sampled answer would be; of several turns each answer is short enough.
        conversations = [
            answer
            if isinstance(answer, Conversation)
            else Conversation.of_answer(answer[:max_tokens])
            for answer in answers
        ]
        rows = [torch.tensor(conversation.ids) for conversation in conversations]
        ids = pad_sequence(rows, True, policy.pad_id)  # (B, T)
        lengths = torch.tensor([len(row) for row in rows])
        valid = torch.arange(ids.shape[1]) < lengths[:, None]  # (B, T)
        taught = pad_sequence([torch.tensor(c.is_taught) for c in conversations], True)
        num_turns = [conversation.num_turns for conversation in conversations]
        all_examples.append(Examples(task, batch, features, prompts, ids, valid, taught, num_turns))
    return all_examples


def step_totals(
    step_examples: list[list[Examples]], num_ranks: int
) -> dict[tuple[str, str], float]:
    """Return {(task, "tokens" or "rows"): count of a step over all ranks / number of ranks}."""
    counts = Counter()
    for examples in itertools.chain.from_iterable(step_examples):
        counts[examples.task.name, "tokens"] += int(examples.taught.sum())
        counts[examples.task.name, "rows"] += sum(examples.num_turns)
    return {key: total / num_ranks for key, total in process_group.all_sum(counts).items()}


class SFTLoss(torch.nn.Module):
    """The loss of a batch as a module, as DistributedDataParallel needs it."""

    def __init__(self, policy: Policy):
        super().__init__()
        self.trainable = torch.nn.ParameterList(policy.trainable.values())
        self.policy = policy

    def forward(
        self,
        features: Features,
        all_examples: list[Examples],
        totals: dict[tuple[str, str], float],
        last: bool,
    ) -> tuple[torch.Tensor, dict[str, dict]]:
        """Return (loss of all tasks' examples, normalised over the step; {task: statistics}).

        If `last`, connect every trainable parameter to the loss so that DDP reduces all of them.
        Statistics are those of `loss.MicroBatchLoss`.
        """
        loss, statistics = 0.0, {}
        for examples in all_examples:
            task, ids, valid = examples.task, examples.ids, examples.valid
            scores = self.policy.score_answers(features, examples.prompts, ids, valid)
            taught = to_device(examples.taught, scores.logp.device)
            text_loss = -(scores.logp * taught).sum() / totals[task.name, "tokens"]
            loss_terms, task_statistics = task.loss_terms(
                examples, features, scores, totals[task.name, "rows"]
            )
            task_loss = text_loss + sum(loss_terms)
            loss = loss + task.loss_weight * task_loss
            statistics[task.name] = {
                "loss": task_loss.detach(),
                "text_loss": text_loss.detach(),
                "entropy": ((scores.entropy * taught).sum(), examples.taught.sum()),
                **task_statistics,
            }
        if last:
            loss = process_group.touch_all_params(loss, self.trainable)
        return loss, statistics


if __name__ == "__main__":
    run_program(lambda: main(program=SFT, loop=train))
