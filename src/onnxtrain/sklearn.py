"""ONNX models as estimators of scikit-learn: in pipelines, in grid searches, wherever its own estimators stand.

scikit-learn is an optional extra; this is the only module of the package that builds on its classes.
"""

from __future__ import annotations

import abc
import dataclasses
import os
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import numpy as np
import onnx

from onnxtrain.edit.head import replace_head
from onnxtrain.edit.working import Model
from onnxtrain.errors import OptionError
from onnxtrain.examples import mlp
from onnxtrain.operators.optimizer import Optimizer
from onnxtrain.training.callbacks import History
from onnxtrain.training.data.rows import rows_to_inputs
from onnxtrain.training.inference.head import Head
from onnxtrain.training.losses.loss_choice import LossLike
from onnxtrain.training.optimizers import choose_optimizer
from onnxtrain.training.schedules import Schedule
from onnxtrain.training.specification import Patterns
from onnxtrain.training.trainer import Trainer


class _NotInstalled:
    """Stands for scikit-learn's base class where there is none."""

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Say what is missing."""
        raise OptionError(
            f"onnxtrain.sklearn.{cls.__name__} needs scikit-learn 1.6 or newer, which is not installed; install it "
            "with pip install 'onnxtrain[sklearn]'."
        )


class _Mixin:
    """Stands for those of its classes that are mixed in."""


try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils.multiclass import check_classification_targets, unique_labels
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, check_random_state, validate_data
except ImportError:  # the module can be imported without scikit-learn, and says so when it is used
    BaseEstimator, ClassifierMixin, RegressorMixin = _NotInstalled, _Mixin, _Mixin

__all__ = ["OnnxClassifier", "OnnxRegressor"]


class _OnnxEstimator(BaseEstimator, abc.ABC):  # type: ignore[misc]
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
        weights = _weights(sample_weight, X)
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
            rows_to_inputs(X, self.trainer_.objective.inputs),
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
        found = self.trainer_.predict(rows_to_inputs(X, self.trainer_.objective.inputs))
        return found[self._head.name] if isinstance(found, dict) else found


class OnnxClassifier(ClassifierMixin, _OnnxEstimator):  # type: ignore[misc]
    """An ONNX model as a classifier of scikit-learn.

    The model's output is one number for each class [N, C], logits or probabilities; it may be one number [N, 1] where
    there are two classes. Class ``k`` of the model is the label ``classes_[k]``: labels of any type, sorted. The loss
    is the cross-entropy.

    Rows of X fill the model's inputs: columns in the order of the inputs, as many for each as its shape has elements,
    so that an input [N, 1, 8, 8] takes 64 columns.

    Args:
        model: A path or a loaded model, which is never changed; ``None`` for a new perceptron of the size of the data,
            in float32 or float64 as X is.
        hidden_layer_sizes: Widths of the hidden layers of a new perceptron, as in ``MLPClassifier``.
        epochs: How often ``fit`` goes through the data.
        learning_rate: By default the optimizer's own.
        optimizer: Update rule, or its name.
        batch_size: Examples per step.
        loss: Another loss of logits and class indices; see :class:`onnxtrain.Trainer`.
        train: Glob patterns of the initializers to train; by default all parameters.
        freeze: Glob patterns of those to keep.
        output: The output that the loss is built on, by default the first floating one.
        new_head: Whether to train a fresh last layer, of one output for each class; see
            :func:`onnxtrain.replace_head`.
        schedule: Learning rate by step, as in :meth:`onnxtrain.Trainer.fit`.
        shuffle: Whether to take the examples in a new order every epoch.
        random_state: Seed of new weights, of the order of the data and of dropout.
        threads: Threads within an operator.

    Attributes:
        classes_: The labels in the order of the model's classes.
        n_features_in_: Number of columns of X.
        feature_names_in_: Their names, where X had some.
        trainer_: The :class:`onnxtrain.Trainer`; further calls of ``partial_fit`` go on with its states.
        history_: One row per epoch of the last call.

    Raises:
        OptionError: scikit-learn is not installed. By ``fit`` and ``partial_fit``: the model's output does not fit the
            classes, or there is nothing to train; it is a ``ValueError``.

    Example:
        >>> import numpy as np
        >>> x, y = np.eye(4)[np.arange(40) % 4], np.array(["ash", "elm", "fir", "oak"])[np.arange(40) % 4]
        >>> print(*OnnxClassifier(epochs=20, learning_rate=0.01, random_state=0).fit(x, y).predict(x[:4]))
        ash elm fir oak
    """

    classes_: np.ndarray

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train from the model's own weights on.

        Args:
            X: Numbers [N, F].
            y: Labels [N].
            sample_weight: One weight per example, at least 0; only their proportions count.

        Raises:
            ValueError: The data cannot be learned from; see above for what is raised on the model.
        """
        return self._learn(X, y, sample_weight, epochs=self.epochs)

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """Go through some more data once, with the weights and the optimizer's states as they are.

        Args:
            X: Numbers [N, F].
            y: Labels [N].
            classes: All labels there are; needed in the first call, where nothing was fitted before.
            sample_weight: One weight per example, at least 0; only their proportions count.

        Raises:
            ValueError: A label is none of the classes, or the first call does not name them.
        """
        first = not hasattr(self, "trainer_")
        if first and classes is None:
            raise OptionError("classes is None; the first call of partial_fit needs all labels there are.")
        return self._learn(X, y, sample_weight, epochs=1, anew=first, classes=classes)

    def predict(self, X: Any) -> np.ndarray:
        """The most probable labels [N] for numbers [N, F]."""
        classes = self.predict_proba(X).argmax(axis=1)
        return np.asarray(self.classes_[classes])

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities [N, C] of the classes for numbers [N, F]."""
        found = self._outputs(X)
        if self._is_binary:
            if not self._gives_probabilities:
                found = 1 / (1 + np.exp(-np.clip(found, -80, 80)))
            positive = found.reshape(len(found), 1)
            return np.concatenate([1 - positive, positive], axis=1)
        if self._gives_probabilities:
            return found
        powers = np.exp(found - found.max(axis=1, keepdims=True))
        return np.asarray(powers / powers.sum(axis=1, keepdims=True))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model with its trained weights; labels that are texts go beside it.

        See :meth:`onnxtrain.Trainer.save`.
        """
        check_is_fitted(self)
        if all(isinstance(label, str) for label in self.classes_):
            self.trainer_.labels = tuple(map(str, self.classes_))
        super().save(path)

    @property
    def _is_binary(self) -> bool:
        return self._head.width == 1

    @property
    def _gives_probabilities(self) -> bool:
        """Whether the output holds probabilities, not logits; those of LogSoftmax are logits, too."""
        targets = self.trainer_.objective.targets
        return self._head.activation in ("Softmax", "Sigmoid") or (targets is not None and targets.from_probabilities)

    def _default_loss(self) -> str:
        return "binary_cross_entropy" if self._is_binary else "softmax_cross_entropy"

    def _check_head(self, width: int) -> None:
        found = 2 if self._is_binary else self._head.width
        if found != width:
            raise OptionError(
                f"The output {self._head.name!r} of the model tells {found} classes apart, but there are {width}; "
                "new_head=True trains a fresh last layer for them."
            )

    def _width_of(self, y: np.ndarray, anew: bool, classes: Any) -> int:
        check_classification_targets(y)
        if anew:
            self._name_classes(unique_labels(y if classes is None else classes))
        elif classes is not None and not np.array_equal(self.classes_, unique_labels(classes)):
            raise OptionError(f"classes is {classes!r}, but this classifier was fitted for {self.classes_.tolist()}.")
        self._check_labels(y)
        return len(self.classes_)

    def _name_classes(self, classes: np.ndarray) -> None:
        if len(classes) < 2:
            raise OptionError(
                f"y holds one class only, {classes.tolist()[0]!r}; a classifier needs at least 2 classes."
            )
        self.classes_ = classes

    def _check_labels(self, y: np.ndarray) -> None:
        unknown = np.setdiff1d(y, self.classes_)
        if len(unknown):
            raise OptionError(
                f"The label {unknown.tolist()[0]!r} in y is none of the classes {self.classes_.tolist()}."
            )

    def _targets(self, y: np.ndarray) -> np.ndarray:
        """The model's class numbers of labels."""
        indices = np.searchsorted(self.classes_, y)
        return indices.astype(np.float64)[:, None] if self._is_binary else indices.astype(np.int64)


