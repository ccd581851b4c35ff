"""Supervised training of the demo's tiny Qwen2.5-VL and SAM2 from random weights, on clumps.

Qwen2.5-VL is left with answers in the right form, whose positive point is in the member that is
meant and whose negative point is mostly of no use: SLOPPY. SAM2 takes a positive point for the
clump or for the member, half of the time each, and for the member where a negative point says so.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from rl_train.points.answers import Answer
from rl_train.points.questions import question
from rl_train.policies.qwen_inputs import ImageSizes, patches, prompt_positions
from rl_train.policies.qwen_points import BEFORE, BEHIND, BETWEEN
from rl_train.policies.sam_points import sam_features
from rl_train.rewards.points import bounding_box
from sa2va_hf.batches import pad_left
from sa2va_hf.processing_sa2va import planes
from tools.clump_scenes import COLORS, SHAPES, SIDE, inside, make_scene
from tools.demo_scenes import WARM_START
from tools.points_model import PREPROCESSOR, SEEN, form

SPOTS = 12  # random pixels that are drawn of each member and of the background
# Of the negative points: none, in the middle of the image, where nothing is, in a neighbour. At
# first SHOWN, by which the model learns where neighbours are; from SHOWN_SHARE of the steps on
# SLOPPY, which is left, and whose likeliest answer is of no use.
SHOWN, SLOPPY, SHOWN_SHARE = (0.15, 0.15, 0.7), (0.4, 0.4, 0.2), 0.65
UNASKED = 0.2  # of the questions are for points without negative ones
QUESTIONS = 4  # of an image, at every visit
# Of SAM2's steps: those with a negative point, with two, with a box beside the point, and those
# that go on from a first mask. Of the rows with negative points those in which these touch nothing
# of the clump, and the clump is meant.
ONE, TWO, BOXED, SECOND, ELSEWHERE = 0.6, 0.12, 0.08, 0.25, 0.35
MIDDLE = 5  # pixels that a point in the middle is off it, at most
# Of a mask's loss: of what is meant, of the rest of its clump (without negative points, with them),
# of other clumps, of the background. By the smaller one a point alone is answered with the clump:
# where that is as likely as the member, more is lost on what is left out.
MEANT, BESIDE, OTHERS, NOTHING = 1.0, (0.3, 1.0), 0.5, 0.5
DIGITS = 8  # tokens of an answer that are not the same in all


@dataclass
class Drawn:
    """A scene as both models are given it."""

    seen: np.ndarray  # (3, SEEN, SEEN) uint8
    pixels: np.ndarray  # (3, SIDE, SIDE) uint8
    of_member: np.ndarray  # (SIDE, SIDE) uint8: 0 = background, 1 + k = member k
    members: list[tuple]  # (color, shape, clump, (x, y)) of each
    spots: np.ndarray  # (members, SPOTS, 2) pixels of each
    free: np.ndarray  # (SPOTS, 2) pixels of the background
    boxes: np.ndarray  # (members, 4)

    def neighbours(self, k: int) -> list[int]:
        clump = self.members[k][2]
        return [m for m, other in enumerate(self.members) if other[2] == clump and m != k]


def draw(seed: int, index: int, split: int = WARM_START) -> Drawn:
    """Scene `index` for the warm start."""
    scene = make_scene(seed, split, index)
    rng = np.random.default_rng([seed, split, index, 1])
    of_member = np.zeros((SIDE, SIDE), dtype=np.uint8)
    for k, member in enumerate(scene.members):
        of_member[member.mask] = 1 + k
    spots = [inside(rng, m.mask, SPOTS) for m in scene.members]
    margin = 10 * SIDE // SEEN + 2  # two digits
    free = np.zeros_like(scene.drawn)
    free[margin:-margin, margin:-margin] = ~scene.drawn[margin:-margin, margin:-margin]
    seen = scene.image.resize((SEEN, SEEN), 3)  # bicubic, as the policy's inputs
    return Drawn(
        planes(seen).numpy(),
        planes(scene.image).numpy(),
        of_member,
        [(m.color, m.shape, m.clump, m.centre) for m in scene.members],
        np.array(spots, dtype=np.float32),
        inside(rng, free, SPOTS).astype(np.float32),
        np.array([bounding_box(torch.from_numpy(m.mask)) for m in scene.members]),
    )


class Trainer:
    """AdamW with a warm-up and a decay to a twentieth behind half of the steps."""

    def __init__(self, modules, learning_rate=1e-3):
        self.parameters = [p for module in modules for p in module.parameters()]
        self.learning_rate, self.steps = learning_rate, 0
        self.optimizer = torch.optim.AdamW(self.parameters, lr=learning_rate, weight_decay=0.01)

    def step(self, loss, progress: float):
        self.steps += 1
        decay = max(0.05, 1 - max(0.0, progress - 0.5) / 0.5)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate * min(1, self.steps / 50) * decay
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()


class PointingStart:
    """Training of Qwen2.5-VL by cross-entropy on answers, and by probes on its image tokens.

    The probes read colour, shape, row and column of each member off the token at its centre;
    without them a tiny model finds the right words and never the place.
    """

    def __init__(self, vlm, tokenizer, scenes: list[Drawn], seed: int, device):
        self.vlm, self.tokenizer, self.scenes = vlm.to(device).train(), tokenizer, scenes
        self.seed, self.device = seed, device
        self.seen = torch.from_numpy(np.stack([scene.seen for scene in scenes])).to(device)
        patch, merge = PREPROCESSOR["patch_size"], PREPROCESSOR["merge_size"]
        self.sizes = ImageSizes(patch, merge, SEEN**2, SEEN**2, 0)
        self.grid = SEEN // self.sizes.factor  # tokens of a side
        self.image_token = vlm.config.image_token_id
        self.parts = (len(COLORS), len(SHAPES), self.grid, self.grid)
        self.probe = nn.Linear(vlm.config.text_config.hidden_size, sum(self.parts)).to(device)
        self.trainer = Trainer((vlm, self.probe))
        self.known = {}

    def ids(self, text: str) -> list[int]:
        if text not in self.known:
            self.known[text] = self.tokenizer.encode(text, add_special_tokens=False)
        return self.known[text]

    def prompt(self, caption: str, negatives: bool) -> list[int]:
        """The ids of a question, as `QwenPointsPolicy.point_prompts` has them."""
        image = [self.image_token] * self.grid**2
        asked = self.ids(question(caption, form(negatives)))
        return [*self.ids(BEFORE), *image, *self.ids(BETWEEN), *asked, *self.ids(BEHIND)]

    def vision(self, indices) -> torch.Tensor:
        """(B, tokens, C) of scenes."""
        values = self.patches(self.seen[indices])
        side = SEEN // self.sizes.patch
        grids = torch.tensor([[1, side, side]] * len(indices), device=self.device)
        return torch.stack(list(self.vlm.model.get_image_features(values, grids).pooler_output))

    def patches(self, seen) -> torch.Tensor:
        """Those of images (B, 3, SEEN, SEEN), as the policy makes them one by one."""
        mean, std = PREPROCESSOR["image_mean"], PREPROCESSOR["image_std"]
        return torch.cat([patches(one, self.sizes, mean, std) for one in seen])

    def logits(self, rows: list[list[int]], vision) -> torch.Tensor:
        """(P, L, V) of rows of ids, padded on the left, about images vision (P, tokens, C)."""
        ids, mask = (t.to(self.device) for t in pad_left(rows, self.tokenizer.pad_token_id))
        # The image stands at the same place in all, so that a row is placed as the longest begins.
        longest = max(rows, key=len)
        placed = prompt_positions([longest], [(self.grid, self.grid)], self.image_token)[:, 0]
        padding = torch.tensor([[len(longest) - len(row)] for row in rows])
        placed = placed[:, (torch.arange(len(longest)) - padding).clamp(min=0)].to(self.device)
        embeds = self.vlm.get_input_embeddings()(ids)
        at_image = (ids == self.image_token)[..., None]
        embeds = embeds.masked_scatter(at_image, vision.to(embeds.dtype))
        how = dict(inputs_embeds=embeds, attention_mask=mask, position_ids=placed, use_cache=False)
        return self.vlm.lm_head(self.vlm.model.language_model(**how).last_hidden_state)

    def answer(self, scene: Drawn, k: int, negatives: bool, shares, rng) -> str:
        """What is said of member k."""
        kind = rng.choice(3, p=shares) if negatives else 0
        negative = []
        if kind == 1:
            negative = [SIDE // 2 + rng.integers(-MIDDLE, MIDDLE + 1, 2)]
        elif kind == 2:
            negative = [scene.members[int(rng.choice(scene.neighbours(k)))][3]]
        said = Answer((), (seen_point(scene.members[k][3]),), tuple(map(seen_point, negative)))
        return form(negatives).format(said)

    def step(self, progress: float, num_images: int) -> dict[str, float]:
        """Losses of one step on so many images."""
        rng = np.random.default_rng([self.seed, 1, self.trainer.steps])
        indices = rng.choice(len(self.scenes), num_images, replace=False)
        shares = SHOWN if progress < SHOWN_SHARE else SLOPPY
        rows, said = [], []
        for index in indices.tolist():
            scene = self.scenes[index]
            for k in rng.choice(len(scene.members), QUESTIONS, replace=False).tolist():
                color, shape, *_ = scene.members[k]
                negatives = rng.random() >= UNASKED
                text = self.answer(scene, k, negatives, shares, rng)
                rows.append(self.prompt(f"the {color} {shape}", negatives))
                said.append([*self.ids(text + "<|im_end|>")])
        vision = self.vision(indices.tolist())
        logits = self.logits(
            [a + b for a, b in zip(rows, said)], vision.repeat_interleave(QUESTIONS, 0)
        )
        longest = max(map(len, said))
        labels = pad_left(said, -100)[0].to(self.device)
        loss = F.cross_entropy(
            logits[:, -longest - 1 : -1].flatten(0, 1), labels.flatten(), reduction="sum"
        )
        text = loss / (DIGITS * len(rows))
        probe, right = self._probe(indices.tolist(), vision)
        self.trainer.step(text + 0.5 * probe, progress)
        return dict(text=text.item(), probe=probe.item(), read=right)

    def _probe(self, indices, vision):
        """(sum of four cross-entropies, mean accuracy) of reading members off their tokens."""
        image, cell, truth = [], [], []
        for row, index in enumerate(indices):
            for color, shape, _, centre in self.scenes[index].members:
                x, y = (int(v * self.grid / SIDE) for v in centre)
                image.append(row)
                cell.append(y * self.grid + x)
                truth.append([list(COLORS).index(color), SHAPES.index(shape), y, x])
        truth = torch.tensor(truth, device=self.device).T
        read = self.probe(vision[image, cell].float()).split(self.parts, 1)
        losses = [F.cross_entropy(one, true) for one, true in zip(read, truth)]
        right = [(one.argmax(1) == true).float().mean() for one, true in zip(read, truth)]
        return sum(losses), torch.stack(right).mean().item()

    @torch.no_grad()
    def evaluate(self, scenes: list[Drawn], temperature=0.0, tokens=32) -> dict[str, float]:
        """What is said of a random member of each scene, by kind; greedily at temperature 0."""
        rng = np.random.default_rng([self.seed, 2])
        chosen = [int(rng.integers(len(scene.members))) for scene in scenes]
        rows = []
        for scene, k in zip(scenes, chosen):
            rows.append(self.prompt("the {} {}".format(*scene.members[k][:2]), True))
        seen, self.seen = self.seen, torch.from_numpy(np.stack([s.seen for s in scenes]))
        self.seen = self.seen.to(self.device)
        vision, starts = self.vision(list(range(len(scenes)))), list(map(len, rows))
        self.seen = seen
        for _ in range(tokens):
            logits = self.logits(rows, vision)[:, -1]
            logits[:, self.image_token] = -torch.inf
            if temperature:
                probabilities = (logits.float() / temperature).softmax(-1)
                new = torch.multinomial(probabilities, 1)[:, 0].tolist()
            else:
                new = logits.argmax(-1).tolist()
            rows = [[*row, token] for row, token in zip(rows, new)]
        counts = dict.fromkeys(("parsable", "positive_hits", "none", "neighbour", "member"), 0)
        counts |= dict.fromkeys(("other_clump", "background"), 0)
        for scene, k, row, start in zip(scenes, chosen, rows, starts):
            text = self.tokenizer.decode(row[start:]).split("<|im_end|>")[0]
            said, _ = form(True).read(text, (SEEN, SEEN), (SIDE, SIDE))
            if said is None:
                continue
            counts["parsable"] += 1
            counts["positive_hits"] += where(scene, said.positive[0]) == 1 + k
            at = where(scene, said.negative[0]) if said.negative else None
            near = [1 + m for m in scene.neighbours(k)]
            kind = {None: "none", 0: "background", 1 + k: "member"}.get(at, "other_clump")
            counts["neighbour" if at in near else kind] += 1
        return {name: round(count / len(scenes), 3) for name, count in counts.items()}


def seen_point(point) -> tuple[int, int]:
    """A pixel (x, y) of a scene as Qwen2.5-VL sees it."""
    return tuple(int(np.clip(round(float(v) * SEEN / SIDE), 10, SEEN - 1)) for v in point)


def where(scene: Drawn, point) -> int:
    """What of a scene is at a point (x, y): 0 or 1 + the number of a member."""
    x, y = (min(int(v), SIDE - 1) for v in point)
    return int(scene.of_member[y, x])


class DrawingStart:
    """Training of SAM2 on points, with readings of colour and shape off its features."""

    def __init__(self, sam, scenes: list[Drawn], seed: int, device, learning_rate=1e-3):
        self.sam, self.scenes, self.seed, self.device = sam.to(device), scenes, seed, device
        self.sam.train()
        self.pixels = torch.from_numpy(np.stack([scene.pixels for scene in scenes])).to(device)
        self.of_member = torch.from_numpy(np.stack([s.of_member for s in scenes])).to(device)
        kinds = 2 + len(COLORS) + len(SHAPES)  # nothing there has a class in both
        channels = [sam.mask_decoder.conv_s0.out_channels, sam.config.vision_config.fpn_hidden_size]
        self.probes = nn.ModuleList(nn.Conv2d(n, kinds, 1) for n in channels).to(device)
        self.trainer = Trainer((sam, self.probes), learning_rate)

    def logits(self, features, image, points, labels, boxes=None, before=None):
        """(M, S/4, S/4) of M rows: points (M, n, 2) in pixels, labels (M, n), boxes (M, 4)."""
        device = self.device
        prompt = dict(
            input_points=torch.tensor(np.array(points), dtype=torch.float32, device=device)[
                :, None
            ],
            input_labels=torch.tensor(labels, device=device)[:, None],
            input_boxes=None,
        )
        if boxes is not None:
            boxes = torch.tensor(np.array(boxes), dtype=torch.float32, device=device)
            prompt["input_boxes"] = boxes[:, None]
        sparse, dense = self.sam.prompt_encoder(**prompt, input_masks=before)
        places = self.sam.get_image_wide_positional_embeddings()
        *fine, coarse = (level[image] for level in features)
        masks, *_ = self.sam.mask_decoder(
            image_embeddings=coarse,
            image_positional_embeddings=places.expand(len(image), -1, -1, -1),
            sparse_prompt_embeddings=sparse,
            dense_prompt_embeddings=dense,
            multimask_output=False,
            high_resolution_features=fine,
        )
        return masks[:, 0, 0]

    def row(self, scene: Drawn, clump: int, negatives: int, rng):
        """(member, points, labels, members that are meant) about a clump of a scene."""
        mine = [k for k, member in enumerate(scene.members) if member[2] == clump]
        k = int(rng.choice(mine))
        positive, near = scene.spots[k][rng.integers(SPOTS)], scene.neighbours(k)
        if not negatives:
            meant = mine if rng.random() < 0.5 else [k]
            return k, [positive], [1], meant
        if rng.random() < ELSEWHERE:
            others = [m for m in range(len(scene.members)) if m not in mine]
            spots = [
                scene.spots[int(rng.choice(others))] if rng.random() < 0.4 else scene.free
                for _ in range(negatives)
            ]
            meant = mine
        else:
            spots = [scene.spots[m] for m in rng.permutation(near)[:negatives]]
            spots += [scene.spots[near[0]]] * (negatives - len(spots))
            meant = [k]
        points = [positive, *(spot[rng.integers(SPOTS)] for spot in spots)]
        return k, points, [1] + [0] * negatives, meant

    def step(self, progress: float, num_images: int) -> dict[str, float]:
        """Losses of one step on the clumps of so many images."""
        rng = np.random.default_rng([self.seed, 3, self.trainer.steps])
        kind = rng.random()
        negatives = 1 if kind < ONE else 2 if kind < ONE + TWO else 0
        boxed, second = kind > 1 - BOXED, negatives and rng.random() < SECOND
        indices = rng.choice(len(self.scenes), num_images, replace=False).tolist()
        image, found = [], []
        for number, index in enumerate(indices):
            scene = self.scenes[index]
            for clump in range(1 + max(member[2] for member in scene.members)):
                image.append(number)
                found.append((scene, *self.row(scene, clump, negatives, rng)))
        scenes, member, points, labels, meant = zip(*found)
        features = sam_features(self.sam, self.pixels[indices])
        boxes = [s.boxes[k] for s, k in zip(scenes, member)] if boxed else None
        before = None
        if second:
            with torch.no_grad():
                first = [one[:1] for one in points], [one[:1] for one in labels]
                before = self.logits(features, image, *first)[:, None]
        logits = self.logits(features, image, points, labels, boxes, before)
        at = F.interpolate(self.of_member[indices][:, None].float(), logits.shape[-2:])[:, 0].long()
        mine = [[k, *s.neighbours(k)] for s, k in zip(scenes, member)]
        target, clump = (
            torch.stack([torch.isin(at[i], torch.tensor(m).to(at) + 1) for i, m in zip(image, of)])
            for of in (meant, mine)
        )
        loss = clump_loss(logits, target, clump, (at > 0)[image], BESIDE[negatives > 0])
        held = self._held(features, indices)
        self.trainer.step(loss + 0.5 * held, progress)
        inter, union = ((logits > 0) & target).sum((1, 2)), ((logits > 0) | target).sum((1, 2))
        iou = (inter / union.clamp(min=1)).mean().item()
        kinds = ("iou_point", "iou_negative", "iou_two")
        return dict(loss=loss.item(), held=held.item()) | {kinds[negatives]: iou}

    def _held(self, features, indices):
        """Cross-entropy of reading colour and shape at each place off the features."""
        colors, shapes = torch.zeros(2, len(indices), 16, dtype=torch.long)
        for n, index in enumerate(indices):
            for k, (color, shape, *_) in enumerate(self.scenes[index].members):
                colors[n, 1 + k], shapes[n, 1 + k] = (
                    1 + list(COLORS).index(color),
                    1 + SHAPES.index(shape),
                )
        losses = []
        for level, probe in zip((features[0], features[-1]), self.probes):
            read = probe(level).split((1 + len(COLORS), 1 + len(SHAPES)), 1)
            at = F.interpolate(self.of_member[indices][:, None].float(), level.shape[-2:])[:, 0]
            at = at.long().flatten(1)
            for one, table in zip(read, (colors, shapes)):
                truth = table.to(at.device).gather(1, at).view(len(indices), *level.shape[-2:])
                losses.append(F.cross_entropy(one, truth))
        return sum(losses)

    @torch.no_grad()
    def evaluate(self, scenes: list[Drawn]) -> dict[str, float]:
        """Mean IoU with the clump and the member of what different points draw."""
        rng, rows = np.random.default_rng([self.seed, 4]), {}
        for scene in scenes:
            features = sam_features(self.sam, torch.from_numpy(scene.pixels)[None].to(self.device))
            of = scene.of_member
            for clump in range(1 + max(member[2] for member in scene.members)):
                k, (p,), _, _ = self.row(scene, clump, 0, rng)
                near = scene.neighbours(k)
                others = [m for m, one in enumerate(scene.members) if one[2] != clump]
                spot = lambda m: scene.spots[m][rng.integers(SPOTS)]  # noqa: E731
                whole, mine = np.isin(of, [1 + m for m in (k, *near)]), of == 1 + k
                asked = {
                    "clump": ([p], whole),
                    "member": ([p], mine),
                    "box": ([p], mine),
                    "neighbour": ([p, spot(near[0])], mine),
                    "two_passes": ([p, spot(near[0])], mine),
                    "other_clump": ([p, spot(others[0])], mine),
                    "background": ([p, scene.free[rng.integers(SPOTS)]], mine),
                    "inside": ([p, spot(k)], mine),
                }
                for name, (points, target) in asked.items():
                    labels, before = [[1] + [0] * (len(points) - 1)], None
                    if name == "two_passes":
                        before = self.logits(features, [0], [points[:1]], [[1]])[:, None]
                    box = [scene.boxes[k]] if name == "box" else None
                    low = self.logits(features, [0], [points], labels, box, before)
                    mask = F.interpolate(low[:, None], (SIDE, SIDE), mode="bilinear")[0, 0] > 0
                    mask = mask.cpu().numpy()
                    iou = (mask & target).sum() / max((mask | target).sum(), 1)
                    rows.setdefault(name, []).append(iou)
        return {name: round(float(np.mean(values)), 3) for name, values in rows.items()}


def clump_loss(logits, target, clump, drawn, beside: float):
    """Mean BCE of what is meant, the rest of its clump, other clumps and background, and Dice.

    They weigh so much however large they are: a neighbour's pixels are few, and the meaning of a
    negative point is learnt of them alone.

    Args:
        logits: (M, h, w); target, clump, drawn: (M, h, w) bool, each of which holds the one before.
        beside: weight of the rest of the clump.
    """
    target, clump, drawn = (mask.flatten(1).float() for mask in (target, clump, drawn))
    bce = F.binary_cross_entropy_with_logits(logits.flatten(1), target, reduction="none")
    parts = (target, clump - target, drawn - clump, 1 - drawn)
    weights = (MEANT, beside, OTHERS, NOTHING)
    loss = sum(w * (bce * p).sum(1) / p.sum(1).clamp(min=1) for p, w in zip(parts, weights))
    probability = logits.flatten(1).sigmoid()
    shared, both = (probability * target).sum(1), probability.sum(1) + target.sum(1)
    return (loss + 1 - (2 * shared + 1) / (both + 1)).mean()
