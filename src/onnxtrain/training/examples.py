"""Small ONNX models with random weights, and points to train on: for the demo, tests and experiments.

They are written with ``onnx.helper`` alone, so they need no package but ONNX.
Every model has a symbolic batch dimension ``N`` and ends in ``logits``; weights come from the given seed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from onnxtrain.errors import OptionError
from onnxtrain.errors._internal import public_names
from onnxtrain.errors.spelling import checks_arguments
from onnxtrain.graph.layers import orientation

__all__ = [
    "digits_cnn",
    "lenet5",
    "lenet5_caffe",
    "lenet_300_100",
    "mlp",
    "points",
    "small_resnet",
    "small_transformer",
]

_DEFAULT_OPSET = 18
_DEFAULT_IR = 8

# Activation by name: the operator and the opset that introduced it.
_ACTIVATIONS = {
    "relu": ("Relu", 7),
    "leaky_relu": ("LeakyRelu", 7),
    "elu": ("Elu", 7),
    "selu": ("Selu", 7),
    "celu": ("Celu", 12),
    "sigmoid": ("Sigmoid", 7),
    "tanh": ("Tanh", 7),
    "softplus": ("Softplus", 7),
    "softsign": ("Softsign", 7),
    "hard_sigmoid": ("HardSigmoid", 7),
    "hard_swish": ("HardSwish", 14),
    "mish": ("Mish", 18),
    "gelu": ("Gelu", 20),
}
# Bounded on both sides: Glorot's initialization suits them, He's the others.
_SATURATING = {"sigmoid", "tanh", "softsign", "hard_sigmoid"}


@checks_arguments
def mlp(
    sizes: Sequence[int] = (784, 512, 512, 10),
    activation: str = "relu",
    *,
    opset: int = _DEFAULT_OPSET,
    seed: int = 0,
) -> onnx.ModelProto:
    """A multi-layer perceptron: fully connected layers with an activation between them.

    ``y_k = activation(y_{k-1} @ W_k.T + b_k)``, without an activation after the last layer.

    Args:
        sizes: The width of the input ``input`` [N, sizes[0]], of each hidden layer, and of ``logits``.
        activation: One of relu, leaky_relu, elu, selu, celu, sigmoid, tanh, softplus, softsign,
            hard_sigmoid, hard_swish, mish (opset 18), gelu (opset 20).
        opset: The ONNX opset to write, 7 or later.
        seed: Seeds the weights: He's initialization, or Glorot's where the activation saturates.

    Raises:
        OptionError: Fewer than two sizes, an unknown activation, or one that the opset does not have.

    Example:
        >>> from onnxtrain.training.examples import mlp
        >>> [list(weight.dims) for weight in mlp((4, 8, 3)).graph.initializer]
        [[8, 4], [8], [3, 8], [3]]
    """
    if len(sizes) < 2 or min(sizes) < 1:
        raise OptionError(f"sizes is {tuple(sizes)}, but a perceptron needs two or more positive layer sizes")
    if activation not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise OptionError(f"the activation {activation!r} is not known; choose one of {known}").about(
            "activation", got=activation
        )
    operator, minimum = _ACTIVATIONS[activation]
    graph = _Graph(f"mlp with {activation}", opset, minimum, seed)
    value = graph.input("input", ["N", sizes[0]])
    glorot = activation in _SATURATING
    for layer, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes), 1):
        if layer > 1:
            value = graph.node(operator, value)
        value = graph.linear(f"layer{layer}", value, fan_in, fan_out, glorot=glorot)
    return graph.model(["N", sizes[-1]])


@checks_arguments
def points(count: int = 200, *, seed: int = 0) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Create training data: random points [count, 4], and the index of the largest of their first three values [count].

    Args:
        count: Number of points.
        seed: Seeds the values, which are normal with mean 0 and standard deviation 1.

    Example:
        >>> x, y = points(3)
        >>> x.shape, y.tolist() == x[:, :3].argmax(axis=1).tolist()
        ((3, 4), True)
    """
    numbers = np.random.default_rng(seed).normal(size=(count, 4)).astype(np.float32)
    return numbers, numbers[:, :3].argmax(axis=1)


