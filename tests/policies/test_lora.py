"""What every LoRA policy shares: what is attached, what trains, counts, precision."""

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rl_train.policies.lora import (
    PROJECTIONS,
    attach_lora,
    autocast,
    freeze_all_but,
    parameter_table,
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
    peft = attach_lora(model.llm, rank=4, alpha=8, dropout=0.05)
    model.eval()
    names = [name for name, _ in model.named_parameters() if ".lora_" in name]
    assert len(names) == 2 * len(PROJECTIONS) * 2  # layers, projections, A and B
    assert torch.equal(model.llm(ids).logits, before)  # in place: no wrapper to call
    config = peft.peft_config["default"]
    assert (config.r, config.lora_alpha, config.lora_dropout) == (4, 8, 0.05)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.fill_(0.1)
    assert not torch.equal(model.llm(ids).logits, before)


def test_only_what_a_pattern_finds_trains_and_in_float32():
    model = Toy(torch.bfloat16)
    attach_lora(model.llm, rank=4, alpha=8)
    trainable = freeze_all_but(model, PATTERNS)
    expected = {
        name
        for name, _ in model.named_parameters()
        if ".lora_A." in name or ".lora_B." in name or name.startswith("head.")
    }
    trains = {name for name, p in model.named_parameters() if p.requires_grad}
    assert set(trainable) == trains == expected
    assert {p.dtype for p in trainable.values()} == {torch.float32}
    assert model.llm.lm_head.weight.dtype == torch.bfloat16
    assert all(trainable[name] is p for name, p in model.named_parameters() if name in trainable)
    with pytest.raises(AssertionError, match="vision"):
        freeze_all_but(model, PATTERNS | {"vision": "^vision\\."})


def test_counts_by_hand():
    """Head 8 x 3 + 3 = 27 trains; the rest of the toy is frozen."""
    model = Toy()
    trainable = freeze_all_but(model, {"head": "^head\\."})
    frozen = sum(p.numel() for p in model.llm.parameters())
    rows = parameter_table(model, trainable, lambda name: "head").split("\n")
    counts = {" ".join(row.split()[:-1]): row.split()[-1] for row in rows[:-1]}
    assert counts == {"head": "27", "llm (frozen)": f"{frozen:,d}"}
    assert rows[-1].split() == ["trainable", "27", "of", f"{frozen + 27:,d}"]


def test_autocast_is_for_a_bf16_base():
    linear, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
    for dtype in (torch.float32, torch.bfloat16):
        with autocast(dtype, x.device):
            assert linear(x).dtype == dtype
