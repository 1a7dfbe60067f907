"""Tensors that are trained in full beside adapters: their names and layouts in PyTorch, which PEFT folders hold.

PEFT saves whole modules (``modules_to_save``). An initializer belongs to one if it is the weight or bias of a layer, or
a vector with a module path for a name, as scales and running statistics of normalizations have.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from onnxtrain.adapters.adapter import Adapter, Array
from onnxtrain.adapters.checkpoint import Architecture, in_checkpoints
from onnxtrain.adapters.layers import Layer, source
from onnxtrain.adapters.merging import initializers_of
from onnxtrain.adapters.peft import COUNTER, WRAPPED
from onnxtrain.adapters.values import evaluate
from onnxtrain.errors import ModelError
from onnxtrain.graph.domains import REPLACED_WEIGHT
from onnxtrain.graph.layers import reads_transposed
from onnxtrain.graph.value import dimensions, is_float
from onnxtrain.model_file.exporters import NameOrigin, module_of, origin_of
from onnxtrain.parameters.names import module_paths
from onnxtrain.parameters.readers import NORMALIZATIONS, read_through_identity


@dataclass(frozen=True)
class ModuleTensor:
    """A tensor of a PyTorch module, and the initializer that holds it."""

    names: tuple[str, ...]
    initializer: ir.Value
    view: ir.Value
    transposed: bool = False
    kind: str = ""
    offset: float = 0.0

    @property
    def is_numbered(self) -> bool:
        """Return whether no module is known that its first name belongs to: it is a number behind another one."""
        return len(self.names) > 1 and re.fullmatch(r"\.\d+", self.module.removeprefix(self._second)) is not None

    @property
    def word(self) -> str:
        """Its name in the module."""
        return self.names[0].rpartition(".")[2]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the initializer."""
        return tuple(int(size) for size in dimensions(self.initializer) or () if isinstance(size, int))

    @property
    def module(self) -> str:
        """The module that has it."""
        return self.names[0].rpartition(".")[0]

    @property
    def _second(self) -> str:
        return self.names[1].rpartition(".")[0]

    def in_checkpoint(self, array: Array | None = None) -> Array:
        """Convert a value of the initializer, by default its own, to PyTorch's layout, in float32 or wider."""
        found = evaluate(self.view, array)
        found = found - found.dtype.type(self.offset) if self.offset else found
        return found.T if self.transposed else found.reshape(-1) if self._is_bias else found

    def in_model(self, array: Array, label: str) -> Array:
        """Convert a value from PyTorch's layout to a value of the initializer."""
        shape = tuple(int(size) for size in dimensions(self.view) or () if isinstance(size, int))
        wanted = shape[::-1] if self.transposed else (int(np.prod(shape)),) if self._is_bias else shape
        if array.shape != wanted:
            raise ModelError(
                f"{label!r} has {self.names[0]!r} of the shape {array.shape}, but the model's is {wanted}; give the "
                "model that it was trained on."
            )
        array = array + np.float32(self.offset) if self.offset else array
        found, _ = initializers_of(self.view, array.T if self.transposed else array.reshape(shape))
        return found[str(self.initializer.name)]

    @property
    def _is_bias(self) -> bool:
        return self.names[0].endswith(".bias")


def module_tensors(value: ir.Value, layers: Iterable[Layer], architecture: Architecture) -> list[ModuleTensor]:
    """Return the tensors of PyTorch modules that an initializer holds: several if modules share it, none if unknown."""
    if architecture.is_norm(str(value.name)):
        if not architecture.norms:
            return []
        names = (architecture.in_checkpoint(str(value.name)), str(value.name))
        return [ModuleTensor(names, value, value, offset=architecture.offset if names[0].endswith(".weight") else 0.0)]
    found, readers = [], 0
    for layer in layers:
        if layer.weight is value:
            if not _is_plain(layer) or architecture.packs(layer.name):
                return []
            own, view = names_in_checkpoint(layer, "weight", architecture), layer.views[0]
            transposed = layer.kind not in ("Gather", "Conv") and not reads_transposed(layer.node)
            found.append(ModuleTensor(own, value, view, transposed, layer.kind))
            readers = max(readers, layer.readers)
        elif bias_of(layer) is value:
            if layer.parts or not _is_added_once(layer):
                return []
            found.append(ModuleTensor(names_in_checkpoint(layer, "bias", architecture), value, value, kind=layer.kind))
            readers = max(readers, len(value.uses()))
    if found:
        return found if readers <= len(found) else []
    paths = (str(value.name),) if origin_of(str(value.name)) is NameOrigin.MODULE else module_paths(value)
    reading = read_through_identity(value)
    if len(dimensions(value) or ()) != 1 or len(reading) != 1 or len(paths) != 1 or "." not in paths[0]:
        return []
    # Exporters compute the sum with the offset of a norm, unless the graph does.
    is_sum = re.search(r"norm\.weight$", paths[0]) is not None and reading[0][0].op_type != "Add"
    return [ModuleTensor(paths, value, value, offset=architecture.offset if is_sum else 0.0)]


