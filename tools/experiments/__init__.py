"""Experiments over many runs: sweeps, cross-play, baselines, benchmarks of captions."""
