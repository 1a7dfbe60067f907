"""Safetensors files as data: mapped arrays by name."""

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import onnxtrain
from onnxtrain import examples
from onnxtrain.data.files import read_arrays
from onnxtrain.errors import DataError
from sentences import raises_sentence

X = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
Y = np.arange(12) % 3


def test_training_on_a_file_equals_training_on_its_arrays(tmp_path):
    save_file({"input": X, "label": Y}, tmp_path / "d.safetensors", metadata={"made": "by hand"})
    ours, theirs = (onnxtrain.Trainer(examples.mlp((4, 8, 3)), loss="softmax_cross_entropy") for _ in range(2))
    assert ours.fit(tmp_path / "d.safetensors", batch_size=5).rows == theirs.fit(X, Y, batch_size=5).rows


def test_arrays_are_mapped(tmp_path):
    arrays = {"a": X, "b": X.astype(np.float16), "c": X > 0, "d": Y.astype(np.uint8), "e": np.float64(3), "f": X[:0]}
    save_file({name: np.asarray(array) for name, array in arrays.items()}, tmp_path / "d.safetensors")
    found = read_arrays(tmp_path / "d.safetensors")
    assert set(found) == set(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == np.asarray(array).dtype
    assert isinstance(found["a"], np.memmap)


def test_bfloat16(tmp_path):
    save_file({"a": X.astype(ml_dtypes.bfloat16)}, tmp_path / "d.safetensors")
    assert read_arrays(tmp_path / "d.safetensors")["a"].dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("content", [b"", b"x" * 100])
def test_damaged_files(tmp_path, content):
    (tmp_path / "d.safetensors").write_bytes(content)
    with raises_sentence("not_safetensors", what=tmp_path / "d.safetensors"):
        read_arrays(tmp_path / "d.safetensors")
    with pytest.raises(DataError, match="does not exist"):
        read_arrays(tmp_path / "no.safetensors")
