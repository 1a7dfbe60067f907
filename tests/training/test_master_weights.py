"""Training of float16 and bfloat16 weights: with float32 master weights, and directly in bfloat16."""

from __future__ import annotations

import subprocess
import sys

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

import onnxtrain
from onnxtrain import examples
from onnxtrain.errors import CheckpointError, OptionError
from onnxtrain.operators.registry import OPTIMIZERS
from onnxtrain.runtime.options import RuntimeOptions
from zoo.arrays import assert_same, copied
from zoo.decoder import batch, decoder

LOSS = "softmax_cross_entropy"
RNG = np.random.default_rng(3)
X = RNG.standard_normal((24, 4)).astype(np.float32)
Y = RNG.integers(0, 3, 24)
BFLOAT16 = ml_dtypes.bfloat16
HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def halved(model, kind="bfloat16"):
    """Return a model with weights and computation in half precision; its input stays float32."""
    dtype = {"bfloat16": onnx.TensorProto.BFLOAT16, "float16": onnx.TensorProto.FLOAT16}[kind]
    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            array = numpy_helper.to_array(tensor)
            raw = array.astype(helper.tensor_dtype_to_np_dtype(dtype)).tobytes()
            tensor.CopyFrom(helper.make_tensor(tensor.name, dtype, array.shape, raw, raw=True))
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT:
            value.type.tensor_type.elem_type = dtype
    return model


def trainer(kind="bfloat16", sizes=(4, 8, 3), **options):
    options = {"optimizer": "adamw(lr=0.05)", "precision": "master_weights=false", **options}
    return onnxtrain.Trainer(halved(examples.mlp(sizes), kind), loss=LOSS, **options)


def given(x=X, kind="bfloat16"):
    return x.astype({"bfloat16": BFLOAT16, "float16": np.float16}[kind])


def graph_of(learner):
    return learner.executor.session._steps[0].step.model.graph


@pytest.mark.sampled(3)
@pytest.mark.parametrize("master_weights", [True, False])
@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_gradients_are_float32_so_that_nothing_scales_losses(kind, master_weights):
    """Only weights, their rows and inputs are in half precision, so that loss scaling is not needed."""
    if kind == "float16" and not master_weights:
        return
    options = {"lora": onnxtrain.Lora(rank=2), "train": "*lm_head*"} if master_weights else {}
    decoders = onnxtrain.Trainer(
        halved(decoder(), kind), loss=LOSS, precision=onnxtrain.Precision(master_weights=master_weights), **options
    )
    decoders.train_step(*batch())
    plain = trainer(kind, precision=onnxtrain.Precision(master_weights=master_weights))
    plain.train_step(given(kind=kind), Y)
    for learner in (decoders, plain):
        held = set(learner.parameters) if not master_weights else set()
        for node in graph_of(learner):
            for output in node.outputs:
                if output.dtype in HALVES:
                    assert node.op_type in ("Gather", "Reshape") or output.name.removesuffix("_new") in held
        gradients = [state for node in graph_of(learner) if "Adam" in node.op_type for state in node.inputs]
        types = {value.dtype for value in gradients if value.name.removesuffix("/V").removesuffix("/H") not in held}
        assert types <= {ir.DataType.FLOAT, ir.DataType.INT64}


def test_weights_take_two_bytes_and_the_file_has_them_as_they_are(tmp_path):
    learner, masters = trainer(), trainer(precision=onnxtrain.Precision(master_weights=True))
    for one in (learner, masters):
        losses = [one.train_step(given(), Y) for _ in range(30)]
        assert losses[-1] < 0.7 * losses[0]
    assert {array.dtype for array in learner.parameters.values()} == {np.dtype(BFLOAT16)}
    assert {array.dtype for array in masters.parameters.values()} == {np.dtype(np.float32)}
    assert learner.executor.states["layer1.weight/H"].dtype == np.float32
    learner.save(tmp_path / "saved.onnx")
    for tensor in onnx.load(tmp_path / "saved.onnx").graph.initializer:
        if tensor.name in learner.parameters:
            np.testing.assert_array_equal(numpy_helper.to_array(tensor), learner.parameters[tensor.name])
    assert learner.evaluate((given(), Y))["loss"] == pytest.approx(losses[-1], rel=0.2)


