"""Each exporter has one file, which alone knows how it names tensors."""

from __future__ import annotations

import importlib
import pkgutil
import re
from typing import get_args

import pytest

from onnxtrain.model_file import exporters
from onnxtrain.model_file.exporters import EXPORTERS, NameOrigin, gives, origin_of
from onnxtrain.model_file.exporters.exporter import Kind

pytestmark = pytest.mark.sampled(1)  # each case is cheap

NAMES: dict[str, dict[Kind, list[str]]] = {
    "torch.onnx.export(dynamo=False)": {
        "made": ["onnx::MatMul_26", "12", "/body/Constant_output_0"],
        "literal": ["/Constant_1_output_0"],
        "of module": ["onnx::Mul_32"],
        "folded": ["onnx::Conv_23"],
    },
    "torch.onnx.export(dynamo=True)": {
        "made": ["val_8", "c_lifted_tensor_0", "block.lifted_tensor_1"],
        "result": ["sigmoid_2", "masked_fill", "fft_rfft"],
        "bounded": ["softplus", "exp_1"],
        "literal": ["_tensor_constant0", "hann_window"],
    },
    "tf2onnx": {
        "made": ["const_fold_opt__12", "dense/zeros_like_1"],
        "variable": ["dense/MatMul/ReadVariableOp:0", "dense/kernel/read"],
        "literal": ["mul/y:0", "mul/Const_3"],
        "computed": ["gate_1/Sigmoid_1:0"],
        "statistic": ["bn/batchnorm/Rsqrt:0"],
        "scale": ["bn/batchnorm/mul:0"],
        "added": ["dense/BiasAdd/ReadVariableOp:0", "bn/batchnorm/sub"],
        "joined biases": ["B0__32"],
    },
    "paddle2onnx": {
        "made": ["p2o.pd_op.reshape.0.0", "helper.constant.0"],
        "numbers": ["generated_tensor_1"],
        "of module": ["helper.unsqueeze.0"],
        "computed": ["p2o.pd_op.exp.0.0"],
        "eager": ["eager_tmp_1"],
    },
    "jax2onnx": {"numbers": ["dot_bias_1"]},
    "skl2onnx": {"made": ["unity2", "n_classes_minus_one", "shape_tensor_cst"]},
    "onnxruntime-genai": {"made": ["/model/constants/INT64/[0]"], "literal": ["/model/constants/FLOAT/[1.0]"]},
    "optimum": {},
}

AUTHORS = [
    "layer.0.norm.bias",
    "logit_scale",
    "model.layers.0.attn.q_proj.MatMul.weight",
    "linear_0.w_0",
    "B",
    "exponent",
]


def test_every_file_has_its_record():
    names = [module.name for module in pkgutil.iter_modules(exporters.__path__) if module.name != "exporter"]
    found = [importlib.import_module(f"{exporters.__name__}.{name}").EXPORTER for name in names]
    assert sorted(map(id, found)) == sorted(map(id, EXPORTERS))
    assert {exporter.name: {*exporter.names} for exporter in EXPORTERS} == {
        name: {*kinds} for name, kinds in NAMES.items()
    }
    assert {kind for exporter in EXPORTERS for kind in exporter.names} == {*get_args(Kind)}


@pytest.mark.parametrize("exporter", EXPORTERS, ids=lambda exporter: exporter.name)
def test_names_tell_what_a_tensor_is(exporter):
    for kind, names in NAMES[exporter.name].items():
        for name in names:
            assert re.search(exporter.names[kind], name), (kind, name)
            assert gives(kind, name)


@pytest.mark.parametrize("name", AUTHORS)
def test_an_author_s_name_is_no_exporter_s(name):
    assert origin_of(name) is not NameOrigin.EXPORTER
    assert [kind for kind in get_args(Kind) if gives(kind, name)] == []
