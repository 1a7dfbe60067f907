"""A graph network: which of two motifs a graph has, from graphs as PyTorch Geometric has them.

A data set is a list of graphs; a batch is one large graph of several, with the number of its graph for every node. The
inputs of such a model share no first axis: `x` [nodes, features], `edge_index` [2, edges], `batch` [nodes]; the targets
[graphs] are a fourth. So `fit` takes ready batches, and counts graphs. With PyTorch Geometric itself, its `DataLoader`
is the data: `trainer.fit(DataLoader(graphs, batch_size=32), target="y")`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import parser

import onnxtrain

WIDTH = 16


@dataclass
class Graph:
    """A graph in the form of `torch_geometric.data.Data`."""

    x: np.ndarray  # [nodes, features]
    edge_index: np.ndarray  # [2, edges]: from, to
    y: int


def graphs(count: int, seed: int) -> list[Graph]:
    """Return rings of six nodes (class 0) or two triangles (class 1), with one more edge and noise at the nodes."""
    rng, found = np.random.default_rng(seed), []
    rings = [np.arange(6), (np.arange(6) + 1) % 6], [np.arange(6), np.array([1, 2, 0, 4, 5, 3])]
    for label in rng.integers(0, 2, count):
        names = rng.permutation(6)
        edges = names[np.concatenate([rings[label], rng.integers(0, 6, (2, 1))], axis=1)]
        noise = rng.normal(size=(6, 2)).astype(np.float32)
        found.append(Graph(np.eye(6, dtype=np.float32), np.concatenate([edges, edges[::-1]], axis=1), int(label)))
        found[-1].x = np.concatenate([found[-1].x, noise], axis=1)
    return found


def batches(data: Sequence[Graph], size: int) -> Iterator[tuple[dict[str, np.ndarray], np.ndarray]]:
    """Join graphs to batches, as `torch_geometric.loader.DataLoader` does."""
    for start in range(0, len(data), size):
        part = data[start : start + size]
        nodes = [len(graph.x) for graph in part]
        first = np.cumsum([0, *nodes[:-1]])
        inputs = {
            "x": np.concatenate([graph.x for graph in part]),
            "edge_index": np.concatenate(
                [graph.edge_index + at for graph, at in zip(part, first, strict=True)], axis=1
            ),
            "batch": np.repeat(np.arange(len(part)), nodes),
        }
        yield inputs, np.array([graph.y for graph in part])


def model() -> onnx.ModelProto:
    """Return three layers in which nodes add up what their neighbours say, the sums of the nodes, and two scores.

    `torch.onnx.export` writes such nodes for `index_add`, `scatter_add` and PyTorch Geometric's layers.
    """
    layers, last = "", "x"
    for number in (1, 2, 3):
        layers += f"""
        h{number} = MatMul({last}, w{number})
        said{number} = Gather(h{number}, source)
        size{number} = Shape(h{number})
        zeros{number} = ConstantOfShape(size{number})
        heard{number} = ScatterND<reduction = "add">(zeros{number}, places, said{number})
        own{number} = MatMul({last}, u{number})
        sum{number} = Add(own{number}, heard{number})
        n{number} = Relu(sum{number})"""
        last = f"n{number}"
    text = f"""<ir_version: 8, opset_import: ["": 18]>
    graph_network (float[nodes, 8] x, int64[2, edges] edge_index, int64[nodes] batch) => (float[graphs, 2] scores)
    <int64 zero = {{0}}, int64 one = {{1}}, int64[1] end = {{-1}}, int64[1] width = {{{WIDTH}}}> {{
        source = Gather(edge_index, zero)
        target = Gather(edge_index, one)
        places = Unsqueeze(target, end) {layers}
        largest = ReduceMax<keepdims = 1>(batch)
        count = Add(largest, one)
        shape = Concat<axis = 0>(count, width)
        empty = ConstantOfShape(shape)
        rows = Unsqueeze(batch, end)
        pooled = ScatterND<reduction = "add">(empty, rows, n3)
        scores = MatMul(pooled, head)
    }}"""
    made, rng = parser.parse_model(text), np.random.default_rng(0)
    sizes = {"head": (WIDTH, 2)}
    for number, width in ((1, 8), (2, WIDTH), (3, WIDTH)):
        sizes |= {f"w{number}": (width, WIDTH), f"u{number}": (width, WIDTH)}
    for name, size in sizes.items():
        values = rng.normal(0, (2 * size[0]) ** -0.5, size).astype(np.float32)
        made.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    return made


def main(folder: Path) -> float:
    """Train on 600 graphs, write `graph_network.onnx`, and return the accuracy on 200 new ones."""
    trainer = onnxtrain.Trainer(model(), loss="cross_entropy", optimizer="adam(lr=5e-3)")
    train, new = graphs(600, seed=0), list(batches(graphs(200, seed=1), 50))
    trainer.fit(list(batches(train, 20)), validation=new, metrics="accuracy", epochs=40, progress=False)
    trainer.save(folder / "graph_network.onnx")
    return trainer.evaluate(new, metrics="accuracy")["accuracy"]


if __name__ == "__main__":
    print(main(Path.cwd()))
