"""Small networks that read images, and folders of images for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def model(outputs: dict[str, tuple[list[object], list[onnx.NodeProto]]], weights: dict[str, np.ndarray], image: list):
    """Return a model of one input ``image``."""
    nodes = [node for _, own in outputs.values() for node in own]
    inputs = [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["N", *image])]
    shown = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", *own[0]]) for name, own in outputs.items()]
    initializers = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "pixels", inputs, shown, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def segmenter(channels: int, size: tuple[object, object] = (16, 16), stride: int = 1, seed: int = 0) -> onnx.ModelProto:
    """Return two convolutions to ``logits`` [N, channels, H / stride, W / stride]."""
    rng = np.random.default_rng(seed)
    weights = {
        "first": rng.normal(0, 0.3, (8, 3, 3, 3)).astype(np.float32),
        "second": rng.normal(0, 0.3, (channels, 8, 1, 1)).astype(np.float32),
        "bias": np.zeros(channels, np.float32),
    }
    nodes = [
        helper.make_node("Conv", ["image", "first"], ["hidden"], pads=[1, 1, 1, 1], strides=[stride, stride]),
        helper.make_node("Relu", ["hidden"], ["active"]),
        helper.make_node("Conv", ["active", "second", "bias"], ["logits"]),
    ]
    out = [side // stride if isinstance(side, int) else f"{side}_out" for side in size]
    return model({"logits": ([channels, *out], nodes)}, weights, [3, *size])


def channels_last(channels: int) -> onnx.ModelProto:
    """Return ``segmenter`` with images [N, H, W, 3] and ``logits`` [N, H, W, channels]."""
    inner = segmenter(channels)
    nodes = [*inner.graph.node]
    nodes[0].input[0], nodes[-1].output[0] = "first_channels", "logits_first"
    nodes = [
        helper.make_node("Transpose", ["image"], ["first_channels"], perm=[0, 3, 1, 2]),
        *nodes,
        helper.make_node("Transpose", ["logits_first"], ["logits"], perm=[0, 2, 3, 1]),
    ]
    weights = {each.name: numpy_helper.to_array(each) for each in inner.graph.initializer}
    return model({"logits": ([16, 16, channels], nodes)}, weights, [16, 16, 3])


def regressor(numbers: list[int], size: int = 16, seed: int = 0) -> onnx.ModelProto:
    """Return a linear layer to ``numbers`` [N, ...]."""
    count = int(np.prod(numbers))
    weights = {
        "kernel": np.random.default_rng(seed).normal(0, 0.02, (3 * size * size, count)).astype(np.float32),
        "shape": np.array([-1, *numbers]),
    }
    nodes = [
        helper.make_node("Flatten", ["image"], ["flat"]),
        helper.make_node("MatMul", ["flat", "kernel"], ["row"]),
        helper.make_node("Reshape", ["row", "shape"], ["numbers"]),
    ]
    return model({"numbers": (numbers, nodes)}, weights, [3, size, size])


def slots(classes: int, size: int = 16) -> onnx.ModelProto:
    """Return a model of three slots: ``logits`` [N, 3, classes + 1] and ``boxes`` [N, 3, 4] for ``detr``."""
    weights, outputs = {}, {}
    for name, columns in {"logits": classes + 1, "boxes": 4}.items():
        rng = np.random.default_rng(columns)
        weights[f"{name}_kernel"] = rng.normal(0, 0.02, (3 * size * size, 3 * columns)).astype(np.float32)
        weights[f"{name}_shape"] = np.array([-1, 3, columns])
        nodes = [
            helper.make_node("Flatten", ["image"], [f"{name}_flat"]),
            helper.make_node("MatMul", [f"{name}_flat", f"{name}_kernel"], [f"{name}_row"]),
            helper.make_node("Reshape", [f"{name}_row", f"{name}_shape"], [f"{name}_open"]),
            helper.make_node("Sigmoid" if name == "boxes" else "Identity", [f"{name}_open"], [name]),
        ]
        outputs[name] = [3, columns], nodes
    return model(outputs, weights, [3, size, size])


def write_squares(folder: Path, count: int, size: tuple[int, int] = (20, 24), seed: int = 0) -> list[np.ndarray]:
    """Write images with a bright square to ``images`` and its pixels to ``masks``; return the masks."""
    from PIL import Image

    rng = np.random.default_rng(seed)
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    masks = []
    for index in range(count):
        image, mask = rng.integers(0, 60, (*size, 3)).astype(np.uint8), np.zeros(size, np.uint8)
        top, left = rng.integers(0, 10, 2)
        image[top : top + 9, left : left + 11] += 150
        mask[top : top + 9, left : left + 11] = 1
        Image.fromarray(image).save(folder / "images" / f"{index:02}.png")
        Image.fromarray(mask).save(folder / "masks" / f"{index:02}.png")
        masks.append(mask)
    return masks
