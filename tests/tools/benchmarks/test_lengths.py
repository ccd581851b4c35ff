"""Steps of real shapes: unequal lengths, tiles, sizes of images; what they waste, their floor."""

import statistics
from types import SimpleNamespace

import pytest
import torch

from rl_train.engine.sampling import sample_token
from sa2va_hf.batches import Prompts
from sa2va_hf.processing_sa2va import region_grid
from tools.benchmarks import roofline, trl_style, workload
from tools.benchmarks.lengths import (
    END,
    Lengths,
    Request,
    check_lengths,
    log_normal,
    wasted_fraction,
)
from tools.benchmarks.workload_sa2va import mask_of

L, T, A = 310, 12, 4
FLAGS = f"--batch_size 2 --num_generations 3 --max_completion_length {T} --lora_r 4 "
FLAGS += "--micro_batch_size 3"
REAL = workload.Options(
    device="cpu",
    sizes="tiny",
    prompt_length=L,
    answer_tokens=A,
    answer_lengths=(7.0, 4.0),
    caption_lengths=(20.0, 10.0),
    num_tiles=3,
    width=75,
    height=42,
    flags=FLAGS.split(),
)


@pytest.fixture(scope="module")
def real():
    made = workload.build(REAL)
    made.step()  # asserts what it left behind
    return made


def test_lengths_are_log_normal_and_cut():
    drawn = log_normal(20000, 200.0, 100.0, 10**6, 0)
    assert statistics.mean(drawn) == pytest.approx(200, rel=0.02)
    assert statistics.stdev(drawn) == pytest.approx(100, rel=0.05)
    assert statistics.median(drawn) == pytest.approx(200 / 1.25**0.5, rel=0.02)  # skewed
    cut = log_normal(20000, 200.0, 100.0, 300, 0)
    assert cut == [min(n, 300) for n in drawn]
    assert log_normal(4, 5.0, 1e-9, 9, 0) == [5] * 4 and min(log_normal(99, 1.0, 9.0, 9, 0)) == 1


def test_lengths_of_a_rank_are_the_same_in_each_step():
    lengths = Lengths((50.0, 20.0), rank=1)
    assert lengths.of(8, 99) == lengths.of(8, 99) != Lengths((50.0, 20.0)).of(8, 99)
    assert Lengths(()).of(3, 7) == [7, 7, 7]


@pytest.mark.parametrize("greedy", [False, True])
def test_rows_draw_their_end_there_and_nowhere_else(greedy):
    """All tokens are alike; answers that are cut have no end."""
    lengths, num_rows, most = Lengths((5.0, 4.0)), 64, 8
    ends = lengths.of(num_rows, most)
    given = torch.zeros(num_rows, most, dtype=torch.float64)  # each would draw END
    uniforms = lengths.forced_uniforms(num_rows, most, None if greedy else given)
    drawn = torch.stack(
        [sample_token(torch.zeros(num_rows, 2000), 1.0, u)[0] for u in uniforms.T], 1
    )
    expected = torch.zeros(num_rows, most, dtype=torch.bool)
    for row, end in enumerate(ends):
        expected[row, end - 1] = end < most
    assert torch.equal(drawn == END, expected) and most in ends and len(set(ends)) > 4
    assert not given.any()  # an argument stays as it is


def test_full_lengths_leave_the_numbers_alone():
    given = torch.zeros(2, 3)
    assert Lengths(()).forced_uniforms(2, 3, given) is given is Lengths(()).without_end(given)
    assert Lengths(()).forced_uniforms(2, 3) is None


def test_wasted_tokens_by_hand():
    prompts = Prompts([[1]], [0], None)
    valid = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]]).bool()
    full = torch.ones(2, 2, dtype=torch.bool)
    assert (
        wasted_fraction([Request(prompts, valid), Request(prompts), Request(prompts, full)])
        == 3 / 12
    )
    assert wasted_fraction([Request(prompts)]) is None


def test_wrong_lengths_are_an_error():
    valid = torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    with pytest.raises(AssertionError, match="not of"):
        check_lengths(valid, [2, 2])
    with pytest.raises(AssertionError, match="3 tokens decoded"):
        check_lengths(valid, [2, 1])


