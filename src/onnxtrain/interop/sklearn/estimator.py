"""Shared base of the scikit-learn estimators: builds the trainer for the data, trains, predicts."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import os
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import numpy as np
import onnx

from onnxtrain.data.data_names import names_of_inputs
from onnxtrain.data.naming import in_order, rows_to_inputs
from onnxtrain.editing.head import replace_head
from onnxtrain.editing.working import Model
from onnxtrain.errors import OptionError
from onnxtrain.graph.patterns import Patterns
from onnxtrain.losses.loss_choice import LossLike
from onnxtrain.operators.choice import choose_optimizer
from onnxtrain.operators.optimizer import Optimizer
from onnxtrain.training.callbacks import History
from onnxtrain.training.examples import mlp
from onnxtrain.training.inference.forward import Head
from onnxtrain.training.schedules import Schedule
from onnxtrain.training.trainer import Trainer


class NotInstalled:
    """Placeholder for scikit-learn's base class where it is not installed."""

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Raise the error for the missing package."""
        raise OptionError(
            f"onnxtrain.interop.sklearn.{cls.__name__} needs scikit-learn 1.6 or newer, which is not installed; "
            "install it with pip install scikit-learn."
        )


class Mixin:
    """Placeholder for scikit-learn's mixins where it is not installed."""


try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
except ImportError:  # the estimators can be imported, but not instantiated
    BaseEstimator, ClassifierMixin, RegressorMixin = NotInstalled, Mixin, Mixin

__all__ = ["BaseEstimator", "ClassifierMixin", "RegressorMixin"]


with contextlib.suppress(ImportError):  # then no estimator can be instantiated
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, check_random_state, validate_data


class OnnxEstimator(BaseEstimator, abc.ABC):  # type: ignore[misc]
    """Base of the classifier and the regressor, which document its arguments."""

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
        """Model with its trained weights."""
        check_is_fitted(self)
        return self.trainer_.model()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model with its trained weights; see :meth:`onnxtrain.Trainer.save`."""
        check_is_fitted(self)
        self.trainer_.save(path)

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train, starting from the model's own weights."""
        return self._learn(X, y, sample_weight, epochs=self.epochs)

    _accepted: ClassVar[dict[str, bool]] = {}
    """Arguments of scikit-learn's validation of y."""

    def _learn(
        self, X: Any, y: Any, sample_weight: Any, *, epochs: int, anew: bool = True, classes: Any = None
    ) -> Self:
        """Train with a new trainer or the current one; ``classes`` are the classes of all data.

        A new training becomes visible as a whole: the first when it begins, a later one when it has ended, until which
        other threads predict with the one before.
        """
        learner = self._as_fitted() if anew else self
        X, y = validate_data(learner, X, y, reset=anew, **self._accepted)
        weights = check_weights(sample_weight, X)
        width = learner._width_of(y, anew, classes)
        if anew:
            learner._begin(X, width)
        else:
            learner._check_head(width)
        if not hasattr(self, "trainer_"):
            self.__dict__.update(learner.__dict__)
        try:
            learner._steps(X, learner._targets(y), weights, epochs)
        except KeyboardInterrupt:  # the trainer has the weights of the last step
            self.__dict__.update(learner.__dict__)
            raise
        self.__dict__.update(learner.__dict__)
        return self

    def _as_fitted(self) -> Self:
        """Return an estimator with the attributes of this moment, whatever another thread sets."""
        found = object.__new__(type(self))
        found.__dict__.update(self.__dict__)
        return found

    def _begin(self, X: np.ndarray, width: int) -> None:
        """Make a trainer for targets of this many columns or classes."""
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
        if self.model is not None and self.new_head:
            self.trainer_.data_adapter.names = names_of_inputs(self.model)
        self.trainer_.labels = None  # ignore labels beside the model's file: targets are class indices
        self._order = self._find_columns()

    def _find_columns(self) -> list[int] | None:
        """Match the columns of X with the model's inputs by name; ``None`` where names do not decide."""
        names = [str(name) for name in getattr(self, "feature_names_in_", ())]
        if not names:
            return None
        trainer = self.trainer_
        inputs = trainer.data_adapter.names.specs(trainer.objective.inputs)
        own = [spec.name for spec in inputs]
        if len(inputs) == 1:
            order = in_order(names, inputs[0], "X")
            trainer.data_adapter.names = trainer.data_adapter.names.learned({own[0]: tuple(order)}, ())
        elif set(own) == set(names):
            order = own
        else:
            return None
        positions = {name: index for index, name in enumerate(names)}
        return [positions[name] for name in order]

    def _inputs(self, X: np.ndarray) -> dict[str, np.ndarray]:
        """Split X into the model's inputs."""
        order = self._order
        ordered = X if order is None or order == list(range(X.shape[1])) else X[:, order]
        return rows_to_inputs(ordered, self.trainer_.objective.inputs)

    @abc.abstractmethod
    def _width_of(self, y: np.ndarray, anew: bool, classes: Any) -> int:
        """Return the number of columns or classes of y; a new training stores the layout of y."""

    @abc.abstractmethod
    def _targets(self, y: np.ndarray) -> np.ndarray:
        """Convert y to targets of the loss."""

    @abc.abstractmethod
    def _check_head(self, width: int) -> None: ...

    @abc.abstractmethod
    def _default_loss(self) -> str: ...

    def _steps(self, X: np.ndarray, targets: np.ndarray, weights: np.ndarray | None, epochs: int) -> None:
        """Train; weights are divided by their mean, so that their scale does not act as a learning rate."""
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
        """Predict the output that has the loss, examples first."""
        check_is_fitted(self)
        X = validate_data(self, X, reset=False)
        found = self.trainer_.predict(self._inputs(X))
        return found[self._head.name] if isinstance(found, dict) else found


def _to_double(graph: onnx.GraphProto) -> None:
    """Convert a perceptron to float64."""
    for value in (*graph.input, *graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
    for tensor in graph.initializer:
        array = onnx.numpy_helper.to_array(tensor).astype(np.float64)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))


def check_weights(given: Any, X: np.ndarray) -> np.ndarray | None:
    """Check the weights of examples."""
    if given is None:
        return None
    weights: np.ndarray = _check_sample_weight(given, X, dtype=np.float64)
    if (weights < 0).any():
        raise OptionError(f"sample_weight holds {weights.min():g}; weights are at least 0.").about(
            "sample_weight", got=weights.min()
        )
    if not weights.any():
        raise OptionError("sample_weight holds only zero weights; at least one must be above zero.")
    return weights
