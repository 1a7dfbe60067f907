"""Checked arguments are not checked again until they change; freed arrays are forgotten."""

import gc

import numpy as np
import pytest

from onnxtrain import kernels
from onnxtrain.errors import OperatorError
from onnxtrain.runtime import remembered


@pytest.fixture(autouse=True)
def nothing_known():
    remembered._known.clear()


@pytest.fixture
def arrays():
    return [np.arange(6, dtype=np.float32) + i for i in range(3)]


def step(arrays):
    x, g, v = arrays
    kernels.momentum_([x], [g], [v], learning_rate=0.5, step=1, alpha=0.5, beta=1.0)


def test_checks_are_run_once(arrays, monkeypatch):
    made = []
    monkeypatch.setattr(remembered, "Bound", lambda *lists: made.append(1) or kernels.Bound(*lists))
    for _ in range(3):
        x, g, v = (array.copy() for array in arrays)
        step(arrays)
        np.testing.assert_array_equal(arrays[2], 0.5 * v + g)
        np.testing.assert_array_equal(arrays[0], x - 0.5 * arrays[2])
    assert len(made) == 1


def to_shape(array):
    array.shape = (2, 3)


def to_type(array):
    array.dtype = np.int32


def to_read_only(array):
    array.flags.writeable = False


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (to_shape, r"shape \(2, 3\)"),
        (to_type, "has type int32"),
        (to_read_only, "is read-only"),
    ],
)
@pytest.mark.parametrize("which", [0, 2])
@pytest.mark.filterwarnings("ignore:Setting the (shape|dtype|strides):DeprecationWarning")
def test_a_changed_array_is_checked_again(arrays, which, change, sentence):
    step(arrays)
    change(arrays[which])
    with pytest.raises(OperatorError, match=sentence):
        step(arrays)


def test_an_array_that_moved_is_updated_where_it_is(arrays):
    step(arrays)
    x, old = arrays[0], arrays[0].ctypes.data
    taken = []
    for size in (100_000, 6):
        x.__setstate__((1, (size,), x.dtype, False, np.full(size, 10, np.float32).tobytes()))
        taken += [np.ones(6, np.float32) for _ in range(100)]  # one of them where x was
    assert x.ctypes.data != old
    wanted = 10 - 0.5 * (0.5 * arrays[2] + arrays[1])
    step(arrays)
    np.testing.assert_array_equal(x, wanted)


def test_a_gradient_may_be_read_only(arrays):
    arrays[1].flags.writeable = False
    step(arrays)
    step(arrays)
    assert len(remembered._known) == 1


def test_arrays_are_not_kept_alive(arrays):
    step(arrays)
    assert len(remembered._known) == 1
    arrays.pop()
    gc.collect()
    assert not remembered._known


def test_only_so_many_sets_are_remembered():
    sets = [[np.ones(2, np.float32) for _ in range(3)] for _ in range(remembered.MOST + 3)]
    for arrays in sets:
        step(arrays)
    assert len(remembered._known) == remembered.MOST


@pytest.mark.torch
def test_a_tensor_with_other_memory_is_checked_again():
    torch = pytest.importorskip("torch")
    tensors = [torch.ones(6) for _ in range(3)]
    step(tensors)
    step(tensors)
    assert len(remembered._known) == 1
    tensors[0].data = torch.full((6,), 10.0)
    v = tensors[2].clone()
    step(tensors)
    np.testing.assert_array_equal(tensors[0].numpy(), 10 - 0.5 * (0.5 * v.numpy() + 1))
    tensors[0].requires_grad_(True)
    with pytest.raises(OperatorError, match="cannot be shared through DLPack"):
        step(tensors)
