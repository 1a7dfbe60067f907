"""Every native kernel against the reference: the last bit for all but SSGD in float64, which sums in another order."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import helper
from operator_cases import CASES, IDS, TYPES, problem
from operator_graphs import model_of

from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.runtime import native


@pytest.fixture(scope="module")
def options():
    if not native.kernels_available():
        pytest.skip("the native library is not built")
    settings = onnxruntime.SessionOptions()
    settings.register_custom_ops_library(str(native.custom_ops_library()))
    settings.log_severity_level = 4
    return settings


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
        units = 16 if name == "SSGD" and dtype == np.float64 else 1 if name == "SSGD" else 0
        unit = np.spacing(np.maximum(np.abs(old), np.abs(want - old)))
        assert (np.abs(new - want) <= units * unit).all()
