"""tools/benchmark.py at a tiny size: the figures that it must give, none of their values."""
import json
from types import SimpleNamespace

import pytest
from transformers import Qwen2Config

from tools import benchmark

TINY = Qwen2Config(vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
                   tie_word_embeddings=False)

def test_data(tmp_path, capsys):
    benchmark.main(["data", "--num_workers", "1", "--num_images", "8", "--width", "320", "--height", "240", "--num_batches", "4",
                    "--rounds", "1", "--num_rows", "300", "--output", str(tmp_path / "data.json")])
    found = json.loads((tmp_path / "data.json").read_text())
    assert found == json.loads(capsys.readouterr().out)
    loader, opening = found["loader"], found["opening"]
    assert loader["ratio"] == pytest.approx(loader["loader_samples_per_second"] / loader["bare_samples_per_second"]) and loader["ratio"] > 0
    assert loader["cpu_ratio"] > 0 and loader["image"] == "320x240"
    assert opening["rows"] == 300 and opening["seconds"] > 0 and 0 < opening["peak_memory_increase_mib"] < 300
    assert opening["jpeg_bytes"] > 10_000 and opening["mask_characters"] > 300


def test_decode(tmp_path, monkeypatch):
    """Every sampler draws, and is put beside the floor; the sizes of the real run are only replaced."""
    monkeypatch.setattr(benchmark, "Sa2VAConfig", lambda **_: type("Config", (), dict(llm=TINY)))
    benchmark.main(["decode", "--device", "cpu", "--num_prompts", "1", "2", "--num_generations", "2", "--prompt_length", "5",
                    "--num_tokens", "4", "--lora_r", "4", "--rounds", "1", "--copy_mib", "1", "--output", str(tmp_path / "decode.json")])
    found = json.loads((tmp_path / "decode.json").read_text())
    assert found["bandwidth_tb_per_second"] > 0 and [size["rows"] for size in found["sizes"]] == [2, 4]
    for size in found["sizes"]:
        assert set(size["samplers"]) == {"decoder", "plain", "generate"} and size["floor_ms"] > 0
        for times in size["samplers"].values():
            assert times["ratio_to_floor"] == pytest.approx(times["ms_per_token"] / size["floor_ms"]) and times["first_token_ms"] > 0


def test_logprob(tmp_path, monkeypatch, capsys):
    """Both ways give one gradient, of which float32 is the judge; what only a GPU counts is NaN."""
    monkeypatch.setattr(benchmark, "Sa2VAConfig", lambda **_: type("Config", (), dict(llm=TINY)))
    benchmark.main(["logprob", "--device", "cpu", "--num_prompts", "2", "--num_generations", "3", "--prompt_length", "9", "--num_tokens", "5",
                    "--lora_r", "4", "--rounds", "1", "--matmul_size", "64", "--output", str(tmp_path / "logprob.json")])
    found = json.loads((tmp_path / "logprob.json").read_text())
    ways = found["ways"]
    assert list(ways) == ["plain", "shared prompt", "and kernels"] and found["matmul_tflops"] > 0
    assert ways["and kernels"]["tflop"] == ways["shared prompt"]["tflop"] < 0.7 * ways["plain"]["tflop"]
    for way in ways.values():
        assert way["times_faster"] == pytest.approx(ways["plain"]["seconds"] / way["seconds"])
        assert way["share_of_ceiling"] == pytest.approx(way["tflop"] / way["seconds"] / found["matmul_tflops"])
        assert way["gradient_error"]["relative"] < 0.1 and way["logp_error"] < 0.1 and way["entropy_error"] < 0.1
        assert way["against_plain"]["cosine"] > 0.99
    assert "and kernels" in capsys.readouterr().out


def test_floor_counts_each_byte_once():
    model = benchmark.random_llm(TINY, 4, "cpu")
    layer = 64 * 64 + 64 + 2 * (64 * 32 + 32) + 64 * 64 + 3 * 64 * 96 + 2 * 64                  # q, k, v with biases, o, MLP, norms
    lora = 4 * (128 + 2 * 96 + 128 + 3 * 160)
    cache = 2 * 1 * 32 * 2 * (3 * 10 + 6 * 4)                                                   # k, v; slots of prompts and rows
    args = SimpleNamespace(prompt_length=10, num_tokens=8)
    assert benchmark.floor_bytes(model, 3, 6, args) == 2 * (2 * (layer + lora) + 64 + 300 * 64 + cache)
