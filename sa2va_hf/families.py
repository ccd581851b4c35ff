"""Families of Sa2VA: from a config.json to the classes that compute it.

`model_type` is sa2va_chat in all of them, so they are told apart by their sub-configurations. A new
family is one file beside this one and one line of FAMILIES.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass

from .configuration_sa2va import Sa2VAConfig
from .internvl import InternVLConfig, InternVLModel, InternVLProcessor
from .modeling_sa2va import Sa2VAModel
from .processing_sa2va import Sa2VAProcessor
from .qwen_vl import (
    Qwen3Sa2VAConfig,
    Qwen3Sa2VAModel,
    Qwen25Sa2VAConfig,
    Qwen25Sa2VAModel,
    QwenVLProcessor,
)

MODEL_TYPE = "sa2va_chat"
# Said of a region prompt that the model was not trained on
UNTAUGHT = (
    "which no published model was trained on: before loop 1 teach it by supervised training, "
    "--tasks region_captions"
)


@dataclass(frozen=True)
class Family:
    """One family: what its config.json has, and its classes."""

    name: str
    looked_for: str  # in config.json, in words
    matches: Callable[[dict], bool]  # of config.json, whether it is of this family
    config: type[Sa2VAConfig]
    model: type[Sa2VAModel]
    processor: type[Sa2VAProcessor]


def _has(raw: dict, *parts: str) -> bool:
    return all(isinstance(raw.get(part), dict) for part in parts)


FAMILIES = (
    Family(
        "InternVL",
        "vision_config and llm_config",
        lambda raw: _has(raw, "vision_config", "llm_config"),
        InternVLConfig,
        InternVLModel,
        InternVLProcessor,
    ),
    Family(
        "Qwen3-VL",
        "text_config and vision_config.deepstack_visual_indexes",
        lambda raw: (
            _has(raw, "vision_config", "text_config")
            and "deepstack_visual_indexes" in raw["vision_config"]
        ),
        Qwen3Sa2VAConfig,
        Qwen3Sa2VAModel,
        QwenVLProcessor,
    ),
    Family(
        "Qwen2.5-VL",
        "text_config and vision_config.fullatt_block_indexes",
        lambda raw: (
            _has(raw, "vision_config", "text_config")
            and "fullatt_block_indexes" in raw["vision_config"]
        ),
        Qwen25Sa2VAConfig,
        Qwen25Sa2VAModel,
        QwenVLProcessor,
    ),
)


def family_of(raw: dict) -> Family:
    """Return the family of a config.json.

    Raises:
        ValueError: it is of none; names what was looked for.
    """
    model_type = raw.get("model_type", MODEL_TYPE)
    named = json.dumps([model_type, raw.get("architectures"), raw.get("auto_map")]).lower()
    vision = raw.get("vision_config")
    encoder = vision.get("model_type") if isinstance(vision, dict) else None
    if "llava" in named or encoder == "clip_vision_model":
        raise ValueError("config.json: this is a LLaVA; Sa2VA of LLaVA-1.5 is not supported")
    if model_type != MODEL_TYPE:
        raise ValueError(
            f"config.json: model_type is {model_type!r}; only 'sa2va_chat', Sa2VA's, is supported"
        )
    for family in FAMILIES:
        if family.matches(raw):
            return family
    looked_for = "; ".join(f"{family.name}: {family.looked_for}" for family in FAMILIES)
    parts = [name for name in raw if name.endswith("_config")]
    raise ValueError(
        f"config.json: of no known family of Sa2VA ({looked_for}); it has "
        f"{' and '.join(parts) or 'none of them'}"
    )


def describe(model: Sa2VAModel, region_prompt: str) -> str:
    """Return what a model is, in one line: family, sizes, template, special ids and versions.

    Args:
        region_prompt: the way in which it is asked about regions.
    """
    config, llm = model.config, model.config.llm
    was_taught = region_prompt in ("tokens", config.raw.get("region_prompt"))
    trained = "" if was_taught else f", {UNTAUGHT}"
    sam = "SAM3" if config.has_sam3 else "SAM2"
    seg = {"after_norm": "after", "before_norm": "before"}[config.seg_state]
    return (
        f"Sa2VA of {family_of(config.raw).name}, written by transformers "
        f"{config.raw.get('transformers_version', '(not said)')}: LLM of {llm.num_hidden_layers} "
        f"layers, width {llm.hidden_size}, {llm.vocab_size} tokens; {sam} at "
        f"{config.sam2.image_size} pixels; template {config.template}; {model.image_token} is "
        f"{model.img_context_id}, [SEG] {model.seg_id}, whose state {seg} the final norm prompts "
        f"{sam}; --region_prompt {region_prompt}{trained}"
    )
