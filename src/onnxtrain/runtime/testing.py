"""Check gradients numerically: for the rules of this project, and for those that users write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from onnxtrain.autodiff.engine import Backward
from onnxtrain.autodiff.evaluator import evaluator
from onnxtrain.errors import GradientError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.graph import Builder
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.graph.value import is_float
from onnxtrain.lowering.build_gradients import Derivative
from onnxtrain.lowering.pipeline import lower_graph
from onnxtrain.lowering.rules.kernels import resolve_fused
from onnxtrain.runtime.native import custom_ops_library, kernels_available

Arrays = Mapping[str, np.ndarray]


class GradientMismatchError(AssertionError):
    """A gradient differs from its central differences; the message names the input and both values."""


@checks_arguments
@dataclass(frozen=True)
class GradientCheck:
    """The result of a check that passed.

    Attributes:
        wrt: The inputs that were checked.
        worst: Largest error over all directions: absolute difference over max(1, scale of the gradient).
        model: The gradient model that was run.
    """

    wrt: tuple[str, ...]
    worst: float
    model: onnx.ModelProto


@checks_arguments
def check_gradient(
    model: onnx.ModelProto | onnx.NodeProto,
    inputs: Arrays | Sequence[np.ndarray | None],
    *,
    wrt: Sequence[str] | None = None,
    opset: int = 18,
    shapes: Literal["static", "dynamic", "unknown"] = "static",
    precision: Literal["double", "float"] = "double",
    runtime: bool = True,
    directions: int = 2,
    seed: int = 0,
    step: float | None = None,
    tolerance: float | None = None,
) -> GradientCheck:
    """Compare onnxtrain's gradient with central differences along random directions.

    All floating outputs are projected on random weights p to one number, L = sum_k sum(p_k y_k); then for
    random directions d and each input x, <dL/dx, d> must equal (L(x + h d) - L(x - h d)) / 2h. The
    differences and the gradient graph are evaluated in float64 by ONNX's reference evaluator; the gradient
    graph also runs on ONNX Runtime in float32 and must agree, once with and once without native kernels if
    there are kernels for its operators.

    Args:
        model: A model, or one node (its non-empty inputs are then fed in order by ``inputs``).
        inputs: Arrays by name, or in the order of the graph's inputs. Keep them away from kinks.
        wrt: Names of the inputs to differentiate by; default: all floating ones.
        opset: Version of the default domain where a node is given.
        shapes: Shapes given to the gradient builder: all sizes, only ranks (symbols), or none.
        precision: "float" for an operator that the reference evaluator only has in float32.
        runtime: Run the gradient graph on ONNX Runtime, too.
        directions: Number of random directions per input.
        seed: Seed of projections and directions.
        step: h; by default 1e-6 in double, 1e-2 in float.
        tolerance: Largest relative error; by default 1e-6 in double, 2e-2 in float.

    Returns:
        The checked inputs and the errors found.

    Raises:
        GradientMismatchError: A gradient differs from the differences, has the wrong type or shape, or is not finite.
        GradientError: The gradient cannot be built.

    Example:
        >>> from onnx import helper
        >>> node = helper.make_node("Mul", ["a", "b"], ["y"])
        >>> check_gradient(node, [np.ones((2, 3)), np.full(3, 2.0)]).wrt
        ('a', 'b')
    """
    if isinstance(model, onnx.NodeProto):
        model = _node_model(model, inputs, opset, precision)
        inputs = [array for array in inputs if array is not None] if not isinstance(inputs, Mapping) else inputs
    feeds = dict(inputs) if isinstance(inputs, Mapping) else _by_name(model, inputs)
    dtype = np.dtype(np.float64 if precision == "double" else np.float32)
    feeds = {name: _as(array, dtype) for name, array in feeds.items()}
    subject = with_float_type(model, dtype)
    rng = np.random.default_rng(seed)
    names = [name for name, a in feeds.items() if a.dtype == dtype] if wrt is None else list(wrt)
    written = _in_standard_operators(subject)
    outputs = _reference(written, feeds)
    projections = {k: rng.normal(size=y.shape).astype(y.dtype) for k, y in outputs.items() if y.dtype == dtype}
    fused = projected_gradient(subject, names, projections, shapes, kernels=True)
    built = projected_gradient(subject, names, projections, shapes) if _has_fused(fused) else fused
    evaluated = _reference(built, feeds)
    _check_forward(evaluated, outputs, 1e-6 if precision == "double" else 1e-4)
    worst = 0.0
    h = step or (1e-6 if precision == "double" else 1e-2)
    limit = tolerance or (1e-6 if precision == "double" else 2e-2)
    objective = evaluator(written)
    for name in names:
        gradient = evaluated[f"{name}_grad"]
        _check_kind(name, gradient, feeds[name])
        for _ in range(directions):
            worst = max(worst, _compare(objective, feeds, projections, name, gradient, rng, h, limit))
    if runtime:
        _check_runtime(built, feeds, evaluated, names, dtype)
        if _has_fused(fused) and kernels_available():
            _check_runtime(fused, feeds, evaluated, names, dtype)
    return GradientCheck(tuple(names), worst, built)


def _node_model(
    node: onnx.NodeProto, inputs: Arrays | Sequence[np.ndarray | None], opset: int, precision: str
) -> onnx.ModelProto:
    given = [name for name in node.input if name]
    arrays = list(inputs.values()) if isinstance(inputs, Mapping) else [a for a in inputs if a is not None]
    dtype = np.dtype(np.float64 if precision == "double" else np.float32)
    infos = []
    for name, array in zip(given, arrays, strict=True):
        element = helper.np_dtype_to_tensor_dtype(_as(np.asarray(array), dtype).dtype)
        infos.append(helper.make_tensor_value_info(name, element, np.asarray(array).shape))
    domains = {"": opset} | ({node.domain: 1} if node.domain else {})
    imports = [helper.make_opsetid(domain, version) for domain, version in domains.items()]
    outputs = [helper.make_empty_tensor_value_info(name) for name in node.output if name]
    graph = helper.make_graph([node], "check", infos, outputs)
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    inferred = onnx.shape_inference.infer_shapes(model)
    known = {info.name: info for info in inferred.graph.output}
    for output in model.graph.output:
        if known[output.name].type.WhichOneof("value") and known[output.name].type.tensor_type.elem_type:
            output.CopyFrom(known[output.name])
        else:
            element = helper.np_dtype_to_tensor_dtype(dtype)
            output.CopyFrom(helper.make_tensor_value_info(output.name, element, None))
    return model


def _by_name(model: onnx.ModelProto, arrays: Sequence[np.ndarray | None]) -> dict[str, np.ndarray]:
    initializers = {tensor.name for tensor in model.graph.initializer}
    names = [info.name for info in model.graph.input if info.name not in initializers]
    if len(names) != len(arrays):
        raise GradientError(f"The model has {len(names)} inputs {names}, but {len(arrays)} arrays were given.").about(
            names, got=len(arrays), wanted=len(names)
        )
    return {name: np.asarray(array) for name, array in zip(names, arrays, strict=True) if array is not None}


def _as(array: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    array = np.asarray(array)  # arithmetic turns 0-d arrays into NumPy scalars
    return array.astype(dtype) if array.dtype in _SINGLE_AND_DOUBLE else array


@checks_arguments
def with_float_type(model: onnx.ModelProto, dtype: np.dtype[Any]) -> onnx.ModelProto:
    """Copy a model with all its float and double tensors in the type ``dtype``."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    kind = helper.np_dtype_to_tensor_dtype(dtype)
    _retype_graph(result.graph, kind, dtype)
    for function in result.functions:
        _retype_nodes(function.node, kind, dtype)
    return result


_FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE)
_SINGLE_AND_DOUBLE = (np.dtype(np.float32), np.dtype(np.float64))


def _retype_graph(graph: onnx.GraphProto, kind: int, dtype: np.dtype[Any]) -> None:
    for info in (*graph.input, *graph.output, *graph.value_info):
        holder = info.type
        while holder.WhichOneof("value") in ("sequence_type", "optional_type"):
            which = holder.WhichOneof("value")
            holder = holder.sequence_type.elem_type if which == "sequence_type" else holder.optional_type.elem_type
        if holder.tensor_type.elem_type in _FLOATS:
            holder.tensor_type.elem_type = kind
    for tensor in graph.initializer:
        _retype_tensor(tensor, dtype)
    _retype_nodes(graph.node, kind, dtype)


def _retype_nodes(nodes: Sequence[onnx.NodeProto], kind: int, dtype: np.dtype[Any]) -> None:
    for node in nodes:
        if node.op_type == "SequenceEmpty" and not node.attribute:
            node.attribute.append(helper.make_attribute("dtype", onnx.TensorProto.FLOAT))
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.TENSOR:
                _retype_tensor(attribute.t, dtype)
            elif attribute.type == onnx.AttributeProto.GRAPH:
                _retype_graph(attribute.g, kind, dtype)
            elif attribute.name in ("to", "dtype", "stash_type") and attribute.i in _FLOATS:
                attribute.i = kind


