"""tools/benchmark.py at a tiny size: the figures that it must give, none of their values."""

import json
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from transformers import Qwen2Config

from rl_train.distributed import Ranks
from rl_train.parts import standing_memory
from rl_train.rollout import sample
from tests.runs import CHECKPOINT, draw_data
from tools import benchmark
from tools.benchmarks import alternatives, common, decode, floor, logprob, profile, teacher, work
from tools.benchmarks.memory import three_copies

TINY = Qwen2Config(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    tie_word_embeddings=False,
)


def test_data(tmp_path, capsys):
    benchmark.main(
        [
            "data",
            "--num_workers",
            "1",
            "--num_images",
            "8",
            "--width",
            "320",
            "--height",
            "240",
            "--num_batches",
            "4",
            "--rounds",
            "1",
            "--num_rows",
            "300",
            "--output",
            str(tmp_path / "data.json"),
        ]
    )
    found = json.loads((tmp_path / "data.json").read_text())
    assert found == json.loads(capsys.readouterr().out)
    loader, opening = found["loader"], found["opening"]
    assert (
        loader["ratio"]
        == pytest.approx(loader["loader_samples_per_second"] / loader["bare_samples_per_second"])
        and loader["ratio"] > 0
    )
    assert loader["cpu_ratio"] > 0 and loader["image"] == "320x240"
    assert (
        opening["rows"] == 300
        and opening["seconds"] > 0
        and 0 < opening["peak_memory_increase_mib"] < 300
    )
    assert opening["jpeg_bytes"] > 10_000 and opening["mask_characters"] > 300


@pytest.mark.parametrize("samplers", [["decoder", "plain", "generate"], ["static", "decoder"]])
def test_decode(tmp_path, monkeypatch, samplers):
    """Every sampler draws, and is put beside the floor; the sizes of the real run are only replaced."""
    monkeypatch.setattr(decode, "Sa2VAConfig", lambda **_: type("Config", (), dict(llm=TINY)))
    benchmark.main(
        [
            "decode",
            "--device",
            "cpu",
            "--num_prompts",
            "1",
            "2",
            "--num_generations",
            "2",
            "--prompt_length",
            "5",
            "--num_tokens",
            "4",
            "--lora_r",
            "4",
            "--rounds",
            "1",
            "--copy_mib",
            "1",
            "--output",
            str(tmp_path / "decode.json"),
            *(["--samplers", *samplers] if "static" in samplers else []),
        ]
    )
    found = json.loads((tmp_path / "decode.json").read_text())
    assert found["bandwidth_tb_per_second"] > 0 and [size["rows"] for size in found["sizes"]] == [
        2,
        4,
    ]
    for size in found["sizes"]:
        assert list(size["samplers"]) == samplers and size["floor_ms"] > 0
        for times in size["samplers"].values():
            assert (
                times["ratio_to_floor"] == pytest.approx(times["ms_per_token"] / size["floor_ms"])
                and times["first_token_ms"] > 0
            )


def test_logprob(tmp_path, monkeypatch, capsys):
    """Both ways give one gradient, of which float32 is the judge; what only a GPU counts is NaN."""
    monkeypatch.setattr(logprob, "Sa2VAConfig", lambda **_: type("Config", (), dict(llm=TINY)))
    benchmark.main(
        [
            "logprob",
            "--device",
            "cpu",
            "--num_prompts",
            "2",
            "--num_generations",
            "3",
            "--prompt_length",
            "9",
            "--num_tokens",
            "5",
            "--lora_r",
            "4",
            "--rounds",
            "1",
            "--matmul_size",
            "64",
            "--output",
            str(tmp_path / "logprob.json"),
        ]
    )
    found = json.loads((tmp_path / "logprob.json").read_text())
    ways = found["ways"]
    assert (
        list(ways) == ["plain", "shared prompt", "and kernels", "and checkpoints"]
        and found["matmul_tflops"] > 0
    )
    assert (
        ways["and kernels"]["tflop"]
        == ways["shared prompt"]["tflop"]
        < 0.7 * ways["plain"]["tflop"]
    )
    for way in ways.values():
        assert way["times_faster"] == pytest.approx(ways["plain"]["seconds"] / way["seconds"])
        assert way["share_of_ceiling"] == pytest.approx(
            way["tflop"] / way["seconds"] / found["matmul_tflops"]
        )
        assert (
            way["gradient_error"]["relative"] < 0.1
            and way["logp_error"] < 0.1
            and way["entropy_error"] < 0.1
        )
        assert way["against_plain"]["cosine"] > 0.99
    assert "and kernels" in capsys.readouterr().out


