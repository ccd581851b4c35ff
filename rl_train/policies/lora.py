"""What every policy with a LoRA on its language model shares, as functions."""

import re
import warnings

import torch
from peft import LoraConfig, get_peft_model

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def attach_lora(language_model, rank: int, alpha: int, dropout: float = 0.0, targets=PROJECTIONS):
    """The PEFT model of `language_model`, into which a fresh LoRA is injected in place (B = 0)."""
    size = dict(r=rank, lora_alpha=alpha, lora_dropout=dropout)
    lora = LoraConfig(**size, bias="none", target_modules=targets, task_type="CAUSAL_LM")
    given_up = "`is_gradient_checkpointing` is deprecated"  # by transformers; peft 0.21 asks for it
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", given_up, FutureWarning)
        return get_peft_model(language_model, lora)


def groups_of(names, patterns: dict[str, str]) -> list[str]:
    """The groups of {group: regex} that parameters of these names belong to."""
    return [group for group in patterns if any(re.search(patterns[group], n) for n in names)]


def group_of_each(names, patterns: dict[str, str]) -> dict[str, str]:
    """{name: the group that it belongs to}, for every step to read: expressions take it 2 ms."""
    return {name: groups_of([name], patterns)[0] for name in names}


def freeze_all_but(model, patterns: dict[str, str]) -> dict[str, torch.nn.Parameter]:
    """{name: parameter} of what trains, in float32: what a pattern of {group: regex} finds."""
    trainable = {}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(bool(groups_of([name], patterns)))
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
            trainable[name] = parameter
    empty = set(patterns) - set(groups_of(trainable, patterns))
    assert not empty, f"trainable groups {sorted(empty)} hold no parameter"
    return trainable


def parameter_counts(model, trainable: dict, group_of) -> dict[str, int]:
    """{part: parameters}; what trains by its group, the rest as "part (frozen)"."""
    counts = {}
    for name, parameter in model.named_parameters():
        part = group_of(name) if name in trainable else f"{name.split('.')[0]} (frozen)"
        counts[part] = counts.get(part, 0) + parameter.numel()
    return counts


def parameter_table(model, trainable: dict, group_of) -> str:
    """Trainable and total counts by part, for the start of the log."""
    counts = parameter_counts(model, trainable, group_of)
    trains = sum(p.numel() for p in trainable.values())
    rows = [f"  {part:32s} {count:>15,d}" for part, count in sorted(counts.items())]
    total = sum(counts.values())
    return "\n".join([*rows, f"  {'trainable':32s} {trains:>15,d} of {total:,d}"])


def autocast(base: torch.dtype, device: torch.device):
    """bf16 autocast of float32 trainables over a base that was loaded in bfloat16."""
    return torch.autocast(device.type, torch.bfloat16, enabled=base == torch.bfloat16)
