"""Policy, EMA teacher and reference as three sets of the trainable weights over one frozen base."""

import contextlib
from collections.abc import Iterable

import torch

COPIES = ("teacher", "reference")
# Fraction of a run's updates after which half of a change of the policy has reached the teacher
TEACHER_HALF_LIFE = 0.1


def ema_decay_at(update: int, half_life_updates: float) -> float:
    """Return the teacher's decay at an update, of which 0 is the run's first.

    The decay is warmed up, so that the teacher soon leaves the initial weights: until about 1.4
    half-lives the teacher is the mean of all policies so far. A slower warm-up, as the common
    (1 + t) / (10 + t), would last until 13 half-lives: beyond the end of a run at the default.

    Args:
        half_life_updates: updates after which half of a change of the policy has arrived.
    """
    return min(0.5 ** (1 / half_life_updates), (1 + update) / (2 + update))


def offloaded_copy(weight: torch.Tensor) -> torch.Tensor:
    """Return a copy in CPU memory, page-locked if a GPU is to read it."""
    copy = torch.empty(weight.shape, dtype=weight.dtype, pin_memory=weight.is_cuda)
    return copy.copy_(weight)


class Roles:
    """Three roles of one model, whose own parameters are the policy.

    Teacher and reference are float32 copies, at which `use(name)` points the parameters.

    Args:
        trainable: {name: parameter}, all float32 (a bf16 average at decay 0.999 would never move).
        copies: the roles beside the policy; without "teacher" nothing is averaged.
        offload: whether copies lie in CPU memory, and on the GPU only while they are used.

    Raises:
        ValueError: a parameter is not float32.
    """

    def __init__(
        self,
        trainable: dict[str, torch.nn.Parameter],
        copies: Iterable[str] = COPIES,
        offload: bool = False,
    ):
        for name, parameter in trainable.items():
            if parameter.dtype != torch.float32:
                raise ValueError(f"{name} is {parameter.dtype}; trainable weights must be float32")
            # Runs at every backward that reaches the parameter.
            parameter.register_hook(self._assert_policy)
        self.trainable, self.active = dict(trainable), "policy"
        new_copy = offloaded_copy if offload else torch.clone
        self.copies = {
            role: {n: new_copy(p.detach()) for n, p in trainable.items()} for role in copies
        }

    @property
    def has_teacher(self) -> bool:
        return "teacher" in self.copies

    def _assert_policy(self, gradient: torch.Tensor) -> torch.Tensor:
        # A recomputed (checkpointed) forward inside a role would silently use the role's weights.
        assert self.active == "policy", f"backward ran inside roles.use({self.active!r})"
        return gradient

    @contextlib.contextmanager
    def use(self, name: str):
        """Let the model compute with the weights of a role, without gradient."""
        if name not in ("policy", *self.copies):
            known = ", ".join(("policy", *self.copies))
            raise ValueError(
                f"role {name!r} is unknown; known: {known}. The tasks' classes determine which "
                "copies are kept: asks_teacher, asks_reference"
            )
        assert self.active == "policy", f"roles.use({name!r}) inside roles.use({self.active!r})"
        if name == "policy":  # nothing to exchange, which takes a millisecond for 600 tensors
            with torch.no_grad():
                yield
            return
        policy_weights = {n: p.data for n, p in self.trainable.items()}
        self.active = name
        try:
            # Pointers are exchanged; numbers are copied only of an offloaded role.
            self._point_at(self._on_device(name))
            with torch.no_grad():
                yield
        finally:
            self._point_at(policy_weights)
            self.active = "policy"

    def _on_device(self, role: str) -> dict[str, torch.Tensor]:
        """Return a role's weights where the policy's are: themselves, or copies if offloaded."""
        if role == "policy":
            return {name: parameter.data for name, parameter in self.trainable.items()}
        return {
            name: weight.to(self.trainable[name].device, non_blocking=True)
            for name, weight in self.copies[role].items()
        }

    def _point_at(self, weights: dict[str, torch.Tensor]):
        for name, parameter in self.trainable.items():
            parameter.data = weights[name]

    @torch.no_grad()
    def update_teacher(self, decay: float):
        """Set teacher <- decay * teacher + (1 - decay) * policy, if there is a teacher."""
        assert self.active == "policy"
        if not self.has_teacher:
            return
        teacher, policy = self._on_device("teacher"), self._on_device("policy")
        # A few kernels for all tensors together.
        torch._foreach_lerp_(
            [teacher[name] for name in policy], [policy[name] for name in policy], 1 - decay
        )
        for name, weight in self.copies["teacher"].items():
            if weight.device != teacher[name].device:  # offloaded
                weight.copy_(teacher[name])

    @torch.no_grad()
    def distance(self, a: str, b: str) -> float:
        """Return the RMS difference of two roles' weights, relative to the reference's RMS."""
        roles = [self._on_device(role) for role in (a, b, "reference")]
        weights_a, weights_b, reference = ([role[n] for n in self.trainable] for role in roles)
        difference = torch._foreach_sub(weights_a, weights_b)
        # The norm of all tensors' norms is that of all their elements.
        norms = [torch.stack(torch._foreach_norm(x)).norm().item() for x in (difference, reference)]
        return norms[0] / norms[1]

    def drift(self) -> dict[str, float]:
        """Return {metric: `distance`} of the teacher; empty without one."""
        if not self.has_teacher:
            return {}
        others = {
            "teacher/distance_to_reference": "reference",
            "teacher/distance_to_policy": "policy",
        }
        return {metric: self.distance("teacher", other) for metric, other in others.items()}
