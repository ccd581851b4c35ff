"""Check a Sa2VA checkpoint before it is trained: a verdict a line, in a few minutes.

    python -m tools.check_checkpoint --model_path M [--data_dir D] [--recorded recorded.json]
                                     [--output_dir O] [flags of rl_train.train]

It loads the model strictly, checks its tokenizer, lets it answer about pictures that it draws,
compares the log-probs of sampler and scorer in float32 and bfloat16, and trains two steps by random
rewards: each trainable group must get a gradient and change. Flags of rl_train.train, such as
--batch_size, are those of these steps, whose seconds and memory are printed. Without --data_dir
they train on drawn pictures. --recorded: answers of the original (tools/record_original.py) that
this model must give too. A changed weight or another normalisation is seen by these alone.

Exit status 0 only if every check holds; 1 if one fails.
"""

import argparse
import contextlib
import io
import json
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm

from rl_train import cli
from rl_train.data.loader import Batches, batch_loader
from rl_train.distributed import process_group
from rl_train.export.load_policy import open_policy
from rl_train.loggers.pictures import PREDICTED, REGION, overlay
from rl_train.policies.registry import family_of
from rl_train.policies.sa2va import Sa2VAPolicy
from rl_train.rollout import Batch
from rl_train.run.build import Run
from rl_train.run.messages import size_in_words
from rl_train.run.start import start_run
from rl_train.train import train
from rl_train.utils.command_line import FlagParser, run_program
from rl_train.utils.io import check_writable, read_json
from rl_train.utils.rng import RowRNG
from sa2va_hf import Sa2VAModel, families
from sa2va_hf.hub import model_folder
from sa2va_hf.tokenizer import load_tokenizer
from tools.gar_writer import write_gar
from tools.record_original import (
    decode_mask,
    draw_scene,
    file_digests,
    questions,
    record_answers,
)

OK, FAILED, NOT_CHECKED = "ok", "FAILED", "not checked"
# Largest mean difference of the log-prob of a token, of sampler and scorer.
GAP_LIMITS = {"float32": 1e-4, "bfloat16": 2e-2}
GAP_TOKENS, GAP_GENERATIONS = 32, 4
# Largest difference of a recorded token's logit, as a fraction of the largest logit.
LOGIT_LIMITS = {"float32": 1e-3, "bfloat16": 3e-2}
MASK_LIMIT = 0.99  # smallest IoU with a recorded mask in bfloat16; in float32 all pixels but 1e-4
STEPS = 2  # the first also compiles
NOT_RECORDED = (
    "the original's answers are not given (--recorded), so a changed weight or another "
    "normalisation is not seen"
)


@dataclass
class Line:
    """One check: its name, verdict, what was seen, and how long it took."""

    name: str
    verdict: str
    text: str
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.verdict:11} {self.name}: {self.text}"


class CheckFailed(Exception):
    """Fault that a check found, as a sentence.

    Args:
        value: what later checks need of this one all the same.
    """

    def __init__(self, text: str, value: object = None):
        super().__init__(text)
        self.value = value


class Checks:
    """Runs checks one after the other and prints a line each."""

    def __init__(self, total: int):
        self.lines: list[Line] = []
        self.bar = tqdm(total=total, desc="checks", leave=False, disable=None)

    def run(self, name: str, check: Callable, *args: object) -> object:
        """Return the second of what `check(*args)` returns, (text, value), and add its line.

        Without it, as for an argument that an earlier check did not return, None. An error of ours
        is raised; wrong input is a failed check.
        """
        if any(argument is None for argument in args):
            return self.skip(name, "an earlier check failed")
        began, verdict = time.perf_counter(), OK
        try:
            text, value = check(*args)
        except CheckFailed as failed:
            verdict, text, value = FAILED, str(failed), failed.value
        except (ValueError, SystemExit) as error:
            verdict, text, value = FAILED, " ".join(str(error).split()), None
        self.add(Line(name, verdict, text, time.perf_counter() - began))
        return value

    def skip(self, name: str, reason: str):
        """Add a line of a check that cannot be made."""
        self.add(Line(name, NOT_CHECKED, reason))

    def add(self, line: Line):
        self.lines.append(line)
        self.bar.write(str(line))
        self.bar.update()


