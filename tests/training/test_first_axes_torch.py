"""Models whose inputs share no first axis train, evaluate and predict on ready batches as in PyTorch."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
import pytest
from onnxtrain.callbacks import Callback

import onnxtrain
from onnxtrain import Trainer
from sentences import raises_sentence

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]
EPOCHS = 2
Batches = list[tuple[dict[str, np.ndarray], np.ndarray]]


def nets(torch: Any) -> dict[str, tuple[Any, Callable[[Any, int], Any], dict[str, dict[int, str]]]]:
    """Return networks by name, with a function that makes a batch of some examples, and their dynamic axes."""
    nn = torch.nn

    class Convolution(nn.Module):
        def __init__(self, width: int, out: int) -> None:
            super().__init__()
            self.linear = nn.Linear(width, out)

        def forward(self, x: Any, edges: Any) -> Any:
            h = self.linear(x)
            return h + torch.zeros_like(h).scatter_add(0, edges[1].unsqueeze(-1).expand(-1, h.shape[1]), h[edges[0]])

    class Nodes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Convolution(3, 8), Convolution(8, 2)

        def forward(self, x: Any, edge_index: Any) -> Any:
            return self.second(torch.relu(self.first(x, edge_index)), edge_index)

    class Graphs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = Convolution(3, 8), nn.Linear(8, 2)

        def forward(self, x: Any, edge_index: Any, batch: Any) -> Any:
            h = torch.relu(self.first(x, edge_index))
            sums = torch.zeros(batch.max() + 1, 8).scatter_add(0, batch.unsqueeze(-1).expand(-1, 8), h)
            return self.head(sums)

    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag, self.head = nn.EmbeddingBag(20, 6, mode="sum"), nn.Linear(6, 3)

        def forward(self, text: Any, offsets: Any) -> Any:
            return self.head(self.bag(text, offsets))

    class States(nn.Module):
        def __init__(self, layers: int, first: bool = True) -> None:
            super().__init__()
            self.first = first
            self.rnn, self.head = nn.GRU(4, 5, layers, batch_first=first), nn.Linear(5, 3)

        def forward(self, x: Any, state: Any) -> Any:
            y, after = self.rnn(x, state)
            return self.head(y[:, -1] if self.first else y[-1]), after

    def nodes(rng: Any, count: int) -> Any:
        n = 2 * count + 1
        x = {"x": rng.normal(size=(n, 3)).astype(np.float32), "edge_index": rng.integers(0, n, (2, 3 * count))}
        return x, rng.integers(0, 2, n)

    def graphs(rng: Any, count: int) -> Any:
        batch = np.repeat(np.arange(count), rng.integers(1, 5, count))
        return nodes(rng, len(batch) // 2)[0] | {
            "x": rng.normal(size=(len(batch), 3)).astype(np.float32),
            "edge_index": rng.integers(0, len(batch), (2, 2 * len(batch))),
            "batch": batch,
        }, rng.integers(0, 2, count)

    def bags(rng: Any, count: int) -> Any:
        sizes = rng.integers(1, 5, count)
        x = {"text": rng.integers(0, 20, sizes.sum()), "offsets": np.concatenate([[0], np.cumsum(sizes)[:-1]])}
        return x, rng.integers(0, 3, count)

    def states(rng: Any, count: int, layers: int, first: bool = True) -> Any:
        x = rng.normal(size=(count, 6, 4) if first else (6, count, 4)).astype(np.float32)
        return {"x": x, "state": rng.normal(size=(layers, count, 5)).astype(np.float32)}, rng.integers(0, 3, count)

    free = {"x": {0: "batch"}, "state": {1: "batch"}}
    return {
        "nodes": (Nodes, nodes, {"x": {0: "n"}, "edge_index": {1: "e"}}),
        "graphs": (Graphs, graphs, {"x": {0: "n"}, "edge_index": {1: "e"}, "batch": {0: "n"}}),
        "bags": (Bags, bags, {"text": {0: "tokens"}, "offsets": {0: "bags"}}),
        "states": (lambda: States(2), functools.partial(states, layers=2), free),
        "one state": (lambda: States(1), functools.partial(states, layers=1), free),
        "time first": (
            lambda: States(2, False),
            functools.partial(states, layers=2, first=False),
            {"x": {1: "batch"}, "state": {1: "batch"}},
        ),
    }


MODELS = ["nodes", "graphs", "bags", "states", "one state", "time first"]


class Case(NamedTuple):
    """A model, batches of different sizes, and what PyTorch gives."""

    model: onnx.ModelProto
    batches: Batches
    losses: list[float]  # of each step
    epochs: list[float]  # mean over the examples
    after: float
    accuracy: float
    predictions: np.ndarray
    before: np.ndarray

    def trainer(self, **options: Any) -> Trainer:
        return Trainer(self.model, loss="cross_entropy", optimizer="sgd(lr=0.1)", **options)

    @property
    def inputs(self) -> list[dict[str, np.ndarray]]:
        return [x for x, _ in self.batches]


@functools.cache
def case(name: str, exporter: str = "old") -> Case:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    make, batch_of, free = nets(torch)[name]
    net, rng = make().eval(), np.random.default_rng(0)
    batches = [batch_of(rng, count) for count in (4, 3, 6)]
    x = batches[0][0]
    several = "state" in x
    options: dict[str, Any] = {"dynamo": False, "dynamic_axes": free, "opset_version": 17}
    if exporter == "new":
        pytest.importorskip("onnxscript")
        dims = {axis: torch.export.Dim(axis) for axes in free.values() for axis in axes.values()}
        shapes = {key: {axis: dims[size] for axis, size in axes.items()} for key, axes in free.items()}
        options = {"dynamo": True, "dynamic_shapes": shapes, "verbose": False}
    file = io.BytesIO()
    torch.onnx.export(
        net, tuple(map(torch.from_numpy, x.values())), file, input_names=list(x),
        output_names=["y", "after"] if several else ["y"], **options,
    )  # fmt: skip

    def forward(inputs: dict[str, np.ndarray]) -> Any:
        found = net(*map(torch.from_numpy, inputs.values()))
        return found[0] if several else found

    measure, step = torch.nn.functional.cross_entropy, torch.optim.SGD(net.parameters(), lr=0.1)
    sizes = np.array([len(y) for _, y in batches])
    losses = []
    with torch.no_grad():
        before = np.concatenate([forward(x).numpy() for x, _ in batches])
    for inputs, y in batches * EPOCHS:
        step.zero_grad()
        loss = measure(forward(inputs), torch.from_numpy(y))
        loss.backward()
        step.step()
        losses.append(loss.item())
    with torch.no_grad():
        predictions = np.concatenate([forward(x).numpy() for x, _ in batches])
        after = sum(measure(forward(x), torch.from_numpy(y)).item() * len(y) for x, y in batches) / sizes.sum()
    accuracy = float((predictions.argmax(1) == np.concatenate([y for _, y in batches])).mean())
    epochs = [float((np.array(part) * sizes).sum() / sizes.sum()) for part in (losses[:3], losses[3:])]
    model = onnx.load_from_string(file.getvalue())
    return Case(model, batches, losses, epochs, float(after), accuracy, predictions, before)


def first(found: Any) -> np.ndarray:
    return found["y"] if isinstance(found, dict) else found


class Sizes(Callback):
    """The examples of each step."""

    def __init__(self) -> None:
        self.found: list[int] = []

    def on_step_end(self, state: Any) -> None:
        assert state.batch.size == state.batch.total
        self.found.append(state.batch.total)


def fitted(own: Case, source: Any, **options: Any) -> Trainer:
    trainer = own.trainer()
    history = trainer.fit(source, epochs=EPOCHS, progress=False, **options)
    np.testing.assert_allclose([row["loss"] for row in history.rows], own.epochs, rtol=1e-5)
    np.testing.assert_allclose(first(trainer.predict(own.inputs)), own.predictions, rtol=1e-4, atol=1e-5)
    return trainer


class Loader:
    """A loader that begins anew each time, and has no length."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


