"""What of a data set is trained on and what is held out."""

import numpy as np
import torch
from torch.utils.data import Subset

from rl_train.data.errors import DamagedSamples, check_bad_fraction
from rl_train.data.samples import number_images


def split_dataset(
    dataset_class,
    data_dir,
    eval_data_dir,
    eval_samples,
    max_bad_fraction,
    shared_images="refuse",
    heldout_class=None,
):
    """(training set, held-out set, the damaged samples of the training data).

    Held out is a sample of --eval_data_dir, see `sample_regions`; without it one of the last images
    of a fixed shuffle, none of whose regions is trained on: of as many images as samples, but of no
    more than a tenth of all, unless these hold too few regions.

    Args:
        heldout_class: of --eval_data_dir, default `dataset_class`.

    Raises:
        ValueError: nothing is left to train on, or an image of both folders is to be refused.
        BadData: see `check_bad_fraction`.
    """
    dataset = dataset_class(data_dir)
    damaged = DamagedSamples(dataset.report(), max_bad_fraction)
    if eval_data_dir:
        heldout = (heldout_class or dataset_class)(eval_data_dir)
        check_bad_fraction(heldout.report(), 0, max_bad_fraction)
        shared = np.isin(dataset.image_keys, heldout.image_keys)
        if shared.any() and shared_images == "refuse":
            raise ValueError(
                f"--data_dir {data_dir} and --eval_data_dir {eval_data_dir} share images: of "
                f"{shared.sum()} of {len(dataset)} training regions, as "
                f"{dataset.image_id(int(shared.argmax()))}; --shared_images drop leaves these out"
            )
        training = Subset(dataset, np.flatnonzero(~shared).tolist()) if shared.any() else dataset
        measured = sample_regions(heldout.image_keys, eval_samples)
        return training, Subset(heldout, measured), damaged
    images = number_images(dataset.image_keys)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(int(images.max()) + 1, generator=generator).numpy()
    place = order.argsort()[images]  # of each region's image in the order
    last_first = place.argsort(kind="stable")[::-1]
    enough = len(order) - place[last_first[:eval_samples]].min()  # images, to hold as many regions
    first = len(order) - max(enough, min(eval_samples, len(order) // 10))  # that is held out
    training, aside = np.flatnonzero(place < first).tolist(), np.flatnonzero(place >= first)
    heldout = aside[sample_regions(dataset.image_keys[aside], eval_samples)]
    if not training:
        raise ValueError(
            f"--data_dir {data_dir} holds {len(dataset)} regions, too few to hold out "
            f"--eval_samples {eval_samples}"
        )
    return Subset(dataset, training), Subset(dataset, sorted(heldout.tolist())), damaged


def sample_regions(image_keys: np.ndarray, count: int) -> list[int]:
    """Indices of `count` of n regions (all, if that is more), with image keys (n,), at random.

    Each image is as likely as any other however many regions it has: one region of every image
    comes before the second of any. The seed is fixed, so that all runs measure the same, and a
    smaller sample is the beginning of a larger one.
    """
    rng, image = np.random.default_rng(0), number_images(image_keys)
    shuffled = rng.permutation(len(image))
    grouped = shuffled[image[shuffled].argsort(kind="stable")]  # by image, in random order within
    turn = np.empty_like(image)  # of a region among those of its image
    turn[grouped] = np.arange(len(image)) - np.searchsorted(image[grouped], image[grouped])
    place = rng.permutation(image.max() + 1)[image]
    return np.lexsort((place, turn))[:count].tolist()
