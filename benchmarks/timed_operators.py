"""Cases of ``operators.py``: each differentiable operator of ONNX with its inputs, beside PyTorch's function.

A shape is written for the smallest size; the letters of ``SIZES`` stand for what grows. Operators that compute nothing
of their own (control flow, sequences) are in ``NOT_TIMED``, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

SIZES: Mapping[str, Mapping[str, int]] = {
    "small": {"N": 8, "R": 16, "C": 64, "P": 8, "T": 16, "B": 2},
    "medium": {"N": 16, "R": 256, "C": 256, "P": 24, "T": 64, "B": 8},
    "large": {"N": 32, "R": 1024, "C": 1024, "P": 56, "T": 128, "B": 16},
}
"""Rows R and columns C of matrices, N images with P x P pixels, B sequences of T steps."""

Shape = tuple[int | str, ...]


@dataclass(frozen=True)
class Input:
    """An input: its shape, the range of its values, and whether it is differentiated."""

    shape: Shape
    low: float = -2.0
    high: float = 2.0
    wanted: bool = True
    make: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray] | None = None

    def array(self, random: np.random.Generator, size: Mapping[str, int]) -> np.ndarray:
        """Draw the values at one size."""
        shape = tuple(size[axis] if isinstance(axis, str) else axis for axis in self.shape)
        if self.make is not None:
            return self.make(random, shape)
        return random.uniform(self.low, self.high, shape).astype(np.float32)


@dataclass(frozen=True)
class Case:
    """One node, and PyTorch's function of the same inputs; ``peer`` gets them as tensors, in order."""

    operator: str
    inputs: Sequence[Input]
    peer: Callable[..., Any]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    form: str = ""
    outputs: int = 1
    opset: int = 21

    @property
    def name(self) -> str:
        """Operator and form, which no other case has."""
        return f"{self.operator}, {self.form}" if self.form else self.operator


ROWS = Input(("R", "C"))
POSITIVE = Input(("R", "C"), 0.1, 2.0)
IMAGES = Input(("N", 16, "P", "P"))
SEQUENCE = Input(("T", "B", 64))


def fixed(value: Any) -> Input:
    """An input that is the same at all sizes, such as axes."""
    return Input((), wanted=False, make=lambda random, shape: np.asarray(value))


NOT_TIMED = {
    **dict.fromkeys(["If", "Loop", "Scan"], "runs other operators"),
    **dict.fromkeys(
        ["Optional", "OptionalGetElement", "SequenceAt", "SequenceConstruct", "SequenceErase", "SequenceInsert"],
        "holds tensors",
    ),
    **dict.fromkeys(["ConcatFromSequence", "SplitToSequence"], "as Concat and Split"),
    **dict.fromkeys(["Identity", "CastLike", "Range", "Unique", "OneHot"], "copies, or its size depends on values"),
    **dict.fromkeys(["DequantizeLinear", "TensorScatter"], "PyTorch has no gradient of it"),
    **dict.fromkeys(["MaxRoiPool", "RoiAlign", "DeformConv"], "torchvision's, not PyTorch's"),
    "SimplifiedLayerNormalization": "as RMSNormalization",
}
"""Differentiable operators without a case."""


def cases() -> list[Case]:
    """All cases; imports PyTorch."""
    import torch
    import torch.nn.functional as functional

    return [
        *_elementwise(torch, functional),
        *_binary(torch, functional),
        *_reductions(torch),
        *_linear(torch, functional),
        *_images(torch, functional),
        *_normalizations(torch, functional),
        *_moves(torch, functional),
        *_recurrent(torch),
        *_losses(functional),
        *_signals(torch),
    ]


