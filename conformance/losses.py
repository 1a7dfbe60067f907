"""Losses and their gradients: the definitions of ``docs/losses.md`` in NumPy, without onnxtrain."""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper, parser

import onnxtrain
from conformance import detection, more_losses, oracle
from conformance.subject import Made, Subject
from onnxtrain.graph import Builder
from onnxtrain.graph.domains import TRAINING_DOMAIN
from onnxtrain.losses import LOSSES, Loss, TargetForm
from onnxtrain.losses.base import reduced

OPSET = 18
Array = np.ndarray
Definition = Callable[[Array, Array], float]


def log_softmax(z: Array, axis: int = -1) -> Array:
    """Log of softmax along an axis."""
    z = z - z.max(axis, keepdims=True)
    return z - np.log(np.exp(z).sum(axis, keepdims=True))


def sigmoid(z: Array) -> Array:
    """1 / (1 + exp(-z))."""
    return 1 / (1 + np.exp(-z))


def cross_entropy(
    z: Array, t: Array, weights: Array | None = None, smoothing: float = 0.0, ignore: int = -100
) -> float:
    """Weighted mean over labels of -log p(label), classes last."""
    classes = z.shape[-1]
    w = np.ones(classes) if weights is None else np.asarray(weights)
    total = count = 0.0
    for index in np.ndindex(t.shape):
        if t[index] != ignore:
            p, label = log_softmax(z[index]), t[index]
            total += -(1 - smoothing) * w[label] * p[label] - smoothing / classes * float(w @ p)
            count += w[label]
    return total / count


def next_token(z: Array, t: Array) -> float:
    """Cross-entropy of each position with the next token."""
    return cross_entropy(z[:, :-1], t[:, 1:])


def binary(z: Array, t: Array, positive: float = 1.0) -> float:
    """Mean over elements of -(w t log p + (1 - t) log(1 - p))."""
    return float(np.mean(-positive * t * np.log(sigmoid(z)) - (1 - t) * np.log(sigmoid(-z))))


def huber(z: Array, t: Array, delta: float) -> float:
    """Quadratic up to delta, linear beyond."""
    d = np.abs(z - t)
    return float(np.mean(np.where(d <= delta, d * d / 2, delta * (d - delta / 2))))


def focal(z: Array, t: Array, gamma: float, weights: Array | None = None) -> float:
    """Mean over labels of -w (1 - p)^gamma log p."""
    w = np.ones(z.shape[-1]) if weights is None else np.asarray(weights)
    log_p = np.array([log_softmax(z[i])[t[i]] for i in np.ndindex(t.shape)])
    return float(np.mean(-w[t.ravel()] * (1 - np.exp(log_p)) ** gamma * log_p))


def binary_focal(z: Array, t: Array, gamma: float, alpha: float | None) -> float:
    """Mean over elements of -a (1 - p_t)^gamma log p_t."""
    p = np.where(t == 1, sigmoid(z), sigmoid(-z))
    a = 1.0 if alpha is None else np.where(t == 1, alpha, 1 - alpha)
    return float(np.mean(-a * (1 - p) ** gamma * np.log(p)))


def dice(z: Array, t: Array, smooth: float) -> float:
    """1 - (2 |p t| + s) / (|p| + |t| + s), mean over examples and classes; z is [N, C, H, W], t labels."""
    p, n = np.exp(log_softmax(z, 1)), z.shape[1]
    there = np.moveaxis(np.eye(n)[t], -1, 1)
    axes = tuple(range(2, z.ndim))
    return float(np.mean(1 - (2 * (p * there).sum(axes) + smooth) / ((p + there).sum(axes) + smooth)))


