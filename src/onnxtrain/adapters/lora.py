"""Low-rank adaptation: y = x W + s x A B with frozen W and trainable A and B."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtrain.adapters.adapter import A, Adapter, Array, B, Entry, concatenated
from onnxtrain.adapters.base_model import BaseModel, chosen_layers
from onnxtrain.adapters.checkpoint import Architecture
from onnxtrain.adapters.emit import Dropout, Emitter, Pair, add_tensor, column_norms
from onnxtrain.adapters.files import SUFFIX, is_adapter_path, unfolded
from onnxtrain.adapters.initial import INITS, Init, Residuals, principal_entry, random_entry
from onnxtrain.adapters.layers import (
    AUTO,
    Layer,
    Target,
    choose_layers,
    find_layers,
    main_output,
    matches,
    refuse_magnitudes,
)
from onnxtrain.adapters.merging import check_mergeable, is_quantized, merged_weights
from onnxtrain.adapters.values import norms
from onnxtrain.editing.working_copy.adaptation import Adaptation
from onnxtrain.editing.working_copy.training_modes import seed_of_node
from onnxtrain.errors import ModelError, OptionError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.operands import Value
from onnxtrain.graph.patterns import no_match
from onnxtrain.model_file.file import ModelFile
from onnxtrain.model_file.large_data import MadeArrays
from onnxtrain.parameters.readers import is_statistic, read_through_identity

_RANK = 8
"""The default rank."""

_APART = 1 << 20
"""Offset of the dropout seeds of adapters, beyond the seeds of the model's own layers."""


@dataclass(frozen=True)
class Slot:
    """One adapter in a graph."""

    target: Target
    scale: float
    alias: str
    magnitude: bool
    start: Entry | None = field(default=None, compare=False)

    @property
    def a(self) -> str:
        """The name of A."""
        return self.target.name + A

    @property
    def b(self) -> str:
        """The name of B."""
        return self.target.name + B

    @property
    def m(self) -> str:
        """The name of the magnitudes."""
        return f"{self.target.name}.lora_magnitude_vector"

    @property
    def names(self) -> list[str]:
        """Names of all its tensors."""
        return [self.a, self.b, *([self.m] if self.magnitude else [])]

    def entry(self, values: Mapping[str, np.ndarray]) -> Entry:
        """Return the adapter with its current values; what is subtracted becomes further columns of A and rows of B."""
        m = np.array(values[self.m]) if self.magnitude else None
        a, b = np.array(values[self.a]), np.array(values[self.b])
        entry = Entry(a, b, self.scale, m, embedding=self.target.layer.is_embedding, alias=self.alias)
        return entry if self.start is None else concatenated([(entry, 1.0), (self.start, -1.0)], self.scale)