def test_floor_counts_each_byte_once():
    model = common.random_llm(TINY, 4, "cpu")
    layer = (
        64 * 64 + 64 + 2 * (64 * 32 + 32) + 64 * 64 + 3 * 64 * 96 + 2 * 64
    )  # q, k, v with biases, o, MLP, norms
    lora = 4 * (128 + 2 * 96 + 128 + 3 * 160)
    cache = 2 * 1 * 32 * 2 * (3 * 10 + 6 * 4)  # k, v; slots of prompts and rows
    args = SimpleNamespace(prompt_length=10, num_tokens=8)
    assert decode.floor_bytes(model, 3, 6, args) == 2 * (2 * (layer + lora) + 64 + 300 * 64 + cache)


# A whole step, on a tiny model

FLAGS = "--flags --batch_size 2 --num_generations 3 --max_completion_length 6 --lora_r 4 --micro_batch_size 3".split()
TINY_STEP = ["--sizes", "tiny", "--device", "cpu", "--answer_tokens", "4"]
PHASES = {
    "encode",
    "rollout1",
    "teacher1",
    "reference1",
    "rollout2",
    "teacher2",
    "reference2",
    "update",
}


@pytest.fixture(scope="module")
def tiny():
    options = SimpleNamespace(sizes="tiny", prompt_length=400, answer_tokens=4, flags=FLAGS[1:])
    return work.build(options, Ranks(0, 1, torch.device("cpu")))


def figures(name, tmp_path, *options):
    benchmark.main([name, "--output", str(tmp_path / "found.json"), *TINY_STEP, *options, *FLAGS])
    return json.loads((tmp_path / "found.json").read_text())


def test_step(tmp_path, capsys):
    found = figures(
        "step",
        tmp_path,
        "--rounds",
        "2",
        "--warmup",
        "0",
        "--alternatives",
        "naive",
        "trl",
        "static",
        "--naive_samples",
        "2",
        "--matmul_size",
        "64",
        "--copy_mib",
        "1",
    )
    assert all(set(found[way]["phases"]) == PHASES for way in ("ours", "naive", "static", "floor"))
    assert set(found["trl"]["phases"]) == PHASES | {"old1", "old2"}
    for way in ("ours", "naive", "trl", "static"):
        assert all(seconds > 0 for seconds in found[way]["phases"].values()), way
        assert len(found[way]["totals"]) == 2
        assert found[way]["total"] == pytest.approx(
            sum(found[way]["totals"]) / len(found[way]["totals"])
        )
        if way != "ours":
            assert found["ratios"][way] == pytest.approx(
                found[way]["total"] / found["ours"]["total"]
            )
    assert found["naive"]["total"] == pytest.approx(sum(found["naive"]["phases"].values()))
    assert found["floor"]["total"] == pytest.approx(sum(found["floor"]["phases"].values()))
    assert found["ratio_to_floor"] == pytest.approx(
        found["ours"]["total"] / found["floor"]["total"]
    )
    assert (
        not found["static"]["compiled"]
        and found["flags"]["num_generations"] == 3
        and found["matmul_tflops"] > 0
    )
    assert "the teacher measured on 2 samples a loop and scaled" in capsys.readouterr().out


