"""Any number of threads read a trainer while one trains it: every reader sees the weights of one step, whole.

The model's weights are all equal after every step, -n after n of them, so that a mixture of two steps shows.
"""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

import onnxtrain
from onnxtrain.errors import BusyError, OptionError
from onnxtrain.runtime.states import StateBuffers
from onnxtrain.training.inference import evaluation
from onnxtrain.training.inference.evaluation import Evaluator
from sentences import raises_sentence

WIDTH, OUT = 128, 64
X = np.ones((2, WIDTH), np.float32)
Y = np.full((2, OUT), -(2.0**22), np.float32)  # so low that the gradient of the mean absolute error is 1 / OUT


def make(**options) -> onnxtrain.Trainer:
    """A trainer whose steps take 1 from every weight."""
    model = onnxtrain.examples.mlp((WIDTH, OUT))
    for tensor in model.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(np.zeros(tensor.dims, np.float32), tensor.name))
    return onnxtrain.Trainer(model, loss="mae", optimizer=onnxtrain.SGD(float(OUT)), threads=1, **options)


def one_value(*arrays: np.ndarray) -> float:
    found = {float(value) for array in arrays for value in (np.min(array), np.max(array))}
    assert len(found) == 1, sorted(found)
    return found.pop()


def saved(trainer: onnxtrain.Trainer, save: Callable[[Path], None], folder: Path) -> float:
    path = folder / f"{threading.get_ident()}.onnx"
    save(path)
    return of_parameters(trainer, onnx.load(path))


def of_parameters(trainer: onnxtrain.Trainer, proto: onnx.ModelProto) -> float:
    tensors = {tensor.name: tensor for tensor in proto.graph.initializer}
    return one_value(*(numpy_helper.to_array(tensors[name]) for name in trainer.parameters))


def in_batches() -> Iterator[np.ndarray]:
    for _ in range(3):
        yield X
        time.sleep(0)


def refused(trainer: onnxtrain.Trainer) -> None:
    with pytest.raises(OptionError, match="predict_proba needs"):
        trainer.predict_proba(X)


Read = Callable[[onnxtrain.Trainer, Path], object]

READ: dict[str, Read] = {
    "predict": lambda t, _: one_value(t.predict(X)) / (WIDTH + 1),
    "predict_all": lambda t, _: one_value(*t.predict_all(X).values()) / (WIDTH + 1),
    "predict_proba": lambda t, _: refused(t),
    "evaluate": lambda t, _: (t.evaluate(X, Y)["loss"] - 2.0**22) / (WIDTH + 1),
    "model": lambda t, _: of_parameters(t, t.model()),
    "save": lambda t, folder: saved(t, t.save, folder),
    "training_model": lambda t, _: of_parameters(t, t.training_model()),
    "save_training_model": lambda t, folder: saved(t, t.save_training_model, folder),
    "get_weights": lambda t, _: (one_value(*t.get_weights().values()), one_value(t.get_weights(flat=True))),
    "state_dict": lambda t, _: one_value(*map(t.state_dict().__getitem__, t.parameters)),
    "parameters": lambda t, _: [one_value(array) for array in t.parameters.values()],
    "weights": lambda t, _: [one_value(array) for array in t.weights.values()],
    "initializers": lambda t, _: one_value(*map(t.initializers().__getitem__, t.parameters)),
    "rebuilt": lambda t, _: one_value(*t.rebuilt().get_weights().values()),
    "open_for_evaluation": lambda t, _: t.open_for_evaluation((X, Y))[1].size,
    "columns": lambda t, _: t.columns,
    "data_names": lambda t, _: t.data_names,
    "objective": lambda t, _: t.objective,
    "config": lambda t, _: t.config,
    "hints": lambda t, _: t.hints,
    "labels": lambda t, _: t.labels,
    "learning_rate": lambda t, _: t.learning_rate,
    "loss_parts": lambda t, _: t.loss_parts,
    "masks": lambda t, _: t.masks,
    "__repr__": lambda t, _: (repr(t), t._repr_html_(), repr(t.parameters)),
    "__deepcopy__": lambda t, _: one_value(*copy.deepcopy(t).get_weights().values()),
    "__getstate__": lambda t, _: one_value(*pickle.loads(pickle.dumps(t)).get_weights().values()),
}
"""Calls of each public method or attribute that changes nothing; each fails unless all weights are equal."""


def equal_weights(trainer: onnxtrain.Trainer, value: float) -> dict[str, np.ndarray]:
    return {name: np.full(array.shape, value, np.float32) for name, array in trainer.parameters.items()}


Train = Callable[[onnxtrain.Trainer, Path], object]

