"""The options of a training, for functions that pass them on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

import numpy as np

from onnxtrain.autodiff.options import Compute
from onnxtrain.losses.base import TargetKind
from onnxtrain.parallel.communicator import Communicator
from onnxtrain.patterns import Patterns
from onnxtrain.runtime.options import RuntimeOptions
from onnxtrain.training.working_copy.adaptation import Adaptation
from onnxtrain.weights.ema import EMA
from onnxtrain.weights.groups import Group


class Options(TypedDict, total=False):
    """The options of a training, as :class:`onnxtrain.Trainer` describes them, for functions that pass them on.

    A test holds that ``Trainer``, ``training_model``, ``prune`` and the flags of the command line have these options
    and no others, with the defaults of :class:`~onnxtrain.training.specification.Specification`.
    """

    train: Patterns | None
    freeze: Patterns | None
    groups: Sequence[Group]
    output: str | None
    targets: TargetKind | None
    batch_norm: str
    dropout: bool
    untie: bool | Patterns
    tie: bool | Patterns
    clip_value: float | None
    clip_norm: float | None
    masks: Mapping[str, np.ndarray] | None
    sparsify: Patterns | None
    accumulate: int
    ema: float | EMA | None
    state_dtype: str | None
    compute: Compute
    master_weights: bool
    straight_through: bool
    qat: bool
    recompute: Patterns
    free_batch: bool
    lora: Adaptation | None
    seed: int
    threads: int | None
    options: RuntimeOptions | None
    parallel: Communicator | None
    shard_states: bool
    shard_gradients: bool
