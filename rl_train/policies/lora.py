"""What every policy with a LoRA on its language model shares, as functions.

Letters: P prompts, L their longest length.
"""

import contextlib
import logging
import re
import warnings

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def attach_lora(language_model, rank: int, alpha: int, dropout: float = 0.0, targets=PROJECTIONS):
    """The PEFT model of `language_model`, into which a fresh LoRA is injected in place (B = 0)."""
    size = dict(r=rank, lora_alpha=alpha, lora_dropout=dropout)
    lora = LoraConfig(**size, bias="none", target_modules=targets, task_type="CAUSAL_LM")
    with warnings.catch_warnings():  # peft 0.21 asks by a name that transformers gives up
        warnings.filterwarnings(
            "ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning
        )
        return get_peft_model(language_model, lora)


def freeze_all_but(model, patterns: dict[str, str]) -> dict[str, torch.nn.Parameter]:
    """{name: parameter} of what trains, in float32: what a pattern of {group: regex} finds."""
    trainable = {}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(re.search(pattern, name) for pattern in patterns.values()))
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
            trainable[name] = parameter
    empty = [
        g for g, pattern in patterns.items() if not any(re.search(pattern, n) for n in trainable)
    ]
    assert not empty, f"trainable groups {empty} hold no parameter"
    return trainable


def parameter_table(model, trainable: dict, group_of) -> str:
    """Trainable and total counts by part, for the start of the log."""
    counts = {}
    for name, parameter in model.named_parameters():
        part = group_of(name) if name in trainable else f"{name.split('.')[0]} (frozen)"
        counts[part] = counts.get(part, 0) + parameter.numel()
    trains = sum(p.numel() for p in trainable.values())
    rows = [f"  {part:32s} {count:>15,d}" for part, count in sorted(counts.items())]
    total = sum(counts.values())
    return "\n".join([*rows, f"  {'trainable':32s} {trains:>15,d} of {total:,d}"])


def autocast(weight: torch.Tensor):
    """bf16 autocast of float32 trainables over a bf16 base, one `weight` of which is given."""
    if weight.dtype != torch.bfloat16:
        return contextlib.nullcontext()
    return torch.autocast(weight.device.type, torch.bfloat16)


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
