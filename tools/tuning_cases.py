"""Cases that measure each constant of native/tuning.h: single nodes, and training steps of one or two layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import onnxtrain
from onnxtrain.graph.domains import ONNXTRAIN_DOMAIN
from onnxtrain.plugins.sparse.operators import pack

Shape = tuple[int, ...]


class Work(NamedTuple):
    """The graph of a session.

    Attributes:
        model: Its graph.
        feeds: Its inputs.
        threads: Number of threads.
    """

    model: onnx.ModelProto
    feeds: Mapping[str, np.ndarray]
    threads: int = 1


Case = Callable[[], Work]


def node(operator: str, shapes: list[Shape], **attributes: Any) -> Case:
    """A node of the library alone, on one thread."""

    def make() -> Work:
        names = ["x", "w", "b"][: len(shapes)]
        outputs = ["y", "more"] if operator == "Attention" else ["y"]
        graph = helper.make_graph(
            [helper.make_node(operator, names, outputs, domain=ONNXTRAIN_DOMAIN, **attributes)],
            "node",
            [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in zip(names, shapes, strict=True)],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        )
        opsets = [helper.make_opsetid("", 18), helper.make_opsetid(ONNXTRAIN_DOMAIN, 1)]
        random = np.random.default_rng(0)
        feeds = {name: random.standard_normal(shape, np.float32) for name, shape in zip(names, shapes, strict=True)}
        return Work(helper.make_model(graph, opset_imports=opsets, ir_version=8), feeds)

    return make


def step(text: str, *, threads: int = 1, weights: Mapping[str, Shape], **options: Any) -> Case:
    """A training step of a graph in ONNX's text form, with weights of these shapes; its output is made small."""

    def make() -> Work:
        model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]> layer {text}')
        model.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT
        random = np.random.default_rng(0)
        for name, shape in weights.items():
            values = 0.05 * random.standard_normal(shape, np.float32)
            model.graph.initializer.append(numpy_helper.from_array(np.abs(values), name))
        trainer = onnxtrain.Trainer(
            model,
            loss=lambda op, prediction, target: op.ReduceMean(prediction * prediction, keepdims=0),
            **{"optimizer": onnxtrain.Momentum(0.01), **options},
        )
        lowered = onnxtrain.lower(trainer.training_model(), kernels=True)
        states = trainer.executor.session.state
        feeds = {}
        for value in lowered.graph.input:
            kind = value.type.tensor_type
            shape = tuple(dim.dim_value for dim in kind.shape.dim)
            if value.name in states:
                feeds[value.name] = np.array(states[value.name])
            elif kind.elem_type == TensorProto.INT64:
                feeds[value.name] = random.integers(0, 1000, shape)
            else:
                feeds[value.name] = np.asarray(np.abs(random.standard_normal(shape, np.float32)), np.float32)
        return Work(lowered, feeds, threads)

    return make


THREADS = 2
"""Of the cases of figures by which work is shared."""

