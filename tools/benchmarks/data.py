"""The training loader against bare decoding and the two resizes; the opening of a large data set."""

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
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from rl_train.data import GraspAnyRegionDataset
from rl_train.data.images import decode_image
from rl_train.data.loader import StepSampler, train_loader
from rl_train.policies.lora import load_tokenizer
from rl_train.policies.sa2va_inputs import Sa2VAInputs
from sa2va_hf import Sa2VAProcessor
from sa2va_hf.prompts import PromptBuilder
from tools.gar_writer import INSTRUCTION, SCHEMA, encode_mask
from tools.make_demo import SHIPPED_CHECKPOINT

PREFETCH = 2  # batches that each worker is ahead: DataLoader's default

CAPTION = (
    "A red ceramic cup with a white rim and a chipped handle stands on a wooden table next to a folded newspaper. "
    * 3
)
REAL_SIZES = SimpleNamespace(
    image_size=448,
    grid_size=16,
    sam2=SimpleNamespace(image_size=1024),  # of Sa2VA-4B
    raw=dict(max_dynamic_patch=12, min_dynamic_patch=1, use_thumbnail=True),
)
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
        return sum(
            image.resize((side, side)).width
            for side in (REAL_SIZES.image_size, REAL_SIZES.sam2.image_size)
        )


