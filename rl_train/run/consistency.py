"""Checks before the first step that all ranks begin alike; machines need not share a disk.

Each rank reads its own folders. If these differ, ranks would train different models and average
their gradients without an error.
"""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from rl_train.checkpoint.fingerprint import fingerprint_of
from rl_train.checkpoint.save_load import RunState
from rl_train.config.grpo_config import Config
from rl_train.data import DamagedSample
from rl_train.data.base import RegionDataset
from rl_train.distributed.process_group import RankInfo, gather_objects

NUM_SAMPLES = 32  # of a data set, evenly spread, that are compared in full


def check_same_on_all_ranks(facts: dict[str, str | int | float | list | None]):
    """Raise ValueError on all ranks, naming the entries that differ, unless `facts` are equal."""
    first, *others = gather_objects(facts)
    for rank, other in enumerate(others, 1):
        differing = [
            f"{name}: {first.get(name)} on rank 0; {other.get(name)} on rank {rank}"
            for name in first | other
            if first.get(name) != other.get(name)
        ]
        if differing:
            raise ValueError(
                f"ranks do not begin alike. {'. '.join(differing)}. Give all machines the same "
                "flags, model and data, and copy rank 0's latest checkpoint to the others."
            )


def check_same_start(
    config: Config, resume: Path | None, ranks: RankInfo, **datasets: RegionDataset
):
    """Compare flags, the checkpoint to resume from, the base model's weights and the data sets."""
    if ranks.world_size == 1:
        return
    machine_flags = config.flags_with("may_differ_by_rank")
    facts = {f"--{n}": value for n, value in config.flags.items() if n not in machine_flags}
    facts["the checkpoint to resume from"] = resume.name if resume else "none"
    folders = filter(None, (config.policy.model_path, config.policy.sam_path))
    facts["weights of --model_path and --sam_path"] = fingerprint_of(*folders).digest
    facts |= {f"samples of the {name} data": sample_digest(d) for name, d in datasets.items()}
    check_same_on_all_ranks(facts)


def check_same_weights(state: RunState, ranks: RankInfo):
    """Compare the step and the weights of the policy and its copies, after they are loaded."""
    if ranks.world_size == 1:
        return
    facts: dict[str, str | int] = dict(step=state.step)
    for role, weights in dict(policy=state.policy.trainable, **state.roles.copies).items():
        tensors = (weight.detach().cpu().numpy().tobytes() for weight in weights.values())
        facts[f"weights of the {role}"] = digest(tensors)
    check_same_on_all_ranks(facts)


def digest(chunks: Iterable[bytes]) -> str:
    """Return twelve hexadecimal digits that depend on every bit of the chunks."""
    sha256 = hashlib.sha256()
    for chunk in chunks:
        sha256.update(chunk)
    return sha256.hexdigest()[:12]


def sample_digest(dataset: RegionDataset) -> str:
    """Return the number of a data set's samples and a digest of some of them."""
    return f"{len(dataset)} ({digest(_sample_bytes(dataset))})"


def _sample_bytes(dataset: RegionDataset) -> Iterator[bytes]:
    for i in np.linspace(0, len(dataset) - 1, min(NUM_SAMPLES, len(dataset))).astype(int).tolist():
        try:
            sample = dataset[i]
        except DamagedSample as damaged:  # `Batches` puts another in its place
            yield str(damaged).encode()
            continue
        yield repr((sample["image_id"], sample["caption"])).encode()
        yield sample["image"].tobytes() + np.packbits(sample["mask"]).tobytes()
