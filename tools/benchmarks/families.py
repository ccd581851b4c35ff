"""config.json of each family of Sa2VA at published sizes, and at tiny ones for a CPU."""

from pathlib import Path

from transformers import PreTrainedTokenizerFast

from rl_train.utils.io import read_json
from tools.benchmarks import qwen
from tools.benchmarks.random_tokenizer import NUM_TEXT_TOKENS, tokenizer
from tools.demo import points_model
from tools.demo.new_folder import new_config

DEMO = Path(__file__).parents[1] / "demo" / "checkpoint"
ADDED = (
    ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    + [f"<|unused_{i}|>" for i in range(151646, 151665)]
    + [
        "<img>",
        "</img>",
        "<IMG_CONTEXT>",
        "<quad>",
        "</quad>",
        "<ref>",
        "</ref>",
        "<box>",
        "</box>",
        "[SEG]",
        "<p>",
        "</p>",
        "<vp>",
        "</vp>",
    ]
)  # 151643 .. 151678, as in Sa2VA's tokenizer
QWEN_ADDED = [*points_model.SPECIAL, "[SEG]", "<p>", "</p>", "<vp>", "</vp>"]
CONFIG_4B = new_config(
    vision=dict(
        image_size=448,
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
    ),
    llm=dict(
        hidden_size=2048,
        intermediate_size=11008,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        vocab_size=NUM_TEXT_TOKENS + len(ADDED),
    ),
    max_dynamic_patch=12,
)
TINY = read_json(DEMO / "config.json")  # for the tests, on a CPU
TINY["llm_config"]["vocab_size"] = qwen.TINY_TEXT_TOKENS + len(ADDED)
# Of images: 16 to 36 tokens of 16 x 16 pixels, or as many pixels
TINY_PARTS = dict(sam2_config=TINY["sam2_config"], pixel_limits=[64**2, 96**2])
QWEN2_7B = dict(
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
)
QWEN2_HALF_B = dict(
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
)
INTERNLM2_7B = dict(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=92558,
)
INTERNLM2_20B = dict(
    hidden_size=6144,
    intermediate_size=16384,
    num_hidden_layers=48,
    num_attention_heads=48,
    num_key_value_heads=8,
    vocab_size=92558,
)
INTERNVIT_6B = dict(
    architectures=["InternVisionModel"],
    image_size=448,
    patch_size=14,
    hidden_size=3200,
    num_hidden_layers=45,
    num_attention_heads=25,
    intermediate_size=12800,
    qk_normalization=True,
    norm_type="rms_norm",
    qkv_bias=False,
    layer_norm_eps=1e-6,
    hidden_act="gelu",
)


def of_internvl(base: dict, llm: dict, template: str) -> dict:
    """Return config.json `base` with other sizes of its LLM and another template."""
    return base | dict(llm_config=base["llm_config"] | llm, template=template)


def of_internlm2(base: dict, llm: dict) -> dict:
    """Return config.json `base` with an InternLM2 as LLM."""
    form = dict(architectures=["InternLM2ForCausalLM"], model_type="internlm2", bias=False)
    return of_internvl(base, form | dict(rms_norm_eps=1e-5) | llm, "internlm2_chat")


def of_qwen(base: dict, vocab_size: int, **top: dict | list[int]) -> dict:
    """Return config.json of a Sa2VA of the Qwen-VL `base`; its last ids are QWEN_ADDED."""
    id_of = {name: vocab_size - len(QWEN_ADDED) + i for i, name in enumerate(QWEN_ADDED)}
    text = dict(vocab_size=vocab_size, eos_token_id=id_of["<|im_end|>"], tie_word_embeddings=False)
    return dict(
        architectures=["Sa2VAChatModelQwen"],
        model_type="sa2va_chat",
        template="qwen_chat",
        transformers_version="4.57.1",
        tie_word_embeddings=False,
        image_token_id=id_of["<|image_pad|>"],
        video_token_id=id_of["<|video_pad|>"],
        vision_start_token_id=id_of["<|vision_start|>"],
        vision_end_token_id=id_of["<|vision_end|>"],
        text_config=base["text_config"] | text,
        vision_config=base["vision_config"],
        **top,
    )


TINY_QWEN_VOCABULARY = qwen.TINY_TEXT_TOKENS + len(QWEN_ADDED)
CONFIGS = {
    "1b": CONFIG_4B | dict(llm_config=CONFIG_4B["llm_config"] | QWEN2_HALF_B),
    "4b": CONFIG_4B,
    "8b": of_internlm2(CONFIG_4B, INTERNLM2_7B),
    "26b": of_internlm2(CONFIG_4B | dict(vision_config=INTERNVIT_6B), INTERNLM2_20B),
    "internvl3-8b": of_internvl(CONFIG_4B, QWEN2_7B, "qwen_chat"),
    "sa2va-qwen3-4b": of_qwen(qwen.QWEN3_4B, 151674),
    "sa2va-qwen-7b": of_qwen(qwen.QWEN_7B, 151670),
    "tiny": TINY,
    "internlm2-tiny": of_internlm2(TINY, {}),
    "sa2va-qwen3-tiny": of_qwen(qwen.TINY3, TINY_QWEN_VOCABULARY, **TINY_PARTS),
    "sa2va-qwen-tiny": of_qwen(qwen.TINY, TINY_QWEN_VOCABULARY, **TINY_PARTS),
}


def tokenizer_of(config: dict) -> PreTrainedTokenizerFast:
    """Build a tokenizer of as many tokens as a model of this config.json has."""
    if "llm_config" in config:
        return tokenizer(config["llm_config"]["vocab_size"] - len(ADDED), ADDED)
    return tokenizer(config["text_config"]["vocab_size"] - len(QWEN_ADDED), QWEN_ADDED)
