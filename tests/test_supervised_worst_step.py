"""The worst step of supervised training, which is tried before its first."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rl_train import memory
from rl_train.distributed import Ranks
from rl_train.policies import qwen_worst_case, worst_case
from rl_train.stand_ins import LongestExamples
from sa2va_hf.prompts import SEGMENT_ANSWERS, SEGMENT_WORDINGS
from tests.policies.tiny_points import write_qwen, write_sam
from tests.runs import on_one_core
from tests.supervised import TakesNothing, built
from tools import train_supervised

one_core = pytest.fixture(autouse=True)(on_one_core)


def test_the_worst_step_is_tried_and_moves_nothing(data, tmp_path, monkeypatch):
    """Captions of all tokens, answers with [SEG] of all of theirs, the longest prompts."""
    monkeypatch.setattr(worst_case, "PIXELS", 64 * 64)
    how = dict(max_caption_length=60, gradient_accumulation_steps=3, other_regions="")
    made = built(data, tmp_path, **how, train=["lora", "text_hidden_fcs", "vision"])
    tried, held, policy = [], [], made.state.policy
    forward = train_supervised.SupervisedLoss.forward

    def trying(module, *args):
        tried.append(args)
        assert torch.rand(1) >= 0  # which are put back
        return forward(module, *args)

    monkeypatch.setattr(train_supervised.SupervisedLoss, "forward", trying)
    monkeypatch.setattr(memory, "held_bytes", lambda given: held.append(list(given)) or 0)
    before = {name: p.detach().clone() for name, p in policy.trainable.items()}
    generator = torch.get_rng_state()
    assert set(memory.worst_step(made, train_supervised.train)) == {"encode", "update"}
    assert torch.equal(torch.get_rng_state(), generator)
    for name, p in policy.trainable.items():
        assert torch.equal(p, before[name]) and p.grad is None
    assert made.state.step == 0 and not made.state.optimizer.state
    ((features, (captions, masks), totals, last),) = tried
    assert held[0][0][0] is features and held[0][0][1] == [captions, masks]  # other batches' too
    assert features.vision.requires_grad and all(grid.all() for grid in features.grids)
    assert captions.valid.shape == (2, 24) and captions.valid.all()
    answers = [len(policy.prompts.answer(answer)) for answer in SEGMENT_ANSWERS]
    assert masks.valid.shape == (2, max(answers)) and masks.valid.all()
    assert ((masks.ids == policy.model.seg_id).sum(1) == 1).all()
    shortest = len(policy.prompts.segment("", features.tiles[0], SEGMENT_WORDINGS[0]))
    assert min(map(len, masks.prompts.ids)) > shortest + 35  # of 60, with the wording's own
    assert len(masks.batch.others) == 2


def test_a_task_that_takes_no_made_up_sample_trains_all_the_same(
    data, tmp_path, monkeypatch, capsys
):
    """Its memory is not announced. All but a refusal is a fault, and so is one of our own task."""
    monkeypatch.setattr(worst_case, "PIXELS", 64 * 64)
    name = f"{TakesNothing.__module__}:TakesNothing"
    made = built(data, tmp_path, tasks=name, max_caption_length=60)
    assert list(made.state.roles.banks) == ["reference"]
    on_gpu = replace(made, ranks=Ranks(0, 1, torch.device("cuda", 0)))
    assert memory.announce(on_gpu, train_supervised.train) == ""
    said = f"is not known: --tasks {name} does not take made-up samples (worst)"
    assert said in capsys.readouterr().out
    with monkeypatch.context() as patch:
        patch.setattr(TakesNothing, "__module__", "rl_train.tasks.supervised")
        with pytest.raises(RuntimeError, match="by a fault of the program"):
            memory.announce(on_gpu, train_supervised.train)
    monkeypatch.setattr(TakesNothing, "examples", lambda *_: {}["no refusal"])
    with pytest.raises(KeyError):
        memory.announce(on_gpu, train_supervised.train)


def test_longest_answers_by_hand():
    asked = SimpleNamespace(name="t", weight=1.0, examples=lambda *_: ("prompts", [[5, 6], [7]]))
    assert LongestExamples(asked, 4, 0).examples() == ("prompts", [[5, 6, 0, 0], [7, 0, 0, 0]])
    asked.longest_answer = 2
    assert LongestExamples(asked, 4, 0).examples() == ("prompts", [[5, 6], [7, 0]])


def test_the_worst_step_of_points(data, tmp_path, monkeypatch):
    monkeypatch.setattr(qwen_worst_case, "MASK_PIXELS", 64 * 64)
    folders = dict(model_path=write_qwen(tmp_path / "qwen"), sam_path=write_sam(tmp_path / "sam"))
    how = dict(tasks="point_answers", answer_style="points", image_side=56)
    made = built(data, tmp_path, **folders, **how, max_completion_length=64)
    assert made.state.roles.banks == {}
    assert set(memory.worst_step(made, train_supervised.train)) == {"encode", "update"}
