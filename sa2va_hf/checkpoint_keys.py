"""Names of the original Sa2VA checkpoint <-> names of the native modules, from one table.

The table maps a native name to where its numbers lie in the original file. Loading walks it
forwards, saving backwards, so the two cannot disagree. (transformers' own conversion mapping does
not carry the one original tensor that feeds two native buffers, and its internals differ between
the 5.x releases that this project runs on.)
"""

import re
from collections.abc import Callable

import torch
from transformers import LlamaConfig, PreTrainedConfig

_SAM = "grounding_encoder.sam2_model."

_HEADS = (
    r"(\.(?:output_hypernetworks_mlps\.\d+|iou_prediction_head|pred_obj_score_head|obj_ptr_proj))"
)

# (native pattern, original replacement), applied in order to the native name.
_RULES = [
    # InternVLVisionModel
    (r"^vision_model\.embeddings\.cls_token$", "vision_model.embeddings.class_embedding"),
    (
        r"^vision_model\.embeddings\.position_embeddings$",
        "vision_model.embeddings.position_embedding",
    ),
    (
        r"^vision_model\.embeddings\.patch_embeddings\.projection\.",
        "vision_model.embeddings.patch_embedding.",
    ),
    (r"^vision_model\.encoder\.layer\.", "vision_model.encoder.layers."),
    (r"^(vision_model\..*)\.attention\.projection_layer\.", r"\1.attn.proj."),
    (r"^(vision_model\..*)\.attention\.([qkv])_proj\.", r"\1.attn.qkv."),
    (r"^(vision_model\..*)\.attention\.([qk])_norm\.", r"\1.attn.\2_norm."),  # InternViT-6B
    (r"^(vision_model\..*)\.layernorm_before\.", r"\1.norm1."),
    (r"^(vision_model\..*)\.layernorm_after\.", r"\1.norm2."),
    (r"^(vision_model\..*)\.lambda_([12])$", r"\1.ls\2"),
    # Sam2VideoModel: top level
    (r"^grounding_encoder\.", _SAM),
    (r"\.no_memory_embedding$", ".no_mem_embed"),
    (r"\.no_memory_positional_encoding$", ".no_mem_pos_enc"),
    (r"\.memory_temporal_positional_encoding$", ".maskmem_tpos_enc"),
    (r"\.no_object_pointer$", ".no_obj_ptr"),
    (r"\.object_pointer_proj\.", ".obj_ptr_proj."),
    (
        r"\.(?:shared_image_embedding|prompt_encoder\.shared_embedding)\.positional_embedding$",
        ".sam_prompt_encoder.pe_layer.positional_encoding_gaussian_matrix",
    ),
    # Hiera and its neck
    (r"\.vision_encoder\.backbone\.", ".image_encoder.trunk."),
    (r"\.patch_embed\.projection\.", ".patch_embed.proj."),
    (r"\.vision_encoder\.neck\.convs\.(\d+)\.", r".image_encoder.neck.convs.\1.conv."),
    (r"(\.trunk\.blocks\.\d+)\.layer_norm([12])\.", r"\1.norm\2."),
    # prompt encoder and mask decoder
    (r"\.prompt_encoder\.mask_embed\.conv1\.", ".sam_prompt_encoder.mask_downscaling.0."),
    (r"\.prompt_encoder\.mask_embed\.layer_norm1\.", ".sam_prompt_encoder.mask_downscaling.1."),
    (r"\.prompt_encoder\.mask_embed\.conv2\.", ".sam_prompt_encoder.mask_downscaling.3."),
    (r"\.prompt_encoder\.mask_embed\.layer_norm2\.", ".sam_prompt_encoder.mask_downscaling.4."),
    (r"\.prompt_encoder\.mask_embed\.conv3\.", ".sam_prompt_encoder.mask_downscaling.6."),
    (r"\.prompt_encoder\.point_embed\.weight$", ".sam_prompt_encoder.point_embeddings.{}.weight"),
    (r"\.prompt_encoder\.", ".sam_prompt_encoder."),
    (r"\.mask_decoder\.upscale_conv1\.", ".sam_mask_decoder.output_upscaling.0."),
    (r"\.mask_decoder\.upscale_layer_norm\.", ".sam_mask_decoder.output_upscaling.1."),
    (r"\.mask_decoder\.upscale_conv2\.", ".sam_mask_decoder.output_upscaling.3."),
    (r"\.mask_decoder\.", ".sam_mask_decoder."),
    (r"\.layer_norm_final_attn\.", ".norm_final_attn."),
    (r"(\.transformer\.layers\.\d+)\.layer_norm(\d)\.", r"\1.norm\2."),
    # three-layer heads: proj_in, layers.0, proj_out -> layers.0, layers.1, layers.2
    (_HEADS + r"\.layers\.0\.", r"\1.layers.1."),
    (_HEADS + r"\.proj_in\.", r"\1.layers.0."),
    (_HEADS + r"\.proj_out\.", r"\1.layers.2."),
    # two-layer MLPs of Hiera and the two-way transformer
    (r"(\.mlp)\.proj_in\.", r"\1.layers.0."),
    (r"(\.mlp)\.proj_out\.", r"\1.layers.1."),
    # memory
    (r"\.memory_attention\.layer_norm\.", ".memory_attention.norm."),
    (r"(\.memory_attention\.layers\.\d+)\.layer_norm(\d)\.", r"\1.norm\2."),
    (r"\.mask_downsampler\.final_conv\.", ".mask_downsampler.encoder.12."),
    (r"\.memory_encoder\.feature_projection\.", ".memory_encoder.pix_feat_proj."),
    (r"\.memory_encoder\.projection\.", ".memory_encoder.out_proj."),
    (r"\.memory_fuser\.", ".fuser."),
    (r"(\.fuser\.layers\.\d+)\.scale$", r"\1.g_weight"),
    (r"(\.fuser\.layers\.\d+)\.depthwise_conv\.", r"\1.dwconv."),
    (r"(\.fuser\.layers\.\d+)\.layer_norm\.", r"\1.norm."),
    (r"(\.fuser\.layers\.\d+)\.pointwise_conv([12])\.", r"\1.pwconv\2."),
    (rf"^({re.escape(_SAM)}.*)\.o_proj\.", r"\1.out_proj."),
]
# SAM3's tracker, applied before _RULES, which complete the names that it has in common with SAM2.
_TRUNK = ".backbone.vision_backbone.trunk"
_SAM3_RULES = [
    (r"\.vision_encoder\.backbone\.embeddings\.position_embeddings$", f"{_TRUNK}.pos_embed"),
    (r"\.class_position$", f"{_TRUNK}.pos_embed"),
    (
        r"\.vision_encoder\.backbone\.embeddings\.patch_embeddings\.projection\.",
        f"{_TRUNK}.patch_embed.proj.",
    ),
    (r"\.vision_encoder\.backbone\.layer_norm\.", f"{_TRUNK}.ln_pre."),
    (r"\.vision_encoder\.backbone\.layers\.", f"{_TRUNK}.blocks."),
    (r"(\.trunk\.blocks\.\d+)\.layer_norm([12])\.", r"\1.norm\2."),
    (r"(\.trunk\.blocks\.\d+)\.attention\.[qkv]_proj\.", r"\1.attn.qkv."),
    (r"(\.trunk\.blocks\.\d+)\.attention\.o_proj\.", r"\1.attn.proj."),
    # the necks of the tracker and of the detector
    (r"\.vision_encoder\.neck\.fpn_layers\.", ".backbone.vision_backbone.sam2_convs."),
    (r"\.detector_neck\.fpn_layers\.", ".backbone.vision_backbone.convs."),
    (r"(convs\.0)\.scale_layers\.0\.", r"\1.dconv_2x2_0."),
    (r"(convs\.0)\.scale_layers\.2\.", r"\1.dconv_2x2_1."),
    (r"(convs\.1)\.scale_layers\.0\.", r"\1.dconv_2x2."),
    (r"(convs\.\d)\.proj1\.", r"\1.conv_1x1."),
    (r"(convs\.\d)\.proj2\.", r"\1.conv_3x3."),
    # mask decoder and memory
    (r"(\.transformer\.layers\.\d+\.mlp)\.proj_in\.", r"\1.lin1."),
    (r"(\.transformer\.layers\.\d+\.mlp)\.proj_out\.", r"\1.lin2."),
    (r"\.temporal_positional_encoding_projection_layer\.", ".obj_ptr_tpos_proj."),
    (r"\.occlusion_spatial_embedding_parameter$", ".no_obj_embed_spatial"),
    (r"\.memory_attention\.layer_norm\.", ".transformer.encoder.norm."),
    (
        r"\.memory_attention\.layers\.(\d+)\.layer_norm(\d)\.",
        r".transformer.encoder.layers.\1.norm\2.",
    ),
    (r"\.memory_attention\.", ".transformer.encoder."),
]
_SAM3_LAST_RULES = [(r"\.memory_encoder\.", ".maskmem_backbone.")]  # applied after _RULES
# InternLM2, whose native modules are Llama's. Qwen2's native names are the original ones.
_INTERNLM2_RULES = [
    (r"^language_model\.model\.embed_tokens\.", "language_model.model.tok_embeddings."),
    (r"^language_model\.lm_head\.", "language_model.output."),
    (r"^(language_model\..*)\.self_attn\.[qkv]_proj\.", r"\1.attention.wqkv."),
    (r"^(language_model\..*)\.self_attn\.o_proj\.", r"\1.attention.wo."),
    (r"^(language_model\..*)\.mlp\.gate_proj\.", r"\1.feed_forward.w1."),
    (r"^(language_model\..*)\.mlp\.up_proj\.", r"\1.feed_forward.w3."),
    (r"^(language_model\..*)\.mlp\.down_proj\.", r"\1.feed_forward.w2."),
    (r"^(language_model\..*)\.input_layernorm\.", r"\1.attention_norm."),
    (r"^(language_model\..*)\.post_attention_layernorm\.", r"\1.ffn_norm."),
]
_VISION_QKV = re.compile(
    r"^(?:vision_model|grounding_encoder\.vision_encoder)\..*\.attention\.([qkv])_proj\."
)
# Of SAM3: positions of the class token (part 0) and of the patches (part 1), joined along dim 1.
_POSITIONS = re.compile(
    r"^grounding_encoder\.(?:(class_position)|vision_encoder\..*\.position_embeddings)$"
)
_INTERNLM2_QKV = re.compile(r"^language_model\..*\.self_attn\.([qkv])_proj\.")
_DOWNSAMPLER = re.compile(r"\.mask_downsampler\.layers\.(\d)\.(conv|layer_norm)\.")