def _elementwise(torch: Any, functional: Any) -> list[Case]:
    small = Input(("R", "C"), -0.9, 0.9)
    above = Input(("R", "C"), 1.1, 3.0)
    functions: dict[str, tuple[Callable[..., Any], Input, dict[str, Any]]] = {
        "Abs": (torch.abs, ROWS, {}),
        "Acos": (torch.acos, small, {}),
        "Acosh": (torch.acosh, above, {}),
        "Asin": (torch.asin, small, {}),
        "Asinh": (torch.asinh, ROWS, {}),
        "Atan": (torch.atan, ROWS, {}),
        "Atanh": (torch.atanh, small, {}),
        "Celu": (functional.celu, ROWS, {}),
        "Cos": (torch.cos, ROWS, {}),
        "Cosh": (torch.cosh, ROWS, {}),
        "Elu": (functional.elu, ROWS, {}),
        "Erf": (torch.erf, ROWS, {}),
        "Exp": (torch.exp, ROWS, {}),
        "Gelu": (functional.gelu, ROWS, {}),
        "HardSigmoid": (functional.hardsigmoid, ROWS, {"alpha": 1 / 6}),
        "HardSwish": (functional.hardswish, ROWS, {}),
        "LeakyRelu": (lambda x: functional.leaky_relu(x, 0.01), ROWS, {}),
        "Log": (torch.log, POSITIVE, {}),
        "Mish": (functional.mish, ROWS, {}),
        "Neg": (torch.neg, ROWS, {}),
        "Reciprocal": (torch.reciprocal, POSITIVE, {}),
        "Relu": (torch.relu, ROWS, {}),
        "Selu": (functional.selu, ROWS, {}),
        "Shrink": (lambda x: functional.softshrink(x, 0.5), ROWS, {"bias": 0.5, "lambd": 0.5}),
        "Sigmoid": (torch.sigmoid, ROWS, {}),
        "Sin": (torch.sin, ROWS, {}),
        "Sinh": (torch.sinh, ROWS, {}),
        "Softplus": (functional.softplus, ROWS, {}),
        "Softsign": (functional.softsign, ROWS, {}),
        "Sqrt": (torch.sqrt, POSITIVE, {}),
        "Tan": (torch.tan, small, {}),
        "Tanh": (torch.tanh, ROWS, {}),
        "ThresholdedRelu": (lambda x: functional.threshold(x, 1.0, 0.0), ROWS, {}),
    }
    found = [Case(name, [x], function, attributes) for name, (function, x, attributes) in functions.items()]
    limits = [fixed(np.float32(-1)), fixed(np.float32(1))]
    found.append(Case("Clip", [ROWS, *limits], lambda x, low, high: torch.clamp(x, -1.0, 1.0)))
    found.append(Case("Swish", [ROWS], functional.silu, opset=24))
    found.append(Case("Cast", [ROWS], lambda x: x.double(), {"to": 11}))
    found.append(
        Case(
            "Dropout",
            [ROWS, fixed(np.float32(0.5)), fixed(True)],
            lambda x, *_: functional.dropout(x, 0.5, True),
            form="random",
        )
    )
    return found


def _binary(torch: Any, functional: Any) -> list[Case]:
    def condition(shape: Shape) -> Input:
        return Input(shape, wanted=False, make=lambda random, sizes: random.random(sizes) < 0.5)

    same, row, column, one = (Input(shape, 0.5, 2.0) for shape in (("R", "C"), ("C",), ("R", 1), ()))
    functions = {
        "Add": torch.add,
        "Sub": torch.sub,
        "Mul": torch.mul,
        "Div": torch.div,
        "Pow": torch.pow,
        "Max": torch.maximum,
        "Min": torch.minimum,
        "Mean": lambda a, b: (a + b) / 2,
        "Sum": torch.add,
    }
    found = []
    for name, function in functions.items():
        for form, other in (("same shape", same), ("a row", row), ("a column", column), ("a number", one)):
            found.append(Case(name, [POSITIVE, other], function, form=form))
    found.append(Case("Pow", [ROWS, fixed(np.float32(2))], lambda x, _: torch.pow(x, 2.0), form="square"))
    found.append(Case("Mod", [POSITIVE, same], torch.fmod, {"fmod": 1}, form="same shape"))
    found.append(Case("Where", [condition(("R", "C")), ROWS, ROWS], torch.where, form="same shape"))
    found.append(Case("Where", [condition(("R", "C")), ROWS, Input(())], torch.where, form="a number"))
    masked = fixed(np.float32(-1e9))
    found.append(Case("Where", [condition(("R", 1)), ROWS, masked], torch.where, form="a mask"))
    found.append(Case("PRelu", [IMAGES, Input((16, 1, 1))], lambda x, s: functional.prelu(x, s.reshape(-1))))
    return found


