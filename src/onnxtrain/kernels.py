"""The optimizers' native kernels over arrays in memory, in place, without ONNX Runtime.

Each function updates lists of parameters and their states where they lie: NumPy arrays, or tensors of any
library that speaks DLPack (PyTorch's among them). States come in the operator's order: for Adam all first
moments ``V``, then all second moments ``H``. Attributes are rounded to float32, as a model file stores them, so
that a function here and the operator in a model give the same bits; the learning rate is float64.

A loop that updates the same arrays again and again should bind them once (:class:`Bound`): the checks then
run once, and a step over a thousand small tensors costs little more than over one large one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onnxtrain.runtime.bound import Bound

__all__ = ["Bound", "adagrad_", "adam_", "momentum_", "ssgd_"]


def adagrad_(
    parameters: Sequence[Any],
    gradients: Sequence[Any],
    states: Sequence[Any],
    *,
    learning_rate: float,
    step: int,
    decay_factor: float = 0.0,
    epsilon: float = 1e-6,
    norm_coefficient: float = 0.0,
    threads: int = 1,
) -> None:
    """Update ``parameters`` and ``states`` in place by one step of ONNX's Adagrad.

    ``r = R / (1 + T * decay_factor)``, ``G = norm_coefficient * X + G``, ``H = H + G * G``,
    ``X = X - r * G / (sqrt(H) + epsilon)``.

    Args:
        parameters: ``X``, float32 or float64 arrays of any shape.
        gradients: ``G``, of the parameters' types and shapes.
        states: ``H``, the accumulated squared gradients, likewise.
        learning_rate: ``R``.
        step: ``T``, the number of steps done before.
        decay_factor: How fast the learning rate falls.
        epsilon: Added to the root.
        norm_coefficient: Weight decay, added to the gradient.
        threads: How many threads share the work; the result does not depend on it.

    Raises:
        OperatorError: An array cannot be used (see :class:`Bound`), or ``1 + step * decay_factor`` is not
            positive.

    Example:
        >>> import numpy as np
        >>> x, g, h = np.array([1.0]), np.array([-1.0]), np.array([3.0])
        >>> adagrad_([x], [g], [h], learning_rate=0.5, step=0, epsilon=0.0)
        >>> x, h
        (array([1.25]), array([4.]))

    PyTorch's ``Adagrad`` counts steps from 1 and divides by ``1 + (step - 1) * lr_decay``; with ``step``
    counted from 0 and ``epsilon=1e-10`` both agree.
    """
    Bound(parameters, gradients, states).adagrad(
        learning_rate=learning_rate,
        step=step,
        decay_factor=decay_factor,
        epsilon=epsilon,
        norm_coefficient=norm_coefficient,
        threads=threads,
    )


def adam_(
    parameters: Sequence[Any],
    gradients: Sequence[Any],
    states: Sequence[Any],
    *,
    learning_rate: float,
    step: int,
    alpha: float = 0.9,
    beta: float = 0.999,
    epsilon: float = 1e-6,
    norm_coefficient: float = 0.0,
    norm_coefficient_post: float = 0.0,
    threads: int = 1,
) -> None:
    """Update ``parameters`` and ``states`` in place by one step of ONNX's Adam.

    ``G = norm_coefficient * X + G``, ``V = alpha * V + (1 - alpha) * G``,
    ``H = beta * H + (1 - beta) * G * G``,
    ``r = R * sqrt(1 - beta**T) / (1 - alpha**T)`` where ``T > 0``, else ``R``,
    ``X = (1 - norm_coefficient_post) * (X - r * V / (sqrt(H) + epsilon))``.

    Args:
        parameters: ``X``, float32 or float64 arrays of any shape.
        gradients: ``G``, of the parameters' types and shapes.
        states: ``V`` of every parameter, then ``H`` of every parameter.
        learning_rate: ``R``.
        step: ``T``; with 0 the learning rate is not corrected.
        alpha: How much of ``V`` stays.
        beta: How much of ``H`` stays.
        epsilon: Added to the root.
        norm_coefficient: Weight decay, added to the gradient.
        norm_coefficient_post: Weight decay, applied after the step.
        threads: How many threads share the work; the result does not depend on it.

    Raises:
        OperatorError: An array cannot be used (see :class:`Bound`).

    Example:
        >>> import numpy as np
        >>> x, g, v, h = np.array([1.0]), np.array([2.0]), np.array([0.0]), np.array([0.0])
        >>> adam_([x], [g], [v, h], learning_rate=0.5, step=1, alpha=0.5, beta=0.75, epsilon=0.0)
        >>> x, v, h
        (array([0.5]), array([1.]), array([1.]))

    PyTorch's ``Adam`` adds epsilon after bias correction: its ``eps`` is ``epsilon / sqrt(1 - beta**T)``.
    """
    Bound(parameters, gradients, states).adam(
        learning_rate=learning_rate,
        step=step,
        alpha=alpha,
        beta=beta,
        epsilon=epsilon,
        norm_coefficient=norm_coefficient,
        norm_coefficient_post=norm_coefficient_post,
        threads=threads,
    )


def momentum_(
    parameters: Sequence[Any],
    gradients: Sequence[Any],
    states: Sequence[Any],
    *,
    learning_rate: float,
    step: int,
    alpha: float,
    beta: float,
    norm_coefficient: float = 0.0,
    mode: str = "standard",
    threads: int = 1,
) -> None:
    """Update ``parameters`` and ``states`` in place by one step of ONNX's Momentum.

    ``G = norm_coefficient * X + G``, ``V = alpha * V + b * G`` with ``b = beta`` where ``T > 0``, else 1;
    ``X = X - R * V`` (standard) or ``X = X - R * (G + alpha * V)`` (nesterov).

    Args:
        parameters: ``X``, float32 or float64 arrays of any shape.
        gradients: ``G``, of the parameters' types and shapes.
        states: ``V``, likewise.
        learning_rate: ``R``.
        step: ``T``, 0 at the first step.
        alpha: How much of ``V`` stays.
        beta: How much of the gradient joins ``V`` after the first step.
        norm_coefficient: Weight decay, added to the gradient.
        mode: ``"standard"`` or ``"nesterov"``.
        threads: How many threads share the work; the result does not depend on it.

    Raises:
        OperatorError: An array cannot be used (see :class:`Bound`), or ``mode`` is another word.

    Example:
        >>> import numpy as np
        >>> x, g, v = np.array([1.0]), np.array([2.0]), np.array([4.0])
        >>> momentum_([x], [g], [v], learning_rate=0.25, step=1, alpha=0.5, beta=1.0)
        >>> x, v
        (array([0.]), array([4.]))

    PyTorch's ``SGD(momentum=alpha, dampening=d)`` is this with ``beta = 1 - d``.
    """
    Bound(parameters, gradients, states).momentum(
        learning_rate=learning_rate,
        step=step,
        alpha=alpha,
        beta=beta,
        norm_coefficient=norm_coefficient,
        mode=mode,
        threads=threads,
    )


def ssgd_(
    parameters: Sequence[Any],
    gradients: Sequence[Any],
    states: Sequence[Any] = (),
    *,
    learning_rate: float,
    measure: str = "log-sum",
    reweighting: str = "l2",
    epsilon: float = 0.01,
    p: float = 0.5,
    regularization: float = 0.0,
    alpha: float = 0.0,
    norm_coefficient: float = 0.0,
    max_scale: float = 0.0,
    threads: int = 1,
) -> None:
    """Update ``parameters`` (and ``states``) in place by one step of SSGD, the sparsity-promoting SGD.

    ``G = norm_coefficient * X + G``; ``D = V = alpha * V + G`` where ``alpha > 0``, else ``D = G``;
    ``s = w**2 / mean(w**2)`` over the array, at most ``max_scale`` where that is above 0;
    ``X = X - R * s * D``, less ``2 * R * regularization * X / mean(w**2)`` (l2) or
    ``R * regularization * w * sign(X) / mean(w**2)`` (l1). ``w`` is the measure's weight of ``X``.

    Args:
        parameters: ``X``, float32 or float64 arrays of any shape; each is a layer of its own.
        gradients: ``G``, of the parameters' types and shapes.
        states: ``V``, likewise, where ``alpha > 0``; else none.
        learning_rate: ``R``.
        measure: ``"log-sum"``, ``"p-norm"``, ``"arctan"``, ``"geman-mcclure"``, ``"exponential"`` or
            ``"tanh"``.
        reweighting: ``"l2"`` or ``"l1"``.
        epsilon: Of all measures but the p-norm, above 0; smaller promotes sparsity more.
        p: Of the p-norm: in (0, 2] for l2 and (0, 1] for l1; the upper end is plain SGD.
        regularization: The weight of the diversity measure in the loss.
        alpha: Momentum.
        norm_coefficient: Weight decay, added to the gradient.
        max_scale: The largest ``s``, 0 for no cap.
        threads: How many threads share the work; the result does not depend on it.

    Raises:
        OperatorError: An array cannot be used (see :class:`Bound`), or an argument is out of its range.

    Example:
        >>> import numpy as np
        >>> x, g = np.array([3.0, 1.0]), np.array([1.0, 1.0])
        >>> ssgd_([x], [g], learning_rate=0.5, measure="p-norm", p=1.0)  # s = |x| / mean(|x|) = 1.5, 0.5
        >>> x
        array([2.25, 0.75])

    Source: Lee, Fedorov, Rao and Garudadri, *SSGD: Sparsity-Promoting Stochastic Gradient Descent Algorithm
    for Unbiased DNN Pruning*, ICASSP 2020. PyTorch has no counterpart.
    """
    Bound(parameters, gradients, states).ssgd(
        learning_rate=learning_rate,
        measure=measure,
        reweighting=reweighting,
        epsilon=epsilon,
        p=p,
        regularization=regularization,
        alpha=alpha,
        norm_coefficient=norm_coefficient,
        max_scale=max_scale,
        threads=threads,
    )
