"""Families of decoder LLMs: what each calls the modules of a layer, and how its layer differs.

A new family of the same layer is a line of `FAMILIES`. Whether the states before or after the final
norm are handed out is a choice of the checkpoint: see `Engine`'s head_norm.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLDecoderLayer
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextDecoderLayer


def joined(sections: list[int], num_frequencies: int) -> list[int]:
    """Return the axis of each frequency: sections[0] frequencies of axis 0, then those of 1, ..

    Axes are time, height and width. The sections add up to `num_frequencies`.
    """
    return [axis for axis, size in enumerate(sections) for _ in range(size)]


def interleaved(sections: list[int], num_frequencies: int) -> list[int]:
    """Return the axis of each frequency, of which axis a has sections[a].

    The axes alternate until a section is used up; the first axis has the rest.
    """
    num_axes = len(sections)
    axis_and_round = [(i % num_axes, i // num_axes) for i in range(num_frequencies)]
    return [axis if round_number < sections[axis] else 0 for axis, round_number in axis_and_round]


@dataclass(frozen=True, kw_only=True)
class Family:
    """Names of the modules of a decoder layer, and how it differs from other families'.

    Attributes:
        layer: class of its layers in transformers.
        norm, mlp_norm: RMSNorms before attention and before the MLP.
        qkv, out, gate_up, down: linears, together those that read one input.
        head_norms: RMSNorms of each head of q and of k, before the rotation.
        axes: which frequencies turn by which axis of a position, where the config has
            mrope_section.
        deepstack: whether features may be added behind its first layers.
        windows: whether its config says which layers attend to a window only.
    """

    layer: type[nn.Module]
    norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    head_norms: tuple[str, ...] = ()
    out: tuple[str, ...] = ("self_attn.o_proj",)
    mlp_norm: str = "post_attention_layernorm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: tuple[str, ...] = ("mlp.down_proj",)
    axes: Callable[[list[int], int], list[int]] = joined
    deepstack: bool = False
    windows: bool = False

    @property
    def linears(self) -> tuple[tuple[str, ...], ...]:
        """Return the names of all linears, by the input that they share."""
        return self.qkv, self.out, self.gate_up, self.down


FAMILIES = (
    Family(layer=LlamaDecoderLayer),  # and InternLM2
    Family(layer=Qwen2DecoderLayer, windows=True),
    Family(layer=Qwen2_5_VLDecoderLayer, windows=True),
    Family(
        layer=Qwen3VLTextDecoderLayer,
        head_norms=("self_attn.q_norm", "self_attn.k_norm"),
        axes=interleaved,
        deepstack=True,
    ),
)


def family_of(layer: nn.Module) -> Family | None:
    """Return the family of a decoder layer, or None if it is of none."""
    return next((family for family in FAMILIES if isinstance(layer, family.layer)), None)
