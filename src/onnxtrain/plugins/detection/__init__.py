"""Object detection: the losses of YOLO and DETR, and mean average precision."""

from onnxtrain.errors.registries import register_loss, register_metric


def register() -> None:
    """Add the losses and metrics of detectors."""
    register_loss("yolo", f"{__name__}.losses:YOLO")
    register_loss("detr", f"{__name__}.losses:DETR")
    register_metric("map", f"{__name__}.metrics:MAP")
    register_metric("map_50", f"{__name__}.metrics:MAP_50")
