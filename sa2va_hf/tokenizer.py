"""The tokenizer of a Sa2VA folder."""

import logging

from transformers import AutoTokenizer


def load_tokenizer(path):
    """The tokenizer in folder `path`, padding on the left. Raises ValueError if there is none."""
    # transformers reads config.json too, does not know sa2va_chat and says so; the tokenizer does
    # not depend on it.
    logging.getLogger("transformers.configuration_utils").setLevel(logging.ERROR)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"--model_path {path}: no tokenizer could be loaded: {reason}") from error
    if tokenizer.pad_token_id is None:
        raise ValueError(f"--model_path {path}: the tokenizer has no pad token")
    return tokenizer
