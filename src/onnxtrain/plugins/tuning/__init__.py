"""Measurements around a training: the range of learning rates, the temperature of a classifier."""
