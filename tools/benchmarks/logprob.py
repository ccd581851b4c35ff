"""Forward and backward of the update's log-probs: the plain way against this project's.

On one language model of random weights. Letters: P prompts, G rows of each, N = P*G rows, L prompt
length, T completion tokens, V vocabulary.
"""

import copy
import gc
from dataclasses import dataclass

import torch

from rl_train import grpo
from rl_train.config import COUNT, flag
from rl_train.engine import Engine
from sa2va_hf import Sa2VAConfig
from tools.benchmarks import common
from tools.random_checkpoint import CONFIG_4B

VOCABULARY_SHARE = 10  # the smaller vocabulary is this many times smaller
WAYS = ("plain", "and kernels", "and checkpoints")  # rows share their prompt's forward but in plain


@dataclass(frozen=True, kw_only=True)
class Options(common.Answers, common.Matmul):
    """sizes"""

    num_prompts: int = flag(4, "prompts in a batch", type=COUNT)

    @property
    def num_rows(self) -> int:
        return self.num_prompts * self.num_generations


def measure(options: Options) -> dict:
    """See `logprob_speeds`."""
    return logprob_speeds(Sa2VAConfig(**CONFIG_4B).llm, options)


class Work:
    """One micro-batch: P random prompts, N completions, a loss's derivative by each log-prob."""

    def __init__(self, model, options: Options):
        torch.manual_seed(0)
        size = (options.num_rows, options.num_tokens)
        self.model, self.options = model, options
        self.embeds, self.mask = common.random_prompts(options.num_prompts, model.config, options)
        self.embeds.requires_grad_()  # mlp1 trains
        self.ids = torch.randint(model.config.vocab_size, size, device=options.device)
        self.slope = torch.randn(size, device=options.device)
        self.engine = Engine(model, pad_id=0, gradient_checkpointing=True)

    def __call__(self, way: str) -> torch.Tensor:
        """(2, N, T) log-probs and entropies; their gradients replace the last ones."""
        for p in (self.embeds, *self.model.parameters()):
            p.grad = None
        with torch.autocast(self.embeds.device.type, torch.bfloat16):
            logp, entropy = self.plain() if way == "plain" else self.ours(way == "and checkpoints")
        logp.backward(self.slope)
        return torch.stack([logp.detach(), entropy])

    def ours(self, gradient_checkpointing: bool):
        """As in training."""
        prompt = torch.arange(len(self.ids), device=self.ids.device) // self.options.num_generations
        valid = torch.ones_like(self.ids, dtype=torch.bool)
        self.engine.gradient_checkpointing = gradient_checkpointing
        answers = self.engine.score(self.embeds, self.mask, prompt, self.ids, valid)
        return answers.logp, answers.entropy

    def plain(self, rows: slice = slice(None)):
        """By one full sequence per row, with the logits of the completions."""
        group, length, ids = self.options.num_generations, self.embeds.shape[1], self.ids[rows]
        embeds = self.embeds.repeat_interleave(group, 0)[rows]
        answers = self.model.get_input_embeddings()(ids).to(embeds.dtype)
        mask = torch.cat([self.mask.repeat_interleave(group, 0)[rows], torch.ones_like(ids)], dim=1)
        hidden = self.model.model(
            inputs_embeds=torch.cat([embeds, answers], dim=1), attention_mask=mask, use_cache=False
        ).last_hidden_state
        logits = self.model.lm_head(hidden[:, length - 1 : -1])  # (n, T, V)
        logp = grpo.token_logps_from_logits(logits, ids, 1.0)
        with torch.no_grad():
            return logp, grpo.entropy_from_logits(logits, 1.0)

    def right(self) -> torch.Tensor:
        """What a call returns and leaves as gradients, in float32: the plain way, row by row."""
        self.engine.release()
        self.model.float()
        self.embeds = self.embeds.detach().float().requires_grad_()
        for p in self.model.parameters():
            p.grad = None
        columns = []
        for row in range(len(self.ids)):
            logp, entropy = self.plain(slice(row, row + 1))
            logp.backward(self.slope[row : row + 1])
            columns.append(torch.stack([logp.detach(), entropy]))
        return torch.cat(columns, dim=1)

    def gradient(self) -> torch.Tensor:
        """The LoRA's and, last, the prompts', as one vector on the CPU."""
        grads = [p.grad for p in self.model.parameters() if p.requires_grad] + [self.embeds.grad]
        assert len(grads) > 1, "no LoRA trains"
        return torch.cat([grad.flatten().float().cpu() for grad in grads])

    def peak(self, way: str) -> float:
        """GiB that a call holds beyond weights and gradients; NaN where it is not counted."""
        if self.embeds.device.type != "cuda":
            return float("nan")
        self(way)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self(way)
        return (torch.cuda.max_memory_allocated() - before) / 2**30


