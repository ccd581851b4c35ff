"""A pretended GPU: tensors that say they are on another device, compute on the CPU, count waits.

For tests without a GPU of which operations would fail on one, as their tensors lie on two devices,
and at which the host would wait until the GPU has computed what it was given.

    gpu = Gpu()
    gpu.take(model)
    with gpu:
        compute()
    gpu.waits  # [(operation, "file:function" of the repository's code that called it)]
"""

import sys
from pathlib import Path
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

ROOT, DEVICE, aten = Path(__file__).parents[1], torch.device("meta"), torch.ops.aten
# Of which the host must know a number, or the size of what comes out.
READS = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "bincount",
    "equal",
    "unique_consecutive",
}
READS |= {"_unique2", "unique_dim", "repeat_interleave"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}


class There(torch.Tensor):
    """A tensor on the pretended device; `here` is the tensor that it stands for."""

    @staticmethod
    def __new__(cls, here, gpu):
        layout = dict(strides=here.stride(), storage_offset=here.storage_offset())
        new = torch.Tensor._make_wrapper_subclass
        tensor = new(cls, here.shape, **layout, dtype=here.dtype, device=DEVICE)
        tensor.here, tensor.gpu = here, gpu
        return tensor

    @property
    def data(self):
        return There(self.here, self.gpu)

    @data.setter
    def data(self, other):
        assert isinstance(other, There), "data of another device"
        self.here = other.here

    def data_ptr(self):
        return self.here.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return _gpu_of(args).run(function, args, kwargs or {})


class Gpu:
    """The context in which tensors are made there, and moved; `waits` is what was counted."""

    def __init__(self):
        self.waits = []

    def __enter__(self):
        self.modes = [_Dispatch(self), _Functions(self), mock.patch("torch.autocast", _Autocast)]
        for mode in self.modes:
            mode.__enter__()

    def __exit__(self, *error):
        for mode in reversed(self.modes):
            mode.__exit__(*error)

    def take(self, module):
        """Move a module's parameters, buffers and other tensors there, in place."""
        for parameter in list(module.parameters()):
            there = There(parameter.detach(), self)
            moved = torch.nn.Parameter(there, parameter.requires_grad)
            torch.utils.swap_tensors(parameter, moved)
        for part in module.modules():
            for held in (part._buffers, vars(part)):
                for name, value in held.items():
                    if isinstance(value, torch.Tensor):
                        held[name] = There(value, self)

    def wait(self, operation: str):
        frame, place = sys._getframe(1), None
        while frame and not place:
            file, name = Path(frame.f_code.co_filename), frame.f_code.co_name
            ours = file.is_relative_to(ROOT)
            ours = ours and file.parts[len(ROOT.parts)] in ("rl_train", "sa2va_hf")
            if ours and not name.startswith("<"):  # comprehensions have frames before Python 3.12
                place = f"{file.stem}:{name}"
            frame = frame.f_back
        self.waits.append((operation, place))

    def run(self, function, args, kwargs):
        """Return an operation's result, on the device where a GPU would have it."""
        name, device = function.overloadpacket.__name__, kwargs.get("device")
        tensors = []
        tree_map(lambda x: tensors.append(x) if isinstance(x, torch.Tensor) else x, (args, kwargs))
        there = any(isinstance(t, There) for t in tensors)
        here = any(t.ndim for t in tensors if not isinstance(t, There))
        to_there = there if device is None else torch.device(device) == DEVICE
        if device is not None:
            kwargs = kwargs | dict(device="cpu")
        if not there and not to_there:
            return function(*args, **kwargs)
        if name in ("_to_copy", "copy_"):
            target, source = (args[0], args[1]) if name == "copy_" else (None, args[0])
            onto = isinstance(target, There) if name == "copy_" else to_there
            late = kwargs.get("non_blocking") or name == "copy_" and len(args) > 2 and args[2]
            if isinstance(source, There) != onto and source.ndim and not (onto and late):
                self.wait("copy")
            if name == "copy_":
                _here(target).copy_(_here(source))
                return target
        elif there and here:
            assert name in INDEXING and isinstance(args[0], There), f"{name}: of two devices"
            self.wait(name)
        index = args[1] if name in INDEXING else ()
        masks = any(i is not None and i.dtype == torch.bool for i in index)
        if masks or name in READS and kwargs.get("output_size") is None:
            self.wait(name)
        out = function(*tree_map(_here, args), **tree_map(_here, kwargs))
        if not function._schema.returns:
            return None
        if function._schema.is_mutable and isinstance(out, torch.Tensor):
            return kwargs.get("out", args[0])
        if to_there:
            out = tree_map(lambda x: There(x, self) if isinstance(x, torch.Tensor) else x, out)
        return out


def _here(x):
    return x.here if isinstance(x, There) else x


def _gpu_of(args) -> Gpu:
    found = []
    tree_map(lambda x: found.append(x.gpu) if isinstance(x, There) else x, args)
    return found[0]


class _Dispatch(TorchDispatchMode):
    """Also of operations whose inputs are all here."""

    def __init__(self, gpu):
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return self.gpu.run(function, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """Functions of a tensor there that the dispatcher does not see, or would refuse."""

    def __init__(self, gpu):
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        if name in ("tolist", "numpy") and isinstance(args[0], There):
            self.gpu.wait(name)
            return getattr(args[0].here, name)()
        if function is torch.tensor and kwargs.get("device") == DEVICE:
            self.gpu.wait(name)
            return There(torch.tensor(*args, **kwargs | dict(device="cpu")), self.gpu)
        if name == "scaled_dot_product_attention" and isinstance(args[0], There):
            # torch would choose a kernel of the device that it pretends to be
            how = {k: v for k, v in kwargs.items() if k in ("attn_mask", "scale", "enable_gqa")}
            return torch._scaled_dot_product_attention_math(*args[:3], **how)[0]
        return function(*args, **kwargs)


class _Autocast(torch.autocast):
    """Autocast of the pretended device is that of the CPU, the only name that it knows."""

    def __init__(self, device_type, *args, **kwargs):
        super().__init__("cpu" if device_type == DEVICE.type else device_type, *args, **kwargs)
