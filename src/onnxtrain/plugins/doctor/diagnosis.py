"""Diagnose an exported model: obstacles to training, and export calls that avoid them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import onnx

from onnxtrain.autodiff.missing import FOR_ONE_CPU
from onnxtrain.errors.formatting import listed
from onnxtrain.graph.domains import MACHINE_LEARNING_DOMAIN, NCHWC_DOMAIN
from onnxtrain.model_file.validity import refuses_invalid
from onnxtrain.parameters.trainable import Initializer
from onnxtrain.training.advice.hints import FOLDED, KEEP_BATCH_NORM, QUANTIZED
from onnxtrain.training.advice.inspection import Inspection, inspect

_NEWER = "torch.onnx.export(model.eval(), ..., dynamo=True)"
_FREE_BATCH = (
    'dynamic_shapes={"x": {0: torch.export.Dim("batch")}} (or dynamic_axes={"x": {0: "batch"}} with dynamo=False)'
)

_QUANTIZED = ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "ConvInteger")
_HALVES = ("float16", "bfloat16")
_CONVERTED_OPSET = 18


class Severity(Enum):
    """Severity of a finding."""

    STOPS = "stops"
    """Nothing, or not the likely parameters, can be trained."""
    CHANGES = "changes"
    """Training differs from training of the exported program."""
    NOTE = "note"
    """For information."""


@dataclass(frozen=True)
class Finding:
    """A finding about an exported model."""

    severity: Severity
    what: str
    remedy: str = ""


@refuses_invalid()
def diagnose(model: str | os.PathLike[str] | onnx.ModelProto, *, output: str | None = None) -> list[Finding]:
    """List obstacles to training a model, the most severe first.

    Example:
        >>> from onnxtrain import examples
        >>> diagnose(examples.mlp((4, 3)))
        []
    """
    found = inspect(model, output=output)
    findings = [
        *_without_gradient(found),
        *_nothing_to_train(found),
        *_other_types(found),
        *_quantized(found),
        *_fixed_batch(found),
        *_cache_inputs(found),
        *_folded(found),
        *(
            Finding(Severity.CHANGES if text in found.surprises else Severity.NOTE, text)
            for text in found.hints
            if not (text.startswith(QUANTIZED) and _quantized_operators(found))
        ),
        *_old_opset(found),
    ]
    order = list(Severity)
    return sorted(findings, key=lambda finding: order.index(finding.severity))


def trains(findings: list[Finding]) -> bool:
    """Return whether no finding stops training."""
    return all(finding.severity is not Severity.STOPS for finding in findings)


def _without_gradient(found: Inspection) -> Iterator[Finding]:
    if found.missing:
        more = f" and {len(found.missing) - 3} more" if len(found.missing) > 3 else ""
        listed = "; ".join(found.missing[:3]) + more
        if any(row.domain == NCHWC_DOMAIN for row in found.operators):
            yield Finding(Severity.STOPS, f"Operators have no gradient: {listed}.", FOR_ONE_CPU)
            return
        yield Finding(
            Severity.STOPS,
            f"Operators between parameters and outputs have no gradient: {listed}.",
            "Train only parameters after them (train=), or register a rule with onnxtrain.register_gradient.",
        )


def _nothing_to_train(found: Inspection) -> Iterator[Finding]:
    if found.trainable_size or _halves(found) or _quantized_operators(found):
        return  # other findings give the reason
    classical = [row for row in found.operators if row.domain == MACHINE_LEARNING_DOMAIN]
    trees = [row.name for row in classical if row.gradient in ("none", "missing")]
    reasons = Counter(row.reason for row in found.initializers if row.reason)
    listed = "; ".join(f"{count} {_tensors(count)}: {reason}" for reason, count in reasons.most_common(3))
    if trees:
        yield Finding(
            Severity.STOPS,
            f"The model computes with {', '.join(trees)}, through which no gradient flows.",
            "Trees and tables are fitted by the program that made them, not by gradients.",
        )
    else:
        yield Finding(
            Severity.STOPS,
            f"No tensor can be trained ({listed or 'the model has none'}).",
            f"Export the weights as initializers: {_NEWER}.",
        )


def _other_types(found: Inspection) -> Iterator[Finding]:
    halves = _halves(found)
    if halves:
        total = sum(row.size for row in halves)
        yield Finding(
            Severity.STOPS,
            f"{len(halves)} {_tensors(len(halves))} ({total:,} elements) of {halves[0].dtype} cannot be trained, "
            "since the optimizers take float and double.",
            f"Export in float32: {_NEWER.replace('model.eval()', 'model.float().eval()')}.",
        )


def _quantized(found: Inspection) -> Iterator[Finding]:
    names = _quantized_operators(found)
    if names:
        yield Finding(
            Severity.CHANGES if found.trainable_size else Severity.STOPS,
            f"The model computes with quantized values ({', '.join(names)}), through which derivatives are zero or "
            "missing.",
            "qat=True trains the quantized weights, straight_through=True passes gradients on; or train the model "
            "before it was quantized.",
        )


def _fixed_batch(found: Inspection) -> Iterator[Finding]:
    for port in found.inputs:
        if port.name in found.fixed_batch_inputs and port.shape and len(port.shape) > 1:
            size = port.shape[0]
            yield Finding(
                Severity.NOTE,
                f"The batch size is fixed: {port.name!r} takes {size} example{'' if size == 1 else 's'} a step. Other "
                "numbers are padded, which is exact but slow.",
                f"Train with dynamic_batch=True, or export with a dynamic one: {_FREE_BATCH}.",
            )
            return


def _cache_inputs(found: Inspection) -> Iterator[Finding]:
    names = found.cache_inputs
    if names:
        some = listed(names, 2, counted=False)
        yield Finding(
            Severity.NOTE,
            f"Training starts from an empty KV cache: {len(names)} inputs ({some}) are left out, so that data need "
            "not have them, and may have them without rows. The saved file keeps them.",
        )


def _folded(found: Inspection) -> Iterator[Finding]:
    counts = {row.name: row.count for row in found.operators if not row.domain}
    convolutions = counts.get("Conv", 0)
    normalized = [name for name in counts if name.endswith("Normalization")]
    biases = sum("Conv" in row.uses and len(row.shape) == 1 for row in found.initializers)
    known = any(text.startswith(FOLDED) for text in found.hints)
    if convolutions >= 3 and biases >= convolutions - 1 and not normalized and not known:
        yield Finding(
            Severity.NOTE,
            f"{convolutions} convolutions have biases and none is normalized: if the program had batch normalization, "
            "the exporter folded it into them, and it cannot be trained any more.",
            f"{KEEP_BATCH_NORM}.",
        )


def _old_opset(found: Inspection) -> Iterator[Finding]:
    if found.opset < _CONVERTED_OPSET:
        yield Finding(
            Severity.NOTE,
            f"The model has opset {found.opset}; training works on a copy at opset {_CONVERTED_OPSET}, the file keeps "
            "its own.",
        )


def _tensors(count: int) -> str:
    return "tensor" if count == 1 else "tensors"


def _halves(found: Inspection) -> list[Initializer]:
    return [row for row in found.initializers if row.dtype in _HALVES and row.size > 1]


def _quantized_operators(found: Inspection) -> list[str]:
    return [row.name for row in found.operators if row.name in _QUANTIZED or row.name.startswith("QLinear")]
