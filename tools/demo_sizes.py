"""The demo's two sizes: what their scenes hold, the model, and how long it is warm-started."""

from dataclasses import dataclass

from tools.demo_model import CONFIG, MID_CONFIG
from tools.demo_scenes import MID, TINY, Kind


@dataclass(frozen=True)
class Size:
    kind: Kind  # of scenes
    config: dict  # of the model
    train_scenes: int
    heldout_scenes: int
    warm_start_scenes: int
    warm_start_steps: dict[str, int]  # by part, in order
    batch_size: int  # scenes of a step
    learning_rate: float
    bfloat16: bool  # what the model computes on a GPU; its weights and losses are float32


SIZES = {
    # ships
    "tiny": Size(
        kind=TINY,
        config=CONFIG,
        train_scenes=800,
        heldout_scenes=100,
        warm_start_scenes=1500,
        warm_start_steps=dict(look=900, talk=450, err=360, see=700, draw=900, decide=60),
        batch_size=16,
        learning_rate=1e-3,
        bfloat16=False,
    ),
    # made on a GPU, in minutes
    "mid": Size(
        kind=MID,
        config=MID_CONFIG,
        train_scenes=400,
        heldout_scenes=60,
        warm_start_scenes=3000,
        warm_start_steps=dict(look=600, talk=500, err=180, see=450, draw=800, decide=50),
        batch_size=32,
        learning_rate=4e-4,
        bfloat16=True,
    ),
}
