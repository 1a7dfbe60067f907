"""Evaluation and prediction: forward passes."""
