"""Hostile rows of all three formats, from their files to the model: each is refused by name, or
whole.

    python -m tests.campaigns.fuzz_samples --samples 20000 [--forward_every 50]

Prints how many were refused, why, and how many were whole and put through the tiny model.
"""

import argparse
import faulthandler
import json
import pickle
import random
import resource
import shutil
import tempfile
import time
import unicodedata
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from rl_train.config.grpo_config import PolicyConfig
from rl_train.data import (
    DamagedSample,
    DescribeAnythingDataset,
    GraspAnyRegionDataset,
    RefCOCODataset,
)
from rl_train.data.loader import Batches
from rl_train.data.rle import mask_size
from rl_train.data.text import phrase
from rl_train.policies.sa2va import build_policy
from rl_train.policies.sa2va_queries import caption_likelihood, segment
from sa2va_hf import Sa2VAProcessor
from tests.data import dam_splits, gar_rows
from tests.data.hostile import HALVES, image_of, mask_of, place_of, text_of
from tools.demo.make_demo import SHIPPED_CHECKPOINT
from tools.gar_writer import SCHEMA

PER_FOLDER = 25  # samples
SECONDS, GIB = 20, 3  # that a sample may take, and memory of the process, the model included


def write_gar(rng: random.Random, folder: Path) -> list[str]:
    """The image ids of the samples that are written."""
    rows = []
    (folder / "Part1").mkdir()
    for k in range(PER_FOLDER):
        data, size = image_of(rng)
        rle, text = mask_of(rng, size), text_of(rng)
        if rle and isinstance(rle["counts"], list):
            rle = None
        said = [("human", "?"), ("gpt", text and text.encode(errors="replace").decode())]
        cell = place_of(rng, data, folder / "Part1", f"{k}.img")
        rows.append(gar_rows.row(image=cell, mask_rle=rle, conversations=gar_rows.turns(*said)))
    gar_rows.write(folder / "Part1" / "data-0.arrow", rows, SCHEMA)
    return [f"Part1/data-0/{k}" for k in range(PER_FOLDER)]


def write_dam(rng: random.Random, folder: Path) -> list[str]:
    annotations, members, names = {}, [("../x.jpg", b""), ("/x.jpg", b"")], []
    for k in range(PER_FOLDER):
        data, size = image_of(rng)
        name = f"{k}{rng.choice(['', '', '', 'é', ' ', chr(10), HALVES[0], chr(0x202E)])}"
        annotations[name] = {"caption": text_of(rng), "mask_rle": mask_of(rng, size)}
        if data is not None and name.isprintable():
            members.append((f"{name}.jpg", data))
        names.append(f"S/{name}/0")
    dam_splits.write(folder / "S", annotations, members)
    return names


def write_refcoco(rng: random.Random, folder: Path) -> list[str]:
    images, annotations, refs = [], [], []
    (folder / "refcoco").mkdir()
    for k in range(PER_FOLDER):
        data, (width, height) = image_of(rng)
        if data is not None:
            (folder / f"{k}.jpg").write_bytes(data)
        sides = [rng.randrange(-5, 2 * side + 5) for side in (width, height) * 4]
        odd = rng.choice(
            [[], [[]], [[1, 2, 3]], None, [["x"] * 6], [[1e300] * 6], "x", [sides, {}]]
        )
        rle = mask_of(rng, (width, height))
        segmentation = rng.choice([[sides], [sides[:6]], rle, [rle], odd])
        name = rng.choice([f"{k}.jpg"] * 9 + [f"../{k}.jpg"])
        images.append(dict(id=k, file_name=name, width=width, height=height))
        annotations.append(dict(id=k, image_id=k, segmentation=segmentation, category_id=1))
        sentences = [dict(sent_id=k, sent=text_of(rng) or "")]
        refs.append(dict(ref_id=k, ann_id=k, split="val", sentences=sentences))
    content = dict(images=images, annotations=annotations, categories=[dict(id=1, name="cup")])
    (folder / "refcoco" / "instances.json").write_text(json.dumps(content))
    (folder / "refcoco" / "refs(unc).p").write_bytes(pickle.dumps(refs))
    return [f"refcoco/val/{k}/{k}" for k in range(PER_FOLDER)]


FORMATS = (
    (write_gar, GraspAnyRegionDataset),
    (write_dam, DescribeAnythingDataset),
    (write_refcoco, RefCOCODataset),
)


