"""ONNX models as scikit-learn estimators, for pipelines, grid searches and the like.

scikit-learn is an optional extra; see docs/sklearn.md.
"""

from __future__ import annotations

import abc
import dataclasses
import inspect
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import onnx

from onnxtrain.data.data_names import names_of_inputs, write_names
from onnxtrain.data.model_inputs import tensor_spec
from onnxtrain.data.naming import in_order, rows_to_inputs
from onnxtrain.editing.head import replace_head
from onnxtrain.editing.working import Model
from onnxtrain.errors import OptionError
from onnxtrain.errors._internal import public_names
from onnxtrain.graph.patterns import Patterns
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.graph.value import dimensions
from onnxtrain.losses.heads import named_output
from onnxtrain.losses.loss_choice import LossLike
from onnxtrain.losses.probabilities import ScoreKind
from onnxtrain.model_file.file import ModelFile
from onnxtrain.operators.optimizer import Optimizer
from onnxtrain.operators.registry import choose_optimizer
from onnxtrain.training.callbacks import History
from onnxtrain.training.examples import mlp
from onnxtrain.training.inference.forward import predict_all
from onnxtrain.training.schedules import Schedule
from onnxtrain.training.trainer import Trainer

__all__ = ["OnnxClassifier", "OnnxRegressor"]

__dir__ = public_names(__name__)


