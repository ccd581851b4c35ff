"""Supervised training of the demo's tiny SAM2 from random weights, on points in clumps.

It takes a positive point for the clump or for the member, half of the time each, and for the member
where a negative point says so. First all of it is trained, of which the image encoder is kept; then
prompt encoder and mask decoder begin anew and learn on its features what a negative point means,
which they do not while these change.

B = scenes of a step, M = clumps of them, each asked about once.
"""

from collections import defaultdict

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from rl_train.policies.sam2_prompting import BACKGROUND, FOREGROUND
from sa2va_hf.mask_decoder import decoder_features
from sa2va_hf.processing_sa2va import normalise_sam_pixels
from tools.demo.clump_scenes import COLORS, SHAPES, SIDE
from tools.demo.points_warm_start import SPOTS, Drawn, Trainer, negative_point

ENCODER = 0.5  # of the steps are those that train the image encoder
READ = 0.5  # weight of the readings of colour and shape off its features
# Of the steps: those with a negative point, with two.
ONE, TWO = 0.65, 0.1
# Of the rows with negative points those in which these touch nothing of the clump, and the clump is
# meant; of the steps with them those that go on from a first mask. Behind the encoder's both begin
# late: first that a negative point says anything is learnt, then what its place says, then
# corrections.
ELSEWHERE, ELSEWHERE_FROM, SECOND, SECOND_FROM = 0.3, 0.4, 0.3, 0.7
# Of a mask's loss: of what is meant, of the rest of its clump (without negative points, with them),
# of other clumps, of the background. By the smaller one a point alone is answered with the clump:
# where that is as likely as the member, more is lost on what is left out.
MEANT, REST_OF_CLUMP, OTHER_CLUMPS, OUTSIDE = 1.0, (0.3, 1.0), 0.5, 0.5
MOST = 9  # members of a scene


