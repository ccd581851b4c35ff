"""How sequences that share a prompt are laid out for one forward, where each token sees its own.

All of it on the CPU, from what is known there: the GPU is sent where its tokens go and waits for
nobody, as it would for each number that it were asked for.

Letters: n rows about P prompts, L prompt length, T completion tokens, M tokens behind a prompt,
S = L + M, m tokens, C LLM width, A axes of a position (1, or 3 where images have time, height and
width).
"""

from dataclasses import dataclass

import numpy as np
import torch

from sa2va_hf.to_device import to_device

# Prompts of one sequence: attention by a bias costs the square of its length, and all sequences are
# padded to the longest.
TOGETHER = 8


def positions(attention_mask: torch.Tensor) -> torch.Tensor:
    """(1, P, L) positions that count attended tokens, whatever side the padding (P, L) is on."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[None]


def next_positions(position_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """(P,) position, on every axis, of the first token behind prompts (A, P, L), (P, L).

    Text goes on after the highest number of what precedes it. An image has at least as many tokens
    as positions, so this is never above the number of tokens.
    """
    return (position_ids * attention_mask).amax((0, 2)) + 1


@dataclass
class Layout:
    """P sequences [beginning | one continuation | another | ..].

    Tokens see the beginning and what precedes them in their own part.
    """

    part: torch.Tensor  # (P, S) of each token: -1 padding, 0 beginning, above 0 a continuation
    position_ids: torch.Tensor  # (A, P, S)

    def bias(self, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
        """(P, 1, S, S) for the attention scores, on `device`: 0 or -inf.

        Padding sees padding, so that no query is without any key.
        """
        part = to_device(self.part, device)
        seen = ((part[:, :, None] == part[:, None]) | (part[:, None] == 0)).tril()  # (P, S, S)
        return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, float("-inf"))[:, None]


@dataclass
class Packed(Layout):
    """n rows as P sequences [prompt | tokens of its first row | of its second | ..].

    The last token of each row is left out, as it is never an input. Of row r `part` is 1 + r.
    """

    ids: torch.Tensor  # (P, M) what stands behind the prompts
    prompt: torch.Tensor  # (n,) prompt of each row
    before: torch.Tensor  # (n, T) index in its sequence of what precedes, and so predicts, a token

    def hidden_before(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """(m, C) of hidden (P, S, C), before each of `tokens` (n, T) bool, row-major."""
        slot = (self.prompt[:, None] * hidden.shape[1] + self.before)[tokens]
        return hidden.flatten(0, 1)[to_device(slot, hidden.device)]


def input_mask(valid: torch.Tensor) -> torch.Tensor:
    """(n, T) bool: the valid tokens (n, T) but each row's last, which are what a model reads."""
    return torch.cat([valid[:, :-1] & valid[:, 1:], torch.zeros_like(valid[:, :1])], dim=1)


def pack(
    mask: torch.Tensor,
    position_ids: torch.Tensor,
    prompt: torch.Tensor,
    ids: torch.Tensor,
    valid: torch.Tensor,
    pad_id: int,
) -> Packed:
    """The layout of `Packed`.

    Args:
        mask: (P, L) attention mask of the prompts, padded on the left; position_ids: (A, P, L).
        prompt: (n,) prompt of each row, not decreasing.
        ids, valid: (n, T); the valid tokens of a row come first.
    """
    num_prompts, length = mask.shape
    row, column = input_mask(valid).nonzero(as_tuple=True)
    owner = prompt[row]
    count = owner.bincount(minlength=num_prompts)
    nth = torch.arange(len(row)) - (count.cumsum(0) - count)[owner]
    at = length + nth  # index in the owner's sequence
    size = length + int(count.max())
    size += -size % 8  # attention kernels like that
    sequence = torch.full((num_prompts, size), pad_id)
    sequence[owner, at] = ids[row, column]
    part = torch.full((num_prompts, size), -1)
    part[:, :length] = mask - 1
    part[owner, at] = row + 1
    placed = position_ids.new_zeros(len(position_ids), num_prompts, size)
    placed[:, :, :length] = position_ids
    placed[:, owner, at] = next_positions(position_ids, mask)[owner] + column
    before = torch.full(ids.shape, length - 1)  # the first token follows the prompt
    before[row, column + 1] = at
    return Packed(part, placed, sequence[:, length:], prompt, before)


@dataclass
class SharedPrefixLayout:
    """P prompts as fewer sequences [what some begin with | the rest of one | of another | ..]."""

    layout: Layout
    source: torch.Tensor  # (sequences, S) of a slot's token the index among P*L; 0 at the padding
    where: torch.Tensor  # (P, L) of a prompt's token the index among all slots; 0 at the padding

    def gather(self, embeds: torch.Tensor):
        """(sequences, S, C) of embeds (P, L, C)."""
        return embeds.flatten(0, 1)[to_device(self.source, embeds.device)]

    def last(self, hidden: torch.Tensor, number: int = 1):
        """(P, number, C) of hidden (sequences, S, C), at each prompt's last tokens."""
        where = to_device(self.where[:, -number:], hidden.device)
        return hidden.flatten(0, 1)[where]

    def tokens(self):
        """(P, L) index of each prompt's tokens among those of all sequences, without padding."""
        return ((self.layout.part >= 0).flatten().cumsum(0) - 1)[self.where]


def shared_prefix_layout(
    mask: torch.Tensor, position_ids: torch.Tensor, shared_prefix_lengths: list[int] | None = None
) -> SharedPrefixLayout:
    """The layout of `SharedPrefixLayout`, with at most TOGETHER prompts in a sequence.

    Args:
        mask: (P, L) attention mask of the prompts, padded on the left; position_ids: (A, P, L).
        shared_prefix_lengths: how many leading tokens each prompt has in common with the one before
            it; 0: it begins a sequence; None: all do.
    """
    lengths, length = mask.sum(1).tolist(), mask.shape[1]
    shared = shared_prefix_lengths or [0] * len(lengths)
    groups = []  # the prompts of each sequence
    for prompt, common in enumerate(shared):
        if common and len(groups[-1]) < TOGETHER:
            groups[-1].append(prompt)
        else:
            groups.append([prompt])
    placed = []  # of each prompt: its sequence, its part there, what it shares, its slots
    for number, (first, *others) in enumerate(groups):
        common = filled = min((shared[prompt] for prompt in others), default=lengths[first])
        for piece, prompt in enumerate((first, *others), 1):
            end = filled + lengths[prompt] - common
            slots = np.concatenate([np.arange(common), np.arange(filled, end)])
            placed.append((number, piece, common, slots))
            filled = end
    size = 1 + max(slots[-1] for *_, slots in placed)
    size += -size % 8  # attention kernels like that
    part = np.full((len(groups), size), -1)
    source = np.zeros((len(groups), size), dtype=np.int64)
    where = np.zeros((len(lengths), length), dtype=np.int64)
    for prompt, (number, piece, common, slots) in reversed(list(enumerate(placed))):
        start = length - len(slots)
        part[number, slots[:common]], part[number, slots[common:]] = 0, piece
        source[number, slots] = prompt * length + np.arange(start, length)
        where[prompt, start:] = number * size + slots
    part, source, where = map(torch.from_numpy, (part, source, where))
    return SharedPrefixLayout(Layout(part, position_ids.flatten(1)[:, source]), source, where)
