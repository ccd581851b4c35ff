"""Fast sampling from a Qwen2 with LoRA: few kernels a layer, the prompt's cache shared by its rows, one CUDA graph a token.

A decode step reads every weight once and computes almost nothing, so what it costs beyond that is the number of kernels.
So linears that read one input are one matrix product together with their LoRA A's (see `fused`), whose rows are refreshed
at the start of each `generate`, and all that lies between two products is one kernel (attention: two; `decode_triton`; on the CPU
`decode_torch`).

Letters: P prompts, G samples each, N = P*G rows, L prompt slots, T new tokens, C width, V vocabulary, H query heads,
K key-value heads, D head size, r LoRA rank. Sizes are rounded up, so that few graphs serve all prompts.
"""

import importlib.util

import torch
import torch.nn.functional as F

from rl_train.engine import decode_torch, forward
from rl_train.engine.fused import Fused, aligned, groups
from rl_train.engine.packing import share
from rl_train.engine.tokens import BLOCK, Completions

PROMPT_SLOTS, NEW_SLOTS = 128, 64  # multiples to which L and T are rounded up
POLL = 2  # tokens between two looks at whether all rows are done, each a poll late
MAX_GRAPHS = 16  # kept; the oldest goes


class Decoder:
    """Samples from one language model. Holds its fused matrices, one cache, and a `Graph` for each size that was asked for.

    Args:
        language_model: one of which `fused.unsupported` says None. Its base parameters become views of the fused matrices.
        ops: module of the other parts of a step; default `decode_triton` on CUDA where Triton is installed, else `decode_torch`.
    """

    def __init__(self, language_model, ops=None):
        model, config = language_model.model, language_model.config
        self.padded_head = aligned(language_model.lm_head)
        self.embedding, self.head, self.final_norm = (
            model.embed_tokens.weight.data,
            language_model.lm_head.weight,
            model.norm,
        )
        self.inv_freq, self.rope_scale = (
            model.rotary_emb.inv_freq.float(),
            model.rotary_emb.attention_scaling,
        )
        self.layers = [
            (
                [Fused(group) for group in groups(layer)],
                layer.input_layernorm,
                layer.post_attention_layernorm,
            )
            for layer in model.layers
        ]
        self.norms, self.trains_base = (
            _norms(model),
            any(p.requires_grad for name, p in model.named_parameters() if "lora_" not in name),
        )
        self.num_kv, self.head_size = config.num_key_value_heads, model.layers[0].self_attn.head_dim
        if ops is None and self.head.is_cuda and importlib.util.find_spec("triton"):
            from rl_train.engine import decode_triton

            ops = (
                decode_triton
                if decode_triton.fits(self.head_size, config.hidden_size, config.intermediate_size)
                else None
            )
        self.ops = ops or decode_torch
        self.num_refreshes = 0
        self.cache = self.head.new_zeros(0)  # shared by all graphs, of which one runs at a time
        self.graphs: dict[tuple, Graph] = {}
        self.pool = torch.cuda.graph_pool_handle() if self.head.is_cuda else None

    def stale(self, language_model) -> bool:
        """Must `language_model`, of which this was made, have another Decoder: its weights have moved, or its LoRA is another or off?"""
        model = language_model.model
        return (
            language_model.lm_head.weight.data_ptr() != self.padded_head.data_ptr()
            or model.embed_tokens.weight.data_ptr() != self.embedding.data_ptr()
            or _norms(model) != self.norms
            or any(
                fused.stale(group)
                for layer, (fuseds, _, _) in zip(model.layers, self.layers)
                for fused, group in zip(fuseds, groups(layer))
            )
        )

    def refresh(self):
        """Copy the LoRA in use into the fused matrices."""
        self.num_refreshes += 1
        fuseds = [fused for fuseds, _, _ in self.layers for fused in fuseds if fused.sources]
        if fuseds:
            torch._foreach_copy_(
                [t for fused in fuseds for t in fused.targets],
                [p.data for fused in fuseds for p in fused.sources],
            )

    def graph(self, num_prompts, num_generations, length, max_new_tokens, **how) -> "Graph":
        """The graph that serves these sizes."""
        num_prompts = (
            1 << (num_prompts - 1).bit_length() if num_prompts <= 16 else _round_up(num_prompts, 16)
        )
        sizes = (
            num_prompts,
            num_generations,
            _round_up(length, PROMPT_SLOTS),
            _round_up(max_new_tokens, NEW_SLOTS),
        )
        key = (*sizes, *how.items())
        if key not in self.graphs:
            slots = num_prompts * (sizes[2] + num_generations * sizes[3])
            if len(self.graphs) == MAX_GRAPHS:
                del self.graphs[next(iter(self.graphs))]
            if self.cache.numel() < slots * self.slot_size:
                self.graphs.clear()  # they hold the old cache's address; a pool without graphs is not used again
                self.pool = torch.cuda.graph_pool_handle() if self.head.is_cuda else None
                self.cache = self.cache.new_zeros(0)
                self.cache = self.head.new_zeros(
                    slots * self.slot_size
                )  # not empty: 0 * NaN is NaN
            self.graphs[key] = Graph(self, *sizes, **how)
        return self.graphs[key]

    @property
    def slot_size(self) -> int:
        """Numbers that one token holds in the cache."""
        return len(self.layers) * 2 * self.num_kv * self.head_size

    @torch.no_grad()
    def generate(
        self,
        language_model,
        embeds,
        attention_mask,
        *,
        num_generations,
        max_new_tokens,
        stop,
        pad_id,
        temperature,
        uniforms,
        same=None,
    ) -> Completions:
        """See `sampler.generate`."""
        num_prompts, num_rows = len(embeds), len(embeds) * num_generations
        with torch.autocast(embeds.device.type, enabled=False):
            graph = self.graph(
                num_prompts,
                num_generations,
                embeds.shape[1],
                max_new_tokens,
                stop=stop,
                pad_id=pad_id,
                temperature=temperature,
                greedy=uniforms is None,
            )
            cache, shared = [], share(attention_mask, same)
            hidden = forward.hidden_states(self, shared.gather(embeds), shared.layout, cache=cache)
            graph.load(cache, shared.tokens(), attention_mask, shared.last(hidden)[:, 0], uniforms)
            del cache
            graph.run(max_new_tokens)
        length = max(1, int(graph.valid[:num_rows].sum(1).max()))
        ids, logp, valid, hidden = (
            t[:num_rows, :length].clone()
            for t in (graph.ids, graph.logp, graph.valid, graph.hiddens)
        )
        hidden[:, -1] = 0.0  # a graph may have run beyond the last answer's end
        return Completions(ids, logp, valid, graph.done[:num_rows].clone(), hidden)


