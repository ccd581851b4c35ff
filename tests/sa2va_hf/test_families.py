"""A config.json gives the classes of its family, or a sentence."""

import copy
import pickle
import re

import pytest
import torch

from sa2va_hf import Sa2VAConfig, Sa2VAModel, Sa2VAProcessor
from sa2va_hf.families import FAMILIES, family_of
from tests.runs import CHECKPOINT


def test_the_public_names_return_the_family():
    (family,) = [family for family in FAMILIES if family.name == "InternVL"]
    config = Sa2VAConfig.from_pretrained(CHECKPOINT)
    assert type(config) is family.config and config.folder == CHECKPOINT
    with torch.device("meta"):
        model = Sa2VAModel(config)
    assert type(model) is family.model and type(Sa2VAProcessor(config)) is family.processor
    # Workers and copies get the same classes.
    assert type(pickle.loads(pickle.dumps(Sa2VAProcessor(config, 3)))) is family.processor
    assert type(copy.deepcopy(config)) is family.config


@pytest.mark.parametrize(
    "raw, words",
    [
        (dict(model_type="llava"), "this is a LLaVA; Sa2VA of LLaVA-1.5 is not supported"),
        (dict(auto_map={"AutoModel": "modeling_sa2va_llava.Sa2VALlava"}), "this is a LLaVA"),
        (dict(vision_config=dict(model_type="clip_vision_model")), "this is a LLaVA"),
        (dict(model_type="internvl"), "model_type is 'internvl'; only 'sa2va_chat'"),
        (dict(vision_config={}), "(InternVL: vision_config and llm_config"),
        (dict(vision_config={}, audio_config={}), "it has vision_config and audio_config"),
        ({}, "it has none of them"),
    ],
)
def test_no_family(raw, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        family_of(dict(model_type="sa2va_chat") | raw)
