"""How sequences that share a prompt are laid out for one forward, in which each token sees its prompt and its own row.

Letters: n rows about P prompts, L prompt length, T completion tokens, M tokens behind a prompt, S = L + M, m tokens, C LLM width.
"""

from dataclasses import dataclass

import numpy as np
import torch

from sa2va_hf.modeling_sa2va import positions

TOGETHER = 8  # prompts of a sequence: attention by a bias costs the square of its length, and all are padded to the longest


@dataclass
class Layout:
    """P sequences [beginning | one continuation | another | ..]. Tokens see the beginning and what precedes them in their own part."""

    part: (
        torch.Tensor
    )  # (P, S) what each token belongs to: -1 padding, 0 beginning, above 0 a continuation
    position_ids: torch.Tensor  # (P, S)

    def bias(self, dtype: torch.dtype) -> torch.Tensor:
        """(P, 1, S, S) for the attention scores: 0 or -inf. Padding sees padding, so that no query is without any key."""
        part = self.part
        seen = ((part[:, :, None] == part[:, None]) | (part[:, None] == 0)).tril()  # (P, S, S)
        return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, float("-inf"))[:, None]


@dataclass
class Packed(Layout):
    """n rows as P sequences [prompt | tokens of its first row | of its second | ..], the last token of each row left out.

    That token is never an input. Of row r `part` is 1 + r.
    """

    ids: torch.Tensor  # (P, M) what stands behind the prompts
    prompt: torch.Tensor  # (n,) prompt of each row
    before: (
        torch.Tensor
    )  # (n, T) index, in its sequence, of what precedes each token: whose hidden state predicts it

    def hidden_before(self, hidden, tokens) -> torch.Tensor:
        """(m, C) of hidden (P, S, C), before each of `tokens` (n, T) bool, row-major."""
        row, column = tokens.nonzero(as_tuple=True)
        return hidden[self.prompt[row], self.before[row, column]]


def fed(valid: torch.Tensor) -> torch.Tensor:
    """(n, T) bool: the valid tokens (n, T) of each row but its last, which are the ones that a model has to read."""
    return torch.cat([valid[:, :-1] & valid[:, 1:], torch.zeros_like(valid[:, :1])], dim=1)


def pack(mask, prompt, ids, valid, pad_id: int) -> Packed:
    """The layout of `Packed`.

    Args:
        mask: (P, L) attention mask of the prompts, padded on the left; prompt: (n,) prompt of each row, not decreasing.
        ids, valid: (n, T); the valid tokens of a row come first.
    """
    (num_prompts, length), device = mask.shape, ids.device
    row, column = fed(valid).nonzero(as_tuple=True)
    owner = prompt[row]
    count = owner.bincount(minlength=num_prompts)
    at = (
        length + torch.arange(len(row), device=device) - (count.cumsum(0) - count)[owner]
    )  # index in the owner's sequence
    size = length + int(count.max())
    size += -size % 8  # attention kernels like that
    sequence = torch.full((num_prompts, size), pad_id, device=device)
    sequence[owner, at] = ids[row, column]
    part = torch.full((num_prompts, size), -1, device=device)
    part[:, :length] = mask - 1
    part[owner, at] = row + 1
    position_ids = torch.zeros_like(part)
    position_ids[:, :length] = positions(mask)
    position_ids[owner, at] = mask.sum(1)[owner] + column
    before = torch.full(ids.shape, length - 1, device=device)  # the first token follows the prompt
    before[row, column + 1] = at
    return Packed(part, position_ids, sequence[:, length:], prompt, before)


@dataclass
class Shared:
    """P prompts as fewer sequences [what some of them begin with | the rest of the first of these | of the second | ..]."""

    layout: Layout
    source: torch.Tensor  # (sequences, S) index, among the P*L slots of the prompts, of the token in each slot; 0 at the padding
    where: (
        torch.Tensor
    )  # (P, L) index, among the sequences' slots, of each prompt's tokens; 0 at the padding

    def gather(self, embeds):
        """(sequences, S, C) of embeds (P, L, C)."""
        return embeds.flatten(0, 1)[self.source]

    def last(self, hidden, number=1):
        """(P, number, C) of hidden (sequences, S, C), at each prompt's last tokens."""
        return hidden.flatten(0, 1)[self.where[:, -number:]]

    def tokens(self):
        """(P, L) index of each prompt's tokens among those of all sequences, without padding."""
        return ((self.layout.part >= 0).flatten().cumsum(0) - 1)[self.where]


def share(mask, same: list[int] | None = None) -> Shared:
    """The layout of `Shared`, with at most TOGETHER prompts in a sequence.

    Args:
        mask: (P, L) attention mask of the prompts, padded on the left.
        same: how many leading tokens each prompt has in common with the one before it; 0: it begins a sequence; None: all do.
    """
    lengths, length = mask.sum(1).tolist(), mask.shape[1]
    groups = []  # the prompts of each sequence
    for prompt, common in enumerate(same or [0] * len(lengths)):
        if common and len(groups[-1]) < TOGETHER:
            groups[-1].append(prompt)
        else:
            groups.append([prompt])
    sequences = []  # pieces: (prompt, from, to)
    for first, *others in groups:
        common = min((same[prompt] for prompt in others), default=lengths[first])
        sequences.append(
            [
                (first, 0, common),
                *((prompt, common, lengths[prompt]) for prompt in (first, *others) if others),
            ]
        )
    size = max(sum(end - start for _, start, end in pieces) for pieces in sequences)
    size += -size % 8  # attention kernels like that
    part, position, source = (
        np.full((len(groups), size), -1),
        *np.zeros((2, len(groups), size), dtype=np.int64),
    )
    where = np.zeros((len(lengths), length), dtype=np.int64)
    for number, pieces in enumerate(sequences):
        filled = 0
        for piece, (prompt, start, end) in enumerate(pieces):
            slots, count = slice(filled, filled + end - start), np.arange(start, end)
            part[number, slots], position[number, slots] = piece, count
            source[number, slots] = prompt * length + length - lengths[prompt] + count
            for reader in groups[number] if piece == 0 else [prompt]:
                where[reader, length - lengths[reader] + count] = number * size + np.arange(
                    filled, filled + len(count)
                )
            filled = slots.stop
    part, position, source, where = (
        torch.from_numpy(x).to(mask.device) for x in (part, position, source, where)
    )
    return Shared(Layout(part, position), source, where)
