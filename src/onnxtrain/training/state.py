"""Values that training changes: parameters, running statistics, optimizer states, averages, the learning rate."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np

from onnxtrain.data.conversion import all_finite
from onnxtrain.errors import ModelError, NumericalError, OptionError
from onnxtrain.errors.formatting import html_table, text_table
from onnxtrain.model_file.file import ModelFile
from onnxtrain.parameters.ema import average_name
from onnxtrain.parameters.stored import with_stored
from onnxtrain.parameters.ties import with_copies
from onnxtrain.runtime.states import StateBuffers
from onnxtrain.training.objective import Objective
from onnxtrain.training.schedules import Schedule, check_rate


class Parameters(MutableMapping[str, np.ndarray]):
    """Live views of values by name; assignment and ``update`` copy into them.

    A view shows the current values after every step; ``np.array(parameters[name])`` is a snapshot. Where another thread
    trains, or has trained last, reading gives a read-only copy of the value after one step; ``get_weights`` gives all
    values of one.
    """

    def __init__(self, states: Mapping[str, np.ndarray], names: Sequence[str]) -> None:
        self._states: Any = states  # StateBuffers, or what a snapshot of them holds
        self._names = dict.fromkeys(names)

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._names:
            raise KeyError(name)
        found: np.ndarray = self._states[name]
        return found

    def __setitem__(self, name: str, value: np.ndarray) -> None:
        if name not in self._names:
            raise OptionError(f"{name!r} is not a parameter; they are {', '.join(list(self._names)[:8])}.")
        self._states[name] = value

    def update(self, *values: Any, **named: Any) -> None:
        """Assign several values as one change."""
        with self._states.writing():
            super().update(*values, **named)

    def __repr__(self) -> str:
        return text_table(self._rows())

    def _repr_html_(self) -> str:
        return html_table(self._rows())

    def _rows(self) -> list[dict[str, object]]:
        kinds = {name: self._states.kind(name) for name in self}
        return [{"name": name, "shape": list(shape), "dtype": dtype} for name, (dtype, shape) in kinds.items()]

    def check(self, name: str, value: np.ndarray) -> None:
        """Check that an array can be assigned to a parameter."""
        if name not in self._names:
            raise OptionError(f"{name!r} is not a parameter; they are {', '.join(list(self._names)[:8])}.")
        dtype, shape = self._states.kind(name)
        if (value.dtype, value.shape) != (dtype, shape):
            raise OptionError(
                f"The parameter {name!r} is {dtype} of shape {shape}; got {value.dtype} of shape {value.shape}."
            )

    def __delitem__(self, name: str) -> None:
        raise OptionError(f"The parameter {name!r} belongs to the model and cannot be deleted.")

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class State:
    """Name the values of a training in its buffers, and convert them to the initializers of the file."""

    def __init__(
        self, buffers: StateBuffers, objective: Objective, held: Iterable[str], *, keeps_averages: bool
    ) -> None:
        trained = [*objective.parameters, *held]
        self.averages = {name: own for name in trained if keeps_averages and (own := average_name(name)) in buffers}
        self.epochs = 0
        self._keeps_averages = keeps_averages
        self._names = objective.parameters, [*trained, *objective.statistics]
        self._read(buffers)

    def _read(self, buffers: Any) -> None:
        self.buffers: StateBuffers = buffers
        self.parameters, self.trained = (Parameters(buffers, names) for names in self._names)

    @contextlib.contextmanager
    def snapshot(self, *, everything: bool = False) -> Iterator[State]:
        """Context with the values of one step, whatever another thread trains meanwhile; keep no array of it."""
        with self.buffers.snapshot(None if everything else {*self.trained, *self.averages.values()}) as buffers:
            found = copy.copy(self)
            found._read(buffers)
            yield found

    def check_averages(self, ema: bool) -> None:
        """Check that a request for moving averages can be met."""
        if ema and not self._keeps_averages:
            raise OptionError(
                "ema=True asks for the moving average of the parameters, but this trainer keeps none; make it with "
                "Trainer(ema=0.999)."
            )

    def values(self, *, ema: bool = False) -> dict[str, np.ndarray]:
        """Return live views of parameters (or their moving averages) and running statistics."""
        self.check_averages(ema)
        averages = {name: self.buffers[average] for name, average in self.averages.items()} if ema else {}
        return {**self.trained, **averages}

    def initializers(self, objective: Objective, file: ModelFile, *, ema: bool = False) -> Mapping[str, np.ndarray]:
        """Return the initializers of the saved model: in the types of the file, with tied copies."""
        own, adapted = self.own_initializers(objective, ema=ema), objective.adapted
        return own if adapted is None else own | adapted.merged(file, self.values(ema=ema))

    def own_initializers(self, objective: Objective, *, ema: bool = False) -> Mapping[str, np.ndarray]:
        """Return the initializers that differ from the file: in its types, with tied copies, without adapters."""
        values, adapted = with_copies(self.values(ema=ema), objective.copies), objective.adapted
        if adapted is None:
            return with_stored(values, objective.stored)
        added = set(adapted.parameters)
        own = {name: array for name, array in values.items() if name not in added}
        return adapted.initial | with_stored(own, objective.stored)

    def check_finite(self, file: ModelFile, *, ema: bool = False, begins: bool = False) -> None:
        """Check that no weight became NaN or infinite in training."""
        for name, array in self.values(ema=ema).items():
            if all_finite(array) or _equals_initializer(file, name, array):
                continue
            values = np.asarray(array, np.float64)
            wrong = values[~np.isfinite(values)]
            what = "so that nothing is saved"
            if begins:
                what = "which an earlier step or assignment left, so that this training cannot begin"
            raise NumericalError(
                f"The weight {name!r} holds {wrong[0]} ({wrong.size:,} of {values.size:,} values), {what}; go on from "
                "a checkpoint (load_checkpoint), or train again with a lower learning rate or clip_norm=1.0."
            )


def _equals_initializer(file: ModelFile, name: str, array: np.ndarray) -> bool:
    try:
        return np.array_equal(file.value(name).astype(np.float64), array.astype(np.float64), equal_nan=True)
    except ModelError:  # an adapter's parameter, which the file lacks
        return False


def split_flat(flat: np.ndarray, like: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Split a flat array into named arrays."""
    size = sum(array.size for array in like.values())
    if flat.shape != (size,):
        raise OptionError(f"The weights are an array of shape {flat.shape}; together they have {size} elements.")
    ends = np.cumsum([array.size for array in like.values()])
    return {
        name: flat[end - array.size : end].reshape(array.shape).astype(array.dtype)
        for (name, array), end in zip(like.items(), ends, strict=True)
    }


class LearningRate:
    """Learning rate of the next step, from a schedule or set by hand."""

    def __init__(self, value: float) -> None:
        self.base = self.current = value
        self.chosen: float | None = None
        self.is_training = False

    def choose(self, value: float) -> None:
        """Set the rate from the next step on."""
        check_rate(value)
        self.current = float(value)
        if self.is_training:
            self.chosen = self.current
        else:
            self.base = self.current

    def restore(self, current: float, base: float) -> None:
        """Set the rate of the next step and its base, between trainings; a training keeps its own."""
        if not self.is_training:
            self.current, self.base = current, base

    def copy(self) -> LearningRate:
        """Return an independent rate between trainings."""
        found = LearningRate(self.base)
        found.current = self.current
        return found

    def follow(self, schedule: Schedule, step: int) -> float:
        """Return the rate of a step."""
        self.current = float(schedule(step)) if self.chosen is None else self.chosen
        return self.current

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Run one training: start with its schedule; a rate that is set meanwhile becomes the base of the next one."""
        self.is_training, self.chosen = True, None
        try:
            yield
            if self.chosen is not None:
                self.base = self.chosen
        finally:
            self.is_training = False
