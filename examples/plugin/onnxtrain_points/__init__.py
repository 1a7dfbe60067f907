"""A plugin of onnxtrain: points to fit a model to, with a loss, a metric and a command."""

import onnxtrain


def register() -> None:
    """Tell onnxtrain what there is; a text is imported when it is used."""
    onnxtrain.register_loss("charbonnier", "onnxtrain_points.losses:Charbonnier")
    onnxtrain.register_metric("largest_error", "onnxtrain_points.metrics:largest_error")
    onnxtrain.register_reader("points", "onnxtrain_points.reading:read_points")
    onnxtrain.register_command("points", "onnxtrain_points.command")
