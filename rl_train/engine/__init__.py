"""Fast sampling and scoring of a decoder LLM: tensors alone, no task, no image, no rank."""

from rl_train.engine.engine import DelayedCompletions, Engine, ScoreOutput
from rl_train.engine.sampling import Completions, StopText

__all__ = ["ScoreOutput", "Completions", "DelayedCompletions", "Engine", "StopText"]
