"""States in bfloat16: rounding in standard operators, and inside updates."""

from __future__ import annotations

from collections import Counter

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, parser

import onnxtrain
from native.rounding_reference import round_stochastic
from onnxtrain.errors import OperatorError
from onnxtrain.lowering.optimizer_bodies import check_states
from onnxtrain.lowering.pipeline import lower_graph
from onnxtrain.runtime.options import RuntimeOptions
from onnxtrain.runtime.step import create_session
from sentences import raises_sentence

WAYS = [onnxtrain.Adam(0.01), onnxtrain.AdamW(0.01), onnxtrain.Momentum(0.1), onnxtrain.Adagrad(0.1)]
WAYS += [
    onnxtrain.LAMB(0.01),
    onnxtrain.Lion(0.01),
    onnxtrain.RMSprop(0.01),
    onnxtrain.SSGD(0.1, alpha=0.9, regularization=1e-3),
]


def rounded(x, count, seed, kind=onnx.TensorProto.FLOAT):
    node = helper.make_node("RoundStochastic", ["x", "T"], ["y"], domain="onnxtrain", seed=seed)
    graph = helper.make_graph(
        [node, helper.make_node("Cast", ["y"], ["wide"], to=1)],
        "rounding",
        [helper.make_tensor_value_info("x", kind, None), helper.make_tensor_value_info("T", 7, [])],
        [helper.make_tensor_value_info("wide", 1, None)],
    )
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("onnxtrain", 1)]
    model = ir.from_proto(helper.make_model(graph, opset_imports=imports, ir_version=10))
    session = create_session(lower_graph(model), RuntimeOptions(1))
    (found,) = session.run(None, {"x": x, "T": np.asarray(count)})
    return found


def samples():
    bits = np.random.default_rng(0).integers(0, 1 << 32, 3000, dtype=np.uint32)
    # Numbers of any exponent, and: neighbours of powers of two, the largest, the smallest, and zero.
    near = (2.0 ** np.arange(-20, 20) * (1 - 2.0**-24)).astype(np.float32)
    odd = [0.0, np.inf, np.nan, 3.4028235e38, 3.39e38, 1e-45, 9e-41, 1.1754942e-38, 1.17549435e-38, 1.0]
    some = np.concatenate([bits.view(np.float32), near, np.asarray(odd, np.float32)])
    return np.concatenate([some, -some])[:-10].reshape(2, -1)


@pytest.mark.parametrize(("count", "seed"), [(1, 0), (12345, 987654321), (2**32 + 5, 2**40 + 3)])
def test_the_body_has_the_bits_of_the_definition(count, seed):
    x = samples()
    np.testing.assert_array_equal(rounded(x, count, seed), round_stochastic(x, count, seed).astype(np.float32))


def test_the_mean_is_the_number():
    x = np.asarray([1.001, -3.003, 1e-10, 7.5e-40], np.float32)
    found = rounded(np.tile(x, 20000), 3, 5).reshape(-1, 4).astype(np.float64)
    below, above = found.min(0), found.max(0)
    deviation = (above - below) / 2 / np.sqrt(20000)
    assert np.all(np.abs(found.mean(0) - x) < 4 * deviation)
    assert np.all(np.asarray(below, ml_dtypes.bfloat16).astype(np.float64) == below)


def test_it_rounds_single_precision_only():
    with raises_sentence("rounded_type", what="x", got="DOUBLE", operator="RoundStochastic"):
        rounded(np.ones(3), 1, 0, onnx.TensorProto.DOUBLE)


def trainer(optimizer, *, kernels=True, masked=False, **options):
    model = onnxtrain.examples.mlp((4, 16, 3))
    made = onnxtrain.Trainer(
        model,
        loss="softmax_cross_entropy",
        optimizer=optimizer,
        precision=onnxtrain.Precision(states="bfloat16"),
        runtime=RuntimeOptions(1, kernels=kernels),
        **options,
    )
    if masked:
        made.set_masks({"layer1.weight": np.arange(64).reshape(made.parameters["layer1.weight"].shape) % 3 > 0})
    return made


