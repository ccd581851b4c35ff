"""Policies: models that answer prompts and can be trained."""
