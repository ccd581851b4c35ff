"""Columns of masks that the evaluations of all model families share.

Of data whose phrases may name nothing (gRefCOCO) the figures are those of the GRES benchmark: an
empty mask for such a phrase has IoU 1 and adds nothing to the sums of cIoU, any other mask has IoU
0 and adds its pixels to the unions. N-acc. is the fraction of these phrases with an empty mask,
T-acc. that of the others with a mask. Sources: gres_model/evaluation/refer_evaluation.py of
henghuiding/ReLA (gIoU, cIoU), mdetr/datasets/refexp.py of henghuiding/gRefCOCO (N-acc., T-acc.; the
former file adds 1 to their denominators, and its T-acc. counts other cases than the paper's).
"""

import torch

from rl_train.loggers.pictures import small_mask
from rl_train.rewards import mask_iou
from rl_train.rollout import Batch

METRICS = {
    "seg_matched": "IoU of masks and regions one by one, best assignment, over the larger number",
    "n_acc": "phrases that name nothing and are answered with an empty mask",
    "t_acc": "phrases that name something and are answered with a mask that is not empty",
}
METRIC_COLUMNS = {"n_acc": ("none_right", "none"), "t_acc": ("some_answered", "some")}


def mask_columns(
    masks: list[torch.Tensor], targets: list[torch.Tensor], batch: Batch
) -> dict[str, list]:
    """Return {column: B values} of B masks (H, W) to evaluate: IoU, its parts, the masks."""
    pairs = list(zip(masks, targets, strict=True))
    columns = {}
    if batch.objects is not None:
        answered = [mask.any().item() for mask in masks]
        none_of = batch.no_target
        columns = dict(
            none=none_of,
            none_right=[none and not any_pixel for none, any_pixel in zip(none_of, answered)],
            some=[not none for none in none_of],
            some_answered=[any_pixel and not none for none, any_pixel in zip(none_of, answered)],
        )
    return columns | dict(
        seg_iou=mask_iou(masks, targets, 1.0).tolist(),
        seg_intersection=[(mask & target).sum().item() for mask, target in pairs],
        seg_union=[(mask | target).sum().item() for mask, target in pairs],
        mask=[small_mask(mask) for mask in masks],
        image_id=batch.image_ids,
        reference=batch.captions,
        index=batch.index,
    )
