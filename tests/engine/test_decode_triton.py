"""Each Triton kernel of a decode step computes what plain torch does."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from rl_train.engine import decode_torch
from rl_train.engine.layers import NormOperands
from rl_train.engine.sampling import StopText

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "prompts, group, heads, slots, rank, heads_norm",
    [
        (2, 4, 4, 128, 4, True),
        (1, 1, 4, 384, 0, False),
        (4, 8, 16, 512, 128, False),
        (16, 8, 16, 1024, 128, True),
        (6, 12, 16, 384, 16, False),
    ],
)
def test_triton_equals_torch(dtype, prompts, group, heads, slots, rank, heads_norm):
    """Each kernel against plain torch in float32, on the same numbers of `dtype`.

    One prompt is empty.
    """
    from rl_train.engine import decode_triton

    n, kv, size, inner, suffix = (
        prompts * group,
        2,
        128 if heads == 16 else 32,
        352 if rank else 360,
        64,
    )  # 360: not in two summands
    width, qkv, mlp = heads * size, (heads + 2 * kv) * size, 352 if group < 8 else 384
    generator = torch.Generator("cuda").manual_seed(0)

    def make(*shape):
        return (0.5 * torch.randn(*shape, device="cuda", generator=generator)).to(dtype)

    def linears(*sizes, inner=0, bias=False):
        out = sum(sizes)
        return SimpleNamespace(
            weight=make(out + rank, inner),
            bias=make(out + len(sizes) * rank) if bias else None,
            lora_b=make(out, rank) if rank else None,
            scaling=2.0,
            sizes=list(sizes),
        )

    def exactly(value):
        """A copy, of `dtype` in float32."""
        if isinstance(value, SimpleNamespace):
            return SimpleNamespace(**{name: exactly(v) for name, v in vars(value).items()})
        if isinstance(value, tuple):
            return tuple(NormOperands(exactly(norm.weight), norm.eps) for norm in value)
        if not torch.is_tensor(value):
            return value
        return value.float().clone() if value.dtype == dtype else value.clone()

    step, pad = (
        torch.tensor([37], device="cuda"),
        torch.tensor([5, slots, 0, slots - 3] * 4, dtype=torch.int32, device="cuda")[:prompts],
    )
    power, position = (
        0.1 + torch.rand(n, width // 32, device="cuda", generator=generator),
        torch.arange(n, device="cuda") % 90,
    )
    done = torch.arange(n, device="cuda") % 3 == 1  # of the second prompt's rows all
    done[n // prompts : 2 * n // prompts] = True
    stored = make(n, kv, suffix, size), make(n, kv, suffix, size)
    cases = dict(
        embed=(torch.arange(n, device="cuda") % 50, make(50, width), make(width)),
        add=(make(n, width), make(n, inner), linears(width, inner=inner), make(width)),
        normed=(make(n, width), power, 1e-6),
        rotate_and_store=(
            make(n, qkv + 3 * rank),
            power,
            1e-6,
            linears(heads * size, kv * size, kv * size, bias=rank > 0),
            make(100, size // 2),
            make(100, size // 2),
            position,
            *stored,
            step,
            tuple(NormOperands(make(size), 1e-6) for _ in "qk") if heads_norm else (),
        ),
        attend=(
            make(n, heads, size),
            make(prompts, kv, slots, size),
            make(prompts, kv, slots, size),
            *stored,
            pad,
            done,
            step,
        ),
        gate=(make(n, 2 * mlp + 2 * rank), power, 1e-6, linears(mlp, mlp)),
    )
    changed = dict(add=slice(0, 1), rotate_and_store=slice(7, 9))  # arguments that are written to
    for name, arguments in cases.items():
        exact = [exactly(argument) for argument in arguments]
        results = []
        for ops, given in ((decode_torch, exact), (decode_triton, arguments)):
            found = getattr(ops, name)(*given)
            found = list(found) if isinstance(found, tuple) else [found]
            if name in ("embed", "add"):
                found[-1] = found[-1].sum(1)  # shares of any number
            if name == "attend":
                assert found[0].isfinite().all()
                found[0] = found[0][~done]  # what nobody reads
            results.append(found + list(given[changed.get(name, slice(0))]))
        for e, f in zip(*results, strict=True):
            assert (f.float() - e).abs().max() <= (
                1e-5 if dtype == torch.float32 else 2e-2
            ) * e.abs().max(), name


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
    stop = SimpleNamespace(stopped=1, eos_id=3, table=table)
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
