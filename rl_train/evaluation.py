"""Held-out measures of both cycles and both directions, greedy and without sampled latents."""
import torch
from tqdm import tqdm

from rl_train.data.loader import eval_loader
from rl_train.distributed import Ranks, gather_objects
from rl_train.policy import Policy
from rl_train.rewards import mask_iou, meteor
from rl_train.rollout import describe, sample

METRICS = ("cycle_iou", "seg_iou", "caption_meteor", "cycle_meteor")


@torch.no_grad()
def evaluate(policy: Policy, dataset, batch_size: int, max_new_tokens: int, num_workers: int, ranks: Ranks) -> dict[str, torch.Tensor]:
    """Per-sample measures of a held-out dataset, of all ranks together, in the dataset's order.

    Returns:
        {"cycle_iou", "seg_iou", "caption_meteor", "cycle_meteor"}: (len(dataset),) each.
        cycle_iou: region -> greedy caption -> mask', IoU with the region; seg_iou: IoU of the mask of the true caption;
        caption_meteor: METEOR of the greedy caption of the region; cycle_meteor: true caption -> mask -> caption'.
    """
    loader = eval_loader(dataset, policy.processor, batch_size, num_workers, ranks.rank, ranks.world_size)
    found = {metric: [] for metric in METRICS}
    for batch in tqdm(loader, desc="evaluation", leave=False, disable=not ranks.is_main):
        images = policy.encode_images(batch.pixel_values, batch.sam_pixels, batch.sizes)
        image, targets = list(range(len(batch))), [mask.to(policy.device) for mask in batch.masks]
        captions = describe(policy, batch, images, image, targets, max_new_tokens)
        masks = answer_masks(policy, batch, images, batch.captions, max_new_tokens)
        found["cycle_iou"].append(mask_iou(answer_masks(policy, batch, images, captions, max_new_tokens), targets, 1.0).cpu())
        found["seg_iou"].append(mask_iou(masks, targets, 1.0).cpu())
        found["caption_meteor"].append(meteor(batch.captions, captions))
        found["cycle_meteor"].append(meteor(batch.captions, describe(policy, batch, images, image, masks, max_new_tokens)))
    parts = gather_objects({metric: torch.cat(values) if values else torch.zeros(0) for metric, values in found.items()})
    merged = {}
    for metric in METRICS:
        merged[metric] = torch.empty(len(dataset))
        for rank, part in enumerate(parts):
            merged[metric][rank::ranks.world_size] = part[metric]
    return merged


def answer_masks(policy, batch, images, captions, max_new_tokens) -> list[torch.Tensor]:
    """(H, W) bool mask of captions[i] in image i, from the model's own greedy answer (not a forced one)."""
    prompts = policy.segment_prompts(images, list(range(len(captions))), captions)
    return sample(policy, batch, images, prompts, 1, max_new_tokens, mask_sigma=0.0).masks


def summary(values: dict[str, torch.Tensor]) -> dict[str, tuple[float, float]]:
    """{metric: (mean, standard error)}."""
    return {m: (v.mean().item(), (v.std() / len(v) ** 0.5).item() if len(v) > 1 else 0.0) for m, v in values.items()}


def before_after_table(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> str:
    """Means before and after with the paired difference and its standard error."""
    lines = [f"{'held out, n = ' + str(len(before['cycle_iou'])):24s} {'before':>8s} {'after':>8s} {'change':>8s} {'s.e.':>7s}"]
    for metric in METRICS:
        difference = summary({metric: after[metric] - before[metric]})[metric]
        lines.append(f"{metric:24s} {before[metric].mean():8.4f} {after[metric].mean():8.4f} {difference[0]:+8.4f} {difference[1]:7.4f}")
    return "\n".join(lines)
