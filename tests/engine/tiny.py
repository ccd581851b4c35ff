"""A tiny language model of random weights, prompts, and both ways through the engine."""

from contextlib import contextmanager
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen2ForCausalLM

from rl_train.engine import Engine, StopText, hf_backend
from rl_train.engine.quantize import quantize_linears
from rl_train.engine.sampling import sample_token

DEMO = Path(__file__).parents[2] / "tools" / "demo" / "checkpoint"  # has a tokenizer
SIZES = dict(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=False,
    initializer_range=0.1,
)
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def tiny_llm(lora_r=4, dtype=torch.float32, device="cpu", seed=0, kind=Qwen2ForCausalLM, **sizes):
    """A frozen LLM with a float32 LoRA that does something on all linears (lora_r 0: without)."""
    torch.manual_seed(seed)
    model = kind(kind.config_class(**SIZES | sizes)).to(device, dtype).requires_grad_(False)
    if lora_r:
        attach_tiny_lora(model, lora_r)
    return model.eval()


def attach_tiny_lora(model, lora_r):
    get_peft_model(model, LoraConfig(r=lora_r, lora_alpha=2 * lora_r, target_modules=LINEARS))
    train_lora(model)


def quantized_llm(choice, lora_r=4, **sizes):
    """`tiny_llm` of three layers, whose linears are quantised before their LoRA comes."""
    llm = tiny_llm(lora_r=0, num_hidden_layers=3, **sizes)
    quantize_linears(llm.model.layers, choice, llm.lm_head.weight.device)
    if lora_r:
        attach_tiny_lora(llm, lora_r)
    return llm


def train_lora(model, std=0.05):
    """Let the LoRA train, and give its B, which starts at zero, a value."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if "lora_" in name:
            parameter.data = parameter.data.float()
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=std)


def trained(model) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def make(*shape, dtype=torch.float64, device="cpu", seed=0):
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32).to(dtype)


def ends_with(ids, vocab=SIZES["vocab_size"]) -> StopText:
    """A stop of some tokens, without a tokenizer."""
    stop = StopText.__new__(StopText)
    stop.table = torch.arange(2).repeat(vocab, 1)
    stop.table[ids] = 1
    stop.first_stop_state, stop.eos_id = 1, None
    return stop


def prompts(model, lengths=(7, 5, 9), seed=0):
    """(embeds (P, L, C), mask (P, L)) of random prompts, padded on the left."""
    weight = model.lm_head.weight
    mask = torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]
    shape = (*mask.shape, weight.shape[1])
    embeds = make(*shape, seed=seed).to(weight.device, weight.dtype)
    return embeds, mask.long().to(weight.device)


@contextmanager
def fast(engine: Engine):
    """Take CUDA's path on the CPU too, with the kernels' twins in plain torch."""
    before, engine.fast_on = engine.fast_on, ("cpu", "cuda", "meta")  # meta: tests/pretend.py
    yield engine
    engine.fast_on = before


@contextmanager
def slow(engine: Engine):
    """Take the model's own modules on CUDA too."""
    before, engine.fast_on = engine.fast_on, ()
    yield engine
    engine.fast_on = before


class Centred:
    """`sample_token` that moves each of `uniforms` to the middle half of the interval of its token.

    So away from the next token: the numbers of the two ways differ by rounding, and of a thousand
    tokens one is drawn within 1e-6 of another, and would differ.
    """

    def __init__(self, uniforms):
        self.uniforms, self.step = uniforms, 0

    def __call__(self, logits, temperature, u):
        token, logp = sample_token(logits, temperature, u)
        if u is not None:
            p = torch.softmax(logits.double() / temperature, -1)
            high, width = (t.gather(1, token[:, None])[:, 0] for t in (p.cumsum(-1), p))
            low = high - width
            self.uniforms[:, self.step] = low + width * ((u - low) / width).clamp(0.25, 0.75)
            self.step += 1
        return token, logp


def both(engine, monkeypatch, embeds, mask, steps=20, greedy=False, seed=0, **how):
    """(fast, by the modules) completions of the same prompts, uniforms and weights."""
    num_generations = how.setdefault("num_generations", 4)
    uniforms = None
    if not greedy:
        shape, random = (len(mask) * num_generations, steps), torch.Generator().manual_seed(seed)
        uniforms = torch.rand(shape, generator=random, dtype=torch.float64).to(embeds.device)
    how = dict(max_new_tokens=steps, uniforms=uniforms, stop=None) | how
    with slow(engine), monkeypatch.context() as patch:
        # It writes into `uniforms`, which the fast way then takes.
        patch.setattr(hf_backend, "sample_token", Centred(uniforms))
        plain = engine.generate(embeds, mask, **how)
    with fast(engine):
        return engine.generate(embeds, mask, **how), plain


def assert_same(fast, plain):
    for name in ("ids", "valid", "stopped"):
        assert torch.equal(getattr(fast, name), getattr(plain, name)), name
    torch.testing.assert_close(fast.logp, plain.logp, atol=1e-4, rtol=0)
    fed = plain.valid[:, 1:]  # tokens of which the next one was sampled
    torch.testing.assert_close(
        fast.hidden[:, :-1][fed], plain.hidden[:, :-1][fed], atol=1e-4, rtol=0
    )
    assert not fast.hidden[:, -1].any()


def work(llm, prompt_length=7, num_tokens=6, lengths=(6, 2, 0, 1, 5)):
    """Arguments of `Engine.score`: two prompts, the second shorter, of two and three rows."""
    weight = llm.lm_head.weight
    embeds, mask = prompts(llm, (prompt_length, prompt_length - 3))
    random, vocab = torch.Generator().manual_seed(1), len(weight)
    ids = torch.randint(vocab, (5, num_tokens), generator=random).to(weight.device)
    valid = torch.arange(num_tokens) < torch.tensor(lengths)[:, None]
    prompt = torch.tensor([0, 0, 1, 1, 1], device=weight.device)
    return embeds.requires_grad_(), mask, prompt, ids, valid.to(weight.device)


def scored(llm, way, checkpointing=False, engine=None, **sizes):
    """(log-probs, entropy, {name: gradient of the LoRA, "embeds"}) of a weighted sum of logps."""
    engine = engine or Engine(llm, pad_id=0, temperature=0.9, gradient_checkpointing=checkpointing)
    embeds, *inputs = work(llm, **sizes)
    half = llm.lm_head.weight.dtype == torch.bfloat16
    with way(engine), torch.autocast(embeds.device.type, torch.bfloat16, enabled=half):
        answers = engine.score(embeds, *inputs)
    slope = make(*answers.logp.shape, dtype=torch.float32, device=embeds.device.type, seed=2)
    (answers.logp * slope).sum().backward()
    gradients = {name: p.grad for name, p in trained(llm).items()} | {"embeds": embeds.grad}
    for parameter in llm.parameters():
        parameter.grad = None
    engine.release()
    return answers.logp.detach(), answers.entropy, gradients
