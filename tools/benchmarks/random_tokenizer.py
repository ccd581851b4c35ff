"""A tokenizer of any number of tokens, for models of random weights."""

import itertools
import string

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tools.demo.new_folder import new_tokenizer

NUM_TEXT_TOKENS = 151643  # of Qwen2.5's vocabulary, before its special ones


def tokenizer(num_text_tokens: int, added: list[str]) -> PreTrainedTokenizerFast:
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
