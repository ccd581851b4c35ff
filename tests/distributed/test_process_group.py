"""Two processes compute what one computes on the joined batch, and stop together."""

import contextlib
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rl_train.data.loader import StepSampler
from rl_train.distributed import process_group
from rl_train.distributed.process_group import (
    COLLECTIVE_TIMEOUT,
    distributed_data_parallel,
    sync_gradients,
)
from tests.ranks import fork, forked, rank_environments, start_fork
from tests.runs import (
    distance,
    rollouts,
    run,
    unmeasured,
    weights,
)

one_core = pytest.fixture(autouse=True)(unmeasured)


def two_of(folder, job):
    """(exit status, output) of each of two ranks of a function of `ranks`."""
    return forked(folder, *[lambda: job(process_group.init())] * 2)


# What is counted over ranks besides, in the two that train one loop alone.
REMEDIES = {
    (0, 1): dict(scale_rewards="batch"),
    (1, 0): dict(scale_rewards="batch", mask_truncated_completions="", overlong_buffer=12),
}


@pytest.mark.parametrize("loop1, loop2", [(1, 1), (0, 1), (1, 0)])
def test_two_processes_train_as_one(data, tmp_path, loop1, loop2):
    same = REMEDIES.get((loop1, loop2), {}) | dict(
        max_steps=3,
        num_generations=3,
        max_completion_length=24,
        learning_rate=1e-5,
        eval_samples=2,
        seed=1,
        temperature=1.5,  # at 1 the demo's captions are nearly all of four words
        loop1_weight=loop1,
        loop2_weight=loop2,
    )
    ended = forked(tmp_path, *[lambda: run(data, tmp_path / "two", batch_size=1, **same)] * 2)
    assert [status for status, _ in ended] == [0, 0], ended
    one = run(data, tmp_path / "one", batch_size=2, **same)

    def key(line):
        return (
            line["step"],
            line["task"],
            line["image_id"],
            line["completion"],
            line["advantage"],
        )

    assert sorted(map(key, rollouts(tmp_path / "two"))) == sorted(map(key, rollouts(one)))
    assert {file.name for file in (tmp_path / "two" / "rollouts").iterdir()} == {
        "rank0.jsonl",
        "rank1.jsonl",
    }
    if loop1:
        assert len({len(line["completion"].split()) for line in rollouts(one)}) >= 3  # ragged
    assert distance(weights(tmp_path / "two", 3), weights(one, 3)) < 1e-5
    assert (
        distance(
            weights(tmp_path / "two", 3, "ema.safetensors"), weights(one, 3, "ema.safetensors")
        )
        < 1e-5
    )
    state = [
        torch.load(output / "checkpoint_step_3" / "training_state.pt", weights_only=True)
        for output in (one, tmp_path / "two")
    ]
    assert [len(s["rng"]) for s in state] == [1, 2]
    # AdamW's steps hardly depend on the size of a gradient; its moments do, so they show a wrong
    # average or divisor. Taken together: some, as of the biases of keys, are rounding alone. A
    # wrong average or divisor costs 0.1 or more.
    moments = [
        torch.cat([p["exp_avg"].flatten() for p in s["optimizer"]["state"].values()]) for s in state
    ]
    assert (moments[0] - moments[1]).norm() < 1e-2 * moments[0].norm()


