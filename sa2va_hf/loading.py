"""Arguments of transformers' `from_pretrained`, as the original's scripts pass them."""

import logging
from pathlib import Path

import torch
from safetensors import safe_open

from .configuration_sa2va import Sa2VAConfig
from .hub import model_folder
from .weights import find_keys

CALL = "Sa2VAModel.from_pretrained:"  # with which a sentence about its folder begins

# They choose how a model is read or which kernel computes it; True and False give the same model.
MEANINGLESS = (
    "_fast_init",
    "attn_implementation",
    "local_files_only",
    "low_cpu_mem_usage",
    "trust_remote_code",
    "use_flash_attn",
    "use_safetensors",
    "weights_only",
)
QUANTIZED = ("load_in_4bit", "load_in_8bit", "quantization_config")
_STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def resolve(
    path: str | Path,
    dtype: torch.dtype | str | None,
    device: torch.device | str | None,
    torch_dtype: torch.dtype | str | None,
    device_map: str | dict | None,
    others: dict,
) -> tuple:
    """Return the dtype and device that arguments of `Sa2VAModel.from_pretrained` mean.

    Arguments without a meaning here are named in one line of the log.

    Raises:
        ValueError: an argument that would change the model, two that contradict each other, an
            unknown dtype or more than one device; names it.
    """
    # False and None ask for nothing, so scripts may pass them.
    if wrong := sorted(name for name, value in others.items() if value and name not in MEANINGLESS):
        remedy = ""
        if any(name in QUANTIZED for name in wrong):
            remedy = "; weights are float32, bfloat16 or float16: pass dtype='bfloat16'"
        raise ValueError(f"Sa2VAModel.from_pretrained does not support {', '.join(wrong)}{remedy}")
    if ignored := sorted(name for name in others if name in MEANINGLESS):
        logging.getLogger(__name__).warning("from_pretrained ignores %s", ", ".join(ignored))
    device = _single_device(_either("device", device, "device_map", device_map))
    dtype = _either("dtype", dtype, "torch_dtype", torch_dtype) or torch.float32
    if dtype == "auto":
        folder = model_folder(CALL, path)
        dtype = Sa2VAConfig.from_pretrained(folder).dtype_name or stored_dtype(folder)
    # A name as transformers writes it: "bfloat16" or "torch.bfloat16".
    named = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(named, torch.dtype):
        raise ValueError(f"Sa2VAModel.from_pretrained: dtype {dtype!r} is none of torch's")
    return named, device


def _either(name, value, other, other_value):
    """Return the argument that is given; ValueError if both are and they differ."""
    if value is not None and other_value is not None and value != other_value:
        raise ValueError(
            f"Sa2VAModel.from_pretrained: {name} is {value!r}, {other} {other_value!r}"
        )
    return other_value if value is None else value


def _single_device(device_name) -> torch.device:
    """Return the device that a `device_map` or a device names, the CPU if None.

    A map may name parts, if all lie on one device. "auto" and its like are the one accelerator, if
    there are not several.
    """
    if isinstance(device_name, dict):
        devices = {"disk" if name == "disk" else _device(name) for name in device_name.values()}
        device_name = devices.pop() if len(devices) == 1 else "several"
    if device_name in ("auto", "balanced", "balanced_low_0", "sequential"):
        if torch.cuda.device_count() < 2:
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        device_name = "several"
    if device_name in ("several", "disk"):
        raise ValueError(
            "Sa2VAModel.from_pretrained: device_map must name one device, such as 'cuda:0'"
        )
    device = _device("cpu" if device_name is None else device_name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        num_gpus = torch.cuda.device_count()
        raise ValueError(f"Sa2VAModel.from_pretrained: no {device} here, of {num_gpus} GPUs")
    return device


def _device(device_name) -> torch.device:
    """Return a device by its name; a number is that of a GPU, also where torch knows none."""
    return torch.device(f"cuda:{device_name}" if isinstance(device_name, int) else device_name)


def stored_dtype(folder: Path) -> torch.dtype:
    """Return the dtype of the LLM's norms in `folder`; ValueError if it has no safetensors."""
    for key, file in find_keys(folder).items():
        if key.startswith(("language_model.", "model.")) and key.endswith("norm.weight"):
            with safe_open(file, framework="pt") as reader:
                return _STORED[reader.get_slice(key).get_dtype()]
    raise ValueError(f"{folder} holds no safetensors with a language model")