CONVOLUTIONS = {
    "3x3, 64 channels of 28": node("Conv", [(8, 64, 28, 28), (64, 64, 3, 3)], pads=[1] * 4, kernel_shape=[3, 3]),
    "3x3, 256 channels of 7": node("Conv", [(8, 256, 7, 7), (256, 256, 3, 3)], pads=[1] * 4, kernel_shape=[3, 3]),
    "5x5, 16 channels of 14": node("Conv", [(32, 16, 14, 14), (32, 16, 5, 5)], pads=[2] * 4, kernel_shape=[5, 5]),
}
FEW_OUTPUTS = {
    f"3x3, {channels} to {outputs} channels of {size}": node(
        "Conv", [(8, channels, size, size), (outputs, channels, 3, 3)], pads=[1] * 4, kernel_shape=[3, 3]
    )
    for channels, outputs, size in ((64, 16, 32), (24, 10, 20))
}
WINOGRAD = {name: case for name, case in CONVOLUTIONS.items() if name.startswith("3x3")}
WINOGRAD_GRADIENTS = {
    f"weight gradient, 3x3, {channels} channels of {size}": node(
        "ConvWeightGradient",
        [(8, channels, size, size), (8, channels, size, size)],
        pads=[1] * 4,
        kernel_shape=[3, 3],
    )
    for channels, size in ((64, 28), (256, 7))
}
POINTWISE = {
    "1x1, 96 channels of 28": node("Conv", [(8, 96, 28, 28), (24, 96, 1, 1)], kernel_shape=[1, 1]),
    "1x1, 320 channels of 7": node("Conv", [(8, 320, 7, 7), (1280, 320, 1, 1)], kernel_shape=[1, 1]),
}
DEPTHWISE = {
    f"depthwise, {channels} channels of {size}": node(
        "Conv",
        [(8, channels, size, size), (channels, 1, 3, 3)],
        pads=[1] * 4,
        kernel_shape=[3, 3],
        group=channels,
    )
    for channels, size in ((96, 56), (960, 7))
}
PRODUCTS = {
    f"{rows} x {depth} x {columns}": node("Linear", [(rows, depth), (depth, columns)])
    for rows, depth, columns in ((32, 784, 256), (512, 256, 1024), (1024, 768, 768))
}
WEIGHT_GRADIENTS = {
    f"weight gradient, {rows} rows, {inputs} to {outputs}": node(
        "LinearWeightGradient", [(rows, outputs), (rows, inputs)]
    )
    for rows, inputs, outputs in ((8192, 64, 64), (1024, 256, 256), (1024, 768, 192), (1024, 845, 256))
}
ATTENTION = {
    f"{heads} heads of {length}": node("Attention", [(2, length, heads, 64)] * 3, scale=0.125)
    for heads, length in ((4, 128), (12, 512))
}
BFLOAT16_ATTENTION = {
    f"bfloat16, 4 heads of {length}, {size} wide": node(
        "Attention", [(32, length, 4, size)] * 3, scale=0.125, compute="bfloat16"
    )
    for length, size in ((17, 128), (33, 64))
}
SHORT_ATTENTION = {
    f"{heads} heads of {length}, {size} wide": node("Attention", [(64, length, heads, size)] * 3, scale=0.25)
    for heads, length, size in ((4, 33, 8), (4, 64, 32))
}


