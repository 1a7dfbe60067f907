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
from peak_memory import PEAK
from sentences import raises_sentence
from zoo.decoder import batch, decoder
from zoo.language_model import language_model

FOLDERS = [str(folder) for folder in Path(__file__).parents[:2]]
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


MEASURE = (
    PEAK
    + """
import sys
for folder in {folders!r}:
    sys.path.insert(0, folder)
import numpy as np, onnxtrain
from test_recompute import blocks, session

made = session(onnxtrain.gradient(blocks(8, 128), recompute={patterns!r}))
x = np.ones((4096, 128), np.float32)
before = peak()
made.run(None, {{"x": x}})
print(peak() - before)
"""
)


@pytest.mark.thorough
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak from /proc")
def test_memory_falls() -> None:
    """Keep one of the seven values of each of eight blocks; an activation has 2 MiB."""
    peaks = []
    for patterns in ((), ("*/chain*", "*/product"), "layers"):
        code = MEASURE.format(folders=FOLDERS, patterns=patterns)
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
    with raises_sentence("no_match_of_node", pattern="'layer*'", names="only/product."):
        onnxtrain.gradient(named("only/product"), xs="x", recompute=patterns)


@pytest.mark.parametrize("name", ["only/product", "players3", "layered"])
def test_layers_without_a_number_are_refused(name):
    with raises_sentence("no_numbered_layer", what="recompute", got=[name]):
        onnxtrain.gradient(named(name), xs="x", recompute="layers")


def test_a_model_without_names():
    with raises_sentence("no_match_of_node", names="none."):
        onnxtrain.gradient(named(""), xs="x", recompute="*")


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
TRAINED = {
    "nothing but adapters of attention": {"lora": onnxtrain.Lora(rank=2, targets=ATTENTION)},
    "adapters of all": {"lora": onnxtrain.Lora(rank=2, targets=ALL)},
    "adapters with dropout": {"lora": onnxtrain.Lora(rank=2, targets=ALL, dropout=0.3)},
    "DoRA": {"lora": onnxtrain.Lora(rank=2, targets=ALL, dora=True)},
    "weights": {},
    "norms": {"train": "*norm.weight"},
    "adapters and norms": {"lora": onnxtrain.Lora(rank=2, targets=ALL), "train": "*norm.weight"},
}


def steps(proto: onnx.ModelProto, recompute: str | tuple[str, ...], kernels: bool, **settings) -> list[float]:
    trainer = onnxtrain.Trainer(
        proto,
        loss="softmax_cross_entropy(axis=-1)",
        optimizer="adamw(lr=1e-2)",
        recompute=recompute,
        runtime=onnxtrain.RuntimeOptions(kernels=kernels, threads=1),
        seed=3,
        **settings,
    )
    tokens, labels = batch()
    inputs = {"input_ids": tokens}
    if any(value.name == "attention_mask" for value in proto.graph.input):
        inputs["attention_mask"] = np.ones_like(tokens)
    return [trainer.train_step(inputs, labels) for _ in range(3)]


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("trained", TRAINED)
def test_layers_change_no_loss(trained, kernels) -> None:
    proto = decoder(2)
    one, other = (steps(proto, recompute, kernels, **TRAINED[trained]) for recompute in ((), "layers"))
    np.testing.assert_allclose(one, other, rtol=2e-6, atol=0)


@pytest.mark.parametrize("kernels", [True, False])
def test_layers_of_genai_change_no_loss(kernels) -> None:
    one, other = (steps(language_model(), recompute, kernels) for recompute in ((), "layers"))
    np.testing.assert_allclose(one, other, rtol=2e-6, atol=0)


MEASURE_LAYERS = (
    PEAK
    + """
import sys
for folder in {folders!r}:
    sys.path.insert(0, folder)
import numpy as np, onnxtrain
from zoo import decoder as module
module.VOCABULARY, module.HIDDEN, module.INNER = 32, 128, 384
from test_recompute import TRAINED
trainer = onnxtrain.Trainer(module.decoder(8), loss="softmax_cross_entropy(axis=-1)", optimizer="sgd(lr=1e-3)",
    recompute={recompute!r}, runtime=onnxtrain.RuntimeOptions(kernels={kernels!r}, threads=1), **TRAINED[{trained!r}])
tokens, labels = module.batch(64, 32)
trainer.train_step(tokens[:1], labels[:1])
before = peak()
print(trainer.train_step(tokens, labels), peak() - before)
"""
)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak from /proc")
@pytest.mark.parametrize(
    ("trained", "kernels"),
    [
        ("adapters of all", True),
        pytest.param("adapters of all", False, marks=pytest.mark.thorough),
        pytest.param("weights", True, marks=pytest.mark.thorough),
        pytest.param("weights", False, marks=[pytest.mark.thorough, pytest.mark.sweep]),
        pytest.param("adapters and norms", True, marks=[pytest.mark.thorough, pytest.mark.sweep]),
        pytest.param("DoRA", True, marks=[pytest.mark.thorough, pytest.mark.sweep]),
    ],
)
def test_of_a_layer_only_its_input_is_kept(trained, kernels) -> None:
    """Compare peaks of eight layers: 2,048 tokens of width 128 are 1 MiB, 384 inner columns 3 MiB."""
    found = []
    for recompute in ((), "layers"):
        code = MEASURE_LAYERS.format(folders=FOLDERS, trained=trained, kernels=kernels, recompute=recompute)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        loss, bytes_ = done.stdout.split()
        found.append((float(loss), int(bytes_) / 2**20))
    (loss, whole), (again, layers) = found
    assert again == pytest.approx(loss, rel=2e-6)
    print(f"{trained}: {whole:.0f} MiB, layers recomputed {layers:.0f}")
    assert layers < 0.45 * whole
