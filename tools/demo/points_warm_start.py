"""Supervised training of the demo's tiny Qwen2.5-VL from random weights, on clumps.

It is left with answers in the right form, whose positive point is in the member that is meant and
whose negative point is mostly of no use, in several ways: SLOPPY. SAM2's part is in
`points_drawing`.

B = scenes of a step, P = questions about them.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb_vision

from rl_train.points.parser import PointPrompt
from rl_train.points.prompts import point_question
from rl_train.policies.qwen_vl import AFTER_IMAGE, AFTER_QUESTION, chat_start
from rl_train.policies.qwen_vl_model import VERSIONS
from sa2va_hf.processing_sa2va import planes
from sa2va_hf.qwen_images import ImagePreprocessing, patches
from tools.demo.clump_scenes import COLORS, SHAPES, SIDE, inside, make_scene
from tools.demo.points_model import PREPROCESSOR, SEEN, form
from tools.demo.scenes import WARM_START

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


SPOTS = 12  # random pixels that are drawn of each member and of the background
# Shares of the modes of negative points (`negative_point`); only the one in a neighbour is of use.
# First the answers are SHOWN, from which the model learns where neighbours are; from SHOWN_FRACTION
# of the steps on they are SLOPPY, which is how the model is left. Its greedy answer is then mostly
# in the background: that mode is the most frequent one and has one place for each neighbour, which
# SHOWN already teaches. A place that is learnt less sharply is a less likely answer.
SHOWN = dict(none=0.15, background_near=0.3, other_clump=0.05, own_edge=0.05, neighbour=0.45)
SLOPPY = dict(none=0.15, background_near=0.4, other_clump=0.15, own_edge=0.1, neighbour=0.2)
SHOWN_FRACTION = 0.7
UNASKED = 0.2  # of the questions are for points without negative ones
QUESTIONS = 4  # of an image, at every visit
BORDER = 10 * SIDE // SEEN + 2  # pixels; behind it the seen image's coordinates have two digits
CLEAR = 6  # pixels between a point in the background and any member
EDGE = 0.75  # of the way from a member's centre to its edge: where a point at its own edge is
SAME_DISTANCE = 20  # pixels: distances from the middle of the image that count as equal
NEAR = 60  # pixels from a member's centre to what is beside it; neighbours are at about 40
# Of a point beside a member, from opposite to a neighbour: smallest first, to both sides.
TURNS = np.radians([0, *(sign * turn for turn in range(10, 181, 10) for sign in (1, -1))])
DIGITS = 8  # tokens of an answer that are not the same in all


@dataclass
class Drawn:
    """A scene in the forms that both models take."""

    seen: np.ndarray  # (3, SEEN, SEEN) uint8
    pixels: np.ndarray  # (3, SIDE, SIDE) uint8
    of_member: np.ndarray  # (SIDE, SIDE) uint8: 0 = background, 1 + k = member k
    members: list[tuple]  # (color, shape, clump, (x, y)) of each
    spots: np.ndarray  # (members, SPOTS, 2) pixels of each
    free: np.ndarray  # (SPOTS, 2) pixels of the background

    def neighbours(self, k: int) -> list[int]:
        """Return the other members of the clump of member k."""
        clump = self.members[k][2]
        return [m for m, other in enumerate(self.members) if other[2] == clump and m != k]


def draw(seed: int, index: int, split: int = WARM_START) -> Drawn:
    """Draw scene `index` for the warm start."""
    scene = make_scene(seed, split, index)
    rng = np.random.default_rng([seed, split, index, 1])
    of_member = np.zeros((SIDE, SIDE), dtype=np.uint8)
    for k, member in enumerate(scene.members):
        of_member[member.mask] = 1 + k
    spots = [inside(rng, m.mask, SPOTS) for m in scene.members]
    free = np.zeros_like(scene.drawn)
    free[BORDER:-BORDER, BORDER:-BORDER] = ~scene.drawn[BORDER:-BORDER, BORDER:-BORDER]
    seen = scene.image.resize((SEEN, SEEN), 3)  # bicubic, as the policy's inputs
    return Drawn(
        planes(seen).numpy(),
        planes(scene.image).numpy(),
        of_member,
        [(m.color, m.shape, m.clump, m.centre) for m in scene.members],
        np.array(spots, dtype=np.float32),
        inside(rng, free, SPOTS).astype(np.float32),
    )


class Trainer:
    """AdamW with a warm-up and a decay to a twentieth behind half of the steps."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], learning_rate: float = 1e-3):
        self.parameters, self.learning_rate, self.steps = list(parameters), learning_rate, 0
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=learning_rate, weight_decay=0.01, fused=True
        )

    def step(self, loss: torch.Tensor, progress: float):
        """Update by a loss; `progress` in [0, 1] is the fraction of all steps done."""
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

    The probes read what each member is (colour and shape together), its row and its column off the
    token at its centre; without them a tiny model finds the right words and never the place.

    Rows are padded on the right, so that no row needs a mask and the image stands at the same place
    in all of them.
    """

    def __init__(
        self,
        vlm: torch.nn.Module,
        tokenizer: "PreTrainedTokenizerBase",
        scenes: list[Drawn],
        seed: int,
        device: torch.device | str,
        learning_rate: float = 1e-3,
    ):
        self.vlm, self.tokenizer, self.scenes = vlm.to(device).train(), tokenizer, scenes
        self.seed, self.device, self.known, self.placed = seed, device, {}, {}
        self.seen = torch.from_numpy(np.stack([scene.seen for scene in scenes])).to(device)
        patch, merge = PREPROCESSOR["patch_size"], PREPROCESSOR["merge_size"]
        self.preprocessing = ImagePreprocessing(
            patch=patch,
            merge=merge,
            min_pixels=SEEN**2,
            max_pixels=SEEN**2,
            side=0,
            mean=PREPROCESSOR["image_mean"],
            std=PREPROCESSOR["image_std"],
        )
        self.grid = SEEN // self.preprocessing.factor  # tokens of a side
        self.image_token = vlm.config.image_token_id
        self.parts = (len(COLORS) * len(SHAPES), self.grid, self.grid)
        self.probe = nn.Linear(vlm.config.text_config.hidden_size, sum(self.parts)).to(device)
        parameters = [*vlm.parameters(), *self.probe.parameters()]
        self.trainer = Trainer(parameters, learning_rate)

    def ids(self, text: str) -> list[int]:
        """Encode a text piece by piece: a digit is a token of its own, and most answers are new."""
        for piece in (pieces := re.findall(r"\d|\D+", text)):
            if piece not in self.known:
                self.known[piece] = self.tokenizer.encode(piece, add_special_tokens=False)
        return [token for piece in pieces for token in self.known[piece]]

    def prompt(self, caption: str, negatives: bool) -> list[int]:
        """Return the ids of a question, as `QwenVLPolicy.point_questions` makes them."""
        image = [self.image_token] * self.grid**2
        question_ids = self.ids(point_question(caption, form(negatives)))
        return [
            *self.ids(chat_start(VERSIONS["qwen2_5_vl"])),
            *image,
            *self.ids(AFTER_IMAGE),
            *question_ids,
            *self.ids(AFTER_QUESTION),
        ]

    def vision(self, seen: torch.Tensor) -> torch.Tensor:
        """Return (B, tokens, C) of images (B, 3, SEEN, SEEN), as `get_image_features` has them.

        That one attends image by image; here all are of one size, and every layer sees all of one.
        """
        tower, merge = self.vlm.model.visual, self.preprocessing.merge
        assert set(tower.fullatt_block_indexes) == set(range(len(tower.blocks)))
        below = seen.transpose(0, 1).flatten(1, 2)  # (3, B * SEEN, SEEN): one below the other
        hidden = tower.patch_embed(patches(below, self.preprocessing))
        hidden = hidden.unflatten(0, (len(seen), -1))  # (B, patches, C)
        at = torch.arange(self.grid * merge, device=seen.device).view(self.grid, merge)
        row, column = at[:, None, :, None], at[None, :, None, :]
        positions = torch.stack(torch.broadcast_tensors(row, column), -1).view(-1, 2)
        cos, sin = tower.rotary_pos_emb(hidden, positions)
        for block in tower.blocks:
            qkv = block.attn.qkv(block.norm1(hidden)).unflatten(-1, (3, block.attn.num_heads, -1))
            q, k, v = qkv.unbind(2)
            q, k = apply_rotary_pos_emb_vision(q, k, cos, sin)
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            hidden = hidden + block.attn.proj(mixed)
            hidden = hidden + block.mlp(block.norm2(hidden))
        return tower.merger(hidden).unflatten(0, (len(seen), -1))

    def logits(self, rows: list[list[int]], vision: torch.Tensor, begin: int = 0) -> torch.Tensor:
        """Return (P, L - begin, V) of rows of ids, about images vision (P, tokens, C)."""
        length, start, pad = max(map(len, rows)), rows[0].index(self.image_token), [0]
        ids = torch.tensor([row + pad * (length - len(row)) for row in rows]).to(self.device)
        if length not in self.placed:
            longest, side = torch.tensor([max(rows, key=len)]), self.grid * self.preprocessing.merge
            placed, _ = self.vlm.model.get_rope_index(
                longest,
                (longest == self.image_token).int(),
                image_grid_thw=torch.tensor([[1, side, side]]),
            )
            self.placed[length] = placed.to(self.device)
        embeds = self.vlm.get_input_embeddings()(ids)
        behind = embeds[:, start + vision.shape[1] :]
        embeds = torch.cat([embeds[:, :start], vision.to(embeds.dtype), behind], 1)
        positions = self.placed[length].expand(-1, len(rows), -1)
        hidden = self.vlm.model.language_model(
            inputs_embeds=embeds, position_ids=positions, use_cache=False
        ).last_hidden_state
        return self.vlm.lm_head(hidden[:, begin:])

    def answer(
        self,
        scene: Drawn,
        k: int,
        negatives: bool,
        odds: dict[str, float],
        rng: np.random.Generator,
    ) -> str:
        """Return an answer about member k; `odds` {mode: share} choose its negative point."""
        mode = rng.choice(list(odds), p=list(odds.values())) if negatives else "none"
        negative = negative_point(scene, k, mode, rng)
        points = [] if negative is None else [negative]
        point_prompt = PointPrompt(
            (), (seen_point(scene.members[k][3]),), tuple(map(seen_point, points))
        )
        return form(negatives).format(point_prompt)

    def step(self, progress: float, num_images: int) -> dict[str, torch.Tensor]:
        """Train one step on so many images; return losses and the probes' accuracy as `read`."""
        rng = np.random.default_rng([self.seed, 1, self.trainer.steps])
        indices = rng.choice(len(self.scenes), num_images, replace=False).tolist()
        odds = SHOWN if progress < SHOWN_FRACTION else SLOPPY
        rows, starts = [], []
        for index in indices:
            scene = self.scenes[index]
            for k in rng.choice(len(scene.members), QUESTIONS, replace=False).tolist():
                color, shape, *_ = scene.members[k]
                negatives = rng.random() >= UNASKED
                question = self.prompt(f"the {color} {shape}", negatives)
                text = self.answer(scene, k, negatives, odds, rng)
                rows.append([*question, *self.ids(text), self.tokenizer.eos_token_id])
                starts.append(len(question))
        begin, length = min(starts), max(map(len, rows))
        labels = [
            [-100] * (start - begin) + row[start:] + [-100] * (length - len(row))
            for row, start in zip(rows, starts)
        ]
        vision = self.vision(self.seen[indices])
        logits = self.logits(rows, vision.repeat_interleave(QUESTIONS, 0), begin - 1)[:, :-1]
        labels = torch.tensor(labels).to(self.device).flatten()
        loss = F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum")
        text = loss / (DIGITS * len(rows))
        probe, right = self._probe(indices, vision)
        self.trainer.step(text + 0.5 * probe, progress)
        return dict(text=text.detach(), probe=probe.detach(), read=right)

    def _probe(self, indices, vision):
        """Read members off their tokens: return (sum of three cross-entropies, mean accuracy)."""
        at = []
        for row, index in enumerate(indices):
            for color, shape, _, centre in self.scenes[index].members:
                x, y = (int(v * self.grid / SIDE) for v in centre)
                label = list(COLORS).index(color) * len(SHAPES) + SHAPES.index(shape)
                at.append([row, label, y, x])
        image, *truth = torch.tensor(at).to(self.device).T
        read = self.probe(vision[image, truth[1] * self.grid + truth[2]]).split(self.parts, 1)
        losses = [F.cross_entropy(logits, true) for logits, true in zip(read, truth)]
        right = [(logits.argmax(1) == true).float().mean() for logits, true in zip(read, truth)]
        return sum(losses), torch.stack(right).mean()

    @torch.no_grad()
    def evaluate(
        self, scenes: list[Drawn], temperature: float = 0.0, tokens: int = 32
    ) -> dict[str, float]:
        """Measure answers about a random member of each scene; greedy at temperature 0.

        Of all answers these are the shares that can be parsed, whose positive point is in the
        member, and whose negative point is absent (none), in the background at most NEAR pixels
        from the member or farther away, in another clump, in the member (own_edge) or in a
        neighbour.

        All questions of one form have as many tokens: no row is padded.
        """
        rng = np.random.default_rng([self.seed, 2])
        chosen = [int(rng.integers(len(scene.members))) for scene in scenes]
        rows = []
        for scene, k in zip(scenes, chosen):
            rows.append(self.prompt("the {} {}".format(*scene.members[k][:2]), True))
        seen = torch.from_numpy(np.stack([scene.seen for scene in scenes])).to(self.device)
        vision, starts = self.vision(seen), list(map(len, rows))
        for _ in range(tokens):
            logits = self.logits(rows, vision, len(rows[0]) - 1)[:, -1]
            logits[:, self.image_token] = -torch.inf
            if temperature:
                probabilities = (logits.float() / temperature).softmax(-1)
                new = torch.multinomial(probabilities, 1)[:, 0].tolist()
            else:
                new = logits.argmax(-1).tolist()
            rows = [[*row, token] for row, token in zip(rows, new)]
        counts = dict.fromkeys(("parsable", "positive_hits", *SLOPPY, "background_far"), 0)
        for scene, k, row, start in zip(scenes, chosen, rows, starts):
            text = self.tokenizer.decode(row[start:]).split("<|im_end|>")[0]
            point_prompt = form(True).parse_in_pixels(text, (SEEN, SEEN), (SIDE, SIDE)).prompt
            if point_prompt is None:
                continue
            counts["parsable"] += 1
            counts["positive_hits"] += where(scene, point_prompt.positive[0]) == 1 + k
            counts[mode_of(scene, k, point_prompt.negative)] += 1
        return {name: round(count / len(scenes), 3) for name, count in counts.items()}


