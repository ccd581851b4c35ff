"""LoRA and the choice of trainable weights, for every model family."""

import re
import warnings
from collections import Counter
from collections.abc import Iterable

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel

from rl_train.engine.quantize import QuantizedLinear

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FROZEN = " (frozen)"  # suffix of a frozen part in `parameter_counts`


def attach_lora(
    language_model: PreTrainedModel,
    rank: int,
    alpha: int,
    targets: list[str] | str = PROJECTIONS,
) -> PeftModel:
    """Inject a fresh LoRA (B = 0) into `language_model` in place and return its PEFT model."""
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        bias="none",
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():  # peft reads an attribute by a name that transformers gives up
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        return get_peft_model(language_model, config)


def groups_of(names: Iterable[str], patterns: dict[str, str]) -> list[str]:
    """Return the groups in {group: regex} to which any parameter of these names belongs."""
    return [group for group in patterns if any(re.search(patterns[group], n) for n in names)]


def freeze_all_but(
    model: nn.Module, patterns: dict[str, str]
) -> tuple[dict[str, nn.Parameter], dict[str, str]]:
    """Freeze what no pattern of {group: regex} matches; the rest trains in float32.

    Returns:
        ({name: parameter}, {name: group}) of what trains.
    """
    trainable, groups = {}, {}
    for name, parameter in model.named_parameters():
        matching = groups_of([name], patterns)
        parameter.requires_grad_(bool(matching))
        if matching:
            # An optimizer's small steps round to nothing in bfloat16.
            parameter.data = parameter.data.float()
            if parameter.shape[2:] == (1, 1):  # a convolution of single pixels
                parameter.register_hook(plain_strides)
            trainable[name], groups[name] = parameter, matching[0]
    empty = set(patterns) - set(groups.values())
    assert not empty, f"trainable groups {sorted(empty)} hold no parameter"
    return trainable, groups


def plain_strides(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Return the same gradient (C, D, 1, 1) with the strides of its parameter.

    Of channels-last images it has other strides over its two sides of length 1. Its memory is the
    same, yet DistributedDataParallel warns.
    """
    if gradient is None:  # `touch_all_params` reaches the parameter without one
        return None
    return gradient.flatten().view(gradient.shape)


def parameter_counts(model: nn.Module, groups: dict[str, str]) -> Counter[str]:
    """Count parameters: what trains by its group in {name: group}, the rest as part + FROZEN."""
    counts = Counter()
    for name, parameter in model.named_parameters():
        counts[groups.get(name, name.split(".")[0] + FROZEN)] += parameter.numel()
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):  # its tensors hold several weights a number
            stored = module.weight.numel() + module.scale.numel()
            weights = module.out_features * module.in_features
            counts[name.split(".")[0] + FROZEN] += weights - stored
    return counts
