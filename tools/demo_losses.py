"""Losses of the demo's warm start that the drawn scenes make possible."""

import torch
import torch.nn.functional as F

from tools.demo_scenes import COLORS, POSITIONS, SHAPES, SIZES


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


class Attributes(torch.nn.Module):
    """Supervision by the attributes that a scene's drawer knows.

    It gets from random weights to a model in minutes: `code` turns stated attributes into a prompt
    embedding, with which SAM2 learns first; [SEG]'s embedding learns to equal it and takes over.
    Linear probes pull the attributes into region features. Thrown away afterwards.
    """

    VALUES = dict(
        color=list(COLORS),
        shape=list(SHAPES),
        size=list(SIZES),
        position=[p for row in POSITIONS for p in row],
    )

    def __init__(self, prompt_size: int, width: int):
        super().__init__()
        self.probes = torch.nn.ModuleDict(
            {a: torch.nn.Linear(width, len(values)) for a, values in self.VALUES.items()}
        )
        self.codes = torch.nn.ParameterDict(
            {a: torch.randn(len(values), prompt_size) * 0.5 for a, values in self.VALUES.items()}
        )

    def index(self, obj, attribute):
        return self.VALUES[attribute].index(getattr(obj, attribute))

    def code(self, objects, said):
        """(n, prompt_size): the sum of the codes of the attributes said[i] of objects[i]."""
        return torch.stack(
            [sum(self.codes[a][self.index(o, a)] for a in s) for o, s in zip(objects, said)]
        )

    def probe_loss(self, vectors, objects):
        """Mean cross-entropy of all attributes of objects[i], read off vectors (n, width)."""
        losses = [
            F.cross_entropy(
                self.probes[a](vectors),
                torch.tensor([self.index(o, a) for o in objects], device=vectors.device),
            )
            for a in self.VALUES
        ]
        return torch.stack(losses).mean()