def names_in_checkpoint(layer: Layer, word: str, architecture: Architecture) -> tuple[str, ...]:
    """Return the names of the weight or bias of a layer, the checkpoint's first."""
    replaced = layer.node.metadata_props.get(REPLACED_WEIGHT, "")
    module = in_checkpoints(module_of(layer.node.name or "", layer.node.metadata_props))
    if origin_of(replaced) is NameOrigin.MODULE:
        first = [replaced.rpartition(".")[0]]
    elif module and not layer.name.startswith(f"{module}."):  # the weight of two modules has the name of one
        first = [module]
    else:
        first = []
    modules = dict.fromkeys([*map(architecture.in_checkpoint, first or layer.names[:1]), *first, *layer.names])
    views = layer.views[:-1] if word == "weight" else ()  # of which one may be a tied tensor
    return (*(f"{module}.{word}" for module in modules), *(str(value.name) for value in views))


def _is_plain(layer: Layer) -> bool:
    """Return whether a layer multiplies with the weight of one module, stored as floating-point values."""
    return layer.bits >= 16 and not layer.parts and layer.node.attributes.get_float("alpha", 1.0) == 1


def bias_of(layer: Layer) -> ir.Value | None:
    """Return the initializer that a layer adds."""
    if layer.y is layer.product:
        return layer.inner_bias
    add = layer.y.producer()
    assert add is not None
    return next(value for value in add.inputs if value is not layer.product)


def _is_added_once(layer: Layer) -> bool:
    """Return whether a layer adds its bias without a factor."""
    return layer.kind != "Gemm" or layer.node.attributes.get_float("beta", 1.0) == 1


def for_peft(
    adapter: Adapter, graph: ir.Graph, layers: Sequence[Layer], architecture: Architecture, label: str
) -> dict[str, Array]:
    """Return the tensors that were trained in full under PEFT's names and in PyTorch's layouts.

    PEFT loads whole modules, so that the other tensors of their modules are added with the values of the model, as are
    the heads that PEFT's class of the task always saves.
    """
    architecture.check_known(label)
    if not adapter.tensors and not adapter.checkpoint.task_type:
        return {}
    known = {
        str(name): module_tensors(value, layers, architecture)
        for name, value in graph.initializers.items()
        if is_float(value)
    }
    found: dict[str, Array] = {}
    saved_as: dict[str, str] = {}
    for name, array in adapter.tensors.items():
        tensors = [tensor for tensor in known.get(name, ()) if not tensor.is_numbered]
        if not tensors or {tensor.kind for tensor in tensors} != {tensor.kind for tensor in known[name]}:
            told = "the model does not say which module PEFT would look for"
            if architecture.is_norm(name):
                told = f"checkpoints of {architecture.kind!r} have no parameters of norms"
            elif architecture.packs(name.partition(".MatMul")[0]):
                told = f"checkpoints of {architecture.kind!r} pack it with others"
            raise _not_held(label, name, told)
        given = adapter.aliases.get(name, ())
        for index, tensor in enumerate(tensors):
            saved_name = given[index] if len(given) == len(tensors) else tensor.names[0]
            saved_as[tensor.module] = saved_name.rpartition(".")[0]
            found[saved_name] = tensor.in_checkpoint(array)
    wrapped = {entry.alias or name for name, entry in adapter.entries.items()}
    checkpoint = adapter.checkpoint.for_layers(wrapped)
    saved = {checkpoint.saved_module(module): module for module in saved_as.values() if module not in wrapped}

    def is_saved(module: str) -> bool:
        return checkpoint.is_head(module) or any(module == one or module.startswith(f"{one}.") for one in saved)

    if inside := [module for module in wrapped if is_saved(module)]:
        raise _not_held(
            label, min(adapter.tensors), f"PEFT would save its module whole, and {inside[0]!r} in it is adapted"
        )
    prefix = _prefix(adapter)
    own: dict[str, Array] = {}
    left_out: dict[str, Array] = {}
    for name, tensors in known.items():
        value = graph.initializers[name]
        for tensor in (tensor for tensor in tensors if not tensor.is_numbered):
            module = saved_as.get(tensor.module, tensor.module.removeprefix(prefix))
            if is_saved(module):
                own[f"{module}.{tensor.word}"] = tensor.in_checkpoint()
                left_out |= _siblings(tensor, module, layers)
        paths = () if tensors else (name, *module_paths(value))
        missing = [path for path in paths if is_saved(path.removeprefix(prefix).rpartition(".")[0])]
        if missing and adapter.tensors:
            raise _not_held(label, min(adapter.tensors), f"PEFT would save its module whole, with {missing[0]!r}")
    return {_in_wrapper(name, wrapped): array for name, array in (left_out | own | found).items()}


