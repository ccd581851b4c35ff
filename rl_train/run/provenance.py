"""Record of how a run was made: an entry in its starts.json for each start, resumes too."""

import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from rl_train.run.build import Run
from rl_train.run.messages import machine
from rl_train.utils.io import read_json, write_json

STARTS = "starts.json"
ROOT = Path(__file__).parents[2]
# Those on which numbers may depend; those that are not installed are left out.
PACKAGES = (
    *("torch", "triton", "transformers", "tokenizers", "peft", "safetensors", "numpy", "pillow"),
    *("pycocotools", "nltk", "pyarrow", "datasets", "bitsandbytes", "openai", "huggingface_hub"),
)


def read_starts(folder: Path) -> list[dict[str, Any]]:
    """Return the entries in the folder's starts.json, if there is one. Raises DamagedFile."""
    file = folder / STARTS
    return read_json(file).get("starts", []) if file.is_file() else []


def record_start(folder: Path, earlier: list[dict[str, Any]], run: Run):
    """Write an entry about this start behind the earlier ones."""
    write_json(folder / STARTS, dict(starts=[*earlier, describe_start(run)]), indent=2)


def describe_start(run: Run) -> dict[str, Any]:
    """Return command, flags, code, packages, machine, base and data of this start as JSON."""
    fingerprint = run.state.base_fingerprint
    return dict(
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        from_step=run.state.step,  # 0, or that of the checkpoint
        command=shlex.join([sys.executable, *sys.argv]),
        working_directory=str(Path.cwd()),
        flags=run.flags,  # config.json has those of the last start alone
        code=git_state(ROOT),
        python=platform.python_version(),
        packages=package_versions(),
        cuda=torch.version.cuda,
        machine=f"{machine(run.ranks)}; {platform.node()}, {platform.platform()}",
        base=fingerprint.digest if fingerprint else None,
        data=run.state.data,
    )


def package_versions() -> dict[str, str]:
    """Return {package: installed version}."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def git_state(root: Path) -> dict[str, Any]:
    """Return the commit of a checkout and the files that differ from it; None if it is none.

    Files that git ignores do not count. A folder within another repository is no checkout.
    """
    commit = changed = None
    if (root / ".git").exists():
        commit = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "status", "--porcelain")
    return dict(
        commit=commit and commit.strip(),
        changed_files=None if changed is None else [line[3:] for line in changed.splitlines()],
    )


def _git(root: Path, *words: str) -> str | None:
    """Return what git prints; None if it is not installed or refuses (another user's folder)."""
    try:
        ended = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return ended.stdout if ended.returncode == 0 else None
