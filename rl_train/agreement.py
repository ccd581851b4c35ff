"""What must be alike on all ranks before the first gradient; machines need not share a disk.

Each rank reads its own folders. Where these differ, ranks would train different models, and average
their gradients without a word.
"""

import hashlib
from pathlib import Path

import numpy as np
import torch

from rl_train.checkpoint import RunState, list_checkpoints
from rl_train.config import Config
from rl_train.data import DamagedSample
from rl_train.distributed import Ranks, gather_objects

OF_A_MACHINE = {"model_path", "data_dir", "eval_data_dir", "output_dir", "resume", "num_workers"}
OF_A_MACHINE |= {"sam_path", "llm_judge_base_url", "attributes", "image_root"}
SAMPLES = 32  # of a data set, evenly spread, that are compared in full
PLACES, PLACE = 16, 2**16  # parts of a file of weights that are compared, and bytes of each


def agree(facts: dict[str, object], advice: str):
    """Raise ValueError on all ranks, saying who has what, unless all have the same `facts`."""
    of_ranks, differing = gather_objects(facts), []
    for name in dict.fromkeys(name for mine in of_ranks for name in mine):
        holders = {}
        for rank, mine in enumerate(of_ranks):
            holders.setdefault(str(mine.get(name, "unknown")), []).append(str(rank))
        if len(holders) > 1:
            who = [f"{value} on rank {', '.join(ranks)}" for value, ranks in holders.items()]
            differing.append(f"{name}: {'; '.join(who)}")
    if differing:
        raise ValueError(f"ranks do not begin alike. {'. '.join(differing)}. {advice}")


def agree_on_start(config: Config, resume: Path | None):
    """Raise ValueError on all ranks unless all have rank 0's flags and the same checkpoints."""
    flags = {f"--{n}": v for n, v in config.flags.items() if n not in OF_A_MACHINE}
    agree(flags, "Start all machines with the same flags.")
    latest = [path.name for path in list_checkpoints(config.run.output_dir)[-1:]]
    facts = {"the latest checkpoint in --output_dir": latest[0] if latest else "none"}
    facts["the checkpoint to go on from"] = resume.name if resume else "none"
    agree(facts, "Use a shared disk, or copy rank 0's latest checkpoint to the other machines.")


def agree_on_inputs(config: Config, ranks: Ranks, **datasets):
    """Raise ValueError on all ranks unless all read the same base model and the same samples."""
    if ranks.world_size > 1:
        facts = {f"samples of the {name} data": samples(one) for name, one in datasets.items()}
        folders = dict(model_path=config.policy.model_path, sam_path=config.policy.sam_path)
        for flag, folder in folders.items():
            if folder:
                facts[f"files of --{flag}"] = digest(base_files(Path(folder)))
        agree(facts, "Give all machines the same model and data.")


def agree_on_weights(state: RunState, ranks: Ranks):
    """Raise ValueError on all ranks unless all hold the same step, weights and optimizer state."""
    if ranks.world_size > 1:
        facts = dict(step=state.step, weights=digest(state.policy.trainable))
        if state.roles.has_teacher:
            facts |= {"the teacher's weights": digest(state.roles.banks["teacher"])}
        facts |= {"optimizer and tasks": digest(state.state_dict())}
        agree(facts, "Copy rank 0's checkpoint to the other machines; use one version of torch.")


def digest(value) -> str:
    """Twelve hexadecimal digits that depend on every bit of nested dicts, lists and tensors."""
    whole = hashlib.sha256()
    _feed(whole, value)
    return whole.hexdigest()[:12]


def _feed(whole, value):
    if isinstance(value, torch.Tensor):
        _feed(whole, f"{value.dtype}{tuple(value.shape)}")
        whole.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, dict):
        _feed(whole, ["by name", *value.items()])
    elif isinstance(value, (list, tuple)):
        _feed(whole, f"{len(value)} parts")
        for part in value:
            _feed(whole, part)
    else:
        whole.update(value if isinstance(value, bytes) else f"{value!r};".encode())


def samples(dataset) -> str:
    """The number of a data set's samples, and a digest of some of them."""
    places = np.linspace(0, len(dataset) - 1, min(SAMPLES, len(dataset))).astype(int)
    found = []
    for i in places.tolist():
        try:
            sample = dataset[i]
        except DamagedSample as damaged:  # `Batches` puts another in its place
            found.append(str(damaged))
            continue
        pixels = sample["image"].tobytes(), np.packbits(sample["mask"]).tobytes()
        found.append([sample["image_id"], sample["caption"], *pixels])
    return f"{len(dataset)} ({digest(found)})"


def base_files(folder: Path) -> list:
    """Name, size and content of a checkpoint's files: of weights the header and a few parts."""
    found = []
    for file in sorted(folder.glob("*.json")) + sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        with file.open("rb") as opened:
            if size <= PLACES * PLACE or file.suffix == ".json":
                parts = [opened.read()]
            else:
                parts = []
                for start in np.linspace(0, size - PLACE, PLACES).astype(int).tolist():
                    opened.seek(start)
                    parts.append(opened.read(PLACE))
        found.append([file.name, size, *parts])
    return found