def ctc(z: Array, t: Array, blank: int = 0) -> float:
    """Mean of -log p(labels) / their number, p summed over all paths one by one."""
    losses = []
    for scores, row in zip(log_softmax(z), t, strict=True):
        labels = [int(label) for label in row if label >= 0]
        total = 0.0
        for path in itertools.product(range(z.shape[2]), repeat=z.shape[1]):
            merged = [c for c, _ in itertools.groupby(path) if c != blank]
            if merged == labels:
                total += float(np.exp(sum(scores[step, c] for step, c in enumerate(path))))
        losses.append(-np.log(total) / max(1, len(labels)))
    return float(np.mean(losses))


def transducer(z: Array, t: Array, blank: int = 0) -> float:
    """Mean of -log p(labels), p summed over all paths one by one; every frame ends with a blank."""
    losses = []
    for scores, row in zip(log_softmax(z), t, strict=True):
        labels = [int(label) for label in row if label >= 0]
        frames, total = scores.shape[0], 0.0
        # The frame of each label; a path is a sequence of frames that never falls.
        for path in itertools.combinations_with_replacement(range(frames), len(labels)):
            log_p = sum(scores[frame, u, labels[u]] for u, frame in enumerate(path))
            log_p += sum(scores[frame, sum(at <= frame for at in path), blank] for frame in range(frames))
            total += float(np.exp(log_p))
        losses.append(-np.log(total))
    return float(np.mean(losses))


def angular(z: Array, t: Array, scale: float, margin: float) -> float:
    """Cross-entropy of scaled cosines, whose label's angle is larger by a margin."""
    z = z.copy()
    for row, label in enumerate(t):
        angle = np.arccos(z[row, label])
        inside = angle + margin < np.pi
        z[row, label] = np.cos(angle + margin) if inside else z[row, label] - margin * np.sin(margin)
    return cross_entropy(scale * z, t)


def triplet(z: Array, t: Array, margin: float, mining: str) -> float:
    """Mean of max(0, |a - p| - |a - n| + margin) over all triplets, or over the hardest of each anchor."""
    terms: list[float] = []
    for a in range(len(t)):
        near = [p for p in range(len(t)) if p != a and t[p] == t[a]]
        far = [n for n in range(len(t)) if t[n] != t[a]]
        of_anchor = [
            max(0.0, float(np.linalg.norm(z[a] - z[p]) - np.linalg.norm(z[a] - z[n])) + margin)
            for p, n in itertools.product(near, far)
        ]
        terms += of_anchor if mining == "all" else [max(of_anchor)] if of_anchor else []
    return float(np.mean(terms))


def info_nce(z: Array, t: Array, temperature: float) -> float:
    """Mean over examples with partners of -log softmax of similarities, mean over partners."""
    z = z / np.linalg.norm(z, axis=1, keepdims=True)
    terms = []
    for i in range(len(t)):
        others = [j for j in range(len(t)) if j != i]
        log_p = dict(zip(others, log_softmax(z[others] @ z[i] / temperature), strict=True))
        partners = [log_p[j] for j in others if t[j] == t[i]]
        terms += [-float(np.mean(partners))] if partners else []
    return float(np.mean(terms))


def log_sigmoid(z: Array) -> Array:
    """Log of 1 / (1 + exp(-z))."""
    return -np.log1p(np.exp(-z))


def dpo(z: Array, t: Array, beta: float) -> float:
    """Mean over pairs of -log sigmoid(beta d), d the difference of the log ratios of model and reference."""
    ratio = z - t
    return float(np.mean(-log_sigmoid(beta * (ratio[:, 0] - ratio[:, 1]))))


def ipo(z: Array, t: Array, beta: float) -> float:
    """(d - 1 / (2 beta))^2 of the log-probabilities by token that the model gained over the reference."""
    ratio = z - t
    return float(np.mean((ratio[:, 0] - ratio[:, 1] - 1 / (2 * beta)) ** 2))


def simpo(z: Array, t: Array, beta: float, gamma: float) -> float:
    """-log sigmoid(beta times the difference of log-probabilities by token, less gamma)."""
    mean = z / t
    return float(np.mean(-log_sigmoid(beta * (mean[:, 0] - mean[:, 1]) - gamma)))


