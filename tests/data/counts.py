"""The counts of a data set's report."""

from rl_train.data.base import RegionDataset


def counts(dataset: RegionDataset) -> dict:
    """Return the report without the places of what was skipped."""
    return {name: value for name, value in dataset.report().items() if name != "first_skipped"}
