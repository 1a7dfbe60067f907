"""The pseudo-code of the operators' pages, elementwise in Python floats: an independent reference.

It imports nothing of onnxtrain; callers give all attributes, in float64.
"""

from __future__ import annotations

import math


def adagrad(R, T, x, g, h, *, decay_factor, epsilon, norm_coefficient):
    r = R / (1 + T * decay_factor)
    g = norm_coefficient * x + g
    h = h + g * g
    return x - r * g / (math.sqrt(h) + epsilon), h


def adam(R, T, x, g, v, h, *, alpha, beta, epsilon, norm_coefficient, norm_coefficient_post):
    g = norm_coefficient * x + g
    v = alpha * v + (1 - alpha) * g
    h = beta * h + (1 - beta) * g * g
    root = math.sqrt(h) + epsilon
    adjusted = R * math.sqrt(1 - beta**T) / (1 - alpha**T) if T > 0 else R
    return (1 - norm_coefficient_post) * (x - adjusted * v / root), v, h


def adamw(R, T, x, g, v, h, *, alpha, beta, epsilon, weight_decay):
    v = alpha * v + (1 - alpha) * g
    h = beta * h + (1 - beta) * g * g
    v_hat, h_hat = (v / (1 - alpha**T), h / (1 - beta**T)) if T > 0 else (v, h)
    return x - R * weight_decay * x - R * v_hat / (math.sqrt(h_hat) + epsilon), v, h


def momentum(R, T, x, g, v, *, alpha, beta, mode, norm_coefficient):
    g = norm_coefficient * x + g
    v = alpha * v + (beta if T > 0 else 1) * g
    return x - R * (g + alpha * v if mode == "nesterov" else v), v


def lion(R, T, x, g, v, *, alpha, beta, weight_decay):
    c = alpha * v + (1 - alpha) * g
    sign = (c > 0) - (c < 0) if c == c else c
    return x - R * (sign + weight_decay * x), beta * v + (1 - beta) * g


def rmsprop(R, T, x, g, h, v=None, *, alpha, epsilon, weight_decay, momentum):
    g = weight_decay * x + g
    h = alpha * h + (1 - alpha) * g * g
    d = g / (math.sqrt(h) + epsilon)
    if v is None:
        return x - R * d, h
    v = momentum * v + d
    return x - R * v, h, v


def sgd(R, T, x, g, v=None, *, momentum, dampening, weight_decay, mode):
    g = weight_decay * x + g
    if v is None:
        return (x - R * g,)
    v = momentum * v + (1 - dampening if T > 0 else 1) * g
    return x - R * (g + momentum * v if mode == "nesterov" else v), v


def lamb(R, T, xs, gs, vs, hs, *, alpha, beta, epsilon, weight_decay):
    """A whole tensor: lists of numbers in, lists of X_new, V_new and H_new out."""
    vs = [alpha * v + (1 - alpha) * g for v, g in zip(vs, gs, strict=True)]
    hs = [beta * h + (1 - beta) * g * g for h, g in zip(hs, gs, strict=True)]
    v_by, h_by = (1 - alpha**T, 1 - beta**T) if T > 0 else (1, 1)
    steps = [v / v_by / (math.sqrt(h / h_by) + epsilon) + weight_decay * x for x, v, h in zip(xs, vs, hs, strict=True)]
    weight_norm, step_norm = math.hypot(*xs), math.hypot(*steps)
    trust = weight_norm / step_norm if weight_norm and step_norm else 1
    return [x - R * trust * step for x, step in zip(xs, steps, strict=True)], vs, hs


def ssgd_weight(u, *, measure, reweighting, epsilon, p):
    """w² of one weight, by the table of measures."""
    a = abs(u)
    if reweighting == "l2":
        return {
            "log-sum": lambda: a**2 + epsilon,
            "p-norm": lambda: 2 / p * a ** (2 - p),
            "arctan": lambda: (a**4 + epsilon**2) / epsilon,
            "geman-mcclure": lambda: (a**2 + epsilon) ** 2 / epsilon,
            "exponential": lambda: epsilon * math.exp(a**2 / epsilon),
            "tanh": lambda: epsilon * math.cosh(a**2 / epsilon) ** 2,
        }[measure]()
    w = {
        "log-sum": lambda: a + epsilon,
        "p-norm": lambda: 1 / p * a ** (1 - p),
        "arctan": lambda: (a**2 + epsilon**2) / epsilon,
        "geman-mcclure": lambda: (a + epsilon) ** 2 / epsilon,
        "exponential": lambda: epsilon * math.exp(a / epsilon),
        "tanh": lambda: epsilon * math.cosh(a / epsilon) ** 2,
    }[measure]()
    return w * w


def ssgd(R, xs, gs, vs, *, regularization, alpha, norm_coefficient, max_scale, block=(), **measure):
    """A whole layer: lists of numbers in, lists of X_new and V_new out; blocks have tests of their own."""
    assert not block
    squares = [ssgd_weight(x, **measure) for x in xs]
    mean = sum(squares) / len(squares)
    x_new, v_new = [], []
    for x, g, v, square in zip(xs, gs, vs, squares, strict=True):
        s = square / mean
        if max_scale > 0:
            s = min(s, max_scale)
        direction = alpha * v + (norm_coefficient * x + g)
        if measure["reweighting"] == "l2":
            taken = 2 * R * regularization * x / mean
        else:
            taken = R * regularization * math.sqrt(square) * ((x > 0) - (x < 0)) / mean
        x_new.append(x - R * s * direction - taken)
        v_new.append(direction)
    return x_new, v_new
