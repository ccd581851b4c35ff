"""Sampling of a token, the test for the end of an answer, and the records of both samplers.

Letters: N rows, T new tokens, C width, V vocabulary, S states of the stop text's automaton.
"""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from transformers.convert_slow_tokenizer import bytes_to_unicode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")  # of sentencepiece
BLOCK = 512  # classes whose probabilities are summed together before the search among them
LOWEST = torch.finfo(torch.float32).min
GREEDY = -1.0  # in the place of a uniform number


@dataclass
class Completions:
    """N sampled answers. ids, valid and stopped are on the CPU, where the caller continues."""

    ids: torch.Tensor  # (N, T) long, pad after a row's end
    logp: torch.Tensor  # (N, T) float32 log-probs under the distribution they were sampled from
    valid: torch.Tensor  # (N, T) bool, up to and including the token that completes the stop text
    stopped: torch.Tensor  # (N,) bool, False = cut at the length limit
    # (N, T, C) last hidden state at each token as input; any numbers from a row's last token on
    hidden: torch.Tensor


def sample_token(
    logits: torch.Tensor, temperature: float, u: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a token (N,) and its log-prob (N,) for each row of logits (N, V).

    The token is sampled by inverse CDF at u (N,) in [0, 1): it is the first whose cumulative
    probability exceeds u of the total, and never one of probability 0. If u is None, or GREEDY in a
    row, it is the most likely token, the first one of equals.

    Sums are float64, over blocks first and then inside the one block that is hit: a float64 scan of
    the whole vocabulary costs more on a GPU than the rest of the sampling. Other blocks enter only
    by their highest logit and their sum relative to it, so torch.compile reads the logits once.
    """
    x = F.pad(logits.float() / temperature, (0, -logits.shape[1] % BLOCK), value=float("-inf"))
    x = x.unflatten(1, (-1, BLOCK))  # (N, K, BLOCK)
    top = x.amax(-1)  # (N, K)
    highest, top = top.amax(1, keepdim=True), top.clamp(min=LOWEST)  # -inf - -inf is no number
    scale = (top - highest).exp()
    block_sums = (x - top[..., None]).exp().sum(-1, dtype=torch.float64) * scale
    total = block_sums.sum(1, keepdim=True)
    if u is None:
        block = top.argmax(1, keepdim=True)  # (N, 1)
    else:
        cdf, target = block_sums.cumsum(1), u[:, None].double() * total
        greedy = u[:, None] < 0
        block = torch.where(greedy, top.argmax(1, keepdim=True), _first_above(cdf, target, total))
    # Then inside the block that is hit: (N, BLOCK).
    block_logits = x.gather(1, block[..., None].expand(-1, 1, BLOCK))[:, 0]
    if u is None:
        offset = block_logits.argmax(1, keepdim=True)
    else:
        p = (block_logits - top.gather(1, block)).exp().double() * scale.gather(1, block)
        target = (target - (cdf - block_sums).gather(1, block)).clamp(min=0)  # rounding: not below
        offset = torch.where(
            greedy,
            block_logits.argmax(1, keepdim=True),
            _first_above(p.cumsum(1), target, p.sum(1, keepdim=True)),
        )
    logp = block_logits.gather(1, offset) - highest - total.log().float()
    return (block * BLOCK + offset)[:, 0], logp[:, 0]


def _first_above(cdf, target, total) -> torch.Tensor:
    """Return the index (N, 1) of the first entry of a rising cdf (N, K) above target (N, 1).

    Rounding may make target equal to total (N, 1), the end of the cdf: it is then lowered.
    """
    return (cdf <= target.minimum(total * (1 - 1e-13))).sum(1, keepdim=True)


class StopText:
    """Test for a template's stop texts, and for EOS.

    An answer ends at the first token after which its decoded text, without line breaks, ends with a
    stop text: the rule of the original's inference and of `sa2va_hf.prediction.StopWords`. A stop
    text is plain BPE text, whose ids depend on what precedes it. So the stop texts are an automaton
    over bytes (Aho-Corasick) whose state is the longest tail of the answer that begins one of them.
    Where a whole token leads from each state is computed once, so a step is one look-up, without a
    sync.

    Args:
        tokenizer: byte-level BPE, or one of sentencepiece with byte fallback.
        vocab_size: of the model, which may have more rows than its tokenizer has tokens; those
            decode to nothing.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", stop_texts: list[str], vocab_size: int
    ):
        # States from `first_stop_state` on are reached only after a stop text.
        automaton, self.first_stop_state = _automaton([text.encode() for text in stop_texts])
        table = _over_tokens(automaton, _token_bytes(tokenizer, vocab_size))
        self.table = torch.from_numpy(table)  # (V, S) long
        self.eos_id = tokenizer.eos_token_id

    def to(self, device: torch.device | str) -> "StopText":
        """Move the table to `device` and return self."""
        self.table = self.table.to(device)
        return self

    def step(self, state: torch.Tensor, token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the state (N,) after token (N,), and whether the token ends the answer (N,) bool.

        The state before the first token is 0.
        """
        state = self.table[token, state]
        done = state >= self.first_stop_state
        return state, done if self.eos_id is None else done | (token == self.eos_id)


@dataclass(frozen=True)
class SamplingParams:
    """Settings of a call of `Engine.generate`, which describes them."""

    num_generations: int
    max_new_tokens: int
    stop: StopText | None
    pad_id: int
    temperature: float
    uniforms: torch.Tensor | None  # (N, max_new_tokens)


def _automaton(texts: list[bytes]) -> tuple[np.ndarray, int]:
    """Return the next state (S, 256), and the first of the states, at the end, behind a text.

    State 0 is the start. A line break changes nothing, except where it splits a character.
    """
    prefixes = {text[:n] for text in texts for n in range(len(text) + 1)} | {b""}
    behind = {prefix: prefix.endswith(tuple(texts)) for prefix in prefixes}
    order = sorted(prefixes, key=lambda prefix: (behind[prefix], len(prefix), prefix))
    state = {prefix: i for i, prefix in enumerate(order)}
    step = np.empty((len(order), 256), dtype=np.int64)
    for prefix, byte in ((p, b) for p in order for b in range(256)):
        seen = prefix + bytes([byte])
        if byte in b"\r\n":
            seen = prefix if "\ufffd" not in prefix.decode(errors="replace") else b""
        # The longest tail of what was seen that begins a text; at least b"" does.
        step[state[prefix], byte] = next(
            state[seen[i:]] for i in range(len(seen) + 1) if seen[i:] in state
        )
    return step, len(order) - sum(behind.values())


def _token_bytes(tokenizer, vocab_size: int) -> list[bytes]:
    """Return the bytes that each id adds to the decoded text.

    Byte-level pieces add the bytes of their alphabet; those of sentencepiece have ▁ for a space and
    `<0x0A>` for a byte. Added tokens are spelt as they are.
    """
    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
    pieces = [piece or "" for piece in tokenizer.convert_ids_to_tokens(range(len(tokenizer)))]
    # Rows of the embedding beyond the tokenizer: they add no text.
    pieces += [""] * (vocab_size - len(tokenizer))
    if "<0x00>" in pieces:  # of sentencepiece
        bytes_of = [BYTE_PIECE.fullmatch(piece) for piece in pieces]
        return [
            bytes([int(byte[1], 16)]) if byte else piece.replace("▁", " ").encode()
            for piece, byte in zip(pieces, bytes_of)
        ]
    return [
        bytes(map(byte_of.get, piece)) if set(piece) <= byte_of.keys() else piece.encode()
        for piece in pieces
    ]


def _over_tokens(automaton: np.ndarray, tokens: list[bytes]) -> np.ndarray:
    """Return the state (V, S) after each whole token from each state."""
    table = np.tile(np.arange(len(automaton)), (len(tokens), 1))
    lengths = np.array([len(token) for token in tokens])
    for position in range(lengths.max(initial=0)):
        # All tokens advance by one byte at a time, from all states at once.
        longer = np.flatnonzero(lengths > position)
        byte = np.array([tokens[i][position] for i in longer])
        table[longer] = automaton[table[longer], byte[:, None]]
    return table
