"""Supervised training of the demo's Sa2VA from random weights, on drawn scenes."""

import time
from functools import cache, partial

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from rl_train.data.text import phrase
from rl_train.rewards.iou import mask_iou
from sa2va_hf.losses import resized_mask_loss
from sa2va_hf.processing_sa2va import normalise_tiles
from sa2va_hf.prompts import DESCRIBE, FORCED_ANSWER, SEGMENT_WORDINGS, PromptBuilder
from sa2va_hf.templates import IGNORE_INDEX
from tools.demo_drawn import Drawn
from tools.demo_losses import (
    Codes,
    Probes,
    balanced_mask_loss,
    choice_loss,
    nearest,
    region_means,
)
from tools.demo_scenes import TINY, Kind, caption

# The captions that the model is left with are of somebody who takes one value for another: of each
# pair the one for the other with this probability, of three the next. Half of the pairs are said
# wrongly more often than rightly, no word is said more often than it is true, and yet an object's
# caption is on average likelier of itself than of one that it is mistaken for.
MISTAKES = {
    ("small", "medium", "large"): 0.45,
    ("dotted", "hatched"): 0.45,
    ("cyan", "lime"): 0.3,
    ("pink", "brown"): 0.6,
    ("star", "diamond"): 0.3,
    ("ring", "arrow"): 0.6,
    ("plain", "checked"): 0.3,
    ("striped", "banded"): 0.6,
    ("blue", "purple"): 0.3,
    ("black", "white"): 0.3,
    ("red", "orange"): 0.6,
    ("green", "yellow"): 0.6,
    ("triangle", "cross"): 0.3,
    ("circle", "square"): 0.6,
    ("bottom left", "bottom right"): 0.3,
    ("top left", "top right"): 0.6,
}
# Shares of the steps of SAM2 in which it is prompted by the objects own codes, and in which inside
# and outside of an object weigh the same.
CLEAR_SHARE, PLAIN_SHARE = 0.6, 0.7
LOG_STEPS = 100  # steps that a part's figures are means of


def mistaken(obj, rng) -> str:
    """A caption of the object by somebody who makes MISTAKES."""
    partner = {
        value: (other, share)
        for values, share in MISTAKES.items()
        for value, other in zip(values, values[1:] + values[:1])
    }
    said = [
        other if rng.random() < share else v
        for v, (other, share) in ((v, partner[v]) for v in obj.attributes)
    ]
    return caption(*said)


