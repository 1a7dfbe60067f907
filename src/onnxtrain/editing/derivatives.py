"""Derivatives as models: gradients, products with the Jacobian and the Hessian, Jacobians, gradients of each example.

All of them are compositions of :func:`gradient`. With the cotangent c and the tangent t:
Jᵀc is the gradient of <y, c> by x; Jᵀc is linear in c, so J t is the gradient of <Jᵀc, t> by c; and H v is the
gradient of <dy/dx, v> by x. Jacobians and gradients of each example repeat one of these in a Scan.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.autodiff.options import GradientOptions
from onnxtrain.editing.working import Model, Working
from onnxtrain.editing.working_copy.widening import keep_types, narrow_outputs, widen
from onnxtrain.errors import GradientError
from onnxtrain.errors.hints import Hint, warn_of
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.graph import Builder, Value
from onnxtrain.graph.bounds import Fact, Facts
from onnxtrain.graph.clone import values_read
from onnxtrain.graph.declared_shapes import all_values, declared_otherwise
from onnxtrain.graph.passes import remove_unused
from onnxtrain.graph.replace import substitute
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.graph.value import HALVES, dimensions, is_float
from onnxtrain.lowering.build_gradients import Derivative
from onnxtrain.lowering.pipeline import lower_graph
from onnxtrain.lowering.rewrite import gradient_nodes
from onnxtrain.model_file.external import with_external_data
from onnxtrain.model_file.file import ModelFile
from onnxtrain.model_file.validity import refuses_invalid
from onnxtrain.parameters.trainable import parameter_table

Names = Sequence[str] | str | None

_DEFAULTS = GradientOptions()


@checks_arguments
@refuses_invalid()
def gradient(
    model: Model,
    y: str | None = None,
    xs: Names = None,
    *,
    straight_through: bool = False,
    recompute: str | Sequence[str] = (),
) -> onnx.ModelProto:
    """Add outputs to a model: the gradient of one of its values.

    For a scalar y and each x, the result has an output ``{x}_grad`` = dy/dx of the type and shape of x, or
    ``{x}_grad2`` where the model has that name, as in a second gradient. A y that is not scalar is summed. The result
    contains standard operators only and runs on any ONNX runtime. A model below opset 18 is upgraded to 18. A float16
    or bfloat16 model computes in float32; its weights, inputs and outputs keep their types, and so do the gradients
    with respect to them.

    Args:
        model: A path or a loaded model.
        y: Name of the floating value to differentiate; by default the only output.
        xs: Names of initializers, graph inputs or intermediate values; by default every trainable parameter
            (see :func:`onnxtrain.inspect`).
        straight_through: Straight-through estimator: pass gradients through rounding operators (Round, Floor, Ceil,
            Sign) unchanged, through QuantizeLinear and DequantizeLinear where the value is within the integers'
            range, and through integer operators (DynamicQuantizeLinear, MatMulInteger, ...) to the values that they
            quantize. By default, gradients of the first two groups are zero, like the derivatives, and a gradient
            that reaches an integer operator is an error.
        recompute: Glob patterns of node names. The gradient recomputes outputs of these nodes instead of keeping them
            in memory (activation checkpointing).

    Returns:
        A model with the original outputs followed by one gradient per x. It contains all its data; save a model above
        2 GiB with ``onnx.save(..., save_as_external_data=True)``.

    Raises:
        GradientError: A name does not exist or is not floating; operators between x and y have no rule or compute with
            quantized integers (the message lists all); a pattern matches no node.
        ModelError: The model cannot be read.

    Warns:
        TrainingHint: The sum of y is the same for all xs, as after a softmax, so that the gradients are zero.
    """
    return _with_gradients(model, y, xs, GradientOptions.of(straight_through, recompute))[0]


@checks_arguments
@refuses_invalid()
def vjp(model: Model, y: Names = None, xs: Names = None) -> onnx.ModelProto:
    """Add vector-Jacobian products to a model: reverse mode.

    For outputs y_1, y_2, ... and each x the result has an output ``{x}_vjp`` = Σ_i J_iᵀ c_i, where J_i = dy_i/dx and
    the cotangents c_i are new inputs ``{y}_cotangent`` of the types and shapes of the y_i. It consists of standard
    operators.

    Args:
        model: A path or a loaded model.
        y: Names of floating values; by default all floating outputs.
        xs: Names of inputs, initializers or intermediate values; by default all floating inputs.

    Returns:
        A model with the original outputs followed by one product per x.

    Raises:
        GradientError: A name does not exist or is not floating; operators between x and y have no gradient.
        ModelError: The model cannot be read.

    Example:
        >>> model = onnx.parser.parse_model('''
        ... <ir_version: 8, opset_import: ["": 18]>
        ... f (float[2] x) => (float[2] y) { y = Mul(x, x) }''')
        >>> [value.name for value in vjp(model).graph.input]
        ['x', 'y_cotangent']
    """
    working = Working(model)
    y_names = _outputs(working, y)
    x_names = _inputs(working, xs)
    products = _free_names(working.graph, [f"{name}_vjp" for name in x_names])
    proto, _ = _pulled_back(working, y_names, x_names, products)
    return proto


@checks_arguments
@refuses_invalid()
def jvp(model: Model, y: Names = None, xs: Names = None) -> onnx.ModelProto:
    """Add Jacobian-vector products to a model: forward mode.

    For x_1, x_2, ... and each y the result has an output ``{y}_jvp`` = Σ_i J_i t_i, where J_i = dy/dx_i and the
    tangents t_i are new inputs ``{x}_tangent`` of the types and shapes of the x_i. The product is the transpose of
    the reverse mode, which is linear in its cotangent. Its cost does not grow with the number of xs.

    Args:
        model: A path or a loaded model.
        y: Names of floating values; by default all floating outputs.
        xs: Names of inputs, initializers or intermediate values; by default all floating inputs.

    Returns:
        A model of standard operators with the original outputs followed by one product per y.

    Raises:
        GradientError: A name does not exist or is not floating; operators between x and y have no first or second
            gradient.
        ModelError: The model cannot be read.

    Example:
        >>> model = onnx.parser.parse_model('''
        ... <ir_version: 8, opset_import: ["": 18]>
        ... f (float[2] x) => (float[2] y) { y = Mul(x, x) }''')
        >>> [value.name for value in jvp(model).graph.output]
        ['y', 'y_jvp']
    """
    working = Working(model)
    y_names, x_names = _outputs(working, y), _inputs(working, xs)
    kept = [str(value.name) for value in working.graph.outputs]
    found = _free_names(working.graph, [f"{name}_jvp" for name in y_names])
    products = [working.free_name(f"{name}_vjp") for name in x_names]
    proto, cotangents = _pulled_back(working, y_names, x_names, products)
    working = Working(proto)
    total = _inner_products(working, dict(zip(products, _new_inputs(working, x_names, "_tangent"), strict=True)))
    working = Working(_gradients(working, total, cotangents, found, drop=products))
    _keep_outputs(working, [*kept, *found])
    _zero_inputs(working, dict(zip(cotangents, y_names, strict=True)))
    return working.finish()


@checks_arguments
@refuses_invalid()
def hessian_vector_product(model: Model, y: str | None = None, xs: Names = None) -> onnx.ModelProto:
    """Add Hessian-vector products to a model.

    For a scalar y and each x_i the result has the outputs ``{x}_grad`` = dy/dx_i and
    ``{x}_hvp`` = Σ_j (d²y / dx_i dx_j) v_j, where the vectors v_j are new inputs ``{x}_vector`` of the types and
    shapes of the x_j. A y that is not scalar is summed.

    Args:
        model: A path or a loaded model.
        y: Name of the floating value to differentiate; by default the only output.
        xs: Names of initializers, inputs or intermediate values; by default every trainable parameter.

    Returns:
        A model of standard operators with the original outputs, the gradients and the products.

    Raises:
        GradientError: A name does not exist or is not floating; operators between x and y have no first or second
            gradient.
        ModelError: The model cannot be read.
    """
    first, gradients = _with_gradients(model, y, xs)
    kept = [value.name for value in first.graph.output]
    x_names = list(gradients)
    working = Working(first)
    products = _free_names(working.graph, [f"{name}_hvp" for name in x_names])
    vectors = _new_inputs(working, x_names, "_vector")
    total = _inner_products(working, dict(zip(gradients.values(), vectors, strict=True)))
    working = Working(_gradients(working, total, x_names, products))
    _keep_outputs(working, [*kept, *products])
    return working.finish()


@checks_arguments
@refuses_invalid()
def jacobian(model: Model, y: str | None = None, xs: Names = None, *, batch: bool = False) -> onnx.ModelProto:
    """Add Jacobians to a model.

    For y and each x the result has an output ``{x}_jacobian`` = dy/dx of shape [*y.shape, *x.shape]. It is computed by
    one vector-Jacobian product per element of y, in a Scan.

    Args:
        model: A path or a loaded model.
        y: Name of a floating value; by default the only output.
        xs: Names of inputs, initializers or intermediate values; by default all floating inputs.
        batch: True if axis 0 of y and of every x is a batch whose examples do not depend on each other. The result
            then has one Jacobian per example, of shape [N, *y.shape[1:], *x.shape[1:]], for as many products as an
            example of y has elements. The batch of a run may be empty.

    Returns:
        A model of standard operators with the original outputs followed by one Jacobian per x.

    Raises:
        GradientError: A name does not exist or is not floating; operators between x and y have no gradient; the rank
            of y or of an x is not known.
        ModelError: The model cannot be read.
    """
    working = Working(model)
    (y_name,) = _outputs(working, y, one=True)
    x_names = _inputs(working, xs)
    kept = [str(value.name) for value in working.graph.outputs]
    found = _free_names(working.graph, [f"{name}_jacobian" for name in x_names])
    product_names = [working.free_name(f"{name}_vjp") for name in x_names]
    proto, (cotangent,) = _pulled_back(working, [y_name], x_names, product_names)
    working = Working(proto)
    graph = working.graph
    op = Builder(graph, working.opset)
    value = op.wrap(find_value(graph, y_name, "y"))
    shapes = dict(zip(x_names, map(dimensions, find_values(graph, x_names, "xs")), strict=True))
    for name, shape in {y_name: value.shape, **shapes}.items():
        if shape is None or (batch and not shape):
            need = "has no batch axis" if shape is not None else "has an unknown rank"
            raise GradientError(f"jacobian: {name!r} {need}; the axes of a Jacobian are those of y and of x.")
        firsts = {shape[0], value.shape[0]} if batch and shape and value.shape else set()
        fixed = all(isinstance(axis, int) for axis in firsts) and len(firsts) == 2
        if batch and (name in graph.initializers or fixed):
            raise GradientError(
                f"jacobian: axis 0 of {name!r} {list(shape or ())} is not the batch of {y_name!r} "
                f"{list(value.shape or ())}; leave out batch=True, or name other xs."
            ).about(name, got=shape, wanted=value.shape)
    vectors = _unit_vectors(op, value, batch=batch)
    products = find_values(graph, product_names, "xs")
    stacked = _scan(op, {find_value(graph, cotangent, "y"): vectors}, products)
    graph.inputs[:] = [value for value in graph.inputs if value.name != cotangent]
    size = op.shape_of(value)
    for name, made, rows in zip(x_names, found, stacked, strict=True):
        own = op.shape_of(op.wrap(find_value(graph, name, "xs")))
        if batch:  # [C, N, *x.shape[1:]]
            rows = op.Transpose(rows, perm=[1, 0, *range(2, len(shapes[name] or ()) + 1)])
            own = op.Slice(own, op.ints(1), op.ints(np.iinfo(np.int64).max))
        full = op.reshape(rows, op.Concat(size, own, axis=0))
        y_axes, x_axes = dimensions(value.ir) or (), shapes[name] or ()
        _add_output(graph, op, full.with_shape((*y_axes, *(x_axes[1:] if batch else x_axes))), made)
    _keep_outputs(working, [*kept, *found])
    return working.finish()


@checks_arguments
@refuses_invalid()
def per_example_gradients(
    model: Model, y: str | None = None, xs: Names = None, *, inputs: Names = None
) -> onnx.ModelProto:
    """Turn a model into one that computes the gradients of every example by itself.

    For a batch of N examples and each x the result has an output ``{x}_grads`` [N, *x.shape]: for each example the
    gradient of y on a batch of this example alone. So are the original outputs, [N, ...]; a scalar output becomes [N].

    ONNX Runtime's Scan needs at least one step, so the batch of a run may not be empty.

    Args:
        model: A path or a loaded model that accepts a batch of one.
        y: Name of the floating value to differentiate; by default the only output. It is summed.
        xs: Names of initializers or intermediate values; by default every trainable parameter.
        inputs: Names of the inputs with the examples on axis 0; by default all whose first axis is dynamic.

    Returns:
        A model of standard operators, which runs the examples one after another in a Scan.

    Raises:
        GradientError: A name does not exist or is not floating; operators between x and y have no gradient; no input
            has a batch axis, or one has a fixed number of examples.
        ModelError: The model cannot be read.
    """
    single, gradients = _with_gradients(model, y, xs)
    working = Working(single)
    graph = working.graph
    batched = _batch_inputs(graph, inputs)
    if any(name in batched for name in gradients):
        raise GradientError("per_example_gradients: xs are parameters; gradients by inputs are those of gradient().")
    new = _free_names(working.graph, [f"{name}_grads" for name in gradients])
    grads = dict(zip(gradients.values(), new, strict=True))
    aside = {str(value.name): working.free_name(f"{value.name}.example") for value in (*graph.inputs, *graph.outputs)}
    op = Builder(graph, working.opset)
    whole = {name: _stacked_input(value) for name, value in batched.items()}
    pairs = {value: op.wrap(whole[name]) for name, value in batched.items()}
    outputs = list(graph.outputs)
    names = [str(value.name) for value in outputs]
    stacked = _scan(op, pairs, outputs, axis=True)
    graph.inputs[:] = [whole.get(str(value.name), value) for value in graph.inputs]
    graph.outputs.clear()
    for value, name, rows in zip(outputs, names, stacked, strict=True):
        value.name = aside[name]
        if name not in grads and dimensions(value):  # the batch of one
            rows = op.Squeeze(rows, op.ints(1))
        _add_output(graph, op, rows, grads.get(name, name))
    for name, value in batched.items():
        value.name = aside[name]
        whole[name].name = name
    return working.finish()


def _with_gradients(
    model: Model,
    y: str | None,
    xs: Names,
    options: GradientOptions = _DEFAULTS,
    *,
    names: Sequence[str] | None = None,
) -> tuple[onnx.ModelProto, dict[str, str]]:
    """Add the gradients of y as outputs, by default under free names; return the model and these names by x."""
    file = ModelFile.load(model)
    working = file.training_model()
    declared = {str(value.name): value.dtype for value in working.graph.outputs if value.dtype in HALVES}
    halves = widen(working)
    working = infer_shapes(working)
    warn_of(Hint(text, surprising=True) for text in declared_otherwise(working.graph))
    graph = working.graph
    if gradient_nodes(graph):  # y may depend on them
        infer_shapes(lower_graph(working))
    target = find_value(graph, _only_output(graph) if y is None else y, "y")
    if xs is None:
        table = parameter_table(working, target, straight_through=options.straight_through)
        x_names = [row.name for row in table if row.trainable]
        if not x_names:
            raise GradientError(f"No trainable parameter determines {target.name!r}; name the xs.")
    else:
        x_names = _names_of(xs, "xs")
    made = _free_names(graph, [f"{name}_grad" for name in x_names]) if names is None else list(names)
    target = find_value(graph, target.name or "", "y")
    warn_of(_constant_sum(working, target, x_names))
    keep_types(working, halves, x_names)
    working.metadata_props.update(options.entries())
    lower_graph(working, derivative=Derivative(target, find_values(graph, x_names, "xs"), made))
    narrow_outputs(working, declared)
    proto = with_external_data(ir.to_proto(infer_shapes(working)), file.folder)
    return proto, dict(zip(x_names, made, strict=True))


def _constant_sum(model: ir.Model, y: ir.Value, xs: Sequence[str]) -> Iterator[Hint]:
    """Hint at a y, such as a softmax, that has the same sum whatever the xs are."""
    facts = Facts(model.functions, xs, dict.fromkeys(find_values(model.graph, xs, "xs"), Fact()))
    found = facts.of(y)
    if found.sums or found.number is not None:
        yield Hint(
            f"The gradient of {y.name!r} is that of its sum, which is always the same: the gradients are zero, but for "
            f"rounding. Differentiate a loss, or the logarithm of a probability; vjp(model, {y.name!r}) takes a weight "
            "for each element.",
            surprising=True,
        )


def _outputs(working: Working, given: Names, *, one: bool = False) -> list[str]:
    """Return the names of y: the given ones, by default all floating outputs."""
    if given is not None:
        names = _names_of(given, "y")
        if one and len(names) > 1:
            raise GradientError(f"y names {len(names)} values ({', '.join(map(repr, names))}); it needs one.").about(
                "y", got=names
            )
        for name in names:
            if not is_float(find_value(working.graph, name, "y")):
                raise GradientError(f"y names {name!r}, which is not floating.")
        return names
    names = list(dict.fromkeys(str(value.name) for value in working.graph.outputs if is_float(value)))
    if not names or (one and len(names) > 1):
        count = f"{len(names)} floating outputs ({', '.join(map(repr, names))})" if names else "no floating output"
        raise GradientError(f"The model has {count}; name a value with y=.")
    return names


def _inputs(working: Working, given: Names) -> list[str]:
    if given is not None:
        return _names_of(given, "xs")
    graph = working.graph
    names = [str(value.name) for value in graph.inputs if is_float(value) and value.name not in graph.initializers]
    if not names:
        raise GradientError("The model has no floating input; name the xs.")
    return names


def _pulled_back(
    working: Working, ys: Sequence[str], xs: Sequence[str], names: Sequence[str]
) -> tuple[onnx.ModelProto, list[str]]:
    """Add Σ Jᵀc for each x under a name; returns the model and the names of the cotangents."""
    cotangents = _new_inputs(working, ys, "_cotangent")
    total = _inner_products(working, dict(zip(ys, cotangents, strict=True)))
    return _gradients(working, total, xs, names), [str(value.name) for value in cotangents]


def _gradients(
    working: Working, y: str, xs: Sequence[str], names: Sequence[str], drop: Sequence[str] = ()
) -> onnx.ModelProto:
    """Add the gradients of y under names of our own, and drop some outputs; nodes that no output needs stay."""
    working.graph.outputs[:] = [value for value in working.graph.outputs if value.name not in drop]
    return _with_gradients(ir.to_proto(working.model), y, xs, names=names)[0]


def _new_inputs(working: Working, like: Sequence[str], suffix: str) -> list[ir.Value]:
    """Append an input of the type and shape of each of some values, under a free name."""
    made = []
    for name in like:
        value = find_value(working.graph, name, "y" if suffix == "_cotangent" else "xs")
        made.append(ir.Value(name=working.free_name(f"{name}{suffix}"), type=value.type, shape=value.shape))
    working.graph.inputs.extend(made)
    return made


def _inner_products(working: Working, pairs: dict[str, ir.Value]) -> str:
    """Append Σ <value, vector> over pairs of a value's name and a vector; return the name of the sum."""
    op = Builder(working.graph, working.opset)
    op.scope = "inner products"
    values = [op.wrap(find_value(working.graph, name, "y")) for name in pairs]
    parts = [
        op.ReduceSum(op.Mul(value, op.wrap(vector)), keepdims=0)
        for value, vector in zip(values, pairs.values(), strict=True)
    ]
    total = op.Sum(*(op.cast(part, parts[0].dtype) for part in parts))
    total.ir.name = working.free_name("inner_products")
    return total.ir.name