@checks_arguments
def digits_cnn(*, opset: int = _DEFAULT_OPSET, seed: int = 0) -> onnx.ModelProto:
    """A convolutional network for scikit-learn's digits: ``image`` [N, 1, 8, 8] from 0 to 1, ten logits.

    Three 3x3 convolutions (16, 32, 64 filters) with Relu, max pooling after the last two, one linear layer;
    25,866 parameters. A few epochs of Adam reach about 99 % accuracy on held-out images.

    Args:
        opset: The ONNX opset to write, 11 or later.
        seed: Seeds the weights (He's initialization).

    Raises:
        OptionError: The opset is too old.

    Example:
        >>> from onnxtrain.training.examples import digits_cnn
        >>> [node.op_type for node in digits_cnn().graph.node][:3]
        ['Conv', 'Relu', 'Conv']
    """
    graph = _Graph("digits_cnn", opset, 11, seed)
    value = graph.input("image", ["N", 1, 8, 8])
    value = graph.node("Relu", graph.conv("conv1", value, 1, 16, 3, padding=1))
    value = graph.node("Relu", graph.conv("conv2", value, 16, 32, 3, padding=1))
    value = graph.max_pool(value)
    value = graph.node("Relu", graph.conv("conv3", value, 32, 64, 3, padding=1))
    value = graph.node("Flatten", graph.max_pool(value))
    graph.linear("classifier", value, 256, 10)
    return graph.model(["N", 10])


@checks_arguments
def lenet5(*, opset: int = _DEFAULT_OPSET, seed: int = 0) -> onnx.ModelProto:
    """LeNet-5 in its usual form today, with Relu and max pooling: ``image`` [N, 1, 28, 28], ten logits.

    Convolutions of 6 and 16 filters 5x5 (the first padded by 2), linear layers of 120, 84 and 10;
    61,706 parameters. Source: LeCun, Bottou, Bengio, Haffner, "Gradient-based learning applied to document
    recognition", 1998, which has subsampling layers and hyperbolic tangents.

    Args:
        opset: The ONNX opset to write, 11 or later.
        seed: Seeds the weights (He's initialization).

    Raises:
        OptionError: The opset is too old.
    """
    graph = _Graph("lenet5", opset, 11, seed)
    value = graph.input("image", ["N", 1, 28, 28])
    value = graph.max_pool(graph.node("Relu", graph.conv("conv1", value, 1, 6, 5, padding=2)))
    value = graph.max_pool(graph.node("Relu", graph.conv("conv2", value, 6, 16, 5)))
    value = graph.node("Flatten", value)
    value = graph.node("Relu", graph.linear("fc1", value, 400, 120))
    value = graph.node("Relu", graph.linear("fc2", value, 120, 84))
    graph.linear("fc3", value, 84, 10)
    return graph.model(["N", 10])


@checks_arguments
def lenet5_caffe(*, opset: int = _DEFAULT_OPSET, seed: int = 0) -> onnx.ModelProto:
    """LeNet-5 in Caffe's form, which pruning papers use: ``image`` [N, 1, 28, 28], ten logits.

    Convolutions of 20 and 50 filters 5x5, each with max pooling, a hidden layer of 500 with Relu:
    430,500 weights and 580 biases.

    Args:
        opset: The ONNX opset to write, 11 or later.
        seed: Seeds the weights (He's initialization).

    Raises:
        OptionError: The opset is too old.
    """
    graph = _Graph("lenet5_caffe", opset, 11, seed)
    value = graph.input("image", ["N", 1, 28, 28])
    value = graph.max_pool(graph.conv("conv1", value, 1, 20, 5))
    value = graph.max_pool(graph.conv("conv2", value, 20, 50, 5))
    value = graph.node("Flatten", value)
    value = graph.node("Relu", graph.linear("ip1", value, 800, 500))
    graph.linear("ip2", value, 500, 10)
    return graph.model(["N", 10])