def cpo(z: Array, t: Array, beta: float, alpha: float) -> float:
    """-log sigmoid(beta times the difference), and alpha times the negative log-likelihood of a chosen token."""
    return float(np.mean(-log_sigmoid(beta * (z[:, 0] - z[:, 1]))) - alpha * z[:, 0].sum() / t[:, 0].sum())


def orpo(z: Array, t: Array, beta: float) -> float:
    """Negative log-likelihood by token of the chosen rows - beta times the mean log sigmoid of log odds ratios."""
    a, b = z[:, 0] / t[:, 0], z[:, 1] / t[:, 1]
    odds = (a - b) - (np.log1p(-np.exp(a)) - np.log1p(-np.exp(b)))
    return float(-z[:, 2].sum() / t[:, 2].sum() - beta * np.mean(log_sigmoid(odds)))


def grpo(z: Array, t: Array, beta: float, epsilon: float) -> float:
    """Mean over tokens of -min(r a, clip(r) a) + beta (exp d - d - 1), r = exp(z - old), d = reference - z."""
    counts, a, old, reference = t.transpose(1, 0, 2)
    r, d = np.exp(z - old), reference - z
    terms = -np.minimum(r * a, np.clip(r, 1 - epsilon, 1 + epsilon) * a) + beta * (np.exp(d) - d - 1)
    return float((counts * terms).sum() / counts.sum())


def kto(z: Array, t: Array, fixed: Array, beta: float, weights: tuple[float, float]) -> float:
    """Mean of w (1 - sigmoid(s beta (r - k))), k the mean log ratio of other answers, 0 or more, without gradient."""
    k = max(0.0, float(np.mean(fixed[:, 1] - t[:, 1])))
    terms = []
    for answer, told in zip(z, t, strict=True):
        sign, w = (1, weights[0]) if told[2] == 1 else (-1, weights[1])
        terms.append(w * (1 - sigmoid(sign * beta * (answer[0] - told[0] - k))))
    return float(np.mean(terms))


def reward(z: Array, t: Array, center: float) -> float:
    """Mean over pairs of -log sigmoid(c - r - margin) + center (c + r)^2."""
    c, r = z[:, 0], z[:, 1]
    return float(np.mean(-log_sigmoid(c - r - t) + center * (c + r) ** 2))


def multiple_negatives(z: Array, t: Array, scale: float) -> float:
    """Mean over queries of -log softmax of similarities at their own document, without those of equal queries."""
    terms = []
    for i in range(len(z)):
        others = [j for j in range(len(z)) if j == i or t[j] != t[i]]
        documents = np.concatenate([z[i, 1:2], *(z[j, (2 if j == i else 1) :] for j in others)])
        terms.append(-log_softmax(scale * documents @ z[i, 0])[0])
    return float(np.mean(terms))


def listnet(z: Array, t: Array) -> float:
    """Mean over queries of the cross-entropy between the softmaxes of relevances and of scores."""
    terms = []
    for scores, relevances in zip(z, t, strict=True):
        there = relevances >= 0
        terms.append(-float(np.exp(log_softmax(relevances[there])) @ log_softmax(scores[there])))
    return float(np.mean(terms))


def ranknet(z: Array, t: Array) -> float:
    """Mean of log(1 + exp(s_b - s_a)) over pairs of documents of a query with t_a > t_b."""
    terms = [
        np.log1p(np.exp(s[b] - s[a]))
        for s, relevances in zip(z, t, strict=True)
        for a, b in itertools.permutations(range(len(s)), 2)
        if relevances[a] > relevances[b] >= 0
    ]
    return float(np.mean(terms))


TEACHER = np.array([[0.5, -1.0, 0.25], [1.5, 0.75, -0.5], [-0.25, 1.0, 0.5]])
"""The teacher of the distillation is this matrix times the logits."""