def _retype_tensor(tensor: onnx.TensorProto, dtype: np.dtype[Any]) -> None:
    if tensor.data_type in _FLOATS:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(dtype), tensor.name))


def _in_standard_operators(model: onnx.ModelProto) -> onnx.ModelProto:
    """Convert a model for the reference evaluator: operators of this project's domain become standard ones."""
    if not _has_fused(model):
        return model
    working = infer_shapes(ir.from_proto(model))
    resolve_fused(working, Backward(), kernels=False)
    return ir.to_proto(working)


def _reference(model: onnx.ModelProto, feeds: Arrays) -> dict[str, np.ndarray]:
    with np.errstate(all="ignore"):
        arrays = evaluator(model).run(None, dict(feeds))
    return {info.name: np.asarray(array) for info, array in zip(model.graph.output, arrays, strict=True)}


@checks_arguments
def projected_gradient(
    model: onnx.ModelProto,
    names: Sequence[str],
    projections: Arrays,
    shapes: Literal["static", "dynamic", "unknown"] = "static",
    *,
    kernels: bool = False,
) -> onnx.ModelProto:
    """The gradient of sum_k sum(projection_k * output_k) by the named inputs, with fused operators if ``kernels``."""
    working = ir.from_proto(_with_shapes(model, shapes))
    infer_shapes(working)
    graph = working.graph
    op = Builder(graph, working.opset_imports.get("", 1))
    total = []
    by_name = {value.name: value for value in graph.outputs}
    for name, weights in projections.items():
        output = by_name[name]
        if not is_float(output):
            output.dtype = ir.tensor(weights).dtype
        product = (op.wrap(output) * op.constant(weights)).with_shape(weights.shape)
        total.append(op.ReduceSum(product, keepdims=0))
    objective = op.sum_of(total).ir
    inputs = {value.name: value for value in graph.inputs} | dict(graph.initializers)
    lower_graph(working, kernels=kernels, derivative=Derivative(objective, [inputs[name] for name in names]))
    return ir.to_proto(infer_shapes(working))


def _with_shapes(model: onnx.ModelProto, shapes: str) -> onnx.ModelProto:
    """Replace the sizes of inputs and outputs by symbols, or remove their shapes."""
    if shapes == "static":
        return model
    result = onnx.ModelProto()
    result.CopyFrom(model)
    del result.graph.value_info[:]
    for info in (*result.graph.input, *result.graph.output):
        if not info.type.HasField("tensor_type"):
            continue
        tensor = info.type.tensor_type
        if shapes == "unknown" or info in result.graph.output:
            tensor.ClearField("shape")
        elif len(tensor.shape.dim) > 1 or tensor.elem_type not in (onnx.TensorProto.INT32, onnx.TensorProto.INT64):
            # A list of integers keeps its length: for sizes or axes it is a rank, which rules may know.
            for axis, dimension in enumerate(tensor.shape.dim):
                dimension.dim_param = f"{info.name}_{axis}"
    return result