def sum_of_products(count):
    """Return a model with loss = mean over examples of sum(x w): the gradient of w is the mean of x."""
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        g (bfloat16[n,{count}] x) => (bfloat16 y) {{ p = Mul(x, w) y = ReduceMean<keepdims=0>(p) }}""")
    model.graph.initializer.append(helper.make_tensor("w", onnx.TensorProto.BFLOAT16, [count], np.ones(count)))
    return model


@pytest.mark.parametrize("state_dtype", [None, "bfloat16"])
def test_steps_that_are_too_small_for_the_nearest_number_are_taken_in_the_mean(state_dtype):
    """Take 200 steps of 1e-4 from 1; the next bfloat16 is 0.0039 below, so rounding to nearest would stay at 1."""
    count, rate = 40_000, 1e-4
    optimizer = onnxtrain.Momentum(rate * count, alpha=0.0)
    learner = onnxtrain.Trainer(
        sum_of_products(count),
        loss="output:y",
        optimizer=optimizer,
        precision=onnxtrain.Precision(master_weights=False, states=state_dtype),
    )
    x = np.ones((1, count), BFLOAT16)
    for _ in range(200):
        learner.train_step(x)
    nearest = (np.ones(1, np.float32) - np.float32(rate)).astype(BFLOAT16)
    assert nearest == 1
    w = learner.parameters["w"].astype(np.float64)
    assert len(np.unique(w)) > 3  # each element is rounded independently
    # The variance of a step between neighbors u apart is at most u rate; allow five standard deviations of the mean.
    assert w.mean() == pytest.approx(1 - 200 * rate, abs=5 * np.sqrt(200 * 2**-8 * rate / count))


@pytest.mark.parametrize(
    "options", [{}, {"accumulate": 2, "clip_norm": 0.5, "precision": "states=bfloat16, master_weights=false"}], ids=str
)
def test_a_resumed_training_continues_bit_for_bit(tmp_path, options):
    whole, first, second = trainer(**options), trainer(**options), trainer(**options)
    data = given(), Y
    whole.fit(data, epochs=4, batch_size=8, progress=False)
    first.fit(data, epochs=2, batch_size=8, progress=False, checkpoint=tmp_path / "run")
    second.fit(data, epochs=4, batch_size=8, progress=False, checkpoint=tmp_path / "run", resume=True)
    assert_same(whole.executor.states, second.executor.states)
    with pytest.raises(CheckpointError, match="master_weights"):
        trainer(**options | {"precision": options.get("precision", "float32").replace("=false", "=true")}).fit(
            data, epochs=4, batch_size=8, progress=False, checkpoint=tmp_path / "run", resume=True
        )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_learns_with_and_without_kernels(optimizer):
    """The random bits are equal, so weights differ only where updates differ by float32 rounding."""
    made = getattr(onnxtrain, optimizer)
    rate = {"SSGD": 0.2, "Momentum": 0.2, "SGD": 0.2, "Adagrad": 0.1}.get(optimizer, 0.02)
    needed = {"SSGD": {"p": 1.0}}.get(optimizer, {})
    learners = [
        trainer(optimizer=made(rate, **needed), runtime=RuntimeOptions(kernels=kernels), threads=1)
        for kernels in (True, False)
    ]
    for _ in range(2):
        for learner in learners:
            learner.train_step(given(), Y)
    for name, array in learners[0].parameters.items():
        one, other = (np.asarray(learner.parameters[name], np.float32) for learner in learners)
        assert np.mean(one != other) < 0.1, name
        np.testing.assert_allclose(one, other, rtol=2**-6, atol=1e-4, err_msg=name)
        assert array.dtype == BFLOAT16
    losses = [learners[0].train_step(given(), Y) for _ in range(40)]
    assert losses[-1] < losses[0]


def test_an_update_widens_weights_part_by_part_and_writes_them_where_they_stand():
    learner = trainer(sizes=(4, 300, 3), precision="states=bfloat16, master_weights=false")
    learner.train_step(given(), Y)
    operators = [node.op_type for node in graph_of(learner)]
    assert "FusedAdamW" in operators
    assert "RoundStochastic" not in operators
    assert "BitwiseXor" not in operators  # of the operator's body
    assert not set(learner.executor.session._steps[0].second_buffers) & set(learner.parameters)


def test_products_read_large_weights_as_they_are_and_nothing_makes_them_float():
    learner = trainer(sizes=(4, 200, 200, 3))
    learner.train_step(given(), Y)
    graph = graph_of(learner)
    assert not [node for node in graph if node.op_type == "Cast" and node.outputs[0].shape == (200, 200)]
    (weight,) = (value for value in graph.inputs if value.name in learner.parameters and value.shape == (200, 200))
    readers = [node.op_type for node in weight.consumers()]
    assert sorted(readers) == ["FusedAdamW", "Linear", "LinearGradient"]  # the update, the linear layer, its gradients
    assert learner.executor.session._steps[0].second_buffers == ("T",)


def test_seeds_differ_and_training_models_go_on():
    one, other = trainer(seed=0), trainer(seed=1)
    for learner in (one, other):
        learner.train_step(given(), Y)
    assert any(np.any(array != other.parameters[name]) for name, array in one.parameters.items())
    model = one.training_model()
    onnx.checker.check_model(model)
    session = onnxtrain.TrainingSession(model)
    session.step({"input": given(), "target": Y, "learning_rate": np.float32(0.05)})
    one.train_step(given(), Y)
    assert_same(one.executor.states, session.state)


@pytest.mark.parametrize("options", [{"loss": "next_token(chunk=4)"}, {"tie": True}], ids=str)
def test_language_models_learn(options):
    """Embeddings, linear layers and head train, also with logits computed chunk by chunk."""
    options = {"loss": LOSS, **options}
    learner = onnxtrain.Trainer(
        halved(decoder()), optimizer="adamw(lr=0.01)", precision=onnxtrain.Precision(master_weights=False), **options
    )
    before = copied(learner.executor.states)
    x, y = batch()
    losses = [learner.train_step(x, x if options["loss"] != LOSS else y) for _ in range(15)]
    assert losses[-1] < 0.7 * losses[0]
    for name, array in learner.parameters.items():
        assert array.dtype == BFLOAT16
        assert np.any(array != before[name]), name


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"kind": "float16"},
            r"Precision\(master_weights=False\) holds trained weights in bfloat16, but '.*' is float16, whose range",
        ),
        (
            {"ema": 0.9},
            r"ema keeps averages of weights in float32, and master_weights=False has none in it; leave one",
        ),
        (
            {"distributed": None},
            r"shard_states=True cuts weights in float32; leave shard_states or master_weights out",
        ),
    ],
)
def test_refusals(options, sentence):
    if "distributed" in options:
        options = {**options, "distributed": onnxtrain.Distributed(Two(), shard_states=True)}
    with pytest.raises(OptionError, match=sentence):
        trainer(**options)


MEASURE = """
import re, sys
from pathlib import Path
import ml_dtypes, numpy as np, onnxtrain

