"""A decode step as plain functions under torch.compile, which its kernels are held against.

Letters: N = P*G rows about P prompts, m tokens (in a decode step N), H query heads, K key-value
heads, D head size, L prompt slots, T suffix slots, S = L + T*G, C width, F MLP width, r LoRA rank,
k linears of one input.
"""

from collections.abc import Callable
from copy import copy
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from rl_train.engine import decode_torch
from rl_train.engine.decode import Graph
from rl_train.engine.fused_weights import FusedLinears, FusedModel, norm_operands
from rl_train.engine.layers import rms_norm
from rl_train.engine.lm_head import product

RECOMPILE_LIMIT = 64  # each size, and each shape that one function meets, is compiled for itself
BLOCK = 128  # keys that FlexAttention skips or reads together
AUTOTUNE = "max-autotune-no-cudagraphs"  # with coordinate descent, and products in Triton
KERNELS = ("add", "rotate_and_store", "attend", "gate")  # the other parts are compiled anyway


def first_half(
    residual: torch.Tensor,
    delta: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    qkv: tuple,
    cos: torch.Tensor,
    sin: torch.Tensor,
    num_kv: int,
    linear: Callable,
):
    """Return residual + delta (m, C), q (m, H, D), k (m, K, D) and v (m, K, D).

    Args: cos, sin: (m, 1, D/2).
    """
    residual = residual + delta
    heads = linear(rms_norm(residual, norm, eps), *qkv).unflatten(1, (-1, 2 * cos.shape[2]))
    first, second = heads[:, :-num_kv].chunk(2, dim=2)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=2)
    return residual, rotated[:, :-num_kv], rotated[:, -num_kv:], heads[:, -num_kv:]


def second_half(
    residual: torch.Tensor,
    attended: torch.Tensor,
    out: tuple,
    norm: torch.Tensor,
    eps: float,
    gate_up: tuple,
    down: tuple,
    linear: Callable,
):
    """Return (residual (m, C), what the MLP adds to it (m, C)) behind attention (m, H*D)."""
    residual = residual + linear(attended, *out)
    gate, up = linear(rms_norm(residual, norm, eps), *gate_up).chunk(2, dim=1)
    return residual, linear(F.silu(gate) * up, *down)


def fused_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, lora_b: torch.Tensor | None
):
    """Return (m, outputs) by a product with [W; A] and one with LoRA's B.

    Args:
        weight: (outputs + k*r, inputs); bias: or None.
        lora_b: scaled; (k*r, outputs), in blocks, or (k, r, outputs of each); None: no LoRA.
    """
    y = F.linear(x, weight, bias)
    if lora_b is None:
        return y
    rank = lora_b.shape[:-1].numel()  # of all
    y, inner = y[:, :-rank].float(), y[:, -rank:]
    if lora_b.dim() == 2:
        return (y + inner @ lora_b).to(x.dtype)
    lora_outputs = torch.bmm(inner.unflatten(1, lora_b.shape[:2]).transpose(0, 1), lora_b)
    return (y + lora_outputs.transpose(0, 1).flatten(1)).to(x.dtype)


def operands(linears: FusedLinears):
    """Return the arguments of `fused_linear` for a `FusedLinears` with its current LoRA."""
    lora_b = linears.lora_b
    if lora_b is not None:
        # Two equal blocks are a batched product; three of unequal widths one block-diagonal matrix.
        parts = [b.t() * linears.scaling for b in lora_b.split_with_sizes(linears.sizes)]
        lora_b = torch.stack(parts) if len(parts) == 2 else torch.block_diag(*parts)
    return linears.weight, linears.bias, lora_b


def store(
    k: torch.Tensor, v: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
):
    """Write k, v (N, K, D) to `slots` (G,) of keys, values (P, K, S, D)."""
    for cache, new in ((keys, k), (values, v)):
        cache[:, :, slots] = new.unflatten(0, (len(cache), -1)).transpose(1, 2)


