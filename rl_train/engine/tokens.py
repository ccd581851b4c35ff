"""What both samplers share: the draw of a token, the test for the stop text, and the record that they return.

Letters: N rows, T new tokens, C width, V vocabulary, S states of the stop text's automaton.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers.pre_tokenizers import ByteLevel

BLOCK = 512  # classes whose probabilities are summed together before the search among them


@dataclass
class Completions:
    ids: torch.Tensor  # (N, T) long, pad after a row's end
    logp: torch.Tensor  # (N, T) float32 log-probs under the distribution they were drawn from
    valid: torch.Tensor  # (N, T) bool, up to and including the token that completes the stop text
    stopped: torch.Tensor  # (N,) bool, False = cut at the length limit
    hidden: (
        torch.Tensor
    )  # (N, T, C) last hidden state at each completion token as input; zero where never fed


def draw(
    logits: torch.Tensor, temperature: float, u: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(token (N,), its log-prob (N,)) from logits (N, V), by inverse CDF at u (N,) in [0, 1); the likeliest token if u is None."""
    logp = torch.log_softmax(logits.float() / temperature, dim=-1)
    token = logp.argmax(-1) if u is None else inverse_cdf(logp, u)
    return token, logp.gather(1, token[:, None])[:, 0]


def inverse_cdf(logp: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """(N,) index of the first class whose cumulative probability exceeds u (N,) of the total.

    Sums are float64, over blocks first and then inside the one block that is hit: a float64 scan of the whole vocabulary
    costs more on a GPU than the rest of the sampling. A class without probability is never drawn.
    """
    p = logp.exp()
    if p.shape[1] % BLOCK:
        p = F.pad(p, (0, -p.shape[1] % BLOCK))
    p = p.unflatten(1, (-1, BLOCK))  # (N, V / BLOCK, BLOCK)
    outer = p.sum(-1, dtype=torch.float64).cumsum(-1)  # (N, V / BLOCK)
    target = u.double()[:, None] * outer[:, -1:]
    block = _first_above(outer, target)  # (N, 1)
    before = F.pad(outer, (1, 0)).gather(1, block)
    inner = (
        p.gather(1, block[..., None].expand(-1, 1, BLOCK))[:, 0].double().cumsum(-1)
    )  # (N, BLOCK)
    return (block * BLOCK + _first_above(inner, target - before))[:, 0]


def _first_above(cdf, target):
    """(N, 1) index of the first entry of a rising cdf (N, K) above target (N, 1), at most that of the last rise."""
    return torch.minimum(
        (cdf <= target).sum(-1, keepdim=True), (cdf < cdf[:, -1:]).sum(-1, keepdim=True)
    )


class StopText:
    """Test for the template's stop text, which is plain BPE text whose ids depend on what precedes it, and for EOS.

    The stop texts are an automaton over bytes (Aho-Corasick) whose state is the longest tail of the answer that begins
    one of them. Where a whole token leads from each state is computed once, so a step is one look-up, without a sync.
    Like a search in the decoded text, it finds a stop text that is spread over many tokens or lies inside one.

    Args:
        tokenizer: byte-level BPE.
        vocab_size: of the model, which may have more rows than its tokenizer has tokens; those decode to nothing.
    """

    def __init__(self, tokenizer, stop_texts: list[str], vocab_size: int):
        automaton = _automaton([text.encode() for text in stop_texts])  # (S, 256)
        self.found = len(automaton) - 1
        self.table = torch.from_numpy(
            _over_tokens(automaton, _token_bytes(tokenizer, vocab_size))
        )  # (V, S) long
        self.eos_id = tokenizer.eos_token_id

    def to(self, device) -> "StopText":
        """Itself, its table moved to `device`."""
        self.table = self.table.to(device)
        return self

    def start(self, num_rows: int) -> torch.Tensor:
        """(N,) state before the first token."""
        return torch.zeros(num_rows, dtype=torch.long, device=self.table.device)

    def step(self, state: torch.Tensor, token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(state (N,) after token (N,), (N,) bool: does the answer end with it?)"""
        state = self.table[token, state]
        done = state == self.found
        return state, done if self.eos_id is None else done | (token == self.eos_id)

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """(N,) bool: does the completion `ids` (N, t) of each row end here?"""
        state = self.start(len(ids))
        for token in ids.to(state.device).T:
            state, done = self.step(state, token)
        return done.to(ids.device)


def _automaton(texts: list[bytes]) -> np.ndarray:
    """(S, 256) next state; state 0 is the start, S-1 the find, which is never left."""
    prefixes = sorted({text[:n] for text in texts for n in range(len(text))} | {b""}, key=len)
    state = {prefix: i for i, prefix in enumerate(prefixes)}
    step = np.full((len(prefixes) + 1, 256), len(prefixes))
    for prefix, byte in ((p, b) for p in prefixes for b in range(256)):
        seen = prefix + bytes([byte])
        if not any(seen.endswith(text) for text in texts):
            step[state[prefix], byte] = next(
                state[seen[i:]] for i in range(len(seen) + 1) if seen[i:] in state
            )
    return step


def _token_bytes(tokenizer, vocab_size: int) -> list[bytes]:
    """What each id adds to the decoded text: byte-level pieces by their alphabet, added tokens as they are spelt."""
    byte_of = _byte_of_character()
    pieces = tokenizer.convert_ids_to_tokens(range(len(tokenizer))) + [None] * (
        vocab_size - len(tokenizer)
    )
    return [
        b""
        if piece is None
        else bytes(map(byte_of.__getitem__, piece))
        if all(c in byte_of for c in piece)
        else piece.encode()
        for piece in pieces
    ]


def _byte_of_character() -> dict[str, int]:
    """The byte that each character of byte-level BPE stands for: printable ones for themselves, the others in order from U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    found = {chr(byte): byte for byte in printable} | {
        chr(0x100 + i): byte for i, byte in enumerate(others)
    }
    assert set(found) == set(ByteLevel.alphabet())
    return found


def _over_tokens(automaton: np.ndarray, tokens: list[bytes]) -> np.ndarray:
    """(V, S) state after each whole token from each state."""
    table = np.tile(np.arange(len(automaton)), (len(tokens), 1))
    lengths = np.array([len(token) for token in tokens])
    for position in range(lengths.max(initial=0)):
        longer = np.flatnonzero(lengths > position)
        byte = np.array([tokens[i][position] for i in longer])
        table[longer] = automaton[table[longer], byte[:, None]]
    return table
