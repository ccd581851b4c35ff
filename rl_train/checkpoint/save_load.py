"""Checkpoints: everything that a run needs to continue as if it had never stopped.

checkpoint_step_N/
    adapter/                 the LoRA in PEFT's own format
    trainables.safetensors   all trainable weights by native name, float32; the base's digest
    ema.safetensors          the teacher's, if a task has one
    training_state.pt        optimizer, scheduler, step, tasks, counters, RNG of each rank
    config.json              the run's flags
    data.json                facts of the data that it was trained and measured on
checkpoint_best/             the same of the step with the best score on the evaluation split, and
    eval.json                its step, its score and its metrics, the teacher's too
The reference is not stored: it is the base with a fresh LoRA.

final_model/                 the last one merged into the base, see --merge_at_end (`export`)

A folder of one of these names is whole: it is written as .NAME.RUN.K.unfinished and renamed. RUN is
the run's id and K a number. .NAME.RUN.K.replaced is the earlier folder of that name while another
takes its place. Folders that the run's `RunRecord` does not name are not the run's, and stay.
"""

import pickle
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.stateful import Stateful

from rl_train.checkpoint.fingerprint import BaseFingerprint
from rl_train.checkpoint.record import (
    BEST_CHECKPOINT,
    CHECKPOINT_NAME,
    RECORD,
    DataFacts,
    RunRecord,
    read_record,
)
from rl_train.distributed.process_group import gather_objects, print0
from rl_train.policies.base import Policy
from rl_train.roles import Roles
from rl_train.utils.io import (
    CannotWrite,
    DamagedFile,
    fsync,
    read_json,
    remove_folder,
    warn,
    wrap_write_errors,
    write_json,
)

WEIGHT_FILES = dict(policy="trainables.safetensors", teacher="ema.safetensors")  # {role: file}
DATA_FILE = "data.json"
STATE_KEYS = {"step", "optimizer", "scheduler", "tasks", "counters", "rng"}  # training_state.pt
OTHER_CHECKPOINT = "--resume with the folder of an earlier checkpoint, and another --output_dir"
UNFINISHED, REPLACED = ".unfinished", ".replaced"  # suffixes that only `replacing` gives


class WrongOptimizer(ValueError):
    """A state is of AdamW in another number of bits."""


