"""Table of the data sets by name, each with its reader, and how one is opened.

A new data set is a reader in a file of its own and a line in `DATASETS`.
"""

from collections.abc import Callable, Sequence
from functools import partial

from rl_train.data.base import RegionDataset
from rl_train.data.dam import DescribeAnythingDataset
from rl_train.data.gar import GraspAnyRegionDataset
from rl_train.data.reasonseg import ReasonSegDataset
from rl_train.data.refcoco import REFCOCO_NAMES, RefCOCODataset
from rl_train.data.segzero import SegZeroDataset

# {--dataset: reader of a folder}; below, those of --eval_data_dir.
DATASETS = {
    "gar": GraspAnyRegionDataset,
    "dam": DescribeAnythingDataset,
    "segzero": SegZeroDataset,
    **{name: partial(RefCOCODataset, name=name, split="train") for name in REFCOCO_NAMES},
}
EVAL_DATASETS = {
    **DATASETS,
    "reasonseg": ReasonSegDataset,
    **{name: partial(RefCOCODataset, name=name, split="val") for name in REFCOCO_NAMES},
}
# {data set: parameter of its reader that takes --subsets}; a split of RefCOCO is one subset.
SUBSET_PARAMETERS = {"gar": "parts", "dam": "splits"} | dict.fromkeys(REFCOCO_NAMES, "split")

Opener = Callable[[str], RegionDataset]  # takes the folder


def opener_of(
    name: str,
    subsets: Sequence[str] = (),
    image_root: str | None = None,
    is_eval: bool = False,
    subsets_flag: str = "--subsets",
    folder_flag: str = "--data_dir ",
) -> Opener:
    """Return the function that opens the data set `name` in a folder.

    Args:
        subsets: folders to read (gar, dam), or one split of RefCOCO: default train, or val if
            `is_eval`.
        image_root: see `RefCOCODataset`.
        subsets_flag: the flag that names the subsets, in errors.
        folder_flag: the flag that names the folder, in errors.

    Raises:
        ValueError: the data set has no such thing; names the flag.
    """
    keywords = {}
    if image_root:
        if name not in REFCOCO_NAMES:
            raise ValueError(f"--image_root: only for {', '.join(REFCOCO_NAMES)}, not {name}")
        keywords["image_root"] = image_root
    if subsets:
        if name not in SUBSET_PARAMETERS:
            raise ValueError(f"{subsets_flag}: only for {', '.join(SUBSET_PARAMETERS)}, not {name}")
        if name in REFCOCO_NAMES and len(subsets) > 1:
            raise ValueError(f"{subsets_flag}: {name} is read one split at a time")
        value = subsets[0] if name in REFCOCO_NAMES else list(subsets)
        keywords[SUBSET_PARAMETERS[name]] = value
    reader_class = (EVAL_DATASETS if is_eval else DATASETS)[name]

    def open_folder(data_dir: str) -> RegionDataset:
        try:
            return reader_class(data_dir, **keywords)
        except ValueError as error:
            raise ValueError(str(error).replace("--data_dir ", folder_flag)) from error

    return open_folder