def test_a_step_of_real_shapes(real):
    """Tiles, sizes and lengths as asked for, of the policy's answers and of the teacher's."""
    policy, expected = real.policy, real.policy.lengths.of(6, T)
    assert [len(tiles) for tiles in real.batch.inputs.tiles] == [3, 3]
    assert {tuple(mask.shape) for mask in real.masks + real.batch.masks} == {(42, 75)}
    assert len(set(expected)) > 2
    describe, segment = (real.requests[f"rollout{n}"][0] for n in (1, 2))
    assert describe.valid.sum(1).tolist() == expected and segment.valid.all()
    assert list(map(len, describe.prompts.ids)) == [L, L]
    image = 3 * policy.prompts.tokens_per_tile
    assert all(ids.count(policy.prompts.context_id) == image for ids in segment.prompts.ids)
    words = log_normal(2, 20.0, 10.0, 512, 0)
    assert [len(caption.split()) for caption in real.batch.captions] == words
    assert words[0] - words[1] == len(segment.prompts.ids[0]) - len(segment.prompts.ids[1]) != 0
    (forced,), (said,) = real.requests["ask1"], real.requests["teacher2"]
    assert forced.valid is None and len(forced.prompts) == 6
    assert said.valid.sum(1).tolist() == expected and list(map(len, said.prompts.ids)) == [L] * 6
    share = 1 - sum(expected) / (6 * max(expected))
    assert real.wasted() == {"rollout1": share, "rollout2": 0, "teacher2": share}


def test_floor_counts_the_real_lengths(real):
    """Loop 1's answers, by hand."""
    model = roofline.LanguageModel(real.policy.model.language_model)
    lengths, tokens = real.policy.lengths.of(6, T), sum(real.policy.lengths.of(6, T))
    pairs = 2 * L**2 / 2 + sum(n * (L + n / 2) for n in lengths)
    scored = 2 * (2 * L + tokens) * (model.base + model.lora) + 4 * model.attention * pairs
    scored += 2 * model.head * tokens
    assert roofline.step_floor(real, 1.0, 1e30)["reference1"] == pytest.approx(scored)
    read = (max(lengths) - 1) * model.read(0) + model.read(0)  # every step, and the prompts'
    for group in (lengths[:3], lengths[3:]):
        for step in range(1, max(group)):
            going_on = sum(n > step for n in group)
            read += model.slot * (L + going_on * step)
    assert roofline.step_floor(real, 1e30, 1.0)["rollout1"] == pytest.approx(read)


def test_floor_reads_an_image_once_for_all_prompts_about_it(real):
    """The teacher's, of which three are about each of two images."""
    model, image = roofline.LanguageModel(real.policy.model.language_model), 3 * 64
    prompts = real.requests["ask1"][0].prompts
    start = prompts.ids[0].index(real.policy.prompts.context_id)
    total = sum(map(len, prompts.ids)) - 4 * (start + image)
    found = roofline.call_of(real, real.requests["ask1"][0])
    assert found.own.sum() == total and found.answers is None
    pairs = sum(len(ids) ** 2 for ids in prompts.ids) / 2 - 4 * (start + image) ** 2 / 2
    least = roofline.Least(model, 1.0, 1e30)
    assert least.ask(found) == pytest.approx(model.forward(total, pairs, 0))


@pytest.mark.parametrize("rule", ["area", "nearest"])
@pytest.mark.parametrize("size", [(1080, 1920), (960, 1280), (450, 613)])
def test_a_mask_covers_the_cells_that_it_is_made_of(rule, size):
    cells = (torch.arange(256) <= 99).view(16, 16).roll(37)
    assert torch.equal(region_grid(mask_of(cells, *size)[None], 16, 448, rule)[0], cells)


@pytest.mark.parametrize(
    "more, sentence",
    [
        (dict(num_tiles=2), "--num_tiles 2"),
        (dict(sizes="qwen-tiny", num_tiles=13), "--num_tiles 13"),
        (dict(sizes="qwen-tiny", caption_lengths=(5.0, 2.0)), "--caption_lengths"),
    ],
)
def test_shapes_that_no_image_has_are_refused(more, sentence):
    with pytest.raises(ValueError, match=sentence):
        workload.build(workload.Options(device="cpu", **dict(sizes="tiny") | more))


def test_unequal_lengths_are_not_trls():
    with pytest.raises(ValueError, match="--answer_lengths"):
        trl_style.build_trl_style(REAL)


def test_a_budget_is_a_share_of_the_gpu(monkeypatch):
    gpu, held = torch.device("cuda:0"), []
    has = SimpleNamespace(total_memory=140 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: has)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda *how: held.append(how)
    )
    workload.hold_to(None, gpu)
    workload.hold_to(80, torch.device("cpu"))
    workload.hold_to(70, gpu)
    workload.hold_to(35, torch.device("cuda"))
    assert held == [(0.5, 0), (0.25, None)]  # None: the current one
    with pytest.raises(ValueError, match="--budget_gib 141: the GPU has 140.0"):
        workload.hold_to(141, gpu)
