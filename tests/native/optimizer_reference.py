"""The operator pages' pseudo-code, twice: in a wide type with error bounds, and in the tensor's own type bit by bit."""

from __future__ import annotations

import itertools

import numpy as np

WIDE = np.longdouble

DEFAULTS = {
    "Adagrad": {"decay_factor": 0.0, "epsilon": 1e-6, "norm_coefficient": 0.0},
    "Adam": {
        "alpha": 0.9,
        "beta": 0.999,
        "epsilon": 1e-6,
        "norm_coefficient": 0.0,
        "norm_coefficient_post": 0.0,
    },
    "Momentum": {"alpha": 0.95, "beta": 0.1, "norm_coefficient": 0.0, "mode": "standard"},
}
STATES = {"Adagrad": 1, "Adam": 2, "Momentum": 1}


def scalars(name, R, T, attributes):
    """R, T and the attributes combined in float64."""
    c = {k: v if isinstance(v, str) else np.float64(np.float32(v)) for k, v in {**DEFAULTS[name], **attributes}.items()}
    R = np.float64(R)
    if name == "Adagrad":
        c["rate"] = R / (1 + T * c["decay_factor"])
    if name == "Adam":
        corrected = R * np.sqrt(1 - c["beta"] ** T) / (1 - c["alpha"] ** T) if T > 0 else R
        c |= {"rate": corrected, "rest_alpha": 1 - c["alpha"], "rest_beta": 1 - c["beta"]}
        c["post"] = 1 - c["norm_coefficient_post"]
    if name == "Momentum":
        c |= {"rate": R, "beta": c["beta"] if T > 0 else np.float64(1)}
    return c


def stepwise(name, R, T, X, G, *states, **attributes):
    """Run the pseudo-code in the tensor's type, each operation rounded: the kernels' results bit for bit."""
    c = {k: v if isinstance(v, str) else X.dtype.type(v) for k, v in scalars(name, R, T, attributes).items()}
    with np.errstate(all="ignore"):
        g = c["norm_coefficient"] * X + G
        if name == "Adagrad":
            h = states[0] + g * g
            return X - c["rate"] * g / (np.sqrt(h) + c["epsilon"]), h
        if name == "Momentum":
            v = c["alpha"] * states[0] + c["beta"] * g
            direction = g + c["alpha"] * v if c["mode"] == "nesterov" else v
            return X - c["rate"] * direction, v
        v = c["alpha"] * states[0] + c["rest_alpha"] * g
        h = c["beta"] * states[1] + c["rest_beta"] * g * g
        return c["post"] * (X - c["rate"] * v / (np.sqrt(h) + c["epsilon"])), v, h


def wide(name, R, T, X, G, *states, **attributes):
    """The pseudo-code in a wide type, and the size of each result's largest term.

    Where terms cancel, no arithmetic in the tensor's type can be exact to the last places of what is left; errors
    are counted in last places of the terms.
    """
    c = {k: v if isinstance(v, str) else WIDE(v) for k, v in scalars(name, R, T, attributes).items()}
    X, G, *states = (np.asarray(a, WIDE) for a in (X, G, *states))
    g, g_size = c["norm_coefficient"] * X + G, abs(c["norm_coefficient"] * X) + abs(G)
    if name == "Adagrad":
        h, h_size = states[0] + g * g, states[0] + g_size**2
        root = np.sqrt(h) + c["epsilon"]
        size = abs(X) + abs(c["rate"]) * g_size / root * (h_size / h)
        return [(X - c["rate"] * g / root, size), (h, h_size)]
    if name == "Momentum":
        v = c["alpha"] * states[0] + c["beta"] * g
        v_size = abs(c["alpha"] * states[0]) + c["beta"] * g_size
        nesterov = c["mode"] == "nesterov"
        direction, size = (g + c["alpha"] * v, g_size + c["alpha"] * v_size) if nesterov else (v, v_size)
        return [(X - c["rate"] * direction, abs(X) + abs(c["rate"]) * size), (v, v_size)]
    v = c["alpha"] * states[0] + c["rest_alpha"] * g
    v_size = abs(c["alpha"] * states[0]) + c["rest_alpha"] * g_size
    h = c["beta"] * states[1] + c["rest_beta"] * g * g
    h_size = c["beta"] * states[1] + c["rest_beta"] * g_size**2
    root = np.sqrt(h) + c["epsilon"]
    x = c["post"] * (X - c["rate"] * v / root)
    size = abs(c["post"]) * (abs(X) + abs(c["rate"]) * v_size / root * (h_size / h))
    return [(x, size), (v, v_size), (h, h_size)]


