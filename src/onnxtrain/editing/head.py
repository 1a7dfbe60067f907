"""Change the end of a model: cut it, append layers, or replace its head for another number of classes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from onnxtrain.editing.layers import Layer, uniform
from onnxtrain.editing.working import Model, Working
from onnxtrain.errors import OptionError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.graph.builder import Builder
from onnxtrain.graph.clone import values_read
from onnxtrain.graph.domains import LABELS, REPLACED_WEIGHT
from onnxtrain.graph.inference import keeps_shape
from onnxtrain.graph.layers import orientation, reads_transposed
from onnxtrain.graph.operands import Value
from onnxtrain.graph.replace import set_inputs
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.graph.value import constant_tensor, dimensions, is_float
from onnxtrain.model_file.validity import refuses_invalid


@checks_arguments
@refuses_invalid()
def cut(model: Model, at: str | Sequence[str] | None = None, *, start: str | Sequence[str] = ()) -> onnx.ModelProto:
    """Return the part of a model that computes some of its values, which become the outputs.

    The nodes behind them are removed, and with them the weights and the inputs that nothing else reads. The rest stays
    as it is, names and weights included; a ZipMap becomes the tensor that it reads.

    Args:
        model: A path or a loaded model; it is not changed.
        at: Names of values, or of nodes with one output; by default the model's outputs.
        start: Names of values, or of nodes with one output, that become inputs: the nodes before them are removed.

    Returns:
        The part, a model that holds all its data.

    Raises:
        ModelError: The model cannot be read.
        OptionError: ``at`` or ``start`` names no result of a node, or a node with several outputs.

    Example:
        >>> model = onnx.parser.parse_model('''
        ... <ir_version: 8, opset_import: ["": 18]>
        ... f (float[n, 2] x) => (float[n, 2] y) { h = Relu(x)  y = Softmax(h) }''')
        >>> part, rest = cut(model, at="h"), cut(model, start="h")
        >>> [node.op_type for node in part.graph.node], part.graph.output[0].name
        (['Relu'], 'h')
        >>> [node.op_type for node in rest.graph.node], rest.graph.input[0].name
        (['Softmax'], 'h')
    """
    working = Working(model)
    graph = working.graph
    if at is not None:
        graph.outputs[:] = _ends(working, "at", at)
        if not graph.outputs:
            raise OptionError("at= is empty; name at least one value or node of the model.")
    for value in _ends(working, "start", start):
        given = ir.Value(name=value.name, type=value.type, shape=value.shape)
        value.name = working.free_name(f"{value.name}.before")
        value.replace_all_uses_with(given, replace_graph_outputs=True)
        graph.inputs.append(given)
    return working.finish()


def _ends(working: Working, option: str, given: str | Sequence[str]) -> list[ir.Value]:
    """Return the values at which an option cuts a model, whose types are known."""
    names = [given] if isinstance(given, str) else list(given)
    values = list(dict.fromkeys(working.value(name, option) for name in names))
    for name, value in zip(names, values, strict=False):
        if value.type is None:
            raise OptionError(f"{option}={name!r}: the type of this value is not known; cut at another one.")
    return values


@checks_arguments
@refuses_invalid()
def append(model: Model, *layers: Layer, output: str | None = None, seed: int = 0) -> onnx.ModelProto:
    """Return a model with further layers behind one of its outputs, whose result replaces the output.

    Args:
        model: A path or a loaded model; it is not changed.
        *layers: From :mod:`onnxtrain.editing.layers`, in order.
        output: The output to build on; by default the first floating one.
        seed: Seed of the new weights.

    Returns:
        The longer model; it holds all its data. The new weights are called ``{layer.name}.weight`` and
        ``{layer.name}.bias``, with a number behind the layer's name if that name is taken.

    Raises:
        ModelError: The model cannot be read.
        OptionError: There is no such output, or a layer does not fit its input.

    Example:
        >>> from onnxtrain.editing.layers import Activation, Linear
        >>> model = onnx.parser.parse_model('''
        ... <ir_version: 8, opset_import: ["": 18]>
        ... f (float[n, 2] x) => (float[n, 2] y) { y = Tanh(x) }''')
        >>> longer = append(model, Linear(8), Activation("Relu"), Linear(3))
        >>> [node.op_type for node in longer.graph.node], [tensor.name for tensor in longer.graph.initializer]
        (['Tanh', 'Gemm', 'Relu', 'Gemm'], ['head.weight', 'head.bias', 'head2.weight', 'head2.bias'])
    """
    if not layers:
        raise OptionError("append was given no layer; give some of onnxtrain.editing.layers, such as Linear(10).")
    working = Working(model)
    end = working.output(output)
    op = Builder(working.graph, working.opset)
    random = np.random.default_rng(seed)
    x = op.wrap(end)
    for layer in layers:
        if not isinstance(layer, Layer):
            raise OptionError(
                f"append was given {layer!r}; it takes layers of onnxtrain.editing.layers, such as Linear(10)."
            )
        op.scope = working.free_name(layer.name)
        x = layer.build(op, x, _Weights(working, op, x.dtype), random)
        infer_shapes(working.model)  # the next layer may read the shape
    made = x.ir
    made.name = working.free_name("output")
    working.graph.outputs[list(working.graph.outputs).index(end)] = made
    return working.finish()


class _Weights:
    """Factory of the weights of one layer, in the type of its input."""

    def __init__(self, working: Working, op: Builder, dtype: ir.DataType) -> None:
        self._working, self._op, self._dtype = working, op, dtype

    def __call__(self, role: str, values: npt.NDArray[np.generic]) -> Value:
        array = values.astype(self._dtype.numpy())
        return self._op.wrap(self._working.initializer(f"{self._op.scope}.{role}", array, self._dtype))


_HEADS = ("Gemm", "MatMul", "Conv")


_ANY_NUMBER = frozenset(
    {"Softmax", "LogSoftmax", "Hardmax", "ArgMax", "ArgMin", "TopK", "Dropout", "LpNormalization"}
    | {"Flatten", "Squeeze", "Unsqueeze", "Transpose", "Shape", "Size", "Cast", "CastLike", "Identity"}
    | {"GlobalAveragePool", "GlobalMaxPool", "AveragePool", "MaxPool", "DepthToSpace"}
    | {"ReduceMean", "ReduceMax", "ReduceMin", "ReduceSum", "ReduceLogSumExp", "ReduceL2"}
)
"""Operators that take any number of classes as they are."""

_SIZES = {"Reshape": 1, "Resize": 3, "Expand": 1}
"""Input slot with the sizes of the result, by operator."""


@checks_arguments
@refuses_invalid()
def replace_head(
    model: Model, classes: int, *, at: str | None = None, output: str | None = None, name: str = "head", seed: int = 0
) -> onnx.ModelProto:
    """Replace a model's last layer with weights by a new one for another number of classes; return the new model.

    The last Gemm, MatMul or Conv before the output gets new weights ``head.weight`` and, where it has one,
    ``head.bias``, uniform within ±1 / sqrt(features) as in PyTorch. Everything before it stays. The nodes behind it
    must not depend on the number of classes (Softmax, Reshape, pooling and the like do not).

    Train the head alone with ``Trainer(..., train="head.*")``, and more of the model after that.

    Args:
        model: A path or a loaded model; it is not changed.
        classes: Size of the class axis of the new output, at least 1.
        at: The layer to replace, by the name of its node, its output, or its weight.
        output: The output of the head; by default the first floating one.
        name: Prefix of the names of the new weights.
        seed: Seed of the new weights.

    Returns:
        The new model; it holds all its data.

    Raises:
        ModelError: The model cannot be read.
        OptionError: There is no such layer, or a node behind it requires the old number of classes.

    Example:
        >>> from onnxtrain import examples
        >>> model = replace_head(examples.mlp((4, 8, 3)), classes=7)
        >>> [(tensor.name, list(tensor.dims)) for tensor in model.graph.initializer][-2:]
        [('head.weight', [7, 8]), ('head.bias', [7])]
    """
    if isinstance(classes, bool) or not isinstance(classes, int | np.integer) or classes < 1:
        raise OptionError(f"classes is {classes!r}; it must be an integer of at least 1.").about("classes", got=classes)
    working = Working(model)
    end = working.output(output)
    head = _find(working, end) if at is None else _named(working, at)
    old = _classes(head)
    working.model.metadata_props.pop(LABELS, None)  # of the old classes
    result = _replace(working, head, int(classes), working.free_name(name), np.random.default_rng(seed))
    _fit_tail(working, result, old, int(classes))
    working.forget_behind([result])
    return working.finish()


def _find(working: Working, end: ir.Value) -> ir.Node:
    """Return the last layer with weights that an output depends on."""
    needed: set[ir.Value] = {end}
    for node in reversed(list(working.graph)):
        if not any(value in needed for value in node.outputs):
            continue
        if _is_head(working, node):
            return node
        needed.update(values_read(node))
    raise OptionError(
        f"The output {end.name!r} depends on no {', '.join(_HEADS[:-1])} or {_HEADS[-1]} with a weight of its own, so "
        "there is no head to replace; use cut and append."
    )


def _named(working: Working, at: str) -> ir.Node:
    """Return the layer that ``at`` names, by its node, its output or its weight."""
    if at in working.graph.initializers:
        found = [node for node in working.graph if _is_head(working, node) and _source(node.inputs[1]).name == at]
        if not found:
            raise OptionError(f"at={at!r} is a weight that no {', '.join(_HEADS)} multiplies with; name a layer.")
        return found[-1]
    node = working.value(at).producer()
    if node is None or not _is_head(working, node):
        kind = "an input" if node is None else f"a {node.op_type}"
        raise OptionError(f"at={at!r} is {kind}; a head is a {', '.join(_HEADS[:-1])} or {_HEADS[-1]} with a weight.")
    return node


def _is_head(working: Working, node: ir.Node) -> bool:
    if node.domain or node.op_type not in _HEADS or len(node.inputs) < 2:
        return False
    weight = node.inputs[1]
    rank = 2 if weight is None or weight.shape is None else len(weight.shape)
    fits = is_float(node.outputs[0]) and (node.op_type == "Conv" or rank == 2)
    return fits and working.follow_from_weights([weight])


def _source(value: ir.Value | None) -> ir.Value:
    """Return the weight that a value is a view of: through Transpose, Identity, dequantization."""
    assert value is not None
    producer = value.producer()
    while producer is not None and producer.inputs and producer.inputs[0] is not None:
        value = producer.inputs[0]
        producer = value.producer()
    return value


def _weight_shape(head: ir.Node) -> tuple[int, ...]:
    weight = head.inputs[1]
    shape = None if weight is None else dimensions(weight)
    if shape is None or not all(isinstance(size, int) for size in shape):
        raise OptionError(f"The weight of {_label(head)} has no known shape; name another layer with at=.")
    return tuple(int(size) for size in shape if isinstance(size, int))


def _classes(head: ir.Node) -> int:
    shape = _weight_shape(head)
    return shape[0] if head.op_type == "Conv" or reads_transposed(head) else shape[-1]


def _replace(working: Working, head: ir.Node, classes: int, name: str, random: np.random.Generator) -> ir.Value:
    """Give a layer new weights, and a new bias where it has one; returns the layer's result."""
    shape = _weight_shape(head)
    dtype = head.outputs[0].dtype
    assert dtype is not None
    if head.op_type == "Conv":
        if head.attributes.get_int("group", 1) != 1:
            raise OptionError(f"{_label(head)} has groups, so its channels are no classes; name another with at=.")
        features = shape[1:]
    else:
        features = shape[1:] if reads_transposed(head) else shape[:1]
    fan_in = int(np.prod(features))
    head.metadata_props.setdefault(REPLACED_WEIGHT, str(_source(head.inputs[1]).name))
    values = uniform(random, (classes, *features), fan_in)
    if head.op_type == "MatMul":
        values = np.ascontiguousarray(values.T)
    weight = working.initializer(f"{name}.weight", values.astype(dtype.numpy()), dtype)
    following = None if head.op_type == "Gemm" else _bias_after(working, head)
    has_bias = following is not None or (len(head.inputs) > 2 and head.inputs[2] is not None)
    bias = None
    if has_bias:
        bias_shape: tuple[int, ...] = (classes,)
        if following is not None and head.op_type == "Conv":
            bias_shape = (classes, *(1,) * (len(shape) - 2))
        array = uniform(random, bias_shape, fan_in).astype(dtype.numpy())
        bias = working.initializer(f"{name}.bias", array, dtype)
    if head.op_type == "Gemm":
        for attribute in ("alpha", "beta"):
            head.attributes.pop(attribute, None)
        head.attributes.update({name: ir.AttrInt64(name, value) for name, value in orientation().items()})
    if following is None:
        set_inputs(head, [head.inputs[0], weight, *[bias] * (len(head.inputs) - 2)])
        return head.outputs[0]
    set_inputs(head, [head.inputs[0], weight])
    set_inputs(following, [head.outputs[0], bias])
    working.forget_behind([head.outputs[0]])
    return following.outputs[0]