def distillation(z: Array, t: Array, taught: Array, temperature: float, mix: float) -> float:
    """mix T² K(q, p) + (1 - mix) C, with C the cross-entropy on labels."""
    q, p = log_softmax(taught / temperature), log_softmax(z / temperature)
    divergence = temperature**2 * float(np.mean((np.exp(q) * (q - p)).sum(-1)))
    return mix * divergence + (1 - mix) * cross_entropy(z, t)


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Array:
    """Seeded numbers in float32."""
    return (scale * np.random.default_rng((seed, *shape)).normal(size=shape)).astype(np.float32)


def labels(*shape: int, classes: int, seed: int = 0) -> Array:
    """Seeded labels."""
    return np.random.default_rng((seed, *shape)).integers(0, classes, shape)


class Row(NamedTuple):
    """A loss, its inputs, and its definition."""

    label: str
    loss: Loss
    prediction: Array
    target: Array
    definition: Definition


WEIGHTS = (0.5, 2.0, 0.25, 1.5)
HALF = labels(4, 5, classes=2).astype(np.float32)
IGNORING = np.array([0, 3, -100, 1, 2, -100])
ANSWERS = normal(5, 2, seed=2) - 4
"""Log-probabilities of two answers."""
JUDGED = np.concatenate([normal(5, 2, seed=3) - 5, np.float32([[1], [0], [0], [1], [0]])], 1)
TOKENS = np.float32([[3, 2, 7], [4, 4, 9], [2, 5, 6], [1, 3, 4]])
SAMPLED = np.stack([np.float32([[1, 1, 1], [1, 1, 0]]), *(normal(2, 3, seed=7 + i) - 3 * (i > 0) for i in range(3))], 1)
LIKELIHOODS = -np.abs(normal(4, 3)) * TOKENS - np.float32(0.2)
COSINES = np.tanh(normal(6, 4, seed=5)) * np.float32(0.95)
EMBEDDINGS = normal(4, 3, 5)
UNIT = EMBEDDINGS / np.linalg.norm(EMBEDDINGS, axis=-1, keepdims=True)
RELEVANCE = np.float32([[1, 0, 0], [0, 2, 1], [0, 1, -1], [3, 3, 0]])


REG_MAX = 4
CELLS = np.array(
    [[(x + 0.5) / w, (y + 0.5) / h, 1 / w, 1 / h] for h, w in ((3, 4), (2, 2)) for y in range(h) for x in range(w)]
)
"""Two grids of anchors."""
HEAD = np.concatenate([normal(3, 16, 4 * REG_MAX + 2), np.tile(CELLS.astype(np.float32), (3, 1, 1))], 2)
NO_BOX = (-1, 0, 0, 0, 0)
DETECTED = np.float32(
    [
        [(0, 0.4, 0.45, 0.6, 0.7), (1, 0.6, 0.5, 0.57, 0.8), (1, 0.5, 0.5, 0.01, 0.01)],  # the last contains no centre
        [(1, 0.3, 0.7, 0.5, 0.5), NO_BOX, NO_BOX],
        [NO_BOX, NO_BOX, NO_BOX],
    ]
)
SLOTS = np.concatenate([normal(3, 4, 3), 0.3 + 0.4 * np.random.default_rng(5).random((3, 4, 4), np.float32)], 2)