def _reductions(torch: Any) -> list[Case]:
    functions = {
        "ReduceL1": lambda x, d: x.abs().sum(d),
        "ReduceL2": lambda x, d: torch.linalg.vector_norm(x, dim=d),
        "ReduceLogSum": lambda x, d: x.sum(d).log(),
        "ReduceLogSumExp": lambda x, d: torch.logsumexp(x, d),
        "ReduceMax": lambda x, d: torch.amax(x, d),
        "ReduceMean": lambda x, d: torch.mean(x, d),
        "ReduceMin": lambda x, d: torch.amin(x, d),
        "ReduceProd": lambda x, d: torch.prod(x, d),
        "ReduceSum": lambda x, d: torch.sum(x, d),
        "ReduceSumSquare": lambda x, d: (x * x).sum(d),
    }
    found = []
    for name, function in functions.items():
        x = Input(("R", "C"), 0.9, 1.1) if name == "ReduceProd" else POSITIVE
        for form, axis in (("columns", 1), ("rows", 0)):
            peer = lambda x, _, f=function, d=axis: f(x, d)  # noqa: E731
            found.append(Case(name, [x, fixed([axis])], peer, {"keepdims": 0}, form=form))
    end = fixed(1)
    found.append(Case("CumSum", [ROWS, end], lambda x, _: torch.cumsum(x, 1)))
    found.append(Case("CumProd", [Input(("R", "C"), 0.9, 1.1), end], lambda x, _: torch.cumprod(x, 1), opset=26))
    found.append(Case("Softmax", [ROWS], lambda x: torch.softmax(x, -1)))
    found.append(Case("LogSoftmax", [ROWS], lambda x: torch.log_softmax(x, -1)))
    found.append(Case("TopK", [ROWS, fixed([4])], lambda x, _: torch.topk(x, 4).values, outputs=2))
    return found


def _linear(torch: Any, functional: Any) -> list[Case]:
    weight = Input(("C", "C"), -0.1, 0.1)
    found = [
        Case("MatMul", [ROWS, weight], torch.matmul, form="a matrix"),
        Case("MatMul", [Input(("B", 4, "T", 32)), Input(("B", 4, 32, "T"))], torch.matmul, form="batches"),
        Case("Gemm", [ROWS, weight, Input(("C",))], lambda a, b, c: torch.addmm(c, a, b.T), {"transB": 1}),
        Case("Det", [Input(("N", 8, 8))], torch.linalg.det),
    ]
    for equation, first, second in (
        ("bij,bjk->bik", ("N", "T", 64), ("N", 64, 64)),
        ("nsd,dts->ntd", ("R", 16, 64), (64, 16, 16)),
        ("bhqd,bhkd->bhqk", ("B", 4, "T", 32), ("B", 4, "T", 32)),
        ("nd,kd->nk", ("R", "C"), ("C", "C")),
        ("bqhd,bkhd->bhqk", ("B", "T", 4, 32), ("B", "T", 4, 32)),
        ("bld,dn->bldn", ("B", "T", 64), (64, 16)),
    ):
        peer = lambda a, b, e=equation: torch.einsum(e, a, b)  # noqa: E731
        found.append(Case("Einsum", [Input(first), Input(second)], peer, {"equation": equation}, form=equation))
    return found


