"""Linears whose frozen weights are kept in 4 or 8 bits, as in QLoRA.

A weight is dequantised at each use and again in the backward, or within the sampler's product
(`int8_triton`), so sampling, scoring and the gradient read the same numbers. bitsandbytes' own
linears do not: its 8-bit one rounds inputs to int8 too, its 4-bit one uses another kernel where no
gradient is asked. So only its packing to NF4 is used.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import FunctionCtx, once_differentiable

BLOCK = 64  # weights of NF4 that share a scale
CHOICES = ("4bit", "8bit")


class QuantizedLinear(nn.Linear):
    """A frozen linear that keeps its weight in NF4 or int8.

    Args:
        linear: its weight's dtype is that of the product; its bias is kept as it is.
        choice: one of CHOICES; device: where to quantise, and to stay.

    Attributes:
        weight: (out * in / 2, 1) uint8 of two NF4 values each, or (out, in) int8.
        scale: float32, of each block of BLOCK weights or of each row.
    """

    def __init__(self, linear: nn.Linear, choice: str, device: torch.device | str):
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.choice, self.dtype = choice, linear.weight.dtype
        quantize = _to_nf4 if choice == "4bit" else _to_int8
        weight, scale = quantize(linear.weight.detach().to(device))
        # Parameters, so that they move with the model and count in its memory.
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = linear.bias

    def dequantize(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the weight (out, in) as the product reads it, written to `out` if that is given.

        Args: out: (out, in), contiguous and of the product's dtype.
        """
        if out is None:
            shape = (self.out_features, self.in_features)
            out = torch.empty(shape, dtype=self.dtype, device=self.weight.device)
        from_bits = _from_nf4 if self.choice == "4bit" else _from_int8
        from_bits(self.weight, self.scale, out)
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Under autocast a norm's output may be float32, which an nn.Linear would round alike.
        return _Product.apply(x.to(self.dtype), self)


class _Product(torch.autograd.Function):
    """Product with a dequantised weight, which is not saved for the backward but made again."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: torch.Tensor, linear: QuantizedLinear) -> torch.Tensor:
        ctx.linear = linear
        return F.linear(x, linear.dequantize(), linear.bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, d: torch.Tensor) -> tuple[torch.Tensor, None]:
        return d @ ctx.linear.dequantize(), None


def quantize_linears(module: nn.Module, choice: str, device: torch.device | str):
    """Replace every linear below `module` by a quantised one on `device`, one at a time."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, QuantizedLinear(child, choice, device))


def require_library(flag: str):
    """Raise ValueError, naming the flag and the remedy, if bitsandbytes cannot be imported."""
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"{flag} needs the bitsandbytes library: "
            "pip install -e '.[quantize]' (the extra `quantize`)"
        ) from error


def _to_nf4(weight):
    from bitsandbytes.functional import quantize_4bit  # of an extra

    packed, state = quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4")
    return packed, state.absmax


def _from_nf4(packed, scale, out):
    from bitsandbytes.functional import QuantState, dequantize_4bit

    state = QuantState(scale, shape=out.shape, dtype=out.dtype, blocksize=BLOCK, quant_type="nf4")
    if out.is_cuda:
        dequantize_4bit(packed, state, out=out)
    else:  # where it can't write to `out`
        out.copy_(dequantize_4bit(packed, state))


def _to_int8(weight):
    weight = weight.float()
    scale = weight.abs().amax(1) / 127  # (out,)
    # A row of zeros has scale 0, by which it can't be divided.
    divisor = torch.where(scale > 0, scale, 1.0)[:, None]
    return (weight / divisor).round().to(torch.int8), scale


def _from_int8(packed, scale, out):
    if out.is_cuda:
        from rl_train.engine.quantize_triton import multiply

        multiply(packed, scale, out)
    else:
        out.copy_(packed * scale[:, None])  # in float32, rounded once
