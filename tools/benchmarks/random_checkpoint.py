"""A Sa2VA-4B checkpoint with random weights, to try one's GPUs before a download.

    python -m tools.benchmarks.random_checkpoint --output outputs/random_4b [--device cuda]
    python -m rl_train.train --model_path outputs/random_4b --data_dir .. --max_steps 2 ..

Shapes, key layout and special-token ids are those of the published 4B (InternViT-300M, Qwen2.5-3B,
SAM2 Hiera-L; 3.9 B weights, 7.9 GB in bfloat16). Nothing that it says means anything.
"""

import itertools
import string
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rl_train.utils.command_line import FlagParser, run_program
from sa2va_hf import Sa2VAConfig, Sa2VAModel
from sa2va_hf.weights import default_dtype
from tools.demo.new_folder import new_config, new_tokenizer, save

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
        vocab_size=151679,
    ),
    max_dynamic_patch=12,
)
NUM_TEXT_TOKENS = 151643
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
# Of [SEG] over random hidden states: it is sampled in a few per cent of positions, so that loop 2
# has masks.
SEG_LOGIT_STD = 6.0


def tokenizer(
    num_text_tokens: int = NUM_TEXT_TOKENS, added: list[str] = ADDED
) -> PreTrainedTokenizerFast:
    """Build a byte-level BPE of `num_text_tokens` and, behind them, the special tokens `added`.

    Words of up to four letters are one token each, so that random ids decode to text that encodes
    to about as many ids.
    """
    letters = string.ascii_lowercase
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = []
    for length in range(1, 5):
        for word in map("".join, itertools.product(letters, repeat=length)):
            # Shorter words come first, until the vocabulary is full.
            if len(vocab) == num_text_tokens:
                break
            merges.append(("Ġ" + word[:-1], word[-1]))
            vocab["Ġ" + word] = len(vocab)
    bpe = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return new_tokenizer(bpe, added)


def random_model(
    config: dict = CONFIG_4B,
    device: torch.device | str = "cpu",
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> Sa2VAModel:
    """Build a model of random weights."""
    torch.manual_seed(seed)
    with default_dtype(dtype), torch.device(device):
        return Sa2VAModel(Sa2VAConfig(**config))


def write(
    folder: Path, config: dict = CONFIG_4B, device: torch.device | str = "cpu", seed: int = 0
):
    """Write the checkpoint `folder`: weights in bfloat16, config and tokenizer."""
    model, text = random_model(config, device, seed), tokenizer()
    with torch.no_grad():
        head = model.language_model.lm_head.weight  # (V, C); hidden states have unit variance
        seg = torch.randn(head.shape[1], device=head.device)
        head[text.convert_tokens_to_ids("[SEG]")] = (SEG_LOGIT_STD * seg / seg.norm()).to(
            head.dtype
        )
    save(model, text, folder)


def main(argv: list[str] | None = None):
    parser = FlagParser(
        prog="python -m tools.benchmarks.random_checkpoint",
        description=__doc__,
    )
    parser.add_argument("--output", required=True, type=Path, help="folder to write; about 8 GB")
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="where the weights are drawn",
    )
    args = parser.parse_args(argv)
    write(args.output, CONFIG_4B, args.device)
    print(f"{args.output}: random weights of Sa2VA-4B's shapes")


if __name__ == "__main__":
    run_program(main)
