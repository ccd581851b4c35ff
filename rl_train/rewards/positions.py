"""Parts of an image that a phrase names by their position."""

import re

import torch

# {word: (axis of (H, W), whether it names the first half)}
SIDES = {
    **dict.fromkeys(("top", "upper", "above"), (0, True)),
    **dict.fromkeys(("bottom", "lower", "below"), (0, False)),
    "left": (1, True),
    "right": (1, False),
}


def named_part(text: str, size: tuple[int, int]) -> torch.Tensor | None:
    """Return (H, W) bool: the part of an image that `text` names by the words of SIDES.

    None if it names none, or both halves of an axis.
    """
    named = {SIDES[word] for word in re.findall(r"\w+", text.lower()) if word in SIDES}
    if not named or len({axis for axis, _ in named}) < len(named):
        return None
    part = torch.ones(size, dtype=torch.bool)
    for axis, first in named:
        middle = size[axis] // 2
        outside = part.narrow(
            axis, middle if first else 0, size[axis] - middle if first else middle
        )
        outside[:] = False
    return part


def fraction_in_named_part(mask: torch.Tensor, text: str) -> float:
    """Return the fraction of a mask (H, W) bool in `named_part` of a text; 0 without one."""
    part = named_part(text, tuple(mask.shape))
    if part is None or not mask.any():
        return 0.0
    return (mask.cpu() & part).sum().item() / mask.sum().item()
