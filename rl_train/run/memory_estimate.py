"""GPU memory that a run holds at its start."""

from collections.abc import Iterable

from rl_train.policies.base import Policy
from rl_train.roles import COPIES

GIB = 2**30


def standing_memory(policy: Policy, copies: Iterable[str] = COPIES) -> dict[str, int]:
    """Return {part: bytes} that a run holds on each GPU at any batch size."""
    weights = sum(parameter.nbytes for parameter in policy.trainable.values())
    base = sum(parameter.nbytes for parameter in policy.model.parameters()) - weights
    trained = {"trainable weights": 1} | ({" and ".join(copies): len(copies)} if copies else {})
    # AdamW's two moments and the gradient, each as large as the weights.
    trained |= {"optimizer": 2, "gradients": 1}
    return {"frozen base": base} | {part: n * weights for part, n in trained.items()}
