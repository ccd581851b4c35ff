"""A Sa2VA with random weights of a published size, to try one's GPUs before a download.

    python -m tools.benchmarks.random_checkpoint --output outputs/random_4b [--device cuda]
    python -m tools.benchmarks.random_checkpoint --sizes sa2va-qwen3-4b --output outputs/qwen3
    python -m rl_train.train --model_path outputs/random_4b --data_dir .. --max_steps 2 ..

Shapes and key layout are those of the published models, of the 4B the special tokens' ids too
(InternViT-300M, Qwen2.5-3B, SAM2 Hiera-L; 3.9 B weights, 7.9 GB in bfloat16). The tokenizer is no
published one. Nothing that it says means anything.
"""

import json
from pathlib import Path

import torch

from rl_train.utils.command_line import FlagParser, run_program
from sa2va_hf import Sa2VAConfig, Sa2VAModel
from sa2va_hf.weights import default_dtype
from tools.benchmarks.families import CONFIGS, tokenizer_of
from tools.demo.new_folder import save

# Of [SEG] over random hidden states: it is sampled in a few per cent of positions, so that loop 2
# has masks.
SEG_LOGIT_STD = 6.0
# Of a Qwen-VL's messages, without a system prompt
QWEN_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.content %}"
    "{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ c.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def random_model(
    config: dict,
    device: torch.device | str = "cpu",
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> Sa2VAModel:
    """Build a model of random weights."""
    torch.manual_seed(seed)
    with default_dtype(dtype), torch.device(device):
        return Sa2VAModel(Sa2VAConfig(**config))


def write(folder: Path, config: dict, device: torch.device | str = "cpu", seed: int = 0):
    """Write the checkpoint `folder`: weights in bfloat16, config, tokenizer, image processor."""
    model, text = random_model(config, device, seed), tokenizer_of(config)
    with torch.no_grad():
        head = model.language_model.lm_head.weight  # (V, C); hidden states have unit variance
        seg = torch.randn(head.shape[1], device=head.device)
        head[text.convert_tokens_to_ids("[SEG]")] = (SEG_LOGIT_STD * seg / seg.norm()).to(
            head.dtype
        )
    if "text_config" in config:
        text.chat_template = QWEN_TEMPLATE
    save(model, text, folder)
    if "text_config" in config:
        settings = model.config.preprocessing()
        fields = dict(image_processor_type="Qwen2VLImageProcessor", patch_size=settings.patch)
        fields |= dict(merge_size=settings.merge, temporal_patch_size=settings.frames)
        fields |= dict(image_mean=settings.mean, image_std=settings.std)
        (folder / "preprocessor_config.json").write_text(json.dumps(fields, indent=2) + "\n")


def main(argv: list[str] | None = None):
    parser = FlagParser(
        prog="python -m tools.benchmarks.random_checkpoint",
        description=__doc__,
    )
    parser.add_argument(
        "--output", required=True, type=Path, help="folder to write; of the 4B 8 GB"
    )
    parser.add_argument(
        "--sizes",
        choices=list(CONFIGS),
        default="4b",
        help="of which model; names with tiny are for tests on a CPU",
    )
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="where the weights are drawn",
    )
    args = parser.parse_args(argv)
    write(args.output, CONFIGS[args.sizes], args.device)
    print(f"{args.output}: random weights of the shapes of {args.sizes}")


if __name__ == "__main__":
    run_program(main)
