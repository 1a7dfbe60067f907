"""Crafted model files that each target one weakness: a registry, a model to change, a file to write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser

Make = Callable[[Path], object]
CRAFTED: dict[str, Make] = {}
"""By name, functions that write ``model.onnx`` and its other files to a folder."""

HEAD = '<ir_version: 8, opset_import: ["": 18, "own": 1]>\n'
HUGE = 2**40


def crafted(name: str) -> Callable[[Make], Make]:
    def register(make: Make) -> Make:
        CRAFTED[name] = make
        return make

    return register


def write(folder: Path, model: ModelProto | bytes) -> None:
    data = model if isinstance(model, bytes) else model.SerializeToString()
    (folder / "model.onnx").write_bytes(data)


def text(name: str, ports: str, weights: str, nodes: str) -> None:
    graph = f"{HEAD} f {ports} <{weights}> {{ {nodes} }}"
    CRAFTED[name] = lambda folder: write(folder, parser.parse_model(graph))


def base() -> ModelProto:
    """y = x w, with w [4, 3]."""
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "base",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 3])],
        [numpy_helper.from_array(np.ones((4, 3), np.float32), "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def changed(name: str, change: Callable[[ModelProto], object]) -> None:
    def make(folder: Path) -> None:
        model = base()
        change(model)
        write(folder, model)

    CRAFTED[name] = make
