"""Gradient checks as rows of tables; the tables are the files of the folder ``cases``."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper, numpy_helper

from onnxtrain.runtime.testing import _node_model

Shapes = Literal["static", "dynamic", "unknown"]


@dataclass(frozen=True)
class Case:
    """One node (or model) and its inputs; the fields are the arguments of ``check_gradient``."""

    name: str
    node: onnx.NodeProto | onnx.ModelProto
    inputs: Sequence[np.ndarray | None]
    opset: int = 18
    wrt: Sequence[str] | None = None
    shapes: Sequence[Shapes] = ("static", "dynamic", "unknown")
    precision: Literal["double", "float"] = "double"
    runtime: bool = True
    tolerance: float | None = None

    @property
    def operators(self) -> set[tuple[str, str]]:
        """(domain, operator) of the nodes that the case differentiates."""
        nodes = [self.node] if isinstance(self.node, onnx.NodeProto) else list(self.node.graph.node)
        return {("" if n.domain == "ai.onnx" else n.domain, n.op_type) for n in nodes}


def rows(family: str) -> list[Case]:
    """The rows of one table."""
    found: list[Case] = importlib.import_module(f"autodiff.cases.{family}").CASES
    return found


def all_rows() -> list[Case]:
    """The rows of all tables."""
    families = sorted(path.stem for path in (Path(__file__).parent / "cases").glob("*.py"))
    return [row for family in families for row in rows(family)]


def case(
    operator: str,
    *inputs: np.ndarray | None,
    label: str = "",
    outputs: int | Sequence[str] = 1,
    opset: int = 18,
    domain: str = "",
    wrt: Sequence[str] | None = None,
    shapes: Sequence[Shapes] = ("static", "dynamic", "unknown"),
    precision: Literal["double", "float"] = "double",
    runtime: bool = True,
    tolerance: float | None = None,
    **attributes: object,
) -> Case:
    """Create a case of a single node with inputs named a, b, c ... and outputs y0, y1 ... (or as given)."""
    names = ["" if array is None else "abcdefghijkl"[i] for i, array in enumerate(inputs)]
    results = [f"y{i}" for i in range(outputs)] if isinstance(outputs, int) else list(outputs)
    node = helper.make_node(operator, names, results, domain=domain, **attributes)
    name = f"{operator}-{label}" if label else f"{operator}-{opset}"
    return Case(name, node, inputs, opset, wrt, shapes, precision, runtime, tolerance)


def fixed(row: Case) -> Case:
    """Turn the integer and boolean inputs of a row into initializers, so that rules know axes, pads, indices."""
    model = _node_model(row.node, row.inputs, row.opset, row.precision)
    graph = model.graph
    arrays = [array for array in row.inputs if array is not None]
    known = {i.name: a for i, a in zip(graph.input, arrays, strict=True) if a.dtype.kind != "f"}
    graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in known.items())
    for info in [info for info in graph.input if info.name in known]:
        graph.input.remove(info)
    return replace(
        row,
        name=f"{row.name}-constant",
        node=model,
        inputs=[array for array in arrays if array.dtype.kind == "f"],
    )


def normal(*shape: int, seed: int = 0, scale: float = 1.0, shift: float = 0.0) -> np.ndarray:
    """Seeded normal numbers in float64."""
    return np.random.default_rng((seed, *shape)).normal(size=shape) * scale + shift


def apart(*shape: int, seed: int = 0, gap: float = 0.05) -> np.ndarray:
    """Numbers of both signs that differ from each other and from zero by ``gap``: no ties, no kinks near."""
    count = int(np.prod(shape))
    order = np.random.default_rng((seed, *shape)).permutation(count)
    return ((order - count // 2 + 0.5) * gap * 2).reshape(shape)


def gradients_alone(model: onnx.ModelProto) -> onnx.ModelProto:
    """Make the gradients the only outputs of a gradient model, renamed so that they can be differentiated again."""
    working = ir.from_proto(model)
    gradients = [output for output in working.graph.outputs if (output.name or "").endswith("_grad")]
    working.graph.outputs.clear()
    working.graph.outputs.extend(gradients)
    for output in gradients:
        output.name = f"first/{output.name}"
    return ir.to_proto(working)
