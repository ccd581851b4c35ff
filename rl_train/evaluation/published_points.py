"""ReasonSeg as Seg-Zero's and VisionReasoner's own evaluations ask, draw and count it.

Their sources are evaluation_scripts/evaluation.py of dvlab-research/Seg-Zero and
evaluation_visionreasoner.py beside it. docs/points.md says what is equal and what is not.
"""

import torch

from rl_train.evaluation.mask_columns import mask_columns
from rl_train.points.parser import AnswerFormat
from rl_train.points.prompts import point_question
from rl_train.points.published import FRAME, prompts_of_evaluation
from rl_train.policies.qwen_vl import QwenImageFeatures, QwenVLPolicy
from rl_train.rollout import Batch

# Characters that are taken off both ends of a question, {style: characters}.
STRIPPED = {"segzero": ".", "visionreasoner": '."?!'}
# Flags' values. The first may be changed; the others make up the protocol.
DEFAULTS = dict(image_size=FRAME, max_completion_length=1024)
FIXED = dict(negative_points="off", coordinates="pixels", sam_passes=1)


@torch.no_grad()
def measure(
    policy: QwenVLPolicy,
    batch: Batch,
    features: QwenImageFeatures,
    max_new_tokens: int,
    style: str,
) -> dict[str, list]:
    """Measure greedy answers of one batch: {column: B values} of an `evaluate.EvalResult`.

    An answer that their code cannot read is an empty mask.

    Args:
        style: segzero or visionreasoner.
    """
    rows, answer_format = list(range(len(batch))), AnswerFormat(style)
    questions = [
        point_question(caption, answer_format, STRIPPED[style]) for caption in batch.captions
    ]
    prompts = policy.point_questions(features, rows, questions)
    _, texts = policy.complete(features, prompts, 1, max_new_tokens)
    answers = [
        prompts_of_evaluation(text, style, seen_size, size)
        for text, seen_size, size in zip(texts, features.seen_sizes, features.sizes)
    ]
    masks = policy.best_masks(features, rows, [answer or [] for answer in answers])
    targets = [mask.to(policy.device) for mask in batch.masks]
    return mask_columns(masks, targets, batch) | dict(
        parsable=[answer is not None for answer in answers], caption=texts
    )
