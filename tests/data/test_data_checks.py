"""Datasets: types that convert and types that do not, and every mismatch between data and model."""

import ml_dtypes
import numpy as np
import pytest

from onnxtrain.data import (
    ArrayDataset,
    IterableDataset,
    TensorSpec,
    check_labels,
    open_dataset,
    split_validation,
)
from onnxtrain.data.conversion import to_numpy
from onnxtrain.data.naming import Wanted
from onnxtrain.data.target_checks import LabelCheck
from onnxtrain.errors import DataError
from sentences import raises_sentence
from tensor_specs import FLOAT, ONE, TWO, X, Y

# --- conversions


@pytest.mark.parametrize(
    ("found", "needed"),
    [
        (np.float64, np.float32),
        (np.float32, np.float64),
        (np.float32, np.float16),
        (np.float32, ml_dtypes.bfloat16),
        (ml_dtypes.bfloat16, np.float32),
        (np.uint8, np.float32),
        (np.int64, np.float32),
        (np.bool_, np.float32),
        (np.int32, np.int64),
        (np.int64, np.int32),
        (np.uint8, np.int8),
        (np.bool_, np.int64),
        (np.bool_, np.bool_),
        (">f4", np.float32),
        (">i8", np.int64),
        (ml_dtypes.int4, ml_dtypes.int4),
    ],
)
def test_types_that_convert(found, needed):
    values = np.array([[0, 1], [1, 1]]).astype(found)
    dataset = open_dataset({"x": values}, [TensorSpec("x", np.dtype(needed))], need_target=False)
    array = next(dataset.batches(2)).inputs["x"]
    assert array.dtype == np.dtype(needed)
    assert array.dtype.isnative
    assert array.astype(np.float64).tolist() == [[0, 1], [1, 1]]


@pytest.mark.parametrize(
    ("found", "needed", "hint"),
    [
        (np.float64, np.int64, "round and convert it first"),
        (np.float32, np.bool_, "convert it first"),
        (np.int64, np.bool_, "convert it first"),
        (np.complex64, np.float32, "convert it first"),
        ("U1", np.float32, "convert it first"),
        ("M8[s]", np.int64, "convert it first"),
    ],
)
def test_types_that_do_not_convert(found, needed, hint):
    values = np.zeros((2, 1)).astype(found)
    message = rf"input 'x' has type .*, but the model needs {np.dtype(needed)}: {hint} \(array\.astype\)"
    with pytest.raises(DataError, match=message):
        open_dataset({"x": values}, [TensorSpec("x", np.dtype(needed))], need_target=False)


def test_objects_that_are_numbers_are_numbers():
    table = np.empty((2, 2), object)  # of a table of integers and truth values
    table[:] = [[2**60 + 1, True], [3, False]]
    found = to_numpy(table, "the table")
    assert found.dtype == np.int64
    assert found.tolist() == [[2**60 + 1, 1], [3, 0]]
    for wrong in ([1, None], [1, "a"], [2**70, 1], [1, 1j]):
        with pytest.raises(DataError):
            to_numpy(np.array(wrong, object), "x")


def test_text_for_a_text_input():
    spec = TensorSpec("words", np.dtype(object), ("N",))
    for source in (np.array(["a", "bc"]), np.array(["a", "bc"], object)):
        (batch,) = open_dataset({"words": source}, [spec], need_target=False).batches(2)
        assert batch.inputs["words"].dtype == object
        assert batch.inputs["words"].tolist() == ["a", "bc"]


def test_batches_are_contiguous_whatever_the_data():
    strided = np.asfortranarray(np.arange(40.0, dtype=np.float32).reshape(10, 4))[:, ::2]
    for shuffle in (False, True):
        for batch in ArrayDataset({"x": strided}).batches(3, shuffle=shuffle):
            assert batch.inputs["x"].flags.c_contiguous


def test_in_memory_data_in_order_is_not_copied():
    x = X.astype(np.float32)
    batch = next(open_dataset((x, Y), ONE).batches(2))
    assert np.shares_memory(batch.inputs["image"], x)


def test_the_target_converts_too():
    spec = TensorSpec("label", np.dtype(np.int64), ("N",))
    (batch,) = open_dataset((X, Y.astype(np.uint8)), ONE).expecting(spec).batches(5)
    assert batch.targets.dtype == np.int64
    with raises_sentence("array_type", what="the target array", got="float64", wanted="int64", hint="round"):
        open_dataset((X, Y / 2), ONE).expecting(spec)
    with raises_sentence(
        "array_rank", what="the target array", got=(5, 2), wanted=("N",), rank=2, needed="(batch,)", model_rank=1
    ):
        open_dataset((X, X.astype(int)), ONE).expecting(spec)


