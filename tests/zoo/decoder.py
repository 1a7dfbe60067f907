"""A small decoder as language models are built: RMS norm, causal attention, a gated feed-forward part, residuals."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

VOCABULARY, HIDDEN, HEADS, INNER = 13, 16, 2, 24


class Graph:
    """Nodes and weights of a model under construction."""

    def __init__(self, seed: int) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.random = np.random.default_rng(seed)

    def add(self, operator: str, *inputs: str, name: str = "", outputs: int = 1, **attributes: object) -> str:
        """One node; returns its first output."""
        made = [f"v{len(self.nodes)}" + (f"_{i}" if i else "") for i in range(outputs)]
        self.nodes.append(helper.make_node(operator, inputs, made, name=name, **attributes))
        return made[0]

    def weight(self, name: str, *shape: int, array: np.ndarray | None = None) -> str:
        """One initializer, by default random."""
        if array is None:
            array = (self.random.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)
        self.weights.append(numpy_helper.from_array(array, name))
        return name

    def linear(self, x: str, name: str, inputs: int, outputs: int) -> str:
        """x W."""
        return self.add("MatMul", x, self.weight(f"{name}.weight", inputs, outputs), name=f"/{name.replace('.', '/')}")

    def norm(self, x: str, name: str) -> str:
        """x / sqrt(mean x²) w."""
        axes = self.weight(f"{name}.axes", array=np.array([-1]))
        epsilon = self.weight(f"{name}.eps", array=np.array(1e-5, np.float32))
        mean = self.add("ReduceMean", self.add("Mul", x, x), axes)
        scaled = self.add("Div", x, self.add("Sqrt", self.add("Add", mean, epsilon)))
        return self.add("Mul", scaled, self.weight(f"{name}.weight", array=np.ones(HIDDEN, np.float32)))


def decoder(layers: int = 2, seed: int = 0, *, packed: bool = False) -> onnx.ModelProto:
    """Logits [batch, tokens, vocabulary] of tokens [batch, tokens].

    Args:
        layers: How many.
        seed: Of the weights.
        packed: True if one linear layer computes queries, keys and values.
    """
    g = Graph(seed)
    x = g.add("Gather", g.weight("model.embed_tokens.weight", VOCABULARY, HIDDEN), "input_ids")
    shape = g.weight("heads", array=np.array([0, 0, HEADS, HIDDEN // HEADS]))
    flat = g.weight("flat", array=np.array([0, 0, HIDDEN]))
    scale = g.weight("root", array=np.array((HIDDEN // HEADS) ** -0.5, np.float32))
    length = g.add("Shape", "input_ids", start=1, end=2)
    square = g.add("Expand", g.weight("one", array=np.array(-1e4, np.float32)), g.add("Concat", length, length, axis=0))
    mask = g.add("Trilu", square, g.weight("first", array=np.array(1)), upper=1)
    for index in range(layers):
        path = f"model.layers.{index}"
        attention = f"{path}.self_attn"
        normed = g.norm(x, f"{path}.input_layernorm")
        if packed:
            whole = g.linear(normed, f"{attention}.qkv_proj", HIDDEN, 3 * HIDDEN)
            first = g.add("Split", whole, axis=-1, num_outputs=3, outputs=3)
            found = [first, f"{first}_1", f"{first}_2"]
        else:
            found = [g.linear(normed, f"{attention}.{part}_proj", HIDDEN, HIDDEN) for part in "qkv"]
        q, k, v = (
            g.add("Transpose", g.add("Reshape", part, shape), perm=perm)
            for part, perm in zip(found, ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]), strict=True)
        )
        scores = g.add("Add", g.add("Mul", g.add("MatMul", q, k), scale), mask)
        mixed = g.add("Transpose", g.add("MatMul", g.add("Softmax", scores), v), perm=[0, 2, 1, 3])
        x = g.add("Add", x, g.linear(g.add("Reshape", mixed, flat), f"{attention}.o_proj", HIDDEN, HIDDEN))
        normed = g.norm(x, f"{path}.post_attention_layernorm")
        gate = g.linear(normed, f"{path}.mlp.gate_proj", HIDDEN, INNER)
        inner = g.add(
            "Mul",
            g.add("Mul", gate, g.add("Sigmoid", gate)),
            g.linear(normed, f"{path}.mlp.up_proj", HIDDEN, INNER),
        )
        x = g.add("Add", x, g.linear(inner, f"{path}.mlp.down_proj", INNER, HIDDEN))
    g.add("MatMul", g.norm(x, "model.norm"), g.weight("lm_head.weight", HIDDEN, VOCABULARY))
    g.nodes[-1].output[0] = "logits"
    graph = helper.make_graph(
        g.nodes,
        "decoder",
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "tokens"])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "tokens", VOCABULARY])],
        g.weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def batch(rows: int = 3, tokens: int = 5, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, and as labels those that follow."""
    drawn = np.random.default_rng(seed).integers(0, VOCABULARY, (rows, tokens + 1))
    return drawn[:, :-1], drawn[:, 1:]


def parsed(text: str) -> onnx.ModelProto:
    """A model in text, in whose names two underscores stand for a dot, which ONNX's parser does not take."""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]> {text}')
    for node in model.graph.node:
        node.name = node.name.replace("__", ".")
        for place, name in enumerate(node.input):
            node.input[place] = name.replace("__", ".")
    for tensor in model.graph.initializer:
        tensor.name = tensor.name.replace("__", ".")
    return model
