"""Supervised training of the demo's tiny Sa2VA from random weights, on drawn scenes."""

from collections import deque

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from rl_train.data.text import phrase
from rl_train.rewards.iou import mask_iou
from sa2va_hf import video_lisa_encode_fn
from sa2va_hf.batches import pad_left
from sa2va_hf.processing_sa2va import upsample_masks
from sa2va_hf.prompts import DESCRIBE, FORCED_ANSWER, SEGMENT_WORDINGS, PromptBuilder
from sa2va_hf.templates import template_map
from tools.demo_losses import Attributes, balanced_mask_loss
from tools.demo_model import DETAIL_ODDS
from tools.demo_scenes import (
    ATTRIBUTES,
    WARM_START,
    caption,
    make_scene,
    partial_attributes,
    phrase_of,
)

FULL_PHRASES = 0.7  # of the segmentation prompts; the rest are partial
# Where the prompt head's training ends: IoU of the last 25 batches; at most so many steps.
PROMPT_HEAD_IOU, PROMPT_HEAD_STEPS = 0.44, 2000


class WarmStart:
    """Supervised training of the tiny model in region captioning and referring segmentation.

    Args:
        num_scenes: scenes drawn once and reused.
        objects_per_scene: targets drawn from each scene at every visit.
    """

    def __init__(self, model, tokenizer, processor, seed, num_scenes, objects_per_scene=3):
        self.model, self.tokenizer, self.processor = model, tokenizer, processor
        self.seed, self.objects_per_scene = seed, objects_per_scene
        self.attributes = Attributes(model.config.prompt_size, model.config.llm.hidden_size)
        self.attributes.to(model.device)
        self.prompts = PromptBuilder(tokenizer, model.config.template, model.config.tokens_per_tile)
        model.bind_tokenizer(tokenizer)
        self.scenes = [
            make_scene(seed, WARM_START, i)
            for i in tqdm(range(num_scenes), desc="warm-start scenes")
        ]
        self.tiles = torch.cat([processor.tiles(s.image) for s in self.scenes])  # (scenes, 3, S, S)
        self.sam_images = torch.stack([processor.sam_image(s.image) for s in self.scenes])  # uint8

    def loss(self, indices, rng, own_share):
        """(loss, its parts as numbers) of the scenes `indices`.

        It is the cross-entropy of both tasks' answers, mask losses and help by `Attributes`.

        Args:
            own_share: weight of the masks that are decoded from [SEG]'s own embedding, beside those
                from attribute codes.
        """
        model = self.model
        scenes, image, objects = self._targets(indices, rng, self.objects_per_scene)
        features = model.extract_feature(self.tiles[indices].to(model.device))
        grids = [self.processor.region_grid(obj.mask)[None] for obj in objects]
        examples = [
            self._describe(obj, scenes[i], grid, rng) for obj, i, grid in zip(objects, image, grids)
        ]
        questions, masks, said = zip(
            *[self._segment(obj, scenes[i], rng) for obj, i in zip(objects, image)]
        )
        examples += questions
        ids, mask = self._pad(examples)
        labels = pad_left([e["labels"] for e in examples], -100)[0].to(model.device)
        # One tile each; half have a region.
        flags = torch.tensor([True] * len(objects) + [False] * len(objects))
        out = model(
            ids,
            mask,
            image_features=features[image + image],
            prompt_masks=grids,
            vp_overall_mask=flags,
        )
        text = F.cross_entropy(
            out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
        )
        prompts = model.text_hidden_fcs(out.hidden_states[-1][ids == model.seg_id])
        copy = F.mse_loss(prompts, self.attributes.code(objects, said).detach())
        regions = torch.stack(
            [
                features[i][grid[0].flatten().to(model.device)].mean(0)
                for i, grid in zip(image, grids)
            ]
        )
        probe = self.attributes.probe_loss(regions, objects)
        every = [(i, obj) for i, scene in enumerate(scenes) for obj in scene.objects]
        codes = self.attributes.code([obj for _, obj in every], [ATTRIBUTES] * len(every))
        sam = model.sam_features(self.sam_images[indices].to(model.device))
        logits = model.decode_masks(
            sam,
            torch.tensor([i for i, _ in every] + image, device=model.device),
            torch.cat([codes, prompts]),
        )
        from_code = balanced_mask_loss(logits[: len(every)], [obj.mask for _, obj in every])
        own = balanced_mask_loss(logits[len(every) :], masks)
        parts = dict(
            text=text.item(),
            from_code=from_code.item(),
            own=own.item(),
            copy=copy.item(),
            probe=probe.item(),
        )
        return text + from_code + own_share * own + copy + probe, parts

    def _targets(self, indices, rng, per_scene):
        """(scenes, which of them each object is in, objects): `per_scene` targets of each."""
        scenes = [self.scenes[i] for i in indices]
        objects = [
            scene.objects[k]
            for scene in scenes
            for k in rng.choice(scene.targets, per_scene, replace=len(scene.targets) < per_scene)
        ]
        return scenes, [i for i in range(len(scenes)) for _ in range(per_scene)], objects

    def _pad(self, examples):
        """(ids, attention mask) of encoded examples, padded on the left, on the model's device."""
        rows = [example["input_ids"] for example in examples]
        return (t.to(self.model.device) for t in pad_left(rows, self.tokenizer.pad_token_id))

    def _describe(self, obj, scene, grid, rng):
        detail = str(rng.choice(list(DETAIL_ODDS), p=list(DETAIL_ODDS.values())))
        question = self.prompts.question(DESCRIBE, 1, [int(grid.sum())])
        return self._encode(question, caption(obj, scene, rng, detail))

    def _segment(self, obj, scene, rng):
        """(encoded example, its mask, the attributes it states).

        The mask of a partial phrase is of all the objects that it fits.
        """
        if rng.random() < FULL_PHRASES:
            words, mask, said = caption(obj, scene, rng, "full"), obj.mask, ATTRIBUTES
        else:
            said = partial_attributes(rng)
            words = phrase_of(obj, scene, rng, said)
            fits = [
                all(getattr(other, a) == getattr(obj, a) for a in said) for other in scene.objects
            ]
            mask = np.any([o.mask for o, fit in zip(scene.objects, fits) if fit], axis=0)
        wording = SEGMENT_WORDINGS[rng.integers(len(SEGMENT_WORDINGS))]
        question = self.prompts.question(wording.replace("{x}", phrase(words)), 1)
        return self._encode(question, FORCED_ANSWER), mask, said

    def _encode(self, question, answer):
        example = template_map(
            {"conversation": [{"input": question, "output": answer}]}, self.prompts.template
        )
        return video_lisa_encode_fn(
            example, self.tokenizer, max_length=8192, input_ids_with_output=True
        )

    def run(self, steps, batch_size=8, learning_rate=7e-4):
        """Train everything for so many steps."""
        parameters = [*self.model.parameters(), *self.attributes.parameters()]
        optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, learning_rate, total_steps=steps, pct_start=0.05
        )
        with tqdm(range(steps), desc="warm start") as progress:
            for step in progress:
                rng = np.random.default_rng([self.seed, 7, step])
                loss, parts = self.loss(
                    rng.choice(len(self.scenes), batch_size, replace=False),
                    rng,
                    own_share(step / steps),
                )
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
                schedule.step()
                progress.set_postfix(parts)

    def prompt_head_loss(self, rng, num_scenes=4, objects_per_scene=2):
        """(mask loss of [SEG]'s own embedding, mean IoU of its masks).

        Nothing but text_hidden_fcs gets a gradient.
        """
        model, indices = self.model, rng.choice(len(self.scenes), num_scenes, replace=False)
        scenes, image, objects = self._targets(indices, rng, objects_per_scene)
        questions, masks, _ = zip(
            *[self._segment(obj, scenes[i], rng) for obj, i in zip(objects, image)]
        )
        ids, mask = self._pad(questions)
        with torch.no_grad():
            features = model.extract_feature(self.tiles[indices].to(model.device))
            hidden = model(ids, mask, image_features=features[image]).hidden_states[-1]
            sam = model.sam_features(self.sam_images[indices].to(model.device))
        prompts = model.text_hidden_fcs(hidden[ids == model.seg_id])
        logits = model.decode_masks(sam, torch.tensor(image, device=model.device), prompts)
        predicted = [
            upsample_masks(one[None], self.processor.sam_size, mask.shape)[0] > 0
            for one, mask in zip(logits.detach(), masks)
        ]
        iou = mask_iou(predicted, [torch.from_numpy(mask).to(model.device) for mask in masks])
        return balanced_mask_loss(logits, masks), iou.mean().item()

    def retrain_prompt_head(self, target=PROMPT_HEAD_IOU, learning_rate=3e-3):
        """Draw text_hidden_fcs anew and train it alone, until its masks have an IoU of `target`."""
        for layer in self.model.text_hidden_fcs:
            if isinstance(layer, torch.nn.Linear):
                torch.nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
                torch.nn.init.zeros_(layer.bias)
        optimizer = torch.optim.Adam(self.model.text_hidden_fcs.parameters(), lr=learning_rate)
        ious = deque([0.0] * 25, maxlen=25)
        with tqdm(range(PROMPT_HEAD_STEPS), desc="prompt head") as progress:
            for step in progress:
                loss, iou = self.prompt_head_loss(np.random.default_rng([self.seed, 8, step]))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                ious.append(iou)
                progress.set_postfix(iou=np.mean(ious))
                if np.mean(ious) >= target:
                    return
        raise RuntimeError(
            f"the prompt head's masks have an IoU of {np.mean(ious):.2f} "
            f"after {PROMPT_HEAD_STEPS} steps, not {target}"
        )


def own_share(progress: float) -> float:
    """Weight of [SEG]'s own masks: 0 in the first 40 % of the warm start, 1 from 60 % on."""
    return min(max((progress - 0.4) / 0.2, 0.0), 1.0)