# --- misfits

NAN = X.copy()
NAN[3, 1] = np.nan
INFINITE = X.copy()
INFINITE[2, 0] = -np.inf
HUGE = X.copy()
HUGE[4, 0] = 1e300


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ((X[:0], Y[:0]), r"the data is empty: input 'image' has shape \(0, 2\)"),
        ((X, Y[:4]), r"different lengths: input 'image' has 5 examples, the target array has 4"),
        (
            (X.ravel(), Y),
            r"input 'image' has rank 1 \(shape \(10,\)\), but the model needs rank 2: \(batch, 2\)",
        ),
        (
            (X.reshape(2, 5), Y),
            r"input 'image' has shape \(2, 5\), but the model needs \(batch, 2\): axis 1 is 5",
        ),
        ((X[0, 0], Y), r"input 'image' is a scalar, but it needs a first axis of examples"),
        ((NAN, Y), r"input 'image' holds nan at example 3: remove such examples"),
        ((INFINITE, Y), r"input 'image' holds -inf at example 2: remove"),
        ((HUGE, Y), r"input 'image' holds 1e\+300 at example 4, which float32 cannot hold: scale the data"),
        ((X, NAN), r"the target array holds nan at example 3"),
        (
            {"x": X, "y": Y},
            r"no array for input 'image': it holds 'x' and 'y', the model needs 'image'; name the",
        ),
        ({}, r"no array for input 'image': it holds no arrays"),
        ({"image": X}, r"the data holds only the input 'image': add an array of targets"),
        ({"image": X, "a": Y, "b": Y}, r"the data has 'a' and 'b' besides the inputs: name the one"),
        (X, r"the data is one array, but 'image' and 'targets' are needed; give \(inputs, targets\)"),
        (
            (X, Y, Y),
            r"the data is a sequence of 3 \(ndarray, ndarray, ndarray\); it needs \(inputs, targets\)",
        ),
        (
            ((X, X), Y),
            r"the data is a sequence of 2 \(tuple, ndarray\); .* 1 array for 'image' in this order",
        ),
        (
            (X, [[1, 2], [1]]),
            r"^The targets in the data are a list of lists; give numpy.array of it, for which all rows",
        ),
        (([[0.5, 1.0], [1.0]], Y), r"^The inputs in the data are a list of lists; give numpy.array of it"),
        (
            ({"picture": X}, Y),
            r"the mapping of inputs in the data has no array for input 'image': it holds 'pict",
        ),
        (3, r"the data is a int; give a path, a mapping from name to array"),
        (np.array([[None], [{}]]), r"the data is one array"),
        (
            (np.array([[None], [{}]]), Y),
            r"input 'image' is a ndarray that holds Python objects; it needs numbers",
        ),
        ({"image": [[1, 2], [3]], "y": Y}, r"input 'image' holds rows of different lengths; pad them to one length"),
    ],
)
def test_data_that_does_not_fit(source, message):
    with pytest.raises(DataError, match=message):
        open_dataset(source, ONE)


def test_values_are_not_read_without_validation():
    dataset = open_dataset((NAN, Y), ONE, validate=False)
    assert len(list(dataset.batches(2))) == 3
    with pytest.raises(DataError, match="nan at example 3"):
        dataset.validate()


def test_validation_in_chunks_names_the_first_example(monkeypatch):
    from onnxtrain.data import array_dataset

    monkeypatch.setattr(array_dataset, "_CHECK_BYTES", 100)
    x = np.zeros((1000, 3), np.float32)
    x[777, 2] = x[800, 0] = np.nan
    with pytest.raises(DataError, match="nan at example 777"):
        open_dataset({"x": x}, [TensorSpec("x", FLOAT)], need_target=False)
    dataset = ArrayDataset({"x": x}, np.arange(1000))
    train, validation = split_validation(dataset, 0.5)
    with pytest.raises(DataError, match=r"nan at example (777|800)"):
        (train if 777 in train._indices else validation).validate()
    with raises_sentence("label_range", what="the target array", got=10, wanted="0 to 9 (10 classes)", example=10):
        ArrayDataset({"x": np.zeros(1000)}, np.arange(1000)).validate({None: LabelCheck(10)})
    ArrayDataset({"x": np.zeros(1000)}, np.arange(1000)).validate({None: LabelCheck(1000)})


def test_integers_that_do_not_fit_are_named():
    tokens = np.array([[1], [2], [2**40]])
    with raises_sentence(
        "array_limits", what="input 'x'", got=1099511627776, wanted="int32", example=2, least="-2147483648"
    ):
        open_dataset({"x": tokens}, [TensorSpec("x", np.dtype(np.int32))], need_target=False)


