"""The tokenizer of a Sa2VA folder."""

from pathlib import Path

from transformers import AutoTokenizer, PretrainedConfig

from .hub import model_folder
from .internlm2_tokenizer import is_internlm2, load_internlm2


def load_tokenizer(path: str | Path):
    """Load the tokenizer in folder `path`, which pads on the left; no code of the folder runs.

    Args:
        path: a folder, or a name on the hub.

    Raises:
        ValueError: there is none, it needs code of the folder, or it has no pad token.
    """
    folder = model_folder("--model_path", path)
    if is_internlm2(folder):
        return load_internlm2(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder,
            padding_side="left",
            # The tokenizer does not depend on config.json. Not given a configuration, transformers
            # reads that file too, whose `auto_map` names code of the folder.
            config=PretrainedConfig(),
            trust_remote_code=False,  # not given, transformers asks on stdin, and runs it after "y"
            fix_mistral_regex=False,  # not given, transformers 5.17 warns of any large vocabulary
        )
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"--model_path {path}: no tokenizer could be loaded: {reason}") from error
    if tokenizer.pad_token_id is None:
        raise ValueError(f"--model_path {path}: the tokenizer has no pad token")
    return tokenizer