class DrawingStart:
    """Training of SAM2 on points, and by readings of colour and shape while its encoder is."""

    def __init__(
        self,
        sam: nn.Module,
        scenes: list[Drawn],
        seed: int,
        device: torch.device | str,
        learning_rate: float = 1e-3,
    ):
        self.sam, self.scenes, self.seed, self.device = sam.to(device).train(), scenes, seed, device
        self.pixels = torch.from_numpy(np.stack([scene.pixels for scene in scenes])).to(device)
        self.of_member = torch.from_numpy(np.stack([s.of_member for s in scenes])).to(device)
        num_labels = 1 + len(COLORS) * len(SHAPES)
        widths = [sam.mask_decoder.conv_s0.out_channels]
        widths.append(sam.config.vision_config.fpn_hidden_size)
        self.probes = nn.ModuleList(nn.Conv2d(width, num_labels, 1) for width in widths).to(device)
        self.encoding = Trainer([*sam.parameters(), *self.probes.parameters()], learning_rate)
        # What begins anew: all but the encoder and its features' last layers.
        kept = ("vision_encoder.", "mask_decoder.conv_s")
        state = {k: v.clone() for k, v in sam.state_dict().items() if not k.startswith(kept)}
        self.anew = state
        rest = [p for name, p in sam.named_parameters() if not name.startswith(kept[0])]
        self.drawing = Trainer(rest, learning_rate)

    def levels(self, pixels: torch.Tensor) -> list[torch.Tensor]:
        """Return the encoder's three levels of features for images (B, 3, SIDE, SIDE)."""
        return list(self.sam.vision_encoder(normalise_sam_pixels(pixels)).fpn_hidden_states)

    def logits(
        self,
        features: list[torch.Tensor],
        image_index: list[int],
        points: list,
        labels: list,
        before: torch.Tensor | None = None,
    ):
        """Return mask logits (M, S/4, S/4) of points (M, n, 2) in pixels with labels (M, n)."""
        points = torch.tensor(np.array(points), dtype=torch.float32).to(self.device)
        sparse, dense = self.sam.prompt_encoder(
            input_points=points[:, None],
            input_labels=torch.tensor(labels).to(self.device)[:, None],
            input_boxes=None,
            input_masks=before,
        )
        positions = self.sam.get_image_wide_positional_embeddings()
        *fine, coarse = (level[image_index] for level in features)
        masks, *_ = self.sam.mask_decoder(
            image_embeddings=coarse,
            image_positional_embeddings=positions.expand(len(image_index), -1, -1, -1),
            sparse_prompt_embeddings=sparse,
            dense_prompt_embeddings=dense,
            multimask_output=False,
            high_resolution_features=fine,
        )
        return masks[:, 0, 0]

    def row(
        self,
        scene: Drawn,
        clump: int,
        negatives: int,
        rng: np.random.Generator,
        elsewhere: float = ELSEWHERE,
    ):
        """Return (member, points, labels, members that are meant) about a clump of a scene."""
        clump_members = [k for k, member in enumerate(scene.members) if member[2] == clump]
        k = int(rng.choice(clump_members))
        positive, near = scene.spots[k][rng.integers(SPOTS)], scene.neighbours(k)
        labels = [FOREGROUND] + [BACKGROUND] * negatives
        if not negatives:
            meant = clump_members if rng.random() < 0.5 else [k]
            return k, [positive], labels, meant
        if rng.random() < elsewhere:
            others = [m for m in range(len(scene.members)) if m not in clump_members]
            spots = [
                scene.spots[int(rng.choice(others))] if rng.random() < 0.5 else scene.free
                for _ in range(negatives)
            ]
            meant = clump_members
        else:
            spots = [scene.spots[m] for m in rng.permutation(near)[:negatives]]
            spots += [scene.spots[near[0]]] * (negatives - len(spots))
            meant = [k]
        points = [positive, *(spot[rng.integers(SPOTS)] for spot in spots)]
        return k, points, labels, meant

    def step(self, progress: float, num_images: int) -> dict[str, torch.Tensor]:
        """Train one step on the clumps of so many images; return losses and IoU."""
        rng = np.random.default_rng([self.seed, 3, self.encoding.steps + self.drawing.steps])
        indices = rng.choice(len(self.scenes), num_images, replace=False).tolist()
        first = progress < ENCODER
        progress = progress / ENCODER if first else (progress - ENCODER) / (1 - ENCODER)
        if not first and not self.drawing.steps:
            self.sam.load_state_dict(self.anew, strict=False)
        uniform = rng.random()
        negatives = 1 if uniform < ONE else 2 if uniform < ONE + TWO else 0
        late = not first and progress > SECOND_FROM
        second = negatives and late and rng.random() < SECOND
        elsewhere = ELSEWHERE * (first or progress > ELSEWHERE_FROM)
        image, rows = [], []
        for number, index in enumerate(indices):
            scene = self.scenes[index]
            for clump in range(1 + scene.members[-1][2]):
                image.append(number)
                rows.append((scene, *self.row(scene, clump, negatives, rng, elsewhere)))
        scenes, member, points, labels, meant = zip(*rows)
        with torch.set_grad_enabled(first):
            levels = self.levels(self.pixels[indices])
        features, before = decoder_features(self.sam, levels), None
        if second:
            with torch.no_grad():
                first_points, first_labels = [p[:1] for p in points], [p[:1] for p in labels]
                before = self.logits(features, image, first_points, first_labels)[:, None]
        logits = self.logits(features, image, points, labels, before)
        at = self._at(indices, logits.shape[-2:])[image]
        clump_members = [[k, *s.neighbours(k)] for s, k in zip(scenes, member)]
        target, clump = self._masks(at, meant), self._masks(at, clump_members)
        loss = clump_loss(logits, target, clump, at > 0, REST_OF_CLUMP[negatives > 0])
        names = ("iou_point", "iou_negative", "iou_two")
        metrics = {names[negatives]: mask_iou(logits.detach() > 0, target), "loss": loss.detach()}
        if first:
            read = self._read(features, indices)
            metrics["read"] = read.detach()
            self.encoding.step(loss + READ * read, progress)
        else:
            self.drawing.step(loss, progress)
        return metrics

    def _read(self, features, indices):
        """Return the cross-entropy of reading colour and shape off finest and coarsest features."""
        # (B, 1 + MOST): label of each member, 0 of the background
        label_of = torch.zeros(len(indices), 1 + MOST, dtype=torch.long)
        for n, index in enumerate(indices):
            for k, (color, shape, *_) in enumerate(self.scenes[index].members):
                label = list(COLORS).index(color) * len(SHAPES) + SHAPES.index(shape)
                label_of[n, 1 + k] = 1 + label
        label_of, loss = label_of.to(self.device), 0.0
        for level, probe in zip((features[0], features[-1]), self.probes, strict=True):
            at = self._at(indices, level.shape[-2:])
            truth = label_of.gather(1, at.flatten(1)).view_as(at)
            loss = loss + F.cross_entropy(probe(level), truth)
        return loss

    def _at(self, indices, size) -> torch.Tensor:
        """Return (B, *size) long: 0 = background, 1 + k = member k."""
        return F.interpolate(self.of_member[indices][:, None].float(), size)[:, 0].long()

    def _masks(self, at, members) -> torch.Tensor:
        """Return (M, h, w) bool: where of `at` (M, h, w) one of the row's members is."""
        table = torch.zeros(len(members), 1 + MOST, dtype=torch.bool)
        for row, row_members in enumerate(members):
            table[row, [1 + k for k in row_members]] = True
        return table.to(self.device).gather(1, at.flatten(1)).view_as(at)

    @torch.no_grad()
    def evaluate(self, scenes: list[Drawn]) -> dict[str, float]:
        """Measure the mean IoU with clump and member of masks by different points."""
        rng = np.random.default_rng([self.seed, 4])
        image, prompts, clump_members, whole = [], defaultdict(list), [], []
        for number, scene in enumerate(scenes):
            for clump in range(1 + scene.members[-1][2]):
                k, (p,), *_ = self.row(scene, clump, 0, rng)
                near = scene.neighbours(k)
                others = [m for m, member in enumerate(scene.members) if member[2] != clump]
                spots = dict(
                    neighbour=scene.spots[int(rng.choice(near))],
                    other_clump=scene.spots[int(rng.choice(others))],
                    background=scene.free,
                    inside=scene.spots[k],
                )
                image.append(number)
                clump_members.append(torch.from_numpy(scene.of_member == 1 + k))
                of_clump = np.isin(scene.of_member, [1 + m for m in (k, *near)])
                whole.append(torch.from_numpy(of_clump))
                prompts["alone"].append([p])
                for name, candidates in spots.items():
                    prompts[name].append([p, candidates[rng.integers(SPOTS)]])
                for name in ("background_near", "own_edge"):
                    prompts[name].append([p, negative_point(scene, k, name, rng)])
        pixels = torch.from_numpy(np.stack([scene.pixels for scene in scenes])).to(self.device)
        features = decoder_features(self.sam, self.levels(pixels))
        clump_members, whole = (
            torch.stack(masks).to(self.device) for masks in (clump_members, whole)
        )
        low = {}
        for name, points in prompts.items():
            labels = [[FOREGROUND] + [BACKGROUND] * (len(row) - 1) for row in points]
            low[name] = self.logits(features, image, points, labels)
            if name == "neighbour":
                before = low["alone"][:, None]
                low["two_passes"] = self.logits(features, image, points, labels, before)
        masks = {
            name: F.interpolate(logits[:, None], (SIDE, SIDE), mode="bilinear")[:, 0] > 0
            for name, logits in low.items()
        }
        metrics = {"clump": mask_iou(masks["alone"], whole)}
        metrics |= {name: mask_iou(mask, clump_members) for name, mask in masks.items()}
        return {name: round(iou.item(), 3) for name, iou in metrics.items()}


