"""jax2onnx, which exports JAX.

No weight has a name of its program: all are words with numbers. It writes a matmul as Gemm with zeros for the bias,
``dot_bias_1`` or a scalar.
"""

from __future__ import annotations

from typing import Final

from onnxtrain.model_file.exporters.exporter import Exporter

EXPORTER: Final = Exporter("jax2onnx", {"numbers": r"^dot_bias_\d+$"})
