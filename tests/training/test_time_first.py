"""Inputs with time first are proved from the graph, and not cut into batches along time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnxtrain
from onnxtrain.cli import main
from onnxtrain.editing.working_copy.inputs import mark_first_axes
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.graph.value import TIME_FIRST
from onnxtrain.model_file.file import ModelFile
from onnxtrain.training.inference.forward import evaluate, predict
from onnxtrain.training.trainer import Trainer
from sentences import raises_sentence, warns_sentence

T, N, F, H, C = 12, 6, 5, 4, 3
RNG = np.random.default_rng(0)
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
X = RNG.normal(size=(T, N, F)).astype(np.float32)
Y = RNG.integers(0, C, (T, N))
"""A batch with time first."""


def node(operator: str, inputs: str, outputs: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(operator, inputs.split(), outputs.split(), name=f"n_{outputs.split()[0]}", **attributes)


def network(
    before: list[onnx.NodeProto],
    shape: list[int | str | None],
    *,
    cell: str = "LSTM",
    directions: int = 1,
    layers: int = 1,
    tokens: bool = False,
    last: bool = False,
    names: tuple[str | int | None, ...] = ("T", "N"),
) -> onnx.ModelProto:
    """Return a tagger [T, N, C], or a classifier by the last state [N, C]; nodes before compute ``a`` from ``x``."""
    arrays = {
        "zero": np.array([0]), "one": np.array([1]), "rows": np.array([-1, F]), "joined": np.array([0, 0, -1]),
        "table": RNG.normal(size=(20, F)), "u": RNG.normal(size=(F, F)), "scale": np.ones(F),
        "back": np.array([-1, N, F]), "forth": np.array([-1, T, F]), "head": RNG.normal(size=(directions * H, C)),
    }  # fmt: skip
    nodes, source = [*before], "a"
    for layer in range(layers):
        width, options = F if source == "a" else directions * H, {"hidden_size": H}
        arrays |= {
            f"w{layer}": RNG.normal(size=(directions, GATES[cell] * H, width)),
            f"r{layer}": RNG.normal(size=(directions, GATES[cell] * H, H)),
        }
        turned = {"direction": "bidirectional"} if directions == 2 else {}
        outputs = f"y{layer} h{layer}"
        nodes += [
            node(cell, f"{source} w{layer} r{layer}", outputs, **options, **turned),
            node("Transpose", f"y{layer}", f"t{layer}", perm=[0, 2, 1, 3]),
            node("Reshape", f"t{layer} joined", f"z{layer}"),
        ]
        source = f"z{layer}"
    nodes += [node("Gather", f"h{layers - 1} zero_index", "s")] if last else [node("Identity", source, "s")]
    nodes += [node("MatMul", "s head", "y")]
    arrays["zero_index"] = np.array(0)
    used = {name for each in nodes for name in each.input}
    initializers = [
        numpy_helper.from_array(array if array.dtype == np.int64 else array.astype(np.float32), name)
        for name, array in arrays.items()
        if name in used
    ]
    kind = TensorProto.INT64 if tokens else TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", kind, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [*names[last:], C])],
        initializers,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def tagger(**options: Any) -> onnx.ModelProto:
    return network([node("Identity", "x", "a")], ["T", "N", F], **options)


def turned(**options: Any) -> onnx.ModelProto:
    """Return the same tagger for examples first, [N, T, F], with an output [T, N, C]."""
    return network([node("Transpose", "x", "a", perm=[1, 0, 2])], ["N", "T", F], **options)


SPAN = ["T", "N", F]
SWAP = node("Transpose", "x", "b", perm=[1, 0, 2])
TIME_FIRST_FORMS: dict[str, Callable[[], onnx.ModelProto]] = {
    **{cell: lambda cell=cell: tagger(cell=cell) for cell in GATES},  # type: ignore[misc]
    "bidirectional": lambda: tagger(directions=2),
    "stacked": lambda: tagger(layers=2),
    "last state": lambda: tagger(last=True),
    "names alike": lambda: network([node("Identity", "x", "a")], ["N", "N", F], names=("N", "N")),
    "names swapped": lambda: network([node("Identity", "x", "a")], ["N", "T", F], names=("N", "T")),
    "output's names alike": lambda: tagger(names=("N", "N")),
    "no names": lambda: network([node("Identity", "x", "a")], [None, None, F], names=(None, None)),
    "fixed": lambda: network([node("Identity", "x", "a")], [T, N, F], names=(T, N)),
    "equal sizes": lambda: network([node("Identity", "x", "a")], [N, N, F], names=(N, N)),
    "tokens": lambda: network([node("Gather", "table x", "a")], ["T", "N"], tokens=True),
    "cast tokens": lambda: network([node("Cast", "x", "b", to=7), node("Gather", "table b", "a")], ["T", "N"]),
    "linear": lambda: network([node("MatMul", "x u", "b"), node("Tanh", "b", "a")], SPAN),
    "normalized": lambda: network([node("LayerNormalization", "x scale", "a", axis=-1)], SPAN),
    "merged and split": lambda: network(
        [
            node("Reshape", "x rows", "b"),
            node("MatMul", "b u", "c"),
            node("Shape", "x", "sizes"),
            node("Reshape", "c sizes", "a"),
        ],
        ["T", "N", F],
    ),
    "turned twice": lambda: network([SWAP, node("Relu", "b", "c"), node("Transpose", "c", "a", perm=[1, 0, 2])], SPAN),
    "features first": lambda: network([node("Transpose", "x", "a", perm=[0, 2, 1])], ["T", F, "N"]),
    "no examples": lambda: network([node("Unsqueeze", "x one", "a")], ["T", F], names=("T", 1)),
}

BATCH_FIRST_FORMS: dict[str, Callable[[], onnx.ModelProto]] = {
    **{cell: lambda cell=cell: turned(cell=cell) for cell in GATES},  # type: ignore[misc]
    "bidirectional": lambda: turned(directions=2),
    "stacked": lambda: turned(layers=2),
    "last state": lambda: turned(last=True),
    "names of time": lambda: network([node("Transpose", "x", "a", perm=[1, 0, 2])], ["T", "T", F]),
    "no names": lambda: network([node("Transpose", "x", "a", perm=[1, 0, 2])], [None, None, F]),
    "fixed": lambda: network([node("Transpose", "x", "a", perm=[1, 0, 2])], [N, T, F]),
    "one example": lambda: network([node("Reshape", "x back1", "a")], [1, T, F]),
    "tokens": lambda: network([node("Transpose", "x", "b"), node("Gather", "table b", "a")], ["N", "T"], tokens=True),
    "merged and split": lambda: network(
        [node("Reshape", "x rows", "b"), node("MatMul", "b u", "c"), node("Reshape", "c forth", "d"),
         node("Transpose", "d", "a", perm=[1, 0, 2])], ["N", T, F],
    ),
    "viewed as time": lambda: network([node("Reshape", "x back", "a")], [N, T, F]),
    "one step": lambda: network([node("Unsqueeze", "x zero", "a")], ["N", F]),
}  # fmt: skip


def marks(model: onnx.ModelProto) -> list[tuple[str, int | None]]:
    """Return what the graph proves about each input."""
    working = infer_shapes(ModelFile.load(model).training_model())
    mark_first_axes(working.graph)
    return [value.meta[TIME_FIRST] for value in working.graph.inputs if TIME_FIRST in value.meta]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", TIME_FIRST_FORMS)
def test_the_time_of_a_recurrent_node_is_found_at_the_input(form: str) -> None:
    batch = {"features first": 2, "no examples": None}.get(form, 1)
    cell = form if form in GATES else "LSTM"
    assert marks(TIME_FIRST_FORMS[form]()) == [(f"the {cell} 'n_y0'", batch)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", BATCH_FIRST_FORMS)
def test_examples_first_stay_examples(form: str) -> None:
    model = BATCH_FIRST_FORMS[form]()
    if form == "one example":
        model.graph.initializer.append(numpy_helper.from_array(np.array([-1, 1, F]), "back1"))
    assert not marks(model)


def unrolled(kind: str, steps: int = 4) -> onnx.ModelProto:
    """Return a model that picks the elements of the first axis of x [steps, N, F] one by one."""
    weights = {"u": RNG.normal(size=(F, F)), "v": RNG.normal(size=(2 * F, F)), "head": RNG.normal(size=(F, C))}
    nodes, state = [], ""
    if kind == "split":
        nodes.append(node("Split", "x", " ".join(f"s{step}" for step in range(steps)), axis=0, num_outputs=steps))
    for step in range(steps):
        if kind == "split":
            nodes.append(node("Squeeze", f"s{step} zero", f"x{step}"))
        else:
            nodes.append(node("Gather", f"x i{step}", f"x{step}"))
        if not step:
            nodes.append(node("Identity" if kind == "sum" else "MatMul", "x0" if kind == "sum" else "x0 u", "h0"))
            state = "h0"
            continue
        if kind == "joined":  # as in PyTorch's tutorial of names
            nodes += [node("Concat", f"x{step} {state}", f"j{step}", axis=1), node("MatMul", f"j{step} v", f"h{step}")]
            state = f"h{step}"
        elif kind == "sum":
            nodes.append(node("Add", f"x{step} {state}", f"h{step}"))
            state = f"h{step}"
        elif kind != "apart":
            nodes += [
                node("MatMul", f"{state} u", f"m{step}"),
                node("Add", f"x{step} m{step}", f"a{step}"),
                node("Tanh", f"a{step}", f"h{step}"),
            ]
            state = f"h{step}"
    if kind == "apart":
        nodes += [node("MatMul", f"x{step} u", f"h{step}") for step in range(1, steps)]
        nodes += [node("Concat", " ".join(f"h{step}" for step in range(steps)), "c", axis=0), node("Tanh", "c", "d")]
        state = "d"
    nodes.append(node("MatMul", f"{state} head", "y"))
    used = {name for each in nodes for name in each.input}
    arrays = [numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()]
    arrays += [numpy_helper.from_array(np.array(step), f"i{step}") for step in range(steps)]
    arrays.append(numpy_helper.from_array(np.array([0]), "zero"))
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [steps, "N", F])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["M", C])],
        [array for array in arrays if array.name in used],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("kind", "steps", "last"),
    [("gathered", 4, "Add 'n_a3'"), ("split", 4, "Add 'n_a3'"), ("joined", 5, "Concat 'n_j4'")],
)
def test_unrolled_steps_are_a_recurrence(kind: str, steps: int, last: str) -> None:
    model = unrolled(kind, steps)
    assert marks(model) == [(f"the unrolled steps up to the {last}", 1)]
    own = Trainer(model, loss="cross_entropy")
    x, y = RNG.normal(size=(steps, N, F)).astype(np.float32), Y[0]
    with raises_sentence("time_first", what="x", node=last):
        own.fit(x, np.arange(steps) % C, progress=False)
    assert own.fit([(x, y)], progress=False).rows[-1]["loss"] == pytest.approx(
        Trainer(model, loss="cross_entropy").train_step(x, y), rel=1e-5
    )


@pytest.mark.parametrize(("kind", "steps"), [("apart", 4), ("sum", 4), ("gathered", 2)])
def test_other_combinations_of_elements_are_no_recurrence(kind: str, steps: int) -> None:
    assert not marks(unrolled(kind, steps))


def test_each_of_several_inputs_has_its_own_axis() -> None:
    nodes = [
        helper.make_node("LSTM", ["x", "w", "r", "", "lengths"], ["", "h"], hidden_size=H, name="encoder"),
        helper.make_node("Gather", ["h", "first"], ["s"]),
        helper.make_node("MatMul", ["s", "head"], ["y"]),
    ]
    arrays = {"w": RNG.normal(size=(1, 4 * H, F)), "r": RNG.normal(size=(1, 4 * H, H)), "head": np.ones((H, C))}
    graph = helper.make_graph(
        nodes,
        "g",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["T", "N", F]),
            helper.make_tensor_value_info("lengths", TensorProto.INT32, ["N"]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", C])],
        [numpy_helper.from_array(array.astype(np.float32), name) for name, array in arrays.items()]
        + [numpy_helper.from_array(np.array(0), "first")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    assert marks(model) == [("the LSTM 'encoder'", 1)]
    batch = {"x": X, "lengths": np.full(N, T, np.int32)}
    trainer = Trainer(model, loss="cross_entropy")
    with raises_sentence("time_first", what="x", cure="give ready batches, as an iterable or to train_step"):
        trainer.fit((batch, Y[0]), progress=False)
    trainer.fit([(batch, Y[0])], progress=False)
    np.testing.assert_array_equal(trainer.predict([batch]), predict(trainer.model(), [batch]))


READY = "give ready batches, as an iterable or to train_step"
ALL_IN_ONE = f"give ready batches as an iterable, or all in one with batch_size={T}"
ALONE = "train without accumulate, in one process"


class Sequences:
    """A map-style dataset."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return X[:, index], Y[:, index]