def _bias_after(working: Working, head: ir.Node) -> ir.Node | None:
    """Return the Add that is the only reader of a matmul and adds weights, one for each class, or ``None``."""
    readers = list(head.outputs[0].consumers())
    if len(readers) != 1 or readers[0].op_type != "Add" or readers[0].domain or head.outputs[0].is_graph_output():
        return None
    if head.op_type == "Conv" and len(head.inputs) > 2 and head.inputs[2] is not None:
        return None
    node = readers[0]
    other = node.inputs[1] if node.inputs[0] is head.outputs[0] else node.inputs[0]
    if other is None or not working.follow_from_weights([other]):
        return None
    sizes = [size for size in dimensions(other) or () if size != 1]
    return node if sizes == [_classes(head)] else None


def _fit_tail(working: Working, head: ir.Value, old: int, new: int) -> None:
    """Adapt the nodes behind a head to its new number of classes, in place."""
    behind, sizes = {head}, set[ir.Value]()
    for node in working.graph:
        read = values_read(node)
        if not any(value in behind or value in sizes for value in read):
            continue
        if not any(value in behind for value in read):  # computes with shapes only
            sizes.update(node.outputs)
            continue
        if node.op_type in _SIZES and not node.domain:
            _resize(working, node, old, new)
        elif not _takes_any_number(node, behind, old):
            raise OptionError(
                f"Behind the head stands {_label(node)}, which is made for its "
                f"{old} classes; name a layer further back with at=, or use cut and append."
            )
        (sizes if node.op_type in ("Shape", "Size") else behind).update(node.outputs)


