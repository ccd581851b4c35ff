"""Image tokens that the LLM reads: those of tiles, and of the regions in them."""

import torch

from .to_device import to_device


def pixel_shuffle(x: torch.Tensor) -> torch.Tensor:
    """Join the patches (t, n, D) of each 2 x 2 square: tokens (t, n / 4, 4 D), row-major."""
    side = int(x.shape[1] ** 0.5) // 2  # in tokens
    x = x.view(len(x), side, 2, side, 2, x.shape[-1])  # (t, rows, r, columns, c, D)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(len(x), side**2, -1)


def context_features(
    image_features: torch.Tensor,
    prompt_masks: list[torch.Tensor] | None,
    flags: torch.Tensor | None,
) -> torch.Tensor:
    """Return the features (tokens, C) at the `<IMG_CONTEXT>` ids of a batch, in order of the ids.

    They are the tokens of each tile, and after a flagged tile those of each of its regions.

    Args:
        image_features: (t, tokens, C), all tiles of all samples.
        prompt_masks: list over the flagged tiles of (n, 16, 16) bool regions, or None.
        flags: (t,) bool, tiles that regions refer to, or None.

    Raises:
        ValueError: the number of flags does not match.
    """
    (tiles, tokens, _), device = image_features.shape, image_features.device
    flags = [False] * tiles if flags is None else flags.tolist()
    masks = [] if prompt_masks is None else prompt_masks
    if len(flags) != tiles:
        raise ValueError(f"vp_overall_mask has {len(flags)} entries for {tiles} tiles")
    if sum(flags) != len(masks):
        raise ValueError(f"{len(masks)} prompt_masks for {sum(flags)} flagged tiles")
    indices, masks = [], iter(masks)  # indices among all tiles' tokens
    for tile, flag in enumerate(flags):
        indices.append(torch.arange(tile * tokens, (tile + 1) * tokens))
        if flag:
            cells = next(masks).cpu().bool().flatten(1)  # (n, 256)
            # Cells are row-major as tokens are, so a region's tokens are those of its cells, again.
            indices.append(cells.nonzero()[:, 1] + tile * tokens)
    return image_features.flatten(0, 1)[to_device(torch.cat(indices), device)]
