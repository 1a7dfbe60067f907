"""Layers for measuring fused operators, each with PyTorch's kernel for the same computation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Run = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """One gradient of one layer.

    Attributes:
        operator: The fused operator.
        layer: The layer, for the table.
        inputs: Its inputs.
        like: Per output, the index of the input with its type and shape, or a shape.
        torch: Makes PyTorch's call from the inputs as tensors.
        attributes: Its attributes.
        constants: Indices of the inputs that a model would have as constants.
    """

    operator: str
    layer: str
    inputs: Sequence[np.ndarray]
    like: Sequence[int | tuple[int, ...]]
    torch: Callable[..., Run]
    attributes: dict[str, Any] = field(default_factory=dict)
    constants: Sequence[int] = ()


def normal(*shape: int) -> np.ndarray:
    """Seeded samples of the normal distribution."""
    return np.random.default_rng(shape).normal(size=shape).astype(np.float32)


def cases() -> list[Case]:
    """The measured layers."""
    import torch
    from torch.nn import functional

    aten = torch.ops.aten
    found: list[Case] = []

    def relu(dy: Any, y: Any) -> Run:
        return lambda: aten.threshold_backward(dy, y, 0.0)

    large = (32, 64, 32, 32)
    found.append(Case("ReluGradient", text(large), [normal(*large), np.maximum(normal(*large), 0)], [0], relu))

    def clip(dy: Any, x: Any, low: Any, high: Any) -> Run:
        return lambda: aten.hardtanh_backward(dy, x, 0.0, 6.0)

    bounds = [np.float32(0), np.float32(6)]
    found.append(
        Case("ClipGradient", text(large), [normal(*large), 4 * normal(*large), *bounds], [0], clip, constants=(2, 3))
    )

    wide = (1024, 1024)
    for approximate in ("none", "tanh"):

        def gelu(dy: Any, x: Any, approximate: str = approximate) -> Run:
            return lambda: aten.gelu_backward(dy, x, approximate=approximate)

        name = f"{text(wide)}, {'erf' if approximate == 'none' else approximate}"
        found.append(Case("GeluGradient", name, [normal(*wide)] * 2, [0], gelu, {"approximate": approximate}))

    def silu(dy: Any, x: Any, one: Any) -> Run:
        return lambda: aten.silu_backward(dy, x)

    program = "Sigmoid x1;Sub x2 s0;Mul x1 s1;Add s2 x2;Mul s0 s3;Mul x0 s4"
    given = [normal(*wide), normal(*wide), np.float32(1)]
    found.append(Case("Elementwise", f"{text(wide)}, SiLU", given, [0], silu, {"program": program}, constants=[2]))

    def dropout(x: Any, ratio: Any, count: Any) -> Run:
        return lambda: functional.dropout(x, 0.1)

    inputs = [normal(*wide), np.float32(0.1), np.asarray(3)]
    found.append(Case("CountedDropout", text(wide), inputs, [0], dropout, {"seed": 1}))

    scores = (8, 4, 128, 128)
    rows = np.exp(normal(*scores))
    rows /= rows.sum(-1, keepdims=True)

    def softmax(dy: Any, y: Any) -> Run:
        return lambda: aten._softmax_backward_data(dy, y, -1, torch.float32)

    def log_softmax(dy: Any, y: Any) -> Run:
        return lambda: aten._log_softmax_backward_data(dy, y, -1, torch.float32)

    found.append(Case("SoftmaxGradient", text(scores), [normal(*scores), rows], [0], softmax, {"axis": -1}))
    found.append(
        Case("LogSoftmaxGradient", text(scores), [normal(*scores), np.log(rows)], [0], log_softmax, {"axis": -1})
    )

    logits = (512, 1000)
    labels = np.random.default_rng(0).integers(0, 1000, (512, 1))
    log_probability = normal(*logits) - 7

    def cross_entropy(dy: Any, log_probability: Any, labels: Any) -> Run:
        labels, weight = labels[:, 0], torch.tensor(512.0)
        return lambda: aten._log_softmax_backward_data(
            aten.nll_loss_backward(dy, log_probability, labels, None, 1, -100, weight),
            log_probability,
            1,
            torch.float32,
        )

    inputs = [np.float32(1 / 512), log_probability, labels]
    found.append(Case("SoftmaxCrossEntropyGradient", text(logits), inputs, [1], cross_entropy))

    tokens, scale = (1024, 256), normal(256)

    def layer_norm(dy: Any, x: Any, scale: Any) -> Run:
        _, mean, inverse = aten.native_layer_norm(x, [256], scale, scale, 1e-5)
        return lambda: aten.native_layer_norm_backward(dy, x, [256], mean, inverse, scale, scale, [True] * 3)

    settings = {"axis": -1, "epsilon": 1e-5}
    inputs = [normal(*tokens), normal(*tokens), scale]
    found.append(Case("LayerNormalizationGradient", text(tokens), inputs, [0, 2, 2], layer_norm, settings))

    def rms_norm(dy: Any, x: Any, scale: Any) -> Run:
        x, scale = x.requires_grad_(), scale.requires_grad_()
        y = functional.rms_norm(x, [256], scale, 1e-5)
        return lambda: torch.autograd.grad(y, [x, scale], dy, retain_graph=True)

    found.append(Case("RMSNormalizationGradient", text(tokens), inputs, [0, 2], rms_norm, settings))

    for size in ((32, 64, 32, 32), (32, 384, 4, 4)):
        channel = normal(size[1])

        def batch_norm(dy: Any, x: Any, scale: Any) -> Run:
            _, mean, inverse = aten.native_batch_norm(x, scale, scale, None, None, True, 0.1, 1e-5)
            return lambda: aten.native_batch_norm_backward(
                dy, x, scale, None, None, mean, inverse, True, 1e-5, [True] * 3
            )

        inputs = [normal(*size), normal(*size), channel]
        found.append(Case("BatchNormalizationGradient", text(size), inputs, [0, 2, 2], batch_norm, {"epsilon": 1e-5}))

        def batch_norm_relu(x: Any, scale: Any, bias: Any, mean: Any, variance: Any) -> Run:
            return lambda: functional.batch_norm(x, mean, variance, scale, bias, True).relu_()

        inputs = [normal(*size), *[channel] * 3, np.abs(channel)]
        kept = (2, size[1])
        results = [0, 3, 4, kept, kept]
        relu_behind = {"activation": "Relu"}
        found.append(Case("BatchNormalization", f"{text(size)}, relu", inputs, results, batch_norm_relu, relu_behind))

    image = (64, 6, 28, 28)

    def max_pool(dy: Any, x: Any) -> Run:
        _, indices = aten.max_pool2d_with_indices(x, [2, 2], [2, 2])
        return lambda: aten.max_pool2d_with_indices_backward(dy, x, [2, 2], [2, 2], [0, 0], [1, 1], False, indices)

    settings = {"kernel_shape": [2, 2], "strides": [2, 2], "dilations": [1, 1], "pads": [0] * 4}
    found.append(
        Case(
            "MaxPoolGradient", f"{text(image)}, 2 x 2", [normal(64, 6, 14, 14), normal(*image)], [1], max_pool, settings
        )
    )

    planes, twice = (8, 64, 28, 28), np.zeros((28, 56), np.float32)
    for column in range(56):
        position = min(max((column + 0.5) / 2 - 0.5, 0.0), 27.0)
        near = min(int(position), 26)
        twice[near : near + 2, column] = near + 1 - position, position - near

    def resize(x: Any, *_: Any) -> Run:
        return lambda: aten.upsample_bilinear2d(x, [56, 56], False)

    layer = f"{text(planes)} to 56 x 56"
    inputs = [normal(*planes), twice, twice]
    found.append(Case("ResizeByMatrices", layer, inputs, [(8, 64, 56, 56)], resize, constants=(1, 2)))

    vocabulary, width = 30522, 256
    indices = np.random.default_rng(0).integers(0, vocabulary, (8, 128))

    def embedding(dy: Any, indices: Any, shape: Any) -> Run:
        return lambda: aten.embedding_dense_backward(dy, indices, vocabulary, -1, False)

    inputs = [normal(8, 128, width), indices, np.array([vocabulary, width])]
    layer = f"{vocabulary} x {width}, 1024 rows"
    found.append(Case("GatherGradient", layer, inputs, [(vocabulary, width)], embedding, {"axis": 0}, constants=(2,)))
    return found + transforms(torch) + attentions(aten) + linears() + convolutions(aten) + recurrent()


def transforms(torch: Any) -> list[Case]:
    """Gradients of samples at the points of a grid and of determinants, and a Fourier transform."""
    aten = torch.ops.aten

    def sampled(dy: Any, x: Any, grid: Any) -> Run:
        return lambda: aten.grid_sampler_2d_backward(dy, x, grid, 0, 0, False, [True, True])

    def determinant(dy: Any, x: Any) -> Run:
        y = torch.linalg.det(x.requires_grad_())
        return lambda: torch.autograd.grad(y, x, dy, retain_graph=True)

    def fourier(x: Any) -> Run:
        return lambda: torch.fft.fft(torch.view_as_complex(x))

    images, matrices, lines = (8, 16, 56, 56), (256, 8, 8), (64, 1024, 2)
    inputs = [normal(*images), normal(*images), np.tanh(normal(8, 56, 56, 2))]
    settings = {"axis": 1, "length": 1024, "bins": 1024, "parts": 2, "inverse": 0, "divided": 0}
    return [
        Case("GridSampleGradient", f"{text(images)}, 56 x 56 points", inputs, [1, 2], sampled),
        Case("DetGradient", text(matrices), [normal(256), normal(*matrices)], [1], determinant),
        Case("Fourier", "64 x 1024", [normal(*lines)], [0], fourier, settings),
    ]


ATTENTIONS = (
    # batch, rows, heads, size of a head, keys that are masked at the end
    (8, 128, 4, 64, 20),
    (8, 65, 3, 64, 0),
)


def attentions(aten: Any) -> list[Case]:
    """Self-attention as in BERT-mini (with a key mask) and in a small vision transformer, and its gradient."""
    found = []
    for batch, rows, heads, size, masked in ATTENTIONS:
        shape = (batch, rows, heads, size)
        arrays = [normal(*shape), *(np.roll(normal(*shape), turn) for turn in (1, 2, 3))]
        mask = np.zeros((batch, 1, 1, rows), np.float32)
        mask[..., rows - masked :] = np.finfo(np.float32).min
        settings = {"scale": size**-0.5}
        forward = aten._scaled_dot_product_flash_attention_for_cpu
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward

        def given(bias: Sequence[Any], settings: Any = settings, full: Any = (batch, heads, rows, rows)) -> Any:
            return settings | {"attn_mask": bias[0].expand(full) if bias else None}

        def attention(q: Any, k: Any, v: Any, *bias: Any, given: Any = given, forward: Any = forward) -> Run:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return lambda: forward(q, k, v, 0.0, False, **given(bias))

        def gradient(
            dy: Any,
            q: Any,
            k: Any,
            v: Any,
            _y: Any,
            _log_sum: Any,
            *bias: Any,
            given: Any = given,
            forward: Any = forward,
            backward: Any = backward,
        ) -> Run:
            dy, q, k, v = (x.transpose(1, 2) for x in (dy, q, k, v))
            y, log_sum = forward(q, k, v, 0.0, False, **given(bias))
            return lambda: backward(dy, q, k, v, y, log_sum, 0.0, False, **given(bias))

        layer = text(shape) + (", masked" if masked else "")
        bias = [mask] if masked else []
        sums = (batch, heads, rows)
        y, log_sum = attention_of(*arrays[1:], mask, settings["scale"])
        found.append(Case("Attention", layer, [*arrays[1:], *bias], [0, sums], attention, settings))
        inputs = [*arrays, y, log_sum, *bias]
        found.append(Case("AttentionGradient", layer, inputs, [1, 2, 3], gradient, settings))

        def packed(qkv: Any, *bias: Any, attention: Any = attention) -> Run:
            return attention(*qkv.unbind(2), *bias)

        def packed_gradient(dy: Any, qkv: Any, y: Any, log_sum: Any, *bias: Any, gradient: Any = gradient) -> Run:
            return gradient(dy, *qkv.unbind(2), y, log_sum, *bias)

        qkv = np.stack(arrays[1:], axis=2)
        found.append(Case("PackedAttention", layer, [qkv, *bias], [shape, sums], packed, settings))
        inputs = [arrays[0], qkv, y, log_sum, *bias]
        found.append(Case("PackedAttentionGradient", layer, inputs, [1], packed_gradient, settings))
    return found


def attention_of(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, bias: np.ndarray, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """y and the log-sums that the gradient reads."""
    scores = scale * np.einsum("bshd,bthd->bhst", q, k) + bias
    largest = scores.max(-1, keepdims=True)
    e = np.exp(scores - largest)
    sums = e.sum(-1, keepdims=True)
    return np.einsum("bhst,bthe->bshe", e / sums, v), (largest + np.log(sums))[..., 0]


LINEARS = (
    # leading axes, inputs, outputs, whether the weight is [outputs, inputs]
    ((8, 128), 256, 256, False),
    ((8, 128), 256, 256, True),
    ((8, 128), 256, 1024, False),
    ((8, 128), 1024, 256, False),
    ((64,), 784, 128, True),
)


def linears() -> list[Case]:
    """Linear layers as in BERT-mini and the MLP: y, dx, dw and db, and all of them behind a Relu."""
    import torch
    from torch.nn import functional

    aten = torch.ops.aten

    found = []
    for leading, inputs, outputs, transposed in LINEARS:
        x, dy, bias = normal(*leading, inputs), normal(*leading, outputs), normal(outputs)
        weight = normal(outputs, inputs) if transposed else normal(inputs, outputs)

        def linear(x: Any, w: Any, b: Any = None, turned: bool = transposed) -> Run:
            return lambda: functional.linear(x, w if turned else w.t(), b)

        def by_input(dy: Any, w: Any, turned: bool = transposed) -> Run:
            return lambda: dy @ (w if turned else w.t())

        def by_weight(dy: Any, x: Any, turned: bool = transposed) -> Run:
            dy, x = dy.flatten(0, -2), x.flatten(0, -2)
            return lambda: (dy.t() @ x if turned else x.t() @ dy, dy.sum(0))

        def by_all(dy: Any, w: Any, x: Any, turned: bool = transposed) -> Run:
            dx, others = by_input(dy, w, turned), by_weight(dy, x, turned)
            return lambda: (aten.threshold_backward(dx(), x, 0), *others())

        layer = f"{text(x.shape)}, {outputs} outputs" + (", transposed" if transposed else "")
        found += [
            Case("Linear", layer, [x, weight, bias], [dy.shape], linear, {"transB": int(transposed)}),
            Case("Linear", f"{layer}, by x", [dy, weight], [x.shape], by_input, {"transB": int(not transposed)}),
            Case(
                "LinearGradient",
                f"{layer}, behind relu",
                [dy, weight, np.maximum(x, 0)],
                [x.shape, weight.shape, bias.shape],
                by_all,
                {"transB": int(transposed), "activation": "Relu"},
            ),
            Case(
                "LinearWeightGradient",
                layer,
                [dy, x],
                [weight.shape, bias.shape],
                by_weight,
                {"transB": int(transposed)},
            ),
        ]
    return found + few_bits()


def few_bits() -> list[Case]:
    """Linear layers with int4 weights and their gradient, against PyTorch with float32 weights."""
    import torch

    def numbers(integers: Any, scales: Any) -> Any:
        parts = torch.stack([integers & 15, integers >> 4], dim=-1).flatten(2)
        return ((parts.float() - 8) * scales[..., None]).flatten(1)

    def product(x: Any, integers: Any, scales: Any) -> Run:
        weight = numbers(integers, scales).T
        return lambda: x @ weight

    def gradient(dy: Any, integers: Any, scales: Any) -> Run:
        weight = numbers(integers, scales)
        return lambda: dy @ weight

    found = []
    for rows, inputs, outputs in ((128, 1024, 1024), (512, 2048, 2048)):
        block, blocks = 32, inputs // 32
        integers = np.random.default_rng(0).integers(0, 256, (outputs, blocks, block // 2), np.uint8)
        weights = [integers, np.abs(normal(outputs, blocks))]
        attributes = {"K": inputs, "N": outputs, "bits": 4, "block_size": block}
        layer = f"{rows} x {outputs}, {inputs} inputs, 4 bits"
        x, dy = normal(rows, inputs), normal(rows, outputs)
        found.append(Case("MatMulNBits", layer, [x, *weights], [dy.shape], product, attributes, (1, 2)))
        found.append(Case("MatMulNBitsGradient", layer, [dy, *weights], [x.shape], gradient, attributes, (1, 2)))
    return found


CONVOLUTIONS = (
    # batch, channels, size, filters, kernel, stride, padding, groups
    (64, 1, 28, 20, 5, 1, 0, 1),
    (64, 20, 12, 50, 5, 1, 0, 1),
    (32, 64, 32, 64, 3, 1, 1, 1),
    (32, 128, 16, 128, 3, 1, 1, 1),
    (32, 256, 8, 256, 3, 1, 1, 1),
    (32, 512, 4, 512, 3, 1, 1, 1),
    (32, 128, 16, 256, 3, 2, 1, 1),
    (32, 144, 32, 24, 1, 1, 0, 1),
    (32, 384, 4, 96, 1, 1, 0, 1),
    (32, 144, 32, 144, 3, 1, 1, 144),
    (32, 384, 4, 384, 3, 1, 1, 384),
    (32, 144, 32, 144, 3, 2, 1, 144),
)


def convolutions(aten: Any) -> list[Case]:
    """Input and weight gradients of convolutions as in LeNet-5, ResNet-18 and MobileNetV2."""
    found = []
    for batch, channels, size, filters, kernel, stride, pad, groups in CONVOLUTIONS:
        x, weight = normal(batch, channels, size, size), normal(filters, channels // groups, kernel, kernel)
        windows = (size + 2 * pad - kernel) // stride + 1
        dy = normal(batch, filters, windows, windows)
        settings: dict[str, Any] = {
            "kernel_shape": [kernel] * 2,
            "strides": [stride] * 2,
            "dilations": [1, 1],
            "pads": [pad] * 4,
            "group": groups,
        }
        layer = f"{text(x.shape)}, {kernel} x {kernel}, {filters} filters"
        layer += (f", stride {stride}" if stride > 1 else "") + (", depthwise" if groups > 1 else "")

        def both(dy: Any, x: Any, weight: Any, mask: list[bool], stride: int = stride, settings: Any = settings) -> Run:
            return lambda: aten.convolution_backward(
                dy, x, weight, None, [stride] * 2, settings["pads"][:2], [1, 1], False, [0, 0], settings["group"], mask
            )

        def by_input(
            dy: Any, weight: Any, shape: Any, size: tuple[int, ...] = x.shape, both: Callable[..., Run] = both
        ) -> Run:
            return both(dy, dy.new_zeros(size), weight, [True, False, False])

        def by_weight(dy: Any, x: Any, size: tuple[int, ...] = weight.shape, both: Callable[..., Run] = both) -> Run:
            return both(dy, x, dy.new_zeros(size), [False, True, False])

        shape = np.array(x.shape)
        found.append(Case("ConvInputGradient", layer, [dy, weight, shape], [x.shape], by_input, settings, (2,)))
        found.append(Case("ConvWeightGradient", layer, [dy, x], [weight.shape], by_weight, settings))
    return found


RECURRENT = (("LSTM", 4, "Sigmoid Tanh Tanh"), ("GRU", 3, "Sigmoid Tanh"), ("RNN", 1, "Tanh"))


def recurrent() -> list[Case]:
    """LSTM, GRU and RNN of 100 steps, 256 units, batch 8, with saved activations, and their gradients."""
    import torch

    steps, batch, width = 100, 8, 256
    x, state = normal(steps, batch, width), (1, batch, width)
    left_out, no_lengths = np.zeros(0, np.float32), np.zeros(0, np.int32)
    found = []
    for operator, gates, functions in RECURRENT:
        lstm, rows = operator == "LSTM", gates * width
        count = len(functions.split())
        weights = [normal(1, rows, width) / 16, normal(1, rows, width) / 16, normal(1, 2 * rows) / 16]
        inputs = [x, *weights, no_lengths, *[left_out] * (3 if lstm else 1)]
        attributes: dict[str, Any] = {"hidden_size": width, "activations": functions, "linear_before_reset": 1}
        attributes |= {"activation_alpha": [0.0] * count, "activation_beta": [0.0] * count}
        results = [(steps, *state), *[state] * (2 if lstm else 1)]
        kept = [(steps, batch, 1, rows)]
        kept += [(steps, *state)] if lstm else [(steps, batch, 1, width)] * (operator == "GRU")
        module = getattr(torch.nn, operator)(width, width)

        def forward(x: Any, *rest: Any, module: Any = module) -> Run:
            return lambda: module(x)

        def backward(x: Any, *rest: Any, module: Any = module) -> Run:
            y, _ = module(x.requires_grad_())
            dy = torch.ones_like(y)
            return lambda: torch.autograd.grad(y, [x, *module.parameters()], dy, retain_graph=True)

        layer = f"{text((steps, batch, width))}, {width} units"
        constants = [index for index, array in enumerate(inputs) if array.size == 0]
        found.append(Case(operator, layer, inputs, [*results, *kept], forward, attributes, constants))
        arriving = [normal(*results[0]), *[left_out] * (len(results) - 1)]
        read = [*inputs, np.tanh(normal(*results[0])), *(np.abs(np.tanh(normal(*shape))) for shape in kept), *arriving]
        constants = [index for index, array in enumerate(read) if array.size == 0]
        spaces = kept if operator == "GRU" else kept[:1]
        like = [*spaces, x.shape, *(array.shape for array in weights)]
        found.append(Case(f"{operator}Gradient", layer, read, like, backward, attributes, constants))
    return found


def text(shape: Sequence[int]) -> str:
    """Format a shape."""
    return " x ".join(map(str, shape))