def test_lengths_are_forced(tiny, monkeypatch):
    """Prompts of L tokens, captions of T, answers of A with one [SEG], N masks to describe, a new role of each weight."""
    seen, embed = [], tiny.policy.embed

    def watched(images, prompts, *rest):
        seen.append(list(map(len, prompts.ids)))
        return embed(images, prompts, *rest)

    monkeypatch.setattr(tiny.policy, "embed", watched)
    before = {name: p.detach().clone() for name, p in tiny.policy.trainable.items()}
    laps = tiny.step(0)  # asserts what it left behind
    assert {phase for phase, _, _ in laps} == PHASES and len(laps) == len(PHASES)
    assert (
        seen[0] == [400, 400] and max(map(len, seen)) == 6
    )  # rollouts share their prompt, the teacher has one a row
    assert seen.count([400, 400]) == 2 and [400] * 6 in seen
    moved = [name for name, p in tiny.policy.trainable.items() if not torch.equal(p, before[name])]
    assert len(moved) > 0.9 * len(before)
    assert any(
        (tiny.roles.banks["teacher"][name] != tiny.roles.banks["reference"][name]).any()
        for name in moved
    )


def test_each_way_scores_the_same_tokens_alike(tiny):
    """The stand-ins' log-probs and [SEG] embeddings are the project's, to bf16; their teacher encodes each row's own image."""
    policy, batch = tiny.policy, tiny.batch
    images = policy.encode_images(batch.inputs.pixel_values, batch.inputs.sam_pixels, batch.sizes)
    prompts = policy.segment_prompts(images, [0, 1], batch.captions)
    with work.forced(tiny):
        rollout = sample(policy, batch, images, prompts, 3, tiny.answer_tokens, None, 0.0)
    assert rollout.seg_rows.tolist() == list(range(6))
    ours = work.train.token_logps(policy, rollout)
    for all_logits in (False, True):
        rows = alternatives.PerRow(tiny, all_logits)
        with alternatives.replaced(*rows.replacements()[:1]):
            theirs = rows.token_logps(policy, rollout)
        assert torch.allclose(ours.logp, theirs.logp, atol=0.05) and torch.allclose(
            ours.entropy, theirs.entropy, atol=0.05
        )
        assert torch.allclose(ours.latent_mean, theirs.latent_mean, atol=0.05)


@pytest.mark.parametrize("how", [dict(), dict(cache_implementation="static")])
def test_generate_stands_in_for_the_sampler(tiny, how):
    """transformers' generate, greedily, gives the sampler's tokens and their hidden states."""
    policy, batch = tiny.policy, tiny.batch
    images = policy.encode_images(batch.inputs.pixel_values, batch.inputs.sam_pixels, batch.sizes)
    call = dict(
        num_generations=1,
        max_new_tokens=tiny.answer_tokens,
        stop=None,
        uniforms=None,
    )
    with policy.autocast(), torch.no_grad():
        embeds, mask = policy.embed(images, policy.segment_prompts(images, [0, 1], batch.captions))
        ours = policy.engine.generate(embeds, mask, **call)
        theirs = alternatives.huggingface(tiny, **how)(embeds, mask, **call)
        drawn = alternatives.huggingface(tiny, **how)(
            embeds,
            mask,
            **call | dict(num_generations=2, uniforms=torch.rand(4, tiny.answer_tokens)),
        )
    assert torch.equal(ours.ids, theirs.ids) and torch.allclose(
        ours.hidden.float(), theirs.hidden.float(), atol=0.1
    )
    assert drawn.ids.shape == (4, 4) and (drawn.logp < 0).all()


def test_a_stand_in_that_is_not_called_is_an_error(tiny):
    with pytest.raises(AssertionError, match="does not call score_all"):
        with alternatives.replaced((work.train, "score_all", None)):
            pass


