"""Further prompts in the place of those whose groups have no signal (--resample_equal_groups).

Which sample stands in for which follows from (seed, step, position in the step, round) alone. So
no rank needs to know of another's groups, ranks may go through different numbers of rounds, and a
resumed run takes the same samples.
"""

from collections.abc import Iterator

from torch.utils.data import DataLoader

from rl_train.checkpoint.save_load import RunState
from rl_train.data.loader import StepSampler
from rl_train.policies.base import Features
from rl_train.rollout import Batch
from rl_train.run.step import Step
from rl_train.tasks.base import Task


class Resampler:
    """Gives each task a batch, and then the samples that stand in for those without a signal.

    Args:
        loader: of the run, whose data set reads the further samples, in this process.
        num_rounds: at most; 0: nothing is replaced.
    """

    def __init__(self, sampler: StepSampler, loader: DataLoader, state: RunState, num_rounds: int):
        self.sampler, self.loader, self.state = sampler, loader, state
        self.num_rounds = num_rounds

    def rounds(
        self, step: Step, batch: Batch, features: Features
    ) -> Iterator[list[tuple[Task, Batch, Features]]]:
        """Yield [(task, batch, its features), ..] of all tasks.

        With --resample_equal_groups yield one task at a time, each followed by batches that replace
        its groups of equal rewards. Before it takes the next one, the caller adds its rollouts of
        what was yielded to `step`.
        """
        step.num_batches += 1
        if not self.num_rounds:
            yield [(task, batch, features) for task in self.state.tasks]
            return
        for task in self.state.tasks:
            yield [(task, batch, features)]
            for further in self.further_batches(step, len(batch)):
                yield [(task, further, self.state.policy.encode(further))]

    def further_batches(self, step: Step, size: int) -> Iterator[Batch]:
        """Yield the samples in the place of equal groups of the newest rollout, round by round.

        Args:
            size: samples of the batch that was rolled out first.
        """
        sampler = self.sampler
        first = (step.num_batches - 1) * sampler.world_size * size + sampler.rank * size
        positions = list(range(first, first + size))  # in the step, of the groups of a round
        for further in sampler.further_indices(self.state.step, self.num_rounds):
            scored = step.rollouts[-1]
            scored.replaced = {
                group
                for group, differs in enumerate(scored.groups_that_differ)
                if not differs and further[positions[group]] >= 0
            }
            if not scored.replaced:
                return
            positions = [positions[group] for group in sorted(scored.replaced)]
            yield self.loader.dataset[further[positions].tolist()]