# Model and tokenizer


def check_layout(path: str) -> tuple[str, Path]:
    """Find the folder and its family. Raises ValueError if it is no Sa2VA."""
    folder = model_folder("--model_path", path)
    if family_of(folder) != Sa2VAPolicy.family:
        raise ValueError(f"--model_path {path}: config.json is of no Sa2VA")
    raw = read_json(folder / "config.json")
    written = raw.get("transformers_version", "(not said)")
    return f"Sa2VA of {families.family_of(raw).name}, written by transformers {written}", folder


def check_weights(folder: Path, device: str, dtype: str) -> tuple[str, Sa2VAModel]:
    """Load the weights strictly. Raises ValueError for missing or further keys, or wrong shapes."""
    model = Sa2VAModel.from_pretrained(folder, dtype=dtype, device=device).eval()
    for name, weight in model.named_parameters():
        if not torch.isfinite(weight).all():
            raise CheckFailed(f"{name} has a NaN or infinity")
    size = sum(weight.numel() for weight in model.parameters())
    return f"{size:,d} parameters, every key found and none left over, in {dtype}", model


def check_tokenizer(folder: Path, model: Sa2VAModel) -> tuple[str, object]:
    """Bind the tokenizer. Raises ValueError if one of Sa2VA's tokens is not one embedded id."""
    tokenizer = load_tokenizer(folder)
    model.bind_tokenizer(tokenizer)
    text = "Please segment the red circle in this image."
    ids = tokenizer.encode(text, add_special_tokens=False)
    back = tokenizer.decode(ids)
    if back.strip() != text:
        raise CheckFailed(f"{text!r} comes back from its ids as {back!r}")
    rows = model.config.llm.vocab_size
    return (
        f"{len(tokenizer)} tokens of {rows} in the embedding; [SEG] is {model.seg_id}, "
        f"{model.image_token} {model.img_context_id}",
        tokenizer,
    )


# Answers


def check_answers(
    model: Sa2VAModel, tokenizer: object, max_new_tokens: int
) -> tuple[str, dict[str, dict]]:
    """Ask about the drawn pictures. Raises CheckFailed if a mask or an end is missing."""
    asked = questions(reads_regions(model))
    model.preparing_for_generation(tokenizer, max_new_tokens)
    answers = record_answers(model, asked, max_new_tokens, tokenizer=tokenizer)
    texts, faults = [], []
    for name, answer in answers.items():
        texts.append(f"{name}: {describe_answer(answer)}")
        if name != "region" and not answer["masks"]:
            faults.append(f"no mask for the {name}")
        if len(answer["ids"]) == max_new_tokens:
            faults.append(f"no end of the answer to the {name} within {max_new_tokens} tokens")
        if not np.isfinite(answer["logits"]).all():
            faults.append(f"NaN in the logits of the {name}")
    text = "; ".join(texts)
    if faults:
        raise CheckFailed(f"{', '.join(faults)}. {text}", answers)
    judged = "each ends, with a mask where one is asked for; whether it is right is yours to see"
    return f"{judged}: {text}", answers


def reads_regions(model: Sa2VAModel) -> bool:
    """Return whether the published model was trained on regions in the image's tokens."""
    return families.family_of(model.config.raw).model.region_prompts[0] == "tokens"


def describe_answer(answer: dict) -> str:
    """Return an answer's words, and the IoU of its first mask with the circle."""
    text = answer["text"]
    words = text if len(text) <= 80 else f"{text[:50]} .. {text[-26:]}"
    if not answer["masks"]:
        return repr(words)
    mask = decode_mask(answer["masks"][0])[0]
    _, circle, _ = draw_scene(circle_x=180)
    union = (mask | circle).sum()
    return f"{words!r}, IoU of the mask with the circle {(mask & circle).sum() / union:.2f}"