def smooth_noise(rng, width: int, height: int, cell: int, channels: int) -> np.ndarray:
    """(H, W, channels) uint8 noise with blobs of about `cell` pixels."""
    coarse = rng.integers(0, 256, (-(-height // cell), -(-width // cell), channels), dtype=np.uint8)
    return np.stack(
        [
            np.asarray(Image.fromarray(coarse[..., c]).resize((width, height)))
            for c in range(channels)
        ],
        axis=-1,
    )


def make_rows(num: int, width: int, height: int, quality: int = 90) -> list[dict]:
    """`num` different rows of GAR's columns: JPEGs with detail at several scales, and regions with curved outlines."""
    rows = []
    for i in range(num):
        rng = np.random.default_rng([0, i])
        layers = [
            smooth_noise(rng, width, height, cell, 3).astype(np.float32) for cell in (160, 20, 4)
        ]
        image = Image.fromarray(
            (0.6 * layers[0] + 0.3 * layers[1] + 0.1 * layers[2]).astype(np.uint8)
        )
        mask = smooth_noise(rng, width, height, 160, 1)[..., 0] > 160
        file = io.BytesIO()
        image.save(file, format="JPEG", quality=quality)
        rows.append(
            {
                "image": {"bytes": file.getvalue(), "path": None},
                "mask_rle": encode_mask(mask),
                "catagory": ["cup"],
                "conversations": [
                    {"from": "human", "value": INSTRUCTION},
                    {"from": "gpt", "value": CAPTION},
                ],
            }
        )
    return rows


def write_shards(folder: Path, rows: list[dict], num_rows: int, rows_per_shard: int = 2000):
    """`num_rows` rows, which repeat `rows`, in Arrow shards of GAR's layout."""
    folder.mkdir(parents=True)
    table = pa.Table.from_pylist(
        [rows[i % len(rows)] for i in range(min(rows_per_shard, num_rows))], schema=SCHEMA
    )
    for number, start in enumerate(range(0, num_rows, rows_per_shard)):
        with pa.ipc.new_stream(str(folder / f"data-{number:05d}.arrow"), SCHEMA) as writer:
            writer.write_table(table.slice(0, num_rows - start), max_chunksize=1000)


def cpu_seconds() -> float:
    """Of this process and of the children that have ended."""
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def speed(loader, args) -> tuple[float, float]:
    """(samples per second from when each worker has filled its buffers once, CPU seconds of all processes per sample of all)."""
    before, batches, num_first = (
        cpu_seconds(),
        iter(loader),
        (PREFETCH + 2) * max(1, args.num_workers),
    )
    for _ in range(num_first):
        next(batches)
    start = time.perf_counter()
    for _ in range(args.num_batches):
        next(batches)
    rate = args.num_batches * args.batch_size / (time.perf_counter() - start)
    del batches, loader  # ends the workers
    ahead = PREFETCH * args.num_workers  # batches that they prepared for nothing
    return rate, (cpu_seconds() - before) / (
        (num_first + args.num_batches + ahead) * args.batch_size
    )


def loader_against_bare(folder: Path, rows: list[dict], args) -> dict:
    """The training loader against bare decoding with the two resizes, round by round in turns."""
    prompts = PromptBuilder(load_tokenizer(SHIPPED_CHECKPOINT), "phi3_chat", 256)
    inputs = Sa2VAInputs(Sa2VAProcessor(REAL_SIZES, max_tiles=1), prompts, 32768, 128)
    dataset, bare = GraspAnyRegionDataset(folder), Bare([row["image"]["bytes"] for row in rows])
    found = {"loader": [], "bare": []}
    for round_number in range(args.rounds):
        for name, data in (("bare", bare), ("loader", dataset)):
            sampler = StepSampler(len(data), args.batch_size, 1, round_number)
            found[name].append(
                speed(
                    train_loader(data, inputs, sampler, args.num_workers)
                    if name == "loader"
                    else DataLoader(
                        data,
                        batch_sampler=sampler,
                        num_workers=args.num_workers,
                    ),
                    args,
                )
            )
    (ours, our_cpu), (least, least_cpu) = (zip(*found[name]) for name in ("loader", "bare"))
    ratios = [a / b for a, b in zip(ours, least)]
    return dict(
        num_workers=args.num_workers,
        image=f"{args.width}x{args.height}",
        jpeg_bytes=round(statistics.mean(map(len, bare.jpegs))),
        loader_samples_per_second=statistics.median(ours),
        bare_samples_per_second=statistics.median(least),
        ratio=statistics.median(ratios),
        ratios=ratios,
        cpu_ratio=statistics.median(b / a for a, b in zip(our_cpu, least_cpu)),
    )


def opening(folder: Path, num_rows: int) -> dict:
    """Seconds and memory that opening a data set of many rows takes, in a process of its own."""
    rows = make_rows(16, 640, 480, 50)
    write_shards(folder, rows, num_rows)
    done = subprocess.run(
        [sys.executable, "-c", OPEN, str(folder)], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout) | dict(
        jpeg_bytes=round(statistics.mean(len(row["image"]["bytes"]) for row in rows)),
        mask_characters=round(statistics.mean(len(row["mask_rle"]["counts"]) for row in rows)),
        gigabytes=sum(path.stat().st_size for path in folder.iterdir()) / 1e9,
    )


def measure(args) -> dict:
    """{"loader", "opening"}: see `loader_against_bare` and `opening`. Its files are temporary."""
    with tempfile.TemporaryDirectory() as folder:
        rows = make_rows(args.num_images, args.width, args.height)
        write_shards(Path(folder) / "large", rows, len(rows))
        found = {"loader": loader_against_bare(Path(folder) / "large", rows, args)}
        return found | {"opening": opening(Path(folder) / "many", args.num_rows)}


def add_arguments(parser):
    parser.add_argument("--num_workers", type=int, default=2, help="of both loaders")
    parser.add_argument("--batch_size", type=int, default=4, help="samples per batch")
    parser.add_argument("--num_images", type=int, default=64, help="different images")
    parser.add_argument("--width", type=int, default=1280, help="of an image, pixels")
    parser.add_argument("--height", type=int, default=960, help="of an image, pixels")
    parser.add_argument("--num_batches", type=int, default=40, help="timed in each round")
    parser.add_argument(
        "--rounds", type=int, default=5, help="of either loader, in turns; the median counts"
    )
    parser.add_argument(
        "--num_rows", type=int, default=50_000, help="of the data set that is opened"
    )
