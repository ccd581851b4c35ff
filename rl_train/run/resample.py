"""Further prompts in the place of those whose groups have no signal (--resample_equal_groups).

Which sample stands in for which follows from (seed, step, position in the step, round) alone. So
no rank needs to know of another's groups, ranks may go through different numbers of rounds, and a
resumed run takes the same samples.
"""

from collections.abc import Iterator

from rl_train.data.loader import Batches, StepSampler
from rl_train.policies.base import Features, Policy
from rl_train.rollout import Batch
from rl_train.run.step import Step


class Resampler:
    """Yields a batch, and then the samples that stand in for those without a signal.

    Args:
        batches: reads the further samples, in this process.
        num_rounds: at most; 0: nothing is replaced.
    """

    def __init__(self, sampler: StepSampler, batches: Batches, policy: Policy, num_rounds: int):
        self.sampler, self.batches, self.policy = sampler, batches, policy
        self.num_rounds = num_rounds

    def rounds(
        self, step: Step, number: int, batch: Batch, features: Features
    ) -> Iterator[tuple[Batch, Features]]:
        """Yield (batch, its features), then those of samples in the place of its equal groups.

        Before each next round the caller adds its rollout of what was yielded to `step`.

        Args:
            number: of the step in progress in the run.
        """
        yield batch, features
        if not self.num_rounds:
            return
        sampler, size = self.sampler, len(batch)
        first = (step.num_batches - 1) * sampler.world_size * size + sampler.rank * size
        positions = list(range(first, first + size))  # in the step, of the groups of a round
        for further in sampler.further_indices(number, self.num_rounds):
            scored = step.rollouts[-1]
            scored.replaced = {
                group
                for group, differs in enumerate(scored.groups_that_differ)
                if not differs and further[positions[group]] >= 0
            }
            if not scored.replaced:
                return
            positions = [positions[group] for group in sorted(scored.replaced)]
            batch = self.batches[further[positions].tolist()]
            yield batch, self.policy.encode(batch)
