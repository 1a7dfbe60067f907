"""ONNX's reference evaluator, completed by the operators that gradient graphs need."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from onnx.reference.ops.op_grid_sample import GridSample as SingleGridSample
from onnx.reference.ops.op_loop import Loop as StackingLoop
from onnx.reference.ops.op_scan import Scan as ForwardScan

_PLACEMENT = ("scan_input_axes", "scan_input_directions", "scan_output_axes", "scan_output_directions")


class Scan(ForwardScan):
    """Scan along any axis in either direction; ONNX's own: the first, forward (workarounds: evaluated Scan)."""

    def __init__(self, onnx_node: onnx.NodeProto, run_params: dict[str, Any]) -> None:
        plain = onnx.NodeProto()
        plain.CopyFrom(onnx_node)
        del plain.attribute[:]
        plain.attribute.extend(a for a in onnx_node.attribute if a.name not in _PLACEMENT)
        super().__init__(plain, run_params)  # type: ignore[no-untyped-call]
        self._scanned: int = next(a.i for a in onnx_node.attribute if a.name == "num_scan_inputs")
        given = {a.name: list(a.ints) for a in onnx_node.attribute if a.name in _PLACEMENT}
        self._placement = [given.get(name) for name in _PLACEMENT]

    def _run(self, *args: np.ndarray, **options: Any) -> tuple[np.ndarray, ...]:
        axes_in, directions_in, axes_out, directions_out = self._placement
        states = len(args) - self._scanned
        inputs = list(args)
        for index in range(self._scanned):
            array = np.moveaxis(inputs[states + index], axes_in[index] if axes_in else 0, 0)
            inputs[states + index] = array[::-1] if directions_in and directions_in[index] else array
        outputs = list(super()._run(*inputs, **options))  # type: ignore[no-untyped-call]
        for index in range(len(outputs) - states):
            array = outputs[states + index]
            array = array[::-1] if directions_out and directions_out[index] else array
            outputs[states + index] = np.moveaxis(array, 0, axes_out[index] if axes_out else 0)
        return tuple(outputs)


class Loop(StackingLoop):
    """Loop as specified: a new axis, and a condition that may be left out (workarounds: evaluated Loop)."""

    def _run(  # type: ignore[override]
        self,
        count: np.ndarray | None,
        condition: np.ndarray | None,
        *initial: np.ndarray,
        context: dict[str, Any] | None = None,
        **options: Any,
    ) -> tuple[np.ndarray, ...]:
        loop: Any = self
        body, states = loop.body, list[Any](initial)
        names, going, number = body.input_names, condition is None or bool(condition), 0
        collected: list[list[np.ndarray]] = [[] for _ in range(self.K)]
        while going and (count is None or number < int(count)):
            values = [np.asarray(number, dtype=np.int64), np.asarray(True), *states]
            feeds = {**(context or {}), **dict(zip(names, values, strict=True))}
            results = loop._run_body(feeds, bindings=options.get("bindings"))
            going, states = bool(results[0]), list(results[1 : 1 + self.N])
            for parts, result in zip(collected, results[1 + self.N :], strict=True):
                parts.append(result)
            number += 1
        return (*states, *(np.stack(parts) if parts else np.zeros((0,), np.float32) for parts in collected))


class SequenceInsert(OpRun):
    """SequenceInsert at any position; ONNX's own gets the end wrong (workarounds: evaluated SequenceInsert)."""

    def _run(self, items: list[np.ndarray], item: np.ndarray, position: np.ndarray | None = None) -> tuple[Any, ...]:
        made = list(items)
        index = len(made) if position is None else int(position)
        made.insert(index + len(made) if index < 0 else index, item)
        return (made,)


class SequenceMap(OpRun):
    """SequenceMap over any number of sequences, with values from outside (workarounds: evaluated SequenceMap)."""

    def need_context(self) -> bool:
        """True: the body may read values of the surrounding graph."""
        return True

    def _run(
        self, items: list[np.ndarray], *others: Any, context: dict[str, Any] | None = None, **options: Any
    ) -> tuple[Any, ...]:
        node: Any = self
        names = node.body.input_names
        made: list[list[np.ndarray]] = [[] for _ in node.body.output_names]
        for index, item in enumerate(items):
            values = [item, *(other[index] if isinstance(other, list) else other for other in others)]
            feeds = {**(context or {}), **dict(zip(names, values, strict=True))}
            for parts, result in zip(made, node._run_body(feeds, bindings=options.get("bindings")), strict=True):
                parts.append(result)
        return tuple(made)


class Optional(OpRun):
    """Optional of a present value; ONNX's own makes a sequence of it (workarounds: evaluated Optional)."""

    def _run(self, value: Any, **options: Any) -> tuple[Any, ...]:
        return (value,)


class Erf(OpRun):
    """The error function in the type of its input; ONNX's own computes in float32 (workarounds: evaluated Erf)."""

    def _run(self, x: np.ndarray) -> tuple[Any, ...]:
        return (np.vectorize(math.erf, otypes=[x.dtype])(x),)


class Gelu(OpRun):
    """Gelu in the type of its input; ONNX's own is a function of Erf (workarounds: evaluated Erf)."""

    def _run(self, x: np.ndarray, approximate: str = "none") -> tuple[Any, ...]:
        if approximate == "tanh":
            inner = np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
        else:
            inner = np.vectorize(math.erf, otypes=[x.dtype])(x / math.sqrt(2))
        return ((x * (1 + inner) / 2).astype(x.dtype),)


class GridSample(SingleGridSample):
    """GridSample at points in the type of the grid; ONNX's own rounds them (workarounds: evaluated GridSample)."""

    def _gs_denormalize_coordinates(self, n: Any, dims: Any, align_corners: bool) -> np.ndarray:
        pairs = zip(n, dims, strict=False)
        return np.array([self._gs_denormalize(n=v, length=d, align_corners=align_corners) for v, d in pairs])


class LpNormalization(OpRun):
    """Division by the norm, of absolute values for p = 1 (workarounds: evaluated LpNormalization)."""

    def _run(self, x: np.ndarray, axis: int = -1, p: int = 2) -> tuple[Any, ...]:
        norm = np.linalg.norm(x, ord=p, axis=axis, keepdims=True)
        return (np.divide(x, norm, out=np.zeros_like(x), where=norm != 0),)


_OPERATORS: list[type[OpRun]] = [
    Erf,
    Gelu,
    GridSample,
    Loop,
    LpNormalization,
    Optional,
    Scan,
    SequenceInsert,
    SequenceMap,
]


def evaluator(model: onnx.ModelProto, more: Sequence[type[OpRun]] = ()) -> ReferenceEvaluator:
    """Create a reference evaluator of a model, with further operators if given."""
    return ReferenceEvaluator(model, new_ops=[*_OPERATORS, *more])