def difference(vector, right) -> dict:
    """Cosine and relative length of the difference of two vectors."""
    vector, right = vector.double(), right.double()
    return dict(
        cosine=torch.cosine_similarity(vector, right, dim=0).item(),
        relative=((vector - right).norm() / right.norm()).item(),
    )


def operations(model, options: Options) -> dict[str, float]:
    """{way: operations that it cannot do without}.

    No gradient of frozen weights, attention where it is causal.
    """
    layers = model.model.layers
    matrices = [(n, p) for layer in layers for n, p in layer.named_parameters() if p.ndim == 2]
    lora = sum(p.numel() for name, p in matrices if "lora_" in name)
    base = sum(p.numel() for _, p in matrices) - lora
    heads = len(layers) * model.config.num_attention_heads * layers[0].self_attn.head_dim
    rows, length, new = options.num_rows, options.prompt_length, options.num_tokens
    head = 2 * 2 * rows * new * model.lm_head.weight.numel()

    def count(prompts):
        """Of the completions behind so many forwards of a prompt."""
        tokens = prompts * length + rows * new
        pairs = rows * new * (length + new / 2) + prompts * length**2 / 2
        return 2 * tokens * (2 * base + 3 * lora) + 14 * heads * pairs + head

    return {way: count(rows if way == "plain" else options.num_prompts) for way in WAYS}


def logprob_speeds(config, options: Options) -> dict:
    """Seconds, memory and errors against float32 of all ways; memory with a smaller vocabulary."""
    limit = common.matmul_rate(options)
    model = common.random_llm(config, options.lora_r, options.device)
    work, needed = Work(model, options), operations(model, options)
    clocks = common.seconds_in_turns({way: lambda way=way: work(way) for way in WAYS}, options)
    ways, outputs, gradients = {}, {}, {}
    for name in WAYS:
        outputs[name], gradients[name] = work(name), work.gradient()
        ways[name] = dict(
            seconds=clocks[name],
            times_faster=clocks["plain"] / clocks[name],
            tflop=needed[name] / 1e12,
            share_of_ceiling=needed[name] / clocks[name] / limit,
            against_plain=difference(gradients[name], gradients["plain"]),
            peak_gib=work.peak(name),
        )
    right = work.right()
    for name, way in ways.items():
        logp_error, entropy_error = (outputs[name] - right).abs().amax(dim=(1, 2)).tolist()
        way |= dict(logp_error=logp_error, entropy_error=entropy_error)
        way["gradient_error"] = difference(gradients[name], work.gradient())
    del model, work, right
    gc.collect()
    smaller = copy.deepcopy(config)
    smaller.vocab_size = config.vocab_size // VOCABULARY_SHARE
    work = Work(common.random_llm(smaller, options.lora_r, options.device), options)
    for name, way in ways.items():
        way["peak_gib_smaller_vocabulary"] = work.peak(name)
    measured = dict(
        device=common.device_name(options.device),
        matmul_tflops=limit / 1e12,
        vocabulary=config.vocab_size,
        ways=ways,
    )
    show(measured, options)
    return measured


def show(measured, options: Options):
    print(
        f"{measured['device']}, matrix product {measured['matmul_tflops']:.0f} TFLOP/s; "
        f"{options.num_rows} rows x ({options.prompt_length} + {options.num_tokens})"
    )
    print(
        f"{'way':16} {'seconds':>8} {'faster':>7} {'TFLOP':>7} {'of ceiling':>10} {'peak GiB':>9} "
        f"{'V/10':>7} {'cosine to plain':>15} {'gradient error':>15} {'logp error':>11}"
    )
    for name, way in measured["ways"].items():
        print(
            f"{name:16} {way['seconds']:>8.3f} {way['times_faster']:>7.2f} {way['tflop']:>7.1f} "
            f"{way['share_of_ceiling']:>10.1%} {way['peak_gib']:>9.2f} "
            f"{way['peak_gib_smaller_vocabulary']:>7.2f} {way['against_plain']['cosine']:>15.6f} "
            f"{way['gradient_error']['relative']:>15.2e} {way['logp_error']:>11.2e}"
        )
