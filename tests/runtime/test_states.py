"""Live state arrays: they show the current value after any steps, and writing to them changes the state."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest
from onnx import numpy_helper

import onnxtrain
from onnxtrain.errors import OptionError
from onnxtrain.runtime.states import StateBuffers
from sentences import raises_sentence

X, Y = np.random.default_rng(0).standard_normal((6, 5)).astype(np.float32), np.arange(6) % 3
FEEDS = {"input": X, "target": Y, "learning_rate": np.float32(0.1)}


def session(kernels: bool | None, *, accumulate: bool = False) -> onnxtrain.TrainingSession:
    training = onnxtrain.training_model(
        onnxtrain.examples.mlp((5, 7, 6, 3)),
        loss="softmax_cross_entropy",
        optimizer=onnxtrain.Momentum(0.1),
        accumulate=accumulate,
    )
    return onnxtrain.TrainingSession(training, runtime=onnxtrain.RuntimeOptions(kernels=kernels, threads=1))


def values(of: onnxtrain.TrainingSession) -> dict[str, np.ndarray]:
    """Copy the states, as a file would hold them."""
    model = of.model()
    graphs = (model.graph, *(entry.algorithm for entry in model.training_info))
    return {
        tensor.name: numpy_helper.to_array(tensor)
        for graph in graphs
        for tensor in graph.initializer
        if tensor.name in of.state
    }


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("kernels", [False, None])
def test_kept_arrays_have_the_current_values(kernels: bool | None, accumulate: bool) -> None:
    trained, reference = session(kernels, accumulate=accumulate), session(kernels, accumulate=accumulate)
    if kernels is False:
        assert trained.state.doubled
    kept: list[dict[str, np.ndarray]] = []
    for step in range(6):
        if step != 1:  # also arrays that were first read after the buffers were swapped
            kept.append({name: trained.state[name] for name in trained.state})
        loss, expected = trained.step(FEEDS)["loss"], reference.step(FEEDS)["loss"]
        assert loss == expected
        for name, value in values(reference).items():
            np.testing.assert_array_equal(values(trained)[name], value)
            for arrays in kept:
                np.testing.assert_array_equal(arrays[name], value, err_msg=name)
                assert trained.state[name] is arrays[name]
    kept.clear()
    gc.collect()
    assert trained.step(FEEDS)["loss"] == reference.step(FEEDS)["loss"]


@pytest.mark.parametrize("kernels", [False, None])
def test_writing_into_a_kept_array_changes_the_state(kernels: bool | None) -> None:
    trained, reference = session(kernels), session(kernels)
    kept = {name: trained.state[name] for name in trained.state}
    rng = np.random.default_rng(1)
    for _ in range(3):
        assert trained.step(FEEDS)["loss"] == reference.step(FEEDS)["loss"]
        for name, array in kept.items():
            if array.ndim:
                new = rng.standard_normal(array.shape).astype(np.float32)
                array[...] = new
                reference.state[name] = new
    for name, value in values(reference).items():
        np.testing.assert_array_equal(kept[name], value)


def doubled(dtype: type | np.dtype = np.float32, shape: tuple[int, ...] = (2, 3)) -> StateBuffers:
    states = StateBuffers({"w": np.zeros(shape, dtype)})
    states.give_second_buffer("w")
    return states


def step(states: StateBuffers, number: float) -> None:
    """Swap the two buffers of a state, like a step."""
    states.buffer("w", states.turn("w") + 1)[...] = number
    states.after_step(["w"], ("w",))


VIEWS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "itself": lambda array: array,
    "row": lambda array: array[1],
    "transposed": lambda array: array.T,
    "a view of a view": lambda array: array.reshape(-1)[2:][::2],
    "other type": lambda array: array.view(np.uint32).view(np.float32),
    "array interface": lambda array: np.asarray(memoryview(array)),
    "dlpack": lambda array: np.from_dlpack(array),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", VIEWS)
def test_every_view_keeps_the_array_current(name: str) -> None:
    states = doubled()
    step(states, 1)
    view = VIEWS[name](states["w"])
    gc.collect()
    for number in (2, 3, 4):
        step(states, number)
        assert (view == number).all()
        assert (states["w"] == number).all()


def test_buffers_alternate_while_no_array_is_held() -> None:
    states = doubled()
    assert (states["w"] == 0).all()
    turns = []
    for number in range(4):
        step(states, number)
        turns.append(states.turn("w"))
    assert turns == [1, 0, 1, 0]
    kept = states["w"]
    step(states, 7)
    assert states.turn("w") == 0
    del kept
    step(states, 8)
    assert states.turn("w") == 1
    assert (states["w"] == 8).all()


def test_an_array_that_was_handed_out_before_there_was_a_second_buffer() -> None:
    states = StateBuffers({"w": np.zeros(3)})
    kept = states["w"]
    states.give_second_buffer("w")
    step(states, 5)
    assert kept.tolist() == [5, 5, 5]


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (4,)], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "bool", "int8"])
def test_arrays_of_every_type_and_shape(dtype: str, shape: tuple[int, ...]) -> None:
    import ml_dtypes

    states = doubled(np.dtype(getattr(ml_dtypes, dtype, dtype)), shape)
    kept = states["w"]
    step(states, 1)
    assert (kept.shape, kept.dtype.name, kept.flags.writeable) == (shape, dtype, True)
    assert (kept == 1).all()
    kept[...] = 0
    assert not states["w"].any()


def test_a_kept_array_outlives_its_states() -> None:
    states = doubled()
    kept = states["w"]
    step(states, 3)
    del states
    gc.collect()
    assert (kept == 3).all()


def test_assigning_checks_type_and_shape() -> None:
    states = doubled()
    with raises_sentence("state_differs", what="w", got=(2, 3), wanted=(2, 3), type="float32", given="float64"):
        states["w"] = np.zeros((2, 3))
    with pytest.raises(OptionError, match="There is no state 'v'; the states are w"):
        states["v"] = np.zeros((2, 3), np.float32)
    with raises_sentence("state_cannot_be_deleted", what="w"):
        del states["w"]
    with pytest.raises(KeyError):
        states["v"]
