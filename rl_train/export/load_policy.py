"""Open the policy in a folder, of a model or of a checkpoint, and find what it was trained on."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset

from rl_train.checkpoint.fingerprint import fingerprint_of
from rl_train.checkpoint.save_load import WEIGHT_FILES, load_weights, open_weights
from rl_train.config.grpo_config import DataConfig, PolicyConfig
from rl_train.data.dataset_flags import dataset_openers
from rl_train.data.split import picture_keys, split_dataset
from rl_train.distributed.process_group import print0
from rl_train.policies.base import Policy
from rl_train.policies.lora import groups_of
from rl_train.policies.registry import FAMILIES, build_policy, family_of
from rl_train.utils.io import read_json
from sa2va_hf import Sa2VAConfig
from sa2va_hf.hub import CHECKPOINT_FILE, model_folder

# Flags of a run that its checkpoints' weights depend on.
FLAGS_OF_WEIGHTS = (
    *("lora_r", "lora_alpha", "sam_path", "image_size", "max_image_tokens"),
    "region_prompt",
)


def open_policy(
    folder: Path,
    checkpoint_folder: Path | None,
    role: str,
    device: torch.device | str,
    max_new_tokens: int = 0,
    flag: str = "--model_path",
    family: str | None = None,
    **config: str | int | float | bool | None,
) -> Policy:
    """Return the policy of a model folder, or with a role's weights of a checkpoint.

    Args:
        folder: value of `flag`, a model or a checkpoint of a run.
        checkpoint_folder: checkpoint of a run that started from the model `folder`.
        role, config: see `load_policy`.
        family: family that the model must belong to; None: any.

    Raises:
        ValueError: there is no such policy, or it is of another family; names the flag.
    """
    base, checkpoint_folder = find_base(folder, checkpoint_folder, flag, family)
    if config.get("sam_path"):
        config["sam_path"] = str(model_folder("--sam_path", config["sam_path"]))
    if checkpoint_folder:
        return load_policy(checkpoint_folder, role, base, device, max_new_tokens, **config)
    if role == "teacher":
        raise ValueError(f"--role teacher: {flag} {folder} is no checkpoint of a run")
    # A fresh LoRA adds nothing, so its rank is the cheapest.
    config = PolicyConfig(model_path=str(base), lora_r=1, gradient_checkpointing=False, **config)
    return build_policy(config, {}, FAMILIES[family_of(base)].rl_patterns, max_new_tokens, device)


def find_base(
    folder: Path, checkpoint_folder: Path | None, flag: str, family: str | None = None
) -> tuple[Path, Path | None]:
    """Return (the base's local folder, the checkpoint or None) of `open_policy`'s arguments.

    Only config.json files are read. Raises ValueError: see there.
    """
    base = folder
    if (folder / CHECKPOINT_FILE).is_file():
        if checkpoint_folder:
            raise ValueError(
                f"{flag} {folder} is itself a checkpoint: --checkpoint {checkpoint_folder} is one "
                "too many"
            )
        checkpoint_folder, base = folder, read_json(folder / "config.json")["model_path"]
    base = model_folder(flag, base)
    if (actual_family := family_of(base, flag)) != (family or actual_family):
        raise ValueError(f"{flag} {folder}: its family is {actual_family}, not {family}")
    return base, checkpoint_folder


def load_policy(
    folder: Path,
    role: str,
    base: Path | None,
    device: torch.device | str,
    max_new_tokens: int = 0,
    **config: str | int | float | bool | None,
) -> Policy:
    """Return the policy with the weights of a role of the checkpoint in `folder`.

    Args:
        role: "policy" or "teacher"; base: default is the one that the run started from.
        config: fields of `PolicyConfig` beside the base, in place of the run's or the default's.

    Raises:
        ValueError: there is no such base, or the checkpoint lacks a file, was trained on another
            base or trains other weights than the base has.
    """
    flags = read_json(folder / "config.json")
    base = model_folder("--model_path", base or flags["model_path"])
    check_seg_state(flags, base)
    # Checkpoints hold trained weights alone: their shapes follow from the run's flags.
    settings = {name: flags[name] for name in FLAGS_OF_WEIGHTS if name in flags} | config
    if settings.get("sam_path"):
        settings["sam_path"] = str(model_folder("--sam_path", settings["sam_path"]))
    config = PolicyConfig(model_path=str(base), gradient_checkpointing=False, **settings)
    weights = open_weights(folder / WEIGHT_FILES[role])
    groups = flags.get("trainable_modules") or groups_of(
        weights.keys(), FAMILIES[family_of(base)].rl_patterns
    )
    policy = build_policy(config, {}, groups, max_new_tokens, device)
    fingerprint = fingerprint_of(*filter(None, (config.model_path, config.sam_path)))
    load_weights(folder, policy.trainable, WEIGHT_FILES[role], fingerprint)
    return policy


def check_seg_state(flags: dict[str, Any], base: Path):
    """Raise ValueError if a run of an earlier version had another --seg_state than its base has.

    Args:
        flags: of the run; base: folder of the model that it started from.
    """
    seg_state = flags.get("seg_state")
    if seg_state and seg_state != Sa2VAConfig.from_pretrained(base).seg_state:
        raise ValueError(
            f"{base}/config.json: the run was trained with --seg_state {seg_state}, which is a "
            f'flag no more: add "seg_state": "{seg_state}" to this file'
        )


def drop_trained_images(dataset: Dataset, folder: Path, choice: str) -> Dataset:
    """Return the data set, or with the `choice` "drop" its regions on images not trained on.

    Args:
        folder: checkpoint of a run, whose data sets are opened again.
        choice: refuse, drop or keep regions on images that the run was trained on. A sentence says
            how many there are.

    Raises:
        ValueError: no such checkpoint or data, or a region is to be refused; names the flag.
    """
    if not (folder / "training_state.pt").is_file():
        raise ValueError(f"--train_eval_overlap {choice}: {folder} is no checkpoint of a run")
    flags = read_json(folder / "config.json")
    data = DataConfig(**{f.name: flags[f.name] for f in fields(DataConfig) if f.name in flags})
    open_train, open_eval = dataset_openers(data)
    training, _, _ = split_dataset(
        open_train,
        data.data_dir,
        data.eval_data_dir,
        data.eval_samples,
        max_bad_fraction=1.0,
        train_eval_overlap=data.train_eval_overlap,
        eval_opener=open_eval,
    )
    # Both together, as COCO's images are recognised across the two.
    keys, trained = picture_keys(dataset, training)
    shared = np.isin(keys, trained)
    sentence = (
        f"--train_eval_overlap {choice}: {shared.sum()} of {len(dataset)} regions are on "
        f"{len(np.unique(keys[shared]))} of the {len(np.unique(trained))} images that the run of "
        f"{folder} was trained on"
    )
    print0(sentence)
    if choice == "refuse" and shared.any():
        raise ValueError(f"{sentence}; drop leaves them out, keep measures them")
    if choice == "drop" and shared.all():
        raise ValueError(f"{sentence}: nothing is left to measure")
    return Subset(dataset, np.flatnonzero(~shared).tolist()) if choice == "drop" else dataset