def _not_held(label: str, name: str, reason: str) -> ModelError:
    return ModelError(
        f"{label!r} cannot hold {name!r}, which is trained beside the adapters: {reason}; save an .onnx_adapter file, "
        "or the whole model as .onnx."
    ).about(label, got=name)


def _siblings(tensor: ModuleTensor, module: str, layers: Sequence[Layer]) -> dict[str, Array]:
    """Return the other tensors of a layer or normalization that exporters leave out or merge with others."""
    found: dict[str, Array] = {}
    if tensor.kind == "Gather":
        return found
    if tensor.kind and tensor.word == "weight":
        layer = next(one for one in layers if one.weight is tensor.initializer and one.kind == tensor.kind)
        bias, size, end = bias_of(layer), layer.outputs, layer.y
        scale = 1.0 if _is_added_once(layer) else layer.node.attributes.get_float("beta", 1.0)
    elif tensor.kind:
        return found
    else:
        node, _ = read_through_identity(tensor.initializer)[0]
        bias, size, end, scale = None, int(np.prod(tensor.shape)), node.outputs[0], 1.0
        slots = NORMALIZATIONS.get((node.domain, node.op_type))
        if slots is not None:
            statistics = (3, 4) if node.op_type == "BatchNormalization" else ()
            for slot, word in zip((*slots, *statistics), _NORMALIZATION, strict=False):
                other = node.inputs[slot] if slot < len(node.inputs) else None
                if other is not None and other is not tensor.initializer and source(other) is not None:
                    found[f"{module}.{word}"] = evaluate(other)
            if node.op_type == "BatchNormalization":
                found[f"{module}.{COUNTER}"] = np.array(0)
            if len(slots) == 1:
                return found
        elif tensor.word != "weight" or node.domain:
            return found
    bias = _added_behind(end, size) if bias is None else bias
    array = np.zeros(size, np.float32) if bias is None or source(bias) is None else evaluate(bias).reshape(-1) * scale
    return {f"{module}.bias": array} | found


_NORMALIZATION = ("weight", "bias", "running_mean", "running_var")


def _added_behind(value: ir.Value, size: int) -> ir.Value | None:
    """Return the initializer of one number per output that is added to a value."""
    for node in value.consumers():
        for other in node.inputs if node.op_type == "Add" and not node.domain else ():
            if other is not None and other is not value and source(other) is not None:
                shape = dimensions(other) or ()
                if size in shape and all(axis in (1, size) for axis in shape):
                    return other
    return None


def _prefix(adapter: Adapter) -> str:
    """Return what module paths of the model have before those of the checkpoint, as the adapted layers show it."""
    for name, entry in adapter.entries.items():
        if entry.alias and name.endswith(f".{entry.alias}"):
            return name.removesuffix(entry.alias)
    return ""


def _in_wrapper(name: str, wrapped: Collection[str]) -> str:
    module, _, word = name.rpartition(".")
    return f"{module}{WRAPPED}.{word}" if module in wrapped else name


