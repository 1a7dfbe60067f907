"""Models of a fixed batch size: only the real examples of a padded last batch count."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import parser

import onnxtrain
from onnxtrain.errors import DataError
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.losses import CustomLoss, SoftmaxCrossEntropy
from onnxtrain.losses.partial_batches import batch_axes, joined_axis
from onnxtrain.training.callbacks import Callback
from onnxtrain.training.inference.forward import evaluate, predict
from onnxtrain.training.trainer import Trainer
from sentences import raises_sentence, warns_sentence
from zoo.arrays import assert_same

FIXED, EXAMPLES = 4, 30


def network(batch: int | str, *, outputs: int = 3) -> onnx.ModelProto:
    """Return a model of two layers with this batch size."""
    rng = np.random.default_rng(0)
    text = f"""<ir_version: 8, opset_import: ["": 18]> m (float[{batch},5] x) => (float[{batch},{outputs}] y) {{
        h = MatMul(x, w1)  a = Tanh(h)  z = MatMul(a, w2)  y = Add(z, b) }}"""
    return with_weights(text, w1=rng.normal(size=(5, 6)), w2=rng.normal(size=(6, outputs)), b=np.zeros(outputs))


def sequences(batch: int | str) -> onnx.ModelProto:
    """Return a model with logits [batch, 2, 3] for tokens [batch, 2, 5]."""
    text = f"""<ir_version: 8, opset_import: ["": 18]> m (float[{batch},2,5] x) => (float[{batch},2,3] y) {{
        y = MatMul(x, w) }}"""
    return with_weights(text, w=np.random.default_rng(0).normal(size=(5, 3)))


def with_weights(text: str, **weights: np.ndarray) -> onnx.ModelProto:
    model = parser.parse_model(text)
    for name, array in weights.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    return model


def loss_model(folder, batch: str = "N") -> str:
    text = f"""<ir_version: 8, opset_import: ["": 18]> loss (float[{batch},3] p, float[{batch},3] t) => (float l) {{
        d = Sub(p, t)  s = Mul(d, d)  e = ReduceSum<keepdims=0>(s, axis)
        r = Sqrt(e)  l = ReduceMean<keepdims=0>(r) }}"""
    model = parser.parse_model(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1]), "axis"))
    path = folder / f"loss-{batch}.onnx"
    onnx.save(model, path)
    return str(path)


def root(op, prediction, target):
    difference = prediction - target
    return op.Sqrt(op.ReduceMean(difference * difference, keepdims=0))


def labelled(op, prediction, target):
    return op.ReduceMean(op.SoftmaxCrossEntropyLoss(prediction, target, reduction="none"), keepdims=0).with_shape(())


WEIGHTED = SoftmaxCrossEntropy(class_weights=(1.0, 2.0, 0.5), label_smoothing=0.1, ignore_index=-1)

CASES = {
    "labels": ("softmax_cross_entropy", "labels"),
    "distributions": ("softmax_cross_entropy", "distributions"),
    "weights, smoothing, ignored labels": (WEIGHTED, "some ignored"),
    "binary": ("binary_cross_entropy", "values"),
    "squared": ("mean_squared_error", "values"),
    "absolute": ("mean_absolute_error", "values"),
    "huber": ("huber", "values"),
    "custom": (root, "values"),
    "custom on labels": (CustomLoss(labelled, "indices"), "labels"),
    "model": ("model", "values"),
    "rank 3": (WEIGHTED, "rank 3"),
}


def data(kind: str, size: int = EXAMPLES) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    shape = (size, 2) if kind == "rank 3" else (size,)
    x = rng.normal(size=(*shape, 5)).astype(np.float32)
    if kind in ("labels", "some ignored", "rank 3"):
        y = rng.integers(0, 3, shape)
        return x, y if kind == "labels" else np.where(rng.uniform(size=shape) < 0.3, -1, y)
    y = rng.uniform(size=(size, 3)).astype(np.float32)
    return x, y / y.sum(1, keepdims=True) if kind == "distributions" else y


def pair(case: str, tmp_path, **options) -> tuple[Trainer, Trainer, tuple[np.ndarray, np.ndarray]]:
    """Return a model with a fixed and with a dynamic batch size, and data."""
    loss, kind = CASES[case]
    build = sequences if kind == "rank 3" else network
    settings = {
        "loss": loss_model(tmp_path) if loss == "model" else loss,
        "optimizer": onnxtrain.Momentum(0.1),
        **options,
    }
    return Trainer(build(FIXED), **settings), Trainer(build("N"), **settings), data(kind)


def assert_close(left: Trainer, right: Trainer) -> None:
    for name, array in right.parameters.items():
        np.testing.assert_allclose(left.parameters[name], array, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES)
def test_evaluation_measures_exactly_all_examples(case: str, tmp_path) -> None:
    fixed, free, examples = pair(case, tmp_path)
    if case not in ("custom", "model"):
        expected = free.evaluate(examples, batch_size=EXAMPLES)["loss"]
    else:  # a loss that is not a sum: batches of the same sizes
        expected = free.evaluate(examples, batch_size=FIXED)["loss"]
    assert fixed.evaluate(examples)["loss"] == pytest.approx(expected, rel=1e-6)
    first = tuple(array[:3] for array in examples)
    assert fixed.evaluate(first)["loss"] == pytest.approx(free.evaluate(first)["loss"], rel=1e-6)


def test_metrics_count_exactly_all_examples() -> None:
    x, y = data("labels")
    subject = Trainer(network(FIXED), loss="softmax_cross_entropy")
    prediction = subject.predict(x)
    assert isinstance(prediction, np.ndarray)

    def size(y_true: np.ndarray, y_pred: np.ndarray) -> float:
        assert len(y_true) == len(y_pred)
        return float(len(y_true))

    found = subject.evaluate((x, y), metrics=["accuracy", size])
    assert found["accuracy"] == pytest.approx(np.mean(prediction.argmax(1) == y))
    assert found["size"] == 30


def test_evaluation_without_a_trainer(tmp_path) -> None:
    examples = data("labels")
    onnx.save(network(FIXED), tmp_path / "fixed.onnx")
    onnx.save(network("N"), tmp_path / "free.onnx")
    from onnxtrain.training.inference.forward import evaluate, predict

    fixed, free = (
        evaluate(tmp_path / f"{name}.onnx", examples, loss="softmax_cross_entropy", metrics=["accuracy"])
        for name in ("fixed", "free")
    )
    assert fixed == pytest.approx(free, rel=1e-6)
    fixed, free = (predict(tmp_path / f"{name}.onnx", examples[0]) for name in ("fixed", "free"))
    np.testing.assert_allclose(fixed, free, rtol=1e-6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
def test_training_weighs_the_last_batch_by_its_own_examples(case: str, tmp_path) -> None:
    fixed, free, examples = pair(case, tmp_path)
    histories = [subject.fit(examples, epochs=2, batch_size=FIXED) for subject in (fixed, free)]
    assert histories[0].column("step") == histories[1].column("step") == [8.0, 16.0]
    assert histories[0].column("loss") == pytest.approx(histories[1].column("loss"), rel=1e-5)
    assert_close(fixed, free)


@pytest.mark.parametrize("kernels", [None, False])
def test_a_step_on_fewer_examples(kernels: bool | None, tmp_path) -> None:
    options = onnxtrain.RuntimeOptions(kernels=kernels)
    fixed, free, (x, y) = pair("weights, smoothing, ignored labels", tmp_path, runtime=options, clip_norm=0.5)
    for rows in (4, 1, 3, 4, 2):
        assert fixed.train_step(x[:rows], y[:rows]) == pytest.approx(free.train_step(x[:rows], y[:rows]), rel=1e-5)
    assert_close(fixed, free)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
def test_micro_batches_are_full_and_the_last_is_padded(case: str, tmp_path) -> None:
    """A micro-batch is one batch of the fixed size; a step takes up to ``accumulate`` of them."""
    fixed, free, (x, y) = pair(case, tmp_path, accumulate=3)
    for rows in (12, 9, 10, 4, 1):
        if case in ("custom", "model"):  # not a sum: micro-batches must be the same
            loss = fixed.train_step(x[:rows], y[:rows])
            for start in range(0, rows, FIXED):
                part = {
                    "x": x[start : start + FIXED][: rows - start],
                    "target": y[start : start + FIXED][: rows - start],
                }
                free.executor.session.step({**part, "learning_rate": np.float32(0.1)}, entry=0)
            expected = free.executor.session.step({"learning_rate": np.float32(0.1)}, entry=1)["loss"]
        else:
            loss, expected = (subject.train_step(x[:rows], y[:rows]) for subject in (fixed, free))
        assert loss == pytest.approx(float(expected), rel=1e-5)
    assert_close(fixed, free)
    history = fixed.fit((x, y), epochs=2)
    assert history.column("step") == [3.0, 6.0]


def test_a_step_on_more_examples_than_the_model_takes_is_refused() -> None:
    x, y = data("labels")
    subject = Trainer(network(FIXED), loss="softmax_cross_entropy")
    with raises_sentence("examples_of_fixed_batch", what="x", got=5, wanted=4, at="most 4"):
        subject.train_step(x[:5], y[:5])
    with raises_sentence("examples_of_fixed_batch", what="x", got=32, wanted=4, at="most 12"):
        Trainer(network(FIXED), loss="softmax_cross_entropy", accumulate=3).fit(
            [(np.zeros((32, 5), np.float32), np.zeros(32, int))]
        )
    with pytest.raises(DataError, match=r"'target' has 3 examples, but 'x' has 2"):
        subject.train_step(x[:2], y[:3])


@pytest.mark.parametrize(
    ("fixed", "given", "accumulate", "step", "more"),
    [
        *[(1, {"batch_size": 8}, 1, 1, 8), (4, {"batch_size": 8}, 1, 4, 2), (4, {"batch_size": 9}, 1, 4, 2)],
        *[(4, {}, 1, 4, 8), (4, {}, 2, 8, 8), (4, {"batch_size": 7}, 1, 4, None), (4, {"batch_size": 2}, 1, 4, None)],
    ],
)
def test_steps_of_another_size_than_asked_for_get_a_hint(fixed, given, accumulate, step, more) -> None:
    """Take the advice of the hint: it makes the larger steps."""
    x, y = data("labels", 40)
    subject = Trainer(network(fixed), loss="softmax_cross_entropy", accumulate=accumulate)
    wanted = given.get("batch_size", 32)
    advice = "" if more is None else f"; accumulate={more} takes {more} such batches a step"
    size = "1 example" if fixed == 1 else f"{fixed} examples"
    with warns_sentence("fixed_batch", size=size, step=step, wanted=wanted, more=advice):
        history = subject.fit(x, y, **given)
    assert history.column("step") == [40 / step]
    assert sum("fixed batch" in hint for hint in subject.hints) == 1
    subject.fit(x, y, **given)
    assert sum("fixed batch" in hint for hint in subject.hints) == 1
    for model, options in (
        (network(fixed), {"dynamic_batch": True}),
        (onnxtrain.dynamic_batch(network(fixed)), {}),
        (network(fixed), {"accumulate": more or 1}),
    ):
        other = Trainer(model, loss="softmax_cross_entropy", **options)
        steps = other.fit(x, y, batch_size=wanted).column("step")
        if "accumulate" not in options or (more and wanted == more * fixed):
            assert steps == [-(-40 // wanted)]
            assert not any("fixed batch" in hint for hint in other.hints)


@pytest.mark.parametrize(
    ("examples", "options", "given"),
    [(40, {}, {"batch_size": 4}), (40, {"accumulate": 3}, {"batch_size": 12}), (4, {}, {}), (3, {}, {})],
)
def test_steps_of_the_size_that_was_asked_for_get_none(examples, options, given) -> None:
    subject = Trainer(network(FIXED), loss="softmax_cross_entropy", **options)
    subject.fit(*data("labels", examples), **given)
    assert not any("fixed batch" in hint for hint in subject.hints)


def test_an_iterable_and_results_without_training_need_no_hint() -> None:
    x, y = data("labels", 8)
    subject = Trainer(network(FIXED), loss="softmax_cross_entropy")
    subject.fit([(x[:4], y[:4]), (x[4:], y[4:])])
    subject.evaluate(x, y, batch_size=8)
    subject.predict(x, batch_size=8)
    subject.train_step(x[:4], y[:4])
    assert not any("fixed batch" in hint for hint in subject.hints)


def test_batches_of_an_iterable_are_cut_and_padded_to_measure() -> None:
    x, y = data("labels")
    subject = Trainer(network(FIXED), loss="softmax_cross_entropy")
    expected = subject.evaluate((x, y), metrics=["accuracy"])
    batches = [(x[:7], y[:7]), (x[7:9], y[7:9]), (x[9:], y[9:])]
    assert subject.evaluate(batches, metrics=["accuracy"]) == pytest.approx(expected, rel=1e-6)
    np.testing.assert_array_equal(subject.predict([{"x": x[:7]}, {"x": x[7:]}]), subject.predict(x))


def test_a_resumed_training_continues_with_partial_batches(tmp_path) -> None:
    class Stop(Callback):
        def __init__(self, step: int) -> None:
            self.step = step

        def on_step_end(self, state) -> None:
            if state.step == self.step:
                raise KeyboardInterrupt

    def run(stop: int, **options) -> Trainer:
        subject = Trainer(network(FIXED), loss="softmax_cross_entropy", optimizer=onnxtrain.Adam(0.05))
        subject.fit(data("labels", 10), epochs=4, callbacks=[Stop(stop)], **options)
        return subject

    whole = run(0)
    for stop in (3, 5):
        options = {"checkpoint": tmp_path / str(stop), "checkpoint_every": 1}
        with pytest.raises(KeyboardInterrupt):
            run(stop, **options)
        resumed = run(0, resume=True, **options)
        assert_same(whole.parameters, resumed.parameters)


def test_frozen_batch_normalization_is_exact_and_trained_one_sees_the_repeated_examples() -> None:
    def normalized(batch: int | str) -> onnx.ModelProto:
        text = f"""<ir_version: 8, opset_import: ["": 18]> m (float[{batch},5] x) => (float[{batch},5] y) {{
            n = BatchNormalization(x, scale, bias, mean, var)  y = Mul(n, w) }}"""
        ones, zeros = np.ones(5), np.zeros(5)
        return with_weights(text, scale=ones, bias=zeros, mean=zeros, var=ones, w=ones)

    x = np.random.default_rng(0).normal(size=(2, 5)).astype(np.float32)
    for mode in ("frozen", "train"):
        fixed, free = (
            Trainer(normalized(batch), loss="mean_squared_error", optimizer=onnxtrain.Momentum(0.1), batch_norm=mode)
            for batch in (FIXED, "N")
        )
        # Two examples, each twice in a batch of four, have the statistics of the two.
        for _ in range(3):
            assert fixed.train_step(x, x) == pytest.approx(free.train_step(x, x), rel=1e-5)
        found, expected = dict(fixed.weights), dict(free.weights)
        assert ("mean" in found) == (mode == "train")
        for name, array in found.items():
            np.testing.assert_allclose(array, expected[name], rtol=1e-5, atol=1e-6)


COST = """<ir_version: 8, opset_import: ["": 18]> m (float[4,5] x, float[4,3] t) => (float[4,3] y, float cost) {
    y = MatMul(x, w)  d = Sub(y, t)  s = Mul(d, d)  cost = ReduceMean<keepdims=0>(s) }"""


def test_a_loss_inside_the_model_cannot_leave_padding_out() -> None:
    subject = Trainer(
        with_weights(COST, w=np.ones((5, 3))), loss="output:cost", optimizer=onnxtrain.Momentum(0.1), accumulate=2
    )
    x, y = data("values")
    sentence = (
        r"The model takes batches of 4 examples and computes its loss itself \(output:cost\), so that padding would "
        r"be part of it; \d examples are left for the last batch: give a multiple of 4 or .* a dynamic batch axis\."
    )
    with pytest.raises(DataError, match=sentence):
        subject.evaluate({"x": x, "t": y})
    with pytest.raises(DataError, match=sentence):
        subject.train_step({"x": x[:3], "t": y[:3]})
    with pytest.raises(DataError, match=sentence):  # before the first step, not after an epoch
        subject.fit({"x": x[:8], "t": y[:8]}, validation={"x": x, "t": y})
    with pytest.raises(DataError, match=sentence):  # before the first micro-batch is added up
        subject.train_step({"x": x[:6], "t": y[:6]})
    assert np.all(subject.parameters["w"] == 1)
    assert not subject.executor.session.state["accumulated_weight"]
    assert subject.evaluate({"x": x[:28], "t": y[:28]})["loss"] > 0
    # Training leaves such examples out, different ones in every epoch.
    history = subject.fit({"x": x, "t": y}, epochs=2)
    assert history.column("step") == [4.0, 8.0]  # three steps of two micro-batches, one step of one
    with pytest.raises(DataError, match=sentence):
        subject.fit({"x": x[:3], "t": y[:3]})


def test_a_loss_model_of_a_fixed_batch_size_is_refused(tmp_path) -> None:
    subject = Trainer(network(FIXED), loss=loss_model(tmp_path, "4"), optimizer=onnxtrain.Momentum(0.1))
    x, y = data("values")
    assert subject.evaluate((x[:8], y[:8]))["loss"] > 0
    with raises_sentence("targets_of_fixed_shape", what="model", got=2, wanted=(4, 3)):
        subject.evaluate((x, y))


def time_first(batch: int | str, steps: int = 7) -> onnx.ModelProto:
    """Return a model with examples first in the input, time first in one output, and an output without examples."""
    text = f"""<ir_version: 8, opset_import: ["": 18]> m (float[{batch},{steps},5] x)
        => (float[{batch},{steps},3] y, float[{steps},{batch},3] states, float[3] w0) {{
        y = MatMul(x, w)  states = Transpose<perm=[1,0,2]>(y)  w0 = Gather(w, zero) }}"""
    model = with_weights(text, w=np.random.default_rng(0).normal(size=(5, 3)))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(0), "zero"))
    return model


@pytest.mark.parametrize("batch", [FIXED, "N"])
@pytest.mark.parametrize("steps", [7, FIXED])
def test_rows_are_dropped_along_the_axis_of_the_examples(batch: int | str, steps: int) -> None:
    subject = Trainer(time_first(batch, steps), loss="mean_squared_error", output="y")
    x = np.random.default_rng(0).normal(size=(10, steps, 5)).astype(np.float32)
    found = subject.predict(x, batch_size=FIXED)
    expected = x @ subject.parameters["w"]
    np.testing.assert_allclose(found["y"], expected, rtol=1e-5)
    np.testing.assert_allclose(found["states"], expected.transpose(1, 0, 2), rtol=1e-5)


def test_a_loss_on_a_prediction_without_examples_first_is_refused() -> None:
    subject = Trainer(time_first(FIXED, FIXED), loss="mean_squared_error", output="states")
    x, y = np.zeros((6, FIXED, 5), np.float32), np.zeros((6, FIXED, 3), np.float32)
    assert subject.train_step(x[:FIXED], y[:FIXED]) == 0
    with raises_sentence("padding_stays_in_loss", prediction="'states'", axis="its examples in axis 1", size=4):
        subject.train_step(x[:2], y[:2])
    for call in (subject.evaluate, subject.fit):
        with pytest.raises(DataError, match="'states' has the batch on axis 1"):
            call((x, y))


def test_the_axis_of_the_examples_is_found_behind_a_reshape_to_fixed_sizes() -> None:
    text = """<ir_version: 8, opset_import: ["": 18]> m (float[4,6] x) => (float[2,4,3] y) <int64[3] s = {4,2,3}> {
        r = Reshape(x, s)  y = Transpose<perm=[1,0,2]>(r) }"""
    import onnx_ir as ir

    model = infer_shapes(ir.from_proto(parser.parse_model(text)))
    assert batch_axes(model, list(model.graph.outputs)) == {"y": 1}


@pytest.mark.parametrize("steps", [3, 5])
@pytest.mark.parametrize("batch", [FIXED, "N"])
def test_rows_are_joined_along_the_axis_of_the_examples_where_shapes_do_not_tell(batch: int | str, steps: int) -> None:
    """The output has time first and a shape computed from floats, which shape inference does not follow."""
    model = parser.parse_model(f"""<ir_version: 8, opset_import: ["": 18]> m (float[{batch},T] x) => (float[p,q,r] y)
        <float w = {{2}}> {{ h = Mul(x, w)  u = Transpose(h)  n = Shape(u)  one = Constant<value_ints=[1]>()
        k = Concat<axis=0>(n, one)  f = Cast<to=1>(k)  g = Abs(f)  s = Cast<to=7>(g)  y = Reshape(u, s) }}""")
    x = np.arange(10.0 * steps, dtype=np.float32).reshape(10, steps)
    for declared in (model, without_shape(model)):
        np.testing.assert_array_equal(predict(declared, x, batch_size=FIXED), 2 * x.T[:, :, None])


def without_shape(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    copy.graph.output[0].type.tensor_type.ClearField("shape")
    return copy


def test_an_axis_of_the_examples_that_cannot_be_known_is_refused() -> None:
    arrays = [np.zeros((5, 4, 4)), np.zeros((5, 4, 4))]
    with raises_sentence("batch_axis_unknown", what="y", got=[(5, 4, 4), (5, 4, 4)], wanted=[1, 2]):
        joined_axis("y", arrays, [4, 4])
    assert joined_axis("y", [*arrays, np.zeros((5, 3, 4))], [4, 4, 3]) == 1
    assert joined_axis("y", [np.zeros((4, 4)), np.zeros((3, 4))], [4, 3]) == 0
    assert joined_axis("boxes", [np.zeros((9, 6)), np.zeros((7, 6))], [4, 3]) is None


@pytest.mark.parametrize("size", [2**33, 2**60])
def test_a_batch_that_no_machine_holds_is_not_filled_up(size: int) -> None:
    model = parser.parse_model(f"""<ir_version: 8, opset_import: ["": 18]> m (float[{size},2] x) => (float[{size},2] y)
        <float[2] w = {{1, 2}}> {{ y = Mul(x, w) }}""")
    x = np.ones((3, 2), np.float32)
    subject = Trainer(model, loss="mean_squared_error")
    sentence = rf"takes batches of {size} examples \(input 'x'\), but one has 3: padding it takes [\d,]+ GiB"
    for attempt in (
        lambda: subject.predict(x),
        lambda: subject.train_step(x, x),
        lambda: subject.evaluate((x, x)),
        lambda: subject.fit((x, x)),
        lambda: predict(model, x),
    ):
        with pytest.raises(DataError, match=sentence):
            attempt()


def test_batches_of_nothing_are_refused() -> None:
    x, y = np.ones((6, 5), np.float32), np.ones((6, 3), np.float32)
    for attempt in (
        lambda: predict(network(0), x),
        lambda: evaluate(network(0), (x, y), loss="mean_squared_error"),
        lambda: Trainer(network(0), loss="mean_squared_error").fit((x, y)),
        lambda: Trainer(network(0), loss="softmax_cross_entropy").train_step(x, np.zeros(6, np.int64)),
    ):
        with raises_sentence("batch_of_0", what="x"):
            attempt()


AMBIGUOUS = {
    "classes as many as examples": (
        "p = Cast <to = 7> (zeros)  a = Pad (x, p)  y = MatMul (a, w)", "['rows', 3]"
    ),
    "time first": ("u = Unsqueeze (x, zero)  e = Expand (u, three)  y = MatMul (e, w)", "[3, 3, 3]"),
    "examples last": ("h = MatMul (x, w)  y = Transpose (h)", "[3, 'rows']"),
    "examples and steps merged": ("u = Unsqueeze (x, two)  m = Mul (u, v)  s = Constant <value_ints = [12, 5]> ()  "
                                  "y = Reshape (m, s)", "[12, 5]"),
}  # fmt: skip


@pytest.mark.parametrize("case", AMBIGUOUS)
def test_predictions_are_joined_along_the_axis_that_the_nodes_give(case):
    body, declared = AMBIGUOUS[case]
    model = parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 18]> m (float[3,4] x) => (float{declared.replace("'", "")} y)
        <float[4,3] w, float[1,4,5] v, float[4] zeros = {{0, 0, 0, 0}}, int64[1] zero = {{0}},
        int64[1] two = {{2}}, int64[3] three = {{3, 1, 1}}>
        {{ {body} }}"""
    )
    rng = np.random.default_rng(0)
    for name, shape in (("w", (4, 3)), ("v", (1, 4, 5))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name))
    w, v = (onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer[-2:])
    x = rng.normal(size=(10, 4)).astype(np.float32)
    expected = {
        "classes as many as examples": x @ w,
        "time first": np.stack([x @ w] * 3),
        "examples last": (x @ w).T,
        "examples and steps merged": (x[:, :, None] * v).reshape(-1, 5),
    }[case]
    np.testing.assert_allclose(predict(model, x), expected, rtol=1e-5)
    if case == "classes as many as examples":
        labels = rng.integers(0, 3, 10)
        logits = expected - np.log(np.exp(expected).sum(1, keepdims=True))
        found = evaluate(model, (x, labels), loss="cross_entropy", metrics=["accuracy"])
        assert found["loss"] == pytest.approx(-logits[np.arange(10), labels].mean(), rel=1e-5)
        assert found["accuracy"] == pytest.approx((expected.argmax(1) == labels).mean())


def test_an_input_as_long_as_the_last_batch_is_not_padded():
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["": 18]> m (float[3,2] x, float[2,2] table) => (float[3,2] y)
        <float[2,2] w = {1, 2, 3, 4}> { h = MatMul (x, w)  y = MatMul (h, table) }"""
    )
    x, table = np.ones((2, 2), np.float32), np.eye(2, dtype=np.float32)
    trainer = Trainer(model, loss="mse")
    assert trainer.train_step({"x": x, "table": table}, np.zeros((2, 2), np.float32)) == pytest.approx(26)


def test_an_output_with_time_first_is_not_compared_with_targets_of_examples_first():
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["": 18]> m (float[3,3,2] x) => (float[3,3,2] y)
        <float[2,2] w = {1, 2, 3, 4}> { h = MatMul (x, w)  y = Transpose <perm = [1, 0, 2]> (h) }"""
    )
    x, y = np.ones((6, 3, 2), np.float32), np.zeros((6, 3, 2), np.float32)
    for source in ((x, y), (x, np.zeros((6, 3), np.int64))):
        loss = "mse" if source[1].ndim == 3 else "cross_entropy"
        with pytest.raises(DataError, match="has the batch on axis 1"):
            Trainer(model, loss=loss).fit(source)
