"""Tasks: their prompts and rewards. A new one is a file and a line in `TASKS`, or module:Class."""

from inspect import isclass

from rl_train.utils.load_named import load_named

from .caption_mask_caption import CaptionMaskCaption
from .captioning import Captioning
from .grounded_captioning import GroundedCaptioning
from .mask_caption_mask import MaskCaptionMask
from .point_segmentation import PointSegmentation
from .referring import Referring

TASKS = {
    "mask_caption_mask": MaskCaptionMask,
    "caption_mask_caption": CaptionMaskCaption,
    "referring": Referring,
    "captioning": Captioning,
    "grounded_captioning": GroundedCaptioning,
    "point_segmentation": PointSegmentation,
}
DEFAULT_TASKS = ("mask_caption_mask", "caption_mask_caption")  # trained without --tasks


def load_task(name: str, known: dict[str, type] = TASKS) -> type:
    """Return the task class called `name` among the `known`, or the one "module:Class" names.

    Raises:
        ValueError: there is no such task, module or class.
    """
    if name not in known and ":" not in name:
        raise ValueError(f"--tasks {name}: unknown; known: {', '.join(known)}, or module:Class")
    return known.get(name) or load_named("--tasks", name, "class", isclass)
