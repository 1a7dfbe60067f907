"""skl2onnx, which exports scikit-learn: it names the constants of its formulas by what they are for."""

from __future__ import annotations

from typing import Final

from onnxtrain.model_file.exporters.exporter import Exporter

EXPORTER: Final = Exporter(
    "skl2onnx",
    {
        "made": r"(?i:cst\d*$|^(unity|unit_float_tensor|negate|minus_one|half_scalar|clf_length|prod_operand"
        r"|const_[np]\d+|(inverted_)?n_classes(_minus_one)?)\d*$)",
    },
)
