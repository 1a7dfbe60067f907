"""Recognize constants by their values: position tables, masks, numbers of formulas, matrices of signal processing.

Each test looks for an exact property that no learned weight has: recurrences of sinusoids, even steps, symmetries of
windows and filters, the support of filter banks, the few values of masks and graphs. Initial values of layers
(constants, identities, random numbers) have none of them, and training destroys all.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from onnxtrain.parameters.readers import Reader, is_linear, is_lookup

_LARGEST = 1 << 24
"""Number of elements above which a tensor is not examined: such matrices are learned."""

_TOLERANCE = 1e-4
"""Tolerance relative to the largest value; float16 tensors need ten times as much."""

_LEAST_ROWS, _MOST_ROWS = 8, 64
"""Number of rows of sinusoids that are examined."""

_LEAST_TAPS = 5
"""Smallest number of taps for which a symmetry is no coincidence."""

_COLOURS = (
    (0.299, 0.587, 0.114),
    (0.2126, 0.7152, 0.0722),
    (0.2627, 0.678, 0.0593),
    (3.2405, -1.5372, -0.4985),
    (0.4122, 0.5363, 0.0514),
    (0.393, 0.769, 0.189),
)
"""Rows of matrices that convert RGB: luma of BT.601, 709 and 2020, from XYZ, to LMS, sepia."""

_FIRST_ROW: Final = 16
"""First examined row of a position table: earlier rows may be padding, later ones are less exact."""

_POSITIONS: Final = 5e-3
"""Tolerance of a position table, relative to the largest value of a column; float16 tables are within it."""

_CIRCLE: Final = 1e-3
"""Tolerance of cos² + sin² = 1."""

_STEP: Final = 1e-5
"""Tolerance of even steps."""

_FILLS: Final = 1e9
"""Magnitude that no weight has; exporters write masks as -inf or the smallest float."""

INFINITE: Final = "a mask: it holds infinite or huge values"
"""Reason of a mask that no name words."""

_HIDDEN, _BEFORE_SOFTMAX = -1e4, -10.0
"""Values of an additive mask at hidden positions: in general, and before a softmax."""

_FEW: Final = 3
"""Largest number of distinct values of a mask."""

_LOOKED_AT: Final = 1 << 20
"""Number of elements examined to count distinct values."""

_OF_ACTIVATIONS = (math.sqrt(2), math.sqrt(0.5), math.sqrt(2 / math.pi), 2 / math.sqrt(math.pi), 0.044715, 1.702)
"""Constants of GELU, which are no initial values of trainable scalars."""

_KNOWN = (*_OF_ACTIVATIONS, math.pi, math.e, math.log(2), math.log(10))
"""Constants of formulas that are neither round numbers nor roots."""

_LARGEST_ROOT: Final = 1 << 14


def has_one_value(array: np.ndarray) -> bool:
    """Return whether all elements are equal, as in untrained scales and biases.

    Example:
        >>> has_one_value(np.ones((1, 4, 1))), has_one_value(np.eye(2))
        (True, False)
    """
    return bool(array.size and array.flat[0] == array.flat[-1] and (array == array.flat[0]).all())


def is_common(number: float) -> bool:
    """Return whether a number is typical of formulas: round, a root of an integer or its inverse, or known.

    Example:
        >>> [is_common(number) for number in (0.5, 1e-5, 1 / math.sqrt(80), 2.6592)]
        [True, True, True, False]
    """
    digits = np.format_float_scientific(np.float32(number), trim="-").partition("e")[0]
    if len(digits.replace("-", "").replace(".", "")) <= 3 or float(number).is_integer() or is_of_activation(number):
        return True
    square = number * number
    roots = [c for c in (square, 1 / square, 1 / abs(number)) if c < 2**31]
    is_root = any(math.isclose(c, round(c), rel_tol=1e-6) and 1 <= round(c) <= _LARGEST_ROOT for c in roots)
    return is_root or any(math.isclose(abs(number), known, rel_tol=1e-6) for known in _KNOWN)


def is_of_activation(number: float) -> bool:
    """Return whether a number is a constant of GELU."""
    return any(math.isclose(abs(number), one, rel_tol=1e-6) for one in _OF_ACTIVATIONS)


def is_repeated(array: np.ndarray) -> bool:
    """Return whether values repeat along an axis, such as an exporter's copies for each example of a batch."""
    if sum(size != 1 for size in array.shape) < 2:
        return False
    return any(size > 1 and bool((array == array.take([0], axis)).all()) for axis, size in enumerate(array.shape))


