"""The end of the demo's warm start: a disturbed prompt head, and masks decided all the same.

What loop 2 has to learn is then which object a phrase means, and not where a mask ends.
"""

from contextlib import contextmanager
from copy import deepcopy

import numpy as np
import torch
from tqdm import tqdm

from sa2va_hf.losses import resized_mask_loss
from tools.demo_warm_start import WarmStart, mistaken

HIT_TARGET = 0.65  # share of phrases whose mask lies on the right object
LARGEST_NOISE, BISECTIONS = 32.0, 10  # of the prompt head's weights' standard deviation
SCALES = [2 ** (k / 2) for k in range(-4, 5)]  # that its output may lack then
DECIDED = 0.3  # IoU of a mask with an object that it is made to be, at least


@torch.no_grad()
def unsettle(start: WarmStart, target: float = HIT_TARGET, num_scenes: int = 64):
    """Disturb text_hidden_fcs by random numbers, until so few of its masks hit.

    The share of hits falls as the numbers grow; the largest that leave `target` of them is found by
    bisection. Then give the prompt embeddings the scale of which masks are best.

    Raises:
        RuntimeError: fewer hit even undisturbed.
    """
    said = list(phrases(start, num_scenes))
    last = start.model.text_hidden_fcs[2]
    learnt, generator = last.weight.clone(), torch.Generator().manual_seed(start.seed)
    noise = torch.randn(learnt.shape, generator=generator).to(learnt) * learnt.std()
    low, high = 0.0, LARGEST_NOISE
    for _ in range(BISECTIONS):
        share = (low + high) / 2
        last.weight.copy_(learnt + share * noise)
        hits = found(start, said, 1.0)[1]
        low, high = (share, high) if hits >= target else (low, share)
    if low == 0:
        raise RuntimeError(f"not {target} of the masks hit, even undisturbed: train longer")
    last.weight.copy_(learnt + low * noise)
    of_scale = {scale: found(start, said, scale) for scale in SCALES}
    best = max(SCALES, key=lambda scale: of_scale[scale][0])
    last.weight.mul_(best)
    last.bias.mul_(best)
    iou, hits = of_scale[best]
    tqdm.write(
        f"prompt head: noise of {low:.2f} standard deviations, scaled by {best:.2f}: of its "
        f"masks {hits:.2f} hit, IoU {iou:.2f}"
    )


def phrases(start: WarmStart, num_scenes: int):
    """Yield ((n, C) hidden states at [SEG], SAM2's features, (n, h, w) masks) of scenes.

    The hidden states are those of the captions of all n objects of a scene.
    """
    rng = np.random.default_rng([start.seed, 11])
    number = min(num_scenes, len(start.scenes))
    for index in rng.choice(len(start.scenes), number, replace=False).tolist():
        rows, image, objects = start.drawn.all_objects([index])
        with start.low_precision():
            hidden = start.hidden_states([index], image, [obj.caption for obj in objects], rng)
            features = start.model.sam_features(start.drawn.sam_images[[index]])
        yield hidden, features, start.drawn.masks[rows]


def found(start: WarmStart, said, scale: float) -> tuple[float, float]:
    """(mean IoU, share on the right object) of the masks of `phrases`, prompts times `scale`."""
    ious, hits = [], []
    for hidden, features, masks in said:
        with start.low_precision():
            prompts = scale * start.model.text_hidden_fcs(hidden).float()
            image = torch.zeros(len(prompts), dtype=torch.long, device=prompts.device)
            logits = start.model.decode_masks(features, image, prompts)
        iou = all_ious(logits > 0, masks)
        ious.append(iou.diag())
        right = torch.arange(len(iou), device=iou.device)
        hits.append((iou.diag() > 0) & (iou.argmax(1) == right))
    return torch.cat(ious).mean().item(), torch.cat(hits).double().mean().item()


def all_ious(masks, areas) -> torch.Tensor:
    """(n, m) IoU of each of n masks (n, h, w) bool with each of m areas, none of them empty."""
    masks, areas = (one.flatten(1).double() for one in (masks, areas))
    both = masks @ areas.T
    return both / (masks.sum(1)[:, None] + areas.sum(1) - both)


def decide(start: WarmStart, steps: int):
    """Train SAM2's hypernetworks to answer prompts of the disturbed head by an object, whole.

    By the one that the mask is most of before, so that which objects it finds changes little.
    """
    model, drawn = start.model, start.drawn
    decoder = model.grounding_encoder.mask_decoder
    before = deepcopy(decoder.output_hypernetworks_mlps)

    def loss(indices, rng, progress):
        rows, image, objects = drawn.all_objects(indices)
        said = [rng.choice([obj.caption, mistaken(obj, rng)]) for obj in objects]
        masks = drawn.masks[rows]
        with torch.no_grad(), start.low_precision():
            prompts = model.text_hidden_fcs(start.hidden_states(indices, image, said, rng))
            features = model.sam_features(drawn.sam_images[indices])
            with hypernetworks(decoder, before):
                iou = all_ious(model.decode_masks(features, image, prompts) > 0, masks)
        with start.low_precision():
            logits = model.decode_masks(features, image, prompts)
        best, of = iou.masked_fill(image[:, None] != image, -1).max(1)
        some = best > DECIDED
        mask = resized_mask_loss(logits[some], masks[of[some]].float()).mean()
        own = of == torch.arange(len(of), device=of.device)
        return mask, dict(mask=mask, hits=own[some].float().mean(), some=some.float().mean())

    start.train("decisions", (decoder.output_hypernetworks_mlps,), loss, steps, 12)


@contextmanager
def hypernetworks(decoder, others):
    """SAM2's mask decoder with other hypernetworks than its own."""
    own, decoder.output_hypernetworks_mlps = decoder.output_hypernetworks_mlps, others
    try:
        yield
    finally:
        decoder.output_hypernetworks_mlps = own
