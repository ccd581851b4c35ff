"""Losses of the demo's warm start that the drawn scenes make possible."""

import torch
import torch.nn.functional as F

from tools.demo_scenes import ATTRIBUTES

NOISE = 0.25  # of NORM, in each dimension of a disturbed code, at most
NORM = 4.0  # of the code of one value; that of an object, the sum of four, has a mean square of 1


def balanced_mask_loss(logits, masks):
    """Mean BCE with the region's and the background's pixels at equal weight, plus Dice.

    From random weights the usual loss would settle on empty masks, since regions cover a few per
    cent of an image.

    Args:
        logits: (n, h, w).
        masks: n arrays (H, W) bool, resized to the logits' size.
    """
    size = logits.shape[-2:]
    target = torch.stack(
        [F.interpolate(torch.from_numpy(m)[None, None].float(), size=size)[0, 0] for m in masks]
    )
    target = target.to(logits.device).flatten(1)
    bce = F.binary_cross_entropy_with_logits(logits.flatten(1), target, reduction="none")
    inside = (bce * target).sum(1) / target.sum(1).clamp(min=1)
    outside = (bce * (1 - target)).sum(1) / (1 - target).sum(1)
    probability = logits.sigmoid().flatten(1)
    dice = 1 - (2 * (probability * target).sum(1) + 1) / (probability.sum(1) + target.sum(1) + 1)
    return (inside + outside + 2 * dice).mean()


class Codes:
    """A fixed vector for each value of each attribute, orthogonal to all others.

    An object's code is the sum of its values' four. Which object a prompt embedding z means is
    then decided by z alone, whatever its scale: the one with the largest product z . code.
    """

    def __init__(self, prompt_size: int, seed: int, device):
        generator = torch.Generator().manual_seed(seed)
        vectors = torch.randn(prompt_size, prompt_size, generator=generator)
        vectors = NORM * torch.linalg.qr(vectors).Q.to(device)
        number = sum(map(len, ATTRIBUTES.values()))
        assert number <= prompt_size, "more values than dimensions"
        values = [(name, value) for name, values in ATTRIBUTES.items() for value in values]
        self.of_value = dict(zip(values, vectors))
        means = [
            sum(self.of_value[name, v] for v in vs) / len(vs) for name, vs in ATTRIBUTES.items()
        ]
        self.mean = sum(means)  # (D,)

    def __call__(self, attributes) -> torch.Tensor:
        """(n, D) codes of n tuples of attributes."""
        return torch.stack(
            [sum(self.of_value[av] for av in zip(ATTRIBUTES, a)) for a in attributes]
        )

    def read(self, vectors, objects) -> tuple[torch.Tensor, dict[str, float]]:
        """(loss, accuracies) of reading each object's values off its vector (n, D) by their codes.

        The loss is that of Probes whose weights are the codes, and the distance to the code.
        """
        losses, right = [F.mse_loss(vectors, self([obj.attributes for obj in objects]))], {}
        for k, (name, values) in enumerate(ATTRIBUTES.items()):
            logits = vectors @ torch.stack([self.of_value[name, v] for v in values]).T
            truth = [values.index(obj.attributes[k]) for obj in objects]
            truth = torch.tensor(truth, device=vectors.device)
            losses.append(F.cross_entropy(logits, truth))
            right[name] = (logits.argmax(1) == truth).float().mean().item()
        return torch.stack(losses).mean(), right

    def nearest(self, z: torch.Tensor, objects) -> int:
        """Which of the objects z (D,) means."""
        return int((self([obj.attributes for obj in objects]) @ z).argmax())

    def around(self, objects, rng) -> torch.Tensor:
        """(n, D) random embeddings, one about each object: wrong in places, weak, noisy, scaled."""
        said = [
            [
                rng.choice(ATTRIBUTES[a]) if rng.random() < 0.1 else v
                for a, v in zip(ATTRIBUTES, obj.attributes)
            ]
            for obj in objects
        ]
        n, device = len(objects), self.mean.device
        draw = lambda low, high: torch.from_numpy(rng.uniform(low, high, (n, 1))).float().to(device)  # noqa
        noise = torch.from_numpy(rng.standard_normal((n, len(self.mean)))).float().to(device)
        share = draw(0.3, 1)
        z = self.mean + share * (self(said) - self.mean + draw(0, NOISE) * NORM * noise)
        return z * torch.exp2(draw(-1, 1))


class Probes(torch.nn.Module):
    """Linear readings of the attributes off region features, which pull them in there."""

    def __init__(self, width: int):
        super().__init__()
        self.of = torch.nn.ModuleDict(
            {name: torch.nn.Linear(width, len(values)) for name, values in ATTRIBUTES.items()}
        )

    def forward(self, vectors, objects) -> tuple[torch.Tensor, dict[str, float]]:
        """(mean cross-entropy, {attribute: accuracy}) of vectors (n, width) about n objects."""
        losses, right = [], {}
        for k, (name, values) in enumerate(ATTRIBUTES.items()):
            logits = self.of[name](vectors)
            truth = [values.index(obj.attributes[k]) for obj in objects]
            truth = torch.tensor(truth, device=vectors.device)
            losses.append(F.cross_entropy(logits, truth))
            right[name] = (logits.argmax(1) == truth).float().mean().item()
        return torch.stack(losses).mean(), right
