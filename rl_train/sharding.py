"""The frozen base shared out over the ranks (FSDP2, --shard_base), if it does not fit one GPU.

Each of R ranks keeps 1/R of every layer of the LLM and of the vision encoder. What trains stays
whole on every rank, and so do embeddings, lm_head and SAM2; results are those of a run without it.

Where a GPU has room for all layers beside what a step holds anyway, they are gathered once for all
forwards without gradient of a step or an evaluation (`whole_base`): ordinary weights, by which the
fast sampler runs, nobody waits for anybody, and which are gone before the update.

Elsewhere, and in the update, a layer is gathered while it computes. A forward is thereby a
collective, but ranks sample answers of different lengths. So before each forward of a sharded part
all ranks say which part they need next; the highest that any named is run by all, by the others on
a dummy input, after which they ask again. A rank that has none left until another collective says
so by `join`, which `distributed` calls before each of its own. Forwards with gradient are equally
many on all ranks, so that backwards are in step. A part is called whole, `vision_model(..)` or
`language_model.model(..)`; its layers never by themselves.
"""

import contextlib
import math
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from rl_train.distributed import before_meeting, print0
from sa2va_hf import Sa2VAModel

NOTHING = -1  # in place of the number of a part: no forward left
MARGIN = 0.1  # of a GPU's memory, for activations and the sampler's cache beside the whole base
SETS_TO_COME = 3  # of what trains: Adam's two, and the gradients' buckets, which stay


def whole_base(policy):
    """A context in which the base of a policy is whole on this rank, if it fits.

    For forwards without gradient; a collective at its begin. Without --shard_base nothing happens.
    """
    return policy.shards.whole(policy) if policy.shards else contextlib.nullcontext()


def with_whole_base(policy, batches):
    """Yield the batches, from the first to the end of the last as `whole_base` has it."""
    with whole_base(policy):
        yield from batches


