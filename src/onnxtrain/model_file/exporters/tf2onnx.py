"""tf2onnx, which exports TensorFlow and Keras.

Variables have the path of the operation that reads them (``dense/MatMul/ReadVariableOp:0``), constants that of the
operation that they belong to. It folds what TensorFlow computes of variables alone: batch normalization becomes a
scale divided by the deviation and a shift. It leaves out biases of zeros, and joins the bias of a Keras LSTM with the
zeros of ONNX's second one.
"""

from __future__ import annotations

import re
from typing import Final

from onnxtrain.model_file.exporters.exporter import Exporter

_END: Final = r"(_\d+)?(:0)?$"
_VARIABLE: Final = r"/(ReadVariableOp|read)" + _END
_OPERATORS: Final = (
    r"(Abs|Add(V2)?|Einsum|Exp|Log(1p)?|MatMul|Max(imum)?|Mean|Min(imum)?|Mul|Neg|Pow|Prod|RealDiv|Reciprocal|Relu"
    r"|Rsqrt|Sigmoid|Softmax|Softplus|Sqrt|Square|Sub|Sum|Tanh|add|l2_normalize|matmul|mul|pow|sub|truediv)"
)

EXPORTER: Final = Exporter(
    "tf2onnx",
    {
        "made": r"(?i:(^|[/._])const(ant)?([._]?\d+)*$|const_fold_opt|^constantfolding/|__\d+$|/[xy]$)"
        r"|(?i:(^|/)(zeros|ones|fill|full)(_like)?(_\d+)*$)",
        "variable": _VARIABLE,
        "literal": r"/([xy]|Const(_\d+)?)(:0)?$",
        "computed": rf"^(?!.*batchnorm/).*/{_OPERATORS}(_\d+)?:0$",
        "statistic": rf"(^|/)batchnorm/Rsqrt{_END}",
        "scale": rf"(^|/)batchnorm/mul{_END}",
        "added": rf"(^|/)batchnorm/sub{_END}|(^|/)(?i:(bias_?)?add)(_\d+)?/(.*/)?(ReadVariableOp|read){_END}",
        "joined biases": r"^B\d*__\d+$",
    },
)


def without_operation(name: str) -> str:
    """Return the name of a tensor without the operation that reads the variable."""
    return re.sub(r"(/(ReadVariableOp|read)(_\d+)?)?(:0)?$", "", name)