TRAIN: dict[str, Train] = {
    "train_step": lambda t, _: t.train_step(X, Y),
    "fit": lambda t, _: t.fit(np.repeat(X, 20, 0), np.repeat(Y, 20, 0), batch_size=2, progress=False),
    "set_weights": lambda t, _: t.set_weights(equal_weights(t, -5.0)),
    "load_state_dict": lambda t, _: t.load_state_dict(equal_weights(t, -7.0), strict=False),
    "load_checkpoint": lambda t, folder: t.load_checkpoint(folder / "checkpoint"),
    "open_data": lambda t, _: t.open_data((X, Y)),
    "change_settings": lambda t, _: t.change_settings(clip_norm=None),
    "set_trained": lambda t, _: t.set_trained(),
    "set_masks": lambda t, _: t.set_masks({name: array == array for name, array in t.parameters.items()}),
    "parameters.update": lambda t, _: t.parameters.update(equal_weights(t, -9.0)),
}
"""Every public method that changes what is trained."""


@pytest.fixture
def shared(tmp_path) -> onnxtrain.Trainer:
    trainer = make(ema=0.5)
    trainer.fit(X, Y, checkpoint=tmp_path / "checkpoint", progress=False)
    return trainer


def together(*works: Callable[[], object], seconds: float = 0.0, times: int = 1) -> None:
    """Call functions again and again, each in a thread of its own; raise the first error."""
    until, errors, start = time.perf_counter() + seconds, list[BaseException](), threading.Barrier(len(works))

    def loop(work: Callable[[], object]) -> None:
        start.wait()
        try:
            for number in itertools.count():
                if errors or (number >= times and time.perf_counter() > until):
                    return
                work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=loop, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_every_public_name_is_tried():
    public = {name for name in dir(onnxtrain.Trainer) if not name.startswith("_")}
    assert public == {name for name in {**READ, **TRAIN} if not name.startswith("_") and "." not in name}


def stress(trainer: onnxtrain.Trainer, folder: Path, seconds: float) -> None:
    """Run every pair of a method that trains, and two that read."""
    works = {name: functools.partial(work, trainer, folder) for name, work in {**READ, **TRAIN}.items()}
    readers = list(READ)
    sets = [(train, *pair) for train in TRAIN for pair in zip(readers, readers[7:] + readers[:7], strict=True)]
    sets += [(one, other, one) for one, other in itertools.combinations(readers, 2)]
    for names in sets:
        try:
            together(*map(works.__getitem__, names), seconds=seconds)
        except BaseException as error:
            error.add_note(f"in {names}")
            raise


@pytest.mark.parametrize("packed_after", [1, pytest.param(100, marks=pytest.mark.thorough)])
def test_pairs_of_methods(packed_after, shared, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, "_PACKED_AFTER", packed_after)
    stress(shared, tmp_path, 0.0)


@pytest.mark.thorough
def test_pairs_of_methods_for_longer(shared, tmp_path):
    stress(shared, tmp_path, 0.2)


@pytest.mark.parametrize("packed_after", [2, 100])
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"ema": 0.0}], ids=str)
def test_readers_see_whole_steps(options, packed_after, monkeypatch):
    monkeypatch.setattr(evaluation, "_PACKED_AFTER", packed_after)
    trainer, end = make(**options), threading.Event()
    seen: list[list[float]] = [[] for _ in range(3)]
    averaged = {"ema": True} if options.get("ema") == 0.0 else {}

    def read(number: int) -> None:
        while not end.is_set():
            found = trainer.predict(in_batches() if number else X, **averaged)
            seen[number].append(-one_value(found) / (WIDTH + 1))

    readers = [threading.Thread(target=read, args=(number,)) for number in range(3)]
    for reader in readers:
        reader.start()
    done = 0
    while done < 300 or min(map(len, seen)) < 20:
        trainer.train_step(X, Y)
        done += 1
        assert -one_value(trainer.predict(X)) == done * (WIDTH + 1)  # a thread reads what it has written
    end.set()
    for reader in readers:
        reader.join()
    for values in seen:
        assert values == sorted(values)
        assert all(value == int(value) <= done for value in values)


@pytest.mark.parametrize("name", TRAIN)
def test_a_second_training_is_refused(name, shared, tmp_path):
    before = shared.state_dict()
    other = threading.Thread(target=lambda: caught.append(attempt()))
    caught: list[BusyError] = []

    def attempt() -> BusyError:
        with raises_sentence("busy", got="fit") as found:
            TRAIN[name](shared, tmp_path)
        return found.value

    with shared.executor.states.training("fit"):
        other.start()
        other.join()
    assert len(caught) == 1
    assert all(np.array_equal(array, before[key]) for key, array in shared.state_dict().items())
    TRAIN[name](shared, tmp_path)


