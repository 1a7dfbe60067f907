"""ONNX's backend tests through onnxtrain's backend: the nine of the training domain, and tests of emitted operators.

The sources tell which operators onnxtrain's graphs emit.
"""

from __future__ import annotations

import re
import unittest
import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.backend.test.case.test_case import TestCase
from onnx.backend.test.loader import load_model_tests
from onnx.backend.test.runner import Runner

import onnxtrain
import sampling
from onnxtrain import backend
from onnxtrain.errors import ModelError
from onnxtrain.interop.backend import _meaning
from onnxtrain.model_file.validity import newest_opset
from onnxtrain.operators.arithmetic import ONNX_OPERATORS
from sentences import raises_sentence

TRAINING_TESTS = {
    *("test_adam", "test_adam_multiple", "test_adagrad", "test_adagrad_multiple"),
    *("test_momentum", "test_momentum_multiple", "test_nesterov_momentum"),
    *("test_gradient_of_add", "test_gradient_of_add_and_mul"),
}

NO_NUMPY_TYPE = "ONNX Runtime's Python interface takes no NumPy arrays of this type"
NO_KERNEL = "ONNX Runtime's CPU provider has no kernel for this type"
OTHER_RESULT = "ONNX Runtime's kernel gives another result"
LESS_EXACT = "ONNX Runtime's kernel errs by 1e-4 around zero, the runner allows 1e-7"
RANDOM = "ONNX Runtime draws other random numbers than ONNX's reference"
NOT_COMPARABLE = "ONNX's runner cannot compare an optional sequence"

# What ONNX Runtime itself cannot run. Each is expected to fail: one that passes fails the suite.
EXCLUDED = {
    r"(?i)_(bfloat16|float8e\w*|float4e2m1|e4m3\w*|e5m2|u?int[24])(_|\b)": NO_NUMPY_TYPE,
    r"^test_dft_": LESS_EXACT,
    r"^test_training_dropout_(default_)?(mask_)?cpu$": RANDOM,
    r"^test_loop16_seq_none_": NOT_COMPARABLE,
    r"^test_(max|min)_u?int16_": NO_KERNEL,
    r"^test_pow_types_float32_uint(32|64)_": NO_KERNEL,
    r"^test_top_k_uint64_": NO_KERNEL,
    r"^test_attention_\w+_bf16_expanded_": NO_KERNEL,
    r"^test_reduce_max_empty_set_bool_": NO_KERNEL,
    r"^test_maxunpool_export_with_output_shape_": OTHER_RESULT,
    r"^test_resize_downsample_scales_(linear|cubic)_align_corners_": OTHER_RESULT,
}


def emitted_operators() -> set[str]:
    """ONNX's operators that the sources emit through a builder."""
    names = set(ONNX_OPERATORS.values())
    for file in Path(onnxtrain.__file__).parent.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        names |= set(re.findall(r"\b(?:op|builder|self)\.([A-Z]\w+)\(", text))
        names |= set(re.findall(r"\bseveral\(\s*\"([A-Z]\w+)\"", text))
        names |= set(re.findall(r"\bbinary\(\"([A-Z]\w+)\"", text))
        names |= set(re.findall(r"ir\.Node\(\s*\"\", \"([A-Z]\w+)\"", text))
    return {name for name in names if onnx.defs.has(name, "")}


def chosen_tests() -> dict[str, TestCase]:
    """ONNX's tests of the training operators, and of all emitted operators."""
    emitted = emitted_operators()
    return {
        case.name: case
        for case in load_model_tests(kind="node")
        if case.name in TRAINING_TESTS or {node.op_type for node in case.model.graph.node} <= emitted
    }


def is_redefined(case: TestCase) -> bool:
    """Return whether an operator is newer than ONNX Runtime's newest opset, so that the older one is emitted."""
    opset = next((entry.version for entry in case.model.opset_import if not entry.domain), 0)
    nodes = [node for node in case.model.graph.node if not node.domain]
    return any(_meaning(node, opset) != _meaning(node, min(opset, newest_opset())) for node in nodes)


