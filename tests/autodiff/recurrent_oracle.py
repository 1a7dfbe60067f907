"""LSTM, GRU and RNN in NumPy, step by step as in the specification, with every attribute, in float64."""

import numpy as np

FUNCTIONS = {
    "Sigmoid": lambda x, a, b: 1 / (1 + np.exp(-x)),
    "Tanh": lambda x, a, b: np.tanh(x),
    "Relu": lambda x, a, b: np.maximum(x, 0),
    "Affine": lambda x, a, b: a * x + b,
    "LeakyRelu": lambda x, a, b: np.where(x < 0, a * x, x),
    "ThresholdedRelu": lambda x, a, b: np.where(x > a, x, 0),
    "ScaledTanh": lambda x, a, b: a * np.tanh(b * x),
    "HardSigmoid": lambda x, a, b: np.clip(a * x + b, 0, 1),
    "Elu": lambda x, a, b: np.where(x < 0, a * (np.exp(x) - 1), x),
    "Softsign": lambda x, a, b: x / (1 + np.abs(x)),
    "Softplus": lambda x, a, b: np.log1p(np.exp(x)),
}
ALPHA = {"Affine": 1.0, "LeakyRelu": 0.01, "ThresholdedRelu": 1.0, "ScaledTanh": 1.0, "HardSigmoid": 0.2, "Elu": 1.0}
BETA = {"Affine": 0.0, "ScaledTanh": 1.0, "HardSigmoid": 0.5}
DEFAULTS = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}


def recurrent(operator, x, w, r, b=None, lengths=None, h0=None, c0=None, p=None, **attributes):
    """All outputs of the operator: Y, Y_h (and Y_c for LSTM)."""
    batch_first = attributes.get("layout", 0) == 1
    if batch_first:
        x = x.swapaxes(0, 1)
        h0, c0 = (None if s is None else s.swapaxes(0, 1) for s in (h0, c0))
    directions, hidden = w.shape[0], r.shape[2]
    steps, batch = x.shape[:2]
    functions = _functions(operator, directions, attributes)
    y = np.zeros((steps, directions, batch, hidden))
    last = np.zeros((2, directions, batch, hidden))
    for d in range(directions):
        backwards = attributes.get("direction", "forward") == "reverse" or d == 1
        biases = np.zeros(2 * w.shape[1]) if b is None else b[d]
        for n in range(batch):
            count = steps if lengths is None else int(lengths[n])
            h = np.zeros(hidden) if h0 is None else h0[d, n]
            c = np.zeros(hidden) if c0 is None else c0[d, n]
            order = range(count)[::-1] if backwards else range(count)
            for t in order:
                peepholes = np.zeros(3 * hidden) if p is None else p[d]
                h, c = _STEPS[operator](x[t, n], h, c, w[d], r[d], biases, peepholes, functions[d], attributes)
                y[t, d, n] = h
            last[:, d, n] = h, c
    if batch_first:
        y, last = y.transpose(2, 0, 1, 3), last.swapaxes(1, 2)
    return [y, last[0], last[1]] if operator == "LSTM" else [y, last[0]]


def _functions(operator, directions, attributes):
    names = attributes.get("activations") or DEFAULTS[operator] * directions
    alphas, betas = iter(attributes.get("activation_alpha", ())), iter(attributes.get("activation_beta", ()))
    made = []
    for name in names:
        a = next(alphas, ALPHA[name]) if name in ALPHA else None
        b = next(betas, BETA[name]) if name in BETA else None
        bound = attributes.get("clip")

        def function(x, name=name, a=a, b=b, clip=bound):
            return FUNCTIONS[name](x if clip is None else np.clip(x, -clip, clip), a, b)

        made.append((function, lambda x, name=name, a=a, b=b: FUNCTIONS[name](x, a, b)))
    size = len(DEFAULTS[operator])
    return [made[d * size : (d + 1) * size] for d in range(directions)]


def _rnn(x, h, c, w, r, b, p, functions, attributes):
    wb, rb = np.split(b, 2)
    return functions[0][0](w @ x + r @ h + wb + rb), c


def _gru(x, h, c, w, r, b, p, functions, attributes):
    wz, wr, wh = np.split(w, 3)
    rz, rr, rh = np.split(r, 3)
    wbz, wbr, wbh, rbz, rbr, rbh = np.split(b, 6)
    f, g = functions[0][0], functions[1][0]
    z, reset = f(wz @ x + rz @ h + wbz + rbz), f(wr @ x + rr @ h + wbr + rbr)
    if attributes.get("linear_before_reset"):
        new = g(wh @ x + reset * (rh @ h + rbh) + wbh)
    else:
        new = g(wh @ x + rh @ (reset * h) + rbh + wbh)
    return (1 - z) * new + z * h, c


def _lstm(x, h, c, w, r, b, p, functions, attributes):
    wb, rb = np.split(b, 2)
    i, o, f, g = np.split(w @ x + r @ h + wb + rb, 4)
    pi, po, pf = np.split(p, 3)
    gate, candidate, (_, output) = functions[0][0], functions[1][0], functions[2]
    i = gate(i + pi * c)
    f = 1 - i if attributes.get("input_forget") else gate(f + pf * c)
    c = f * c + i * candidate(g)
    return gate(o + po * c) * output(c), c


_STEPS = {"LSTM": _lstm, "GRU": _gru, "RNN": _rnn}