def _takes_any_number(node: ir.Node, behind: set[ir.Value], old: int) -> bool:
    if node.domain:
        return False
    if node.op_type in _ANY_NUMBER:
        return True
    if not keeps_shape(node.op_type):
        return False
    others = [value for value in node.inputs if value is not None and value not in behind]
    return all(value.shape is not None and old not in _sizes(value) for value in others) or old == 1


def _sizes(value: ir.Value) -> list[int]:
    assert value.shape is not None
    return [size for size in value.shape if isinstance(size, int)]


def _resize(working: Working, node: ir.Node, old: int, new: int) -> None:
    """Change the size of the class axis in the constant sizes of a node's result."""
    index = _SIZES[node.op_type]
    value = node.inputs[index] if len(node.inputs) > index else None
    tensor = None if value is None else constant_tensor(value)
    if value is None or tensor is None:
        return
    given = tensor.numpy()
    found = np.flatnonzero(given == old)
    if len(found) == 0:
        return
    if len(found) > 1 or old == 1:
        raise OptionError(
            f"Behind the head stands {_label(node)} to sizes {given.tolist()}, "
            f"of which it is not clear which one counts its {old} classes; use cut and append."
        )
    changed = given.copy()
    changed[found[0]] = new
    name = working.free_name(f"{value.name}_{new}")
    made = working.initializer(name, changed, tensor.dtype)
    set_inputs(node, [*node.inputs[:index], made, *node.inputs[index + 1 :]])


def _label(node: ir.Node) -> str:
    return f"{node.op_type} {node.name or node.outputs[0].name!r}"
