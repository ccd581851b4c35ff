"""Qwen2.5-VL and SAM2 from their folders: transformers' own classes, every weight accounted for."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Sam2Config,
    Sam2Model,
)

from rl_train.config import PolicyConfig
from rl_train.files import read_json
from rl_train.policies.qwen_inputs import ImageSizes
from sa2va_hf.weights import find_keys

SAM_CONFIGS = ("vision_config", "prompt_encoder_config", "mask_decoder_config")
# What preprocessor_config.json says of still images.
PREPROCESSING = ("patch_size", "merge_size", "temporal_patch_size", "min_pixels", "max_pixels")
PREPROCESSING += ("image_mean", "image_std")
# SAM2 has one such matrix, transformers two copies of it, of which a file may hold but one.
TWICE = ("prompt_encoder.shared_embedding", "shared_image_embedding")


class PointModel(nn.Module):
    """Qwen2.5-VL, which answers, and SAM2, which draws the mask."""

    def __init__(self, vlm: Qwen2_5_VLForConditionalGeneration, sam: Sam2Model):
        super().__init__()
        self.vlm, self.sam = vlm, sam


@dataclass
class TextModel:
    """The part of Qwen2.5-VL that an `engine.Engine` takes: the decoder behind embeddings."""

    model: nn.Module
    lm_head: nn.Linear

    @property
    def config(self):
        return self.model.config

    def get_input_embeddings(self):
        return self.model.embed_tokens


@dataclass(frozen=True)
class Seen:
    """How an image reaches Qwen2.5-VL."""

    sizes: ImageSizes
    frames: int  # equal ones of which a still image consists
    mean: tuple[float, ...]  # of the three colours, in [0, 1]
    std: tuple[float, ...]


def load_qwen(path, dtype=torch.float32) -> Qwen2_5_VLForConditionalGeneration:
    """Qwen2.5-VL of the folder `path`, in its published layout. Raises ValueError: `_load`."""
    raw = _config("--model_path", path, ("qwen2_5_vl",))
    config = Qwen2_5_VLConfig(**raw)
    return _load("--model_path", Qwen2_5_VLForConditionalGeneration, config, path, dtype)


def load_sam(path, dtype=torch.float32) -> Sam2Model:
    """SAM2 of the folder `path` for single images: its image encoder in `dtype`, the rest float32.

    Published folders are of the model for videos, whose memory is left out. Raises ValueError:
    `_load`.
    """
    raw = _config("--sam_path", path, ("sam2", "sam2_video"))
    config = Sam2Config(**{part: raw[part] for part in SAM_CONFIGS if part in raw})
    sam = _load("--sam_path", Sam2Model, config, path, torch.float32)
    sam.vision_encoder.to(dtype)
    return sam


def _config(flag: str, path, kinds: tuple[str, ...]) -> dict:
    """config.json of a folder. Raises ValueError if its model is none of `kinds`."""
    raw = read_json(Path(path) / "config.json")
    kind = raw.get("model_type")
    if kind not in kinds:
        raise ValueError(
            f"{flag} {path}: config.json says model_type {kind!r}, not {' or '.join(kinds)}"
        )
    return raw


def _load(flag: str, kind, config, path, dtype):
    """The model of class `kind` whose every weight is in the folder's files.

    Raises:
        ValueError: a file is missing or damaged, or holds other weights than the config asks for.
    """
    find_keys(Path(path))  # reads the header of every file, and names a damaged one
    how = dict(config=config, dtype=dtype, use_safetensors=True, local_files_only=True)
    how |= dict(output_loading_info=True, ignore_mismatched_sizes=True)  # to name all that is wrong
    model, found = kind.from_pretrained(path, **how)
    missing = set(found["missing_keys"])
    copies = [f"{name}.positional_embedding" for name in TWICE]
    if len(absent := missing & set(copies)) == 1:
        (other,) = set(copies) - absent
        model.get_buffer(absent.pop()).copy_(model.get_buffer(other))
        missing -= set(copies)
    wrong = dict(
        missing=sorted(missing),
        unexpected=sorted(found["unexpected_keys"]),
        misshapen=sorted(str(key[0]) for key in found["mismatched_keys"]),
    )
    if any(wrong.values()):
        words = [f"{len(keys)} weights {how} {keys[:3]}" for how, keys in wrong.items() if keys]
        raise ValueError(f"{flag} {path}: its files are not what config.json says: {words}")
    return model.eval()


def image_sizes(path, config: PolicyConfig) -> Seen:
    """How the folder's checkpoint sees images, under --image_side and --max_image_tokens.

    Raises:
        ValueError: preprocessor_config.json is not there or not whole, or --image_side is none of
            its sizes.
    """
    file = Path(path) / "preprocessor_config.json"
    raw = read_json(file)
    limits = raw.get("size", {})  # newer files have these, older ones the others
    raw = dict(min_pixels=limits.get("shortest_edge"), max_pixels=limits.get("longest_edge")) | raw
    if missing := [name for name in PREPROCESSING if raw.get(name) is None]:
        raise ValueError(f"{file}: lacks {', '.join(missing)}")
    patch, merge, frames, least, most, mean, std = (raw[name] for name in PREPROCESSING)
    unit, side = patch * merge, config.image_side
    if side % unit or side and not least <= side**2 <= most:
        raise ValueError(
            f"--image_side {side}: must be 0 or a multiple of {unit}, whose square is from {least} "
            f"to {most}, as {file} says"
        )
    most = min(most, config.max_image_tokens * unit**2)
    return Seen(ImageSizes(patch, merge, least, most, side), frames, tuple(mean), tuple(std))
