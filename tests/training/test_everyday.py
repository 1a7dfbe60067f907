"""Everyday use of a trainer: fit(x, y), sample weights, copies, reading and setting weights."""

import copy
import pickle

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain import examples
from onnxtrain.errors import DataError, OptionError
from onnxtrain.losses import SoftmaxCrossEntropy
from sentences import raises_sentence

torch = pytest.importorskip("torch")

RNG = np.random.default_rng(0)
X = RNG.normal(size=(12, 4)).astype(np.float32)
LABELS = RNG.integers(0, 3, 12)
LOSS = "softmax_cross_entropy"


def trainer(loss=LOSS, **options):
    return onnxtrain.Trainer(examples.mlp((4, 8, 3)), loss=loss, optimizer=onnxtrain.Adam(0.05), **options)


def bits(one):
    return {name: array.tobytes() for name, array in one.executor.states.items()}


def test_inputs_and_targets_apart_are_as_in_a_tuple():
    one, other = trainer(), trainer()
    history = one.fit(X, LABELS, epochs=2, batch_size=5)
    assert history.rows == other.fit((X, LABELS), epochs=2, batch_size=5).rows
    assert bits(one) == bits(other)
    assert one.evaluate(X, LABELS, metrics=["accuracy"]) == other.evaluate((X, LABELS), metrics=["accuracy"])
    named = trainer()
    named.fit({"input": X}, LABELS, epochs=2, batch_size=5)
    assert bits(named) == bits(one)


def test_a_fraction_is_held_out():
    one, other = trainer(seed=3), trainer(seed=3)
    rows = one.fit(X, LABELS, validation=0.25, batch_size=4, epochs=2).rows
    from onnxtrain.data import split_validation

    parts = split_validation(other.open_data((X, LABELS)), 0.25, 3)
    assert (parts.train.size, parts.validation.size) == (9, 3)
    assert rows == other.fit(parts.train, validation=parts.validation, batch_size=4, epochs=2).rows
    with pytest.raises(OptionError, match="validation fraction is 1"):
        trainer().fit(X, LABELS, validation=1)


def test_without_shuffling_the_last_examples_are_held_out():
    one, other = trainer(), trainer()
    rows = one.fit(X, LABELS, validation=0.25, shuffle=False, batch_size=4, epochs=2).rows
    parts = {"validation": (X[9:], LABELS[9:]), "shuffle": False}
    assert rows == other.fit(X[:9], LABELS[:9], batch_size=4, epochs=2, **parts).rows


DISTRIBUTIONS = RNG.dirichlet(np.ones(3), 12).astype(np.float32)
NUMBERS = RNG.normal(size=(12, 3)).astype(np.float32)
NOT_ALL = np.where(np.arange(12) % 5 == 0, -100, LABELS)


def softmax(z, t, **options):
    t = torch.as_tensor(t)
    return torch.nn.functional.cross_entropy(z, t, reduction="none", **options)


CASES = {
    "labels": (LOSS, LABELS, lambda z: softmax(z, LABELS), 12),
    "ignored": (LOSS, NOT_ALL, lambda z: softmax(z, NOT_ALL), 9),
    "smoothed": (
        SoftmaxCrossEntropy(label_smoothing=0.2),
        LABELS,
        lambda z: softmax(z, LABELS, label_smoothing=0.2),
        12,
    ),
    "distributions": (LOSS, DISTRIBUTIONS, lambda z: softmax(z, DISTRIBUTIONS), 12),
    "binary": (
        "binary_cross_entropy",
        (NUMBERS > 0).astype(np.float32),
        lambda z: torch.nn.functional.binary_cross_entropy_with_logits(
            z, torch.as_tensor((NUMBERS > 0).astype(np.float32)), reduction="none"
        ).mean(1),
        12,
    ),
    "squares": ("mean_squared_error", NUMBERS, lambda z: ((z - torch.as_tensor(NUMBERS)) ** 2).mean(1), 12),
    "distances": ("mean_absolute_error", NUMBERS, lambda z: (z - torch.as_tensor(NUMBERS)).abs().mean(1), 12),
    "huber": (
        "huber(delta=0.5)",
        NUMBERS,
        lambda z: torch.nn.functional.huber_loss(z, torch.as_tensor(NUMBERS), reduction="none", delta=0.5).mean(1),
        12,
    ),
}


