"""The fast sampler draws what the plain one draws: tokens alike, numbers to rounding, whatever the sizes and the weights."""

import copy
import importlib
from argparse import Namespace

import pytest
import torch

from rl_train import checkpoint, rollout
from rl_train.engine import forward, logprob, sampler
from rl_train.engine.decode import Decoder
from rl_train.engine.fused import unsupported
from rl_train.engine.logprob import hidden_states
from rl_train.engine.packing import TOGETHER, share
from rl_train.engine.sampler import decoder_of, generate_plain
from rl_train.engine.tokens import draw
from rl_train.roles import Roles
from rl_train.rollout import noise
from sa2va_hf import Sa2VAModel

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
    return model.encode_images(batch.inputs.pixel_values, batch.inputs.sam_pixels, batch.sizes)


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
            self.uniforms[:, self.step] = (
                high - width + width * ((u - high + width) / width).clamp(0.25, 0.75)
            )
            self.step += 1
        return token, logp


@torch.no_grad()
def both(
    policy,
    decoder,
    images,
    batch,
    which=(0, 1, 2),
    num_generations=4,
    steps=STEPS,
    temperature=1.7,
    greedy=False,
    segment=False,
    seed=0,
):
    """(fast, plain) completions of the same prompts, uniforms and weights."""
    prompts = (
        policy.segment_prompts(images, list(which), [batch.captions[i] for i in which])
        if segment
        else policy.describe_prompts(images, list(which), [batch.inputs.grids[i] for i in which])
    )
    embeds, mask = policy.embed(images, prompts)
    uniforms = (
        None
        if greedy
        else noise(seed, 0, 0, list(which), num_generations, steps, 0)[0].to(embeds.device)
    )
    lm, how = (
        policy.model.language_model,
        dict(
            num_generations=num_generations,
            max_new_tokens=steps,
            stop=policy.stop.to(embeds.device),
            pad_id=policy.pad_id,
            temperature=temperature,
            uniforms=uniforms,
        ),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            sampler, "draw", Centred(uniforms)
        )  # writes into `uniforms`, which the fast one then takes
        plain = generate_plain(lm, embeds, mask, **how)
    return decoder.generate(lm, embeds, mask, **how), plain


def assert_same(fast, plain):
    assert (
        torch.equal(fast.ids, plain.ids)
        and torch.equal(fast.valid, plain.valid)
        and torch.equal(fast.stopped, plain.stopped)
    )
    torch.testing.assert_close(fast.logp, plain.logp, atol=1e-4, rtol=0)
    fed = plain.valid[:, 1:]  # tokens of which the next one was sampled
    torch.testing.assert_close(
        fast.hidden[:, :-1][fed], plain.hidden[:, :-1][fed], atol=1e-4, rtol=0
    )
    assert not fast.hidden[:, -1].any()


@pytest.mark.parametrize(
    "how",
    [
        dict(),
        dict(num_generations=1),
        dict(temperature=1.0),
        dict(greedy=True, num_generations=1),
        dict(which=[1]),
        dict(steps=1),
        dict(steps=2),
        dict(which=[0, 1, 2, 3], num_generations=3, steps=70),
        dict(segment=True, temperature=1.0),
        dict(temperature=3.0, steps=48),
    ],
    ids=str,
)
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
        monkeypatch.setattr(
            module, "decoder_for", lambda language_model, embeds: decoder_of(language_model)
        )
    return tokens


