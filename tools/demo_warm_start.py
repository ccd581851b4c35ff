"""Supervised training of the demo's tiny Sa2VA from random weights, on drawn scenes."""

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from rl_train.data.text import phrase
from rl_train.rewards.iou import mask_iou
from sa2va_hf import video_lisa_encode_fn
from sa2va_hf.batches import pad_left
from sa2va_hf.losses import mask_loss
from sa2va_hf.prompts import DESCRIBE, FORCED_ANSWER, SEGMENT_WORDINGS, PromptBuilder
from sa2va_hf.templates import template_map
from tools.demo_losses import Codes, Probes, balanced_mask_loss
from tools.demo_scenes import WARM_START, caption, make_scene

# The captions that the model is left with are of somebody who takes one value for another: of each
# pair the one for the other with this probability, so that half of the pairs are said wrongly more
# often than rightly, and no word is said more often than it is true.
MISTAKES = {
    ("plain", "checked"): 0.35,
    ("striped", "banded"): 0.65,
    ("blue", "purple"): 0.35,
    ("black", "white"): 0.35,
    ("red", "orange"): 0.65,
    ("green", "yellow"): 0.65,
    ("triangle", "cross"): 0.35,
    ("circle", "square"): 0.65,
    ("bottom left", "bottom right"): 0.35,
    ("top left", "top right"): 0.65,
}
TRUE_SHARE = 0.6  # of the steps, in which captions are still true
# Shares of the steps of SAM2 in which it is prompted by the objects own codes, and in which inside
# and outside of an object weigh the same.
CLEAR_SHARE, PLAIN_SHARE = 0.6, 0.7
HIT_TARGET = 0.65  # share of phrases whose mask in the end lies on the right object
LARGEST_NOISE, BISECTIONS = 4.0, 8  # in the prompt head, of its weights' standard deviation
SCALES = [2 ** (k / 2) for k in range(-4, 5)]  # that it may lack then


def mistaken(obj, rng) -> str:
    """A caption of the object by somebody who makes MISTAKES."""
    partner = {a: (b, share) for pair, share in MISTAKES.items() for a, b in (pair, pair[::-1])}
    said = [
        other if rng.random() < share else v
        for v, (other, share) in ((v, partner[v]) for v in obj.attributes)
    ]
    return caption(*said)


def resized(mask, logits) -> torch.Tensor:
    """A mask (H, W) at the size of mask logits (n, h, w)."""
    pixels = torch.from_numpy(mask)[None, None].to(logits.device).float()
    return F.interpolate(pixels, logits.shape[-2:])[0, 0] > 0


