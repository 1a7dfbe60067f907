"""Datasets: every data format gives the same batches; order of an epoch, resuming within it, splitting."""

import collections

import numpy as np
import pytest

from onnxtrain.data import (
    ArrayDataset,
    open_dataset,
    split_validation,
)
from onnxtrain.errors import DataError
from sentences import raises_sentence
from tensor_specs import ONE, TWO, X, Y

M = np.arange(15, dtype=np.int32).reshape(5, 3)


class Tensor:
    """Imitation of a PyTorch tensor: no conversion without detach() and cpu()."""

    dtype = "torch.float32"

    def __init__(self, array, steps=()):
        self.array, self.steps = array, steps

    def detach(self):
        return Tensor(self.array, (*self.steps, "detach"))

    def cpu(self):
        return Tensor(self.array, (*self.steps, "cpu"))

    def numpy(self):
        assert self.steps == ("detach", "cpu")
        return self.array


class OnlyDLPack:
    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class OnlyArray:
    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return self.array


class Loader:
    """A PyTorch-style loader: iterable again and again, with a length."""

    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)

    def __len__(self):
        return len(self.items)


PARTS = [slice(0, 2), slice(2, 4), slice(4, 5)]

TWO_INPUT_SOURCES = {
    "mapping": {"image": X, "mask": M, "label": Y},
    "mapping in another order": {"label": Y, "mask": M, "image": X},
    "tuple of arrays": ((X, M), Y),
    "list": [[X, M], Y],
    "flat tuple": (X, M, Y),
    "tuple with mapping": ({"mask": M, "image": X}, Y),
    "list of numbers as targets": ((X, M), [0, 1, 2, 3, 4]),
    "tensors": ((Tensor(X), OnlyDLPack(M)), OnlyArray(Y)),
    "list of tuples": [((X[p], M[p]), Y[p]) for p in PARTS],
    "list of flat tuples": [(X[p], M[p], Y[p]) for p in PARTS],
    "list of lists": [[X[p], M[p], Y[p]] for p in PARTS],
    "list of mappings": [{"image": X[p], "mask": M[p], "label": Y[p]} for p in PARTS],
    "loader of tensors": Loader([[Tensor(X[p]), Tensor(M[p]), Tensor(Y[p])] for p in PARTS]),
    "loader of mappings": Loader([(collections.OrderedDict(image=X[p], mask=M[p]), Y[p]) for p in PARTS]),
    "function": lambda: (((X[p], M[p]), Y[p]) for p in PARTS),
}


@pytest.mark.parametrize("form", TWO_INPUT_SOURCES)
def test_every_form_gives_the_same_batches(form):
    dataset = open_dataset(TWO_INPUT_SOURCES[form], TWO)
    for epoch in range(2):
        batches = list(dataset.batches(2, epoch=epoch))
        assert [batch.size for batch in batches] == [2, 2, 1]
        for part, batch in zip(PARTS, batches, strict=True):
            assert list(batch.inputs) == ["image", "mask"]
            for array, expected in [
                (batch.inputs["image"], X),
                (batch.inputs["mask"], M),
                (batch.targets, Y),
            ]:
                assert type(array) is np.ndarray
                assert array.tolist() == expected[part].tolist()
            assert batch.inputs["image"].dtype == np.float32
            assert batch.inputs["mask"].dtype == np.int64
    assert [batch.targets.tolist() for batch in dataset.batches(2, start=2)] == [[4]]


def test_one_input():
    for source in [(X, Y), [X, Y], ((X,), Y), ({"image": X}, Y), {"image": X, "y": Y}, [(X, Y)]]:
        (batch,) = open_dataset(source, ONE).batches(5)
        assert batch.inputs["image"].tolist() == X.tolist()
        assert batch.targets.tolist() == Y.tolist()


@pytest.mark.parametrize(
    "source",
    [X, Tensor(X), {"image": X}, {"image": X, "a": Y, "b": Y}, (X,), [{"image": X}], Loader([X]), [(X,)]],
)
def test_without_targets(source):
    (batch,) = open_dataset(source, ONE, need_target=False).batches(5)
    assert batch.inputs["image"].tolist() == X.tolist()
    assert batch.targets is None


def test_unneeded_targets():
    (batch,) = open_dataset((X, Y), ONE, need_target=False).batches(5)
    assert batch.inputs["image"].tolist() == X.tolist()
    (batch,) = open_dataset((X, M), TWO, need_target=False).batches(5)
    assert batch.inputs["mask"].tolist() == M.tolist()
    assert batch.targets is None


def test_target_by_name():
    arrays = {"image": X, "label": Y, "weight": Y * 2}
    (batch,) = open_dataset(arrays, ONE, target="weight").batches(5)
    assert batch.targets.tolist() == (Y * 2).tolist()
    (batch,) = open_dataset(arrays, ONE, target="image").batches(5)
    assert batch.targets.tolist() == X.tolist()


