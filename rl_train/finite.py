"""Which of a model's outputs were not finite, known without waiting for the GPU at each."""

import torch


class Watch:
    """Remembers the names of outputs of which any number was NaN or infinite.

    A model that diverged answers all prompts alike, so that its rewards are equal and no loss is
    computed: what it said itself has to be looked at.
    """

    def __init__(self):
        self.seen: dict[str, torch.Tensor] = {}  # {name: () bool on its device}

    @torch.no_grad()
    def __call__(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """`values` itself, looked at."""
        bad = ~values.isfinite().all()
        self.seen[name] = self.seen[name] | bad if name in self.seen else bad
        return values

    def take(self) -> list[str]:
        """The names since the last call."""
        names = [name for name, bad in self.seen.items() if bad]
        self.seen.clear()
        return names
