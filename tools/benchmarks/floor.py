"""The least that a step must compute and move, and the seconds that takes at measured ceilings.

Counted once: prompts that G rows share, and the image tokens that the teacher's prompts share;
attention where it is causal; no gradient of frozen weights; logits of completions alone; of each
generated token every weight read once. A lower bound of what any loop of this shape does, not of
what this one does.

Letters: B prompts, G samples each, N = B*G rows, L prompt length, T tokens of a caption, A of an
answer with a mask, F of a forced one.
"""

from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from rl_train.policies.qwen_loading import TextModel
from tools.benchmarks.qwen import SHAPES
from tools.benchmarks.work import Work

# Of a trainable number: weight, gradient, two moments, again weight, EMA read; four written.
# (Of Qwen2.5-VL, which has no EMA, that is two too many, a thousandth of its update.)
OPTIMIZER_BYTES = 4 * 10


class LanguageModel:
    """What a token of the language model costs."""

    def __init__(self, language_model):
        layers = language_model.model.layers
        matrices = [(name, p) for name, p in layers.named_parameters() if p.ndim == 2]
        self.lora = sum(p.numel() for name, p in matrices if "lora_" in name)
        self.base = sum(p.numel() for name, p in matrices) - self.lora
        self.head = language_model.lm_head.weight.numel()
        config, size = language_model.config, layers[0].self_attn.head_dim
        # numbers of a query in all layers, bytes of a token's keys and values
        self.attention = config.num_attention_heads * size * len(layers)
        self.slot = 2 * 2 * config.num_key_value_heads * size * len(layers)

    def forward(self, tokens: int, pairs: float, scored: int, backward=False) -> float:
        """Operations of `tokens` through the layers, `pairs` of query and key, `scored` logits.

        With `backward` those of the gradient too.
        """
        per_token = 2 * (self.base + self.lora) + (2 * self.base + 4 * self.lora if backward else 0)
        attention = (14 if backward else 4) * self.attention * pairs
        return tokens * per_token + attention + (4 if backward else 2) * self.head * scored

    def read(self, slots: float) -> float:
        """Bytes of a decoding step: weights but the embeddings, keys and values in `slots`."""
        return 2 * (self.base + self.lora + self.head) + self.slot * slots


@dataclass(frozen=True)
class Least:
    """Seconds of the parts of a step, at `matmul` operations and `bandwidth` bytes a second."""

    model: LanguageModel
    prompts: int  # B
    rows: int  # N
    length: int  # L
    matmul: float
    bandwidth: float

    def compute(self, operations, moved=0.0) -> float:
        return max(operations / self.matmul, moved / self.bandwidth)

    def ask(self, count, tokens, pairs) -> float:
        """A forward of `tokens`, of which `count` have logits."""
        return self.compute(self.model.forward(tokens, pairs, count), self.model.read(0))

    def prefill(self) -> float:
        return self.ask(self.prompts, self.prompts * self.length, self.prompts * self.length**2 / 2)

    def decode(self, slots, tokens) -> float:
        """All tokens after the first, each row's own slots growing from 0 to T."""
        model, rows = self.model, self.rows
        read = (tokens - 1) * model.read(slots + rows * tokens / 2)
        return self.compute((tokens - 1) * rows * 2 * (model.base + model.lora + model.head), read)

    def scores(self, tokens, backward=False) -> float:
        """One pass over all rows, which share their prompts."""
        prompts, length, answers = self.prompts, self.length, self.rows * tokens
        pairs = prompts * length**2 / 2 + answers * (length + tokens / 2)
        operations = self.model.forward(prompts * length + answers, pairs, answers, backward)
        return self.compute(operations, self.model.read(0))


