"""Saving and resuming a run, and the fingerprint of the base that it stands on."""
