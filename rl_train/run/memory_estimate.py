"""GPU memory that a run holds at its start."""

from collections.abc import Collection

from rl_train.distributed.fsdp import held_bytes
from rl_train.engine.quantize import QuantizedLinear
from rl_train.policies.base import Policy
from rl_train.roles import COPIES

GIB = 2**30


def standing_memory(
    policy: Policy, copies: Collection[str] = COPIES, low_memory: Collection[str] = ()
) -> dict[str, int]:
    """Return {part: bytes} that a run holds on each GPU at any batch size.

    Args:
        low_memory: ways to take less, as in `OptimConfig`.
    """
    if "offload_roles" in low_memory and policy.device.type == "cuda":
        copies = ()
    weights = sum(parameter.nbytes for parameter in policy.trainable.values())
    base = {"frozen base": held_bytes(policy.model.parameters()) - weights}
    if policy.device.type == "cuda" and (largest := largest_dequantized_layer(policy)):
        base["a layer's dequantised weights"] = largest
    if policy.engine.sharded:
        sharded = policy.engine.sharded
        # Gathered layers take the place of the rank's part of them, see `ShardedLayers.memory`.
        lent = sharded.memory.nbytes if sharded.memory is not None else 0
        gathered = {"LLM gathered to sample": sharded.nbytes - lent}
        base = {"part of the frozen base": base["frozen base"]} | gathered
    trained = {"trainable weights": 1} | ({" and ".join(copies): len(copies)} if copies else {})
    # AdamW's two moments, in 8 bits a quarter of float32, and the gradient.
    moments = 0.5 if "adamw_8bit" in low_memory else 2
    trained |= {"optimizer": moments, "gradients": 1}
    return base | {part: int(n * weights) for part, n in trained.items()}


def largest_dequantized_layer(policy: Policy) -> int:
    """Return the bytes of the LLM's largest layer once dequantised; 0 without --quantize_base."""
    layers = policy.engine.language_model.model.layers
    return max(
        sum(
            linear.out_features * linear.in_features * linear.dtype.itemsize
            for linear in layer.modules()
            if isinstance(linear, QuantizedLinear)
        )
        for layer in layers
    )
