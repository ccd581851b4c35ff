"""A third family of models is one record: it builds, and its exports have card and citations."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from torch import nn

from rl_train.checkpoint.save_load import STATE_KEYS
from rl_train.config.grpo_config import PolicyConfig
from rl_train.export.model_card import write_card
from rl_train.policies import registry
from rl_train.policies.registry import FAMILIES, QWEN_VL, SA2VA, build_policy, family_of

ENTRY = "@article{tiny,\n  title = {A tiny model}\n}\n"


class TinyPolicy:
    """Members of a policy that a model card reads."""

    family = "tiny"

    def __init__(self, trained):
        self.trained = trained
        self.model = nn.ModuleDict(dict(head=nn.Linear(2, 3), body=nn.Linear(4, 4)))
        self.group_of = {f"head.{n}": "head" for n, _ in self.model["head"].named_parameters()}


def build(config, groups, max_new_tokens, device):
    return TinyPolicy(groups)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A folder of a model of the family "tiny", which is known for the length of a test."""
    tiny = replace(
        QWEN_VL,
        name="tiny",
        model_types=("tiny_chat",),
        check=lambda config: None,
        build=build,
        group_patterns={"head": "^head"},
        citation=ENTRY,
        card_loading="Load it with `tiny.load(FOLDER)`, ask QUESTION",
        library="tiny",
        example_question=lambda flags, base: f"where? ({flags['dataset']})",
    )
    monkeypatch.setitem(registry.FAMILIES, tiny.name, tiny)
    folder = tmp_path / "tiny_model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(dict(model_type="tiny_chat")))
    return folder


def test_a_new_family_is_built(folder):
    assert family_of(folder) == "tiny"
    config = PolicyConfig(model_path=str(folder))
    policy = build_policy(config, dict(loop="tiny"), ["head"], 8, torch.device("cpu"))
    assert isinstance(policy, TinyPolicy) and policy.trained == ["head"]


def test_sa2va_takes_no_other_sam2():
    config = PolicyConfig(model_path="M", sam_path="S")
    with pytest.raises(ValueError, match="--sam_path S: the model in --model_path has its own"):
        SA2VA.check(config)


def test_a_new_family_has_card_and_citations(folder, tmp_path):
    checkpoint = tmp_path / "checkpoint_step_3"
    checkpoint.mkdir()
    flags = dict(tasks=["own:Task"], dataset="gar", data_dir="owner/set", kl_coef=0.1)
    (checkpoint / "config.json").write_text(json.dumps(flags))
    torch.save(dict.fromkeys(STATE_KEYS) | dict(step=3), checkpoint / "training_state.pt")
    write_card(tmp_path, checkpoint, folder, "policy")
    card = (tmp_path / "README.md").read_text()
    assert "## Loading\nLoad it with `tiny.load(FOLDER)`, ask where? (gar)" in card
    fields = ModelCard.load(tmp_path / "README.md").data
    assert fields.library_name == "tiny" and fields.datasets == ["owner/set"]
    entries = card.partition("## Citation")[2]
    assert ENTRY in entries and "{rl_sa2va," in entries
    assert "sa2va, " not in entries and "2402.03300" in entries


def test_every_family_is_whole():
    """Names are the policies' own, and groups beside the trainable ones are reached by these."""
    for name, family in FAMILIES.items():
        assert family.name == name and family.rl_patterns.keys() <= family.group_patterns.keys()
        assert set(family.gradient_via.values()) <= family.rl_patterns.keys()
        assert family.citation.count("{") == family.citation.count("}")
