"""Evaluation on held-out regions, its metrics and their intervals."""