def torch_weights(model, weights, terms, count):
    """Return PyTorch's parameters after one step of gradient descent with learning rate 0.5."""
    tensors = {
        t.name: torch.tensor(onnx.numpy_helper.to_array(t).copy(), requires_grad=True) for t in model.graph.initializer
    }
    w1, b1, w2, b2 = tensors.values()
    product = lambda x, w: x @ w if x.shape[1] == w.shape[0] else x @ w.T  # noqa: E731
    z = product(torch.relu(product(torch.as_tensor(X), w1) + b1), w2) + b2
    loss = (terms(z) * torch.as_tensor(weights)).sum() / count
    loss.backward()
    return loss.item(), {name: (t - 0.5 * t.grad).detach().numpy() for name, t in tensors.items()}


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_weights_of_examples_multiply_their_terms(name, accumulate):
    loss, targets, terms, count = CASES[name]
    weights = RNG.random(12).astype(np.float32) * 3
    model = examples.mlp((4, 8, 3))
    one = onnxtrain.Trainer(model, loss=loss, optimizer=onnxtrain.Momentum(0.5, alpha=0.0), accumulate=accumulate)
    expected, values = torch_weights(model, weights, terms, count)
    assert one.train_step(X, targets, sample_weight=weights) == pytest.approx(expected, rel=1e-5)
    for key, value in values.items():
        np.testing.assert_allclose(one.parameters[key], value, rtol=1e-4, atol=1e-6)
    other = onnxtrain.Trainer(model, loss=loss, optimizer=onnxtrain.Momentum(0.5, alpha=0.0), accumulate=accumulate)
    other.fit(X, targets, sample_weight=weights, batch_size=12, shuffle=False)
    for key, value in one.parameters.items():
        np.testing.assert_array_equal(other.parameters[key], value)


def test_weights_follow_their_examples():
    """Examples of weight zero count like absent ones, in any order and part of the data."""
    weights = (np.arange(12) % 2).astype(np.float64)
    one = trainer(seed=1)
    one.fit(X, LABELS, sample_weight=weights, batch_size=12, epochs=3)
    wrong = np.where(weights > 0, LABELS, (LABELS + 1) % 3)
    other = trainer(seed=1)
    other.fit(X, wrong, sample_weight=weights, batch_size=12, epochs=3)
    for name, array in one.parameters.items():
        np.testing.assert_allclose(other.parameters[name], array, atol=1e-6)
    one.fit(X, LABELS, epochs=1)  # without weights
    assert not one.config.weighted


def test_validation_has_no_weights():
    one = trainer()
    rows = one.fit(X, LABELS, sample_weight=np.full(12, 2.0), validation=(X, LABELS), batch_size=12).rows
    assert rows[0]["val_loss"] == one.evaluate(X, LABELS)["loss"]
    assert np.isfinite(one.fit(X, LABELS, sample_weight=np.ones(12), validation=0.25).rows[0]["val_loss"])


def test_weights_of_examples_in_a_padded_batch():
    model = examples.mlp((4, 8, 3))
    fixed = onnx.ModelProto.FromString(model.SerializeToString())
    for value in (*fixed.graph.input, *fixed.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 5
    weights = RNG.random(12)
    free, padded = (onnxtrain.Trainer(m, loss=LOSS) for m in (model, fixed))
    free.fit(X, LABELS, sample_weight=weights, batch_size=5, shuffle=False)
    padded.fit(X, LABELS, sample_weight=weights, shuffle=False)
    for name, array in free.parameters.items():
        np.testing.assert_allclose(padded.parameters[name], array, atol=1e-6)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (-np.ones(12), "needs one finite number of at least 0"),
        (np.ones((12, 1)), "sample_weight is float64 of shape"),
        (np.full(12, np.nan), "needs one finite number of at least 0"),
        (np.ones(5), "5 examples|have 5|has 5|different lengths"),
    ],
)
def test_invalid_sample_weights(weights, message):
    with pytest.raises(DataError, match=message):
        trainer().fit(X, LABELS, sample_weight=weights)
    with pytest.raises(DataError, match=r"sample_weight"):
        trainer().train_step(X, LABELS, sample_weight=weights)


def test_losses_without_terms_by_example_take_no_weights():
    one = trainer(loss=lambda op, prediction, target: op.ReduceMean(abs(prediction - target), keepdims=0))
    with pytest.raises(OptionError, match="the loss custom has no terms by example"):
        one.fit(X, NUMBERS, sample_weight=np.ones(12))
    with raises_sentence("goes_with_arrays", what="sample_weight"):
        trainer().fit([(X, LABELS)], sample_weight=np.ones(12))


