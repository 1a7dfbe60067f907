"""Names of the operator sets."""

TRAINING_DOMAIN = "ai.onnx.preview.training"
"""The standard's training operators: Gradient, Adagrad, Adam, Momentum."""

ONNXTRAIN_DOMAIN = "onnxtrain"
"""Operators of this project: optimizers that the standard lacks, and fused operators with native kernels."""

MICROSOFT_DOMAIN = "com.microsoft"
"""ONNX Runtime's own operators."""

NCHWC_DOMAIN = "com.microsoft.nchwc"
"""ONNX Runtime's operators in a layout for one kind of CPU, which it writes at its highest level of optimization."""

MACHINE_LEARNING_DOMAIN = "ai.onnx.ml"
"""The standard's operators of classical models: trees, support vectors, ZipMap."""


def is_default_domain(domain: str) -> bool:
    """Return whether a domain is ONNX's own, which has two spellings."""
    return domain in ("", "ai.onnx")


LABELS = "onnxtrain.labels"
"""Metadata key of a model: the labels of its classes."""

REPLACED_WEIGHT = "onnxtrain.replaced_weight"
"""Metadata key of the node of a new head: the name of the weight that it had before."""
