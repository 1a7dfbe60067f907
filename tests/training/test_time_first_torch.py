"""Files of both exporters: time first is refused where it would be cut, and examples first train as in PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxtrain.training.inference.forward import evaluate, predict
from onnxtrain.training.trainer import Trainer
from sentences import raises_sentence

T, N, F, C = 9, 4, 5, 3
FORMS = [
    "LSTM",
    "GRU",
    "RNN",
    "bidirectional LSTM",
    "bidirectional GRU",
    "stacked",
    "embedding",
    "last",
    "unrolled head",
]

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]


def export(path: Path, form: str, *, first: str, dynamo: bool, free: bool) -> tuple[Any, Any, Any, Any]:
    """Export a network with time or the batch first; return it with inputs and targets [time, batch] or the reverse."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    cell = next((name for name in ("GRU", "RNN") if name in form), "LSTM")
    directions = 2 if form.startswith("bidirectional") else 1

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(20, F)
            self.rnn = getattr(torch.nn, cell)(
                F, 6, 2 if form == "stacked" else 1, batch_first=first == "batch", bidirectional=directions == 2
            )
            self.head = torch.nn.Linear(6 * directions, C)

        def forward(self, x: Any) -> Any:
            y, _ = self.rnn(self.embedding(x) if form == "embedding" else x)
            if form == "last":
                y = y[-1] if first == "time" else y[:, -1]
            if form == "unrolled head":
                return torch.stack([self.head(torch.relu(y)), self.head(y)]).sum(0)
            return self.head(y)

    net = Net()
    x = torch.randint(0, 20, (T, N)) if form == "embedding" else torch.randn(T, N, F)
    y = torch.randint(0, C, (N,) if form == "last" else (T, N))
    if first == "batch":
        x, y = x.transpose(0, 1).contiguous(), y if form == "last" else y.T.contiguous()
    names = ("time", "batch") if first == "time" else ("batch", "time")
    options: dict[str, Any] = {"dynamo": dynamo, "input_names": ["x"], "output_names": ["y"], "verbose": False}
    if dynamo:
        options["external_data"] = False
        if free:
            dims = dict(enumerate(map(torch.export.Dim, names))) if directions == 1 else {names.index("batch"): "batch"}
            options["dynamic_shapes"] = (dims,)
    elif free:
        axes = {0: "batch"} if form == "last" else dict(enumerate(names))
        options["dynamic_axes"] = {"x": dict(enumerate(names)), "y": axes}
    torch.onnx.export(net, (x,), str(path), **options)
    return torch, net, x.numpy(), y.numpy()


@pytest.mark.sampled(9)
@pytest.mark.parametrize(("dynamo", "free"), [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("form", FORMS)
def test_time_first_is_not_cut(tmp_path: Path, form: str, dynamo: bool, free: bool) -> None:
    path = tmp_path / "model.onnx"
    torch, net, x, y = export(path, form, first="time", dynamo=dynamo, free=free)
    loss = "cross_entropy(axis=-1)"
    trainer = Trainer(path, loss=loss, optimizer="sgd(lr=0.1)")
    for call in (
        lambda: trainer.fit(x, y, batch_size=N, progress=False),
        lambda: trainer.evaluate(x, y, batch_size=N),
        lambda: trainer.predict(x, batch_size=N),
        lambda: evaluate(path, (x, y), loss=loss, batch_size=N),
        lambda: predict(path, x, batch_size=N),
    ):
        with raises_sentence("time_first", what="x"):
            call()
    with torch.no_grad():
        logits = net(torch.tensor(x))
    np.testing.assert_allclose(predict(path, x), logits.numpy(), rtol=1e-4, atol=1e-5)
    expected = torch.nn.functional.cross_entropy(logits.reshape(-1, C), torch.tensor(y).reshape(-1)).item()
    assert trainer.evaluate([(x, y)])["loss"] == pytest.approx(expected, rel=1e-4)
    assert trainer.fit([(x, y)], progress=False).rows[-1]["loss"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.sampled(9)
@pytest.mark.parametrize(("dynamo", "free"), [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("form", FORMS)
def test_examples_first_train_as_in_pytorch(tmp_path: Path, form: str, dynamo: bool, free: bool) -> None:
    path = tmp_path / "model.onnx"
    torch, net, x, y = export(path, form, first="batch", dynamo=dynamo, free=free)
    trainer = Trainer(path, loss="cross_entropy(axis=-1)", optimizer="sgd(lr=0.1)")
    assert not [text for text in trainer.hints if "time" in text]
    with torch.no_grad():
        logits = net(torch.tensor(x)).numpy()
    np.testing.assert_allclose(trainer.predict(x, batch_size=3), logits, rtol=1e-4, atol=1e-5)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(3):
        for start in range(0, N, 2):
            optimizer.zero_grad()
            part = net(torch.tensor(x[start : start + 2] if free else x))
            wanted = torch.tensor(y[start : start + 2] if free else y)
            torch.nn.functional.cross_entropy(part.reshape(-1, C), wanted.reshape(-1)).backward()
            optimizer.step()
            if not free:
                break
    trainer.fit(x, y, batch_size=2, epochs=3, shuffle=False, progress=False)
    with torch.no_grad():
        logits = net(torch.tensor(x)).numpy()
    np.testing.assert_allclose(trainer.predict(x), logits, rtol=1e-3, atol=1e-4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("first", ["time", "batch"])
def test_an_encoder_of_attention_is_named_by_its_axes(tmp_path: Path, first: str, dynamo: bool) -> None:
    torch = pytest.importorskip("torch")
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=first == "batch", dropout=0.0)
    net = torch.nn.Sequential(torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), torch.nn.Linear(8, C))
    names = ("seq", "batch") if first == "time" else ("batch", "seq")
    options: dict[str, Any] = {"dynamo": dynamo, "input_names": ["x"], "output_names": ["y"], "verbose": False}
    if dynamo:
        dims = dict(enumerate(map(torch.export.Dim, names)))
        options |= {"external_data": False, "dynamic_shapes": {"input": dims}}
    else:
        options["dynamic_axes"] = {"x": dict(enumerate(names)), "y": dict(enumerate(names))}
    torch.onnx.export(net.eval(), (torch.randn(7, 4, 8),), str(tmp_path / "model.onnx"), **options)
    found = [text for text in Trainer(tmp_path / "model.onnx", loss="cross_entropy(axis=-1)").hints if "time" in text]
    assert len(found) == (first == "time")
