"""Fast sampling: few kernels a layer, the prompt's cache shared by its rows, a CUDA graph a token.

A decode step reads every weight once and computes almost nothing, so what it costs beyond that is
the number of kernels. So linears that read one input are one matrix product together with their
LoRA A's (see `fused_weights`), whose rows are refreshed at the start of each `generate`, and the
parts of the layer between two products are one kernel (attention: two; `decode_triton`, or the same
in plain torch, `decode_torch`).

The cache holds each prefix once: a prompt, for its rows; or what neighbouring prompts begin with,
such as an image's tokens, for one row of each (`packing.CacheLayout`). The rest of a row's prompt
and its new tokens lie in slots of its own.

Answers of two roles can be sampled together: each token reads the frozen weights once for both. The
first half of the rows has one role's LoRA, the second half the other's.

Letters: P prefixes, G rows of each, N = P*G rows, L prefix slots, R slots of a row's rest, T new
tokens, m prompt tokens, C width, V vocabulary, K key-value heads, D head size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from rl_train.engine import packed_forward
from rl_train.engine.decode_torch import TokenCache
from rl_train.engine.layer_graphs import capture, memory_of
from rl_train.engine.layers import decoder_layer, mark_rows_dynamic, norm
from rl_train.engine.lm_head import product
from rl_train.engine.packing import CacheLayout, SharedPrefixLayout, next_positions
from rl_train.engine.sampling import GREEDY, Completions, SamplingParams
from sa2va_hf.to_device import to_device

if TYPE_CHECKING:
    from rl_train.engine.fused_weights import FusedModel


PROMPT_SLOTS, NEW_SLOTS = 128, 64  # multiples to which L, R and T are rounded up: few graphs
MAX_GRAPHS = 16  # kept; the oldest goes
# Fraction of a GPU's memory by which the cache may grow so that two roles' answers fit in it.
MAX_GROWTH = 0.02
POLL = 2  # tokens between two polls of whether all rows are done; each is read one poll late


@dataclass
class PrefilledPrompts:
    """Prompts whose keys and values one role has computed, and which are not answered yet."""

    cache: list[list[torch.Tensor]]  # of each layer its keys and values, (m, K, D) each
    layout: CacheLayout
    next_position: torch.Tensor  # (P,) position of the first token behind each prompt
    last: torch.Tensor  # (P, C) last hidden states
    params: SamplingParams

    def with_rows_per_prefix(self, num_rows: int) -> "PrefilledPrompts":
        """Return the same with `num_rows` rows of a prefix, a divisor of what it has."""
        return replace(self, layout=self.layout.with_rows_per_prefix(num_rows))


class Decoder:
    """Sampler of a `fused_weights.FusedModel`: holds a cache, and a `DecodeGraph` for each size."""

    def __init__(self, fused: "FusedModel", make_graph: "Callable[..., DecodeGraph] | None" = None):
        self.fused, self.make_graph = fused, make_graph or DecodeGraph
        self.slot_size = len(fused.layers) * 2 * fused.num_kv * fused.head_size  # numbers a token
        self.graphs: dict[tuple, "DecodeGraph"] = {}
        self._make_cache(0)

    def _make_cache(self, slots: int):
        """Make one cache for all graphs, which run one at a time; drop graphs of the last cache."""
        self.graphs.clear()
        weight = self.fused.embedding
        # A pool without graphs is not used again.
        self.pool = torch.cuda.graph_pool_handle() if weight.is_cuda else None
        self.cache = None  # freed before there is another
        self.cache = weight.new_zeros(slots * self.slot_size)  # not empty: 0 * NaN is NaN

    def joined(
        self, first: PrefilledPrompts, second: PrefilledPrompts
    ) -> list[PrefilledPrompts] | None:
        """Return both with the same number of rows of a prefix; None if one graph can't hold them.

        It can if they end alike, the rows of a prefix of one are a multiple of the other's, and the
        cache does not grow by more than MAX_GROWTH.
        """
        both, ends = [first, second], []
        for prompts in both:
            params = prompts.params
            ends.append((id(params.stop), params.pad_id, params.temperature, params.max_new_tokens))
        fewest, most = sorted(prompts.layout.rows_per_prefix for prompts in both)
        if ends[0] != ends[1] or most % fewest:
            return None
        split = [prompts.with_rows_per_prefix(fewest) for prompts in both]
        alone = max(self._num_slots(self._sizes([prompts])) for prompts in both)
        growth = self._num_slots(self._sizes(split)) - alone
        growth *= self.slot_size * self.cache.element_size()
        return split if growth <= MAX_GROWTH * memory_of(self.cache.device) else None

    def _sizes(self, role_prompts: Sequence[PrefilledPrompts]) -> dict[str, int]:
        """Return the sizes of a graph for one or two roles' prompts, and how it samples."""
        layouts, params = [prompts.layout for prompts in role_prompts], role_prompts[0].params
        group = layouts[0].rows_per_prefix
        num_prefixes = max(len(layout.prefixes) for layout in layouts)
        prefixes = _round_up(num_prefixes, 16)
        if num_prefixes <= 16:
            # The next power of 2: a few prefixes need not pay for 16.
            prefixes = 1 << (num_prefixes - 1).bit_length()
        # Kernels take 16 rows of a LoRA at least.
        while len(role_prompts) > 1 and prefixes * group % 16:
            prefixes *= 2
        return dict(
            num_loras=len(role_prompts),
            num_prefixes=prefixes * len(role_prompts),
            rows_per_prefix=group,
            prefix_slots=_round_up(
                max(layout.prefixes.shape[1] for layout in layouts), PROMPT_SLOTS
            ),
            rest_slots=_round_up(max(layout.rests.shape[1] for layout in layouts), PROMPT_SLOTS),
            num_tokens=_round_up(params.max_new_tokens, NEW_SLOTS),
            greedy=all(prompts.params.uniforms is None for prompts in role_prompts),
        )

    @staticmethod
    def _num_slots(sizes: dict[str, int]) -> int:
        """Return the slots of the cache that a graph takes."""
        own_slots = sizes["rest_slots"] + sizes["num_tokens"]  # of a row
        of_a_prefix = sizes["prefix_slots"] + sizes["rows_per_prefix"] * own_slots
        return sizes["num_prefixes"] * of_a_prefix

    def graph(self, role_prompts: Sequence[PrefilledPrompts]) -> "DecodeGraph":
        """Return the graph for one or two roles' prompts, captured at first use."""
        sizes, params = self._sizes(role_prompts), role_prompts[0].params
        # Everything that a capture fixes. The stop text counts by identity, as its table does.
        key = (*sizes.values(), params.stop, params.pad_id, params.temperature)
        if key not in self.graphs:
            slots = self._num_slots(sizes)
            if len(self.graphs) == MAX_GRAPHS:
                del self.graphs[next(iter(self.graphs))]  # dicts keep the order of insertion
            if self.cache.numel() < slots * self.slot_size:
                self._make_cache(slots)
            self.graphs[key] = self.make_graph(
                self.fused, self.cache, self.pool, params=params, **sizes
            )
        return self.graphs[key]

    def prefill(
        self,
        embeds: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        prefix_layout: SharedPrefixLayout,
        params: SamplingParams,
    ) -> PrefilledPrompts:
        """Compute keys and values of prompts with the LoRA in use, which is also copied.

        Args:
            prefix_layout: layout of the prompts; it and their mask are on the CPU.
        """
        cache, layout = [], prefix_layout.cache_layout(params.num_generations)
        hidden = packed_forward.hidden_states(
            self.fused, prefix_layout.gather(embeds), prefix_layout.layout, cache=cache
        )
        next_position = next_positions(position_ids, attention_mask)
        return PrefilledPrompts(
            cache, layout, next_position, prefix_layout.last(hidden)[:, 0], params
        )

    @torch.no_grad()
    def sample(self, role_prompts: Sequence[PrefilledPrompts]) -> list[Completions]:
        """Sample the answers of one or two roles' prompts; see `Engine.generate`.

        Args:
            role_prompts: prompts of the role whose LoRA the copies hold; behind them, if `joined`
                returned two, those of the role whose LoRA is the second one. Their caches are
                emptied.
        """
        with torch.autocast(role_prompts[0].last.device.type, enabled=False):
            graph = self.graph(role_prompts)
            graph.load(role_prompts)
            for prompts in role_prompts:
                prompts.cache.clear()  # copied: freed before the first token
            graph.begin(role_prompts)
            graph.run(role_prompts[0].params.max_new_tokens)
        return [graph.completions(rows) for rows in graph.rows]