def trained(model: onnx.ModelProto, **options: Any) -> Trainer:
    return Trainer(model, loss="cross_entropy(axis=-1)", optimizer="sgd(lr=0.1)", **options)


CUTS: dict[str, tuple[str, Callable[[Trainer], object]]] = {
    "fit": (READY, lambda own: own.fit(X, Y, batch_size=4, progress=False)),
    "fit shuffles": (READY, lambda own: own.fit(X, Y, batch_size=T, progress=False)),
    "fit in order": (ALL_IN_ONE, lambda own: own.fit(X, Y, batch_size=4, shuffle=False, progress=False)),
    "fit on a map": (READY, lambda own: own.fit(Sequences(), progress=False)),
    "fit with a fraction": (
        READY, lambda own: own.fit(X, Y, batch_size=T, shuffle=False, validation=0.25, progress=False)),
    "validation": (
        f"give ready batches as an iterable, or all in one with batch_size={9 * T}",
        lambda own: own.fit([(X, Y)], validation=(np.tile(X, (9, 1, 1)), np.tile(Y, (9, 1))), progress=False)),
    "evaluate": (ALL_IN_ONE, lambda own: own.evaluate(X, Y, batch_size=4)),
    "evaluate a map": (READY, lambda own: own.evaluate(Sequences())),
    "predict": (ALL_IN_ONE, lambda own: own.predict(X, batch_size=4)),
    "predict_proba": (ALL_IN_ONE, lambda own: own.predict_proba(X, batch_size=4)),
    "predict labels": (ALL_IN_ONE, lambda own: own.predict(X, batch_size=4, labels=True)),
    "onnxtrain.evaluate": (
        ALL_IN_ONE, lambda own: evaluate(own.model(), (X, Y), loss="cross_entropy(axis=-1)", batch_size=4)),
    "onnxtrain.predict": (ALL_IN_ONE, lambda own: predict(own.model(), X, batch_size=4)),
    "accumulate": (ALONE, lambda own: own.rebuilt(accumulate=2).train_step(X, Y)),
    "accumulate in fit": (ALONE, lambda own: own.rebuilt(accumulate=2).fit([(X, Y)], progress=False)),
    "quantize": (ALL_IN_ONE, lambda own: onnxtrain.quantize(own.model(), calibration=X, batch_size=4)),
    "features": (READY, lambda own: own.fit(X, Y, batch_size=T, shuffle=False, cache_features=True, progress=False)),
}  # fmt: skip


