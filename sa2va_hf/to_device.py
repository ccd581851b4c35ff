"""From the CPU to a GPU, which goes on with what it has."""

import torch


def to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """The tensor on `device`, without a wait.

    More than 64 KB a GPU takes when it comes to them, for which the host waits unless their memory
    is pinned; and, pinned or not, if it is first copied to lie in one piece.
    """
    if torch.device(device).type == "cuda" and not tensor.is_cuda:
        tensor = tensor.contiguous().pin_memory()
    return tensor.to(device, non_blocking=True)
