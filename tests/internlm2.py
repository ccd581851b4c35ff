"""A tiny Sa2VA of InternLM2: the demo's weights under InternLM2's names, with its tokenizer."""

import json
import shutil
from pathlib import Path

import torch

from sa2va_hf import Sa2VAConfig, Sa2VAModel
from sa2va_hf.tokenizer import load_tokenizer
from tests.runs import CHECKPOINT, ROOT

TOKENIZER = ROOT / "tests" / "sa2va_hf" / "internlm2_tokenizer"
FILES = ("tokenizer.model", "tokenizer_config.json")


def write_internlm2(folder: Path) -> Path:
    """Write the checkpoint `folder`; the attention's biases, which InternLM2 has not, are dropped.

    Each token has the embedding and the row of lm_head that the demo has for its text, the mean of
    those of several tokens.
    """
    raw = json.loads((CHECKPOINT / "config.json").read_text()) | dict(template="internlm2_chat")
    raw["llm_config"] |= dict(
        architectures=["InternLM2ForCausalLM"],
        model_type="internlm2",
        bias=False,
        vocab_size=540,  # some rows more than the tokenizer has tokens
        rope_scaling=dict(type="dynamic", factor=2.0),
    )
    model, demo = Sa2VAModel(Sa2VAConfig(**raw)), Sa2VAModel.from_pretrained(CHECKPOINT)
    state, rows = demo.state_dict(), rows_of_demo()
    for name in (demo.embed_tokens_key, demo.lm_head_key):
        state[name] = torch.stack([state[name][ids].mean(0) for ids in rows])
    own = model.state_dict()
    assert all(name.endswith("_proj.bias") for name in set(state) - set(own))
    model.load_state_dict({name: state[name] for name in own})
    model.save_pretrained(folder, dtype=torch.bfloat16)
    for file in FILES:
        shutil.copyfile(TOKENIZER / file, folder / file)
    return folder


def rows_of_demo() -> list[list[int]]:
    """The demo's ids for the text of each token."""
    tokenizer, demo = load_tokenizer(TOKENIZER), load_tokenizer(CHECKPOINT)
    texts = [tokenizer.decode([i]) for i in range(len(tokenizer))]
    texts += ["<|endoftext|>"] * (540 - len(tokenizer))
    unknown = demo.encode("<|endoftext|>")
    return [demo.encode(text) or unknown for text in texts]
