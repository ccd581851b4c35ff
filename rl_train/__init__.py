"""Reinforcement learning of Sa2VA by closed mask-caption cycles."""
