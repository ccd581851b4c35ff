"""Policy, EMA teacher and reference as three sets of the trainable weights over one frozen base."""

import contextlib

import torch

ROLES = ("policy", "teacher", "reference")


class Roles:
    """Three roles of one model.

    The model's own parameters are the policy. Teacher and reference are float32 copies; `use(name)`
    points the parameters at a copy for the length of a `with` block, without gradient and without
    moving a byte.

    Args:
        trainable: {name: parameter}, all float32 (a bf16 average at decay 0.999 would never move).

    Raises:
        ValueError: a parameter that is not float32, or none at all.
    """

    def __init__(self, trainable: dict[str, torch.nn.Parameter]):
        if not trainable:
            raise ValueError("no trainable parameters")
        for name, parameter in trainable.items():
            if parameter.dtype != torch.float32:
                raise ValueError(f"{name} is {parameter.dtype}; trainable weights must be float32")
        self.trainable = dict(trainable)
        self.banks = {
            role: {n: p.detach().clone() for n, p in trainable.items()}
            for role in ("teacher", "reference")
        }
        self.active = "policy"
        for parameter in self.trainable.values():
            parameter.register_hook(self._assert_policy)

    def _assert_policy(self, gradient):
        # A recomputed (checkpointed) forward inside a role would silently use the role's weights.
        assert self.active == "policy", f"backward ran inside roles.use({self.active!r})"
        return gradient

    @contextlib.contextmanager
    def use(self, name: str):
        """Let the model compute with the weights of a role, without gradient."""
        if name not in ROLES:
            raise ValueError(f"role {name!r} is unknown; known: {', '.join(ROLES)}")
        assert self.active == "policy", f"roles.use({name!r}) inside roles.use({self.active!r})"
        own = {n: p.data for n, p in self.trainable.items()}
        self.active = name
        try:
            if name != "policy":
                for n, p in self.trainable.items():
                    p.data = self.banks[name][n]
            with torch.no_grad():
                yield
        finally:
            for n, p in self.trainable.items():
                p.data = own[n]
            self.active = "policy"

    @torch.no_grad()
    def update_teacher(self, decay: float):
        """teacher <- decay teacher + (1 - decay) policy; once after each optimizer step."""
        assert self.active == "policy"
        teacher = self.banks["teacher"]
        torch._foreach_lerp_(
            [teacher[n] for n in self.trainable],
            [p.data for p in self.trainable.values()],
            1 - decay,
        )

    @torch.no_grad()
    def distance(self, a: str, b: str) -> float:
        """RMS difference of two roles' trainable weights, relative to the reference's RMS."""
        weights = {"policy": self.trainable, **self.banks}
        left, right, reference = (
            [weights[role][n].detach() for n in self.trainable] for role in (a, b, "reference")
        )

        def norm(tensors):
            return torch.stack(torch._foreach_norm(tensors)).norm().item()

        return norm(torch._foreach_sub(left, right)) / norm(reference)

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """{"teacher": .., "reference": ..}: the banks; the policy is the model itself."""
        return {role: {n: t.clone() for n, t in bank.items()} for role, bank in self.banks.items()}

    def load_state_dict(self, state):
        """Fill the banks. Raises ValueError if a name is missing or unexpected."""
        for role, bank in self.banks.items():
            if set(state[role]) != set(bank):
                raise ValueError(
                    f"{role} bank: names differ: {sorted(set(state[role]) ^ set(bank))[:5]}"
                )
            for name, tensor in bank.items():
                tensor.copy_(state[role][name])
