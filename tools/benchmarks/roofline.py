"""The least that a step must compute and move, and the seconds that takes at measured ceilings.

Counted once: prompts that G rows share, and the image tokens that prompts share; attention where it
is causal; no gradient of frozen weights; logits of completions alone; of each step of decoding
every weight, and the keys and values of the rows that go on. Lengths are those of the last step. A
lower bound of what any loop of this shape does, not of what this one does.

Letters: P prompts, N rows, G of each prompt, T tokens.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from rl_train.policies.qwen_vl_model import TextModel
from sa2va_hf.batches import Prompts, shared_prefix_lengths
from sa2va_hf.qwen_vl import QwenVLModel
from tools.benchmarks.lengths import Request
from tools.benchmarks.qwen import SHAPES
from tools.benchmarks.workload import Work
from tools.benchmarks.workload_sa2va import num_pieces

# Of a trainable number: weight, gradient, two moments, again weight, EMA read; four written.
# (Of Qwen2.5-VL, which has no EMA, that is two too many, a thousandth of its update.)
OPTIMIZER_BYTES = 4 * 10


class LanguageModel:
    """Cost of a token of the language model."""

    def __init__(self, language_model: nn.Module):
        layers = language_model.model.layers
        # Of a linear, quantised or not, the weights that it multiplies by and the bytes it keeps.
        linears = [module for module in layers.modules() if isinstance(module, nn.Linear)]
        sizes = {linear: linear.out_features * linear.in_features for linear in linears}
        lora = {
            module for name, module in layers.named_modules() if "lora_" in name and module in sizes
        }
        self.lora = sum(sizes[linear] for linear in lora)
        self.base = sum(sizes.values()) - self.lora
        self.base_bytes = sum(linear.weight.nbytes for linear in linears if linear not in lora)
        self.head = language_model.lm_head.weight.numel()
        config, size = language_model.config, layers[0].self_attn.head_dim
        # numbers of a query in all layers, bytes of a token's keys and values
        self.attention = config.num_attention_heads * size * len(layers)
        self.slot = 2 * 2 * config.num_key_value_heads * size * len(layers)

    def forward(self, tokens: int, pairs: float, scored: int, backward: bool = False) -> float:
        """Count operations of `tokens` in the layers, `pairs` of query and key, `scored` logits.

        With `backward` those of the gradient too.
        """
        # A product is 2 a weight; its backward 2 by the input, and 2 by a weight that trains.
        per_token = 2 * (self.base + self.lora) + (2 * self.base + 4 * self.lora if backward else 0)
        # Two products forward; backward five more, of which one is the scores, computed again.
        attention = (14 if backward else 4) * self.attention * pairs
        return tokens * per_token + attention + (4 if backward else 2) * self.head * scored

    def read(self, slots: float) -> float:
        """Count bytes of a decoding step: weights but embeddings, keys and values in `slots`."""
        return self.base_bytes + 2 * (self.lora + self.head) + self.slot * slots


@dataclass(frozen=True)
class Call:
    """Tokens of one call: of P prompts and N answers to them."""

    prompts: torch.Tensor  # (P,)
    shared: torch.Tensor  # (P,) leading tokens that the prompt before has too
    answers: torch.Tensor | None  # (P, G); None: the prompts are only read

    @property
    def own(self) -> torch.Tensor:
        """Return (P,) tokens that no prompt before has."""
        return self.prompts - self.shared

    @property
    def pairs(self) -> float:
        """Return the cost of query and key in the prompts."""
        return (self.prompts**2 - self.shared**2).sum().item() / 2


@dataclass(frozen=True)
class Least:
    """Seconds of the parts of a step, at `matmul` operations and `bandwidth` bytes a second."""

    model: LanguageModel
    matmul: float
    bandwidth: float

    def compute(self, operations: float, moved: float = 0.0) -> float:
        return max(operations / self.matmul, moved / self.bandwidth)

    def ask(self, call: Call) -> float:
        """Return a call's cost: the prompts and, if it answers, the logits and all tokens."""
        model, answers = self.model, call.answers
        logits = 0 if answers is None else len(call.prompts)
        operations = model.forward(call.own.sum().item(), call.pairs, logits)
        prompts = self.compute(operations, model.read(0))
        return prompts if answers is None else prompts + self.decode(call)

    def decode(self, call: Call) -> float:
        """Return the cost of all tokens after the first: in each step of rows that are not done."""
        model, answers = self.model, call.answers
        fed = answers - 1  # (P, G) the last is never fed
        longest = fed.max(1).values  # (P,) steps in which a prompt's keys and values are read
        steps = int(longest.max())
        # A prompt's keys once a step for all its rows, a row's own up to that step.
        slots = (longest * call.own).sum() + (fed * (fed + 1) / 2).sum()
        moved = steps * model.read(0) + model.slot * slots.item()
        each = 2 * (model.base + model.lora + model.head)
        return self.compute(fed.sum().item() * each, moved)

    def saved_together(self, calls: list[Call]) -> float:
        """Return what two decodings cost less if each step reads the weights once for both."""
        steps = min(int(call.answers.max()) - 1 for call in calls)
        return steps * self.model.read(0) / self.bandwidth

    def scores(self, call: Call, backward: bool = False) -> float:
        """Return the cost of one pass over all rows, which share their prompts."""
        answers = call.answers  # (P, G)
        pairs = call.pairs + (answers * (call.prompts[:, None] + answers / 2)).sum().item()
        tokens = answers.sum().item()
        both = call.own.sum().item() + tokens
        return self.compute(self.model.forward(both, pairs, tokens, backward), self.model.read(0))


