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
COLUMNS = dict(ms_per_token=".2f", ratio_to_floor=".2f", first_token_ms=".1f")
COLUMNS |= dict(first_call_seconds=".1f", hidden_error=".1e", warmup_rounds="d", settled="")


@dataclass(frozen=True, kw_only=True)
class Options(common.Answers):
    """sizes"""

    num_prompts: tuple = flag(
        (4, 16), "prompts in a batch, measured one after the other", type=COUNT
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
    """Measure each sampler's time of a token after the first, beside the floor, by batch size."""
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
        works, times, sampled = samplers(engine, num_prompts, options), {}, {}
        for name in options.samplers:
            start = time.perf_counter()
            with torch.autocast(torch.device(options.device).type, torch.bfloat16):
                sampled[name] = works[name](options.num_tokens)
            common.synchronize(options.device)
            first = dict(first_call_seconds=time.perf_counter() - start)  # compiles, captures
            first["hidden_error"] = hidden_error(sampled, name)
            times[name] = first | token_times(works[name], floor, options)
            table[f"{rows} rows, {name}"] = times[name]
            print(name, times[name], flush=True)
        sizes.append(dict(rows=rows, num_prompts=num_prompts, floor_ms=floor, samplers=times))
    common.print_table(COLUMNS, table, **ceilings)
    return ceilings | dict(sizes=sizes)


def token_times(work: Callable[..., object], floor: float, options: Options) -> dict[str, float]:
    """Measure milliseconds of all tokens, of the first and of each that follows."""
    with torch.autocast(torch.device(options.device).type, torch.bfloat16):
        timed = [common.timing(lambda n=n: work(n), options) for n in (options.num_tokens, 1)]
    whole, first = (1e3 * timing.seconds for timing in timed)
    # The first token comes from the prompts' forward, not from a step of decoding.
    each = (whole - first) / (options.num_tokens - 1)
    times = dict(ms_per_token=each, first_token_ms=first, total_ms=whole)
    warmth = dict(warmup_rounds=timed[0].warmup_rounds, settled=all(t.settled for t in timed))
    return times | dict(ratio_to_floor=each / floor) | warmth


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
                # One at a time: each holds a cache and graphs.
                decoders.clear()
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
