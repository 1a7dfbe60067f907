"""Synchronized batch normalization: the nodes in the graph, and results of one process with two parts."""

import threading

import numpy as np
import pytest
from onnx import parser

import onnxtrain
from onnxtrain.distributed import Single
from onnxtrain.errors import StepError
from onnxtrain.runtime.native import all_reducing


class Pretended(Single):
    """Process that has another one beside it with the same part of every batch."""

    size = 2

    def all_reduce_(self, array):
        array *= 2

    def all_gather_(self, array):
        array[...] = array[0]


def trainer(batch_norm, several=None, **options):
    settings = {"loss": "softmax_cross_entropy", "optimizer": "sgd(lr=0.1)", "threads": 1, **options}
    return onnxtrain.Trainer(onnxtrain.examples.small_resnet(), batch_norm=batch_norm, distributed=several, **settings)


@pytest.fixture
def batch():
    rng = np.random.default_rng(3)
    return rng.normal(1.0, 2.0, size=(4, 3, 16, 16)).astype(np.float32), rng.integers(0, 2, 4)


def operators(made):
    return [node.op_type for node in made.executor.session._steps[0].step.model.graph]


def test_every_normalization_has_a_sum_in_each_direction():
    found = operators(trainer("sync", Pretended()))
    norms = operators(trainer("train", Pretended())).count("BatchNormalizationGradient")
    assert norms > 3
    assert found.count("AllReduce") == 2 * norms
    assert "AllReduce" not in operators(trainer("sync"))
    assert "AllReduce" not in operators(trainer("train", Pretended()))


def test_the_same_part_twice_is_that_part(batch):
    """Check that sums double and their quotients stay; gradients are summed, too."""
    x, y = batch
    twice, once = trainer("sync", Pretended()), trainer("train")
    for _ in range(3):
        twice.train_step(np.concatenate([x, x]), np.concatenate([y, y]))
        once.train_step(x, y)
    for name, array in once.weights.items():
        np.testing.assert_allclose(twice.weights[name], array, rtol=1e-4, atol=1e-5, err_msg=name)


def test_sums_are_made_on_the_thread_that_runs_the_session(batch):
    """Sum on one thread, so that MPI need not support several."""
    threads = set()

    class Watched(Pretended):
        def all_reduce_(self, array):
            threads.add(threading.get_ident())
            super().all_reduce_(array)

    trainer("sync", Watched(), threads=3).train_step(*batch)
    assert threads == {threading.get_ident()}


def test_a_layer_without_a_gradient_behind_it_still_takes_the_statistics_of_all(batch):
    x, y = batch
    twice = trainer("sync", Pretended(), train="classifier.*")
    assert operators(twice).count("AllReduce") == operators(trainer("sync", Pretended())).count("AllReduce") // 2
    before = {name: np.array(twice.weights[name]) for name in twice.objective.statistics}
    twice.train_step(x, y)
    assert all(np.any(twice.weights[name] != value) for name, value in before.items())


def test_the_file_of_a_training_is_for_one_process():
    for proto in (trainer("sync", Pretended()).training_model(), onnxtrain.lower(trainer("sync").training_model())):
        assert "AllReduce" not in {node.op_type for node in proto.graph.node}
    step = onnxtrain.lower(trainer("sync", Pretended()).training_model(), entry=0, kernels=True)
    assert "AllReduce" not in {node.op_type for node in step.graph.node}


def test_a_session_without_an_all_reduce_function_reports_it(batch):
    made, (x, y) = trainer("sync", Pretended()), batch
    steps = made.executor
    feeds = {"image": x, steps.objective.heads[0].target_name: y, "learning_rate": np.float32(0.1)}
    with pytest.raises(StepError, match="AllReduce"):
        steps.session.step(feeds, entry=0)
    with pytest.raises(KeyError, match="what went wrong"), all_reducing(lambda array: {}["what went wrong"]):
        steps.session.step(feeds, entry=0)


NORM = """
<ir_version: 8, opset_import: ["": 18]>
f (T[n, 3] x) => (T[n, 3] y) <T[3] s = {1, 2, 3}, T[3] b = {0, 0, 1}, T[3] mean = {0, 0, 0}, T[3] var = {1, 1, 1}>
{ y = BatchNormalization <momentum = 0.25> (x, s, b, mean, var) }
"""


@pytest.mark.parametrize("kind", ["float", "double"])
def test_a_large_mean_leaves_the_variance_its_digits(kind):
    """Use a variance of 1 beside a mean of 1000: sums of squares in single precision would lose it."""
    model = parser.parse_model(NORM.replace("T[", f"{kind}["))
    made = onnxtrain.Trainer(model, loss="mse", optimizer="sgd(lr=0.0)", batch_norm="sync", distributed=Pretended())
    dtype = {"float": np.float32, "double": np.float64}[kind]
    x = np.random.default_rng(0).normal(1000, 1, (200, 3)).astype(dtype)
    made.train_step(np.concatenate([x, x]), np.zeros((400, 3), dtype))
    np.testing.assert_allclose(made.weights["mean"], 0.75 * x.mean(axis=0, dtype=float), rtol=1e-6)
    np.testing.assert_allclose(made.weights["var"], 0.25 + 0.75 * x.var(axis=0, dtype=float), rtol=1e-5)