def step_floor(work: Work, matmul: float, bandwidth: float) -> dict[str, float]:
    """Return {phase: seconds} of the last step, by operations and bytes a second."""
    policy, points = work.policy, work.options.sizes in SHAPES
    model = policy.model.vlm if points else policy.model.language_model
    costs = LanguageModel(TextModel(model.model.language_model, model.lm_head) if points else model)
    least = Least(costs, matmul, bandwidth)
    encode, masks = (points_operations if points else image_operations)(work)
    vision, drawing = vision_encoder(work), draw_operations(work)
    sam = policy.model.sam.vision_encoder if points else policy.model.grounding_encoder
    # Encoders read their weights once, or compute for longer.
    frozen = sum(p.nbytes for encoder in (vision, sam) for p in encoder.parameters())
    seconds, update = {"encode": least.compute(encode, frozen)}, 0.0
    drawn = set()  # (image, cells) of each image with a region drawn
    update += least.compute(0, OPTIMIZER_BYTES * sum(p.numel() for p in policy.trainable.values()))
    for number, task in enumerate(work.state.tasks, 1):
        rollout, ask, teacher = (f"{phase}{number}" for phase in ("rollout", "ask", "teacher"))
        for phase in (rollout, ask, teacher):
            seconds[phase] = sum(least.ask(call_of(work, r)) for r in work.requests[phase])
            new = drawn_regions(work, phase) - drawn
            seconds[phase] += least.compute(len(new) * drawing)
            drawn |= new
        masks_phase = rollout if task.action else ask if task.asks_teacher else teacher
        seconds[masks_phase] += least.compute(masks)
        sampled = call_of(work, work.requests[rollout][0])
        asks_reference = work.config.loss.kl_coef > 0
        seconds[f"reference{number}"] = least.scores(sampled) if asks_reference else 0.0
        update += least.scores(sampled, backward=True)
        # Forward and twice that backward through the mask decoder.
        update += least.compute(3 * masks) if task.action else 0.0
    if len(work.state.tasks) > 1:  # the teacher of loop 2 writes while loop 1 samples
        written = [work.requests["rollout1"][0], work.requests["teacher2"][-1]]
        seconds["teacher2"] -= least.saved_together([call_of(work, call) for call in written])
    return seconds | {"update": update}


def call_of(work: Work, request: Request) -> Call:
    """Return the cost of a call's request."""
    prompts = torch.tensor([len(ids) for ids in request.prompts.ids], dtype=torch.float64)
    answers = None
    if request.valid is not None:
        answers = request.valid.sum(1).cpu().double().view(len(prompts), -1)
    return Call(prompts, shared_tokens(work, request.prompts), answers)


def shared_tokens(work: Work, prompts: Prompts) -> torch.Tensor:
    """Return how many leading tokens (P,) each prompt shares with the one before: an image's."""
    if work.options.sizes in SHAPES:  # whose prompts are about an image each
        return torch.zeros(len(prompts), dtype=torch.float64)
    pieces, draws = num_pieces(work.policy, work.options), draws_regions(work)
    images = SimpleNamespace(tiles=[pieces] * len(work.batch), draw=draws or None)
    shared = shared_prefix_lengths(work.policy.model, images, prompts)
    return torch.tensor(shared, dtype=torch.float64)


def vision_encoder(work: Work) -> nn.Module:
    """Return the encoder of the images that the language model sees."""
    model = work.policy.model
    if work.options.sizes in SHAPES:
        return model.vlm.model.visual
    return model.model.model.visual if isinstance(model, QwenVLModel) else model.vision_model


def draws_regions(work: Work) -> bool:
    """Return whether regions are drawn on the images that the language model sees."""
    is_qwen = isinstance(work.policy.model, QwenVLModel)
    return is_qwen and work.policy.region_prompt in ("outline", "box")


def drawn_regions(work: Work, phase: str) -> set[tuple[int, bytes]]:
    """Return (image, cells) of all regions that a phase's calls need drawn on their images."""
    asked = [request.prompts for request in work.requests[phase]] if draws_regions(work) else []
    return {
        (image, cells.numpy().tobytes())
        for prompts in asked
        for image, cells in zip(prompts.image_index, prompts.prompt_masks or ())
    }


def draw_operations(work: Work) -> int:
    """Count operations of encoding one image with a region drawn; 0 where none is drawn."""
    if not draws_regions(work):
        return 0
    with FlopCounterMode(display=False) as encoding, torch.no_grad():
        work.policy.model.encode_images(work.batch.inputs.tiles[:1])
    return encoding.get_total_flops()


def points_operations(work: Work) -> tuple[int, int]:
    """Operations of both image encoders, and of the masks that the answers prompt.

    With and without negative points.
    """
    policy, task = work.policy, work.state.tasks[0]
    images = [row // work.config.rollout.num_generations for row in range(work.num_rows)]
    with FlopCounterMode(display=False) as encoding:
        features = policy.encode(work.batch)
    parsed = task.parse([policy.forced_text] * len(images), features, images)
    answers = [answer.prompt for answer in parsed]
    with FlopCounterMode(display=False) as decoding:
        policy.point_masks(features, images, answers, task.options.sam_passes)
    return encoding.get_total_flops(), decoding.get_total_flops()


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
