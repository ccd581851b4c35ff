"""Policy, EMA teacher and reference as three sets of the trainable weights over one frozen base."""

import contextlib
from collections.abc import Iterable, Iterator

import torch

COPIES = ("teacher", "reference")
# Tensors in each torch._foreach call of `update_teacher` and `distance`: few kernels, and no more
# tensors of an offloaded role are on the GPU at a time
CHUNK_SIZE = 64
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

    Teacher and reference are float32 copies, at which `use(name)` points the parameters, or at
    copies of them on the GPU.

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
                f"role {name!r} is unknown; known: {known}. Teacher and reference are kept if "
                "the class of a task says asks_teacher"
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
            self._point_at(dict(zip(self.trainable, self._on_device(name, self.trainable))))
            with torch.no_grad():
                yield
        finally:
            self._point_at(policy_weights)
            self.active = "policy"

    def _on_device(self, role: str, names: Iterable[str]) -> list[torch.Tensor]:
        """Return a role's weights where the policy's are: themselves, or copies if offloaded."""
        if role == "policy":
            return [self.trainable[name].data for name in names]
        return [
            self.copies[role][name].to(self.trainable[name].device, non_blocking=True)
            for name in names
        ]

    def _chunks_of_names(self) -> Iterator[list[str]]:
        """Yield the names of all weights, CHUNK_SIZE at a time."""
        names = list(self.trainable)
        for start in range(0, len(names), CHUNK_SIZE):
            yield names[start : start + CHUNK_SIZE]

    def _point_at(self, weights: dict[str, torch.Tensor]):
        for name, parameter in self.trainable.items():
            parameter.data = weights[name]

    @torch.no_grad()
    def update_teacher(self, decay: float):
        """Set teacher <- decay * teacher + (1 - decay) * policy, if there is a teacher."""
        assert self.active == "policy"
        if not self.has_teacher:
            return
        for names in self._chunks_of_names():
            teacher = self._on_device("teacher", names)
            torch._foreach_lerp_(teacher, self._on_device("policy", names), 1 - decay)
            for name, weight in zip(names, teacher):
                if weight is not self.copies["teacher"][name]:  # offloaded
                    self.copies["teacher"][name].copy_(weight)

    @torch.no_grad()
    def distance(self, a: str, b: str) -> float:
        """Return the RMS difference of two roles' weights, relative to the reference's RMS."""
        differences, references = [], []  # norms of each tensor
        for names in self._chunks_of_names():
            weights_a, weights_b = (self._on_device(role, names) for role in (a, b))
            differences += torch._foreach_norm(torch._foreach_sub(weights_a, weights_b))
            references += torch._foreach_norm(self._on_device("reference", names))
        # The norm of all tensors' norms is that of all their elements.
        norms = [torch.stack(each).norm().item() for each in (differences, references)]
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
