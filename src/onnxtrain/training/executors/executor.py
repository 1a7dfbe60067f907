"""Run training steps: whole batches, micro-batches and padded ones, in one process."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

from onnxtrain.data import Batch, Dataset
from onnxtrain.errors import DataError, NumericalError, OptionError
from onnxtrain.errors._internal import gc_paused
from onnxtrain.graph.upstream.sessions import refuse_crashing_nodes
from onnxtrain.lowering.training_info.algorithm import FirstValues
from onnxtrain.lowering.training_info.build import build_entries, build_unfilled
from onnxtrain.lowering.training_info.recipe import StepEntry
from onnxtrain.model_file.validity import invalid_refused
from onnxtrain.runtime.options import device_of
from onnxtrain.runtime.session import TrainingSession
from onnxtrain.runtime.states import new_states
from onnxtrain.training.config import TrainingConfig
from onnxtrain.training.features import divide
from onnxtrain.training.objective import Objective

if TYPE_CHECKING:
    from onnxtrain.training.callbacks.stopping import Stopping

Arrays = dict[str, np.ndarray]


class Executor:
    """Run training steps on batches: whole, split into micro-batches, or padded for a model of a fixed batch size."""

    def __init__(
        self, objective: Objective, config: TrainingConfig, values: Mapping[str, np.ndarray] | None = None
    ) -> None:
        _check_options(config)
        refuse_crashing_nodes(objective.model.graph)
        self.objective = self._stepped = objective
        self.config = config
        self.on_features = False
        self.fixed = objective.fixed_batch
        built = self._build(objective, config)
        first_values = built[1]
        given = {} if values is None else values
        self.states = new_states(
            {name: given[name] if name in given else first_values[name] for name in first_values}
            | {name: given[name] for name in given if name.rpartition("/")[0] in config.held}
            if given
            else first_values,  # a lazy mapping: read one value at a time
            config.runtime,
            None if given else config.model.take,
        )
        # From now on the buffers hold the weights.
        config.model.release([*first_values, *(copy.name for copy in objective.copies)])
        self._built: tuple[list[StepEntry], FirstValues] | None = built
        self._opening = threading.RLock()
        self._session: TrainingSession | None = None
        self._padded: TrainingSession | None = None
        self.parts: dict[str, float] = {}
        self.look: Callable[[Arrays], None] | None = None
        self._part_names = objective.part_names
        self._scaled = _scaled(objective, config)

    def change(self, objective: Objective, config: TrainingConfig) -> None:
        """Run another configuration of the same model from the next step on, on the same buffers."""
        stepped = divide(objective).trained if self.on_features else objective
        built = self._build(stepped, config)  # may fail, and then nothing has changed
        with self._opening:
            self.objective, self.config, self._scaled = objective, config, _scaled(objective, config)
            self._stepped, self._built, self._session, self._padded = stepped, built, None, None

    def use_features(self, *, wanted: bool) -> None:
        """Run the trained part alone from the next step on, on batches of the features that it reads, or all again."""
        if wanted != self.on_features:
            stepped = divide(self.objective).trained if wanted else self.objective
            with self._opening:
                self._stepped, self.on_features, self.fixed = stepped, wanted, stepped.fixed_batch
                self._built = self._session = self._padded = None

    @gc_paused()
    def _build(self, objective: Objective, config: TrainingConfig) -> tuple[list[StepEntry], FirstValues]:
        return build_entries(_scaled(objective, config).step_spec(config))

    @property
    def session(self) -> TrainingSession:
        """Session for whole batches."""
        found = self._session
        if found is None:
            with self._opening:  # another thread may ask for the training model
                found = self._session
                if found is None:
                    # The session consumes the entries; they are built again after one that could not be opened.
                    built, self._built = self._built or self._build(self._stepped, self.config), None
                    found = self._session = self._open(*built)
        return found

    @gc_paused()
    def _open(self, entries: list[StepEntry], first_values: FirstValues) -> TrainingSession:
        config = self.config
        file = config.model
        with invalid_refused(lambda: file.path or file.whole()):
            return TrainingSession.of_entries(
                entries,
                first_values,
                self._writer(),
                runtime=config.runtime,
                folder=str(file.folder or ""),
                states=self.states,
            )

    def _writer(self) -> Callable[[], onnx.ModelProto]:
        """Return a function that writes the training model, and that keeps no reference to this executor."""
        stepped, config = self._stepped, self.config
        return lambda: build_unfilled(stepped.step_spec(config))[0]

    def padded_session(self, rows: int) -> TrainingSession:
        """Return the session for padded batches: the same states, and a loss on the real examples alone."""
        if self._padded is None:
            self._padded = self._open(*self._build(self._stepped.on_real_rows(rows), self.config))
        return self._padded

    def step(self, feeds: Arrays, learning_rate: float) -> float:
        """Train one step on one batch, in the micro-batches of the configuration; return the loss before the update."""
        names, fixed = self.objective.names, self.fixed
        rate = {names.learning_rate: np.asarray(learning_rate, dtype=np.float32)}
        if fixed is not None:
            self._check_rows(feeds)
        if self.config.accumulate == 1:
            results = self._run(feeds, rate)
            if self._part_names:
                self.parts = {name: float(results[name]) for name in self._part_names}
            return float(results[names.loss])
        self.parts = self._add_up(feeds, rate | self._scaled.scale_feeds(self._label_weights(feeds)))
        return float(self.session.step(rate, entry=1)[names.loss])

    def step_share(self, feeds: Arrays, learning_rate: float) -> float:
        """Train one step on this process's share of a batch: all of it."""
        return self.step(feeds, learning_rate)

    def step_batch(self, batch: Batch, learning_rate: float) -> float:
        """Train one step on this process's share of a batch of a dataset; return the loss before the update."""
        objective = self.objective
        return self.step_share(objective.feeds(batch), learning_rate)

    def check_loss(self, loss: float, step: int, learning_rate: float, hint: Callable[[], str] = str) -> None:
        """Check that the loss of a step is finite; the hint ends the sentence of the error."""
        if not math.isfinite(loss):
            cure = f"(learning rate {learning_rate:g}); lower the learning rate or clip gradients (clip_norm=1.0)."
            if not step:
                cure = "before the first update; look for values in the data or the model that give no finite loss."
            where = " ".join(filter(None, (self.nan_origin, hint())))
            raise NumericalError(f"The loss became {loss} at step {step} {cure} {where}".strip())

    def share(self, dataset: Dataset) -> Dataset:
        """Return this process's share of every batch of a dataset: all of it."""
        return dataset

    @property
    def most_rows(self) -> int | None:
        """Largest number of examples in a step; ``None`` for any number."""
        return None if self.fixed is None else self.fixed.size * self.config.accumulate

    def send_signal(self, stopping: Stopping) -> None:
        """Share a signal that this process received with the other ranks, in the next step."""

    def received_signal(self, stopping: Stopping) -> bool:
        """Return whether any rank has received a signal to stop; all ranks agree after each step."""
        return stopping.signal is not None

    def check_agreement(self, identity: Mapping[str, Any], data: Mapping[str, Dataset | None]) -> None:
        """Check that all processes train by the same settings on the same data."""

    def check_equal_weights(self) -> None:
        """Check that all processes have the same weights."""

    @property
    def nan_origin(self) -> str:
        """Sentence of an error message that names the ranks with a loss that is not finite; empty in one process."""
        return ""

    @property
    def transient(self) -> frozenset[str]:
        """Names of the states that carry nothing from one step to the next."""
        sums = {f"{name}/accumulated" for name in self.objective.parameters}
        return frozenset(sums | {"accumulated_weight", "accumulated_loss"}) & frozenset(self.states)

    @property
    def checkpoint_names(self) -> list[str]:
        """Names of the states that a checkpoint needs."""
        transient = self.transient
        return [name for name in self.states if name not in transient]

    def checkpoint_states(self) -> dict[str, np.ndarray]:
        """Return the states for a checkpoint; all processes call it together."""
        return {name: self.states[name] for name in self.checkpoint_names}

    def load_states(self, values: Mapping[str, np.ndarray]) -> None:
        """Load the states of a checkpoint."""
        self.states.update(values)

    @property
    def residual_names(self) -> list[str]:
        """Names of the residuals of compressed gradients, which a checkpoint may lack."""
        return []

    def _rows(self, feeds: Arrays) -> int:
        if self.fixed is not None:
            return self.fixed.rows(feeds)
        names = (str(value.name) for value in self._stepped.model.graph.inputs)
        return next((len(feeds[name]) for name in names if name not in self._stepped.common), 1)

    def _add_up(self, feeds: Arrays, rate: Arrays) -> dict[str, float]:
        """Add up the gradients of all micro-batches; return the losses by name if the loss is a sum of several."""
        size = self._rows(feeds)
        micro = self._micro_rows(size)
        if micro >= size:
            results = self._run(feeds, rate)
            return {name: float(results[name]) for name in self._part_names}
        heads = self.objective.heads
        sums = bool(heads) and all(head.loss.reduction == "sum" for head in heads)
        totals: dict[str, float] = {}
        for start in range(0, size, micro):
            part = self._stepped.some_rows(feeds, slice(start, start + micro))
            results = self._run(part, rate)
            rows = min(micro, size - start)
            for name in self._part_names:
                totals[name] = totals.get(name, 0.0) + float(results[name]) * (1.0 if sums else rows / size)
        return totals

    def _label_weights(self, feeds: Arrays) -> list[float]:
        totals = [0.0] * (1 + len(self._scaled.scales))
        if not self._scaled.scales:
            return totals
        rows = self._rows(feeds)
        micro = self._micro_rows(rows)
        targets = [head.target_name for head in self._scaled.heads]
        for start in range(0, rows, micro or 1):
            part = self._scaled.label_weights({name: feeds[name][start : start + micro] for name in targets})
            totals = [total + own for total, own in zip(totals, part, strict=True)]
        return totals

    def _micro_rows(self, rows: int) -> int:
        return -(-rows // self.config.accumulate) if self.fixed is None else self.fixed.size

    def _micro_batches(self, rows: int) -> int:
        return -(-rows // self._micro_rows(rows)) if rows else 0

    def _run(self, feeds: Arrays, rate: Arrays) -> Arrays:
        """Run the first entry on a batch or micro-batch, padded to the fixed batch size of the model."""
        if self.look is not None and not self.on_features:
            look, self.look = self.look, None
            look(feeds)
        fixed = self.fixed
        if fixed is None or fixed.rows(feeds) == fixed.size:
            return self.session.step(feeds | rate, entry=0)
        rows = fixed.rows(feeds)
        session = self.padded_session(rows)
        unpadded = {self.objective.names.weights, *(head.target_name for head in self.objective.heads)}
        real = {name: array for name, array in feeds.items() if name in unpadded}
        for name, array in real.items():
            if len(array) != rows:
                raise DataError(f"{name!r} has {len(array)} examples, but {fixed.input!r} has {rows}.")
        inputs = fixed.filled({name: array for name, array in feeds.items() if name not in real})
        return session.step(inputs | real | rate, entry=0)

    def _check_rows(self, feeds: Mapping[str, np.ndarray]) -> None:
        """Check that all arrays have the same number of examples and that it fits into a step."""
        fixed = self.fixed
        assert fixed is not None
        rows, most = fixed.rows(feeds), self.most_rows or 0
        if not 1 <= rows <= most:
            raise DataError(
                f"{fixed.input!r} has {rows} examples, but the model takes batches of {fixed.size}; "
                f"give at {'most ' + str(most) if rows else 'least one'}."
            ).about(fixed.input, got=rows, wanted=fixed.size)
        for name in self._stepped.batched:
            if len(feeds[name]) != rows:
                raise DataError(f"{name!r} has {len(feeds[name])} examples, but {fixed.input!r} has {rows}.")
        if rows % fixed.size:
            self.padded_session(rows % fixed.size)  # fails before the first micro-batch if padding is not possible


def _scaled(objective: Objective, config: TrainingConfig) -> Objective:
    """Return the objective whose micro-batches add up to the step of the whole batch."""
    return objective.scaled() if config.accumulate > 1 or config.divided else objective


def _check_options(config: TrainingConfig) -> None:
    device = device_of(config.runtime.provider_list())
    kernels = config.runtime.uses_kernels()
    if config.precision.compute == "bfloat16":
        config.runtime.require_bfloat16()
    if config.precision.states is not None and device is not None:
        raise OptionError(
            f"Precision(states={config.precision.states!r}) needs states in the CPU's memory; leave providers or "
            "states out."
        )
    if not config.precision.master_weights and device is not None:
        raise OptionError(
            "Precision(master_weights=False) needs weights in the CPU's memory; leave providers or master_weights out."
        )
    if config.precision.states == "8bit" and not kernels:
        raise OptionError(
            "Precision(states='8bit') needs the native kernels, which decode and encode states inside the update, but "
            "they are not used here; give states='bfloat16'."
        )