class OnnxRegressor(RegressorMixin, _OnnxEstimator):  # type: ignore[misc]
    """An ONNX model as a regressor of scikit-learn.

    The model's output is one number for each column of y: [N, K], or [N] for one. The loss is the mean squared error.

    Rows of X fill the model's inputs: columns in the order of the inputs, as many for each as its shape has elements.

    Args:
        model: A path or a loaded model, which is never changed; ``None`` for a new perceptron of the size of the data,
            in float32 or float64 as X is.
        hidden_layer_sizes: Widths of the hidden layers of a new perceptron, as in ``MLPRegressor``.
        epochs: How often ``fit`` goes through the data.
        learning_rate: By default the optimizer's own.
        optimizer: Update rule, or its name.
        batch_size: Examples per step.
        loss: Another loss of numbers; see :class:`onnxtrain.Trainer`.
        train: Glob patterns of the initializers to train; by default all parameters.
        freeze: Glob patterns of those to keep.
        output: The output that the loss is built on, by default the first floating one.
        new_head: Whether to train a fresh last layer, of one output for each column of y; see
            :func:`onnxtrain.replace_head`.
        schedule: Learning rate by step, as in :meth:`onnxtrain.Trainer.fit`.
        shuffle: Whether to take the examples in a new order every epoch.
        random_state: Seed of new weights, of the order of the data and of dropout.
        threads: Threads within an operator.

    Attributes:
        n_features_in_: Number of columns of X.
        feature_names_in_: Their names, where X had some.
        trainer_: The :class:`onnxtrain.Trainer`; further calls of ``partial_fit`` go on with its states.
        history_: One row per epoch of the last call.

    Raises:
        OptionError: scikit-learn is not installed. By ``fit`` and ``partial_fit``: the model's output does not fit y,
            or there is nothing to train; it is a ``ValueError``.

    Example:
        >>> import numpy as np
        >>> x = np.random.default_rng(0).normal(size=(100, 2))
        >>> bool(OnnxRegressor(epochs=100, learning_rate=0.01, random_state=0).fit(x, x[:, 0]).score(x, x[:, 0]) > 0.9)
        True
    """

    _accepted: ClassVar[dict[str, bool]] = {"multi_output": True, "y_numeric": True}

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train from the model's own weights on.

        Args:
            X: Numbers [N, F].
            y: Numbers [N] or [N, K].
            sample_weight: One weight per example, at least 0; only their proportions count.

        Raises:
            ValueError: The data cannot be learned from; see above for what is raised on the model.
        """
        return self._learn(X, y, sample_weight, epochs=self.epochs)

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Go through some more data once, with the weights and the optimizer's states as they are.

        Args:
            X: Numbers [N, F].
            y: Numbers [N] or [N, K].
            sample_weight: One weight per example, at least 0; only their proportions count.

        Raises:
            ValueError: The data does not fit the earlier data.
        """
        return self._learn(X, y, sample_weight, epochs=1, anew=not hasattr(self, "trainer_"))

    def predict(self, X: Any) -> np.ndarray:
        """Numbers for numbers [N, F], in the form of the y that was learned: [N] or [N, K]."""
        found = self._outputs(X)
        return found.reshape(len(found)) if self._flat else found.reshape(len(found), self._head.width)

    def _width_of(self, y: np.ndarray, anew: bool, classes: Any) -> int:
        if anew:
            self._flat = y.ndim == 1
        return 1 if y.ndim == 1 else y.shape[1]

    def _targets(self, y: np.ndarray) -> np.ndarray:
        return y.reshape(len(y), -1).astype(np.float64)

    def _default_loss(self) -> str:
        return "mean_squared_error"

    def _check_head(self, width: int) -> None:
        if self._head.width != width:
            raise OptionError(
                f"The output {self._head.name!r} of the model has {self._head.width} columns, but y has {width}; "
                "new_head=True trains a fresh last layer for them."
            )


def _to_double(graph: onnx.GraphProto) -> None:
    """Make a perceptron compute in float64."""
    for value in (*graph.input, *graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
    for tensor in graph.initializer:
        array = onnx.numpy_helper.to_array(tensor).astype(np.float64)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))


def _weights(given: Any, X: np.ndarray) -> np.ndarray | None:
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
