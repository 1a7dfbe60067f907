"""Low-rank adaptation: y = x W + s x A B with frozen W and trainable A and B."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from onnxtrain.adapters.adapter import Adapter, Array, Entry
from onnxtrain.adapters.attached import Attached, Slot
from onnxtrain.adapters.emit import Dropout, Emitter, Pair, column_norms
from onnxtrain.adapters.files import read_adapter, unfolded
from onnxtrain.adapters.fitting import Place, chosen_layers, fit, name_of
from onnxtrain.adapters.layers import AUTO, Layer, Part, choose_layers, find_layers, main_output, refuse_magnitudes
from onnxtrain.adapters.manifest import check_base
from onnxtrain.adapters.values import norms
from onnxtrain.errors import OptionError
from onnxtrain.ir.builder import Builder
from onnxtrain.ir.value import Value
from onnxtrain.model_file.file import ModelFile
from onnxtrain.spelling import checks_arguments
from onnxtrain.weights.readers import is_statistic, read_through_identity
from onnxtrain.working_copy.adaptation import Adaptation
from onnxtrain.working_copy.training_modes import seed_of_node

_INITS = ("kaiming", "gaussian")
_APART = 1 << 20
"""Offset of the dropout seeds of adapters, beyond the seeds of the model's own layers."""