def test_partial_work_is_scaled(tiny, monkeypatch):
    """Two of six one at a time: their results stand for all, four more shares of their time are added."""
    clock, extra = iter([10.0, 13.0]), {"teacher1": 0.0}
    monkeypatch.setattr(alternatives.time, "perf_counter", lambda: next(clock))
    call = alternatives.partly(
        lambda policy, images, rows, texts: [(rows, texts)], tiny, 2, extra, "teacher1"
    )
    found = call(tiny.policy, "images", list(range(6)), list("abcdef"))
    assert found == [([0], ["a"]), ([1], ["b"])] * 3 and extra == {"teacher1": 6.0}


def test_floor_of_a_step_by_hand(tiny):
    """Operations of loop 1's log-probs: shared prompts, causal pairs, no gradient of frozen weights."""
    model = floor.Model(tiny.policy.model.language_model)
    width, inner, kv = 64, 96, 32
    assert model.base == 2 * (2 * width * width + 2 * width * kv + 3 * width * inner)
    assert model.lora == 2 * 4 * (2 * 2 * width + 2 * (width + kv) + 3 * (width + inner))
    assert (model.attention, model.slot) == (2 * 64, 2 * 2 * 2 * kv)
    tokens, scored, pairs = 2 * 400 + 6 * 6, 6 * 6, 2 * 400**2 / 2 + 6 * 6 * (400 + 3)
    forward = (
        2 * tokens * (model.base + model.lora)
        + 4 * model.attention * pairs
        + 2 * model.head * scored
    )
    least = floor.step_floor(tiny, 1.0, 1e30)
    assert least["reference1"] == pytest.approx(forward)
    assert least["update"] > 2 * forward
    assert floor.step_floor(tiny, 1e30, 1.0)["update"] >= 40 * sum(
        p.numel() for p in tiny.policy.trainable.values()
    )


def test_profile(tmp_path, capsys):
    """On a CPU operators stand for kernels: every phase has its own, and no more of them than it took under the profiler."""
    found = figures(
        "profile",
        tmp_path,
        "--rounds",
        "2",
        "--warmup",
        "0",
        "--picture",
        str(tmp_path / "bars.png"),
    )
    assert (
        set(found["phases"]) == PHASES
        and "update, its costliest kernels" in capsys.readouterr().out
    )
    for phase in found["phases"].values():
        busy = sum(phase["classes"][name] for name in profile.KERNELS)
        assert 0 < busy < phase["profiled_seconds"] and phase["classes"]["idle"] == pytest.approx(
            max(0.0, phase["seconds"] - busy)
        )
        assert phase["classes"]["other kernels"] > phase["classes"]["our kernels"] == 0
    assert any(
        "backward" in kernel["name"].lower() for kernel in found["phases"]["update"]["kernels"]
    )
    assert not any(
        "Backward" in kernel["name"] for kernel in found["phases"]["reference1"]["kernels"]
    )
    seconds = [kernel["seconds"] for kernel in found["kernels"]]
    assert (
        seconds == sorted(seconds, reverse=True)
        and len(seconds) == 25
        and found["kernels"][0]["calls"] > 1
    )
    assert Image.open(tmp_path / "bars.png").width == 1400


