"""Fast sampling: few kernels a layer, the prompt's cache shared by its rows, a CUDA graph a token.

A decode step reads every weight once and computes almost nothing, so what it costs beyond that is
the number of kernels. So linears that read one input are one matrix product together with their
LoRA A's (see `fused`), whose rows are refreshed at the start of each `generate`, and all that lies
between two products is one kernel (attention: two; `decode_triton`; on the CPU `decode_torch`).

Letters: P prompts, G samples each, N = P*G rows, L prompt length, T new tokens, m prompt tokens,
C width, A axes of a position.
"""

import torch

from rl_train.engine import forward
from rl_train.engine.graph import Graph
from rl_train.engine.packing import Shared, next_positions
from rl_train.engine.tokens import Completions, Draws

PROMPT_SLOTS, NEW_SLOTS = 128, 64  # multiples to which L and T are rounded up: few graphs serve all
MAX_GRAPHS = 16  # kept; the oldest goes


class Decoder:
    """Samples from a `fused.FusedModel`. Holds a cache, and a `Graph` for each size asked for."""

    def __init__(self, fused):
        self.fused = fused
        self.slot_size = len(fused.layers) * 2 * fused.num_kv * fused.head_size  # numbers a token
        self.graphs: dict[tuple, Graph] = {}
        self._make_cache(0)

    def _make_cache(self, slots: int):
        """One cache for all graphs, of which one runs at a time. Graphs hold its address, so go."""
        self.graphs.clear()
        weight = self.fused.embedding
        # A pool without graphs is not used again.
        self.pool = torch.cuda.graph_pool_handle() if weight.is_cuda else None
        self.cache = None  # freed before there is another
        self.cache = weight.new_zeros(slots * self.slot_size)  # not empty: 0 * NaN is NaN

    def graph(self, num_prompts: int, length: int, draws: Draws) -> Graph:
        """The graph that serves these sizes."""
        prompts = _round_up(num_prompts, 16)
        if num_prompts <= 16:
            prompts = 1 << (num_prompts - 1).bit_length()
        length, new = _round_up(length, PROMPT_SLOTS), _round_up(draws.max_new_tokens, NEW_SLOTS)
        sizes = prompts, draws.num_generations, length, new
        key = (*sizes, draws.stop, draws.pad_id, draws.temperature, draws.greedy)
        if key not in self.graphs:
            slots = prompts * (length + draws.num_generations * new)
            if len(self.graphs) == MAX_GRAPHS:
                del self.graphs[next(iter(self.graphs))]
            if self.cache.numel() < slots * self.slot_size:
                self._make_cache(slots)
            self.graphs[key] = Graph(self.fused, self.cache, self.pool, *sizes, draws)
        return self.graphs[key]

    def generate(
        self, embeds, attention_mask, position_ids, shared: Shared, draws: Draws
    ) -> Completions:
        """See `Engine.generate`; shared: the layout of the prompts."""
        num_rows = len(embeds) * draws.num_generations
        with torch.autocast(embeds.device.type, enabled=False):
            graph = self.graph(len(embeds), embeds.shape[1], draws)
            cache, behind = [], next_positions(position_ids, attention_mask)
            hidden = forward.hidden_states(
                self.fused, shared.gather(embeds), shared.layout, cache=cache
            )
            graph.load(cache, shared.tokens(), attention_mask, behind)
            del cache
            graph.begin(shared.last(hidden)[:, 0], draws.uniforms)
            graph.run(draws.max_new_tokens)
        length = max(1, int(graph.valid[:num_rows].sum(1).max()))
        buffers = graph.ids, graph.logp, graph.valid, graph.hiddens
        ids, logp, valid, hidden = (buffer[:num_rows, :length].clone() for buffer in buffers)
        hidden[:, -1] = 0.0  # a graph may have run beyond the last answer's end
        return Completions(ids, logp, valid, graph.done[:num_rows].clone(), hidden)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