def test_a_dataset_is_returned_as_it_is():
    dataset = ArrayDataset({"image": X})
    assert open_dataset(dataset, ONE) is dataset


def test_sizes_and_counts():
    dataset = open_dataset((X, Y), ONE)
    assert (dataset.size, dataset.batch_count(2), dataset.batch_count(5)) == (5, 3, 1)
    assert len(list(dataset.batches(2))) == 3
    assert open_dataset(Loader([(X, Y)] * 4), ONE).batch_count(2) == 4
    assert open_dataset(lambda: iter([(X, Y)]), ONE).batch_count(2) is None
    assert open_dataset(Loader([(X, Y)]), ONE).size is None


@pytest.mark.torch
def test_pytorch_loaders_and_tensors():
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(M), torch.tensor(Y))
    dataset = open_dataset(torch.utils.data.DataLoader(data, batch_size=2), TWO)
    assert [batch.targets.tolist() for batch in dataset.batches(2)] == [[0, 1], [2, 3], [4]]
    assert dataset.batch_count(2) == 3

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return zip(X, Y, strict=True)

    stream = open_dataset(torch.utils.data.DataLoader(Stream(), batch_size=5), ONE)
    assert stream.batch_count(5) is None
    assert next(stream.batches(5)).inputs["image"].tolist() == X.tolist()

    tensor = torch.tensor(X, dtype=torch.bfloat16, requires_grad=True)
    (batch,) = open_dataset((tensor, Y), ONE).batches(5)
    assert batch.inputs["image"].tolist() == X.tolist()
    (batch,) = open_dataset(data, TWO).batches(5)
    assert batch.targets.tolist() == Y.tolist()


# --- order


def order(dataset, **options):
    return [int(label) for batch in dataset.batches(7, shuffle=True, **options) for label in batch.targets]


def test_the_order_depends_on_seed_and_epoch_only():
    dataset = ArrayDataset({"x": np.arange(50.0)}, np.arange(50))
    expected = np.random.Generator(np.random.PCG64(np.random.SeedSequence([3, 2]))).permutation(50)
    assert order(dataset, seed=3, epoch=2) == expected.tolist()
    assert order(ArrayDataset({"x": np.arange(50.0)}, np.arange(50)), seed=3, epoch=2) == expected.tolist()
    others = [order(dataset, seed=3, epoch=1), order(dataset, seed=2, epoch=2), list(range(50))]
    assert all(other != expected.tolist() for other in others)
    assert all(sorted(other) == list(range(50)) for other in others)


@pytest.mark.parametrize("start", range(9))
def test_a_start_in_the_middle_gives_the_rest_of_the_epoch(start):
    dataset = ArrayDataset({"x": np.arange(50.0)}, np.arange(50))
    assert order(dataset, start=start) == order(dataset)[7 * start :]


def test_inputs_and_targets_stay_together():
    dataset = ArrayDataset({"x": np.arange(50.0)}, np.arange(50))
    for batch in dataset.batches(8, shuffle=True):
        assert batch.inputs["x"].tolist() == batch.targets.tolist()


def test_split_validation():
    dataset = ArrayDataset({"x": np.arange(40.0)}, np.arange(40))
    train, validation = split = split_validation(dataset, 0.25, seed=1)
    assert (split.train, split.validation) == (train, validation)
    assert (train.size, validation.size) == (30, 10)
    parts = [[int(y) for batch in part.batches(7) for y in batch.targets] for part in split]
    assert sorted(parts[0] + parts[1]) == list(range(40))
    assert parts[1] != list(range(30, 40))
    again = split_validation(dataset, 0.25, seed=1)
    assert [int(y) for batch in again.validation.batches(7) for y in batch.targets] == parts[1]
    other = split_validation(dataset, 0.25, seed=2)
    assert [int(y) for batch in other.validation.batches(7) for y in batch.targets] != parts[1]
    assert sorted(order(train)) == parts[0]
    assert order(train) != parts[0]
    last = split_validation(dataset, 0.25, shuffle=False)  # as Keras's validation_split
    ends = [[int(y) for batch in part.batches(7) for y in batch.targets] for part in last]
    assert ends == [list(range(30)), list(range(30, 40))]
    first, second = split_validation(train, 0.5)  # of a part
    halves = [int(y) for part in (first, second) for batch in part.batches(7) for y in batch.targets]
    assert sorted(halves) == parts[0]
    assert split_validation(dataset, 0.001).validation.size == 1
    assert split_validation(dataset, 0.999).train.size == 1


def test_what_cannot_be_split():
    for fraction in (0, 1, -0.5, 1.5):
        with raises_sentence("validation_fraction", what="validation"):
            split_validation(ArrayDataset({"x": X}), fraction)
    with raises_sentence("validation_fraction_of_batches", what="validation", got="IterableDataset"):
        split_validation(open_dataset([(X, Y)], ONE), 0.5)
    with pytest.raises(DataError, match="has 1 example, which cannot be split"):
        split_validation(ArrayDataset({"x": X[:1]}), 0.5)