def inverse_derivative(measure, reweighting, epsilon, p, z):
    """1 / f'(z), from the measures' definitions."""
    if measure == "log-sum":
        return z + epsilon
    if measure == "p-norm":
        power = p / 2 if reweighting == "l2" else p
        return z ** (1 - power) / power
    if measure == "arctan":
        return (z * z + epsilon * epsilon) / epsilon
    if measure == "geman-mcclure":
        return (z + epsilon) ** 2 / epsilon
    if measure == "exponential":
        return epsilon * np.exp(z / epsilon)
    return epsilon * np.cosh(z / epsilon) ** 2


def mean_squares(X, block):
    """The mean square of the block of each element, block by block."""
    means = np.empty_like(X)
    for corner in itertools.product(*(range(0, size, length) for size, length in zip(X.shape, block, strict=True))):
        part = tuple(slice(start, start + length) for start, length in zip(corner, block, strict=True))
        means[part] = (X[part] ** 2).mean()
    return means


def wide_ssgd(
    R,
    X,
    G,
    V=None,
    *,
    measure="log-sum",
    reweighting="l2",
    epsilon=0.01,
    p=0.5,
    regularization=0.0,
    alpha=0.0,
    norm_coefficient=0.0,
    max_scale=0.0,
    block=(),
):
    """SSGD in a wide type, and the size of each result's largest term."""
    X, G = np.asarray(X, WIDE), np.asarray(G, WIDE)
    R, epsilon, p, alpha, norm_coefficient = (WIDE(a) for a in (R, *np.float32([epsilon, p, alpha, norm_coefficient])))
    regularization, max_scale = np.float32(regularization), np.float32(max_scale)
    root = np.sqrt(mean_squares(X, block)) if block else abs(X)
    z = (mean_squares(X, block) if block else X * X) if reweighting == "l2" else root
    h = inverse_derivative(measure, reweighting, epsilon, p, z)
    square = h if reweighting == "l2" else h * h
    mean = square.mean()
    s = square / mean
    if max_scale > 0:
        s = np.minimum(s, WIDE(max_scale))
    g, g_size = norm_coefficient * X + G, abs(norm_coefficient * X) + abs(G)
    d, d_size = (g, g_size) if V is None else (alpha * V + g, abs(alpha * V) + g_size)
    shrinkage = 2 * R * regularization * X / mean
    if reweighting == "l1":
        direction = np.divide(X, root, out=np.zeros_like(X), where=root > 0) if block else np.sign(X)
        shrinkage = R * regularization * h * direction / mean
    results = [(X - R * s * d - shrinkage, abs(X) + abs(R) * s * d_size + abs(shrinkage))]
    return results if V is None else [*results, (d, d_size)]


def assert_close(actual, expected, float32_places=4, float64_relative=2e-15):
    """Each array within the bound for its type of (value, size of the largest term)."""
    assert len(actual) == len(expected)
    for array, (value, size) in zip(actual, expected, strict=True):
        single = array.dtype == np.float32
        bound = float32_places * np.spacing(np.asarray(size, np.float32)) if single else float64_relative * size
        error = abs(np.asarray(array, WIDE) - value)
        worst = np.argmax(error / np.maximum(bound, WIDE(1e-300)))
        assert (error <= bound).all(), (
            f"{array.flat[worst]!r} for {value.flat[worst]!r}: {np.max(error / bound)} bounds"
        )


def draw(rng, shape, dtype, states):
    """Random X, G and states; the last of two, or the only one of Adagrad, is not negative where it has to be."""
    X, G, V = (np.asarray(rng.standard_normal(shape), dtype) for _ in range(3))
    H = np.asarray(rng.standard_normal(shape) ** 2 * 0.1, dtype)
    return [X, G, *{0: [], 1: [H], 2: [V, H]}[states]]