@checks_arguments
def lenet_300_100(*, opset: int = _DEFAULT_OPSET, seed: int = 0) -> onnx.ModelProto:
    """LeNet-300-100, the perceptron of pruning papers: ``image`` [N, 1, 28, 28], ten logits.

    Hidden layers of 300 and 100 with Relu: 266,200 weights and 410 biases.

    Args:
        opset: The ONNX opset to write, 9 or later.
        seed: Seeds the weights (He's initialization).

    Raises:
        OptionError: The opset is too old.
    """
    graph = _Graph("lenet_300_100", opset, 9, seed)
    value = graph.node("Flatten", graph.input("image", ["N", 1, 28, 28]))
    value = graph.node("Relu", graph.linear("fc1", value, 784, 300))
    value = graph.node("Relu", graph.linear("fc2", value, 300, 100))
    graph.linear("fc3", value, 100, 10)
    return graph.model(["N", 10])


@checks_arguments
def small_resnet(
    width: int = 8,
    blocks: Sequence[int] = (1, 1, 1),
    classes: int = 10,
    *,
    opset: int = _DEFAULT_OPSET,
    seed: int = 0,
) -> onnx.ModelProto:
    """A residual network as exported for inference: ``image`` [N, 3, H, W], ``logits`` [N, classes].

    Every stage halves the resolution of the one before it and doubles its filters. Each convolution is
    followed by a BatchNormalization node with its (fresh) running statistics. Source: He, Zhang, Ren, Sun,
    "Deep residual learning for image recognition", 2015.

    Args:
        width: Filters of the first stage.
        blocks: Residual blocks of each stage.
        classes: Number of logits.
        opset: The ONNX opset to write, 9 or later.
        seed: Seeds the weights (He's initialization).

    Raises:
        OptionError: The opset is too old.
    """
    graph = _Graph("small_resnet", opset, 9, seed)
    value = graph.input("image", ["N", 3, "H", "W"])
    value = graph.node("Relu", graph.conv_batch_norm("stem", value, 3, width, 3))
    channels = width
    for stage, count in enumerate(blocks):
        filters = width << stage
        for block in range(count):
            name, stride = f"stage{stage}.block{block}", 2 if stage and not block else 1
            residual = graph.node("Relu", graph.conv_batch_norm(f"{name}.1", value, channels, filters, 3, stride))
            residual = graph.conv_batch_norm(f"{name}.2", residual, filters, filters, 3)
            if stride != 1 or channels != filters:
                value = graph.conv_batch_norm(f"{name}.shortcut", value, channels, filters, 1, stride)
            value = graph.node("Relu", graph.node("Add", residual, value))
            channels = filters
    value = graph.node("Flatten", graph.node("GlobalAveragePool", value))
    graph.linear("classifier", value, channels, classes)
    return graph.model(["N", classes])


@checks_arguments
def small_transformer(
    vocabulary: int = 100,
    width: int = 32,
    layers: int = 2,
    heads: int = 4,
    classes: int = 4,
    longest: int = 64,
    *,
    opset: int = _DEFAULT_OPSET,
    seed: int = 0,
) -> onnx.ModelProto:
    """A text classifier like DistilBERT: token ids and a mask [N, S] (int64), ``logits`` [N, classes].

    Token and position embeddings, then blocks of masked multi-head attention and a two-layer perceptron with
    Gelu, each with a residual connection and LayerNormalization; the first token's vector is classified.
    Attention is written in MatMul, Reshape, Transpose and Softmax. Source: Sanh, Debut, Chaumond, Wolf,
    "DistilBERT, a distilled version of BERT", 2019.

    Args:
        vocabulary: Number of token ids.
        width: Elements of a token's vector, a multiple of ``heads``.
        layers: Number of blocks.
        heads: Attention heads of a block.
        classes: Number of logits.
        longest: Maximum number of tokens of a sequence, S.
        opset: The ONNX opset to write, 17 or later; Gelu is one node from 20 on, five before.
        seed: Seeds the weights (Glorot's initialization; embeddings with standard deviation 0.02).

    Raises:
        OptionError: ``width`` is not a multiple of ``heads``, or the opset is too old.
    """
    if width % heads:
        raise OptionError(f"width is {width}, which {heads} heads cannot share; make it a multiple of heads")
    graph = _Graph("small_transformer", opset, 17, seed)
    tokens = graph.input("input_ids", ["N", "S"], TensorProto.INT64)
    mask = graph.input("attention_mask", ["N", "S"], TensorProto.INT64)
    value = _embeddings(graph, tokens, vocabulary, longest, width)
    masked = _attention_bias(graph, mask)
    for layer in range(layers):
        name = f"layer{layer}"
        attended = _attention(graph, f"{name}.attention", value, masked, width, heads)
        value = graph.layer_norm(f"{name}.norm1", graph.node("Add", value, attended), width)
        hidden = graph.gelu(graph.project(f"{name}.up", value, width, 4 * width))
        hidden = graph.project(f"{name}.down", hidden, 4 * width, width)
        value = graph.layer_norm(f"{name}.norm2", graph.node("Add", value, hidden), width)
    first = graph.node("Gather", value, graph.constant("first", np.int64(0)), axis=1)
    graph.linear("classifier", first, width, classes, glorot=True)
    return graph.model(["N", classes])


