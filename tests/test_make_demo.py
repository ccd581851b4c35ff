"""The demo's prompt head: trained alone, from a fresh draw, to a stated IoU or not at all."""

import numpy as np
import pytest
import torch

from sa2va_hf import Sa2VAConfig, Sa2VAModel, Sa2VAProcessor
from sa2va_hf.tokenizer import load_tokenizer
from tools import demo_warm_start
from tools.demo_model import CONFIG, make_tokenizer
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
    """The mean of the last 25 IoUs counts: at .5 a step it reaches a target of .1 in the fifth."""
    losses = []
    real = warm_start.prompt_head_loss
    monkeypatch.setattr(
        warm_start, "prompt_head_loss", lambda rng: losses.append(real(rng)) or (losses[-1][0], 0.5)
    )
    before = {name: p.clone() for name, p in warm_start.model.state_dict().items()}
    warm_start.retrain_prompt_head(target=0.1)
    assert len(losses) == 5 and all(0 <= iou <= 1 and loss > 0 for loss, iou in losses)
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


def test_answers_have_one_wording(warm_start):
    """So that loop 2 without a sampled mask has nothing to choose among."""
    scene, rng = warm_start.scenes[0], np.random.default_rng(0)
    obj = scene.objects[scene.targets[0]]
    answers = {
        tuple(i for i in warm_start._segment(obj, scene, rng)[0]["labels"] if i != -100)
        for _ in range(20)
    }
    assert len(answers) == 1
