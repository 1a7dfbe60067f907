"""A callback, imported by workers, that kills its process once in the middle of an epoch."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import ray.train

from onnxtrain.training.callbacks import Callback


class KillOnce(Callback):
    """Kill the worker of a rank at a step, unless a marker file exists."""

    def __init__(self, marker: Path, rank: int, step: int) -> None:
        self.marker, self.rank, self.step = marker, rank, step

    def on_step_end(self, state) -> None:
        rank = ray.train.get_context().get_world_rank()
        if rank == self.rank and state.step == self.step and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
