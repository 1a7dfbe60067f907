"""Transformers and a perceptron of the forms study, with the data that needs no file: sentences and a table."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto

from onnxtrain.training.examples import _attention, _Graph

WIDTH, HEADS, BLOCKS = 48, 4, 2
WORDS, LENGTH, TOPICS = 200, 24, 8
COLUMNS, CLASSES = 40, 8

Examples = tuple[np.ndarray, np.ndarray]


def vit(seed: int) -> onnx.ModelProto:
    """A vision transformer: 49 patches of 4 x 4 pixels, two blocks of attention, 48 wide."""
    graph = _Graph("vit", 18, 17, seed)
    image = graph.input("image", ["N", 1, 28, 28])
    weight = graph.weight("patches.weight", (WIDTH, 1, 4, 4), 0.25)
    patches = graph.node("Conv", image, weight, graph.bias("patches.bias", WIDTH), kernel_shape=[4, 4], strides=[4, 4])
    shape = graph.constant("patches.shape", np.array([0, WIDTH, 49], np.int64))
    tokens = graph.node("Transpose", graph.node("Reshape", patches, shape), perm=[0, 2, 1])
    tokens = graph.node("Add", tokens, graph.weight("embeddings.position", (1, 49, WIDTH), 0.02))
    return _classifier(graph, tokens, 10)


def text(seed: int) -> onnx.ModelProto:
    """A text classifier: embeddings of 24 words, two blocks of attention, 48 wide."""
    graph = _Graph("text", 18, 17, seed)
    words = graph.input("words", ["N", LENGTH], TensorProto.INT64)
    tokens = graph.node("Gather", graph.weight("embeddings.word", (WORDS, WIDTH), 0.3), words)
    tokens = graph.node("Add", tokens, graph.weight("embeddings.position", (1, LENGTH, WIDTH), 0.02))
    return _classifier(graph, tokens, TOPICS)


def _classifier(graph: _Graph, value: str, classes: int) -> onnx.ModelProto:
    """Blocks of attention and a perceptron, normalized first, and a layer on the mean of the tokens."""
    bias = graph.constant("no_mask", np.float32(0))
    for block in range(BLOCKS):
        name = f"block{block}"
        attended = _attention(graph, name, graph.layer_norm(f"{name}.norm1", value, WIDTH), bias, WIDTH, HEADS)
        value = graph.node("Add", value, attended)
        wide = graph.project(f"{name}.up", graph.layer_norm(f"{name}.norm2", value, WIDTH), WIDTH, 4 * WIDTH)
        value = graph.node("Add", value, graph.project(f"{name}.down", graph.gelu(wide), 4 * WIDTH, WIDTH))
    axes = graph.constant("tokens", np.array([1], np.int64))
    mean = graph.node("ReduceMean", graph.layer_norm("norm", value, WIDTH), axes, keepdims=0)
    graph.linear("classifier", mean, WIDTH, classes, glorot=True)
    return graph.model(["N", classes])


def sentences(count: int, seed: int) -> Examples:
    """Sentences on eight topics: a third of the words are those of the topic, the others are the same in all."""
    rng, fixed = np.random.default_rng(100 + seed), np.random.default_rng(99)
    common = np.cumsum(fixed.dirichlet(np.full(WORDS, 0.3)))
    own = np.cumsum(fixed.dirichlet(np.full(WORDS, 0.3), TOPICS), axis=-1)
    labels = rng.integers(0, TOPICS, count)
    words = np.empty((count, LENGTH), np.int64)
    for place in range(LENGTH):
        of_topic = rng.random(count) < 1 / 3
        chances = np.where(of_topic[:, None], own[labels], common)
        words[:, place] = np.minimum((rng.random((count, 1)) > chances).sum(axis=1), WORDS - 1)
    return words, labels


def table(count: int, seed: int) -> Examples:
    """Rows of 40 columns: a class is one of two clusters in 20 of them, the others are mixtures and noise."""
    rng, fixed = np.random.default_rng(200 + seed), np.random.default_rng(98)
    centres = fixed.normal(0, 1.1, (CLASSES, 2, 20))
    mixing = fixed.normal(0, 0.3, (20, 10))
    labels = rng.integers(0, CLASSES, count)
    facts = centres[labels, rng.integers(0, 2, count)] + rng.normal(0, 1.5, (count, 20))
    columns = [facts, facts @ mixing, rng.normal(size=(count, COLUMNS - 30))]
    return np.concatenate(columns, axis=1).astype(np.float32), labels
