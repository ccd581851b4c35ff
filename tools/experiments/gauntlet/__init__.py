"""Gauntlet: what cheap causes gain without training, beside best-of-8 by the true reward."""