def steps(own: Case) -> None:
    trainer = own.trainer()
    found = [trainer.train_step(*batch) for batch in own.batches * EPOCHS]
    np.testing.assert_allclose(found, own.losses, rtol=1e-5, atol=1e-7)


def validation(own: Case) -> None:
    trainer = own.trainer()
    rows = trainer.fit(
        own.batches, validation=own.batches, metrics="accuracy", epochs=EPOCHS, shuffle=True, progress=False
    ).rows
    assert rows[-1]["val_loss"] == pytest.approx(own.after, rel=1e-5)
    assert rows[-1]["val_accuracy"] == pytest.approx(own.accuracy)


def evaluation(own: Case) -> None:
    found = fitted(own, own.batches).evaluate(own.batches, metrics="accuracy")
    assert found["loss"] == pytest.approx(own.after, rel=1e-5)
    assert found["accuracy"] == pytest.approx(own.accuracy)
    without = onnxtrain.evaluate(own.model, own.batches, loss="cross_entropy")["loss"]
    assert without == pytest.approx(own.trainer().evaluate(own.batches)["loss"], rel=1e-6)


def examples_are_those_of_the_targets(own: Case) -> None:
    sizes = Sizes()
    own.trainer().fit(own.batches, callbacks=[sizes], progress=False)
    assert sizes.found == [len(y) for _, y in own.batches]


