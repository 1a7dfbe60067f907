"""The steps of a config: its session, built when it is first needed, on buffers that outlive it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

from onnxtrain.config import TrainingConfig
from onnxtrain.data import Dataset
from onnxtrain.errors import DataError, OptionError
from onnxtrain.gc_pause import gc_paused
from onnxtrain.model_file.validity import invalid_refused
from onnxtrain.runtime.device_states import new_states
from onnxtrain.runtime.providers import device_of
from onnxtrain.runtime.session import TrainingSession
from onnxtrain.runtime.states import StateBuffers
from onnxtrain.training.objective import Objective
from onnxtrain.training_info.algorithm import FirstValues
from onnxtrain.training_info.build import build_entries, build_unfilled
from onnxtrain.training_info.entry import Entry
from onnxtrain.workarounds.sessions import refuse_what_crashes

if TYPE_CHECKING:
    from onnxtrain.callbacks.stopping import Stopping

Arrays = dict[str, np.ndarray]


class Steps:
    """Steps on batches: whole ones, in micro-batches, or padded for a model of a fixed batch size.

    Args:
        objective: What is minimised.
        config: What the objective was made for.
        states: Buffers of an earlier config to go on with; by default new ones.
        values: What new buffers have, where that is not what the model has.

    Attributes:
        states: The buffers.

    Raises:
        OptionError: There is nothing to train, the loss cannot be built, or the options of the session cannot be had.
        StepError: ONNX Runtime would crash.
    """

    def __init__(
        self,
        objective: Objective,
        config: TrainingConfig,
        *,
        states: StateBuffers | None = None,
        values: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        self.objective = objective
        self.config = config
        self.accumulate = config.accumulate
        self.fixed = objective.fixed_batch
        # What no session can run is said at once, and not at the first step.
        device = device_of(config.options.provider_list())
        kernels = config.options.uses_kernels()
        if config.compute == "bfloat16":
            config.options.require_bfloat16()
        refuse_what_crashes(objective.model.graph)
        if config.state_dtype is not None and device is not None:
            raise OptionError(
                f"state_dtype={config.state_dtype!r} is for states in the processor's memory; "
                "leave providers or state_dtype out."
            )
        if not config.master_weights and device is not None:
            raise OptionError(
                "master_weights=False is for weights in the processor's memory; leave providers or master_weights out."
            )
        if config.state_dtype == "8bit" and not kernels:
            raise OptionError(
                "state_dtype='8bit' needs the native kernels, which decode and encode states inside the update, and "
                "these are not used here; take state_dtype='bfloat16'."
            )
        self._built: tuple[list[Entry], FirstValues] | None = self._build(objective)
        if states is None:
            first_values = self._built[1]
            given = {} if values is None else values
            states = new_states(
                {name: given[name] if name in given else first_values[name] for name in first_values}
                if given
                else first_values,  # one after the other
                config.options,
                None if given else config.model.take,
            )
            # It is the buffers that have the weights from now on.
            config.model.release([*first_values, *(copy.name for copy in objective.copies)])
        self.states = states
        self._session: TrainingSession | None = None
        self._padded: TrainingSession | None = None
        self.parts: dict[str, float] = {}
        """The losses of the last step, where the loss is the sum of several."""
        specs = [*objective.inputs, *(head.targets.spec for head in objective.heads)]
        self._inputs = [str(value.name) for value in objective.model.graph.inputs]
        self._part_names = objective.part_names
        self._sums = any(head.targets.loss.reduction == "sum" for head in objective.heads)
        self._real = {objective.names.weights, *(head.targets.name for head in objective.heads)}
        self.batched = {
            spec.name for spec in specs if self.fixed is not None and spec.shape and spec.shape[0] == self.fixed.size
        }
        """Names of the inputs that have one row per example, in a model of a fixed batch size."""

    @gc_paused()
    def _build(self, objective: Objective) -> tuple[list[Entry], FirstValues]:
        return build_entries(objective.recipe(self.config))

    @property
    def session(self) -> TrainingSession:
        """The session of whole batches."""
        if self._session is None:
            built, self._built = self._built or self._build(self.objective), None  # it uses them up
            self._session = self._open(*built)
        return self._session

    @gc_paused()
    def _open(self, entries: list[Entry], first_values: FirstValues) -> TrainingSession:
        config = self.config
        file = config.model
        with invalid_refused(lambda: file.path or file.whole()):
            return TrainingSession.of_entries(
                entries,
                first_values,
                self._writer(),
                options=config.options,
                folder=str(file.folder or ""),
                states=self.states,
            )

    def _writer(self) -> Callable[[], onnx.ModelProto]:
        """Writes the training model. The session has it, and must not keep alive the steps that keep the session."""
        return functools.partial(_written, self.objective, self.config)

    def padded_session(self, rows: int) -> TrainingSession:
        """The same steps on the same states for padded batches, with the loss on the real examples.

        Args:
            rows: How many real examples there are, for an error's sentence.

        Raises:
            DataError: Padding cannot be left out of this loss.
        """
        if self._padded is None:
            self._padded = self._open(*self._build(self.objective.on_real_rows(rows)))
        return self._padded

    def step(self, feeds: Arrays, learning_rate: float) -> float:
        """One step on one batch, of as many micro-batches as the config says; returns the loss before it.

        Raises:
            DataError: The arrays do not fit a model of a fixed batch size.
            StepError: onnxruntime failed.
        """
        names, fixed = self.objective.names, self.fixed
        rate = {names.learning_rate: np.asarray(learning_rate, dtype=np.float32)}
        if fixed is not None:
            self._check_rows(feeds)
        if self.accumulate == 1:
            results = self._run(feeds, rate)
            if self._part_names:
                self.parts = {name: float(results[name]) for name in self._part_names}
            return float(results[names.loss])
        self.parts = self._add_up(feeds, rate)
        return float(self.session.step(rate, entry=1)[names.loss])

    def step_share(self, feeds: Arrays, learning_rate: float) -> float:
        """One step on what this process takes of a batch: all of it."""
        return self.step(feeds, learning_rate)

    def share(self, dataset: Dataset) -> Dataset:
        """What this process takes of every batch of a dataset: all of it."""
        return dataset

    @property
    def most_rows(self) -> int | None:
        """How many examples a step takes at most; ``None`` for any number."""
        return None if self.fixed is None else self.fixed.size * self.accumulate

    def tell(self, stopping: Stopping) -> None:
        """Let the other processes know, in the next step, that this one has been asked to stop."""

    def asked(self, stopping: Stopping) -> bool:
        """Whether a process has been asked to stop, as all of them know since the last step."""
        return stopping.signal is not None

    def agree(self, identity: Mapping[str, Any]) -> None:
        """Find out that all processes are about to do the same."""

    def check(self) -> None:
        """Find out that all processes have the same weights."""

    @property
    def origin(self) -> str:
        """Where a loss that is no number comes from, in words, where that is known."""
        return ""

    @property
    def transient(self) -> frozenset[str]:
        """Names of the states that mean nothing between two steps."""
        sums = {f"{name}/accumulated" for name in self.objective.parameters}
        return frozenset(sums | {"accumulated_weight", "accumulated_loss"}) & frozenset(self.states)

    @property
    def kept_names(self) -> list[str]:
        """Names of what a checkpoint has."""
        transient = self.transient
        return [name for name in self.states if name not in transient]

    def kept_states(self) -> dict[str, np.ndarray]:
        """What a checkpoint has; of several processes all have to ask for it."""
        return {name: self.states[name] for name in self.kept_names}

    def take_states(self, values: Mapping[str, np.ndarray]) -> None:
        """Take over what a checkpoint has."""
        for name, value in values.items():
            self.states[name] = value

    @property
    def residual_names(self) -> list[str]:
        """Names of what a checkpoint may have beside them: it goes without where there is none."""
        return []

    def go_on_from(self, before: Steps) -> None:
        """Take over what the steps of an earlier config have beside the buffers."""

    def _rows(self, feeds: Arrays) -> int:
        """How many examples there are."""
        if self.fixed is not None:
            return self.fixed.rows(feeds)
        return next((len(feeds[name]) for name in self._inputs if feeds[name].ndim), 1)

    def _add_up(self, feeds: Arrays, rate: Arrays) -> dict[str, float]:
        """Add up the gradients of all micro-batches; returns the losses where the loss is the sum of several."""
        size = self._rows(feeds)
        micro = self._micro_rows(size)
        if micro >= size:
            results = self._run(feeds, rate)
            return {name: float(results[name]) for name in self._part_names}
        totals: dict[str, float] = {}
        for start in range(0, size, micro):
            part = {key: value[start : start + micro] if value.ndim else value for key, value in feeds.items()}
            results = self._run(part, rate)
            rows = min(micro, size - start)
            for name in self._part_names:
                totals[name] = totals.get(name, 0.0) + float(results[name]) * (1.0 if self._sums else rows / size)
        return totals

    def _micro_rows(self, rows: int) -> int:
        """How many of so many examples are in a micro-batch, apart from the last one."""
        return -(-rows // self.accumulate) if self.fixed is None else self.fixed.size

    def _micro_batches(self, rows: int) -> int:
        """In how many micro-batches so many examples are taken."""
        return -(-rows // self._micro_rows(rows)) if rows else 0

    def _run(self, feeds: Arrays, rate: Arrays) -> Arrays:
        """The first entry on a batch or micro-batch; one that is smaller than the model takes is padded."""
        fixed = self.fixed
        if fixed is None or fixed.rows(feeds) == fixed.size:
            return self.session.step(feeds | rate, entry=0)
        rows = fixed.rows(feeds)
        session = self.padded_session(rows)
        real = {name: array for name, array in feeds.items() if name in self._real}
        for name, array in real.items():
            if len(array) != rows:
                raise DataError(f"{name!r} has {len(array)} examples, but {fixed.input!r} has {rows}.")
        inputs = fixed.filled({name: array for name, array in feeds.items() if name not in real})
        return session.step(inputs | real | rate, entry=0)

    def _check_rows(self, feeds: Mapping[str, np.ndarray]) -> None:
        """Refuse more examples than a step takes, and arrays of different lengths."""
        fixed = self.fixed
        assert fixed is not None
        rows, most = fixed.rows(feeds), self.most_rows or 0
        if not 1 <= rows <= most:
            raise DataError(
                f"{fixed.input!r} has {rows} examples, but the model takes batches of {fixed.size}; "
                f"give at {'most ' + str(most) if rows else 'least one'}."
            )
        for name in self.batched:
            if len(feeds[name]) != rows:
                raise DataError(f"{name!r} has {len(feeds[name])} examples, but {fixed.input!r} has {rows}.")
        if rows % fixed.size:
            self.padded_session(rows % fixed.size)  # what cannot be padded is found out before any micro-batch


def _written(objective: Objective, config: TrainingConfig) -> onnx.ModelProto:
    return build_unfilled(objective.recipe(config)).proto
