"""Ends of ranks that have lost another one; other ends are tested beside their faults."""

import os
import signal

import pytest
import torch

from rl_train.distributed import process_group
from rl_train.distributed.process_group import RankInfo, lost_rank
from rl_train.run.error_report import ErrorReporter
from rl_train.utils.io import UserFault
from tests.ranks import forked


def lose_rank_1():
    ranks = process_group.init()
    try:
        with ErrorReporter(None, ranks):
            process_group.gather_objects(None)
            if ranks.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            process_group.gather_objects(None)
    finally:  # as `train.main`: gloo's threads end before Python
        process_group.close()


def test_a_rank_that_lost_another_ends_with_a_line_and_a_status_that_restarts(tmp_path):
    """Status 1, not a sentence's 2: the launcher names the rank that was killed."""
    (status, said), (killed, _) = forked(tmp_path, lose_rank_1, lose_rank_1)
    assert (status, killed) == (1, -signal.SIGKILL), said
    assert "rl_train: rank 0 has lost another rank: " in said and "Traceback" not in said


@pytest.mark.parametrize(
    "error, said",
    [
        (RuntimeError("[gloo/pair.cc:5] Connection\nclosed"), "[gloo/pair.cc:5] Connection closed"),
        (torch.distributed.DistBackendError("NCCL\nshm is full"), "NCCL shm is full"),
        (RuntimeError("[enforce fail at gloo] op.preamble.length <= op.nbytes. 9 vs 4"), None),
        (RuntimeError("a fault of ours"), None),
        (None, None),
    ],
)
def test_what_says_that_a_rank_was_lost(error, said):
    assert lost_rank(error) == said


def test_a_measure_that_a_run_has_not_ends_it_with_a_sentence():
    """Known when the first evaluation is done, hence after the run has begun."""
    endings = ErrorReporter(None, RankInfo(0, 1, torch.device("cpu")))
    endings.run = object()
    with pytest.raises(
        SystemExit, match="^rl_train: --metric_for_best_model x: this run measures y$"
    ):
        with endings:
            raise UserFault("--metric_for_best_model x: this run measures y")
    with pytest.raises(ValueError, match="^a fault of ours$"):
        with endings:
            raise ValueError("a fault of ours")
