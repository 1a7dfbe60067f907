"""Compile a pruned model: its sparse layers become operators that skip zeros, where these are faster."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import helper

from onnxtrain.data.data_names import read_names, write_names
from onnxtrain.errors import ModelError, OptionError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.model_file.file import ModelFile, serialised
from onnxtrain.model_file.upgrade import upgrade_opset
from onnxtrain.model_file.validity import refuses_invalid
from onnxtrain.model_file.writing import check_writable
from onnxtrain.plugins.sparse.edited import Edited, assign
from onnxtrain.plugins.sparse.empty_units import without_empty_units
from onnxtrain.plugins.sparse.layers import Layer, LayerSearch, Shape
from onnxtrain.plugins.sparse.layouts import with_padded_images, with_transposed_rows
from onnxtrain.plugins.sparse.operators import COST, LEAST_OPSET, PackedWeight, pack
from onnxtrain.plugins.sparse.preparation import as_stored, with_computed_weights, with_dense_layers
from onnxtrain.plugins.sparse.replace import with_pooled_convolutions, with_sparse_layers
from onnxtrain.runtime.native import custom_ops_library
from onnxtrain.runtime.turns import session_of_one_thread, times_in_turns

if TYPE_CHECKING:
    import onnxruntime

_HOPELESS = 0.4
"""Cost of the blocks, relative to all weights one by one, above which no layer was ever faster: not measured."""

_WORTH_IT, _WHOLE = 1.1, 1.0
"""The least speed-up of a layer, measured alone, and of the whole model."""

_DOUBT, _MOST_DOUBTFUL, _BETTER = 1.5, 8, 1.02
"""Layers whose speed-up alone lies between the first and its reciprocal, the slowest of them, are decided in the whole
model, where the cost of a call does not hide them: what must get faster by the last factor."""

_AS_FAST = 1.05
"""The most time with padded images, or with transposed rows, relative to the time without them: they save copies, and
timings have noise."""

_SECONDS = 0.15
"""Seconds of the dense model, or layer, in a measurement."""


@dataclass(frozen=True)
class SparseLayer:
    """A layer that was considered."""

    name: str
    operator: str
    sparsity: float
    block: int
    speedup: float | None
    compiled: bool


@dataclass(frozen=True)
class SparseModel:
    """The result of :func:`compile_sparse`."""

    layers: tuple[SparseLayer, ...]
    speedup: float
    removed_units: int


@checks_arguments
@refuses_invalid()
def compile_sparse(
    model: str | os.PathLike[str] | onnx.ModelProto,
    path: str | os.PathLike[str],
    *,
    sizes: Mapping[str, int] | None = None,
) -> SparseModel:
    """Write a pruned model whose sparse layers run on kernels that skip zeros.

    MatMul, Gemm and Conv nodes with mostly-zero constant weights become nodes ``SparseLinear`` and ``SparseConv`` of
    the domain ``onnxtrain``, with the bias, batch normalization, residual sum and Relu or Clip that follow. Each layer
    is timed both ways on this machine, and stays dense where that is as fast. A compiled model can be given, too: its
    layers are decided anew, for this machine and these ``sizes``.

    A convolution that stays dense in front of Relu and MaxPool with strides of 2 becomes a node ``ConvReluMaxPool``,
    which needs fewer multiplications, where that is faster. A convolution writes its result with the padding that the
    next one reads, and a linear layer leaves it transposed for the next one, also in front of elementwise operators,
    unless that is slower.

    Units whose weights are all zero, and units that nothing reads, are taken out of the model first: what they add to
    the next layer goes into its bias.

    Sessions that register :func:`onnxtrain.custom_ops_library` use the kernels. Other sessions, of any runtime, run the
    same file at about dense speed, since the operators are ONNX functions. NaN and infinity in activations do not
    reach results through weights that are zero, in sessions with the kernels.

    Args:
        model: The pruned model: a path or a loaded model.
        path: The new file.
        sizes: Sizes of the inputs' dynamic dimensions for the timing, by name. A batch size that is not given is 1.

    Returns:
        What became of each layer, and the speed-up of the whole model.

    Raises:
        ModelError: The model cannot be read, or the file cannot be written.
        OptionError: A dynamic dimension has no size, or ``sizes`` names an unknown one or gives no positive integer.
        OnnxTrainError: The native kernels are missing.

    Example:
        >>> import tempfile
        >>> import onnxtrain
        >>> model = onnxtrain.examples.mlp((256, 256, 3))
        >>> weight = next(tensor for tensor in model.graph.initializer if tensor.name == "layer1.weight")
        >>> pruned = np.where(np.arange(256 * 256) % 50 == 0, 1, 0).reshape(256, 256).astype(np.float32)
        >>> weight.CopyFrom(onnx.numpy_helper.from_array(pruned, weight.name))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     result = onnxtrain.compile_sparse(model, f"{folder}/fast.onnx")
        >>> [layer.operator for layer in result.layers]
        ['Gemm', 'Gemm']
    """
    library = str(custom_ops_library())
    check_writable(path)
    file = ModelFile.load(model)
    names = read_names(file)
    given = upgrade_opset(with_dense_layers(file.dense().inlined()), LEAST_OPSET)
    feeds = _feeds(given, sizes or {})
    whole, computed = with_computed_weights(given)
    shapes = _shapes(whole)
    proto = without_empty_units(whole, shapes)
    removed = _units(LayerSearch(whole.graph, shapes).layers())
    shapes = _shapes(proto)
    layers = list(LayerSearch(proto.graph, shapes).layers())
    removed -= _units(layers)
    packed = [pack(layer.matrix) for layer in layers]
    tried = [index for index, weight in enumerate(packed) if _relative_cost(weight) <= _HOPELESS]
    activations = _activations(proto, feeds, {name for index in tried for name in layers[index].reads})
    times: dict[int, tuple[float, float]] = {}
    for index in tried:
        found = _layer_models(proto, layers[index], packed[index], activations)
        inputs = {name: activations[name] for name in layers[index].reads}
        times[index] = _times(_session(found[0]), _session(found[1], library), inputs)
    speedups = {index: dense / sparse for index, (dense, sparse) in times.items()}
    chosen = [index for index in tried if speedups[index] >= _WORTH_IT]
    doubtful = [index for index in tried if 1 / _DOUBT < speedups[index] < _DOUBT]

    def with_layers(some: list[int]) -> onnx.ModelProto:
        return with_sparse_layers(proto, [(layers[index], packed[index]) for index in some], shapes) if some else proto

    made = with_layers(chosen)
    session = _session(made, library)
    for index in sorted(doubtful, key=lambda index: -max(times[index]))[:_MOST_DOUBTFUL]:
        other = sorted({*chosen} ^ {index})
        other_made = with_layers(other)
        other_session = _session(other_made, library)
        before, after = _times(session, other_session, feeds)
        if before > _BETTER * after:
            chosen, made, session = other, other_made, other_session
    changes = (
        (partial(with_pooled_convolutions, shapes=shapes), 1 / _BETTER),
        (with_padded_images, _AS_FAST),
        (partial(with_transposed_rows, shapes=shapes), _AS_FAST),
    )
    for change, most in changes if chosen else ():
        if (changed := change(made)) is not None:
            other_session = _session(changed, library)
            before, after = _times(session, other_session, feeds)
            if after < most * before:
                made, session = changed, other_session
    speedup = 1.0
    if chosen or proto is not whole:
        made = as_stored(made, computed)
        session = _session(made, library)
        dense, sparse = _times(_session(given), session, feeds)
        speedup = dense / sparse
        if speedup < _WHOLE:
            made, speedup, chosen, removed = given, 1.0, [], 0
    else:
        made = given
    file.replace_by(path, serialised(made))
    write_names(Path(path), names)
    return SparseModel(
        tuple(
            SparseLayer(
                layer.name,
                layer.nodes[0].op_type,
                layer.sparsity,
                packed[index].block,
                speedups.get(index),
                index in chosen,
            )
            for index, layer in enumerate(layers)
        ),
        speedup,
        removed,
    )


def _units(layers: Iterable[Layer]) -> int:
    return sum(len(layer.matrix) for layer in layers)


def _relative_cost(weight: PackedWeight) -> float:
    return weight.values.size * COST[weight.block] / (weight.outputs * weight.depth)


def _shapes(proto: onnx.ModelProto) -> dict[str, Shape | None]:
    """Return the shapes of values: sizes, symbols, and ``None`` for what is unknown."""
    inferred = onnx.shape_inference.infer_shapes(proto).graph
    return {
        value.name: tuple(dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None for dim in shape.dim)
        for value in (*inferred.input, *inferred.value_info, *inferred.output)
        if value.type.HasField("tensor_type") and (shape := value.type.tensor_type.shape) is not None
        if value.type.tensor_type.HasField("shape")
    }


def _feeds(proto: onnx.ModelProto, sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Return random inputs."""
    for name, given in sizes.items():
        if not isinstance(given, (int, np.integer)) or isinstance(given, bool) or given < 1:
            raise OptionError(f"The size of {name!r} is {given!r}; it needs an integer of at least 1.")
    rng = np.random.default_rng(0)
    feeds, used = {}, set()
    initialized = {tensor.name for tensor in proto.graph.initializer}
    for value in proto.graph.input:
        if value.name in initialized:
            continue
        shape = []
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.HasField("dim_value"):
                shape.append(dim.dim_value)
                continue
            used.add(dim.dim_param)
            size = sizes.get(dim.dim_param, 1 if axis == 0 else None)
            if size is None and not dim.dim_param:
                raise OptionError(
                    f"Axis {axis} of the input {value.name!r} has a dynamic size without a name, so that sizes= cannot "
                    "give it; name the axis or fix its size in the model, for the timing."
                )
            if size is None:
                raise OptionError(
                    f"Axis {axis} of the input {value.name!r} has the dynamic size {dim.dim_param!r}; give the size "
                    f"that it has in use, for the timing: sizes={{{dim.dim_param!r}: 128}}."
                )
            shape.append(size)
        dtype = np.dtype(helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))
        if dtype.kind in "iub":
            feeds[value.name] = np.ones(shape, dtype)
        elif dtype.kind == "f":
            feeds[value.name] = rng.standard_normal(shape).astype(dtype)
        else:
            raise OptionError(
                f"The input {value.name!r} has the type {dtype}; the model is timed on random numbers, so that its "
                "inputs must be numbers."
            )
    if unknown := set(sizes) - used:
        known = ", ".join(sorted(filter(None, used))) or "none"
        raise OptionError(
            f"sizes names {min(unknown)!r}, but the inputs have no dynamic dimension of that name; they have: {known}."
        )
    return feeds


