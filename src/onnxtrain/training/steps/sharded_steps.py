"""Steps of several processes, each of which keeps a share of the optimizer's states and updates one of weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtrain.config import TrainingConfig
from onnxtrain.errors import OptionError
from onnxtrain.ir.shapes import infer_shapes
from onnxtrain.passes.lower import lower_entry
from onnxtrain.runtime.states import StateBuffers
from onnxtrain.runtime.step import StepSession
from onnxtrain.training.objective import Objective
from onnxtrain.training.steps.parallel_steps import ParallelSteps
from onnxtrain.training.steps.row_squares import Layout, RowSquares
from onnxtrain.training.steps.steps import Arrays, Steps
from onnxtrain.training_info.algorithm import FirstValues
from onnxtrain.training_info.build import build_update, fill_states
from onnxtrain.training_info.entry import Entry


@dataclass(frozen=True)
class _Piece:
    """The part of a parameter that a process updates.

    Attributes:
        group: Which of the joined memories it lies in: one for each bucket.
        place: Its elements in that memory.
        start: The first of its elements in the parameter.
    """

    group: int
    place: slice
    start: int

    def of(self, array: np.ndarray) -> np.ndarray:
        """Its elements in an array of the parameter's shape."""
        return array.reshape(-1)[self.start : self.start + self.place.stop - self.place.start]


