"""Surroundings of a training that must not change it: the model's ending, the form of targets, ranks, and threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import helper, numpy_helper

from differential.modules import Draw, Model
from differential.reference import Plan

MOVES = ("", "Identity", "Reshape", "Unsqueeze, Squeeze", "Transpose twice", "Concat of parts")
"""Nodes that only move values, behind the activation."""
ENDINGS = ("logits", *(f"probabilities{', ' + move if move else ''}" for move in MOVES))
FORMS = {
    "indices": ("int64", "int32", "uint8", "float", "texts", "a column"),
    "bits": ("float32", "float64", "bool", "int64"),
    "values": ("float32", "float64"),
}
RANKS, THREADS = (1, 2, 3), (1, 2)


class Surroundings(NamedTuple):
    """Everything that must not change a result.

    Attributes:
        ending: One of ENDINGS.
        axis: The axis of the classes; ``None`` for yes or no.
        form: The form of the targets, one of FORMS.
        names: The classes, where targets are texts.
        ranks: Ranks that train together.
        threads: Threads of the session.
        reading: Threads that predict meanwhile.
    """

    ending: str = "logits"
    axis: int | None = None
    form: str = "int64"
    names: tuple[str, ...] = ()
    ranks: int = 1
    threads: int = 1
    reading: int = 0

    def ended(self, file: onnx.ModelProto) -> onnx.ModelProto:
        """Return the model with its ending: the probabilities of its logits, moved and moved back."""
        if self.ending == "logits":
            return file
        model = onnx.ModelProto()
        model.CopyFrom(file)
        graph, last = model.graph, file.graph.output[0]
        rank = len(last.type.tensor_type.shape.dim)
        last_name = f"{last.name}_as_logits"
        for node in graph.node:
            node.output[:] = [last_name if name == last.name else name for name in node.output]
            node.input[:] = [last_name if name == last.name else name for name in node.input]

        def add(operator: str, *inputs: str, outputs: int = 1, **attributes: Any) -> list[str]:
            count = len(graph.node)
            names = [f"ending_{count}_{index}" for index in range(outputs)]
            graph.node.append(helper.make_node(operator, inputs, names, **attributes))
            return names

        def constant(*values: int) -> str:
            name = f"ending_c{len(graph.initializer)}"
            graph.initializer.append(numpy_helper.from_array(np.array(values, np.int64), name))
            return name

        softmax = {} if self.axis is None else {"axis": self.axis}
        (value,) = add("Sigmoid" if self.axis is None else "Softmax", last_name, **softmax)
        move = self.ending.partition(", ")[2]
        if move == "Identity":
            (value,) = add("Identity", value)
        elif move == "Reshape":
            (shape,) = add("Shape", value)
            (value,) = add("Reshape", value, shape)
        elif move == "Unsqueeze, Squeeze":
            axes = constant(1)
            (value,) = add("Squeeze", *add("Unsqueeze", value, axes), axes)
        elif move == "Transpose twice":
            order = [0, *range(rank - 1, 0, -1)]
            (value,) = add("Transpose", *add("Transpose", value, perm=order), perm=order)
        elif move == "Concat of parts":
            axis = rank - 1 if self.axis is None else self.axis
            size = int(last.type.tensor_type.shape.dim[axis].dim_value)
            parts = add("Split", value, constant(1, size - 1), outputs=2, axis=axis)
            (value,) = add("Concat", *parts, axis=axis)
        graph.node[-1].output[0] = last.name
        return model

    def formed(self, target: np.ndarray) -> np.ndarray:
        """Return targets in the form that is drawn."""
        if self.names:
            return np.array(self.names)[target]
        if self.form == "a column":
            return target[:, None]
        return target.astype(np.float32 if self.form == "float" else self.form)

    @contextlib.contextmanager
    def readers(self, trainer: Any, inputs: tuple[np.ndarray, ...]) -> Iterator[None]:
        """Predict in other threads meanwhile; raise their first error."""
        done, errors = threading.Event(), []
        data = inputs[0] if len(inputs) == 1 else inputs

        def read() -> None:
            try:
                while not done.wait(0.001):
                    trainer.predict(data)
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=read) for _ in range(self.reading)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            done.set()
            for thread in threads:
                thread.join()
        if errors:
            raise errors[0]


def surroundings(draw: Draw, model: Model, plan: Plan, loss: Any, divides: bool) -> Surroundings:
    """Draw the surroundings of a training.

    Args:
        draw: The choices.
        model: The model.
        plan: The training.
        loss: The loss.
        divides: Whether ranks may divide the batches.
    """
    ending, axis, form, names = "logits", None, "", ()
    target, name = plan.steps[0][1], plan.loss
    classes = name in ("softmax_cross_entropy", "focal")
    if draw.chance(0.4) and (classes or name in ("binary_cross_entropy", "binary_focal")):
        axis = loss.axis if classes else None
        width = model.output[(axis or len(model.output)) - 1]
        ending = draw.pick([known for known in ENDINGS if width > 1 or "parts" not in known])
    if np.issubdtype(target.dtype, np.integer):
        lowest = min(int(step[1].min()) for step in plan.steps)
        flat = target.ndim == 1 and classes
        allowed = [
            known
            for known in FORMS["indices"]
            if (known not in ("uint8", "texts") or lowest >= 0)
            and (known not in ("texts", "a column", "float") or flat)
        ]
        form = draw.pick(allowed)
        if form == "texts":
            names = tuple(f"class {chr(97 + index)}" for index in range(model.output[(loss.axis) - 1]))
    else:
        kind = "bits" if name in ("binary_cross_entropy", "binary_focal") else "values"
        form = draw.pick(FORMS[kind])
    small = min(len(step[1]) for step in plan.steps) < max(RANKS) * plan.cuts
    ranks = draw.pick([1, 1, 1, 2, 3]) if divides and not small and plan.ema is None else 1
    return Surroundings(
        ending, axis, form, names, ranks, draw.pick(THREADS), draw.pick([0, 0, 0, 1]) if ranks == 1 else 0
    )
