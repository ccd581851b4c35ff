"""Splits data into a training set and an evaluation split."""

from collections.abc import Callable

import numpy as np
import torch
from torch.utils.data import Subset

from rl_train.data.base import RegionDataset, number_images
from rl_train.data.distractors import unwrap_subset
from rl_train.data.errors import DamagedSamples, check_bad_fraction
from rl_train.data.images import NOT_COCO
from rl_train.data.registry import Opener


def split_dataset(
    opener: Opener,
    data_dir: str,
    eval_data_dir: str | None,
    eval_samples: int,
    max_bad_fraction: float,
    train_eval_overlap: str = "refuse",
    eval_opener: Opener | None = None,
    log: Callable[[str], None] = lambda sentence: None,
) -> tuple[RegionDataset | Subset, Subset, DamagedSamples]:
    """Return (training set, evaluation split, the damaged samples of the training data).

    The evaluation split is a sample of --eval_data_dir, see `sample_regions`. Without that flag it
    comes from --data_dir, see `split_off_eval`.

    Args:
        opener: opens --data_dir.
        eval_opener: opens --eval_data_dir, default the same.
        train_eval_overlap: refuse, drop from training, or keep in training the regions whose image
            is on both sides by `picture_keys`.
        log: called with a sentence that counts the regions and images of both sides.

    Raises:
        ValueError: nothing is left to train on, or an image on both sides is to be refused.
        BadData: see `check_bad_fraction`.
    """
    dataset = opener(data_dir)
    damaged = DamagedSamples(dataset.report(), max_bad_fraction)
    if eval_data_dir:
        eval_set = (eval_opener or opener)(eval_data_dir)
        name = f"--eval_data_dir {eval_data_dir}: "
        check_bad_fraction(eval_set.report(), 0, max_bad_fraction, name)
        keys, eval_keys = picture_keys(dataset, eval_set)
        shared = np.isin(keys, eval_keys)  # (n,)
        in_both = "none in both"
        if shared.any():
            in_both = (
                f"{len(np.unique(keys[shared])):,d} in both ({shared.sum():,d} of "
                f"{len(dataset):,d} training regions) (--train_eval_overlap {train_eval_overlap})"
            )
        log(
            f"images: {len(np.unique(keys)):,d} to train on, {len(np.unique(eval_keys)):,d} to "
            f"evaluate on, {in_both}"
        )
        if shared.any() and train_eval_overlap == "refuse":
            raise ValueError(
                f"--data_dir {data_dir} and --eval_data_dir {eval_data_dir} share images, of "
                f"{shared.sum()} of {len(dataset)} training regions, such as "
                f"{dataset.image_id(int(shared.argmax()))}; --train_eval_overlap drop leaves "
                "these out, keep trains on them"
            )
        drop = shared.any() and train_eval_overlap == "drop"
        training = Subset(dataset, np.flatnonzero(~shared).tolist()) if drop else dataset
        evaluation = Subset(eval_set, sample_regions(eval_keys, eval_samples))
    else:
        training, evaluation = split_off_eval(dataset, eval_samples, log)
    if not len(training):
        raise ValueError(
            f"--data_dir {data_dir}: of {len(dataset)} regions nothing is left to train on beside "
            f"the evaluation split (lower --eval_samples {eval_samples}, or give another "
            "--eval_data_dir)"
        )
    return training, evaluation, damaged


def split_off_eval(
    dataset: RegionDataset, eval_samples: int, log: Callable[[str], None]
) -> tuple[Subset, Subset]:
    """Return (training set, evaluation split) of one data set.

    The evaluation split is taken from the last images of a fixed shuffle, of which no region is
    trained on. They are as many as samples, but no more than a tenth of all images unless these
    have too few regions.
    """
    (keys,) = picture_keys(dataset)
    images = number_images(keys)  # (n,)
    # A fixed seed: all runs on one data set hold out the same images.
    order = torch.randperm(int(images.max()) + 1, generator=torch.Generator().manual_seed(0))
    position = order.numpy().argsort()[images]  # (n,) of each region's image in the shuffle
    enough = np.sort(position)[-eval_samples:][0]  # images from here on hold `eval_samples` regions
    first_eval = min(enough, len(order) - min(eval_samples, len(order) // 10))
    training = np.flatnonzero(position < first_eval)
    untrained = np.flatnonzero(position >= first_eval)
    evaluation = np.sort(untrained[sample_regions(images[untrained], eval_samples)])
    log(
        f"images: {len(np.unique(images[training])):,d} to train on, "
        f"{len(np.unique(images[evaluation])):,d} others to evaluate on"
    )
    return Subset(dataset, training.tolist()), Subset(dataset, evaluation.tolist())


def picture_keys(*datasets: RegionDataset | Subset) -> list[np.ndarray]:
    """Return (n,) int64 keys of each data set's n samples, equal where two share an image.

    Two images are the same if their bytes are, or if both are one image of COCO in different
    encodings.
    """
    sets = [unwrap_subset(dataset) for dataset in datasets]
    keys = np.concatenate([dataset.image_keys[index] for dataset, index in sets])
    coco = np.concatenate([dataset.coco_ids[index] for dataset, index in sets])
    # Bytes known as an image of COCO count as that image in files of any other name too.
    pairs = [(k, c) for k, c in zip(keys.tolist(), coco.tolist()) if c != NOT_COCO]
    id_of_key = dict(reversed(pairs))  # the first of several
    keys = np.array([id_of_key.get(key, key) for key in keys.tolist()], dtype=np.int64)
    return np.split(keys, np.cumsum([len(dataset) for dataset in datasets])[:-1])


def sample_regions(image_keys: np.ndarray, count: int) -> list[int]:
    """Return indices of `count` of n regions (all, if that is more), with image keys (n,).

    Each image is equally likely however many regions it has: one region of every image comes before
    the second of any. The seed is fixed, so that all runs measure the same regions, and a smaller
    sample is the beginning of a larger one.
    """
    rng, image = np.random.default_rng(0), number_images(image_keys)
    shuffled = rng.permutation(len(image))
    grouped = shuffled[image[shuffled].argsort(kind="stable")]  # by image, in random order within
    within = np.empty_like(image)  # (n,) number of a region among those of its image
    within[grouped] = np.arange(len(image)) - np.searchsorted(image[grouped], image[grouped])
    position = rng.permutation(image.max() + 1)[image]
    # By the number within an image first, then by the image's random position.
    return np.lexsort((position, within))[:count].tolist()
