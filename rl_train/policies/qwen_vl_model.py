"""Qwen2.5-VL or Qwen3-VL and SAM2 from their folders, by transformers' own classes, strictly."""

import re
import shutil
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    Qwen3VLForConditionalGeneration,
    Sam2Config,
    Sam2Model,
)
from transformers.utils import logging as transformers_logging

from rl_train.config.grpo_config import PolicyConfig
from rl_train.utils.io import read_json
from sa2va_hf.qwen_images import ImagePreprocessing
from sa2va_hf.sam2_attention import leave_out_unread_scores
from sa2va_hf.weights import INDEX, find_keys

# SAM2 has one such matrix. transformers keeps two copies; a file may hold only one of them.
SHARED_EMBEDDINGS = ("prompt_encoder.shared_embedding", "shared_image_embedding")


QwenVL = Qwen2_5_VLForConditionalGeneration | Qwen3VLForConditionalGeneration


@dataclass(frozen=True)
class Version:
    """Differences between the versions of Qwen-VL.

    Attributes:
        system_prompt: that the chat template puts before a conversation without one.
        coordinates: unit in which the base answers, one of `parser.COORDINATE_SCALES`.
        image_size: default of --image_size; 0 keeps the shape of images.
    """

    title: str
    model_class: type[QwenVL]
    system_prompt: str
    coordinates: str
    image_size: int


# By the model_type in config.json.
VERSIONS = {
    "qwen2_5_vl": Version(
        "Qwen2.5-VL",
        Qwen2_5_VLForConditionalGeneration,
        system_prompt="You are a helpful assistant.",
        coordinates="pixels",
        image_size=840,
    ),
    "qwen3_vl": Version(
        "Qwen3-VL",
        Qwen3VLForConditionalGeneration,
        system_prompt="",
        coordinates="thousand",
        image_size=832,
    ),
}


def version_of(path: str | Path) -> Version:
    """Return the version of the Qwen-VL in a folder, by its config.json."""
    return VERSIONS[read_json(Path(path) / "config.json")["model_type"]]


class PointModel(nn.Module):
    """Qwen-VL, which answers, and SAM2, which predicts the mask."""

    def __init__(self, vlm: QwenVL, sam: Sam2Model):
        super().__init__()
        self.vlm, self.sam = vlm, sam


@dataclass
class TextModel:
    """Text decoder of Qwen-VL as a causal language model, the form that `Engine` takes."""

    model: nn.Module
    lm_head: nn.Linear

    @property
    def config(self) -> PreTrainedConfig:
        return self.model.config

    def get_input_embeddings(self) -> nn.Embedding:
        return self.model.embed_tokens


def load_qwen(path: str | Path, dtype: torch.dtype = torch.float32) -> QwenVL:
    """Load Qwen-VL from a folder in its published layout. Raises ValueError: see `_load`."""
    return _load("--model_path", version_of(path).model_class, path, dtype)


def module_key(key: str) -> str:
    """Return the name that a tensor of a weight file has in transformers' module.

    Qwen2.5-VL's published files have `visual.` and `model.`, for which the module has
    `model.visual.` and `model.language_model.`; Qwen3-VL's have the module's names.
    """
    if key.startswith("visual."):
        return f"model.{key}"
    return re.sub(r"^model\.(?!visual\.|language_model\.)", "model.language_model.", key)


