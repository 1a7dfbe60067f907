"""Which steps the processes of a training take."""

from __future__ import annotations

from typing import Any

from onnxtrain.config import TrainingConfig
from onnxtrain.errors import OptionError
from onnxtrain.training.objective import Objective
from onnxtrain.training.steps.parallel_steps import ParallelSteps
from onnxtrain.training.steps.sharded_gradients import ShardedGradientSteps
from onnxtrain.training.steps.sharded_steps import ShardedSteps
from onnxtrain.training.steps.synchronized_steps import SynchronizedShardedSteps, SynchronizedSteps


def steps_of_several(objective: Objective, config: TrainingConfig, **given: Any) -> ParallelSteps:
    """The steps of several processes, as a config wants them; ``given`` as :class:`Steps` takes it.

    Raises:
        OptionError: It wants what does not go together.
    """
    kind: type[ParallelSteps]
    if config.shard_gradients:
        if config.synchronized:
            raise OptionError(
                'batch_norm="sync" lets processes wait for each other within the backward pass, in which '
                "shard_gradients=True sends gradients; take shard_states=True."
            )
        kind = ShardedGradientSteps
    elif config.synchronized:
        kind = SynchronizedShardedSteps if config.shard_states else SynchronizedSteps
    else:
        kind = ShardedSteps if config.shard_states else ParallelSteps
    return kind(objective, config, **given)
