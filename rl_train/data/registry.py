"""Table of the data sets by name, each with its reader, and how one is opened.

A new data set is a reader in a file of its own and a line in `DATASETS`; "module:Class" is one of
the user's.
"""

import argparse
from collections.abc import Callable, Collection, Sequence
from functools import partial

from rl_train.data.base import RegionDataset
from rl_train.data.coco import COCODataset, COCONamesDataset
from rl_train.data.dam import DescribeAnythingDataset
from rl_train.data.folders import FoldersDataset
from rl_train.data.gar import GraspAnyRegionDataset
from rl_train.data.gcg import GCGDataset
from rl_train.data.muse import MUSEDataset
from rl_train.data.reasonseg import open_reasonseg
from rl_train.data.refcoco import REFCOCO_NAMES, RefCOCODataset
from rl_train.data.sa2va import Sa2VADataset
from rl_train.data.segzero import SegZeroDataset
from rl_train.utils.load_named import load_named

# {--dataset: reader of a folder}; below, those of --eval_data_dir.
DATASETS = {
    "gar": GraspAnyRegionDataset,
    "dam": DescribeAnythingDataset,
    "segzero": SegZeroDataset,
    "sa2va": Sa2VADataset,
    "coco": COCODataset,
    "coco_names": COCONamesDataset,
    "folders": FoldersDataset,
    "muse": MUSEDataset,
    "gcg": GCGDataset,
    "reasonseg": open_reasonseg,
    **{name: partial(RefCOCODataset, name=name, split="train") for name in REFCOCO_NAMES},
}
EVAL_DATASETS = {
    **DATASETS,
    "reasonseg": partial(open_reasonseg, default_split="val"),
    **{name: partial(RefCOCODataset, name=name, split="val") for name in REFCOCO_NAMES},
}
# Data sets of files that name images; each is read one split at a time.
WITH_IMAGE_ROOT = (*REFCOCO_NAMES, "sa2va", "coco", "coco_names", "folders", "muse", "gcg")
ONE_SPLIT = (*WITH_IMAGE_ROOT, "reasonseg")
# {data set: parameter of its reader that takes --subsets}
SUBSET_PARAMETERS = {"gar": "parts", "dam": "splits"} | dict.fromkeys(ONE_SPLIT, "split")

Opener = Callable[[str], RegionDataset]  # takes the folder


def dataset_name(text: str, known: Collection[str] = DATASETS) -> str:
    """Return a word that names a data set. Raises ArgumentTypeError for another one."""
    if text not in known and ":" not in text:
        raise argparse.ArgumentTypeError(
            f"{text}: must be one of {', '.join(known)}, or module:Class of your own reader"
        )
    return text


def eval_dataset_name(text: str) -> str:
    """Return a word that names a data set to evaluate on; see `dataset_name`."""
    return dataset_name(text, EVAL_DATASETS)


def opener_of(
    name: str,
    subsets: Sequence[str] = (),
    image_root: str | None = None,
    is_eval: bool = False,
    subsets_flag: str = "--subsets",
    folder_flag: str = "--data_dir ",
    name_flag: str = "--dataset",
) -> Opener:
    """Return the function that opens the data set `name` in a folder.

    Args:
        subsets: folders to read (gar, dam), or one split: of RefCOCO and ReasonSeg default train,
            or val if `is_eval`; of the others the name of a file.
        image_root: folder of the images of WITH_IMAGE_ROOT.
        subsets_flag: the flag that names the subsets, in errors.
        folder_flag: the flag that names the folder, in errors.
        name_flag: the flag that names the data set, in errors.

    Raises:
        ValueError: the data set has no such thing, or there is no such reader; names the flag.
    """
    keywords = {}
    if image_root:
        if name not in WITH_IMAGE_ROOT:
            raise ValueError(f"--image_root: only for {', '.join(WITH_IMAGE_ROOT)}, not {name}")
        keywords["image_root"] = image_root
    if subsets:
        if name not in SUBSET_PARAMETERS:
            raise ValueError(f"{subsets_flag}: only for {', '.join(SUBSET_PARAMETERS)}, not {name}")
        if name in ONE_SPLIT and len(subsets) > 1:
            raise ValueError(f"{subsets_flag}: {name} is read one split at a time")
        value = subsets[0] if name in ONE_SPLIT else list(subsets)
        keywords[SUBSET_PARAMETERS[name]] = value
    known = EVAL_DATASETS if is_eval else DATASETS
    reader_class = known.get(name) or load_named(name_flag, name, "class", callable)

    def open_folder(data_dir: str) -> RegionDataset:
        try:
            return reader_class(data_dir, **keywords)
        except ValueError as error:
            raise ValueError(str(error).replace("--data_dir ", folder_flag)) from error

    return open_folder