def check_recorded(
    recorded: dict, folder: Path, answers: dict[str, dict], dtype: str
) -> tuple[str, None]:
    """Compare files, tokens, logits, texts and masks with the original's. Raises CheckFailed."""
    digests = file_digests(folder)
    differing = sorted(
        name
        for name, digest in recorded["files"].items()
        if name in digests and digests[name] != digest
    )
    missing = sorted(recorded["files"].keys() - digests.keys())
    faults = []
    if differing:
        faults.append(f"not the recorded files: {', '.join(differing)}")
    if missing:
        faults.append(f"recorded files that are missing: {', '.join(missing)}")
    unknown = sorted(recorded["answers"].keys() - answers.keys())
    coarsest = "bfloat16" if "bfloat16" in (dtype, recorded["dtype"]) else "float32"
    for name, theirs in recorded["answers"].items():
        if name in answers:
            faults += differences(name, theirs, answers[name], coarsest)
    if faults:
        raise CheckFailed("; ".join(faults))
    text = f"{', '.join(answers)}: as the original in {recorded['dtype']}"
    return text + (f"; not asked here: {', '.join(unknown)}" if unknown else ""), None


def differences(name: str, theirs: dict, ours: dict, dtype: str) -> list[str]:
    """Return what differs between the original's answer and ours, a phrase each."""
    faults = []
    same = sum(a == b for a, b in zip(theirs["ids"], ours["ids"]))
    if theirs["ids"] != ours["ids"]:
        faults.append(f"{name}: {same} of {len(theirs['ids'])} tokens are the recorded ones")
    elif theirs["text"] != ours["text"]:
        faults.append(f"{name}: the text is {ours['text']!r}, recorded {theirs['text']!r}")
    # Up to the first other token both saw the same words.
    count = next(
        (i for i, (a, b) in enumerate(zip(theirs["ids"], ours["ids"])) if a != b),
        min(len(theirs["ids"]), len(ours["ids"])),
    )
    if count:
        pair = np.array([theirs["logits"][:count], ours["logits"][:count]])
        gap = abs(pair[0] - pair[1]).max() / abs(pair[0]).max()
        if gap > LOGIT_LIMITS[dtype]:
            faults.append(f"{name}: logits differ by {gap:.1%} of the largest")
    masks = [[decode_mask(mask) for mask in answer["masks"]] for answer in (theirs, ours)]
    if len(masks[0]) != len(masks[1]):
        faults.append(f"{name}: {len(masks[1])} masks, recorded {len(masks[0])}")
    for number, (a, b) in enumerate(zip(*masks), 1):
        if a.shape != b.shape:
            faults.append(f"{name}: mask {number} is {b.shape}, recorded {a.shape}")
        elif dtype == "float32" and (a != b).mean() > 1e-4:
            faults.append(f"{name}: {(a != b).mean():.2%} of mask {number}'s pixels differ")
        elif (a | b).any() and (a & b).sum() / (a | b).sum() < MASK_LIMIT:
            iou = (a & b).sum() / (a | b).sum()
            faults.append(f"{name}: mask {number} has IoU {iou:.3f} with the recorded one")
    return faults


# Training


def random_reward(completions: list[str], **columns: object) -> list[float]:
    """Reward answers at random, so that every group has a gradient whatever the model says."""
    return torch.rand(len(completions)).tolist()


def write_drawn_data(folder: Path):
    """Write 16 drawn pictures with two regions each in GAR's layout."""
    rows = []
    for number in range(16):
        image, circle, square = draw_scene(circle_x=100 + 12 * number)
        picture = Image.fromarray(image)
        rows += [
            dict(image=picture, mask=circle, caption="A plain red circle.", category="circle"),
            dict(image=picture, mask=square, caption="A plain blue square.", category="square"),
        ]
    write_gar(rows, folder)


