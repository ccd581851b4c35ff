"""The demo's two sizes: what their scenes hold, the model, and how long it is warm-started."""

from dataclasses import dataclass

from tools.demo.model import CONFIG, MID_CONFIG
from tools.demo.scenes import MID, TINY, Kind


@dataclass(frozen=True)
class Size:
    """Scenes, model and warm start of a demo."""

    kind: Kind  # of scenes
    config: dict  # of the model
    train_scenes: int
    heldout_scenes: int
    warm_start_scenes: int
    dtype: str  # what the model computes in the warm start; what trains is float32
    warm_start: dict[str, dict]  # flags of `rl_train.sft` by part, in order


SIZES = {
    # ships
    "tiny": Size(
        kind=TINY,
        config=CONFIG,
        train_scenes=800,
        heldout_scenes=100,
        warm_start_scenes=1500,
        dtype="float32",
        warm_start=dict(
            hints=dict(max_steps=750, batch_size=64, learning_rate=1e-3),
            learn=dict(max_steps=150, batch_size=64, learning_rate=6e-4),
            err=dict(max_steps=200, batch_size=64, learning_rate=5e-4),
            decide=dict(max_steps=20, batch_size=64, learning_rate=1e-3),
        ),
    ),
    # made on a GPU, in minutes
    "mid": Size(
        kind=MID,
        config=MID_CONFIG,
        train_scenes=400,
        heldout_scenes=60,
        warm_start_scenes=3000,
        dtype="bfloat16",
        warm_start=dict(
            hints=dict(max_steps=900, batch_size=64, learning_rate=4e-4),
            learn=dict(max_steps=300, batch_size=64, learning_rate=3e-4),
            err=dict(max_steps=200, batch_size=96, learning_rate=3e-4),
            decide=dict(max_steps=50, batch_size=96, learning_rate=4e-4),
        ),
    ),
}
