"""How sequences that share a prompt are laid out for one forward, in which each token sees its prompt and its own row.

Letters: n rows about P prompts, L prompt length, T completion tokens, M tokens behind a prompt, S = L + M, m tokens, C LLM width.
"""
from dataclasses import dataclass

import torch

from sa2va_hf.modeling_sa2va import positions


@dataclass
class Packed:
    """n rows as P sequences [prompt | tokens of its first row | of its second | ..], the last token of each row left out.

    That token is never an input. Tokens see their prompt and what precedes them in their own row.
    """
    ids: torch.Tensor           # (P, M) what stands behind the prompts
    part: torch.Tensor          # (P, S) what each token belongs to: -1 padding, 0 prompt, 1 + row
    position_ids: torch.Tensor  # (P, S)
    prompt: torch.Tensor        # (n,) prompt of each row
    before: torch.Tensor        # (n, T) index, in its sequence, of what precedes each token: whose hidden state predicts it

    def bias(self, dtype: torch.dtype) -> torch.Tensor:
        """(P, 1, S, S) for the attention scores: 0 or -inf. Padding sees padding, so that no query is without any key."""
        part = self.part
        seen = ((part[:, :, None] == part[:, None]) | (part[:, None] == 0)).tril()                 # (P, S, S)
        return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, float("-inf"))[:, None]

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
    at = length + torch.arange(len(row), device=device) - (count.cumsum(0) - count)[owner]        # index in the owner's sequence
    size = length + int(count.max())
    size += -size % 8                                                                          # attention kernels like that
    sequence = torch.full((num_prompts, size), pad_id, device=device)
    sequence[owner, at] = ids[row, column]
    part = torch.full((num_prompts, size), -1, device=device)
    part[:, :length] = mask - 1
    part[owner, at] = row + 1
    position_ids = torch.zeros_like(part)
    position_ids[:, :length] = positions(mask)
    position_ids[owner, at] = mask.sum(1)[owner] + column
    before = torch.full(ids.shape, length - 1, device=device)                                  # the first token follows the prompt
    before[row, column + 1] = at
    return Packed(sequence[:, length:], part, position_ids, prompt, before)


def whole(mask) -> Packed:
    """Sequences with no rows behind them, of the attention mask (P, L), padded on the left."""
    return Packed(mask.new_zeros(len(mask), 0), mask.long() - 1, positions(mask), mask.new_zeros(0), mask.new_zeros(0, 0))