@checks_arguments
@dataclass(frozen=True)
class Lora(Adaptation):
    """Adapters for layers of a model: y = x W + b becomes y = x W + s · dropout(x) A B + b; only A and B are trained.

    With W [in, out], A is [in, rank] and B [rank, out]; s = alpha / rank, with ``rslora`` alpha / sqrt(rank). B starts
    at zero, so that the adapted model first computes what the model computes. For a convolution, A has the kernel shape
    of W and B is 1x1. For an embedding, A has a row for each row of W, and A starts at zero instead of B.

    With ``dora`` each column of the weight has a trainable magnitude m [out]:
    y = x W' + b with W' = m (W + s A B) / ‖W + s A B‖. The column norms are constants for the gradient. Dropout acts on
    the low-rank part only.

    Attributes:
        rank: Columns of A and rows of B, at least 1.
        alpha: Weight of the adapter, above 0.
        targets: Glob patterns of layer names: names of weights, module paths of the exported program, or node names.
            ``{q,v}`` lists alternatives, and a name without wildcards matches the end of a path. "all-linear" selects
            all linear layers except the output layer. "auto" selects the projections of attention; without any, the
            same as "all-linear"; without these, all convolutions. ``onnxtrain inspect MODEL --adaptable`` lists the
            layers.
        dropout: Probability to drop an element of the adapter's input in training, in [0, 1).
        dora: Train magnitudes, too. Not for embeddings.
        rslora: Use the rank-stabilized scale.
        init: Initialization of A: "kaiming", uniform within ±1 / sqrt(in), or "gaussian", with standard deviation
            1 / rank.
        adapter: An ``.onnx_adapter`` file or a PEFT folder to start from. It determines the adapted layers and their
            ranks; a PEFT folder the scale, too. Tensors that were trained in full beside it, as a head, begin with its
            values and are trained again, except those that ``freeze`` names.

    Raises:
        OptionError: A field is outside its range.

    Example:
        >>> Lora(rank=16, targets=["q_proj", "v_proj"]).scale
        1.0
    """

    rank: int = 8
    alpha: float = 16
    targets: str | Sequence[str] = AUTO
    dropout: float = 0.0
    dora: bool = False
    rslora: bool = False
    init: str = "kaiming"
    adapter: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int | np.integer) or self.rank < 1:
            raise OptionError(f"rank of Lora is {self.rank!r}; it must be an integer of at least 1.")
        if not _is_number(self.alpha) or not 0 < self.alpha < math.inf:
            raise OptionError(f"alpha of Lora is {self.alpha!r}; it must be a number above 0.")
        if not _is_number(self.dropout) or not 0 <= self.dropout < 1:
            raise OptionError(f"dropout of Lora is {self.dropout!r}; it must be at least 0 and below 1.")
        if self.init not in _INITS:
            raise OptionError(f"init of Lora is {self.init!r}; it is {' or '.join(map(repr, _INITS))}.")
        if not self.targets or not all(isinstance(target, str) for target in self.targets):
            raise OptionError(f"targets of Lora is {self.targets!r}; it must be a pattern, or a list of some.")
        if not isinstance(self.targets, str):
            object.__setattr__(self, "targets", tuple(self.targets))  # hashable

    @property
    def scale(self) -> float:
        """Scale s of A B."""
        return float(self.alpha / math.sqrt(self.rank) if self.rslora else self.alpha / self.rank)

    @property
    def drops(self) -> bool:
        """Return whether training applies dropout."""
        return self.dropout > 0

    def attach(self, model: ir.Model, file: ModelFile, *, output: str | None, seed: int, training: bool) -> Attached:
        """Add adapters to a working copy; see :class:`~onnxtrain.working_copy.adaptation.Adaptation`."""
        graph = model.graph
        layers = find_layers(model)
        given = self._given(graph, layers, file)
        if given is None:
            chosen = choose_layers(layers, self.targets, main_output(graph, output))
        else:
            chosen = chosen_layers(layers, given[1], str(self.adapter))
        entries = {} if given is None else given[0].entries
        if self.dora or any(entry.magnitude is not None for entry in entries.values()):
            refuse_magnitudes(chosen)
        emitter = Emitter(graph, graph.opset_imports[""])
        random = np.random.default_rng([seed % (1 << 63), _APART])
        slots: list[Slot] = []
        for place, layer in enumerate(chosen):
            op = emitter.builder(layer)
            pairs = []
            for part in layer.parts or (None,):
                slot, pair = _slot(op, layer, part, self._first(layer, part, entries, random))
                slots.append(slot)
                pairs.append(pair)
            dropout = Dropout(self.dropout, seed_of_node(seed, _APART + place)) if training and self.drops else None
            emitter.add(op, layer, pairs, dropout=dropout)
        settings = Adapter({}, self.rank, self.alpha, self.rslora, self.dropout)
        if given is None:
            return Attached(tuple(slots), settings)
        tensors = _in_types_of(file, given[0].tensors)
        settings = replace(given[0], dropout=self.dropout, tensors=tensors)
        return Attached(tuple(slots), settings, _assigned(graph, file, given[0], str(self.adapter)))

    def _given(self, graph: ir.Graph, layers: Sequence[Layer], file: ModelFile) -> tuple[Adapter, list[Place]] | None:
        """Read the adapter to start from, and match it to the layers."""
        if self.adapter is None:
            return None
        adapter, places = fit(read_adapter(self.adapter), graph, layers, str(self.adapter))
        check_base(adapter.base, file, [layer for layer, _ in places], str(self.adapter))
        return unfolded(adapter, self.scale), places

    def _first(self, layer: Layer, part: Part | None, given: Mapping[str, Entry], random: np.random.Generator) -> Entry:
        """Return the initial values of a layer's adapter."""
        entry = given.get(name_of(layer, part))
        if entry is None:
            a, b = self._matrices(layer, layer.outputs if part is None else part.size, random)
            entry = Entry(a, b, self.scale, embedding=layer.is_embedding)
        if self.dora and entry.magnitude is None:
            magnitude = norms(layer, entry, part).astype(entry.a.dtype)
            entry = replace(entry, magnitude=magnitude)
        return entry

    def _matrices(
        self, layer: Layer, outputs: int, random: np.random.Generator
    ) -> tuple[npt.NDArray[np.floating], npt.NDArray[np.floating]]:
        dtype = np.float64 if layer.y.dtype == ir.DataType.DOUBLE else np.float32
        if layer.is_embedding:
            a = np.zeros((layer.inputs, self.rank), dtype)
            return a, random.standard_normal((self.rank, outputs)).astype(dtype)
        shape = (self.rank, layer.inputs, *layer.window) if layer.window else (layer.inputs, self.rank)
        if self.init == "gaussian":
            a = (random.standard_normal(shape) / self.rank).astype(dtype)
        else:
            bound = 1 / math.sqrt(math.prod((layer.inputs, *layer.window)))
            a = random.uniform(-bound, bound, shape).astype(dtype)
        ones = (1,) * len(layer.window)
        return a, np.zeros((outputs, self.rank, *ones) if layer.window else (self.rank, outputs), dtype)


