"""Train a model by supervised examples, in the prompts in which it is then reinforced.

    python -m tools.train_supervised --model_path M --data_dir D --output_dir O     # one process
    NPROC=8 bash run_rl_train.sh supervised --model_path M ...                      # eight GPUs
    python -m tools.train_supervised --tasks point_answers --model_path QWEN --sam_path SAM ...

As Sa2VA's own: cross-entropy of the answers and 2.0 BCE + 0.5 Dice of the masks that they prompt,
on the same prompts, encoding, LoRA and weights as in reinforcement learning. With these deviations:
cross-entropy is the mean of all answers' tokens of a step (not of each process's), masks count with
all their pixels, a sample is one turn about one region, no dropout, and the LLM's embeddings train
only if --train names them. See docs/supervised.md.

Evaluations, checkpoints, --resume, curves and signals are those of `rl_train.train`.
"""

from collections import Counter

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from rl_train import distributed
from rl_train.cli import Program, run_program
from rl_train.curves import Clock, Tally
from rl_train.data.loader import steps
from rl_train.distributed import GradientAverage
from rl_train.parts import Parts
from rl_train.supervised_config import SUPERVISED_PARTS
from rl_train.tasks.supervised import SUPERVISED, Examples
from rl_train.train import main, update

PROGRAM = Program(
    "python -m tools.train_supervised",
    "Supervised training of captions and masks, or of points; one process per GPU (torchrun).",
    SUPERVISED_PARTS,
    SUPERVISED,
    ("region_captions", "referring_segmentation"),
)


def train(parts: Parts, loader, end_of_step, average=GradientAverage):
    """The loop. Letters: B samples per batch, one example of each a task, T tokens of an answer.

    Args:
        average: in place of `GradientAverage`.
    """
    state, config = parts.state, parts.config
    policy, optim = state.policy, config.optim
    objective = average(SupervisedLoss(policy), policy.trainable)
    for batches in steps(loader, optim.gradient_accumulation_steps):
        if state.step >= parts.max_steps:
            break
        clock, tally = Clock(policy.device), Tally()
        work, several = [], len(batches) > 1
        for batch in batches:  # B samples
            with torch.set_grad_enabled(not several):
                features = policy.encode(batch)  # with gradient, if an encoder trains
            work.append((batch, features, examples_of(parts, batch, features)))
            tally.damaged += batch.damaged
            tally.add_shares(parts.sampler.shares, batch.index)
            clock("encode")
        totals = step_totals(work, parts.ranks.world_size)
        for number, (batch, features, examples) in enumerate(work, 1):
            last = number == len(work)
            if several and policy.encoders_train:  # here, where but one's activations are held
                features = policy.encode(batch)
            with objective.averaging(last):
                loss, statistics = objective(features, examples, totals, last=last)
                loss.backward()
            for task, mine in statistics.items():
                tally.add_update(task, mine, on_policy=False)
        update(state, objective, tally, optim.max_grad_norm)
        end_of_step(state, [], tally, clock)


def examples_of(parts: Parts, batch, features) -> list[Examples]:
    """Every task's examples of a batch; what is drawn follows from (seed, step, task, sample)."""
    state, policy, found = parts.state, parts.state.policy, []
    longest = parts.config.rollout.max_completion_length
    for number, task in enumerate(state.tasks):
        seeds = [[parts.config.run.seed, state.step, number, index] for index in batch.index]
        with torch.no_grad():
            prompts, answers = task.examples(
                batch, features, list(map(np.random.default_rng, seeds))
            )
        rows = [torch.tensor(answer[:longest]) for answer in answers]
        ids = pad_sequence(rows, True, policy.pad_id).to(policy.device)  # (B, T)
        lengths = torch.tensor(list(map(len, rows)), device=policy.device)
        valid = torch.arange(ids.shape[1], device=policy.device) < lengths[:, None]
        found.append(Examples(task, batch, prompts, ids, valid))
    return found


def step_totals(work, num_ranks: int) -> dict[str, dict[str, float]]:
    """{task: {"tokens", "rows"}} of a step: counts over all ranks, divided by their number."""
    counts = Counter()
    for *_, examples in work:
        for one in examples:
            counts[one.task.name, "tokens"] += int(one.valid.sum())
            counts[one.task.name, "rows"] += len(one.ids)
    total = distributed.all_sum(counts)
    names = dict.fromkeys(name for name, _ in counts)
    return {n: {k: total[n, k] / num_ranks for k in ("tokens", "rows")} for n in names}


class SupervisedLoss(nn.Module):
    """The loss of a batch as a module of what trains, as DistributedDataParallel wants it."""

    def __init__(self, policy):
        super().__init__()
        self.trainable = nn.ParameterList(policy.trainable.values())
        self.policy = policy

    def forward(self, features, examples: list[Examples], totals, last: bool):
        """(loss of all tasks' examples, normalised over the whole step; {task: statistics}).

        With `last` it holds every trainable, as DistributedDataParallel wants it of a backward.
        Statistics are those of `objective.MicroBatchLoss`.
        """
        loss, statistics = 0.0, {}
        for one in examples:
            task, total = one.task, totals[one.task.name]
            scores = self.policy.score_answers(features, one.prompts, one.ids, one.valid)
            text = -scores.logp.sum() / total["tokens"]
            terms, more = task.terms(one, features, scores, total["rows"])
            of_task = text + sum(terms)
            loss = loss + task.weight * of_task
            tokens = one.valid.sum()
            entropy = ((scores.entropy * one.valid).sum(), tokens)
            own = dict(loss=of_task.detach(), text_loss=text.detach(), entropy=entropy)
            statistics[task.name] = own | more
        if last:
            loss = loss + 0 * sum(parameter.view(-1)[0] for parameter in self.trainable)
        return loss, statistics


if __name__ == "__main__":
    run_program(lambda: main(program=PROGRAM, loop=train))
