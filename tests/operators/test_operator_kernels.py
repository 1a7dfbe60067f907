"""Every native kernel against the reference: to the last bit, but for SSGD and LAMB, which sum in another order."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import helper
from operator_cases import CASES, IDS, TYPES, problem
from operator_graphs import model_of
from test_operator_body import EXACT, UNITS

from onnxtrain import kernels
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.operators import OPTIMIZERS
from onnxtrain.runtime import native


@pytest.fixture(scope="module")
def options():
    if not native.kernels_available():
        pytest.skip("the native library is not built")
    settings = onnxruntime.SessionOptions()
    settings.register_custom_ops_library(str(native.custom_ops_library()))
    settings.log_severity_level = 4
    return settings


@pytest.mark.sampled("T")
@pytest.mark.parametrize("T", [0, 3, 1000])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("name", "attributes"), CASES, ids=IDS)
def test_kernel_equals_reference(name, attributes, dtype, T, options):
    made = problem(name, attributes, [((40, 30), dtype), ((7,), dtype)], seed=T)
    inputs = [np.asarray(0.1, np.float32), np.asarray(T), *made.tensors]
    wanted = made.run(inputs[0], inputs[1])
    model = model_of(name, inputs, attributes, outputs=len(wanted))
    model.opset_import.append(helper.make_opsetid("", 18))
    typed = ir.to_proto(infer_shapes(ir.from_proto(model)))  # a session wants the types of a kernel's outputs
    session = onnxruntime.InferenceSession(typed.SerializeToString(), options, providers=["CPUExecutionProvider"])
    got = session.run(None, {value.name: array for value, array in zip(typed.graph.input, inputs, strict=True)})
    for new, want, old in zip(got, wanted, made.old, strict=True):
        units = 0 if name in EXACT else UNITS[np.dtype(dtype)]
        unit = np.spacing(np.maximum(np.abs(old), np.abs(want - old)))
        assert (np.abs(new - want) <= units * unit).all()


@pytest.mark.sampled("dtype")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("name", "attributes"), CASES, ids=IDS)
def test_the_fused_kernel_prepares_gradients(name, attributes, dtype, masked, options):
    made = problem(name, attributes, [((40, 30), dtype)], seed=3)
    factor, mask = np.asarray(0.37, dtype), np.random.default_rng(4).random((40, 30)) < 0.6
    X, G, *states = made.tensors
    prepared = G * factor if not masked else np.where(mask, G, dtype(0)) * factor
    rate, count = np.asarray(0.1, np.float32), np.asarray(3)
    old = [X, *states]
    kind = helper.np_dtype_to_tensor_dtype(X.dtype)
    results = []
    for operator, domain, feeds in (
        (name, made.schema.domain, {"R": rate, "T": count, "X": X, "G": prepared}),
        (f"Fused{name}", ONNXTRAIN_DOMAIN, {"R": rate, "T": count, "factor": factor, "X": X, "G": G}),
    ):
        fused = operator != name
        feeds |= {"M": mask} if fused and masked else {}
        feeds |= {f"state{index}": state for index, state in enumerate(states)}
        produced = [f"output{index}" for index in range(len(old))]
        own = {"masked": 1} if fused and masked else {}
        graph = helper.make_graph(
            [helper.make_node(operator, list(feeds), produced, domain=domain, **attributes, **own)],
            "update",
            [
                helper.make_tensor_value_info(k, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
                for k, v in feeds.items()
            ],
            [helper.make_tensor_value_info(output, kind, X.shape) for output in produced],
        )
        opsets = [helper.make_opsetid("", 18), helper.make_opsetid(domain, 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        results.append(session.run(None, feeds))
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.skipif(not native.kernels_available(), reason="the native library is not built")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("name", "attributes"), CASES, ids=IDS)
def test_functions_over_arrays_equal_the_reference(name, attributes, dtype):
    made = problem(name, attributes, [((40, 30), dtype), ((7,), dtype)], seed=5)
    wanted = made.run(np.float64(0.1), np.int64(3))
    xs, gs, states = made.tensors[:2], made.tensors[2:4], made.tensors[4:]
    step = {"step": 3} if OPTIMIZERS[name].schema.counted else {}
    old = made.old
    before = [array.copy() for array in old]
    getattr(kernels, f"{name.lower()}_")(xs, gs, states, learning_rate=0.1, **step, **attributes)
    for new, want, start in zip(old, wanted, before, strict=True):
        units = 0 if name in EXACT else UNITS[np.dtype(dtype)]
        unit = np.spacing(np.maximum(np.abs(start), np.abs(want - start)))
        assert (np.abs(new - want) <= units * unit).all()
