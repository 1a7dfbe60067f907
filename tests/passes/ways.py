"""A model before and after a pass; one training with native kernels and one in standard operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime

import onnxtrain
from onnxtrain.graph.shapes import infer_shapes

ONE_THREAD_WITH_KERNELS = onnxtrain.RuntimeOptions(threads=1, kernels=True)


def passed(proto: onnx.ModelProto, change: Callable[[ir.Model], None]) -> onnx.ModelProto:
    """Run a pass on a model whose shapes are known; names stay unique, and outputs keep theirs."""
    working = infer_shapes(ir.from_proto(proto))
    change(working)
    names = [output.name for node in working.graph for output in node.outputs]
    assert len(set(names)) == len(names)
    result = ir.to_proto(working)
    given, left = ([output.name for output in each.graph.output] for each in (proto, result))
    assert given == left
    return result


def operators(proto: onnx.ModelProto) -> list[str]:
    """Return the operators of a model's nodes, in order."""
    return [node.op_type for node in proto.graph.node]


def assert_same_results(
    proto: onnx.ModelProto, other: onnx.ModelProto, feeds: Mapping[str, np.ndarray], atol: float = 1e-6
) -> None:
    """Compare the first outputs of two models in ONNX Runtime."""
    before, after = (
        onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)[0]
        for model in (proto, other)
    )
    np.testing.assert_allclose(after, before, atol=atol)


def operators_of_step(trainer: onnxtrain.Trainer) -> list[str]:
    """Return the operators of the nodes in a trainer's session."""
    return [node.op_type for node in trainer.executor.session._steps[0].step.model.graph]


def trained_both_ways(
    proto: onnx.ModelProto, train: str | Sequence[str], inputs: np.ndarray, targets: np.ndarray
) -> list[tuple[list[float], onnxtrain.Trainer]]:
    """Return the losses of ten steps, and the trainer, in standard operators and with kernels."""
    trained = []
    for kernels in (False, None):
        trainer = onnxtrain.Trainer(
            proto,
            loss="mean_squared_error",
            optimizer=onnxtrain.Momentum(0.05, 0.9),
            train=train,
            runtime=onnxtrain.RuntimeOptions(kernels=kernels),
        )
        trained.append(([trainer.train_step(inputs, targets) for _ in range(10)], trainer))
    return trained


def recomputed(
    proto: onnx.ModelProto, pattern: str, train: Sequence[str], inputs: np.ndarray, targets: np.ndarray
) -> list[str]:
    """Return the nodes of a step with kernels that a pattern makes recompute; the losses must stay.

    Nodes are named by their first output.
    """
    for node in proto.graph.node:
        node.name = node.output[0]
    losses = []
    for recompute in ((), pattern):
        trainer = onnxtrain.Trainer(
            proto, loss="mean_squared_error", train=train, recompute=recompute, runtime=ONE_THREAD_WITH_KERNELS
        )
        losses.append([trainer.train_step(inputs, targets) for _ in range(3)])
    assert losses[0] == losses[1]
    nodes = onnxtrain.lower(trainer.training_model(), kernels=True).graph.node
    return [node.op_type for node in nodes if node.name.startswith("again/")]