def mask_iou(mask: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean IoU of masks (M, h, w) bool with targets, none of which is empty."""
    both, either = (mask & target).sum((1, 2)), (mask | target).sum((1, 2))
    return (both / either).mean()


def clump_loss(
    logits: torch.Tensor,
    target: torch.Tensor,
    clump: torch.Tensor,
    drawn: torch.Tensor,
    rest_weight: float,
):
    """Return BCE of what is meant, the rest of its clump, other clumps and background, and Dice.

    Each part is a mean with its own weight, whatever its size: a neighbour's pixels are few, and
    the meaning of a negative point is learnt from them alone.

    Args:
        logits: (M, h, w); target, clump, drawn: (M, h, w) bool, each of which holds the one before.
        rest_weight: weight of the rest of the clump.
    """
    target, clump, drawn = (mask.flatten(1).float() for mask in (target, clump, drawn))
    bce = F.binary_cross_entropy_with_logits(logits.flatten(1), target, reduction="none")
    parts = (target, clump - target, drawn - clump, 1 - drawn)
    weights = (MEANT, rest_weight, OTHER_CLUMPS, OUTSIDE)
    loss = sum(w * (bce * p).sum(1) / p.sum(1).clamp(min=1) for p, w in zip(parts, weights))
    probability = logits.flatten(1).sigmoid()
    shared, both = (probability * target).sum(1), probability.sum(1) + target.sum(1)
    return (loss + 1 - (2 * shared + 1) / (both + 1)).mean()
