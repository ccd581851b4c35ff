"""Forward and backward of the update's log-probs: the plain way against this project's, on one language model of random weights.

Letters: P prompts, G rows of each, N = P*G rows, L prompt length, T completion tokens, V vocabulary.
"""

import copy
import gc

import torch

from rl_train import grpo
from rl_train.engine import Engine
from rl_train.engine.modules import follow, hidden_states
from rl_train.engine.packing import positions
from sa2va_hf import Sa2VAConfig
from tools.benchmarks.common import device_name, matmul_rate, random_llm, seconds_in_turns
from tools.random_checkpoint import CONFIG_4B

VOCABULARY_SHARE = 10  # the smaller vocabulary is this many times smaller


def plain(engine, embeds, mask, ids, num_generations):
    """(N, T) log-probs and entropies by one full sequence per row, with the logits of the completions."""
    model, length = engine.language_model, embeds.shape[1]
    embeds, mask = (x.repeat_interleave(num_generations, 0) for x in (embeds, mask))
    mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
    hidden = hidden_states(model, follow(model, embeds, ids), mask, positions(mask))
    logits = model.lm_head(hidden[:, length - 1 : -1])  # (N, T, V)
    logp = grpo.token_logps_from_logits(logits, ids, 1.0)
    with torch.no_grad():
        return logp, grpo.entropy_from_logits(logits, 1.0)


def shared(kernels: bool, gradient_checkpointing=False):
    """The same as in training, with the model's modules or with kernels."""

    def way(engine, embeds, mask, ids, num_generations):
        engine.fast_on = (embeds.device.type,) if kernels else ()
        engine.gradient_checkpointing = gradient_checkpointing
        prompt = torch.arange(len(ids), device=ids.device) // num_generations
        answers = engine.score(embeds, mask, prompt, ids, torch.ones_like(ids, dtype=torch.bool))
        return answers.logp, answers.entropy

    return way


WAYS = {
    "plain": plain,
    "shared prompt": shared(kernels=False),
    "and kernels": shared(kernels=True),
    "and checkpoints": shared(kernels=True, gradient_checkpointing=True),
}  # the last one is the default


class Work:
    """One micro-batch: P prompts of random embeddings, N random completions, and the derivative of a loss by each log-prob."""

    def __init__(self, model, args):
        torch.manual_seed(0)
        rows = args.num_prompts * args.num_generations
        self.model, self.args = model, args
        self.engine = Engine(model, pad_id=0, gradient_checkpointing=True)
        self.embeds = torch.randn(
            args.num_prompts,
            args.prompt_length,
            model.config.hidden_size,
            device=args.device,
            dtype=torch.bfloat16,
        )
        self.embeds.requires_grad_()  # mlp1 trains
        self.mask = torch.ones(
            args.num_prompts, args.prompt_length, dtype=torch.long, device=args.device
        )
        self.ids = torch.randint(
            model.config.vocab_size, (rows, args.num_tokens), device=args.device
        )
        self.slope = torch.randn(rows, args.num_tokens, device=args.device)

    def __call__(self, way):
        """Forward and backward; the gradients replace the last ones. Returns (logp (N, T), entropy (N, T))."""
        for p in (self.embeds, *self.model.parameters()):
            p.grad = None
        with torch.autocast(
            self.embeds.device.type, torch.bfloat16, enabled=self.embeds.dtype == torch.bfloat16
        ):
            logp, entropy = way(
                self.engine, self.embeds, self.mask, self.ids, self.args.num_generations
            )
        logp.backward(self.slope)
        return logp.detach(), entropy

    def gradient(self) -> torch.Tensor:
        """The LoRA's and, last, the prompts', as one vector on the CPU."""
        grads = [p.grad for p in self.model.parameters() if p.requires_grad] + [self.embeds.grad]
        assert len(grads) > 1, "no LoRA trains"
        return torch.cat([grad.flatten().float().cpu() for grad in grads])

    def peak(self, way) -> float:
        """GiB that forward and backward hold at their peak beyond weights and gradients; NaN where it is not counted."""
        if self.embeds.device.type != "cuda":
            return float("nan")
        self(way)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self(way)
        return (torch.cuda.max_memory_allocated() - before) / 2**30


def difference(found, right) -> dict:
    """Cosine and relative length of the difference of two vectors."""
    found, right = found.double(), right.double()
    return dict(
        cosine=torch.cosine_similarity(found, right, dim=0).item(),
        relative=((found - right).norm() / right.norm()).item(),
    )


