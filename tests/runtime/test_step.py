"""Sessions of step graphs: refused inputs, error messages, options."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import parser

import onnxtrain
from onnxtrain.errors import StepError
from sentences import raises_sentence

HEADER = '<ir_version: 8, opset_import: ["": 18]>'


@pytest.mark.parametrize("batch", ["N", "2"])
def test_einsum_with_ellipses_of_different_ranks_is_refused_before_it_crashes(batch: str) -> None:
    text = f"""{HEADER} g (float[{batch},3,4] x) => (float[{batch},3] y) <float[4] w = {{1, 2, 3, 4}}>
        {{ y = Einsum<equation = "...ij,...j->...i">(x, w) }}"""
    with raises_sentence("einsum_ellipses", got=[0, 1]):
        onnxtrain.Trainer(parser.parse_model(text), loss="mean_squared_error")


def test_failure_in_the_backward_pass_names_the_rule() -> None:
    text = f"""{HEADER} g (float[N,3] x, float[M,3] z) => (float[K,3] y) <float[3] w = {{1, 2, 3}}>
        {{ a = Mul(x, w)  b = Mul(z, w)  y = Add(a, b) }}"""
    trainer = onnxtrain.Trainer(parser.parse_model(text), loss="mean_squared_error")
    with pytest.raises(StepError, match="ONNX Runtime failed in the Add node"):
        trainer.train_step((np.ones((2, 3)), np.ones((4, 3))), np.ones((4, 3)))


def test_unknown_provider() -> None:
    options = onnxtrain.RuntimeOptions(providers=["NoExecutionProvider"])
    with raises_sentence("unknown_provider", what="providers", got="NoExecutionProvider"):
        onnxtrain.Trainer(onnxtrain.examples.mlp((4, 3)), loss="softmax_cross_entropy", runtime=options)


def test_idle_threads_sleep_soon() -> None:
    """Two trainers on the same cores do half as many steps if the idle threads of each wait actively for long."""
    options = onnxtrain.RuntimeOptions(threads=2).session_options()
    assert options.get_session_config_entry("session.intra_op.spin_duration_us") == "100"


@pytest.mark.parametrize("options", [{"memory_pattern": True}, {"threads": 1}, {"threads": 2}, {"kernels": False}])
def test_options_do_not_change_the_result(options: dict[str, object]) -> None:
    losses = []
    for settings in (onnxtrain.RuntimeOptions(), onnxtrain.RuntimeOptions(**options)):
        trainer = onnxtrain.Trainer(
            onnxtrain.examples.mlp((4, 8, 3)),
            loss="softmax_cross_entropy",
            runtime=settings,
            optimizer=onnxtrain.Adam(0.1),
        )
        losses.append([trainer.train_step(np.eye(4, dtype=np.float32)[:3], np.arange(3)) for _ in range(5)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
