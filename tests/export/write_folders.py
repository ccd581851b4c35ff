"""Write a tiny Qwen2.5-VL and SAM2 as the transformers of this environment does.

    VERSIONS/4.57.1/bin/python tests/export/write_folders.py OUTPUT

It runs in environments without this package (`test_versions.py`), so it imports nothing of it.
OUTPUT/qwen and, where transformers has it, OUTPUT/sam are written by `save_pretrained` of model,
tokenizer and processor, OUTPUT/resaved by that of what the Auto classes read from OUTPUT/qwen.
OUTPUT/logits.safetensors holds this version's own logits of one prompt.
"""

import json
import os
import sys
from pathlib import Path

import torch
import transformers
from run_folder import logits_and_ids
from safetensors.torch import save_file
from tiny_sizes import (
    MROPE_SECTION,
    ROPE_THETA,
    SAM_MASK_DECODER,
    SAM_PROMPT_ENCODER,
    SAM_VISION,
    SPECIAL,
    TEXT,
    VISION,
)
from transformers import (
    AutoProcessor,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2TokenizerFast,
    Qwen2VLImageProcessor,
)

CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}{% endfor %}"
# The form of the published config.json, which every version takes.
FLAT_TEXT = TEXT | dict(
    vocab_size=272,
    rms_norm_eps=1e-6,
    rope_theta=ROPE_THETA,
    rope_scaling=dict(type="mrope", mrope_section=MROPE_SECTION),
    use_sliding_window=False,
    tie_word_embeddings=False,
)
TOKEN_IDS = dict(
    bos_token_id="<|endoftext|>",
    eos_token_id="<|im_end|>",
    image_token_id="<|image_pad|>",
    video_token_id="<|video_pad|>",
    vision_start_token_id="<|vision_start|>",
    vision_end_token_id="<|vision_end|>",
)
PUBLISHED_VISION = VISION | dict(spatial_patch_size=14, tokens_per_second=2)


def byte_alphabet() -> list[str]:
    """The characters by which a byte-level BPE writes the bytes 0 to 255, as GPT-2's."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    characters = dict(zip(plain, map(chr, plain))) | {b: chr(256 + i) for i, b in enumerate(others)}
    return [characters[byte] for byte in sorted(characters)]


def write_qwen(folder: Path):
    """Write a model of random weights, its processor and its tokenizer."""
    folder.mkdir(parents=True)
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    vocab.write_text(json.dumps({token: i for i, token in enumerate(byte_alphabet())}))
    merges.write_text("#version: 0.2\n")
    tokenizer = Qwen2TokenizerFast(
        str(vocab),
        str(merges),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token=None,
        additional_special_tokens=SPECIAL,
    )
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in TOKEN_IDS.items()}
    image_processor = Qwen2VLImageProcessor(min_pixels=3136, max_pixels=28 * 28 * 24)
    parts = [image_processor, tokenizer]
    if transformers.__version__ >= "4.52":
        parts.append(transformers.Qwen2VLVideoProcessor())
    Qwen2_5_VLProcessor(*parts, chat_template=CHAT_TEMPLATE).save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(**FLAT_TEXT, **ids, vision_config=dict(PUBLISHED_VISION))
    model = Qwen2_5_VLForConditionalGeneration(config)
    model.generation_config.update(do_sample=True, temperature=0.1, repetition_penalty=1.05)
    model.save_pretrained(folder)


def resave_qwen(folder: Path, output: Path):
    """Load a folder by the Auto classes and write it again, the weights in several files."""
    AutoProcessor.from_pretrained(folder).save_pretrained(output)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder)
    model.save_pretrained(output, max_shard_size="100KB")


def write_sam(folder: Path):
    """Write a SAM2 for single images."""
    config = transformers.Sam2Config(
        vision_config=transformers.Sam2VisionConfig(**SAM_VISION),
        prompt_encoder_config=dict(SAM_PROMPT_ENCODER),
        mask_decoder_config=dict(SAM_MASK_DECODER),
    )
    torch.manual_seed(0)
    transformers.Sam2Model(config).save_pretrained(folder)


def main(output: Path):
    output.mkdir(parents=True, exist_ok=True)
    os.chdir(output)  # so that no file names a folder of this machine
    write_qwen(Path("qwen"))
    resave_qwen(Path("qwen"), Path("resaved"))
    if transformers.__version__ >= "4.56":
        write_sam(Path("sam"))
    save_file(logits_and_ids(Path("qwen")), "logits.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
