"""The token sampler against memory bandwidth and the alternatives, on one language model of random weights."""

import torch
from rl_train.engine.sampler import decoder_of, generate_plain

from rl_train.engine import Engine
from rl_train.engine.fused import unsupported
from sa2va_hf import Sa2VAConfig
from tools.benchmarks.common import copy_bandwidth, device_name, random_llm, seconds
from tools.random_checkpoint import CONFIG_4B

SAMPLERS = ("decoder", "plain", "generate", "static")


def floor_bytes(model, num_prompts: int, num_rows: int, args) -> int:
    """What a token must read once: all weights but the embedding table, the LoRA in bf16, the keys and values of a mean token."""
    config, embedding = model.config, model.get_input_embeddings().weight
    weights = 2 * sum(p.numel() for p in model.parameters() if p is not embedding)
    slot = (
        2
        * 2
        * config.num_hidden_layers
        * config.num_key_value_heads
        * model.model.layers[0].self_attn.head_dim
    )
    return weights + slot * (num_prompts * args.prompt_length + num_rows * args.num_tokens // 2)


def samplers(model, num_prompts: int, args) -> dict:
    """{name of --samplers: function of a number of new tokens}: each draws that many for each row, without stopping."""
    group, width = args.num_generations, model.config.hidden_size
    embeds = torch.randn(
        num_prompts, args.prompt_length, width, device=args.device, dtype=torch.bfloat16
    )
    mask = torch.ones(num_prompts, args.prompt_length, dtype=torch.long, device=args.device)

    def ours(*fast_on):
        engine = Engine(model, pad_id=0)
        engine.fast_on = fast_on

        def work(num_tokens):
            uniforms = torch.rand(
                num_prompts * group, num_tokens, dtype=torch.float64, device=args.device
            )
            engine.generate(
                embeds,
                mask,
                num_generations=group,
                max_new_tokens=num_tokens,
                stop=None,
                uniforms=uniforms,
            )

        return work

    def huggingface(**how):
        def work(num_tokens):
            found = model.generate(
                inputs_embeds=embeds.repeat_interleave(group, 0),
                attention_mask=mask.repeat_interleave(group, 0),
                do_sample=True,
                top_k=0,
                top_p=1.0,
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                pad_token_id=0,
                **how,
            )
            assert found.shape == (num_prompts * group, num_tokens)

        return work

    named = {
        "decoder": ours("cpu", "cuda"),
        "plain": ours(),
        "generate": huggingface(),
        "static": huggingface(cache_implementation="static"),
    }
    return {name: named[name] for name in args.samplers}


@torch.no_grad()
def decode_speeds(config, args) -> dict:
    """Bandwidth of a copy, and for each number of prompts the floor and every sampler's time of a token after the first."""
    model = random_llm(config, args.lora_r, args.device)
    reason = unsupported(model)
    if reason:
        raise ValueError(f"the fast sampler does not take this model: {reason}")
    bandwidth = copy_bandwidth(args)
    found = dict(
        device=device_name(args.device), bandwidth_tb_per_second=bandwidth / 1e12, sizes=[]
    )
    print(f"{found['device']}, copy {bandwidth / 1e12:.2f} TB/s")
    print(f"{'rows':>5} {'sampler':18} {'ms/token':>9} {'x floor':>8} {'first token ms':>15}")
    for num_prompts in args.num_prompts:
        rows = num_prompts * args.num_generations
        floor = 1e3 * floor_bytes(model, num_prompts, rows, args) / bandwidth
        size = dict(rows=rows, num_prompts=num_prompts, floor_ms=floor, samplers={})
        found["sizes"].append(size)
        print(f"{rows:>5} {'floor':18} {floor:>9.2f}")
        for name, work in samplers(model, num_prompts, args).items():
            with torch.autocast(torch.device(args.device).type, torch.bfloat16):
                whole, first = (
                    1e3 * seconds(lambda n=n, w=work: w(n), args) for n in (args.num_tokens, 1)
                )
            token = (whole - first) / (args.num_tokens - 1)
            size["samplers"][name] = dict(
                ms_per_token=token,
                ratio_to_floor=token / floor,
                first_token_ms=first,
                total_ms=whole,
            )
            print(f"{rows:>5} {name:18} {token:>9.2f} {token / floor:>8.2f} {first:>15.1f}")
    return found


def measure(args) -> dict:
    """See `decode_speeds`."""
    return decode_speeds(Sa2VAConfig(**CONFIG_4B).llm, args)


def add_arguments(parser):
    parser.add_argument(
        "--num_prompts",
        type=int,
        nargs="+",
        default=[4, 16],
        help="prompts in a batch, measured one after the other",
    )
    parser.add_argument("--num_generations", type=int, default=8, help="rows of each prompt")
    parser.add_argument("--prompt_length", type=int, default=400, help="tokens")
    parser.add_argument("--num_tokens", type=int, default=128, help="new tokens of each row")
    parser.add_argument("--lora_r", type=int, default=128, help="rank")
    parser.add_argument(
        "--rounds", type=int, default=5, help="of each measurement; the median counts"
    )
    parser.add_argument(
        "--copy_mib", type=int, default=4096, help="size of the copy that measures the bandwidth"
    )
    parser.add_argument(
        "--samplers",
        nargs="+",
        choices=SAMPLERS,
        default=list(SAMPLERS[:3]),
        help="decoder = this project's, plain = by the "
        "model's own forward, generate = transformers', static = that with a compiled static cache, which takes minutes",
    )
    parser.add_argument("--device", default="cuda", help="where")
