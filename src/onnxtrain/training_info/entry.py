"""One entry of a training model in the IR: main graph and algorithm in one graph."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

COUNTERS_KEY = "onnxtrain.dropout_counters"
"""Key of a training model's metadata that holds, as a JSON list, the states that tell one step from another."""

SYNCHRONIZED_KEY = "onnxtrain.synchronized"
"""Key of an entry's metadata that says ``true`` where batch normalization takes the statistics of all processes.

It is said to sessions only: a file is for one process."""


@dataclass(eq=False)
class Entry:
    """What one session is made from, whoever wrote the training model.

    Attributes:
        model: Main graph and algorithm in one sorted graph. Its states are graph inputs; other tensors are
            initializers.
        states: The states of the whole training, by name.
        updates: States to the names of the values that they take after a step.
        results: Names of the values that a step returns.
        main: Names of the main graph's inputs and initializers; all others belong to the algorithm.
        announced: Groups of states whose new values are announced as soon as they are there, where native kernels run.
        passed: Like updates, of what is announced and then forgotten.
    """

    model: ir.Model
    states: Sequence[str]
    updates: dict[str, str] = field(default_factory=dict)
    results: list[str] = field(default_factory=list)
    main: Collection[str] = ()
    announced: Sequence[Sequence[str]] = ()
    passed: dict[str, str] = field(default_factory=dict)
