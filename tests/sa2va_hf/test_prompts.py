"""Prompt strings of both templates, and a run under a checkpoint whose config says vicuna."""

import json
import shutil

import pytest

from rl_train.data.text import phrase
from sa2va_hf.prompts import DESCRIBE, PromptBuilder
from sa2va_hf.templates import IGNORE_INDEX, PROMPT_TEMPLATE, template_map, video_lisa_encode_fn
from sa2va_hf.tokenizer import load_tokenizer
from tests.runs import CHECKPOINT, on_one_core, rollouts, run


@pytest.mark.parametrize(
    "template, before, after",
    [("phi3_chat", "<|user|>\n", "<|end|>\n<|assistant|>\n"), ("vicuna", "USER: ", " ASSISTANT:")],
)
def test_prompts_follow_the_template(template, before, after):
    prompts = PromptBuilder(load_tokenizer(CHECKPOINT), template, tokens_per_tile=2)
    image = "<img><IMG_CONTEXT><IMG_CONTEXT></img>"
    region = "\nThere are 1 part regions in the picture: region1<vp>"
    region += "<IMG_CONTEXT><IMG_CONTEXT><IMG_CONTEXT></vp>.\n"
    assert prompts.text(DESCRIBE, 1, [3]) == f"{before}{image}{region}{DESCRIBE}{after}"
    assert (
        prompts.tokenizer.decode(prompts.segment(phrase("A {Red} dog."), 1))
        == f"{before}{image}\nPlease segment a {{red}} dog in this image.{after}"
    )


def test_ids_are_those_of_the_text():
    """Though the image's tokens are put in after encoding: of several tiles, with regions as large
    as the image, or none."""
    prompts = PromptBuilder(load_tokenizer(CHECKPOINT), "phi3_chat", tokens_per_tile=4)
    for how in (
        (DESCRIBE, 1, [3]),
        (DESCRIBE, 1, [4]),
        (DESCRIBE, 1, [9]),
        (DESCRIBE, 3, [1, 12]),
        ("What is <img> this?", 2, None),
    ):
        assert prompts.ids(*how) == prompts.tokenizer.encode(
            prompts.text(*how), add_special_tokens=False
        )


def test_an_answer_is_encoded_as_in_the_supervised_training():
    """phi3_chat's answer ends in its suffix, which is one piece with it; vicuna's, which has none,
    in EOS."""
    tokenizer = load_tokenizer(CHECKPOINT)
    for template in ("phi3_chat", "vicuna"):
        prompts = PromptBuilder(tokenizer, template, tokens_per_tile=2)
        turn = dict(input=prompts.question(DESCRIBE, 1, [3]), output="A red dog.")
        data = video_lisa_encode_fn(
            template_map({"conversation": [turn]}, PROMPT_TEMPLATE[template]), tokenizer, 8192
        )
        answer = [i for i, label in zip(data["input_ids"], data["labels"]) if label != IGNORE_INDEX]
        assert prompts.answer("A red dog.") == answer
        assert (answer[-1] == tokenizer.eos_token_id) == (template == "vicuna")
        assert prompts.completion_text(answer) == "A red dog."


def test_lower_case_makes_no_special_token():
    """A sampled caption that shouts them would else end the turn in the teacher's prompt."""
    assert phrase("A <IMG> dog <|END|>\n<|Assistant|> [seg].") == "a dog"


def test_vicuna_runs(data, tmp_path, monkeypatch):
    """It has no stop text, so answers end at the tokenizer's EOS or at the limit."""
    for _ in on_one_core(monkeypatch):
        model = tmp_path / "model"
        shutil.copytree(CHECKPOINT, model)
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"template": "vicuna"}))
        run(data, tmp_path / "run", model_path=model)
    lines = rollouts(tmp_path / "run")
    assert {line["step"] for line in lines} == {0, 1} and {line["task"] for line in lines} == {
        "loop1",
        "loop2",
    }


def test_an_unknown_template_is_refused():
    with pytest.raises(ValueError, match="template 'llama9' is unknown; known: phi3_chat"):
        PromptBuilder(load_tokenizer(CHECKPOINT), "llama9", 2)
