"""The state of a trainer as a dictionary."""

import numpy as np
import pytest

import onnxtrain
from onnxtrain.errors import OptionError
from sentences import raises_sentence


def trainer():
    return onnxtrain.Trainer(onnxtrain.examples.mlp((4, 8, 3)), loss="cross_entropy", optimizer="adam(lr=0.01)")


@pytest.fixture
def data():
    return np.random.default_rng(0).standard_normal((24, 4), np.float32), np.arange(24) % 3


def test_a_state_is_copied_and_loaded(data):
    one, other = trainer(), trainer()
    one.train_step(*data)
    state = one.state_dict()
    assert {"layer1.weight", "layer1.weight/V", "T"} <= set(state)
    kept = {name: array.tobytes() for name, array in state.items()}
    one.train_step(*data)
    assert {name: array.tobytes() for name, array in state.items()} == kept
    other.load_state_dict(state)
    other.train_step(*data)
    assert {n: a.tobytes() for n, a in other.state_dict().items()} == {
        n: a.tobytes() for n, a in one.state_dict().items()
    }
    del state["T"]
    with raises_sentence("state_lacks", missing=1, name="'T'"):
        other.load_state_dict(state)
    other.load_state_dict(state, strict=False)
    with pytest.raises(OptionError, match="is not a parameter"):
        other.load_state_dict({"nothing": np.zeros(1)}, strict=False)
