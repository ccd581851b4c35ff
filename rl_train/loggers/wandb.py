"""Mirror a run's TensorBoard logs and flags to Weights & Biases, by its `sync_tensorboard`."""

import secrets
from pathlib import Path
from typing import Any

from rl_train.utils.io import read_json, write_json


def start_wandb(folder: Path, project: str, flags: dict[str, Any]):
    """Start the W&B run of `folder`: a new one, or the one that a resumed run continues.

    It reads what SummaryWriter writes from then on, and ends with this process: as "failed" after
    an error. Points may be sent again after a kill; they are the same. Neither printed output nor
    code is sent.

    Raises:
        ValueError: wandb refuses, for example without an account or for a project's name.
    """
    import wandb  # an extra

    file = folder / "wandb.json"  # by its id a resumed run continues the same W&B run
    run_id = read_json(file)["id"] if file.is_file() else secrets.token_hex(4)
    try:
        wandb.init(
            project=project,
            name=folder.resolve().name,
            id=run_id,
            resume="allow",
            dir=str(folder),
            config=flags,
            allow_val_change=True,
            sync_tensorboard=True,
            settings=wandb.Settings(console="off", disable_git=True, save_code=False),
        )
    except wandb.errors.Error as error:
        raise ValueError(f"--wandb {project}: {' '.join(str(error).split())}") from error
    write_json(file, dict(id=run_id))
