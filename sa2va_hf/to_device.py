"""Transfers from the CPU to a GPU that do not synchronise."""

import torch


def to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Copy a tensor to `device` without waiting for the GPU.

    The host would wait for transfers of more than 64 KB from memory that is not pinned, and of
    tensors that are not contiguous.
    """
    if torch.device(device).type == "cuda" and not tensor.is_cuda:
        tensor = tensor.contiguous().pin_memory()
    return tensor.to(device, non_blocking=True)
