"""The families of models that can be a policy, by the model_type in their config.json."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rl_train.config import PolicyConfig
from rl_train.files import read_json
from rl_train.policies import qwen_points, qwen_worst_case, sa2va, worst_case
from rl_train.types import Batch


@dataclass(frozen=True)
class Family:
    """What builds a policy, and the worst that its flags allow."""

    build: Callable  # (config, groups, max_new_tokens, device, shards) -> the policy
    longest_answers: Callable  # policy -> the same, whose answers are as long as they may be
    worst_batch: Callable  # (policy, its inputs, batch size) -> the longest prompts
    has_sam: bool  # in its own folder


def _build_points(config, groups, max_new_tokens, device, shards):
    if shards:
        raise ValueError(f"--shard_base: not with --model_path {config.model_path}, of Qwen2.5-VL")
    if odd := sorted(set(groups) - set(sa2va.TRAINABLE)):
        raise ValueError(
            f"--train {' '.join(odd)}: of --model_path {config.model_path}, of Qwen2.5-VL, only "
            "lora trains"
        )
    return qwen_points.build_policy(config, max_new_tokens, device)


SA2VA = Family(
    sa2va.build_policy,
    worst_case.LongestAnswers,
    worst_case.worst_batch,
    has_sam=True,
)
QWEN_POINTS = Family(
    _build_points,
    qwen_worst_case.LongestPoints,
    qwen_worst_case.worst_batch,
    has_sam=False,
)
FAMILIES = {sa2va.Sa2VAPolicy.family: SA2VA, qwen_points.QwenPointsPolicy.family: QWEN_POINTS}
MODEL_TYPES = {"sa2va_chat": sa2va.Sa2VAPolicy.family}
MODEL_TYPES |= {"qwen2_5_vl": qwen_points.QwenPointsPolicy.family}


def family_of(path) -> str:
    """The name in FAMILIES of the model in folder `path`; what says nothing of it is Sa2VA.

    Its own reader says of that what it lacks. Raises ValueError for a config.json of another kind
    of model, or that is no JSON.
    """
    file, kind = Path(path) / "config.json", "sa2va_chat"
    if file.is_file():
        kind = read_json(file).get("model_type", kind)
    if kind not in MODEL_TYPES:
        known = ", ".join(MODEL_TYPES)
        raise ValueError(f"{file} says model_type {kind!r}; known: {known}")
    return MODEL_TYPES[kind]


def build_policy(
    config: PolicyConfig, tasks: dict[str, str], groups, max_new_tokens: int, device, shards=None
):
    """The policy that `config` names: its base, a fresh LoRA, and the groups that the loss reaches.

    Args:
        tasks: {task: the family that it asks}; shards: see `sa2va.build_policy`.

    Raises:
        ValueError: a folder is not what its flag asks for, a task asks another family; names the
            flag.
    """
    name = family_of(config.model_path)
    for task, asked in tasks.items():
        if asked != name:
            raise ValueError(
                f"--tasks {task}: asks a model of the family {asked}, and --model_path "
                f"{config.model_path} is of {name}"
            )
    family = FAMILIES[name]
    if family.has_sam and config.sam_path:
        raise ValueError(f"--sam_path {config.sam_path}: the model in --model_path has its own")
    return family.build(config, groups, max_new_tokens, device, shards)


def longest_answers(policy):
    """The model of a policy, whose answers are as long and as costly as they may be."""
    return FAMILIES[policy.family].longest_answers(policy)


def worst_batch(policy, inputs, batch_size: int) -> Batch:
    """A batch of the largest images and the longest prompts that `inputs` passes."""
    return FAMILIES[policy.family].worst_batch(policy, inputs, batch_size)