def operations(model, args) -> dict:
    """{way: floating-point operations that it cannot do without}: no gradient of frozen weights, attention where it is causal."""
    layers = [layer for layer in model.model.layers]
    base = sum(
        p.numel()
        for layer in layers
        for n, p in layer.named_parameters()
        if "lora_" not in n and p.ndim == 2
    )
    lora = sum(p.numel() for layer in layers for n, p in layer.named_parameters() if "lora_" in n)
    heads = model.config.num_attention_heads * layers[0].self_attn.head_dim
    rows, length, new = args.num_prompts * args.num_generations, args.prompt_length, args.num_tokens
    head = 2 * 2 * rows * new * model.lm_head.weight.numel()

    def count(tokens, pairs):
        return (
            2 * tokens * (2 * base + 3 * lora) + 14 * len(layers) * heads * pairs + head
        )  # attention: 2 products, then 5

    own = rows * new * (length + new / 2)
    once = count(args.num_prompts * length + rows * new, own + args.num_prompts * length**2 / 2)
    return dict.fromkeys(WAYS, once) | {
        "plain": count(rows * (length + new), own + rows * length**2 / 2)
    }


def logprob_speeds(config, args) -> dict:
    """Seconds, memory and gradients of both ways; their errors against float32; their memory with a smaller vocabulary."""
    limit = matmul_rate(args)
    model = random_llm(config, args.lora_r, args.device)
    work, needed = Work(model, args), operations(model, args)
    found = dict(
        device=device_name(args.device),
        matmul_tflops=limit / 1e12,
        vocabulary=config.vocab_size,
        ways={},
    )
    clocks = seconds_in_turns({name: lambda way=way: work(way) for name, way in WAYS.items()}, args)
    outputs, gradients = {}, {}
    for name, way in WAYS.items():
        outputs[name], gradients[name] = work(way), work.gradient()
        found["ways"][name] = dict(
            seconds=clocks[name],
            tflop=needed[name] / 1e12,
            share_of_ceiling=needed[name] / clocks[name] / limit,
            peak_gib=work.peak(way),
        )
    for name, way in found["ways"].items():
        way["times_faster"] = clocks["plain"] / way["seconds"]
        way["against_plain"] = difference(gradients[name], gradients["plain"])
    # The right answer: the same weights in float32, layers recomputed in the backward to fit.
    work.engine.release()
    right = Work(model.float(), args)
    right.embeds = work.embeds.detach().float().requires_grad_()
    logp, entropy = right(shared(kernels=False, gradient_checkpointing=True))
    for name in WAYS:
        found["ways"][name] |= dict(
            gradient_error=difference(gradients[name], right.gradient()),
            logp_error=(outputs[name][0] - logp).abs().max().item(),
            entropy_error=(outputs[name][1] - entropy).abs().max().item(),
        )
    del model, work, right, logp, entropy
    gc.collect()
    smaller = copy.deepcopy(config)
    smaller.vocab_size = config.vocab_size // VOCABULARY_SHARE
    work = Work(random_llm(smaller, args.lora_r, args.device), args)
    for name, way in WAYS.items():
        found["ways"][name]["peak_gib_smaller_vocabulary"] = work.peak(way)
    show(found, args)
    return found


def measure(args) -> dict:
    """See `logprob_speeds`."""
    return logprob_speeds(Sa2VAConfig(**CONFIG_4B).llm, args)


def show(found, args):
    rows = args.num_prompts * args.num_generations
    print(
        f"{found['device']}, matrix product {found['matmul_tflops']:.0f} TFLOP/s; "
        f"{rows} rows x ({args.prompt_length} + {args.num_tokens})"
    )
    print(
        f"{'way':16} {'seconds':>8} {'faster':>7} {'TFLOP':>7} {'of ceiling':>10} {'peak GiB':>9} {'V/10':>7} {'cosine to plain':>15} "
        f"{'gradient error':>15} {'logp error':>11}"
    )
    for name, way in found["ways"].items():
        print(
            f"{name:16} {way['seconds']:>8.3f} {way['times_faster']:>7.2f} {way['tflop']:>7.1f} {way['share_of_ceiling']:>10.1%} "
            f"{way['peak_gib']:>9.2f} {way['peak_gib_smaller_vocabulary']:>7.2f} {way['against_plain']['cosine']:>15.6f} "
            f"{way['gradient_error']['relative']:>15.2e} {way['logp_error']:>11.2e}"
        )


def add_arguments(parser):
    parser.add_argument("--num_prompts", type=int, default=4, help="prompts in a batch")
    parser.add_argument("--num_generations", type=int, default=8, help="rows of each prompt")
    parser.add_argument("--prompt_length", type=int, default=400, help="tokens")
    parser.add_argument("--num_tokens", type=int, default=128, help="of each row's completion")
    parser.add_argument("--lora_r", type=int, default=128, help="rank")
    parser.add_argument(
        "--rounds", type=int, default=5, help="of each way, in turns; the median counts"
    )
    parser.add_argument(
        "--matmul_size",
        type=int,
        default=8192,
        help="side of the square matrices whose product is the ceiling",
    )
    parser.add_argument("--device", default="cuda", help="where")
