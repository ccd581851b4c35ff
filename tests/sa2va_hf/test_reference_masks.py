"""SAM2, video and predict_forward against numbers recorded from the original Sa2VA code."""

import pytest
import torch

from sa2va_hf.mask_decoder import decode_candidates, decoder_features
from sa2va_hf.processing_sa2va import upsample_masks
from sa2va_hf.video import track

# SAM2


@pytest.mark.parametrize("x", ["A", "B"])
def test_sam_masks(original, recorded, pyramid, x):
    raw = pyramid(x, True)
    fine, middle, coarse = decoder_features(original.grounding_encoder, raw)
    recorded.close(f"sam_{x}_fpn0_s0_stride16", fine[0, :, ::16, ::16])
    recorded.close(f"sam_{x}_fpn1_s1_stride8", middle[0, :, ::8, ::8])
    recorded.close(f"sam_{x}_fpn2_stride4", raw[2][0, :, ::4, ::4])
    masks, iou, _, score = decode_candidates(
        original.grounding_encoder, [fine, middle], coarse, recorded["lang_emb"][:1]
    )
    recorded.close(f"sam_{x}_multimask", masks[0])
    recorded.close(f"sam_{x}_iou", iou[0])
    recorded.close(f"sam_{x}_objscore", score[0])
    first = torch.zeros(1, dtype=torch.long)
    logits = original.decode_masks(raw, first, recorded["lang_emb"][:1])
    recorded.close(f"sam_{x}_inject256", logits[0])
    recorded.close(f"sam_{x}_langinf1024_stride4", at_1024(logits)[0])
    if x == "A":  # of one image: each pass of the full-size encoder costs as much as all else
        logits = original.decode_masks(pyramid(x, False), first, recorded["lang_emb"][:1])
        recorded.close(f"sam_{x}_inject256_exact", logits[0])
        recorded.close(f"sam_{x}_langinf1024_exact_stride4", at_1024(logits)[0])


def at_1024(logits):
    return upsample_masks(logits, 1024, (1024, 1024))[:, ::4, ::4]


def test_prompts_of_sam(original, recorded):
    sam = original.grounding_encoder
    sparse, _ = sam.prompt_encoder(
        input_points=torch.zeros(1, 1, 1, 2),
        input_labels=-torch.ones(1, 1, 1, dtype=torch.int32),
        input_boxes=None,
        input_masks=None,
    )
    recorded.close("sam_sparse_prompt", torch.cat([sparse[0, 0], recorded["lang_emb"][:1]]))
    recorded.close(
        "sam_image_pe_stride8", sam.get_image_wide_positional_embeddings()[0, :, ::8, ::8]
    )


def test_two_prompts_of_one_image(original, recorded, pyramid):
    logits = original.decode_masks(
        pyramid("A", True), torch.zeros(2, dtype=torch.long), recorded["lang_emb"]
    )
    recorded.close("sam_A_inject256", logits[0])
    recorded.close("sam_A_inject256_obj1", logits[1])


def test_candidate_is_picked_by_predicted_iou(original, recorded, pyramid):
    fine, middle, coarse = decoder_features(original.grounding_encoder, pyramid("A", True))
    masks, iou, _, score = decode_candidates(
        original.grounding_encoder, [fine, middle], coarse, recorded["samx_arg_emb"][None]
    )
    recorded.close("samx_arg_multimask_stride4", masks[0, :, ::4, ::4])
    recorded.close("samx_arg_iou", iou[0])
    recorded.close("samx_arg_obj", score[0])
    assert iou[0].argmax() == recorded.facts["samx_arg"]["argmax"] == 0
    logits = original.decode_masks(
        pyramid("A", True), torch.zeros(1, dtype=torch.long), recorded["samx_arg_emb"][None]
    )
    recorded.close("samx_arg_inject256", logits[0])


def test_text_hidden_fcs(original, recorded):
    recorded.close("thf_out", original.text_hidden_fcs(recorded["thf_in"]))


def test_tracked_video(original, recorded, pyramid):
    logits = track(
        original, [pyramid("A", True), pyramid("B", True)], recorded["lang_emb"][:1], num_prompted=1
    )[0]
    recorded.close("sam_A_inject256", logits[0])
    recorded.close("video_A_then_B_tracked_frame1_stride4", at_1024(logits)[1])


# The whole way


@pytest.mark.parametrize("x", ["A", "B"])
def test_predict_forward(original, recorded, image, pyramid, tokenizer, monkeypatch, x):
    """Image, text and regions give masks at the image's size, the recorded answer forced."""
    forced = iter(recorded[f"e2e_{x}_answer_ids"].tolist())
    seen, raw = {}, pyramid(x, True)  # test_sam_masks compares these features

    def force(module, args, logits):
        return (
            torch.nn.functional.one_hot(torch.tensor(next(forced)), 512).float().expand_as(logits)
        )

    def embed(ids, *rest):
        seen["prompt"] = ids
        return type(original).embed(original, ids, *rest)

    def decode_masks(features, rows, prompts):
        seen["prompts"] = prompts
        seen["logits"] = type(original).decode_masks(original, features, rows, prompts)
        return seen["logits"]

    monkeypatch.setattr(original, "embed", embed)
    monkeypatch.setattr(original, "decode_masks", decode_masks)
    monkeypatch.setattr(original, "sam_features", lambda pixels: raw)
    hooks = [
        original.language_model.lm_head.register_forward_hook(force),
        original.text_hidden_fcs.register_forward_pre_hook(
            lambda module, args: seen.update(hidden=args[0])
        ),
    ]
    regions = {"A": [recorded["mask_A_nhw_u8"].numpy()], "B": None}[x]
    text = {"A": "<image>Please segment region1.", "B": "<image>\nPlease segment it."}[x]
    result = original.predict_forward(
        image=image(x),
        text=text,
        mask_prompts=regions,
        tokenizer=tokenizer,
        rounded_normalisation=True,
    )
    for hook in hooks:
        hook.remove()

    recorded.equal(f"e2e_{x}_prompt_ids", seen["prompt"][0])
    assert result["prediction"] == recorded.facts[f"e2e_{x}"]["prediction"]
    recorded.close(f"e2e_{x}_seg_hidden", seen["hidden"])
    recorded.close(f"e2e_{x}_seg_lang_emb", seen["prompts"])
    for k in range(2):
        recorded.close(f"e2e_{x}_logits1024_{k}_stride4", at_1024(seen["logits"])[k])
        recorded.equal(f"e2e_{x}_mask_{k}", torch.from_numpy(result["prediction_masks"][k])[0])
    recorded.close(
        f"e2e_{x}_logits_orig_0", upsample_masks(seen["logits"], 1024, image(x).size[::-1])[0]
    )
