"""Register object detection."""

from onnxtrain.errors.registries import register_loss, register_metric

_HERE = "onnxtrain.plugins.detection"


def register() -> None:
    """Add the losses and metrics of detectors."""
    register_loss("yolo", f"{_HERE}.losses:YOLO")
    register_loss("detr", f"{_HERE}.losses:DETR")
    register_metric("map", f"{_HERE}.metrics:MAP")
    register_metric("map_50", f"{_HERE}.metrics:MAP_50")
