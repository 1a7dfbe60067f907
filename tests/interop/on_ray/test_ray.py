"""Trainings on two local Ray nodes match one process, even when a worker is lost."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxtrain
from distributed.threads import step_in_rank_order
from onnxtrain.errors import OptionError
from onnxtrain.training.examples import mlp

pytest.importorskip("ray", minversion="2.60", reason="Ray is not installed: pip install 'onnxtrain[ray]'")
pytest.importorskip("torch", reason="PyTorch, whose gloo Ray's collectives need, is not installed")

import ray
import ray.data
from kill_once import KillOnce
from ray.cluster_utils import Cluster
from ray.train import FailureConfig, RunConfig, ScalingConfig

import onnxtrain.interop.ray

pytestmark = pytest.mark.filterwarnings("ignore")

COMMON = {"loss": "softmax_cross_entropy", "optimizer": "adam(lr=0.01)", "epochs": 3, "batch_size": 16, "threads": 1}


@pytest.fixture(scope="module")
def cluster():
    with pytest.MonkeyPatch.context() as context:
        context.setenv("PYTHONPATH", ":".join([str(Path(__file__).parent), *filter(None, sys.path)]))
        context.setenv("RAY_USAGE_STATS_ENABLED", "0")
        context.setenv("RAY_AUTH_MODE", "disabled")
        nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
        nodes.add_node(num_cpus=2)
        ray.init(nodes.address, log_to_driver=False)
        yield
        ray.shutdown()
        nodes.shutdown()


def _points(count: int = 200) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, count)
    return (np.eye(4)[labels] + 0.3 * rng.normal(size=(count, 4))).astype(np.float32), labels


def _dataset() -> ray.data.Dataset:
    return ray.data.from_items([{"input": x, "label": y} for x, y in zip(*_points(), strict=True)])


def _fit(
    folder: Path, name: str, *, model=None, workers: int = 2, failures: int = 0, **options
) -> dict[str, np.ndarray]:
    onnxtrain.ray.fit(
        model or mlp((4, 8, 3)),
        _dataset(),
        save=folder / f"{name}.onnx",
        scaling=ScalingConfig(num_workers=workers, placement_strategy="SPREAD"),
        run=RunConfig(name=name, storage_path=str(folder), failure_config=FailureConfig(max_failures=failures)),
        **{**COMMON, **options},
    )
    model = onnx.load(folder / f"{name}.onnx")
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def test_two_workers_are_one_process_with_two_micro_batches(cluster, tmp_path):
    found = _fit(tmp_path, "two", shuffle=False)
    trainer = onnxtrain.Trainer(
        mlp((4, 8, 3)), loss=COMMON["loss"], optimizer=COMMON["optimizer"], accumulate=2, threads=1
    )
    trainer.fit(*_points(), epochs=3, batch_size=16, shuffle=False)
    for name, value in trainer.get_weights().items():
        np.testing.assert_array_equal(found[name], value)


@pytest.mark.parametrize("shard", [False, True])
def test_workers_with_micro_batches_add_up_in_rank_order(cluster, tmp_path, shard):
    """A weight that two nodes share, and odd numbers of micro-batches."""
    text = "g (float[N, 4] input) => (float[N, 3] y) { a = MatMul(input, w) b = MatMul(a, w) y = MatMul(b, v) }"
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 18]> {text}')
    rng = np.random.default_rng(0)
    for name, shape in (("w", (4, 4)), ("v", (4, 3))):
        values = rng.normal(size=shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    several = onnxtrain.Distributed(shard_states=shard)
    found = _fit(tmp_path, "micro", model=model, shuffle=False, accumulate=3, distributed=several)
    alone = onnxtrain.Trainer(model, loss=COMMON["loss"], optimizer=COMMON["optimizer"], accumulate=3, threads=1)
    x, y = _points()
    for start in [*range(0, len(x), 16)] * 3:
        step_in_rank_order(alone, (x[start : start + 16],), y[start : start + 16], 2)
    for name, value in alone.get_weights().items():
        np.testing.assert_array_equal(found[name], value)


def test_workers_move_values_of_any_type(cluster):
    """Gloo supports neither uint16 nor ml_dtypes types, so bytes are moved."""
    import ml_dtypes

    @ray.remote
    def work(rank: int) -> list[list[float]]:
        from onnxtrain.interop.ray import Collective

        group, found = Collective(rank, 2, "types"), []
        for dtype in (np.float32, np.dtype("<f4").newbyteorder("<"), ml_dtypes.bfloat16, np.uint16, np.int64, np.bool_):
            number, rows = np.full((), 1 - rank, dtype), np.full((2, 3), rank, dtype)
            group.broadcast_(number)
            group.all_gather_(rows)
            found.append([float(number), *rows[:, 0].astype(float)])
        return found

    found = ray.get([work.remote(rank) for rank in range(2)])
    assert found == [[[1.0, 0.0, 1.0]] * 6] * 2


def test_a_killed_worker_is_restarted(cluster, tmp_path):
    """It is killed in the second epoch; the result equals an undisturbed run bit for bit."""
    undisturbed = _fit(tmp_path, "undisturbed")
    marker = tmp_path / "killed"
    killed = _fit(tmp_path, "killed", failures=1, callbacks=[KillOnce(marker, rank=1, step=18)])
    assert marker.exists()
    for name, value in undisturbed.items():
        np.testing.assert_array_equal(killed[name], value)


def test_metrics_are_reported(cluster, tmp_path):
    np.savez(tmp_path / "test.npz", input=_points()[0], label=_points()[1])
    result = onnxtrain.ray.fit(
        mlp((4, 8, 3)),
        _dataset(),
        validation=tmp_path / "test.npz",
        metrics="accuracy",
        run=RunConfig(name="measured", storage_path=str(tmp_path)),
        **COMMON,
    )
    assert result.metrics["epoch"] == 3
    assert result.metrics["val_accuracy"] > 0.5
    with result.checkpoint.as_directory() as folder:
        measured = onnxtrain.evaluate(Path(folder) / "model.onnx", tmp_path / "test.npz", loss=COMMON["loss"])
    assert measured["loss"] == pytest.approx(result.metrics["val_loss"])


def test_arguments_are_checked():
    with pytest.raises(OptionError, match="epochs is 0"):
        onnxtrain.ray.fit(mlp((4, 3)), None, **{**COMMON, "epochs": 0})
