"""Read the weight files of a checkpoint folder in the original layout into a `Sa2VAModel`."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from .checkpoint_keys import native_tensor, original_keys, original_shapes

INDEX = "model.safetensors.index.json"
SAM3_KEY = ".sam2_convs."  # in names of weights of SAM3 alone
DTYPES = ("F32", "BF16", "F16", "F64")


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype):
    """Context in which new float tensors, and so the parameters of new modules, have `dtype`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def load(model: nn.Module, folder: Path, write: Callable[[torch.Tensor, torch.Tensor], object]):
    """Write every tensor of the folder's files into the model by write(tensor, value).

    Raises:
        ValueError: no checkpoint there, a LoRA adapter instead of a model, missing or unexpected
            keys, a shape that does not fit the config, or an unreadable file; names the file.
    """
    files, source = find_keys(folder), {}
    llm, tied, config = model.language_model, model.config.tied, model.config.llm
    native_keys = (model.embed_tokens_key, model.lm_head_key)
    names = {original_keys(key, config)[0][0]: key for key in native_keys}
    # A file with both may hold two that differ: they are read apart, and tied again if equal.
    if tied and files.keys() >= names.keys():
        model.unwritten = None
        llm.lm_head.weight = nn.Parameter(torch.empty_like(llm.lm_head.weight))
    elif tied and files.keys() & names.keys():  # one tensor under either name
        present, absent = sorted(names, key=lambda key: key not in files)
        files[absent], source, model.unwritten = files[present], {absent: present}, names[absent]
    state, has_sam3 = model.state_dict(), model.config.has_sam3
    check_keys(folder, files, original_shapes(state, config, has_sam3))
    # All files stay open: a native tensor may be put together of several.
    with contextlib.ExitStack() as stack:
        readers = {
            file: stack.enter_context(safe_open(file, framework="pt"))
            for file in set(files.values())
        }

        def read(key: str) -> torch.Tensor:
            return readers[files[key]].get_tensor(source.get(key, key))

        for name, tensor in state.items():
            write(tensor, native_tensor(name, read, config, has_sam3))
    if tied and torch.equal(llm.lm_head.weight, llm.model.embed_tokens.weight):
        llm.lm_head.weight = llm.model.embed_tokens.weight


def find_keys(folder: Path) -> dict[str, Path]:
    """Return {original key: safetensors file} of a checkpoint folder.

    Every file's header is read, which finds truncated files.

    Raises:
        ValueError: no checkpoint there, or an index or file that is missing or damaged; names it.
    """
    index = folder / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            if outside := [name for name in names if Path(name).name != name]:
                raise ValueError(f"{outside[0]!r} is no file of this folder")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is damaged: {error!r}") from error
    elif (folder / "model.safetensors").is_file():
        names = ["model.safetensors"]
    elif (folder / "adapter_config.json").is_file():
        raise ValueError(
            f"{folder} holds a LoRA adapter, not a Sa2VA model: "
            "export it first (python -m tools.export)"
        )
    else:
        raise ValueError(f"{folder} holds neither model.safetensors nor {INDEX}")
    files = {}
    for name in names:
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name} is missing although {index.name} lists it")
        try:
            with safe_open(folder / name, framework="pt") as reader:
                files.update(dict.fromkeys(reader.keys(), folder / name))  # header only
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{folder / name} is damaged or truncated: {error}") from error
    return files


def holds_sam3(folder: Path) -> bool:
    """Return whether a folder's weights have SAM3's names; False without weights.

    No config.json says which of SAM2 and SAM3 a model has.
    """
    if not (folder / INDEX).is_file() and not (folder / "model.safetensors").is_file():
        return False
    return any(SAM3_KEY in key for key in find_keys(folder))


def check_keys(path: Path, files: dict[str, Path], expected: dict[str, tuple[int, ...]]):
    """Raise ValueError unless `files` hold just the keys `expected`, in their shapes, as floats."""
    missing, unexpected = sorted(set(expected) - set(files)), sorted(set(files) - set(expected))
    if missing or unexpected:
        raise ValueError(
            f"{path}: {len(missing)} keys missing {missing[:5]}, "
            f"{len(unexpected)} unexpected {unexpected[:5]}"
        )
    for file in sorted(set(files.values())):
        with safe_open(file, framework="pt") as reader:
            for key in reader.keys():
                header = reader.get_slice(key)
                if (dtype := header.get_dtype()) not in DTYPES:
                    raise ValueError(f"{file}: {key} is of {dtype}, not of {', '.join(DTYPES)}")
                shape = tuple(header.get_shape())
                if shape != expected[key]:
                    raise ValueError(
                        f"{file}: {key} has shape {shape}, config.json asks for {expected[key]}"
                    )