def _embeddings(graph: _Graph, tokens: str, vocabulary: int, longest: int, width: int) -> str:
    words = graph.weight("embeddings.token", (vocabulary, width), 0.02)
    positions = graph.weight("embeddings.position", (longest, width), 0.02)
    length = graph.node("Gather", graph.node("Shape", tokens), graph.constant("sequence_axis", np.int64(1)))
    zero, one = graph.constant("zero", np.int64(0)), graph.constant("one", np.int64(1))
    position = graph.node("Gather", positions, graph.node("Range", zero, length, one))
    value = graph.node("Add", graph.node("Gather", words, tokens), position)
    return graph.layer_norm("embeddings.norm", value, width)


def _attention_bias(graph: _Graph, mask: str) -> str:
    """Return the bias of attention scores [N, heads, S, S]: 0 for a token, -10000 where the mask is 0."""
    axes = graph.constant("head_and_query_axes", np.array([1, 2], np.int64))
    kept = graph.node("Cast", graph.node("Unsqueeze", mask, axes), to=TensorProto.FLOAT)
    absent = graph.node("Sub", graph.constant("present", np.float32(1)), kept)
    return graph.node("Mul", absent, graph.constant("masked_score", np.float32(-10000)))


def _attention(graph: _Graph, name: str, value: str, bias: str, width: int, heads: int) -> str:
    """``softmax(q @ k.T / sqrt(d) + bias) @ v`` for each head, then a projection."""
    size = width // heads
    split = graph.constant(f"{name}.split", np.array([0, 0, heads, size], np.int64))
    join = graph.constant(f"{name}.join", np.array([0, 0, width], np.int64))
    scale = graph.constant(f"{name}.scale", np.float32(1 / math.sqrt(size)))
    # [N, S, heads, size] to [N, heads, S, size]; the key is transposed for the matmul.
    orders = {"query": [0, 2, 1, 3], "key": [0, 2, 3, 1], "value": [0, 2, 1, 3]}
    parts = {}
    for part, order in orders.items():
        projected = graph.project(f"{name}.{part}", value, width, width)
        parts[part] = graph.node("Transpose", graph.node("Reshape", projected, split), perm=order)
    scores = graph.node("Mul", graph.node("MatMul", parts["query"], parts["key"]), scale)
    weights = graph.node("Softmax", graph.node("Add", scores, bias), axis=-1)
    mixed = graph.node("Transpose", graph.node("MatMul", weights, parts["value"]), perm=[0, 2, 1, 3])
    return graph.project(f"{name}.output", graph.node("Reshape", mixed, join), width, width)