def test_prompts_of_one_image_share_its_forward(model, decoder, images, batch, fast_on_the_cpu):
    """Two regions of one image, one of another, a third of that, ragged: as if each were alone, and the image passes once."""
    grids = list(batch.inputs.grids)
    prompts = model.describe_prompts(
        images, [0, 0, 1, 2, 2, 2], [grids[0], grids[1], grids[2], grids[0], grids[3], grids[0]]
    )
    same, image = model.shared_prefix_lengths(images, prompts), model.model.config.tokens_per_tile
    assert [s > image for s in same] == [False, True, False, False, True, True] and same[0] == same[
        2
    ] == 0
    embeds, mask = model.embed(images, prompts)
    uniforms = noise(0, 0, 0, list(range(6)), 2, STEPS, 0)[0]
    how = dict(
        num_generations=2,
        max_new_tokens=STEPS,
        stop=model.stop,
        pad_id=model.pad_id,
        temperature=1.0,
        uniforms=uniforms,
    )
    language_model = model.model.language_model
    shared, alone = (
        decoder.generate(language_model, embeds, mask, same=s, **how) for s in (same, None)
    )
    assert_same(shared, alone)
    assert_same(shared, generate_plain(language_model, embeds, mask, **how))
    assert fast_on_the_cpu == [mask.sum() - sum(same), mask.sum()]
    shared = share(mask, same)
    found = shared.last(forward.hidden_states(decoder, shared.gather(embeds), shared.layout))[:, 0]
    torch.testing.assert_close(
        found, hidden_states(language_model, embeds, mask)[:, -1], atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("num_tiles", [1, 6])
def test_the_teacher_shares_images_and_finds_the_same(
    policy, prepare, scenes, monkeypatch, request, num_tiles
):
    """Masks of captions and captions of masks, in both paths; of two chunks, the second of which begins inside an image's prompts."""
    model = policy(max_tiles=num_tiles)
    randomise(model)
    batch = prepare(scenes[:2], model.processor)
    images = model.encode_images(batch.inputs.pixel_values, batch.inputs.sam_pixels, batch.sizes)
    assert max(images.tiles) > 1 or num_tiles == 1
    monkeypatch.setattr(rollout, "TEACHER_ROWS", 4)
    image, captions = (
        [0, 0, 0, 1, 1, 0],
        ["a cup", "the small red ball left of it", "a cup", "a hat", "one more", "it"],
    )
    masks = [batch.masks[i].roll(20 * row, 1) for row, i in enumerate(image)]

    def ask():
        return (
            rollout.segment(model, images, image, captions),
            rollout.describe(model, batch, images, image, masks, STEPS),
        )

    plain_masks, plain_captions = ask()
    tokens = request.getfixturevalue("fast_on_the_cpu")
    fast_masks, fast_captions = ask()
    assert (
        all(torch.equal(a, b) for a, b in zip(fast_masks, plain_masks))
        and fast_captions == plain_captions
    )
    assert len(set(plain_captions)) > 1 and any(mask.any() for mask in plain_masks)
    lengths = [
        len(model.prompts.segment(text, images.tiles[i])) + len(model.prompts.forced_answer)
        for i, text in zip(image, captions)
    ]
    assert (
        tokens[0] < sum(lengths[:4]) - 2 * images.tiles[0] * model.model.config.tokens_per_tile
    )  # 3 of an image, 1 of another
    assert tokens[1] == sum(lengths[4:]) and len(tokens) == 4  # one of each image


def test_what_prompts_have_in_common_ends_with_their_image(model, images, batch):
    """The same caption twice: the whole prompts are equal, but each needs a token of its own; another image: nothing."""
    prompts = model.segment_prompts(images, [1, 1, 3], ["a cup", "a cup", "a cup"])
    same = model.shared_prefix_lengths(images, prompts)
    ids = prompts.ids[1]
    assert (
        same == [0, same[1], 0] and ids[same[1] - 1] == model.model.img_context_id != ids[same[1]]
    )
    assert ids[: same[1]].count(model.model.img_context_id) == model.model.config.tokens_per_tile


def test_no_more_prompts_than_allowed_share_a_sequence():
    shared = share(torch.ones(20, 5, dtype=torch.long), [0] + [3] * 19)
    assert [int(part.max()) for part in shared.layout.part] == [
        TOGETHER,
        TOGETHER,
        20 - 2 * TOGETHER,
    ]
    assert (
        share(torch.ones(3, 5, dtype=torch.long), [0, 3, 2]).layout.part[0, :11].tolist()
        == [0] * 2 + [1] * 3 + [2] * 3 + [3] * 3
    )


def test_shared_layout():
    """By hand: prompts of 3, 4 and 2 tokens, of which the first two begin with 2 equal ones."""
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1], [0, 0, 1, 1]])
    layout = share(mask, [0, 2, 0])
    assert layout.layout.part.tolist() == [
        [0, 0, 1, 2, 2, -1, -1, -1],
        [0, 0, -1, -1, -1, -1, -1, -1],
    ]
    assert layout.layout.position_ids[0, :5].tolist() == [
        0,
        1,
        2,
        2,
        3,
    ] and layout.layout.position_ids[1, :2].tolist() == [0, 1]
    assert layout.source[0, :5].tolist() == [1, 2, 3, 6, 7] and layout.source[1, :2].tolist() == [
        10,
        11,
    ]
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
    base = model.peft.unload()  # injected in place: the same language model, bare again
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
        q.weight.mul_(2)  # seen by the decoder
    assert_same(*both(model, decoder, images, batch))
    optimizer = torch.optim.AdamW(model.trainable.values())
    checkpoint.write(
        tmp_path / "checkpoint_step_0",
        0,
        model,
        Roles(model.trainable),
        optimizer,
        torch.optim.lr_scheduler.ConstantLR(optimizer),
        Namespace(),
        [checkpoint.rng_state()],
    )
    checkpoint.load_weights(tmp_path / "checkpoint_step_0", model.trainable)
    model.peft.unload()
    model.model.save_pretrained(tmp_path / "model")
    again, state = (
        Sa2VAModel.from_pretrained(tmp_path / "model").state_dict(),
        model.model.state_dict(),
    )
    assert again.keys() == state.keys() and all(torch.equal(v, state[k]) for k, v in again.items())
    assert (tmp_path / "model" / "model.safetensors").stat().st_size < 1.05 * sum(
        v.nbytes for v in state.values()
    )


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
    for owner, name in (
        (lm, "lm_head"),
        (lm.model, "embed_tokens"),
        (lm.model.layers[1], "post_attention_layernorm"),
        (lm.model, "norm"),
    ):
        for change in (
            lambda: setattr(owner, name, copy.deepcopy(getattr(owner, name))),  # another module
            lambda: setattr(
                getattr(owner, name).weight, "data", getattr(owner, name).weight.data.clone()
            ),
        ):
            decoder = decoder_of(lm)
            change()
            assert decoder.stale(lm) and decoder_of(lm) is not decoder, name


def test_a_bias_that_the_decoder_does_not_add_is_refused(policy):
    lm = policy().model.language_model
    lm.model.layers[1].mlp.down_proj.base_layer.bias = torch.nn.Parameter(
        torch.ones(lm.config.hidden_size), requires_grad=False
    )
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
    images = on_gpu.encode_images(batch.inputs.pixel_values, batch.inputs.sam_pixels, batch.sizes)
    for how in (
        dict(),
        dict(which=[0, 1, 2, 3], steps=30),
        dict(num_generations=8, steps=70),
        dict(greedy=True, num_generations=1),
        dict(),
        dict(segment=True, temperature=0.5, steps=64),
    ):
        fast, plain = both(on_gpu, decoder, images, batch, **how)
        assert_same(fast, plain)
    randomise(on_gpu, seed=2)
    changed, plain = both(on_gpu, decoder, images, batch)
    assert_same(changed, plain)
