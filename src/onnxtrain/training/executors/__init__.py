"""Executors run the steps of a training: of one process, of data-parallel ranks, and of ranks that share the states."""

from __future__ import annotations

from onnxtrain.errors import OptionError
from onnxtrain.training.config import TrainingConfig
from onnxtrain.training.executors.executor import Executor


def executor_class(config: TrainingConfig) -> type[Executor]:
    """Return the class of executor for a configuration."""
    if not config.divided:
        return Executor
    # one process does not need these
    from onnxtrain.training.executors.data_parallel import DataParallelExecutor, SyncBatchNormExecutor
    from onnxtrain.training.executors.sharded import (
        ShardedExecutor,
        ShardedGradientExecutor,
        ShardedSyncBatchNormExecutor,
    )

    if config.distributed.shard_gradients:
        if config.synchronized:
            raise OptionError(
                'batch_norm="sync" makes processes wait for each other within the backward pass, while '
                "shard_gradients=True sends gradients; use shard_states=True instead."
            )
        return ShardedGradientExecutor
    if config.synchronized:
        return ShardedSyncBatchNormExecutor if config.distributed.shard_states else SyncBatchNormExecutor
    return ShardedExecutor if config.distributed.shard_states else DataParallelExecutor
