# Written by `python tools/stubs.py`; do not edit.
"""Optimizers as ONNX operators: schema, reference over NumPy arrays, body in standard operators."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from .evaluation import emit as emit
from .nodes import infer_optimizer_types as infer_optimizer_types
from .optimizer import Optimizer as Optimizer
from .registry import Entry
from .sparsity import Sparsity

OPTIMIZERS: Final[Mapping[str, Entry]]

@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Adagrad: the learning rate of every element shrinks with its accumulated squared gradients.

    With learning rate R, update count T (0 in the first step), parameter X, its gradient G and the state H::

        r     = R / (1 + T * decay_factor)
        G'    = norm_coefficient * X + G
        H_new = H + G' * G'
        X_new = X - r * G' / (sqrt(H_new) + epsilon)

    PyTorch: ``torch.optim.Adagrad(lr=learning_rate, lr_decay=decay_factor, weight_decay=norm_coefficient,
    eps=epsilon)`` takes the same steps; only its default ``eps``, 1e-10, differs.

    Args:
        learning_rate: R, 0 or more.
        decay_factor: 0 or more.
        epsilon: 0 or more.
        norm_coefficient: Weight decay added to the gradient (L2 regularization), 0 or more.

    Raises:
        OptionError: A setting is outside its range.

    Source:
        J. Duchi, E. Hazan, Y. Singer, "Adaptive Subgradient Methods for Online Learning and Stochastic
        Optimization", JMLR 12, 2011; ai.onnx.preview.training::Adagrad, version 1.

    Example:
        >>> Adagrad(learning_rate=0.1).node_attributes()
        {'decay_factor': 0.0, 'epsilon': 1e-06, 'norm_coefficient': 0.0}
        >>> from onnxtrain.operators import adagrad
        >>> x, g, h = np.ones(2), np.array([3.0, -4.0]), np.zeros(2)
        >>> adagrad(0.1, 0, x, g, h, epsilon=0.0)
        (array([0.9, 1.1]), array([ 9., 16.]))
    """

    learning_rate: float
    decay_factor: float
    epsilon: float
    norm_coefficient: float
    def __init__(
        self,
        learning_rate: float = 0.01,
        decay_factor: float = 0.0,
        epsilon: float = 1e-06,
        norm_coefficient: float = 0.0,
        *,
        lr: float = ...,
        lr_decay: float = ...,
        eps: float = ...,
        weight_decay: float = ...,
    ) -> None: ...

def adagrad(
    R: ArrayLike,
    T: ArrayLike,
    *inputs: ArrayLike,
    decay_factor: float = 0.0,
    epsilon: float = 1e-06,
    norm_coefficient: float = 0.0,
) -> tuple[np.ndarray, ...]: ...

