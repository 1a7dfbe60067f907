"""The trainer: steps, options, saving, all forms of data."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest

import onnxtrain
from onnxtrain.errors import DataError, OptionError, StepError
from onnxtrain.losses import SoftmaxCrossEntropy
from onnxtrain.runtime.session import TrainingSession
from onnxtrain.training.trainer import Trainer
from sentences import raises_sentence
from zoo.arrays import assert_same, copied


def mlp() -> onnx.ModelProto:
    return onnxtrain.examples.mlp((5, 8, 3))


def data(size: int = 24, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 3, size)
    x = rng.normal(size=(size, 5)).astype(np.float32)
    x[np.arange(size), y] += 2
    return x, y


def trainer(**options) -> Trainer:
    settings = {"loss": "softmax_cross_entropy", "optimizer": onnxtrain.Adam(0.01), **options}
    return Trainer(settings.pop("model", mlp()), **settings)


def weights(subject: Trainer) -> dict[str, np.ndarray]:
    return copied(subject.parameters)


def test_train_step_returns_the_loss_before_the_update() -> None:
    subject, (x, y) = trainer(), data()
    before = subject.evaluate((x, y))["loss"]
    assert subject.train_step(x, y) == pytest.approx(before, rel=1e-6)
    assert subject.evaluate((x, y))["loss"] < before


def test_kernels_and_bodies_take_the_same_steps() -> None:
    x, y = data()
    subjects = [trainer(runtime=onnxtrain.RuntimeOptions(kernels=kernels)) for kernels in (None, False)]
    for _ in range(10):
        losses = [subject.train_step(x, y) for subject in subjects]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_accumulated_micro_batches_equal_the_large_batch() -> None:
    x, y = data(22)
    y = np.where(np.arange(22) < 4, -1, y)  # micro-batches of different weight
    loss = SoftmaxCrossEntropy(ignore_index=-1, class_weights=(1.0, 2.0, 0.5))
    whole = trainer(loss=loss, optimizer=onnxtrain.Momentum(0.1), clip_norm=0.5)
    parts = trainer(loss=loss, optimizer=onnxtrain.Momentum(0.1), clip_norm=0.5, accumulate=4)
    for _ in range(5):
        assert parts.train_step(x, y) == pytest.approx(whole.train_step(x, y), rel=1e-5)
        for name, array in weights(whole).items():
            np.testing.assert_allclose(parts.parameters[name], array, rtol=1e-4, atol=1e-6)


def _first_gradient(**options) -> dict[str, np.ndarray]:
    subject, (x, y) = trainer(optimizer=onnxtrain.Momentum(1.0, alpha=0.0), **options), data()
    subject.train_step(x, y)
    return {name: np.array(subject.executor.session.state[f"{name}/V"]) for name in subject.parameters}


def test_clipping_by_norm_scales_all_gradients_together() -> None:
    plain, clipped, loose = _first_gradient(), _first_gradient(clip_norm=0.1), _first_gradient(clip_norm=1e6)
    norm = np.sqrt(sum(np.sum(g.astype(np.float64) ** 2) for g in plain.values()))
    assert norm > 0.1
    for name, gradient in plain.items():
        np.testing.assert_allclose(clipped[name], gradient * (0.1 / norm), rtol=1e-5, atol=1e-8)
        np.testing.assert_allclose(loose[name], gradient, rtol=1e-6)


def test_clipping_by_value_clips_every_element() -> None:
    plain, clipped = _first_gradient(), _first_gradient(clip_value=0.01)
    for name, gradient in plain.items():
        np.testing.assert_allclose(clipped[name], np.clip(gradient, -0.01, 0.01), rtol=1e-5, atol=1e-8)


def test_same_seed_same_weights_and_another_seed_others() -> None:
    results = []
    for seed in (1, 1, 2):
        subject = trainer(seed=seed)
        subject.fit(data(), epochs=2, batch_size=8)
        results.append(weights(subject))
    assert_same(results[0], results[1])
    assert any(not np.array_equal(results[0][name], results[2][name]) for name in results[0])


def test_data_forms_give_the_same_training(tmp_path) -> None:
    x, y = data()
    name = mlp().graph.input[0].name
    np.savez(tmp_path / "data.npz", **{name: x, "label": y})
    np.savez_compressed(tmp_path / "small.npz", **{name: x, "label": y})
    batches = [(x[i : i + 8], y[i : i + 8]) for i in range(0, 24, 8)]
    sources = [(x, y), {name: x, "label": y}, tmp_path / "data.npz", str(tmp_path / "small.npz"), batches]
    results = []
    for source in sources:
        subject = trainer()
        subject.fit(source, epochs=2, batch_size=8, shuffle=False)
        results.append(weights(subject))
    for result in results[1:]:
        assert_same(results[0], result)


def test_one_hot_targets_train_like_labels() -> None:
    x, y = data()
    by_label, by_row = trainer(), trainer()
    by_label.fit((x, y), epochs=1, batch_size=8)
    by_row.fit((x, np.eye(3, dtype=np.float32)[y]), epochs=1, batch_size=8)
    for name, array in weights(by_label).items():
        np.testing.assert_allclose(by_row.parameters[name], array, rtol=1e-4, atol=1e-6)


class Distributions:
    """Batches of unknown types and shapes until they are read."""

    def __iter__(self):
        x, y = data()
        yield x, np.eye(3, dtype=np.float32)[y]


def test_distributions_from_an_iterable_have_to_be_announced() -> None:
    with raises_sentence("array_rank", model_rank=1, hint='For distributions over classes, say targets="values".'):
        trainer().fit(Distributions(), epochs=1)
    assert len(trainer(targets="values").fit(Distributions(), epochs=1).rows) == 1


def test_trained_on_distributions_and_measured_on_labels() -> None:
    x, labels = data()
    soft = np.full((len(labels), 3), 0.1, np.float32)
    soft[np.arange(len(labels)), labels] = 0.8
    subject = trainer()
    before = subject.evaluate((x, soft))["loss"]  # evaluated before training determines the form of the targets
    history = subject.fit((x, soft), validation=(x, labels), metrics=["accuracy"], epochs=2, shuffle=False)
    assert history.rows[-1]["val_accuracy"] == subject.evaluate((x, labels), metrics=["accuracy"])["accuracy"]
    logits = subject.predict(x)
    assert isinstance(logits, np.ndarray)
    log_probability = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    np.testing.assert_allclose(
        subject.evaluate((x, soft))["loss"], -np.mean((soft * log_probability).sum(1)), rtol=1e-5
    )
    np.testing.assert_allclose(
        subject.evaluate((x, labels))["loss"], -np.mean(log_probability[np.arange(len(labels)), labels]), rtol=1e-5
    )
    assert subject.evaluate((x, soft))["loss"] < before


def test_parameters_are_live_and_writable() -> None:
    subject, (x, y) = trainer(), data()
    name = next(iter(subject.parameters))
    subject.parameters[name][...] = 0
    assert not np.any(subject.parameters[name])
    subject.parameters[name] = np.ones_like(subject.parameters[name])
    assert np.all(subject.parameters[name] == 1)
    subject.train_step(x, y)
    assert not np.all(subject.parameters[name] == 1)
    with pytest.raises(KeyError):
        subject.parameters["T"]


def test_train_and_freeze_patterns() -> None:
    names = list(trainer().parameters)
    assert list(trainer(train=names[0]).parameters) == names[:1]
    assert list(trainer(freeze=names[0]).parameters) == names[1:]
    with raises_sentence("no_match", option="train", pattern="'nothing*'", kind="initializer"):
        trainer(train="nothing*")
    with raises_sentence("nothing_trainable", reasons="frozen"):
        trainer(freeze="*")


def test_saved_model_differs_in_the_trained_initializers_only(tmp_path) -> None:
    subject, (x, y) = (
        trainer(freeze="*bias*" if any("bias" in t.name for t in mlp().graph.initializer) else None),
        data(),
    )
    subject.fit((x, y), epochs=1, batch_size=8)
    subject.save(tmp_path / "out.onnx")
    saved, original = onnx.load(tmp_path / "out.onnx"), mlp()
    trained = dict(subject.weights)
    for ours, theirs in zip(saved.graph.initializer, original.graph.initializer, strict=True):
        if ours.name in trained:
            np.testing.assert_array_equal(onnx.numpy_helper.to_array(ours), trained[ours.name])
            theirs.CopyFrom(ours)
    assert saved.SerializeToString() == original.SerializeToString()
    session = onnxruntime.InferenceSession(tmp_path / "out.onnx", providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(
        session.run(None, {original.graph.input[0].name: x})[0], subject.predict(x), rtol=1e-5, atol=1e-6
    )


def test_saved_training_model_resumes(tmp_path) -> None:
    subject, (x, y) = trainer(), data()
    subject.train_step(x, y)
    subject.save_training_model(tmp_path / "training.onnx")
    resumed = onnxtrain.TrainingSession(tmp_path / "training.onnx")
    feeds = {mlp().graph.input[0].name: x, "target": y, "learning_rate": np.float32(0.01)}
    losses = [resumed.step(feeds)["loss"] for _ in range(3)]
    assert losses == [pytest.approx(subject.train_step(x, y), rel=1e-6) for _ in range(3)]


def test_metrics_and_custom_functions() -> None:
    subject, (x, y) = trainer(optimizer=onnxtrain.Adam(0.05)), data(64)
    history = subject.fit((x, y), validation=(x, y), epochs=20, batch_size=16, metrics=["accuracy", worst])
    assert history.rows[-1]["val_accuracy"] > 0.9
    expected = np.mean(np.argmax(subject.predict(x), axis=1) == y)
    assert subject.evaluate((x, y), metrics=["accuracy"])["accuracy"] == pytest.approx(expected)
    assert "val_worst" in history.rows[-1]


def worst(y_true: np.ndarray, y_pred: np.ndarray) -> float:
    return float(np.max(np.abs(y_pred)))


def test_schedules_reach_the_step() -> None:
    subject = trainer()
    history = subject.fit(data(), epochs=4, batch_size=8, schedule="linear(0.0)")
    rates = history.column("learning_rate")
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 0.2 * rates[0]


def test_custom_loss_function() -> None:
    def squared(op, prediction, target):
        difference = prediction - target
        return op.ReduceMean(difference * difference, keepdims=0)

    x, _ = data()
    target = np.random.default_rng(1).normal(size=(24, 3)).astype(np.float32)
    ours, built_in = trainer(loss=squared), trainer(loss="mean_squared_error")
    for _ in range(3):
        assert ours.train_step(x, target) == pytest.approx(built_in.train_step(x, target), rel=1e-5)


def test_loss_as_a_model(tmp_path) -> None:
    text = """<ir_version: 8, opset_import: ["": 18]> loss (float[N,3] p, float[N,3] t) => (float l) {
        d = Sub(p, t)  s = Mul(d, d)  l = ReduceMean<keepdims=0>(s) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "loss.onnx")
    x, _ = data()
    target = np.random.default_rng(1).normal(size=(24, 3)).astype(np.float32)
    ours, built_in = trainer(loss=str(tmp_path / "loss.onnx")), trainer(loss="mean_squared_error")
    for _ in range(3):
        assert ours.train_step(x, target) == pytest.approx(built_in.train_step(x, target), rel=1e-5)


