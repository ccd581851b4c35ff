"""The training loader against bare decoding and the two resizes."""

import statistics
import tempfile
import time
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from rl_train.config.flags import COUNT, COUNT_OR_0, flag
from rl_train.data import GraspAnyRegionDataset
from rl_train.data.images import decode_image
from rl_train.data.loader import StepSampler, batch_loader
from rl_train.policies.sa2va_inputs import Sa2VAPreprocessor
from sa2va_hf import Sa2VAProcessor
from sa2va_hf.prompts import PromptBuilder
from sa2va_hf.tokenizer import load_tokenizer
from tools.benchmarks.families import DEMO
from tools.gar_writer import encode_image, write_gar

PREFETCH = 2  # batches that each worker is ahead: DataLoader's default
CAPTION = "A red ceramic cup with a chipped handle stands on a table next to a newspaper. " * 4
REAL_SIZES = SimpleNamespace(
    image_size=448,
    grid_size=16,
    sam2=SimpleNamespace(image_size=1024),  # of Sa2VA-4B
    raw=dict(
        vision_config={},  # these two say that it is an InternVL
        llm_config={},
        max_dynamic_patch=12,
        min_dynamic_patch=1,
        use_thumbnail=True,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """sizes"""

    num_workers: int = flag(2, "of both loaders", type=COUNT_OR_0)
    batch_size: int = flag(4, "samples per batch", type=COUNT)
    num_images: int = flag(64, "different images", type=COUNT)
    width: int = flag(1280, "of an image, pixels", type=COUNT)
    height: int = flag(960, "of an image, pixels", type=COUNT)
    num_batches: int = flag(40, "timed in each round", type=COUNT)
    rounds: int = flag(5, "of either loader, in turns; the median counts", type=COUNT)


class Bare(Dataset):
    """JPEG decoding and the two resizes: the least that a loader can do."""

    def __init__(self, jpegs: list[bytes]):
        self.jpegs = jpegs

    def __len__(self):
        return len(self.jpegs)

    def __getitem__(self, i: int) -> int:
        image = decode_image(self.jpegs[i])
        sides = REAL_SIZES.image_size, REAL_SIZES.sam2.image_size
        return sum(image.resize((side, side)).width for side in sides)


def make_rows(num: int, width: int, height: int) -> list[dict]:
    """Draw `num` rows for `write_gar`: detail of several sizes, regions of curved outlines."""
    rows, rng = [], np.random.default_rng(0)

    def blobs(size: int) -> Image.Image:
        shape = (-(-height // size), -(-width // size), 3)
        pixels = rng.integers(256, size=shape, dtype=np.uint8)
        return Image.fromarray(pixels).resize((width, height))

    for _ in range(num):
        image = Image.blend(blobs(160), Image.blend(blobs(20), blobs(4), 0.25), 0.4)
        region = np.asarray(blobs(160))[..., 0]
        mask = region > region.mean()
        rows.append(dict(image=image, mask=mask, caption=CAPTION, category="cup"))
    return rows


def speed(loader: DataLoader, options: Options) -> float:
    """Measure samples per second, from when each worker has filled its buffers once."""
    batches = iter(loader)
    for _ in range((PREFETCH + 2) * max(1, options.num_workers)):
        next(batches)
    start = time.perf_counter()
    for _ in range(options.num_batches):
        next(batches)
    return options.num_batches * options.batch_size / (time.perf_counter() - start)


def measure(options: Options) -> dict:
    """Return {"loader": samples per second of both loaders, in turns, and their ratio}."""
    prompts, workers = PromptBuilder(load_tokenizer(DEMO), "phi3_chat", 256), options.num_workers
    inputs = Sa2VAPreprocessor(Sa2VAProcessor(REAL_SIZES, max_tiles=1), prompts, 32768, 128)
    rows = make_rows(options.num_images, options.width, options.height)
    bare, speeds = Bare([encode_image(row["image"], "JPEG") for row in rows]), []
    with tempfile.TemporaryDirectory() as folder:
        write_gar(rows, folder, image_format="JPEG")
        dataset = GraspAnyRegionDataset(folder)
        for number in range(options.rounds):
            sampler = StepSampler(len(bare), options.batch_size, 1, number)
            least = DataLoader(bare, batch_sampler=sampler, num_workers=workers)
            ours = batch_loader(dataset, inputs, sampler, workers)
            speeds.append((speed(least, options), speed(ours, options)))
    ratios = [ours / least for least, ours in speeds]
    loader = dict(
        image=f"{options.width}x{options.height}",
        jpeg_bytes=round(statistics.mean(map(len, bare.jpegs))),
        loader_samples_per_second=statistics.median(ours for _, ours in speeds),
        bare_samples_per_second=statistics.median(least for least, _ in speeds),
        ratio=statistics.median(ratios),
        ratios=ratios,
    )
    return dict(loader=loader)
