"""TrainingSession on training models of other tools."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from strangers import MAIN, SGD, WEIGHT, entry, graph, initializer, model, plain_sgd, sgd_reference

import onnxtrain
from onnxtrain.errors import DataError, TrainingInfoError
from sentences import raises_sentence


@pytest.fixture
def batch() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(5, 3)).astype(np.float32), rng.normal(size=(5, 1)).astype(np.float32)


def test_sgd_written_by_hand_takes_the_steps_of_numpy(batch) -> None:
    x, t = batch
    session = onnxtrain.TrainingSession(plain_sgd())
    w = WEIGHT.astype(np.float64)
    for _ in range(7):
        loss, w = sgd_reference(w, x, t, 0.1)
        result = session.step({"x": x, "t": t, "rate": np.asarray(0.1, np.float32)})
        assert list(result) == ["loss"]
        np.testing.assert_allclose(result["loss"], loss, rtol=1e-5)
        np.testing.assert_allclose(session.state["w"], w, rtol=1e-5, atol=1e-6)


def test_batch_sizes_may_change_from_step_to_step(batch) -> None:
    x, t = batch
    session = onnxtrain.TrainingSession(plain_sgd())
    w = WEIGHT.astype(np.float64)
    for size in (5, 2, 1, 5, 3):
        _, w = sgd_reference(w, x[:size], t[:size], 0.1)
        session.step({"x": x[:size], "t": t[:size], "rate": np.asarray(0.1, np.float32)})
        np.testing.assert_allclose(session.state["w"], w, rtol=1e-5, atol=1e-6)


def test_initialize_restores_the_initializers(batch) -> None:
    x, t = batch
    session = onnxtrain.TrainingSession(plain_sgd())
    session.step({"x": x, "t": t, "rate": np.asarray(0.1, np.float32)})
    assert not np.array_equal(session.state["w"], WEIGHT)
    session.initialize()
    np.testing.assert_array_equal(session.state["w"], WEIGHT)


def test_initialization_graph_overrides_initializers(batch) -> None:
    start = graph("start () => (float[3,1] w_first) { w_first = Constant<value = float[3,1] {1, 2, 3}>() }")
    info = entry(graph(SGD), {"w": "w_next"}, initialization=start, initial={"w": "w_first"})
    session = onnxtrain.TrainingSession(model(graph(MAIN), [info], [initializer("w", WEIGHT)]))
    np.testing.assert_array_equal(session.state["w"], WEIGHT)
    session.initialize()
    np.testing.assert_array_equal(session.state["w"], [[1], [2], [3]])


def test_several_entries_run_in_order_each_assigning_before_the_next(batch) -> None:
    x, t = batch
    double = graph("double () => (float[3,1] w_double) { w_double = Add(w, w) }")
    both = model(
        graph(MAIN), [entry(double, {"w": "w_double"}), entry(graph(SGD), {"w": "w_next"})], [initializer("w", WEIGHT)]
    )
    session = onnxtrain.TrainingSession(both)
    _, expected = sgd_reference(2.0 * WEIGHT, x, t, 0.1)
    session.step({"x": x, "t": t, "rate": np.asarray(0.1, np.float32)})
    np.testing.assert_allclose(session.state["w"], expected, rtol=1e-5)
    session.step({}, entry=0)
    np.testing.assert_allclose(session.state["w"], 2 * expected, rtol=1e-5)


def test_all_values_are_computed_before_any_assignment() -> None:
    swap = graph("swap () => (float[2] a_next, float[2] b_next) { a_next = Identity(b)  b_next = Identity(a) }")
    main = graph("main (float[2] x) => (float[2] y) { s = Add(a, b)  y = Add(s, x) }")
    states = [initializer("a", [1, 2]), initializer("b", [3, 4])]
    session = onnxtrain.TrainingSession(model(main, [entry(swap, {"a": "a_next", "b": "b_next"})], states))
    for a, b in (([3, 4], [1, 2]), ([1, 2], [3, 4]), ([3, 4], [1, 2])):
        session.step({})
        np.testing.assert_array_equal(session.state["a"], a)
        np.testing.assert_array_equal(session.state["b"], b)


def test_a_binding_may_take_an_output_of_the_main_graph() -> None:
    main = graph("main (float[2] x) => (float[2] y) { y = Add(memory, x) }")
    nothing = graph("nothing () => () {}")
    session = onnxtrain.TrainingSession(model(main, [entry(nothing, {"memory": "y"})], [initializer("memory", [0, 0])]))
    for _ in range(3):
        session.step({"x": np.array([1, 2], dtype=np.float32)})
    np.testing.assert_array_equal(session.state["memory"], [3, 6])


def test_state_of_the_algorithm_counts_steps(batch) -> None:
    x, t = batch
    counting = SGD.replace("float[3,1] w_next)", "float[3,1] w_next, int64 n_next)").replace(
        "w_next = Sub(w, step)",
        "w_next = Sub(w, step)  one = Constant<value = int64 {1}>()  n_next = Add(n, one)",
    )
    info = entry(graph(counting), {"w": "w_next", "n": "n_next"}, states=[initializer("n", 0, np.int64)])
    session = onnxtrain.TrainingSession(model(graph(MAIN), [info], [initializer("w", WEIGHT)]))
    for _ in range(4):
        session.step({"x": x, "t": t, "rate": np.asarray(0.1, np.float32)})
    assert session.state["n"] == 4


def test_assigning_a_state_copies_and_checks(batch) -> None:
    session = onnxtrain.TrainingSession(plain_sgd())
    session.state["w"] = np.ones((3, 1), dtype=np.float32)
    np.testing.assert_array_equal(session.state["w"], 1)
    with raises_sentence("state_differs", what="w", got=(2,), wanted=(3, 1), type="float32", given="float64"):
        session.state["w"] = np.ones(2)


def test_step_graph_runs_on_a_bare_session(batch) -> None:
    x, t = batch
    training = plain_sgd()
    step = onnxtrain.lower(training)
    assert {node.domain for node in step.graph.node} <= {""}
    assert [value.name for value in step.graph.output] == ["loss", "w_new"]
    bare = onnxruntime.InferenceSession(step.SerializeToString(), providers=["CPUExecutionProvider"])
    session = onnxtrain.TrainingSession(training)
    w = WEIGHT
    for _ in range(3):
        loss, w = bare.run(["loss", "w_new"], {"x": x, "t": t, "rate": np.asarray(0.1, np.float32), "w": w})
        result = session.step({"x": x, "t": t, "rate": np.asarray(0.1, np.float32)})
        np.testing.assert_array_equal(result["loss"], loss)
        np.testing.assert_array_equal(session.state["w"], w)


def test_training_models_of_older_opsets_are_upgraded(batch) -> None:
    x, t = batch
    older = SGD.replace(
        "loss = ReduceMean<keepdims = 0>(s)",
        "m = ReduceMean<axes = [0, 1], keepdims = 0>(s)  u = Unsqueeze<axes = [0]>(m)  loss = Squeeze<axes = [0]>(u)",
    )
    training = model(graph(MAIN), [entry(graph(older), {"w": "w_next"})], [initializer("w", WEIGHT)])
    training.opset_import[0].version = 11
    session = onnxtrain.TrainingSession(training)
    loss, w = sgd_reference(WEIGHT.astype(np.float64), x, t, 0.1)
    result = session.step({"x": x, "t": t, "rate": np.asarray(0.1, np.float32)})
    np.testing.assert_allclose(result["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(session.state["w"], w, rtol=1e-5)


def _bindings(update: dict[str, str], algorithm: str = SGD, **options: object) -> onnx.ModelProto:
    return model(graph(MAIN), [entry(graph(algorithm), update, **options)], [initializer("w", WEIGHT)])


def _twice() -> onnx.ModelProto:
    result = plain_sgd()
    result.training_info[0].update_binding.append(onnx.StringStringEntryProto(key="w", value="w_next"))
    return result


def _with_initialization(text: str, binding: dict[str, str]) -> onnx.ModelProto:
    return _bindings({"w": "w_next"}, initialization=graph(text), initial=binding)


def _reversed() -> onnx.ModelProto:
    result = plain_sgd()
    result.graph.node[0].input[0] = "t"
    return result


BAD = {
    "no training_info": (lambda: model(graph(MAIN), [], [initializer("w", WEIGHT)]), "has no training_info"),
    "key is no initializer": (lambda: _bindings({"v": "w_next"}), r"has the key 'v', which is not an initializer of"),
    "value is not an output": (
        lambda: _bindings({"w": "g"}),
        r"gives 'w' the value 'g', which is not an output of the algo",
    ),
    "key twice": (_twice, "has the key 'w' twice"),
    "shape differs": (
        lambda: _bindings({"w": "loss"}),
        r"gives 'w' of shape \[3, 1\] the value 'loss' of shape \[\]",
    ),
    "type differs": (
        lambda: _bindings(
            {"w": "w_double"},
            SGD.replace("w_next)", "w_next, double[3,1] w_double)").replace(
                "w_next = Sub", "w_double = Cast<to = 11>(w)  w_next = Sub"
            ),
        ),
        "gives 'w' of type float the value 'w_double' of type double",
    ),
    "name taken": (
        lambda: _bindings({"w": "y"}, "same (float[3,1] t) => (float[3,1] y) { y = Add(w, t) }"),
        "defines 'y', which the main graph",
    ),
    "main graph reads the algorithm": (_reversed, "may read the main graph, never the reverse"),
    "initialization with inputs": (
        lambda: _with_initialization("i (float[3,1] a) => (float[3,1] b) { b = Neg(a) }", {"w": "b"}),
        "initialization has the inputs 'a'; it must have none",
    ),
    "initialization value missing": (
        lambda: _with_initialization(
            "i () => (float[3,1] b) { b = Constant<value = float[3,1] {1,2,3}>() }", {"w": "c"}
        ),
        "gives 'w' the value 'c', which is not an output of the initialization graph",
    ),
    "unknown operator input": (
        lambda: _bindings({"w": "w_next"}, SGD.replace("Sub(y, t)", "Sub(yy, t)")),
        "together are not valid ONNX",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_training_info_is_refused_with_the_binding_and_the_reason(name: str) -> None:
    build, message = BAD[name]
    with pytest.raises(TrainingInfoError, match=message):
        onnxtrain.TrainingSession(build())


def test_unknown_entry() -> None:
    session = onnxtrain.TrainingSession(plain_sgd())
    with pytest.raises(TrainingInfoError, match="no entry 3; the training model has 1"):
        session.step({}, entry=3)
    with pytest.raises(TrainingInfoError, match="no entry 3; the training model has 1"):
        onnxtrain.lower(plain_sgd(), entry=3)


def test_lower_asks_which_of_several_entries() -> None:
    several = plain_sgd()
    several.training_info.append(several.training_info[0])
    with pytest.raises(TrainingInfoError, match="has 2 entries; choose one"):
        onnxtrain.lower(several)


def test_missing_feed_is_named(batch) -> None:
    session = onnxtrain.TrainingSession(plain_sgd())
    with pytest.raises(DataError, match="needs the input 't'"):
        session.step({"x": batch[0], "rate": np.asarray(0.1, np.float32)})


def test_failure_inside_the_runtime_names_the_node(batch) -> None:
    x, t = batch
    session = onnxtrain.TrainingSession(plain_sgd())
    with raises_sentence("runtime_failed", operator="Sub"):
        session.step({"x": x, "t": t[:2], "rate": np.asarray(0.1, np.float32)})


def test_training_model_keeps_the_current_states(batch) -> None:
    x, t = batch
    session = onnxtrain.TrainingSession(plain_sgd())
    session.step({"x": x, "t": t, "rate": np.asarray(0.1, np.float32)})
    resumed = onnxtrain.TrainingSession(session.model())
    feeds = {"x": x, "t": t, "rate": np.asarray(0.1, np.float32)}
    assert session.step(feeds)["loss"] == resumed.step(feeds)["loss"]
    np.testing.assert_array_equal(session.state["w"], resumed.state["w"])
