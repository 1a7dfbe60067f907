"""Gradients of ONNX's operators, of first and second order: the rows of ``tests/autodiff/cases``."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

from autodiff.case import Case, all_rows, apart, case
from conformance import oracle
from conformance.evaluation import OPERATORS
from conformance.oracle import Arrays
from conformance.subject import Made, Subject, file_name
from onnxtrain.autodiff.evaluator import evaluator
from onnxtrain.graph.domains import TRAINING_DOMAIN
from onnxtrain.runtime.testing import _as, _by_name, _node_model, with_float_type

SINGLE, DOUBLE = np.dtype(np.float32), np.dtype(np.float64)

SOURCE = "central differences in float64 of ONNX's reference evaluator, to fourth order"

OLDEST = 18
"""Models below this opset are upgraded for training; the suite has none."""


def subjects() -> Iterator[Subject]:
    """All rows once, and the first that is smooth of each operator for the second order."""
    rows = [row for row in (*all_rows(), *MORE) if _is_of_onnx(row) and row.opset >= OLDEST]
    names = {row.name for row in rows}
    for row in rows:
        twin = row.name.removesuffix("-constant").removesuffix("-weights-known")
        if row.name in LEFT_OUT or (twin != row.name and twin in names):
            continue  # the same values with inputs as initializers
        covers = frozenset(name for _, name in row.operators)
        yield Subject("gradient", file_name(row.name), covers, functools.partial(_first, row))
    seen: set[str] = set()
    alone = [row for row in rows if len(row.operators) == 1]
    for row in (*alone, *rows):  # one node where there is such a row
        new = {name for _, name in row.operators} - seen
        if new and row.name not in LEFT_OUT:
            seen |= new
            yield Subject("second_order", file_name(row.name), frozenset(new), functools.partial(_second, row))


def _is_of_onnx(row: Case) -> bool:
    return all(not domain for domain, _ in row.operators)


SLOW = "is slow in ONNX's reference evaluator"
LEFT_OUT = {
    "DeformConv-offset-groups": SLOW,
    "DeformConv-bias-mask": SLOW,
    "DeformConv-groups": SLOW,
    "Dropout-training": "draws random numbers",
    "Dropout-training-constant": "draws random numbers",
    "Dropout-training-no-mask": "draws random numbers",
    "Dropout-training-no-mask-constant": "draws random numbers",
    "Dropout-training-22": "draws random numbers",
    "Dropout-training-22-constant": "draws random numbers",
    "GroupNormalization-(2, 4, 3)-18": "of an opset where the operator is deprecated",
    "GroupNormalization-(2, 6, 2, 3)-18": "of an opset where the operator is deprecated",
    "MaxRoiPool-against-torch": "has no image in its regions; MORE has one",
    "RoiAlign-maximum-adaptive-half": "two samples are equally large",
}
"""Rows that the suite leaves out, and why."""


REGIONS = np.array([[0.0, 0.0, 0.0, 5.0, 3.0], [1.0, 2.0, 1.0, 4.0, 4.0]])
MORE = [
    case("MaxRoiPool", apart(2, 2, 6, 7), REGIONS, label="regions", wrt=["a"], pooled_shape=[2, 3]),
]
"""Rows that only the suite has, since ONNX's own evaluator does not run them."""


class _Problem:
    """A row with its arrays in float32, and the projection of its outputs in float64."""

    def __init__(self, row: Case) -> None:
        node = row.node
        model = _node_model(node, row.inputs, row.opset, "float") if isinstance(node, onnx.NodeProto) else node
        self.model = with_float_type(model, SINGLE)
        arrays = [array for array in row.inputs if array is not None]
        given = _by_name(self.model, arrays)
        self.feeds = {name: _as(array, SINGLE) for name, array in given.items()}
        self.wide = {name: _as(array, DOUBLE) for name, array in self.feeds.items()}
        self.names: Sequence[str] = row.wrt or [name for name, a in self.feeds.items() if a.dtype == SINGLE]
        self._evaluator = evaluator(with_float_type(self.model, DOUBLE), OPERATORS)
        outputs = self._run(self.wide)
        rng = np.random.default_rng(11)
        self.weights = {
            name: rng.normal(size=y.shape).astype(SINGLE) for name, y in outputs.items() if y.dtype == DOUBLE
        }
        self.directions = {name: rng.normal(size=self.feeds[name].shape).astype(SINGLE) for name in self.names}

    def _run(self, feeds: Arrays) -> dict[str, np.ndarray]:
        with np.errstate(all="ignore"):
            found = self._evaluator.run(None, dict(feeds))
        names = [output.name for output in self.model.graph.output]
        return {name: np.asarray(y) for name, y in zip(names, found, strict=True)}

    def objective(self, feeds: Arrays) -> float:
        outputs = self._run(feeds)
        return float(sum(np.sum(outputs[name] * weight.astype(DOUBLE)) for name, weight in self.weights.items()))


def _first(row: Case) -> Made:
    problem = _Problem(row)
    expected = {f"{n}_grad": oracle.gradient(problem.objective, problem.wide, n) for n in problem.names}
    model = _differentiated(problem.model, problem.weights, problem.names, "{}_grad")
    return Made(model, [(problem.feeds, expected)], SOURCE)


def _second(row: Case) -> Made:
    problem = _Problem(row)
    wide = {name: array.astype(DOUBLE) for name, array in problem.directions.items()}
    expected = {f"{n}_second": oracle.second(problem.objective, problem.wide, n, wide) for n in problem.names}
    first = _differentiated(problem.model, problem.weights, problem.names, "{}_grad")
    directions = {f"{name}_grad": array for name, array in problem.directions.items()}
    model = _differentiated(first, directions, problem.names, "{}_second", suffix=" of the first gradient")
    return Made(model, [(problem.feeds, expected)], SOURCE + ", of the first gradient along a direction")


def _differentiated(
    model: onnx.ModelProto, weights: Arrays, names: Sequence[str], output: str, suffix: str = ""
) -> onnx.ModelProto:
    """A model of the gradients of sum_k sum(weights_k * output_k), by a node Gradient of the standard."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    terms = []
    for name, weight in weights.items():
        graph.initializer.append(numpy_helper.from_array(weight, f"weight of {name}"))
        graph.node.append(helper.make_node("Mul", [name, f"weight of {name}"], [f"weighted {name}"]))
        graph.node.append(helper.make_node("ReduceSum", [f"weighted {name}"], [f"sum of {name}"], keepdims=0))
        terms.append(f"sum of {name}")
    objective = f"objective{suffix}"
    graph.node.append(helper.make_node("Sum", terms, [objective]))
    outputs = [output.format(name) for name in names]
    graph.node.append(
        helper.make_node("Gradient", list(names), outputs, domain=TRAINING_DOMAIN, xs=list(names), y=objective)
    )
    infos = {info.name: info for info in graph.input}
    known = {info.name for info in graph.value_info}
    graph.value_info.extend(info for info in graph.output if info.name not in known)
    del graph.output[:]
    for name, found in zip(names, outputs, strict=True):
        info = onnx.ValueInfoProto()
        info.CopyFrom(infos[name])
        info.name = found
        graph.output.append(info)
    if not any(entry.domain == TRAINING_DOMAIN for entry in result.opset_import):
        result.opset_import.append(helper.make_opsetid(TRAINING_DOMAIN, 1))
    return result
