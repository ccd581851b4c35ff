"""A run at Weights & Biases with the metrics, pictures and flags that TensorBoard gets."""

import secrets
import sys
from pathlib import Path

import numpy as np

from rl_train.utils.io import read_json, write_json

RUN_FILE = "wandb.json"  # in the run's folder: its id lets a resumed run continue the same W&B run


class WandbLogger:
    """The W&B run of `folder`: a new one, or the one that a resumed run continues.

    Points may be sent again after a kill; they are the same. Neither printed output nor code is
    sent.

    Raises:
        ValueError: wandb refuses, for example without an account or for a project's name.
    """

    def __init__(self, folder: Path, project: str, flags: dict):
        import wandb  # an extra

        file = Path(folder) / RUN_FILE
        run_id = read_json(file)["id"] if file.is_file() else secrets.token_hex(4)
        try:
            self.run = wandb.init(
                project=project,
                name=Path(folder).resolve().name,
                id=run_id,
                resume="allow",
                dir=str(folder),
                config=flags,
                allow_val_change=True,
                settings=wandb.Settings(console="off", disable_git=True, save_code=False),
            )
        except wandb.errors.Error as error:
            raise ValueError(f"--wandb {project}: {' '.join(str(error).split())}") from error
        self.image = wandb.Image
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step", step_sync=True)
        write_json(file, dict(id=run_id))

    def scalars(self, values: dict[str, float], step: int):
        self.run.log({**values, "step": step})

    def picture(self, name: str, pixels: np.ndarray, step: int):
        """Log an image, (H, W, 3) uint8."""
        self.run.log({name: self.image(pixels), "step": step})

    def close(self):
        """Wait until all is sent or on this disk; a run that ends with an error is "failed"."""
        self.run.finish(exit_code=int(sys.exc_info()[0] is not None))