class Fuzz:
    """Reads folders, checks what is whole, and counts the rest by reason."""

    def __init__(self, forward_every: int):
        config = PolicyConfig(
            model_path=str(SHIPPED_CHECKPOINT), dtype="float32", lora_r=1, lora_alpha=1
        )
        self.policy = build_policy(config, ("lora",), 100, "cpu")
        self.policies = {n: Sa2VAProcessor(self.policy.model.config, n) for n in (1, 6)}
        self.forward_every, self.counts, self.slowest = forward_every, Counter(), 0.0

    def folder(self, number: int, folder: Path):
        """Write and read the samples of one folder."""
        rng = random.Random(number)
        write, reader = FORMATS[number % 3]
        names = write(rng, folder)
        self.policy.processor = self.policies[(1, 6)[number % 2]]
        try:
            dataset = reader(folder)
        except ValueError as error:  # it names the folder, and the reasons for each row
            assert "holds no usable region" in str(error), error
            self.counts["all of a folder"] += PER_FOLDER
            return
        report = dataset.report()
        assert report["kept"] + sum(report["skipped"].values()) == PER_FOLDER, (number, report)
        self.counts.update(report["skipped"])
        for i in range(len(dataset)):
            start = time.monotonic()
            self.sample(dataset, i, names, number)
            self.slowest = max(self.slowest, time.monotonic() - start)
            assert self.slowest < SECONDS, (number, i)

    def sample(self, dataset, i: int, names: list[str], number: int):
        inputs = self.policy.preprocessor(100, 512)
        try:
            sample = dataset[i]
            inputs.check(sample)
        except DamagedSample as error:
            assert error.image_id in names and error.reason, (number, i)
            assert str(error).isprintable(), str(error)
            words = error.reason.split()
            self.counts[" ".join(w for w in words if not any(c.isdigit() for c in w))] += 1
            return
        self.counts["whole"] += 1
        where, caption = (number, i), sample["caption"]
        assert sample["image_id"] in names and sample["image"].mode == "RGB", where
        assert sample["mask"].dtype == bool and sample["mask"].any(), where
        assert sample["mask"].shape == mask_size(*sample["image"].size[::-1]), where
        assert caption.strip() == caption != "" and caption.splitlines() == [caption], where
        assert not any(unicodedata.category(c) in ("Cc", "Cs") for c in caption), where
        batch = Batches([sample], inputs)[[0]]
        self.check_inputs(batch, where)
        self.check_prompts(batch, caption, where)
        if self.counts["whole"] % self.forward_every == 0:
            self.forward(batch, where)

    def check_inputs(self, batch, where):
        """The documented shapes, whatever the image was."""
        processor, [tiles] = self.policy.processor, batch.inputs.tiles
        side, grid, sam = processor.image_size, processor.grid_size, processor.sam_size
        assert 1 <= len(tiles) <= processor.max_tiles + (processor.max_tiles > 1), where
        assert tiles.shape[1:] == (3, side, side) and tiles.dtype == torch.uint8, where
        assert batch.inputs.sam_pixels.shape == (1, 3, sam, sam), where
        assert (
            batch.inputs.prompt_masks.shape == (1, grid, grid) and batch.inputs.prompt_masks.any()
        ), where

    def check_prompts(self, batch, caption: str, where):
        """Prompts have as many image tokens as the model is fed, and no further special token."""
        prompts, tiles = self.policy.prompts, len(batch.inputs.tiles[0])
        cells, image = int(batch.inputs.prompt_masks.sum()), tiles * prompts.tokens_per_tile
        found = prompts.segment(phrase(caption), tiles)
        special = prompts.tokenizer.added_tokens_decoder
        added = lambda ids: [i for i in ids if i in special]  # noqa: E731
        assert found.count(prompts.context_id) == image, where
        assert added(found) == added(prompts.segment("x", tiles)), where
        assert added(prompts.answer(caption)) == added(prompts.answer("x")), where
        assert prompts.describe(tiles, cells).count(prompts.context_id) == image + cells, where
        assert len(found) + 100 <= self.policy.model.config.llm.max_position_embeddings, where

    @torch.no_grad()
    def forward(self, batch, where):
        """Both prompts through the tiny model."""
        images = self.policy.encode(batch)
        [mask] = segment(self.policy, images, [0], batch.captions).masks
        assert mask.shape == batch.masks[0].shape, where
        question = (self.policy, images, [0], batch.masks, batch.captions)
        assert 0 < caption_likelihood(*question, 64).item() <= 1, where
        prompts = self.policy.segment_prompts(images, [0], batch.captions)
        hidden = self.policy.last_hidden_states(images, prompts)
        assert np.isfinite(hidden.numpy()).all() and hidden.abs().sum() > 0, where
        self.counts["forward"] += 1


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=300)
    parser.add_argument("--forward_every", type=int, default=10, help="of the whole samples")
    parser.add_argument("--first", type=int, default=0, help="number of the first folder")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # pillow's, of every damaged image
    fuzz, start = Fuzz(args.forward_every), time.monotonic()
    for number in tqdm(range(args.first, args.first + args.samples // PER_FOLDER), disable=None):
        faulthandler.dump_traceback_later(PER_FOLDER * SECONDS, exit=True)
        folder = Path(tempfile.mkdtemp())
        fuzz.folder(number, folder)
        shutil.rmtree(folder)
    gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    assert gib < GIB, gib
    seen = dict(samples=args.samples // PER_FOLDER * PER_FOLDER, slowest=round(fuzz.slowest, 2))
    seen |= dict(gib=round(gib, 2), seconds=round(time.monotonic() - start))
    print(json.dumps(seen | {"counts": dict(fuzz.counts.most_common())}))


if __name__ == "__main__":
    main()
