"""A decoder layer's forward and backward without autograd, and CUDA graphs that launch them.

A layer's forward launches about 25 kernels, its backward 60. With few tokens Python launches them
more slowly than the GPU runs them. So each layer has one CUDA graph for its forward and one for its
backward. Graphs read and write fixed addresses: inputs are copied in before a replay, results are
cloned after it, so the next replay overwrites nothing that is still needed.

Letters: m tokens, C width, K key-value heads, D head size.
"""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from rl_train.engine import varlen_attention
from rl_train.engine.layers import Rotation, mark_rows_dynamic
from rl_train.engine.varlen_attention import VarlenSegments, power_of_2

if TYPE_CHECKING:
    from rl_train.engine.fused_weights import FusedModel

# Elements of a layer's largest tensor above which launches no longer take longer than the GPU. This
# bounds the graphs' memory, too.
MAX_ELEMENTS = 2**26
MAX_MEMORY_FRACTION = 0.01  # fraction of a GPU's memory that a layer's temporaries may take
TEMPORARIES = 4  # temporaries of its largest tensor's size that a backward holds at once
MAX_SIZES = 16  # sizes of inputs whose graphs are kept; the least recently used is dropped


def memory_of(device: torch.device) -> float:
    """Return a GPU's total memory in bytes; infinity for a CPU."""
    if device.type != "cuda":
        return float("inf")
    return torch.cuda.get_device_properties(device).total_memory


class Graph(Protocol):
    """A captured CUDA graph."""

    def replay(self):
        """Run once more what was captured."""