def _keep_outputs(working: Working, names: Sequence[str]) -> None:
    by_name = {str(value.name): value for value in working.graph.outputs}
    working.graph.outputs[:] = [by_name[name] for name in names]


def _zero_inputs(working: Working, pairs: dict[str, str]) -> None:
    """Replace inputs by zeros of the shape of other values, where anything still depends on them."""
    remove_unused(working.model)
    graph = working.graph
    op = Builder(graph, working.opset)
    for name, like in pairs.items():
        value = find_value(graph, name, "y")
        if value.uses():
            substitute(graph, {value: op.zeros_like(op.wrap(find_value(graph, like, "y"))).ir})
        graph.inputs[:] = [one for one in graph.inputs if one is not value]
    graph.sort()


def _unit_vectors(op: Builder, y: Value, *, batch: bool) -> Value:
    """Return the unit vectors of y's shape [M, *y.shape], or those of one example, repeated [C, N, *y.shape[1:]]."""
    size = op.shape_of(y)
    shape = op.Slice(size, op.ints(1), op.ints(np.iinfo(np.int64).max)) if batch else size
    count = op.ReduceProd(shape, keepdims=1)
    square = op.Concat(count, count, axis=0)
    eye = op.cast(op.EyeLike(op.ConstantOfShape(square, value=ir.tensor(np.zeros(1, np.float32)))), y.dtype)
    if not batch:
        return op.reshape(eye, op.Concat(count, size, axis=0))
    one = op.reshape(eye, op.Concat(count, op.ints(1), shape, axis=0))
    return op.Expand(one, op.Concat(count, size, axis=0))