class NotInstalled:
    """Placeholder for scikit-learn's base class where it is not installed."""

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Raise the error for the missing package."""
        raise OptionError(
            f"onnxtrain.interop.sklearn.{cls.__name__} needs scikit-learn 1.6 or newer, which is not installed; "
            "install it with pip install scikit-learn."
        )


try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils.class_weight import compute_sample_weight
    from sklearn.utils.multiclass import check_classification_targets, type_of_target, unique_labels
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, check_random_state, validate_data
    from sklearn.utils.validation import column_or_1d as column
except ImportError:  # the estimators can be imported, but not instantiated
    BaseEstimator, ClassifierMixin, RegressorMixin = NotInstalled, type("Mixin", (), {}), type("Mixin", (), {})


@dataclasses.dataclass(frozen=True)
class Head:
    """The output of a model that a loss reads."""

    name: str
    width: int

    @classmethod
    def of(cls, model: str | os.PathLike[str] | onnx.ModelProto, output: str | None, rows: Any) -> Self:
        """Return the head of a model; if its width is unknown, predict the first row."""
        graph = infer_shapes(ModelFile.load(model).training_model()).graph
        value = named_output(graph, output)
        name = str(value.name)
        shape: Sequence[Any] | None = dimensions(value)
        if shape is None or not all(isinstance(size, int) for size in shape[1:]):
            inputs = [tensor_spec(item) for item in graph.inputs]
            shape = predict_all(model, rows_to_inputs(rows[:1], inputs))[name].shape
        if len(shape) not in (1, 2):
            listed = ", ".join(map(str, shape))
            raise OptionError(
                f"The output {name!r} has the shape ({listed}); it needs one row [C] for each example."
            ).about(name)
        return cls(name, int(shape[1]) if len(shape) == 2 else 1)


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
        X, y = checked(learner, X, y, reset=anew, **self._accepted)
        y = y.toarray() if hasattr(y, "toarray") else y
        weights = check_weights(sample_weight, X)
        if (by_label := getattr(self, "class_weight", None)) is not None:
            weights = compute_sample_weight(by_label, y) * (1 if weights is None else weights)
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

    def _inputs(self, X: Any) -> dict[str, Any]:
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
        X = checked(self, X, reset=False)
        return self.trainer_.predict_all(self._inputs(X))[self._head.name]


def _to_double(graph: onnx.GraphProto) -> None:
    """Convert a perceptron to float64."""
    for value in (*graph.input, *graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
    for tensor in graph.initializer:
        array = onnx.numpy_helper.to_array(tensor).astype(np.float64)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))


def checked(estimator: OnnxEstimator, *data: Any, **options: Any) -> Any:
    """Return data that scikit-learn has validated; texts in X, on which it has no advice, get a sentence of our own."""
    try:
        return validate_data(estimator, *data, accept_sparse="csr", **options)
    except ValueError as error:
        if "could not convert string to float" not in str(error):
            raise
        text = str(error).partition(": ")[2]
        raise OptionError(
            f"X holds texts, such as {text}, and {type(estimator).__name__} takes numbers; encode the columns of texts "
            "in front of it, with a ColumnTransformer and a OneHotEncoder in a pipeline, for example."
        ) from error


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


class OnnxClassifier(ClassifierMixin, OnnxEstimator):  # type: ignore[misc]
    """Scikit-learn classifier of an ONNX model.

    The model's output is [N, C], logits or probabilities of C classes; [N, 1] is accepted for two classes. Class ``k``
    of the model is the label ``classes_[k]``: labels of any type, sorted. The loss is the cross-entropy.

    An indicator y [N, K] of zeros and ones asks K questions: the output is [N, K], the loss the binary cross-entropy;
    ``predict`` returns an indicator, ``predict_proba`` [N, K] the probabilities of ones.

    The columns of X are split into the model's inputs, in the order of the inputs: an input [N, 1, 8, 8] takes 64
    columns.

    Args:
        model: A path or a loaded model, which is never changed; ``None`` for a new perceptron that fits the data,
            in float32 or float64 like X.
        hidden_layer_sizes: Widths of the hidden layers of a new perceptron, as in ``MLPClassifier``.
        epochs: Number of epochs of ``fit``.
        learning_rate: Learning rate; by default the optimizer's own.
        optimizer: An optimizer, or its name.
        batch_size: Examples per step.
        loss: Another loss on logits and class indices; see :class:`onnxtrain.Trainer`.
        train: Glob patterns of the initializers to train; by default all parameters.
        freeze: Glob patterns of the initializers to keep.
        output: The output of the loss, by default the first floating one.
        new_head: Replace the last layer by a new one with one output per class; see
            :func:`onnxtrain.replace_head`.
        schedule: Learning rate by step, as in :meth:`onnxtrain.Trainer.fit`.
        shuffle: Shuffle the examples every epoch.
        random_state: Seed of new weights, the order of the data and dropout.
        threads: Threads within an operator.
        class_weight: Weights of the examples by label, ``{label: weight}`` (1 for others), or ``"balanced"``, as in
            scikit-learn; for an indicator a list of dictionaries. They multiply ``sample_weight``.

    Attributes:
        classes_: The labels in the order of the model's classes; of an indicator the numbers of its columns.
        n_features_in_: Number of columns of X.
        feature_names_in_: Names of the columns, if X had any.
        trainer_: The :class:`onnxtrain.Trainer`; further calls of ``partial_fit`` continue with its states.
        history_: One row per epoch of the last call.

    Raises:
        OptionError: scikit-learn is not installed. From ``fit`` and ``partial_fit``: the model's output does not fit
            the classes, or there is nothing to train; it is a ``ValueError``.

    Example:
        >>> import numpy as np
        >>> x, y = np.eye(4)[np.arange(40) % 4], np.array(["ash", "elm", "fir", "oak"])[np.arange(40) % 4]
        >>> print(*OnnxClassifier(epochs=20, learning_rate=0.01, random_state=0).fit(x, y).predict(x[:4]))
        ash elm fir oak
    """

    classes_: np.ndarray
    _accepted: ClassVar[dict[str, bool]] = {"multi_output": True}
    _multilabel = False

    def __init__(self, model: Model | None = None, *, class_weight: Any = None, **options: Any) -> None:
        super().__init__(model, **options)
        self.class_weight = class_weight

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = tags.input_tags.sparse = True
        return tags

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """Train for one epoch on more data, continuing with the current weights and optimizer states.

        Args:
            X: Values [N, F].
            y: Labels [N], or an indicator [N, K].
            classes: All labels; required in the first call if ``fit`` was not called before, but for an indicator.
            sample_weight: One weight per example, at least 0; only their ratios matter.

        Raises:
            ValueError: A label is not one of the classes, or the first call does not give them.
        """
        first = not hasattr(self, "trainer_")
        if self.class_weight == "balanced":
            raise OptionError("class_weight='balanced' needs all data, and partial_fit has some; give {label: weight}.")
        if first and classes is None and (np.ndim(y) != 2 or np.shape(y)[1] == 1):
            raise OptionError("classes is None; the first call of partial_fit needs all labels.")
        return self._learn(X, y, sample_weight, epochs=1, anew=first, classes=classes)

    def predict(self, X: Any) -> np.ndarray:
        """Predict the most probable labels [N], or an indicator [N, K], for values [N, F]."""
        fitted = self._as_fitted()
        found = fitted.predict_proba(X)
        if fitted._multilabel:
            return np.asarray(found > 0.5, np.int64)
        classes = found.argmax(axis=1)
        return np.asarray(fitted.classes_[classes])

    def predict_proba(self, X: Any) -> np.ndarray:
        """Predict probabilities [N, C] of the classes, or [N, K] of ones, for values [N, F]."""
        fitted = self._as_fitted()
        found, kind = fitted._outputs(X), fitted._kind
        if kind == "log independent":
            found, kind = np.exp(found), "independent"
        are_probabilities = kind in ("distribution", "independent")
        questions = fitted._is_binary or fitted._multilabel
        if questions and not are_probabilities:
            found = 1 / (1 + np.exp(-np.clip(found, -80, 80)))
        if fitted._is_binary and not fitted._multilabel:
            positive = found.reshape(len(found), 1)
            return np.concatenate([1 - positive, positive], axis=1)
        if questions or are_probabilities:
            return np.asarray(found)
        powers = np.exp(found - found.max(axis=1, keepdims=True))
        return np.asarray(powers / powers.sum(axis=1, keepdims=True))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model with its trained weights; text labels are written beside it.

        See :meth:`onnxtrain.Trainer.save`.
        """
        check_is_fitted(self)
        classes = self.classes_
        texts = tuple(map(str, classes)) if all(isinstance(label, str) for label in classes) else None
        self.trainer_.save(path)
        write_names(Path(path), dataclasses.replace(self.trainer_.data_names, labels=texts))

    @property
    def _is_binary(self) -> bool:
        return self._head.width == 1

    @property
    def _kind(self) -> ScoreKind | None:
        """The meaning of the output, as the loss declares it or its nodes prove it."""
        heads = self.trainer_.objective.heads
        if not heads or heads[0].declared.from_logits is True:
            return "logits"
        return heads[0].scores.kind if heads[0].declared.from_logits is None else "independent"

    def _default_loss(self) -> str:
        return "binary_cross_entropy" if self._is_binary or self._multilabel else "softmax_cross_entropy"

    def _check_head(self, width: int) -> None:
        found = 2 if self._is_binary and not self._multilabel else self._head.width
        if found != width:
            raise OptionError(
                f"The output {self._head.name!r} of the model is for {found} classes, but there are {width}; "
                "new_head=True trains a new last layer for them."
            ).about(self._head.name, got=found, wanted=width)

    def _width_of(self, y: np.ndarray, anew: bool, classes: Any) -> int:
        check_classification_targets(y)
        several = y.ndim == 2 and y.shape[1] > 1
        if several and type_of_target(y) != "multilabel-indicator":
            raise OptionError("y has several columns that are not all 0 and 1; give one column of labels.")
        if anew and several:
            self.classes_ = np.arange(y.shape[1])
        self._multilabel = several if anew else self._multilabel
        if self._multilabel:
            if y.shape[1:] != self.classes_.shape:
                raise OptionError(f"y has the shape {y.shape}; earlier data have {len(self.classes_)} columns.")
            return len(self.classes_)
        y = column(y, warn=True)
        if anew:
            self._name_classes(unique_labels(y if classes is None else classes))
        elif classes is not None and not np.array_equal(self.classes_, unique_labels(classes)):
            raise OptionError(
                f"classes is {classes!r}, but this classifier was fitted for {self.classes_.tolist()}."
            ).about("classes", got=classes, wanted=self.classes_.tolist())
        self._check_labels(y)
        return len(self.classes_)

    def _name_classes(self, classes: np.ndarray) -> None:
        if len(classes) < 2:
            raise OptionError(
                f"y holds one class only, {classes.tolist()[0]!r}; a classifier needs at least 2 classes."
            ).about("y", got=classes.tolist()[0])
        self.classes_ = classes

    def _check_labels(self, y: np.ndarray) -> None:
        unknown = np.setdiff1d(y, self.classes_)
        if len(unknown):
            raise OptionError(
                f"The label {unknown.tolist()[0]!r} in y is not one of the classes {self.classes_.tolist()}."
            ).about("y", got=unknown.tolist()[0], wanted=self.classes_.tolist())

    def _targets(self, y: np.ndarray) -> np.ndarray:
        """Convert labels to class indices, or an indicator to targets."""
        if self._multilabel:
            return y.astype(np.float64)
        indices = np.searchsorted(self.classes_, y.reshape(-1))
        return indices.astype(np.float64)[:, None] if self._is_binary else indices.astype(np.int64)