@dataclass(frozen=True)
class Attached:
    """The adapters of a working copy."""

    slots: tuple[Slot, ...]
    settings: Adapter
    resumed: tuple[str, ...] = ()
    lr_ratio: float = 1.0

    @property
    def initial(self) -> dict[str, np.ndarray]:
        """Values of the file's initializers that differ from the file."""
        return dict(self.settings.tensors)

    @property
    def weights(self) -> Sequence[str]:
        """Names of the weights that have adapters."""
        return [str(slot.target.layer.weight.name) for slot in self.slots]

    @property
    def parameters(self) -> Sequence[str]:
        """The names of A, B and magnitudes."""
        return [name for slot in self.slots for name in slot.names]

    @property
    def rate_scales(self) -> Mapping[str, float]:
        """Multipliers of the learning rate by name; embeddings have none."""
        slots = [slot for slot in self.slots if not slot.target.layer.is_embedding and self.lr_ratio != 1]
        return {name: float(self.lr_ratio) for slot in slots for name in slot.names if name != slot.a}

    def adapter(self, values: Mapping[str, np.ndarray]) -> Adapter:
        """Return the adapters with their current values."""
        entries = {slot.target.name: slot.entry(values) for slot in self.slots}
        full = {name: array for name, array in values.items() if name not in self.parameters}
        return replace(self.settings, entries=entries, base=None, tensors={**self.initial, **full})

    def writes(self, path: str | os.PathLike[str]) -> bool:
        """Return whether a path names an adapter: an ``.onnx_adapter`` file or a folder."""
        return is_adapter_path(Path(path))

    def check_writes(self, path: str | os.PathLike[str], file: ModelFile, trained: Iterable[str]) -> None:
        """Raise ModelError for a PEFT folder that cannot hold the tensors that are trained in full."""
        names = {*self.initial, *trained}.difference(self.parameters)
        if Path(path).suffix != SUFFIX:
            tensors = {name: file.value(name) for name in names}
            checkpoint = self.settings.checkpoint.completed(file.folder, None)
            BaseModel.of(file).in_modules(replace(self.settings, tensors=tensors), str(path), checkpoint)

    def hints(self, file: ModelFile, trained: Iterable[str]) -> list[str]:
        """Say what a PEFT folder cannot hold, for a model of onnxruntime-genai's builder."""
        checkpoint = self.settings.checkpoint.completed(file.folder, None)
        architecture = Architecture.of(file.names(), file.folder, checkpoint)
        full = {*self.initial, *trained}.difference(self.parameters)
        if not architecture.built or (architecture.known and not full):
            return []
        try:
            self.check_writes("a PEFT folder", file, trained)
        except ModelError as error:
            return [str(error)]
        return []

    def write(
        self,
        path: str | os.PathLike[str],
        file: ModelFile,
        values: Mapping[str, np.ndarray],
        base_model: str | os.PathLike[str] | None = None,
    ) -> None:
        """Write an ``.onnx_adapter`` file, in the element types of the model's layers, or a PEFT folder."""
        targets = [slot.target for slot in self.slots]
        BaseModel.of(file).write(Path(path), self.adapter(values), targets, base_model)

    def check_mergeable(self) -> None:
        """Raise OptionError for an adapter that cannot be merged into its weight."""
        for slot in self.slots:
            check_mergeable(slot.target.layer, requantize=False)

    def merged(self, file: ModelFile, values: Mapping[str, np.ndarray]) -> MadeArrays:
        """Return the weights with the adapters merged into them."""
        entries = self.adapter({name: values[name] for name in self.parameters}).entries
        return merged_weights([(slot.target, entries[slot.target.name]) for slot in self.slots])


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
            1 / rank. "pissa" starts with s A B equal to the ``rank`` largest singular values of W, and subtracts it
            from W, as a constant beside it: y = x W + s · dropout(x) (A B - A₀ B₀) + b. The saved adapter [A, A₀],
            [B, -B₀] has twice the rank, for the unchanged W. "loftq" starts with s A B as the best approximation of
            the error of quantization, W of the ``original`` minus the quantized W; layers that are not quantized
            start as with "kaiming".
        adapter: An ``.onnx_adapter`` file or a PEFT folder to start from. It determines the adapted layers and their
            ranks; a PEFT folder the scale, too. Tensors that were trained in full beside it, as a head, begin with its
            values and are trained again, except those that ``freeze`` names.
        rank_pattern: Ranks of single layers, by patterns as in ``targets``; the first that matches applies.
        alpha_pattern: Alphas of single layers, likewise.
        lr_ratio: The learning rate of B divided by that of A, above 0 (LoRA+). As in PEFT, magnitudes have B's rate.
            Embeddings keep the rate of A.
        original: For "loftq", the float model that the quantized one was made from, with the same names of layers.

    Raises:
        OptionError: A field is outside its range.

    Example:
        >>> Lora(rank=16, targets=["q_proj", "v_proj"]).scale
        1.0

    Source:
        E. Hu et al., "LoRA", 2021. S. Liu et al., "DoRA", 2024. D. Kalajdzievski, "A Rank Stabilization Scaling Factor
        for Fine-Tuning with LoRA", 2023. S. Hayou, N. Ghosh, B. Yu, "LoRA+", 2024. F. Meng, Z. Wang, M. Zhang,
        "PiSSA", 2024. Y. Li et al., "LoftQ", 2023.
    """

    rank: int = _RANK
    alpha: float = 16
    targets: str | Sequence[str] = AUTO
    dropout: float = 0.0
    dora: bool = False
    rslora: bool = False
    init: Init = "kaiming"
    adapter: str | os.PathLike[str] | None = None
    rank_pattern: Mapping[str, int] = field(default_factory=dict, hash=False)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict, hash=False)
    lr_ratio: float = 1.0
    original: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        for option, ranks in (("rank", {"": self.rank}), ("rank_pattern", self._pattern("rank_pattern"))):
            for pattern, rank in ranks.items():
                if isinstance(rank, bool) or not isinstance(rank, int | np.integer) or rank < 1:
                    raise OptionError(
                        f"{_of(option, pattern)} is {rank!r}; it must be an integer of at least 1."
                    ).about(_of(option, pattern), got=rank)
        for option, alphas in (("alpha", {"": self.alpha}), ("alpha_pattern", self._pattern("alpha_pattern"))):
            for pattern, alpha in alphas.items():
                if not _is_number(alpha) or not 0 < alpha < math.inf:
                    raise OptionError(f"{_of(option, pattern)} is {alpha!r}; it must be a number above 0.")
        if not _is_number(self.dropout) or not 0 <= self.dropout < 1:
            raise OptionError(f"dropout of Lora is {self.dropout!r}; it must be at least 0 and below 1.")
        if not _is_number(self.lr_ratio) or not 0 < self.lr_ratio < math.inf:
            raise OptionError(f"lr_ratio of Lora is {self.lr_ratio!r}; it must be a number above 0.")
        if self.init not in INITS:
            raise OptionError(f"init of Lora is {self.init!r}; it is {' or '.join(map(repr, INITS))}.")
        if self.init == "loftq" and self.original is None and self.adapter is None:
            raise OptionError(
                'init="loftq" of Lora needs the weights before quantization; give the float model that the quantized '
                "one was made from (original=, --lora-original), or take another init."
            )
        if self.init != "loftq" and self.original is not None:
            raise OptionError(
                f'original of Lora is for init="loftq", but init is {self.init!r}; leave one of them out.'
            )
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
        """Add adapters to the main graph of a working copy, in place."""
        graph = model.graph
        layers = find_layers(model)
        given = self._given(BaseModel(file, graph, layers))
        if given is None:
            chosen = choose_layers(layers, self.targets, main_output(graph, output))
        else:
            chosen = chosen_layers(layers, given[1], str(self.adapter))
        entries = {} if given is None else given[0].entries
        if self.dora or any(entry.magnitude is not None for entry in entries.values()):
            refuse_magnitudes(chosen)
        self._check_patterns(chosen)
        residuals = None
        if self.init == "loftq" and self.original is not None and given is None:
            residuals = self._residuals(chosen, self.original)
        emitter = Emitter(graph, graph.opset_imports[""])
        random = np.random.default_rng([seed % (1 << 63), _APART])
        slots: list[Slot] = []
        for index, layer in enumerate(chosen):
            op = emitter.builder(layer)
            pairs = []
            for target in layer.targets:
                entry, start = self._first(target, entries, residuals, random)
                slot, pair = _slot(op, target, entry, start)
                slots.append(slot)
                pairs.append(pair)
            dropout = Dropout(self.dropout, seed_of_node(seed, _APART + index)) if training and self.drops else None
            emitter.add(op, layer, pairs, dropout=dropout)
        if given is None:
            return Attached(tuple(slots), self._settings(), lr_ratio=self.lr_ratio)
        tensors = _in_types_of(file, given[0].tensors)
        settings = replace(given[0], dropout=self.dropout, tensors=tensors)
        resumed = _assigned(graph, file, given[0], str(self.adapter))
        return Attached(tuple(slots), settings, resumed, self.lr_ratio)

    def _settings(self) -> Adapter:
        """Return the settings of saved adapters."""
        if self.init != "pissa":
            return Adapter({}, self.rank, self.alpha, self.rslora, self.dropout)
        return Adapter({}, 2 * self.rank, self.alpha * (math.sqrt(2) if self.rslora else 2), self.rslora, self.dropout)

    def _pattern(self, option: str) -> dict[str, Any]:
        """Copy a mapping of patterns to values."""
        given = getattr(self, option)
        if not isinstance(given, Mapping) or not all(isinstance(pattern, str) for pattern in given):
            raise OptionError(f"{option} of Lora is {given!r}; it maps patterns of layers to numbers.")
        if given and self.adapter is not None:
            raise OptionError(f"{option} of Lora is given, but the adapter {str(self.adapter)!r} determines its ranks.")
        object.__setattr__(self, option, dict(given))
        return dict(given)

    def _check_patterns(self, chosen: Sequence[Layer]) -> None:
        """Check that each pattern of ranks and alphas matches an adapted layer."""
        names = [target.names for layer in chosen for target in layer.targets]
        for option in ("rank_pattern", "alpha_pattern"):
            for pattern in getattr(self, option):
                if not any(matches(pattern, own) for own in names):
                    first = [own[0] for own in names]
                    raise OptionError(no_match(f"lora_{option}", pattern, "layer that gets an adapter", first))

    def _own(self, target: Target) -> Lora:
        """Return these settings with the rank and alpha of a target."""
        names = target.names
        rank = next((rank for one, rank in self.rank_pattern.items() if matches(one, names)), self.rank)
        alpha = next((alpha for one, alpha in self.alpha_pattern.items() if matches(one, names)), self.alpha)
        return self if (rank, alpha) == (self.rank, self.alpha) else replace(self, rank=rank, alpha=alpha)

    def _residuals(self, chosen: Sequence[Layer], original: str | os.PathLike[str]) -> Residuals:
        if not any(map(is_quantized, chosen)):
            raise OptionError(
                'init="loftq" of Lora approximates the error of quantization, but no adapted layer is quantized; take '
                "another init."
            ).about("init", got="loftq")
        return Residuals(original)

    def _given(self, base: BaseModel) -> tuple[Adapter, list[Target]] | None:
        """Read the adapter to start from, and match it to the layers."""
        if self.adapter is None:
            return None
        adapter, targets = base.read(self.adapter)
        ranks = {entry.rank for entry in adapter.entries.values()}
        if self.rank not in (_RANK, *ranks) and not adapter.folded:  # there it is the scale of the adapter
            raise OptionError(
                f"rank of Lora is {self.rank}, but the adapter {str(self.adapter)!r} has rank "
                f"{' and '.join(map(str, sorted(ranks)))}, which continues; leave rank out."
            )
        return unfolded(adapter, self.scale), targets

    def _first(
        self,
        target: Target,
        given: Mapping[str, Entry],
        residuals: Residuals | None,
        random: np.random.Generator,
    ) -> tuple[Entry, Entry | None]:
        """Return the initial values of a layer's adapter, and the adapter that is subtracted, if any."""
        entry, start, own = given.get(target.name), None, self._own(target)
        if entry is None and self.init == "pissa":
            entry = start = principal_entry(target, own.rank, own.scale)
        if entry is None and residuals is not None:
            entry = residuals.entry(target, own.rank, own.scale)
        if entry is None:
            entry = random_entry(target, own.rank, own.scale, self.init, random)
        if self.dora and entry.magnitude is None:
            first = None if start is not None else entry
            entry = replace(entry, magnitude=norms(target, first).astype(entry.a.dtype))
        return entry, start