class DecodeGraph:
    """Buffers of one size, for N rows of P prefixes, some of which may be empty.

    On CUDA also the graph that decodes one token of all rows in them.

    Args:
        fused: `fused_weights.FusedModel`; cache: numbers that hold at least all keys and values.
        pool: CUDA graphs' memory pool, None on the CPU.
        num_loras: 1, or 2: the second half of the rows then uses the LoRA that is held.
        num_prefixes, rows_per_prefix, prefix_slots, rest_slots, num_tokens: P, G, L, R, T.
        greedy: whether all rows are decoded greedily.
        params: its stop, pad_id and temperature are read.

    Attributes:
        rows: of one or two roles the rows (n,) of their answers; the others are unused.
        reads_int8: whether its kernels multiply with int8 weights, which are not dequantised.
    """

    def __init__(
        self,
        fused: "FusedModel",
        cache: torch.Tensor,
        pool: tuple[int, int] | None,
        num_loras: int,
        num_prefixes: int,
        rows_per_prefix: int,
        prefix_slots: int,
        rest_slots: int,
        num_tokens: int,
        greedy: bool,
        params: SamplingParams,
    ):
        self.fused, self.rows_per_prefix, self.rest_slots = fused, rows_per_prefix, rest_slots
        self.num_loras, self.greedy, self.rows = num_loras, greedy, []
        self.vocab, width = fused.head.weight.shape
        self.stop = params.stop
        # A captured graph reads this address, so the table must not be freed.
        self.table = params.stop and params.stop.table
        self.pad_id, self.temperature = params.pad_id, params.temperature
        n, new_zeros = num_prefixes * rows_per_prefix, cache.new_zeros
        layers, kv, size = len(fused.layers), fused.num_kv, fused.head_size
        prefix_shape = (layers, 2, num_prefixes, kv, prefix_slots, size)
        suffix_shape = (layers, 2, n, kv, rest_slots + num_tokens, size)
        # Both halves lie in the one cache that all graphs share.
        split = torch.Size(prefix_shape).numel()
        self.prefix = cache[:split].view(prefix_shape)
        self.suffix = cache[split : split + torch.Size(suffix_shape).numel()].view(suffix_shape)
        self.pad = new_zeros(num_prefixes, dtype=torch.int32)  # empty slots before each prefix
        self.own_pad = new_zeros(n, dtype=torch.int32)  # empty slots before each row's own
        self.hiddens = new_zeros(n, num_tokens, width)
        self.uniforms = new_zeros(n, num_tokens, dtype=torch.float64)  # float64, as the sums are
        self.ids = new_zeros(n, num_tokens, dtype=torch.long)
        self.logp = new_zeros(n, num_tokens, dtype=torch.float32)
        self.valid = new_zeros(n, num_tokens, dtype=torch.bool)
        self.done = new_zeros(n, dtype=torch.bool)
        self.state, self.token, self.position = (new_zeros(n, dtype=torch.long) for _ in range(3))
        mark_rows_dynamic(self.done, self.state, self.token)  # so that `choose` is compiled once
        for buffer in (self.uniforms, self.ids, self.logp, self.valid):
            torch._dynamo.maybe_mark_dynamic(buffer, (0, 1))
        self.step, self.slot = (new_zeros(1, dtype=torch.long) for _ in range(2))
        # An image has at most as many positions as tokens, so L + R + T positions suffice.
        positions = torch.arange(prefix_slots + rest_slots + num_tokens, device=cache.device)
        angle = positions[:, None] * fused.inv_freq
        angles = [f(angle) * fused.rope_scale for f in (torch.cos, torch.sin)]
        self.cos, self.sin = (values.to(cache.dtype) for values in angles)  # (positions, D/2)
        self.reads_int8 = fused.has_int8 and fused.decode_ops.reads_int8(fused.layers[0].copied, n)
        self.graph = self._capture(pool)

    @property
    def nbytes(self) -> int:
        """Bytes of its buffers, without the shared cache."""
        buffers = self.hiddens, self.uniforms, self.ids, self.logp, self.valid
        return sum(buffer.nbytes for buffer in buffers)

    def _capture(self, pool):
        if pool is None:
            return None
        return capture([self.advance], pool)[0]

    def load(self, role_prompts: Sequence[PrefilledPrompts]):
        """Copy the keys and values of one or two roles' prompts to the end of their slots."""
        self.pad.fill_(self.prefix.shape[4])  # unused prefixes are empty
        for buffer in (self.position, self.own_pad):
            buffer.zero_()  # of unused rows
        first = range(0, len(self.pad), len(self.pad) // len(role_prompts))  # prefix of each role
        self.rows = [self._load(*pair) for pair in zip(first, role_prompts)]

    def _load(self, first: int, prompts: PrefilledPrompts) -> torch.Tensor:
        """Copy a role's keys and values, its prefixes from `first` on; return its rows."""
        layout, slots, rest_slots = prompts.layout, self.prefix.shape[4], self.rest_slots
        device, (num_prefixes, length) = self.pad.device, layout.prefixes.shape
        prefix_slice = slice(first, first + num_prefixes)
        rest_length = layout.rests.shape[1]
        prefixes, rests = to_device(layout.prefixes, device), to_device(layout.rests, device)
        rows = to_device(layout.rows + first * self.rows_per_prefix, device)
        self.pad[prefix_slice].copy_(slots - layout.prefix_lengths, non_blocking=True)
        # Of each prompt's rows.
        num_generations = len(rows) // len(prompts.next_position)
        position = prompts.next_position.repeat_interleave(num_generations)
        own_pad = (rest_slots - layout.rest_lengths).int().repeat_interleave(num_generations)
        self.position.index_copy_(0, rows, to_device(position, device))
        self.own_pad.index_copy_(0, rows, to_device(own_pad, device))
        # Aligned to the right, so that padding is one number a prefix or a row.
        for prefix, suffix, layer in zip(self.prefix, self.suffix, prompts.cache):
            for shared, of_rows, source in zip(prefix, suffix, layer):
                # (m, K, D) -> (prefixes, K, length, D)
                shared[prefix_slice, :, slots - length :] = source[prefixes].transpose(1, 2)
                if rest_length:  # then each prompt has one row
                    rest = source[rests].transpose(1, 2)
                    of_rows[rows, :, rest_slots - rest_length : rest_slots] = rest
        return rows

    def begin(self, role_prompts: Sequence[PrefilledPrompts]):
        """Sample the first token of each row from its prompt's last hidden state."""
        for buffer in (self.step, self.state, self.valid, self.hiddens):
            buffer.zero_()
        self.slot.fill_(self.rest_slots)
        self.done.fill_(True)  # unused rows are done from the start
        first = torch.zeros_like(self.hiddens[:, 0])
        for rows, prompts in zip(self.rows, role_prompts):
            self.done.index_fill_(0, rows, False)
            hidden, uniforms = prompts.last, prompts.params.uniforms
            if self.fused.before_norm:
                hidden = norm(hidden, self.fused.final_norm)
            first.index_copy_(0, rows, hidden.repeat_interleave(len(rows) // len(hidden), 0))
            if uniforms is not None:
                uniforms = to_device(uniforms.double(), self.uniforms.device)
                self.uniforms[rows, : uniforms.shape[1]] = uniforms
            elif not self.greedy:
                self.uniforms[rows] = GREEDY
        self.sample(first)

    def completions(self, rows: torch.Tensor) -> Completions:
        """Return copies of what was sampled in some rows."""
        copy_to_cpu = partial(torch.Tensor.to, device="cpu", copy=True)
        valid, stopped = copy_to_cpu(self.valid[rows]), copy_to_cpu(self.done[rows])
        # At least one column, also where no row has a token.
        columns = slice(max(1, int(valid.sum(1).max())))
        logp, hidden = self.logp[rows, columns], self.hiddens[rows, columns]  # copies
        hidden[:, -1] = 0.0  # a graph may have run beyond the last answer's end
        ids = copy_to_cpu(self.ids[rows, columns])
        return Completions(ids, logp, valid[:, columns], stopped, hidden)

    def run(self, max_new_tokens: int):
        """Decode until all rows are done, or max_new_tokens.

        The host reads the poll before the last, so the device never waits for it.
        """
        polls = []
        for t in range(1, max_new_tokens):
            if self.graph is None:  # on the CPU
                if self.done.all():
                    return
                self.advance()
                continue
            self.graph.replay()
            if t % POLL == 0:
                flag, event = torch.empty(1, dtype=torch.bool, pin_memory=True), torch.cuda.Event()
                flag.copy_(self.done.all(), non_blocking=True)
                event.record()
                polls.append((flag, event))
                if len(polls) > 1:
                    flag, event = polls.pop(0)
                    event.synchronize()
                    if flag:
                        return

    def advance(self):
        """Feed the newest token, sample the next."""
        hidden, normed = self.forward()
        self.hiddens.index_copy_(1, self.step, hidden[:, None])
        for counter in (self.step, self.slot, self.position):
            counter += 1
        self.sample(normed)

    def sample(self, normed: torch.Tensor):
        """Draw token `step` of each row from `normed` (N, C) and write it down."""
        logits = product(normed, self.fused.padded_head.t())  # (N, at least V)
        self.fused.decode_ops.choose(self, *mark_rows_dynamic(logits))

    def forward(self):
        """Return the last hidden state (N, C) of the newest token, and what lm_head reads (N, C).

        Its keys and values are stored.
        """
        fused, ops = self.fused, self.fused.decode_ops
        x = ops.embed(self.token, fused.embedding)
        rotation = ops.rotation(self.cos, self.sin, self.position)
        for number, (prefix, suffix) in enumerate(zip(self.prefix, self.suffix)):
            cache = TokenCache(
                *prefix, *suffix, pad=self.pad, own_pad=self.own_pad, done=self.done, slot=self.slot
            )
            attention, layer_ops = partial(ops.attend, cache), ops.layer_ops(cache)
            with fused.gathered(number, number + 1, self.num_loras, self.reads_int8) as weights:
                x = decoder_layer(x, weights, rotation, attention, layer_ops)
        residual, normed = ops.final(x, fused.final_norm)
        return residual if fused.before_norm else normed, normed


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
