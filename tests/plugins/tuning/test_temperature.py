"""Temperature scaling: the temperature of a search by hand, and a model whose logits are divided by it."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain import layers
from onnxtrain.errors import DataError, OptionError
from onnxtrain.training.examples import mlp

RNG = np.random.default_rng(0)
X = RNG.normal(size=(300, 4)).astype(np.float32)
SCORES = (X @ RNG.normal(size=(4, 3)) + RNG.normal(size=(300, 3))) * 3
Y, YES = SCORES.argmax(1), (SCORES[:, :1] > 0).astype(np.float32)


def sure(outputs: int, loss: str) -> onnxtrain.Trainer:
    """A model that is too sure of its classes."""
    trainer = onnxtrain.Trainer(mlp((4, outputs)), loss=loss, optimizer="adam(lr=0.05)")
    trainer.fit(X[:60], (YES if outputs == 1 else Y)[:60], epochs=30, progress=False)
    trainer.set_weights({name: 4 * array for name, array in trainer.get_weights().items()})
    return trainer


def entropy(logits: np.ndarray, labels: np.ndarray) -> float:
    if logits.shape[1] == 1:
        logits, labels = np.concatenate([0 * logits, logits], 1), labels[:, 0].astype(int)
    shifted = logits - logits.max(1, keepdims=True)
    return float((np.log(np.exp(shifted).sum(1)) - shifted[np.arange(len(labels)), labels]).mean())


def best_by_hand(logits: np.ndarray, labels: np.ndarray) -> float:
    """Golden-section search over the logarithm."""
    low, high, ratio = np.log(0.01), np.log(100), (np.sqrt(5) - 1) / 2
    while high - low > 1e-9:
        one, other = high - ratio * (high - low), low + ratio * (high - low)
        if entropy(logits / np.exp(one), labels) < entropy(logits / np.exp(other), labels):
            high = other
        else:
            low = one
    return float(np.exp((low + high) / 2))


@pytest.mark.parametrize(("outputs", "loss", "labels"), [(3, "cross_entropy", Y), (1, "bce", YES)])
def test_the_temperature_is_the_best_one(outputs, loss, labels, tmp_path):
    trainer = sure(outputs, loss)
    logits = trainer.predict(X[60:]).astype(np.float64)
    wanted = best_by_hand(logits, labels[60:])
    for model in (trainer, trainer.model()):
        found = onnxtrain.calibrate(model, X[60:], labels[60:], **({} if model is trainer else {"loss": loss}))
        assert found.temperature == pytest.approx(wanted, rel=1e-6)
        assert found.temperature > 1.5
        assert found.loss == pytest.approx(entropy(logits, labels[60:]), rel=1e-5)
        assert found.calibrated_loss == pytest.approx(entropy(logits / wanted, labels[60:]), rel=1e-5)
        found.save(tmp_path / "calibrated.onnx")
        onnx.checker.check_model(tmp_path / "calibrated.onnx", full_check=True)
        after = onnxtrain.predict(tmp_path / "calibrated.onnx", X)
        np.testing.assert_allclose(after, trainer.predict(X) / wanted, rtol=1e-5, atol=1e-5)
        assert [value.name for value in found.model.graph.output] == ["logits"]


def test_a_softmax_at_the_end_reads_divided_logits():
    trainer = sure(3, "cross_entropy")
    model = onnxtrain.append(trainer.model(), layers.Softmax())
    found = onnxtrain.calibrate(model, (X[60:], Y[60:]))
    assert found.temperature == pytest.approx(onnxtrain.calibrate(trainer, X[60:], Y[60:]).temperature, rel=1e-6)
    assert [node.op_type for node in found.model.graph.node][-2:] == ["Div", "Softmax"]
    np.testing.assert_array_equal(onnxtrain.predict(found.model, X).argmax(1), onnxtrain.predict(model, X).argmax(1))


@pytest.mark.parametrize(("last", "options"), [("Sigmoid", {}), ("Softmax", {"axis": 0})])
def test_a_last_layer_that_the_loss_takes_for_logits(last, options):
    model = sure(3, "cross_entropy").model()
    model.graph.node[-1].output[0] = "before"
    model.graph.node.append(onnx.helper.make_node(last, ["before"], ["logits"], **options))
    found = onnxtrain.calibrate(model, (X[60:], Y[60:]))
    after = onnxtrain.evaluate(found.model, (X[60:], Y[60:]), loss="cross_entropy", batch_size=1000)["loss"]
    assert after == pytest.approx(found.calibrated_loss, rel=1e-4)


def test_logits_and_probabilities_are_divided_alike():
    model = sure(3, "cross_entropy").model()
    model.graph.node.append(onnx.helper.make_node("Softmax", ["logits"], ["probabilities"]))
    model.graph.output.append(onnx.helper.make_tensor_value_info("probabilities", onnx.TensorProto.FLOAT, ["N", 3]))
    first = onnxtrain.calibrate(onnxtrain.Trainer(model, loss={"logits": "cross_entropy"}), X[60:], Y[60:])
    model.graph.output.insert(0, model.graph.output.pop())
    for found in (first, onnxtrain.calibrate(model, (X[60:], Y[60:]))):
        results = onnxtrain.predict_all(found.model, X)
        powers = np.exp(results["logits"])
        np.testing.assert_allclose(results["probabilities"], powers / powers.sum(1, keepdims=True), rtol=1e-4)
        assert found.temperature == pytest.approx(first.temperature, rel=1e-4)


def test_ignored_labels_distributions_and_texts(tmp_path):
    trainer = sure(3, "cross_entropy")
    wanted = onnxtrain.calibrate(trainer, X[100:], Y[100:]).temperature
    some = np.where(np.arange(300) < 100, -100, Y)
    assert onnxtrain.calibrate(trainer, X, some).temperature == pytest.approx(wanted, rel=1e-9)
    assert onnxtrain.calibrate(trainer, X[100:], np.eye(3)[Y[100:]]).temperature == pytest.approx(wanted, rel=1e-5)
    texts = onnxtrain.Trainer(trainer.model(), loss="cross_entropy")
    texts.labels = ("a", "b", "c")
    names = np.array(["a", "b", "c"])[Y]
    assert onnxtrain.calibrate(texts, X[100:], names[100:]).temperature == pytest.approx(wanted, rel=1e-9)
    lines = [",".join(map(str, [*row, name])) for row, name in zip(X[100:], names[100:], strict=True)]
    (tmp_path / "table.csv").write_text("\n".join(["a,b,c,d,kind", *lines]))
    found = onnxtrain.calibrate(texts, tmp_path / "table.csv", target="kind")
    assert found.temperature == pytest.approx(wanted, rel=1e-9)
    with pytest.raises(DataError, match="the targets are the labels 'a', 'b', 'c', but"):
        onnxtrain.calibrate(texts.model(), tmp_path / "table.csv", target="kind")


def test_no_temperature_is_best():
    trainer = sure(3, "cross_entropy")
    predicted = trainer.predict(X)
    for labels, message in ((predicted.argmax(1), "are right for all"), (predicted.argmin(1), "say nothing about")):
        with pytest.raises(OptionError, match=f"The logits {message}"):
            onnxtrain.calibrate(trainer, X, labels)
    with pytest.raises(OptionError, match="calibrate needs logits of classes"):
        onnxtrain.calibrate(mlp((4, 3)), X, SCORES.astype(np.float32), loss="mse")
    model = mlp((4, 3))
    for tensor in model.graph.initializer:
        tensor.CopyFrom(
            onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor) * np.float32("nan"), tensor.name)
        )
    with pytest.raises(OptionError, match="are NaN"):
        onnxtrain.calibrate(model, X, Y)