def test_equal_symbols_stand_for_equal_sizes():
    specs = [
        TensorSpec("ids", np.dtype(np.int64), ("N", "T")),
        TensorSpec("mask", np.dtype(np.int64), ("N", "T")),
    ]
    ids = np.zeros((2, 4), int)
    open_dataset({"ids": ids, "mask": ids}, specs, need_target=False)
    message = r"input 'mask' has 3 for the dimension 'T' \(shape \(2, 3\)\), but input 'ids' has 4; they"
    with pytest.raises(DataError, match=message):
        open_dataset({"ids": ids, "mask": ids[:, :3]}, specs, need_target=False)


def test_unknown_target_and_missing_inputs():
    with raises_sentence("no_target", subject="the data", target="class", arrays="'image' and 'label'"):
        open_dataset({"image": X, "label": Y}, ONE, target="class")
    with raises_sentence(
        "no_array_for_input", what=["image", "mask"], got=["label"], wanted=["image", "mask"], inputs="inputs"
    ):
        open_dataset({"label": Y}, TWO)


@pytest.mark.parametrize("batch_size", [0, -1, 1.5, None])
@pytest.mark.parametrize("source", [(X, Y), [(X, Y)]], ids=["arrays", "iterable"])
def test_batch_size(source, batch_size):
    with raises_sentence("batch_size", what="batch_size"):
        open_dataset(source, ONE).batches(batch_size)


@pytest.mark.parametrize("name", ["seed", "epoch", "start"])
@pytest.mark.parametrize("source", [(X, Y), [(X, Y)]], ids=["arrays", "iterable"])
def test_numbers_that_must_not_be_negative(source, name):
    with raises_sentence("count_at_least_0", name=name, number=-1):
        open_dataset(source, ONE).batches(2, shuffle=True, **{name: -1})


# --- iterables


def test_a_one_shot_iterator_serves_one_epoch():
    dataset = open_dataset(((X[p], Y[p]) for p in [slice(0, 2), slice(2, 5)]), ONE)
    assert len(list(dataset.batches(2))) == 2
    with raises_sentence("one_shot_iterator", what="data", got="generator"):
        dataset.batches(2)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([], r"the data is empty: its iterator returned no batch"),
        ([(X, Y), (X[:0], Y[:0])], r"batch 1 is empty: input 'image' of batch 1 has shape \(0, 2\)"),
        ([(X, Y), (X, Y[:3])], r"batch 1 has arrays of different lengths"),
        (
            [(X, Y), (X[:, :1], Y)],
            r"input 'image' of batch 1 has shape \(5, 1\), but the model needs \(batch, 2\)",
        ),
        ([(X, Y), (NAN, Y)], r"input 'image' of batch 1 holds nan at example 3"),
        ([(X, Y), (X, NAN)], r"the target array of batch 1 holds nan at example 3"),
        ([(X, Y), {"picture": X}], r"batch 1 has no array for input 'image': it holds 'picture'"),
        ([(X, Y), X], r"batch 1 is one array, but 'image' and 'targets' are needed"),
        ([(X, Y), 3], r"batch 1 is a int; it must be a mapping from name to array or \(inputs, targets\)"),
    ],
)
def test_batches_that_do_not_fit(items, message):
    dataset = open_dataset(lambda: iter(items), ONE)
    batches = dataset.batches(2)
    with pytest.raises(DataError, match=message):
        list(batches)


def test_a_function_must_return_an_iterator():
    with raises_sentence("data_function_returned", what="data", got="int"):
        open_dataset(lambda: 3, ONE).batches(2)


def test_iterables_are_validated_on_the_way():
    dataset = IterableDataset([(X, Y)], Wanted(ONE))
    dataset.validate({None: LabelCheck(5)})
    assert len(list(dataset.batches())) == 1
    dataset.validate({None: LabelCheck(4, -1)})
    with raises_sentence(
        "label_range",
        what="the target array of batch 0",
        got=4,
        wanted="0 to 3 (4 classes)",
        example=4,
        ignored=" or -1, which is ignored",
    ):
        list(dataset.batches())
    assert len(list(open_dataset([(NAN, Y)], ONE, validate=False).batches(2))) == 1


# --- labels


def test_labels():
    check_labels(np.array([[0, 1], [2, -100]]), 3, ignore_index=-100)
    with raises_sentence("label_range", what="the targets", got=3, wanted="0 to 2 (3 classes)", example=1):
        check_labels(np.array([[0, 1], [2, 3]]), 3)
    with pytest.raises(DataError, match="label -1 at example 0"):
        check_labels(np.array([-1, 3]), 3)
    with raises_sentence("labels_type", what="the targets", got="float64"):
        check_labels(np.array([0.0, 1.0]), 3)