@pytest.mark.parametrize(
    "name, kind",
    [
        ("nvjet_tst_192x128_64x4_2x1_v_bz_coopA_TNT", "matrix products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128", "matrix products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "matrix products"),
        ("void cutlass::Kernel2<cutlass_80_tensorop>", "matrix products"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits>", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "attention"),
        ("_attend", "attention"),
        ("_merge", "attention"),
        ("_gate", "our kernels"),
        ("_add_norm_backward", "our kernels"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>>",
            "other kernels",
        ),
        ("void at::native::reduce_kernel<512, 1>", "other kernels"),
        ("Memcpy DtoH (Device -> Pageable)", "copies"),
        ("Memset (Device)", "copies"),
    ],
)
def test_class_of_a_kernel(name, kind):
    assert profile.kind(name) == kind


def trace(*events):
    """Kernels (name, start, end) in seconds, as the profiler writes them, the last first."""
    return {
        "traceEvents": [
            {"ph": "M", "name": "process_name"},
            {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 0.0, "dur": 9e9},
        ]
        + [
            {
                "cat": "gpu_memcpy" if name.startswith("Memcpy") else "kernel",
                "name": name,
                "ts": 7e12 + start * 1e6,
                "dur": (end - start) * 1e6,
            }
            for name, start, end in reversed(events)
        ]
    }


SPIN = "at::cuda::(anonymous namespace)::spin_kernel(long)"
STEP = [
    (SPIN, 0, 0),
    ("lost", 0.1, 0.2),
    (SPIN, 0.9, 0.95),
    ("nvjet", 1, 3),
    ("_gate", 2, 4),
    ("Memcpy HtoD", 6, 7),
    ("softmax", 6.25, 6.5),  # 3 + 1 busy of 7, 5.25 in all
    (SPIN, 8, 8),
    ("flash", 8.5, 9),
    ("flash", 9.5, 10),
    (SPIN, 11, 11),
    ("later", 11.5, 12),
]


def test_kernels_are_attributed():
    """Each to the phase between whose marks it ran; what overlaps counts for its share of the time in which anything ran."""
    parts = profile.split(
        profile.parse(trace(*STEP), "cuda"), [("one", 7.0), ("two", 3.0)], "spin_kernel"
    )
    assert [name for name, *_ in parts["one"]] == ["nvjet", "_gate", "Memcpy HtoD", "softmax"]
    assert profile.attribute(parts["one"]) == pytest.approx(
        {
            "matrix products": 2 * 4 / 5.25,
            "our kernels": 2 * 4 / 5.25,
            "copies": 4 / 5.25,
            "other kernels": 0.25 * 4 / 5.25,
            "attention": 0,
        }
    )
    assert profile.attribute(parts["two"]) == pytest.approx(
        dict.fromkeys(profile.KERNELS, 0) | {"attention": 1}
    )
    assert profile.attribute([]) == dict.fromkeys(profile.KERNELS, 0)
    assert profile.costliest(parts["two"], 5) == [
        {"name": "flash", "class": "attention", "calls": 2, "seconds": pytest.approx(1)}
    ]
    assert profile.short("void at::native::(anonymous namespace)::" + 70 * "x") == 60 * "x"


@pytest.mark.parametrize(
    "events, message",
    [
        ([e for e in STEP if e[0] != SPIN], "0 of 3 ends of phases are left"),
        (STEP[3:], "2 of 3 ends of phases are left, among 9"),
        (
            STEP[:7] + STEP[8:],
            "one took 7.000 s, in the trace 0.900",
        ),  # the spare mark in its place
        ([], "0 of 3 ends of phases are left, among 0"),
    ],
)
def test_a_trace_that_lost_events_is_an_error(events, message):
    with pytest.raises(RuntimeError, match=message):
        profile.split(
            profile.parse(trace(*events), "cuda"), [("one", 7.0), ("two", 3.0)], "spin_kernel"
        )


def test_bars_are_as_long_as_the_phases():
    classes = dict.fromkeys(profile.COLOURS, 0.0)
    image = profile.draw(
        dict(
            device="GPU",
            total=0.5,
            phases={
                "rollout1": dict(
                    seconds=0.4,
                    classes=classes | {"matrix products": 0.1, "copies": 0.2, "idle": 0.1},
                ),
                "update": dict(seconds=0.1, classes=classes | {"attention": 0.1}),
            },
        )
    )
    colours = {name: tuple(bytes.fromhex(colour[1:])) for name, colour in profile.COLOURS.items()}
    lines = [
        [image.getpixel((x, y)) for x in range(150, image.width)] for y in range(110, image.height)
    ]  # below the legend
    lengths = {name: max(line.count(colour) for line in lines) for name, colour in colours.items()}
    assert (
        lengths["copies"] == 550 and lengths["other kernels"] == lengths["our kernels"] == 0
    )  # half of 1100
    assert lengths["matrix products"] == lengths["attention"] == lengths["idle"] == 275


def test_memory(tmp_path, tiny):
    found = figures("memory", tmp_path, "--rounds", "1")
    standing = standing_memory(tiny.policy)
    frozen = sum(
        p.numel()
        for name, p in tiny.policy.model.named_parameters()
        if name not in tiny.policy.trainable
    )
    assert found["base"] == pytest.approx((2 * frozen + 5 * standing["trainable weights"]) / 2**30)
    assert found["ratio"] == found["peak"] == 0 and set(found["later"]) == PHASES  # no GPU
    assert three_copies(10, 3) == 3 * 13 + 9


def test_scale(tmp_path, capsys):
    found = figures(
        "scale", tmp_path, "--rounds", "1", "--warmup", "0", "--num_processes", "1", "2"
    )
    one, two = found["runs"]
    assert (one["num_processes"], two["num_processes"]) == (1, 2) and len(two["rounds"][0]) == 2
    assert two["seconds"] == pytest.approx(max(two["rounds"][0])) and found["efficiency"] == {
        "1": 1.0,
        "2": pytest.approx(one["seconds"] / two["seconds"]),
    }
    assert two["exchange_seconds"] > 0 and set(two["phases"]) == PHASES
    assert "GB exchanged" in capsys.readouterr().out


# The teacher


def test_teacher(tmp_path, capsys):
    found = figures(
        "teacher",
        tmp_path,
        "--rounds",
        "2",
        "--naive_samples",
        "2",
        "--matmul_size",
        "64",
        "--copy_mib",
        "1",
    )
    assert set(found["masks"]) == {"forced", "sampled", "one at a time"} and set(
        found["captions"]
    ) == {"in batches", "one at a time"}
    for kind in ("masks", "captions"):
        for way in found[kind].values():
            assert way["seconds"] > 0 and way["ratio_to_floor"] == pytest.approx(
                way["seconds"] / found["floor"][kind]
            )
            assert way["times_faster"] == pytest.approx(
                found[kind]["one at a time"]["seconds"] / way["seconds"]
            )
    assert (
        found["rows"] == 6
        and found["flags"]["max_completion_length"] == 6
        and found["matmul_tflops"] > 0
    )
    assert "one at a time measured on 2 samples and scaled" in capsys.readouterr().out


def test_one_at_a_time_is_scaled(tmp_path, monkeypatch):
    """Two of six rows in 5 seconds are 15 for all; the others' seconds are their own."""
    clock = {
        ("masks", "forced"): 1.0,
        ("masks", "sampled"): 2.0,
        ("masks", "one at a time"): 5.0,
        ("captions", "in batches"): 3.0,
        ("captions", "one at a time"): 4.0,
    }
    monkeypatch.setattr(
        teacher, "seconds_in_turns", lambda works, args: {name: clock[name] for name in works}
    )
    found = figures(
        "teacher",
        tmp_path,
        "--naive_samples",
        "2",
        "--rounds",
        "1",
        "--matmul_size",
        "64",
        "--copy_mib",
        "1",
    )
    assert [way["seconds"] for way in found["masks"].values()] == [1, 2, 15] and found["masks"][
        "sampled"
    ]["times_faster"] == 7.5
    assert [way["seconds"] for way in found["captions"].values()] == [3, 12] and found["captions"][
        "in batches"
    ]["times_faster"] == 4


def test_what_each_way_of_the_teacher_does(tiny, monkeypatch):
    """In batches one forward of all rows from features that are there; one at a time a forward and the encoders for each."""
    calls = Counter()

    def counted(owner, name):
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *inputs: calls.update([name]) or function(*inputs))

    counted(tiny.policy, "embed")
    counted(tiny.policy.model, "vision_features")
    counted(tiny.policy.model, "sam_features")
    found = {}
    with tiny.roles.use("teacher"):
        for name, way in teacher.ways(tiny, 2).items():
            calls.clear()
            way()
            found[name] = dict(calls)
    assert found == {
        ("masks", "forced"): dict(embed=1),
        ("masks", "sampled"): dict(embed=1),
        ("captions", "in batches"): dict(embed=1),
        ("masks", "one at a time"): dict(embed=2, vision_features=2, sam_features=2),
        ("captions", "one at a time"): dict(embed=2, vision_features=2),
    }


def test_agreement_of_a_trained_model(tmp_path, capsys):
    """The demo's model says what is forced; its IoU is over the regions and captions of the data set."""
    data = draw_data(tmp_path) / "heldout"
    benchmark.main(
        [
            "teacher",
            "--device",
            "cpu",
            "--model_path",
            str(CHECKPOINT),
            "--data_dir",
            str(data),
            "--num_samples",
            "5",
            "--dtype",
            "float32",
            "--output",
            str(tmp_path / "found.json"),
        ]
    )
    found = json.loads((tmp_path / "found.json").read_text())
    means = found["means"]
    assert found["num_samples"] == 5 and set(means) == set(found["intervals"]) == set(
        teacher.MEASURES
    )
    assert means["says_seg"] == means["same_tokens"] == 1 and means["agreement"] > 0.999
    assert 0.2 < means["sampled_iou"] == pytest.approx(means["forced_iou"], abs=1e-3) and found[
        "difference"
    ][0] == pytest.approx(0, abs=1e-3)
    printed = capsys.readouterr().out
    assert all(f"\n{name} " in printed for name in teacher.MEASURES)


def test_flags_of_the_teacher(tmp_path, capsys):
    """A data set without a model is no reason to measure seconds."""
    with pytest.raises(SystemExit):
        benchmark.main(["teacher", "--data_dir", str(tmp_path)])
    assert "required: --model_path" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, sentence",
    [
        ("--teacher_answer sampled", "--teacher_answer sampled: a step is measured with forced"),
        ("--num_iterations 2", "measured with 1"),
        ("--tasks mask_caption_mask", "--tasks"),
        ("--mask_to_caption_weight 0", "measured with 1.0"),
        ("--mask_sigma auto", "--mask_sigma auto"),
        ("--shard_base", "--shard_base True"),
        ("--max_completion_length 4", "--answer_tokens 4: must be below --max_completion_length 4"),
    ],
)
def test_flags_that_a_step_does_not_follow_are_refused(flags, sentence):
    """Rather than left out of what is then printed as measured."""
    with pytest.raises(ValueError, match=sentence):
        work.build(
            SimpleNamespace(sizes="tiny", prompt_length=400, answer_tokens=4, flags=flags.split()),
            None,
        )