def train(path):
    trainer = onnxtrain.Trainer(path, loss="cross_entropy", threads=1, precision="master_weights={master_weights}")
    for _ in range(2):
        trainer.train_step(np.ones((2, 64), ml_dtypes.bfloat16), np.zeros(2, np.int64))
    own = re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())
    return trainer, 1024 * int(own[1])

_, before = train({small!r})
trainer, after = train({large!r})
print((after - before) / sum(array.size for array in trainer.parameters.values()))
"""


@pytest.mark.thorough
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads resident memory from /proc")
def test_a_weight_takes_two_bytes_less_than_with_a_master(tmp_path):
    paths = {"small": (64, 64, 64), "large": (64, 3000, 3000, 3000, 64)}
    for name, sizes in paths.items():
        onnx.save(halved(examples.mlp(sizes)), tmp_path / f"{name}.onnx")
    found = []
    for master_weights in (True, False):
        places = {name: str(tmp_path / f"{name}.onnx") for name in paths}
        code = MEASURE.format(**places, master_weights=master_weights)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        found.append(float(done.stdout))
    assert 1.5 < found[0] - found[1] < 3


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("fp16", "There is no option 'fp16': a model in float16 or bfloat16 trains as it is, in float32; leave it out"),
        (
            "loss_scale",
            "There is no option 'loss_scale': gradients are float32 whatever the type of the model, so that",
        ),
        ("scaler", "There is no option 'scaler': gradients are float32"),
        (
            "stochastic_rounding",
            r"There is no option 'stochastic_rounding': give precision=onnxtrain.Precision\(master_weights=False\)",
        ),
    ],
)
def test_options_of_other_tools_are_answered(name, sentence):
    with pytest.raises(OptionError, match=sentence):
        trainer(**{name: True})


class Two:
    """Stand-in for two ranks, for errors before any communication."""

    rank, size = 0, 2