def attend_by_products(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor
):
    """Return attention (N, H*D) of q (N, H, D) over keys, values (P, K, S, D).

    Args: bias: (P, 1, G, 1, S).
    """
    (n, num_heads, size), (num_prompts, num_kv, *_) = q.shape, keys.shape
    per, group = num_heads // num_kv, n // num_prompts
    q = (q * size**-0.5).view(num_prompts, group, num_kv, per, size).transpose(1, 2)
    scores = q.reshape(num_prompts, num_kv, -1, size) @ keys.transpose(2, 3)
    scores = scores.float().unflatten(2, (group, per)) + bias
    p = torch.softmax(scores, dim=-1).to(q.dtype).flatten(2, 3)
    return (p @ values).unflatten(2, (group, per)).transpose(1, 2).reshape(n, -1)


def attend_by_flex(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, block_mask: BlockMask
):
    """Return what `attend_by_products` does; `block_mask` is of the G rows of a prompt."""
    grouped = q.unflatten(0, (len(keys), -1)).transpose(1, 2)  # (P, H, G, D)
    mixed = flex_attention(grouped, keys, values, block_mask=block_mask, enable_gqa=True)
    return mixed.transpose(1, 2).reshape(len(q), -1)


def first(
    residual: torch.Tensor,
    delta: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    qkv: tuple,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
):
    """Return (residual, q) of `first_half`, which stores k and v."""
    num_kv = keys.shape[1]
    residual, q, k, v = first_half(residual, delta, norm, eps, qkv, cos, sin, num_kv, fused_linear)
    store(k, v, keys, values, slots)
    return residual, q.contiguous()


def between(residual: torch.Tensor, mixed: torch.Tensor, layer: tuple, following: tuple):
    """Finish the layer of attention `mixed`, and return `first` of the layer that follows."""
    return first(*second_half(residual, mixed, *layer, fused_linear), *following)


def last(residual: torch.Tensor, mixed: torch.Tensor, layer: tuple, norm: torch.Tensor, eps: float):
    """Return the final norm's output (N, C) after attention `mixed` and the rest of its layer."""
    residual, delta = second_half(residual, mixed, *layer, fused_linear)
    return rms_norm(residual + delta, norm, eps)


def slots_and_bias(step: torch.Tensor, pad: torch.Tensor, length: int, group: int, slots: int):
    """Return (slots (G,) of this token, the end of those in use (1,), bias (P, 1, G, 1, S))."""
    row, slot = torch.arange(group, device=step.device), torch.arange(slots, device=step.device)
    end = length + (step + 1) * group
    # Behind the prompt lie the first tokens of all G rows, then the second ones: every G-th is a
    # row's own.
    own_slots = (slot >= length) & (slot < end) & ((slot - length) % group == row[:, None])
    visible = own_slots | ((slot >= pad[:, None, None]) & (slot < length))  # (P, G, S)
    bias = torch.zeros_like(visible, dtype=torch.float32).masked_fill(~visible, float("-inf"))
    return end - group + row, end, bias[:, None, :, None]


