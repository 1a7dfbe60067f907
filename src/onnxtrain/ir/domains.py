"""The operator sets that the program speaks of, each named once."""

TRAINING_DOMAIN = "ai.onnx.preview.training"
"""The standard's training operators: Gradient, Adagrad, Adam, Momentum."""

ONNXTRAIN_DOMAIN = "onnxtrain"
"""Operators of this project: optimizers that the standard lacks, and fused operators with native kernels."""

MICROSOFT_DOMAIN = "com.microsoft"
"""ONNX Runtime's own operators."""

MACHINE_LEARNING_DOMAIN = "ai.onnx.ml"
"""The standard's operators of classical models: trees, support vectors, ZipMap."""


def is_default_domain(domain: str) -> bool:
    """Whether a domain is ONNX's own, which has two spellings."""
    return domain in ("", "ai.onnx")
