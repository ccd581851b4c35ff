"""The token sampler against memory bandwidth and `generate`, on one LLM of random weights."""

from dataclasses import dataclass

import torch

from rl_train.config import COUNT, GROUP, flag
from rl_train.engine import Engine
from sa2va_hf import Sa2VAConfig
from tools.benchmarks import common
from tools.random_checkpoint import CONFIG_4B

SAMPLERS = ("decoder", "generate", "static")


@dataclass(frozen=True, kw_only=True)
class Options(common.Answers, common.Copy):
    """sizes"""

    num_prompts: tuple[int, ...] = flag(
        (4, 16), "prompts in a batch, measured one after the other", type=COUNT, nargs="+"
    )
    num_tokens: int = flag(128, "new tokens of each row", type=GROUP)
    samplers: tuple = flag(
        SAMPLERS[:2],
        "decoder = this project's, generate = that of transformers, static = the same with a "
        "compiled static cache, which takes minutes",
        type=str,
        choices=list(SAMPLERS),
        nargs="+",
    )


def measure(options: Options) -> dict:
    """See `decode_speeds`."""
    return decode_speeds(Sa2VAConfig(**CONFIG_4B).llm, options)


@torch.no_grad()
def decode_speeds(config, options: Options) -> dict:
    """For each number of prompts the floor, and every sampler's time of a token after the first."""
    model = common.random_llm(config, options.lora_r, options.device)
    engine, bandwidth = Engine(model, pad_id=0), common.copy_bandwidth(options)
    name = common.device_name(options.device)
    measured = dict(device=name, bandwidth_tb_per_second=bandwidth / 1e12, sizes=[])
    print(f"{name}, copy {bandwidth / 1e12:.2f} TB/s")
    print(f"{'rows':>5} {'sampler':18} {'ms/token':>9} {'x floor':>8} {'first token ms':>15}")
    for num_prompts in options.num_prompts:
        rows = num_prompts * options.num_generations
        floor = 1e3 * floor_bytes(model, num_prompts, rows, options) / bandwidth
        size = dict(rows=rows, num_prompts=num_prompts, floor_ms=floor, samplers={})
        measured["sizes"].append(size)
        print(f"{rows:>5} {'floor':18} {floor:>9.2f}")
        works = samplers(engine, num_prompts, options)
        for name in options.samplers:
            times = token_times(works[name], options)
            times["ratio_to_floor"] = times["ms_per_token"] / floor
            size["samplers"][name] = times
            print(
                f"{rows:>5} {name:18} {times['ms_per_token']:>9.2f} "
                f"{times['ratio_to_floor']:>8.2f} {times['first_token_ms']:>15.1f}"
            )
    return measured


def token_times(work, options: Options) -> dict[str, float]:
    """Milliseconds of all tokens, of the first, and of each that follows."""
    with torch.autocast(torch.device(options.device).type, torch.bfloat16):
        whole, first = (
            1e3 * common.seconds(lambda: work(num), options) for num in (options.num_tokens, 1)
        )
    each = (whole - first) / (options.num_tokens - 1)
    return dict(ms_per_token=each, first_token_ms=first, total_ms=whole)


def floor_bytes(model, num_prompts: int, num_rows: int, options: Options) -> int:
    """What a token must read once.

    All weights but the embedding table, the LoRA in bf16, the keys and values of a mean token.
    """
    config, embedding = model.config, model.get_input_embeddings().weight
    weights = 2 * sum(p.numel() for p in model.parameters() if p is not embedding)
    heads = config.num_hidden_layers * config.num_key_value_heads
    slot = 2 * 2 * heads * model.model.layers[0].self_attn.head_dim
    slots = num_prompts * options.prompt_length + num_rows * options.num_tokens // 2
    return weights + slot * slots


def samplers(engine: Engine, num_prompts: int, options: Options) -> dict:
    """{name of --samplers: function of a number of tokens, which draws so many for each row}."""
    group = options.num_generations
    rows = num_prompts * group
    embeds, mask = common.random_prompts(num_prompts, engine.language_model.config, options)

    def ours(num_tokens):
        engine.generate(
            embeds,
            mask,
            num_generations=group,
            max_new_tokens=num_tokens,
            stop=None,
            uniforms=torch.rand(rows, num_tokens, dtype=torch.float64, device=options.device),
        )

    def huggingface(num_tokens, **how):
        ids = engine.language_model.generate(
            inputs_embeds=embeds.repeat_interleave(group, 0),
            attention_mask=mask.repeat_interleave(group, 0),
            do_sample=True,
            top_k=0,
            top_p=1.0,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            pad_token_id=engine.pad_id,
            **how,
        )
        assert ids.shape == (rows, num_tokens)

    def static(num_tokens):
        huggingface(num_tokens, cache_implementation="static")

    return dict(decoder=ours, generate=huggingface, static=static)
