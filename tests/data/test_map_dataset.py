"""Map-style datasets: equal to arrays, or one sentence for a misfit."""

import numpy as np
import pytest

import onnxtrain
from onnxtrain import examples
from onnxtrain.data import TensorSpec, open_dataset
from onnxtrain.errors import DataError
from sentences import raises_sentence

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 4)).astype(np.float32)
LABELS = X[:, :3].argmax(1)
TEXTS = np.array(["ant", "bee", "cow"])[LABELS]


class Pairs:
    """As PyTorch's map-style datasets are."""

    def __init__(self, x=X, y=LABELS, form=lambda x, y: (x, y)):
        self.x, self.y, self.form = x, y, form

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.form(self.x[index], self.y[index])


class Batched(Pairs):
    def __getitems__(self, indices):
        return [self[index] for index in indices]

    def __getitem__(self, index):
        return {"input": self.x[index], "label": int(self.y[index]), "id": index}


def trainer():
    return onnxtrain.Trainer(examples.mlp((4, 8, 3)), loss="softmax_cross_entropy", seed=2)


@pytest.mark.parametrize("source", [Pairs(), Batched(), Pairs(y=TEXTS), Pairs(form=lambda x, y: [x, int(y)])])
def test_training_equals_training_on_arrays(source):
    target = "label" if isinstance(source, Batched) else None
    ours, theirs = trainer(), trainer()
    options = {"epochs": 2, "batch_size": 7, "validation": 0.25, "metrics": "accuracy"}
    rows = ours.fit(source, target=target, **options).rows
    assert rows == theirs.fit(X, TEXTS if source.y is TEXTS else LABELS, **options).rows
    assert ours.labels == (("ant", "bee", "cow") if source.y is TEXTS else None)
    assert ours.evaluate(source, target=target) == theirs.evaluate(X, source.y)


def test_predictions_of_one_array_for_an_example():
    class Inputs(Pairs):
        def __getitem__(self, index):
            return self.x[index]

    np.testing.assert_array_equal(
        onnxtrain.predict(examples.mlp((4, 3)), Inputs()), onnxtrain.predict(examples.mlp((4, 3)), X)
    )


def test_pytorch():
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(LABELS))
    half = torch.utils.data.Subset(data, range(20))
    assert trainer().fit(half, batch_size=6).rows == trainer().fit(X[:20], LABELS[:20], batch_size=6).rows


def test_mismatches():
    with raises_sentence("empty_dataset", what="the Pairs"):
        trainer().fit(Pairs(X[:0]))
    ragged = [*X[:39], np.zeros(5, np.float32)]
    with raises_sentence("part_shapes_differ", what="part 0", got=(5,), example=39, dataset="the Pairs"):
        trainer().fit(Pairs(ragged))
    with raises_sentence("array_shape", what="input 'input' of the batch of the examples 22, 32, 23 ..."):
        trainer().fit(Pairs(X[:, :3]))
    broken = X.copy()
    broken[5, 1] = np.nan
    with raises_sentence(
        "holds_at_example", what="input 'input' of the batch of the examples 22, 32, 23 ...", value="nan"
    ):
        trainer().fit(Pairs(broken))
    with raises_sentence("label_range", got=7, example=0, wanted="0 to 2 (3 classes)"):
        trainer().fit(Pairs(y=np.full(40, 7)))
    specs = [TensorSpec("input", np.dtype(np.float32), ("N", 4))]
    with pytest.raises(DataError, match="has 'label' and 'id' besides the inputs"):
        next(open_dataset(Batched(), specs).batches(4))


def test_labels_to_ignore_behind_the_first_examples():
    """The first examples alone are read in advance, and the loss takes what comes later."""
    labels = np.where(np.arange(len(X)) > 35, -100, LABELS)
    ours, theirs = trainer(), trainer()
    ours.fit(Pairs(y=labels), epochs=1, batch_size=8, shuffle=False, progress=False)
    theirs.fit(X, labels, epochs=1, batch_size=8, shuffle=False, progress=False)
    np.testing.assert_array_equal(ours.get_weights(flat=True), theirs.get_weights(flat=True))


def test_a_first_batch_without_targets():
    batches = [(X[:8], np.full((8, 1), np.nan, np.float32)), (X[8:], X[8:, :1])]
    other = onnxtrain.Trainer(examples.mlp((4, 8, 1)), loss="mse")
    with pytest.warns(onnxtrain.errors.TrainingHint, match="the list: some targets are missing"):
        other.fit(batches, progress=False)
