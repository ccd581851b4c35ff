"""Prompt strings of both templates, and a run under a checkpoint whose config says vicuna."""
import json
import shutil

import pytest
from tests.runs import CHECKPOINT, draw_data, on_one_core, rollouts, run

from rl_train.policy import load_tokenizer
from rl_train.prompts import DESCRIBE, PromptBuilder, phrase


@pytest.mark.parametrize("template, before, after", [
    ("phi3_chat", "<|user|>\n", "<|end|>\n<|assistant|>\n"), ("vicuna", "USER: ", " ASSISTANT:")])
def test_prompts_follow_the_template(template, before, after):
    prompts = PromptBuilder(load_tokenizer(CHECKPOINT), template, tokens_per_tile=2)
    image = "<img><IMG_CONTEXT><IMG_CONTEXT></img>"
    region = "\nThere are 1 part regions in the picture: region1<vp><IMG_CONTEXT><IMG_CONTEXT><IMG_CONTEXT></vp>.\n"
    assert prompts.text(DESCRIBE, 1, [3]) == f"{before}{image}{region}{DESCRIBE}{after}"
    assert prompts.tokenizer.decode(prompts.segment("A {Red} dog.", 1)) == f"{before}{image}\nPlease segment a {{red}} dog in this image.{after}"


def test_lower_case_makes_no_special_token():
    """A sampled caption that shouts them would else end the turn in the teacher's prompt."""
    assert phrase("A <IMG> dog <|END|>\n<|Assistant|> [seg].") == "a dog."[:-1]


def test_vicuna_runs(tmp_path, monkeypatch):
    """It has no stop text, so answers end at the tokenizer's EOS or at the limit."""
    for _ in on_one_core(monkeypatch):
        model = tmp_path / "model"
        shutil.copytree(CHECKPOINT, model)
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"template": "vicuna"}))
        run(draw_data(tmp_path / "data"), tmp_path / "run", model_path=model)
    lines = rollouts(tmp_path / "run")
    assert {line["step"] for line in lines} == {0, 1} and {line["task"] for line in lines} == {"loop1", "loop2"}


def test_an_unknown_template_is_refused():
    with pytest.raises(ValueError, match="template 'llama9' is unknown; known: phi3_chat"):
        PromptBuilder(load_tokenizer(CHECKPOINT), "llama9", 2)
