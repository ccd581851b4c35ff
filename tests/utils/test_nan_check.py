"""What a watcher of NaN has seen is joined with what another one has."""

import torch

from rl_train.utils.nan_check import NanWatcher


def test_joined():
    first, second = NanWatcher(), NanWatcher()
    first("a", torch.tensor([torch.nan]))
    first("b", torch.ones(1))
    second("a", torch.ones(1))
    second("b", torch.tensor([torch.inf]))
    second("c", torch.ones(1))
    taken = first.take()
    taken.join(second.take())
    assert taken.names() == ["a", "b"]
    assert set(taken.seen) == {"a", "b", "c"} and not first.seen and not second.seen
