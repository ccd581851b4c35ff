"""Run in the repository root on the GPU machine: python /tmp/wt6_gpu_check.py   (tests, then ms per token and kernels at 32 and 128 rows)."""
import collections, os, statistics, subprocess, sys, time
sys.path.insert(0, os.getcwd())
import torch
from types import SimpleNamespace

start = time.perf_counter()
log = lambda *a: print(f"[{time.perf_counter() - start:5.1f}s]", *a, flush=True)
log(torch.__version__, torch.cuda.get_device_name())
if "--no-tests" not in sys.argv:
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/test_decode.py", "--tb=short", "-p", "no:warnings"],
                          capture_output=True, text=True)
    log("gpu tests:", "\n".join(done.stdout.splitlines()[-40:] if done.returncode else done.stdout.splitlines()[-2:]))

from tools import benchmark
from tools.random_checkpoint import CONFIG_4B
from sa2va_hf import Sa2VAConfig
from rl_train.decode import Decoder
from rl_train import decode_torch

args = SimpleNamespace(device="cuda", prompt_length=400, num_tokens=128, num_generations=8, rounds=5, copy_mib=4096)
torch.set_grad_enabled(False)
model = benchmark.random_llm(Sa2VAConfig(**CONFIG_4B).llm, 128, "cuda")
source = torch.zeros(4096 * 2**20, dtype=torch.uint8, device="cuda"); target = torch.empty_like(source)
bandwidth = 2 * source.numel() / benchmark.seconds(lambda: target.copy_(source), args)
del source, target
log(f"copy {bandwidth / 1e12:.2f} TB/s; memory {torch.cuda.memory_allocated() / 2**30:.1f} GiB")
decoder = Decoder(model)
log("ops", decoder.ops.__name__, f"memory after fusing {torch.cuda.memory_allocated() / 2**30:.1f} GiB")


def run(decoder, num_prompts, tokens):
    n = num_prompts * 8
    embeds = torch.randn(num_prompts, 400, 2048, device="cuda", dtype=torch.bfloat16)
    with torch.autocast("cuda", torch.bfloat16):
        return decoder.generate(model, embeds, torch.ones(num_prompts, 400, dtype=torch.long, device="cuda"), num_generations=8,
                                max_new_tokens=tokens, stop=None, pad_id=0, temperature=1.0,
                                uniforms=torch.rand(n, tokens, dtype=torch.float64, device="cuda"))


def replay_ms(graph, count=100):
    times = []
    for _ in range(5):
        graph.step.fill_(0)
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        for _ in range(count):
            graph.graph.replay()
        b.record(); b.synchronize()
        times.append(a.elapsed_time(b) / count)
    return statistics.median(times)


for num_prompts in (4, 16):
    before = time.perf_counter()
    run(decoder, num_prompts, 128); torch.cuda.synchronize()
    first = time.perf_counter() - before
    whole = benchmark.seconds(lambda: run(decoder, num_prompts, 128), args)
    one = benchmark.seconds(lambda: run(decoder, num_prompts, 1), args)
    graph = list(decoder.graphs.values())[-1]
    floor = 1e3 * benchmark.floor_bytes(model, num_prompts, num_prompts * 8, args) / bandwidth
    ms, token = replay_ms(graph), 1e3 * (whole - one) / 127
    log(f"rows {num_prompts * 8}: floor {floor:.2f} ms; replay {ms:.2f} ms ({ms / floor:.2f}x); per token {token:.2f} ms ({token / floor:.2f}x); "
        f"generate(128) {whole:.3f} s, generate(1) {one:.3f} s; first call with capture {first:.1f} s")
    graph.step.fill_(60)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(10):
            graph.graph.replay()
        torch.cuda.synchronize()
    total = collections.defaultdict(lambda: [0.0, 0])
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            total[event.name][0] += event.time_range.elapsed_us() / 10
            total[event.name][1] += 1
    log(f"kernels a step {sum(c for _, c in total.values()) / 10:.0f}, busy {sum(t for t, _ in total.values()) / 1e3:.2f} ms")
    for name, (us, count) in sorted(total.items(), key=lambda item: -item[1][0])[:25]:
        print(f"   {us:9.1f} us/step {count / 10:6.1f}x {10 * us / max(count, 1):7.1f} us each  {name[:100]}")
if "--torch" in sys.argv:
    decoder.graphs.clear()
    decoder.ops = decode_torch
    run(decoder, 4, 8)
    log(f"plain torch ops, 32 rows: {replay_ms(list(decoder.graphs.values())[-1], 20):.2f} ms")
log("peak memory", f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