def negative_point(
    scene: Drawn, k: int, mode: str, rng: np.random.Generator
) -> np.ndarray | tuple[float, float] | None:
    """Return a negative point (x, y) of a mode about member k, None for the mode "none".

    background_near: beside the member, see `beside`. other_clump: the centre of any member of
    another clump. own_edge: in the member itself, just inside its edge. neighbour: the centre of a
    neighbour.
    """
    near = scene.neighbours(k)
    if mode == "none":
        return None
    if mode == "own_edge":
        return at_own_edge(scene, k, rng.uniform(0, 2 * np.pi))
    if mode == "other_clump":
        others = [m for m in range(len(scene.members)) if m != k and m not in near]
        return scene.members[int(rng.choice(others))][3]
    neighbour = int(rng.choice(near))
    if mode == "background_near":
        return beside(scene, k, neighbour)
    assert mode == "neighbour", mode
    return scene.members[neighbour][3]


def beside(scene: Drawn, k: int, neighbour: int) -> np.ndarray:
    """Return a point (x, y) of the background beside member k, as far from it as a neighbour.

    It is opposite to the neighbour, or turned from there until nothing is drawn and its distance
    from the middle of the image is about the neighbour's: no distance tells the two apart.
    """
    centre, other = (np.array(scene.members[m][3]) for m in (k, neighbour))
    (x, y), middle = centre - other, (SIDE - 1) / 2
    angles = np.arctan2(y, x) + TURNS
    points = centre + np.hypot(x, y) * np.stack([np.cos(angles), np.sin(angles)], 1)
    around = np.radians(np.arange(0, 360, 45))
    around = CLEAR * np.stack([np.cos(around), np.sin(around)], 1)
    columns, rows = np.rint(points[:, None] + around).astype(int).clip(0, SIDE - 1).T
    free = (scene.of_member[rows, columns] == 0).all(0)
    free &= ((points >= BORDER) & (points <= SIDE - BORDER)).all(1)
    assert free.any()
    from_middle = np.hypot(*(points - middle).T) - np.hypot(*(other - middle))
    difference = np.abs(from_middle).clip(min=SAME_DISTANCE)
    return points[np.where(free, difference, np.inf).argmin()]  # the first of equal ones