def fit_tensors(
    adapter: Adapter, graph: ir.Graph, layers: Sequence[Layer], architecture: Architecture, label: str
) -> Adapter:
    """Return the adapter with the tensors that were trained in full as values of the model's initializers."""
    if not adapter.tensors and not adapter.of_modules:
        return adapter
    tensors, aliases = dict(adapter.tensors), dict(adapter.aliases)
    if adapter.of_modules:
        known = [
            tensor
            for value in graph.initializers.values()
            if is_float(value)
            for tensor in module_tensors(value, layers, architecture)
        ]
        made = _of_modules(adapter, known, label)
        tensors |= {name: array for name, (array, _) in made.items()}
        aliases |= {name: names for name, (_, names) in made.items()}
    found = {name: _checked(name, array, graph, label) for name, array in tensors.items()}
    return replace(adapter, tensors=found, of_modules={}, aliases=aliases)


def _checked(name: str, array: Array, graph: ir.Graph, label: str) -> Array:
    """Return a value in the type of its initializer."""
    advice = "give the model that it was trained on"
    value = graph.initializers.get(name)
    tied = None if value is not None else next((v for node in graph for v in node.outputs if v.name == name), None)
    value = value if value is not None else tied  # a working copy computes tied initializers
    if value is None:
        raise ModelError(f"{label!r} has {name!r}, which is no initializer of the model; {advice}.").about(
            label, got=name
        )
    shape = tuple(dimensions(value) or ())
    if array.shape != shape:
        raise ModelError(
            f"{label!r} has {name!r} of the shape {array.shape}, but the model's is {shape}; {advice}."
        ).about(name, got=array.shape, wanted=shape)
    if value.dtype is None or not is_float(value):
        raise ModelError(f"{label!r} has values for {name!r}, which are not of floating point in the model; {advice}.")
    return array.astype(value.dtype.numpy(), copy=False)


def _of_modules(
    adapter: Adapter, known: Sequence[ModuleTensor], label: str
) -> dict[str, tuple[Array, tuple[str, ...]]]:
    """Return the initializers that tensors of modules belong to: value, and the names of its tensors."""
    found: dict[str, tuple[Array, tuple[str, ...]]] = {}
    for name, array in adapter.of_modules.items():
        wanted = name.replace(f"{WRAPPED}.", ".")
        candidates = _matching(known, wanted)
        if not candidates and wanted.endswith(".bias") and not array.any():
            continue  # exporters leave it out
        if len(candidates) != 1:
            raise ModelError(
                f"{label!r} has {wanted!r}, which was trained beside the adapters, but the model has "
                f"{_missing(wanted, candidates, known)}."
            )
        (candidate,) = candidates
        own, value = str(candidate.initializer.name), candidate.in_model(array, label)
        before = found.get(own)
        if before is not None and not np.array_equal(before[0], value):
            raise ModelError(
                f"{label!r} has different values for {before[1][0]!r} and {wanted!r}, which share an initializer of "
                "the model; export a model that has them apart."
            )
        found[own] = value, (*(before[1] if before else ()), wanted)
    if adapter.trained is None:
        return found
    own_values = {str(tensor.initializer.name): tensor.initializer.const_value for tensor in known}
    return {
        name: item
        for name, item in found.items()
        if name in adapter.trained or not _is_value(own_values[name], item[0])
    }


def _is_value(tensor: ir.TensorProtocol | None, array: Array) -> bool:
    """Return whether a tensor has a value already, as have others of the modules that PEFT saves whole."""
    return tensor is not None and np.array_equal(np.asarray(tensor.numpy()), array)


def _missing(wanted: str, candidates: Sequence[ModuleTensor], known: Sequence[ModuleTensor]) -> str:
    """Describe why a tensor belongs to no initializer, and the next step."""
    if candidates:
        return f"{len(candidates)} initializers for it; give the model that it was trained on"
    if wanted.endswith(".bias"):
        return "no initializer for it; export the model with it (exporters leave out biases of zeros)"
    similar = difflib.get_close_matches(wanted, [tensor.names[0] for tensor in known], n=1)
    told = f", whose most similar name is {similar[0]!r}" if similar else ""
    return f"no initializer for it; give the model that it was trained on, not this one{told}"


def _matching(known: Collection[ModuleTensor], name: str) -> list[ModuleTensor]:
    first = [tensor for tensor in known if name == tensor.names[0]]
    exact = first or [tensor for tensor in known if name in tensor.names]
    if exact:
        return exact
    ends = f".{name}"
    return [tensor for tensor in known if any(own.endswith(ends) or name.endswith(f".{own}") for own in tensor.names)]
