"""New folders: of data, complete or absent, and of a Sa2VA.

Configuration and tokenizer are in the form that the original's code and transformers 4 read too.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from sa2va_hf import Sa2VAModel

QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Fields of tokenizer_config.json that say how a tokenizer was read, not what it is
OF_LOADING = ("fix_mistral_regex", "is_local", "local_files_only")


@contextlib.contextmanager
def complete_or_absent(folder: Path) -> Iterator[Path]:
    """Yield a folder to write in, which is renamed to `folder` once all is written.

    What an interrupted program has left there is written over.
    """
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    unfinished.mkdir(parents=True, exist_ok=True)
    yield unfinished
    unfinished.rename(folder)


def new_config(vision: dict, llm: dict, **top: str | int | float | bool | dict) -> dict:
    """Return a config.json of InternViT-300M's and Qwen2.5's kind.

    Args:
        vision, llm: sizes, with the names of vision_config and llm_config; top: other fields.
    """
    return dict(
        architectures=["Sa2VAChatModel"],
        model_type="sa2va_chat",
        template="phi3_chat",
        ps_version="v2",
        select_layer=-1,
        force_image_size=vision["image_size"],
        downsample_ratio=0.5,
        dynamic_image_size=True,
        use_thumbnail=True,
        min_dynamic_patch=1,
        torch_dtype="bfloat16",
        # Whose form this is. transformers 5.17 takes a large vocabulary of an unknown version for
        # one of Mistral's and warns.
        transformers_version="4.46.3",
        vision_config=dict(
            # The original's defaults of these four are InternViT-6B's.
            architectures=["InternVisionModel"],
            qk_normalization=False,
            norm_type="layer_norm",
            qkv_bias=True,
            patch_size=14,
            layer_norm_eps=1e-6,
            hidden_act="gelu",
            **vision,
        ),
        llm_config=dict(
            architectures=["Qwen2ForCausalLM"],
            rope_theta=1e6,
            rms_norm_eps=1e-6,
            hidden_act="silu",
            tie_word_embeddings=False,
            attention_dropout=0.0,
            **llm,
        ),
        **top,
    )


def new_tokenizer(bpe: Tokenizer, special_tokens: list[str]) -> PreTrainedTokenizerFast:
    """Wrap a byte-level BPE: its last ids are `special_tokens`, pad and EOS those of Qwen2."""
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special_tokens])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def train_tokenizer(
    texts: list[str], vocab_size: int, special_tokens: list[str]
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE with Qwen2's pre-tokenisation.

    Args: vocab_size: largest number of tokens, without the special ones.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return new_tokenizer(tokenizer, special_tokens)


def save(model: Sa2VAModel, tokenizer: PreTrainedTokenizerFast, folder: Path):
    """Write the checkpoint `folder`: weights in bfloat16, configuration and tokenizer."""
    model.save_pretrained(folder, dtype=torch.bfloat16)
    tokenizer.save_pretrained(folder)
    # transformers 5 writes a name of its own for the class, which transformers 4 does not know.
    file = folder / "tokenizer_config.json"
    fields = json.loads(file.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name in OF_LOADING:
        fields.pop(name, None)
    file.write_text(json.dumps(fields, indent=2) + "\n")
