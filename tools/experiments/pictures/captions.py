"""Captions that are true of one object of a scene and of no other.

x runs to the right and y downwards, in pixels; a box is (left, top, right, bottom).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

# {relation: (axis, sign)}: the object lies on that side of its neighbour. Axis 0 is x.
RELATIONS = {"left of": (0, -1), "right of": (0, 1), "above": (1, -1), "below": (1, 1)}
NEAR = 0.6  # of the image's side: the farthest neighbour, centre to centre
STEEP = 0.75  # the largest offset across the relation's axis, relative to the one along it
MARGIN = 0.02  # of the image's side: an object that the caption must not fit is this far off


@dataclass(frozen=True)
class Named:
    """An object of a scene as its words see it.

    Attributes:
        tags: second wordings of the object.
        also: other labels that are true of it.
        center: (x, y), the mean of its visible pixels.
        box: of its visible pixels.
    """

    label: str
    tags: tuple[str, ...]
    center: tuple[float, float]
    box: tuple[int, int, int, int]
    also: tuple[str, ...] = ()


def fits(wording: str, named: Named) -> bool:
    """Tell whether the words are also true of this object: its label has them all, or a tag.

    A black cat is a "cat", and an owl with the tag "bird" is a "bird".
    """
    return (
        wording in named.tags
        or wording in named.also
        or set(wording.split()) <= set(named.label.split())
    )


def is_clear(named: Named, relation: str, other: Named, side: int) -> bool:
    """Tell whether nobody would doubt that the object stands in this relation to the other."""
    axis, sign = RELATIONS[relation]
    offset = np.subtract(named.center, other.center)  # (x, y)
    along, across = sign * offset[axis], abs(offset[1 - axis])
    edge = other.box[axis + 2] if sign > 0 else other.box[axis]  # of the other, on this side
    outside = sign * (named.center[axis] - edge) > 0
    return bool(outside and across <= STEEP * along and np.hypot(*offset) <= NEAR * side)


def is_possible(named: Named, relation: str, other: Named, side: int) -> bool:
    """Tell whether somebody might say that the object stands in this relation to the other."""
    axis, sign = RELATIONS[relation]
    return sign * (named.center[axis] - other.center[axis]) > -MARGIN * side


def by_label(
    scene: Sequence[Named], i: int, side: int, may_name: Callable[[str, str], bool]
) -> str | None:
    """Return object i's label, with its place beside a neighbour if others have the label too.

    Args:
        side: of the image, in pixels.
        may_name: tells of a label and a neighbour's whether a caption may combine them.

    Returns:
        None if no relation tells the object from the others.
    """
    label = scene[i].label
    rivals = [k for k, other in enumerate(scene) if k != i and fits(label, other)]
    if not rivals:
        return label
    for j in sorted(
        (j for j in range(len(scene)) if j != i and j not in rivals),
        key=lambda j: np.hypot(*np.subtract(scene[i].center, scene[j].center)),
    ):
        anchor = scene[j]
        is_unique = not any(k != j and fits(anchor.label, other) for k, other in enumerate(scene))
        if not is_unique or not may_name(label, anchor.label):
            continue
        for relation in RELATIONS:
            if is_clear(scene[i], relation, anchor, side) and not any(
                is_possible(scene[k], relation, anchor, side) for k in rivals
            ):
                return f"{label} {relation} the {anchor.label}"
    return None


def by_tag(scene: Sequence[Named], i: int, num_concepts: Callable[[str], int]) -> str | None:
    """Return a tag of object i that fits no other object, the rarest; None if there is none.

    Args:
        num_concepts: tells how many concepts have a tag.
    """
    words = set(scene[i].label.split())
    for tag in sorted(scene[i].tags, key=lambda tag: (num_concepts(tag), tag)):
        others = (other for k, other in enumerate(scene) if k != i)
        if not set(tag.split()) <= words and not any(fits(tag, other) for other in others):
            return tag
    return None