@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam: steps along the running average of the gradient, scaled by the root of the average of its square.

    With learning rate R, update count T (1 in the first step), parameter X, its gradient G and the states
    V and H::

        G'    = norm_coefficient * X + G
        V_new = alpha * V + (1 - alpha) * G'
        H_new = beta * H + (1 - beta) * G' * G'
        R'    = R * sqrt(1 - beta**T) / (1 - alpha**T)     for T > 0, else R
        X_new = (1 - norm_coefficient_post) * (X - R' * V_new / (sqrt(H_new) + epsilon))

    PyTorch: ``torch.optim.Adam(lr=learning_rate, betas=(alpha, beta), weight_decay=norm_coefficient)`` differs in
    epsilon: ONNX adds it before the bias correction, PyTorch after it. A step with PyTorch's ``eps`` equals one here
    with ``epsilon = eps * sqrt(1 - beta**T)``: a constant epsilon weighs more in early steps here. The default is 1e-6,
    not 1e-8. ``norm_coefficient_post`` is not AdamW's ``weight_decay``: it scales the updated parameter, and the
    learning rate does not multiply it.

    Args:
        learning_rate: R, 0 or more.
        alpha: In [0, 1).
        beta: In [0, 1).
        epsilon: 0 or more.
        norm_coefficient: Weight decay added to the gradient (L2 regularization), 0 or more.
        norm_coefficient_post: Decay of the updated parameter, in [0, 1).
        sparsity: Scaling of the updates that makes the model sparse, :class:`~onnxtrain.operators.sparsity.Sparsity`.

    Raises:
        OptionError: A setting is outside its range.

    Source:
        D. P. Kingma, J. Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015;
        ai.onnx.preview.training::Adam, version 1.

    Example:
        >>> Adam(learning_rate=3e-4).alpha
        0.9
        >>> Adam(alpha=1.0)
        Traceback (most recent call last):
            ...
        onnxtrain.errors.OptionError: Adam: alpha is 1.0, but must be a finite number, 0 or more and below 1.
        >>> from onnxtrain.operators import adam
        >>> x, g, v, h = np.ones(1), np.array([3.0]), np.zeros(1), np.zeros(1)
        >>> adam(0.5, 0, x, g, v, h, alpha=0.5, beta=0.75, epsilon=0.0)
        (array([0.5]), array([1.5]), array([2.25]))
    """

    learning_rate: float
    alpha: float
    beta: float
    epsilon: float
    norm_coefficient: float
    norm_coefficient_post: float
    sparsity: Sparsity | None
    def __init__(
        self,
        learning_rate: float = 0.001,
        alpha: float = 0.9,
        beta: float = 0.999,
        epsilon: float = 1e-06,
        norm_coefficient: float = 0.0,
        norm_coefficient_post: float = 0.0,
        sparsity: Sparsity | None = None,
        *,
        lr: float = ...,
        betas: tuple[float, float] = ...,
        eps: float = ...,
        weight_decay: float = ...,
    ) -> None: ...

def adam(
    R: ArrayLike,
    T: ArrayLike,
    *inputs: ArrayLike,
    alpha: float = 0.9,
    beta: float = 0.999,
    epsilon: float = 1e-06,
    norm_coefficient: float = 0.0,
    norm_coefficient_post: float = 0.0,
) -> tuple[np.ndarray, ...]: ...

@dataclass(frozen=True)
class AdamW(Optimizer):
    """AdamW: Adam with decoupled weight decay, which shrinks the parameter itself.

    With learning rate R, update count T (1 in the first step), parameter X, its gradient G, the states V and H, and
    alpha, beta = betas (the operator multiplies the last fraction by sqrt(1 - beta**T) above and below)::

        V_new = alpha * V + (1 - alpha) * G
        H_new = beta * H + (1 - beta) * G * G
        X_new = (1 - R * weight_decay) * X
                - R / (1 - alpha**T) * V_new / (sqrt(H_new) / sqrt(1 - beta**T) + eps)

    PyTorch: ``torch.optim.AdamW(lr=learning_rate, betas=betas, eps=eps, weight_decay=weight_decay)`` takes the same
    steps; ``maximize`` and ``amsgrad`` are missing here.

    Args:
        learning_rate: R, 0 or more.
        betas: Both in [0, 1).
        eps: 0 or more.
        weight_decay: Decay of the parameter, multiplied by the learning rate, 0 or more.

    Raises:
        OptionError: A setting is outside its range.

    Source:
        I. Loshchilov, F. Hutter, "Decoupled Weight Decay Regularization", ICLR 2019; onnxtrain::AdamW, version 1.

    Example:
        >>> AdamW(learning_rate=3e-4, weight_decay=0.1).node_attributes()
        {'alpha': 0.9, 'beta': 0.999, 'epsilon': 1e-08, 'weight_decay': 0.1}
        >>> AdamW(betas=(0.9, 1.0))
        Traceback (most recent call last):
            ...
        onnxtrain.errors.OptionError: AdamW: betas[1] is 1.0, but must be a finite number, 0 or more and below 1.
        >>> from onnxtrain.operators import adamw
        >>> x, g, v, h = np.ones(1), np.array([3.0]), np.zeros(1), np.zeros(1)
        >>> adamw(0.5, 1, x, g, v, h, alpha=0.5, beta=0.75, epsilon=0.0, weight_decay=0.5)
        (array([0.25]), array([1.5]), array([2.25]))
    """

    learning_rate: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    def __init__(
        self,
        learning_rate: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-08,
        weight_decay: float = 0.01,
        *,
        lr: float = ...,
        alpha: float = ...,
        beta: float = ...,
        epsilon: float = ...,
    ) -> None: ...

def adamw(
    R: ArrayLike,
    T: ArrayLike,
    *inputs: ArrayLike,
    alpha: float = 0.9,
    beta: float = 0.999,
    epsilon: float = 1e-08,
    weight_decay: float = 0.01,
) -> tuple[np.ndarray, ...]: ...

@dataclass(frozen=True)
class LAMB(Optimizer):
    """LAMB: AdamW with layer-wise learning rates, for large batches.

    With learning rate R, update count T (1 in the first step), parameter X, its gradient G, the states V and H, and
    alpha, beta = betas; norms are Euclidean, over all elements of the tensor::

        V_new = alpha * V + (1 - alpha) * G
        H_new = beta * H + (1 - beta) * G * G
        U = V_new / (1 - alpha**T) / (sqrt(H_new / (1 - beta**T)) + eps) + weight_decay * X
        X_new = X - R * trust * U,  trust = ||X|| / ||U||, or 1 where either norm is zero

    PyTorch has no LAMB. The steps are those of algorithm 2 of the paper with phi(z) = z. ``timm.optim.Lamb`` scales
    parameters without decay only with ``always_adapt=True``, and clips gradients by their global norm, which is
    ``Trainer(clip_norm=1.0)`` here. Biases and norms usually have no decay:
    ``groups=[Group("*.bias|*norm*", weight_decay=0)]``.

    Args:
        learning_rate: R, 0 or more.
        betas: Both in [0, 1).
        eps: 0 or more.
        weight_decay: Share of the parameter that is added to the step before scaling, 0 or more.

    Raises:
        OptionError: A setting is outside its range.

    Source:
        Y. You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", ICLR 2020;
        onnxtrain::LAMB, version 1.

    Example:
        >>> LAMB(learning_rate=2e-3, weight_decay=0.1).node_attributes()
        {'alpha': 0.9, 'beta': 0.999, 'epsilon': 1e-06, 'weight_decay': 0.1}
        >>> from onnxtrain.operators import lamb
        >>> x, g, v, h = np.full(1, 4.0), np.array([3.0]), np.zeros(1), np.zeros(1)
        >>> lamb(0.5, 1, x, g, v, h, alpha=0.5, beta=0.75, epsilon=0.0, weight_decay=0.0)
        (array([2.]), array([1.5]), array([2.25]))
    """

    learning_rate: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    def __init__(
        self,
        learning_rate: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-06,
        weight_decay: float = 0.01,
        *,
        lr: float = ...,
        alpha: float = ...,
        beta: float = ...,
        epsilon: float = ...,
    ) -> None: ...

def lamb(
    R: ArrayLike,
    T: ArrayLike,
    *inputs: ArrayLike,
    alpha: float = 0.9,
    beta: float = 0.999,
    epsilon: float = 1e-06,
    weight_decay: float = 0.01,
) -> tuple[np.ndarray, ...]: ...

@dataclass(frozen=True)
class Lion(Optimizer):
    """Lion: steps of one size along the sign of an averaged gradient.

    With learning rate R, parameter X, its gradient G, the state V, and alpha, beta = betas::

        X_new = (1 - R * weight_decay) * X - R * sign(alpha * V + (1 - alpha) * G)
        V_new = beta * V + (1 - beta) * G

    PyTorch has no Lion; the authors' implementation takes these steps. The learning rate is three to ten times smaller
    than AdamW's, the weight decay as many times larger.

    Args:
        learning_rate: R, 0 or more.
        betas: Both in [0, 1).
        weight_decay: Decay of the parameter, multiplied by the learning rate, 0 or more.

    Raises:
        OptionError: A setting is outside its range.

    Source:
        X. Chen et al., "Symbolic Discovery of Optimization Algorithms", NeurIPS 2023; onnxtrain::Lion, version 1.

    Example:
        >>> Lion(weight_decay=0.1).node_attributes()
        {'alpha': 0.9, 'beta': 0.99, 'weight_decay': 0.1}
        >>> from onnxtrain.operators import lion
        >>> lion(0.25, 0, np.ones(1), np.array([-3.0]), np.array([1.0]), alpha=0.5, beta=0.5)
        (array([1.25]), array([-1.]))
    """

    learning_rate: float
    betas: tuple[float, float]
    weight_decay: float
    def __init__(
        self,
        learning_rate: float = 0.0001,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        lr: float = ...,
        alpha: float = ...,
        beta: float = ...,
    ) -> None: ...

def lion(
    R: ArrayLike,
    T: ArrayLike,
    *inputs: ArrayLike,
    alpha: float = 0.9,
    beta: float = 0.99,
    weight_decay: float = 0.0,
) -> tuple[np.ndarray, ...]: ...

@dataclass(frozen=True)
class Momentum(Optimizer):
    """Stochastic gradient descent with momentum, standard or Nesterov's; plain with ``alpha=0``.

    With learning rate R, update count T (0 in the first step), parameter X, its gradient G and the state V::

        G'    = norm_coefficient * X + G
        b     = beta for T > 0, else 1
        V_new = alpha * V + b * G'
        X_new = X - R * V_new                        mode "standard"
        X_new = X - R * (G' + alpha * V_new)         mode "nesterov"

    PyTorch: ``torch.optim.SGD(lr=learning_rate, momentum=alpha, dampening=1 - beta,
    weight_decay=norm_coefficient, nesterov=mode == "nesterov")`` takes the same steps; PyTorch has Nesterov's
    mode only for ``beta=1``.

    Args:
        learning_rate: R, 0 or more.
        alpha: In [0, 1).
        beta: 0 or more.
        mode: "standard" or "nesterov".
        norm_coefficient: Weight decay added to the gradient (L2 regularization), 0 or more.
        sparsity: Scaling of the updates that makes the model sparse, :class:`~onnxtrain.operators.sparsity.Sparsity`.

    Raises:
        OptionError: A setting is outside its range, or the mode is unknown.

    Source:
        I. Sutskever, J. Martens, G. Dahl, G. Hinton, "On the importance of initialization and momentum in
        deep learning", ICML 2013; ai.onnx.preview.training::Momentum, version 1.

    Example:
        >>> import numpy as np
        >>> Momentum(learning_rate=0.05, mode="nesterov").node_attributes()
        {'alpha': 0.9, 'beta': 1.0, 'mode': 'nesterov', 'norm_coefficient': 0.0}
        >>> from onnxtrain.operators import momentum
        >>> x, g, v = np.ones(1), np.array([2.0]), np.array([4.0])
        >>> momentum(0.25, 1, x, g, v, alpha=0.5, beta=1.0, mode="standard", norm_coefficient=0.0)
        (array([0.]), array([4.]))
        >>> momentum(0.25, 1, x, g, v, alpha=0.5, beta=1.0, mode="nesterov", norm_coefficient=0.0)
        (array([0.]), array([4.]))
    """

    learning_rate: float
    alpha: float
    beta: float
    mode: str
    norm_coefficient: float
    sparsity: Sparsity | None
    def __init__(
        self,
        learning_rate: float = 0.01,
        alpha: float = 0.9,
        beta: float = 1.0,
        mode: str = "standard",
        norm_coefficient: float = 0.0,
        sparsity: Sparsity | None = None,
        *,
        lr: float = ...,
        momentum: float = ...,
        dampening: float = ...,
        nesterov: bool = ...,
        weight_decay: float = ...,
    ) -> None: ...

def momentum(
    R: ArrayLike,
    T: ArrayLike,
    *inputs: ArrayLike,
    alpha: float,
    beta: float,
    mode: str,
    norm_coefficient: float,
) -> tuple[np.ndarray, ...]: ...

@dataclass(frozen=True)
class RMSprop(Optimizer):
    """RMSprop: steps along the gradient, divided by the root of its averaged square.

    With learning rate R, parameter X, its gradient G and the states H and, where momentum is above 0, V::

        G'    = weight_decay * X + G
        H_new = alpha * H + (1 - alpha) * G' * G'
        V_new = momentum * V + G' / (sqrt(H_new) + eps)
        X_new = X - R * V_new

    PyTorch: ``torch.optim.RMSprop(lr=learning_rate, alpha=alpha, eps=eps, weight_decay=weight_decay,
    momentum=momentum)`` takes the same steps; ``centered`` is missing here.

    Args:
        learning_rate: R, 0 or more.
        alpha: In [0, 1).
        eps: 0 or more.
        weight_decay: Weight decay added to the gradient (L2 regularization), 0 or more.
        momentum: In [0, 1); with 0 there is no state V.

    Raises:
        OptionError: A setting is outside its range.

    Source:
        T. Tieleman, G. Hinton, "Lecture 6.5: RMSprop", COURSERA 2012; onnxtrain::RMSprop, version 1.

    Example:
        >>> RMSprop(momentum=0.9).node_attributes()
        {'alpha': 0.99, 'epsilon': 1e-08, 'weight_decay': 0.0, 'momentum': 0.9}
        >>> from onnxtrain.operators import rmsprop
        >>> rmsprop(0.5, 0, np.ones(1), np.array([3.0]), np.array([0.0]), alpha=0.75, epsilon=0.0)
        (array([0.]), array([2.25]))
    """

    learning_rate: float
    alpha: float
    eps: float
    weight_decay: float
    momentum: float
    def __init__(
        self,
        learning_rate: float = 0.01,
        alpha: float = 0.99,
        eps: float = 1e-08,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        *,
        lr: float = ...,
        epsilon: float = ...,
    ) -> None: ...

def rmsprop(
    R: ArrayLike,
    T: ArrayLike,
    *inputs: ArrayLike,
    alpha: float = 0.99,
    epsilon: float = 1e-08,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
) -> tuple[np.ndarray, ...]: ...

@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent, plain or with momentum.

    With learning rate R, update count T (0 in the first step), parameter X, its gradient G and, where momentum is above
    0, the state V::

        G'    = weight_decay * X + G
        V_new = momentum * V + (1 - dampening) * G'        in the first step G'
        X_new = X - R * G'                                 without momentum
        X_new = X - R * V_new                              with momentum
        X_new = X - R * (G' + momentum * V_new)            with nesterov

    PyTorch: ``torch.optim.SGD`` with the same arguments takes the same steps. :class:`Momentum` is ONNX's own operator
    for gradient descent with momentum.

    Args:
        learning_rate: R, 0 or more.
        momentum: In [0, 1); with 0 there is no state.
        dampening: 0 or more.
        weight_decay: Weight decay added to the gradient (L2 regularization), 0 or more.
        nesterov: Use Nesterov's momentum.

    Raises:
        OptionError: A setting is outside its range, or nesterov is given without momentum or with dampening.

    Source:
        I. Sutskever, J. Martens, G. Dahl, G. Hinton, "On the importance of initialization and momentum in
        deep learning", ICML 2013; onnxtrain::SGD, version 1.

    Example:
        >>> import numpy as np
        >>> SGD(learning_rate=0.1, momentum=0.9, nesterov=True).node_attributes()
        {'momentum': 0.9, 'dampening': 0.0, 'weight_decay': 0.0, 'mode': 'nesterov'}
        >>> SGD().states
        ()
        >>> from onnxtrain.operators import sgd
        >>> sgd(0.5, 0, np.ones(1), np.array([3.0]))
        (array([-0.5]),)
        >>> sgd(0.25, 1, np.ones(1), np.array([2.0]), np.array([4.0]), momentum=0.5)
        (array([0.]), array([4.]))
    """

    learning_rate: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    def __init__(
        self,
        learning_rate: float = 0.001,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        lr: float = ...,
        mode: str = ...,
    ) -> None: ...

def sgd(
    R: ArrayLike,
    T: ArrayLike,
    *inputs: ArrayLike,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    mode: str = "standard",
) -> tuple[np.ndarray, ...]: ...

@dataclass(frozen=True)
class SSGD(Optimizer):
    """Sparsity-promoting gradient descent: prunes a network while it trains.

    With learning rate R, parameter X (a layer), its gradient G and, for ``alpha > 0``, the state V::

        w²    = 1 / f'(X²)  for l2,  1 / f'(|X|)²  for l1      f: the measure
        s     = min(w² / mean(w²), max_scale)                  no limit for max_scale = 0
        G'    = norm_coefficient * X + G
        V_new = alpha * V + G'                                 direction D; G' itself for alpha = 0
        A     = 2 R λ X / mean(w²)  for l2,  R λ w sign(X) / mean(w²)  for l1      λ: regularization
        X_new = X - R * s * D - A

    With ε > 0 no weight becomes exactly zero; a threshold removes the vanished ones. With "p-norm" a zero weight stays
    zero. s averages 1 over a layer, so the steps of the remaining weights grow like 1 / density: see ``max_scale``.

    PyTorch has no SSGD; ``measure="p-norm", p=2`` (l2) is ``torch.optim.SGD(lr=learning_rate,
    momentum=alpha, weight_decay=norm_coefficient)``.

    Args:
        learning_rate: R, 0 or more.
        measure: "log-sum", "p-norm", "arctan", "geman-mcclure", "exponential", "tanh", or a registered one.
        reweighting: "l2" or "l1".
        epsilon: Parameter of all measures except "p-norm", above 0.
        p: Parameter of "p-norm", in (0, 2] for l2, (0, 1] for l1.
        regularization: λ, 0 or more.
        alpha: Momentum, in [0, 1).
        norm_coefficient: Weight decay added to the gradient (L2 regularization), 0 or more.
        max_scale: Largest s; 0 is no limit.
        block: (outputs, inputs) of a block of a weight matrix, whose weights are reweighted together, so that whole
            blocks vanish. In a convolution the inputs of a block are channels at one position of the kernel, if these
            suffice. The operator's attribute has one size for each axis of the stored tensor instead.

    Raises:
        OptionError: A setting is outside its range, or the measure is unknown.

    Source:
        C.-H. Lee, I. Fedorov, B. D. Rao, H. Garudadri, "SSGD: Sparsity-Promoting Stochastic Gradient Descent
        Algorithm for Unbiased DNN Pruning", ICASSP 2020.

    Example:
        >>> import numpy as np
        >>> [state.name for state in SSGD(alpha=0.9).states], SSGD().states
        (['V'], ())
        >>> from onnxtrain.operators import ssgd
        >>> x, g = np.array([1.0, 3.0]), np.array([1.0, 1.0])
        >>> ssgd(0.1, 0, x, g, measure="p-norm", p=1.0)  # w² = 2 |x|, s = |x| / 2
        (array([0.95, 2.85]),)
    """

    learning_rate: float
    measure: str
    reweighting: str
    epsilon: float
    p: float
    regularization: float
    alpha: float
    norm_coefficient: float
    max_scale: float
    block: tuple[int, int]
    def __init__(
        self,
        learning_rate: float = 0.01,
        measure: str = "log-sum",
        reweighting: str = "l2",
        epsilon: float = 0.01,
        p: float = 0.5,
        regularization: float = 0.0,
        alpha: float = 0.0,
        norm_coefficient: float = 0.0,
        max_scale: float = 0.0,
        block: tuple[int, int] = (1, 1),
        *,
        lr: float = ...,
        momentum: float = ...,
        weight_decay: float = ...,
    ) -> None: ...
    @property
    def native(self) -> bool: ...

def ssgd(
    R: ArrayLike,
    T: ArrayLike,
    *inputs: ArrayLike,
    measure: str = "log-sum",
    reweighting: str = "l2",
    epsilon: float = 0.01,
    p: float = 0.5,
    regularization: float = 0.0,
    alpha: float = 0.0,
    norm_coefficient: float = 0.0,
    max_scale: float = 0.0,
    block: tuple[int, ...] = (),
) -> tuple[np.ndarray, ...]: ...
