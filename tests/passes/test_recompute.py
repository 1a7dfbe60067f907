"""Values recomputed in the backward pass: the same results, in less memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

import onnxtrain
from onnxtrain.errors import GradientError

CHAIN = ("Tanh", "Sin", "Softplus", "Sigmoid", "Tanh")


def blocks(count: int, width: int, *, static: int | None = None) -> onnx.ModelProto:
    """Return residual blocks of a matmul and a chain of activations."""
    nodes, weights, last = [], [], "x"
    generator = np.random.default_rng(0)
    for index in range(count):
        weight = generator.normal(size=(width, width)).astype(np.float32) / width**0.5
        weights.append(numpy_helper.from_array(weight, f"w{index}"))
        current = f"{index}/product"
        nodes.append(helper.make_node("MatMul", [last, f"w{index}"], [current], name=f"block{index}/product"))
        for place, operator in enumerate(CHAIN):
            source, current = current, f"{index}/{place}"
            nodes.append(helper.make_node(operator, [source], [current], name=f"block{index}/chain{place}"))
        source, current = current, f"{index}/sum"
        nodes.append(helper.make_node("Add", [source, last], [current], name=f"block{index}/sum"))
        last = current
    nodes.append(helper.make_node("ReduceMean", [last], ["y"], keepdims=0))
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [static or "n", width])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [])
    graph = helper.make_graph(nodes, "blocks", [x], [y], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def session(model: onnx.ModelProto, optimized: Path | None = None) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    if optimized is not None:
        options.optimized_model_filepath = str(optimized)
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def count(model: onnx.ModelProto, operator: str) -> int:
    return sum(node.op_type == operator for node in model.graph.node)


@pytest.mark.parametrize("static", [None, 5])
@pytest.mark.parametrize("patterns", ["*/chain*", ["block0/*", "*/product"], ["*/chain1", "*/chain2"], "layers"])
def test_gradients_are_equal_bit_by_bit(patterns, static) -> None:
    model = blocks(3, 8, static=static)
    x = np.random.default_rng(1).normal(size=(5, 8)).astype(np.float32)
    plain, again = onnxtrain.gradient(model), onnxtrain.gradient(model, recompute=patterns)
    assert len(again.graph.node) > len(plain.graph.node)
    onnx.checker.check_model(again, full_check=True)
    for one, other in zip(session(plain).run(None, {"x": x}), session(again).run(None, {"x": x}), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("static", [None, 5])
def test_no_optimizer_merges_the_copies(tmp_path, static) -> None:
    model = onnxtrain.gradient(blocks(3, 8, static=static), recompute="*/chain*")
    session(model, tmp_path / "optimized.onnx")
    optimized = onnx.load(tmp_path / "optimized.onnx")
    # Not those of the last block, which would be recomputed at once: no gradient arrives before.
    for operator, forward, again in (("Sin", 3, 2), ("Softplus", 3, 2), ("Tanh", 6, 4)):
        assert count(model, operator) == forward + again
        assert count(optimized, operator) == forward + again


def test_copies_wait_for_the_gradient() -> None:
    """Check that each copy depends on a result of the backward pass before it."""
    model = onnxtrain.gradient(blocks(3, 8), recompute="*/chain*")
    depends: dict[str, set[str]] = {}
    for node in model.graph.node:
        found = set().union(*({name} | depends.get(name, set()) for name in node.input))
        for name in node.output:
            depends[name] = found
    copies = [node for node in model.graph.node if node.name.startswith("again/block0/")]
    assert len(copies) == len(CHAIN)
    later = [node for node in model.graph.node if node.name.startswith("again/block1/")]
    for node in copies:
        assert any(set(other.output) & depends[node.output[0]] for other in later)


def test_random_numbers_are_drawn_once() -> None:
    model = parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 18]> g (float[64] x) => (float y)'
        '{ ["a"] noise = RandomNormalLike(x) ["b"] noisy = Mul(x, noise) ["c"] wave = Exp(noisy)'
        ' ["d"] limited = Tanh(wave) square = Mul(limited, limited) ["e"] y = ReduceSum<keepdims=0>(square) }'
    )
    again = onnxtrain.gradient(model, xs="x", recompute=["a", "b", "c"])
    assert count(again, "RandomNormalLike") == 1
    assert count(again, "Exp") == 2


def test_training_steps_are_equal_bit_by_bit() -> None:
    losses = []
    x = np.random.default_rng(1).normal(size=(6, 8)).astype(np.float32)
    for patterns in ((), "*/chain*", "layers"):
        trainer = onnxtrain.Trainer(
            blocks(3, 8), loss="output:y", optimizer=onnxtrain.Adam(0.01), recompute=patterns, threads=1
        )
        losses.append([trainer.train_step(x) for _ in range(4)])
    assert losses[0] == losses[1] == losses[2]


MEASURE = """
import re, sys
from pathlib import Path
sys.path.insert(0, {folder!r})
import numpy as np, onnxtrain
from test_recompute import blocks, session

def peak():
    # Not getrusage: what that says begins with the peak of the process that started this one.
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

made = session(onnxtrain.gradient(blocks(8, 128), recompute={patterns!r}))
x = np.ones((4096, 128), np.float32)
before = peak()
made.run(None, {{"x": x}})
print(peak() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak from /proc")
def test_memory_falls() -> None:
    """Keep one of the seven values of each of eight blocks; an activation has 2 MiB."""
    peaks = []
    for patterns in ((), ("*/chain*", "*/product"), "layers"):
        code = MEASURE.format(folder=str(Path(__file__).parent), patterns=patterns)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout))
    assert max(peaks[1:]) < 0.6 * peaks[0]


def named(name):
    """Return two nodes, the second without a name, and their sum."""
    return parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 18]> g (float[4] x) => (float y)'
        f'{{ ["{name}"] wave = Tanh(x) square = Mul(wave, wave) y = ReduceSum<keepdims=0>(square) }}'
    )


@pytest.mark.parametrize("patterns", ["only/*", ["only/product", "*/prod*"], ["?nly/product"], ()])
def test_patterns_that_name_a_node_are_taken(patterns):
    onnxtrain.gradient(named("only/product"), xs="x", recompute=patterns)


@pytest.mark.parametrize("name", ["/model/layers.3/mlp", "layer0.norm1", "h.11", "transformer/block_2/product"])
def test_numbered_layers_are_seen(name):
    onnxtrain.gradient(named(name), xs="x", recompute="layers")


@pytest.mark.parametrize("patterns", ["layer*", ["only/*", "layer*"]])
def test_a_pattern_that_matches_no_node_is_refused(patterns):
    with pytest.raises(GradientError, match=r"recompute='layer\*' matches no named node; the model has .*only/product"):
        onnxtrain.gradient(named("only/product"), xs="x", recompute=patterns)


@pytest.mark.parametrize("name", ["only/product", "players3", "layered"])
def test_layers_without_a_number_are_refused(name):
    with pytest.raises(GradientError, match=rf"no node has a name with a numbered layer.*'{name}'"):
        onnxtrain.gradient(named(name), xs="x", recompute="layers")


def test_a_model_without_names():
    with pytest.raises(GradientError, match=r"matches no named node; the model has none\.$"):
        onnxtrain.gradient(named(""), xs="x", recompute="*")
