"""What the classifier and the regressor share: a trainer that is made for the data, its steps and its outputs."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import os
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import numpy as np
import onnx

from onnxtrain.callbacks import History
from onnxtrain.data.naming import in_order, rows_to_inputs
from onnxtrain.edit.head import replace_head
from onnxtrain.edit.working import Model
from onnxtrain.errors import OptionError
from onnxtrain.examples import mlp
from onnxtrain.losses.loss_choice import LossLike
from onnxtrain.operators.optimizer import Optimizer
from onnxtrain.schedules import Schedule
from onnxtrain.sklearn.installed import BaseEstimator
from onnxtrain.trainer import Trainer
from onnxtrain.training.inference.head import Head
from onnxtrain.training.optimizers import choose_optimizer
from onnxtrain.weights.parameters import Patterns

with contextlib.suppress(ImportError):  # then no estimator can be made
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, check_random_state, validate_data


class OnnxEstimator(BaseEstimator, abc.ABC):  # type: ignore[misc]
    """What the classifier and the regressor share; its arguments are described there."""

    trainer_: Trainer

    def __init__(
        self,
        model: Model | None = None,
        *,
        hidden_layer_sizes: Sequence[int] = (100,),
        epochs: int = 50,
        learning_rate: float | None = None,
        optimizer: str | Optimizer = "adam",
        batch_size: int = 64,
        loss: LossLike | None = None,
        train: Patterns | None = None,
        freeze: Patterns | None = None,
        output: str | None = None,
        new_head: bool = False,
        schedule: str | Schedule | None = None,
        shuffle: bool = True,
        random_state: Any = None,
        threads: int | None = None,
    ) -> None:
        self.model = model
        self.hidden_layer_sizes = hidden_layer_sizes
        self.epochs = epochs
        self.learning_rate = learning_rate
        self.optimizer = optimizer
        self.batch_size = batch_size
        self.loss = loss
        self.train = train
        self.freeze = freeze
        self.output = output
        self.new_head = new_head
        self.schedule = schedule
        self.shuffle = shuffle
        self.random_state = random_state
        self.threads = threads

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "trainer_")

    @property
    def model_(self) -> onnx.ModelProto:
        """The model with its trained weights."""
        check_is_fitted(self)
        return self.trainer_.model()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model with its trained weights; see :meth:`onnxtrain.Trainer.save`.

        Raises:
            ModelError: The path cannot be written.
            NotFittedError: There is nothing to save yet.
        """
        check_is_fitted(self)
        self.trainer_.save(path)

    _accepted: ClassVar[dict[str, bool]] = {}
    """What of y is accepted beyond one column of labels."""

    def _learn(
        self, X: Any, y: Any, sample_weight: Any, *, epochs: int, anew: bool = True, classes: Any = None
    ) -> Self:
        """Train on some data, with a new trainer or the one that there is; classes are those of all data."""
        X, y = validate_data(self, X, y, reset=anew, **self._accepted)
        weights = check_weights(sample_weight, X)
        width = self._width_of(y, anew, classes)
        if anew:
            self._begin(X, width)
        else:
            self._check_head(width)
        self._steps(X, self._targets(y), weights, epochs)
        return self

    def _begin(self, X: np.ndarray, width: int) -> None:
        """A new trainer, for targets of this many columns or classes."""
        seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        model = self.model
        if model is None:
            model = mlp((X.shape[1], *self.hidden_layer_sizes, width), seed=seed)
            if X.dtype == np.float64:
                _to_double(model.graph)
        elif self.new_head:
            model = replace_head(model, width, output=self.output, seed=seed)
        self._head = Head.of(model, self.output, X)
        self._check_head(width)
        optimizer = choose_optimizer(self.optimizer)
        if self.learning_rate is not None:
            optimizer = dataclasses.replace(optimizer, learning_rate=self.learning_rate)
        self.trainer_ = Trainer(
            model,
            loss=self._default_loss() if self.loss is None else self.loss,
            optimizer=optimizer,
            train=self.train,
            freeze=self.freeze,
            output=self.output,
            seed=seed,
            threads=self.threads,
        )
        self.trainer_.labels = None  # those beside the model's file: it learns from the numbers of classes
        self._places = self._find_columns()

    def _find_columns(self) -> list[int] | None:
        """Where X has the columns that the model reads, by their names; ``None`` where these tell nothing.

        Raises:
            DataError: X has other columns than those that the model was trained on.
        """
        names = [str(name) for name in getattr(self, "feature_names_in_", ())]
        if not names:
            return None
        trainer = self.trainer_
        inputs = trainer._data.names.specs(trainer._objective.inputs)
        own = [spec.name for spec in inputs]
        if len(inputs) == 1:
            order = in_order(names, inputs[0], "X")
            trainer._data.names = trainer._data.names.learned({own[0]: tuple(order)}, ())
        elif set(own) == set(names):
            order = own
        else:
            return None
        places = {name: place for place, name in enumerate(names)}
        return [places[name] for name in order]

    def _inputs(self, X: np.ndarray) -> dict[str, np.ndarray]:
        """The model's inputs for the columns of X."""
        places = self._places
        ordered = X if places is None or places == list(range(X.shape[1])) else X[:, places]
        return rows_to_inputs(ordered, self.trainer_._objective.inputs)

    @abc.abstractmethod
    def _width_of(self, y: np.ndarray, anew: bool, classes: Any) -> int:
        """How many columns or classes y stands for; a new training remembers what y is."""

    @abc.abstractmethod
    def _targets(self, y: np.ndarray) -> np.ndarray:
        """What the loss takes for y."""

    @abc.abstractmethod
    def _check_head(self, width: int) -> None: ...

    @abc.abstractmethod
    def _default_loss(self) -> str: ...

    def _steps(self, X: np.ndarray, targets: np.ndarray, weights: np.ndarray | None, epochs: int) -> None:
        """Train; weights count relative to their mean, so that their scale is no learning rate."""
        if weights is not None:
            kept = weights > 0
            X, targets, weights = X[kept], targets[kept], weights[kept]
            weights = weights / weights.mean()
        self.history_: History = self.trainer_.fit(
            self._inputs(X),
            targets,
            sample_weight=weights,
            epochs=epochs,
            batch_size=self.batch_size,
            schedule=self.schedule,
            shuffle=self.shuffle,
            progress=False,
        )

    def _outputs(self, X: Any) -> np.ndarray:
        """The output of the model that the loss is for, examples first."""
        check_is_fitted(self)
        X = validate_data(self, X, reset=False)
        found = self.trainer_.predict(self._inputs(X))
        return found[self._head.name] if isinstance(found, dict) else found


def _to_double(graph: onnx.GraphProto) -> None:
    """Make a perceptron compute in float64."""
    for value in (*graph.input, *graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
    for tensor in graph.initializer:
        array = onnx.numpy_helper.to_array(tensor).astype(np.float64)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))


def check_weights(given: Any, X: np.ndarray) -> np.ndarray | None:
    """Weights of examples, where there are some.

    Raises:
        OptionError: One is negative, or all are zero.
    """
    if given is None:
        return None
    weights: np.ndarray = _check_sample_weight(given, X, dtype=np.float64)
    if (weights < 0).any():
        raise OptionError(f"sample_weight holds {weights.min():g}; weights are at least 0.")
    if not weights.any():
        raise OptionError("sample_weight holds only zero weights; at least one must be above zero.")
    return weights
