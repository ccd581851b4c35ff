"""Metrics of a step, TensorBoard, pictures, rollout files, Weights & Biases."""
