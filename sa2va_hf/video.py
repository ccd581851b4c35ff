"""Track language prompts through a video with the memory of transformers' SAM2 or SAM3 tracker.

The native forward is not used whole: it takes no language prompt, and it replaces the mask of an
object that it believes absent, which the original Sa2VA does not. Memory attention, memory encoder
and their bookkeeping are native.

Letters: M objects, F frames, h w sides of the coarsest feature map.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from transformers.models.sam2_video.modeling_sam2_video import Sam2VideoInferenceSession

from .mask_decoder import decode_candidates, decoder_features
from .sam3 import gate

if TYPE_CHECKING:
    from .modeling_sa2va import Sa2VAModel


@torch.no_grad()
def track(
    model: "Sa2VAModel",
    frames: Iterable[list[torch.Tensor]],
    prompts: torch.Tensor,
    num_prompted: int,
) -> torch.Tensor:
    """Return mask logits (M, F, 256, 256), float32, of M objects, each tracked by itself.

    The first `num_prompted` frames are conditioning frames: each is decoded from the language
    prompt without memory, as a single image would be. The later ones are decoded without the
    prompt, from features conditioned on the memories of those and of the 6 frames before.

    Args:
        model: `Sa2VAModel`.
        frames: iterable of F `sam_features` of one frame.
        prompts: (M, 256) language embeddings.

    Source: `language_embd_inference` and `propagate_in_video` of the original.
    """
    sam = model.grounding_encoder
    session = Sam2VideoInferenceSession(
        inference_device=model.device,
        inference_state_device=model.device,
        dtype=sam.no_memory_embedding.dtype,
    )
    objects = [session.obj_id_to_idx(m) for m in range(len(prompts))]
    logits = [[] for _ in objects]
    for frame, features in enumerate(frames):
        prompted = frame < num_prompted
        fine, middle, no_memory = decoder_features(sam, features)
        coarse = features[-1].flatten(2).permute(2, 0, 1)  # (h*w, 1, 256)
        position_encoding = sam.vision_encoder.neck.position_encoding(
            features[-1].shape, coarse.device, coarse.dtype
        )
        # Objects do not see each other: each has its own memory.
        for m in objects:
            conditioned = (
                no_memory
                if prompted
                else sam._prepare_memory_conditioned_features(
                    session,
                    frame,
                    m,
                    is_initial_conditioning_frame=False,
                    current_vision_features=coarse,
                    current_vision_positional_embeddings=position_encoding.flatten(2).permute(
                        2, 0, 1
                    ),
                    num_total_frames=frame + 1,
                )
            )
            masks, iou, tokens, score = decode_candidates(
                sam, [fine, middle], conditioned, prompts[m : m + 1] if prompted else None
            )
            best = iou[0].argmax()  # of three candidates
            chosen = gate(sam, masks[:, best], score)  # (1, 256, 256)
            logits[m].append(chosen[0].float())
            appears = (score > 0).to(tokens.dtype)  # (1, 1)
            # A token of the object for later frames, another where the decoder believes it absent.
            pointer = (
                appears * sam.object_pointer_proj(tokens[:, best])
                + (1 - appears) * sam.no_object_pointer
            )
            # The memory encoder takes masks at the size of SAM2's input: (1, 1, 1024, 1024).
            mask = F.interpolate(
                chosen[None].float(),
                size=(sam.image_size, sam.image_size),
                mode="bilinear",
            )
            # False: the original remembers probabilities of prompted frames too, not binary masks.
            memory, memory_positions = sam._encode_new_memory(
                coarse, mask.to(coarse.dtype), score, False
            )
            session.store_output(
                m,
                frame,
                is_conditioning_frame=prompted,
                output_value=dict(
                    object_pointer=pointer,
                    maskmem_features=memory,
                    maskmem_pos_enc=memory_positions,
                ),
            )
    return torch.stack([torch.stack(frame_logits) for frame_logits in logits])