def test_rank_comes_from_rank_and_device_from_local_rank(monkeypatch):
    for name, value in dict(RANK="9", LOCAL_RANK="1", WORLD_SIZE="16").items():
        monkeypatch.setenv(name, value)
    joined, device = [], []
    monkeypatch.setattr(
        process_group, "rendezvous", lambda *_, **__: iter([(dist.HashStore(),) * 3])
    )

    def join(backend, rank, world_size, timeout, store):
        joined.append((backend, rank, world_size, timeout))

    monkeypatch.setattr(process_group.dist, "init_process_group", join)
    ranks = process_group.init()
    assert (ranks.rank, ranks.world_size, ranks.is_main, joined) == (
        9,
        16,
        False,
        [("gloo", 9, 16, COLLECTIVE_TIMEOUT)],
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", device.append)
    ranks = process_group.init()
    assert (
        ranks.rank == 9
        and ranks.device == torch.device("cuda", 1)
        and device == [ranks.device]
        and joined[1:] == [("nccl", 9, 16, COLLECTIVE_TIMEOUT)]
    )


def test_an_attempt_reads_no_address_of_the_one_before(tmp_path, monkeypatch):
    """torchrun keeps its store over restarts, with the addresses of the ranks that are gone."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    places = [place | dict(MASTER_PORT=str(server.port)) for place in rank_environments()]

    def late_second_rank():
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1" and os.environ["RANK"] == "1":
            time.sleep(6)  # gloo asks this rank's old address for a few seconds
        ranks = process_group.init()
        dist.barrier()
        assert ranks.world_size == 2

    for attempt in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        outputs = [tmp_path / f"{attempt}.{rank}" for rank in range(2)]
        waits = [start_fork(o, place, late_second_rank) for o, place in zip(outputs, places)]
        ended = [wait() for wait in waits]
        assert [status for status, _ in ended] == [0, 0], ended


def test_alone_without_torchrun():
    assert process_group.init() == process_group.RankInfo(0, 1, torch.device("cpu"))
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("accumulation", [1, 2])
def test_ranks_share_the_samples_of_a_step(accumulation):
    def step_indices(world_size, start):
        ranks = [
            iter(
                StepSampler(
                    37, 8 // world_size // accumulation, accumulation, 5, rank, world_size, start
                )
            )
            for rank in range(world_size)
        ]
        return [
            sorted(i for rank in ranks for _ in range(accumulation) for i in next(rank))
            for _ in range(6)
        ]

    one = step_indices(1, 0)
    assert step_indices(2, 0) == one
    assert all(len(set(step)) == 8 for step in one)
    assert step_indices(2, 4)[:2] == step_indices(1, 4)[:2] == one[4:]


def test_a_fault_on_one_rank_stops_both(tmp_path):
    def job(ranks):
        process_group.raise_on_any_rank([])
        try:
            process_group.raise_on_any_rank(["loop2 loss"] if ranks.rank == 1 else [])
            print("WENT ON")
        finally:
            process_group.close()

    for status, output in two_of(tmp_path, job):
        # Not always 1: gloo may abort the rank whose peer is gone already.
        assert (
            status != 0
            and "FloatingPointError: not finite: rank 1: loop2 loss" in output
            and "WENT ON" not in output
        )


def test_a_send_to_a_killed_rank_is_a_lost_rank(tmp_path):
    """gloo tells all that waits of a closed connection, but a send that has begun.

    That waits for its timeout (of a run: 30 minutes), unless the launcher ends the rank before.
    """

    def is_stopped(pid):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def job(ranks):
        pids = process_group.gather_objects(os.getpid())
        tensor = torch.zeros(2**24)  # more than the socket's buffers hold
        if ranks.rank == 1:
            dist.irecv(tensor, 0)
            os.kill(os.getpid(), signal.SIGSTOP)
        while not is_stopped(pids[1]):
            time.sleep(0.01)
        send = dist.isend(tensor, 1)
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(RuntimeError) as raised:
            send.wait(timedelta(seconds=1))
        assert process_group.lost_rank(raised.value), raised.value

    (status, output), (killed, _) = two_of(tmp_path, job)
    assert (status, killed) == (0, -signal.SIGKILL), output


def test_gradients_are_averaged(tmp_path):
    """A weight that one rank does not reach counts as zero there; so in a second update."""

    class Both(torch.nn.Module):
        def __init__(self, rank):
            super().__init__()
            self.a, self.b = (torch.nn.Parameter(torch.zeros(n)) for n in (2, 3))
            self.rank = rank

        def forward(self, scale, last):
            mine = scale * (self.a.sum() * 2 if self.rank == 0 else self.b.sum() * 6)
            return process_group.touch_all_params(mine, (self.a, self.b)) if last else mine

    def job(ranks):
        both = Both(ranks.rank)
        ddp = distributed_data_parallel(both)
        for _ in range(2):
            for scale, last in ((0.25, False), (0.75, True)):
                with sync_gradients(ddp, last):
                    ddp(scale, last=last).backward()
            assert both.a.grad.tolist() == [1, 1] and both.b.grad.tolist() == [3, 3, 3]
            norms = process_group.gradient_norms([both.a, both.b])
            assert (norms - torch.tensor([2**0.5, 27**0.5])).abs().max() < 1e-5, norms
            both.zero_grad(set_to_none=True)
        assert process_group.all_sum({"x": ranks.rank + 0.5}) == {"x": 2.0}
        assert process_group.gather_objects("ab"[ranks.rank]) == ["a", "b"]
        process_group.print0("SAID")
        process_group.close()

    ended = two_of(tmp_path, job)
    assert [status for status, _ in ended] == [0, 0], ended
    assert ["SAID" in output for _, output in ended] == [True, False]


class SquaredOutputs(torch.nn.Module):
    """A loss of rows: the sum of their squared outputs over the step's mean rows per rank."""

    def __init__(self, dtype):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(12, dtype=dtype).view(3, 4) - 6)

    def forward(self, rows, rows_per_rank, last):
        return (rows @ self.weight).square().sum() / rows_per_rank


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_two_ranks_have_the_gradient_of_one_bit_for_bit(tmp_path, dtype):
    """And the weights after an update: nothing rounds, as the numbers are small integers.

    Elsewhere the two differ in the order of their sums alone.
    """
    rows = torch.randint(-8, 9, (8, 3), generator=torch.Generator().manual_seed(0)).to(dtype)

    def weights_after(rows, num_ranks):
        module = SquaredOutputs(dtype)
        ddp, optimizer = (
            distributed_data_parallel(module),
            torch.optim.AdamW(module.parameters(), 0.1),
        )
        for _ in range(2):
            for number, micro_batch in enumerate(rows.split(2), 1):
                last = number == len(rows) // 2
                with sync_gradients(ddp, last):
                    ddp(micro_batch, 8 / num_ranks, last=last).backward()
            gradient = module.weight.grad.clone()
            optimizer.step()
            module.weight.data.round_()  # of the next update, nothing rounds either
            optimizer.zero_grad(set_to_none=True)
        return gradient, optimizer.state[module.weight]["exp_avg_sq"], module.weight.detach()

    def job(ranks):
        torch.save(weights_after(rows[ranks.rank :: 2], 2), tmp_path / f"{ranks.rank}.pt")
        process_group.close()

    ended = two_of(tmp_path, job)
    assert [status for status, _ in ended] == [0, 0], ended
    alone = weights_after(rows, 1)
    assert alone[0].abs().max() > 100
    for rank in range(2):
        of_rank = torch.load(tmp_path / f"{rank}.pt")
        assert all(torch.equal(a, b) for a, b in zip(of_rank, alone, strict=True))


