"""The token sampler against memory bandwidth and `generate`, on one LLM of random weights."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from rl_train.config.flags import AT_LEAST_2, COUNT, flag
from rl_train.engine import Engine
from rl_train.engine.decode import Decoder
from rl_train.engine.fused_weights import FusedModel
from rl_train.engine.sampling import Completions
from tools.benchmarks import common, compiled
from tools.benchmarks.roofline import LanguageModel

SAMPLERS = ("decoder", "generate")
COLUMNS = dict(ms_per_token=".2f", ratio_to_floor=".2f", lowest=".2f", highest=".2f")
COLUMNS |= dict(first_token_ms=".1f")
COLUMNS |= dict(first_call_seconds=".1f", hidden_error=".1e", warmup_rounds="d", settled="")


@dataclass(frozen=True, kw_only=True)
class Options(common.Answers):
    """sizes"""

    num_prompts: tuple = flag(
        (4, 16), "prompts in a batch, one number of them after the other", type=COUNT
    )
    num_tokens: int = flag(128, "new tokens of each row", type=AT_LEAST_2)
    samplers: tuple = flag(
        SAMPLERS,
        "decoder = this project's, generate = transformers'; the former's step compiled: "
        f"{', '.join(compiled.GRAPHS)}; with one or all of its kernels as compiled twins: "
        f"{', '.join(compiled.WITHOUT)}",
        choices=[*SAMPLERS, *compiled.GRAPHS, *compiled.WITHOUT],
    )


@torch.no_grad()
def measure(options: Options) -> dict:
    """Measure each sampler's time of a token after the first, beside the floor, by batch size.

    Each sampler holds a cache and graphs of its own.
    """
    model = common.random_llm(options)
    engine, costs = Engine(model, pad_id=0), LanguageModel(model)
    if set(options.samplers) - set(SAMPLERS):
        torch._dynamo.config.recompile_limit = compiled.RECOMPILE_LIMIT
        # Also on a CPU, so that compiled steps can be tried without a GPU.
        engine.fast_on = (torch.device(options.device).type,)
    _, bandwidth, ceilings = common.ceilings(options)
    sizes, table = [], {}
    for num_prompts in options.num_prompts:
        rows = num_prompts * options.num_generations
        slots = num_prompts * options.prompt_length + rows * options.num_tokens // 2  # of the mean
        floor = 1e3 * costs.read(slots) / bandwidth
        table[f"{rows} rows, floor"] = dict(ms_per_token=floor)
        times = sampler_times(engine, num_prompts, floor, options)
        table |= {f"{rows} rows, {name}": measured for name, measured in times.items()}
        sizes.append(dict(rows=rows, num_prompts=num_prompts, floor_ms=floor, samplers=times))
    common.print_table(COLUMNS, table, **ceilings)
    return ceilings | dict(sizes=sizes)


def sampler_times(
    engine: Engine, num_prompts: int, floor: float, options: Options
) -> dict[str, dict[str, float]]:
    """Return {sampler: `token_times`, seconds of its first call and its error}."""
    every = samplers(engine, num_prompts, options)
    works, first, sampled = {name: every[name] for name in options.samplers}, {}, {}
    for name, work in works.items():
        start = time.perf_counter()
        with torch.autocast(torch.device(options.device).type, torch.bfloat16):
            sampled[name] = work(options.num_tokens)
        common.synchronize(options.device)
        seconds = time.perf_counter() - start  # compiles, captures
        first[name] = dict(first_call_seconds=seconds, hidden_error=hidden_error(sampled, name))
    times = token_times(works, floor, options)
    for name, measured in times.items():
        measured |= first[name]
        print(name, measured, flush=True)
    return times


def token_times(
    works: dict[str, Callable[..., object]], floor: float, options: Options
) -> dict[str, dict[str, float]]:
    """Return {sampler: milliseconds of all tokens, of the first and of each that follows}.

    All samplers take turns, so the ratio of two of them holds on a host whose speed changes.

    Args: floor: milliseconds of a token, to which the ratio is that of medians; lowest and highest
        are those of a round.
    """
    num_tokens = options.num_tokens

    def sample(name: str, number: int):
        with torch.autocast(torch.device(options.device).type, torch.bfloat16):
            works[name](number)

    samples = {(name, n): partial(sample, name, n) for name in works for n in (num_tokens, 1)}
    timings, times = common.timings_in_turns(samples, options), {}
    for name in works:
        whole, first = timings[name, num_tokens], timings[name, 1]
        # The first token comes from the prompts' forward, not from a step of decoding.
        each_of_rounds = [
            1e3 * (of_all - of_first) / (num_tokens - 1)
            for of_all, of_first in zip(whole.of_rounds, first.of_rounds)
        ]
        each = 1e3 * (whole.seconds - first.seconds) / (num_tokens - 1)
        times[name] = dict(
            ms_per_token=each,
            ratio_to_floor=each / floor,
            lowest=min(each_of_rounds) / floor,
            highest=max(each_of_rounds) / floor,
            first_token_ms=1e3 * first.seconds,
            total_ms=1e3 * whole.seconds,
            warmup_rounds=whole.warmup_rounds,
            settled=whole.settled,
        )
    return times


def hidden_error(sampled: dict, name: str) -> float | None:
    """Return the relative error of hidden states at the first decoded token.

    The first sampler's are the reference. Only rows with the same first token count: the prompt's
    forward gives it, and its states depend on it.
    """
    reference, completions = sampled[next(iter(sampled))], sampled[name]
    if completions is None or reference is None:
        return None
    same = completions.ids[:, 0] == reference.ids[:, 0]
    if not same.any():
        return None
    states, expected = (c.hidden[same, 0].float() for c in (completions, reference))  # (n, C)
    return ((states - expected).norm() / expected.norm()).item()


def decoder(fused: FusedModel, name: str) -> Decoder:
    """Return a decoder whose step is this project's, or an alternative to it."""
    if name in compiled.GRAPHS:
        return Decoder(fused, partial(compiled.CompiledGraph, **compiled.GRAPHS[name]))
    if name in compiled.WITHOUT:
        return Decoder(compiled.without(fused, name))
    return Decoder(fused)


def samplers(engine: Engine, num_prompts: int, options: Options) -> dict:
    """Return {name of SAMPLERS: function that samples a number of tokens for each row}."""
    group = options.num_generations
    rows = num_prompts * group
    embeds, mask = common.random_prompts(num_prompts, engine.language_model.config, options)

    uniforms = torch.rand(rows, options.num_tokens, dtype=torch.float64, device=options.device)
    decoders = {}

    def ours(num_tokens: int, name: str = "decoder") -> Completions:
        fused = engine.fused(embeds)
        if fused is not None:
            if name not in decoders:
                decoders[name] = decoder(fused, name)
            engine._decoder = decoders[name]
        return engine.generate(
            embeds,
            mask,
            num_generations=group,
            max_new_tokens=num_tokens,
            stop=None,
            uniforms=uniforms[:, :num_tokens],
        )

    def huggingface(num_tokens: int):
        ids = engine.language_model.generate(
            inputs_embeds=embeds.repeat_interleave(group, 0),
            attention_mask=mask.repeat_interleave(group, 0),
            **common.free_sampling(num_tokens, engine.pad_id),
        )
        assert ids.shape == (rows, num_tokens)

    alternatives = [*compiled.GRAPHS, *compiled.WITHOUT]
    works = {name: partial(ours, name=name) for name in ["decoder", *alternatives]}
    return works | dict(generate=huggingface)