def one_batch_as_it_is(own: Case) -> None:
    x, y = own.batches[0]
    trainer, by_mapping = own.trainer(), own.trainer()
    assert trainer.fit(x, y, progress=False, batch_size=2).rows[-1]["loss"] == pytest.approx(own.losses[0], rel=1e-5)
    by_mapping.fit({**x, "label": y}, progress=False)
    for name, array in trainer.parameters.items():
        np.testing.assert_array_equal(by_mapping.parameters[name], array)
    fresh, count = own.trainer(), len(y)
    assert fresh.evaluate(x, y, batch_size=2)["loss"] == pytest.approx(own.losses[0], rel=1e-5)
    for found in (fresh.predict(x), fresh.predict(x, batch_size=2), onnxtrain.predict(own.model, x, batch_size=2)):
        np.testing.assert_allclose(first(found), own.before[:count], rtol=1e-4, atol=1e-5)


def results(own: Case) -> None:
    trainer = own.trainer()
    for found in (trainer.predict(iter(own.inputs)), onnxtrain.predict(own.model, own.inputs)):
        np.testing.assert_allclose(first(found), own.before, rtol=1e-4, atol=1e-5)
    assert trainer.predict_proba(own.batches).sum() == pytest.approx(len(own.before), rel=1e-5)
    np.testing.assert_array_equal(trainer.predict(own.inputs, labels=True), own.before.argmax(1))


def resumed(own: Case, folder: Path) -> None:
    class Stop(Callback):
        def on_step_end(self, state: Any) -> None:
            if state.step == 4:
                raise KeyboardInterrupt

    options: dict[str, Any] = {"epochs": EPOCHS, "schedule": "cosine", "progress": False}
    whole, again = own.trainer(), own.trainer()
    whole.fit(own.batches, **options)
    with pytest.raises(KeyboardInterrupt):
        own.trainer().fit(own.batches, checkpoint=folder, checkpoint_every=2, callbacks=[Stop()], **options)
    again.fit(own.batches, checkpoint=folder, resume=True, **options)
    for name, array in whole.parameters.items():
        np.testing.assert_array_equal(again.parameters[name], array)


def step_graphs(own: Case) -> None:
    trained = onnxtrain.training_model(own.model, loss="cross_entropy", optimizer="sgd(lr=0.1)")
    session = onnxruntime.InferenceSession(onnxtrain.lower(trained).SerializeToString())
    x, y = own.batches[0]
    weights = {each.name: onnx.numpy_helper.to_array(each) for each in own.model.graph.initializer}
    target = next(each.name for each in session.get_inputs() if each.name.startswith("target"))
    states = {each.name: each for each in session.get_inputs() if each.name not in {*x, target}}
    feeds = {
        name: weights[name] if name in weights else np.array(0.1 if "rate" in name else 0, _dtype(each.type))
        for name, each in states.items()
    }
    outputs = [each.name for each in session.get_outputs() if "loss" in each.name]
    (loss,) = session.run(outputs, {**x, target: y, **feeds})
    assert float(loss) == pytest.approx(own.losses[0], rel=1e-5)


def _dtype(kind: str) -> Any:
    return np.int64 if "int64" in kind else np.float32


WHAT: dict[str, Callable[[Case], object]] = {
    "train_step": steps,
    "fit a list": lambda own: fitted(own, own.batches),
    "fit a loader": lambda own: fitted(own, Loader(own.batches), prefetch=False),
    "fit a function": lambda own: fitted(own, lambda: iter(own.batches)),
    "fit tuples": lambda own: fitted(own, [(*x.values(), y) for x, y in own.batches]),
    "fit mappings": lambda own: fitted(own, [{**x, "label": y} for x, y in own.batches]),
    "fit augmented": lambda own: fitted(own, own.batches, augment=lambda x, rng: x),
    "fit and evaluate": evaluation,
    "validation": validation,
    "examples": examples_are_those_of_the_targets,
    "one batch": one_batch_as_it_is,
    "predictions": results,
    "step graphs": step_graphs,
}


