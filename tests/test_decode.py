"""The fast sampler draws what the plain one draws: tokens alike, numbers to rounding, whatever the sizes and the weights."""
import copy
import importlib
from argparse import Namespace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rl_train import checkpoint, decode_torch, forward, logprob, rollout, sampler
from rl_train.decode import Decoder
from rl_train.fused import unsupported
from rl_train.logprob import hidden_states
from rl_train.packing import TOGETHER, share
from rl_train.policy import load_tokenizer
from rl_train.roles import Roles
from rl_train.rollout import noise
from rl_train.sampler import decoder_of, generate_plain
from rl_train.tokens import StopText, _token_bytes, draw
from sa2va_hf import Sa2VAModel
from tools.make_demo import SHIPPED_CHECKPOINT

STEPS = 20


def randomise(policy, seed=0, std=0.02):
    """Give the LoRA's B, which starts at zero, a value."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.trainable.items():
            if "lora_B" in name:
                parameter += std * torch.randn(parameter.shape, generator=generator).to(parameter)


@pytest.fixture(scope="module")
def model(policy):
    model = policy()
    randomise(model)
    return model


@pytest.fixture(scope="module")
def images(model, batch):
    return model.encode_images(batch.pixel_values, batch.sam_pixels, batch.sizes)


@pytest.fixture(scope="module")
def decoder(model):
    return Decoder(model.model.language_model)


class Centred:
    """`draw` that moves each number of `uniforms` to the middle half of the interval of the token it draws, and so away from the next one.

    The numbers of the two samplers differ by rounding. Of a thousand tokens one is drawn within 1e-6 of another, and would differ.
    """

    def __init__(self, uniforms):
        self.uniforms, self.step = uniforms, 0

    def __call__(self, logits, temperature, u):
        token, logp = draw(logits, temperature, u)
        if u is not None:
            p = torch.softmax(logits.double() / temperature, -1)
            high, width = (t.gather(1, token[:, None])[:, 0] for t in (p.cumsum(-1), p))
            self.uniforms[:, self.step] = high - width + width * ((u - high + width) / width).clamp(0.25, 0.75)
            self.step += 1
        return token, logp


@torch.no_grad()
def both(policy, decoder, images, batch, which=(0, 1, 2), num_generations=4, steps=STEPS, temperature=1.7, greedy=False, segment=False,
         seed=0):
    """(fast, plain) completions of the same prompts, uniforms and weights."""
    prompts = (policy.segment_prompts(images, list(which), [batch.captions[i] for i in which]) if segment else
               policy.describe_prompts(images, list(which), [batch.grids[i] for i in which]))
    embeds, mask = policy.embed(images, prompts)
    uniforms = None if greedy else noise(seed, 0, 0, list(which), num_generations, steps, 0)[0].to(embeds.device)
    lm, how = policy.model.language_model, dict(
        num_generations=num_generations, max_new_tokens=steps, stop=policy.stop.to(embeds.device), pad_id=policy.pad_id,
        temperature=temperature, uniforms=uniforms)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "draw", Centred(uniforms))               # writes into `uniforms`, which the fast one then takes
        plain = generate_plain(lm, embeds, mask, **how)
    return decoder.generate(lm, embeds, mask, **how), plain


def assert_same(fast, plain):
    assert torch.equal(fast.ids, plain.ids) and torch.equal(fast.valid, plain.valid) and torch.equal(fast.stopped, plain.stopped)
    torch.testing.assert_close(fast.logp, plain.logp, atol=1e-4, rtol=0)
    fed = plain.valid[:, 1:]                                            # tokens of which the next one was sampled
    torch.testing.assert_close(fast.hidden[:, :-1][fed], plain.hidden[:, :-1][fed], atol=1e-4, rtol=0)
    assert not fast.hidden[:, -1].any()


@pytest.mark.parametrize("how", [
    dict(), dict(num_generations=1), dict(temperature=1.0), dict(greedy=True, num_generations=1), dict(which=[1]), dict(steps=1),
    dict(steps=2), dict(which=[0, 1, 2, 3], num_generations=3, steps=70), dict(segment=True, temperature=1.0), dict(temperature=3.0, steps=48)], ids=str)
def test_fast_equals_plain(model, decoder, images, batch, how):
    """Ragged prompts, several sizes one after the other through one decoder."""
    fast, plain = both(model, decoder, images, batch, **how)
    assert_same(fast, plain)


def test_rows_stop_at_different_times_and_at_the_limit(model, decoder, images, batch):
    fast, plain = both(model, decoder, images, batch, steps=48, temperature=1.0)
    assert_same(fast, plain)
    assert len({int(v.sum()) for v in fast.valid}) > 2 and fast.stopped.any()
    fast, _ = both(model, decoder, images, batch, steps=5)
    assert fast.valid.all() and not fast.stopped.any() and fast.ids.shape[1] == 5


def test_all_rows_done_ends_early(model, decoder, images, batch):
    fast, plain = both(model, decoder, images, batch, steps=64, segment=True, temperature=0.5)
    assert_same(fast, plain)
    assert fast.stopped.all() and fast.ids.shape[1] < 64


def test_hidden_states_at_seg(model, decoder, images, batch):
    fast, plain = both(model, decoder, images, batch, segment=True, temperature=1.0)
    seg = model.seg_tokens(fast.ids, fast.valid)
    assert seg.any()
    torch.testing.assert_close(fast.hidden[seg], plain.hidden[seg], atol=1e-4, rtol=0)


@pytest.fixture
def fast_on_the_cpu(monkeypatch):
    """The paths that CUDA takes, in plain torch; the number of tokens of each forward."""
    tokens, real = [], forward.hidden_states

    def counted(decoder, embeds, packed, *args, **kwargs):
        tokens.append(int((packed.part >= 0).sum()))
        return real(decoder, embeds, packed, *args, **kwargs)
    monkeypatch.setattr(forward, "hidden_states", counted)
    for module in (sampler, logprob):
        monkeypatch.setattr(module, "decoder_for", lambda language_model, embeds: decoder_of(language_model))
    return tokens


def test_prompts_of_one_image_share_its_forward(model, decoder, images, batch, fast_on_the_cpu):
    """Two regions of one image, one of another, a third of that, ragged: as if each were alone, and the image passes once."""
    grids = list(batch.grids)
    prompts = model.describe_prompts(images, [0, 0, 1, 2, 2, 2], [grids[0], grids[1], grids[2], grids[0], grids[3], grids[0]])
    same, image = model.same(images, prompts), model.model.config.tokens_per_tile
    assert [s > image for s in same] == [False, True, False, False, True, True] and same[0] == same[2] == 0
    embeds, mask = model.embed(images, prompts)
    uniforms = noise(0, 0, 0, list(range(6)), 2, STEPS, 0)[0]
    how = dict(num_generations=2, max_new_tokens=STEPS, stop=model.stop, pad_id=model.pad_id, temperature=1.0, uniforms=uniforms)
    language_model = model.model.language_model
    shared, alone = (decoder.generate(language_model, embeds, mask, same=s, **how) for s in (same, None))
    assert_same(shared, alone)
    assert_same(shared, generate_plain(language_model, embeds, mask, **how))
    assert fast_on_the_cpu == [mask.sum() - sum(same), mask.sum()]
    shared = share(mask, same)
    found = shared.last(forward.hidden_states(decoder, shared.gather(embeds), shared.layout))
    torch.testing.assert_close(found, hidden_states(language_model, embeds, mask)[:, -1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("num_tiles", [1, 6])
def test_the_teacher_shares_images_and_finds_the_same(policy, prepare, scenes, monkeypatch, request, num_tiles):
    """Masks of captions and captions of masks, in both paths; of two chunks, the second of which begins inside an image's prompts."""
    model = policy(max_tiles=num_tiles)
    randomise(model)
    batch = prepare(scenes[:2], model.processor)
    images = model.encode_images(batch.pixel_values, batch.sam_pixels, batch.sizes)
    assert max(images.tiles) > 1 or num_tiles == 1
    monkeypatch.setattr(rollout, "TEACHER_ROWS", 4)
    image, captions = [0, 0, 0, 1, 1, 0], ["a cup", "the small red ball left of it", "a cup", "a hat", "one more", "it"]
    masks = [batch.masks[i].roll(20 * row, 1) for row, i in enumerate(image)]
    ask = lambda: (rollout.segment(model, images, image, captions), rollout.describe(model, batch, images, image, masks, STEPS))  # noqa: E731
    plain_masks, plain_captions = ask()
    tokens = request.getfixturevalue("fast_on_the_cpu")
    fast_masks, fast_captions = ask()
    assert all(torch.equal(a, b) for a, b in zip(fast_masks, plain_masks)) and fast_captions == plain_captions
    assert len(set(plain_captions)) > 1 and any(mask.any() for mask in plain_masks)
    lengths = [len(model.prompts.segment(text, images.tiles[i])) + len(model.prompts.forced_answer) for i, text in zip(image, captions)]
    assert tokens[0] < sum(lengths[:4]) - 2 * images.tiles[0] * model.model.config.tokens_per_tile       # 3 of an image, 1 of another
    assert tokens[1] == sum(lengths[4:]) and len(tokens) == 4                                            # one of each image


