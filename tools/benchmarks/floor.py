"""The least that a step must compute and move, phase by phase, and the seconds that takes at the measured ceilings.

Counted once: prompts that G rows share, and the image tokens that the teacher's prompts share; attention where it is causal; no gradient
of frozen weights; logits of completions alone; of each generated token every weight read once. A lower bound of what any loop of this
shape does, not of what this one does.

Letters: B prompts, G samples each, N = B*G rows, L prompt length, T tokens of a caption, A of an answer with a mask, F of a forced one.
"""

import torch
from torch.utils.flop_counter import FlopCounterMode

from tools.benchmarks.work import Work

OPTIMIZER_BYTES = (
    4 * 10
)  # of a trainable number: weight, gradient, two moments read, three written; weight and EMA read, EMA written


class Model:
    """What a token of the language model costs."""

    def __init__(self, language_model):
        layers = language_model.model.layers
        parameters = [
            (name, p) for layer in layers for name, p in layer.named_parameters() if p.ndim == 2
        ]
        self.lora = sum(p.numel() for name, p in parameters if "lora_" in name)
        self.base = sum(p.numel() for name, p in parameters) - self.lora
        self.head = language_model.lm_head.weight.numel()
        config, size = language_model.config, layers[0].self_attn.head_dim
        self.attention = (
            config.num_attention_heads * size * len(layers)
        )  # numbers that a query has, in all layers
        self.slot = (
            2 * 2 * config.num_key_value_heads * size * len(layers)
        )  # bytes of a token's keys and values

    def forward(self, tokens: int, pairs: float, scored: int, backward=False) -> float:
        """Operations of `tokens` through the layers, `pairs` of query and key, `scored` tokens' logits; backward: and of the gradient."""
        per_token = 2 * (self.base + self.lora) + (2 * self.base + 4 * self.lora if backward else 0)
        return (
            tokens * per_token
            + (14 if backward else 4) * self.attention * pairs
            + (4 if backward else 2) * self.head * scored
        )

    def read(self, slots: float) -> float:
        """Bytes of one decoding step: all weights but the embedding table, the LoRA in bf16, the keys and values in `slots`."""
        return 2 * (self.base + self.lora + self.head) + self.slot * slots


def step_floor(work: Work, matmul: float, bandwidth: float) -> dict[str, float]:
    """{phase: seconds} at `matmul` operations and `bandwidth` bytes a second."""
    policy, prompts, rows = work.policy, work.args.batch_size, work.num_rows
    length, caption, answer = (
        work.prompt_length,
        work.args.max_completion_length,
        work.answer_tokens,
    )
    model, forced = Model(policy.model.language_model), len(policy.prompts.forced_answer)
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
        pairs = prompts * length**2 / 2 + rows * tokens * (length + tokens / 2)
        return compute(
            model.forward(prompts * length + rows * tokens, pairs, rows * tokens, backward),
            model.read(0),
        )

    def ask(count, tokens, pairs):
        return compute(model.forward(tokens, pairs, count), model.read(0))

    encode, masks = vision_operations(work), mask_operations(work)
    asked = ask(0, own + rows * forced, own_pairs + rows * forced * (length + forced / 2))
    frozen = sum(
        p.nbytes
        for part in ("vision_model", "grounding_encoder")
        for p in policy.model.get_submodule(part).parameters()
    )
    trainable = sum(p.numel() for p in policy.trainable.values())
    return {
        "encode": compute(encode, frozen),
        "rollout1": ask(prompts, prompts * length, prompts * length**2 / 2)
        + decode(prompts * length, caption, rows),
        "teacher1": asked + compute(masks),
        "reference1": scores(caption),
        "rollout2": ask(prompts, prompts * length, prompts * length**2 / 2)
        + decode(prompts * length, answer, rows)
        + compute(masks),
        "teacher2": ask(rows, own, own_pairs) + decode(own, caption, rows),
        "reference2": scores(answer),
        "update": scores(caption, backward=True)
        + scores(answer, backward=True)
        + compute(3 * masks)
        + compute(0, OPTIMIZER_BYTES * trainable),
    }


def vision_operations(work: Work) -> int:
    """Operations of both image encoders on the batch, counted while they run."""
    with FlopCounterMode(display=False) as counter:
        work.policy.encode_images(
            work.batch.inputs.pixel_values, work.batch.inputs.sam_pixels, work.batch.sizes
        )
    return counter.get_total_flops()


def mask_operations(work: Work) -> int:
    """Operations of SAM2's mask decoder on N prompts, counted while it runs."""
    policy, batch = work.policy, work.batch
    images = policy.encode_images(batch.inputs.pixel_values, batch.inputs.sam_pixels, batch.sizes)
    prompts = torch.randn(work.num_rows, policy.model.config.prompt_size, device=policy.device)
    with FlopCounterMode(display=False) as counter:
        policy.decode_masks(
            images, [row // work.args.num_generations for row in range(work.num_rows)], prompts
        )
    return counter.get_total_flops()
