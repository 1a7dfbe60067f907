"""Forms of sparsity: blocks, n of m weights, allocations, whichever way round a file stores a weight."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxtrain
from onnxtrain.cli import main
from onnxtrain.errors import OnnxTrainError, OptionError, TrainingHint
from onnxtrain.operators import SSGD, Adam
from onnxtrain.parameters.layouts import Layout, product_layouts
from onnxtrain.plugins.pruning.thresholds import Form, magnitude_cut
from sentences import raises_sentence, warns_sentence

X, Y = onnxtrain.examples.points(120)
GEMM = Layout((8, 6), (0,), (1,))
CONVOLUTION = Layout((8, 6, 3, 3), (0,), (2, 3, 1), uses=16)


def model_of(*nodes, inputs, outputs, **weights):
    """A model of nodes with weights drawn at random, by their shapes."""
    random = np.random.default_rng(0)
    arrays = {name: random.normal(size=shape).astype(np.float32) for name, shape in weights.items()}
    graph = helper.make_graph(
        nodes,
        "layers",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, inputs)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, outputs)],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def node(operator, *inputs, to="y", **attributes):
    return helper.make_node(operator, list(inputs), [to], **attributes)


LAYERS = {
    "MatMul": (model_of(node("MatMul", "x", "w"), inputs=["N", 4], outputs=["N", 6], w=(4, 6)), (1,), (0,), 1),
    "MatMul of a sequence": (
        model_of(node("MatMul", "x", "w"), inputs=["N", 5, 4], outputs=["N", 5, 6], w=(4, 6)),
        (1,),
        (0,),
        5,
    ),
    "Gemm": (model_of(node("Gemm", "x", "w"), inputs=["N", 4], outputs=["N", 6], w=(4, 6)), (1,), (0,), 1),
    "Gemm transB": (
        model_of(node("Gemm", "x", "w", transB=1), inputs=["N", 4], outputs=["N", 6], w=(6, 4)),
        (0,),
        (1,),
        1,
    ),
    "transposed before": (
        model_of(
            node("Transpose", "w", to="t", perm=[1, 0]),
            node("MatMul", "x", "t"),
            inputs=["N", 4],
            outputs=["N", 6],
            w=(6, 4),
        ),
        (0,),
        (1,),
        1,
    ),
    "Conv": (
        model_of(node("Conv", "x", "w"), inputs=["N", 4, 8, 8], outputs=["N", 6, 6, 6], w=(6, 4, 3, 3)),
        (0,),
        (2, 3, 1),
        36,
    ),
    "ConvTranspose": (
        model_of(node("ConvTranspose", "x", "w"), inputs=["N", 4, 5, 5], outputs=["N", 6, 7, 7], w=(4, 6, 3, 3)),
        (1,),
        (2, 3, 0),
        25,
    ),
    "Einsum": (
        model_of(
            node("Einsum", "x", "w", equation="nsi,hid->nshd"),
            inputs=["N", 5, 4],
            outputs=["N", 5, 2, 3],
            w=(2, 4, 3),
        ),
        (0, 2),
        (1,),
        5,
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_outputs_and_inputs_of_a_stored_weight(name):
    model, outputs, inputs, uses = LAYERS[name]
    trainer = onnxtrain.Trainer(model, loss="mean_squared_error")
    found = product_layouts(trainer.objective.model, ["w"])["w"]
    assert (found.outputs, found.inputs, found.uses) == (outputs, inputs, uses)


def test_rows_and_back():
    array = np.arange(8 * 6 * 9).reshape(CONVOLUTION.shape)
    rows = CONVOLUTION.rows(array)
    assert rows.shape == (8, 54)
    assert rows[1, :6].tolist() == array[1, :, 0, 0].tolist()  # the channels at one position of the kernel
    np.testing.assert_array_equal(CONVOLUTION.stored(rows), array)


def test_a_weight_whose_reader_is_not_known_is_refused():
    model = model_of(
        node("Add", "x", "w", to="s"), node("MatMul", "s", "v"), inputs=[3, 4], outputs=[3, 2], w=(3, 4), v=(4, 2)
    )
    with raises_sentence("layout_unknown", what="w", got=(3, 4), readers="Add"):
        onnxtrain.prune(
            model,
            (np.ones((3, 4), np.float32), np.ones((3, 2), np.float32)),
            loss="mean_squared_error",
            train="*",
            tensors="w",
            sparsity=0.5,
            block=(2, 1),
        )


@pytest.mark.parametrize("allocation", ["uniform", "global", "flops"])
@pytest.mark.parametrize("block", [(4, 1), (1, 4), (3, 2), (16, 1), (1, 1 << 20)])
def test_whole_blocks_of_the_largest_norm_remain(block, allocation):
    random = np.random.default_rng(1)
    weights = {"gemm": random.normal(size=GEMM.shape), "conv": random.normal(size=CONVOLUTION.shape)}
    layouts = {"gemm": GEMM, "conv": CONVOLUTION}
    cut = magnitude_cut(weights, 0.5, Form(block, allocation=allocation, layouts=layouts))
    kept, gone = {name: [] for name in weights}, {name: [] for name in weights}
    for name, layout in layouts.items():
        sizes = layout.block(*block)
        for corner in itertools.product(*(range(0, size, n) for size, n in zip(layout.shape, sizes, strict=True))):
            part = tuple(slice(start, start + n) for start, n in zip(corner, sizes, strict=True))
            assert len(np.unique(cut.masks[name][part])) == 1
            cost = layout.uses**0.25 if allocation == "flops" else 1.0
            score = np.sqrt(np.mean(weights[name][part] ** 2)) / cost
            (kept if cut.masks[name][part].all() else gone)[name].append(score)
    groups = [list(weights)] if allocation != "uniform" else [[name] for name in weights]
    for names in groups:
        left, removed = ([score for name in names for score in scores[name]] for scores in (kept, gone))
        assert left
        assert min(left) >= max(removed)
        size = sum(weights[name].size for name in names)
        largest = max(np.prod(layouts[name].block(*block)) for name in names)
        assert size / 2 - largest <= sum(np.count_nonzero(cut.masks[name]) for name in names) <= size / 2


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (1, 2), (4, 8)])
def test_n_of_m_inputs_remain(n, m):
    random = np.random.default_rng(2)
    weights = {"gemm": random.normal(size=GEMM.shape), "conv": random.normal(size=CONVOLUTION.shape)}
    layouts = {"gemm": GEMM, "conv": CONVOLUTION}
    cut = magnitude_cut(weights, 1 - n / m, Form(n_m=(n, m), layouts=layouts))
    for name, layout in layouts.items():
        rows, mask = np.abs(layout.rows(weights[name])), layout.rows(cut.masks[name])
        for row, start in itertools.product(range(len(rows)), range(0, rows.shape[1], m)):
            values, kept = rows[row, start : start + m], mask[row, start : start + m]
            assert kept.sum() == min(n, len(values))
            assert values[kept].min() >= max(values[~kept], default=0.0)


def blocks_of(mask, outputs):
    """True where all weights of a block of outputs [outputs, inputs] are kept alike."""
    height = mask.shape[0] // outputs * outputs
    return (
        mask[:height].reshape(-1, outputs, mask.shape[1]).any(axis=1)
        == mask[:height].reshape(-1, outputs, mask.shape[1]).all(axis=1)
    ).all()


@pytest.mark.parametrize("optimizer", [SSGD(0.05, alpha=0.9), Adam(0.01)], ids=["ssgd", "adam"])
@pytest.mark.parametrize("method", ["ssgd", "magnitude", "random"])
def test_prune_by_blocks(method, optimizer):
    result = onnxtrain.prune(
        onnxtrain.examples.mlp((4, 32, 3)),
        (X, Y),
        loss="cross_entropy",
        method=method,
        optimizer=optimizer,
        sparsity=0.7,
        block=(4, 1),
        allocation="uniform",
        epochs=4,
        fine_tune_epochs=2,
    )
    assert 0.65 < result.sparsity < 0.75
    assert blocks_of(result.values["layer1.weight"] != 0, 4)
    assert ("block=(4, 1)" in result.optimizer) == (method == "ssgd")
    assert "blocks of 4 outputs and 1 inputs" in result.text()
    assert result.as_dict()["block"] == [4, 1]


PROMOTING = {
    "ssgd": SSGD(0.5, block=(4, 1)),
    "momentum": onnxtrain.Momentum(0.5, sparsity=onnxtrain.Sparsity(block=(4, 1))),
}


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("rule", PROMOTING)
@pytest.mark.parametrize("name", ["MatMul", "Gemm transB", "Conv", "ConvTranspose"])
def test_a_step_scales_the_weights_of_a_block_alike(name, rule, kernels):
    """By a scale that grows with the mean square of four outputs at one input, and averages 1."""
    model, outputs, _, _ = LAYERS[name]
    x = np.random.default_rng(3).normal(
        size=(5, *[d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim][1:])
    )
    y = np.zeros((5, *[d.dim_value for d in model.graph.output[0].type.tensor_type.shape.dim][1:]), np.float32)
    steps = {}
    for optimizer in (PROMOTING[rule], PROMOTING[rule].plain()):
        trainer = onnxtrain.Trainer(
            model, loss="mean_squared_error", optimizer=optimizer, runtime=onnxtrain.RuntimeOptions(kernels=kernels)
        )
        before = np.array(trainer.parameters["w"])
        trainer.train_step(x.astype(np.float32), y)
        steps[optimizer] = np.array(trainer.parameters["w"]) - before
    scale = np.moveaxis(steps[PROMOTING[rule]] / steps[PROMOTING[rule].plain()], outputs[0], 0)
    squares = np.moveaxis(before, outputs[0], 0).astype(float) ** 2
    for start in range(0, len(squares), 4):
        squares[start : start + 4] = squares[start : start + 4].mean(axis=0)
    wanted = (squares + 0.01) / np.mean(squares + 0.01)
    np.testing.assert_allclose(scale, wanted, rtol=2e-3)


def test_a_checkpoint_knows_its_blocks(tmp_path):
    model = onnxtrain.examples.mlp((4, 32, 3))
    options = {"epochs": 1, "progress": False, "checkpoint": tmp_path / "kept"}
    onnxtrain.Trainer(model, loss="cross_entropy", optimizer="ssgd(lr=0.05, block=(4, 1))").fit(X, Y, **options)
    with pytest.raises(OnnxTrainError, match="block"):
        onnxtrain.Trainer(model, loss="cross_entropy", optimizer="ssgd(lr=0.05)").fit(
            X, Y, **{**options, "epochs": 2}, resume=True
        )


def test_two_of_four():
    result = onnxtrain.prune(
        onnxtrain.examples.mlp((4, 32, 3)), (X, Y), loss="cross_entropy", n_m=(2, 4), epochs=3, fine_tune_epochs=2
    )
    assert result.sparsity == 0.5
    assert ((result.values["layer1.weight"] != 0).sum(axis=1) == 2).all()
    assert [point.sparsity for point in result.points] == [0.25, 0.5, 0.5]
    assert "2 of 4 weights" in result.text()


def test_a_search_finds_blocks():
    result = onnxtrain.prune(
        onnxtrain.examples.mlp((4, 32, 3)),
        (X, Y),
        loss="cross_entropy",
        validation=0.25,
        accuracy_drop=0.1,
        block=(4, 1),
        epochs=5,
        fine_tune_epochs=0,
    )
    assert result.sparsity > 0.1
    assert blocks_of(result.values["layer1.weight"] != 0, 4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"block": 4},
            r"prune: block is 4; it needs two integers of at least 1, the outputs and the inputs of a block",
        ),
        ({"block": (0, 1)}, r"block is \(0, 1\)"),
        ({"block": (4, 1), "n_m": (2, 4)}, r"n_m=\(2, 4\) and block=\(4, 1\) are two forms of sparsity; give one"),
        ({"n_m": (4, 4)}, r"n_m is \(4, 4\); it needs n of at least 1 and a larger m"),
        ({"n_m": "2:4"}, r"n_m is '2:4'; it needs two integers, such as \(2, 4\)"),
        (
            {"n_m": (2, 4), "sparsity": 0.9},
            r"n_m=\(2, 4\) removes 50.00% of the weights, so it takes no accuracy_drop=",
        ),
        (
            {"n_m": (2, 4), "allocation": "uniform"},
            "gives every tensor the same sparsity; allocation='uniform' changes",
        ),
        ({"allocation": "layer", "sparsity": 0.5}, "allocation is 'layer'; it needs to be one of 'uniform', 'global'"),
    ],
)
def test_bad_forms(given, message):
    with pytest.raises(OptionError, match=message):
        onnxtrain.prune(onnxtrain.examples.mlp((4, 8, 3)), (X, Y), loss="cross_entropy", **given)


def test_a_bad_block_of_an_optimizer():
    with raises_sentence("sparsity_block", what="block", got=(4,), label="SSGD"):
        SSGD(block=(4,))
    with raises_sentence("sparsity_block", what="block", got=4, label="Sparsity"):
        onnxtrain.Sparsity(block=4)


@pytest.fixture(scope="module")
def pruned():
    """A model that another tool pruned: zeros in its weights, and nothing that says so."""
    return onnxtrain.prune(
        onnxtrain.examples.mlp((4, 32, 3)), (X, Y), loss="cross_entropy", sparsity=0.6, epochs=3, fine_tune_epochs=1
    )


def test_masks_of_a_file_pruned_elsewhere_remain(pruned):
    with warns_sentence("zeros_as_after_pruning"):
        onnxtrain.prune(pruned.model(), (X, Y), loss="cross_entropy", method="magnitude", sparsity=0.7, epochs=1)
    result = onnxtrain.prune(
        pruned.model(), (X, Y), loss="cross_entropy", sparsity=0.7, block=(4, 1), epochs=2, masks="keep"
    )
    for name, mask in pruned.masks.items():
        assert not result.values[name][~mask].any()
    assert result.sparsity > 0.7  # the zeros inside of remaining blocks stay


def test_a_distilled_model_is_pruned_by_blocks(tmp_path):
    teacher = onnxtrain.Trainer(onnxtrain.examples.mlp((4, 32, 3)), loss="cross_entropy", optimizer=Adam(0.01))
    teacher.fit(X, Y, epochs=10, progress=False)
    teacher.save(tmp_path / "teacher.onnx")
    result = onnxtrain.prune(
        teacher.model(),
        (X, Y),
        loss=onnxtrain.losses.Distillation(tmp_path / "teacher.onnx"),
        sparsity=0.5,
        block=(4, 1),
        epochs=4,
        fine_tune_epochs=4,
    )
    assert blocks_of(result.values["layer1.weight"] != 0, 4)
    assert result.metric == "accuracy"
    assert result.accuracy_after > 0.6


def test_adapters_leave_the_zeros_of_the_model_alone(pruned):
    """The base weights are frozen, so that no zero is lost until the adapter is merged, as a hint says."""
    trainer = onnxtrain.Trainer(pruned.model(), loss="cross_entropy", lora=onnxtrain.Lora(rank=2), optimizer="adam")
    trainer.fit(X, Y, epochs=1, progress=False)
    (hint,) = [hint for hint in trainer.hints if "as after pruning" in hint]
    assert "but not with the adapter merged into them; to keep the zeros, save the adapter" in hint
    kept = {
        tensor.name: numpy_helper.to_array(tensor)
        for tensor in onnx.load_from_string(pruned.model().SerializeToString()).graph.initializer
    }
    for name, mask in pruned.masks.items():
        assert not kept[name][~mask].any()


def test_int8_and_sparse_together(tmp_path, pruned):
    onnx.save(pruned.model(), tmp_path / "pruned.onnx")
    quantized = onnxtrain.quantize(tmp_path / "pruned.onnx", (X, Y))
    trainer = onnxtrain.Trainer(quantized, loss="cross_entropy", qat=True, masks="keep", optimizer="adam(lr=1e-3)")
    zeros = {name: np.array(array) == 0 for name, array in trainer.parameters.items() if array.ndim == 2}
    assert sum(map(np.count_nonzero, zeros.values())) >= pruned.size - pruned.non_zeros
    trainer.fit(X, Y, epochs=2, progress=False)
    for name, mask in zeros.items():
        assert not np.array(trainer.parameters[name])[mask].any()


@pytest.mark.parametrize("storage", ["dense", "sparse"])
def test_hints_and_masks_of_a_pruned_file(tmp_path, capsys, pruned, storage):
    """The hint comes wherever a pruned file is trained, and names what keeps its zeros."""
    path = tmp_path / "pruned.onnx"
    pruned.save(path, storage=storage)
    sentence = "training changes them; masks='keep' keeps them zero"
    with pytest.warns(TrainingHint, match=sentence):
        onnxtrain.Trainer(path, loss="cross_entropy")
    sklearn = pytest.importorskip("onnxtrain.sklearn")
    with pytest.warns(TrainingHint, match=sentence):
        sklearn.OnnxClassifier(str(path), epochs=1).fit(X, Y)
    np.savez(tmp_path / "train.npz", input=X, label=Y)
    line = ["fit", str(path), "--data", str(tmp_path / "train.npz"), "--loss", "cross_entropy", "--epochs", "2"]
    assert main([*line, "-o", str(tmp_path / "dense.onnx")]) == 0
    assert "--masks keep keeps them zero" in capsys.readouterr().out
    assert main([*line, "-o", str(tmp_path / "kept.onnx"), "--masks", "keep"]) == 0
    assert "as after pruning" not in capsys.readouterr().out
    counts = {}
    for name in ("dense", "kept"):
        arrays = [numpy_helper.to_array(t) for t in onnx.load(tmp_path / f"{name}.onnx").graph.initializer]
        counts[name] = sum(np.count_nonzero(array) for array in arrays if array.ndim == 2)
    assert counts["kept"] == pruned.non_zeros < counts["dense"]


def test_forms_on_the_command_line(tmp_path, capsys):
    onnx.save(onnxtrain.examples.mlp((4, 32, 3)), tmp_path / "model.onnx")
    np.savez(tmp_path / "train.npz", input=X, label=Y)
    line = ["prune", str(tmp_path / "model.onnx"), "--data", str(tmp_path / "train.npz"), "--loss", "cross_entropy"]
    line += ["--epochs", "1", "-o", str(tmp_path / "out.onnx")]
    assert main([*line, "--sparsity", "0.6", "--block", "4,1", "--allocation", "uniform"]) == 0
    assert "uniform cut of blocks of 4 outputs and 1 inputs" in capsys.readouterr().out
    assert main([*line, "--n-m", "2,4"]) == 0
    assert "2 of 4 weights" in capsys.readouterr().out
    assert main([*line, "--n-m", "2:4"]) == 2
    assert "'2:4' is not a pair of integers such as 4,1" in capsys.readouterr().err
    fit = [
        "fit",
        *line[1:6],
        "--optimizer",
        "ssgd",
        "--block",
        "4,1",
        "--epochs",
        "1",
        "-o",
        str(tmp_path / "fit.onnx"),
    ]
    assert main(fit) == 0
    capsys.readouterr()