def _images(torch: Any, functional: Any) -> list[Case]:
    grid = Input(("N", "P", "P", 2), -1.0, 1.0)
    sizes, none = fixed(np.array([1, 1, 2, 2], np.float32)), fixed(np.zeros(0, np.float32))
    nearest = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    halves = {"kernel_shape": [2, 2], "strides": [2, 2]}
    weight = Input((16, 16, 3, 3), -0.2, 0.2)
    return [
        Case("Conv", [IMAGES, weight], lambda x, w: functional.conv2d(x, w, padding=1), {"pads": [1, 1, 1, 1]}),
        Case(
            "Conv",
            [IMAGES, Input((16, 1, 3, 3))],
            lambda x, w: functional.conv2d(x, w, padding=1, groups=16),
            {"pads": [1, 1, 1, 1], "group": 16},
            form="depthwise",
        ),
        Case(
            "ConvTranspose",
            [IMAGES, Input((16, 16, 2, 2))],
            lambda x, w: functional.conv_transpose2d(x, w, stride=2),
            {"strides": [2, 2]},
        ),
        Case("AveragePool", [IMAGES], lambda x: functional.avg_pool2d(x, 2), halves),
        Case("MaxPool", [IMAGES], lambda x: functional.max_pool2d(x, 2), halves),
        Case("LpPool", [IMAGES], lambda x: functional.lp_pool2d(x, 2.0, 2), halves),
        Case("GlobalAveragePool", [IMAGES], lambda x: x.mean((2, 3), keepdim=True)),
        Case("GlobalMaxPool", [IMAGES], lambda x: torch.amax(x, (2, 3), keepdim=True)),
        Case("GlobalLpPool", [IMAGES], lambda x: torch.linalg.vector_norm(x, dim=(2, 3), keepdim=True)),
        Case(
            "Resize",
            [IMAGES, none, sizes],
            lambda x, *_: functional.interpolate(x, scale_factor=2, mode="bilinear"),
            {"mode": "linear"},
            form="linear",
        ),
        Case(
            "Resize",
            [IMAGES, none, sizes],
            lambda x, *_: functional.interpolate(x, scale_factor=2, mode="nearest"),
            nearest,
            form="nearest",
        ),
        Case("GridSample", [IMAGES, grid], lambda x, g: functional.grid_sample(x, g, align_corners=False), opset=20),
        Case(
            "AffineGrid",
            [Input((8, 2, 3)), fixed([8, 16, 24, 24])],
            lambda t, _: functional.affine_grid(t, [8, 16, 24, 24], align_corners=False),
            form="24 x 24",
            opset=20,
        ),
        Case("DepthToSpace", [IMAGES], lambda x: functional.pixel_shuffle(x, 2), {"blocksize": 2, "mode": "CRD"}),
        Case(
            "SpaceToDepth", [IMAGES], lambda x: functional.pixel_unshuffle(x, 2), {"blocksize": 2}, form="order of ONNX"
        ),
        Case("LRN", [IMAGES], lambda x: functional.local_response_norm(x, 5, 1e-4, 0.75, 1.0), {"size": 5}),
        Case(
            "Col2Im",
            [Input(("N", 36, 196)), fixed([28, 28]), fixed([2, 2])],
            lambda x, *_: functional.fold(x, (28, 28), 2, stride=2),
            {"strides": [2, 2]},
        ),
        Case(
            "MaxUnpool",
            [Input(("N", 4, 16, 16)), Input(("N", 4, 16, 16), wanted=False, make=_pooled)],
            lambda x, i: functional.max_unpool2d(x, i - _first(torch, i), 2),
            halves,
        ),
    ]


