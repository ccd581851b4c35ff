"""The policy that a folder holds, a model's or a checkpoint's, and what that was trained on."""

from dataclasses import fields
from pathlib import Path

import numpy as np
from torch.utils.data import Subset

from rl_train import checkpoint, hub
from rl_train.base import base_of
from rl_train.config import DataConfig, PolicyConfig
from rl_train.data.opening import readers
from rl_train.data.split import picture_keys, split_dataset
from rl_train.distributed import print0
from rl_train.files import read_json
from rl_train.policies.families import build_policy, family_of
from rl_train.policies.lora import groups_of
from rl_train.policies.sa2va import TRAINABLE

FILES = dict(policy="trainables.safetensors", ema="ema.safetensors")  # of each role


def open_policy(
    folder: Path,
    checkpoint_folder: Path | None,
    role: str,
    device,
    max_new_tokens=0,
    shards=None,
    flag="--model_path",
    family: str | None = None,
    **config,
):
    """The policy of a model folder, or with a role's weights of a checkpoint.

    Args:
        folder: what `flag` names, a model or a checkpoint of a run; checkpoint_folder: of a run
            that started from the model `folder`; role, config: see `load_policy`.
        family: of which it must be, None: any.

    Raises:
        ValueError: there is no such policy, or it is of another family; names the flag.
    """
    base = folder
    if any((base / file).is_file() for file in ("trainables.safetensors", "training_state.pt")):
        if checkpoint_folder:
            raise ValueError(
                f"{flag} {base} is itself a checkpoint: --checkpoint {checkpoint_folder} is one "
                "too many"
            )
        checkpoint_folder, base = base, Path(read_json(base / "config.json")["model_path"])
        if not base.is_dir() and not hub.NAME.fullmatch(str(base)):
            advice = "; give the base as --model_path and this folder as --checkpoint"
            raise ValueError(
                f"{flag} {checkpoint_folder}: the run started from {base}, which is no folder here"
                + advice * (flag == "--model_path")
            )
    if family and (found := family_of(hub.model_folder(flag, base))) != family:
        raise ValueError(f"{flag} {folder}: is of the family {found}, asked is {family}")
    if checkpoint_folder:
        where = (checkpoint_folder, role, base, device, max_new_tokens, shards)
        return load_policy(*where, **config)
    if role == "ema":
        raise ValueError(f"--role ema: {flag} {base} is no checkpoint of a run, it has no teacher")
    base = hub.model_folder(flag, base)
    config = PolicyConfig(model_path=str(base), lora_r=1, gradient_checkpointing=False, **config)
    return build_policy(config, {}, TRAINABLE, max_new_tokens, device, shards)


def load_policy(
    folder: Path, role: str, base: Path | None, device, max_new_tokens=0, shards=None, **config
):
    """The policy with the weights of a role of the checkpoint in `folder`.

    Args:
        role: "policy" or "ema" (the teacher); base: default is the one that the run started from.
        config: fields of `PolicyConfig` beside the base and its LoRA.

    Raises:
        ValueError: there is no such base, or the checkpoint lacks a file, was trained on another
            base or trains other weights than the base has.
    """
    flags = read_json(folder / "config.json")
    base = hub.model_folder("--model_path", base or flags["model_path"])
    lora = {name: flags[name] for name in ("lora_r", "lora_alpha", "lora_dropout")}
    config = PolicyConfig(model_path=str(base), **lora, gradient_checkpointing=False, **config)
    weights = checkpoint.open_weights(folder / FILES[role])
    groups = flags.get("train") or groups_of(weights.keys(), TRAINABLE)
    policy = build_policy(config, {}, groups, max_new_tokens, device, shards)
    stands_on = base_of(*filter(None, (config.model_path, config.sam_path)))
    checkpoint.check_base(folder, FILES[role], stands_on)
    checkpoint.load_weights(folder, policy.trainable, FILES[role])
    return policy


def untrained(dataset, folder: Path, choice: str):
    """The data set, or with the `choice` "drop" its regions on images that a run did not train on.

    Args:
        folder: a checkpoint of the run, whose data sets are opened again; choice: refuse, drop or
            keep these regions. A sentence says how many there are.

    Raises:
        ValueError: no such checkpoint or data, or a region is to be refused; names the flag.
    """
    if not (folder / "training_state.pt").is_file():
        raise ValueError(f"--shared_images {choice}: {folder} is no checkpoint of a run")
    flags = read_json(folder / "config.json")
    known = {f.name for f in fields(DataConfig)} & set(flags)
    data = DataConfig(**{name: flags[name] for name in known})
    opened, heldout = readers(data)
    where = (data.data_dir, data.eval_data_dir, data.eval_samples, 1.0, data.shared_images, heldout)
    training, _, _ = split_dataset(opened, *where)
    keys, trained = picture_keys(dataset, training)
    shared = np.isin(keys, trained)
    sentence = (
        f"--shared_images {choice}: {shared.sum()} of {len(dataset)} regions are on "
        f"{len(np.unique(keys[shared]))} of the {len(np.unique(trained))} images that the run of "
        f"{folder} was trained on"
    )
    print0(sentence)
    if choice == "refuse" and shared.any():
        raise ValueError(f"{sentence}; drop leaves them out, keep measures them")
    if choice == "drop" and shared.all():
        raise ValueError(f"{sentence}: nothing is left to measure")
    return Subset(dataset, np.flatnonzero(~shared).tolist()) if choice == "drop" else dataset