def test_loss_as_an_output_of_the_model() -> None:
    text = """<ir_version: 8, opset_import: ["": 18]> m (float[N,2] x, float[N,1] t) => (float[N,1] y, float cost)
        <float[2,1] w = {0.5, -0.5}> { y = MatMul(x, w)  d = Sub(y, t)  s = Mul(d, d)
        cost = ReduceMean<keepdims=0>(s) }"""
    subject = Trainer(onnx.parser.parse_model(text), loss="output:cost", optimizer=onnxtrain.Momentum(0.1))
    x = np.random.default_rng(0).normal(size=(8, 2)).astype(np.float32)
    feeds = {"x": x, "t": x @ np.array([[1.0], [2.0]], dtype=np.float32)}
    losses = [subject.train_step(feeds) for _ in range(50)]
    assert losses[-1] < 1e-2 * losses[0]
    history = subject.fit([feeds, feeds], epochs=1)
    assert history.rows[0]["step"] == 2


@pytest.mark.parametrize(("final", "loss"), [("Softmax", "softmax_cross_entropy"), ("Sigmoid", "binary_cross_entropy")])
def test_final_activation_that_the_loss_contains_is_seen_through(final: str, loss: str) -> None:
    text = f"""<ir_version: 8, opset_import: ["": 18]> m (float[N,2] x) => (float[N,2] p)
        <float[2,2] w = {{0.5, -0.5, 0.1, 0.2}}> {{ z = MatMul(x, w)  p = {final}(z) }}"""
    plain = text.replace(f"p = {final}(z)", "p = Identity(z)")
    x = np.random.default_rng(0).normal(size=(4, 2)).astype(np.float32)
    y = np.array([0, 1, 1, 0]) if final == "Softmax" else np.eye(2, dtype=np.float32)[[0, 1, 1, 0]]
    losses = []
    for source in (text, plain):
        subject = Trainer(onnx.parser.parse_model(source), loss=loss, optimizer=onnxtrain.Momentum(0.1))
        losses.append([subject.train_step(x, y) for _ in range(4)])
    assert losses[0] == losses[1]