def _scan(op: Builder, pairs: dict[ir.Value, Value], outputs: Sequence[ir.Value], *, axis: bool = False) -> list[Value]:
    """Move the nodes that depend on some inputs into the body of a Scan over stacks of these inputs."""
    graph = op.graph
    slices = [
        ir.Value(name=f"{value.name}.slice", type=value.type, shape=_without_batch(value) if axis else value.shape)
        for value in pairs
    ]
    body = ir.Graph(slices, [], nodes=[], name="one")
    inner = Builder(body, op.opset, outer=op)
    inside: dict[ir.Value, ir.Value] = {}
    for value, part in zip(pairs, slices, strict=True):
        start = inner.Unsqueeze(inner.wrap(part), inner.ints(0)) if axis else inner.wrap(part)
        inside[value] = start.with_shape((1, *(dimensions(value) or ())[1:])).ir if axis else part
    dependent = set(pairs)
    moved = []
    for node in graph:
        if any(value in dependent for value in values_read(node)):
            moved.append(node)
            dependent.update(node.outputs)
    for value, substitute_value in inside.items():
        value.replace_all_uses_with(substitute_value)
    graph.remove(moved)
    body.extend(moved)
    for value in outputs:
        inner.output(inner.wrap(inside.get(value, value)))
    made = op.several("Scan", *pairs.values(), outputs=len(outputs), body=body, num_scan_inputs=len(pairs))
    for rows, value in zip(made, outputs, strict=True):
        shape = dimensions(value)
        if shape is not None:
            rows.with_shape((None, *shape))
        rows.ir.type = value.type
    return list(made)


