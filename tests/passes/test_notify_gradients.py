"""Gradient-ready notifications: positions of the nodes, the function called, no copies."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

import onnxtrain
from onnxtrain.lowering.lower import lower_entry
from onnxtrain.lowering.notify_gradients import LISTENER
from onnxtrain.lowering.training_info.build import build_entries
from onnxtrain.runtime.native import kernels_available
from onnxtrain.runtime.options import RuntimeOptions
from onnxtrain.runtime.states import StateBuffers
from onnxtrain.runtime.step import StepSession
from sentences import raises_sentence

pytestmark = pytest.mark.skipif(not kernels_available(), reason="GradientsReady is a native operator")

GROUPS = [["layer3.weight", "layer3.bias", "layer2.bias"], ["layer2.weight", "layer1.weight", "layer1.bias"]]
FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.POINTER(ctypes.c_void_p), ctypes.c_int64)


def entry(passed=()):
    """Return the entry that sums gradients, with its groups; gradients that are passed on are no states."""
    made = onnxtrain.Trainer(
        onnxtrain.examples.mlp((8, 16, 16, 4)), loss="softmax_cross_entropy", accumulate=2, runtime=RuntimeOptions(1)
    )
    (first, _), values = build_entries(made.objective.step_spec(made.config))
    first.notified_groups = [[f"{name}/accumulated" for name in group] for group in GROUPS]
    first.notified_only = {f"{name}/accumulated": first.updates.pop(f"{name}/accumulated") for name in passed}
    return first, values


def feeds(listener):
    rng = np.random.default_rng(0)
    address = ctypes.cast(listener, ctypes.c_void_p).value or 0
    x, y = rng.normal(size=(6, 8)).astype(np.float32), rng.integers(0, 4, 6)
    return {"input": x, "target": y, LISTENER: np.asarray(address)}


def test_each_group_is_announced_behind_its_last_gradient():
    step = lower_entry(entry()[0], kernels=True)
    nodes = list(step.model.graph)
    places = [place for place, node in enumerate(nodes) if node.op_type == "GradientsReady"]
    assert len(places) == 2
    for place, group in zip(places, GROUPS, strict=True):
        names = [value.name for value in nodes[place].inputs]
        assert names == [LISTENER, *(f"{name}/accumulated_new" for name in group)]
        assert any(value.name in names for value in nodes[place - 1].outputs)
    assert places[0] < len(nodes) - 3  # nodes of the backward pass follow
    assert not any(node.op_type == "Identity" for node in nodes)
    assert LISTENER in step.feeds
    assert set(step.in_place) >= {f"{name}/accumulated" for group in GROUPS for name in group}


@pytest.mark.parametrize("passed", [[], GROUPS[1]])
def test_the_function_gets_the_gradients_of_its_group(passed):
    found = {}

    @FUNCTION  # must live as long as it may be called
    def take(group, addresses, count):
        for place, name in enumerate(GROUPS[group]):
            shape = shapes[name]
            numbers = ctypes.cast(addresses[place], ctypes.POINTER(ctypes.c_float))
            found[name] = np.ctypeslib.as_array(numbers, shape).copy()
        assert count == 3
        return 0

    first, values = entry(passed)
    shapes = {name: values[name].shape for group in GROUPS for name in group}
    states = StateBuffers(values)
    step = lower_entry(first, kernels=True)
    assert not {f"{name}/accumulated_new" for name in passed} & {value.name for value in step.model.graph.outputs}
    session = StepSession(step, states, RuntimeOptions(1), kernels=True)
    session.run(feeds(take))
    assert found.keys() == shapes.keys()
    whole, values = entry()
    others = StateBuffers(values)
    StepSession(lower_entry(whole, kernels=True), others, RuntimeOptions(1), kernels=True).run(feeds(FUNCTION(0)))
    for name, gradient in found.items():
        np.testing.assert_array_equal(gradient, others[f"{name}/accumulated"], err_msg=name)
        if name not in passed:
            np.testing.assert_array_equal(gradient, states[f"{name}/accumulated"], err_msg=name)


def test_a_function_that_fails_ends_the_step():
    first, values = entry()
    session = StepSession(lower_entry(first, kernels=True), StateBuffers(values), RuntimeOptions(1), kernels=True)
    fails = FUNCTION(lambda group, addresses, count: group)
    with raises_sentence("runtime_failed", reason="GradientsReady: the function that was"):
        session.run(feeds(fails))


def test_standard_operators_alone_have_none():
    step = lower_entry(entry()[0], kernels=False)
    assert LISTENER not in step.feeds
    assert {node.domain for node in step.model.graph} == {""}
