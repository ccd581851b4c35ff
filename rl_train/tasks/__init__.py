"""What is asked and how it is judged; a new task is a file and a line here, or module:Class."""

import importlib

from .caption_mask_caption import CaptionMaskCaption
from .mask_caption_mask import MaskCaptionMask

TASKS = {"mask_caption_mask": MaskCaptionMask, "caption_mask_caption": CaptionMaskCaption}


def load_task(name: str) -> type:
    """The task class called `name` in TASKS, or the one that "module:Class" names.

    Raises:
        ValueError: there is no such task, module or class.
    """
    if name in TASKS:
        return TASKS[name]
    module_name, colon, class_name = name.partition(":")
    if not colon:
        raise ValueError(f"--tasks {name}: unknown; known: {', '.join(TASKS)}, or module:Class")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise ValueError(f"--tasks {name}: there is no module {error.name}") from error
        raise
    if not isinstance(vars(module).get(class_name), type):
        raise ValueError(f"--tasks {name}: the module {module_name} has no class {class_name}")
    return vars(module)[class_name]