def _without_batch(value: ir.Value) -> ir.Shape | None:
    shape = dimensions(value)
    return None if shape is None else ir.Shape(shape[1:])


def _add_output(graph: ir.Graph, op: Builder, value: Value, name: str) -> None:
    op.output(value)
    graph.outputs[-1].name = name


def _batch_inputs(graph: ir.Graph, given: Names) -> dict[str, ir.Value]:
    """Return the inputs with the examples on axis 0."""
    if given is None:
        found = [
            value
            for value in graph.inputs
            if value.name not in graph.initializers and (axes := dimensions(value)) and not isinstance(axes[0], int)
        ]
        if not found:
            raise GradientError(
                "per_example_gradients: no input has a dynamic first axis; name the inputs with inputs=, or free the "
                "axis with dynamic_batch(model)."
            )
        return {str(value.name): value for value in found}
    values = find_values(graph, _names_of(given, "inputs"), "inputs")
    for value in values:
        axes = dimensions(value)
        if value not in list(graph.inputs) or not axes or (isinstance(axes[0], int) and axes[0] != 1):
            raise GradientError(
                f"per_example_gradients: {value.name!r} must be an input whose first axis is dynamic, or 1; its shape "
                f"is {axes}. dynamic_batch(model) frees the axis."
            ).about(value.name)
    return {str(value.name): value for value in values}


