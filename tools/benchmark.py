"""Measure the parts that a run's speed depends on.

    python -m tools.benchmark data [--num_workers 2] [--output data.json]     # the loader and the opening of a data set
    python -m tools.benchmark decode [--static] [--output decode.json]        # the token sampler, on a GPU, at Sa2VA-4B's sizes
    python -m tools.benchmark logprob [--output logprob.json]                 # the update's forward and backward, likewise
"""
import argparse
import io
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from rl_train.data import GraspAnyRegionDataset
from rl_train.data.images import decode_image
from rl_train.data.loader import PREFETCH, StepSampler, train_loader
from rl_train.fused import unsupported
from rl_train.sampler import decoder_of, generate_plain
from sa2va_hf import Sa2VAConfig, Sa2VAProcessor
from tools.benchmark_llm import random_llm, seconds
from tools.benchmark_logprob import logprob_speeds
from tools.gar_writer import INSTRUCTION, SCHEMA, encode_mask
from tools.random_checkpoint import CONFIG_4B

CAPTION = "A red ceramic cup with a white rim and a chipped handle stands on a wooden table next to a folded newspaper. " * 3
REAL_SIZES = SimpleNamespace(image_size=448, grid_size=16, sam2=SimpleNamespace(image_size=1024),     # of Sa2VA-4B
                             raw=dict(max_dynamic_patch=12, min_dynamic_patch=1, use_thumbnail=True))
OPEN = """
import json, sys, time
from rl_train.data import GraspAnyRegionDataset
peak = lambda: int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) / 1024   # ru_maxrss is inherited
before, start = peak(), time.perf_counter()
dataset = GraspAnyRegionDataset(sys.argv[1])
seconds = time.perf_counter() - start
print(json.dumps(dict(rows=len(dataset), seconds=seconds, peak_memory_increase_mib=peak() - before)))
"""


class Bare(Dataset):
    """JPEG decode and the two resizes, and nothing else: the least that a loader can do."""

    def __init__(self, jpegs: list[bytes]):
        self.jpegs = jpegs

    def __len__(self):
        return len(self.jpegs)

    def __getitem__(self, i: int) -> int:
        image = decode_image(self.jpegs[i])
        return sum(image.resize((side, side)).width for side in (REAL_SIZES.image_size, REAL_SIZES.sam2.image_size))


