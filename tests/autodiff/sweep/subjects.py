"""ONNX's node tests as models to differentiate, at several opsets."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import onnx
from onnx import defs, helper, numpy_helper, version_converter
from onnx.backend.test.loader import load_model_tests

from autodiff.sweep.lift import lift
from autodiff.sweep.tables import (
    CONFIGURATION,
    MOVED,
    NEWEST,
    OPSETS,
    REPLACED,
    SILENT,
    SKIPPED,
    WITHOUT_EVALUATOR,
    matching,
)
from onnxtrain.autodiff import registry
from onnxtrain.errors import ModelError
from onnxtrain.model_file.upgrade import upgrade_opset

FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE)
HALVES = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
OLDEST = 18
"""Older models are upgraded to this opset before they are differentiated."""


@dataclass(frozen=True, eq=False)
class NodeTest:
    """One of ONNX's node tests.

    Attributes:
        name: Name without ``test_``.
        operator: Its only operator.
        model: The model of ONNX's test.
        inputs: Arrays, lists of arrays for sequences, ``None`` for an empty optional.
        outputs: The outputs that ONNX expects.
    """

    name: str
    operator: str
    model: onnx.ModelProto
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]


@dataclass(frozen=True)
class Subject:
    """A node test at one opset, with tensors only.

    Attributes:
        test: Name of the test.
        operator: Its operator.
        opset: Version of the default domain.
        model: The model.
        feeds: Its inputs.
        expected: The outputs that ONNX expects for the inputs before they were moved.
        moved: True if the inputs were moved away from kinks and ties.
        wrt: The inputs to differentiate by.
    """

    test: str
    operator: str
    opset: int
    model: onnx.ModelProto
    feeds: Mapping[str, np.ndarray]
    expected: Mapping[str, np.ndarray]
    moved: bool
    wrt: tuple[str, ...]

    @property
    def has_integers(self) -> bool:
        """True where some inputs are axes, indices or sizes, which a rule may know or not."""
        return any(not _is_float(array) for array in self.feeds.values())

    def with_constants(self) -> Subject:
        """Turn integer and boolean inputs into initializers."""
        model = onnx.ModelProto()
        model.CopyFrom(self.model)
        known = {name: array for name, array in self.feeds.items() if not _is_float(array)}
        model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in known.items())
        for info in [info for info in model.graph.input if info.name in known]:
            model.graph.input.remove(info)
        return replace(self, model=model, feeds={k: v for k, v in self.feeds.items() if k not in known})


@functools.cache
def node_tests() -> tuple[NodeTest, ...]:
    """ONNX's tests of one node of the default domain, in its order."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ONNX computes some expected values out of range
        loaded = load_model_tests(kind="node")
    tests = []
    for case in loaded:
        node = case.model.graph.node[0]
        if len(case.model.graph.node) == 1 and node.domain in ("", "ai.onnx") and "_expanded" not in case.name:
            inputs, outputs = case.data_sets[0]
            name = case.name.removeprefix("test_")
            tests.append(NodeTest(name, node.op_type, case.model, tuple(inputs), tuple(outputs)))
    return tuple(tests)


@functools.cache
def refusal(test: NodeTest) -> str | None:
    """The reason why a test is no gradient check; ``None`` where it is one."""
    given, made = _element_types(test.model.graph.input), _element_types(test.model.graph.output)
    if not given.intersection(FLOATS + HALVES) or not made.intersection(FLOATS + HALVES):
        return "it has no floating-point input or no floating-point output"
    entry = registry.find(test.operator, "", NEWEST)
    if entry is not None and entry.function is None:
        return "no gradient flows through the operator (listed above)"
    if not _known(test.operator):
        return f"the operator is newer than opset {NEWEST}"
    if not given.intersection(FLOATS) or not made.intersection(FLOATS):
        return "half precision only: too coarse for differences; the same operator is checked in double"
    named = matching(SKIPPED, test.name)
    if named is None and (subject := subject_at(test, own_opset(test))) is not None and not subject.wrt:
        return "its input sequence or optional is empty"
    return named


def _known(operator: str) -> bool:
    try:
        return bool(defs.get_schema(operator, NEWEST))
    except defs.SchemaError:
        return False


