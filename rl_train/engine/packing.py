"""Layouts of sequences that share a prompt, for one forward in which no row sees another.

Layouts are computed on the CPU and sent to the GPU as indices, so no host-device synchronisation is
needed.

Letters: n rows about P prompts, L prompt length, T completion tokens, M tokens behind a prompt,
S = L + M, m tokens, C LLM width, A axes of a position (1, or 3 where images have time, height and
width).
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from sa2va_hf.to_device import to_device

# Attention by a bias costs the square of a sequence's length, and all sequences are padded to the
# longest.
MAX_PROMPTS_PER_SEQUENCE = 8
# To decode one more row takes about as long as to read the keys and values of so many slots.
SLOTS_PER_ROW = 1000


def positions(attention_mask: torch.Tensor) -> torch.Tensor:
    """Return positions (1, P, L) that count attended tokens, with padding on either side."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[None]


def next_positions(position_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """Return the position (P,), on every axis, of the first token behind prompts (A, P, L), (P, L).

    It is one above the highest position of the prompt. An image has at least as many tokens
    as positions, so this is never above the number of tokens.
    """
    return (position_ids * attention_mask).amax((0, 2)) + 1


@dataclass
class Layout:
    """P sequences [beginning | one continuation | another | ..].

    Tokens attend to the beginning and to the preceding tokens of their own part.
    """

    part: torch.Tensor  # (P, S) of each token: -1 padding, 0 beginning, above 0 a continuation
    position_ids: torch.Tensor  # (A, P, S)

    def bias(self, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
        """Return the bias (P, 1, S, S) of the attention scores, 0 or -inf, on `device`.

        Padding attends to padding, so that every query has a key.
        """
        part = to_device(self.part, device)
        same_part, beginning = part[:, :, None] == part[:, None], part[:, None] == 0
        visible = (same_part | beginning).tril()  # (P, S, S), causal
        bias = torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, float("-inf"))
        return bias[:, None]


@dataclass
class Packed(Layout):
    """n rows as P sequences [prompt | tokens of its first row | of its second | ..].

    The last token of each row is left out, as it is never an input. Of row r `part` is 1 + r.
    """

    ids: torch.Tensor  # (P, M) tokens behind the prompts
    prompt_index: torch.Tensor  # (n,) prompt of each row
    before: torch.Tensor  # (n, T) index, in its sequence, of the token that predicts each token

    def hidden_before(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return rows (m, C) of hidden (P, S, C) that predict `tokens` (n, T) bool, row-major."""
        slot = (self.prompt_index[:, None] * hidden.shape[1] + self.before)[tokens]
        return hidden.flatten(0, 1)[to_device(slot, hidden.device)]


def input_mask(valid: torch.Tensor) -> torch.Tensor:
    """Return the tokens (n, T) bool that are inputs: the valid ones (n, T) but each row's last."""
    return torch.cat([valid[:, :-1] & valid[:, 1:], torch.zeros_like(valid[:, :1])], dim=1)


def pack(
    mask: torch.Tensor,
    position_ids: torch.Tensor,
    prompt_index: torch.Tensor,
    ids: torch.Tensor,
    valid: torch.Tensor,
    pad_id: int,
) -> Packed:
    """Lay rows out as in `Packed`.

    Args:
        mask: (P, L) attention mask of the prompts, padded on the left; position_ids: (A, P, L).
        prompt_index: (n,) prompt of each row, not decreasing.
        ids, valid: (n, T); the valid tokens of a row come first.
    """
    num_prompts, length = mask.shape
    row, column = input_mask(valid).nonzero(as_tuple=True)
    row_prompt = prompt_index[row]
    count = row_prompt.bincount(minlength=num_prompts)
    rank = torch.arange(len(row)) - (count.cumsum(0) - count)[row_prompt]
    index = length + rank  # index in the owner's sequence
    size = length + int(count.max())
    size += -size % 8  # attention kernels are faster on multiples of 8
    sequence = torch.full((num_prompts, size), pad_id)
    sequence[row_prompt, index] = ids[row, column]
    part = torch.full((num_prompts, size), -1)
    part[:, :length] = mask - 1  # 0 the prompt, -1 its padding
    part[row_prompt, index] = row + 1
    sequence_positions = position_ids.new_zeros(len(position_ids), num_prompts, size)
    sequence_positions[:, :, :length] = position_ids
    sequence_positions[:, row_prompt, index] = (
        next_positions(position_ids, mask)[row_prompt] + column
    )
    before = torch.full(ids.shape, length - 1)  # the first token follows the prompt
    before[row, column + 1] = index
    return Packed(part, sequence_positions, sequence[:, length:], prompt_index, before)


@dataclass
class CacheLayout:
    """Tokens of P prompts in the sampler's cache: g prefixes that rows share, and each row's rest.

    Indices are among all tokens, aligned to the right; those of the padding mean nothing.
    """

    prefixes: torch.Tensor  # (g, L') tokens of each prefix
    prefix_lengths: torch.Tensor  # (g,)
    rests: torch.Tensor  # (P, R) tokens of each prompt behind its prefix
    rest_lengths: torch.Tensor  # (P,)
    rows_per_prefix: int
    rows: torch.Tensor  # (N,) index of each row among the g * rows_per_prefix

    def with_rows_per_prefix(self, num_rows: int) -> "CacheLayout":
        """Return the layout with `num_rows` rows of a prefix, a divisor: prefixes are repeated."""
        times = self.rows_per_prefix // num_rows
        return replace(
            self,
            prefixes=self.prefixes.repeat_interleave(times, 0),
            prefix_lengths=self.prefix_lengths.repeat_interleave(times),
            rows_per_prefix=num_rows,  # so that `rows` stay the same
        )


@dataclass
class SharedPrefixLayout:
    """P prompts as fewer sequences [shared prefix | rest of one prompt | rest of another | ..]."""

    layout: Layout
    source: torch.Tensor  # (sequences, S) index among P*L of each slot's token; 0 at the padding
    where: torch.Tensor  # (P, L) index among all slots of each prompt's token; 0 at the padding
    sequence: torch.Tensor  # (P,) sequence of each prompt, not decreasing
    prefix_lengths: torch.Tensor  # (sequences,) tokens of the prefix; all of a prompt alone
    lengths: torch.Tensor  # (P,) tokens of each prompt

    def gather(self, embeds: torch.Tensor):
        """Return the embeddings (sequences, S, C) of prompts (P, L, C)."""
        return embeds.flatten(0, 1)[to_device(self.source, embeds.device)]

    def last(self, hidden: torch.Tensor, number: int = 1):
        """Return hidden (sequences, S, C) at each prompt's last tokens, (P, number, C)."""
        where = to_device(self.where[:, -number:], hidden.device)
        return hidden.flatten(0, 1)[where]

    def tokens(self):
        """Return the index (P, L) of each prompt's tokens among all tokens, without padding."""
        return ((self.layout.part >= 0).flatten().cumsum(0) - 1)[self.where]

    def cache_layout(self, num_generations: int) -> CacheLayout:
        """Return the layout of a cache for G rows of each prompt.

        G rows of one prompt share all of it. If G is 1, the prompts of a sequence share its prefix
        if the slots saved outweigh the unused rows that make all groups equally large.
        """
        num_prompts = len(self.lengths)
        every = torch.arange(num_prompts)
        sequence, prefix_lengths = self.sequence, self.prefix_lengths
        rows_per_prefix = 1 << (int(sequence.bincount().max()) - 1).bit_length()
        rest_lengths = self.lengths - prefix_lengths[sequence]
        saved_slots = (self.lengths - rest_lengths).sum() - prefix_lengths.sum()
        unused_rows = len(prefix_lengths) * rows_per_prefix - num_prompts
        if num_generations > 1 or saved_slots <= SLOTS_PER_ROW * unused_rows:
            # Each prompt is a prefix.
            sequence, prefix_lengths, rows_per_prefix = every, self.lengths, num_generations
            rest_lengths = torch.zeros_like(self.lengths)
        first = torch.searchsorted(sequence, torch.arange(len(prefix_lengths)))  # prompt of each
        rank = every - first[sequence]  # among the prompts of its prefix
        rows = (sequence * rows_per_prefix + rank)[:, None] + torch.arange(num_generations)
        tokens = self.tokens()  # (P, L), aligned to the right
        # A prefix is its first prompt, shifted to the right by that prompt's rest.
        shifted = torch.arange(tokens.shape[1]) - rest_lengths[first, None]
        prefixes = tokens[first].gather(1, shifted.clamp(min=0))  # (g, L)
        return CacheLayout(
            prefixes=prefixes[:, tokens.shape[1] - int(prefix_lengths.max()) :],
            prefix_lengths=prefix_lengths,
            rests=tokens[:, tokens.shape[1] - int(rest_lengths.max()) :],
            rest_lengths=rest_lengths,
            rows_per_prefix=rows_per_prefix,
            rows=rows.flatten(),
        )


def shared_prefix_layout(
    mask: torch.Tensor, position_ids: torch.Tensor, shared_prefix_lengths: list[int] | None = None
) -> SharedPrefixLayout:
    """Lay prompts out as in `SharedPrefixLayout`, at most MAX_PROMPTS_PER_SEQUENCE together.

    Args:
        mask: (P, L) attention mask of the prompts, padded on the left; position_ids: (A, P, L).
        shared_prefix_lengths: how many leading tokens each prompt has in common with the one before
            it; 0: it begins a sequence; None: all do.
    """
    lengths, length = mask.sum(1).tolist(), mask.shape[1]
    shared = shared_prefix_lengths or [0] * len(lengths)
    groups = []  # prompts of each sequence
    for prompt, common in enumerate(shared):
        if common and len(groups[-1]) < MAX_PROMPTS_PER_SEQUENCE:
            groups[-1].append(prompt)
        else:
            groups.append([prompt])
    placements = []  # (sequence, part, shared tokens, slots) of each prompt
    prefix_lengths = []  # of each sequence
    for sequence, (first, *others) in enumerate(groups):
        common = filled = min((shared[prompt] for prompt in others), default=lengths[first])
        prefix_lengths.append(common)
        for part_id, prompt in enumerate((first, *others), 1):
            end = filled + lengths[prompt] - common
            # First tokens lie in the shared slots, the rest behind the prompts before it.
            slots = np.concatenate([np.arange(common), np.arange(filled, end)])
            placements.append((sequence, part_id, common, slots))
            filled = end
    size = 1 + max(slots[-1] for *_, slots in placements)
    size += -size % 8  # attention kernels are faster on multiples of 8
    part = np.full((len(groups), size), -1)
    source = np.zeros((len(groups), size), dtype=np.int64)
    where = np.zeros((len(lengths), length), dtype=np.int64)
    # In reverse, so that the shared slots keep the tokens of a sequence's first prompt.
    for prompt, (sequence, part_id, common, slots) in reversed(list(enumerate(placements))):
        start = length - len(slots)
        part[sequence, slots[:common]], part[sequence, slots[common:]] = 0, part_id
        source[sequence, slots] = prompt * length + np.arange(start, length)
        where[prompt, start:] = sequence * size + slots
    part, source, where = map(torch.from_numpy, (part, source, where))
    return SharedPrefixLayout(
        layout=Layout(part, position_ids.flatten(1)[:, source]),
        source=source,
        where=where,
        sequence=torch.tensor([sequence for sequence, *_ in placements]),
        prefix_lengths=torch.tensor(prefix_lengths),
        lengths=torch.tensor(lengths),
    )
