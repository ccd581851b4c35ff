"""Log-probs from hidden states, forward and backward: this project's head against torch's own.

Letters: m tokens, C width, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from rl_train.config.flags import COUNT, flag
from rl_train.engine.lm_head import token_logps
from tools.benchmarks import common

COLUMNS = dict(seconds=".4f", fraction_of_ceiling=".1%", peak_gib=".2f")
COLUMNS |= dict(logp_error=".1e", gradient_error=".1e", warmup_rounds="d", settled="")


@dataclass(frozen=True, kw_only=True)
class Options(common.Ceilings):
    """sizes"""

    num_tokens: int = flag(4096, "tokens", type=COUNT)
    width: int = flag(2048, "of the model", type=COUNT)
    vocabulary: int = flag(151_679, "tokens of the model", type=COUNT)


def default(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, vocabulary: int):
    """Return log-probs (m,) of ids (m,) after hidden (m, C), by logits in the model's dtype."""
    logits = F.linear(hidden, weight)[:, :vocabulary].float()
    return torch.log_softmax(logits, dim=-1).gather(1, ids[:, None])[:, 0]


def chunked(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, vocabulary: int):
    """Return log-probs by this project's head, which computes entropies too."""
    return token_logps(hidden, weight, ids, 1.0, vocabulary)[0]


def torch_chunked(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, vocabulary: int):
    """Return log-probs by torch's own chunked loss, which has no entropies and no temperature."""
    chunking = torch.nn.LinearCrossEntropyOptions()
    return -F.linear_cross_entropy(hidden, weight, ids, reduction="none", options=chunking)


def run(
    way: Callable,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    slope: torch.Tensor,
    vocabulary: int,
):
    """Return log-probs (m,), and the derivative by hidden (m, C) of their sum times slope (m,)."""
    hidden = hidden.detach().requires_grad_()
    logp = way(hidden, weight, ids, vocabulary)
    logp.backward(slope)
    return logp.detach(), hidden.grad


def peak(work: Callable[[], object], device: torch.device | str) -> float:
    """Return the GiB that `work` allocates at most; NaN where memory is not counted."""
    if torch.device(device).type != "cuda":
        return float("nan")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def measure(options: Options) -> dict:
    """Measure seconds and memory of all ways, and errors of some tokens against float32."""
    limit, _, ceilings = common.ceilings(options)
    torch.manual_seed(0)
    device, dtype, vocabulary = options.device, torch.bfloat16, options.vocabulary
    hidden = torch.randn(options.num_tokens, options.width, device=device, dtype=dtype)
    # A multiple of 64, for which matrix products have fast kernels.
    rows = vocabulary + -vocabulary % 64
    padded = torch.zeros(rows, options.width, device=device, dtype=dtype)
    weight = torch.nn.init.normal_(padded[:vocabulary], std=0.02)
    ids = torch.randint(vocabulary, (options.num_tokens,), device=options.device)
    slope = torch.randn(options.num_tokens, device=options.device)
    compiled, some = torch.compile(default, dynamic=True), slice(64)
    ways = {
        "this project's": (chunked, padded),
        "default": (default, weight),
        "default, padded": (default, padded),
        "compiled": (compiled, weight),
        "compiled, padded": (compiled, padded),
    }
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):  # in torch 2.13, not in 2.11
        ways["torch's chunked"] = (torch_chunked, weight)
    runs = {
        name: partial(run, way, hidden, matrix, ids, slope, vocabulary)
        for name, (way, matrix) in ways.items()
    }
    # The reference of the errors, on a few tokens.
    logp, gradient = run(
        default, hidden[some].float(), weight.float(), ids[some], slope[some], vocabulary
    )
    rows, needed = {}, 4 * hidden.numel() * vocabulary  # operations: 2 m C V each way
    for name, timing in common.timings_in_turns(runs, options).items():
        logps, slopes = runs[name]()
        rows[name] = vars(timing) | dict(
            fraction_of_ceiling=needed / timing.seconds / limit,
            peak_gib=peak(runs[name], options.device),
            logp_error=(logps[some] - logp).abs().max().item(),
            gradient_error=((slopes[some] - gradient).norm() / gradient.norm()).item(),
        )
    table = {"floor": dict(seconds=needed / limit)} | rows
    common.print_table(COLUMNS, table, **ceilings, num_tokens=options.num_tokens)
    return ceilings | dict(ways=rows)