def test_what_prompts_have_in_common_ends_with_their_image(model, images, batch):
    """The same caption twice: the whole prompts are equal, but each needs a token of its own; another image: nothing."""
    prompts = model.segment_prompts(images, [1, 1, 3], ["a cup", "a cup", "a cup"])
    same = model.same(images, prompts)
    ids = prompts.ids[1]
    assert same == [0, same[1], 0] and ids[same[1] - 1] == model.model.img_context_id != ids[same[1]]
    assert ids[:same[1]].count(model.model.img_context_id) == model.model.config.tokens_per_tile


def test_no_more_prompts_than_allowed_share_a_sequence():
    shared = share(torch.ones(20, 5, dtype=torch.long), [0] + [3] * 19)
    assert [int(part.max()) for part in shared.layout.part] == [TOGETHER, TOGETHER, 20 - 2 * TOGETHER]
    assert share(torch.ones(3, 5, dtype=torch.long), [0, 3, 2]).layout.part[0, :11].tolist() == [0] * 2 + [1] * 3 + [2] * 3 + [3] * 3


def test_shared_layout():
    """By hand: prompts of 3, 4 and 2 tokens, of which the first two begin with 2 equal ones."""
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1], [0, 0, 1, 1]])
    layout = share(mask, [0, 2, 0])
    assert layout.layout.part.tolist() == [[0, 0, 1, 2, 2, -1, -1, -1], [0, 0, -1, -1, -1, -1, -1, -1]]
    assert layout.layout.position_ids[0, :5].tolist() == [0, 1, 2, 2, 3] and layout.layout.position_ids[1, :2].tolist() == [0, 1]
    assert layout.source[0, :5].tolist() == [1, 2, 3, 6, 7] and layout.source[1, :2].tolist() == [10, 11]
    assert layout.where[mask.bool()].tolist() == [0, 1, 2, 0, 1, 3, 4, 8, 9]
    assert layout.tokens()[mask.bool()].tolist() == [0, 1, 2, 0, 1, 3, 4, 5, 6]