@pytest.mark.sampled("model")
@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("model", MODELS)
def test_ready_batches_are_taken_as_they_are(model: str, what: str) -> None:
    WHAT[what](case(model))


@pytest.mark.thorough
@pytest.mark.sampled("what")
@pytest.mark.parametrize("what", ["train_step", "fit a list", "one batch", "predictions"])
@pytest.mark.parametrize("model", MODELS)
def test_files_of_the_newer_exporter(model: str, what: str) -> None:
    WHAT[what](case(model, "new"))


@pytest.mark.parametrize("model", MODELS)
def test_a_resumed_training_goes_on_at_its_batch(model: str, tmp_path: Path) -> None:
    resumed(case(model), tmp_path)


@pytest.mark.parametrize("model", ["nodes", "bags", "states"])
def test_what_would_cut_a_batch_is_refused(model: str) -> None:
    own, name = case(model), {"nodes": "x", "bags": "text", "states": "state"}[model]
    with raises_sentence("first_axis", what=name, cure="train without accumulate, in one process"):
        own.trainer(accumulate=2).train_step(*own.batches[0])
    dataset = own.trainer().open_data(own.batches).shared(lambda number, rows: slice(0, rows // 2))
    with raises_sentence("first_axis", what=name, cure="train in one process"):
        dataset.batches()


def test_axes_of_one_name_have_one_length() -> None:
    (x, y), *_ = case("graphs").batches
    with raises_sentence("array_lengths", what="input 'batch' of batch 0"):
        case("graphs").trainer().fit([({**x, "batch": x["batch"][:-1]}, y)], progress=False)


class Graph:
    """A batch of graphs as PyTorch Geometric has it."""

    def __init__(self, x: dict[str, np.ndarray], y: np.ndarray) -> None:
        self.edge_index = x["edge_index"]
        self._arrays = {**x, "y": y, "ptr": np.array([0, len(x["x"])])}

    def to_dict(self) -> dict[str, np.ndarray]:
        return self._arrays


def test_batches_of_pytorch_geometric() -> None:
    own = case("graphs")
    graphs = [Graph(*batch) for batch in own.batches]
    trainer = fitted(own, graphs, target="y")
    np.testing.assert_allclose(trainer.predict(Loader(graphs)), own.predictions, rtol=1e-4, atol=1e-5)  # type: ignore[arg-type]
    assert trainer.evaluate(graphs, target="y")["loss"] == pytest.approx(own.after, rel=1e-5)


def test_examples_that_numbers_choose_from_within_are_still_cut() -> None:
    """The last token of each row, as in CLIP, and one-hot rows: indices stay within their example."""
    torch = pytest.importorskip("torch")
    nn = torch.nn

    class LastToken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(20, 8), nn.Linear(8, 3)

        def forward(self, text: Any, lengths: Any) -> Any:
            h = self.table(text)
            first = h[torch.arange(text.shape[0]), text.argmax(-1)]
            second = h.gather(1, (lengths - 1).view(-1, 1, 1).expand(-1, 1, 8)).squeeze(1)
            return self.head(first + second + torch.zeros(text.shape[0], 8).scatter(1, lengths.unsqueeze(1), 1.0))

    file, rng = io.BytesIO(), np.random.default_rng(0)
    x = {"text": rng.integers(0, 20, (6, 5)), "lengths": rng.integers(1, 6, 6)}
    torch.onnx.export(
        LastToken().eval(), tuple(map(torch.from_numpy, x.values())), file, dynamo=False, input_names=list(x),
        output_names=["y"], dynamic_axes={"text": {0: "n", 1: "t"}, "lengths": {0: "n"}}, opset_version=17,
    )  # fmt: skip
    trainer = Trainer(onnx.load_from_string(file.getvalue()), loss="cross_entropy")
    assert trainer.objective.time_first is None
    np.testing.assert_allclose(trainer.predict(x, batch_size=4), trainer.predict(x), rtol=1e-4, atol=1e-6)
    assert trainer.fit(x, rng.integers(0, 3, 6), batch_size=4, progress=False).rows[-1]["step"] == 2