def _check_forward(found: Arrays, expected: Arrays, limit: float) -> None:
    for name, wanted in expected.items():
        error = _relative_error(found[name], wanted)
        if not error <= limit:
            raise GradientMismatchError(
                f"The output {name!r} of the gradient model (shape {found[name].shape}) differs by {error:.2g} of its "
                f"largest value from the model's own (shape {wanted.shape}); differentiation must not change it."
            )


def _relative_error(found: np.ndarray, wanted: np.ndarray) -> float:
    """The largest difference over the larger of one and the largest value; infinite where shapes differ."""
    if found.shape != wanted.shape:
        return float("inf")
    if wanted.dtype.kind != "f":
        return 0.0 if np.array_equal(found, wanted) else float("inf")
    finite = np.isfinite(wanted)
    if not np.array_equal(found[~finite], wanted[~finite], equal_nan=True):
        return float("inf")
    differences = np.abs(found[finite] - wanted[finite])
    return float(np.max(differences, initial=0.0)) / max(1.0, float(np.max(np.abs(wanted[finite]), initial=0.0)))


def _check_kind(name: str, gradient: np.ndarray, x: np.ndarray) -> None:
    if gradient.shape != x.shape or gradient.dtype != x.dtype:
        raise GradientMismatchError(
            f"The gradient of {name!r} is {gradient.dtype} of shape {gradient.shape}; "
            f"the input is {x.dtype} of shape {x.shape}."
        )
    if not np.isfinite(gradient).all():
        raise GradientMismatchError(f"The gradient of {name!r} is not finite: {gradient.reshape(-1)[:8]}.")


def _compare(
    objective: ReferenceEvaluator,
    feeds: Arrays,
    projections: Arrays,
    name: str,
    gradient: np.ndarray,
    rng: np.random.Generator,
    h: float,
    limit: float,
) -> float:
    direction = rng.normal(size=gradient.shape).astype(gradient.dtype)
    if not direction.size:
        return 0.0

    def value(sign: float) -> float:
        moved = {**feeds, name: (feeds[name] + sign * h * direction).astype(gradient.dtype)}
        with np.errstate(all="ignore"):
            outputs = objective.run(list(projections), moved)
        pairs = zip(outputs, projections.values(), strict=True)
        return float(sum(np.sum(np.asarray(y, dtype=np.float64) * p) for y, p in pairs))

    measured = (value(1.0) - value(-1.0)) / (2 * h)
    expected = float(np.sum(gradient.astype(np.float64) * direction))
    scale = max(1.0, abs(measured), float(np.linalg.norm(gradient)))
    error = abs(measured - expected) / scale
    if not error <= limit:
        raise GradientMismatchError(
            f"The gradient of {name!r} along a random direction is {expected:.9g}, but central differences "
            f"give {measured:.9g}: a relative error of {error:.2g}, more than {limit:.2g}."
        )
    return error


def _check_runtime(
    built: onnx.ModelProto, feeds: Arrays, expected: Arrays, names: Sequence[str], dtype: np.dtype[Any]
) -> None:
    import onnxruntime

    single = np.dtype(np.float32)
    model = built if dtype == single else with_float_type(built, single)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    if _has_fused(model):
        options.register_custom_ops_library(str(custom_ops_library()))
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    outputs = session.run([f"{name}_grad" for name in names], {k: _as(v, single) for k, v in feeds.items()})
    for name, found in zip(names, outputs, strict=True):
        wanted = expected[f"{name}_grad"]
        error = _relative_error(found, wanted)
        if not error <= 2e-3:
            raise GradientMismatchError(
                f"On ONNX Runtime in float32 the gradient of {name!r} (shape {found.shape}) differs by "
                f"{error:.2g} of its largest value from the float64 result (shape {wanted.shape})."
            )


def _has_fused(model: onnx.ModelProto) -> bool:
    return any(entry.domain == ONNXTRAIN_DOMAIN for entry in model.opset_import)
