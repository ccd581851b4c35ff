"""Qwen2.5-VL, whose image tokens have positions in time, height and width: as transformers itself.

Three prompts about images of three sizes, ragged answers, LoRA on the text model, float32.
"""

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from rl_train.engine import Engine
from rl_train.engine.fused_weights import unsupported
from tests.engine.tiny import LINEARS, fast, slow, train_lora, trained

VOCAB, G, T = 600, 2, 9
IMAGE, START, END = VOCAB - 1, VOCAB - 3, VOCAB - 4  # ids
GRIDS = torch.tensor([[1, 8, 12], [1, 8, 12], [1, 16, 6]])  # patches; 4 are one token
LENGTHS = torch.tensor([9, 6, 4, 9, 1, 7])  # of the answers


class TextModel(torch.nn.Module):
    """The part of Qwen2.5-VL that an engine takes: its text model behind embeddings."""

    def __init__(self, vl):
        super().__init__()
        self.model, self.lm_head = vl.model.language_model, vl.lm_head
        self.config = self.model.config

    def get_input_embeddings(self):
        return self.model.embed_tokens


@pytest.fixture(scope="module")
def vl():
    torch.manual_seed(0)
    rope = dict(rope_type="default", rope_theta=1e6, mrope_section=[4, 6, 6])
    text = dict(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
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
        out_hidden_size=128,
        patch_size=14,
        window_size=112,
        fullatt_block_indexes=[1],
    )
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VOCAB - 2,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    model = Qwen2_5_VLForConditionalGeneration(config).eval()
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
        features = torch.cat(vl.model.get_image_features(pixels, GRIDS).pooler_output)
        embeds = vl.model.language_model.embed_tokens(ids)
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
    slope = torch.linspace(-1, 1, len(logps))
    return torch.cat(
        [g.flatten() for g in torch.autograd.grad(logps @ slope, trained(vl).values())]
    )


@pytest.mark.parametrize("way", [slow, fast])
def test_scores_as_a_full_forward(vl, work, way):
    engine = Engine(TextModel(vl), pad_id=0)
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
    engine = Engine(TextModel(vl), pad_id=0)
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
    engine = Engine(TextModel(vl), pad_id=0)
    (embeds, mask), positions = work[3:]
    pair = [1, 1]
    embeds, mask, positions = embeds[pair], mask[pair], positions[:, pair]
    embeds[1, -3:] = embeds[1, -3:].flip(0)
    shared = [0, int(mask[1].sum()) - 3]
    inputs = dict(num_last=4, position_ids=positions)
    with fast(engine):
        found = engine.read(embeds, mask, shared_prefix_lengths=shared, **inputs)
    torch.testing.assert_close(found, engine.read(embeds, mask, **inputs), atol=1e-5, rtol=0)


def test_the_text_model_is_known(vl):
    assert unsupported(TextModel(vl)) is None
