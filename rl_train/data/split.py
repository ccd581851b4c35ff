"""What of a data set is trained on and what is held out."""

import numpy as np
import torch
from torch.utils.data import Subset

from rl_train.data.errors import DamagedSamples, check_bad_fraction
from rl_train.data.images import NOT_COCO
from rl_train.data.samples import number_images


def split_dataset(
    dataset_class,
    data_dir,
    eval_data_dir,
    eval_samples,
    max_bad_fraction,
    shared_images="refuse",
    heldout_class=None,
    say=lambda sentence: None,
):
    """(training set, held-out set, the damaged samples of the training data).

    Held out is a sample of --eval_data_dir, see `sample_regions`; without it one of the last images
    of a fixed shuffle, none of whose regions is trained on: of as many images as samples, but of no
    more than a tenth of all, unless these hold too few regions.

    Args:
        dataset_class: what opens --data_dir; heldout_class: what opens --eval_data_dir, default
            the same.
        shared_images: refuse, or drop or keep in training, regions whose image `picture_keys` finds
            in both; say: is called with a sentence that counts them.

    Raises:
        ValueError: nothing is left to train on, or an image of both folders is to be refused.
        BadData: see `check_bad_fraction`.
    """
    dataset = dataset_class(data_dir)
    damaged = DamagedSamples(dataset.report(), max_bad_fraction)
    if not eval_data_dir:
        return *hold_out(dataset, data_dir, eval_samples, say), damaged
    heldout = (heldout_class or dataset_class)(eval_data_dir)
    where = f"--eval_data_dir {eval_data_dir}: "
    check_bad_fraction(heldout.report(), 0, max_bad_fraction, where)
    keys, held = picture_keys(dataset, heldout)
    shared = np.isin(keys, held)  # (n,)
    both = len(np.unique(keys[shared]))
    say(
        f"{both} images are both trained on and held out, of {len(np.unique(keys))} and "
        f"{len(np.unique(held))}: {shared.sum()} of {len(dataset)} training regions"
        + f" (--shared_images {shared_images})"
        * bool(both)
    )
    if shared.any() and shared_images == "refuse":
        raise ValueError(
            f"--data_dir {data_dir} and --eval_data_dir {eval_data_dir} share images: of "
            f"{shared.sum()} of {len(dataset)} training regions, as "
            f"{dataset.image_id(int(shared.argmax()))}; --shared_images drop leaves these out, "
            "keep trains on them"
        )
    if shared.all() and shared_images == "drop":
        raise ValueError(
            f"--shared_images drop: all {len(dataset)} regions of --data_dir {data_dir} are on "
            f"images of --eval_data_dir {eval_data_dir}; nothing is left to train on"
        )
    drop = shared.any() and shared_images == "drop"
    training = Subset(dataset, np.flatnonzero(~shared).tolist()) if drop else dataset
    return training, Subset(heldout, sample_regions(held, eval_samples)), damaged


def hold_out(dataset, data_dir, eval_samples: int, say) -> tuple[Subset, Subset]:
    """(training set, held-out set) of one data set, see `split_dataset`."""
    images = number_images(*picture_keys(dataset))
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(int(images.max()) + 1, generator=generator).numpy()
    place = order.argsort()[images]  # of each region's image in the order
    last_first = place.argsort(kind="stable")[::-1]
    enough = len(order) - place[last_first[:eval_samples]].min()  # images, to hold as many regions
    first = len(order) - max(enough, min(eval_samples, len(order) // 10))  # that is held out
    training, aside = np.flatnonzero(place < first).tolist(), np.flatnonzero(place >= first)
    heldout = aside[sample_regions(images[aside], eval_samples)]
    if not training:
        raise ValueError(
            f"--data_dir {data_dir} holds {len(dataset)} regions, too few to hold out "
            f"--eval_samples {eval_samples}"
        )
    say(
        f"held out: {len(heldout)} regions of {len(np.unique(images[heldout]))} images; "
        f"trained on: {len(training)} of {len(np.unique(images[training]))} others"
    )
    return Subset(dataset, training), Subset(dataset, sorted(heldout.tolist()))


def picture_keys(*datasets) -> list[np.ndarray]:
    """(n,) int64 of each data set's n samples, alike where two of any have one image.

    That is one with the same bytes, or the same image of COCO under another encoding.
    """
    keys, coco = (
        np.concatenate([_column(dataset, name) for dataset in datasets])
        for name in ("image_keys", "coco_ids")
    )
    named = coco != NOT_COCO
    if named.any():  # those bytes are an image of COCO, whatever another file of them is called
        known, first = np.unique(keys[named], return_index=True)
        place = np.searchsorted(known, keys).clip(max=len(known) - 1)
        keys = np.where(known[place] == keys, coco[named][first[place]], keys)
    return np.split(keys, np.cumsum([len(dataset) for dataset in datasets])[:-1])


def _column(dataset, name: str) -> np.ndarray:
    """What `dataset.name` says of each sample, of a Subset too."""
    if isinstance(dataset, Subset):
        return _column(dataset.dataset, name)[np.asarray(dataset.indices)]
    return getattr(dataset, name)


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
