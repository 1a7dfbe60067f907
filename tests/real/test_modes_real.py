"""Files in training mode: exports of ``model.train()``, and small imitations."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

import onnxtrain
from onnxtrain.errors import TrainingHint
from onnxtrain.training.inference import forward
from sentences import raises_sentence, warns_sentence

pytestmark = pytest.mark.filterwarnings("ignore::onnxtrain.errors.TrainingHint")

W = np.linspace(0.5, 1.5, 8, dtype=np.float32)
X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(16, 8)).astype(np.float32)

DROPOUTS = {
    "constant node": (
        17,
        "<float[8] w> { t = Constant<value = bool {1}>()  r = Constant<value = float {0.5}>()"
        " d = Dropout(x, r, t)  y = Mul(d, w) }",
    ),
    "initializer": (17, "<float[8] w, float r = {0.5}, bool t = {1}> { d = Dropout(x, r, t)  y = Mul(d, w) }"),
    "behind Identity": (
        17,
        "<float[8] w, float r = {0.5}, bool t = {1}> { u = Identity(t)  d = Dropout(x, r, u)  y = Mul(d, w) }",
    ),
    "fixed seed": (17, "<float[8] w, float r = {0.5}, bool t = {1}> { d = Dropout<seed = 7>(x, r, t)  y = Mul(d, w) }"),
    "default ratio": (17, "<float[8] w, bool t = {1}> { d = Dropout(x, , t)  y = Mul(d, w) }"),
    "computed": (
        17,
        "<float[8] w, float r = {0.5}, int64 zero = {0}> { s = Shape(x)  n = Size(s)  t = Greater(n, zero)"
        " d = Dropout(x, r, t)  y = Mul(d, w) }",
    ),
    "mask that is read": (
        17,
        "<float[8] w, float r = {0.5}, bool t = {1}> { d, m = Dropout(x, r, t)  f = Cast<to = 1>(m)  e = Mul(d, f)"
        " y = Mul(e, w) }",
    ),
    "opset 12": (12, "<float[8] w, float r = {0.5}, bool t = {1}> { d = Dropout(x, r, t)  y = Mul(d, w) }"),
    "opset 10": (10, "<float[8] w> { d = Dropout<ratio = 0.5>(x)  y = Mul(d, w) }"),
    "opset 7": (7, "<float[8] w> { d = Dropout<ratio = 0.5>(x)  y = Mul(d, w) }"),
    "branches of If": (
        17,
        "<float[8] w, float r = {0.5}, bool t = {1}, bool c = {1}> { d = If (c) <"
        " then_branch = a () => (float[N,8] p) { p = Dropout(x, r, t) },"
        " else_branch = b () => (float[N,8] q) { q = Dropout(x, r, t) } >  y = Mul(d, w) }",
    ),
    "body of Loop": (
        17,
        "<float[8] w, float r = {0.5}, bool t = {1}, int64 n = {2}, bool c = {1}> { d = Loop (n, c, x) <"
        " body = b (int64 i, bool go, float[N,8] h) => (bool on, float[N,8] k) { on = Identity(go)"
        " k = Dropout(h, r, t) } >  y = Mul(d, w) }",
    ),
    "function": (
        17,
        "<float[8] w> { d = my.drop(x)  e = my.drop(d)  y = Mul(e, w) }"
        ' <domain: "my", opset_import: ["": 17]> drop (h) => (k) { r = Constant<value = float {0.5}>()'
        " t = Constant<value = bool {1}>()  k = Dropout(h, r, t) }",
    ),
    "function in a function": (
        17,
        "<float[8] w, bool t = {1}> { d = my.outer(x, t)  y = Mul(d, w) }"
        ' <domain: "my", opset_import: ["": 17, "my": 1]> outer (h, t) => (k) { k = my.drop(h, t) }'
        ' <domain: "my", opset_import: ["": 17]> drop (h, t) => (k) { r = Constant<value = float {0.5}>()'
        " k = Dropout(h, r, t) }",
    ),
}
STAYS = (
    "The saved file stays in training mode, for other tools, too; onnxtrain.inference_mode(path) returns it in "
    "inference mode."
)
IN_BODIES = ("branches of If", "body of Loop")


def dropping(form: str) -> onnx.ModelProto:
    opset, text = DROPOUTS[form]
    text = text.replace("float[8] w", "float[8] w = {" + ", ".join(map(str, W)) + "}")
    return parser.parse_model(
        f'<ir_version: 8, opset_import: ["": {opset}, "my": 1]> m (float[N,8] x) => (float[N,8] y) {text}'
    )


def trainer(model: onnx.ModelProto, **options) -> onnxtrain.Trainer:
    return onnxtrain.Trainer(model, loss="mean_squared_error", optimizer=onnxtrain.Momentum(0.1), **options)


def without_weights(model: onnx.ModelProto, names: set[str]) -> bytes:
    for tensor in model.graph.initializer:
        if tensor.name in names:
            tensor.ClearField("float_data")
            tensor.ClearField("raw_data")
    return model.SerializeToString(deterministic=True)


@pytest.mark.parametrize("form", DROPOUTS)
def test_dropout_of_the_file_does_nothing(form, tmp_path):
    first, second = trainer(dropping(form)), trainer(dropping(form))
    np.testing.assert_array_equal(first.predict(X), X * W)
    losses = [first.train_step(X, Y) for _ in range(3)]
    assert losses[0] == pytest.approx(np.mean((X * W - Y) ** 2), rel=1e-5)
    assert losses == [second.train_step(X, Y) for _ in range(3)]
    np.testing.assert_array_equal(first.parameters["w"], second.parameters["w"])
    w = np.array(first.parameters["w"])
    np.testing.assert_array_equal(first.predict(X), X * w)
    assert first.evaluate((X, Y)) == first.evaluate((X, Y)) == second.evaluate((X, Y))
    first.save(tmp_path / "saved.onnx")
    assert without_weights(onnx.load(tmp_path / "saved.onnx"), {"w"}) == without_weights(dropping(form), {"w"})


@pytest.mark.parametrize("form", DROPOUTS)
def test_evaluation_without_a_trainer_is_inference_too(form):
    model = dropping(form)
    np.testing.assert_array_equal(forward.predict(model, X), X * W)
    loss = forward.evaluate(model, (X, Y), loss="mean_squared_error")["loss"]
    assert loss == pytest.approx(np.mean((X * W - Y) ** 2), rel=1e-5)


@pytest.mark.parametrize("form", [form for form in DROPOUTS if form not in IN_BODIES])
def test_dropout_drops_on_request(form):
    def run(seed):
        subject = trainer(dropping(form), dropout=True, seed=seed)
        return [subject.train_step(X, Y) for _ in range(3)], subject

    (losses, subject), (again, _), (other, _) = run(0), run(0), run(1)
    assert losses == again != other
    assert losses[0] != pytest.approx(np.mean((X * W - Y) ** 2), rel=1e-3)
    np.testing.assert_array_equal(subject.predict(X), X * np.array(subject.parameters["w"]))


def test_each_call_of_a_function_drops_by_itself():
    """With one seed, both masks would be equal, and half of the elements would stay instead of a quarter."""
    text = dropping("function")
    text.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 8
    subject = trainer(text, dropout=True)
    ones = np.ones((4096, 8), np.float32)
    loss = subject.train_step(ones, np.zeros_like(ones))
    assert loss == pytest.approx(4 * np.mean(W**2), rel=0.05)  # E (4 m1 m2)² = 16 / 4


@pytest.mark.parametrize("form", IN_BODIES)
def test_dropout_in_bodies_stays_off_with_a_hint(form):
    with warns_sentence("dropout_in_bodies", nodes="Dropout node"):
        subject = trainer(dropping(form), dropout=True)
    assert subject.train_step(X, Y) == pytest.approx(np.mean((X * W - Y) ** 2), rel=1e-5)


def switched() -> onnx.ModelProto:
    """Return a model whose training mode is an input."""
    text = f"""<ir_version: 8, opset_import: ["": 17]> m (float[N,8] x, bool train) => (float[N,8] y)
        <float[8] w = {{{", ".join(map(str, W))}}}, float r = {{0.5}}>
        {{ off = Not(train)  on = Not(off)  d = Dropout(x, r, on)  e = Dropout(d, r, train)  y = Mul(e, w) }}"""
    return parser.parse_model(text)


def test_an_input_for_the_mode_need_not_be_fed(tmp_path):
    subject = trainer(switched())
    assert subject.train_step(X, Y) == pytest.approx(np.mean((X * W - Y) ** 2), rel=1e-5)
    np.testing.assert_array_equal(subject.predict(X), X * np.array(subject.parameters["w"]))
    np.testing.assert_array_equal(forward.predict(switched(), X), X * W)
    subject.train_step({"x": X, "train": np.asarray(True)}, Y)  # and may be
    subject.save(tmp_path / "saved.onnx")
    assert [value.name for value in onnx.load(tmp_path / "saved.onnx").graph.input] == ["x", "train"]
    assert subject.hints == [
        "2 Dropout nodes do nothing; dropout=True lets them drop.",
        "The file lets a value decide whether 2 Dropout nodes drop; training and evaluation here do not ask it.",
    ]
    dropped = trainer(switched(), dropout=True)
    assert dropped.train_step(X, Y) != pytest.approx(np.mean((X * W - Y) ** 2), rel=1e-3)


def test_an_input_for_the_mode_with_other_readers_stays():
    model = switched()
    model.graph.node.append(helper.make_node("Cast", ["train"], ["z"], to=TensorProto.FLOAT))
    model.graph.output.append(helper.make_tensor_value_info("z", 1, []))
    subject = trainer(model, output="y")
    subject.train_step({"x": X, "train": np.asarray(True)}, Y)


def normalizing(opset: int, *, outputs: int = 3, read: bool = False) -> onnx.ModelProto:
    names = ["h", "new_mean", "new_var", "saved_mean", "saved_var"][:outputs]
    mode = {"training_mode": 1} if opset >= 14 else {}
    nodes = [helper.make_node("BatchNormalization", ["x", "s", "b", "m", "v"], names, "norm", momentum=0.7, **mode)]
    infos = [helper.make_tensor_value_info("x", 1, ["N", 8]), helper.make_tensor_value_info("y", 1, ["N", 8])]
    results = infos[1:]
    if read:
        nodes += [helper.make_node("Add", ["h", "new_mean"], ["y"])]
        results.append(helper.make_tensor_value_info("new_var", 1, [8]))
    else:
        nodes += [helper.make_node("Identity", ["h"], ["y"])]
    arrays = {"s": W, "b": W - 1, "m": W / 2, "v": W + 1}
    weights = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "g", infos[:1], results, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


NORMS = [(9, 5), (13, 5), (14, 3), (17, 3), (17, 1)]


@pytest.mark.parametrize(("opset", "outputs"), NORMS)
def test_batch_normalization_of_the_file_is_frozen(opset, outputs, tmp_path):
    model = normalizing(opset, outputs=outputs)
    subject = trainer(model)
    h = (X - W / 2) / np.sqrt(W + 1 + 1e-5) * W + W - 1
    np.testing.assert_allclose(subject.predict(X), h, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(forward.predict(model, X), h, rtol=1e-4, atol=1e-5)
    assert subject.train_step(X, Y) == pytest.approx(np.mean((h - Y) ** 2), rel=1e-4)
    single = trainer(model)
    single.train_step(X[:1], Y[:1])  # one example has no variance
    assert set(subject.parameters) == {"s", "b"}
    assert subject.objective.statistics == {}
    subject.save(tmp_path / "saved.onnx")
    saved = onnx.load(tmp_path / "saved.onnx")
    assert saved.graph.node[0] == model.graph.node[0]
    assert numpy_helper.to_array(saved.graph.initializer[2]).tobytes() == (W / 2).tobytes()


@pytest.mark.parametrize(("opset", "outputs"), NORMS)
def test_batch_normalization_of_the_file_trains_on_request(opset, outputs):
    subject = trainer(normalizing(opset, outputs=outputs), batch_norm="train")
    subject.train_step(X, Y)
    np.testing.assert_allclose(subject.executor.session.state["m"], 0.7 * W / 2 + 0.3 * X.mean(0), rtol=1e-4)


@pytest.mark.parametrize("layer", ["BatchNormalization", "Dropout"])
@pytest.mark.parametrize("trains", [False, True])
def test_a_file_that_stays_in_training_mode_gets_a_warning(layer, trains):
    model = normalizing(17) if layer == "BatchNormalization" else dropping("initializer")
    with warns_sentence("stays_in_training_mode", layer=layer):
        trainer(model, batch_norm="train" if trains and layer == "BatchNormalization" else "frozen", dropout=trains)


def partly(first: int, second: int) -> onnx.ModelProto:
    """Return a model with two batch normalizations in these modes, with linear layers between."""
    text = f"""<ir_version: 8, opset_import: ["": 17]> f (float[N,8] x) => (float[N,8] y)
        <float[8] s1, float[8] b1, float[8] m1, float[8] v1, float[8] s2, float[8] b2, float[8] m2, float[8] v2> {{
        {"h, p, q" if first else "h"} = BatchNormalization<training_mode = {first}>(x, s1, b1, m1, v1)
        z = MatMul(h, w)
        {"y, r, t" if second else "y"} = BatchNormalization<training_mode = {second}>(z, s2, b2, m2, v2) }}"""
    for name, values in {"s": W, "b": W - 1, "m": W / 2, "v": W + 1}.items():
        for number in (1, 2):
            listed = ", ".join(map(str, values))
            text = text.replace(f"float[8] {name}{number}", f"float[8] {name}{number} = {{{listed}}}")
    model = parser.parse_model(text)
    matrix = np.random.default_rng(2).normal(size=(8, 8)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(matrix, "w"))
    return model


@pytest.mark.parametrize(("first", "second"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_each_batch_normalization_trains_in_the_mode_of_the_file(first, second):
    """Only nodes that the file sets to training mode train; if it sets none, all do."""
    some = first != second
    subject = trainer(partly(first, second), batch_norm="train")
    modes = (first, second) if some else (1, 1)
    expected = {f"{kind}{number}" for number, on in enumerate(modes, start=1) if on for kind in "mv"}
    assert set(subject.objective.statistics) == expected

    def normalized(x, on):
        mean, variance = (x.mean(0), x.var(0)) if on else (W / 2, W + 1)
        return (x - mean) / np.sqrt(variance + 1e-5) * W + W - 1

    matrix = numpy_helper.to_array(partly(first, second).graph.initializer[-1])
    y = normalized(normalized(X, modes[0]) @ matrix, modes[1])
    assert subject.train_step(X, Y) == pytest.approx(np.mean((y - Y) ** 2), rel=1e-4)
    for number, on in enumerate(modes, start=1):
        if not on:
            np.testing.assert_array_equal(subject.get_weights().get(f"m{number}", W / 2), W / 2)
    text = 'sets 1 BatchNormalization node to training mode, which batch_norm="train" trains; 1 stays frozen'
    assert any(text in hint for hint in subject.hints) == some
    frozen = trainer(partly(first, second), batch_norm="train", freeze="[sb][12]")
    counted = "2 BatchNormalization nodes" if modes == (1, 1) else "1 BatchNormalization node,"
    assert any(f"freeze keeps the weights of {counted}" in hint for hint in frozen.hints)


@pytest.mark.parametrize("form", [*DROPOUTS, *NORMS, "norms in a function", "an input for the mode"], ids=str)
def test_inference_mode_gives_what_predict_does(form, tmp_path):
    """Each example has the same result alone and in a batch, in ONNX Runtime, by a file that is valid."""
    models = {"norms in a function": lambda: parser.parse_model(FUNCTION_NORM), "an input for the mode": switched}
    if form in NORMS:
        model = normalizing(form[0], outputs=form[1])
    else:
        model = models[form]() if form in models else dropping(form)
    before = model.SerializeToString(deterministic=True)
    found = onnxtrain.inference_mode(model)
    assert model.SerializeToString(deterministic=True) == before
    onnx.checker.check_model(found, full_check=True)
    assert [value.name for value in found.graph.input] == ["x"]
    assert [value.name for value in found.graph.output] == [value.name for value in model.graph.output]
    onnx.save(found, tmp_path / "inference.onnx")
    run = onnxruntime.InferenceSession(tmp_path / "inference.onnx", providers=["CPUExecutionProvider"]).run
    expected = forward.predict(model, X)
    np.testing.assert_allclose(run(None, {"x": X})[0], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(run(None, {"x": X[:1]})[0], expected[:1], rtol=1e-4, atol=1e-5)
    assert not any("training mode" in hint for hint in trainer(found).hints)


def test_readers_of_new_statistics_get_the_old_ones_when_frozen():
    subject = trainer(normalizing(17, read=True), output="y")
    h = (X - W / 2) / np.sqrt(W + 1 + 1e-5) * W + W - 1
    results = subject.predict(X)
    np.testing.assert_allclose(results["y"], h + W / 2, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(results["new_var"].reshape(-1, 8)[0], W + 1)
    assert subject.train_step(X, Y) == pytest.approx(np.mean((h + W / 2 - Y) ** 2), rel=1e-4)


FUNCTION_NORM = f"""<ir_version: 8, opset_import: ["": 17, "my": 1]> m (float[N,8] x) => (float[N,8] y)
    <float[8] s = {{{", ".join(map(str, W))}}}, float[8] b = {{0,0,0,0,0,0,0,0}}, float[8] m = {{0,0,0,0,0,0,0,0}},
    float[8] v = {{1,1,1,1,1,1,1,1}}, float[8] m2 = {{0,0,0,0,0,0,0,0}}, float[8] v2 = {{1,1,1,1,1,1,1,1}}>
    {{ h = my.norm(x, s, b, m, v)  y = my.norm(h, s, b, m2, v2) }}
    <domain: "my", opset_import: ["": 17]> norm (x, s, b, m, v) => (y)
    {{ y, p, q = BatchNormalization<training_mode = 1>(x, s, b, m, v) }}"""


def test_batch_normalization_in_a_function():
    model = parser.parse_model(FUNCTION_NORM)
    frozen = trainer(model)
    np.testing.assert_allclose(frozen.predict(X), X * W * W / (1 + 1e-5), rtol=1e-4)
    subject = trainer(model, batch_norm="train")
    subject.train_step(X, Y)
    assert sorted(subject.objective.statistics) == ["m", "m2", "v", "v2"]
    np.testing.assert_allclose(subject.executor.session.state["m"], 0.1 * X.mean(0), rtol=1e-4)


def test_hints_describe_the_file():
    assert onnxtrain.inspect(dropping("opset 10")).hints == ("1 Dropout node does nothing; dropout=True lets it drop.",)
    with warns_sentence("dropout_in_training_mode", nodes="2 Dropout nodes") as caught:
        subject = trainer(dropping("function"))
    assert len(caught) == 1  # the other hint is no surprise
    assert caught[0].filename == __file__
    assert subject.hints == [
        "2 Dropout nodes do nothing; dropout=True lets them drop.",
        f"The file sets 2 Dropout nodes to training mode; training and evaluation here do not drop. {STAYS}",
    ]
    assert trainer(dropping("function"), dropout=True).hints == [
        f"The file sets 2 Dropout nodes to training mode; evaluation here does not drop. {STAYS}",
    ]
    assert trainer(normalizing(17)).hints == [
        '1 BatchNormalization node keeps its statistics frozen; batch_norm="train" trains with batch statistics and '
        "writes the running ones back.",
        "The file sets 1 BatchNormalization node to training mode; training and evaluation here use its running "
        f"statistics. {STAYS}",
    ]
    assert trainer(normalizing(17), batch_norm="train").hints == [
        f"The file sets 1 BatchNormalization node to training mode. {STAYS}"
    ]


def test_dropout_with_ratio_zero_does_not_count():
    model = dropping("initializer")
    model.graph.initializer[1].CopyFrom(numpy_helper.from_array(np.float32(0), "r"))
    assert trainer(model).hints == []


def test_a_request_without_such_layers_gets_a_hint():
    model = onnxtrain.examples.mlp((8, 8))
    with warns_sentence("no_batch_norm", mode="train", advice="optimize=False) keeps it"):
        trainer(model, batch_norm="train")
    with warns_sentence("no_dropout", advice="export(model.train(), ...)"):
        trainer(model, dropout=True)
    with pytest.warns(TrainingHint, match="has nothing to train"):
        onnxtrain.training_model(model, loss="mean_squared_error", optimizer=onnxtrain.Adam(), batch_norm="train")


def test_batch_normalization_in_a_body_stays_frozen_with_a_hint():
    text = (
        FUNCTION_NORM.split("{ h =")[0]
        + """<bool c = {1}> { y = If (c) <
        then_branch = a () => (float[N,8] p) { p, p1, p2 = BatchNormalization<training_mode = 1>(x, s, b, m, v) },
        else_branch = b () => (float[N,8] q) { q = BatchNormalization(x, s, b, m, v) } > }"""
    )
    text = text.replace(">\n    <bool c = {1}>", ", bool c = {1}>").replace("><bool c", ", bool c")
    model = parser.parse_model(text.replace(">   <", ", "))
    np.testing.assert_allclose(trainer(model).predict(X), X * W / np.sqrt(1 + 1e-5), rtol=1e-4)
    match = "leaves 2 BatchNormalization nodes in bodies of If, Loop or Scan frozen: their statistics cannot be updated"
    with pytest.warns(TrainingHint, match=match):
        trainer(model, batch_norm="train")


def test_random_operators_of_the_model_get_a_hint():
    model = parser.parse_model("""<ir_version: 8, opset_import: ["": 17]> m (float[N,8] x) => (float[N,8] y)
        <float[8] w = {1,1,1,1,1,1,1,1}> { n = RandomNormalLike(x)  h = Add(x, n)  y = Mul(h, w) }""")
    subject = trainer(model)
    assert not np.array_equal(subject.predict(X), subject.predict(X))
    assert subject.hints == [
        "The model samples random numbers itself (RandomNormalLike): its outputs differ from run to run, in "
        "evaluation too, and no seed given here changes that."
    ]


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


def exported(torch, path, *, train: bool, seed: int = 0, **options) -> onnx.ModelProto:
    torch.manual_seed(seed)
    nn = torch.nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.features = nn.Sequential(
                *(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6)),
                *(nn.ReLU(), nn.Dropout(0.4)),
            )
            self.fc = nn.Linear(6, 3)

        def forward(self, x):
            return self.fc(self.features(x).mean((2, 3)))

    net = Net().train(train)
    torch.onnx.export(net, (torch.randn(8, 2, 9, 9),), str(path), verbose=False, **options)
    return onnx.load(path)


IMAGES = np.random.default_rng(0).normal(size=(8, 2, 9, 9)).astype(np.float32)
LABELS = np.arange(8) % 3

EXPORTS = {
    "TorchScript": lambda torch: {"dynamo": False, "training": torch.onnx.TrainingMode.TRAINING},
    "dynamo": lambda torch: {"dynamo": True, "optimize": False},
    "dynamo, optimized": lambda torch: {"dynamo": True},
}


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("exporter", EXPORTS)
def test_an_export_in_training_mode_trains_reproducibly(torch, exporter, tmp_path):
    model = exported(torch, tmp_path / "train.onnx", train=True, **EXPORTS[exporter](torch))
    assert any(node.op_type == "Dropout" and len(node.input) == 3 for node in model.graph.node)
    for options in ({}, {"dropout": True}, {"batch_norm": "train"}):
        runs = []
        for _ in range(2):
            subject = onnxtrain.Trainer(model, loss="softmax_cross_entropy", **options)
            losses = [subject.train_step(IMAGES, LABELS) for _ in range(2)]
            runs.append((losses, subject.evaluate((IMAGES, LABELS)), subject.predict(IMAGES).tobytes()))
        assert runs[0] == runs[1], options


KEPT = {
    "TorchScript": lambda torch: {"dynamo": False, "training": torch.onnx.TrainingMode.PRESERVE},
    "dynamo": lambda torch: {"dynamo": True, "optimize": False},
}


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("exporter", KEPT)
def test_the_export_call_that_the_hint_names_keeps_batch_normalization(torch, exporter, tmp_path):
    """The statistics are the network's, and no node is in training mode."""
    torch.manual_seed(0)
    nn = torch.nn
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 3, 3), nn.BatchNorm2d(3), nn.Flatten())
    for _ in range(3):
        net(torch.randn(8, 2, 9, 9))
        for layer in (net[1], net[3]):
            nn.init.normal_(layer.weight)
    images, path = torch.from_numpy(IMAGES), str(tmp_path / "kept.onnx")
    torch.onnx.export(net.eval(), (images,), path, verbose=False, **KEPT[exporter](torch))
    np.testing.assert_allclose(onnxtrain.predict(path, IMAGES), net(images).detach().numpy(), rtol=1e-4, atol=1e-5)
    subject = onnxtrain.Trainer(path, loss="mse", batch_norm="train", untie=True)
    assert not any("training mode" in hint for hint in subject.hints)
    assert len(subject.objective.statistics) == 4


