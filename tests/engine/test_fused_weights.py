"""The engine takes weights over in the open, gives them back, and says what it does not know."""

import copy

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from rl_train.engine import Engine
from rl_train.engine.fused_weights import FusedModel, unsupported
from tests.engine.tiny import LINEARS, assert_same, both, fast, prompts, tiny_llm


@pytest.fixture
def engine():
    """One that has taken its model over."""
    engine = Engine(tiny_llm(vocab_size=301), pad_id=1)
    with fast(engine):
        engine.last_hidden_states(*prompts(engine.language_model))
    return engine


def linear(model, name="q_proj"):
    return model.model.layers[0].self_attn.get_submodule(name).base_layer


def test_parameters_are_views_with_the_same_numbers(engine, monkeypatch):
    """One copy of the weights, that the model computes with too."""
    model = engine.language_model
    fresh = tiny_llm(vocab_size=301).state_dict()
    assert all(torch.equal(v, fresh[k]) for k, v in model.state_dict().items())
    fused = engine.fused
    with fast(engine):
        qkv = fused(model.lm_head.weight).layers[0].copied.qkv
    q, k = linear(model), linear(model, "k_proj")
    assert q.weight.data_ptr() == qkv.weight.data_ptr() and q.bias.data_ptr() == qkv.bias.data_ptr()
    assert k.weight.untyped_storage().data_ptr() == q.weight.untyped_storage().data_ptr()
    with torch.no_grad():
        q.weight.mul_(2)  # seen by both
    assert_same(*both(engine, monkeypatch, *prompts(model)))


def test_release_gives_every_parameter_its_own_storage(engine, monkeypatch, tmp_path):
    model = engine.language_model
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="covering the entire storage"):  # never wrong bytes
        save_torch_state_dict(model.state_dict(), tmp_path)
    engine.release()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    for parameter in model.parameters():
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
    save_torch_state_dict(model.state_dict(), tmp_path)
    engine.release()  # of nothing
    assert_same(*both(engine, monkeypatch, *prompts(model)))  # and takes it over again


def test_a_model_that_is_changed_without_release_is_an_error(engine):
    """Each would else be computed as before, without a word."""
    model = engine.language_model
    lora = model.model.layers[0].self_attn.q_proj

    def merge(undo):
        for module in (m for m in model.modules() if hasattr(m, "base_layer")):
            module.unmerge() if undo else module.merge()

    def disable(undo):
        for module in (m for m in model.modules() if hasattr(m, "base_layer")):
            module.enable_adapters(undo)

    def replace(undo):
        model.model.layers[0].self_attn.q_proj = lora if undo else lora.base_layer

    with fast(engine):
        for change in (merge, disable, replace):
            change(False)
            with pytest.raises(AssertionError, match="release"):
                engine.last_hidden_states(*prompts(model))
            change(True)
            engine.last_hidden_states(*prompts(model))
        model.double().float()  # as `.to(device)` does
        with pytest.raises(AssertionError, match="release"):
            engine.last_hidden_states(*prompts(model))
        engine.release()
        engine.last_hidden_states(*prompts(model))


def test_the_check_costs_next_to_nothing(engine):
    """It looks at one linear, however many there are."""
    model = engine.language_model
    fused, seen = FusedModel(model), []
    for layer in model.model.layers[1:]:
        layer.register_forward_pre_hook(lambda *_: seen.append(1))
        del layer.self_attn  # would fail if it were looked at
    fused.check()
    assert not seen


def test_one_warning_where_the_model_is_not_known(caplog):
    model = tiny_llm(dtype=torch.float16)
    engine = Engine(model, pad_id=1)
    assert [record.getMessage() for record in caplog.records] == [
        "slow token sampling and scoring: its weights are torch.float16 on cpu"
    ]
    assert engine.fast_on == () and Engine(tiny_llm(), pad_id=1).fast_on == ("cuda",)
    assert len(caplog.records) == 1


def test_what_is_not_known_is_refused():
    model = tiny_llm()
    assert unsupported(model) is None
    loras = [module for module in model.modules() if hasattr(module, "base_layer")]
    for lora in loras:
        lora.enable_adapters(False)
    assert "disabled" in unsupported(model)
    for lora in loras:
        lora.enable_adapters(True)
    attention = model.model.layers[1].self_attn
    attention.k_proj.scaling["default"] *= 2
    assert "layer 1: LoRA of different rank or scale" in unsupported(model)
    attention.k_proj = attention.k_proj.base_layer
    assert "layer 1: LoRA on some linears only" in unsupported(model)
    attention.k_proj = torch.nn.Bilinear(1, 1, 1)
    assert "linears of another kind" in unsupported(model)


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda m: m.model.norm.weight.requires_grad_(), "base weights train"),
        (lambda m: m.lm_head.double(), "float64"),
        (lambda m: setattr(m.config, "hidden_act", "gelu"), "only silu"),
        (lambda m: setattr(m.config, "layer_types", ["sliding_attention"] * 2), "full attention"),
        (lambda m: setattr(m, "lm_head", torch.nn.Sequential(m.lm_head)), "not plain"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(change, reason):
    model = tiny_llm()
    head = model.lm_head
    change(model)
    if reason == "not plain":
        model.lm_head.weight = head.weight
    assert reason in unsupported(model)


def test_other_layers_and_other_loras_are_refused():
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=9))
    model.model, model.model.layers = model.transformer, model.transformer.h
    assert "layers of GPT2Block are not known" == unsupported(model)
    model = tiny_llm()
    model.model.layers[1] = LlamaDecoderLayer(LlamaConfig(hidden_size=64), 0)
    assert unsupported(model) == (
        "its layers are of several families: Qwen2DecoderLayer, LlamaDecoderLayer"
    )
    model = tiny_llm(lora_r=0)
    config = LoraConfig(r=2, target_modules=LINEARS, use_dora=True)
    get_peft_model(model, config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    assert "not the plain kind" in unsupported(model)


def test_the_engine_of_a_copy_is_its_own(engine):
    """Nothing is kept outside the engine."""
    model = copy.deepcopy(engine.language_model)
    other = Engine(model, pad_id=1)
    with fast(other):
        assert other.fused(model.lm_head.weight) is not engine._fused