@pytest.mark.sampled("options")
@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.1, "masked": True}, {"accumulate": 2, "ema": 0.9}], ids=str)
@pytest.mark.parametrize("optimizer", WAYS, ids=repr)
def test_training_is_the_same_as_in_standard_operators(optimizer, options):
    x = np.random.default_rng(1).standard_normal((10, 8, 4)).astype(np.float32)
    y = np.random.default_rng(2).integers(0, 3, (10, 8))
    ways = [trainer(optimizer, kernels=kernels, **options) for kernels in (True, False)]
    losses = [[made.train_step(*batch) for batch in zip(x, y, strict=True)] for made in ways]
    # The last bit of float32 sometimes decides the neighbour that a state becomes.
    np.testing.assert_allclose(losses[0], losses[1], rtol=2e-3)
    states = [name for name, value in ways[0].executor.states.items() if value.dtype == ml_dtypes.bfloat16]
    assert len(states) == 4 * len(optimizer.states)
    for made in ways:
        assert any(np.any(made.executor.states[name] != 0) for name in states)


def test_the_rounding_is_in_the_update_and_each_state_is_once():
    made = trainer(onnxtrain.Adam(0.01), clip_norm=1.0)
    lowered = onnxtrain.lower(made.training_model(), kernels=True)
    found = Counter(node.op_type for node in lowered.graph.node)
    assert found["FusedAdam"] == 1
    assert found["RoundStochastic"] == 0
    readers = Counter(name for node in lowered.graph.node for name in node.input if name.endswith(("/V", "/H")))
    assert set(readers.values()) == {1}
    (fused,) = (node for node in lowered.graph.node if node.op_type == "FusedAdam")
    assert len(set(next(a.ints for a in fused.attribute if a.name == "seeds"))) == 8
    metadata = {entry.key: entry.value for entry in lowered.metadata_props}
    assert metadata["onnxtrain.in_place"].count("/H") == 4


def test_a_step_graph_for_any_runtime_has_standard_operators():
    lowered = onnxtrain.lower(trainer(onnxtrain.Adam(0.01)).training_model())
    assert {node.domain for node in lowered.graph.node} == {""}
    onnx.checker.check_model(lowered, full_check=True)


def test_a_state_that_somebody_reads_is_rounded_beside_the_update():
    made = trainer(onnxtrain.Momentum(0.1))
    model = made.training_model()
    algorithm = model.training_info[0].algorithm
    update = next(node for node in algorithm.node if node.op_type == "Momentum")
    wide = update.output[4]  # V_new of the first parameter
    algorithm.node.append(helper.make_node("ReduceMax", [wide], ["largest"], keepdims=0))
    algorithm.output.append(helper.make_tensor_value_info("largest", 1, []))
    session = onnxtrain.TrainingSession(model)
    feeds = {"input": np.ones((2, 4), np.float32), "target": np.asarray([0, 1]), "learning_rate": np.float32(0.1)}
    largest = session.step(feeds)["largest"]
    name = next(name for name in session.state if name.endswith("/V"))
    assert abs(float(session.state[name].astype(np.float32).max()) - largest) <= 2**-7 * abs(largest)


def test_browsers_have_no_such_type():
    model = trainer(onnxtrain.Adam(0.01)).training_model()
    with raises_sentence("webgpu_bfloat16"):
        onnxtrain.lowering.lower.lower(model, portable="webgpu")


def trained_with(state_dtype):
    return onnxtrain.Trainer(
        onnxtrain.examples.mlp((64, 128, 3)),
        loss="softmax_cross_entropy",
        optimizer=onnxtrain.Adam(0.01),
        precision=onnxtrain.Precision(states=state_dtype),
    )


def test_graphs_for_any_runtime_have_none():
    model = trained_with("8bit").training_model()
    with raises_sentence("states_in_8_bits", what="DecodeBlockwise"):
        onnxtrain.lower(model)


def test_inside_an_update_they_are_taken():
    trained_with("8bit").train_step(np.ones((2, 64), np.float32), np.asarray([0, 1]))


@pytest.mark.parametrize("operator", ["EncodeBlockwise", "DecodeBlockwise"])
def test_either_operator_is_refused_where_it_stands_alone(operator):
    model = parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 18, "onnxtrain" : 1]> g (float[4] x) => (float[4] y)'
        f"{{ y = onnxtrain.{operator}(x) }}"
    )
    with pytest.raises(OperatorError, match=f"{operator}: states in 8 bits"):
        check_states(ir.from_proto(model).graph)


def test_operators_of_others_with_such_names_are_left():
    graph = ir.from_proto(
        parser.parse_model(
            '<ir_version: 9, opset_import: ["" : 18, "theirs" : 1]> g (float[4] x) => (float[4] y)'
            "{ y = theirs.EncodeBlockwise(x) }"
        )
    ).graph
    before = ir.to_proto(graph)
    check_states(graph)
    assert ir.to_proto(graph) == before
