"""A curriculum by region size: an epoch's order, from large regions to small ones.

PYTHONPATH=docs/examples python -m rl_train.train --sampler curriculum:large_first ..
"""

import numpy as np

from rl_train.data import DamagedSample

BINS = 4  # of equally many regions: large ones first, in each bin at random


def large_first(dataset, epoch, generator):
    """The first epoch's indices by the regions' fraction of their image; later ones at random.

    It reads every sample once. Of a large data set keep the fractions in a file.
    """
    order = generator.permutation(len(dataset))
    if epoch > 0:
        return order
    by_size = sorted(order.tolist(), key=lambda index: -region_fraction(dataset, index))
    return np.concatenate([generator.permutation(part) for part in np.array_split(by_size, BINS)])


def region_fraction(dataset, index) -> float:
    try:
        return dataset[index]["mask"].mean()
    except DamagedSample:  # for which the loader takes another one
        return 0.0