def test_alone_nothing_is_reduced():
    linear = torch.nn.Linear(2, 1, bias=False)
    ddp = distributed_data_parallel(Passing(linear))
    for last in (False, True):
        with sync_gradients(ddp, last):
            ddp(torch.tensor([3.0, 4.0]), last=last).backward()
    assert linear.weight.grad.tolist() == [[6, 8]]
    assert process_group.gradient_norms([linear.weight]).tolist() == [10]
    assert process_group.all_sum({"x": 3}) == {"x": 3}
    assert process_group.gather_objects("a") == ["a"]
    process_group.raise_on_any_rank([])
    with pytest.raises(FloatingPointError, match="rank 0: gradient of w"):
        process_group.raise_on_any_rank(["gradient of w"])


class Passing(torch.nn.Module):
    """A layer that need not know which micro-batch is the last."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, last):
        return self.layer(x)


def gloo_threads() -> list[str]:
    """Names of this process's threads that belong to gloo."""
    names = []
    for file in Path("/proc/self/task").glob("*/comm"):
        # `close` has joined a thread of Python's: the kernel may end it between glob and read.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            names.append(file.read_text().strip())
    return [name for name in names if "gloo" in name]


def test_the_group_s_threads_end_with_it(tmp_path):
    """One that frees a tensor while Python exits would abort the process."""

    def job(ranks):
        ddp = distributed_data_parallel(torch.nn.Linear(4, 4))
        for _ in range(3):
            ddp(torch.ones(2, 4)).sum().backward()
            process_group.gather_objects(ranks.rank)
        assert gloo_threads()
        process_group.close()
        assert not gloo_threads(), gloo_threads()
        assert ddp.module.weight.grad is not None  # the module outlives the group

    ended = two_of(tmp_path, job)
    assert [status for status, _ in ended] == [0, 0], ended


def test_a_group_that_an_error_holds_is_kept(tmp_path):
    """Its threads then live on, and nothing waits for them."""

    def job(ranks):
        process_group.gather_objects(None)
        held = dist.group.WORLD
        process_group.close()
        assert held in process_group._closed and gloo_threads()

    ended = two_of(tmp_path, job)
    assert [status for status, _ in ended] == [0, 0], ended


def test_a_run_of_two_ranks_leaves_no_thread(data, tmp_path):
    def job():
        run(data, tmp_path / "run", batch_size=1, max_steps=1)
        assert not gloo_threads(), gloo_threads()

    ended = forked(tmp_path, job, job)
    assert [status for status, _ in ended] == [0, 0], ended


def test_a_module_of_ddp_may_outlive_its_group(tmp_path):
    """Its reducer must not be what frees the group: that joins a thread which waits for the GIL."""

    def job():
        sys.setswitchinterval(5)  # seconds: Python hands the GIL over as rarely as it can
        for _ in range(300):
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            ddp = distributed_data_parallel(torch.nn.Linear(4, 4))
            process_group.gather_objects(None)
            process_group.close()
            del ddp

    status, output = fork(tmp_path, job)
    assert status == 0, output
