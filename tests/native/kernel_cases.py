"""Random calls of the native kernels: sizes and attributes that are ordinary, edge cases, or absurd."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from gradient_cases import (
    batch_normalization,
    batch_normalization_with_activation,
    chain,
    cross_entropy,
    elementwise,
    gather,
    gather_concat,
    log_softmax,
    normalization,
    resize,
    softmax,
)
from kernel_case import Case, pick
from layer_cases import attention, attention_gradient, linear, linear_gradient, low_bit, recurrent, wide_attention
from sparse_cases import pooled_convolution, sparse_convolution, sparse_linear, transposed_rows
from transform_cases import determinant, fourier, samples
from update_cases import after, optimizer
from window_cases import convolution, max_pool, max_pool_same
from window_cases import sweep as sweep

DRAWS: tuple[Callable[[np.random.Generator], Case], ...] = (
    convolution, convolution, convolution, max_pool, max_pool_same, gather, gather_concat, softmax, log_softmax, resize,
    cross_entropy, elementwise, chain, normalization, batch_normalization, batch_normalization_with_activation,
    attention, attention_gradient, wide_attention, linear, linear_gradient, low_bit, optimizer, recurrent, recurrent,
    after, sparse_linear, sparse_convolution, pooled_convolution, transposed_rows, fourier, samples, samples,
    determinant,
)  # fmt: skip


def draw_case(seed: int, number: int) -> Case:
    """Case ``number`` of a seed: the same on every machine."""
    rng = np.random.default_rng((seed, number))
    return pick(rng, *DRAWS)(rng)