def original_keys(
    native: str, llm: PreTrainedConfig | None = None, sam3: bool = False
) -> tuple[list[str], int | None]:
    """Return (keys, part): where the native tensor `native` lies in the original layout.

    One key and None for a plain copy; one key and 0, 1 or 2 for q, k or v of a fused tensor (see
    `_fused_heads`); one key and 0 or 1 for SAM3's positions (see `_POSITIONS`); four keys and None
    for point embeddings, which are concatenated along dim 0.

    Args:
        llm: the native config of the LLM; a LlamaConfig has InternLM2's names, others Qwen2's.
        sam3: whether `grounding_encoder` is SAM3 and not SAM2.
    """
    # The original is one Sequential of (convolution, LayerNorm, GELU), three indices a layer.
    key = _DOWNSAMPLER.sub(
        lambda m: f".mask_downsampler.encoder.{3 * int(m[1]) + (m[2] == 'layer_norm')}.", native
    )
    internlm2 = isinstance(llm, LlamaConfig)
    rules = _RULES + (_INTERNLM2_RULES if internlm2 else [])
    if sam3 and native.startswith("grounding_encoder."):
        rules = _SAM3_RULES + rules + _SAM3_LAST_RULES
    for pattern, replacement in rules:
        key = re.sub(pattern, replacement, key)
    if "{}" in key:  # the four point embeddings
        return [key.format(i) for i in range(4)], None
    if sam3 and (positions := _POSITIONS.match(native)):
        return [key], int(not positions[1])
    qkv = _VISION_QKV.match(native) or (_INTERNLM2_QKV.match(native) if internlm2 else None)
    return [key], "qkv".index(qkv[1]) if qkv else None


