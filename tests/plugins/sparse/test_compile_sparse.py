"""Compiling pruned models: the same results with the kernels and without them, small files, and layers left dense."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from pruned_models import make_every_layer_sparse, mlp, model_of, pruned, residual_network, run

import onnxtrain
from onnxtrain.errors import ModelError, OptionError
from onnxtrain.plugins.sparse import compile as compiling
from onnxtrain.plugins.sparse.operators import CONV, LINEAR, TRANSPOSE

RNG = np.random.default_rng(1)


@pytest.fixture
def every_layer(monkeypatch):
    make_every_layer_sparse(monkeypatch)


def operators(path):
    return [node.op_type for node in onnx.load(path).graph.node]


@pytest.mark.usefixtures("every_layer")
@pytest.mark.parametrize(("model", "feeds"), [(mlp, (512,)), (residual_network, (64, 28, 28))])
def test_the_same_results_with_kernels_and_without(model, feeds, tmp_path):
    made, path = model(), tmp_path / "fast.onnx"
    onnxtrain.compile_sparse(made, path)
    onnx.checker.check_model(path, full_check=True)
    layers = {LINEAR, CONV}
    assert set(operators(path)) <= layers  # with bias, normalization, residual sums and limits
    for batch in (1, 9):
        x = {"x": RNG.standard_normal((batch, *feeds), np.float32)}
        expected = run(made, x)
        np.testing.assert_allclose(run(path, x), expected, rtol=1e-3, atol=1e-4)
        for threads in (1, 2):
            np.testing.assert_allclose(run(path, x, kernels=True, threads=threads), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("every_layer")
def test_names_of_the_data_go_along(tmp_path):
    """Without them, images would not be normalized, and columns be read by position."""
    onnx.save(mlp(), tmp_path / "pruned.onnx")
    (tmp_path / "pruned.labels.json").write_text('{"labels": ["a", "b"], "mean": [0.5], "std": [0.25]}')
    onnxtrain.compile_sparse(tmp_path / "pruned.onnx", tmp_path / "fast.onnx")
    assert json.loads((tmp_path / "fast.labels.json").read_text())["std"] == [0.25]
    onnxtrain.compile_sparse(mlp(), tmp_path / "fast.onnx")  # another model of this name
    assert not (tmp_path / "fast.labels.json").exists()


@pytest.mark.usefixtures("every_layer")
def test_a_file_needs_neither_our_library_nor_our_package(tmp_path):
    path = tmp_path / "fast.onnx"
    onnxtrain.compile_sparse(mlp(), path)
    np.save(tmp_path / "x.npy", RNG.standard_normal((3, 512), np.float32))
    program = (
        "import sys, numpy, onnxruntime\n"
        "session = onnxruntime.InferenceSession(sys.argv[1], providers=['CPUExecutionProvider'])\n"
        "numpy.save(sys.argv[3], session.run(None, {'x': numpy.load(sys.argv[2])})[0])\n"
        "assert not any(name.startswith('onnxtrain') for name in sys.modules)\n"
    )
    names = [str(tmp_path / name) for name in ("fast.onnx", "x.npy", "y.npy")]
    subprocess.run([sys.executable, "-c", program, *names], check=True)
    expected = run(mlp(), {"x": np.load(tmp_path / "x.npy")})
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("every_layer")
def test_without_the_library_one_dense_product_is_left(tmp_path):
    import onnxruntime

    path = tmp_path / "fast.onnx"
    onnxtrain.compile_sparse(mlp(), path)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    left = operators(tmp_path / "optimized.onnx")
    assert sum(name in ("MatMul", "Gemm", "FusedMatMul", "FusedGemm") for name in left) == 2
    assert not {"ScatterND", "CumSum", "Cast", "Transpose", "ConstantOfShape", "Slice", "Concat"} & set(left)


@pytest.mark.usefixtures("every_layer")
@pytest.mark.parametrize(("zeros", "share"), [(0.9, 0.16), (0.98, 0.05)])
def test_the_size_of_the_file(zeros, share, tmp_path):
    made, path = mlp(zeros), tmp_path / "fast.onnx"
    onnxtrain.compile_sparse(made, path)
    assert path.stat().st_size < share * made.ByteSize()


def test_layers_that_are_not_faster_stay_dense(monkeypatch, tmp_path):
    monkeypatch.setattr(compiling, "_SECONDS", 0.0)
    monkeypatch.setattr(compiling, "_WORTH_IT", 1e9)
    monkeypatch.setattr(compiling, "_DOUBT", 1.0)
    made, path = mlp(0.9), tmp_path / "fast.onnx"
    result = onnxtrain.compile_sparse(made, path)
    assert [layer.compiled for layer in result.layers] == [False, False]
    assert all(layer.speedup is not None for layer in result.layers)
    assert result.speedup == 1.0
    assert operators(path) == [node.op_type for node in made.graph.node]
    monkeypatch.setattr(compiling, "_WORTH_IT", 0.0)
    monkeypatch.setattr(compiling, "_WHOLE", 1e9)  # nor a model that is not
    assert not any(layer.compiled for layer in onnxtrain.compile_sparse(made, path).layers)
    assert operators(path) == [node.op_type for node in made.graph.node]


def test_dense_layers_are_not_timed(monkeypatch, tmp_path):
    monkeypatch.setattr(compiling, "_times", None)
    made = mlp(zeros=0.1)
    result = onnxtrain.compile_sparse(made, tmp_path / "fast.onnx")
    assert [(layer.operator, layer.speedup) for layer in result.layers] == [("MatMul", None), ("Gemm", None)]
    assert result.layers[0].sparsity == pytest.approx(0.1, abs=0.01)


@pytest.mark.parametrize(
    ("zeros", "tried"), [((0.58, 1), False), ((0.62, 1), True), ((0.18, 4), False), ((0.22, 4), True), ("2:4", False)]
)
def test_how_many_zeros_are_enough_to_be_timed(zeros, tried, monkeypatch, tmp_path):
    monkeypatch.setattr(compiling, "_times", lambda *_: (0.5, 1.0))
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((512, 512)).astype(np.float32)
    if zeros == "2:4":
        weight *= (np.arange(512) + rng.integers(0, 4, (512, 1))) % 4 < 2
    else:
        weight = pruned(rng, (512, 512), *zeros)
    made = model_of("m (float[N, 512] x) => (float[N, 512] y) { y = Gemm<transB = 1>(x, w) }", w=weight)
    (layer,) = onnxtrain.compile_sparse(made, tmp_path / "fast.onnx").layers
    assert (layer.speedup is not None, layer.compiled) == (tried, False)


@pytest.mark.parametrize(
    ("in_the_model", "compiled"),
    [
        ([(1.0, 1.0), (1.0, 1.0)], [True, False]),
        ([(1.0, 0.9), (1.0, 0.99)], [False, False]),
        ([(1.0, 1.1), (1.0, 0.9)], [True, True]),
    ],
)
def test_doubtful_layers_are_decided_in_the_whole_model(in_the_model, compiled, monkeypatch, tmp_path):
    alone, transposed, whole = [(1.0, 0.8), (0.9, 0.9)], [(1.0, 1.0)], [(2.0, 1.0)]
    answers = iter([*alone, *in_the_model, *(transposed if all(compiled) else []), *whole])
    monkeypatch.setattr(compiling, "_times", lambda *_: next(answers))
    result = onnxtrain.compile_sparse(mlp(0.9), tmp_path / "fast.onnx")
    assert [layer.compiled for layer in result.layers] == compiled
    assert result.speedup == (2.0 if any(compiled) else 1.0)


def test_layers_in_no_doubt_are_not_tried_again(monkeypatch, tmp_path):
    answers = iter([(1.0, 0.5), (1.0, 2.0), (2.0, 1.0)])
    monkeypatch.setattr(compiling, "_times", lambda *_: next(answers))
    result = onnxtrain.compile_sparse(mlp(), tmp_path / "fast.onnx")
    assert [(layer.speedup, layer.compiled) for layer in result.layers] == [(2.0, True), (0.5, False)]


@pytest.mark.thorough  # it takes timings
def test_a_very_sparse_model_is_faster(tmp_path):
    result = onnxtrain.compile_sparse(mlp(0.98, 1024), tmp_path / "fast.onnx", sizes={"N": 32})
    assert all(layer.compiled for layer in result.layers)
    assert result.speedup > 1.5


W = pruned(np.random.default_rng(2), (64, 64), 0.95)


@pytest.mark.usefixtures("every_layer")
@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("a = MatMul(x, w) y = Add(a, a)", [LINEAR, "Add"]),
        ("a = MatMul(x, w) b = Relu(a) y = Add(a, b)", [LINEAR, "Relu", "Add"]),
        ("a = MatMul(x, w) b = Add(a, scalar) y = Relu(b)", [LINEAR]),
        ("a = MatMul(x, w) b = MatMul(x, w) y = Add(a, b)", [TRANSPOSE, LINEAR, LINEAR]),
        ("a = MatMul(x, w) b = MatMul(x, w) c = Add(a, b) y = Relu(c)", [TRANSPOSE, LINEAR, LINEAR]),
        ("a = MatMul(w, x) y = Add(a, x)", ["MatMul", "Add"]),
        ("a = MatMul(x, w) y = Sum(a, w)", [LINEAR, "Sum"]),
        ("y = Gemm<transA = 1>(x, w)", ["Gemm"]),
        ("a = MatMul(x, w) y = Add(a, wide)", [LINEAR, "Add"]),
        ("c = Constant<value = float[1] {2.0}>() a = MatMul(x, w) y = Add(c, a)", [LINEAR]),
    ],
)
def test_which_nodes_are_taken(text, left, tmp_path):
    made = model_of(
        f"f (float[64, 64] x) => (y) {{ {text} }}",
        w=W, scalar=np.array([0.5], np.float32), wide=np.ones((2, 1, 64), np.float32),
    )  # fmt: skip
    made.graph.output[0].type.tensor_type.elem_type = 1
    path = tmp_path / "fast.onnx"
    onnxtrain.compile_sparse(made, path)
    assert operators(path) == left
    x = {"x": RNG.standard_normal((64, 64), np.float32)}
    np.testing.assert_allclose(run(path, x, kernels=True), run(made, x), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(run(path, x), run(made, x), rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("every_layer")
def test_subgraphs_and_functions_stay_as_they_are(tmp_path):
    made = model_of(
        """f (float[64, 64] x, bool c) => (float[64, 64] y) {
          a = MatMul(x, w)
          y = If (c) <then_branch = t () => (float[64, 64] p) { p = MatMul(a, w) },
                      else_branch = e () => (float[64, 64] q) { q = Neg(a) }>
        }""",
        w=W,
    )
    path = tmp_path / "fast.onnx"
    onnxtrain.compile_sparse(made, path)
    assert operators(path) == [LINEAR, "If"]
    for branch in (True, False):
        feeds = {"x": RNG.standard_normal((64, 64), np.float32), "c": np.array(branch)}
        np.testing.assert_allclose(run(path, feeds, kernels=True), run(made, feeds), rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("every_layer")
@pytest.mark.parametrize(("model", "feeds"), [(mlp, (512,)), (residual_network, (64, 28, 28))])
def test_a_compiled_model_is_decided_anew(model, feeds, tmp_path, monkeypatch):
    once, twice, dense = (tmp_path / f"{name}.onnx" for name in ("once", "twice", "dense"))
    first = onnxtrain.compile_sparse(model(), once)
    second = onnxtrain.compile_sparse(once, twice)
    assert [layer.block for layer in first.layers] == [layer.block for layer in second.layers]
    assert operators(twice) == operators(once)
    x = {"x": RNG.standard_normal((2, *feeds), np.float32)}
    np.testing.assert_array_equal(run(once, x, kernels=True), run(twice, x, kernels=True))
    monkeypatch.setattr(compiling, "_WORTH_IT", 1e9)  # a machine on which dense layers are faster
    result = onnxtrain.compile_sparse(once, dense)
    assert not any(layer.compiled for layer in result.layers)
    assert not {LINEAR, CONV} & set(operators(dense))
    assert not onnx.load(dense).functions
    onnx.checker.check_model(dense, full_check=True)
    np.testing.assert_allclose(run(dense, x), run(model(), x), rtol=1e-3, atol=1e-4)


STRINGS = helper.make_tensor("", TensorProto.STRING, [3], [b"a", b"b", b"c"])


@pytest.mark.usefixtures("every_layer")
@pytest.mark.parametrize(
    "changes",
    [
        {"w1.deltas": numpy_helper.from_array(np.full(3, 65535, np.uint16))},
        {"w1.deltas": STRINGS},
        {"w1.values": STRINGS},
        {"bias": STRINGS},
        *({"shape": shape} for shape in ([2], [0, 1, 1], [-1, -1, 1], [2**62, 4, 1], [20_000, 20_000, 1], "text", 3.5)),
        {"lower": "text"},
        {"lower": None},
        {"shape": None},
        {"input": 3},
    ],
    ids=str,
)
def test_damaged_packed_weights_are_refused_when_decided_anew(changes, tmp_path):
    path = tmp_path / "fast.onnx"
    onnxtrain.compile_sparse(mlp(), path)
    made = onnx.load(path)
    node = next(node for node in made.graph.node if node.output[0] == "c")
    for name, value in changes.items():
        if isinstance(value, TensorProto):
            wanted = node.input[3] if name == "bias" else name
            tensor = next(tensor for tensor in made.graph.initializer if tensor.name == wanted)
            tensor.CopyFrom(value)
            tensor.name = wanted
        elif name == "input":
            del node.input[value:]
        else:
            kept = [attribute for attribute in node.attribute if attribute.name != name]
            del node.attribute[:]
            node.attribute.extend(kept + ([] if value is None else [helper.make_attribute(name, value)]))
    with pytest.raises(ModelError):
        onnxtrain.compile_sparse(made, tmp_path / "again.onnx")


@pytest.mark.usefixtures("every_layer")
def test_weights_that_another_node_reads_stay(tmp_path):
    made = model_of("f (float[64, 64] x) => (float[64, 64] y) { a = MatMul(x, w) b = Neg(w) y = Add(a, b) }", w=W)
    onnxtrain.compile_sparse(made, tmp_path / "fast.onnx")
    names = [tensor.name for tensor in onnx.load(tmp_path / "fast.onnx").graph.initializer]
    assert names[:3] == ["w", "w.values", "w.deltas"]


@pytest.mark.parametrize(
    ("model", "sizes", "message"),
    [
        (mlp(), {"M": 3}, r"sizes names 'M', but the inputs have no dynamic dimension of that name; they have: N\."),
        (
            model_of("f (float[N, T, 64] x) => (float[N, T, 64] y) { y = MatMul(x, w) }", w=W),
            {},
            r"Axis 1 of the input 'x' has the dynamic size 'T'; give the size that it has in use",
        ),
        (
            model_of("f (float[N, ?, 64] x) => (float[N, ?, 64] y) { y = MatMul(x, w) }", w=W),
            {},
            r"Axis 1 of the input 'x' has a dynamic size without a name",
        ),
        (mlp(), {"N": 0}, r"The size of 'N' is 0; it needs an integer of at least 1"),
        (mlp(), {"N": -2}, r"The size of 'N' is -2; it needs an integer"),
        (mlp(), {"N": "8"}, r"The size of 'N' is '8'; it needs an integer"),
        (
            model_of("f (string[N] s) => (string[N] y) { y = Identity(s) }"),
            {},
            r"The input 's' has the type object; .* its inputs must be numbers",
        ),
    ],
)
def test_bad_sizes(model, sizes, message, tmp_path):
    with pytest.raises(OptionError, match=message):
        onnxtrain.compile_sparse(model, tmp_path / "fast.onnx", sizes=sizes)
    assert not (tmp_path / "fast.onnx").exists()


def test_bad_files(tmp_path):
    with pytest.raises(ModelError, match=r"missing\.onnx"):
        onnxtrain.compile_sparse(tmp_path / "missing.onnx", tmp_path / "fast.onnx")
    with pytest.raises(ModelError, match=r"nowhere"):
        onnxtrain.compile_sparse(mlp(), tmp_path / "nowhere" / "fast.onnx")


@pytest.mark.usefixtures("every_layer")
def test_the_command(tmp_path, capsys, monkeypatch):
    from onnxtrain.cli import main

    monkeypatch.chdir(tmp_path)
    onnx.save(mlp(), "pruned.onnx")
    assert main(["sparsify", "pruned.onnx", "--static", "N=8", "-o", "fast.onnx"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("sparse\n") + printed.count("sparse ") >= 2
    assert "fast.onnx" in printed
    assert operators("fast.onnx") == [LINEAR, LINEAR]
    onnx.save(onnxtrain.examples.mlp((4, 8, 3)), "dense.onnx")
    assert main(["sparsify", "dense.onnx", "-o", "still.onnx"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert ("No layer has enough zeros to be faster" in printed) == (LINEAR not in operators("still.onnx"))
    assert main(["sparsify", "pruned.onnx", "--static", "M=8", "-o", "fast.onnx"]) == 2
    assert "sizes names 'M'" in capsys.readouterr().err.replace("--static", "sizes")
    weight = numpy_helper.to_array(onnx.load("fast.onnx").graph.initializer[0])
    assert weight.ndim >= 1
