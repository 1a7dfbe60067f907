"""Find the outputs and inputs of the matrix that a stored weight is, for blocks of weights and n of m weights.

A linear layer is a matrix [outputs, inputs] whichever way round the file stores it. The operator that reads a tensor
decides which axes are which:

| reader | stored axes |
|---|---|
| MatMul, second operand; Attention | [..., inputs, outputs] |
| MatMul, first operand | [..., outputs, inputs] |
| Gemm, second operand | [inputs, outputs], or [outputs, inputs] where the node transposes it |
| Conv, DeformConv | [outputs, inputs, kernel...] |
| ConvTranspose | [inputs, outputs, kernel...] |
| RNN, GRU, LSTM; MoE | [..., outputs, inputs] |
| Einsum | summed labels are inputs, labels of the output are outputs |
| Gather (an embedding) | [inputs, outputs] |

The inputs of a convolution are its channels at each position of the kernel, channels innermost.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxtrain.errors import OptionError
from onnxtrain.graph.domains import MICROSOFT_DOMAIN
from onnxtrain.graph.layers import Axes, constant_values, follows, form_of, moved, reads_transposed
from onnxtrain.graph.value import dimensions
from onnxtrain.parameters.readers import Reader, is_linear, is_lookup

_CONVOLUTIONS = frozenset({"Conv", "DeformConv", "FusedConv", "NhwcConv"})
_TRANSPOSED_CONVOLUTIONS = frozenset({"ConvTranspose", "ConvTransposeWithDynamicPads"})
_STACKED = frozenset({"RNN", "GRU", "LSTM", "MoE"})
_ELEMENTWISE = frozenset(
    {"Identity", "Cast", "CastLike", "QuantizeLinear", "DequantizeLinear", "Mul", "Div", "Add", "Sub", "Where"}
    | {"Clip", "Round", "FakeQuantize"}
)


@dataclass(frozen=True)
class Layout:
    """The matrix that a stored weight is."""

    shape: tuple[int, ...]
    outputs: tuple[int, ...]
    inputs: tuple[int, ...]
    uses: int = 1

    def block(self, outputs: int, inputs: int) -> tuple[int, ...]:
        """Return the size along each stored axis of a block of (outputs, inputs).

        Example:
            >>> Layout((8, 3, 5, 5), (0,), (2, 3, 1)).block(4, 1)
            (4, 1, 1, 1)
            >>> Layout((8, 3, 5, 5), (0,), (2, 3, 1)).block(1, 6)
            (1, 3, 1, 2)
        """
        sizes = [1] * len(self.shape)
        for axes, wanted in ((self.outputs, outputs), (self.inputs, inputs)):
            for axis in reversed(axes):
                sizes[axis] = max(1, min(self.shape[axis], wanted))
                wanted = wanted // sizes[axis]
        return tuple(sizes)

    def rows(self, array: np.ndarray) -> np.ndarray:
        """Return a stored array as rows of inputs, one row for each output."""
        return array.transpose(self._order()).reshape(-1, math.prod(self.shape[axis] for axis in self.inputs))

    def stored(self, rows: np.ndarray) -> np.ndarray:
        """Return rows of inputs in the form of the stored array: the inverse of :meth:`rows`."""
        order = self._order()
        return rows.reshape([self.shape[axis] for axis in order]).transpose(np.argsort(order))

    def _order(self) -> list[int]:
        rest = [axis for axis in range(len(self.shape)) if axis not in self.inputs]
        return [*rest, *self.inputs]


def product_layouts(model: ir.Model, names: Sequence[str]) -> dict[str, Layout]:
    """Return the layouts of weights by name."""
    found = {}
    for name in names:
        value = model.graph.initializers[name]
        shape = tuple(size for size in dimensions(value) or () if isinstance(size, int))
        layout = next(_layouts(value, shape, model), None)
        if layout is None:
            readers = ", ".join(sorted({node.op_type for node, _ in value.uses()})) or "nothing"
            raise OptionError(
                f"Blocks and n of m weights need the outputs and inputs of {name!r}, of shape {shape}, which is read "
                f"by {readers}: that does not tell which axes they are; choose other parameters with patterns "
                "(tensors= of prune, sparsify= of Trainer)."
            ).about(name, got=shape)
        found[name] = layout
    return found


def _layouts(value: ir.Value, shape: tuple[int, ...], model: ir.Model) -> Iterator[Layout]:
    """Yield the layouts that the readers of a tensor tell: those of products before those of lookups."""
    lookups = []
    for (node, index), axes in _readers(value, tuple(range(len(shape))), model):
        roles = _roles(node, index, len(axes))
        if roles is None:
            continue
        by_role = {role: [axes[i] for i, own in enumerate(roles) if own == role] for role in "oik"}
        outputs, channels, kernel = ([axis for axis in by_role[role] if axis is not None] for role in "oik")
        layout = Layout(shape, tuple(outputs), (*kernel, *channels), _uses(node, index))
        if is_lookup((node, index)):
            lookups.append(layout)
        else:
            yield layout
    yield from lookups


def _readers(value: ir.Value, axes: Axes, model: ir.Model) -> Iterator[tuple[Reader, Axes]]:
    """Yield the nodes that read a value as a weight, with the stored axis of each axis that they see."""
    waiting, seen, constant = [(value, axes)], {value}, constant_values(model)
    for current, own in waiting:
        for node, index in current.uses():
            function = model.functions.get(node.op_identifier())
            if function is not None:
                reached = [(formal, own) for formal in function.inputs[index : index + 1]]
            elif is_linear((node, index)) or is_lookup((node, index)):
                yield (node, index), own
                continue
            else:
                # After arithmetic with data the values are no weights.
                passed = node.outputs[:1] if follows(node, constant) else []
                reached = [(output, moved) for output in passed if (moved := _moved(node, current, own))]
            waiting += [item for item in reached if item[0] not in seen]
            seen.update(item[0] for item in reached)


def _moved(node: ir.Node, value: ir.Value, axes: Axes) -> Axes | None:
    """Return the stored axes of a node's output; ``None`` where it mixes them."""
    if node.domain not in ("", MICROSOFT_DOMAIN):
        return None
    before, after = dimensions(value), dimensions(node.outputs[0])
    if node.op_type in _ELEMENTWISE and (before == after or after is None):
        return axes
    return moved(node, value, axes)


