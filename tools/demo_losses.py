"""Losses of the demo's warm start that the drawn scenes make possible."""

import torch
import torch.nn.functional as F

from tools.demo_scenes import TINY

NOISE = 0.25  # of a value's code, in each dimension of a disturbed one, at most


def region_means(features, image, grids) -> torch.Tensor:
    """(n, C) mean feature of the cells of each region.

    Args:
        features: (B, g * g, C) of images; image: (n,) long, that of each region.
        grids: (n, g, g) bool, none empty.
    """
    region, cell = grids.flatten(1).nonzero(as_tuple=True)
    sums = features.new_zeros(len(grids), features.shape[-1])
    sums = sums.index_add(0, region, features[image[region], cell])
    return sums / grids.flatten(1).sum(1, keepdim=True)


def choice_loss(logits, masks, image, meant) -> tuple[torch.Tensor, torch.Tensor]:
    """(cross-entropy of the meant object among its scene's by mean logit, share of hits).

    Args:
        logits: (n, h, w) of n prompts, one about each object of some scenes.
        masks: (n, h, w) bool of the objects, scene by scene; image: (n,) long, the scene of each.
        meant: (n,) long, the object that each prompt means.
    """
    same = image[:, None] == image  # (n, n)
    number = same.sum(1)  # of objects of the scene of each
    first = same.int().argmax(1)
    places = torch.arange(int(number.max()), device=image.device)
    real = places < number[:, None]  # (n, K)
    others = torch.where(real, first[:, None] + places, first[:, None])  # (n, K)
    areas = masks[others].float()  # (n, K, h, w)
    inside = (areas * logits[:, None]).sum((2, 3)) / areas.sum((2, 3))
    inside = inside.masked_fill(~real, -torch.inf)
    losses = F.cross_entropy(inside, meant - first, reduction="none")
    return losses.mean(), (inside.argmax(1) == meant - first).float().mean()


def balanced_mask_loss(logits, masks):
    """Mean BCE with the region's and the background's pixels at equal weight, plus Dice.

    From random weights the usual loss would settle on empty masks, since regions cover a few per
    cent of an image.

    Args:
        logits: (n, h, w).
        masks: (n, h, w) bool.
    """
    target = masks.float().flatten(1)
    bce = F.binary_cross_entropy_with_logits(logits.flatten(1), target, reduction="none")
    inside = (bce * target).sum(1) / target.sum(1).clamp(min=1)
    outside = (bce * (1 - target)).sum(1) / (1 - target).sum(1)
    probability = logits.sigmoid().flatten(1)
    dice = 1 - (2 * (probability * target).sum(1) + 1) / (probability.sum(1) + target.sum(1) + 1)
    return (inside + outside + 2 * dice).mean()


def nearest(z, image, codes, of) -> torch.Tensor:
    """(n,) long: which of m objects each prompt embedding means, of those of its own image.

    Args:
        z: (n, D); image: (n,) long, the image of each.
        codes: (m, D) of objects; of: (m,) long, the image of each.
    """
    return (z @ codes.T).masked_fill(image[:, None] != of, -torch.inf).argmax(1)


class Codes:
    """A fixed vector for each value of each attribute, orthogonal to all others.

    An object's code is the sum of its values', with a mean square of 1. Which object a prompt
    embedding z means is then decided by z alone, whatever its scale: the one with the largest
    product z . code (`nearest`).
    """

    def __init__(self, prompt_size: int, seed: int, device, attributes=TINY.attributes):
        generator = torch.Generator().manual_seed(seed)
        vectors = torch.randn(prompt_size, prompt_size, generator=generator)
        self.attributes, self.norm = attributes, (prompt_size / len(attributes)) ** 0.5
        vectors = self.norm * torch.linalg.qr(vectors).Q.to(device)
        self.vectors = vectors.contiguous()  # (D, D), a value a row
        values = [(name, value) for name, values in attributes.items() for value in values]
        assert len(values) <= prompt_size, "more values than dimensions"
        self.row = {value: row for row, value in enumerate(values)}
        means = [
            sum(self.vectors[self.row[name, v]] for v in vs) / len(vs)
            for name, vs in attributes.items()
        ]
        self.mean = sum(means)  # (D,)

    def __call__(self, said) -> torch.Tensor:
        """(n, D) codes of n tuples of values, one of each attribute."""
        rows = [[self.row[av] for av in zip(self.attributes, values)] for values in said]
        rows = torch.tensor(rows, device=self.vectors.device)
        return sum(self.vectors[column] for column in rows.T)

    def read(self, vectors, objects) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """(loss, accuracies) of reading each object's values off its vector (n, D) by their codes.

        The loss is that of Probes whose weights are the codes, and the distance to the code.
        """
        said = [obj.attributes for obj in objects]
        losses, right, first = [F.mse_loss(vectors, self(said))], {}, 0
        for (name, values), column in zip(self.attributes.items(), zip(*said)):
            logits = vectors @ self.vectors[first : first + len(values)].T
            truth = torch.tensor([values.index(v) for v in column], device=vectors.device)
            losses.append(F.cross_entropy(logits, truth))
            right[name] = (logits.argmax(1) == truth).float().mean()
            first += len(values)
        return torch.stack(losses).mean(), right

    def around(self, objects, rng) -> torch.Tensor:
        """(n, D) random embeddings, one about each object: wrong in places, weak, noisy, scaled."""
        said = [
            [
                rng.choice(values) if rng.random() < 0.1 else v
                for values, v in zip(self.attributes.values(), obj.attributes)
            ]
            for obj in objects
        ]
        n, device = len(objects), self.mean.device
        draw = lambda low, high: torch.from_numpy(rng.uniform(low, high, (n, 1))).float().to(device)  # noqa
        noise = torch.from_numpy(rng.standard_normal((n, len(self.mean)))).float().to(device)
        share = draw(0.3, 1)
        z = self.mean + share * (self(said) - self.mean + draw(0, NOISE) * self.norm * noise)
        return z * torch.exp2(draw(-1, 1))


class Probes(torch.nn.Module):
    """Linear readings of the attributes off region features, which pull them in there."""

    def __init__(self, width: int, attributes=TINY.attributes):
        super().__init__()
        self.attributes = attributes
        self.of = torch.nn.ModuleDict(
            {name: torch.nn.Linear(width, len(values)) for name, values in attributes.items()}
        )

    def forward(self, vectors, objects) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """(mean cross-entropy, {attribute: accuracy}) of vectors (n, width) about n objects."""
        losses, right = [], {}
        said = zip(*(obj.attributes for obj in objects))
        for (name, values), column in zip(self.attributes.items(), said):
            logits = self.of[name](vectors)
            truth = torch.tensor([values.index(v) for v in column], device=vectors.device)
            losses.append(F.cross_entropy(logits, truth))
            right[name] = (logits.argmax(1) == truth).float().mean()
        return torch.stack(losses).mean(), right
