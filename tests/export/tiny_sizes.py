"""Sizes of a tiny Qwen2.5-VL and a tiny SAM2, for every version of transformers.

`write_folders.py` reads them in environments without this package, so it imports nothing.
"""

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"]
SPECIAL += ["<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
TEXT = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=1024,
    initializer_range=0.1,
)
ROPE_THETA, MROPE_SECTION = 1e4, [2, 3, 3]
VISION = dict(
    depth=2,
    hidden_size=32,
    intermediate_size=64,
    num_heads=2,
    out_hidden_size=64,
    patch_size=14,
    window_size=56,
    fullatt_block_indexes=[1],
    initializer_range=0.1,
)
SAM_SIDE, SAM_WIDTH = 128, 32
SAM_BACKBONE = dict(
    model_type="sam2_hiera_det_model",
    hidden_size=8,
    num_attention_heads=1,
    blocks_per_stage=[1, 1, 2, 1],
    embed_dim_per_stage=[8, 16, 32, 64],
    num_attention_heads_per_stage=[1, 1, 2, 2],
    window_size_per_stage=[8, 4, 8, 4],
    global_attention_blocks=[3],
    image_size=[SAM_SIDE, SAM_SIDE],
    window_positional_embedding_background_size=[4, 4],
)
SAM_VISION = dict(
    backbone_config=SAM_BACKBONE,
    backbone_channel_list=[64, 32, 16, 8],
    backbone_feature_sizes=[[32, 32], [16, 16], [8, 8]],
    fpn_hidden_size=SAM_WIDTH,
)
SAM_PROMPT_ENCODER = dict(hidden_size=SAM_WIDTH, image_size=SAM_SIDE, mask_input_channels=8)
SAM_MASK_DECODER = dict(
    hidden_size=SAM_WIDTH, num_attention_heads=2, mlp_dim=64, iou_head_hidden_dim=SAM_WIDTH
)
