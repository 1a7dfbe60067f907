"""Knowledge about exporters, one file each: the names that they give, the metadata that they write, their habits.

Nothing outside of this folder knows how an exporter calls a tensor: :func:`gives` asks all of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from functools import cache

import onnx_ir as ir

from onnxtrain.model_file.exporters import (
    genai,
    jax2onnx,
    optimum,
    paddle2onnx,
    pytorch,
    scikit_learn,
    tf2onnx,
    torchscript,
)
from onnxtrain.model_file.exporters.exporter import Kind

EXPORTERS = (
    torchscript.EXPORTER,
    pytorch.EXPORTER,
    tf2onnx.EXPORTER,
    paddle2onnx.EXPORTER,
    jax2onnx.EXPORTER,
    scikit_learn.EXPORTER,
    genai.EXPORTER,
    optimum.EXPORTER,
)


@cache
def _pattern(kind: Kind) -> re.Pattern[str]:
    return re.compile("|".join(exporter.names[kind] for exporter in EXPORTERS if kind in exporter.names))


def gives(kind: Kind, name: str) -> bool:
    """Return whether an exporter gives such a name to a tensor of this kind.

    Example:
        >>> [gives("made", name) for name in ("onnx::Mul_123", "p2o.helper.constant.0", "text.logit_scale")]
        [True, True, False]
        >>> names = ("p2o.pd_op.exp.0.0", "p2o.pd_op.reshape.0.0", "gate_1/Sigmoid_1:0", "a/Reshape:0", "eager_tmp_1")
        >>> [gives("computed", name) for name in names]
        [True, False, True, False, True]
        >>> [gives("statistic", name) for name in ("bn_1/batchnorm/Rsqrt:0", "bn_1/batchnorm/mul:0")]
        [True, False]
        >>> names = ("dense/BiasAdd/ReadVariableOp:0", "bn_1/batchnorm/sub:0", "dense/Cast/ReadVariableOp:0")
        >>> [gives("added", name) for name in names]
        [True, True, False]
        >>> [gives("joined biases", name) for name in ("B0__32", "B__912", "W0__30")]
        [True, True, False]
    """
    return _pattern(kind).search(name) is not None


class NameOrigin(Enum):
    """Author of an initializer's name."""

    MODULE = "a module path, as in a state dict"
    WORD = "a word"
    EXPORTER = "made by an exporter"


def origin_of(name: str) -> NameOrigin:
    """Classify the name of an initializer: a module path, a plain word, or an exporter's.

    Example:
        >>> [origin_of(name).name for name in ("text.logit_scale", "logit_scale", "onnx::Mul_123")]
        ['MODULE', 'WORD', 'EXPORTER']
    """
    bare = name.removesuffix(":0")
    if gives("variable", bare):
        return NameOrigin.MODULE
    if gives("made", bare) or gives("result", bare):
        return NameOrigin.EXPORTER
    return NameOrigin.MODULE if re.match(r"^\w+(\.\w+)+$", bare) else NameOrigin.WORD


def origin(value: ir.Value) -> NameOrigin:
    """Classify the name of an initializer, which for TorchScript's exporter is never the result of an operation."""
    name = value.name or ""
    found = origin_of(name)
    if found is NameOrigin.EXPORTER and gives("result", name):
        return NameOrigin.WORD if any(torchscript.is_path(node.name or "") for node in value.consumers()) else found
    return found


def bare(name: str) -> str:
    """Return the name of a tensor as its author gave it, without what an exporter appends."""
    return tf2onnx.without_operation(name)


def module_of(name: str, metadata: Mapping[str, str]) -> str:
    """Return the module path of a node by its metadata or name; "" where no exporter tells it."""
    scopes = pytorch.scopes(metadata)
    if scopes is None:
        return torchscript.module_of(name)
    return scopes[-2] if len(scopes) > 1 else ""
