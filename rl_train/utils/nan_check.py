"""Remember which of a model's outputs were not finite, without waiting for the GPU at each."""

import torch


class NanWatcher:
    """Remembers the names of outputs of which any number was NaN or infinite.

    A model that diverged answers all prompts alike, so that its rewards are equal and no loss is
    computed: its outputs themselves have to be checked.
    """

    def __init__(self, seen: dict[str, torch.Tensor] | None = None):
        self.seen: dict[str, torch.Tensor] = dict(seen or {})  # {name: () bool on its device}

    @torch.no_grad()
    def __call__(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Check `values` and return them."""
        bad = ~values.isfinite().all()  # () bool, not read here: reading waits for the GPU
        self.seen[name] = self.seen[name] | bad if name in self.seen else bad
        return values

    def take(self) -> "NanWatcher":
        """Return what was seen since the last call; only its `names` wait for the GPU."""
        watcher, self.seen = NanWatcher(self.seen), {}
        return watcher

    def join(self, other: "NanWatcher"):
        """Add what another one saw."""
        for name, bad in other.seen.items():
            self.seen[name] = self.seen.get(name, bad) | bad

    def names(self) -> list[str]:
        """Return the names of outputs of which a number was not finite."""
        return [name for name, bad in self.seen.items() if bad]
