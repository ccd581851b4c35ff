"""Ranks, and the few collectives of a step. Nothing else but `train`, `sharding` and `data/loader` knows that
there are ranks.

Gradients are averaged by one all-reduce of one flat buffer after the last backward of a step, instead of by
DistributedDataParallel: every trainable takes part in every step, with zeros where no term reached it, so neither
`no_sync`, nor ragged lengths, nor a loop of weight 0 can leave a parameter unreduced (tests/test_distributed.py).
"""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from tqdm import tqdm


@dataclass(frozen=True)
class Ranks:
    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def init() -> Ranks:
    """Join the process group that torchrun describes (NCCL on GPU, gloo on CPU), or be alone without one."""
    world_size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    if "WORLD_SIZE" in os.environ and not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return Ranks(rank, world_size, device)


def close():
    if dist.is_initialized():
        dist.destroy_process_group()


def print0(*parts):
    """Print on the first rank, without breaking a progress bar."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        tqdm.write(" ".join(map(str, parts)))


def gather_objects(value) -> list:
    """`value` of every rank, in rank order."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def all_sum(values: dict[str, float], device) -> dict[str, float]:
    """Sums over ranks, in float64; every rank passes the same names."""
    if not dist.is_initialized():
        return dict(values)
    buffer = torch.tensor([float(v) for v in values.values()], dtype=torch.float64, device=device)
    dist.all_reduce(buffer)
    return dict(zip(values, buffer.tolist()))


def average_gradients(parameters: list[torch.nn.Parameter]):
    """Replace every gradient by its mean over ranks; a missing gradient counts as zero."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    if not dist.is_initialized():
        return
    flat = torch.cat([p.grad.flatten() for p in parameters])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for parameter, gradient in zip(parameters, flat.split([p.numel() for p in parameters])):
        parameter.grad.copy_(gradient.view_as(parameter))


def raise_on_any_rank(faults: list[str]):
    """Raise FloatingPointError on all ranks, with every rank's faults, if any rank has one."""
    found = [
        f"rank {rank}: {fault}"
        for rank, rank_faults in enumerate(gather_objects(faults))
        for fault in rank_faults
    ]
    if found:
        raise FloatingPointError("not finite: " + "; ".join(found[:20]))