@dataclass
class RunState:
    """State that a run carries from step to step; the policy and the roles hold the weights.

    Attributes:
        step: number of steps done.
        fault_counts: {name: count of failed judge calls or damaged samples over many steps}; in
            training_state.pt under "counters".
        base_fingerprint: the frozen model under the weights.
        data: facts of the data, which data.json of a checkpoint holds.
    """

    policy: Policy
    roles: Roles
    tasks: list
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LambdaLR
    step: int = 0
    fault_counts: dict[str, Stateful] = field(default_factory=dict)
    base_fingerprint: BaseFingerprint | None = None
    data: DataFacts = field(default_factory=dict)

    def weights(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return {role: {name: weight}} of the policy and, if there is one, of the teacher."""
        roles = dict(policy=self.policy.trainable) | self.roles.copies
        return {role: roles[role] for role in WEIGHT_FILES if role in roles}

    def check_finite(self):
        """Raise FloatingPointError, on all ranks alike, if a weight is NaN or infinite."""
        for role, weights in self.weights().items():
            # One transfer from the GPU a role.
            finite = torch.stack([weight.isfinite().all() for weight in weights.values()]).tolist()
            if names := [name for name, ok in zip(weights, finite) if not ok]:
                raise FloatingPointError(f"not finite: {role}: {', '.join(names[:5])}")

    def state_dict(self) -> dict:
        """Return the content of training_state.pt without the random number generators."""
        return dict(
            step=self.step,
            optimizer=self.optimizer.state_dict(),
            scheduler=self.scheduler.state_dict(),
            tasks={task.name: task.action.state_dict() for task in self.tasks if task.action},
            counters={name: count.state_dict() for name, count in self.fault_counts.items()},
        )

    def load_state_dict(self, state: dict):
        """Load what `state_dict` returned.

        Raises:
            ValueError, KeyError: it is of other weights or tasks.
        """
        defaults = self.optimizer.defaults
        for group in state["optimizer"]["param_groups"]:
            if ("fused" in group) != ("fused" in defaults):  # a setting of torch's AdamW alone
                raise WrongOptimizer("--low_memory adamw_8bit: must be as it was in the run so far")
            if "fused" in defaults:
                group["fused"] = defaults["fused"]  # this machine's, not the writer's
        self.optimizer.load_state_dict(state["optimizer"])
        for parameter, moments in self.optimizer.state.items():
            # Of torch's AdamW, or of bitsandbytes'.
            names = ("exp_avg", "exp_avg_sq") if "exp_avg" in moments else ("state1", "state2")
            for name in names:
                if moments[name].shape != parameter.shape:
                    raise ValueError(f"{name} of {tuple(moments[name].shape)}")
        self.scheduler.load_state_dict(state["scheduler"])
        self.step = state["step"]
        for task in self.tasks:
            if task.action:
                task.action.load_state_dict(state["tasks"][task.name])
        for name, count in self.fault_counts.items():
            count.load_state_dict(state["counters"][name])


def step_of(folder: Path) -> int:
    """Return the number of steps after which a checkpoint was written."""
    return int(CHECKPOINT_NAME.fullmatch(folder.name)[1])


def list_checkpoints(output_dir: str | Path) -> list[Path]:
    """Return the complete checkpoints in order of their steps."""
    folders = Path(output_dir).glob("checkpoint_step_*")
    checkpoints = [f for f in folders if CHECKPOINT_NAME.fullmatch(f.name) and f.is_dir()]
    return sorted(checkpoints, key=step_of)


def resume_hint(output_dir: str | Path) -> str:
    """Return a sentence part on the last checkpoint and how --resume goes on."""
    if checkpoints := list_checkpoints(output_dir):
        return f"the last whole checkpoint is {checkpoints[-1]}, --resume goes on from it"
    return f"{output_dir} holds no checkpoint yet, --resume auto begins anew"


def save(
    output_dir: str | Path,
    state: RunState,
    flags: dict[str, Any],
    total_limit: int,
    is_main: bool,
):
    """Write checkpoint_step_N, and remove the oldest beyond `total_limit` (0: none)."""
    write(Path(output_dir) / f"checkpoint_step_{state.step}", state, flags, is_main)
    if is_main:
        remove_oldest(output_dir, total_limit)


def save_if_best(
    output_dir: str | Path,
    state: RunState,
    flags: dict[str, Any],
    metrics: dict[str, Any],
    is_main: bool,
):
    """Write checkpoint_best if metrics["score"] is above that of the one there, if any."""
    best = best_score(output_dir, state.data) if is_main else None
    # Rank 0 alone has the file; all must decide alike, as `write` is a collective.
    if metrics["score"] > gather_objects(best)[0]:
        write(Path(output_dir) / BEST_CHECKPOINT, state, flags, is_main, metrics)


def write(
    target: Path,
    state: RunState,
    flags: dict[str, Any],
    is_main: bool,
    metrics: dict[str, Any] | None = None,
):
    """Write the folder `target` on the first rank; it replaces one of that name.

    Raises FloatingPointError, on all ranks, if a weight is not finite; CannotWrite as `replacing`.
    """
    state.check_finite()
    # On all ranks: a state dict would reshard the layers of the first rank alone.
    state.policy.reshard_base()
    rng = gather_objects(torch.get_rng_state())
    if not is_main:
        return
    with replacing(target) as folder:
        if state.policy.peft:  # supervised training may train the language model whole
            state.policy.peft.save_pretrained(folder / "adapter")
        metadata = {"base": state.base_fingerprint.digest} if state.base_fingerprint else None
        for role, weights in state.weights().items():
            on_cpu = {n: weight.detach().cpu().contiguous() for n, weight in weights.items()}
            save_file(on_cpu, folder / WEIGHT_FILES[role], metadata)
        with (folder / "training_state.pt").open("wb") as file:  # for the error of a full disk
            torch.save(state.state_dict() | dict(rng=rng), file)
        write_json(folder / "config.json", flags, indent=2)
        if state.data:
            write_json(folder / DATA_FILE, state.data, indent=2)
        if metrics:
            evaluation = dict(step=state.step, score=metrics["score"], metrics=metrics)
            write_json(folder / "eval.json", evaluation, indent=2)
    print0(f"saved {target}")


def remove_oldest(output_dir: str | Path, total_limit: int):
    """Remove the oldest of the run's checkpoints beyond `total_limit` (0: none).

    What cannot be removed is named in a warning.
    """
    output = Path(output_dir)
    record = read_record(output)
    if not total_limit or record is None:
        return
    checkpoints = [f for f in list_checkpoints(output) if f.name in record.folders]
    for old in checkpoints[:-total_limit]:
        try:
            unfinished = old.rename(_beside(old, record.run_id, UNFINISHED))
        except OSError as error:
            warn(f"{old} cannot be removed now ({error}); a later checkpoint tries again")
            continue
        remove_folder(unfinished)  # half removed it must not look whole
        record.folders.remove(old.name)
        record.write(output)
        print0(f"removed {old} (--save_total_limit {total_limit})")


def clean_output_dir(output_dir: str | Path, start: int, total_limit: int):
    """Remove what a kill left unfinished in the output folder of a run that begins at step `start`.

    Raises ValueError if it holds a later checkpoint, which the next --resume would take for this
    run's.
    """
    output, checkpoints = Path(output_dir), list_checkpoints(output_dir)
    if checkpoints and step_of(checkpoints[-1]) > start:
        raise ValueError(
            f"--resume: goes on from step {start}, and --output_dir {output} holds "
            f"{checkpoints[-1].name}: give another --output_dir"
        )
    record = read_record(output)
    if record is None:
        return
    recover(output, record.run_id)
    there = [name for name in record.folders if (output / name).is_dir()]
    if there != record.folders:  # a kill before such a folder was whole, or after its removal
        record.folders = there
        record.write(output)
    remove_oldest(output, total_limit)


def _beside(target: Path, run_id: str, suffix: str) -> Path:
    """Return a name for an unfinished or replaced folder that nothing has yet."""
    numbers = [int(path.suffixes[-2][1:]) for path in _leftovers(target, run_id)]
    number = max(numbers, default=-1) + 1
    return target.with_name(f".{target.name}.{run_id}.{number}{suffix}")


def _leftovers(target: Path, run_id: str, suffix: str = "") -> list[Path]:
    """Return the run's unfinished and replaced folders of the name `target`, the newest last."""
    name = re.compile(rf"\.{re.escape(target.name)}\.{run_id}\.([0-9]+)({UNFINISHED}|{REPLACED})")
    leftovers = [path for path in target.parent.glob(".*") if name.fullmatch(path.name)]
    leftovers.sort(key=lambda path: int(name.fullmatch(path.name)[1]))
    return [path for path in leftovers if path.name.endswith(suffix)]


def recover(output: Path, run_id: str, names: Iterable[str] | None = None):
    """Restore and remove what a kill in `replacing` or `remove_oldest` left behind.

    Args:
        names: of the folders concerned; None for all.
    """
    if names is None:
        leftover = re.compile(rf"\.(.+)\.{run_id}\.[0-9]+({UNFINISHED}|{REPLACED})")
        matches = [leftover.fullmatch(path.name) for path in output.glob(".*")]
        names = {match[1] for match in matches if match}
    for name in names:
        target = output / name
        replaced = _leftovers(target, run_id, REPLACED)
        if replaced and not target.exists():  # only the newest is whole: a kill came between
            with wrap_write_errors(target):
                replaced[-1].rename(target)
        for path in _leftovers(target, run_id):
            remove_folder(path)


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a new folder that takes the name `target` when the context ends, complete.

    All files get the mode of any new file: safetensors makes its own 0600. Raises CannotWrite,
    after which `target` is what it was. It is also raised if `target` holds anything and is not in
    the record of the run in whose output folder it lies.
    """
    output = target.parent
    record = read_record(output) or RunRecord()
    if target.name not in record.folders:
        if target.exists() and not (target.is_dir() and not any(target.iterdir())):
            raise CannotWrite(
                f"{target} cannot be written: it is there, and this run did not make it; move it "
                "away"
            )
        if (output / RECORD).is_file():
            record.folders.append(target.name)
            record.write(output)
    recover(output, record.run_id, [target.name])
    folder = _beside(target, record.run_id, UNFINISHED)
    with wrap_write_errors(target):
        folder.mkdir()  # without parents: an output folder that was removed stays away
        yield folder
        mode = folder.stat().st_mode & 0o777  # by the umask
        for path in (*folder.rglob("*"), folder):
            path.chmod(mode if path.is_dir() else mode & 0o666)
            fsync(path)
        if target.exists():
            # Removing it at once would take longer.
            target.rename(_beside(target, record.run_id, REPLACED))
        folder.rename(target)
        fsync(output)
    recover(output, record.run_id, [target.name])


def find_resume_checkpoint(resume: str | None, output_dir: str | Path) -> Path | None:
    """Return the checkpoint that --resume names; None without it, or if there is none yet."""
    if resume is None:
        return None
    if resume in ("latest", "auto"):
        return max(list_checkpoints(output_dir), key=step_of, default=None)
    if not (Path(resume) / "training_state.pt").is_file():
        raise ValueError(f"--resume {resume}: it has no training_state.pt, it is no checkpoint")
    return Path(resume)


def read_state(folder: str | Path) -> dict:
    """Return the content of training_state.pt. Raises DamagedFile."""
    file = Path(folder) / "training_state.pt"
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, KeyError, pickle.UnpicklingError) as error:
        raise DamagedFile(file, f"torch.load cannot read it ({type(error).__name__})") from error
    if not isinstance(state, dict) or STATE_KEYS - state.keys():
        is_dict = isinstance(state, dict)
        holds = ", ".join(sorted(map(str, state))) if is_dict else f"a {type(state).__name__}"
        raise DamagedFile(
            file, f"it holds {holds:.200} and not the state of a run; {OTHER_CHECKPOINT}"
        )
    return state


def open_weights(path: Path) -> safe_open:
    """Open a safetensors file and read its header. Raises DamagedFile."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise DamagedFile(path, error) from error


def load_weights(
    folder: Path,
    parameters: dict[str, torch.Tensor],
    file: str = WEIGHT_FILES["policy"],
    base_fingerprint: BaseFingerprint | None = None,
):
    """Copy a file's weights into the parameters.

    Raises ValueError if it is damaged, if its names or shapes are not those of the parameters, or
    if it was trained on another base than that of `base_fingerprint`.
    """
    reader = open_weights(folder / file)
    if base_fingerprint and reader.metadata() != {"base": base_fingerprint.digest}:
        trained_on = read_json(folder / "config.json")["model_path"]
        raise ValueError(
            f"{folder} was trained on another base than the one in {base_fingerprint.folders}: the "
            f"run started from what then lay in {trained_on}. Give that base as --model_path"
        )
    weights = {name: reader.get_tensor(name) for name in reader.keys()}
    shapes = {(name, weight.shape) for name, weight in weights.items()}
    expected = {(name, parameter.shape) for name, parameter in parameters.items()}
    if differing := sorted({name for name, _ in shapes ^ expected}):
        raise ValueError(
            f"{folder}/{file}: names or shapes differ from what trains: {differing[:5]}"
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])