class Shards:
    """This rank's share of one model.

    Raises:
        ValueError: there is but one process.
    """

    def __init__(self, ranks):
        if ranks.world_size == 1:
            raise ValueError("--shard_base: one process has nobody to share with, start several")
        self.ranks, self.parts, self.layers, self.in_dummy = ranks, [], [], False
        self.fits = None  # whether a GPU has room for all layers: see `decide`

    def load(self, path, dtype, device) -> Sa2VAModel:
        """`Sa2VAModel.from_pretrained`, of which this rank keeps its share of the layers."""
        model = Sa2VAModel.blank(path, dtype)
        self.split(model)
        model.load_weights(path, self.fill)
        return model.to(device)

    def split(self, model):
        """Make a Sa2VAModel without LoRA keep this rank's share of its layers, on its device."""
        device, size = self.ranks.device, model.config.image_size
        names = ("fsdp",)  # PEFT reads it
        mesh = init_device_mesh(device.type, (self.ranks.world_size,), mesh_dim_names=names)
        vision, llm = model.vision_model, model.language_model.model
        how = dict(dtype=model.language_model.dtype, device=device)
        pixels = torch.zeros(1, 3, size, size, **how)
        embeds = torch.zeros(1, 1, model.config.llm.hidden_size, **how)
        for part, layers, dummy in (
            (vision, vision.encoder.layer, dict(pixel_values=pixels)),
            (llm, llm.layers, dict(inputs_embeds=embeds, use_cache=False)),
        ):
            for layer in layers:
                fully_shard(layer, mesh=mesh, reshard_after_forward=True)
            whole = {p for p in part.parameters() if not isinstance(p, DTensor)}
            fully_shard(part, mesh=mesh, ignored_params=whole)
            agree = partial(self._agree, len(self.parts))
            part.register_forward_pre_hook(lambda *_, agree=agree: agree(), prepend=True)
            self.parts.append((part, dummy))
            self.layers += layers
        before_meeting.append(self.join)

    @staticmethod
    def fill(tensor: torch.Tensor, value: torch.Tensor):
        """Write the whole `value` into `tensor`, of a sharded one this rank's share."""
        if isinstance(tensor, DTensor):
            where = (tensor.device_mesh, tensor.placements)
            value = distribute_tensor(value.to(tensor.device), *where, src_data_rank=None)
        tensor.copy_(value)

    @contextlib.contextmanager
    def whole(self, policy):
        """See `whole_base`."""
        self.join()  # the others may still be at forwards of before
        if self.fits is None:
            self.decide(policy)
        if not self.fits:
            yield
            return
        shares, modules = [], [*self.layers, *(part for part, _ in self.parts)]
        hooks = [hooks for m in modules for hooks in (m._forward_pre_hooks, m._forward_hooks)]
        kept = [dict(of_one) for of_one in hooks]  # that gather, reshard, agree with others
        try:
            for layer in self.layers:
                shares += gathered(layer)
            for of_one in hooks:
                of_one.clear()
            yield
        finally:
            for of_one, before in zip(hooks, kept):
                of_one.clear()
                of_one.update(before)
            for module, name, share in shares:
                setattr(module, name, share)
            policy.engine.release()

    def begin(self):
        """Return when this rank may run the LLM layer by layer, each in `lend`, with gradient."""
        self._agree(len(self.parts) - 1)

    @contextlib.contextmanager
    def lend(self, layer):
        """A context in which one layer is whole; a collective at its begin."""
        shares = gathered(layer)
        try:
            yield
        finally:
            for module, name, share in shares:
                setattr(module, name, share)

    def decide(self, policy):
        """Set `fits`, and say it: whether all ranks have room for the whole base. A collective.

        Before an optimizer has its state, which is counted as still to come.
        """
        shares = [p for layer in self.layers for p in shared(layer).values()]
        layers = sum(p.numel() * p.element_size() for p in shares)
        trained = sum(p.nbytes for p in policy.trainable.values())
        device = self.ranks.device
        fits = has_room(layers, trained, *free_memory(device))
        least = torch.tensor(int(fits), device=device)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        self.fits = bool(least)
        how = "once for all that takes no gradient" if self.fits else "anew for each forward"
        print0(f"--shard_base: {layers / 2**30:.1f} GiB of layers are gathered {how}")

    def join(self):
        """Take part in the other ranks' forwards until none has any left; all ranks call it."""
        self._agree(NOTHING)

    def _agree(self, number: int):
        """Return when this rank may run the part it needs, or at NOTHING when none needs any."""
        while not self.in_dummy and (wanted := self._highest(number)) != number:
            assert number == NOTHING or not torch.is_grad_enabled(), (
                "a forward with gradient while another rank samples: join() first"
            )
            part, dummy = self.parts[wanted]
            self.in_dummy = True
            with torch.no_grad():
                part(**dummy)
            self.in_dummy = False

    def _highest(self, number: int) -> int:
        highest = torch.tensor(number, device=self.ranks.device)
        dist.all_reduce(highest, dist.ReduceOp.MAX)
        return highest.item()


def has_room(layers, trained, free, total) -> bool:
    """Whether `layers` bytes fit into the free ones of `total` beside what else will be held.

    Args:
        trained: bytes of a set of what trains.
    """
    return free >= layers + SETS_TO_COME * trained + MARGIN * total


def free_memory(device) -> tuple[float, float]:
    """(bytes of a GPU that this process may still use, bytes that it has); of a CPU no end."""
    if device.type != "cuda":
        return math.inf, 0
    free, total = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + cached, total


def shared(layer) -> dict[tuple[nn.Module, str], DTensor]:
    """{(module, name): parameter} of those of which each rank holds a share."""
    return {
        (module, name): parameter
        for module in layer.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if isinstance(parameter, DTensor)
    }


def gathered(layer) -> list[tuple[nn.Module, str, DTensor]]:
    """The shares of a layer's parameters, in whose places stand whole ones from now on."""
    places = list(shared(layer))
    layer.unshard()
    whole = [getattr(module, name).detach().clone() for module, name in places]
    layer.reshard()
    shares = [(module, name, getattr(module, name)) for module, name in places]
    for (module, name), weight in zip(places, whole):
        setattr(module, name, nn.Parameter(weight, requires_grad=False))
    return shares


def held_bytes(model) -> tuple[int, int]:
    """(bytes that this rank holds, bytes of the whole) of all parameters."""
    held = sum((p.to_local() if isinstance(p, DTensor) else p).nbytes for p in model.parameters())
    return held, sum(p.numel() * p.element_size() for p in model.parameters())
