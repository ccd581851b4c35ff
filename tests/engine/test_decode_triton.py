"""Each Triton kernel of a decode step computes what plain torch does."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from rl_train.engine import decode_torch, layers
from rl_train.engine.decode_torch import TokenCache
from rl_train.engine.layers import Linears, Norm
from rl_train.engine.sampling import StopText

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "prompts, group, heads, slots, suffix, rank, heads_norm, num_loras",
    [
        (2, 4, 4, 128, 64, 4, True, 1),
        (1, 1, 4, 384, 192, 0, False, 1),
        (4, 8, 16, 512, 640, 128, False, 1),
        (16, 8, 16, 1024, 64, 128, True, 1),
        (6, 12, 16, 384, 1536, 16, False, 1),
        (4, 8, 4, 128, 64, 4, True, 2),
        (8, 8, 16, 512, 640, 128, False, 2),
        (8, 12, 16, 384, 192, 16, True, 2),
        (2, 4, 40, 128, 64, 24, False, 1),
        (8, 8, 14, 512, 64, 80, False, 2),
    ],
)
def test_triton_equals_torch(
    dtype, prompts, group, heads, slots, suffix, rank, heads_norm, num_loras
):
    """Each kernel against plain torch in float32, on the same numbers of `dtype`.

    One prompt is empty. Rows' own slots begin behind empty ones. Of two LoRAs each half of the rows
    has one.
    """
    from rl_train.engine import decode_triton
    from rl_train.engine.linear_triton import complete

    def close(found, expected):
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        assert (found.float() - expected).abs().max() <= tolerance * expected.abs().max()

    n, kv, size, inner = (
        prompts * group,
        2,
        128 if heads == 16 else 32,
        352 if rank else 360,
    )  # 360: not in two summands
    width, mlp = heads * size, 352 if group < 8 else 384
    generator = torch.Generator("cuda").manual_seed(0)

    def make(*shape):
        return (0.5 * torch.randn(*shape, device="cuda", generator=generator)).to(dtype)

    def linears(*sizes, inner, bias=False):
        num_outputs, num_inner = sum(sizes), num_loras * rank * len(sizes)
        joined_b = make(num_loras, num_outputs, rank) if rank else [None]
        return Linears(
            weight=make(num_outputs + num_inner, inner),
            # LoRA's A have no bias.
            bias=F.pad(make(num_outputs), (0, num_inner)) if bias else None,
            sizes=list(sizes),
            scaling=2.0,
            b=joined_b[0].split(sizes) if rank else (),
            joined_b=joined_b if num_loras > 1 else joined_b[0],
            second_b=joined_b[1].split(sizes) if num_loras > 1 else (),
        )

    def exactly(value):
        """A copy, of `dtype` in float32."""
        if isinstance(value, (tuple, list)):
            copies = [exactly(v) for v in value]
            return type(value)(*copies) if hasattr(value, "_fields") else type(value)(copies)
        if not torch.is_tensor(value):
            return value
        return value.float().clone() if value.dtype == dtype else value.clone()

    newest = suffix * 2 // 3  # slot of the newest token
    slot, pad = (
        torch.tensor([newest], device="cuda"),
        torch.tensor([5, slots, 0, slots - 3] * 4, dtype=torch.int32, device="cuda")[:prompts],
    )
    own_pad = torch.arange(n, dtype=torch.int32, device="cuda") * 11 % (newest + 1)
    position = torch.arange(n, device="cuda") % 90
    done = torch.arange(n, device="cuda") % 3 == 1  # of the second prompt's rows all
    done[n // prompts : 2 * n // prompts] = True
    shared = [make(prompts, kv, slots, size) for _ in "kv"]
    own = (make(n, kv, suffix, size) for _ in "kv")
    cache = TokenCache(*shared, *own, pad, own_pad, done, slot)
    angles = make(100, size // 2), make(100, size // 2), position
    norms = tuple(Norm(make(size), 1e-6) for _ in "qk") if heads_norm else ()
    residual, mixed, weights = make(n, width), make(n, inner), Norm(make(width), 1e-6)
    out, gate_up = linears(width, inner=inner), linears(mlp, mlp, inner=width)
    qkv = linears(heads * size, kv * size, kv * size, inner=width, bias=rank > 0)

    # Each part by the kernels, and by plain torch in float32 on what the kernels were given.
    normed = decode_triton.norm(decode_triton.Residual(residual), weights)  # nothing is added
    close(decode_triton._finish(*normed), layers.norm(exactly(residual), exactly(weights)))
    product = decode_triton.linear(mixed, out)
    close(complete(product)[0], decode_torch.linear(exactly(mixed), exactly(out))[0])
    before = exactly(residual)
    x = decode_triton.add(decode_triton.Residual(residual), product)
    normed = decode_triton.norm(x, weights)
    assert x.pending is None
    close(x.value, before + exactly(complete(product)[0]))
    close(decode_triton._finish(*normed), layers.norm(exactly(x.value), exactly(weights)))
    # Both kernels that read a product of a norm.
    exact = layers.norm(exactly(x.value), exactly(weights))
    projected = decode_triton.linear(normed, gate_up)
    close(
        torch.cat(complete(projected), 1),
        torch.cat(decode_torch.linear(exact, exactly(gate_up)), 1),
    )
    close(decode_triton.gate(projected), layers.gate(exactly(complete(projected))))
    projected, expected_cache = decode_triton.linear(normed, qkv), exactly(cache)
    close(torch.cat(complete(projected), 1), torch.cat(decode_torch.linear(exact, exactly(qkv)), 1))
    rotation = decode_triton.rotation(*angles)
    q, *stored = decode_triton.heads(cache, projected, norms, rotation)
    assert stored == [None, None]
    rotation = decode_torch.rotation(*exactly(angles))
    expected = layers.heads(exactly(complete(projected)), exactly(norms), rotation)
    close(q, expected[0])
    decode_torch.attend(expected_cache, *expected)  # stores k and v
    close(cache.keys, expected_cache.keys)
    close(cache.values, expected_cache.values)
    q = make(n, heads, size)
    attended = decode_triton.attend(cache, q, None, None)
    assert attended.isfinite().all()
    expected = decode_torch.attend(exactly(cache), exactly(q), None, None)
    close(attended[~done], expected[~done])  # of the others nobody reads


@pytest.mark.parametrize("vocab", [151_679, 512, 513, 40])
def test_choose_compiled_equals_torch(vocab):
    """The same token wherever the number lies inside a token's interval, and the same record.

    Never one that is no token or has no probability.
    """
    from rl_train.engine import decode_triton

    torch._dynamo.reset()  # so that each vocabulary is compiled for itself, as in a run
    n, num_tokens, column, stops = 64, 3, 1, vocab // 4
    generator = torch.Generator("cuda").manual_seed(0)
    logits = 3 * torch.randn(n, vocab + -vocab % 64 + 64, device="cuda", generator=generator)
    logits[:, 7] = float("-inf")
    logits[1::2, 3] += 40  # nearly certain
    p = torch.softmax(logits[:, :vocab].double() / 1.3, -1)
    table = torch.arange(2, device="cuda").repeat(vocab, 1)
    table[stops : 2 * stops] = 1  # tokens that end the answer
    stop = SimpleNamespace(first_stop_state=1, eos_id=3, table=table)
    stop.step = lambda state, token: StopText.step(stop, state, token)

    def rows(uniforms, greedy=False, stop=stop):
        new = partial(torch.zeros, n, num_tokens, device="cuda")
        done = torch.arange(n, device="cuda") % 5 == 0
        return SimpleNamespace(
            vocab=vocab,
            temperature=1.3,
            greedy=greedy,
            uniforms=uniforms,
            step=torch.tensor([column], device="cuda"),
            stop=stop,
            table=stop and stop.table,
            pad_id=5,
            ids=new(dtype=torch.long),
            logp=new(),
            valid=new(dtype=torch.bool),
            done=done,
            token=torch.zeros_like(done, dtype=torch.long),
            state=torch.zeros_like(done, dtype=torch.long),
        )

    def chosen(ops, *how, **options):
        found = rows(*how, **options)
        ops.choose(found, logits.clone())
        return found

    uniforms = torch.rand(n, num_tokens, device="cuda", generator=generator, dtype=torch.float64)
    for place in (0.25, 0.75):
        wanted = torch.multinomial(p, 1, generator=generator)
        uniforms[:, column] = (p.cumsum(-1).gather(1, wanted) - (1 - place) * p.gather(1, wanted))[
            :, 0
        ]
        certain = (p.gather(1, wanted)[:, 0] > 1e-5).nonzero()[:, 0]
        assert len(certain) > n // 4
        for how in (dict(), dict(stop=None)):
            mine, theirs = (chosen(ops, uniforms, **how) for ops in (decode_triton, decode_torch))
            for name in ("token", "ids", "valid", "done", "state"):
                assert torch.equal(getattr(mine, name)[certain], getattr(theirs, name)[certain]), (
                    name
                )
            torch.testing.assert_close(mine.logp[certain], theirs.logp[certain], atol=1e-4, rtol=0)
            alive = certain[~rows(uniforms).done[certain]]
            assert (
                torch.equal(mine.token[alive], wanted[alive, 0])
                and (mine.ids[:, column] == mine.token).all()
            )
            assert (
                not mine.ids[:, ~(torch.arange(num_tokens) == column)].any()
                and (mine.token[::5] == 5).all()
            )
    for u in (0.0, 1 - 2**-53):
        token = chosen(decode_triton, torch.full_like(uniforms, u)).token
        assert (token < vocab).all() and (token != 7).all()
    alive = ~rows(uniforms).done
    token = chosen(decode_triton, uniforms, greedy=True).token
    assert torch.equal(logits.gather(1, token[:, None])[alive, 0], logits[alive, :vocab].amax(1))