class Selected(Runner):
    """ONNX's runner for chosen tests only; its own would report thousands as skipped."""

    def __init__(self, names: set[str]) -> None:
        super().__init__(backend, __name__)
        for category, items in self._test_items.items():
            kept = {name: item for name, item in items.items() if name.removesuffix("_cpu") in names}
            self._test_items[category] = {name: item for name, item in kept.items() if name.endswith("_cpu")}


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # ONNX computes some expected values out of range
    CASES = chosen_tests()
    REDEFINED = {name: case for name, case in CASES.items() if is_redefined(case)}
    CHOSEN = (CASES.keys() - REDEFINED.keys()) | TRAINING_TESTS
    RUNNER = Selected(CHOSEN)
for pattern in EXCLUDED:
    RUNNER.xfail(pattern)
ITEMS = {name: item for items in RUNNER._test_items.values() for name, item in items.items()}
OTHERS = [item for name, item in sorted(ITEMS.items()) if name.removesuffix("_cpu") not in TRAINING_TESTS]
for item, is_sampled in zip(OTHERS, sampling.places([{} for _ in OTHERS], 3), strict=True):
    if not is_sampled:
        item.func = pytest.mark.thorough(item.func)
globals().update({name: case for name, case in RUNNER.test_cases.items() if issubclass(case, unittest.TestCase)})


def test_the_suite_is_the_one_that_was_meant():
    run = {name for items in RUNNER._test_items.values() for name in items}
    assert {f"{name}_cpu" for name in TRAINING_TESTS} <= run
    assert run == {f"{name}_cpu" for name in CHOSEN}
    assert len(run) > 500
    basics = "Add Sub Mul Div Pow Sqrt Where Cast MatMul Gemm ReduceSum Reshape Transpose Concat Expand ScatterElements"
    assert set(basics.split()) <= emitted_operators()
    for pattern in EXCLUDED:
        assert any(re.search(pattern, name) for name in run), f"{pattern} matches no test"


def older_definition(case: TestCase) -> onnx.ModelProto | None:
    """The model of a test at ONNX Runtime's newest opset; none where it uses later features."""
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    next(entry for entry in model.opset_import if not entry.domain).version = newest_opset()
    try:
        onnx.checker.check_model(onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True), True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError):
        return None
    return model


@pytest.mark.parametrize("name", REDEFINED)
def test_what_an_older_definition_says_alike(name):
    """Tests such as BitShift's with unsigned integers, whose later definition adds signed ones."""
    model = older_definition(REDEFINED[name])
    if model is None or re.search(r"mod_float.*fmod_0|bitshift.*uint16", name):
        pytest.skip("only the later definition has this, or ONNX Runtime has no kernel for the type")
    for inputs, outputs in REDEFINED[name].data_sets:
        found = backend.prepare(model).run(list(inputs))
        for one, other in zip(found, outputs, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)


# The interface itself.

OLDER_THAN_28 = pytest.mark.skipif(newest_opset() >= 28, reason="this ONNX Runtime has Mod as opset 28 defines it")

X = np.asarray([[1.0, -2.0], [3.0, 4.0]], np.float32)


def relu(opset: int, ir_version: int = 8, operator: str = "Relu") -> onnx.ModelProto:
    return helper.make_model(
        helper.make_graph(
            [helper.make_node(operator, ["x"], ["y"])],
            "one node",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2])],
        ),
        opset_imports=[helper.make_opsetid("", opset)],
        ir_version=ir_version,
    )


@pytest.mark.parametrize("inputs", [[X], X, {"x": X}])
def test_inputs_by_order_alone_and_by_name(inputs):
    (y,) = backend.run_model(relu(18), inputs)
    np.testing.assert_array_equal(y, np.maximum(X, 0))


