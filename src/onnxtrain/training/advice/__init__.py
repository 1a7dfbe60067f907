"""Inspect and diagnose a model before training."""