def rows() -> list[Row]:
    """Every loss with its options; the distillation is a case of its own, since it has a teacher."""
    losses = onnxtrain.losses
    z, t = normal(6, 4, scale=2), labels(6, classes=4)
    entropy = losses.SoftmaxCrossEntropy
    return [
        Row("labels", entropy(), z, t, cross_entropy),
        Row("weights", entropy(WEIGHTS), z, t, lambda z, t: cross_entropy(z, t, np.array(WEIGHTS))),
        Row("smoothing", entropy(label_smoothing=0.2), z, t, lambda z, t: cross_entropy(z, t, smoothing=0.2)),
        Row("ignoring", entropy(ignore_index=-100), z, IGNORING, cross_entropy),
        Row(
            "images",
            entropy(axis=1),
            normal(2, 3, 2, 4),
            labels(2, 2, 4, classes=3),
            lambda z, t: cross_entropy(np.moveaxis(z, 1, -1), t),
        ),
        Row("tokens", losses.NextToken(), normal(2, 4, 5), labels(2, 4, classes=5), next_token),
        Row("logits", losses.BinaryCrossEntropy(), normal(4, 5, scale=2), HALF, binary),
        Row("positive", losses.BinaryCrossEntropy(3.0), normal(4, 5), HALF, lambda z, t: binary(z, t, 3.0)),
        Row("values", losses.MeanSquaredError(), z, normal(6, 4, seed=1), lambda z, t: float(np.mean((z - t) ** 2))),
        Row("values", losses.MeanAbsoluteError(), z, normal(6, 4, seed=1), lambda z, t: float(np.mean(np.abs(z - t)))),
        Row("values", losses.Huber(0.7), z, normal(6, 4, seed=1), lambda z, t: huber(z, t, 0.7)),
        Row("labels", losses.Focal(2.0), z, t, lambda z, t: focal(z, t, 2.0)),
        Row("weights", losses.Focal(0.5, WEIGHTS), z, t, lambda z, t: focal(z, t, 0.5, np.array(WEIGHTS))),
        Row("logits", losses.BinaryFocal(2.0, 0.25), z[:4], HALF[:, :4], lambda z, t: binary_focal(z, t, 2.0, 0.25)),
        Row("plain", losses.BinaryFocal(0.5, None), z[:4], HALF[:, :4], lambda z, t: binary_focal(z, t, 0.5, None)),
        Row(
            "labels",
            losses.Dice(0.1).with_form(TargetForm("indices")),
            normal(2, 3, 2, 4),
            labels(2, 2, 4, classes=3),
            lambda z, t: dice(z, t, 0.1),
        ),
        Row("padded", losses.CTC(), normal(3, 5, 3), np.array([[1, 2, -1], [2, 2, -1], [1, 2, 1]]), ctc),
        Row(
            "padded",
            losses.Transducer(),
            normal(3, 4, 3, 3),
            np.array([[1, 2], [2, -1], [-1, -1]]),
            transducer,
        ),
        Row("cosines", losses.ArcFace(8.0, 0.5), COSINES, t, lambda z, t: angular(z, t, 8.0, 0.5)),
        Row(
            "cosines",
            losses.CosFace(8.0, 0.35),
            COSINES,
            t,
            lambda z, t: cross_entropy(8.0 * (z - 0.35 * np.eye(4)[t]), t),
        ),
        *(
            Row(
                mining,
                losses.Triplet(0.5, mining),
                normal(7, 4),
                np.array([0, 1, 0, 2, 1, 1, 3]),
                lambda z, t, mining=mining: triplet(z, t, 0.5, mining),  # type: ignore[misc]
            )
            for mining in ("hard", "all")
        ),
        Row(
            "partners",
            losses.InfoNCE(0.2),
            normal(7, 4),
            np.array([0, 1, 0, 2, 1, 1, 3]),
            lambda z, t: info_nce(z, t, 0.2),
        ),
        Row("pairs", losses.DPO(0.3), ANSWERS, normal(5, 2, seed=4) - 4, lambda z, t: dpo(z, t, 0.3)),
        Row("means", losses.IPO(0.3), ANSWERS / 4, normal(5, 2, seed=4) / 4 - 1, lambda z, t: ipo(z, t, 0.3)),
        Row("pairs", losses.SimPO(0.7, 0.3), ANSWERS[:4], TOKENS[:, :2], lambda z, t: simpo(z, t, 0.7, 0.3)),
        Row("pairs", losses.CPO(0.3, 0.5), ANSWERS[:4], TOKENS[:, :2], lambda z, t: cpo(z, t, 0.3, 0.5)),
        Row("pairs", losses.ORPO(0.3), LIKELIHOODS, TOKENS, lambda z, t: orpo(z, t, 0.3)),
        Row("sampled", losses.GRPO(0.3, 0.5), normal(2, 3, seed=6) - 2, SAMPLED, lambda z, t: grpo(z, t, 0.3, 0.5)),
        Row("judged", losses.KTO(0.3, 1.0, 0.5), ANSWERS, JUDGED, lambda z, t: kto(z, t, ANSWERS, 0.3, (1.0, 0.5))),
        Row("margins", losses.Reward(0.1), normal(4, 2), np.abs(normal(4)), lambda z, t: reward(z, t, 0.1)),
        Row(
            "equal_queries",
            losses.MultipleNegatives(5.0),
            UNIT,
            np.array([0, 1, 2, 1]),
            lambda z, t: multiple_negatives(z, t, 5.0),
        ),
        Row("absent", losses.ListNet(), normal(4, 3), RELEVANCE, listnet),
        Row("absent", losses.RankNet(), normal(4, 3), RELEVANCE, ranknet),
        Row(
            "boxes",
            losses.YOLO(reg_max=REG_MAX, topk=5, beta=1.0),
            HEAD,
            DETECTED,
            lambda z, t: detection.yolo(z, t, REG_MAX, HEAD.astype(np.float64), topk=5, beta=1.0),
        ),
        Row("boxes", losses.DETR(), SLOTS, DETECTED, lambda z, t: detection.detr(z, t, SLOTS.astype(np.float64))),
        *_more_rows(),
    ]