def _convolution(channels: int, size: int, made: int, kernel: int, *, stride: int = 1, group: int = 1) -> Case:
    pads = ", ".join([str(kernel // 2)] * 4)
    return step(
        f"(float[16, {channels}, {size}, {size}] x) => (y) {{"
        f" h = Mul(x, s) y = Conv <pads = [{pads}], strides = [{stride}, {stride}], group = {group}> (h, w) }}",
        weights={"s": (1,), "w": (made, channels // group, kernel, kernel)},
        threads=THREADS,
    )


POINTWISE_GRADIENTS = {
    f"step of 1x1, {channels} channels of {size} to {made}": _convolution(channels, size, made, 1)
    for channels, size, made in ((64, 14, 256), (512, 7, 1024))
}
CONVOLUTION_STEPS = {
    "step of 3x3, 64 channels of 28": _convolution(64, 28, 64, 3),
    "step of 5x5, 16 channels of 14": _convolution(16, 14, 32, 5),
    "step of 3x3, 512 channels of 7": _convolution(512, 7, 512, 3),
    "step of 3x3, 64 channels of 28, strides of 2": _convolution(64, 28, 128, 3, stride=2),
}
PLANE_STEPS = {
    "step of 3x3, 96 channels of 28, each by itself": _convolution(96, 28, 96, 3, group=96),
    "step of 5x5, 8 groups of 4 channels of 14": _convolution(32, 14, 32, 5, group=8),
    "step of 3x3, one channel of 28": _convolution(1, 28, 8, 3),
}
TRANSPOSED_STEPS = {
    f"step of a transposed 4x4, {channels} channels of {size}": step(
        f"(float[16, {channels}, {size}, {size}] x) => (y) {{ h = Mul(x, s)"
        " y = ConvTranspose <pads = [1, 1, 1, 1], strides = [2, 2]> (h, w) }",
        weights={"s": (1,), "w": (channels, channels // 2, 4, 4)},
    )
    for channels, size in ((64, 14), (16, 28))
}


def _update(optimizer: onnxtrain.Optimizer, **options: Any) -> dict[str, Case]:
    large = step(
        "(float[1, 1024] x) => (y) { y = MatMul(x, w) }", weights={"w": (1024, 4096)}, optimizer=optimizer, **options
    )
    names = [f"w{number}" for number in range(40)]
    values = ["x", *(f"h{number}" for number in range(len(names) - 1)), "y"]
    products = " ".join(f"{values[i + 1]} = MatMul({values[i]}, {name})" for i, name in enumerate(names))
    many = step(
        f"(float[1, 64] x) => (y) {{ {products} }}",
        weights=dict.fromkeys(names, (64, 64)),
        optimizer=optimizer,
        **options,
    )
    kind = type(optimizer).__name__ + (", clipped," if options else "")
    return {f"{kind} of four million weights": large, f"{kind} of 40 small weights": many}


NORMS = {
    "step of LayerNormalization, 512 rows of 768": step(
        "(float[512, 768] x) => (y) { h = Mul(x, t) y = LayerNormalization <axis = -1> (h, s, b) }",
        weights={"t": (1,), "s": (768,), "b": (768,)},
        threads=THREADS,
    ),
    "step of BatchNormalization, 256 channels of 7": step(
        "(float[16, 256, 7, 7] x) => (y) { h = Mul(x, t) y = BatchNormalization (h, s, b, m, v) }",
        weights={"t": (1,), **dict.fromkeys("sbmv", (256,))},
        batch_norm="train",
        threads=THREADS,
    ),
    "step of BatchNormalization, 1024 rows of 256": step(
        "(float[1024, 256] x) => (y) { h = Mul(x, t) y = BatchNormalization (h, s, b, m, v) }",
        weights={"t": (1,), **dict.fromkeys("sbmv", (256,))},
        batch_norm="train",
        threads=THREADS,
    ),
}
SOFTMAX = {
    "step of Softmax over the channels, 21 of 56": step(
        "(float[4, 21, 56, 56] x) => (y) { h = Mul(x, t) y = Softmax <axis = 1> (h) }", weights={"t": (1,)}
    )
}
POOLING = {
    f"step of MaxPool {size}x{size}, 32 channels of 56": step(
        "(float[8, 32, 56, 56] x) => (y) { h = Mul(x, t)"
        f" y = MaxPool <kernel_shape = [{size}, {size}], strides = [2, 2]> (h) }}",
        weights={"t": (1,)},
    )
    for size in (2, 3)
}
GATHER = {
    "step of an embedding, 4,096 of 256 numbers": step(
        "(int64[32, 128] x) => (y) { y = Gather(w, x) }", weights={"w": (1000, 256)}
    ),
    "step of an embedding, 26,624 of 16 numbers": step(
        "(int64[1024, 26] x) => (y) { y = Gather(w, x) }", weights={"w": (52000, 16)}
    ),
}


def _recurrent(units: int, batch: int) -> Case:
    return step(
        f"(float[16, {batch}, {units}] x) => (y) {{ y = LSTM <hidden_size = {units}> (x, w, r) }}",
        weights={"w": (1, 4 * units, units), "r": (1, 4 * units, units)},
        threads=THREADS,
    )


RECURRENT = {
    f"step of an LSTM of {units} units, batch of {batch}": _recurrent(units, batch)
    for units, batch in ((64, 32), (256, 8), (256, 32), (1024, 8))
}
SHARED = {
    "step of a product, two threads": step(
        "(float[64, 256] x) => (y) { h = MatMul(x, v) r = Relu(h) y = MatMul(r, w) }",
        weights={"v": (256, 256), "w": (256, 256)},
        threads=THREADS,
    ),
    "Gelu of 512 rows of 768, two threads": step(
        "(float[512, 768] x) => (y) {"
        " h = Mul(x, t) e = Div(h, q) f = Erf(e) g = Add(f, o) i = Mul(h, g) y = Mul(i, p) }",
        weights={"t": (1,), "q": (1,), "o": (1,), "p": (1,)},
        train="t",
        threads=THREADS,
    ),
}
LINEAR_STEPS = {
    f"step of Gemm with a bias, {rows} rows": step(
        f"(float[{rows}, 512] x) => (y) {{ y = Gemm(x, w, b) }}", weights={"w": (512, 512), "b": (512,)}
    )
    for rows in (128, 2048)
}
BFLOAT16 = {
    f"step of a product in bfloat16, {rows} rows": step(
        f"(float[{rows}, 768] x) => (y) {{ h = MatMul(x, v) y = MatMul(h, w) }}",
        weights={"v": (768, 768), "w": (768, 768)},
        precision="bfloat16",
    )
    for rows in (128, 1024)
}
"""Of processors with AVX512-BF16."""

BFLOAT16_CONVOLUTIONS = {
    f"{operator} in bfloat16, {channels} channels of {size}": node(
        operator,
        [(8, channels, size, size), (channels, channels, 3, 3) if operator == "Conv" else (8, channels, size, size)],
        pads=[1] * 4,
        kernel_shape=[3, 3],
        compute="bfloat16",
    )
    for operator in ("Conv", "ConvWeightGradient")
    for channels, size in ((64, 56), (256, 14))
}
"""Of processors with AVX512-BF16."""


def sparse(x_shape: tuple[int, ...], threads: int, zeros: float = 0.9, **window: list[int]) -> Case:
    """A linear layer of 768 outputs, or a convolution with as many channels as x has, with single zeros."""

    def make() -> Work:
        random = np.random.default_rng(0)
        outputs = x_shape[1] if window else 768
        depth = x_shape[1] * int(np.prod(window.get("kernel_shape", 1)))
        weight = pack(random.standard_normal((outputs, depth), np.float32) * (random.random((outputs, depth)) >= zeros))
        constants = {"values": weight.values, "deltas": weight.deltas, "bias": np.zeros(outputs, np.float32)}
        constants["residual"] = np.zeros((), np.float32)
        operator, domain = "SparseConv" if window else "SparseLinear", ONNXTRAIN_DOMAIN
        graph = helper.make_graph(
            [helper.make_node(operator, ["x", *constants], ["y"], domain=domain, shape=weight.shape, **window)],
            "node",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, x_shape)],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
            [numpy_helper.from_array(array, name) for name, array in constants.items()],
        )
        opsets = [helper.make_opsetid("", 18), helper.make_opsetid(ONNXTRAIN_DOMAIN, 1)]
        feeds = {"x": random.standard_normal(x_shape, np.float32)}
        return Work(helper.make_model(graph, opset_imports=opsets, ir_version=8), feeds, threads)

    return make


SPARSE = {
    f"product with 90 % zeros, {rows} rows, {threads} threads": sparse((rows, 768), threads)
    for rows in (1, 8, 128)
    for threads in (1, 2)
} | {"product with 90 % zeros, 128 rows, depth 3,072, one thread": sparse((128, 3072), 1)}


def masked(rows: int, zeros: float, operator: str) -> Case:
    """A linear layer of 256 inputs and outputs under a mask, or the gradient of its weight."""

    def make() -> Work:
        random = np.random.default_rng(0)
        mask = random.random((256, 256)) >= zeros
        feeds = {name: random.standard_normal((rows, 256), np.float32) for name in ("x", "dy")}
        feeds["w"] = random.standard_normal((256, 256), np.float32) * mask
        names = ["x", "w", "", "mask"] if operator == "Linear" else ["dy", "x", "mask"]
        feeds = {name: feeds[name] for name in names if name in feeds}
        graph = helper.make_graph(
            [helper.make_node(operator, names, ["y"], domain=ONNXTRAIN_DOMAIN)],
            "node",
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, array.shape) for name, array in feeds.items()],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
            [numpy_helper.from_array(mask, "mask")],
        )
        opsets = [helper.make_opsetid("", 18), helper.make_opsetid(ONNXTRAIN_DOMAIN, 1)]
        return Work(helper.make_model(graph, opset_imports=opsets, ir_version=8), feeds, 1)

    return make


MASKED = {
    f"{operator} under a mask with {zeros:.0%} zeros, {rows} rows": masked(rows, zeros, operator)
    for operator in ("Linear", "LinearWeightGradient")
    for rows, zeros in ((1024, 0.7), (1024, 0.95), (64, 0.9))
}
SPARSE_CONVOLUTIONS = {
    f"convolution with 95 % zeros, {channels} channels, {size} x {size}": sparse(
        (1, channels, size, size), 1, 0.95, kernel_shape=[3, 3], pads=[1] * 4
    )
    for channels, size in ((64, 56), (512, 7))
}


def pooled(images: int, threads: int) -> Case:
    """The first convolution of a ResNet with its MaxPool."""

    def make() -> Work:
        random = np.random.default_rng(0)
        constants = {"w": random.standard_normal((64, 3, 7, 7), np.float32), "bias": np.zeros(64, np.float32)}
        windows = {
            "kernel_shape": [7, 7],
            "strides": [2, 2],
            "pads": [3] * 4,
            "pool_shape": [3, 3],
            "pool_pads": [1] * 4,
        }
        graph = helper.make_graph(
            [helper.make_node("ConvReluMaxPool", ["x", *constants], ["y"], domain=ONNXTRAIN_DOMAIN, **windows)],
            "node",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, (images, 3, 224, 224))],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
            [numpy_helper.from_array(array, name) for name, array in constants.items()],
        )
        opsets = [helper.make_opsetid("", 18), helper.make_opsetid(ONNXTRAIN_DOMAIN, 1)]
        feeds = {"x": random.standard_normal((images, 3, 224, 224), np.float32)}
        return Work(helper.make_model(graph, opset_imports=opsets, ir_version=8), feeds, threads)

    return make


POOLED = {
    f"7 x 7 convolution with MaxPool, {images} images, {threads} threads": pooled(images, threads)
    for images, threads in ((1, 1), (1, 2), (8, 2))
}

CAUSAL_ATTENTION = {
    f"causal, {length}": step(
        f"(float[4, {length}, 4, 48] x) => (y) {{"
        " h = Mul (x, w) q = Transpose <perm = [0, 2, 1, 3]> (h) k = Transpose <perm = [0, 2, 3, 1]> (h)"
        f" sizes = Constant <value = int64[2] {{{length}, {length}}}> () one = Constant <value = int64 {{1}}> ()"
        " lowest = ConstantOfShape <value = float[1] {-3e38}> (sizes) mask = Trilu <upper = 1> (lowest, one)"
        " s = MatMul (q, k) b = Add (s, mask) p = Softmax <axis = -1> (b) y = MatMul (p, q) }",
        weights={"w": (48,)},
    )
    for length in (64, 256)
}
BIAS_GRADIENT = {
    f"positions of {length}": step(
        f"(float[8, {length}, 4, 32] x) => (y) {{"
        " q = Transpose <perm = [0, 2, 1, 3]> (x) k = Transpose <perm = [0, 2, 3, 1]> (x) s = MatMul (q, k)"
        " b = Add (s, positions) p = Softmax <axis = -1> (b) y = MatMul (p, q) }",
        weights={"positions": (4, length, length)},
    )
    for length in (64, 256)
}
ADAM = _update(onnxtrain.Adam(0.001))

CHAINS = {
    "step of SiLU, 512 rows of 3072": step(
        "(float[512, 3072] x) => (y) { h = Mul(x, t) s = Sigmoid(h) y = Mul(h, s) }",
        weights={"t": (1,)},
        threads=THREADS,
    ),
}

CASES: dict[str, dict[str, Case]] = {
    "kTaskElements": SHARED | NORMS,
    "kPatience": SHARED,
    "kChainElements": CHAINS,
    "kNormalizationBlocks": NORMS,
    "kAheadBytes": ADAM,
    **dict.fromkeys(("kClearedElements", "kAddedElements"), TRANSPOSED_STEPS | CONVOLUTION_STEPS),
    "kPreparedElements": _update(onnxtrain.Adam(0.001), clip_norm=1.0),
    "kMeasuredElements": _update(onnxtrain.SSGD(0.001)) | _update(onnxtrain.LAMB(0.001)),
    "kLoopElements": ADAM | _update(onnxtrain.SSGD(0.001)),
    **dict.fromkeys(("kGatheredElements", "kNormalizedColumns"), NORMS),
    "kSoftmaxColumns": SOFTMAX,
    **dict.fromkeys(("kPooledWindows", "kPooledTogether"), POOLING),
    **dict.fromkeys(("kGatherColumns", "kSummedBytes", "kSortedBits", "kAheadRows", "kAheadRowBytes"), GATHER),
    **dict.fromkeys(
        ("kProductDepth", "kStripShare", "kLeastStripRows", "kColumnsShare", "kLeastRows", "kLeastColumns"), PRODUCTS
    ),
    "kSumDepth": LINEAR_STEPS,
    **dict.fromkeys(("kOuterDepth", "kOuterShare", "kOuterParts", "kNearLineBytes", "kPackedLines"), WEIGHT_GRADIENTS),
    "kBfloat16Depth": BFLOAT16,
    **dict.fromkeys(
        ("kBlockSumShare", "kLeastBlockPositions", "kGradientSourceWords", "kGradientDepth"), BFLOAT16_CONVOLUTIONS
    ),
    "kLeastProducts": PRODUCTS | SHARED,
    **dict.fromkeys(("kPackingCost", "kReadingCost", "kFewTiles"), PRODUCTS),
    "kStripRows": {**PRODUCTS, **CONVOLUTIONS},
    "kAccumulationDepth": CONVOLUTIONS,
    **dict.fromkeys(
        ("kScoreShare", "kMostScoreRows", "kLeastScoreRows", "kLeastQueries", "kAttentionTasks"), ATTENTION
    ),
    **dict.fromkeys(("kMaskedScoreRows", "kKeysPerMaskedRow"), CAUSAL_ATTENTION),
    **dict.fromkeys(("kShortKeys", "kShortHead", "kLaneScores"), SHORT_ATTENTION),
    "kBfloat16Positions": BFLOAT16_ATTENTION,
    **dict.fromkeys(("kBiasParts", "kBiasElements"), BIAS_GRADIENT),
    **dict.fromkeys(("kLeastStepProducts", "kLeastUnits", "kCachedWeightsShare", "kLeastBatchRows"), RECURRENT),
    **dict.fromkeys(("kFactorDepth", "kUncachedWeights", "kColumnsAheadBytes", "kPolls"), RECURRENT),
    **dict.fromkeys(
        ("kProductTasks", "kGradientSumBytes", "kGradientPositions", "kFewestPositions"), CONVOLUTION_STEPS
    ),
    "kPlaneTasks": PLANE_STEPS,
    **dict.fromkeys(("kBlockBytes", "kLargeWeights", "kLeastPositions", "kPackedElements"), CONVOLUTIONS),
    **dict.fromkeys(("kChunkDepth", "kTileCost", "kRunCost", "kClassesWorthIt", "kCostedRows"), CONVOLUTIONS),
    **dict.fromkeys(("kLeastSparseProducts", "kSparseTasks", "kSparseRows", "kSparsePanelShare"), SPARSE),
    **dict.fromkeys(
        ("kMaskedShare", "kMaskedProduct", "kMaskedBlockProduct", "kMaskedGradientProduct", "kMaskedElement"), MASKED
    ),
    **dict.fromkeys(("kMaskedWeight", "kMaskedCheck", "kMaskedFill", "kMaskedPanelShare"), MASKED),
    **dict.fromkeys(
        (
            "kSparseLinearSliceBytes",
            "kSparseSliceBytes",
            "kSparseSliceProducts",
            "kSparseSliceBlockProducts",
            "kSparseStripBytes",
        ),
        SPARSE_CONVOLUTIONS,
    ),
    **dict.fromkeys(("kPooledShare", "kPooledProducts", "kPooledTasks"), POOLED),
    "kLeastPositionsOfLarge": CONVOLUTIONS,
    **dict.fromkeys(("kLineAdditions", "kTileStart", "kSpreadingWorthIt"), TRANSPOSED_STEPS | CONVOLUTION_STEPS),
    **dict.fromkeys(("kPositionProduct", "kLonelyVector", "kTransposedElement", "kPositionDepth"), FEW_OUTPUTS),
    **dict.fromkeys(("kWinogradWeight", "kWinogradTile", "kWinogradWorthIt"), WINOGRAD),
    **dict.fromkeys(("kWinogradBlock", "kWinogradStrip", "kWinogradPack", "kWinogradDepth"), WINOGRAD),
    "kWinogradImages": WINOGRAD,
    **dict.fromkeys(("kWinogradChunk", "kWinogradTasks", "kWinogradSum", "kWinogradGradientTile"), WINOGRAD_GRADIENTS),
    **dict.fromkeys(("kWinogradShare", "kLeastWinogradTiles"), WINOGRAD_GRADIENTS),
    "kPixelShare": POINTWISE,
    **dict.fromkeys(("kWeightsInPlace", "kTurnedRows"), POINTWISE_GRADIENTS),
    "kShiftedBytes": PLANE_STEPS,
    **dict.fromkeys(("kSideBySideBytes", "kSideBySideProducts", "kPositionsAtOnce"), DEPTHWISE | PLANE_STEPS),
}
"""The cases of each figure, by its name."""
