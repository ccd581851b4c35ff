"""The demo's warm start: what it is wrong about, and its prompt head, trained to a stated share."""

import numpy as np
import pytest
import torch

from sa2va_hf import Sa2VAConfig, Sa2VAModel, Sa2VAProcessor
from sa2va_hf.tokenizer import load_tokenizer
from tools import demo_warm_start
from tools.demo_losses import Codes
from tools.demo_model import CONFIG, make_tokenizer
from tools.demo_report import told_apart
from tools.demo_scenes import ATTRIBUTES, Object, Scene, make_scene
from tools.make_demo import SHIPPED_CHECKPOINT
from tools.new_folder import save


@pytest.fixture
def warm_start():
    model = Sa2VAModel.from_pretrained(SHIPPED_CHECKPOINT)
    tokenizer = load_tokenizer(SHIPPED_CHECKPOINT)
    return demo_warm_start.WarmStart(
        model, tokenizer, Sa2VAProcessor(model.config, max_tiles=1), seed=0, num_scenes=4
    )


def test_the_shipped_files_are_those_that_would_be_written(tmp_path):
    tokenizer = load_tokenizer(SHIPPED_CHECKPOINT)
    llm = CONFIG["llm_config"] | {"vocab_size": len(tokenizer)}
    save(Sa2VAModel(Sa2VAConfig(**CONFIG | {"llm_config": llm})), make_tokenizer(seed=0), tmp_path)
    for name in ("config.json", "tokenizer_config.json", "tokenizer.json"):
        assert (tmp_path / name).read_text() == (SHIPPED_CHECKPOINT / name).read_text()


def test_nothing_else_is_trained_and_the_target_ends_it(warm_start, monkeypatch):
    """The mean of the last 10 shares counts, which are .5 each."""
    losses, real = [], warm_start.prompt_head_loss
    monkeypatch.setattr(
        warm_start, "prompt_head_loss", lambda rng: losses.append(real(rng)) or (losses[-1][0], 0.5)
    )
    before = {name: p.clone() for name, p in warm_start.model.state_dict().items()}
    warm_start.retrain_prompt_head(target=0.1)
    assert len(losses) == demo_warm_start.WINDOW and all(
        0 <= hits <= 1 and loss > 0 for loss, hits in losses
    )
    changed = {
        name
        for name, p in warm_start.model.state_dict().items()
        if not torch.equal(p, before[name])
    }
    assert changed == {name for name in before if name.startswith("text_hidden_fcs.")}


def test_a_target_out_of_reach_is_an_error(warm_start, monkeypatch):
    monkeypatch.setattr(demo_warm_start, "PROMPT_HEAD_STEPS", 1)
    with pytest.raises(RuntimeError, match="after 1 steps, not 0.99"):
        warm_start.retrain_prompt_head(target=0.99)


def test_mistakes_make_no_word_more_frequent_and_half_of_the_values_wrong():
    partners = dict(demo_warm_start.MISTAKES)
    for values in ATTRIBUTES.values():
        pairs = {pair: share for pair, share in partners.items() if pair[0] in values}
        assert sorted(value for pair in pairs for value in pair) == sorted(values)
        assert sorted(pairs.values()) == sorted(1 - share for share in pairs.values())
    rng = np.random.default_rng(0)
    obj = Object("plain", "red", "circle", "top left", None)
    said = [demo_warm_start.mistaken(obj, rng) for _ in range(2000)]
    for word, share in {"plain": 0.65, "orange": 0.65, "square": 0.65, "left": 0.35}.items():
        assert abs(np.mean([word in text for text in said]) - share) < 0.05


def test_codes_find_the_object_whatever_their_scale_and_the_embeddings_around_it_mostly():
    codes, scene = Codes(64, seed=0, device="cpu"), make_scene(0, 0, 0)
    z = codes([obj.attributes for obj in scene.objects])
    assert torch.allclose(z.square().mean(), torch.tensor(1.0), atol=1e-4)
    for scale in (0.1, 10):
        for number, one in enumerate(codes.mean + scale * z):
            assert codes.nearest(one, scene.objects) == number
    rng = np.random.default_rng(0)
    found = [
        codes.nearest(one, scene.objects) == number
        for _ in range(50)
        for number, one in enumerate(codes.around(scene.objects, rng, 1.0))
    ]
    assert 0.5 < np.mean(found) < 0.9


def test_what_the_report_says_of_scenes():
    """Three objects: the middle one shares a value with each other one."""
    objects = [("plain", "red", "circle", "top left"), ("plain", "blue", "cross", "top right")]
    objects += [("banded", "blue", "square", "bottom left")]
    scene = Scene(None, tuple(Object(*attributes, None) for attributes in objects))
    apart = told_apart([scene])
    # alone: 3 of 4 values of the first and last object, 2 of the middle one
    assert apart[1] == dict(any=pytest.approx(8 / 12), best=1.0) and apart[4]["any"] == 1


def test_a_prompt_head_that_has_lost_its_scale_gets_it_back(warm_start):
    last = warm_start.model.text_hidden_fcs[2]
    shipped = last.weight.detach().clone()
    with torch.no_grad():
        for parameter in last.parameters():
            parameter.div_(8)
    warm_start.scale_prompt_head(num_scenes=4)
    factor = float((last.weight / (shipped / 8)).mean())
    assert any(factor == pytest.approx(scale) for scale in demo_warm_start.SCALES) and factor > 2