def step_floor(work: Work, matmul: float, bandwidth: float) -> dict[str, float]:
    """{phase: seconds} at `matmul` operations and `bandwidth` bytes a second."""
    points = work.options.sizes in SHAPES
    model = work.policy.model.vlm if points else work.policy.model.language_model
    costs = LanguageModel(TextModel(model.model.language_model, model.lm_head) if points else model)
    sizes = (work.config.rollout.batch_size, work.num_rows, work.options.prompt_length)
    least = Least(costs, *sizes, matmul, bandwidth)
    return points_floor(work, least) if points else sa2va_floor(work, least)


def sa2va_floor(work: Work, least: Least) -> dict[str, float]:
    """Of both loops."""
    policy, prompts, rows = work.policy, work.config.rollout.batch_size, work.num_rows
    length, answer = work.options.prompt_length, work.options.answer_tokens
    caption = work.config.rollout.max_completion_length
    forced = len(policy.prompts.forced_answer)
    image = 1 + policy.model.config.tokens_per_tile  # tokens that prompts about one image share
    own = prompts * image + rows * (length - image)  # tokens of N prompts about B images
    own_pairs = (prompts * image**2 + rows * (length**2 - image**2)) / 2
    ask, decode, scores, compute = least.ask, least.decode, least.scores, least.compute
    encode, masks = image_operations(work)
    asked = ask(0, own + rows * forced, own_pairs + rows * forced * (length + forced / 2))
    encoders = [policy.model.vision_model, policy.model.grounding_encoder]
    frozen = sum(p.nbytes for encoder in encoders for p in encoder.parameters())
    backward = scores(caption, backward=True) + scores(answer, backward=True)
    return {
        "encode": compute(encode, frozen),
        "rollout1": least.prefill() + decode(prompts * length, caption),
        "teacher1": asked + compute(masks),
        "reference1": scores(caption),
        "rollout2": least.prefill() + decode(prompts * length, answer) + compute(masks),
        "teacher2": ask(rows, own, own_pairs) + decode(own, caption),
        "reference2": scores(answer),
        "update": backward + compute(3 * masks) + compute(0, OPTIMIZER_BYTES * trainables(work)),
    }


def points_floor(work: Work, least: Least) -> dict[str, float]:
    """Of points; of the masks those that the answers prompt, with and without negative points."""
    policy, batch, tokens = work.policy, work.batch, work.config.rollout.max_completion_length
    task = work.state.tasks[0]
    images = [row // work.config.rollout.num_generations for row in range(work.num_rows)]
    with FlopCounterMode(display=False) as encoding:
        features = policy.encode(batch)
    answers, _ = task.read([policy.said] * len(images), features, images)
    with FlopCounterMode(display=False) as decoding:
        policy.point_masks(features, images, answers, task.options.sam_passes)
    encoders = [policy.model.vlm.model.visual, policy.model.sam.vision_encoder]
    frozen = sum(p.nbytes for encoder in encoders for p in encoder.parameters())
    decoded = least.decode(least.prompts * least.length, tokens)
    update = least.scores(tokens, backward=True)
    return {
        "encode": least.compute(encoding.get_total_flops(), frozen),
        "rollout1": least.prefill() + decoded,
        "teacher1": least.compute(decoding.get_total_flops()),
        "reference1": least.scores(tokens),
        "update": update + least.compute(0, OPTIMIZER_BYTES * trainables(work)),
    }


def trainables(work: Work) -> int:
    """Numbers that train."""
    return sum(p.numel() for p in work.policy.trainable.values())


def image_operations(work: Work) -> tuple[int, int]:
    """Operations of both image encoders on the batch, and of SAM2's mask decoder on N prompts."""
    policy, rows = work.policy, work.num_rows
    prompts = torch.randn(rows, policy.model.config.prompt_size, device=policy.device)
    image = [row // work.config.rollout.num_generations for row in range(rows)]
    with FlopCounterMode(display=False) as encoding:
        images = policy.encode(work.batch)
    with FlopCounterMode(display=False) as decoding:
        policy.decode_masks(images, image, prompts)
    return encoding.get_total_flops(), decoding.get_total_flops()
