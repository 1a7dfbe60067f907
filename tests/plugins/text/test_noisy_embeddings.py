"""NEFTune: noise of the published size in each step, and none elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain import callbacks
from onnxtrain.errors import OptionError
from plugins.text.chats import language_model

T, H = 6, 16
IDS = np.arange(1, 4 * T + 1).reshape(4, T)
DATA = {"input_ids": IDS, "attention_mask": np.ones_like(IDS), "labels": IDS}


class Losses(callbacks.Callback):
    def __init__(self) -> None:
        self.found: list[float] = []

    def on_step_end(self, state: Any) -> None:
        self.found.append(state.loss)


def trained(path: Any, *more: Any, steps: int = 3) -> tuple[Any, list[float]]:
    kept, trainer = Losses(), onnxtrain.Trainer(path, loss="next_token", optimizer="sgd(lr=0)")
    trainer.fit(DATA, epochs=steps, batch_size=4, callbacks=[kept, *more], shuffle=False, progress=False)
    return trainer, kept.found


def test_steps_have_noise_and_nothing_else(tmp_path: Any) -> None:
    path = language_model(tmp_path / "model.onnx")
    (plain, without), (noisy, found) = trained(path), trained(path, callbacks.NEFTune(5))
    assert len(set(without)) == 1
    assert len({*found, *without}) == 4  # other noise in each step
    assert noisy.evaluate(DATA)["loss"] == plain.evaluate(DATA)["loss"] == pytest.approx(without[0], rel=1e-6)
    assert noisy.train_step(DATA) == without[0]  # after the training
    assert trained(path, callbacks.NEFTune(5))[1] == found
    noisy.save(tmp_path / "saved.onnx")
    assert [node.op_type for node in onnx.load(tmp_path / "saved.onnx").graph.node] == [
        node.op_type for node in onnx.load(path).graph.node
    ]


def test_a_trainer_in_a_callback_has_no_noise(tmp_path: Any) -> None:
    path = language_model(tmp_path / "model.onnx")
    inner: list[float] = []

    class Trains(callbacks.Callback):
        def on_step_end(self, state: Any) -> None:
            inner.extend(trained(path, steps=1)[1])

    found = trained(path, Trains(), callbacks.NEFTune(5), steps=2)[1]
    assert len(set(found)) == 2
    assert set(inner) == set(trained(path, steps=1)[1])
    assert not set(inner) & set(found)


def test_a_resumed_training_draws_new_noise(tmp_path: Any) -> None:
    path = language_model(tmp_path / "model.onnx")
    losses: list[float] = []
    for epochs, resume in ((2, False), (4, True)):
        kept, trainer = Losses(), onnxtrain.Trainer(path, loss="next_token", optimizer="sgd(lr=0)")
        more = {"callbacks": [kept, callbacks.NEFTune(5)], "checkpoint": tmp_path / "kept", "resume": resume}
        trainer.fit(DATA, epochs=epochs, batch_size=4, shuffle=False, progress=False, **more)
        losses += kept.found
    assert len(set(losses)) == len(losses) == 4


def test_an_adapter_of_the_table_has_no_noise_of_its_own(tmp_path: Any) -> None:
    """The embedding and its adapter are one value, which gets the noise of its width once."""
    path, kept = language_model(tmp_path / "model.onnx"), Losses()
    lora = onnxtrain.Lora(rank=4, targets="*")
    trainer = onnxtrain.Trainer(path, loss="next_token", optimizer="sgd(lr=0)", lora=lora)
    assert any("words" in name for name in trainer.parameters)
    more = [kept, callbacks.NEFTune(5)]
    trainer.fit(DATA, epochs=3, batch_size=4, callbacks=more, shuffle=False, progress=False)
    assert kept.found == pytest.approx(trained(path, callbacks.NEFTune(5))[1], rel=1e-6)


def test_the_noise_has_the_published_size(tmp_path: Any) -> None:
    """The mean square of a model's output that is its embedding: alpha^2 / 3 / (T H) above that without noise."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 18]>
        f (int64[N, T] input_ids) => (float[N, T, 200] y) { y = Gather(words, input_ids) }"""
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros((64, 200), np.float32), "words"))
    ids, kept = np.zeros((50, T), np.int64), Losses()
    trainer = onnxtrain.Trainer(model, loss="mse", optimizer="sgd(lr=0)")
    data = (ids, np.zeros((50, T, 200), np.float32))
    trainer.fit(*data, epochs=1, batch_size=50, callbacks=[kept, callbacks.NEFTune(8)], progress=False)
    assert kept.found == pytest.approx([8**2 / 3 / (T * 200)], rel=0.02)


@pytest.mark.parametrize("alpha", [0, -1, float("nan"), True])
def test_wrong_sizes(alpha: Any) -> None:
    with pytest.raises(OptionError, match="NEFTune needs a finite number above 0"):
        callbacks.NEFTune(alpha)


def test_a_model_without_tokens() -> None:
    trainer = onnxtrain.Trainer(onnxtrain.examples.mlp((4, 3)), loss="cross_entropy")
    data = np.zeros((4, 4), np.float32), np.arange(4) % 3
    with pytest.raises(OptionError, match="the model looks up no token ids in a table"):
        trainer.fit(*data, callbacks=[callbacks.NEFTune()], progress=False)