@pytest.mark.sampled("form")
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("form", ["LSTM", "GRU", "RNN", "bidirectional", "stacked", "no names", "fixed", "linear"])
def test_time_is_not_cut(form: str, cut: str) -> None:
    cure, call = CUTS[cut]
    if (form, cut) == ("fixed", "validation"):
        pytest.skip("the shape is refused")
    own = trained(TIME_FIRST_FORMS[form]())
    cell = form if form in GATES else "LSTM"
    with raises_sentence("time_first", what="x", node=f"the {cell} 'n_y0'", cure=cure):
        call(own)
    assert own.train_step(X, Y) > 0  # stays possible


def test_ranks_do_not_divide_ready_batches() -> None:
    dataset = trained(tagger()).open_data([(X, Y)]).shared(lambda number, rows: slice(0, rows // 2))
    with raises_sentence("time_first", what="x", cure="train in one process"):
        dataset.batches()


def test_nothing_is_written_before_the_refusal(tmp_path: Path) -> None:
    with raises_sentence("time_first"):
        trained(tagger()).fit(X, Y, run=tmp_path / "run", checkpoint=tmp_path / "checkpoints", progress=False)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_predict_refuses_files_longer_than_a_batch(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.tile(X, (30, 1, 1)))
    with raises_sentence("time_first", what="x"):
        predict(tagger(), {"x": np.load(tmp_path / "x.npy", mmap_mode="r")})


@pytest.mark.parametrize("exact", [True, False])
def test_what_is_not_cut_stays_right(exact: bool) -> None:
    model, x = tagger(directions=2), X if exact else X.astype(np.float64)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    whole = session.run(None, {"x": X})[0]
    np.testing.assert_array_equal(predict(model, x), whole)
    np.testing.assert_array_equal(predict(model, {"x": x}, batch_size=T), whole)
    own = trained(model)
    np.testing.assert_array_equal(own.predict(x, batch_size=T), whole)
    logits = whole.astype(np.float64) - whole.max(-1, keepdims=True)
    likely = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = -np.take_along_axis(likely, Y[..., None], -1).mean()
    assert own.evaluate(x, Y)["loss"] == pytest.approx(expected, rel=1e-5)
    assert own.evaluate([(x, Y)])["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("last", [False, True])
def test_ready_batches_are_joined_along_the_examples(last: bool) -> None:
    model = tagger(last=last)
    whole = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": X})[0]
    parts = [{"x": X[:, :2]}, {"x": X[:, 2:]}]
    np.testing.assert_allclose(predict(model, parts), whole, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(trained(model).predict(parts), whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("last", [False, True])
def test_fit_takes_ready_batches_of_any_length(last: bool) -> None:
    batches = [(X, Y), (X[:7, :3], Y[:7, :3])]
    batches = [(x, y[0] if last else y) for x, y in batches]
    model = tagger(last=last)
    stepped, fitted = trained(model), trained(model)
    for batch in batches:
        stepped.train_step(*batch)
    fitted.fit(batches, progress=False)
    for name, array in stepped.parameters.items():
        np.testing.assert_array_equal(fitted.parameters[name], array)


def test_fit_takes_one_batch_in_order() -> None:
    model = tagger()
    stepped, fitted = trained(model), trained(model)
    stepped.train_step(X, Y)
    fitted.fit(X, Y, batch_size=T, shuffle=False, progress=False)
    for name, array in stepped.parameters.items():
        np.testing.assert_array_equal(fitted.parameters[name], array)


@pytest.mark.parametrize("cell", GATES)
def test_examples_first_train_and_predict_as_before(cell: str) -> None:
    x, y = np.ascontiguousarray(X.transpose(1, 0, 2)), Y[0]
    model = turned(cell=cell, last=True)
    own = trained(model)
    whole = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0]
    np.testing.assert_allclose(own.predict(x, batch_size=4), whole, rtol=1e-5, atol=1e-6)
    assert not [text for text in own.hints if "time" in text]
    losses = [own.fit(x, y, batch_size=4, progress=False).rows[-1]["loss"] for _ in range(5)]
    assert losses[-1] < losses[0]
    assert own.evaluate(x, y, batch_size=4)["loss"] == pytest.approx(own.evaluate(x, y)["loss"], rel=1e-5)


@pytest.mark.plugins
def test_scikit_learn_refuses() -> None:
    from onnxtrain.interop.sklearn import OnnxClassifier

    model = network([node("Cast", "x", "b", to=7), node("Gather", "table b", "a")], ["T", "N"], last=True)
    classifier = OnnxClassifier(model, epochs=1)
    with raises_sentence("time_first", what="x"):
        classifier.fit(np.abs(X[..., 0]), np.arange(T) % C)


def test_the_command_line_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, data = tmp_path / "model.onnx", tmp_path / "data.npz"
    onnx.save(tagger(), model)
    np.savez(data, x=X, y=Y)
    tuned = tmp_path / "tuned.onnx"
    fit = ["fit", model, "--data", data, "--loss", "cross_entropy(axis=-1)", "--output", tuned]
    runs = [
        fit,
        ["evaluate", model, "--data", data, "--loss", "cross_entropy(axis=-1)", "--batch-size", "4"],
        ["predict", model, "--data", data, "--target", "y", "--batch-size", "4", "--output", tmp_path / "out.npz"],
    ]
    for arguments in runs:
        assert main([str(argument) for argument in arguments])
        shown = " ".join(capsys.readouterr().err.split())
        assert "the input 'x' is the time of the LSTM 'n_y0', not the axis of examples" in shown
        assert "batch_first=True" in shown
    assert not tuned.exists()


def test_a_hint_names_the_node() -> None:
    (text,) = [text for text in onnxtrain.inspect(tagger()).hints if "time" in text]
    assert "'x' is the time of the LSTM 'n_y0'" in text
    assert "batch_first=True" in text


@pytest.mark.plugins
def test_doctor_has_the_hint() -> None:
    from onnxtrain.plugins.doctor.diagnosis import diagnose

    (text,) = [text for text in onnxtrain.inspect(tagger()).hints if "time" in text]
    assert text in [finding.what for finding in diagnose(tagger())]


def attention(names: list[str | int]) -> onnx.ModelProto:
    """Return a model without a recurrent node, which mixes its second and first axes by attention."""
    nodes = [
        helper.make_node("Transpose", ["x"], ["q"], perm=[1, 0, 2]),
        helper.make_node("Transpose", ["x"], ["k"], perm=[1, 2, 0]),
        helper.make_node("MatMul", ["q", "k"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["p"]),
        helper.make_node("MatMul", ["p", "q"], ["m"]),
        helper.make_node("MatMul", ["m", "w"], ["z"]),
        helper.make_node("Transpose", ["z"], ["y"], perm=[1, 0, 2]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, names)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [*names[:2], C])],
        [numpy_helper.from_array(RNG.normal(size=(F, C)).astype(np.float32), "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("names", ["T N", "seq_len batch", "S B", "time batch_size", "src_len bs", "frames n"])
def test_names_of_axes_are_a_hint(names: str) -> None:
    model = attention([*names.split(), F])
    with warns_sentence("time_first_by_names", what="x"):
        own = trained(model)
    own.fit(X, Y, progress=False)  # a name is no proof


@pytest.mark.sampled(1)
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("names", ["N T", "batch seq", "batch batch", "height width", "nodes n", "B S", "N L", "x y"])
def test_other_names_are_none(names: str) -> None:
    assert not [text for text in trained(attention([*names.split(), F])).hints if "time" in text]
