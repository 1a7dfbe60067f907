"""Trainable parameters of a model: find, name, tie, mask and group them."""
