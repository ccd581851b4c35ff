"""The policy that a checkpoint of a run holds."""

from pathlib import Path

from rl_train import checkpoint
from rl_train.config import PolicyConfig
from rl_train.files import read_json
from rl_train.policies.lora import groups_of
from rl_train.policies.sa2va import TRAINABLE, build_policy

FILES = dict(policy="trainables.safetensors", ema="ema.safetensors")  # of each role


def load_policy(
    folder: Path, role: str, base: Path | None, device, max_new_tokens=0, shards=None, **config
):
    """The policy with the weights of a role of the checkpoint in `folder`.

    Args:
        role: "policy" or "ema" (the teacher); base: default is the one that the run started from.
        config: fields of `PolicyConfig` beside the base and its LoRA.

    Raises:
        ValueError: there is no such base, or the checkpoint lacks a file or trains other weights
            than the base has.
    """
    flags = read_json(folder / "config.json")
    base = Path(base or flags["model_path"])
    if not base.is_dir():
        started = flags["model_path"]
        raise ValueError(f"--model_path {base}: no such folder; the run started from {started}")
    lora = {name: flags[name] for name in ("lora_r", "lora_alpha", "lora_dropout")}
    config = PolicyConfig(model_path=str(base), **lora, gradient_checkpointing=False, **config)
    groups = groups_of(checkpoint.open_weights(folder / FILES[role]).keys(), TRAINABLE)
    policy = build_policy(config, groups, max_new_tokens, device, shards)
    checkpoint.load_weights(folder, policy.trainable, FILES[role])
    return policy