def at_own_edge(scene: Drawn, k: int, angle: float) -> np.ndarray:
    """Return a point (x, y) in member k, just inside its edge in a direction."""
    centre, direction = np.array(scene.members[k][3]), np.array([np.cos(angle), np.sin(angle)])
    ray = centre[:, None] + direction[:, None] * np.arange(SIDE // 4)
    columns, rows = np.rint(ray).astype(int).clip(0, SIDE - 1)
    length = int(np.argmin(scene.of_member[rows, columns] == 1 + k))  # pixels to its edge
    return centre + EDGE * length * direction


def mode_of(scene: Drawn, k: int, negative: tuple) -> str:
    """Return the mode of an answer about member k by the first of its negative points."""
    if not negative:
        return "none"
    at = where(scene, negative[0]) - 1
    if at < 0:
        near = np.hypot(*np.subtract(negative[0], scene.members[k][3])) <= NEAR
        return "background_near" if near else "background_far"
    if at == k:
        return "own_edge"
    return "neighbour" if at in scene.neighbours(k) else "other_clump"


def seen_point(point: tuple[int, int]) -> tuple[int, int]:
    """Convert a pixel (x, y) of a scene to the image that Qwen2.5-VL sees."""
    return tuple(int(np.clip(round(float(v) * SEEN / SIDE), 10, SEEN - 1)) for v in point)


def where(scene: Drawn, point: tuple[int, int]) -> int:
    """Return what is at a point (x, y) of a scene: 0, or 1 + the number of a member."""
    x, y = (min(int(v), SIDE - 1) for v in point)
    return int(scene.of_member[y, x])