class CompiledGraph(Graph):
    """A decode step whose parts between, before and behind attention are compiled functions.

    The LoRA is the one in use when it is made.

    Args:
        attention: "products", "flex", or "kernel": this project's, the rest compiled.
        mode, backend: of torch.compile.
    """

    def __init__(
        self,
        *args: Any,
        attention: str,
        mode: str | None = None,
        backend: str | Callable = "inductor",
        **sizes: Any,
    ):
        self.attention = attention
        self.compile = partial(torch.compile, dynamic=False, mode=mode, backend=backend)
        super().__init__(*args, **sizes)

    def _capture(self, pool):
        fused, compile = self.fused, self.compile
        fused.refresh()
        self.operands = [list(map(operands, layer.linears)) for layer in fused.layers]
        self.first, self.between, self.last = map(compile, (first, between, last))
        self.slots_and_bias = compile(slots_and_bias)
        self.choose = compile(decode_torch.choose)
        if self.attention == "kernel":
            self.attend, self.caches = fused.decode_ops.attend, self.suffix
        else:
            self._join_caches()
            flex = self.attention == "flex"
            self.attend = compile(attend_by_flex if flex else attend_by_products)
        return super()._capture(pool)

    def _join_caches(self):
        """Join the slots of a prompt and its rows: [prompt | first of all rows | second | ..]."""
        layers, two, num_prompts, num_kv, length, size = self.prefix.shape
        group, device = self.num_generations, self.prefix.device
        slots = length + self.suffix.shape[4] * group
        self.caches = self.prefix.new_zeros(layers, two, num_prompts, num_kv, slots, size)
        self.prefix, self.end = self.caches[..., :length, :], self.pad.clone()
        pad, end = self.pad, self.end  # (P,)

        def seen(
            prompt: torch.Tensor, head: torch.Tensor, row: torch.Tensor, slot: torch.Tensor
        ) -> torch.Tensor:
            own = (slot >= length) & ((slot - length) % group == row) & (slot < end[prompt])
            return own | ((slot >= pad[prompt]) & (slot < length))

        if self.attention == "flex":
            blocks = -(-slots // BLOCK)
            self.blocks = torch.zeros(num_prompts, 1, 1, dtype=torch.int32, device=device)
            every = torch.arange(blocks, dtype=torch.int32, device=device)
            every = every.expand(num_prompts, 1, 1, -1).contiguous()
            self.mask = BlockMask.from_kv_blocks(
                self.blocks, every, BLOCK_SIZE=BLOCK, mask_mod=seen, seq_lengths=(group, slots)
            )

    def forward(self):
        layers, final, kernel = self.fused.layers, self.fused.final_norm, self.attention == "kernel"
        cos, sin = (
            values[self.position][:, None] for values in (self.cos, self.sin)
        )  # (N, 1, D/2)
        residual = F.embedding(self.token, self.fused.embedding)
        slots = self.step  # of their own suffixes
        if not kernel:
            length, whole = self.prefix.shape[4], self.caches.shape[4]
            slots, end, visible = self.slots_and_bias(
                self.step, self.pad, length, self.num_generations, whole
            )
        if self.attention == "flex":
            self.end.copy_(end.expand_as(self.end))
            self.blocks.copy_(((end + BLOCK - 1) // BLOCK).view(1, 1, 1).expand_as(self.blocks))
            visible = self.mask
        following = [
            (*norm_operands(layer.norm), qkv, cos, sin, *layer_cache, slots)
            for layer, (qkv, *_), layer_cache in zip(layers, self.operands, self.caches)
        ]
        residual, q = self.first(residual, torch.zeros_like(residual), *following[0])
        for number, fused_layer in enumerate(layers):
            layer_cache = self.caches[number]
            if kernel:
                mixed = self.attend(
                    q, *self.prefix[number], *layer_cache, self.pad, self.done, self.step
                )
            else:
                mixed = self.attend(q, *layer_cache, visible)
            _, out, *mlp = self.operands[number]
            layer = out, *norm_operands(fused_layer.mlp_norm), *mlp
            if number + 1 == len(layers):
                normed = self.last(residual, mixed, layer, *norm_operands(final))
                return normed, normed
            residual, q = self.between(residual, mixed, layer, following[number + 1])

    def sample(self, hidden: torch.Tensor):
        self.choose(self, product(hidden, self.fused.padded_head.t()))


GRAPHS = dict(
    compiled=dict(attention="flex"),
    compiled_products=dict(attention="products"),
    compiled_autotune=dict(attention="flex", mode=AUTOTUNE),
    mixed_attend=dict(attention="kernel"),
)


WITHOUT = {f"without_{name}": [name] for name in KERNELS} | dict(without_any=KERNELS)


def without(fused: FusedModel, name: str):
    """Return a copy of `fused` that decodes with WITHOUT[name] as compiled plain torch."""
    compiled = {n: torch.compile(getattr(decode_torch, n), dynamic=False) for n in WITHOUT[name]}
    other = copy(fused)
    other.decode_ops = SimpleNamespace(**vars(fused.decode_ops) | compiled)
    return other
