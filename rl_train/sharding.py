"""The frozen base shared out over the ranks (FSDP2, --shard_base), if it does not fit one GPU.

Each of R ranks keeps 1/R of every layer of the LLM and of the vision encoder; a layer is gathered
while it computes. What trains stays whole on every rank, and so do embeddings, lm_head and SAM2:
nobody else knows of it, and results are those of a run without it.

A forward is thereby a collective, but ranks sample answers of different lengths. So before each
forward of a sharded part all ranks say which part they need next; the highest that any named is run
by all, by the others on a dummy input, after which they ask again. A rank that has none left until
another collective says so by `join`, which `distributed` calls before each of its own. Forwards
with gradient are equally many on all ranks, so that backwards are in step. A part is called whole,
`vision_model(..)` or `language_model.model(..)`; its layers never by themselves.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from rl_train.distributed import before_meeting
from sa2va_hf import Sa2VAModel

NOTHING = -1  # in place of the number of a part: no forward left


class Shards:
    """This rank's share of one model.

    Raises:
        ValueError: there is but one process.
    """

    def __init__(self, ranks):
        if ranks.world_size == 1:
            raise ValueError("--shard_base: one process has nobody to share with, start several")
        self.ranks, self.parts, self.in_dummy = ranks, [], False

    def load(self, path, dtype, device) -> Sa2VAModel:
        """`Sa2VAModel.from_pretrained`, of which this rank keeps its share of the layers."""
        model = Sa2VAModel.blank(path, dtype)
        self.split(model)
        model.load_weights(path, self.fill)
        before_meeting.append(self.join)
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

    @staticmethod
    def fill(tensor: torch.Tensor, value: torch.Tensor):
        """Write the whole `value` into `tensor`, of a sharded one this rank's share."""
        if isinstance(tensor, DTensor):
            where = (tensor.device_mesh, tensor.placements)
            value = distribute_tensor(value.to(tensor.device), *where, src_data_rank=None)
        tensor.copy_(value)

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


def held_bytes(model) -> tuple[int, int]:
    """(bytes that this rank holds, bytes of the whole) of all parameters."""
    held = sum((p.to_local() if isinstance(p, DTensor) else p).nbytes for p in model.parameters())
    return held, sum(p.numel() * p.element_size() for p in model.parameters())
