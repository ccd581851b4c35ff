"""The least that a step must compute and move, and the seconds that takes at measured ceilings.

Counted once: prompts that G rows share, and the image tokens that the teacher's prompts share;
attention where it is causal; no gradient of frozen weights; logits of completions alone; of each
generated token every weight read once. A lower bound of what any loop of this shape does, not of
what this one does.

Letters: B prompts, G samples each, N = B*G rows, L prompt length, T tokens of a caption, A of an
answer with a mask, F of a forced one.
"""

import torch
from torch.utils.flop_counter import FlopCounterMode

from tools.benchmarks.work import Work

# Of a trainable number: weight, gradient, two moments, again weight, EMA read; four written.
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


def step_floor(work: Work, matmul: float, bandwidth: float) -> dict[str, float]:
    """{phase: seconds} at `matmul` operations and `bandwidth` bytes a second."""
    policy, prompts, rows = work.policy, work.config.rollout.batch_size, work.num_rows
    length, answer = work.options.prompt_length, work.options.answer_tokens
    caption = work.config.rollout.max_completion_length
    model, forced = LanguageModel(policy.model.language_model), len(policy.prompts.forced_answer)
    image = 1 + policy.model.config.tokens_per_tile  # tokens that prompts about one image share
    own = prompts * image + rows * (length - image)  # tokens of N prompts about B images
    own_pairs = (prompts * image**2 + rows * (length**2 - image**2)) / 2

    def compute(operations, moved=0.0):
        return max(operations / matmul, moved / bandwidth)

    def decode(slots, tokens, num_rows):
        """All tokens after the first, each row's own slots growing from 0 to T."""
        read = (tokens - 1) * model.read(slots + num_rows * tokens / 2)
        return compute((tokens - 1) * num_rows * 2 * (model.base + model.lora + model.head), read)

    def scores(tokens, backward=False):
        """One pass over all rows, which share their prompts."""
        answers = rows * tokens
        pairs = prompts * length**2 / 2 + answers * (length + tokens / 2)
        operations = model.forward(prompts * length + answers, pairs, answers, backward)
        return compute(operations, model.read(0))

    def ask(count, tokens, pairs):
        return compute(model.forward(tokens, pairs, count), model.read(0))

    encode, masks = image_operations(work)
    asked = ask(0, own + rows * forced, own_pairs + rows * forced * (length + forced / 2))
    encoders = [policy.model.vision_model, policy.model.grounding_encoder]
    frozen = sum(p.nbytes for encoder in encoders for p in encoder.parameters())
    trainable = sum(p.numel() for p in policy.trainable.values())
    prefill = ask(prompts, prompts * length, prompts * length**2 / 2)
    backward = scores(caption, backward=True) + scores(answer, backward=True)
    return {
        "encode": compute(encode, frozen),
        "rollout1": prefill + decode(prompts * length, caption, rows),
        "teacher1": asked + compute(masks),
        "reference1": scores(caption),
        "rollout2": prefill + decode(prompts * length, answer, rows) + compute(masks),
        "teacher2": ask(rows, own, own_pairs) + decode(own, caption, rows),
        "reference2": scores(answer),
        "update": backward + compute(3 * masks) + compute(0, OPTIMIZER_BYTES * trainable),
    }


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
