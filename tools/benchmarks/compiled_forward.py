"""The update's forward with layers that are one compiled function, forward and backward.

What `engine/forward.py` and its kernels are held against (`benchmark logprob --alternatives`).

Letters: m tokens of P sequences, S slots of each, C width, H query heads, K key-value heads,
D head size, r LoRA rank, k linears of one input.
"""

import inspect
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn

from rl_train.engine import blocks, forward, forward_torch
from tools.benchmarks.compiled import first_half, rms_norm, second_half

OPS = ("add_norm", "add_norm_backward", "rotate", "gate", "gate_backward")
# Before torch 2.12 heads that share their keys were taken as they are.
GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def lora_linear(x, weight, bias, scaling, *lora):
    """(m, outputs) of k linears; weight: (outputs, inputs); lora: A, B of the first, second, .."""
    y = F.linear(x, weight, bias)
    if not lora:
        return y
    inner = F.linear(x, torch.cat(lora[::2]).to(x.dtype)).chunk(len(lora) // 2, dim=1)
    parts = [a @ b.to(x.dtype).t() for a, b in zip(inner, lora[1::2])]
    return y + scaling * torch.cat(parts, dim=1)


def operands(linears):
    """What `lora_linear` takes of a `fused.FusedLinears`."""
    outputs, bias = sum(linears.sizes), linears.bias
    bias = None if bias is None else bias[:outputs]
    return linears.weight[:outputs], bias, linears.scaling, *linears.sources


def attend_varlen(q, k, v, keys, *ends):
    """(m, H*D) by torch's public attention of runs; the keys of a prompt are repeated."""
    # By way of float32, in which the gradients of repeated keys add up.
    k, v = (t.float()[keys].to(t.dtype) for t in (k, v))
    return varlen_attn(q, k, v, *ends, window_size=(-1, 0), **GROUPED).flatten(1)


def attend_flex(q, k, v, block_mask):
    """The same by FlexAttention over all packed tokens."""
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    mixed = flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True)
    return mixed[0].transpose(0, 1).flatten(1)


def mark(tensor, *dims):
    """tensor, of which these sizes change from step to step: not to be compiled for one of them."""
    for dim in dims:
        torch._dynamo.maybe_mark_dynamic(tensor, dim)
    return tensor


def varlen_runs(places, layout):
    # Their longest are upper bounds: rounded up, so that they seldom change.
    longest = [-(-length // 256) * 256 for length in places.longest]
    return mark(places.keys, 0), places.query_ends, places.key_ends, *longest


def flex_mask(places, layout):
    """Which packed tokens see which: `Layout.bias` without the padding."""
    part = mark(layout.part.flatten()[places.slots], 0)
    sequence = mark(places.slots // places.num_slots, 0)

    def seen(_, head, query, key):
        same = (sequence[query] == sequence[key]) & (key <= query)
        return same & ((part[query] == part[key]) | (part[key] == 0))

    size = len(part)
    blocks = create_block_mask(seen, None, None, size, size, device=part.device)
    for tensor in blocks.as_tuple():
        if torch.is_tensor(tensor):
            mark(tensor, *range(2, tensor.dim()))
    return (blocks,)


ATTENTION = dict(varlen=(attend_varlen, varlen_runs), flex=(attend_flex, flex_mask))


class CompiledForward:
    """`forward.hidden_states`, each layer compiled: in one ("varlen", "flex") or around "flash".

    "flash" is this project's own attention.
    """

    def __init__(self, attention: str, backend="inductor"):
        self.attention = attention
        attend, self.seen = ATTENTION.get(attention, (None, lambda *_: ()))

        def first(residual, delta, cos, sin, num_kv, norm, qkv):
            return first_half(residual, delta, *norm, qkv, cos, sin, num_kv, lora_linear)

        def joined(*args):
            residual, *heads = first(*args)
            return residual, torch.cat(heads, dim=1)

        def second(residual, mixed, out, norm, gate_up, down):
            return second_half(residual, mixed, out, *norm, gate_up, down, lora_linear)

        def whole(*args, rest, seen):
            residual, *heads = first(*args)
            return second(residual, attend(*heads, *seen), *rest)

        compiled = [torch.compile(f, backend=backend) for f in (joined, second, whole, rms_norm)]
        self.joined, self.second, self.whole, self.norm = compiled

    def __call__(self, fused, embeds, layout, gradient_checkpointing=False, cache=None):
        places, num_kv = blocks.runs(layout.part), fused.num_kv
        with torch.autocast(embeds.device.type, enabled=False):
            position = layout.position_ids.flatten(1)[:, places.slots].t()
            position = position.expand(-1, fused.num_axes).index_select(1, fused.axis)
            angle = (position * fused.inv_freq)[:, None]  # (m, 1, D/2)
            turn = [(f(angle) * fused.rope_scale).to(embeds.dtype) for f in (torch.cos, torch.sin)]
            bias = None if blocks.by_flash(embeds) else layout.bias(embeds.dtype)
            residual, seen = embeds.flatten(0, 1)[places.slots], self.seen(places, layout)
            delta = 0 * residual  # not zeros: what needs a gradient is alike in all layers

            def layer(residual, delta, linears, *norms):
                for tensor in (residual, delta, *turn):
                    mark(tensor, 0)
                qkv, *rest = map(operands, linears)
                norm, mlp_norm = ((n.weight, n.variance_epsilon) for n in norms)
                rest.insert(1, mlp_norm)
                args = residual, delta, *turn, num_kv, norm, qkv
                if self.attention != "flash":
                    return self.whole(*args, rest=rest, seen=seen)
                residual, heads = self.joined(*args)
                if bias is None:
                    mixed = blocks.Flash.apply(heads, num_kv, places)
                else:
                    mixed = blocks.dense_attention(heads, num_kv, places, bias)
                return self.second(mark(residual, 0), mark(mixed, 0), *rest)

            for parts in fused.layers:
                if gradient_checkpointing and torch.is_grad_enabled():
                    lora = [parameter for linears in parts[0] for parameter in linears.sources]
                    residual, delta = forward._Checkpoint.apply(
                        layer, parts, residual, delta, *lora
                    )
                else:
                    residual, delta = layer(residual, delta, *parts)
            final = fused.final_norm
            hidden = self.norm(mark(residual + delta, 0), final.weight, final.variance_epsilon)
            slots = hidden.new_zeros(embeds.shape).flatten(0, 1)
            return slots.index_copy(0, places.slots, hidden).view(embeds.shape)


NAMES = ("ops", "flash", *ATTENTION)


def instead(name: str, fused, backend="inductor"):
    """A context in which NAMES' alternative is `forward`: "ops" compiles its kernels' twins."""
    if name != "ops":
        return patch.object(forward, "hidden_states", CompiledForward(name, backend))
    ops = {op: torch.compile(getattr(forward_torch, op), backend=backend) for op in OPS}
    return patch.object(fused, "forward_ops", SimpleNamespace(**ops))
