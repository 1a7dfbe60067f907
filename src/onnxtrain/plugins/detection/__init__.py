"""Object detection: the losses of YOLO and DETR, and mean average precision."""
