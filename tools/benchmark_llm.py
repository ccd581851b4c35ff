"""What the benchmarks of the language model share: a model of random weights, and the clock."""
import statistics
import time

import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen2ForCausalLM

from rl_train.policy import LORA_TARGETS


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
    get_peft_model(model, LoraConfig(r=lora_r, lora_alpha=2 * lora_r, target_modules=LORA_TARGETS, task_type="CAUSAL_LM"))    # in place
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if "lora_" in name:
            parameter.data = parameter.data.float()
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.01)
    return model.eval()


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