def forward(
    fused: "FusedModel",
    number: int,
    residual: torch.Tensor,
    rotation: Rotation,
    segments: VarlenSegments,
    cache: list[list[torch.Tensor]] | None = None,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Return a layer's output (m, C) and what `varlen_attention.attend` returns.

    Args:
        number: of the layer; residual: (m, C), its input.
        cache: list that receives its keys and values, [(m, K, D), (m, K, D)].
    """
    functions = fused.functions
    with fused.gathered(number, then=number + 1) as layer:
        mark_if(number == 0, residual)
        q, k, v = functions.before_attention(residual, layer, rotation)
        attended = varlen_attention.attend(q, k, v, segments)
        if cache is not None:
            cache.append([k, v])
        del q, k, v  # freed before the MLP, the layer's peak of memory
        attn_output = attended[0]
        mark_if(number == 0, residual, attn_output)
        return functions.after_attention(residual, attn_output, layer), attended


def backward(
    fused: "FusedModel",
    number: int,
    d: torch.Tensor,
    residual: torch.Tensor,
    attended: Sequence[torch.Tensor],
    rotation: Rotation,
    segments: VarlenSegments,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the gradients of a layer's input (m, C) and of A, B of each of its linears in turn.

    Args:
        d: (m, C) gradient of the layer's output; residual, attended: input and last result of
            `forward`.
    """
    functions, attn_output = fused.functions, attended[0]
    may_compile = number == len(fused.layers) - 1  # the first in a backward
    with fused.gathered(number, then=number - 1) as layer:
        mark_if(may_compile, d, residual, attn_output)
        # Backward through the MLP and the output projection. Their forward is recomputed, but for
        # the product of `down`.
        d, d_attn_output, *d_rest = functions.after_attention_vjp(d, residual, attn_output, layer)
        q, k, v = functions.before_attention(residual, layer, rotation)
        d_heads = varlen_attention.attend_vjp(d_attn_output, q, k, v, segments, *attended)
        mark_if(may_compile, d, *d_heads)
        d, *d_qkv = functions.before_attention_vjp(d, d_heads, residual, layer, rotation)
    return d, [*d_qkv, *d_rest]


def mark_if(may_compile: bool, *tensors: torch.Tensor):
    """Call `mark_rows_dynamic` if the layer that computes next may compile.

    Layers of the same shapes share what the first one's calls compile, and a mark takes 10 us.
    """
    if may_compile:
        mark_rows_dynamic(*tensors)


@functools.cache
def _stream() -> torch.cuda.Stream:
    """Return the stream on which functions are captured."""
    return torch.cuda.Stream()


def capture(
    functions: Sequence[Callable[[], object]], pool: tuple[int, int], num_bytes: int = 0
) -> list[torch.cuda.CUDAGraph]:
    """Return one CUDA graph for each function, with memory from `pool`.

    Compiling and loading kernels can't be captured. The first function runs once before, on the
    stream of the captures, for which it also allocates workspaces. The others must have run.

    Args:
        num_bytes: size of a block to reserve in the pool, from which the captures then allocate;
            0: none.
    """
    stream, graphs = _stream(), []
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        functions[0]()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # memory of another stream or pool is of no use here
        for function in functions:
            graph = torch.cuda.CUDAGraph()
            # Captures this thread alone: other threads pin memory.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            if num_bytes and not graphs:
                torch.empty(num_bytes, dtype=torch.uint8, device="cuda")  # freed at once
            try:
                function()
            finally:
                graph.capture_end()
            graphs.append(graph)
    torch.cuda.current_stream().wait_stream(stream)
    return graphs


class LayerGraphs:
    """Graphs of all layers of a model, by sizes of their inputs.

    The first call of a size runs without graphs, which compiles and loads kernels. The second one
    captures the graphs of all layers.
    """

    def __init__(self, fused: "FusedModel", capture: Callable = capture):
        self.fused = weakref.proxy(fused)  # which has these graphs
        self.capture = capture
        layer, weight = fused.layers[0], fused.embedding
        self.max_outputs = max(sum(group.sizes) for group in layer.linears)  # of a token
        memory = (
            MAX_MEMORY_FRACTION * memory_of(weight.device) / (TEMPORARIES * weight.element_size())
        )
        max_elements = int(min(MAX_ELEMENTS, memory))
        self.most_tokens = max_elements // self.max_outputs
        # The backward has the gradients of keys once for each query head.
        self.most_keys = max_elements // layer.qkv_sizes[0]
        self.capacity = 0  # tokens for which there is memory
        self.clear()

    def clear(self):
        """Drop all graphs and buffers. Each size then runs once without graphs before a capture."""
        self._wait()
        self.of_sizes: dict[tuple[int, ...], SizedGraphs] = {}
        self.buffers: dict[tuple, torch.Tensor] = {}
        # A pool without graphs is not used again.
        self.pool = torch.cuda.graph_pool_handle() if self.fused.embedding.is_cuda else None
        self.is_reserved = False

    def _wait(self):
        """Wait until the GPU has run the graphs: only then may they go."""
        if self.fused.embedding.is_cuda:
            torch.cuda.synchronize()

    def fit(self, segments: VarlenSegments) -> bool:
        """Return whether padded inputs are small enough for graphs."""
        # Flash attention's backward holds up to 128 tokens more for each segment.
        num_queries = segments.num_tokens + 128 * len(segments.cu_seqlens_q)
        num_keys = max(num_queries, len(segments.keys))
        return segments.num_tokens <= self.most_tokens and num_keys <= self.most_keys

    def forward(
        self,
        number: int,
        residual: torch.Tensor,
        rotation: Rotation,
        segments: VarlenSegments,
        cache: list[list[torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Run the module's `forward` on padded inputs, by a layer's graph once it is captured."""
        graphs = self._graphs(rotation, segments)
        if number == 0 and graphs.has_run_forward and not graphs.forward_graphs:
            graphs.capture_forward()
        if graphs.forward_graphs:
            return graphs.replay_forward(number, residual, rotation, segments, cache)
        heads = []
        out, attended = forward(self.fused, number, residual, rotation, segments, heads)
        if not graphs.is_allocated:
            graphs.allocate(out, heads[0], attended)
        if cache is not None:
            cache += heads
        graphs.has_run_forward |= number == len(self.fused.layers) - 1
        return out, attended

    def backward(
        self,
        number: int,
        d: torch.Tensor,
        residual: torch.Tensor,
        attended: Sequence[torch.Tensor],
        rotation: Rotation,
        segments: VarlenSegments,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run the module's `backward` on padded inputs, by a layer's graph once it is captured."""
        graphs = self._graphs(rotation, segments)
        first = number == len(self.fused.layers) - 1
        # Of sizes that were dropped since the forward there may be no buffers yet.
        can_capture = graphs.has_run_backward and graphs.is_allocated
        if first and can_capture and not graphs.backward_graphs:
            graphs.capture_backward()
        if graphs.backward_graphs:
            return graphs.replay_backward(number, d, residual, attended, rotation, segments)
        results = backward(self.fused, number, d, residual, attended, rotation, segments)
        graphs.has_run_backward |= number == 0
        return results

    def capture_all(self, functions: Sequence[Callable[[], object]]) -> list[Graph]:
        """Return a graph of each function."""
        num_bytes = 0
        if not self.is_reserved:
            # Else each size that is larger than those before would take memory of its own.
            num_bytes = TEMPORARIES * self.capacity * self.max_outputs
            num_bytes *= self.fused.embedding.element_size()
        self.is_reserved = True
        return self.capture(functions, self.pool, num_bytes)

    def _graphs(self, rotation, segments) -> "SizedGraphs":
        sizes = segments.num_tokens, len(segments.keys), len(segments.cu_seqlens_q)
        sizes += segments.max_seqlen_q, segments.max_seqlen_k
        if segments.num_tokens > self.capacity:
            self.capacity = min(power_of_2(segments.num_tokens), self.most_tokens)
            self.clear()
        graphs = self.of_sizes.pop(sizes, None)
        if graphs is None:
            graphs = SizedGraphs(self, rotation, segments)
            if len(self.of_sizes) == MAX_SIZES:
                self._wait()
                del self.of_sizes[next(iter(self.of_sizes))]
        self.of_sizes[sizes] = graphs  # the last used is the last: dicts keep the order
        return graphs

    def buffer(self, name: str, like: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Return a buffer shaped like a tensor.

        If its rows are the tokens, it is the first rows of one that all sizes share.
        """
        shape = [*like.shape]
        if shape[:1] == [num_tokens]:
            shape[0] = self.capacity
        key = name, *shape
        if key not in self.buffers:
            self.buffers[key] = like.new_zeros(shape)
        return self.buffers[key][: len(like)] if like.dim() else self.buffers[key]


class SizedGraphs:
    """Graphs of all layers for inputs of one size, and where they read and write.

    Attributes:
        rotation, segments: copies at the addresses that the graphs read; loaded: the segments that
            were copied last.
        residual, d: buffers of a layer's input and of its output's gradient.
        out, kv: buffers of a layer's output, and of its keys and values.
        attn_output, logsumexp: buffers of what attention returns; attn_state: random state that it
            returns too, unused without dropout.
        d_residual, d_lora: buffers of the gradients of a layer's input and of its LoRA's
            parameters, these as one tensor.
        is_allocated: whether there are these buffers, which `allocate` makes.
        forward_graphs, backward_graphs: one graph for each layer; empty before a capture.
        has_run_forward, has_run_backward: whether all layers have run once without graphs.
    """

    def __init__(self, graphs: LayerGraphs, rotation: Rotation, segments: VarlenSegments):
        self.graphs = weakref.proxy(graphs)  # which has these
        self.rotation = Rotation(*[x.clone() for x in rotation])
        self.segments = segments.with_tensors([x.clone() for x in segments.tensors])
        self.loaded = segments
        self.is_allocated = False
        self.forward_graphs: list[Graph] = []
        self.backward_graphs: list[Graph] = []
        self.has_run_forward = self.has_run_backward = False

    def allocate(
        self, out: torch.Tensor, heads: list[torch.Tensor], attended: Sequence[torch.Tensor]
    ):
        """Make the buffers of what a layer reads and writes, shaped like these."""
        m = self.segments.num_tokens

        def buffer(name, like):
            return self.graphs.buffer(name, like, m)

        self.residual, self.d, self.d_residual, self.out = (
            buffer(name, out) for name in ("residual", "d_out", "d_residual", "out")
        )
        self.kv = [buffer(name, tensor) for name, tensor in zip("kv", heads)]
        attn_output, logsumexp, *self.attn_state = attended
        self.attn_output = buffer("attn_output", attn_output)
        self.logsumexp = buffer("logsumexp", logsumexp)
        sources = self.graphs.fused.layers[0].sources
        lora = out.new_empty(sum(p.numel() for p in sources), dtype=torch.float32)
        self.d_lora = buffer("d_lora", lora)
        self.is_allocated = True

    @property
    def attended(self) -> list[torch.Tensor]:
        """Results of `varlen_attention.attend`, in its order."""
        return [self.attn_output, self.logsumexp, *self.attn_state]

    def load(self, rotation: Rotation, segments: VarlenSegments):
        """Copy both to the graphs' addresses, unless these segments were copied last."""
        if segments is not self.loaded:
            targets = [*self.rotation, *self.segments.tensors]
            for target, source in zip(targets, [*rotation, *segments.tensors], strict=True):
                target.copy_(source)
            self.loaded = segments

    def capture_forward(self):
        """Capture the forward of all layers."""
        fused = self.graphs.fused

        def one_layer(number):
            heads = []
            out, attended = forward(
                fused, number, self.residual, self.rotation, self.segments, heads
            )
            targets = [self.out, *self.kv, self.attn_output, self.logsumexp]
            for target, source in zip(targets, [out, *heads[0], *attended]):
                target.copy_(source)

        self.forward_graphs = self._capture(one_layer)

    def capture_backward(self):
        """Capture the backward of all layers."""
        fused = self.graphs.fused

        def one_layer(number):
            d, d_lora = backward(
                fused, number, self.d, self.residual, self.attended, self.rotation, self.segments
            )
            self.d_residual.copy_(d)
            for target, source in zip(self._of_each(self.d_lora), d_lora, strict=True):
                target.copy_(source)

        self.backward_graphs = self._capture(one_layer)

    def _capture(self, one_layer):
        numbers = range(len(self.graphs.fused.layers))
        return self.graphs.capture_all([functools.partial(one_layer, n) for n in numbers])

    def replay_forward(
        self,
        number: int,
        residual: torch.Tensor,
        rotation: Rotation,
        segments: VarlenSegments,
        cache: list[list[torch.Tensor]] | None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Run the module's `forward` by a layer's graph."""
        self.load(rotation, segments)
        self.residual.copy_(residual)
        self.forward_graphs[number].replay()
        if cache is not None:
            cache.append([tensor.clone() for tensor in self.kv])
        attended = self.attn_output.clone(), self.logsumexp.clone(), *self.attn_state
        return self.out.clone(), attended

    def replay_backward(
        self,
        number: int,
        d: torch.Tensor,
        residual: torch.Tensor,
        attended: Sequence[torch.Tensor],
        rotation: Rotation,
        segments: VarlenSegments,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run the module's `backward` by a layer's graph."""
        self.load(rotation, segments)
        targets = [self.d, self.residual, self.attn_output, self.logsumexp]
        for target, source in zip(targets, [d, residual, *attended]):
            target.copy_(source)
        self.backward_graphs[number].replay()
        # Copies: autograd may keep a gradient until another of the same parameter comes.
        return self.d_residual.clone(), self._of_each(self.d_lora.clone())

    def _of_each(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return views of a flat tensor with the shapes of a layer's LoRA parameters."""
        sources = self.graphs.fused.layers[0].sources
        parts = flat.split([p.numel() for p in sources])
        return [part.view(p.shape) for part, p in zip(parts, sources)]
