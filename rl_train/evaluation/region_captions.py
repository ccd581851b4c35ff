"""Captions of RefCOCOg's regions as Sa2VA's own evaluation asks, cleans and counts them.

Its sources are region_cap_refcocog_eval.py and metrics_region_cap.py in projects/sa2va/evaluation
of bytedance/Sa2VA; the scores are those of tylin/coco-caption (pycocoevalcap). Its METEOR is a Java
program, which counts paraphrases and function words in another way than NLTK's and adds up a whole
set: on 1,000 made-up captions it gave .260 where `region_meteor` gave .466 (correlation of the
captions' scores .89). docs/evaluation.md says what else differs.
"""

import re

import torch
from torch.utils.data import Subset

from rl_train.data.refcoco import RefCOCODataset
from rl_train.policies.sa2va import Sa2VAPolicy
from rl_train.rewards.cider import cider
from rl_train.rewards.meteor import meteor
from rl_train.rollout import Batch
from sa2va_hf.batches import ImageFeatures, Prompts

# Behind the image and its region; with the line break that the original's <image> has behind it.
QUESTION = "\nPlease give me a short description of the region in the picture marked by region1."
METRICS = {
    "region_cider": "CIDEr-D of a caption with all phrases of its region (0 to 10)",
    "region_meteor": "METEOR (NLTK's) of a caption with the nearest phrase of its region",
}
METRIC_COLUMNS = {}  # each metric is its column's mean
# In this order, also inside of words: "this" becomes "th".
_REMOVED = ("<s>", "\n", "region1", "Region1", "The region marked by", "The region marked as")
_REMOVED += ("The region marked", "is", "shows", ":")


def clean(text: str) -> str:
    """Clean an answer exactly as the original does before it counts."""
    for words in _REMOVED:
        text = text.replace(words, "")
    text = text.replace("   ", " ").replace("  ", " ").split("ASSISTANT: ")[-1]
    text = re.sub(r"<.*?>", "", text).replace("[SEG]", "")
    return " ".join(text.split()).strip("'").strip()


@torch.no_grad()
def measure(
    policy: Sa2VAPolicy, batch: Batch, features: ImageFeatures, max_new_tokens: int
) -> dict[str, list]:
    """Return the greedy captions of one batch: {column: B values} of an `evaluate.EvalResult`."""
    rows, grids = list(range(len(batch))), [grid[None] for grid in features.prompt_masks]
    ids = [
        policy.prompts.ids(QUESTION, tiles, [int(grid.sum())])
        for tiles, grid in zip(features.tiles, grids, strict=True)
    ]
    _, texts = policy.complete(features, Prompts(ids, rows, grids), 1, max_new_tokens)
    return dict(
        caption=[clean(text) for text in texts],
        image_id=batch.image_ids,
        reference=batch.captions,
        index=batch.index,
    )


def one_row_a_region(dataset: RefCOCODataset) -> Subset:
    """Return the first phrase of each region: a caption is asked for once."""
    regions = [region_of(dataset.image_id(i)) for i in range(len(dataset))]
    first = {region: i for i, region in reversed(list(enumerate(regions)))}
    return Subset(dataset, sorted(first.values()))


def region_of(image_id: str) -> str:
    """Return what the samples of a region share of their image_id."""
    return image_id.rpartition("/")[0]


def score(dataset: RefCOCODataset, image_ids: list[str], captions: list[str]) -> dict:
    """Score n captions: {column: (n,) float64}, one for each of METRICS.

    Args:
        dataset: of all phrases; those of a caption's region are its true captions.
    """
    phrases = {}
    for i in range(len(dataset)):
        phrases.setdefault(region_of(dataset.image_id(i)), []).append(dataset.sentence(i))
    references = [phrases[region_of(image_id)] for image_id in image_ids]
    best = [
        meteor(true, [caption] * len(true)).double().max()
        for true, caption in zip(references, captions, strict=True)
    ]
    return dict(region_cider=cider(references, captions), region_meteor=torch.stack(best))
