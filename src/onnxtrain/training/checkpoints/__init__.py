"""Checkpoints of a training, to resume from."""
