"""Parts of every LoRA policy: modules with LoRA, trainables, counts, precision."""

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rl_train.policies.lora import (
    PROJECTIONS,
    attach_lora,
    freeze_all_but,
    parameter_counts,
)

PATTERNS = {"lora": r"\.lora_[AB]\.", "head": r"^head\."}


class Toy(torch.nn.Module):
    """A small language model, and a head beside it."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        sizes = dict(vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=2)
        heads = dict(num_attention_heads=2, num_key_value_heads=1)
        self.llm = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads)).to(dtype)
        self.head = torch.nn.Linear(8, 3, dtype=dtype)


def test_a_fresh_lora_adds_nothing_and_its_b_is_what_adds():
    model, ids = Toy(), torch.arange(6)[None]
    before = model.llm(ids).logits
    peft = attach_lora(model.llm, rank=4, alpha=8)
    model.eval()
    names = [name for name, _ in model.named_parameters() if ".lora_" in name]
    assert len(names) == 2 * len(PROJECTIONS) * 2  # layers, projections, A and B
    assert torch.equal(model.llm(ids).logits, before)  # in place: no wrapper to call
    config = peft.peft_config["default"]
    assert (config.r, config.lora_alpha) == (4, 8)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.fill_(0.1)
    assert not torch.equal(model.llm(ids).logits, before)


def test_only_what_a_pattern_finds_trains_and_in_float32():
    model = Toy(torch.bfloat16)
    attach_lora(model.llm, rank=4, alpha=8)
    trainable, groups = freeze_all_but(model, PATTERNS)
    expected = {
        name
        for name, _ in model.named_parameters()
        if ".lora_A." in name or ".lora_B." in name or name.startswith("head.")
    }
    trains = {name for name, p in model.named_parameters() if p.requires_grad}
    assert set(trainable) == trains == expected
    assert groups.keys() == trainable.keys() and set(groups.values()) == set(PATTERNS)
    assert {p.dtype for p in trainable.values()} == {torch.float32}
    assert model.llm.lm_head.weight.dtype == torch.bfloat16
    assert all(trainable[name] is p for name, p in model.named_parameters() if name in trainable)
    with pytest.raises(AssertionError, match="vision"):
        freeze_all_but(model, PATTERNS | {"vision": "^vision\\."})


def test_counts_by_hand():
    """Head 8 x 3 + 3 = 27 trains; the rest of the toy is frozen."""
    model = Toy()
    _, groups = freeze_all_but(model, {"head": "^head\\."})
    frozen = sum(p.numel() for p in model.llm.parameters())
    assert parameter_counts(model, groups) == {"head": 27, "llm (frozen)": frozen}
