"""Qwen2.5-VL and Qwen3-VL as transformers itself: image tokens have positions on three axes.

The axes are time, height and width; Qwen3-VL adds image features behind its first layers too. Three
prompts about images of three sizes, ragged answers, LoRA on the text model, float32.
"""

import copy

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from rl_train.engine import Engine, decode_torch
from rl_train.engine.fused_weights import unsupported
from sa2va_hf.qwen_vl import image_features, text_model
from tests.engine.test_layer_graphs import with_graphs
from tests.engine.tiny import LINEARS, assert_same, both, fast, slow, train_lora, trained

VOCAB, G, T = 600, 2, 9
IMAGE, START, END = VOCAB - 1, VOCAB - 3, VOCAB - 4  # ids
GRIDS = torch.tensor([[1, 8, 12], [1, 8, 12], [1, 16, 6]])  # patches; 4 are one token
LENGTHS = torch.tensor([9, 6, 4, 9, 1, 7])  # of the answers


# Of each family, its classes and the vision sizes that are its own.
FAMILIES = dict(
    qwen2_5_vl=(
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLConfig,
        dict(out_hidden_size=128, window_size=112, fullatt_block_indexes=[1]),
    ),
    qwen3_vl=(
        Qwen3VLForConditionalGeneration,
        Qwen3VLConfig,
        dict(out_hidden_size=128, num_position_embeddings=64, deepstack_visual_indexes=[0, 1]),
    ),
)