def load(folder: Path, state: RunState, output_dir: str | Path, rank: int):
    """Restore a run from `folder`. Raises ValueError as `load_weights` and `read_state` do."""
    best_score(output_dir)  # known to be readable before the next evaluation
    for role, weights in state.weights().items():
        load_weights(folder, weights, WEIGHT_FILES[role], state.base_fingerprint)
    saved = read_state(folder)
    try:
        state.load_state_dict(saved)
        if rank < len(saved["rng"]):  # of a run of fewer ranks; no step depends on it
            torch.set_rng_state(saved["rng"][rank])
    except WrongOptimizer:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        reason = f"it does not fit this run ({error!r:.200}); {OTHER_CHECKPOINT}"
        raise DamagedFile(folder / "training_state.pt", reason) from error


def best_score(output_dir: str | Path, data: DataFacts | None = None) -> float:
    """Return the score of checkpoint_best, or minus infinity. Raises DamagedFile.

    A score that was measured on other regions than those of `data` counts as none.
    """
    folder = Path(output_dir) / BEST_CHECKPOINT
    if not folder.exists():
        return float("-inf")
    score = read_json(folder / "eval.json")["score"]
    measured_on = read_data(folder)
    if data and measured_on and measured_on["evaluation"] != data["evaluation"]:
        return float("-inf")
    return score


def read_data(checkpoint: Path) -> DataFacts:
    """Return the facts of a checkpoint's data; none if an earlier version wrote it.

    Raises DamagedFile.
    """
    file = checkpoint / DATA_FILE
    data = read_json(file) if file.is_file() else {}
    if data and not all(isinstance(data.get(name), dict) for name in ("training", "evaluation")):
        raise DamagedFile(file, "it does not hold the facts of training and evaluation data")
    return data