FOLDED = "The exporter folded batch normalization"
LAYERS = {
    "a norm behind each": lambda nn: [nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Conv2d(4, 3, 3), norm(nn)],
    "a norm behind one": lambda nn: [nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 3), norm(nn)],
    "none": lambda nn: [nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 3)],
    "a weight norm": lambda nn: [nn.utils.parametrizations.weight_norm(nn.Conv2d(2, 3, 3)), nn.ReLU()],
    "a norm behind none": lambda nn: [nn.ConvTranspose2d(2, 3, 3), nn.ReLU(), norm(nn)],
}


def norm(nn):
    return nn.BatchNorm2d(3)


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_folded_normalization_is_named_for_both_exporters(torch, name, dynamo, tmp_path):
    torch.manual_seed(0)
    net = torch.nn.Sequential(*LAYERS[name](torch.nn), torch.nn.Flatten()).train()
    net(torch.from_numpy(IMAGES))  # a deviation of one is no factor
    path = tmp_path / "folded.onnx"
    torch.onnx.export(net.eval(), (torch.from_numpy(IMAGES),), str(path), dynamo=dynamo, verbose=False)
    folds = name in ("a norm behind each", "a norm behind one")
    assert any(node.op_type == "BatchNormalization" for node in onnx.load(path).graph.node) == (
        name == "a norm behind none"
    )
    found = [hint for hint in onnxtrain.inspect(path).hints if hint.startswith(FOLDED)]
    assert len(found) == folds
    module = "(1, 3)" if dynamo else "of 0, 2:"
    assert not folds or ((module if name == "a norm behind each" else "3" if dynamo else "of 2:") in found[0])