def test_fixed_batch_size_trains_on_all_examples() -> None:
    text = """<ir_version: 8, opset_import: ["": 18]> m (float[4,2] x) => (float[4,1] y) <float[2,1] w = {0.5, 1}>
        { y = MatMul(x, w) }"""
    subject = Trainer(onnx.parser.parse_model(text), loss="mean_squared_error", optimizer=onnxtrain.Momentum(0.1))
    x = np.random.default_rng(0).normal(size=(10, 2)).astype(np.float32)
    history = subject.fit((x, x[:, :1]), epochs=2)
    assert history.rows[-1]["step"] == 6
    assert subject.fit((x[:3], x[:3, :1])).rows[-1]["step"] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "wing"}, "There is no loss 'wing'; use softmax_cross_entropy"),
        ({"loss": "output:nothing"}, "loss='output:nothing', but the model's outputs are"),
        ({"loss": 3}, "A loss is a name, a Loss, a path or a function, or a mapping from outputs to such, not a int"),
        ({"output": "nothing"}, "output='nothing', but the outputs are"),
        ({"batch_norm": "yes"}, "batch_norm is 'yes'; it is 'frozen', 'train' or 'sync'"),
        ({"clip_norm": -1.0}, "clip_norm is -1.0; it needs a finite number above 0"),
        ({"accumulate": 0}, "accumulate is 0; it needs a number of micro-batches of at least 1"),
        ({"threads": 0}, "threads is 0; it needs a number of at least 1"),
        (
            {"threads": 10**6},
            r"threads is 1000000; it needs a number from 1 to \d+, since more would only wait for each",
        ),
    ],
)
def test_bad_options(options, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        trainer(**options)


@pytest.mark.parametrize(
    ("inputs", "targets", "message"),
    [
        (np.zeros((4, 6)), np.zeros(4, int), r"input 'input' of the batch has shape \(4, 6\), .* needs \(batch, 5\)"),
        (np.zeros((4, 5)), np.zeros((4, 2, 2), int), r"the target array of the batch has rank 3"),
        (np.zeros((4, 5)), None, "This loss needs targets"),
        ({"input": np.zeros((4, 5))}, None, "the batch holds only the input 'input': add an array of targets"),
        ({"input": np.zeros((4, 5)), "a": 0, "b": 0}, None, "the batch has 'a' and 'b' besides the inputs"),
        ((np.zeros((4, 5)), np.zeros((4, 5)), np.zeros((4, 5)), 0), None, "the batch is a sequence of 4"),
        ({"wrong": np.zeros((4, 5))}, np.zeros(4, int), "the batch has no array for input 'input': it holds 'wrong'"),
    ],
)
def test_arrays_that_do_not_fit(inputs, targets, message: str) -> None:
    with pytest.raises(DataError, match=message):
        trainer().train_step(inputs, targets)


@pytest.mark.parametrize("form", ["mapping", "pair", "mapping and targets", "with weights"])
def test_a_step_takes_the_batches_of_fit(form: str) -> None:
    x, y = data()
    weights = np.arange(len(x), dtype=np.float32)
    batch = {
        "mapping": {"input": x, "labels": y},
        "pair": (x, y),
        "mapping and targets": ({"input": x}, y),
        "with weights": (x, y, weights),
    }[form]
    whole, step, plain = trainer(), trainer(), trainer()
    loss = whole.fit(batch, epochs=1, batch_size=len(x), shuffle=False, progress=False).rows[0]["loss"]
    assert step.train_step(batch) == pytest.approx(loss, rel=1e-6)
    given = {"sample_weight": weights} if form == "with weights" else {}
    assert plain.train_step(x, y, **given) == pytest.approx(loss, rel=1e-6)
    for name, value in plain.parameters.items():
        np.testing.assert_array_equal(step.parameters[name], value)


def test_labels_out_of_range() -> None:
    x, y = data()
    y[5] = 3
    with pytest.raises(DataError, match="3"):
        trainer().fit((x, y))


def test_a_session_that_could_not_be_opened_fails_in_the_same_way_again(monkeypatch):
    trainer = onnxtrain.Trainer(onnxtrain.examples.mlp((4, 8, 3)), loss="softmax_cross_entropy")

    def fail(*arguments, **named):
        raise StepError("ONNX Runtime refused the graph.")

    with monkeypatch.context() as patch:
        patch.setattr(TrainingSession, "of_entries", fail)
        for call in (lambda: trainer.train_step(np.ones((2, 4), np.float32), np.arange(2)), trainer.training_model):
            with pytest.raises(StepError, match="refused the graph"):
                call()
    assert np.isfinite(trainer.train_step(np.ones((2, 4), np.float32), np.arange(2)))


@pytest.mark.parametrize("targets", [np.zeros(1, int), np.zeros(5, int), np.eye(3, dtype=np.float32)[:1]])
def test_a_step_refuses_targets_of_other_rows(targets):
    trainer = onnxtrain.Trainer(onnxtrain.examples.mlp((4, 8, 3)), loss="softmax_cross_entropy")
    with raises_sentence("array_lengths", what="the target array of the batch", got=len(targets), wanted=12):
        trainer.train_step(np.zeros((12, 4), np.float32), targets)


@pytest.mark.parametrize("weights", [None, np.ones(2, np.float32)])
def test_a_step_refuses_a_batch_again(weights):
    """A plan knows only the batches that passed its checks."""
    trainer = onnxtrain.Trainer(onnxtrain.examples.mlp((4, 8, 3)), loss="softmax_cross_entropy")
    x, y = np.zeros((12, 4), np.float32), np.zeros(12, int)
    for _ in range(2):
        trainer.train_step(x, y, None if weights is None else np.ones(12, np.float32))
        for _ in range(2):
            with raises_sentence("array_lengths"):
                trainer.train_step(x, y[:5] if weights is None else y, weights)


def test_a_step_refuses_rows_of_different_lengths():
    trainer = onnxtrain.Trainer(onnxtrain.examples.mlp((4, 8, 3)), loss="mean_squared_error")
    with raises_sentence("row_lengths", what="the target array"):
        trainer.train_step(np.zeros((2, 4), np.float32), [[1.0, 2.0], [1.0]])


def test_predict_all_names_every_output():
    model = onnxtrain.examples.mlp((4, 3))
    (name,) = [value.name for value in model.graph.output]
    one = Trainer(model, loss="cross_entropy")
    x = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    assert list(one.predict_all(x)) == list(onnxtrain.predict_all(model, x)) == [name]
    np.testing.assert_array_equal(one.predict_all(x, batch_size=2)[name], one.predict(x, batch_size=2))
    np.testing.assert_array_equal(onnxtrain.predict_all(model, x)[name], onnxtrain.predict(model, x))
    np.testing.assert_array_equal(one.predict_all(x, labels=True)[name], one.predict(x, labels=True))