def test_an_optimizer_step_changes_the_rollouts(policy, images, batch):
    """The matrices of the decoder hold a copy of the LoRA: it must be the newest one, and each role's own."""
    model = policy()
    randomise(model)
    decoder, roles = Decoder(model.model.language_model), Roles(model.trainable)
    before, plain = both(model, decoder, images, batch)
    assert_same(before, plain)
    optimizer = torch.optim.AdamW(model.trainable.values(), lr=2e-2)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.trainable.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()
    after, plain = both(model, decoder, images, batch)
    assert_same(after, plain)
    assert before.ids.shape != after.ids.shape or not torch.equal(before.ids, after.ids)
    with roles.use("teacher"):
        teacher, plain = both(model, decoder, images, batch)
        assert_same(teacher, plain)
        assert_same(teacher, before)
    assert_same(both(model, decoder, images, batch)[0], after)


def test_without_a_lora(policy, images, batch):
    model = policy()
    base = model.peft.unload()                                          # injected in place: the same language model, bare again
    assert base is model.model.language_model and unsupported(base) is None
    assert_same(*both(model, Decoder(base), images, batch))


def test_base_parameters_are_views_and_can_be_saved(policy, images, batch, tmp_path):
    """One copy of the weights; the state dict is unchanged, and can be written and read."""
    model = policy()
    before = {k: v.clone() for k, v in model.model.state_dict().items()}
    decoder = Decoder(model.model.language_model)
    (qkv, *_), _, _ = decoder.layers[0]
    q = model.model.language_model.model.layers[0].self_attn.q_proj.base_layer
    assert q.weight.data_ptr() == qkv.weight.data_ptr() and q.bias.data_ptr() == qkv.bias.data_ptr()
    assert all(torch.equal(v, before[k]) for k, v in model.model.state_dict().items())
    with torch.no_grad():
        q.weight.mul_(2)                                                # seen by the decoder
    assert_same(*both(model, decoder, images, batch))
    optimizer = torch.optim.AdamW(model.trainable.values())
    checkpoint.write(tmp_path / "checkpoint_step_0", 0, model, Roles(model.trainable), optimizer,
                     torch.optim.lr_scheduler.ConstantLR(optimizer), Namespace(), [checkpoint.rng_state()])
    checkpoint.load_weights(tmp_path / "checkpoint_step_0", model.trainable)
    model.peft.unload()
    model.model.save_pretrained(tmp_path / "model")
    again, state = Sa2VAModel.from_pretrained(tmp_path / "model").state_dict(), model.model.state_dict()
    assert again.keys() == state.keys() and all(torch.equal(v, state[k]) for k, v in again.items())
    assert (tmp_path / "model" / "model.safetensors").stat().st_size < 1.05 * sum(v.nbytes for v in state.values())