def test_steps_of_several_threads_are_all_counted():
    trainer, done = make(), []

    def step() -> None:
        try:
            trainer.train_step(X, Y)
            done.append(1)
        except BusyError:
            pass

    together(*[step] * 4, times=100)
    assert one_value(trainer.predict(X)) == -len(done) * (WIDTH + 1)


def test_a_prediction_keeps_its_step_and_training_goes_on():
    trainer, copies = make(), []
    trainer.train_step(X, Y)

    def batches() -> Iterator[np.ndarray]:
        yield X
        thread = threading.Thread(target=lambda: [trainer.train_step(X, Y) for _ in range(3)])
        thread.start()
        thread.join()
        copies.append(len(trainer.executor.states._readings))
        yield X

    assert one_value(trainer.predict(batches())) == -(WIDTH + 1)
    assert one_value(trainer.predict(X)) == -4 * (WIDTH + 1)
    assert copies == [0]  # the reading went on with a copy


def test_arrays_are_not_live_in_a_thread_that_got_the_identifier_of_another():
    """The thread that trained last has ended; systems use its identifier again."""
    trainer, read = make(), []
    identifiers = set()

    def work(number: int) -> None:
        identifiers.add(threading.get_ident())
        if number % 2:
            read.append([*trainer.parameters.values()])
        else:
            trainer.train_step(X, Y)

    for number in range(20):
        thread = threading.Thread(target=work, args=(number,))
        thread.start()
        thread.join()
        if number % 2:
            assert not any(array.flags.writeable for array in read[-1])
    assert len(identifiers) < 20  # as this system does


def packed(trainer: onnxtrain.Trainer) -> bool:
    """Return whether the last prediction came from a session that has the weights packed."""
    (evaluator,) = trainer._evaluators.values()
    return any(each.session is not None for each in evaluator._packed.values())


def test_frequent_predictions_are_packed_until_the_weights_change(shared, tmp_path):
    trainer = make(ema=0.5)
    changes = {name: change for name, change in TRAIN.items() if name not in ("open_data", "change_settings")}
    changes["parameters[]"] = lambda t, _: [each.fill(-11.0) for each in t.parameters.values()]
    for name, change in changes.items():
        for number in range(150):
            value = one_value(trainer.predict(X if number % 2 else in_batches())) / (WIDTH + 1)
            assert value == one_value(trainer.get_weights(flat=True))
            assert packed(trainer) == (number >= 99), (name, number)
        change(trainer, tmp_path)
    assert one_value(trainer.predict(X)) == -11.0 * (WIDTH + 1)


def test_predictions_are_not_packed_while_the_weights_may_change():
    trainer = make()
    with trainer.executor.states.training("fit", changes=True):
        for _ in range(150):
            trainer.predict(X)
    assert not packed(trainer)
    live = next(iter(trainer.parameters.values()))
    for _ in range(150):
        trainer.predict(X)
    assert not packed(trainer)
    live += 1
    assert len(np.unique(trainer.predict(X))) == 1


def test_nothing_is_copied_while_nothing_trains(monkeypatch):
    trainer = make()
    trainer.predict(X)
    monkeypatch.setattr(StateBuffers, "copied", None)
    together(*[lambda: trainer.predict(X)] * 4, times=20)
    trainer.train_step(X, Y)
    trainer.fit(X, Y, validation=(X, Y), progress=False)
    trainer.model()


def test_arrays_of_other_threads_are_read_only_copies():
    trainer, found = make(), []
    with trainer.executor.states.training("fit"):
        live = next(iter(trainer.parameters.values()))
        thread = threading.Thread(target=lambda: found.append(next(iter(trainer.parameters.values()))))
        thread.start()
        thread.join()
    trainer.train_step(X, Y)
    assert one_value(live) == -1.0
    assert one_value(found[0]) == 0.0
    with pytest.raises(ValueError, match="read-only"):
        found[0][...] = 1


def test_threads_share_the_sessions_of_first_use(monkeypatch):
    trainer, opened = make(ema=0.5), []
    original = Evaluator._session
    monkeypatch.setattr(Evaluator, "_session", lambda *a, **k: opened.append(1) or original(*a, **k))
    together(*[lambda: trainer.predict(X), lambda: trainer.evaluate(X, Y), lambda: trainer.predict(X, ema=True)] * 3)
    assert len(opened) == 3