def _stacked_input(value: ir.Value) -> ir.Value:
    """Return a new input with the examples of the whole batch."""
    axes = dimensions(value) or ()
    first = axes[0] if not isinstance(axes[0], int) else "N"
    return ir.Value(name=f"{value.name}.all", type=value.type, shape=ir.Shape((first, *axes[1:])))


def _only_output(graph: ir.Graph) -> str:
    if len(set(graph.outputs)) != 1:  # an output may be listed twice
        names = ", ".join(repr(value.name) for value in graph.outputs)
        raise GradientError(f"The model has {len(graph.outputs)} outputs ({names}); name one with y=.")
    return graph.outputs[0].name or ""


def _names_of(given: Sequence[str] | str, argument: str) -> list[str]:
    """Return the names that an argument lists, each once."""
    names = [given] if isinstance(given, str) else list(given) if isinstance(given, Iterable) else [given]
    if not names or not all(isinstance(name, str) for name in names):
        raise GradientError(f"{argument} is {given!r}; it needs a name, or a list of names.").about(argument, got=given)
    return list(dict.fromkeys(names))


def _free_names(graph: ir.Graph, names: Sequence[str]) -> list[str]:
    """Return names of new values, with a number behind those that the model has, such as ``x_grad2``."""
    taken = {*graph.initializers, *(value.name for value in (*graph.inputs, *all_values(graph)))}
    found = []
    for name in names:
        numbered = (f"{name}{count}" for count in itertools.count(2))
        found.append(name if name not in taken else next(other for other in numbered if other not in taken))
    return found


def find_value(graph: ir.Graph, name: str, argument: str) -> ir.Value:
    """Find a value by its name in the main graph."""
    return find_values(graph, [name], argument)[0]


def find_values(graph: ir.Graph, names: Iterable[str], argument: str) -> list[ir.Value]:
    """Find values by their names in the main graph."""
    known, found = ir.convenience.create_value_mapping(graph, include_subgraphs=False), []
    for name in names:
        if not isinstance(name, str):
            raise GradientError(f"{argument} is {name!r}; it needs the name of a value.")
        if (value := known.get(name)) is None:
            raise GradientError(f"{argument} names {name!r}, but the model has no value of that name.")
        found.append(value)
    return found