def test_moved_weights_are_noticed(policy):
    lm = policy().model.language_model
    decoder = decoder_of(lm)
    assert decoder_of(lm) is decoder and not decoder.stale(lm)
    lm.double().float()
    assert decoder.stale(lm) and decoder_of(lm) is not decoder and not decoder_of(lm).stale(lm)


def test_another_lora_is_noticed(policy, images, batch):
    """One that is taken away must not go on being added."""
    model = policy()
    randomise(model)
    lm = model.model.language_model
    decoder = decoder_of(lm)
    lm.model.layers[1].mlp.down_proj.scaling["default"] *= 2
    assert decoder.stale(lm) and decoder_of(lm) is not decoder
    decoder = decoder_of(lm)
    model.peft.unload()
    assert decoder.stale(lm)
    assert_same(*both(model, decoder_of(lm), images, batch))


def test_a_lora_that_is_off_or_merged_is_noticed(policy):
    """And a head or an embedding that is another: each would else be computed as before, without a word."""
    model = policy()
    lm = model.model.language_model
    assert decoder_of(lm) is not None
    with model.peft.disable_adapter():
        assert decoder_of(lm) is None
    assert decoder_of(lm) is decoder_of(lm) is not None
    lora = lm.model.layers[1].self_attn.o_proj
    lora.merge()
    assert decoder_of(lm) is None
    lora.unmerge()
    for owner, name in ((lm, "lm_head"), (lm.model, "embed_tokens")):
        decoder = decoder_of(lm)
        setattr(owner, name, copy.deepcopy(getattr(owner, name)))
        assert decoder.stale(lm) and decoder_of(lm) is not decoder


