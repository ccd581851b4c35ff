"""SAM2's mask decoder with a language prompt, which transformers' own forwards do not take.

`sam` is transformers' `Sam2VideoModel`. Letters: B images, P prompts.
"""

import torch
from torch import nn


def decoder_features(sam: nn.Module, features: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return SAM2's pyramid as input of the mask decoder without memory, in the decoder's dtype.

    Args:
        features: [(B, 256, 256, 256), (B, 256, 128, 128), (B, 256, 64, 64)], `sam_features`.

    Returns:
        [(B, 32, 256, 256), (B, 64, 128, 128), (B, 256, 64, 64)]; the last with `no_mem_embed`.
    """
    dtype = sam.mask_decoder.mask_tokens.weight.dtype
    fine, middle, coarse = (f.to(dtype) for f in features)
    return [
        sam.mask_decoder.conv_s0(fine),
        sam.mask_decoder.conv_s1(middle),
        coarse + sam.no_memory_embedding.to(dtype).view(1, -1, 1, 1),
    ]


def decode_candidates(
    sam: nn.Module, high_res: list[torch.Tensor], coarse: torch.Tensor, prompts: torch.Tensor | None
):
    """Decode three candidate masks for each language prompt.

    The sparse prompt is [not_a_point, not_a_point, language], the dense one `no_mask_embed`.

    Args:
        high_res, coarse: `decoder_features` of the image of each of P prompts.
        prompts: (P, 256), or None for a tracked frame, which has no language token.

    Returns:
        mask logits (P, 3, 256, 256), predicted IoU (P, 3), output tokens (P, 3, 256), object score
        logit (P, 1).
    """
    n, dtype, device = len(coarse), coarse.dtype, coarse.device
    # A point of label -1 is padding, and the encoder adds another: (P, 1, 2, 256).
    sparse, dense = sam.prompt_encoder(
        input_points=torch.zeros(n, 1, 1, 2, device=device, dtype=dtype),
        input_labels=-torch.ones(n, 1, 1, dtype=torch.int32, device=device),
        input_boxes=None,
        input_masks=None,
    )
    sparse = sparse.to(dtype)
    if prompts is not None:
        sparse = torch.cat([sparse, prompts[:, None, None].to(dtype)], dim=2)  # (P, 1, 3, 256)
    image_positions = sam.get_image_wide_positional_embeddings().to(dtype)
    # multimask_output leaves out the first of the decoder's four masks.
    masks, iou, tokens, score = sam.mask_decoder(
        image_embeddings=coarse,
        sparse_prompt_embeddings=sparse,
        dense_prompt_embeddings=dense.to(dtype),
        image_positional_embeddings=image_positions.expand(n, -1, -1, -1),
        multimask_output=True,
        high_resolution_features=high_res,
    )
    # Axis 1 counts the prompts of an image: one here.
    return masks[:, 0], iou[:, 0], tokens[:, 0], score[:, 0]
