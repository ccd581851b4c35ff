"""GPU memory: what a run holds anyway, its worst step before the first, the sentence at its end.

A run that fits its first steps may not fit a later one, for answers grow longer while it learns and
say more [SEG]. So the worst step that the flags allow is made before the first.
"""

import dataclasses
import gc
import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from rl_train.checkpoint import RunState, how_to_go_on
from rl_train.cli import FREE_ON_RESUME
from rl_train.config import Config
from rl_train.distributed import Ranks, gather_objects, print0
from rl_train.policies.families import longest_answers, worst_batch
from rl_train.policies.sa2va import SHARED, Sa2VAPolicy
from rl_train.rewards.controls import Control
from rl_train.rewards.custom import UserReward
from rl_train.roles import COPIES
from rl_train.stand_ins import KeepsWeights, LongestExamples, NotAveraged, NotTried, SilentJudge
from rl_train.tasks.protocol import Context

GIB = 2**30
# The phase that a call by this name belongs to; of several the first here.
CALLS = dict(
    evaluate="evaluation",
    calibrate="calibration",
    judge="teacher",
    score_all="reference",
    encode="encode",
    prompts="rollout",
    sample="rollout",
    draw="rollout",
    train="update",
)
# What to lower if a phase does not fit.
REMEDIES = dict(
    calibration=["batch_size"],
    evaluation=["batch_size"],
    encode=["batch_size", "max_tiles"],
    rollout=["batch_size", "num_generations", "max_completion_length"],
    teacher=["batch_size", "num_generations", "max_completion_length"],
    reference=["micro_batch_size", "max_completion_length"],
    update=["micro_batch_size", "max_masks_per_answer", "max_completion_length"],
)


def standing_memory(policy, copies=COPIES) -> dict[str, int]:
    """{part: bytes} that a run holds on each GPU whatever its batch."""
    weights = sum(parameter.nbytes for parameter in policy.trainable.values())
    base = sum(parameter.nbytes for parameter in policy.model.parameters()) - weights
    trained = {"trainable weights": 1} | ({" and ".join(copies): len(copies)} if copies else {})
    trained |= {"optimizer": 2, "gradients": 1}
    return {"frozen base": base} | {part: n * weights for part, n in trained.items()}


# Before the first step


def announce(parts, train) -> str:
    """What the worst step takes, in words, of the rank where it is most; "" on the CPU.

    Args: see `worst_step`.

    Raises:
        ValueError: a GPU has less. (Or memory ends in the step itself.)
    """
    device = parts.ranks.device
    if device.type != "cuda":
        return ""
    try:
        peaks = worst_step(parts, train)
    except NotTried as error:
        print0(f"peak memory of the worst step is not known: {error}")
        return ""
    has = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    of_ranks = gather_objects((max(peaks.values()), has / GIB))
    most, least = max(peak for peak, _ in of_ranks), min(has for _, has in of_ranks)
    words = ", ".join(f"{phase} {peak:.1f}" for phase, peak in peaks.items())
    announced = f"at most {most:.1f} GiB announced, a GPU has {least:.1f}"
    print0(f"peak memory of the worst step that the flags allow, GiB: {words}; {announced}")
    if most > least and parts.state.policy.shards and parts.state.policy.shards.fits:
        print0("--shard_base: less than that, so layers are gathered anew for each forward")
        parts.state.policy.shards.fits = False
        return announce(parts, train)
    if most > least:
        phase = max(peaks, key=peaks.get)
        todo = remedy(phase, parts.config)
        raise ValueError(f"out of GPU memory in {phase} of the worst step: {announced}; {todo}")
    return announced