def test_a_bias_that_the_decoder_does_not_add_is_refused(policy):
    lm = policy().model.language_model
    lm.model.layers[1].mlp.down_proj.base_layer.bias = torch.nn.Parameter(torch.ones(lm.config.hidden_size), requires_grad=False)
    assert "layer 1: a bias" in unsupported(lm)


def test_what_the_decoder_does_not_know_is_refused(policy):
    model = policy()
    lm = model.model.language_model
    assert unsupported(lm) is None
    assert "not Qwen2ForCausalLM" in unsupported(lm.model)
    with model.peft.disable_adapter():
        assert "disabled" in unsupported(lm)
    lora = lm.model.layers[2].self_attn.k_proj
    lora.scaling["default"] *= 2
    assert "layer 2: LoRA of different rank or scale" in unsupported(lm)
    lm.model.layers[2].self_attn.k_proj = lora.base_layer
    assert "layer 2: LoRA on some linears only" in unsupported(lm)
    assert "float16" in unsupported(policy(dtype=torch.float16).model.language_model)


# On the GPU

@pytest.fixture(scope="module")
def on_gpu(policy):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model = policy()
    model.model.cuda()
    randomise(model)
    return model


@pytest.mark.gpu
@pytest.mark.parametrize("ops", ["decode_torch", "decode_triton"])
def test_graphs_equal_plain(on_gpu, batch, ops):
    """float32, by CUDA graph: the plain sampler's tokens, at sizes that share a graph, need a larger cache, or go back."""
    decoder = Decoder(on_gpu.model.language_model, importlib.import_module(f"rl_train.{ops}"))
    images = on_gpu.encode_images(batch.pixel_values, batch.sam_pixels, batch.sizes)
    for how in (dict(), dict(which=[0, 1, 2, 3], steps=30), dict(num_generations=8, steps=70), dict(greedy=True, num_generations=1), dict(),
                dict(segment=True, temperature=0.5, steps=64)):
        fast, plain = both(on_gpu, decoder, images, batch, **how)
        assert_same(fast, plain)
    randomise(on_gpu, seed=2)
    changed, plain = both(on_gpu, decoder, images, batch)
    assert_same(changed, plain)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("prompts, group, heads, slots, rank",
                         [(2, 4, 4, 128, 4), (1, 1, 4, 384, 0), (4, 8, 16, 512, 128), (16, 8, 16, 1024, 128), (6, 12, 16, 384, 16)])
