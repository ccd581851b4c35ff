"""What the benchmarks share: the clock, the ceilings of the device, a language model of random weights."""

import statistics
import time

import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen2ForCausalLM

from rl_train.policies.sa2va import LORA_TARGETS


def seconds(work, args) -> float:
    """Median over the rounds, of which one more comes first and is not counted."""
    return seconds_in_turns({"": work}, args)[""]


def seconds_in_turns(works: dict, args) -> dict[str, float]:
    """The same of several works, one round of each after the other."""
    found = {name: [] for name in works}
    for _ in range(args.rounds + 1):
        for name, work in works.items():
            synchronize(args.device)
            start = time.perf_counter()
            work()
            synchronize(args.device)
            found[name].append(time.perf_counter() - start)
    return {name: statistics.median(times[1:]) for name, times in found.items()}


def synchronize(device):
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def device_name(device) -> str:
    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "cpu"


def copy_bandwidth(args) -> float:
    """Bytes a second, read and written ones together, of a copy of --copy_mib random bytes."""
    source = torch.randint(256, (args.copy_mib * 2**20,), dtype=torch.uint8, device=args.device)
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source), args)


def matmul_rate(args) -> float:
    """Operations a second of a bf16 product of two random square matrices of side --matmul_size."""
    a, b = (
        torch.randn(args.matmul_size, args.matmul_size, device=args.device, dtype=torch.bfloat16)
        for _ in range(2)
    )

    def products():
        for _ in range(10):
            a @ b

    return 10 * 2 * args.matmul_size**3 / seconds(products, args)


def random_llm(config, lora_r: int, device) -> Qwen2ForCausalLM:
    """A language model of random bf16 weights with a float32 LoRA on all linears, whose B is not zero."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = Qwen2ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    get_peft_model(
        model,
        LoraConfig(
            r=lora_r, lora_alpha=2 * lora_r, target_modules=LORA_TARGETS, task_type="CAUSAL_LM"
        ),
    )  # in place
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if "lora_" in name:
            parameter.data = parameter.data.float()
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.01)
    return model.eval()