def smooth_noise(rng, width: int, height: int, cell: int, channels: int) -> np.ndarray:
    """(H, W, channels) uint8 noise with blobs of about `cell` pixels."""
    coarse = rng.integers(0, 256, (-(-height // cell), -(-width // cell), channels), dtype=np.uint8)
    return np.stack([np.asarray(Image.fromarray(coarse[..., c]).resize((width, height))) for c in range(channels)], axis=-1)


def make_rows(num: int, width: int, height: int, quality: int = 90) -> list[dict]:
    """`num` different rows of GAR's columns: JPEGs with detail at several scales, and regions with curved outlines."""
    rows = []
    for i in range(num):
        rng = np.random.default_rng([0, i])
        layers = [smooth_noise(rng, width, height, cell, 3).astype(np.float32) for cell in (160, 20, 4)]
        image = Image.fromarray((0.6 * layers[0] + 0.3 * layers[1] + 0.1 * layers[2]).astype(np.uint8))
        mask = smooth_noise(rng, width, height, 160, 1)[..., 0] > 160
        file = io.BytesIO()
        image.save(file, format="JPEG", quality=quality)
        rows.append({"image": {"bytes": file.getvalue(), "path": None},
                     "mask_rle": encode_mask(mask), "catagory": ["cup"],
                     "conversations": [{"from": "human", "value": INSTRUCTION}, {"from": "gpt", "value": CAPTION}]})
    return rows


def write_shards(folder: Path, rows: list[dict], num_rows: int, rows_per_shard: int = 2000):
    """`num_rows` rows, which repeat `rows`, in Arrow shards of GAR's layout."""
    folder.mkdir(parents=True)
    table = pa.Table.from_pylist([rows[i % len(rows)] for i in range(min(rows_per_shard, num_rows))], schema=SCHEMA)
    for number, start in enumerate(range(0, num_rows, rows_per_shard)):
        with pa.ipc.new_stream(str(folder / f"data-{number:05d}.arrow"), SCHEMA) as writer:
            writer.write_table(table.slice(0, num_rows - start), max_chunksize=1000)


def cpu_seconds() -> float:
    """Of this process and of the children that have ended."""
    return sum(usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))


def speed(loader, args) -> tuple[float, float]:
    """(samples per second from when each worker has filled its buffers once, CPU seconds of all processes per sample of all)."""
    before, batches, num_first = cpu_seconds(), iter(loader), (PREFETCH + 2) * max(1, args.num_workers)
    for _ in range(num_first):
        next(batches)
    start = time.perf_counter()
    for _ in range(args.num_batches):
        next(batches)
    rate = args.num_batches * args.batch_size / (time.perf_counter() - start)
    del batches, loader                                                      # ends the workers
    ahead = PREFETCH * args.num_workers                                      # batches that they prepared for nothing
    return rate, (cpu_seconds() - before) / ((num_first + args.num_batches + ahead) * args.batch_size)


def loader_against_bare(folder: Path, rows: list[dict], args) -> dict:
    """The training loader against bare decoding with the two resizes, round by round in turns."""
    processor = Sa2VAProcessor(REAL_SIZES, max_tiles=1)
    dataset, bare = GraspAnyRegionDataset(folder), Bare([row["image"]["bytes"] for row in rows])
    found = {"loader": [], "bare": []}
    for round_number in range(args.rounds):
        for name, data in (("bare", bare), ("loader", dataset)):
            sampler = StepSampler(len(data), args.batch_size, 1, round_number)
            found[name].append(speed(train_loader(data, processor, sampler, args.num_workers) if name == "loader" else
                                     DataLoader(data, batch_sampler=sampler, num_workers=args.num_workers,
                                                prefetch_factor=PREFETCH if args.num_workers else None), args))
    (ours, our_cpu), (least, least_cpu) = (zip(*found[name]) for name in ("loader", "bare"))
    ratios = [a / b for a, b in zip(ours, least)]
    return dict(num_workers=args.num_workers, image=f"{args.width}x{args.height}", jpeg_bytes=round(statistics.mean(map(len, bare.jpegs))),
                loader_samples_per_second=statistics.median(ours), bare_samples_per_second=statistics.median(least),
                ratio=statistics.median(ratios), ratios=ratios,
                cpu_ratio=statistics.median(b / a for a, b in zip(our_cpu, least_cpu)))


def opening(folder: Path, num_rows: int) -> dict:
    """Seconds and memory that opening a data set of many rows takes, in a process of its own."""
    rows = make_rows(16, 640, 480, 50)
    write_shards(folder, rows, num_rows)
    done = subprocess.run([sys.executable, "-c", OPEN, str(folder)], capture_output=True, text=True, check=True)
    return json.loads(done.stdout) | dict(jpeg_bytes=round(statistics.mean(len(row["image"]["bytes"]) for row in rows)),
                                          mask_characters=round(statistics.mean(len(row["mask_rle"]["counts"]) for row in rows)),
                                          gigabytes=sum(path.stat().st_size for path in folder.iterdir()) / 1e9)


def benchmark_data(args) -> dict:
    """{"loader", "opening"}: see `loader_against_bare` and `opening`. Its files are temporary."""
    with tempfile.TemporaryDirectory() as folder:
        rows = make_rows(args.num_images, args.width, args.height)
        write_shards(Path(folder) / "large", rows, len(rows))
        found = {"loader": loader_against_bare(Path(folder) / "large", rows, args)}
        return found | {"opening": opening(Path(folder) / "many", args.num_rows)}


def floor_bytes(model, num_prompts: int, num_rows: int, args) -> int:
    """What a token must read once: all weights but the embedding table, the LoRA in bf16, the keys and values of a mean token."""
    config, embedding = model.config, model.get_input_embeddings().weight
    weights = 2 * sum(p.numel() for p in model.parameters() if p is not embedding)
    slot = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * model.model.layers[0].self_attn.head_dim
    return weights + slot * (num_prompts * args.prompt_length + num_rows * args.num_tokens // 2)


def samplers(model, num_prompts: int, args) -> dict:
    """{name: function of a number of new tokens}: each draws that many for each row, without stopping."""
    group, width = args.num_generations, model.config.hidden_size
    embeds = torch.randn(num_prompts, args.prompt_length, width, device=args.device, dtype=torch.bfloat16)
    mask = torch.ones(num_prompts, args.prompt_length, dtype=torch.long, device=args.device)

    def ours(function):
        def work(num_tokens):
            uniforms = torch.rand(num_prompts * group, num_tokens, dtype=torch.float64, device=args.device)
            function(model, embeds, mask, num_generations=group, max_new_tokens=num_tokens, stop=None, pad_id=0, temperature=1.0,
                     uniforms=uniforms)
        return work

    def huggingface(**how):
        def work(num_tokens):
            found = model.generate(
                inputs_embeds=embeds.repeat_interleave(group, 0), attention_mask=mask.repeat_interleave(group, 0), do_sample=True, top_k=0,
                top_p=1.0, max_new_tokens=num_tokens, min_new_tokens=num_tokens, pad_token_id=0, **how)
            assert found.shape == (num_prompts * group, num_tokens)
        return work

    named = {"decoder": ours(decoder_of(model).generate), "plain": ours(generate_plain), "generate": huggingface()}
    return named | ({"generate, static": huggingface(cache_implementation="static")} if args.static else {})


@torch.no_grad()
def decode_speeds(config, args) -> dict:
    """Bandwidth of a copy, and for each number of prompts the floor and every sampler's time of a token after the first."""
    model = random_llm(config, args.lora_r, args.device)
    reason = unsupported(model)
    if reason:
        raise ValueError(f"the fast sampler does not take this model: {reason}")
    source = torch.zeros(args.copy_mib * 2**20, dtype=torch.uint8, device=args.device)
    target = torch.empty_like(source)
    bandwidth = 2 * source.numel() / seconds(lambda: target.copy_(source), args)
    del source, target
    found = dict(device=torch.cuda.get_device_name(args.device) if torch.device(args.device).type == "cuda" else "cpu",
                 bandwidth_tb_per_second=bandwidth / 1e12, sizes=[])
    print(f"{found['device']}, copy {bandwidth / 1e12:.2f} TB/s")
    print(f"{'rows':>5} {'sampler':18} {'ms/token':>9} {'x floor':>8} {'first token ms':>15}")
    for num_prompts in args.num_prompts:
        rows = num_prompts * args.num_generations
        floor = 1e3 * floor_bytes(model, num_prompts, rows, args) / bandwidth
        size = dict(rows=rows, num_prompts=num_prompts, floor_ms=floor, samplers={})
        found["sizes"].append(size)
        print(f"{rows:>5} {'floor':18} {floor:>9.2f}")
        for name, work in samplers(model, num_prompts, args).items():
            with torch.autocast(torch.device(args.device).type, torch.bfloat16):
                whole, first = (1e3 * seconds(lambda n=n, w=work: w(n), args) for n in (args.num_tokens, 1))
            token = (whole - first) / (args.num_tokens - 1)
            size["samplers"][name] = dict(ms_per_token=token, ratio_to_floor=token / floor, first_token_ms=first, total_ms=whole)
            print(f"{rows:>5} {name:18} {token:>9.2f} {token / floor:>8.2f} {first:>15.1f}")
    return found


def benchmark_decode(args) -> dict:
    """See `decode_speeds`."""
    return decode_speeds(Sa2VAConfig(**CONFIG_4B).llm, args)


def benchmark_logprob(args) -> dict:
    """See `logprob_speeds`."""
    return logprob_speeds(Sa2VAConfig(**CONFIG_4B).llm, args)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    data = commands.add_parser("data", help="the loader against bare decoding and resizing; opening a large data set",
                               formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    data.set_defaults(measure=benchmark_data)
    data.add_argument("--num_workers", type=int, default=2, help="of both loaders")
    data.add_argument("--batch_size", type=int, default=4, help="samples per batch")
    data.add_argument("--num_images", type=int, default=64, help="different images")
    data.add_argument("--width", type=int, default=1280, help="of an image, pixels")
    data.add_argument("--height", type=int, default=960, help="of an image, pixels")
    data.add_argument("--num_batches", type=int, default=40, help="timed in each round")
    data.add_argument("--rounds", type=int, default=5, help="of either loader, in turns; the median counts")
    data.add_argument("--num_rows", type=int, default=50_000, help="of the data set that is opened")
    decode = commands.add_parser("decode", help="the token sampler against memory bandwidth and the alternatives, random weights",
                                 formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    decode.set_defaults(measure=benchmark_decode)
    decode.add_argument("--num_prompts", type=int, nargs="+", default=[4, 16], help="prompts in a batch, measured one after the other")
    decode.add_argument("--num_generations", type=int, default=8, help="rows of each prompt")
    decode.add_argument("--prompt_length", type=int, default=400, help="tokens")
    decode.add_argument("--num_tokens", type=int, default=128, help="new tokens of each row")
    decode.add_argument("--lora_r", type=int, default=128, help="rank")
    decode.add_argument("--rounds", type=int, default=5, help="of each measurement; the median counts")
    decode.add_argument("--copy_mib", type=int, default=4096, help="size of the copy that measures the bandwidth")
    decode.add_argument("--static", action="store_true", help="generate with a compiled static cache too; compiling takes minutes")
    decode.add_argument("--device", default="cuda", help="where")
    logprob = commands.add_parser("logprob", help="forward and backward of the update's log-probs against the plain way, random weights",
                                  formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    logprob.set_defaults(measure=benchmark_logprob)
    logprob.add_argument("--num_prompts", type=int, default=4, help="prompts in a batch")
    logprob.add_argument("--num_generations", type=int, default=8, help="rows of each prompt")
    logprob.add_argument("--prompt_length", type=int, default=400, help="tokens")
    logprob.add_argument("--num_tokens", type=int, default=128, help="of each row's completion")
    logprob.add_argument("--lora_r", type=int, default=128, help="rank")
    logprob.add_argument("--rounds", type=int, default=5, help="of each way, in turns; the median counts")
    logprob.add_argument("--matmul_size", type=int, default=8192, help="of the square matrices whose product measures the ceiling")
    logprob.add_argument("--device", default="cuda", help="where")
    for command in (data, decode, logprob):
        command.add_argument("--output", type=Path, help="JSON file for the figures")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    found = args.measure(args)
    print(json.dumps(found, indent=1))
    if args.output:
        args.output.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