def test_triton_equals_torch(on_gpu, dtype, prompts, group, heads, slots, rank):
    """Each kernel against plain torch in float32, on the same numbers of `dtype`; one prompt is empty."""
    from rl_train import decode_triton
    n, kv, size, inner, suffix = prompts * group, 2, 128 if heads == 16 else 32, 352 if rank else 360, 64      # 360: not in two summands
    width, qkv, mlp = heads * size, (heads + 2 * kv) * size, 352 if group < 8 else 384
    generator = torch.Generator("cuda").manual_seed(0)
    make = lambda *shape: (0.5 * torch.randn(*shape, device="cuda", generator=generator)).to(dtype)  # noqa: E731
    lora_b = lambda out: make(out, rank) if rank else None  # noqa: E731
    step, pad = torch.tensor([37], device="cuda"), torch.tensor([5, slots, 0, slots - 3] * 4, dtype=torch.int32, device="cuda")[:prompts]
    power, position = 0.1 + torch.rand(n, width // 32, device="cuda", generator=generator), torch.arange(n, device="cuda") % 90
    stored = make(n, kv, suffix, size), make(n, kv, suffix, size)
    cases = dict(
        embed=(torch.arange(n, device="cuda") % 50, make(50, width), make(width)),
        add=(make(n, width), make(n, inner), make(width + rank, inner), lora_b(width), 2.0, make(width)),
        normed=(make(n, width), power, 1e-6),
        rotate_and_store=(make(n, qkv + 3 * rank), power, 1e-6, make(qkv + 3 * rank) if rank else None, lora_b(qkv), 2.0, make(100, size // 2),
                          make(100, size // 2), position, *stored, step),
        attend=(make(n, heads, size), make(prompts, kv, slots, size), make(prompts, kv, slots, size), *stored, pad, step),
        gate=(make(n, 2 * mlp + 2 * rank), power, 1e-6, lora_b(2 * mlp), 2.0, mlp))
    changed = dict(add=slice(0, 1), rotate_and_store=slice(9, 11))                  # arguments that are written to
    for name, arguments in cases.items():
        exact = [a.clone() if torch.is_tensor(a) else a for a in arguments]
        exact = [a.float() if torch.is_tensor(a) and a.dtype == dtype else a for a in exact]
        results = []
        for ops, given in ((decode_torch, exact), (decode_triton, arguments)):
            found = getattr(ops, name)(*given)
            found = list(found) if isinstance(found, tuple) else [found]
            if name in ("embed", "add"):
                found[-1] = found[-1].sum(1)                                        # shares of any number
            results.append(found + list(given[changed.get(name, slice(0))]))
        for e, f in zip(*results, strict=True):
            assert (f.float() - e).abs().max() <= (1e-5 if dtype == torch.float32 else 2e-2) * e.abs().max(), name


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [151_679, 512, 513, 40])
def test_triton_chooses_as_torch(on_gpu, dtype, vocab):
    """The same token wherever the number lies inside a token's interval, never one that is no token or has no probability; same record."""
    from rl_train import decode_triton
    n, num_tokens, column, stops = 64, 3, 1, vocab // 4
    generator = torch.Generator("cuda").manual_seed(0)
    logits = 3 * torch.randn(n, vocab + -vocab % 512 + 512, device="cuda", generator=generator, dtype=torch.float32).to(dtype)
    logits[:, 7] = float("-inf")
    logits[1::2, 3] += 40                                                           # nearly certain
    p = torch.softmax(logits[:, :vocab].double() / 1.3, -1)
    table = torch.arange(2, device="cuda").repeat(vocab, 1)
    table[stops:2 * stops] = 1                                                      # tokens that end the answer
    stop = SimpleNamespace(found=1, eos_id=3, table=table)
    stop.step = lambda state, token: StopText.step(stop, state, token)

    def rows(uniforms, greedy=False, stop=stop):
        new = partial(torch.zeros, n, num_tokens, device="cuda")
        done = torch.arange(n, device="cuda") % 5 == 0
        return SimpleNamespace(
            logits=logits.clone(), vocab=vocab, temperature=1.3, greedy=greedy, uniforms=uniforms, step=torch.tensor([column], device="cuda"),
            stop=stop, table=stop and stop.table, pad_id=5, ids=new(dtype=torch.long), logp=new(), valid=new(dtype=torch.bool), done=done,
            token=torch.zeros_like(done, dtype=torch.long), state=torch.zeros_like(done, dtype=torch.long))

    def chosen(ops, *how, **options):
        found = rows(*how, **options)
        ops.choose(found)
        return found
    uniforms = torch.rand(n, num_tokens, device="cuda", generator=generator, dtype=torch.float64)
    for place in (0.25, 0.75):
        wanted = torch.multinomial(p, 1, generator=generator)
        uniforms[:, column] = (p.cumsum(-1).gather(1, wanted) - (1 - place) * p.gather(1, wanted))[:, 0]
        certain = (p.gather(1, wanted)[:, 0] > 1e-5).nonzero()[:, 0]
        assert len(certain) > n // 4
        for how in (dict(), dict(stop=None)):
            mine, theirs = (chosen(ops, uniforms, **how) for ops in (decode_triton, decode_torch))
            for name in ("token", "ids", "valid", "done", "state"):
                assert torch.equal(getattr(mine, name)[certain], getattr(theirs, name)[certain]), name
            torch.testing.assert_close(mine.logp[certain], theirs.logp[certain], atol=1e-4, rtol=0)
            alive = certain[~rows(uniforms).done[certain]]
            assert torch.equal(mine.token[alive], wanted[alive, 0]) and (mine.ids[:, column] == mine.token).all()
            assert not mine.ids[:, ~(torch.arange(num_tokens) == column)].any() and (mine.token[::5] == 5).all()
    for u in (0.0, 1 - 2**-53):
        token = chosen(decode_triton, torch.full_like(uniforms, u)).token
        assert (token < vocab).all() and (token != 7).all()
    alive = ~rows(uniforms).done
    token = chosen(decode_triton, uniforms, greedy=True).token
    assert torch.equal(logits.gather(1, token[:, None])[alive, 0], logits[alive, :vocab].amax(1))


# The stop text

@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(SHIPPED_CHECKPOINT)


def by_decoding(tokenizer, stop_texts, ids: list[int]) -> bool:
    """The end by its definition: the newest token is EOS or completes a stop text in the decoded answer."""
    def found(some):
        return any(text in tokenizer.decode(some) for text in stop_texts)
    return ids[-1] == tokenizer.eos_token_id or (found(ids) and not found(ids[:-1]))


@pytest.mark.parametrize("stop_texts", [["<|end|>"], ["<|im_end|>", "<|endoftext|>"], ["aab", "ab<", "<|end|>"], ["d."], ["ä!"], []], ids=str)
def test_stop_text_is_found_as_in_the_decoded_answer(tokenizer, stop_texts):
    """Random ids among those that touch the stop texts, special tokens, and pieces that reach beyond the end."""
    stop = StopText(tokenizer, stop_texts, len(tokenizer) + 5)
    rng = np.random.default_rng(0)
    pieces = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    near = [i for i, piece in enumerate(pieces) if set(piece) & set("".join(stop_texts)) or piece.startswith("<")]
    ends = 0
    for trial in range(150):
        pool = near if near and trial % 3 else range(len(tokenizer) + 5)
        ids = rng.choice(pool, 6).tolist()
        if stop_texts and trial % 2:                                    # the text cut at random places, each part encoded by itself
            text = str(rng.choice(stop_texts))
            cuts = sorted(rng.integers(0, len(text) + 1, 3))
            parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
            ids += [i for part in parts for i in tokenizer.encode(part, add_special_tokens=False)]
            ids += tokenizer.encode(str(rng.choice(["\n", "|", "<", "end", ">>"])), add_special_tokens=False)
        state = stop.start(1)
        for t in range(1, len(ids) + 1):
            state, done = stop.step(state, torch.tensor(ids[t - 1:t]))
            expected = by_decoding(tokenizer, stop_texts, ids[:t])
            assert done.item() == expected, (ids[:t], tokenizer.decode(ids[:t]))
            ends += expected
            if expected:
                break
    assert ends > 20 or not stop_texts


@pytest.mark.parametrize("pieces", [["<|", "end", "|>Ċ"], ["<", "|", "e", "n", "d", "|", ">"], [".<|", "end", "|", ">"],
                                    ["<|", "<|", "end", "|", ">"]])
def test_stop_text_over_given_pieces(tokenizer, pieces):
    stop = StopText(tokenizer, ["<|end|>"], len(tokenizer))
    ids = tokenizer.convert_tokens_to_ids(pieces)
    assert None not in ids
    assert [stop(torch.tensor([ids[:t]])).item() for t in range(1, len(ids) + 1)] == [False] * (len(ids) - 1) + [True]


def test_every_byte_of_the_alphabet(tokenizer):
    """What a token adds to the text is what decoding says, for every token."""
    pieces = _token_bytes(tokenizer, len(tokenizer) + 2)
    assert [piece.decode(errors="replace") for piece in pieces[:-2]] == [tokenizer.decode([i]) for i in range(len(tokenizer))]
    assert pieces[-2:] == [b"", b""]
