"""A run at Weights & Biases beside TensorBoard: the same curves, pictures and flags."""

import importlib.util
import secrets
import sys
from pathlib import Path

from rl_train.files import read_json, write_json

RUN = "wandb.json"  # in the run's folder: by its id a resume goes on in the same run
STEP = "step"
FORBIDDEN = "/\\#?%:"  # in the name of a project


def check_project(project: str):
    """Raise ValueError if wandb is not installed, or knows no projects of this name."""
    found = importlib.util.find_spec("wandb")
    if found is None or found.origin is None:  # a folder that wandb has left here is no package
        raise ValueError(
            f"--wandb {project}: wandb is not installed; pip install wandb, or leave the flag out: "
            "TensorBoard has the same"
        )
    if not project or len(project) > 128 or set(FORBIDDEN) & set(project):
        raise ValueError(f"--wandb {project!r}: 1 to 128 characters, none of {FORBIDDEN}")


class Mirror:
    """The run of `folder` at Weights & Biases, a new one or that which a resume goes on with.

    Points may come again after a kill; they are the same. Neither what is printed nor code is
    sent.

    Raises:
        ValueError: wandb refuses, as without an account; its sentence says why.
    """

    def __init__(self, folder: Path, project: str, flags: dict):
        import wandb  # an extra

        file = Path(folder) / RUN
        run_id = read_json(file)["id"] if file.is_file() else secrets.token_hex(4)
        quiet = dict(console="off", disable_git=True, save_code=False)
        try:
            self.run = wandb.init(
                project=project,
                name=Path(folder).resolve().name,
                id=run_id,
                resume="allow",
                dir=str(folder),
                config=flags,
                allow_val_change=True,
                settings=wandb.Settings(**quiet),
            )
        except wandb.errors.Error as error:
            sentence = " ".join(str(error).split())
            raise ValueError(f"--wandb {project}: {sentence}") from error
        self.image = wandb.Image
        self.run.define_metric(STEP)
        self.run.define_metric("*", step_metric=STEP, step_sync=True)
        write_json(file, dict(id=run_id))

    def scalars(self, values: dict[str, float], step: int):
        self.run.log({**values, STEP: step})

    def picture(self, name: str, pixels, step: int):
        """Log an image, (H, W, 3) uint8."""
        self.run.log({name: self.image(pixels), STEP: step})

    def close(self):
        """Wait until all is sent, or on this disk; a run that ends with an error is "failed"."""
        self.run.finish(exit_code=int(sys.exc_info()[0] is not None))
