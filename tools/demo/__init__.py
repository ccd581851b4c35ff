"""The demos: drawn scenes, tiny checkpoints, and how those were trained."""