def worst_step(parts, train) -> dict[str, float]:
    """{phase: GiB at most} of the worst step that the flags allow; 0 on the CPU.

    By the run's own loop, with its own model. No weight moves, random numbers are as before, and no
    judge and no reward of the user's own is asked.

    Args:
        parts: `parts.Parts` of the run; train: its loop, of `train` or `tools.train_supervised`.

    Raises:
        NotTried: a task of the user's own does not take the samples that are made up here.
    """
    state, config, peaks = parts.state, parts.config, {}
    tokens, policy = config.rollout.max_completion_length, state.policy
    if config.samples:
        policy = longest_answers(policy)
    judge = SilentJudge() if config.reward.use_llm_judge else None
    rewards = (UserReward("rl_train.stand_ins:rising"),)
    context = Context(policy, state.roles, tokens, judge, rewards)
    tasks = []
    for task, options in zip(state.tasks, config.tasks.values()):
        tasks.append(type(task)(options, context))
        if task.action:
            tasks[-1].action.load_state_dict(task.action.state_dict())
    one_update = dict(gradient_accumulation_steps=1)
    if config.samples:
        one_update |= dict(num_iterations=1, ema_decay=1.0)
    else:
        tasks = [LongestExamples(task, tokens, policy.pad_id) for task in tasks]
    all_rows = dict(mask_truncated=False, skip_zero_variance=False)
    loss, optim = replace(config.loss, **all_rows), replace(config.optim, **one_update)
    trial = replace(config, loss=loss, optim=optim)
    once = RunState(policy, state.roles, tasks, KeepsWeights(policy.trainable), scheduler=None)
    given = []  # to the loss, of all that a step holds

    def end_of_step(once, work, tally, clock):
        clock("update")
        once.step += 1
        gradients = standing_memory(policy)["gradients"]
        accumulated = config.optim.gradient_accumulation_steps - 1  # batches held beside this one
        accumulated += bool(accumulated and policy.encoders_train)  # which it encodes once more
        more = adam_to_come(state) + policy.engine.bytes_to_come()
        more += accumulated * held_bytes(given)
        for phase in clock.seconds:
            buckets = gradients if dist.is_initialized() else 0  # beside the gradients themselves
            peak = clock.peaks.get(phase)
            peaks[phase] = 0.0 if peak is None else peak + (more + buckets) / GIB

    longest = config.data.max_caption_length
    batch = worst_batch(policy, policy.inputs(tokens, longest), config.rollout.batch_size)
    if config.data.other_regions:
        batch = replace(batch, others=[mask[None] for mask in batch.masks])
    device = policy.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        of_trial = replace(parts, config=trial, state=once, max_steps=1, control=Control())
        try:
            train(of_trial, [batch], end_of_step, partial(NotAveraged, given=given))
        except ValueError as error:  # here nothing of it is the user's input
            raise RuntimeError("the worst step failed, by a fault of the program") from error
        finally:
            given.clear()
            state.policy.watch.take()  # not to be said of a later step
            state.policy.engine.forget()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return peaks


def adam_to_come(state: RunState) -> int:
    """Bytes of Adam's state that its first step will make."""
    made = [value for of_one in state.optimizer.state.values() for value in of_one.values()]
    whole = standing_memory(state.policy)["optimizer"]
    return whole - sum(value.nbytes for value in made if value.ndim)


def held_bytes(value, seen=None) -> int:
    """Bytes of the tensors on a GPU that records hold, each storage once."""
    seen = set() if seen is None else seen
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        new = value.is_cuda and storage.data_ptr() not in seen
        seen.add(storage.data_ptr())
        return storage.nbytes() if new else 0
    if dataclasses.is_dataclass(value):
        value = list(vars(value).values())
    elif isinstance(value, dict):
        value = list(value.values())
    return sum(held_bytes(one, seen) for one in value) if isinstance(value, (list, tuple)) else 0


# When there is none left


def is_exhaustion(error: RuntimeError) -> bool:
    """Whether a GPU's memory is used up: torch's own error, or that of a library under it."""
    words = str(error)
    by_library = "out of memory" in words or "ALLOC_FAILED" in words
    return isinstance(error, torch.OutOfMemoryError) or by_library


def sentence(error: RuntimeError, config: Config, ranks: Ranks, parts=None) -> str:
    """Where memory ended, what to lower, what was announced, and where to go on.

    Args:
        parts: `parts.Parts`, unless it was still being built.
    """
    calls = {frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)}
    phase = next((phase for call, phase in CALLS.items() if call in calls), "start")
    when = "before the first step" if parts is None else f"in step {parts.state.step + 1}"
    if "worst_step" in calls:
        when = "in the worst step that the flags allow, tried before the first"
    words = [
        f"out of GPU memory on rank {ranks.rank}, {when}, in {phase}",
        remedy(phase, config),
        *([parts.announced] if parts and parts.announced else []),
        how_to_go_on(config.run.output_dir),
    ]
    return "; ".join(words)


def remedy(phase: str, config: Config) -> str:
    """What to change about the memory of a phase: flags with which a run that has begun resumes."""
    if phase == "start":
        return f"the model itself does not fit: {of_the_model(config)}"
    has_begun = (Path(config.run.output_dir) / "config.json").is_file()
    # Supervised training has no rows or groups beside the samples of a batch.
    known = [flag if flag in config.flags else "batch_size" for flag in REMEDIES[phase]]
    flags = [f for f in dict.fromkeys(known) if not has_begun or f in FREE_ON_RESUME]
    words = f"lower {' or '.join(f'--{flag}' for flag in flags)}"
    if "batch_size" in flags:
        words += " (and raise --gradient_accumulation_steps)"
    if phase == "update" and not config.policy.gradient_checkpointing:
        words += ", or switch --gradient_checkpointing on"
    return words


def of_the_model(config: Config) -> str:
    """What to change where the model itself does not fit."""
    of_sa2va = all(kind.family == Sa2VAPolicy.family for kind in config.kinds.values())
    if config.policy.shard_base:
        return "start more processes, a GPU each, of which --shard_base leaves each a smaller part"
    if trained := sorted(SHARED & set(config.rollout.train)):
        return f"--train less than {' and '.join(trained)}, of which no part can be elsewhere"
    return "share it out by --shard_base" if of_sa2va else "it needs a GPU with more"
