"""The base's configuration and tokenizer."""

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from sa2va_hf import PROMPT_TEMPLATE
from sa2va_hf.prompts import DESCRIBE, SEGMENT_ANSWERS, SEGMENT_WORDINGS
from tools.demo.model import QWEN2_PATTERN, SPECIAL_TOKENS
from tools.demo.new_folder import new_config, new_tokenizer

VOCABULARY = 900  # of the tokenizer at most, without special tokens


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


def make_tokenizer(captions: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE with Qwen2's pre-tokenisation on captions and the prompts' texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    texts = [f"{caption}<|end|>\n" for caption in captions]
    template = PROMPT_TEMPLATE["phi3_chat"]["INSTRUCTION"]
    for wording in (DESCRIBE, *SEGMENT_WORDINGS):
        question = "There are 1 part regions in the picture: region1.\n" + wording
        texts += [template.replace("{input}", question)] * 20
    texts += [f"{answer}<|end|>\n" for answer in SEGMENT_ANSWERS] * 20
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return new_tokenizer(tokenizer, SPECIAL_TOKENS)
