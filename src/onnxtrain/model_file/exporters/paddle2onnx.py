"""paddle2onnx, which exports PaddlePaddle.

Weights are Constant nodes with the name of their parameter (``linear_0.w_0``). Results of the program's operators are
named by these (``p2o.pd_op.exp.0.0``), those that the exporter adds by what it does (``helper.unsqueeze.0``), tensors
of ``to_tensor`` ``generated_tensor_1``, and results of operators outside of the exported function ``eager_tmp_1``.
"""

from __future__ import annotations

from typing import Final

from onnxtrain.model_file.exporters.exporter import Exporter

_OPERATORS: Final = (
    r"(abs|add|divide|einsum|elementwise_pow|exp|log|log1p|matmul|max|maximum|mean|min|minimum|multiply|pow|prod"
    r"|reciprocal|relu|rsqrt|scale|sigmoid|softmax|softplus|sqrt|square|subtract|sum|tanh)"
)

EXPORTER: Final = Exporter(
    "paddle2onnx",
    {
        "made": r"(?i:(^|\.)tmp(_\d+)*$|^p2o\.|^(eager_tmp|generated_tensor)_\d+$|^(helper|auto)\.[a-z_]+\.\d+$)",
        "numbers": r"^generated_tensor_\d+$",
        "of module": r"^helper\.(?!constant)",
        "computed": rf"^p2o\.pd_op\.{_OPERATORS}_?\.\d+\.\d+$|^eager_tmp_\d+$",
        "eager": r"^eager_tmp_\d+$",
    },
)