def _in_types_of(file: ModelFile, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Convert values of initializers to the types of the file."""
    dtypes = {name: ir.DataType(file.declared(name).data_type) for name in arrays}
    return {name: array.astype(dtypes[name].numpy(), copy=False) for name, array in arrays.items()}


def _assigned(graph: ir.Graph, file: ModelFile, adapter: Adapter, label: str) -> tuple[str, ...]:
    """Assign an adapter's values to initializers of a working copy, in place; return the names of trainable ones.

    Raises:
        OptionError: A tied tensor has other values than the one that it is tied to.
    """
    _check_tied(graph, set(file.names()), adapter, label)
    found = []
    for name, array in adapter.tensors.items():
        value = graph.initializers.get(name)
        if value is None:  # computed from the tensor that it is tied to
            continue
        value.const_value = ir.tensor(np.ascontiguousarray(array), name=name)
        if not any(is_statistic(node.op_type, index) for node, index in read_through_identity(value)):
            found.append(name)
    return tuple(found)


def _check_tied(graph: ir.Graph, initializers: Collection[str], adapter: Adapter, label: str) -> None:
    arrays = adapter.tensors
    tied = [node for node in graph if len(node.outputs) == 1 and node.outputs[0].name in initializers]
    for node in tied:
        name, original = str(node.outputs[0].name), str(node.inputs[0].name if node.inputs[0] is not None else "")
        shared = len(adapter.aliases.get(original, ())) > 1  # in a PEFT folder: equal values for both
        if name not in arrays and (shared or original not in arrays):
            continue
        given, first = arrays.get(name), arrays.get(original)
        first = first.T if first is not None and node.op_type == "Transpose" else first
        if given is None or first is None or not np.array_equal(given, first):
            raise OptionError(
                f"tie= gives {name!r} the values of {original!r}, but {label!r} was trained with others for the two; "
                "leave tie= out."
            )


def _slot(op: Builder, layer: Layer, part: Part | None, entry: Entry) -> tuple[Slot, Pair]:
    """Add the parameters of a layer's adapter to the graph."""
    slot = Slot(layer, part, entry.scale, entry.alias, magnitude=entry.magnitude is not None)
    a, b = _parameter(op, slot.a, entry.a), _parameter(op, slot.b, entry.b)
    pair = Pair(a, b, entry.scale, part)
    if entry.magnitude is not None:
        squares = op.constant(norms(layer, None, part) ** 2, a.dtype)
        gain = _parameter(op, slot.m, entry.magnitude) / column_norms(op, layer, pair, squares)
        pair = Pair(a, b, entry.scale, part, gain.with_shape((layer.outputs if part is None else part.size,)))
    return slot, pair


def _parameter(op: Builder, name: str, array: npt.NDArray[np.generic]) -> Value:
    """Add an initializer to the main graph.

    Raises:
        OptionError: The name is taken.
    """
    graph = op.graph
    if name in graph.initializers or any(value.name == name for value in graph.inputs):
        raise OptionError(
            f"The model has a tensor {name!r} already, so that it has adapters, or slots for them; give the model "
            "without."
        )
    tensor = ir.tensor(np.ascontiguousarray(array), name=name)
    value = ir.Value(
        name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape.numpy()), const_value=tensor
    )
    graph.register_initializer(value)
    return op.wrap(value)


def _is_number(given: object) -> bool:
    return isinstance(given, int | float | np.number) and not isinstance(given, bool)