def _pooled(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Indices of the upper left pixel of each window, in the whole tensor, as ONNX counts them."""
    images, channels, height, width = shape
    planes = np.arange(images * channels).reshape(images, channels, 1, 1) * (4 * height * width)
    return planes + (2 * np.arange(height))[:, None] * (2 * width) + 2 * np.arange(width)


def _first(torch: Any, indices: Any) -> Any:
    return indices[:, :, :1, :1]


def _normalizations(torch: Any, functional: Any) -> list[Case]:
    scale, channel = Input(("C",)), Input((16,))
    mean, variance = Input((16,), wanted=False), Input((16,), 0.5, 2.0, wanted=False)
    return [
        Case("LayerNormalization", [ROWS, scale, scale], lambda x, w, b: functional.layer_norm(x, w.shape, w, b, 1e-5)),
        Case("RMSNormalization", [ROWS, scale], lambda x, w: functional.rms_norm(x, w.shape, w, 1e-5), opset=23),
        Case(
            "BatchNormalization",
            [IMAGES, channel, channel, mean, variance],
            lambda x, w, b, m, v: functional.batch_norm(x, m, v, w, b, False),
            form="inference",
        ),
        Case(
            "BatchNormalization",
            [IMAGES, channel, channel, mean, variance],
            lambda x, w, b, m, v: functional.batch_norm(x, m, v, w, b, True),
            {"training_mode": 1},
            form="training",
            outputs=3,
        ),
        Case(
            "InstanceNormalization",
            [IMAGES, channel, channel],
            lambda x, w, b: functional.instance_norm(x, weight=w, bias=b),
        ),
        Case(
            "GroupNormalization",
            [IMAGES, channel, channel],
            lambda x, w, b: functional.group_norm(x, 4, w, b),
            {"num_groups": 4},
        ),
        Case("LpNormalization", [ROWS], lambda x: functional.normalize(x, dim=-1), {"axis": -1, "p": 2}),
        Case(
            "MeanVarianceNormalization",
            [IMAGES],
            lambda x: (x - x.mean((0, 2, 3), keepdim=True)) / x.std((0, 2, 3), correction=0, keepdim=True),
        ),
    ]


def _moves(torch: Any, functional: Any) -> list[Case]:
    def indices(shape: Shape, below: str, last: int | None = None) -> Input:
        # drawn below the size of the axis, which is the first of the shape for tables
        return Input(shape, wanted=False, make=lambda random, sizes: random.integers(0, last or 16, sizes))

    return [
        Case("Concat", [ROWS, ROWS], lambda a, b: torch.cat([a, b], 1), {"axis": 1}),
        Case(
            "Split",
            [ROWS],
            lambda x: torch.split_copy(x, x.shape[1] // 2, 1)[0],
            {"axis": 1, "num_outputs": 2},
            outputs=2,
        ),
        Case("Slice", [ROWS, fixed([8]), fixed([1 << 30]), fixed([1])], lambda x, *_: x[:, 8:].contiguous()),
        Case("Pad", [ROWS, fixed([0, 2, 0, 2])], lambda x, _: functional.pad(x, (2, 2))),
        Case("Expand", [Input(("R", 1)), fixed([1, 256])], lambda x, _: x.expand(-1, 256).contiguous()),
        Case("Tile", [ROWS, fixed([2, 1])], lambda x, _: x.repeat(2, 1)),
        Case("Transpose", [ROWS], lambda x: x.T.contiguous(), {"perm": [1, 0]}),
        Case("Reshape", [ROWS, fixed([-1, 16])], lambda x, _: x.reshape(-1, 16).clone()),
        Case("Flatten", [IMAGES], lambda x: x.flatten(1).clone()),
        Case("Squeeze", [Input(("R", 1, "C")), fixed([1])], lambda x, _: x.squeeze(1).clone()),
        Case("Unsqueeze", [ROWS, fixed([1])], lambda x, _: x.unsqueeze(1).clone()),
        Case("Gather", [Input((512, "C")), indices(("R",), "R", 512)], lambda x, i: functional.embedding(i, x)),
        Case("GatherElements", [ROWS, indices(("R", "C"), "C")], lambda x, i: torch.gather(x, 1, i), {"axis": 1}),
        Case("GatherND", [Input((16, 16, "C")), indices(("R", 2), "R")], lambda x, i: x[i[:, 0], i[:, 1]]),
        Case(
            "ScatterElements",
            [ROWS, indices(("R", 8), "C"), Input(("R", 8))],
            lambda x, i, u: x.scatter_add(1, i, u),
            {"axis": 1, "reduction": "add"},
            form="add",
        ),
        Case(
            "ScatterND",
            [Input((512, "C")), indices(("R", 1), "R", 512), ROWS],
            lambda x, i, u: x.index_add(0, i[:, 0], u),
            {"reduction": "add"},
            form="add",
            opset=18,
        ),
        Case(
            "Compress",
            [ROWS, Input(("R",), wanted=False, make=lambda random, shape: np.arange(shape[0]) % 2 == 0)],
            lambda x, c: x[c],
            {"axis": 0},
        ),
        Case("Trilu", [Input(("N", "T", "T"))], torch.tril, {"upper": 0}),
        Case(
            "ReverseSequence",
            [SEQUENCE, Input(("B",), wanted=False, make=lambda random, shape: np.full(shape, 16))],
            lambda x, n: torch.cat([x[:16].flip(0), x[16:]]),
            {"time_axis": 0, "batch_axis": 1},
        ),
        Case(
            "RotaryEmbedding",
            [Input(("B", 4, "T", 32)), Input(("B", "T", 16), wanted=False), Input(("B", "T", 16), wanted=False)],
            lambda x, c, s: _rotated(torch, x, c[:, None], s[:, None]),
            opset=23,
        ),
    ]


def _rotated(torch: Any, x: Any, cosine: Any, sine: Any) -> Any:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], -1)


def _recurrent(torch: Any) -> list[Case]:
    found = []
    for name, gates in (("LSTM", 4), ("GRU", 3), ("RNN", 1)):
        module = getattr(torch.nn, name)(64, 64)
        shapes = ((1, gates * 64, 64), (1, gates * 64, 64), (1, gates * 128))
        weights = [Input(shape, -0.1, 0.1) for shape in shapes]

        def peer(x: Any, w: Any, r: Any, b: Any, module: Any = module, half: int = gates * 64) -> Any:
            names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
            values = dict(zip(names, (w[0], r[0], b[0, :half], b[0, half:]), strict=True))
            return torch.func.functional_call(module, values, (x,))[0]

        attributes = {"hidden_size": 64, **({"linear_before_reset": 1} if name == "GRU" else {})}
        found.append(Case(name, [SEQUENCE, *weights], peer, attributes, form="order of ONNX"))
    return found


def _losses(functional: Any) -> list[Case]:
    labels = Input(("R",), wanted=False, make=lambda random, shape: random.integers(0, 16, shape))
    return [
        Case("SoftmaxCrossEntropyLoss", [ROWS, labels], functional.cross_entropy),
        Case("NegativeLogLikelihoodLoss", [ROWS, labels], functional.nll_loss),
    ]


def _signals(torch: Any) -> list[Case]:
    window = Input((64,), wanted=False, make=lambda random, shape: np.hanning(*shape).astype(np.float32))
    return [
        Case(
            "DFT", [Input(("R", 256, 1))], lambda x: torch.view_as_real(torch.fft.fft(x[..., 0])), {"axis": 1}, opset=19
        ),
        Case(
            "STFT",
            [Input(("B", 1024, 1)), fixed(32), window, fixed(64)],
            lambda x, s, w, n: _short_time(torch, x, w),
            {"onesided": 1},
        ),
    ]


def _short_time(torch: Any, x: Any, window: Any) -> Any:
    found = torch.stft(x[..., 0], 64, 32, window=window, center=False, return_complex=True)
    return torch.view_as_real(found).transpose(1, 2)


def _whole(torch: Any, x: Any) -> Any:
    return torch.view_as_real(torch.fft.fft(x[..., 0]))
