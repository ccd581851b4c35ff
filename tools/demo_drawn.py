"""The scenes of the demo's warm start, as tensors: what is computed of each once.

Letters: S scenes, O objects of all of them, scene by scene; h w the size of mask logits, g h' w'
those of the grids of regions and of SAM2's coarse features.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from tools.demo_scenes import TINY, WARM_START, Kind, Scene, in_order, make_scene


def read(seed: int, kind: Kind, processor, index: int) -> tuple:
    """(scene without pixels, tile, SAM2's image, masks, grids, cells) of one scene, as arrays."""
    scene = make_scene(seed, WARM_START, index, kind)
    masks = torch.from_numpy(np.stack([obj.mask for obj in scene.objects]))  # (k, H, W)
    small = F.interpolate(masks[:, None].float(), [processor.sam_size // 4] * 2)[:, 0] > 0
    cells = F.adaptive_avg_pool2d(masks.float(), processor.sam_size // 16)
    tensors = (
        processor.tile_pixels(scene.image)[0],
        processor.sam_image(scene.image),
        small,
        processor.region_grid(masks),
        cells,
    )
    objects = tuple(replace(obj, mask=None) for obj in scene.objects)
    return Scene(None, objects), *(tensor.numpy() for tensor in tensors)


class Drawn:
    """Scenes without their pixels, and these as tensors on one device.

    Attributes:
        scenes: S of them; tiles: (S, 3, T, T) uint8; sam_images: (S, 3, .., ..) uint8.
        masks: (O, h, w) bool; grids: (O, g, g) bool; cells: (O, h', w') share of each that an
            object covers.
    """

    def __init__(self, seed, num_scenes, processor, device, kind=TINY, workers=0):
        rows = in_order(partial(read, seed, kind, processor), num_scenes, workers)
        rows = tqdm(rows, total=num_scenes, desc="warm-start scenes")
        self.scenes, tiles, sam_images, masks, grids, cells = zip(*rows)
        self.tiles, self.sam_images = (
            torch.from_numpy(np.stack(arrays)).to(device) for arrays in (tiles, sam_images)
        )
        self.masks, self.grids, self.cells = (
            torch.from_numpy(np.concatenate(arrays)).to(device) for arrays in (masks, grids, cells)
        )
        self.numbers = np.array([len(scene.objects) for scene in self.scenes])  # (S,)
        self.first = self.numbers.cumsum() - self.numbers  # (S,) the first object of each

    def all_objects(self, indices) -> tuple[np.ndarray, torch.Tensor, list]:
        """(rows, image, objects) of the scenes `indices`: all n objects of these.

        rows are their places among the O, image is the place in `indices` of the scene of each.
        """
        rows = [self.first[i] + np.arange(self.numbers[i]) for i in indices]
        image = np.repeat(np.arange(len(indices)), self.numbers[indices])
        objects = [obj for i in indices for obj in self.scenes[i].objects]
        return np.concatenate(rows), torch.from_numpy(image).to(self.masks.device), objects

    def some_objects(self, indices, number: int, rng) -> tuple[np.ndarray, torch.Tensor, list]:
        """`all_objects`, but `number` of each scene, drawn."""
        picks = [rng.choice(self.numbers[i], number, replace=False) for i in indices]
        rows = np.concatenate([self.first[i] + pick for i, pick in zip(indices, picks)])
        image = torch.arange(len(indices), device=self.masks.device).repeat_interleave(number)
        objects = [self.scenes[i].objects[k] for i, pick in zip(indices, picks) for k in pick]
        return rows, image, objects
