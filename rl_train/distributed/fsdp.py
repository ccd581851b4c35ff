"""Frozen layers in shards over the ranks of a host (--fsdp), by public methods of torch's FSDP2.

Each of the R ranks of a host keeps 1/R of every frozen matrix of the LLM's layers and of the vision
encoder's blocks; hosts are replicas. All else stays whole: weights that train, norms, biases,
embeddings, lm_head and SAM2.

To gather a layer is a collective, so all ranks of a host must gather the same layers in the same
order. Ranks sample answers of different lengths and have different numbers of micro-batches, hence:

- `unshard` gathers all layers for everything without gradient that follows. It is called where all
  ranks pass, and then no rank waits for another.
- In an update each layer is gathered while it computes, in the forward and in the backward. A rank
  with fewer micro-batches than others takes part in the gathers of theirs (`take_part`).

After `pack` this rank's shards of all layers lie in one tensor. Code that has a copy of all
gathered layers may overwrite it, and must write the shards back before the next gather.
"""

import os
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from rl_train.distributed.process_group import COLLECTIVE_TIMEOUT

_host_groups: list[dist.ProcessGroup] = []  # held until Python ends, as by `process_group.close`


def check_ranks_of_host():
    """Raise ValueError if this host runs one process, which has nobody to share layers with."""
    if ranks_of_host() == 1:
        raise ValueError(
            "--fsdp: one process on a host has no other to share the base with; start one for each "
            "GPU (NPROC=4 bash run_rl_train.sh ..), or leave --fsdp out"
        )


def ranks_of_host() -> int:
    """Return the number of ranks on this host, as torchrun says."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def host_mesh(device: torch.device) -> DeviceMesh:
    """Return the mesh of this host's ranks. A collective of all ranks.

    Its group is its own: DDP's collectives come in between in an order that differs by rank.
    """
    check_ranks_of_host()
    group, _ = dist.new_subgroups(ranks_of_host(), timeout=COLLECTIVE_TIMEOUT)
    _host_groups.append(group)
    return DeviceMesh.from_group(group, device.type, mesh_dim_names=("fsdp",))


class ShardedLayers:
    """Layers of which each rank of a mesh keeps a shard.

    Args:
        parent: module whose forward calls the layers.

    Attributes:
        is_whole: whether the layers are gathered until `reshard`.
        nbytes: bytes of all gathered layers.
        memory: what `pack` returned.
    """

    def __init__(self, parent: nn.Module, layers: Sequence[nn.Module], mesh: DeviceMesh):
        for layer in layers:
            kept = {p for p in layer.parameters() if p.requires_grad or p.ndim < 2}
            fully_shard(layer, mesh=mesh, reshard_after_forward=True, ignored_params=kept)
        # The root, by which the layers share their streams, has nothing to shard.
        fully_shard(parent, mesh=mesh, ignored_params=set(parent.parameters()))
        self.parent, self.layers, self.is_whole = parent, list(layers), False
        # By default FSDP2 counts forwards without gradient when it chooses what a backward gathers
        # next, so that ranks would gather different layers. Of the first layer: nothing more.
        for layer, before in zip(self.layers, [self.layers[0], *self.layers]):
            layer.set_modules_to_backward_prefetch([before])
        parameters = (p for layer in layers for p in layer.parameters())
        self.nbytes = sum(p.numel() * p.itemsize for p in parameters if isinstance(p, DTensor))
        self.memory: torch.Tensor | None = None

    @torch.no_grad()
    def pack(self) -> torch.Tensor | None:
        """Move this rank's shards into one tensor (1-D), in the order of the layers, and return it.

        A collective, before any other gather. It returns None and moves nothing if the rows of a
        matrix do not divide evenly, since FSDP2 keeps the shards of such a matrix padded elsewhere.
        """
        places = [
            (layer, module, name)
            for layer in self.layers
            for module in layer.modules()
            for name, p in module.named_parameters(recurse=False)
            if isinstance(p, DTensor)
        ]
        parameters = [getattr(module, name) for _, module, name in places]
        if any(len(p) % p.device_mesh.size() for p in parameters):
            return None
        shards = [p.to_local() for p in parameters]
        self.memory = shards[0].new_empty(sum(shard.numel() for shard in shards))
        rows = self.memory.split([shard.numel() for shard in shards])
        for (_, module, name), parameter, shard, row in zip(places, parameters, shards, rows):
            row = row.view_as(shard).copy_(shard)
            mesh, placements = parameter.device_mesh, parameter.placements
            moved = DTensor.from_local(row, mesh, placements, run_check=False)
            setattr(module, name, nn.Parameter(moved, requires_grad=False))
        for layer in self.layers:
            # FSDP2 looks for parameters that were replaced at the first gather of a layer alone.
            layer.unshard()
            layer.reshard()
        return self.memory

    def unshard(self):
        """Gather all layers until `reshard`: a collective, unless they are gathered already."""
        if not self.is_whole:
            self.parent.set_reshard_after_forward(False)
            for layer in self.layers:
                layer.unshard()
            self.is_whole = True

    def reshard(self):
        """Free the gathered layers; from now on a forward gathers each while it computes."""
        if self.is_whole:
            for layer in self.layers:
                layer.reshard()
            self.parent.set_reshard_after_forward(True)
            self.is_whole = False

    def take_part(self):
        """Gather what another rank's forward with gradient and its backward gather."""
        for layer in [*self.layers, *reversed(self.layers)]:
            layer.unshard()
            layer.reshard()


def own_rows(parameter: DTensor, whole: torch.Tensor) -> torch.Tensor:
    """Return the rows of a whole matrix that are this rank's shard of the parameter."""
    rows = len(parameter.to_local())  # as on all ranks: see `ShardedLayers.pack`
    return whole[rows * parameter.device_mesh.get_local_rank() :][:rows]


def held_bytes(parameters: Iterable[nn.Parameter]) -> int:
    """Return the bytes that this rank holds of parameters, of which some may be sharded."""
    return sum((p.to_local() if isinstance(p, DTensor) else p).nbytes for p in parameters)
