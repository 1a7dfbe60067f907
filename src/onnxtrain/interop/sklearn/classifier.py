"""Scikit-learn classifier of an ONNX model."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path
from typing import Any, Self

import numpy as np

from onnxtrain.data.data_names import write_names
from onnxtrain.errors import OptionError
from onnxtrain.interop.sklearn.estimator import ClassifierMixin, OnnxEstimator
from onnxtrain.losses.probabilities import ScoreKind

with contextlib.suppress(ImportError):  # then no estimator can be made
    from sklearn.utils.multiclass import check_classification_targets, unique_labels
    from sklearn.utils.validation import check_is_fitted


class OnnxClassifier(ClassifierMixin, OnnxEstimator):  # type: ignore[misc]
    """Scikit-learn classifier of an ONNX model.

    The model's output is [N, C], logits or probabilities of C classes; [N, 1] is accepted for two classes. Class ``k``
    of the model is the label ``classes_[k]``: labels of any type, sorted. The loss is the cross-entropy.

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

    Attributes:
        classes_: The labels in the order of the model's classes.
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

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """Train for one epoch on more data, continuing with the current weights and optimizer states.

        Args:
            X: Values [N, F].
            y: Labels [N].
            classes: All labels; required in the first call if ``fit`` was not called before.
            sample_weight: One weight per example, at least 0; only their ratios matter.

        Raises:
            ValueError: A label is not one of the classes, or the first call does not give them.
        """
        first = not hasattr(self, "trainer_")
        if first and classes is None:
            raise OptionError("classes is None; the first call of partial_fit needs all labels.")
        return self._learn(X, y, sample_weight, epochs=1, anew=first, classes=classes)

    def predict(self, X: Any) -> np.ndarray:
        """Predict the most probable labels [N] for values [N, F]."""
        fitted = self._as_fitted()
        classes = fitted.predict_proba(X).argmax(axis=1)
        return np.asarray(fitted.classes_[classes])

    def predict_proba(self, X: Any) -> np.ndarray:
        """Predict probabilities [N, C] of the classes for values [N, F]."""
        fitted = self._as_fitted()
        found, kind = fitted._outputs(X), fitted._kind
        if kind == "log independent":
            found, kind = np.exp(found), "independent"
        are_probabilities = kind in ("distribution", "independent")
        if fitted._is_binary:
            if not are_probabilities:
                found = 1 / (1 + np.exp(-np.clip(found, -80, 80)))
            positive = found.reshape(len(found), 1)
            return np.concatenate([1 - positive, positive], axis=1)
        if are_probabilities:
            return found
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
        return "binary_cross_entropy" if self._is_binary else "softmax_cross_entropy"

    def _check_head(self, width: int) -> None:
        found = 2 if self._is_binary else self._head.width
        if found != width:
            raise OptionError(
                f"The output {self._head.name!r} of the model is for {found} classes, but there are {width}; "
                "new_head=True trains a new last layer for them."
            ).about(self._head.name, got=found, wanted=width)

    def _width_of(self, y: np.ndarray, anew: bool, classes: Any) -> int:
        check_classification_targets(y)
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
        """Convert labels to class indices."""
        indices = np.searchsorted(self.classes_, y)
        return indices.astype(np.float64)[:, None] if self._is_binary else indices.astype(np.int64)