def test_a_prepared_model_runs_many_times():
    prepared = backend.prepare(relu(18), threads=1)
    for scale in (1, 2):
        np.testing.assert_array_equal(prepared.run([scale * X])[0], np.maximum(scale * X, 0))


def test_too_many_inputs():
    with raises_sentence("arrays_of_inputs", got=2, wanted=1):
        backend.prepare(relu(18)).run([X, X])


def test_devices():
    assert backend.supports_device("CPU")
    assert not backend.supports_device("TPU")
    with raises_sentence("no_provider_of_device", what="device", got="TPU"):
        backend.prepare(relu(18), "TPU")


def test_compatibility():
    assert backend.is_compatible(relu(18))
    assert not backend.is_compatible(relu(18, operator="NoSuchOperator"))
    mystery = relu(18)
    mystery.graph.node[0].domain = "somewhere"
    mystery.opset_import.append(helper.make_opsetid("somewhere", 1))
    assert not backend.is_compatible(mystery)


def test_newer_versions_are_declared_older_where_nothing_changed():
    newest = onnx.defs.onnx_opset_version()
    model = relu(newest, onnx.IR_VERSION)
    before = model.SerializeToString()
    np.testing.assert_array_equal(backend.run_model(model, [X])[0], np.maximum(X, 0))
    assert model.SerializeToString() == before


@OLDER_THAN_28
def test_newer_versions_are_refused_where_something_changed():
    model = relu(28, onnx.IR_VERSION)
    model.graph.node[0].CopyFrom(helper.make_node("Mod", ["x", "x"], ["y"], fmod=1))
    with raises_sentence("opset_too_new", what="Mod", got=28, wanted=newest_opset()):
        backend.prepare(model)


@OLDER_THAN_28
def test_operators_in_branches_count_too():
    model = relu(28, onnx.IR_VERSION)
    info = [helper.make_tensor_value_info("z", TensorProto.FLOAT, None)]
    body = helper.make_graph([helper.make_node("Mod", ["x", "x"], ["z"], fmod=1)], "branch", [], info)
    model.graph.input.append(helper.make_tensor_value_info("c", TensorProto.BOOL, []))
    model.graph.node[0].CopyFrom(helper.make_node("If", ["c"], ["y"], then_branch=body, else_branch=body))
    with pytest.raises(ModelError, match="where Mod differs from opset"):
        backend.prepare(model)


def test_run_node():
    node = helper.make_node("Clip", ["x", "", "high"], ["y"])
    (y,) = backend.run_node(node, [X, np.float32(2)], opset_version=13)
    np.testing.assert_array_equal(y, np.minimum(X, 2))


def test_run_node_of_this_projects_domain():
    node = helper.make_node("SSGD", ["R", "T", "X", "G"], ["X_new"], domain="onnxtrain", measure="p-norm", p=2.0)
    (x_new,) = backend.run_node(node, [np.float32(0.5), np.int64(0), X, X])
    np.testing.assert_array_equal(x_new, X / 2)


def test_run_node_counts_its_inputs():
    with raises_sentence("arrays_of_node", what="Relu", got=2, wanted=1):
        backend.run_node(helper.make_node("Relu", ["x"], ["y"]), [X, X])


def test_errors_of_the_training_operators_are_ours():
    node = helper.make_node("Adam", ["R", "T", "X", "G"], ["X_new"], domain="ai.onnx.preview.training")
    with raises_sentence("tensors_of_optimizer", what="Adam", got=2, wanted=4):
        backend.run_node(node, [np.float32(0.5), np.int64(0), X, X])
    gradient = helper.make_node("Gradient", ["X"], ["dX"], domain="ai.onnx.preview.training", xs=["X"], y="nowhere")
    with raises_sentence("gradient_names_unknown", got="nowhere"):
        backend.run_node(gradient, [X])
