"""Linear models of ``ai.onnx.ml``: their weights, which are attributes, and the same models in standard operators.

scikit-learn's converter writes ``LinearClassifier``, ``LinearRegressor`` and ``Scaler`` with lists of floats as
attributes. In a working copy these lists are initializers, read by standard operators that replace the node; in the
file they stay attributes. The standard operators compute the results of ONNX Runtime's kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from onnx import AttributeProto, NodeProto, TensorProto, helper, numpy_helper

from onnxtrain.graph.domains import MACHINE_LEARNING_DOMAIN
from onnxtrain.graph.layers import orientation

_CLASSIFIER_ENDINGS = ("NONE", "LOGISTIC", "SOFTMAX")
"""Post transforms that standard operators can express."""


class AttributeWeight(NamedTuple):
    """An attribute of a node that is a weight."""

    position: int
    tensor: TensorProto
    mirrored: bool = False


def attribute_weights(node: NodeProto) -> list[AttributeWeight]:
    """Return the weights among a node's attributes; none if standard operators cannot express the node.

    Example:
        >>> node = helper.make_node("Scaler", ["x"], ["y"], domain="ai.onnx.ml", offset=[1.0, 2.0], scale=[0.5, 0.5])
        >>> [(weight.tensor.name, list(weight.tensor.dims)) for weight in attribute_weights(node)]
        [('offset', [2]), ('scale', [2])]
    """
    shapes = _shapes(node)
    if shapes is None:
        return []
    mirrored = _is_mirrored(node)
    found = []
    for position, attribute in enumerate(node.attribute):
        if attribute.name in shapes:
            values = np.array(attribute.floats, np.float32).reshape(shapes[attribute.name])
            tensor = numpy_helper.from_array(values[1:] if mirrored else values, attribute.name)
            found.append(AttributeWeight(position, tensor, mirrored))
    return found


def set_values(attribute: AttributeProto, values: np.ndarray) -> None:
    """Set the values of an attribute, in place."""
    attribute.floats[:] = values.reshape(-1).tolist()


def mirror(values: np.ndarray) -> np.ndarray:
    """Return the values of a mirrored attribute: the negatives, then the values."""
    return np.concatenate([-values, values])


def standard_form(node: NodeProto, weights: Mapping[str, str], *, opset: int) -> list[NodeProto]:
    """Return standard operators that compute a node."""
    made = _StandardNodes(node, weights, opset)
    build = {"Scaler": made.scaler, "LinearRegressor": made.regressor, "LinearClassifier": made.classifier}
    build["Normalizer"] = made.normalizer
    build[node.op_type]()
    return made.nodes


def is_normalizer(node: NodeProto) -> bool:
    """Return whether a node is a ``Normalizer``, which has no weights."""
    return node.op_type == "Normalizer" and node.domain == MACHINE_LEARNING_DOMAIN


def _attributes(node: NodeProto) -> dict[str, AttributeProto]:
    return {attribute.name: attribute for attribute in node.attribute}


def _shapes(node: NodeProto) -> dict[str, tuple[int, ...]] | None:
    """Return the shapes of the weights by attribute; None for another or an invalid node."""
    if node.domain != MACHINE_LEARNING_DOMAIN:
        return None
    given = _attributes(node)
    if node.op_type == "Scaler":
        sizes: dict[str, tuple[int, ...]] = {
            name: (len(given[name].floats),) for name in ("offset", "scale") if name in given
        }
        return sizes if len(sizes) == 2 and (0,) not in sizes.values() else None
    if node.op_type not in ("LinearClassifier", "LinearRegressor") or "coefficients" not in given:
        return None
    count = len(given["coefficients"].floats)
    shifts = len(given["intercepts"].floats) if "intercepts" in given else None
    ending = given["post_transform"].s.decode(errors="replace") if "post_transform" in given else "NONE"
    if node.op_type == "LinearRegressor":
        rows = given["targets"].i if "targets" in given else 1
        fits = ending == "NONE" and shifts in (None, rows)
    else:
        rows, classes = shifts or 0, _class_count(given)
        fits = ending in _CLASSIFIER_ENDINGS and (rows == classes > 1 or (rows, classes) == (1, 2))
    if not fits or rows < 1 or count == 0 or count % rows:
        return None
    return {"coefficients": (rows, count // rows)} | ({} if shifts is None else {"intercepts": (rows,)})


def _class_count(given: Mapping[str, AttributeProto]) -> int:
    labels = [given[name] for name in ("classlabels_ints", "classlabels_strings") if name in given]
    return max((len(attribute.ints) + len(attribute.strings) for attribute in labels), default=0)


def _is_mirrored(node: NodeProto) -> bool:
    """Return whether a binary classifier has one score, and its negative as the other, before the logistic function."""
    given = _attributes(node)
    if "intercepts" not in given or len(given["intercepts"].floats) != 2:
        return False
    if "post_transform" not in given or given["post_transform"].s != b"LOGISTIC":
        return False
    pairs = [np.array(given[name].floats, np.float32).reshape(2, -1) for name in ("coefficients", "intercepts")]
    return all(np.array_equal(pair[0], -pair[1]) for pair in pairs)


class _StandardNodes:
    """Builder of the standard operators for one node."""

    def __init__(self, node: NodeProto, weights: Mapping[str, str], opset: int) -> None:
        self.nodes: list[NodeProto] = []
        self._node, self._weights, self._opset = node, weights, opset
        self._given = _attributes(node)
        self._prefix = f"{node.output[-1]}.{node.op_type}"

    def scaler(self) -> None:
        """y = (x - offset) scale."""
        shifted = self._add("Sub", self._floats(), self._weights["offset"])
        self._add("Mul", shifted, self._weights["scale"], output=self._node.output[0])

    def regressor(self) -> None:
        """y = x coefficients^T + intercepts."""
        self._scores(self._node.output[0])

    def classifier(self) -> None:
        """Scores, and the label of the largest one."""
        scores = self._scores()
        label, result = self._node.output
        ending = self._given["post_transform"].s if "post_transform" in self._given else b"NONE"
        single = len(self._given["intercepts"].floats) == 1
        if single or _is_mirrored(self._node):
            zero = self._constant("zero", np.zeros((1, 1), np.float32))
            index = self._add("Cast", self._rows(self._add("Greater", scores, zero)), to=TensorProto.INT64)
            if ending == b"LOGISTIC":  # the final Concat marks probabilities
                pair = [self._add("Sigmoid", score) for score in (self._add("Neg", scores), scores)]
                self._add("Concat", *pair, output=result, axis=1)
            else:  # (1 - s, s), which are no probabilities
                signs = self._constant("signs", np.array([[-1, 1]], np.float32))
                shift = self._constant("shift of two", np.array([[1, 0]], np.float32))
                self._add("Add", self._add("Mul", scores, signs), shift, output=result)
        else:
            index = self._add("ArgMax", scores, axis=1, keepdims=0)
            operator = {b"NONE": "Identity", b"LOGISTIC": "Sigmoid", b"SOFTMAX": "Softmax"}[ending]
            self._add(operator, scores, output=result, **({"axis": 1} if operator == "Softmax" else {}))
        self._add("Gather", self._labels(), index, output=label)

    def normalizer(self) -> None:
        """y = x / |x| by rows, in any norm; a row of zeros is kept."""
        x, norm = self._floats(), self._given["norm"].s if "norm" in self._given else b"MAX"
        if norm == b"MAX":
            size = self._reduce("ReduceMax", x, since=18)
        else:
            size = self._reduce("ReduceSum", self._add("Abs", x) if norm == b"L1" else self._add("Mul", x, x), since=13)
        some = self._add("Cast", size, to=TensorProto.BOOL)
        one = self._add("Cast", self._add("Not", some), to=TensorProto.FLOAT)
        size = self._add("Add", size, one)  # avoids the infinite slope of the root at 0
        self._add("Div", x, self._add("Sqrt", size) if norm == b"L2" else size, output=self._node.output[0])

    def _scores(self, output: str | None = None) -> str:
        coefficients = self._weights["coefficients"]
        rows, columns = _shapes(self._node)["coefficients"]  # type: ignore[index]
        shape = self._constant("shape", np.array([-1, columns]))
        x = self._add("Reshape", self._floats(), shape)
        shift = self._weights.get("intercepts") or self._constant("shift", np.zeros(rows, np.float32))
        return self._add("Gemm", x, coefficients, shift, output=output, **orientation())

    def _floats(self) -> str:
        return self._add("Cast", self._node.input[0], to=TensorProto.FLOAT)

    def _labels(self) -> str:
        texts = self._given["classlabels_strings"].strings if "classlabels_strings" in self._given else ()
        if texts:
            return self._constant("labels", np.array([text.decode() for text in texts], object))
        return self._constant("labels", np.array(self._given["classlabels_ints"].ints, np.int64))

    def _rows(self, value: str) -> str:
        """[N, 1] as [N]."""
        return self._add("Reshape", value, self._constant("rows", np.array([-1])))

    def _reduce(self, operator: str, value: str, *, since: int) -> str:
        if self._opset < since:
            return self._add(operator, value, axes=[1], keepdims=1)
        return self._add(operator, value, self._constant("axis", np.array([1])), keepdims=1)

    def _constant(self, name: str, values: np.ndarray) -> str:
        tensor = numpy_helper.from_array(values)
        return self._add("Constant", output=f"{self._prefix}.{name}", value=tensor)

    def _add(self, operator: str, *inputs: str, output: str | None = None, **attributes: Any) -> str:
        name = output or f"{self._prefix}.{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [name], **attributes))
        return name