def _more_rows() -> list[Row]:
    """Losses of counts, amounts, quantiles, margins, ordered classes and survival times."""
    losses, more = onnxtrain.losses, more_losses
    z, other = normal(6, 4, scale=2), normal(6, 4, seed=1)
    amounts, aims = np.exp(normal(6, 4, seed=2)), np.exp(normal(6, 4, seed=3))
    shares = np.abs(other) / np.abs(other).sum(1, keepdims=True)
    shares[0] = (0, 0, 1, 0)
    signs, kinds = labels(6, 4, classes=2).astype(np.float32), labels(6, classes=4)
    several = np.array([0.1, 0.5, 0.7, 0.9])
    survival = np.float32([[3, 1], [1, 0], [2, 1], [2, 0], [5, 1], [4, 0]])
    return [
        Row("counts", losses.Poisson(), amounts, np.floor(aims), more.poisson),
        Row("logarithms", losses.Poisson(log_input=True), other, np.floor(aims), more.poisson_of_logarithms),
        Row("amounts", losses.Gamma(), amounts, aims, more.gamma),
        Row("logarithms", losses.Gamma(log_input=True), other, aims, lambda z, t: more.gamma(np.exp(z), t)),
        Row("one", losses.Quantile(0.9), z, other, lambda z, t: more.quantile(z, t, 0.9)),
        Row("several", losses.Quantile(several), z, other[:, 0], lambda z, t: more.quantile(z, t, several)),
        Row("values", losses.LogCosh(), z, other, more.log_cosh),
        Row("values", losses.MeanAbsolutePercentageError(), z, aims, more.percentage),
        Row("values", losses.MeanSquaredLogarithmicError(), amounts, aims, more.squared_logarithmic),
        Row("vectors", losses.CosineSimilarity(), z, other, more.cosine),
        Row("shares", losses.KLDivergence(), z, shares, more.divergence),
        Row("signs", losses.Hinge(), z, signs, lambda z, t: more.hinge(z, t, 1)),
        Row("signs", losses.SquaredHinge(), z, signs, lambda z, t: more.hinge(z, t, 2)),
        Row("labels", losses.CategoricalHinge(), z, kinds, more.categorical_hinge),
        Row("labels", losses.Ordinal(), z[:, :3], kinds, more.ordinal),
        Row(
            "labels",
            losses.Tversky(0.1, alpha=0.3, beta=0.6).with_form(TargetForm("indices")),
            normal(2, 3, 2, 4),
            labels(2, 2, 4, classes=3),
            lambda z, t: more.tversky(z, t, 0.3, 0.6, 0.1),
        ),
        Row("labels", losses.Circle(2.0, 0.3), z, labels(6, classes=2), lambda z, t: more.circle(z, t, 2.0, 0.3)),
        Row("times", losses.Cox(), other[:, 0], survival, more.cox),
    ]


