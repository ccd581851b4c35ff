"""Fast sampling and scoring of a decoder LLM: tensors alone, no task, no image, no rank."""

from rl_train.engine.engine import Answers, Engine
from rl_train.engine.tokens import Completions, StopText

__all__ = ["Answers", "Completions", "Engine", "StopText"]
