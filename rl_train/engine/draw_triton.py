"""The draw of a token by two Triton kernels, and its record: the function `decode_torch.choose`.

Letters: N rows, V vocabulary.
"""

import torch
import triton
import triton.language as tl

from rl_train.engine.tokens import BLOCK

BLOCKS = 8  # of the vocabulary that a program sums up


@triton.jit
def _read_block(logits, row, column, stride, vocab, temperature):
    """Logits of a row divided by the temperature, as float32; -inf beyond the vocabulary."""
    at = logits + row * stride + column
    return tl.load(at, mask=column < vocab, other=float("-inf")).to(tl.float32) / temperature


@triton.jit
def _summarise(
    logits,
    tops,
    sums,
    stride,
    vocab,
    temperature,
    num_blocks,
    NUM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each BLOCK's highest logit, and the sum of its exponentials relative to that."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1) * NUM + tl.arange(0, NUM)
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = _read_block(logits, row, column, stride, vocab, temperature)
    top = tl.maximum(tl.max(x, axis=1), -1e30)  # not -inf: the difference of two is then a number
    total = tl.sum(tl.exp(x - top[:, None]).to(tl.float64), axis=1)
    at = row * num_blocks + block
    tl.store(tops + at, top, mask=block < num_blocks)
    tl.store(sums + at, total, mask=block < num_blocks)


@triton.jit
def _first_above(cdf, share, target, SIZE: tl.constexpr):
    """Index of the first entry of a rising cdf (SIZE,) above target.

    At most that of the last one with a share of its own.
    """
    index = tl.arange(0, SIZE)
    return tl.minimum(tl.sum((cdf <= target).to(tl.int32)), tl.max(tl.where(share > 0, index, 0)))


@triton.jit
def _choose(
    logits,
    tops,
    sums,
    uniforms,
    step,
    token,
    ids,
    logps,
    valid,
    done,
    state,
    table,
    stride,
    vocab,
    temperature,
    num_blocks,
    num_tokens,
    pad,
    eos,
    stopped_state,
    num_states,
    GREEDY: tl.constexpr,
    STOPS: tl.constexpr,
    NUM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A token of each row: the block by the blocks' sums, then the token in it; and its record."""
    row, block, inside = tl.program_id(0).to(tl.int64), tl.arange(0, NUM), tl.arange(0, BLOCK)
    there = block < num_blocks
    at = row * num_tokens + tl.load(step)
    over = tl.load(done + row)
    top = tl.load(tops + row * num_blocks + block, mask=there, other=-1e30)
    highest = tl.max(top)
    share = tl.load(sums + row * num_blocks + block, mask=there, other=0.0)
    share = share * tl.exp(top - highest).to(tl.float64)
    total = tl.sum(share)
    if GREEDY:
        hit = tl.argmax(top, axis=0)
    else:
        target = tl.load(uniforms + at) * total
        hit = _first_above(tl.cumsum(share), share, target, NUM)
        target -= tl.sum(tl.where(block < hit, share, 0.0))
    own_top = tl.max(tl.where(block == hit, top, -1e30))
    x = _read_block(logits, row, hit * BLOCK + inside, stride, vocab, temperature)
    if GREEDY:
        place = tl.argmax(x, axis=0)
    else:
        # Their sum is this block's, to the last bit but the order.
        p = tl.exp(x - own_top).to(tl.float64)
        target = target / tl.exp(own_top - highest).to(tl.float64)
        place = _first_above(tl.cumsum(p), p, target, BLOCK)
    chosen = tl.where(over, pad, hit * BLOCK + place).to(tl.int64)
    logp = tl.sum(tl.where(inside == place, x, 0.0)) - highest - tl.log(total).to(tl.float32)
    tl.store(token + row, chosen)
    tl.store(ids + at, chosen)
    tl.store(logps + at, tl.where(over, 0.0, logp))
    tl.store(valid + at, ~over)
    if STOPS:
        after = tl.load(table + chosen * num_states + tl.load(state + row))
        tl.store(state + row, after)
        tl.store(done + row, over | (after >= stopped_state) | (chosen == eos))


def choose(rows, logits):
    stop, n = rows.stop, len(logits)
    num_blocks = triton.cdiv(rows.vocab, BLOCK)
    tops = logits.new_empty(n, num_blocks, dtype=torch.float32)
    sums = logits.new_empty(n, num_blocks, dtype=torch.float64)
    numbers = logits.stride(0), rows.vocab, rows.temperature, num_blocks
    _summarise[(n, triton.cdiv(num_blocks, BLOCKS))](
        logits, tops, sums, *numbers, NUM=BLOCKS, BLOCK=BLOCK, num_warps=8
    )
    record = rows.token, rows.ids, rows.logp, rows.valid, rows.done, rows.state
    ends = -1, 0, 0
    if stop:
        eos = -1 if stop.eos_id is None else stop.eos_id
        ends = eos, stop.stopped, rows.table.shape[1]
    _choose[(n,)](
        *(logits, tops, sums, rows.uniforms, rows.step, *record, rows.table),
        *(*numbers, rows.uniforms.shape[1], rows.pad_id, *ends),
        GREEDY=rows.greedy,
        STOPS=stop is not None,
        NUM=triton.next_power_of_2(num_blocks),
        BLOCK=BLOCK,
    )
