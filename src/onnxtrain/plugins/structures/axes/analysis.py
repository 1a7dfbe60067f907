"""Find the structures of a model, and remove some of them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from onnxtrain.errors import OptionError
from onnxtrain.graph.clone import captured_values, subgraphs
from onnxtrain.graph.layers import computed_constants, follows, layers
from onnxtrain.graph.shapes import fold_sizes, infer_shapes
from onnxtrain.graph.value import Dimension, add_initializer, constant_array, constant_tensor, dimensions, is_float
from onnxtrain.plugins.structures.axes.labels import Axis, Cut, fixed
from onnxtrain.plugins.structures.axes.node import Findings, Node, UnknownShapeError
from onnxtrain.plugins.structures.axes.registry import RULES

_ROUNDS = 8
"""Passes over the graph in which reshapes and grouped convolutions choose the axis that structures lie on."""

CHANGED_OUTPUT = "is an output of the model, whose shape would change"
"""End of the reason why structures on an output stay."""

_QUANTIZED = {
    "DequantizeLinear": ((0, 2, 1),),
    "MatMulInteger": ((0, 2, -2), (1, 3, -1)),
    "ConvInteger": ((0, 2, 0), (1, 3, 0)),
}
"""Input slots of quantized weights and of their zero points, and the axis along which there may be several of these."""


class Analysis(Findings):
    """One pass over a graph, which applies the rules of its operators."""

    def __init__(
        self,
        model: ir.Model,
        choices: dict[ir.Node, int],
        kept_values: set[ir.Value],
        contents: Mapping[ir.Value, np.ndarray],
        *,
        change_outputs: bool,
    ) -> None:
        super().__init__(choices, kept_values, set(model.graph.initializers.values()), contents)
        self.stops: dict[str, str] = {}
        for node in model.graph:
            self._visit(node, model.graph.opset_imports.get(node.domain, 1))
        for value in model.graph.outputs:
            if not change_outputs:
                for axis in self.axes(value):
                    self._lock(axis, f"{value.name!r} {CHANGED_OUTPUT}")

    def _lock(self, axis: Axis, reason: str) -> None:
        if axis.labels is not None:
            self.labels.lock(axis.labels, reason)

    def _visit(self, node: ir.Node, version: int) -> None:
        entry = RULES.find(node.op_type, node.domain, version)
        if not subgraphs(node) and follows(node, self.constants):
            self.constants.update(node.outputs)
        view = Node(node, self, version)
        if entry is not None and entry.function is not None:
            try:
                outputs = entry.function(view)
            except UnknownShapeError as error:
                self._stop(view, f"{view.describe()}: {error}")
            else:
                self._store(view, outputs)
            return
        reason = entry.reason if entry is not None else "no axis rule is known for this operator"
        self.stops.setdefault(f"{node.domain}::{node.op_type}", reason)
        self._stop(view, f"{view.describe()}: {reason}")

    def _store(self, view: Node, outputs: object) -> None:
        assert isinstance(outputs, Sequence)
        several: Sequence[Sequence[Axis]] = [outputs] if all(isinstance(item, Axis) for item in outputs) else outputs
        view.fix_rest()
        for index, value in enumerate(view.ir.outputs):
            sizes = dimensions(value)
            if sizes is None:
                if index < len(several):
                    for axis in several[index]:
                        self._lock(axis, f"the shape of {value.name!r} is not known")
                continue
            axes = list(several[index]) if index < len(several) else [fixed(view.describe()) for _ in sizes]
            assert len(axes) == len(sizes), f"{view.describe()}: {len(axes)} axes for shape {sizes}"
            for position, size in enumerate(sizes):
                axis = axes[position]
                if axis.labels is not None and (size == 1 or (isinstance(size, int) and size != len(axis.labels))):
                    self._lock(axis, f"{view.describe()} leaves one index of it")
                    axes[position] = fixed("its size is 1")
            self.known[value] = axes

    def _stop(self, view: Node, reason: str) -> None:
        for value in (*view.ir.inputs, *captured_values(view.ir)):
            if value is not None and dimensions(value) is not None:
                for axis in self.axes(value):
                    self._lock(axis, reason)
        for value in view.ir.outputs:
            self.known[value] = [fixed(reason) for _ in dimensions(value) or ()]


class Structures:
    """The structures of a model: groups of indices of its tensors that are removed together."""

    def __init__(
        self,
        model: ir.Model,
        analysis: Analysis,
        kept_values: Collection[ir.Value],
        originals: dict[ir.Value, ir.Value],
    ) -> None:
        self.model, self.stops = model, analysis.stops
        self.roots, self.locked = analysis.labels.resolve()
        self.zero_points = _zero_points(model)
        self._analysis, self._kept_values, self._originals = analysis, kept_values, originals

    def parameters(self) -> Iterator[tuple[ir.Value, list[Axis]]]:
        """Initializers with labelled axes, and their axes."""
        for value, axes in self._analysis.known.items():
            if value.is_initializer() and any(axis.labels is not None for axis in axes):
                yield value, axes

    def is_weight(self, value: ir.Value) -> bool:
        """Return whether masking a structure sets its entries of a parameter to zero."""
        return value not in self._kept_values and (is_float(value) or value in self.zero_points)

    def of(self, axis: Axis) -> np.ndarray:
        """Return the structure of each index of an axis."""
        assert axis.labels is not None
        return np.asarray(self.roots[axis.labels])

    def tagged(self, kinds: Collection[str], *, locked: bool = False) -> np.ndarray:
        """Return the structures of these kinds that can be removed, or that cannot."""
        heads = self._of_kind("heads")
        channels = self._of_kind("channels")
        hidden = np.setdiff1d(self._of_kind("hidden"), np.union1d(heads, channels))
        chosen = [
            found for kind, found in (("heads", heads), ("channels", channels), ("hidden", hidden)) if kind in kinds
        ]
        found = np.unique(np.concatenate(chosen)) if chosen else np.zeros(0, np.int64)
        return np.array([root for root in found.tolist() if (root in self.locked) == locked], np.int64)

    def made(self, kind: str) -> list[np.ndarray]:
        """Return the structures along each axis whose indices are structures of this kind."""
        return [self.roots[labels] for labels, tag in self._analysis.tags if tag == kind]

    def _of_kind(self, kind: str) -> np.ndarray:
        found = self.made(kind)
        return np.unique(np.concatenate(found)) if found else np.zeros(0, np.int64)

    def kept(self, removed: Collection[int] | np.ndarray) -> np.ndarray:
        """Return for every label whether it stays when structures are removed."""
        gone = np.zeros(len(self.roots), bool)
        gone[np.asarray(list(removed), np.int64)] = True
        return np.asarray(~gone[self.roots])

    def read(self) -> Iterator[tuple[str, np.ndarray, int, np.ndarray]]:
        """Yield for layers the name of the input, the weight, its axis along the input's channels, their structures."""
        for layer in layers(self.model.graph):
            x, tensor = layer.node.inputs[0], layer.weight.const_value
            if x is None or tensor is None or x not in self._analysis.known or not self.is_weight(layer.weight):
                continue
            axis = layer.outputs if layer.form.groups > 1 else layer.inputs
            if axis is None or (layer.node.op_type == "MatMul" and len(layer.axes) > 2):
                continue
            found = self._analysis.known[x][layer.form.channels]
            if found.labels is not None and len(found.labels) == tensor.shape[axis]:
                yield layer.x, np.asarray(tensor.numpy()), axis, self.of(found)

    def kept_along(self, name: str, position: int, kept: np.ndarray) -> np.ndarray | None:
        """Return which entries of an axis of a value stay; ``None`` where the axis has no structures."""
        axes = next((axes for value, axes in self._analysis.known.items() if value.name == name), None)
        labels = None if not axes else axes[position].labels
        return None if labels is None else np.asarray(kept[labels])

    def parts(self) -> list[np.ndarray]:
        """Return the structures of each axis of each tensor: some of each must stay."""
        axes = {id(axis.labels): axis for _, axis in self._labelled()}
        unique = {tuple(np.unique(self.of(axis)).tolist()) for axis in axes.values()}
        return [np.array(part) for part in sorted(unique)]

    def _labelled(self) -> Iterator[tuple[ir.Value, Axis]]:
        for value, axes in self._analysis.known.items():
            yield from ((value, axis) for axis in axes if axis.labels is not None and axis.labels.size)

    def multiply_adds(self, kept: np.ndarray | None = None) -> int:
        """Count the multiply-adds of matrix multiplications and convolutions; axes of unknown size count once."""
        total = 0
        for factors in self._analysis.costs:
            total += math.prod(_length(factor, kept) for factor in factors)
        return total

    def size(self, kept: np.ndarray | None = None) -> int:
        """Count the elements of all floating-point and quantized parameters."""
        labelled = dict(self.parameters())
        total = 0
        for value in self.model.graph.initializers.values():
            sizes = dimensions(value)
            if sizes is None or not (is_float(value) or value in self.zero_points):
                continue
            axes = labelled.get(value)
            total += math.prod(
                size if axes is None or axes[axis].labels is None else _length(axes[axis], kept)
                for axis, size in enumerate(sizes)
                if isinstance(size, int)
            )
        return total

    def masks(self, removed: Collection[int] | np.ndarray) -> dict[str, np.ndarray]:
        """Return masks of the weights, false at the entries of these structures."""
        kept = self.kept(removed)
        found: dict[str, np.ndarray] = {}
        for value, axes in self.parameters():
            if not self.is_weight(value):
                continue
            mask = np.ones([size for size in dimensions(value) or () if isinstance(size, int)], bool)
            for position, axis in enumerate(axes):
                if axis.labels is not None:
                    stays = kept[axis.labels]
                    mask &= stays.reshape([-1 if other == position else 1 for other in range(mask.ndim)])
            if not mask.all():
                found[str(value.name)] = mask
        return found

    def under(self, masks: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the structures of which every masked entry is false, locked ones included."""
        dead = np.zeros(len(self.roots), bool)
        alive = np.zeros(len(self.roots), bool)
        for value, axes in self.parameters():
            mask = masks.get(str(self._originals.get(value, value).name))
            if mask is None:
                continue
            for position, axis in enumerate(axes):
                if axis.labels is not None:
                    stays = mask.any(axis=tuple(other for other in range(mask.ndim) if other != position))
                    dead[self.of(axis)[~stays]] = True
                    alive[self.of(axis)[stays]] = True
        return np.flatnonzero(dead & ~alive)

    def remove(self, removed: Collection[int] | np.ndarray) -> None:
        """Remove structures from the model, in place; it can be done once."""
        kept = self.kept(removed)
        parameters = list(self.parameters())
        computed = [(value, axes) for value, axes in self._analysis.known.items() if not value.is_initializer()]
        for value, axes in (*parameters, *computed):
            for position, axis in enumerate(axes):
                if axis.labels is not None and axis.labels.size and not kept[axis.labels].any():
                    raise OptionError(
                        f"Nothing would remain of axis {position} of {value.name!r}, and with it of its layer; "
                        "leave at least one structure of every layer."
                    ).about(value.name, got=position)
        cut = Cut(self.model.graph, kept)
        for change in self._analysis.changes:
            change(cut)
        for value, axes in parameters:
            _shorten(value, axes, kept)
        for value, axes in computed:
            if any(axis.labels is not None and not kept[axis.labels].all() for axis in axes):
                sizes = [
                    size if axis.labels is None else None if axis.repeats else _length(axis, kept)
                    for size, axis in zip(value.shape or (), axes, strict=True)
                ]
                value.shape = ir.Shape(sizes)
        _merge_shared(self.model, self._originals)


def find_structures(model: ir.Model, *, change_outputs: bool = False) -> Structures:
    """Find the structures of a model."""
    _inline(model)
    contents = fold_sizes(model)
    _lift_constants(model)
    for value, array in computed_constants(model, weights=False).items():
        if array.size == max(array.shape, default=0) and not value.is_graph_output():  # a vector, such as a bias
            _store(model, value, ir.tensor(array, dtype=value.dtype))
    originals = _split_shared(model)
    choices: dict[ir.Node, int] = {}
    kept_values: set[ir.Value] = set()
    analysis = None
    for _ in range(_ROUNDS):
        before = len(kept_values)
        analysis = Analysis(model, choices, kept_values, contents, change_outputs=change_outputs)
        if not _choose_again(analysis, choices) and len(kept_values) == before:
            break
    assert analysis is not None
    return Structures(model, analysis, kept_values, originals)


def _choose_again(analysis: Analysis, choices: dict[ir.Node, int]) -> bool:
    """Take the next choice of nodes whose present one leaves nothing to remove; return whether there was one."""
    root, locked = analysis.labels.resolve()
    is_locked = np.zeros(len(root) + 1, bool)
    is_locked[list(locked)] = True
    changed = False
    for node, judged in analysis.judged.items():
        useful = False
        for labels in judged:
            found = root[labels]
            free = found[~is_locked[found]]
            useful = useful or (free.size > 0 and np.unique(found).size > 1)
        if not useful and choices.get(node, 0) + 1 < analysis.counts[node]:
            choices[node] = choices.get(node, 0) + 1
            changed = True
    return changed


def _inline(model: ir.Model) -> None:
    """Replace calls of functions by their bodies, and give group norms the shapes that ONNX does not infer."""
    if model.functions:
        InlinePass()(model)
        infer_shapes(model)
    for node in model.graph:
        source, output = node.inputs[0] if node.inputs else None, node.outputs[0]
        unknown = node.op_type == "GroupNormalization" and output.shape is None
        if unknown and source is not None and source.shape is not None:
            output.shape, output.type = source.shape.copy(), source.type
            infer_shapes(model)


def _split_shared(model: ir.Model) -> dict[ir.Value, ir.Value]:
    """Give each reader of a shared vector a copy, in place; return the original of each copy.

    Exporters store equal vectors once, such as the zero biases of untrained layers. Layers that read the same vector
    would otherwise lose the same entries, or none.
    """
    graph = model.graph
    for node in list(graph):
        source = node.inputs[0] if node.op_type == "Identity" and not node.domain else None
        if source is not None and source.is_initializer() and not node.outputs[0].is_graph_output():
            node.outputs[0].replace_all_uses_with(source)
            graph.remove(node, safe=True)
    originals: dict[ir.Value, ir.Value] = {}
    for value in list(graph.initializers.values()):
        sizes, tensor = dimensions(value), constant_tensor(value)
        readers = list(dict.fromkeys(node for node, _ in value.uses()))
        wide = [size for size in sizes or () if size != 1]
        if tensor is None or len(readers) < 2 or len(wide) != 1 or not is_float(value) or value in graph.inputs:
            continue
        for number, node in enumerate(readers[1:], 2):
            name = f"{value.name}/{number}"
            while name in graph.initializers:
                name += "'"
            copy = add_initializer(graph, ir.tensor(np.asarray(tensor.numpy()), dtype=tensor.dtype, name=name))
            for index, read in enumerate(node.inputs):
                if read is value:
                    node.replace_input_with(index, copy)
            originals[copy] = value
    return originals


def _merge_shared(model: ir.Model, originals: dict[ir.Value, ir.Value]) -> None:
    """Share copies that are still equal to each other, in place."""
    found: dict[tuple[ir.Value, tuple[int, ...], bytes], ir.Value] = {}
    for value in (*dict.fromkeys(originals.values()), *originals):
        tensor = constant_tensor(value)
        assert tensor is not None
        array = np.asarray(tensor.numpy())
        first = found.setdefault((originals.get(value, value), array.shape, array.tobytes()), value)
        if first is not value:
            value.replace_all_uses_with(first)
            model.graph.initializers.pop(str(value.name))


def _lift_constants(model: ir.Model) -> None:
    """Turn Constant nodes of the main graph into initializers."""
    for node in list(model.graph):
        if node.op_type != "Constant" or node.domain or node.outputs[0].is_graph_output():
            continue
        output = node.outputs[0]
        tensor = constant_tensor(output)
        if tensor is None or output.name in model.graph.initializers or tensor.dtype == ir.DataType.STRING:
            continue
        _store(model, output, ir.tensor(np.asarray(tensor.numpy()), dtype=tensor.dtype))


def _store(model: ir.Model, output: ir.Value, tensor: ir.TensorProtocol) -> None:
    """Replace the node of a constant by an initializer of its name."""
    node = output.producer()
    assert node is not None
    tensor.name = output.name
    output.replace_all_uses_with(add_initializer(model.graph, tensor))
    model.graph.remove(node, safe=True)


def _zero_points(model: ir.Model) -> dict[ir.Value, np.ndarray]:
    """Return the quantized initializers that nodes read, and their zero points as arrays that broadcast to them."""
    found: dict[ir.Value, np.ndarray] = {}
    for node in model.graph:
        for slot, zero, axis in _QUANTIZED.get(node.op_type, ()):
            value = node.inputs[slot]
            if value is None or not value.is_initializer():
                continue
            given = constant_array(node.inputs[zero]) if len(node.inputs) > zero else None
            points, rank = np.zeros((), np.int64) if given is None else given, len(dimensions(value) or ())
            if points.ndim == 1 and points.size > 1:
                place = node.attributes.get_int("axis", axis) % rank
                points = points.reshape([-1 if other == place else 1 for other in range(rank)])
            found[value] = points.reshape(()) if points.size == 1 else points
    return found


def _length(factor: Axis | Dimension, kept: np.ndarray | None) -> int:
    if not isinstance(factor, Axis):
        return factor if isinstance(factor, int) else 1
    if factor.labels is None:
        return 1
    return len(factor.labels) if kept is None else int(kept[factor.labels].sum())


def _shorten(value: ir.Value, axes: Sequence[Axis], kept: np.ndarray) -> None:
    tensor = value.const_value
    assert tensor is not None
    array = np.asarray(tensor.numpy())
    shorter = array
    for position, axis in enumerate(axes):
        if axis.labels is not None and not kept[axis.labels].all():
            shorter = np.compress(kept[axis.labels], shorter, axis=position)
    if shorter is not array:
        value.const_value = ir.tensor(shorter, dtype=tensor.dtype, name=value.name)
        value.shape = ir.Shape(shorter.shape)