def _of(option: str, pattern: str) -> str:
    return f"{option} of Lora" + (f" for {pattern!r}" if pattern else "")


def _in_types_of(file: ModelFile, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Convert values of initializers to the types of the file."""
    dtypes = {name: ir.DataType(file.declared(name).data_type) for name in arrays}
    return {name: array.astype(dtypes[name].numpy(), copy=False) for name, array in arrays.items()}


def _assigned(graph: ir.Graph, file: ModelFile, adapter: Adapter, label: str) -> tuple[str, ...]:
    """Assign an adapter's values to initializers of a working copy, in place; return the names of trainable ones."""
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
            ).about(name, got=original)


def _slot(op: Builder, target: Target, entry: Entry, start: Entry | None) -> tuple[Slot, Pair]:
    """Add the parameters of a layer's adapter to the graph; ``start`` is subtracted as a constant."""
    layer = target.layer
    slot = Slot(target, entry.scale, entry.alias, magnitude=entry.magnitude is not None, start=start)
    a, b = _parameter(op, slot.a, entry.a), _parameter(op, slot.b, entry.b)
    if start is not None:
        both = concatenated([(entry, 1.0), (start, -1.0)], entry.scale)
        a = op.Concat(a, op.constant(start.a), axis=0 if layer.is_convolution else 1).with_shape(both.a.shape)
        b = op.Concat(b, op.constant(-start.b), axis=1 if layer.is_convolution else 0).with_shape(both.b.shape)
    pair = Pair(a, b, entry.scale, target.part)
    if entry.magnitude is not None:
        squares = op.constant(norms(target) ** 2, a.dtype)
        gain = _parameter(op, slot.m, entry.magnitude) / column_norms(op, layer, pair, squares)
        pair = replace(pair, gain=gain.with_shape((target.outputs,)))
    return slot, pair


def _parameter(op: Builder, name: str, array: Array) -> Value:
    return add_tensor(op, name, array, "adapters, or slots for them; give the model without")


def _is_number(given: object) -> bool:
    return isinstance(given, int | float | np.number) and not isinstance(given, bool)