def is_evenly_spaced(array: np.ndarray) -> bool:
    """Return whether values are evenly spaced along an axis (grids, distances, anchors) or geometric (slopes)."""
    full = array.astype(np.float64)
    if not np.isfinite(full).all():
        return False
    for axis, size in enumerate(full.shape):
        if size >= 3 and _has_even_steps(np.diff(full, axis=axis), axis, _STEP * float(np.abs(full).max())):
            return True
    is_vector = full.size == max(full.shape, default=0) >= 3
    if is_vector and (full > 0).all() and _has_even_steps(np.diff(np.log(full.reshape(-1))), 0, _STEP):
        return True
    halves = 2 * full
    return bool(full.size > 3 and (halves == np.round(halves)).all())


def _has_even_steps(steps: np.ndarray, axis: int, tolerance: float) -> bool:
    return bool(steps.any() and np.abs(np.diff(steps, axis=axis)).max() <= tolerance)


def are_circle(cosines: np.ndarray, sines: np.ndarray) -> bool:
    """Return whether pairs of elements lie on a circle; checking the ends rejects most others early."""
    ends = [float(cosines.flat[index]) ** 2 + float(sines.flat[index]) ** 2 for index in (0, -1)]
    if ends[0] == 0 or not math.isclose(*ends, rel_tol=_CIRCLE) or has_one_value(cosines):
        return False
    return np.allclose(cosines.astype(np.float64) ** 2 + sines.astype(np.float64) ** 2, ends[0], rtol=_CIRCLE)


def mask_kind(array: np.ndarray, *, meets_softmax: bool, multiplies: bool) -> str:
    """Return why a tensor is a mask; "" where it is not."""
    low, high = float(array.min()), float(array.max())
    if not (math.isfinite(low) and math.isfinite(high)) or max(abs(low), abs(high)) >= _FILLS:
        return INFINITE
    hides = low <= (_BEFORE_SOFTMAX if meets_softmax else _HIDDEN) and high <= 0
    scales = (low, high) == (0, 1) and array.ndim >= 2 and multiplies
    if not (hides or scales):
        return ""
    count = len(np.unique(array.reshape(-1)[:_LOOKED_AT].astype(np.float64)))
    if hides and 2 <= count <= _FEW:
        return "a mask: it holds zeros and values that hide positions"
    return "a mask: it multiplies by zeros and ones" if scales and count == 2 else ""