def check_gap(policy: Sa2VAPolicy, batch: Batch) -> tuple[str, None]:
    """Compare log-probs of sampled tokens with those of the full forward. Raises CheckFailed."""
    dtype = str(policy.base_dtype).removeprefix("torch.")
    with torch.no_grad():
        features = policy.encode(batch)
        index = range(len(batch))
        prompts = policy.segment_prompts(features, index, batch.captions)
        uniforms = RowRNG(0, 0, 0, batch.index, GAP_GENERATIONS).uniforms(GAP_TOKENS)
        rollout = policy.sample(batch, features, prompts, GAP_GENERATIONS, GAP_TOKENS, uniforms)
        scores = policy.score(rollout)
    valid = rollout.valid.to(scores.logp.device)
    gaps = (scores.logp - rollout.logp.to(scores.logp.device)).abs()[valid]
    mean, largest = gaps.mean().item(), gaps.max().item()
    text = f"mean {mean:.1e}, largest {largest:.1e} in {len(gaps)} tokens"
    if not mean <= GAP_LIMITS[dtype]:
        raise CheckFailed(f"{text}; the mean may be {GAP_LIMITS[dtype]:.0e}")
    return text, None


def check_steps(run: Run) -> tuple[str, None]:
    """Train STEPS steps. Raises CheckFailed if a group of weights gets no gradient or stays."""
    state = run.state
    before = {name: w.detach().cpu().clone() for name, w in state.policy.trainable.items()}
    norms, seconds = {}, []
    on_gpu = run.ranks.device.type == "cuda"

    def end_step(state, rollouts, metrics):
        state.step += 1
        norms.update(metrics.same_on_ranks)
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter())

    loader = batch_loader(run.data.train_set, run.preprocessor(), run.sampler, 0)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds.append(time.perf_counter())
    train(run, loader, end_step)
    changes = {}  # {group: its largest change}
    for name, weight in state.policy.trainable.items():
        group, change = state.policy.group_of[name], (weight.detach().cpu() - before[name]).abs()
        changes[group] = max(changes.get(group, 0.0), change.max().item())
    parts = [
        f"{group} gradient {norms.get(f'grad_norm/{group}', 0.0):.2g}, change {change:.1g}"
        for group, change in sorted(changes.items())
    ]
    dead = [
        group
        for group, change in sorted(changes.items())
        if not (0 < change < float("inf") and norms.get(f"grad_norm/{group}", 0.0) > 0)
    ]
    if on_gpu:
        peak = torch.cuda.max_memory_allocated()
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    text = (
        f"{'; '.join(parts)}; the last of {STEPS} steps took {seconds[-1] - seconds[-2]:.1f} s, "
        f"peak memory {size_in_words(peak)}"
    )
    if dead:
        raise CheckFailed(f"without gradient or change: {', '.join(dead)}. {text}")
    return text, None


def start_steps(
    args: argparse.Namespace, flags: list[str], folder: Path, scratch: Path, says_seg: bool
) -> tuple[str, Run]:
    """Build a run by the caller's flags, on drawn pictures or --data_dir, with random rewards too.

    Args:
        says_seg: the model answered a question with a mask.
    """
    data_dir = args.data_dir
    if data_dir is None:
        data_dir = scratch / "data"
        write_drawn_data(data_dir)
    own = dict(model_path=folder, data_dir=data_dir, output_dir=scratch / "run", max_steps=STEPS)
    own |= dict(eval_samples=4, dtype=args.dtype, reward="tools.check_checkpoint:random_reward")
    if not says_seg:  # the spread of its masks cannot be measured
        own |= dict(latent_std=1)
    words = [word for name, value in own.items() for word in (f"--{name}", str(value))]
    with contextlib.redirect_stdout(io.StringIO()):  # what a run says of itself
        config = cli.parse([*words, *flags])
        run = start_run(config, process_group.init())
    counts = [weight.numel() for weight in run.state.policy.trainable.values()]
    samples = "samples" if args.data_dir else "drawn samples"
    return f"{sum(counts):,d} weights train; {len(run.data.train_set)} {samples}", run


# The program


def build_parser() -> FlagParser:
    parser = FlagParser(prog="python -m tools.check_checkpoint", description=__doc__)
    on_gpu = torch.cuda.is_available()
    add = parser.add_argument
    add("--model_path", required=True, help="folder or name on the hub")
    add("--data_dir", type=Path, help="data to train the steps on; default: drawn pictures")
    add("--recorded", type=Path, help="JSON file of tools/record_original.py to compare with")
    add("--output_dir", type=Path, help="folder for report.json and pictures; empty or absent")
    add(
        "--dtype",
        choices=["float32", "bfloat16"],
        default="bfloat16" if on_gpu else "float32",
        help="type of the frozen weights (default: bfloat16, on the CPU float32)",
    )
    add("--max_new_tokens", type=int, default=128, help="longest answer that is checked")
    return parser