def _fused_heads(native: str, llm: PreTrainedConfig | None) -> tuple[int, tuple[int, int, int]]:
    """Return (groups, heads): how q, k and v lie in the fused tensor of which `native` is a part.

    Along dim 0 are `groups` blocks. Each holds heads[0] parts of q, heads[1] of k, heads[2] of v.
    The vision encoder has one block of thirds. InternLM2's wqkv has a block for each key-value
    head: its G query heads, then the key, then the value.
    """
    if _VISION_QKV.match(native):
        return 1, (1, 1, 1)
    return llm.num_key_value_heads, (llm.num_attention_heads // llm.num_key_value_heads, 1, 1)


def original_shapes(
    native_state: dict[str, torch.Tensor], llm: PreTrainedConfig | None = None, sam3: bool = False
) -> dict[str, tuple[int, ...]]:
    """Return {original key: shape} that a model of this state, real or meta, reads and writes."""
    shapes = {}
    for name, tensor in native_state.items():
        keys, part = original_keys(name, llm, sam3)
        rows, *others = tensor.shape
        if sam3 and _POSITIONS.match(name):
            others[0] += shapes[keys[0]][1] if keys[0] in shapes else 0
            shapes[keys[0]] = (rows, *others)
            continue
        if part is not None:  # q, k and v in one tensor
            rows += shapes.get(keys[0], [0])[0]
        elif len(keys) > 1:
            rows //= len(keys)
        shapes.update(dict.fromkeys(keys, (rows, *others)))
    return shapes


def native_tensor(
    name: str,
    read: Callable[[str], torch.Tensor],
    llm: PreTrainedConfig | None = None,
    sam3: bool = False,
) -> torch.Tensor:
    """Build the native tensor `name` of original ones, which `read(key)` returns."""
    keys, part = original_keys(name, llm, sam3)
    tensors = [read(key) for key in keys]
    if sam3 and _POSITIONS.match(name):
        return tensors[0].split([1, tensors[0].shape[1] - 1], dim=1)[part]
    if part is not None:
        groups, heads = _fused_heads(name, llm)
        size = len(tensors[0]) // (groups * sum(heads))  # rows of a head
        blocks = tensors[0].unflatten(0, (groups, -1))
        return blocks.split([size * number for number in heads], dim=1)[part].flatten(0, 1)
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=0)


def to_original(
    native_state: dict[str, torch.Tensor], llm: PreTrainedConfig | None = None, sam3: bool = False
) -> dict[str, torch.Tensor]:
    """Convert a native state dict to the original layout; joined or split tensors are new."""
    out, fused, positions = {}, {}, {}
    for name, tensor in native_state.items():
        keys, part = original_keys(name, llm, sam3)
        if sam3 and _POSITIONS.match(name):
            positions.setdefault(keys[0], {})[part] = tensor
        elif part is not None:
            groups, _ = _fused_heads(name, llm)
            fused.setdefault(keys[0], {})[part] = tensor.unflatten(0, (groups, -1))
        elif len(keys) > 1:
            # Clones: a view would keep all rows alive.
            out.update(zip(keys, (row.clone() for row in tensor.chunk(len(keys), dim=0))))
        else:
            out[keys[0]] = tensor.contiguous()
    # A module has all of q, k and v, whatever their order in the state.
    for key, parts in fused.items():
        out[key] = torch.cat([parts[i] for i in range(3)], dim=1).flatten(0, 1)
    for key, parts in positions.items():
        out[key] = torch.cat([parts[i] for i in range(2)], dim=1)
    return out