def are_positions(array: np.ndarray) -> bool:
    """Return whether the columns of a table are sinusoids of the row index."""
    sizes = [size for size in array.shape if size != 1]
    if len(sizes) < 2 or not array.size or array.dtype.kind not in "fV":
        return False
    rows = array.reshape(sizes[0], -1)
    if len(rows) < _LEAST_ROWS:
        return _are_pairs(rows)
    start = min(len(rows) // 4, _FIRST_ROW)
    part = rows[start : start + _MOST_ROWS].astype(np.float64)
    if not np.isfinite(part).all():
        return False
    factors, _, errors = _recurrence(part)
    turns = np.abs(factors) < 2 - _POSITIONS
    fits = errors <= _POSITIONS * np.abs(part).max(0)
    return bool(turns.any() and (np.abs(factors) <= 2 + _POSITIONS).all() and fits.all())


def _are_pairs(rows: np.ndarray) -> bool:
    """Return whether few rows consist of (sine, cosine) pairs, adjacent or in two halves."""
    width = rows.shape[1]
    if width % 2 or not np.isfinite(rows).all() or (rows == rows[:1]).all():
        return False
    full = rows.astype(np.float64)
    halves = ((full[:, ::2], full[:, 1::2]), (full[:, : width // 2], full[:, width // 2 :]))
    return any(bool((np.abs(one**2 + two**2 - 1) <= _POSITIONS).all()) for one, two in halves)


def _recurrence(part: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Fit t[p + 1] + t[p - 1] = f t[p] to each column, f = 2 cos(w) for a sinusoid; return f, squares and errors."""
    middle, around = part[1:-1], part[2:] + part[:-2]
    squares = (middle**2).sum(0)
    factors = np.divide((middle * around).sum(0), squares, out=np.full(squares.shape, 2.0), where=squares > 0)
    return factors, squares, np.abs(around - factors * middle).max(0)


def fixed_matrix(array: np.ndarray, readers: list[Reader]) -> str:
    """Return the kind of a fixed matrix of signal processing or of a graph; "" where a tensor may be learned.

    Example:
        >>> import onnx_ir as ir
        >>> reader = ir.Node("", "MatMul", [ir.Value(name="x"), ir.Value(name="w")]), 1
        >>> n = np.arange(16)
        >>> fixed_matrix(np.cos(np.pi / 8 * n[:, None] * n), [reader])
        'a Fourier or cosine basis'
    """
    if not 2 <= array.size <= _LARGEST or not readers:
        return ""
    sample = array.reshape(-1)[: 1 << 12].astype(np.float64)
    if not np.isfinite(sample).all():
        return ""
    kinds = {"" if node.domain else node.op_type for node, _ in readers}
    taps = math.prod(array.shape[2:]) if kinds <= {"Conv", "ConvTranspose"} else 0
    if (sample == sample[0]).all() and (array == array.flat[0]).all():  # initial values, if they do not average
        return "filter kernels" if taps > 2 and abs(taps * float(sample[0]) - 1) <= 1e-3 else ""
    if taps:
        return _kernel_kind(array) if all(index == 1 for _, index in readers) else ""
    if any(map(is_lookup, readers)):
        return "one-hot rows" if _is_identity(_squeezed(array)) else ""
    if kinds <= {"MatMul", "Gemm", "Einsum"} and all(map(is_linear, readers)):
        return _matrix_kind(_squeezed(array), is_operand=False)
    if kinds == {"Mul"} and ((array == 0) | (array == 1)).all():
        return ""  # a mask
    return _matrix_kind(_squeezed(array), is_operand=True) if kinds <= {"Mul", "Add", "Sub", "Div"} else ""


def _kernel_kind(array: np.ndarray) -> str:
    """Recognize kernels [outputs, inputs, *taps] of a convolution."""
    if array.ndim < 3:
        return ""
    taps = array.reshape(*array.shape[:2], -1)
    if taps.shape[2] == 1:
        matrix = taps[:, :, 0]
        if matrix.shape[0] == 1 and matrix.shape[1] >= _LEAST_ROWS and _is_range(matrix[0]):
            return "an integer grid"
        return _matrix_kind(matrix, is_operand=False)
    if _has_sinusoids(array):
        return "a Fourier or cosine basis"
    kernels = _single_kernels(taps)
    if kernels is None:
        return ""
    kernels = kernels.astype(np.float64)
    if _are_shifts(kernels):
        return "one-hot kernels"
    shaped = kernels.reshape(-1, *array.shape[2:])
    if _are_filters(shaped):
        return "filter kernels"
    if len(array.shape) == 3 and _is_resampling(shaped):
        return "a resampling filter"
    return "wavelet filters" if _are_wavelets(kernels) else ""


def _matrix_kind(matrix: np.ndarray, *, is_operand: bool) -> str:
    """Recognize a vector, a matrix or a stack of matrices."""
    if matrix.size in (3, 9) and _is_colour(matrix):
        return "a colour conversion"
    if matrix.ndim == 1:
        return "a window" if is_operand and _is_window(matrix) else ""
    if matrix.ndim > 3 or min(matrix.shape[-2:]) < 2:
        return ""
    if _has_sinusoids(matrix):
        return "a Fourier or cosine basis"
    if _is_graph(matrix):
        return "an adjacency or selection matrix"
    if matrix.ndim > 2 or is_operand:
        return ""
    if (matrix[:_MOST_ROWS, :_MOST_ROWS] >= 0).all() and (_is_bank(matrix) or _is_bank(matrix.T)):
        return "a filter bank"
    return "a Hadamard matrix" if len(matrix) >= 4 and _is_orthogonal_signs(matrix) else ""


def _squeezed(array: np.ndarray) -> np.ndarray:
    return array.reshape([size for size in array.shape if size != 1])


def _has_sinusoids(array: np.ndarray) -> bool:
    """Return whether an axis, its halves, or its even and odd indices hold sinusoids, times any factors."""
    for axis, size in enumerate(array.shape):
        if size < _LEAST_ROWS or array.size < 4 * size:
            continue
        rows = np.moveaxis(array, axis, 0)
        parts: list[tuple[np.ndarray, ...]] = [(rows,)]
        if size % 2 == 0 and size >= 2 * _LEAST_ROWS:
            parts += [(rows[: size // 2], rows[size // 2 :]), (rows[::2], rows[1::2])]
        if any(all(map(_are_sinusoids, part)) for part in parts):
            return True
    return False


def _are_sinusoids(rows: np.ndarray) -> bool:
    """Return whether columns satisfy t[p + 1] + t[p - 1] = 2 cos(w) t[p] in their interior.

    A corner comes first, since most tensors are weights, perhaps of a mapped file.
    """
    if not _fit_recurrence(rows[(slice(1, 1 + _LEAST_ROWS), *[slice(_MOST_ROWS)] * (rows.ndim - 1))], least=0):
        return False
    spread = (slice(None, None, max(1, size // _MOST_ROWS)) for size in rows.shape[1:])
    return _fit_recurrence(rows[(slice(1, 1 + _MOST_ROWS), *spread)], least=3)


def _fit_recurrence(part: np.ndarray, least: int) -> bool:
    """Test the recurrence where at least some columns turn fast; the first row may have a scale of its own."""
    part = part.reshape(len(part), -1).astype(np.float64)
    if len(part) < 5:
        return False
    factors, squares, errors = _recurrence(part)
    turning = (np.abs(factors) < 1.98) & (squares > 1e-6 * squares.max())
    fits = (errors <= 2e-3 * np.abs(part).max()) & (np.abs(factors) <= 2.002)
    return bool(fits.all() and turning.sum() >= least)


def _single_kernels(taps: np.ndarray) -> np.ndarray | None:
    """Return one kernel for each output; ``None`` where outputs read several inputs by different kernels."""
    if taps.shape[1] == 1:
        return np.asarray(taps[:, 0])
    used = np.abs(taps).max(2) > 0
    if (used.sum(1) == 1).all():  # a diagonal: one input for each output
        return np.asarray(taps[np.arange(len(taps)), used.argmax(1)])
    return np.asarray(taps[:, 0]) if (taps == taps[:, :1]).all() else None  # a filter of the mean over the inputs


def _are_shifts(kernels: np.ndarray) -> bool:
    """Return whether kernels take one tap each, at different places: a pixel shuffle, a median filter."""
    ones = (kernels == 1).sum(1)
    places = set(kernels.argmax(1).tolist())
    return bool((ones == 1).all() and ((kernels == 0).sum(1) == kernels.shape[1] - 1).all() and len(places) > 2)


def _are_filters(kernels: np.ndarray) -> bool:
    """Return whether all kernels are symmetric filters, small integers in a ratio, or one kernel for all channels."""
    flat = kernels.reshape(len(kernels), -1)
    taps, sums = flat.shape[1], flat.sum(1)
    if ((flat != 0).sum(1) < 2).any() or (np.abs(flat) == np.abs(flat[:, :1])).all():  # fresh identities; only signs
        return False
    largest = np.abs(flat).max(1)
    sizes = np.abs(flat).sum(1)
    balanced = (np.abs(sums) <= _TOLERANCE * sizes) | (np.abs(sums - 1) <= 1e-3)
    if ((flat == flat[:, :1]).all(1) & ~balanced).any():
        return False
    if balanced.all() and taps >= 3:
        if len(flat) >= 2 and taps >= _LEAST_TAPS and (flat == flat[:1]).all():
            return True
        if all(_is_integer_ratio(row) for row in flat):
            return True
    if taps == 2:  # pre-emphasis
        return len(flat) == 1 and 1.0 in flat and bool((flat < -0.9).any() and _has_few_digits(flat, 3))
    symmetric = all(_is_symmetric(kernel, size) for kernel, size in zip(kernels, largest, strict=True))
    unimodal = (flat >= -_TOLERANCE * largest[:, None]).all()
    few = taps < 2 * _LEAST_TAPS and not balanced.all()
    return symmetric and (not few or bool(unimodal and (taps >= _LEAST_TAPS or all(map(_is_integer_ratio, flat)))))


def _is_integer_ratio(values: np.ndarray) -> bool:
    """Return whether nonzero values are small multiples of the smallest one, such as those of Sobel's kernel."""
    sizes = np.abs(values[values != 0])
    ratios = np.multiply.outer((1, 2, 3), sizes / sizes.min())
    return bool(ratios[0].max() <= 64 and (np.abs(ratios - np.round(ratios)).max(1) <= 1e-3).any())


def _is_symmetric(kernel: np.ndarray, largest: float) -> bool:
    """Return whether a kernel equals plus or minus its reflection at the center of its energy."""
    square = kernel**2
    center = []
    for axis, size in enumerate(kernel.shape):
        along = square.sum(tuple(other for other in range(kernel.ndim) if other != axis))
        center.append(round(2 * float((along * np.arange(size)).sum() / along.sum())))
    reflected = kernel
    for axis, (size, double) in enumerate(zip(kernel.shape, center, strict=True)):
        index = double - np.arange(size)
        inside = (index >= 0) & (index < size)
        taken = reflected.take(np.where(inside, index, 0), axis)
        reflected = taken * np.expand_dims(inside, [other for other in range(kernel.ndim) if other != axis])
    limit = _TOLERANCE * largest
    return any(bool(np.abs(kernel - sign * reflected).max() <= limit) for sign in (1, -1))


def _is_resampling(kernels: np.ndarray) -> bool:
    """Return whether kernels are the phases of a symmetric low-pass filter: a later one mirrors an earlier one."""
    if len(kernels) < 3 or kernels.shape[1] < _LEAST_TAPS or ((kernels != 0).sum(1) < 4).any():
        return False
    sums, phases = kernels.sum(1), kernels[1:, 1:]
    limit = _TOLERANCE * np.abs(kernels).max()
    return bool(np.ptp(sums) <= 2e-2 * abs(sums[0]) and np.abs(phases - phases[::-1, ::-1]).max() <= limit)


def _are_wavelets(kernels: np.ndarray) -> bool:
    """Return whether kernels are orthogonal filters of equal signs, or pairs of quadrature mirror filters."""
    taps = kernels.shape[1]
    if taps in (2, 4, 8) and len(kernels) % taps == 0 and (len(kernels) == 2 or taps > 2):
        groups = kernels.reshape(-1, taps, taps)
        if (groups == groups[:1]).all() and _is_orthogonal_signs(groups[0]):
            return True
    if len(kernels) % 2 or taps < 4 or taps % 2:
        return False
    low, high = kernels[::2], kernels[1::2]
    if len(kernels) > 2 and not (low == low[:1]).all():
        low, high = np.split(kernels, 2)
    signs = np.where(np.arange(taps) % 2, -1, 1)
    limit = _TOLERANCE * np.abs(kernels).max()
    mirrored = [low[:, ::-1] * signs, -low[:, ::-1] * signs]
    return bool(np.abs(high.sum(1)).max() <= 10 * limit) and any(np.abs(high - m).max() <= limit for m in mirrored)


def _is_orthogonal_signs(matrix: np.ndarray) -> bool:
    """Return whether rows of one absolute value are orthogonal: Haar and Hadamard matrices."""
    if np.ptp(np.abs(matrix[:4, :_MOST_ROWS])) > _TOLERANCE * np.abs(matrix[0, 0]) or len(matrix) > 1 << 12:
        return False
    sizes = np.abs(matrix)
    if sizes.min() == 0 or np.ptp(sizes) > _TOLERANCE * sizes.max():
        return False
    signs = np.sign(matrix).astype(np.float64)
    gram = signs @ signs.T
    return bool((gram == np.diag(np.diag(gram))).all())


def _is_window(vector: np.ndarray) -> bool:
    """Return whether a vector rises to its center and falls like a mirror image: Hann, Hamming, Gauss, ..."""
    if len(vector) < _LEAST_ROWS:
        return False
    full = vector.astype(np.float64)
    largest = float(np.abs(full).max())
    if full.min() < -_TOLERANCE * largest:
        return False
    for part in (full, full[1:]):  # periodic windows have no last value
        half = (len(part) + 1) // 2
        rising = np.diff(part[:half])
        mirrored = np.abs(part - part[::-1]).max() <= _TOLERANCE * largest
        if mirrored and (rising >= 0).all() and (rising > 0).sum() >= half // 2:
            return True
    return False


def _is_bank(matrix: np.ndarray) -> bool:
    """Return whether columns are bands of rows in rising order, each rising to a peak and falling: mel filters."""
    bins, filters = matrix.shape
    if filters < 4 or bins < 2 * _LEAST_ROWS or (matrix < 0).any():
        return False
    used = matrix[:, matrix.max(0) > 0]
    if used.shape[1] < max(4, filters // 2):
        return False
    peaks, largest = used.argmax(0), used.max(0)
    steps = np.diff(used, axis=0)
    before = np.arange(bins - 1)[:, None] < peaks
    slack = 1e-6 * largest
    if (np.diff(peaks) < 0).any() or peaks[0] == peaks[-1]:
        return False
    if (before & (steps < -slack)).any() or (~before & (steps > slack)).any():
        return False
    slopes = (used > 0) & (used < largest * (1 - 1e-6))
    return bool(slopes.sum() >= filters and (used == 0).mean() > 0.25)


def _is_identity(matrix: np.ndarray) -> bool:
    return matrix.ndim == 2 and len(matrix) > 1 and np.array_equal(matrix, np.eye(*matrix.shape, dtype=matrix.dtype))


def _is_graph(matrix: np.ndarray) -> bool:
    """Return whether a (stack of) matrices holds zeros and ones, averages, or a symmetric sparse adjacency."""
    stack = matrix.reshape(-1, *matrix.shape[-2:])
    rows, columns = stack.shape[1:]
    corner = stack[:, :_MOST_ROWS, :_MOST_ROWS]
    zeros = corner == 0
    if min(rows, columns) < 3 or rows * columns < 16 or zeros.mean() < 0.1:
        return False
    full = stack.astype(np.float64)
    empty = full == 0
    offsets = {int(column - row) for _, row, column in np.argwhere(~zeros)}
    several = (~empty).sum(1).max() > 1 < (~empty).sum(2).max()
    if empty.mean() < 0.1 or not (several or len(offsets) > 4):
        return False
    if ((full == 1) | empty).all():
        return True
    largest = np.abs(full).max()
    if several and rows == columns and rows > 4:
        lower, upper = full, full.swapaxes(1, 2)
        if np.abs(lower - upper).max() <= 1e-6 * largest:
            return True
    if (full < 0).any() or empty.mean() < 0.5:
        return False
    return any(_are_averages(full, axis) for axis in (1, 2))


def _are_averages(stack: np.ndarray, axis: int) -> bool:
    """Return whether the nonzero values along an axis are 1 / their number."""
    counts = (stack != 0).sum(axis, keepdims=True)
    expected = np.where(stack != 0, 1 / np.maximum(counts, 1), 0)
    return bool(counts.max() > 1 and np.abs(stack - expected).max() <= _TOLERANCE)


def _is_range(vector: np.ndarray) -> bool:
    steps = np.diff(vector.astype(np.float64))
    return bool(len(vector) >= _LEAST_ROWS and steps[0] == round(float(steps[0])) != 0 and (steps == steps[0]).all())


def _is_colour(matrix: np.ndarray) -> bool:
    """Return whether a row or column of a matrix of three channels is that of a standard, in either order."""
    lines = [matrix.reshape(3)] if matrix.size == 3 else [*matrix, *matrix.T] if matrix.shape == (3, 3) else []
    if any(np.abs(line[::step] - row).max() <= 1e-3 for line in lines for row in _COLOURS for step in (1, -1)):
        return True
    ones = any((line == 1).all() for line in lines)  # luma passes all channels, and U and V one each
    return matrix.size == 9 and ones and bool((matrix == 0).sum() == 2 and _has_few_digits(matrix, 4))


def _has_few_digits(array: np.ndarray, digits: int) -> bool:
    full = array.astype(np.float64)
    return bool((np.abs(full - np.round(full, digits)) <= 6e-8 * np.maximum(np.abs(full), 1e-3)).all())