def test_a_measurement_of_nothing_is_refused(capsys):
    with pytest.raises(SystemExit):
        benchmark.main(["decode", "--rounds", "0"])
    assert "--rounds 0: must be at least 1" in capsys.readouterr().err


def test_disagreement_is_seen(policy, batch):
    """Of another forced answer, and of a model that does not come to say [SEG]."""
    model = policy()
    same = teacher.compare(model, batch, 14)
    assert same["same_tokens"] == same["says_seg"] == [True] * 4 and same[
        "sampled_iou"
    ] == pytest.approx(same["forced_iou"], abs=1e-3)
    model.prompts.forced_answer = model.tokenizer.encode("It is [SEG]", add_special_tokens=False)
    other = teacher.compare(model, batch, 14)
    assert (
        other["same_tokens"] == [False] * 4
        and other["says_seg"] == [True] * 4
        and other["sampled_iou"] == same["sampled_iou"]
    )
    assert min(other["agreement"]) < 0.999 and other["forced_iou"] != same["forced_iou"]
    model.model.language_model.lm_head.weight.data[model.model.seg_id] = 0
    silent = teacher.compare(model, batch, 14)
    assert (
        silent["same_tokens"] == silent["says_seg"] == [False] * 4
        and silent["agreement"] == silent["sampled_iou"] == [0] * 4
    )
    assert max(silent["forced_iou"]) > 0