class _Graph:
    """A graph under construction with seeded weights; methods add nodes and return the name of a value."""

    def __init__(self, name: str, opset: int, minimum: int, seed: int) -> None:
        newest = onnx.defs.onnx_opset_version()
        if not minimum <= opset <= newest:
            raise OptionError(f"{name} cannot be written at opset {opset}; choose one from {minimum} to {newest}")
        self.name = name.split()[0]
        self.opset = opset
        self.random = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.initializers: list[onnx.TensorProto] = []

    def input(self, name: str, shape: Sequence[int | str], element: int = TensorProto.FLOAT) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, element, shape))
        return name

    def node(self, operator: str, *inputs: str, **attributes: Any) -> str:
        output = f"{operator}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [output], name=output, **attributes))
        return output

    def constant(self, name: str, value: NDArray[Any] | np.generic) -> str:
        self.initializers.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def weight(self, name: str, shape: tuple[int, ...], deviation: float) -> str:
        return self.constant(name, (self.random.standard_normal(shape) * deviation).astype(np.float32))

    def bias(self, name: str, size: int) -> str:
        return self.constant(name, np.zeros(size, np.float32))

    def linear(self, name: str, value: str, fan_in: int, fan_out: int, *, glorot: bool = False) -> str:
        """Gemm with a weight [fan_out, fan_in], as PyTorch stores it."""
        deviation = math.sqrt(2 / (fan_in + fan_out) if glorot else 2 / fan_in)
        weight = self.weight(f"{name}.weight", (fan_out, fan_in), deviation)
        return self.node("Gemm", value, weight, self.bias(f"{name}.bias", fan_out), **orientation())

    def project(self, name: str, value: str, fan_in: int, fan_out: int) -> str:
        """MatMul and Add over the last axis, with a weight [fan_in, fan_out]."""
        weight = self.weight(f"{name}.weight", (fan_in, fan_out), math.sqrt(2 / (fan_in + fan_out)))
        return self.node("Add", self.node("MatMul", value, weight), self.bias(f"{name}.bias", fan_out))

    def conv(self, name: str, value: str, channels: int, filters: int, size: int, padding: int = 0) -> str:
        weight = self.weight(f"{name}.weight", (filters, channels, size, size), math.sqrt(2 / (channels * size * size)))
        bias = self.bias(f"{name}.bias", filters)
        return self.node("Conv", value, weight, bias, kernel_shape=[size, size], pads=[padding] * 4)

    def conv_batch_norm(self, name: str, value: str, channels: int, filters: int, size: int, stride: int = 1) -> str:
        """A padded convolution without bias, then BatchNormalization with fresh statistics."""
        shape = (filters, channels, size, size)
        weight = self.weight(f"{name}.conv.weight", shape, math.sqrt(2 / (channels * size * size)))
        pads, strides = [size // 2] * 4, [stride, stride]
        value = self.node("Conv", value, weight, kernel_shape=[size, size], pads=pads, strides=strides)
        statistics = {"scale": 1, "bias": 0, "mean": 0, "var": 1}
        parameters = [
            self.constant(f"{name}.norm.{key}", np.full(filters, start, np.float32))
            for key, start in statistics.items()
        ]
        return self.node("BatchNormalization", value, *parameters)

    def max_pool(self, value: str) -> str:
        return self.node("MaxPool", value, kernel_shape=[2, 2], strides=[2, 2])

    def layer_norm(self, name: str, value: str, width: int) -> str:
        scale = self.constant(f"{name}.scale", np.ones(width, np.float32))
        return self.node("LayerNormalization", value, scale, self.bias(f"{name}.bias", width), axis=-1)

    def gelu(self, value: str) -> str:
        """``x/2 * (1 + erf(x / sqrt(2)))``."""
        if self.opset >= 20:
            return self.node("Gelu", value)
        numbers = {"gelu_root": math.sqrt(0.5), "gelu_one": 1.0, "gelu_half": 0.5}
        present = {tensor.name for tensor in self.initializers}
        for name, number in numbers.items():
            if name not in present:
                self.constant(name, np.float32(number))
        root, one, half = numbers
        erf = self.node("Erf", self.node("Mul", value, root))
        return self.node("Mul", self.node("Mul", value, half), self.node("Add", erf, one))

    def model(self, shape: Sequence[int | str]) -> onnx.ModelProto:
        """Finish the model: the last node's output is its output ``logits``."""
        self.nodes[-1].output[0] = "logits"
        output = helper.make_tensor_value_info("logits", TensorProto.FLOAT, shape)
        graph = helper.make_graph(self.nodes, self.name, self.inputs, [output], self.initializers)
        imports = [helper.make_opsetid("", self.opset)]
        # IR 8 came with opset 18 and the oldest runtimes read it; later opsets need a later version.
        ir = max(_DEFAULT_IR, helper.find_min_ir_version_for(imports))
        return helper.make_model(graph, opset_imports=imports, ir_version=ir, producer_name="onnxtrain")


__dir__ = public_names(__name__)
