"""Noise on the embeddings of tokens while a model is trained (NEFTune)."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import onnx_ir as ir

from onnxtrain.adapters.adapter import A
from onnxtrain.errors import OptionError
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.graph import Builder
from onnxtrain.training.callbacks.base import Callback, TrainingState

_NOISE: Final = f"onnxtrain.neftune.{secrets.token_hex(8)}"
"""Entry of a lookup that gets noise, which no file has: alpha, and the step at which its training begins."""

_APART: Final = 7919
"""Distance of the seeds of two steps: further than a model has lookups."""

_PASSED_THROUGH: Final = (
    "Identity",
    "Cast",
    "Reshape",
    "Flatten",
    "Squeeze",
    "Unsqueeze",
    "Where",
    "Max",
    "Clip",
    "Add",
)
"""Operators between an input of token ids and the lookup in a table."""


def add_noise(model: ir.Model) -> None:
    """Add noise to the rows of tokens that are looked up in tables, in a step graph, in place."""
    graph = model.graph
    noisy_nodes = [node for node in graph if node.op_type == "Gather" and _NOISE in node.metadata_props]
    if not noisy_nodes or not any(node.op_type == "Gradient" for node in graph):
        return
    op = Builder(graph, model.opset_imports[""])
    for number, node in enumerate(noisy_nodes, 1):
        alpha, step = json.loads(node.metadata_props[_NOISE])
        seed = (number + _APART * step) % (1 << 24)  # a float keeps no larger one
        following = next((other for other in _after(graph, node)), None)
        assert following is not None  # a Gradient node at least
        near, found = op.before(following), node.outputs[0]
        readers = list(found.uses())
        rows = near.wrap(found)
        sizes = near.cast(near.Shape(rows, start=-2), rows.dtype)  # tokens and width
        drawn = near.RandomUniformLike(rows, low=-1.0, high=1.0, seed=float(seed))
        noisy = rows + drawn * near.scalar(alpha, rows) / near.Sqrt(near.ReduceProd(sizes, keepdims=0))
        noisy.ir.type, noisy.ir.shape = found.type, found.shape
        for reader, index in readers:
            reader.replace_input_with(index, noisy.ir)


def _after(graph: ir.Graph, node: ir.Node) -> Iterator[ir.Node]:
    found = False
    for other in graph:
        if found:
            yield other
        found = found or other is node


def lookups(graph: ir.Graph) -> Iterator[ir.Node]:
    """Yield the nodes that look up token ids, an input of the model, in a table of floating point."""
    for node in graph:
        if node.op_type != "Gather" or node.domain or node.inputs[0] is None:
            continue
        table, ids = node.inputs[0], node.inputs[1]
        if table.dtype is None or not table.dtype.is_floating_point() or (table.shape and len(table.shape) != 2):
            continue
        if str(table.name).endswith(A):  # an adapter beside the table, whose rows are added to its
            continue
        while ids is not None and (producer := ids.producer()) is not None and producer.op_type in _PASSED_THROUGH:
            ids = producer.inputs[0]
        name = "" if ids is None or ids.producer() is not None or ids.is_initializer() else str(ids.name).lower()
        if ("ids" in name or "tokens" in name) and "position" not in name and "type" not in name:
            yield node


@checks_arguments
class NEFTune(Callback):
    """Adds noise to the embeddings of tokens in each step: NEFTune, as the Trainer of transformers.

    ::

        x + u alpha / sqrt(T H),  u uniform in (-1, 1)

    for embeddings x [N, T, H] of T tokens. Predictions, evaluations, other trainers and the saved model have
    none. A resumed training draws other noise than an undisturbed one.

    Args:
        alpha: Size of the noise, above 0. The paper takes 5, 10 or 15.

    Raises:
        OptionError: alpha is not accepted, or the model looks up no tokens in a table.

    Source:
        N. Jain et al., "NEFTune: Noisy Embeddings Improve Instruction Finetuning", arXiv 2310.05914.
    """

    def __init__(self, alpha: float = 5.0) -> None:
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not (math.isfinite(alpha) and alpha > 0):
            raise OptionError(f"alpha is {alpha!r}; NEFTune needs a finite number above 0.")
        self.alpha = float(np.float32(alpha))
        self._trainer: Any = None

    def on_fit_begin(self, state: TrainingState) -> None:
        """Let the steps add noise.

        Raises:
            OptionError: The model looks up no tokens in a table.
        """
        trainer = state.trainer
        found = list(lookups(trainer.objective.model.graph))
        if not found:
            raise OptionError(
                "NEFTune adds noise to embeddings of tokens, but the model looks up no token ids in a table."
            )
        for node in found:
            node.metadata_props[_NOISE] = json.dumps([self.alpha, state.step])
        self._trainer = trainer
        trainer.executor.change(trainer.objective, trainer.config)

    def close(self) -> None:
        """Let later steps add none."""
        if self._trainer is not None:
            for node in lookups(self._trainer.objective.model.graph):
                node.metadata_props.pop(_NOISE, None)
            self._trainer.executor.change(self._trainer.objective, self._trainer.config)
            self._trainer = None