@pytest.mark.parametrize(
    ("weight", "bias", "other", "named"),
    [
        ("onnx::Conv_3", "onnx::Conv_4", "fc.bias", True),
        ("193", "194", "fc.bias", True),  # of PyTorch 1.5 to 1.12
        ("1", "2", "3", False),  # of PyTorch 0.3, whose parameters are all numbers
        ("onnx::Conv_3", "conv.bias", "fc.bias", False),
        ("conv.weight", "onnx::Conv_4", "fc.bias", False),
        ("conv.weight", "conv.bias", "fc.bias", False),
    ],
)
def test_both_tensors_of_a_folded_convolution_are_computed(weight, bias, other, named):
    names = ["x", weight, bias]
    nodes = [helper.make_node("Conv", names, ["h"], "/body/conv/Conv"), helper.make_node("Mul", ["h", other], ["y"])]
    infos = [helper.make_tensor_value_info(name, 1, ["N", 3, 5, 5]) for name in "xy"]
    rng = np.random.default_rng(0)
    arrays = {weight: rng.normal(size=(3, 3, 1, 1)), bias: rng.normal(size=3), other: rng.normal(size=(3, 1, 1))}
    tensors = [numpy_helper.from_array(array.astype(np.float32), name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "g", infos[:1], infos[1:], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    found = [
        hint for hint in onnxtrain.inspect(model).hints if hint.startswith(f"{FOLDED} into the weights of body.conv:")
    ]
    assert len(found) == named


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("frozen", [1, 4])
def test_a_partly_frozen_network_trains_as_in_pytorch(torch, frozen, tmp_path):
    """The older exporter records the mode of each layer of a network, one of which is in evaluation mode."""
    torch.manual_seed(0)
    nn = torch.nn
    layers = (nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU())
    net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(150, 3)).train()
    images, labels = torch.from_numpy(IMAGES), torch.from_numpy(LABELS)
    for _ in range(3):
        net(images)
    net[frozen].eval()
    preserve = torch.onnx.TrainingMode.PRESERVE
    axes = {"image": {0: "N"}}
    kept = {name: value.clone() for name, value in net.state_dict().items()}
    path = tmp_path / "partly.onnx"
    torch.onnx.export(
        *(net, (images,), str(path)), dynamo=False, training=preserve, input_names=["image"], dynamic_axes=axes
    )
    net.load_state_dict(kept)  # the exporter ran it in training mode
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(kept[tensor.name].numpy(), tensor.name))
    subject = onnxtrain.Trainer(model, loss="cross_entropy", optimizer="sgd(lr=0.05)", batch_norm="train")
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    for _ in range(3):
        loss = nn.functional.cross_entropy(net(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert subject.train_step(IMAGES, LABELS) == pytest.approx(loss.item(), rel=1e-4)
    onnx.save(onnxtrain.inference_mode(subject.model()), path)
    run = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run
    with torch.no_grad():
        expected = net.eval()(images).numpy()
    # the running variance is of n values in ONNX, of n - 1 in PyTorch
    np.testing.assert_allclose(run(None, {"image": IMAGES})[0], expected, rtol=0.02, atol=0.02)


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
def test_a_fresh_network_of_the_torchscript_exporter(torch, tmp_path):
    """One initializer is scale and running variance of both layers; untied, it trains like the complete export."""
    merged = exported(torch, tmp_path / "merged.onnx", train=False, dynamo=False, do_constant_folding=False)
    merged = exported(
        torch, tmp_path / "merged.onnx", train=False, dynamo=False, training=torch.onnx.TrainingMode.PRESERVE
    )
    assert sum(node.op_type == "Identity" for node in merged.graph.node) == 6
    with raises_sentence("shared_statistics", statistics="is also a weight of '/features"):
        onnxtrain.Trainer(merged, loss="softmax_cross_entropy", batch_norm="train")
    complete = exported(torch, tmp_path / "complete.onnx", train=True, **EXPORTS["TorchScript"](torch))
    losses = []
    for model in (merged, complete):
        subject = onnxtrain.Trainer(model, loss="softmax_cross_entropy", batch_norm="train", untie=True)
        assert len(subject.objective.statistics) == 4
        losses.append([subject.train_step(IMAGES, LABELS) for _ in range(3)])
    assert losses[0] == losses[1]
    with warns_sentence("shared_values", statistics="running statistic of batch normalization"):
        onnxtrain.Trainer(merged, loss="softmax_cross_entropy")


def test_onnx_runtime_reads_the_saved_file(tmp_path):
    subject = trainer(dropping("fixed seed"))
    subject.train_step(X, Y)
    subject.save(tmp_path / "saved.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "saved.onnx", providers=["CPUExecutionProvider"])
    share = np.mean(session.run(None, {"x": np.ones((512, 8), np.float32)})[0] == 0)
    assert 0.4 < share < 0.6  # the file keeps its own mode


def test_frozen_batch_normalization_gets_a_hint_where_others_train():
    model = onnxtrain.append(normalizing(17), onnxtrain.layers.Linear(2))
    subject = trainer(model, batch_norm="train", freeze="s|b")
    assert any("freeze keeps the weights of 1 Batch" in text for text in subject.hints)
    assert not any("freeze keeps" in text for text in trainer(normalizing(17), batch_norm="train").hints)


@pytest.mark.parametrize(
    ("states", "unread", "warned"), [("c, c", True, True), ("h, c", False, False), ("h", True, False)]
)
def test_an_input_that_no_node_reads_gets_a_hint(states, unread, warned):
    model = parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 18]>
        m (float[N,T,2] x, float[1,N,3] h, float[1,N,3] c) => (float[T,1,N,3] y) {{
        t = Transpose<perm = [1,0,2]>(x)  y = LSTM<hidden_size = 3>(t, w, r, , , {states}) }}"""
    )
    for name, size in (("w", 2), ("r", 3)):
        model.graph.initializer.append(numpy_helper.from_array(np.full((1, 12, size), 0.1, np.float32), name))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", TrainingHint)
        hints = trainer(model).hints
    assert any("No node reads the input" in text for text in hints) == unread
    assert any("export with a tensor for each" in str(one.message) for one in caught) == warned