_WEIGHT = inspect.Parameter("class_weight", inspect.Parameter.KEYWORD_ONLY, default=None)
_OPTIONS = [*inspect.signature(OnnxEstimator.__init__).parameters.values(), _WEIGHT]
OnnxClassifier.__init__.__signature__ = inspect.Signature(_OPTIONS)  # type: ignore[attr-defined]  # for scikit-learn


class OnnxRegressor(RegressorMixin, OnnxEstimator):  # type: ignore[misc]
    """Scikit-learn regressor of an ONNX model.

    The model's output has one value per column of y: [N, K], or [N] for one. The loss is the mean squared error.

    The columns of X are split into the model's inputs, in the order of the inputs.

    Args:
        model: A path or a loaded model, which is never changed; ``None`` for a new perceptron that fits the data,
            in float32 or float64 like X.
        hidden_layer_sizes: Widths of the hidden layers of a new perceptron, as in ``MLPRegressor``.
        epochs: Number of epochs of ``fit``.
        learning_rate: Learning rate; by default the optimizer's own.
        optimizer: An optimizer, or its name.
        batch_size: Examples per step.
        loss: Another loss on values; see :class:`onnxtrain.Trainer`.
        train: Glob patterns of the initializers to train; by default all parameters.
        freeze: Glob patterns of the initializers to keep.
        output: The output of the loss, by default the first floating one.
        new_head: Replace the last layer by a new one with one output per column of y; see
            :func:`onnxtrain.replace_head`.
        schedule: Learning rate by step, as in :meth:`onnxtrain.Trainer.fit`.
        shuffle: Shuffle the examples every epoch.
        random_state: Seed of new weights, the order of the data and dropout.
        threads: Threads within an operator.

    Attributes:
        n_features_in_: Number of columns of X.
        feature_names_in_: Names of the columns, if X had any.
        trainer_: The :class:`onnxtrain.Trainer`; further calls of ``partial_fit`` continue with its states.
        history_: One row per epoch of the last call.

    Raises:
        OptionError: scikit-learn is not installed. From ``fit`` and ``partial_fit``: the model's output does not fit y,
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
        tags.target_tags.multi_output = tags.input_tags.sparse = True
        return tags

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train for one epoch on more data, continuing with the current weights and optimizer states.

        Args:
            X: Values [N, F].
            y: Values [N] or [N, K].
            sample_weight: One weight per example, at least 0; only their ratios matter.

        Raises:
            ValueError: The data do not fit the earlier data.
        """
        return self._learn(X, y, sample_weight, epochs=1, anew=not hasattr(self, "trainer_"))

    def predict(self, X: Any) -> np.ndarray:
        """Predict values for values [N, F], in the shape of the training's y: [N] or [N, K]."""
        fitted = self._as_fitted()
        found = fitted._outputs(X)
        return found.reshape(len(found)) if fitted._flat else found.reshape(len(found), fitted._head.width)

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
                "new_head=True trains a new last layer for them."
            ).about(self._head.name, got=self._head.width, wanted=width)
