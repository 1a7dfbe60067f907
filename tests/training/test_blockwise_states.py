"""Optimizer states in 8 bits: as good as float32, a quarter of the bytes, bit-exact resumption, refused options."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest
from onnx import helper
from test_state_dtype import ratio_of_losses

import onnxtrain
from onnxtrain import examples
from onnxtrain.errors import OperatorError, OptionError
from onnxtrain.runtime.options import RuntimeOptions
from sentences import raises_sentence
from zoo.arrays import assert_same

LOSS = "softmax_cross_entropy"
RNG = np.random.default_rng(3)
X = RNG.standard_normal((24, 64)).astype(np.float32)
Y = RNG.integers(0, 3, 24)
LARGE = "layer1.weight"
"""A tensor of 8,192 elements; the others have fewer than 4,096."""
WAYS = [
    onnxtrain.Adam(0.01), onnxtrain.AdamW(0.01), onnxtrain.Momentum(0.1), onnxtrain.SGD(0.1, momentum=0.9),
    onnxtrain.Adagrad(0.1), onnxtrain.LAMB(0.01), onnxtrain.Lion(0.001), onnxtrain.RMSprop(0.01),
    onnxtrain.RMSprop(0.01, momentum=0.9), onnxtrain.SSGD(0.1, alpha=0.9, regularization=1e-3),
]  # fmt: skip


def trainer(state_dtype="8bit", **options):
    options = {"optimizer": "adamw(lr=0.005)", "threads": 1, **options}
    return onnxtrain.Trainer(
        examples.mlp((64, 128, 3)), loss=LOSS, precision=onnxtrain.Precision(states=state_dtype), **options
    )


@pytest.mark.parametrize("optimizer", WAYS, ids=repr)
def test_large_tensors_have_codes_and_scales_and_small_ones_stay(optimizer):
    learner = trainer(optimizer=optimizer)
    size = learner.parameters[LARGE].size
    learner.train_step(X, Y)
    states = learner.executor.states
    for letter in (state.name for state in optimizer.states):
        assert states[f"{LARGE}/{letter}"].dtype == np.uint8
        assert states[f"{LARGE}/{letter}"].shape == learner.parameters[LARGE].shape
        assert states[f"{LARGE}/{letter}_scale"].shape == (size // 256,)
        assert states[f"{LARGE}/{letter}_scale"].dtype == np.float32
        assert np.any(states[f"{LARGE}/{letter}"])
        assert states[f"layer2.weight/{letter}"].dtype == np.float32
        assert states[f"layer1.bias/{letter}"].dtype == np.float32
    lowered = onnxtrain.lower(learner.training_model(), kernels=True)
    found = Counter(node.op_type for node in lowered.graph.node)
    assert not found["EncodeBlockwise"] + found["DecodeBlockwise"]
    metadata = {entry.key: entry.value for entry in lowered.metadata_props}
    assert metadata["onnxtrain.in_place"].count(f"{LARGE}/") == 2 * len(optimizer.states)


@pytest.mark.parametrize(("elements", "kept"), [(4095, np.float32), (4096, np.uint8), (4097, np.uint8)])
def test_the_smallest_tensor_in_8_bits_has_4096_elements(elements, kept):
    model = examples.mlp((elements, 1))
    learner = onnxtrain.Trainer(
        model, loss="mse", optimizer="adam", precision=onnxtrain.Precision(states="8bit"), threads=1
    )
    learner.train_step(np.ones((2, elements), np.float32), np.ones((2, 1), np.float32))
    states = {
        name: array for name, array in learner.executor.states.items() if name.endswith("/V") and array.size == elements
    }
    assert [array.dtype for array in states.values()] == [kept]
    scales = [array.shape for name, array in learner.executor.states.items() if name.endswith("/V_scale")]
    assert scales == ([] if elements < 4096 else [(-(-elements // 256),)])


@pytest.mark.parametrize(
    "options", [{}, {"accumulate": 2, "clip_norm": 0.5, "ema": 0.9}, {"clip_value": 0.01, "groups": True}], ids=str
)
def test_a_resumed_training_continues_bit_for_bit(tmp_path, options):
    if "groups" in options:
        options |= {"groups": (onnxtrain.Group("*bias", weight_decay=0.0, lr_scale=0.1),)}
    whole, first, second = trainer(**options), trainer(**options), trainer(**options)
    data = X, Y
    whole.fit(data, epochs=4, batch_size=8, progress=False)
    first.fit(data, epochs=2, batch_size=8, progress=False, checkpoint=tmp_path / "run")
    second.fit(data, epochs=4, batch_size=8, progress=False, checkpoint=tmp_path / "run", resume=True)
    assert whole.executor.states[f"{LARGE}/V"].dtype == np.uint8
    assert_same(whole.executor.states, second.executor.states)


def test_threads_change_nothing_and_seeds_do():
    one, same_seed, other = trainer(), trainer(threads=3), trainer(seed=1)
    for learner in (one, same_seed, other):
        for _ in range(3):
            learner.train_step(X, Y)
    codes = [learner.executor.states[f"{LARGE}/H"] for learner in (one, same_seed, other)]
    np.testing.assert_array_equal(codes[0], codes[1])
    assert np.any(codes[0] != codes[2])


def test_masked_weights_and_their_states_stay_zero():
    learner = trainer()
    mask = np.arange(8192).reshape(learner.parameters[LARGE].shape) % 3 > 0
    learner.set_masks({LARGE: mask})
    for _ in range(5):
        learner.train_step(X, Y)
    for name in (f"{LARGE}/V", f"{LARGE}/H"):
        assert not np.any(learner.executor.states[name][~mask] & 127)
        assert np.any(learner.executor.states[name][mask])
    assert not np.any(learner.parameters[LARGE][~mask])


def test_a_training_model_saved_to_a_file_continues():
    learner = trainer()
    learner.train_step(X, Y)
    model = learner.training_model()
    onnx.checker.check_model(model)
    session = onnxtrain.TrainingSession(model)
    session.step({"input": X, "target": Y, "learning_rate": np.float32(0.005)})
    learner.train_step(X, Y)
    assert_same(learner.executor.states, session.state)
    session.initialize()
    assert not np.any(session.state[f"{LARGE}/H"])
    assert not np.any(session.state[f"{LARGE}/H_scale"])


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "optimizer",
    [onnxtrain.Adam(2e-3), onnxtrain.Momentum(0.02), onnxtrain.Adagrad(0.05), onnxtrain.Lion(3e-4)],
    ids=repr,
)
def test_it_trains_as_well_as_with_float32(optimizer):
    """After 400 steps on noisy digits of ten classes, validation losses differ by less than two percent."""
    assert abs(ratio_of_losses(optimizer, "8bit", hidden=64) - 1) < 0.02


def test_an_average_that_changes_by_a_thousandth_falls():
    """Rounding to nearest would not change values: half the distance between two codes is a sixteenth."""
    learner = trainer(optimizer=onnxtrain.Adam(0.0))
    learner.executor.states[f"{LARGE}/H"][...] = 31 << 3  # 1 times the scale
    learner.executor.states[f"{LARGE}/H_scale"][...] = 1.0
    for _ in range(300):
        learner.train_step(np.zeros_like(X), Y)  # its gradient for the first weights is zero
    codes, scales = learner.executor.states[f"{LARGE}/H"].reshape(-1, 256), learner.executor.states[f"{LARGE}/H_scale"]
    mean = np.mean(2.0 ** ((codes >> 3) - 31.0) * (1 + (codes & 7) / 8) * scales[:, None])
    assert abs(mean - 0.999**300) < 0.03


@pytest.mark.parametrize("name", ["int8", "8-bit", "uint8"])
def test_names_of_other_tools(name):
    assert trainer(name).config.precision.states == "8bit"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"state_dtype": "int4"},
            r"states is 'int4'; it is 'bfloat16' or '8bit', or None for",
        ),
        (
            {"runtime": RuntimeOptions(kernels=False)},
            r"Precision\(states='8bit'\) needs the native kernels, which decode",
        ),
        (
            {"distributed": None},
            r"shard_states=True cuts states of the weights' type; leave",
        ),
    ],
    ids=str,
)
def test_refusals(options, sentence):
    if "distributed" in options:
        options["distributed"] = onnxtrain.Distributed(Two(), shard_states=True)
    with pytest.raises(OptionError, match=sentence):
        trainer(**{"threads": None, **options})


class Two:
    """Stand-in for two ranks, for errors before any communication."""

    rank, size = 0, 2


@pytest.mark.parametrize("portable", [None, "webgpu"])
def test_a_step_graph_for_any_runtime_is_refused(portable):
    with raises_sentence("states_in_8_bits", what="DecodeBlockwise"):
        onnxtrain.lower(trainer().training_model(), portable=portable)


def test_a_state_that_somebody_reads_is_refused():
    model = trainer(optimizer=onnxtrain.Momentum(0.1)).training_model()
    algorithm = model.training_info[0].algorithm
    wide = next(node for node in algorithm.node if node.op_type == "EncodeBlockwise").input[0]
    algorithm.node.append(helper.make_node("ReduceMax", [wide], ["largest"], keepdims=0))
    algorithm.output.append(helper.make_tensor_value_info("largest", 1, []))
    with pytest.raises(OperatorError, match=r"where something else reads a state"):
        onnxtrain.TrainingSession(model)


def test_a_checkpoint_of_other_states_is_refused(tmp_path):
    trainer("bfloat16").fit((X, Y), epochs=1, batch_size=8, progress=False, checkpoint=tmp_path / "run")
    with raises_sentence("another_training", differences='state_dtype is "bfloat16" there and "8bit" here'):
        trainer().fit((X, Y), epochs=2, batch_size=8, progress=False, checkpoint=tmp_path / "run", resume=True)
