"""Held-out measures of a Sa2VA checkpoint, or of a run's checkpoint on top of it.

    python -m tools.evaluate --model_path M --data_dir D                             # a Sa2VA folder
    python -m tools.evaluate --model_path M --data_dir D --checkpoint O/checkpoint_step_N [--role ema]
"""
import argparse
import json
from pathlib import Path
from types import SimpleNamespace

from torch.utils.data import Subset

from rl_train import checkpoint, distributed
from rl_train.data import DATASETS
from rl_train.evaluation import evaluate, summary
from rl_train.policy import build_policy
from rl_train.rewards.meteor import require_wordnet

# What a bare model is measured with: a LoRA that adds nothing, and every group, though none of them trains here.
BASE = dict(lora_r=1, lora_alpha=1, lora_dropout=0.0, temperature=1.0, gradient_checkpointing=False, mask_sigma=1.0, mask_loss_coef=1.0,
            tasks=["mask_caption_mask", "caption_mask_caption"], caption_to_mask_weight=1.0)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--model_path", required=True, help="Sa2VA folder in the original layout")
    parser.add_argument("--data_dir", required=True, help="folder of held-out regions (GAR Arrow shards)")
    parser.add_argument("--dataset", choices=list(DATASETS), default="gar", help="its format")
    parser.add_argument("--checkpoint", type=Path, help="checkpoint_step_N folder of a run that started from --model_path")
    parser.add_argument("--role", choices=["policy", "ema"], default="policy", help="whose weights of the checkpoint")
    parser.add_argument("--num_samples", type=int, help="first regions to measure; default all")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--max_completion_length", type=int, default=128)
    parser.add_argument("--max_tiles", type=int, default=1)
    parser.add_argument("--num_workers", type=int, default=2)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--output", type=Path, help="JSON file for the means, standard errors and per-sample values")
    args = parser.parse_args(argv)

    require_wordnet()
    ranks = distributed.init()
    flags = json.loads((args.checkpoint / "config.json").read_text()) if args.checkpoint else BASE
    policy = build_policy(SimpleNamespace(**{**flags, **{k: getattr(args, k) for k in ("model_path", "dtype", "max_tiles", "max_completion_length")}}), ranks.device)
    if args.checkpoint:
        checkpoint.load_weights(args.checkpoint, policy.trainable, "ema.safetensors" if args.role == "ema" else "trainables.safetensors")
    dataset = DATASETS[args.dataset](args.data_dir)
    if args.num_samples:
        dataset = Subset(dataset, range(min(args.num_samples, len(dataset))))
    values = evaluate(policy, dataset, args.batch_size, args.max_completion_length, args.num_workers, ranks)
    if ranks.is_main:
        for metric, (mean, error) in summary(values).items():
            print(f"{metric:16s} {mean:.4f} +- {error:.4f}   (n = {len(dataset)})")
        if args.output:
            args.output.write_text(json.dumps({m: dict(mean=mean, standard_error=error, values=[round(v, 5) for v in values[m].tolist()])
                                               for m, (mean, error) in summary(values).items()}))
    distributed.close()


if __name__ == "__main__":
    main()