def save_qwen(model: QwenVL, base: Path, folder: Path, dtype: torch.dtype):
    """Write a model's weights in `dtype`, under the keys and in the files that `base` has.

    transformers' `save_pretrained` would write config.json too, in a form that older versions
    misread.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state, keys_of_file = model.state_dict(), defaultdict(list)
    for key, file in find_keys(base).items():
        keys_of_file[file.name].append(key)
    for name, keys in keys_of_file.items():
        # A copy, because a file that holds tied weights holds two.
        tensors = {key: state[module_key(key)].to("cpu", dtype, copy=True) for key in keys}
        tensors = {key: tensor.contiguous() for key, tensor in tensors.items()}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        shutil.copymode(base / "config.json", folder / name)  # safetensors makes 0600
    if (base / INDEX).is_file():
        shutil.copyfile(base / INDEX, folder / INDEX)


def check_sam(path: str | Path):
    """Raise ValueError, naming --sam_path, if the folder holds no SAM2."""
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ValueError(f"--sam_path {path}: holds no config.json, so it is no SAM2 folder")
    model_type = read_json(file).get("model_type")
    if model_type not in ("sam2", "sam2_video"):
        raise ValueError(f"--sam_path {path}: config.json says model_type {model_type!r}, not sam2")


def load_sam(path: str | Path, dtype: torch.dtype = torch.float32) -> Sam2Model:
    """Load SAM2 for single images: its image encoder in `dtype`, the rest in float32.

    Published folders hold the model for videos, whose memory is left out. Raises ValueError if the
    folder holds another model; see `_load`.
    """
    check_sam(path)
    # transformers would warn of a config of the model for videos, whose other keys are not read.
    raw = read_json(Path(path) / "config.json") | dict(model_type=Sam2Config.model_type)
    sam = _load("--sam_path", Sam2Model, path, torch.float32, Sam2Config.from_dict(raw))
    leave_out_unread_scores(sam)
    sam.vision_encoder.to(dtype)
    return sam


def _load(
    flag: str,
    model_class: type[PreTrainedModel],
    path: str | Path,
    dtype: torch.dtype,
    config: PreTrainedConfig | None = None,
) -> PreTrainedModel:
    """Load a model whose every weight is in the folder's files.

    Args:
        config: of the model; None: that of the folder.

    Raises:
        ValueError: a file is missing or damaged, or holds other weights than the config asks for.
    """
    find_keys(Path(path))  # reads the header of every file, and names a damaged one
    if not sys.stderr.isatty():  # a bar of a line each in a log
        transformers_logging.disable_progress_bar()
    model, info = model_class.from_pretrained(
        path,
        config=config,
        dtype=dtype,
        use_safetensors=True,
        local_files_only=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # reported below, together with the other faults
    )
    copies = {f"{name}.positional_embedding" for name in SHARED_EMBEDDINGS}
    # The one matrix of a file stands for both copies.
    if len(absent := info["missing_keys"] & copies) == 1:
        model.get_buffer(*absent).copy_(model.get_buffer(*copies - absent))
        info["missing_keys"] -= absent
    faults = ("missing_keys", "unexpected_keys", "mismatched_keys")
    if any(info[fault] for fault in faults):
        listed = [f"{len(info[f])} {f} {sorted(map(str, info[f]))[:3]}" for f in faults if info[f]]
        raise ValueError(f"{flag} {path}: its files are not what config.json says: {listed}")
    return model.eval()


def image_preprocessing(path: str | Path, config: PolicyConfig) -> ImagePreprocessing:
    """Read a checkpoint's image preprocessing, limited by --image_size and --max_image_tokens.

    It stands in preprocessor_config.json or, as transformers 5 writes it, in processor_config.json.

    Raises ValueError if the folder holds neither, or --image_size is not one of its sizes.
    """
    files = [Path(path) / name for name in ("processor_config.json", "preprocessor_config.json")]
    if not any(file.is_file() for file in files):
        raise ValueError(
            f"--model_path {path}: holds neither preprocessor_config.json nor "
            "processor_config.json, which say how images are prepared: copy it from the base"
        )
    processor = Qwen2VLImageProcessorPil.from_pretrained(path, local_files_only=True)
    min_pixels, max_pixels = processor.size["shortest_edge"], processor.size["longest_edge"]
    side, token_side = config.image_size, processor.patch_size * processor.merge_size
    if side is None:
        side = version_of(path).image_size
    if side % token_side or side and not min_pixels <= side**2 <= max_pixels:
        raise ValueError(
            f"--image_size {side}: must be 0 or a multiple of {token_side}, whose square is from "
            f"{min_pixels} to {max_pixels}, as the image processor in {path} says"
        )
    return ImagePreprocessing(
        patch=processor.patch_size,
        merge=processor.merge_size,
        min_pixels=min_pixels,
        max_pixels=min(max_pixels, config.max_image_tokens * token_side**2),
        side=side,
        mean=tuple(processor.image_mean),
        std=tuple(processor.image_std),
        frames=processor.temporal_patch_size,
    )
