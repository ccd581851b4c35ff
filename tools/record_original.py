"""Record what the original Sa2VA answers about pictures that this file draws.

It imports nothing of this project. Copy this one file to a machine where the original runs (its
own Python environment, transformers 4.49 or 4.57), and there:

    python record_original.py --model_path M --output recorded.json

This runs the Python files in the folder M, as the original's README says. Then, with this project:

    python -m tools.check_checkpoint --model_path M --recorded recorded.json

The file holds, of each question, its greedy tokens, their logits, the text and the masks, and a
SHA-256 of each file of the model's folder.
"""

import argparse
import base64
import contextlib
import copy
import hashlib
import json
import zlib
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image

WIDTH, HEIGHT = 640, 480
RED, BLUE = (220, 40, 30), (40, 60, 210)
SEGMENT = "<image>\nPlease segment the red circle in this image."
DESCRIBE = "<image>Please generate a detailed description for the given image region."
# Files by which two folders hold the same model.
MODEL_FILES = ("*.safetensors", "*.bin", "*.json", "*.txt", "*.model", "*.jinja")


# The pictures: integers alone, so that every machine draws the same bytes.


def draw_scene(circle_x: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw a red circle and a blue square: image (H, W, 3) uint8, their masks (H, W) bool.

    Args:
        circle_x: column of the circle's middle.
    """
    row, column = np.mgrid[:HEIGHT, :WIDTH]
    image = np.stack([90 + row // 8, 120 + column // 16, 90 + row // 16], -1).astype(np.uint8)
    circle = (row - 240) ** 2 + (column - circle_x) ** 2 <= 80**2
    square = (abs(row - 200) <= 60) & (abs(column - 480) <= 60)
    image[circle], image[square] = RED, BLUE
    return image, circle, square


def questions(reads_regions: bool) -> dict[str, dict]:
    """Return {name: arguments of `predict_forward`}.

    Args: reads_regions: the model takes mask prompts.
    """
    image, _, square = draw_scene(circle_x=180)
    asked = {"phrase": dict(image=Image.fromarray(image), text=SEGMENT)}
    if reads_regions:
        regions = [square[None].astype(np.uint8)]
        asked["region"] = dict(image=Image.fromarray(image), text=DESCRIBE, mask_prompts=regions)
    frames = [Image.fromarray(draw_scene(x)[0]) for x in (180, 210, 240)]
    asked["video"] = dict(video=frames, text=SEGMENT)
    return asked


# Answers


@contextlib.contextmanager
def recorded_generation(max_new_tokens: int):
    """Shorten `generate` of transformers; the list that is entered gets (tokens, logits) of calls.

    Tokens are those behind the prompt (T,). Logits (T,) are each token's own.
    """
    calls, original = [], transformers.GenerationMixin.generate

    def generate(self, *args, **kwargs):
        config = copy.deepcopy(kwargs.get("generation_config") or self.generation_config)
        for name in [name for name in kwargs if hasattr(config, name)]:
            setattr(config, name, kwargs.pop(name))
        wants_record = config.return_dict_in_generate
        config.max_new_tokens, config.max_length = max_new_tokens, None
        config.return_dict_in_generate = config.output_logits = True
        kwargs["generation_config"] = config
        output = original(self, *args, **kwargs)
        steps = torch.cat(output.logits)  # (T, V)
        ids = output.sequences[0, len(output.sequences[0]) - len(steps) :].cpu()
        logits = steps.float().cpu().gather(1, ids[:, None])[:, 0]
        calls.append((ids.tolist(), logits.tolist()))
        return output if wants_record else output.sequences

    transformers.GenerationMixin.generate = generate
    try:
        yield calls
    finally:
        transformers.GenerationMixin.generate = original


def record_answers(model, asked: dict[str, dict], max_new_tokens: int, **others) -> dict[str, dict]:
    """Return what a model answers, {name: record}: ids, logits, text and masks.

    Args:
        model: its `predict_forward` is called; others: further arguments of it.
    """
    answers = {}
    for name, arguments in asked.items():
        with torch.no_grad(), recorded_generation(max_new_tokens) as calls:
            answer = model.predict_forward(**arguments, **others)
        (ids, logits) = calls[-1]
        masks = [encode_mask(np.asarray(mask)) for mask in answer["prediction_masks"]]
        answers[name] = dict(ids=ids, logits=logits, text=answer["prediction"], masks=masks)
    return answers


def encode_mask(mask: np.ndarray) -> dict:
    """Encode a mask (F, H, W) bool as {"size": [F, H, W], "bits": text}."""
    bits = np.packbits(mask.astype(bool)).tobytes()
    return dict(size=list(mask.shape), bits=base64.b64encode(zlib.compress(bits)).decode("ascii"))


def decode_mask(encoded: dict) -> np.ndarray:
    """Return the mask (F, H, W) bool that `encode_mask` wrote."""
    bits = np.frombuffer(zlib.decompress(base64.b64decode(encoded["bits"])), np.uint8)
    size = encoded["size"]
    return np.unpackbits(bits, count=int(np.prod(size))).reshape(size).astype(bool)


def file_digests(folder: Path) -> dict[str, str]:
    """Return {file: SHA-256} of the weights, configs and tokenizer in a folder."""
    digests = {}
    for path in sorted({path for pattern in MODEL_FILES for path in folder.glob(pattern)}):
        with path.open("rb") as file:
            digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


# The original


def local_folder(model_path: str) -> Path:
    """Return the folder of a model, downloaded from the hub if `model_path` is a name there."""
    if Path(model_path).is_dir():
        return Path(model_path)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model_path))


def load_original(folder: Path, device: str, dtype: str):
    """Return the original's (model, arguments of its `predict_forward` beside the question)."""
    config = json.loads((folder / "config.json").read_text())
    classes = config.get("auto_map", {})
    auto = transformers.AutoModel
    if "AutoModel" not in classes and "AutoModelForCausalLM" in classes:
        auto = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(
        folder, torch_dtype=dtype, low_cpu_mem_usage=True, trust_remote_code=True
    )
    others = dict(
        tokenizer=transformers.AutoTokenizer.from_pretrained(
            folder, trust_remote_code=True, use_fast=False
        )
    )
    if "text_config" in config:  # of Qwen-VL
        others["processor"] = transformers.AutoProcessor.from_pretrained(
            folder, trust_remote_code=True
        )
    return model.eval().to(device), others


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    on_gpu = torch.cuda.is_available()
    add = parser.add_argument
    add("--model_path", required=True, help="folder or name on the hub; its Python files are run")
    add("--output", required=True, type=Path, help="JSON file to write; must be absent")
    add("--device", default="cuda" if on_gpu else "cpu", help="default: %(default)s")
    add("--dtype", default="auto", help="auto, bfloat16 or float32; default: %(default)s")
    add("--max_new_tokens", type=int, default=128, help="longest answer; default: %(default)s")
    args = parser.parse_args(argv)
    if args.output.exists():
        raise SystemExit(f"record_original: --output {args.output} exists already")
    folder = local_folder(args.model_path)
    model, others = load_original(folder, args.device, args.dtype)
    config = json.loads((folder / "config.json").read_text())
    is_internvl = "llm_config" in config  # the others never read their mask prompts
    asked = questions(reads_regions=is_internvl)
    answers = record_answers(model, asked, args.max_new_tokens, **others)
    record = dict(
        transformers=transformers.__version__,
        torch=torch.__version__,
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        device=args.device,
        max_new_tokens=args.max_new_tokens,
        files=file_digests(folder),
        answers=answers,
    )
    args.output.write_text(json.dumps(record, indent=1))
    for name, answer in answers.items():
        print(f"{name}: {answer['text']} ({len(answer['masks'])} masks)")


if __name__ == "__main__":
    main()