def read_recorded(path: Path | None) -> dict | None:
    """Read a file of record_original.py. Raises SystemExit, naming the flag, if it is none."""
    if path is None:
        return None
    try:
        recorded = json.loads(path.read_text())
        if {"answers", "files", "dtype", "max_new_tokens"} <= recorded.keys():
            return recorded
        fault = "no file of tools/record_original.py"
    except (OSError, ValueError, AttributeError) as error:
        fault = " ".join(str(error).split())
    raise SystemExit(f"check_checkpoint: --recorded {path}: {fault}")


def save_report(folder: Path | None, checks: Checks, answers: dict[str, dict] | None):
    """Write report.json, and the drawn picture with each answer's first mask."""
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    report = dict(checks=[asdict(line) for line in checks.lines])
    (folder / "report.json").write_text(json.dumps(report, indent=1))
    image, _, square = draw_scene(circle_x=180)
    for name, answer in (answers or {}).items():
        mask = square if name == "region" else None
        if answer["masks"]:
            mask = decode_mask(answer["masks"][0])[0]
        if mask is not None:
            color = REGION if name == "region" else PREDICTED
            overlay(Image.fromarray(image), torch.from_numpy(mask), color).save(
                folder / f"{name}.png"
            )


def check_all(
    checks: Checks, args: argparse.Namespace, flags: list[str], recorded: dict | None
) -> dict[str, dict] | None:
    """Make all checks, and return the answers to the drawn pictures."""
    max_new_tokens = recorded["max_new_tokens"] if recorded else args.max_new_tokens
    folder = checks.run("layout", check_layout, args.model_path)
    model = checks.run("weights", check_weights, folder, args.device, args.dtype)
    tokenizer = checks.run("tokenizer", check_tokenizer, folder, model)
    answers = checks.run("answers", check_answers, model, tokenizer, max_new_tokens)
    if recorded:
        checks.run("as recorded", check_recorded, recorded, folder, answers, args.dtype)
    else:
        checks.skip("as recorded", NOT_RECORDED)
    del model  # the run loads it again
    with tempfile.TemporaryDirectory() as scratch:
        ready = folder if tokenizer else None
        says_seg = any(answer["masks"] for answer in (answers or {}).values())
        run = checks.run("training data", start_steps, args, flags, ready, Path(scratch), says_seg)
        batch = run and Batches(run.data.train_set, run.preprocessor())[[0, 1]]
        checks.run(f"sampler and scorer, {args.dtype}", check_gap, run and run.state.policy, batch)
        checks.run("training steps", check_steps, run)
        other = "float32" if args.dtype == "bfloat16" else "bfloat16"
        del run
        policy = None
        if batch:
            policy = open_policy(folder, None, "policy", args.device, GAP_TOKENS, dtype=other)
        checks.run(f"sampler and scorer, {other}", check_gap, policy, batch)
    return answers


def main(argv: Sequence[str] | None = None):
    """Check the model that `argv` names; exit with status 1 if a check fails."""
    args, flags = build_parser().parse_known_args(argv)
    recorded = read_recorded(args.recorded)
    if args.output_dir:
        check_writable("--output_dir", args.output_dir)
        if args.output_dir.exists() and any(args.output_dir.iterdir()):
            raise SystemExit(f"check_checkpoint: --output_dir {args.output_dir} is not empty")
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    checks = Checks(total=9)
    try:
        answers = check_all(checks, args, flags, recorded)
    finally:
        checks.bar.close()
        process_group.close()
    save_report(args.output_dir, checks, answers)
    failed = [line.name for line in checks.lines if line.verdict == FAILED]
    print(f"failed: {', '.join(failed)}" if failed else "every check that was made holds")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    run_program(main)