def _roles(node: ir.Node, index: int, rank: int) -> str | None:
    """Return a letter for each axis of a weight: o(utput), i(nput), k(ernel) or n, one of several matrices."""
    operator = node.op_type
    if rank < 2:
        return None
    alike = (
        "Conv" if operator in _CONVOLUTIONS else "ConvTranspose" if operator in _TRANSPOSED_CONVOLUTIONS else operator
    )
    form = form_of(alike, {name: given.value for name, given in node.attributes.items()}) if index == 1 else None
    if form is not None:
        letters = ["n" if form.channels < 0 else "k"] * rank
        letters[form.outputs], letters[form.inputs] = "o", "i"
        return "".join(letters)
    if operator == "Einsum":
        return _einsum_roles(node, index)
    if is_lookup((node, index)):
        axis = node.attributes.get_int("axis", 0) % rank
        return "".join("i" if position == axis else "o" for position in range(rank))
    outputs_last = index == 1 and operator not in _STACKED
    if index < 2 and reads_transposed(node, index):
        outputs_last = not outputs_last
    return "n" * (rank - 2) + ("io" if outputs_last else "oi")


def _einsum_roles(node: ir.Node, index: int) -> str | None:
    left, arrow, output = node.attributes["equation"].as_string().replace(" ", "").partition("->")
    terms = left.split(",")
    if "." in left or not arrow:
        return None
    others = "".join(term for position, term in enumerate(terms) if position != index)
    return "".join("i" if label not in output else "n" if label in others else "o" for label in terms[index])


def _uses(node: ir.Node, index: int) -> int:
    """Return how often one example multiplies each weight."""
    operator = node.op_type
    if is_lookup((node, index)):
        return 0
    if operator in _CONVOLUTIONS or operator in _TRANSPOSED_CONVOLUTIONS:
        sized = node.outputs[0] if operator in _CONVOLUTIONS else node.inputs[0]
        shape = (None if sized is None else dimensions(sized)) or ()
        counted: Sequence[object] = shape[1:-1] if operator == "NhwcConv" else shape[2:]
    elif operator in ("RNN", "GRU", "LSTM"):
        counted = ((None if node.inputs[0] is None else dimensions(node.inputs[0])) or ())[:1]
    else:
        data = node.inputs[1 - index] if len(node.inputs) > 1 and operator != "MoE" else node.inputs[0]
        counted = ((None if data is None else dimensions(data)) or ())[1:-1]
    return math.prod(size for size in counted if isinstance(size, int))
