"""What of a data set is trained on and what is held out."""

import torch
from torch.utils.data import Subset

from rl_train.data.errors import DamagedSamples, check_bad_fraction


def split_dataset(dataset_class, data_dir, eval_data_dir, eval_samples, max_bad_fraction):
    """(training set, held-out set, the damaged samples of the training data).

    Without --eval_data_dir the last images of a fixed shuffle are held out, with all their regions,
    in whatever rows these are.
    """
    dataset = dataset_class(data_dir)
    damaged = DamagedSamples(dataset.report(), max_bad_fraction)
    if eval_data_dir:
        heldout = dataset_class(eval_data_dir)
        check_bad_fraction(heldout.report(), 0, max_bad_fraction)
        count = min(eval_samples, len(heldout))
        return dataset, Subset(heldout, range(count)), damaged
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(int(dataset.images.max()) + 1, generator=generator).numpy()
    place = order.argsort()[dataset.images]  # of each region's image in the order
    last_first = place.argsort(kind="stable")[::-1]
    heldout = last_first[:eval_samples]  # whole images, but for what is too many of the last
    training = sorted(last_first[place[last_first] < place[heldout].min()].tolist())
    if not training:
        raise ValueError(
            f"--data_dir {data_dir} holds {len(dataset)} regions, too few to hold out "
            f"--eval_samples {eval_samples}"
        )
    return Subset(dataset, training), Subset(dataset, sorted(heldout.tolist())), damaged
