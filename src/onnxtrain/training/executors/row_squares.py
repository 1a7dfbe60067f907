"""Sums of squares of gradient rows for sharded gradients, bit for bit equal to those of one process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from onnxtrain.distributed.communicator import Communicator
from onnxtrain.graph import Builder
from onnxtrain.lowering.training_info.update import row_axes
from onnxtrain.runtime.options import RuntimeOptions
from onnxtrain.runtime.step import Session, create_session


class Layout(NamedTuple):
    """Layout of a gradient in the array of its bucket."""

    name: str
    begin: int
    shape: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Number of rows; see :func:`~onnxtrain.lowering.training_info.update.row_axes`."""
        return math.prod(self.shape[: row_axes(self.shape)])

    @property
    def columns(self) -> int:
        """Number of elements in a row."""
        return math.prod(self.shape[row_axes(self.shape) :])

    @property
    def axes(self) -> int:
        """Number of axes of the array that is summed along its last one: 2 for rows, 1 for a vector."""
        return 1 + min(1, row_axes(self.shape))


class RowSquares:
    """Sum the squares of the rows of all gradients, which are split into one share per rank.

    A rank sums the rows within its share. A row that crosses the end of a share is sent to all ranks, and each sums it.
    The exchange adds zeros only, which changes no bit, so that the result does not depend on the order of the ranks.
    ONNX Runtime adds up a vector in another order than a row of a matrix, so that each has a session of its own.
    """

    def __init__(
        self,
        buckets: Sequence[Sequence[Layout]],
        communicator: Communicator,
        *,
        dtypes: Sequence[np.dtype[Any]],
        order: Sequence[str],
    ) -> None:
        self._buckets = buckets
        self._communicator = communicator
        self._sessions = {
            (dtype, axes): _session(ir.DataType.from_numpy(dtype), axes)
            for layouts, dtype in zip(buckets, dtypes, strict=True)
            for axes in {layout.axes for layout in layouts}
        }
        first = {
            layout.name: np.zeros(layout.shape[: row_axes(layout.shape)], dtype)
            for layouts, dtype in zip(buckets, dtypes, strict=True)
            for layout in layouts
        }
        self.states = {_squares(name): first[name] for name in order}
        """First values of the sums, by the names of the states that an update reads."""

    def add_up(self, shares: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """Return the sums of squares of all rows of all gradients; all ranks call this together."""
        found: dict[str, np.ndarray] = {}
        for layouts, share in zip(self._buckets, shares, strict=True):
            found |= self._of_bucket(layouts, share)
        return {name: found[name].reshape(first.shape) for name, first in self.states.items()}

    def _of_bucket(self, layouts: Sequence[Layout], share: np.ndarray) -> dict[str, np.ndarray]:
        first = self._communicator.rank * share.size
        sums = [np.zeros(layout.rows, share.dtype) for layout in layouts]
        cut = [[np.zeros(layout.columns, share.dtype) for _ in self._cut(layout, share.size)] for layout in layouts]
        for layout, own, edges in zip(layouts, sums, cut, strict=True):
            start, stop = self._whole_rows(layout, first, first + share.size)
            if start < stop:
                begin = layout.begin + start * layout.columns - first
                rows = share[begin : begin + (stop - start) * layout.columns].reshape(-1, layout.columns)
                own[start:stop] = self._summed(rows, layout)
            for row, edge in zip(self._cut(layout, share.size), edges, strict=True):
                begin = layout.begin + row * layout.columns
                low, high = max(begin, first), min(begin + layout.columns, first + share.size)
                if low < high:
                    edge[low - begin : high - begin] = share[low - first : high - first]
        parts = [*sums, *(edge for edges in cut for edge in edges)]
        together = np.concatenate(parts) if parts else np.zeros(0, share.dtype)
        self._communicator.all_reduce_(together)
        ends = np.cumsum([part.size for part in parts])
        parts = np.split(together, ends[:-1]) if parts else []
        edges_left = iter(parts[len(layouts) :])
        found = {}
        for layout, own in zip(layouts, parts, strict=False):
            for row in self._cut(layout, share.size):
                own[row] = self._summed(next(edges_left).reshape(1, -1), layout)[0]
            found[_squares(layout.name)] = own
        return found

    @staticmethod
    def _cut(layout: Layout, share: int) -> list[int]:
        """Return the rows that cross a boundary between shares of ``share`` elements."""
        if not layout.columns:
            return []
        end = layout.begin + layout.rows * layout.columns
        bounds = range((layout.begin // share + 1) * share, end, share) if share else ()
        crossed = {
            (bound - layout.begin) // layout.columns for bound in bounds if (bound - layout.begin) % layout.columns
        }
        return sorted(crossed)

    @staticmethod
    def _whole_rows(layout: Layout, first: int, last: int) -> tuple[int, int]:
        """Return the range of rows that lie within the elements from ``first`` to ``last`` of the array."""
        if not layout.columns:
            return 0, 0
        start = max(0, -(-(first - layout.begin) // layout.columns))
        return start, min(layout.rows, (last - layout.begin) // layout.columns)

    def _summed(self, rows: np.ndarray, layout: Layout) -> np.ndarray:
        """Sum the squares of rows [rows, columns] with the same operator as an update of whole gradients."""
        x = rows if layout.axes == 2 else rows.reshape(-1)
        (sums,) = self._sessions[x.dtype, x.ndim].run(None, {"x": x})
        return np.reshape(sums, -1)


def _squares(name: str) -> str:
    return f"{name}/squares"


def _session(dtype: ir.DataType, axes: int) -> Session:
    x = ir.Value(name="x", type=ir.TensorType(dtype), shape=ir.Shape(("rows", "columns")[-axes:]))
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 18}, name="row_squares")
    op = Builder(graph, 18)
    sums = op.ReduceSumSquare(op.wrap(x), op.ints(axes - 1), keepdims=0)
    sums.ir.type, sums.ir.shape = ir.TensorType(dtype), ir.Shape(("rows",)[: axes - 1])
    graph.outputs.append(sums.ir)
    return create_session(ir.Model(graph, ir_version=8), RuntimeOptions(threads=1))