def test_the_model_in_memory_is_the_one_that_is_saved(tmp_path):
    one = trainer()
    one.train_step(X, LABELS)
    one.save(tmp_path / "model.onnx")
    saved = onnx.load(tmp_path / "model.onnx")
    found = one.model()
    for tensors in (saved.graph.initializer, found.graph.initializer):
        for tensor in tensors:
            values = onnx.numpy_helper.to_array(tensor)
            tensor.ClearField("float_data")
            tensor.raw_data = values.tobytes()
    assert found == saved
    np.testing.assert_array_equal(onnxtrain.predict(found, X), one.predict(X))


def test_predict_and_evaluate_need_no_trainer(tmp_path):
    one = trainer()
    one.save(tmp_path / "model.onnx")
    np.testing.assert_array_equal(onnxtrain.predict(tmp_path / "model.onnx", X), one.predict(X))
    assert onnxtrain.evaluate(one.model(), (X, LABELS), loss=LOSS) == one.evaluate(X, LABELS)


def test_weights_go_out_and_in():
    one, other = trainer(), trainer()
    one.train_step(X, LABELS)
    other.set_weights(one.get_weights())
    assert {n: a.tobytes() for n, a in other.parameters.items()} == {n: a.tobytes() for n, a in one.parameters.items()}
    flat = one.get_weights(flat=True)
    assert flat.shape == (sum(array.size for array in one.parameters.values()),)
    one.train_step(X, LABELS)
    assert not np.array_equal(flat, one.get_weights(flat=True))  # a copy
    one.set_weights(flat)
    np.testing.assert_array_equal(one.get_weights(flat=True), flat)
    name = next(iter(one.parameters))
    one.parameters.update({name: np.zeros_like(one.parameters[name])})
    assert not one.parameters[name].any()


def test_weights_that_do_not_fit_change_nothing():
    one = trainer()
    before, name = one.get_weights(flat=True), next(iter(one.parameters))
    good = {name: np.zeros_like(one.parameters[name])}
    for wrong, message in (
        (good | {"nothing": np.zeros(3)}, "'nothing' is not a parameter; they are"),
        (good | {list(one.parameters)[1]: np.zeros(99, np.float32)}, r"got float32 of shape \(99,\)"),
        (np.zeros(3), r"array of shape \(3,\); together they have \d+ elements"),
    ):
        with pytest.raises(OptionError, match=message):
            one.set_weights(wrong)
    np.testing.assert_array_equal(one.get_weights(flat=True), before)
    with pytest.raises(OptionError, match="cannot be deleted"):
        del one.parameters[name]


@pytest.mark.parametrize("how", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_trains_independently(how):
    name = trainer().objective.matmul_weights[0]
    mask = np.arange(trainer().parameters[name].size).reshape(trainer().parameters[name].shape) % 3 > 0
    one = trainer(masks={name: mask}, clip_norm=0.5, seed=4)
    one.train_step(X, np.eye(3, dtype=np.float32)[LABELS])
    one.learning_rate = 0.01
    other = how(one)
    assert isinstance(other, onnxtrain.Trainer)
    assert (other.learning_rate, other.config.seed, bits(other)) == (0.01, 4, bits(one))
    before = bits(one)
    losses = [other.train_step(X, np.eye(3, dtype=np.float32)[LABELS]) for _ in range(3)]
    assert bits(one) == before
    assert losses == [one.train_step(X, np.eye(3, dtype=np.float32)[LABELS]) for _ in range(3)]
    assert bits(one) == bits(other)


def test_examples_by_index_take_weights():
    """A dataset that returns an example for an index takes one weight for each, as arrays do."""

    class Indexed:
        def __len__(self):
            return len(X)

        def __getitem__(self, index):
            return X[index], LABELS[index]

    weights = np.arange(12) / 6
    found = []
    for data in ((X, LABELS), Indexed()):
        one = trainer()
        one.fit(data, sample_weight=weights, epochs=2, batch_size=5, progress=False)
        found.append([*one.get_weights(flat=True), one.evaluate(data, sample_weight=weights)["loss"]])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-6)
    with raises_sentence("number_of_weights", what="sample_weight", got=3, wanted=12, name="the Indexed"):
        trainer().fit(Indexed(), sample_weight=np.ones(3))