def subjects() -> Iterator[Subject]:
    """Every loss of :data:`onnxtrain.losses.LOSSES`."""
    for row in rows():
        made = functools.partial(_made, row)
        yield Subject("loss", f"{row.loss.name}_{row.label}", frozenset([row.loss.name]), made)
    yield Subject("loss", "distillation_labels", frozenset(["distillation"]), _distillation)


NAMES = frozenset(LOSSES)
"""The losses that need a case."""


def _made(row: Row) -> Made:
    return _with_gradient(_graph(row.loss, row.prediction, row.target), row.prediction, row.target, row.definition)


def _distillation() -> Made:
    z, t = normal(6, 3), labels(6, classes=3)
    model = parser.parse_model(
        f'<ir_version: 8, opset_import: ["": {OPSET}]> teacher (float[N,3] x) => (float[N,3] y) {{ y = MatMul(x, w) }}'
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(TEACHER.T.astype(np.float32), "w"))
    with tempfile.TemporaryDirectory() as folder:
        onnx.save(model, Path(folder) / "teacher.onnx")
        loss = onnxtrain.losses.Distillation(Path(folder) / "teacher.onnx", 2.0, 0.4)
        built = _graph(loss, z, t, through="x")
    taught = z.astype(np.float64) @ TEACHER.T  # a constant: the teacher is not trained, and its input not either
    return _with_gradient(built, z, t, lambda z, t: distillation(z, t, taught, 2.0, 0.4))


def _graph(loss: Loss, prediction: Array, target: Array, *, through: str = "") -> onnx.ModelProto:
    """A model of the prediction and the target to the loss; ``through``: an input before the prediction."""
    values = []
    for name, array in (("prediction", prediction), ("target", target)):
        kind = ir.TensorType(ir.tensor(array).dtype)
        values.append(ir.Value(name=name, type=kind, shape=ir.Shape(array.shape)))
    inputs = [ir.Value(name=through, type=values[0].type, shape=values[0].shape)] if through else []
    graph = ir.Graph([*inputs, *values], [], nodes=[], opset_imports={"": OPSET}, name="loss")
    op = Builder(graph, OPSET)
    given, aim = (op.wrap(value) for value in values)
    terms = reduced(loss, loss.build(op, given, aim))
    result = op.Identity(terms.loss)
    result.ir.name = "loss"
    graph.outputs.append(result.ir)
    return ir.to_proto(ir.Model(graph, ir_version=8))


def _with_gradient(model: onnx.ModelProto, prediction: Array, target: Array, definition: Definition) -> Made:
    node = helper.make_node(
        "Gradient", ["prediction"], ["prediction_grad"], domain=TRAINING_DOMAIN, xs=["prediction"], y="loss"
    )
    model.graph.node.append(node)
    info = helper.make_tensor_value_info("prediction_grad", onnx.TensorProto.FLOAT, prediction.shape)
    model.graph.output.append(info)
    model.opset_import.append(helper.make_opsetid(TRAINING_DOMAIN, 1))
    wide = {"prediction": prediction.astype(np.float64)}
    aim = target.astype(np.float64) if target.dtype.kind == "f" else target
    expected = {
        "loss": np.array(definition(wide["prediction"], aim)),
        "prediction_grad": oracle.gradient(lambda at: definition(at["prediction"], aim), wide, "prediction"),
    }
    feeds = {"prediction": prediction, "target": target}
    feeds |= {i.name: prediction for i in model.graph.input if i.name not in feeds}
    return Made(model, [(feeds, expected)], "the definition in NumPy in float64, and its central differences")
