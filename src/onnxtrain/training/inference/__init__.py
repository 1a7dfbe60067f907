"""The forward pass: evaluation and prediction."""