def _activations(proto: onnx.ModelProto, feeds: dict[str, np.ndarray], names: set[str]) -> dict[str, np.ndarray]:
    """Return values of the graph on these inputs."""
    missing = sorted(names - set(feeds))
    if not missing:
        return feeds
    shown = Edited(proto)
    assign(shown.graph.output, (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in missing))
    return feeds | dict(zip(missing, _run(_session(shown.proto), feeds), strict=True))


def _run(session: onnxruntime.InferenceSession, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    try:
        found: list[np.ndarray] = session.run(None, feeds)
    except Exception as error:
        raise ModelError(f"ONNX Runtime cannot run the model on random inputs, to time it: {error}") from error
    return found


def _session(proto: onnx.ModelProto, library: str | None = None) -> onnxruntime.InferenceSession:
    try:
        return session_of_one_thread(serialised(proto), library)
    except Exception as error:
        raise ModelError(f"ONNX Runtime cannot load the model: {error}") from error


def _times(
    dense: onnxruntime.InferenceSession, sparse: onnxruntime.InferenceSession, feeds: dict[str, np.ndarray]
) -> tuple[float, float]:
    """Return the seconds of a call of each."""
    for session in (dense, sparse):
        _run(session, feeds)
    return times_in_turns(dense, sparse, feeds, seconds=_SECONDS)


def _layer_models(
    proto: onnx.ModelProto, layer: Layer, weight: PackedWeight, activations: Mapping[str, np.ndarray]
) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """Return models of one layer, dense and sparse."""
    dense = onnx.ModelProto(ir_version=proto.ir_version, opset_import=proto.opset_import)
    graph = dense.graph
    graph.name = "layer"
    graph.node.extend(layer.nodes)
    read = {name for node in layer.nodes for name in node.input}
    graph.initializer.extend(tensor for tensor in proto.graph.initializer if tensor.name in read)
    constants = [node for node in proto.graph.node if node.op_type == "Constant" and node.output[0] in read]
    for node in reversed(constants):
        graph.node.insert(0, node)
    for name in layer.reads:
        shape = activations[name].shape
        graph.input.append(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape))
    graph.output.append(helper.make_tensor_value_info(layer.y, onnx.TensorProto.FLOAT, None))
    return dense, with_sparse_layers(dense, [(layer, weight)], {})
