"""Cut out the part of a model that computes a value."""

from __future__ import annotations

from collections.abc import Sequence

import onnx

from onnxtrain.editing.working import Model, Working
from onnxtrain.errors import OptionError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.model_file.validity import refuses_invalid


@checks_arguments
@refuses_invalid()
def cut(model: Model, at: str | Sequence[str]) -> onnx.ModelProto:
    """Return the part of a model that computes some of its values, which become the outputs.

    The nodes behind them are removed, and with them the weights and the inputs that nothing else reads. The rest stays
    as it is, names and weights included.

    Args:
        model: A path or a loaded model; it is not changed.
        at: Names of values, or of nodes with one output.

    Returns:
        The part, a model that holds all its data.

    Raises:
        ModelError: The model cannot be read.
        OptionError: ``at`` names no result of a node, or a node with several outputs.

    Example:
        >>> model = onnx.parser.parse_model('''
        ... <ir_version: 8, opset_import: ["": 18]>
        ... f (float[n, 2] x) => (float[n, 2] y) { h = Relu(x)  y = Softmax(h) }''')
        >>> part = cut(model, at="h")
        >>> [node.op_type for node in part.graph.node], part.graph.output[0].name
        (['Relu'], 'h')
    """
    names = [at] if isinstance(at, str) else list(at)
    if not names:
        raise OptionError("at= is empty; name at least one value or node of the model.")
    working = Working(model)
    values = list(dict.fromkeys(working.value(name) for name in names))
    for name, value in zip(names, values, strict=False):
        if value.type is None:
            raise OptionError(f"at={name!r}: the type of this value is not known; cut at another one.")
    working.graph.outputs[:] = values
    return working.finish()