class WarmStart:
    """Supervised training of a model in region captioning and referring segmentation.

    With `bfloat16` the model computes in it, its weights and the losses stay float32.

    Args:
        num_scenes: scenes drawn once and reused, by `workers` processes.
        objects_per_scene: objects drawn from each scene at every visit.
    """

    def __init__(
        self,
        model,
        tokenizer,
        processor,
        seed: int,
        num_scenes: int,
        objects_per_scene: int = 2,
        kind: Kind = TINY,
        batch_size: int = 8,
        learning_rate: float = 1e-3,
        workers: int = 0,
        bfloat16: bool = False,
    ):
        self.model, self.tokenizer, self.bfloat16 = model, tokenizer, bfloat16
        self.seed, self.objects_per_scene = seed, objects_per_scene
        self.batch_size, self.learning_rate = min(batch_size, num_scenes), learning_rate
        self.codes = Codes(model.config.prompt_size, seed, model.device, kind.attributes)
        self.probes = Probes(model.config.llm.hidden_size, kind.attributes).to(model.device)
        self.prompts = PromptBuilder(tokenizer, model.config.template, model.config.tokens_per_tile)
        self.question, self.answer = cache(self.prompts.ids), cache(self.prompts.answer)
        self.after = tokenizer.encode(self.prompts.template["SEP"], add_special_tokens=False)
        model.bind_tokenizer(tokenizer)
        self.drawn = Drawn(seed, num_scenes, processor, model.device, kind, workers)
        self.scenes = self.drawn.scenes

    def low_precision(self):
        """The context of what the model computes."""
        return torch.autocast(self.model.device.type, torch.bfloat16, enabled=self.bfloat16)

    def features(self, indices) -> torch.Tensor:
        """(B, tokens, C) image tokens of the scenes `indices`."""
        with self.low_precision():
            return self.model.extract_feature(normalise_tiles(self.drawn.tiles[indices]))

    def loss(self, indices, rng, progress: float, truly: bool):
        """(loss, its parts) of the scenes `indices`."""
        model = self.model
        rows, image, objects = self.drawn.some_objects(indices, self.objects_per_scene, rng)
        features, grids = self.features(indices), self.drawn.grids[rows]
        cells = grids.flatten(1).sum(1).tolist()
        ids, mask, labels = self._batch(
            [self._describe(obj, number, truly, rng) for obj, number in zip(objects, cells)]
            + [self._segment(obj.caption, rng) for obj in objects]
        )
        # One tile each; half have a region.
        flags = torch.tensor([True] * len(objects) + [False] * len(objects))
        with self.low_precision():
            out = model(
                ids,
                mask,
                image_features=features[torch.cat([image, image])],
                prompt_masks=list(grids[:, None]),
                vp_overall_mask=flags,
            )
            prompts = model.text_hidden_fcs(out.hidden_states[-1][ids == model.seg_id])
        logits, labels = out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        text = F.cross_entropy(logits.float(), labels, ignore_index=IGNORE_INDEX)
        copy = F.mse_loss(prompts.float(), self.codes([obj.attributes for obj in objects]))
        probe, read = self.probes(region_means(features.float(), image, grids), objects)
        return text + copy + probe, dict(text=text, copy=copy) | read

    def _batch(self, examples):
        """(ids, attention mask, labels) of encoded examples.

        Padded on the right: then no row attends to nothing, of which some kernels make NaN.
        """
        ids, labels = zip(*examples)
        padding = (self.tokenizer.pad_token_id, 0, IGNORE_INDEX)
        columns = (ids, [[1] * len(row) for row in ids], labels)
        return (
            pad_sequence([torch.tensor(row) for row in rows], True, value).to(self.model.device)
            for rows, value in zip(columns, padding)
        )

    def _describe(self, obj, cells: int, truly: bool, rng):
        return self._example(
            self.question(DESCRIBE, 1, (cells,)), obj.caption if truly else mistaken(obj, rng)
        )

    def _segment(self, said: str, rng):
        wording = SEGMENT_WORDINGS[rng.integers(len(SEGMENT_WORDINGS))]
        ids = self.prompts.ids(wording.replace("{x}", phrase(said)), 1)
        return self._example(ids, FORCED_ANSWER)

    def _example(self, question: list[int], answer: str) -> tuple[list[int], list[int]]:
        """(ids, labels) as `video_lisa_encode_fn` encodes it."""
        ids, ignored = self.answer(answer), [IGNORE_INDEX]
        labels = len(question) * ignored + ids + len(self.after) * ignored
        return question + ids + self.after, labels

    def mask_loss(self, indices, rng, progress: float):
        """(loss, its parts) of SAM2 on the scenes `indices`, prompted by codes.

        What the image features hold of an object is pulled to its code, without which the decoder
        takes long to see what a prompt has to do with an image. In the end any prompt is to be
        answered by one of the objects, whole: the one that it means.
        """
        rows, image, objects = self.drawn.all_objects(indices)
        codes = z = self.codes([obj.attributes for obj in objects])
        if progress > CLEAR_SHARE:
            z = self.codes.around(objects, rng)
        meant, masks = nearest(z, image, codes, image), self.drawn.masks[rows]
        with self.low_precision():
            features = self.model.sam_features(self.drawn.sam_images[indices])
            logits = self.model.decode_masks(features, image, z)
        held, _ = self._held(features, image, rows, objects)
        share = min(max((progress - PLAIN_SHARE) / (1 - PLAIN_SHARE), 0.0), 1.0)
        found = masks[meant]
        plain = resized_mask_loss(logits, found.float()).mean()
        loss = held + (1 - share) * balanced_mask_loss(logits, found) + share * plain
        choice, hits = choice_loss(logits, masks, image, meant)
        iou = mask_iou(logits > 0, found, 1.0).mean()
        return loss + choice, dict(mask=plain, held=held, hits=hits, iou=iou)

    def _held(self, features, image, rows, objects):
        """(loss, accuracies) of reading the objects' codes off SAM2's coarsest features."""
        coarse = features[-1].float()[image]  # (n, D, h, w)
        cells = self.drawn.cells[rows][:, None]  # (n, 1, h, w)
        return self.codes.read((cells * coarse).sum((2, 3)) / cells.sum((2, 3)), objects)

    def look(self, steps):
        """Train the vision encoder to hold what probes are to read off it."""
        model = self.model

        def loss(indices, rng, progress):
            rows, image, objects = self.drawn.all_objects(indices)
            features = self.features(indices).float()
            return self.probes(region_means(features, image, self.drawn.grids[rows]), objects)

        self.train("vision", (model.vision_model, model.mlp1, self.probes), loss, steps, 6)

    def see(self, steps):
        """Train SAM2's vision encoder to hold the objects' codes."""

        def loss(indices, rng, progress):
            rows, image, objects = self.drawn.all_objects(indices)
            with self.low_precision():
                features = self.model.sam_features(self.drawn.sam_images[indices])
            return self._held(features, image, rows, objects)

        self.train("features", (self.model.grounding_encoder,), loss, steps, 8)

    def talk(self, steps):
        """Train what makes captions and prompt embeddings."""
        self.train("captions", self._speaker(), partial(self.loss, truly=True), steps, 7)

    def err(self, steps):
        """Train it on, with the captions of somebody who makes MISTAKES."""
        self.train("mistakes", self._speaker(), partial(self.loss, truly=False), steps, 10)

    def _speaker(self):
        model = self.model
        read = (model.vision_model, model.mlp1, self.probes)
        return (*read, model.language_model, model.text_hidden_fcs)

    def draw(self, steps):
        """Train SAM2."""
        self.train("masks", (self.model.grounding_encoder,), self.mask_loss, steps, 9)

    def hidden_states(self, indices, image, said, rng):
        """(n, C) hidden states at [SEG] of n captions about the scenes `indices`."""
        model = self.model
        ids, mask, _ = self._batch([self._segment(text, rng) for text in said])
        hidden = model(ids, mask, image_features=self.features(indices)[image]).hidden_states[-1]
        return hidden[ids == model.seg_id]

    def train(self, name, modules, loss_of, steps, stream):
        """Train modules by loss_of(indices, rng, progress), with random numbers of their own."""
        parameters = [parameter for module in modules for parameter in module.parameters()]
        fused = self.model.device.type == "cuda"
        optimizer = torch.optim.AdamW(
            parameters, lr=self.learning_rate, weight_decay=0.01, fused=fused
        )
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self.learning_rate, total_steps=steps, pct_start=0.05
        )
        figures, began = [], time.perf_counter()
        for step in tqdm(range(steps), desc=name):
            rng = np.random.default_rng([self.seed, stream, step])
            indices = rng.choice(len(self.scenes), self.batch_size, replace=False)
            loss, parts = loss_of(indices, rng, step / steps)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
            figures.append({key: value.detach() for key, value in parts.items()})
            if (step + 1) % LOG_STEPS == 0 or step + 1 == steps:
                means = {key: torch.stack([f[key] for f in figures]).mean() for key in parts}
                said = ", ".join(f"{key} {value:.3f}" for key, value in means.items())
                took = f"{time.perf_counter() - began:.0f} s"
                tqdm.write(f"{name}: after {step + 1} steps and {took} {said}")
                if not all(value.isfinite() for value in means.values()):
                    raise RuntimeError(f"{name}: not finite within {step + 1} steps")
                figures = []
