"""The comparison of two versions bit for bit finds a difference."""

import sys

import numpy as np
import onnx
import pytest

import compare_bits
import compare_bits_driver
import onnxtrain


@pytest.mark.thorough
def test_other_batches_give_other_bits_and_the_same_batches_the_same(tmp_path):
    random = np.random.default_rng(0)
    onnx.save(onnxtrain.examples.mlp((4, 8, 3)), tmp_path / "small.onnx")
    x = random.standard_normal((2, 8, 4)).astype(np.float32)
    np.savez(tmp_path / "small.npz", **{"input:input": x, "target": random.integers(0, 3, (2, 8))})
    common = [str(tmp_path), "--models", "small", "--steps", "1", "--first"]
    running = [compare_bits.start([sys.executable], [*common, first]) for first in ("0", "0", "1")]
    here, same, other = (compare_bits.read(process) for process in running)
    assert len(here) == 9
    assert compare_bits.differences(here, same) == []
    assert len(compare_bits.differences(here, other)) == 9


def test_a_case_that_fails_or_is_missing_differs():
    failed = {"mlp: error": "error: OptionError: No."}
    assert compare_bits.differences(failed, failed)
    assert compare_bits.differences({"a": "1"}, {"a": "1", "b": "2"}) == ["b: missing here, 2 in the earlier version"]


def test_bits_that_say_the_same_number_differ():
    hashes = {compare_bits_driver.digest({"x": np.array(x)}) for x in (0.0, -0.0, [0.0], np.float32(0.0))}
    assert len(hashes) == 4
