"""The losses over classes: reductions, weights, ignored labels, further axes, the second output."""

import numpy as np

from autodiff.case import case, fixed, normal

_SHAPES = {"rows": (4, 3), "sequence": (2, 3, 5), "image": (2, 3, 2, 2), "volume": (2, 3, 2, 1, 2)}


def _labels(shape, dtype=np.int64):
    sizes = (shape[0], *shape[2:])
    return np.random.default_rng(5).integers(0, shape[1], sizes).astype(dtype)


def _rows(operator, outputs):
    weights = np.array([0.5, 1.5, 2.5])
    for label, shape in _SHAPES.items():
        for reduction in ("mean", "sum", "none"):
            name = f"{label}-{reduction}-{outputs}"
            x, t = normal(*shape), _labels(shape)
            yield case(operator, x, t, label=name, outputs=outputs, reduction=reduction)
            yield case(operator, x, t, weights, label=f"{name}-weights", outputs=outputs, reduction=reduction)
            for ignored in (1, -100, -1):  # a class, and two that are none
                if operator[0] == "N" and reduction == "mean" and ignored == -1:
                    continue  # ONNX's reference evaluator divides by all labels then
                some = t.copy()
                some.flat[::3] = ignored
                more = {"outputs": outputs, "reduction": reduction, "ignore_index": ignored}
                yield case(operator, x, some, label=f"{name}-ignore{ignored}", **more)
                yield case(operator, x, some, weights, label=f"{name}-ignore{ignored}-weights", **more)


_INT32 = _labels((4, 3), np.int32)

CASES = [
    *(row for row in _rows("NegativeLogLikelihoodLoss", 1)),
    *(row for row in _rows("SoftmaxCrossEntropyLoss", 1)),
    *(row for row in _rows("SoftmaxCrossEntropyLoss", 2)),
    *(
        case(operator, normal(4, 3), _INT32, label="int32", ignore_index=0)
        for operator in ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")
    ),
    case("NegativeLogLikelihoodLoss", normal(4, 3), _INT32, opset=22),
    *(
        fixed(case(operator, normal(4, 3), _labels((4, 3)), label="labels"))
        for operator in ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")
    ),
    *(
        case(operator, normal(4, 1), np.zeros(4, dtype=np.int64), label="one-class")
        for operator in ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")
    ),
]
