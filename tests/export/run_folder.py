"""Run a Qwen2.5-VL folder by the transformers of this environment, as its users do.

    VERSIONS/4.49.0/bin/python tests/export/run_folder.py FOLDER OUTPUT.safetensors

It runs in environments without this package (`test_versions.py`), so it imports nothing of it.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

if torch.version.cuda is None:
    # Torchvision's wheel is for CUDA. Beside a CPU's torch its import asks for these operators.
    boxes = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", boxes)
from transformers import AutoProcessor, AutoTokenizer, Qwen2_5_VLForConditionalGeneration  # noqa: E402

TEXT = (
    "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Where is it?<|im_end|>\n"
    "<|im_start|>assistant\n"
)
NUM_NEW_TOKENS = 6


def image() -> Image.Image:
    """A picture of 84 x 56 pixels, which are 3 x 2 tokens, so that no version resizes it."""
    pixels = np.random.default_rng(0).integers(0, 256, (56, 84, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@torch.no_grad()
def logits_and_ids(folder: Path) -> dict[str, torch.Tensor]:
    """Return ids (L,) of the prompt, its logits (L, V) and the ids that are generated greedily."""
    model, info = Qwen2_5_VLForConditionalGeneration.from_pretrained(
        folder, torch_dtype=torch.float32, output_loading_info=True
    )
    faults = {name: keys for name, keys in info.items() if keys}
    assert not faults, faults
    processor = AutoProcessor.from_pretrained(folder)
    inputs = processor(text=[TEXT], images=[image()], return_tensors="pt")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer.encode("Where is it?")) == "Where is it?"
    logits = model.eval()(**inputs).logits[0]
    ids = model.generate(**inputs, do_sample=False, max_new_tokens=NUM_NEW_TOKENS)
    length = inputs["input_ids"].shape[1]
    return dict(
        prompt=inputs["input_ids"][0], logits=logits, generated=ids[0, length:].contiguous()
    )


if __name__ == "__main__":
    save_file(logits_and_ids(Path(sys.argv[1])), sys.argv[2])
