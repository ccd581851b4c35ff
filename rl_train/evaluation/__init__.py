"""Evaluation on the evaluation split, its metrics and their intervals."""
