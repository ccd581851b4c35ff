"""Measure the parts that a run's speed depends on. Each prints its figures, as JSON last, which --output writes to a file.

python -m tools.benchmark data       # the loader and the opening of a data set
python -m tools.benchmark decode     # the token sampler, on a GPU, at Sa2VA-4B's sizes (--samplers: which)
python -m tools.benchmark logprob    # forward and backward of the update's log-probs against the plain way
python -m tools.benchmark step       # one whole step of both loops (--alternatives static: beside a compiled generate)
python -m tools.benchmark profile    # where its time goes, by phase and class of kernel, on a GPU (--picture: as bars)
python -m tools.benchmark teacher    # its part of that: masks for N captions, captions for N masks
python -m tools.benchmark teacher --model_path M --data_dir D     # whether its forced and its sampled answer agree
python -m tools.benchmark memory     # peak memory of a step by phase
python -m tools.benchmark scale      # a step on 1, 2, 4 .. GPUs
"""

import argparse
import json
from pathlib import Path

import torch

from rl_train.config import check_at_least
from tools.benchmarks import data, decode, logprob, memory, profile, scale, step, teacher

COMMANDS = {
    "data": (data, "the loader against bare decoding and resizing; opening a large data set"),
    "decode": (
        decode,
        "the token sampler against memory bandwidth and the alternatives, random weights",
    ),
    "logprob": (
        logprob,
        "forward and backward of the update's log-probs against the plain way, random weights",
    ),
    "step": (step, "one whole step of both loops against other ways to do it, random weights"),
    "profile": (profile, "where a step's time goes: each phase by class of kernel, random weights"),
    "teacher": (
        teacher,
        "the teacher in batches against one sample at a time, random weights; agreement of its answers, trained ones",
    ),
    "memory": (memory, "peak memory of a whole step by phase, random weights"),
    "scale": (scale, "the same step on 1, 2, 4 GPUs of this host"),
}
AT_LEAST = dict(
    rounds=1,
    warmup=0,
    naive_samples=1,
    num_tokens=2,
    num_generations=1,
    prompt_length=1,
    lora_r=1,
    copy_mib=1,
    matmul_size=1,
)


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (module, purpose) in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=purpose,
            description=module.__doc__,
            allow_abbrev=False,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        command.add_argument("--output", type=Path, help="JSON file for the figures")
        module.add_arguments(command)
    args = parser.parse_args(argv)
    check_at_least(parser, args, {name: least for name, least in AT_LEAST.items() if name in args})
    torch.set_num_threads(1)
    found = COMMANDS[args.command][0].measure(args)
    if found is None:  # a rank that has nothing to say
        return
    print(json.dumps(found, indent=1))
    if args.output:
        args.output.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