def _element_types(infos: Any) -> set[int]:
    found = set()
    for info in infos:
        kind = info.type
        while (which := kind.WhichOneof("value")) in ("sequence_type", "optional_type"):
            kind = getattr(kind, which).elem_type
        found.add(kind.tensor_type.elem_type)
    return found


def own_opset(test: NodeTest) -> int:
    """The opset at which a test is checked first: its own, if the opset is supported."""
    return min(max(declared_opset(test.model), OLDEST), NEWEST)


def subjects(test: NodeTest) -> Iterator[Subject]:
    """The test at its own opset, if it converts to it, then at the others."""
    own = own_opset(test)
    for opset in (own, *(opset for opset in OPSETS if opset != own)):
        subject = subject_at(test, opset)
        if subject is None and opset == own:
            return
        if subject is not None:
            yield subject


def subject_at(test: NodeTest, opset: int) -> Subject | None:
    """The test at an opset; ``None`` where the operator differs there."""
    model = None if (test.operator, opset) in WITHOUT_EVALUATOR else at_opset(test.model, opset)
    if model is None:
        return None
    model, feeds, expected = lift(model, test.inputs, test.outputs)
    configuration, silent = _named(test, CONFIGURATION, "input"), _named(test, SILENT, "output")
    wrt = tuple(name for name, array in feeds.items() if _is_float(array) and name not in configuration)
    for info in [info for info in model.graph.output if info.name in silent]:
        model.graph.output.remove(info)
        del expected[info.name]
    moved = _move(test.name, wrt, feeds)
    return Subject(test.name, test.operator, opset, model, feeds, expected, moved, wrt)


def _is_float(array: np.ndarray) -> bool:
    return array.dtype in (np.float32, np.float64)


def _move(test: str, wrt: Sequence[str], feeds: dict[str, np.ndarray]) -> bool:
    """Move inputs by the tables; return whether any was moved."""
    move, replaced = matching(MOVED, test), matching(REPLACED, test)
    if move is not None:
        rng = np.random.default_rng(0)
        for name in [name for name in feeds if name in (move.inputs or wrt)]:
            shift = rng.uniform(move.low, move.high, size=feeds[name].shape)
            feeds[name] = np.asarray(feeds[name] + shift, feeds[name].dtype)
    if replaced is not None:
        feeds.update(
            {name: np.where(np.isfinite(feeds[name]), feeds[name], 1).astype(feeds[name].dtype) for name in wrt}
        )
    return move is not None or replaced is not None


def _named(test: NodeTest, table: Mapping[tuple[str, str], str], side: Literal["input", "output"]) -> set[str]:
    """Names of inputs or outputs that a table lists by their name in the schema."""
    schema = defs.get_schema(test.operator, declared_opset(test.model))
    formal = schema.inputs if side == "input" else schema.outputs
    given = test.model.graph.node[0].input if side == "input" else test.model.graph.node[0].output
    return {
        name
        for index, name in enumerate(given)
        if name and (test.operator, formal[min(index, len(formal) - 1)].name) in table
    }


def declared_opset(model: onnx.ModelProto) -> int:
    """The version of the default domain that a model declares."""
    return next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))


def at_opset(model: onnx.ModelProto, opset: int) -> onnx.ModelProto | None:
    """A copy of a model at another opset, or ``None`` where it cannot be converted."""
    declared = declared_opset(model)
    if _unchanged(model.graph, declared, opset):
        result = onnx.ModelProto()
        result.CopyFrom(model)
        for entry in result.opset_import:
            if entry.domain in ("", "ai.onnx"):
                entry.version = opset
    else:
        try:
            convert = upgrade_opset if opset > declared else version_converter.convert_version
            result = convert(model, opset)
        except (RuntimeError, version_converter.ConvertError, ModelError):
            return None
        if not _valid(result):
            return None
    result.ir_version = max(10, helper.find_min_ir_version_for(list(result.opset_import), ignore_unknown=True))
    return result


def _unchanged(graph: onnx.GraphProto, first: int, second: int) -> bool:
    for node in graph.node:
        try:
            versions = {defs.get_schema(node.op_type, opset, node.domain).since_version for opset in (first, second)}
        except defs.SchemaError:
            return False
        if len(versions) > 1:
            return False
        if not all(_unchanged(a.g, first, second) for a in node.attribute if a.type == onnx.AttributeProto.GRAPH):
            return False
    return True


def _valid(model: onnx.ModelProto) -> bool:
    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError:
        return False
    return True