def test_one_model_in_several_threads():
    model = onnxtrain.examples.mlp((WIDTH, 16, 3))
    expected = onnxtrain.predict(model, X).tobytes(), onnxtrain.gradient(model).SerializeToString(deterministic=True)

    def work() -> None:
        assert onnxtrain.predict(model, X).tobytes() == expected[0]
        assert onnxtrain.gradient(model).SerializeToString(deterministic=True) == expected[1]

    together(*[work] * 4, times=2)


def test_a_training_session_refuses_a_second_thread():
    trainer = make()
    session = onnxtrain.TrainingSession(trainer.training_model())
    feeds = {"input": X, "target": Y, "learning_rate": np.float32(1.0)}
    names = {value.name for value in session._steps[0].step.model.graph.inputs}
    feeds = {name: array for name, array in feeds.items() if name in names}
    with session.state.training("step"), pytest.raises(BusyError, match="one thread trains"):
        together(lambda: session.step(feeds))
    session.step(feeds)


@pytest.mark.plugins
def test_an_estimator_predicts_while_another_thread_trains_it():
    x = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
    old, new = np.repeat(["ash", "elm"], 20), np.array([0, 1, 2, 3] * 10)
    settings = {"hidden_layer_sizes": (8,), "epochs": 3, "random_state": 0, "threads": 1}
    estimator = onnxtrain.sklearn.OnnxClassifier(**settings).fit(x, old)
    before = estimator.predict_proba(x)
    again = onnxtrain.sklearn.OnnxClassifier(**settings).fit(x, new).predict_proba(x)
    end = threading.Event()
    seen: set[bytes] = set()

    def predict() -> None:
        while not end.is_set():
            seen.add(estimator.predict_proba(x).tobytes())
            assert set(estimator.predict(x)) <= {*old} or set(estimator.predict(x)) <= {*new}

    def train() -> None:
        estimator.fit(x, new)
        end.set()

    together(predict, predict, train)
    assert seen <= {before.tobytes(), again.tobytes()}
    with estimator.trainer_.executor.states.training("fit"), pytest.raises(BusyError, match="one thread trains"):
        together(lambda: estimator.partial_fit(x, new))


SERVER = """
import signal, threading, numpy as np, onnxtrain
trainer = onnxtrain.Trainer(onnxtrain.examples.mlp((8, 3)), loss="cross_entropy")
x, y = np.eye(8, dtype=np.float32), np.arange(8) % 3
end, served = threading.Event(), []
def serve():
    while not end.is_set():
        served.append(trainer.predict(x).shape)
threads = [threading.Thread(target=serve) for _ in range(3)]
for thread in threads: thread.start()
class Ready:
    def on_step_end(self, state):
        if state.step == 20: print("ready", flush=True)
try:
    trainer.fit(x, y, epochs=10**9, progress=False, callbacks=[Ready()])
except KeyboardInterrupt as interrupt:
    print(interrupt)
before = len(served)
while len(served) < before + 20: pass
trainer.train_step(x, y)
end.set()
for thread in threads: thread.join()
print("served")
"""


def test_an_interrupted_training_goes_on_serving():
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        text = process.communicate(timeout=60)[0]
    assert "Interrupted; the trainer has the weights of step" in text
    assert text.endswith("served\n")


def calls_a_second(call: Callable[[], object], threads: int, seconds: float = 0.5) -> float:
    counts, began = [0] * threads, time.perf_counter()

    def count(number: int) -> None:
        call()
        counts[number] += 1

    together(*(functools.partial(count, number) for number in range(threads)), seconds=seconds)
    return sum(counts) / (time.perf_counter() - began)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("sizes", "least"), [((16, 64, 3), 0.2), ((256, 1024, 1024, 10), 0.5)], ids=["small", "medium"]
)
def test_throughput_beside_onnxruntime(sizes, least):
    """The figures of docs/serving.md: pytest -s -m thorough FILE -k throughput."""
    model, x = onnxtrain.examples.mlp(sizes), np.ones((8, sizes[0]), np.float32)
    trainer = onnxtrain.Trainer(model, loss="cross_entropy", threads=1)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    calls = {"onnxruntime": lambda: session.run(None, {"input": x}), "onnxtrain": lambda: trainer.predict(x)}
    trainer.predict(x)
    best = dict.fromkeys(calls, 0.0)
    for _ in range(6):  # in turns, since other programs run
        best = {name: max(best[name], calls_a_second(call, 4)) for name, call in calls.items()}
    print(f"\n{sizes}: " + ", ".join(f"{name} {rate:,.0f} calls/s" for name, rate in best.items()))
    assert best["onnxtrain"] > least * best["onnxruntime"]
