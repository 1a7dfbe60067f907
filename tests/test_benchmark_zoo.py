"""The generated zoo of the benchmarks: the same forty models every time, of every kind, that train as in PyTorch."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))

import limits
import zoo_models


def test_the_draw_is_the_committed_one() -> None:
    """Tuning must not change what is measured: a change of the zoo changes this number and every earlier table."""
    assert len(zoo_models.ZOO) == zoo_models.DRAWS * len(zoo_models.KINDS) == 40
    described = "\n".join(f"{model.name} {model.size} {model.description}" for model in zoo_models.draw().values())
    assert hashlib.sha256(described.encode()).hexdigest()[:12] == "e00911e0c653"


@pytest.mark.parametrize("name", zoo_models.ZOO)
def test_batches_fit_the_model(name: str) -> None:
    model = zoo_models.ZOO[name]
    inputs, target = model.batch(6)
    assert {key: array.shape[1:] for key, array in inputs.items()} == model.inputs
    assert set(model.integers) <= set(inputs)
    for key, bound in model.integers.items():
        assert inputs[key].dtype == np.int64
        assert inputs[key].max() < (bound or 6)
    assert target.shape == (6, *model.labels)
    again, _ = model.batch(6)
    assert all(np.array_equal(inputs[key], again[key]) for key in inputs)


def event(operator: str, seconds: float, inputs: list[list[int]], outputs: list[list[int]]) -> dict:
    shapes = {"input_type_shape": [{"float": shape} for shape in inputs]}
    shapes["output_type_shape"] = [{"float": shape} for shape in outputs]
    args = {"op_name": operator, **shapes}
    return {"cat": "Node", "name": f"{operator}_kernel_time", "dur": 1e6 * seconds, "args": args}


@pytest.mark.parametrize(
    ("operator", "inputs", "outputs", "multiplications"),
    [
        ("Linear", [[8, 5, 3], [7, 3], [7]], [[8, 5, 7]], 8 * 5 * 3 * 7),
        ("LinearWeightGradient", [[8, 5, 7], [8, 5, 3]], [[7, 3], [7]], 8 * 5 * 3 * 7),
        ("LinearGradient", [[8, 7], [7, 3], [8, 3]], [[8, 3], [7, 3]], 2 * 8 * 3 * 7),
        ("LinearGradient", [[8, 7], [7, 3], [8, 3]], [[8, 3]], 8 * 3 * 7),
        ("MatMul", [[2, 4, 5, 3], [2, 4, 3, 7]], [[2, 4, 5, 7]], 2 * 4 * 5 * 3 * 7),
        ("FusedMatMul", [[2, 3, 5], [2, 3, 7]], [[2, 5, 7]], 2 * 5 * 3 * 7),  # its first operand is transposed
        ("Conv", [[2, 4, 9, 9], [6, 2, 3, 3]], [[2, 6, 7, 7]], 2 * 6 * 49 * 2 * 9),
        ("ConvInputGradient", [[2, 6, 7, 7], [6, 2, 3, 3]], [[2, 4, 9, 9]], 2 * 6 * 49 * 2 * 9),
        ("ConvWeightGradient", [[2, 6, 7, 7], [2, 4, 9, 9]], [[6, 2, 3, 3]], 2 * 6 * 49 * 2 * 9),
        ("Attention", [[2, 5, 3, 4], [2, 7, 3, 4], [2, 7, 3, 4]], [[2, 5, 3, 4]], 2 * 2 * 3 * 5 * 7 * 4),
        ("AttentionGradient", [[2, 5, 3, 4]] * 2 + [[2, 7, 3, 4]] * 2, [[2, 5, 3, 4]], 5 * 2 * 3 * 5 * 7 * 4),
        ("GRU", [[9, 2, 4], [1, 15, 4], [1, 15, 5]], [[9, 1, 2, 5]], 9 * 2 * 15 * (4 + 5)),
        ("Relu", [[8, 5]], [[8, 5]], 0),
    ],
)
def test_multiplications_are_counted(
    operator: str, inputs: list[list[int]], outputs: list[list[int]], multiplications: int
) -> None:
    (node,) = limits.nodes_of([event(operator, 3e-6, inputs, outputs), event(operator, 2e-6, inputs, outputs)])
    assert node.multiplications == multiplications
    assert node.size == 4 * sum(int(np.prod(shape)) for shape in (*inputs, *outputs))
    assert node.seconds == pytest.approx(2e-6)


def test_a_limit_is_the_longer_of_products_and_bytes() -> None:
    peaks = limits.Peaks(operations=100.0, streams={10: 20.0, 1000: 5.0}, call=0.25)
    assert peaks.seconds(0, 5) == 5 / 20 + 0.25  # smaller than every stream: the fastest one
    assert peaks.seconds(0, 999) == 999 / 20 + 0.25
    assert peaks.seconds(0, 2000) == 2000 / 5 + 0.25
    assert peaks.seconds(100, 20) == 2.0 + 0.25
    nodes = [limits.Node("Relu", 4.0, 0, 20), limits.Node("MatMul", 6.0, 100, 20)]
    assert limits.share(10.0, nodes, peaks) == pytest.approx((1.25 + 2.25) / 10)


@pytest.mark.torch
@pytest.mark.thorough
@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", zoo_models.ZOO)
def test_first_steps_agree_with_pytorch(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    import harness
    import peers

    task = peers.Task("onnxtrain", name, 8, 1, str(tmp_path))
    peers.OnnxTrain.prepare(task)
    batch = peers.batches(task)
    ours, theirs = (
        harness.Measurement(losses=[peer.step(*batch(step)) for step in range(3)])
        for peer in (peers.OnnxTrain(task), peers.Torch(task))
    )
    assert harness.losses_differ(ours, theirs) == ""
