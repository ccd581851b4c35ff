"""The base's configuration."""

from tools.demo.new_folder import new_config


def config_of(side: int, width: int, vision_layers: int, llm_layers: int) -> dict:
    """Return a config.json whose vision model and LLM have this width and these layers.

    Args:
        side: pixels of the image that the vision model sees, a multiple of 28.
    """
    return new_config(
        vision=dict(
            image_size=side,
            hidden_size=width,
            num_hidden_layers=vision_layers,
            num_attention_heads=4,
            intermediate_size=3 * width,
        ),
        llm=dict(
            hidden_size=width,
            intermediate_size=11 * width // 4,
            num_hidden_layers=llm_layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2048,
        ),
        max_dynamic_patch=1,
        sam2_config=dict(
            image_size=256,
            hidden_size=width // 2,
            mask_decoder_mlp_dim=width,
            mask_decoder_heads=4,
            memory_channels=64,
            memory_layers=1,
            memory_mlp_dim=64,
            memory_fuser_dim=64,
            backbone=dict(
                hidden_size=24,
                num_attention_heads=1,
                blocks_per_stage=[1, 2, 4, 1],
                embed_dim_per_stage=[24, 48, 96, 192],
                num_attention_heads_per_stage=[1, 2, 4, 8],
                window_size_per_stage=[8, 4, 8, 4],
                global_attention_blocks=[4, 6],
                window_positional_embedding_background_size=[7, 7],
            ),
        ),
    )