@pytest.fixture(scope="module", params=FAMILIES)
def vl(request):
    torch.manual_seed(0)
    model_class, config_class, own_vision = FAMILIES[request.param]
    rope = dict(rope_type="default", rope_theta=1e6, mrope_section=[4, 6, 6])
    text = dict(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        rope_parameters=rope,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
    )
    vision = dict(
        depth=2,
        hidden_size=64,
        intermediate_size=128,
        num_heads=4,
        patch_size=14,
        initializer_range=0.1,
    )
    config = config_class(
        text_config=text,
        vision_config=vision | own_vision,
        image_token_id=IMAGE,
        video_token_id=VOCAB - 2,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    model = model_class(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", "pos_embed.weight")):
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    targets = rf".*language_model.*\.({'|'.join(LINEARS)})"
    inject_adapter_in_model(LoraConfig(r=4, lora_alpha=8, target_modules=targets), model)
    train_lora(model)
    return model


@pytest.fixture(scope="module")
def work(vl):
    """Ids of the prompts, patches of their images, ids of answers, and the engine's inputs."""
    random = torch.Generator().manual_seed(1)
    prompts = []
    for grid, num_text in zip(GRIDS, (7, 11, 5)):
        text = torch.randint(5, 500, (num_text,), generator=random).tolist()
        prompts.append([2, 3, START, *[IMAGE] * (int(grid.prod()) // 4), END, *text])
    pixels = torch.randn(int(GRIDS.prod(1).sum()), 3 * 2 * 14 * 14, generator=random)
    answers = torch.randint(5, 500, (len(prompts) * G, T), generator=random)
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    images = ids == IMAGE
    with torch.no_grad():
        features = image_features(vl, pixels, GRIDS)
        embeds = text_model(vl).get_input_embeddings()(ids)
    embeds = embeds.masked_scatter(images[..., None], features)
    positions, _ = vl.model.get_rope_index(
        ids, mm_token_type_ids=images.int(), image_grid_thw=GRIDS, attention_mask=mask
    )
    patches = pixels.split(GRIDS.prod(1).tolist())
    return prompts, patches, answers, (embeds, mask), positions


def of_image(work, prompt: int, ids: torch.Tensor) -> dict:
    """transformers' inputs of the sequence ids (1, L) about a prompt's image."""
    return dict(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        pixel_values=work[1][prompt],
        image_grid_thw=GRIDS[prompt : prompt + 1],
        mm_token_type_ids=(ids == IMAGE).int(),
    )


def oracle(vl, work) -> torch.Tensor:
    """Log-probs of the answers' tokens, one behind the other, by a full forward of each row."""
    prompts, _, answers, *_ = work
    logps = []
    for row, length in enumerate(LENGTHS.tolist()):
        prompt, answer = prompts[row // G], answers[row, :length]
        ids = torch.tensor([prompt + answer.tolist()])
        logp = torch.log_softmax(vl(**of_image(work, row // G, ids)).logits[0].float(), -1)
        before = logp[len(prompt) - 1 : len(prompt) - 1 + length]
        logps.append(before.gather(1, answer[:, None])[:, 0])
    return torch.cat(logps)


def gradient(vl, logps) -> torch.Tensor:
    """(parameters,) of a weighted sum."""
    slope = torch.linspace(-1, 1, len(logps), device=logps.device)
    return torch.cat(
        [g.flatten() for g in torch.autograd.grad(logps @ slope, trained(vl).values())]
    )


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("way", [slow, fast])
def test_scores_as_a_full_forward(vl, work, way, checkpointing):
    engine = Engine(text_model(vl), pad_id=0, gradient_checkpointing=checkpointing)
    _, _, answers, inputs, positions = work
    valid, prompt = torch.arange(T) < LENGTHS[:, None], torch.arange(len(GRIDS))
    prompt = prompt.repeat_interleave(G)
    expected = oracle(vl, work)
    right = gradient(vl, expected)
    with way(engine):
        with torch.no_grad():
            counted = engine.score(*inputs, prompt, answers, valid).logp[valid]
        found = engine.score(*inputs, prompt, answers, valid, position_ids=positions).logp[valid]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert (gradient(vl, found) - right).norm() < 1e-5 * right.norm()
    assert (counted - expected).abs().max() > 1e-3  # the positions matter


@pytest.mark.parametrize("way", [slow, fast])
def test_draws_as_transformers_generates(vl, work, way):
    engine = Engine(text_model(vl), pad_id=0)
    prompts, _, _, inputs, positions = work
    how = dict(max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    expected = [
        vl.generate(**of_image(work, p, torch.tensor([ids])), **how)[0, len(ids) :].tolist()
        for p, ids in enumerate(prompts)
    ]
    how = dict(num_generations=1, max_new_tokens=12, stop=None, position_ids=positions)
    with way(engine):
        assert engine.generate(*inputs, **how).ids.tolist() == expected


def test_prompts_of_one_image_share_it(vl, work):
    """The second prompt once more with another end: read as if alone."""
    engine = Engine(text_model(vl), pad_id=0)
    (embeds, mask), positions = work[3:]
    pair = [1, 1]
    embeds, mask, positions = embeds[pair], mask[pair], positions[:, pair]
    embeds[1, -3:] = embeds[1, -3:].flip(0)
    shared = [0, int(mask[1].sum()) - 3]
    inputs = dict(num_last=4, position_ids=positions)
    with fast(engine):
        found = engine.last_hidden_states(embeds, mask, shared_prefix_lengths=shared, **inputs)
    torch.testing.assert_close(
        found, engine.last_hidden_states(embeds, mask, **inputs), atol=1e-5, rtol=0
    )


def test_states_before_the_final_norm(vl, work):
    """Handed out by both samplers and both scorers, of the same tokens and log-probs."""
    text = text_model(vl, before_norm=True)
    engine, after = (
        Engine(text, pad_id=0, head_norm=text.head_norm),
        Engine(text_model(vl), pad_id=0),
    )
    (embeds, mask), positions = work[3:]
    uniforms = torch.rand(6, T, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    how = dict(num_generations=G, max_new_tokens=T, stop=None, uniforms=uniforms)
    prompt, results = torch.arange(len(GRIDS)).repeat_interleave(G), []
    for one, way in ((after, slow), (engine, slow), (engine, fast)):
        with way(one), torch.no_grad():
            drawn = one.generate(embeds, mask, position_ids=positions, **how)
            scores = one.score(embeds, mask, prompt, drawn.ids, drawn.valid, positions)
            ends = one.last_hidden_states(embeds, mask, position_ids=positions)
            assert torch.allclose(
                one.logps(ends[:, 0], drawn.ids[::G, 0]), drawn.logp[::G, 0], atol=1e-5
            )
            fed = scores.hidden_of(drawn.valid & (torch.arange(T) < T - 1))
        assert torch.allclose(fed, drawn.hidden[:, :-1].flatten(0, 1), atol=1e-4)
        results.append([drawn.ids, drawn.logp, scores.logp, fed, ends])
        one.release()
    normed, plain, kernels = results
    assert torch.equal(plain[0], kernels[0]) and torch.equal(plain[0], normed[0])
    torch.testing.assert_close(kernels[1:], plain[1:], atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(text.head_norm(kernels[3]), normed[3], atol=1e-4, rtol=1e-5)
    assert (plain[3] - normed[3]).abs().max() > 0.1


def test_the_text_model_is_known(vl):
    assert unsupported(text_model(vl)) is None


def test_features_that_a_family_does_not_add_are_an_error(vl, work):
    """Embeddings are as wide as the family's states, with deepstack's features behind them."""
    engine, width = Engine(text_model(vl), pad_id=0), vl.config.text_config.hidden_size
    (embeds, mask), positions = work[3:]
    embeds = embeds[..., :width]
    wide = torch.cat([embeds, torch.zeros_like(embeds)], -1)
    with fast(engine):
        if engine.fused(embeds).family.deepstack:
            found, alone = (
                engine.last_hidden_states(x, mask, position_ids=positions) for x in (wide, embeds)
            )
            torch.testing.assert_close(found, alone)
        else:
            with pytest.raises(AssertionError, match="embeddings of 256 numbers, not 128"):
                engine.last_hidden_states(wide, mask, position_ids=positions)
    engine.release()


def test_graphs_launch_the_layers(vl, work, monkeypatch):
    engine, graphs = with_graphs(text_model(vl), monkeypatch)
    valid, prompt = torch.arange(T) < LENGTHS[:, None], torch.arange(len(GRIDS))
    inputs = *work[3], prompt.repeat_interleave(G), work[2], valid, work[4]
    results = []
    for way in (slow, fast, fast, fast):
        with way(engine):
            logps = engine.score(*inputs).logp[valid]
        results.append((logps.detach(), gradient(vl, logps)))
    (of_sizes,) = graphs.of_sizes.values()
    assert len(of_sizes.forward_graphs) == len(of_sizes.backward_graphs) == 3
    (right_logps, right), *others = results
    for logps, found in others:
        torch.testing.assert_close(logps, right_logps, atol=1e-4, rtol=0)
        assert (found - right).norm() < 1e-3 * right.norm()
    Engine.release(engine)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("before_norm", [False, True])
def test_on_a_gpu(vl, work, before_norm, monkeypatch):
    """float32: CUDA graphs sample, and compiled layers score, as the modules."""
    vl = copy.deepcopy(vl).to("cuda")
    text = text_model(vl, before_norm)
    engine = Engine(text, pad_id=0, head_norm=text.head_norm, gradient_checkpointing=True)
    embeds, mask, positions = (tensor.to("cuda") for tensor in (*work[3], work[4]))
    kernels, plain = both(engine, monkeypatch, embeds, mask, position_ids=positions)
    assert_same(kernels, plain)
    assert engine._fused.decode_ops is not decode_torch
    valid, prompt = torch.arange(T) < LENGTHS[:, None], torch.arange(len(GRIDS))
    inputs = embeds, mask, prompt.repeat_interleave(G), work[2], valid, positions
    results = []
    for way in (slow, fast):
        with way(engine):
            logps = engine.score(*inputs).logp[valid]
        results.append((logps.detach(), gradient(vl, logps)))
    (right_logps, right), (logps, found) = results
    torch.testing.assert_close(logps, right_logps, atol=1e-4, rtol=0)
    assert (found - right).norm() < 1e-3 * right.norm()
    engine.release()