class Graph:
    """Buffers of one size and, on CUDA, the graph that decodes one token of all rows in them."""

    def __init__(
        self,
        decoder: Decoder,
        num_prompts,
        num_generations,
        length,
        num_tokens,
        *,
        stop,
        pad_id,
        temperature,
        greedy,
    ):
        self.decoder, self.stop, self.pad_id, self.temperature, self.greedy = (
            decoder,
            stop,
            pad_id,
            temperature,
            greedy,
        )
        self.num_generations, self.vocab = num_generations, len(decoder.head)
        self.table = stop and stop.table  # whose address the graph holds
        n, (vocab, width), new = (
            num_prompts * num_generations,
            decoder.head.shape,
            decoder.head.new_zeros,
        )
        flat, layers, per_head = (
            decoder.cache,
            len(decoder.layers),
            (decoder.num_kv, -1, decoder.head_size),
        )
        split = num_prompts * length * decoder.slot_size
        self.prefix = flat[:split].view(
            layers, 2, num_prompts, decoder.num_kv, length, decoder.head_size
        )
        self.suffix = flat[split : split + n * num_tokens * decoder.slot_size].view(
            layers, 2, n, *per_head
        )  # (.., K, T, D)
        self.pad = new(num_prompts, dtype=torch.int32)  # empty slots before each prompt
        self.logits = new(
            n, _round_up(vocab, BLOCK)
        )  # aligned for the product, ready for `inverse_cdf`
        self.hiddens = new(n, num_tokens, width)
        self.uniforms = new(n, num_tokens, dtype=torch.float64)
        self.ids, self.logp = (
            new(n, num_tokens, dtype=torch.long),
            new(n, num_tokens, dtype=torch.float32),
        )
        self.valid, self.done = new(n, num_tokens, dtype=torch.bool), new(n, dtype=torch.bool)
        self.state, self.token, self.position = (new(n, dtype=torch.long) for _ in range(3))
        self.step = new(1, dtype=torch.long)
        angle = (
            torch.arange(length + num_tokens, device=decoder.head.device)[:, None]
            * decoder.inv_freq
        )  # (L + T, D/2)
        self.cos, self.sin = (
            (f(angle) * decoder.rope_scale).to(decoder.head.dtype) for f in (torch.cos, torch.sin)
        )
        self.graph = self._capture() if decoder.head.is_cuda else None

    def _capture(self):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.advance()  # compiles kernels and makes workspaces
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self.decoder.pool, capture_error_mode="thread_local"
        ):  # other threads pin memory
            self.advance()
        return graph

    def load(self, cache, tokens, attention_mask, hidden, uniforms):
        """Take over the prompts' keys and values, at the end of the slots, and sample the first token from hidden (p, C).

        Args:
            cache: keys and values (m, K, D) of each layer; tokens: (p, length) which of the m stand in each slot of the prompts.
        """
        p, length = attention_mask.shape
        lengths, slots = attention_mask.sum(1), self.prefix.shape[4]
        self.pad.fill_(slots)[:p].copy_(slots - lengths)  # prompts that are not there are empty
        for prefix, layer in zip(self.prefix, cache):
            for target, source in zip(prefix, layer):
                target[:p, :, slots - length :] = source[tokens].transpose(1, 2)
        rows = slice(p * self.num_generations)
        self.position.zero_()[rows] = lengths.repeat_interleave(self.num_generations)
        if uniforms is not None:
            self.uniforms[rows, : uniforms.shape[1]] = uniforms.to(self.uniforms)
        for buffer in (self.step, self.state, self.valid, self.hiddens):
            buffer.zero_()
        self.done.fill_(True)[rows] = False
        first = hidden.new_zeros(len(self.done), hidden.shape[1], dtype=self.hiddens.dtype)
        first[rows] = hidden.repeat_interleave(self.num_generations, 0)
        self.sample(first)

    def run(self, max_new_tokens: int):
        """Decode until all rows are done, or max_new_tokens. The host looks at the poll before the last: the device never waits."""
        polls = []
        for t in range(1, max_new_tokens):
            if self.graph is None:
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
        hidden = self.forward()
        self.hiddens.index_copy_(1, self.step, hidden[:, None])
        self.step += 1
        self.position += 1
        self.sample(hidden)

    def sample(self, hidden):
        """Draw token `step` of each row from hidden (N, C) and write it down."""
        padded = self.decoder.padded_head
        torch.mm(hidden, padded.t(), out=self.logits[:, : len(padded)])
        self.decoder.ops.choose(self)

    def forward(self):
        """(N, C) last hidden state of the newest token; its keys and values go to slot `step`."""
        decoder, ops, layers = self.decoder, self.decoder.ops, self.decoder.layers
        residual, x, power = ops.embed(self.token, decoder.embedding, layers[0][1].weight)
        following = [norm for _, norm, _ in layers[1:]] + [decoder.final_norm]
        for ((qkv, out, gate_up, down), norm, mlp_norm), next_norm, prefix, suffix in zip(
            layers, following, self.prefix, self.suffix
        ):
            q = ops.rotate_and_store(
                F.linear(x, qkv.weight),
                power,
                norm.variance_epsilon,
                qkv.bias,
                qkv.lora_b,
                qkv.scaling,
                self.cos,
                self.sin,
                self.position,
                *suffix,
                self.step,
            )
            found = ops.attend(q, *prefix, *suffix, self.pad, self.step)
            x, power = ops.add(
                residual, found, out.weight, out.lora_b, out.scaling, mlp_norm.weight
            )
            found = ops.gate(
                F.linear(x, gate_up.weight),
                power,
                mlp_norm.variance_epsilon,
                gate_up.lora_b,
                gate_up.scaling,
                gate_up.sizes[0],
            )
            x, power = ops.add(
                residual, found, down.weight, down.lora_b, down.scaling, next_norm.weight
            )
        return ops.normed(x, power, decoder.final_norm.variance_epsilon)


def _norms(model) -> list[int]:
    """Where the weights of all RMSNorms are, which graphs read there."""
    layers = [
        norm
        for layer in model.layers
        for norm in (layer.input_layernorm, layer.post_attention_layernorm)
    ]
    return [norm.weight.data_ptr() for norm in (*layers, model.norm)]


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