class WarmStart:
    """Supervised training of the tiny model in region captioning and referring segmentation.

    Args:
        num_scenes: scenes drawn once and reused.
        objects_per_scene: objects drawn from each scene at every visit.
    """

    def __init__(self, model, tokenizer, processor, seed, num_scenes, objects_per_scene=2):
        self.model, self.tokenizer, self.processor = model, tokenizer, processor
        self.seed, self.objects_per_scene = seed, objects_per_scene
        self.codes = Codes(model.config.prompt_size, seed, model.device)
        self.probes = Probes(model.config.llm.hidden_size).to(model.device)
        self.prompts = PromptBuilder(tokenizer, model.config.template, model.config.tokens_per_tile)
        model.bind_tokenizer(tokenizer)
        self.scenes = [
            make_scene(seed, WARM_START, i)
            for i in tqdm(range(num_scenes), desc="warm-start scenes")
        ]
        self.tiles = torch.cat([processor.tiles(s.image) for s in self.scenes])  # (scenes, 3, S, S)
        self.sam_images = torch.stack([processor.sam_image(s.image) for s in self.scenes])  # uint8

    def loss(self, indices, rng, progress: float):
        """(loss, its parts as numbers) of the scenes `indices`."""
        model = self.model
        scenes, image, objects = self._targets(indices, rng)
        features = model.extract_feature(self.tiles[indices].to(model.device))
        grids = [self.processor.region_grid(obj.mask) for obj in objects]
        ids, mask, labels = self._batch(
            [
                self._describe(obj, grid, progress < TRUE_SHARE, rng)
                for obj, grid in zip(objects, grids)
            ]
            + [self._segment(obj, rng) for obj in objects]
        )
        # One tile each; half have a region.
        flags = torch.tensor([True] * len(objects) + [False] * len(objects))
        out = model(
            ids,
            mask,
            image_features=features[image + image],
            prompt_masks=[grid[None] for grid in grids],
            vp_overall_mask=flags,
        )
        logits, labels = out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        text = F.cross_entropy(logits, labels, ignore_index=-100)
        prompts = model.text_hidden_fcs(out.hidden_states[-1][ids == model.seg_id])
        copy = F.mse_loss(prompts, self.codes([obj.attributes for obj in objects]))
        probe, read = self._probe(features, image, objects, grids)
        parts = dict(text=text.item(), copy=copy.item()) | read
        return text + copy + probe, parts

    def _probe(self, features, image, objects, grids):
        """(loss, accuracies) of the probes on the mean feature of each object's cells."""
        regions = [features[i][grid.flatten()].mean(0) for i, grid in zip(image, grids)]
        return self.probes(torch.stack(regions), objects)

    def _targets(self, indices, rng):
        """(scenes, which of them each object is in, objects)."""
        scenes, number = [self.scenes[i] for i in indices], self.objects_per_scene
        objects = [
            scene.objects[k]
            for scene in scenes
            for k in rng.choice(len(scene.objects), number, replace=False)
        ]
        return scenes, [i for i in range(len(scenes)) for _ in range(number)], objects

    def _batch(self, examples):
        """(ids, attention mask, labels) of encoded examples, padded on the left."""
        rows = [example["input_ids"] for example in examples]
        ids, mask = pad_left(rows, self.tokenizer.pad_token_id)
        labels = pad_left([e["labels"] for e in examples], -100)[0]
        return (t.to(self.model.device) for t in (ids, mask, labels))

    def _describe(self, obj, grid, truly, rng):
        question = self.prompts.question(DESCRIBE, 1, [int(grid.sum())])
        return self._encode(question, obj.caption if truly else mistaken(obj, rng))

    def _segment(self, obj, rng):
        wording = SEGMENT_WORDINGS[rng.integers(len(SEGMENT_WORDINGS))]
        question = self.prompts.question(wording.replace("{x}", phrase(obj.caption)), 1)
        return self._encode(question, FORCED_ANSWER)

    def _encode(self, question, answer):
        example = template_map(
            {"conversation": [{"input": question, "output": answer}]}, self.prompts.template
        )
        return video_lisa_encode_fn(
            example, self.tokenizer, max_length=8192, input_ids_with_output=True
        )

    def mask_loss(self, indices, rng, progress: float):
        """(loss, its parts as numbers) of SAM2 on the scenes `indices`, prompted by codes.

        What the image features hold of an object is pulled to its code, without which the decoder
        takes long to see what a prompt has to do with an image. In the end any prompt is to be
        answered by one of the objects, whole: the one that it means.
        """
        scenes = [self.scenes[i] for i in indices]
        image, objects = zip(*[(i, o) for i, s in enumerate(scenes) for o in s.objects])
        z = self.codes([obj.attributes for obj in objects])
        if progress > CLEAR_SHARE:
            z = self.codes.around(objects, rng)
        meant = [
            scenes[i].objects[self.codes.nearest(v, scenes[i].objects)] for i, v in zip(image, z)
        ]
        masks = [obj.mask for obj in meant]
        features = self.model.sam_features(self.sam_images[indices].to(self.model.device))
        where = torch.tensor(image, device=self.model.device)
        logits = self.model.decode_masks(features, where, z)
        held, _ = self._held(features, where, objects)
        share = min(max((progress - PLAIN_SHARE) / (1 - PLAIN_SHARE), 0.0), 1.0)
        plain = mask_loss(logits, [torch.from_numpy(mask) for mask in masks]).mean()
        loss = held + (1 - share) * balanced_mask_loss(logits, masks) + share * plain
        choice, hits = self._choice(logits, scenes, image, meant)
        found = [one > 0 for one in logits], [resized(mask, logits) for mask in masks]
        iou = mask_iou(*found, 1.0).mean().item()
        return loss + choice, dict(mask=plain.item(), held=held.item(), hits=hits, iou=iou)

    def _held(self, features, where, objects):
        """(loss, accuracies) of reading the objects' codes off SAM2's coarsest features."""
        coarse = features[-1][where]  # (n, D, h, w)
        cells = [torch.from_numpy(obj.mask)[None].float() for obj in objects]
        cells = [F.adaptive_avg_pool2d(one, coarse.shape[-2:]) for one in cells]
        cells = torch.stack(cells).to(coarse.device)  # (n, 1, h, w)
        return self.codes.read((cells * coarse).sum((2, 3)) / cells.sum((2, 3)), objects)

    def _choice(self, logits, scenes, image, meant):
        """(cross-entropy of the meant object among its scene's by mean logit, share of hits)."""
        losses, hits = [], []
        areas = [torch.stack([resized(obj.mask, logits) for obj in s.objects]) for s in scenes]
        for one, i, obj in zip(logits, image, meant):
            area = areas[i].float()  # (objects, h, w)
            inside = (area * one).sum((1, 2)) / area.sum((1, 2))
            number = next(k for k, other in enumerate(scenes[i].objects) if other is obj)
            losses.append(F.cross_entropy(inside[None], torch.tensor([number], device=one.device)))
            hits.append(float(inside.argmax() == number))
        return torch.stack(losses).mean(), float(np.mean(hits))

    def look(self, steps):
        """Train the vision encoder to hold what probes are to read off it."""
        model = self.model

        def loss(indices, rng, progress):
            scenes = [self.scenes[i] for i in indices]
            image, objects = zip(*[(i, o) for i, s in enumerate(scenes) for o in s.objects])
            grids = [self.processor.region_grid(obj.mask) for obj in objects]
            features = model.extract_feature(self.tiles[indices].to(model.device))
            return self._probe(features, image, objects, grids)

        self._train("vision", (model.vision_model, model.mlp1, self.probes), loss, steps, 6)

    def see(self, steps):
        """Train SAM2's vision encoder to hold the objects' codes."""

        def loss(indices, rng, progress):
            scenes = [self.scenes[i] for i in indices]
            image, objects = zip(*[(i, o) for i, s in enumerate(scenes) for o in s.objects])
            features = self.model.sam_features(self.sam_images[indices].to(self.model.device))
            return self._held(features, torch.tensor(image, device=self.model.device), objects)

        self._train("features", (self.model.grounding_encoder,), loss, steps, 8)

    def talk(self, steps):
        """Train what makes captions and prompt embeddings."""
        model = self.model
        parts = (model.vision_model, model.mlp1, model.language_model, model.text_hidden_fcs)
        self._train("captions", (*parts, self.probes), self.loss, steps, 7)

    def draw(self, steps):
        """Train SAM2."""
        self._train("masks", (self.model.grounding_encoder,), self.mask_loss, steps, 9)

    def _train(self, name, modules, loss_of, steps, stream, batch_size=8, learning_rate=1e-3):
        parameters = [parameter for module in modules for parameter in module.parameters()]
        optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, learning_rate, total_steps=steps, pct_start=0.05
        )
        with tqdm(range(steps), desc=name) as progress:
            for step in progress:
                rng = np.random.default_rng([self.seed, stream, step])
                indices = rng.choice(len(self.scenes), batch_size, replace=False)
                loss, parts = loss_of(indices, rng, step / steps)
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
                schedule.step()
                progress.set_postfix({name: f"{value:.2f}" for name, value in parts.items()})

    def _prompts(self, indices, image, objects, rng):
        """(n, D) [SEG]'s embeddings of the objects' captions, each in scene indices[image[n]]."""
        model = self.model
        ids, mask, _ = self._batch([self._segment(obj, rng) for obj in objects])
        with torch.no_grad():
            features = model.extract_feature(self.tiles[indices].to(model.device))
            hidden = model(ids, mask, image_features=features[image]).hidden_states[-1]
        return model.text_hidden_fcs(hidden[ids == model.seg_id])

    @torch.no_grad()
    def unsettle_prompt_head(self, target=HIT_TARGET):
        """Disturb text_hidden_fcs by random numbers, until so few of its masks hit.

        The share of hits falls as the numbers grow; the largest that leave `target` of them is
        found by bisection.
        """
        last = self.model.text_hidden_fcs[2]
        learnt, generator = last.weight.clone(), torch.Generator().manual_seed(self.seed)
        noise = torch.randn(learnt.shape, generator=generator).to(learnt) * learnt.std()
        low, high = 0.0, LARGEST_NOISE
        for _ in range(BISECTIONS):
            share = (low + high) / 2
            last.weight.copy_(learnt + share * noise)
            hits = self.found([1.0])[1.0][1]
            low, high = (share, high) if hits >= target else (low, share)
        last.weight.copy_(learnt + low * noise)

    @torch.no_grad()
    def scale_prompt_head(self):
        """Give the prompt embeddings the scale of which their masks are best."""
        found = self.found(SCALES)
        best = max(SCALES, key=lambda scale: found[scale][0])
        last = self.model.text_hidden_fcs[2]
        last.weight.mul_(best)
        last.bias.mul_(best)
        print(f"prompt head: scaled by {best:.2f}, of its masks {found[best][1]:.2f} hit")

    @torch.no_grad()
    def found(self, scales, num_scenes=64) -> dict[float, tuple[float, float]]:
        """{scale of the prompt embeddings: (mean IoU, share on the right object) of masks}."""
        rng, rows = np.random.default_rng([self.seed, 11]), {scale: [] for scale in scales}
        for index in rng.choice(len(self.scenes), num_scenes, replace=False).tolist():
            objects = self.scenes[index].objects
            prompts = self._prompts([index], [0] * len(objects), objects, rng)
            features = self.model.sam_features(self.sam_images[[index]].to(self.model.device))
            where = torch.zeros(len(objects), dtype=torch.long, device=self.model.device)
            for scale in scales:
                logits = self.model.decode_masks(features, where, scale * prompts)
                masks = [resized(obj.mask, logits) for obj in objects]
                for number, one in enumerate(logits > 0):
                    ious = mask_iou([one] * len(masks), masks, 0.0)
                    hit = ious[number] > 0 and int(ious.argmax()) == number
                    rows[scale].append((float(ious[number]), float(hit)))
        return {scale: tuple(np.mean(of, 0).tolist()) for scale, of in rows.items()}
