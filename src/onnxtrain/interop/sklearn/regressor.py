"""Scikit-learn regressor of an ONNX model."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import numpy as np

from onnxtrain.errors import OptionError
from onnxtrain.interop.sklearn.estimator import OnnxEstimator, RegressorMixin


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
        tags.target_tags.multi_output = True
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