class ShardedSteps(ParallelSteps):
    """Steps of N processes that keep an N-th of the optimizer's states each (ZeRO, stage 1).

    The gradients of a bucket lie one after the other, and its parameters in the same order, cut in N equal shares
    whatever tensor they are of. Every process adds up its share of the gradients of all, updates its share of the
    parameters, and hands it round. That moves as many bytes as adding all gradients up, and gives the same bits.

    Clipping by norm sums the squares of the rows of whole gradients, in the order of one process: a row that is cut
    is sent to all.

    Args:
        objective: What is minimised.
        config: What the objective was made for.
        states: Buffers of an earlier config to go on with.
        values: What new buffers have, where that is not what the model has.
    """

    scatters = True

    def __init__(
        self,
        objective: Objective,
        config: TrainingConfig,
        *,
        states: StateBuffers | None = None,
        values: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        if not all(rule.elementwise for rule in objective.optimizers(config)):
            raise OptionError(
                "shard_states=True cuts weights at any element, but this optimizer's update of one depends on others "
                "of its tensor; leave one of them out."
            )
        if config.clip_norm is not None and config.clip_value is not None:
            raise OptionError("shard_states=True clips by value or by norm; leave clip_value or clip_norm out.")
        if config.ema is not None:
            raise OptionError(
                "shard_states=True keeps no moving average of the weights; leave shard_states or ema out."
            )
        if config.state_dtype is not None:
            raise OptionError(
                "shard_states=True cuts states of the weights' type; leave shard_states or state_dtype out."
            )
        if not config.master_weights:
            raise OptionError("shard_states=True cuts weights in float32; leave shard_states or master_weights out.")
        super().__init__(objective, config, states=states, values=values)
        self._parameters = [self.states.join(names, parts=self.communicator.size) for names in self._buckets]
        self._pieces = {
            name: piece for index, names in enumerate(self._buckets) for name, piece in self._cut(index, names)
        }
        self._own = self._own_gradients()
        self._squares: RowSquares | None = None
        if config.clip_norm is not None:
            dtypes = [memory.dtype for memory in self._parameters]
            self._squares = RowSquares(
                self._layouts(), self.communicator, dtypes=dtypes, order=list(self.objective.parameters)
            )
        self._update: StepSession | None = None
        if not self._pieces:  # of a model with fewer elements than fit a cache line in each process
            first = np.asarray(config.optimizer.schema.first_count, np.int64)
            self._share = StateBuffers({objective.names.count: first})
            return
        entry, first_values = build_update(self._recipe())
        self._share = StateBuffers(first_values)
        for name, piece in self._pieces.items():
            self._share.place(name, self._parameters[piece.group][piece.place])
            self._share.place(f"{name}/accumulated", self._own[piece.group][self._within(piece)])
        self._update = self._session_of(entry)

    def _own_gradients(self) -> list[np.ndarray]:
        """This process's share of the gradients of each bucket."""
        size, rank = self.communicator.size, self.communicator.rank
        return [gradients.reshape(size, -1)[rank] for gradients in self._gradients]

    def _within(self, piece: _Piece) -> slice:
        """The elements of a piece in this process's share of its bucket."""
        first = self.communicator.rank * (self._parameters[piece.group].size // self.communicator.size)
        return slice(piece.place.start - first, piece.place.stop - first)

    def _build(self, objective: Objective) -> tuple[list[Entry], FirstValues]:
        entries, values = super()._build(objective)
        states = {name for name in values if name in entries[0].updates or self._is_fed(entries[0], name)}
        entries[0].states = [name for name in values if name in states]
        return entries[:1], FirstValues({name: values.tensors[name] for name in entries[0].states})

    @staticmethod
    def _is_fed(entry: Entry, name: str) -> bool:
        return any(value.name == name for value in entry.model.graph.inputs)

    def _cut(self, group: int, names: list[str]) -> list[tuple[str, _Piece]]:
        """What of the parameters of one type this process updates."""
        memory = self._parameters[group]
        share = memory.size // self.communicator.size
        first, last = self.communicator.rank * share, (self.communicator.rank + 1) * share
        found = []
        for name in names:
            array, begin = self.states.current(name), self._begin(group, name)
            start, stop = max(begin, first), min(begin + array.size, last)
            if start < stop:
                found.append((name, _Piece(group, slice(start, stop), start - begin)))
        return found

    def _begin(self, group: int, name: str) -> int:
        """The place of a parameter's first element among those of its bucket."""
        array = self.states.current(name)
        return (array.ctypes.data - self._parameters[group].ctypes.data) // array.itemsize

    def _recipe(self) -> Any:
        """What the update of this process is made from: pieces in the place of parameters."""
        recipe = self.objective.recipe(self.config)
        initializers = recipe.model.graph.initializers
        values = []
        for name, piece in self._pieces.items():
            memory = self._parameters[piece.group][piece.place]
            values.append(ir.Value(name=name, type=initializers[name].type, shape=ir.Shape(memory.shape)))
            values[-1].const_value = ir.Tensor(memory, name=name)
        imports = dict(recipe.model.opset_imports)
        graph = ir.Graph([], [], nodes=[], initializers=values, opset_imports=imports, name="update")
        return replace(
            recipe,
            model=infer_shapes(ir.Model(graph, ir_version=recipe.model.ir_version)),
            parameters=list(self._pieces),
            statistics={},
            masks={},  # gradients have zeros there
            given_squares=None if self._squares is None else self._squares.states,
        )

    def _session_of(self, entry: Entry) -> StepSession:
        options = self.config.options
        kernels = options.uses_kernels()
        return StepSession(lower_entry(entry, kernels=kernels), self._share, options, kernels=kernels)

    def step_share(self, feeds: Arrays, learning_rate: float) -> float:
        """One step of all processes, each on its part of the batch; see :class:`ParallelSteps`."""
        names, communicator = self.objective.names, self.communicator
        rate = {names.learning_rate: np.asarray(learning_rate, dtype=np.float32)}
        weight, loss = self._add_up_and_share(feeds, rate)
        squares = {} if self._squares is None else self._squares.add_up(self._own)
        if self._update is None:
            self._share.current(names.count)[...] += 1
        else:
            self._share.current("accumulated_weight")[...] = weight
            for name, rows in squares.items():
                self._share.current(name)[...] = rows
            self._update.run(rate)
        for parameters in self._parameters:
            communicator.all_gather_(parameters.reshape(communicator.size, -1))
        if names.count in self.states:  # masks of dropout are drawn by it
            self.states.current(names.count)[...] = self._share.current(names.count)
        return float(np.float32(loss / (weight or 1)))

    def _layouts(self) -> list[list[Layout]]:
        """The parameters of each bucket, in its order."""
        return [
            [Layout(name, self._begin(group, name), self.states.current(name).shape) for name in names]
            for group, names in enumerate(self._buckets)
        ]

    def kept_states(self) -> dict[str, np.ndarray]:
        """What a checkpoint has: whole parameters and states, whatever share of them a process has."""
        found = {name: np.array(self.states.current(name)) for name in super().kept_names}
        found |= self._kept_residuals()
        found[self.objective.names.count] = np.array(self._share.current(self.objective.names.count))
        for role in self._roles():
            for group, parameters in enumerate(self._parameters):
                whole = np.zeros((self.communicator.size, parameters.size // self.communicator.size), parameters.dtype)
                own = whole.reshape(-1)
                for name, piece in self._pieces.items():
                    if piece.group == group and f"{name}/{role}" in self._share:
                        own[piece.place] = self._share.current(f"{name}/{role}")
                self.communicator.all_gather_(whole)
                for name in self._buckets[group]:
                    if self._has(name, role):
                        array, begin = self.states.current(name), self._begin(group, name)
                        found[f"{name}/{role}"] = own[begin : begin + array.size].reshape(array.shape)
        return found

    @property
    def kept_names(self) -> list[str]:
        """Names of what a checkpoint has."""
        states = [
            f"{name}/{role}" for name in self.objective.parameters for role in self._roles() if self._has(name, role)
        ]
        return list(dict.fromkeys([*super().kept_names, self.objective.names.count, *states]))

    def take_states(self, values: Mapping[str, np.ndarray]) -> None:
        """Take over what a checkpoint has; each process takes its share.

        Raises:
            OptionError: A value is of another type or shape.
        """
        own = {*self.states, *self.residual_names}
        super().take_states({name: value for name, value in values.items() if name in own})
        if self.objective.names.count in values:
            self._share[self.objective.names.count] = values[self.objective.names.count]
        for name, piece in self._pieces.items():
            for role in self._roles():
                if f"{name}/{role}" in values and self._has(name, role):
                    self._share[f"{name}/{role}"] = piece.of(np.asarray(values[f"{name}/{role}"]))

    def _writer(self) -> Callable[[], onnx.ModelProto]:
        write = super()._writer()
        return lambda: fill_states(write(), self.kept_states())

    def go_on_from(self, before: Steps) -> None:
        """Take over the shares of the steps of an earlier config."""
        super().go_on_from(before)
        if isinstance(before, ShardedSteps):
            for name in before._share:
                if name in self._share and name not in self._pieces and not name.endswith("/accumulated"):
                    self._share[name] = before._share.current(name)

    def _roles(self) -> list[str]:
        return [role.name for role in self.config.optimizer.schema.states]

    def _has(self, name: str, role: str) -> bool:
        rule = self.objective.rules(self.config).get(name)
        optimizer = self.config.optimizer if rule is None else rule.optimizer
        return any(state.name == role for state in optimizer.states)
