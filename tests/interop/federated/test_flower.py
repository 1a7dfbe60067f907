"""Flower federations in one process: clients and servers with valid and invalid weights."""

from __future__ import annotations

import copy
import json
import math
import re
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain.errors import OptionError
from onnxtrain.training.examples import mlp
from sentences import raises_sentence

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'onnxtrain[flower]'")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.clientapp.mod import LocalDpMod
from flwr.server.superlink.linkstate.utils import create_message_error_unavailable_res_message
from flwr.serverapp.strategy import FedAdam, FedAvg, FedProx, Krum
from local_grid import LocalGrid, context

from onnxtrain.interop.flower import DP, client_app, server_app

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

COMMON = {"loss": "softmax_cross_entropy", "threads": 1}
SGD = "sgd(lr=0.5)"


def _data(seed: int, count: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """Make points of three classes; every client has mostly one class."""
    rng = np.random.default_rng(seed)
    labels = np.where(rng.random(count) < 0.7, seed % 3, rng.integers(0, 3, count))
    return (np.eye(4)[labels] + 0.3 * rng.normal(size=(count, 4))).astype(np.float32), labels.astype(np.int64)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(mlp((4, 8, 3)), path)
    return path


def _clients(path, count: int = 3, **options):
    given = {"optimizer": SGD, "batch_size": 20, **COMMON, **options}
    return {node: client_app(path, _data(node, 40 + 20 * node), **given) for node in range(count)}


def _serve(path, grid, strategy=None, **options):
    saved = path.parent / "trained.onnx"
    given = {"save": saved, "rounds": 2, "history": path.parent / "history.json", **COMMON, **options}
    server_app(path, strategy, **given)(grid, context())
    return onnx.load(saved), json.loads((path.parent / "history.json").read_text())


def _weights(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def _message(path, config=None, kind: str = "train"):
    weights = {name: Array(value) for name, value in _weights(onnx.load(path)).items()}
    content = RecordDict({"arrays": ArrayRecord(weights), "config": ConfigRecord(config or {})})
    return Message(content, dst_node_id=0, message_type=kind)


def _sent(answer) -> dict[str, np.ndarray]:
    assert not answer.has_error(), answer.error.reason
    return {name: array.numpy() for name, array in answer.content["arrays"].items()}


def test_a_client_trains_like_a_trainer(path):
    answer = _clients(path, 1, epochs=2, seed=3)[0](_message(path, {"server-round": 4}), context())
    trainer = onnxtrain.Trainer(path, optimizer=SGD, seed=7, **COMMON)
    history = trainer.fit(*_data(0, 40), epochs=2, batch_size=20)
    for name, value in _sent(answer).items():
        np.testing.assert_array_equal(value, trainer.parameters[name], strict=True)
    assert answer.content["metrics"]["num-examples"] == 40
    assert answer.content["metrics"]["loss"] == pytest.approx(history.rows[-1]["loss"])


def test_the_server_sets_the_epochs(path):
    two = _sent(_clients(path, 1, epochs=2)[0](_message(path), context()))
    told = _sent(_clients(path, 1)[0](_message(path, {"epochs": 2}), context()))
    assert all(np.array_equal(two[name], told[name]) for name in two)


def test_data_may_depend_on_the_client(path):
    def data(given):
        return _data(given.node_config["partition-id"], 30)

    app = client_app(path, data, optimizer=SGD, **COMMON)
    answers = [_sent(app(_message(path), context(**{"partition-id": part}))) for part in (0, 1)]
    assert not np.array_equal(answers[0]["layer1.weight"], answers[1]["layer1.weight"])


def test_fedavg_weights_clients_by_their_examples(path):
    grid = LocalGrid(_clients(path))
    trained, history = _serve(path, grid, rounds=1)
    sent = [answer for answer in grid.answers if len(answer.content.array_records)]
    counts = np.array([answer.content["metrics"]["num-examples"] for answer in sent])
    assert sorted(counts) == [40, 60, 80]
    for name, value in _weights(trained).items():
        mean = sum(count * _sent(answer)[name].astype(np.float64) for count, answer in zip(counts, sent, strict=True))
        np.testing.assert_allclose(value, mean / counts.sum(), atol=1e-6)
    assert [row["left_out"] for row in history] == [[], []]


def test_the_server_writes_the_users_model(path):
    test = _data(7, 300)
    trained, history = _serve(path, LocalGrid(_clients(path)), rounds=6, validation=test, metrics="accuracy")
    assert history[-1]["accuracy"] > 0.9 > history[0]["accuracy"]
    assert history[-1] == {
        "round": 6,
        **onnxtrain.evaluate(trained, test, metrics="accuracy", loss=COMMON["loss"]),
        "left_out": [],
    }
    original = onnx.load(path)
    for tensor in (*trained.graph.initializer, *original.graph.initializer):
        tensor.ClearField("raw_data")
    assert trained == original


@pytest.mark.parametrize("strategy", [FedAdam(eta=0.1), Krum(num_malicious_nodes=0)])
def test_other_strategies(path, strategy):
    trained, _ = _serve(path, LocalGrid(_clients(path)), strategy)
    assert all(value.dtype == np.float32 for value in _weights(trained).values())


def test_only_trained_parameters_are_sent(path):
    grid = LocalGrid(_clients(path, train="layer2.*"))
    trained, _ = _serve(path, grid, train="layer2.*")
    before = _weights(onnx.load(path))
    changed = {name for name, value in _weights(trained).items() if not np.array_equal(value, before[name])}
    assert changed == {"layer2.weight", "layer2.bias"} == set(_sent(grid.answers[0]))


def test_fedprox_adds_its_term_to_the_loss(path):
    """Check a step of gradient descent: the term's gradient is mu (w - server's w)."""
    x, y = _data(0, 20)
    mu, rate = 0.4, 0.5
    app = client_app(path, (x, y), optimizer=SGD, epochs=2, batch_size=20, **COMMON)
    found = _sent(app(_message(path, {"proximal-mu": mu}), context()))
    plain = onnxtrain.Trainer(path, optimizer=SGD, **COMMON)
    start = plain.get_weights()
    for _ in range(2):
        before = plain.get_weights()
        plain.train_step(x, y)
        plain.set_weights({n: plain.parameters[n] - rate * mu * (before[n] - start[n]) for n in start})
    for name, value in found.items():
        np.testing.assert_allclose(value, plain.parameters[name], atol=1e-6)


def test_fedprox_keeps_clients_near_the_server(path):
    far, near = (
        _serve(path, LocalGrid(_clients(path, optimizer="sgd(lr=0.1)", epochs=20)), strategy, rounds=1)[0]
        for strategy in (FedProx(proximal_mu=0.0), FedProx(proximal_mu=5.0))
    )
    start = _weights(onnx.load(path))
    distances = [sum(np.sum((w[n] - start[n]) ** 2) for n in start) for w in (_weights(far), _weights(near))]
    assert distances[1] < 0.3 * distances[0]


@pytest.mark.parametrize("mu", [-1.0, math.inf])
def test_the_weight_of_the_proximal_term_is_checked(path, mu):
    answer = _clients(path, 1)[0](_message(path, {"proximal-mu": mu}), context())
    assert "proximal term" in answer.error.reason
    assert "at least 0" in answer.error.reason


def _with_arrays(change):
    """Make a function that changes the weights of an answer."""

    def spoil(answer):
        if not answer.has_error() and len(answer.content.array_records):
            record = answer.content["arrays"]
            change(record)
        return answer

    return spoil


def _set(name, value):
    return _with_arrays(lambda record: record.__setitem__(name, Array(value)))


def _examples(count):
    def spoil(answer):
        answer.content["metrics"] = MetricRecord({**answer.content["metrics"], "num-examples": count})
        return answer

    return spoil


def _garbage(record):
    record["layer1.bias"] = Array(dtype="float32", shape=(8,), stype="numpy.ndarray", data=b"no array")


BAD = {
    "nan": (_set("layer1.bias", np.full(8, np.nan, np.float32)), "'layer1.bias' with NaN"),
    "shape": (_set("layer1.bias", np.zeros(9, np.float32)), r"'layer1.bias' as float32 of shape \(9,\)"),
    "type": (_set("layer1.bias", np.zeros(8, np.float64)), "'layer1.bias' as float64"),
    "unknown": (_set("other", np.zeros(8, np.float32)), "'other', which is not trained here"),
    "missing": (_with_arrays(lambda record: record.pop("layer1.bias")), "no 'layer1.bias'"),
    "garbage": (_with_arrays(_garbage), "a form that is no NumPy array"),
    "count": (_examples(-5), "-5 as its number of examples"),
    "no_count": (_examples(math.nan), "nan as its number of examples"),
    "silent": (lambda answer: None, "did not answer within 5 seconds"),
}


@pytest.mark.parametrize(("spoil", "reason"), BAD.values(), ids=BAD)
def test_a_bad_client_is_excluded(path, spoil, reason):
    """The result is the others' average, and one sentence names the excluded client."""
    trained, history = _serve(path, LocalGrid(_clients(path), {1: spoil}), FedAvg(fraction_evaluate=0), timeout=5)
    others = {node: app for node, app in _clients(path).items() if node != 1}
    expected, _ = _serve(path, LocalGrid(others), FedAvg(fraction_evaluate=0))
    for name, value in _weights(expected).items():
        np.testing.assert_allclose(_weights(trained)[name], value, atol=1e-6)
    (told,) = history[1]["left_out"]
    assert "The client 1 " in told
    assert re.search(reason, told)


def test_a_failing_client_reports_why(path):
    x, y = _data(1)
    broken = client_app(path, (x[:, :3], y), optimizer=SGD, **COMMON)
    _, history = _serve(path, LocalGrid({**_clients(path), 1: broken}), FedAvg(fraction_evaluate=0))
    assert "The client 1 failed: " in history[1]["left_out"][0]
    assert "(60, 3)" in history[1]["left_out"][0]


def _in_flowers_name(answer):
    """The reply of Flower's server for a client whose node is gone."""
    asked = copy.copy(answer.metadata)
    asked.__dict__["_message_id"] = answer.metadata.reply_to_message_id
    return create_message_error_unavailable_res_message(asked, "node_unavail")


@pytest.mark.parametrize("dead", [1, 5], ids=["id-of-the-server", "another-id"])
def test_a_dead_client_is_listed_once_under_its_own_id(path, dead):
    """Flower's server answers for it as node 1, for training and for evaluation."""
    clients = _clients(path, 3)
    clients = {0: clients[0], dead: clients[1], 2: clients[2]}
    seen = []

    class Watching(FedAvg):
        def aggregate_train(self, server_round, replies):
            replies = list(replies)
            seen.extend(reply.metadata.src_node_id for reply in replies if reply.has_error())
            return super().aggregate_train(server_round, replies)

    _, history = _serve(path, LocalGrid(clients, {dead: _in_flowers_name}), Watching())
    assert [len(row["left_out"]) for row in history] == [0, 1, 1]
    for row in history[1:]:
        assert row["left_out"][0].startswith(f"The client {dead} failed: ")
        assert "unavailable" in row["left_out"][0].lower()
    assert seen == [dead, dead]


def test_a_client_is_listed_once_a_round_whatever_it_is_asked(path):
    """A silent client is asked to train and to evaluate: only the first reason is kept."""
    _, history = _serve(path, LocalGrid(_clients(path), {1: BAD["silent"][0], 2: _examples(-1)}), timeout=5)
    for row in history[1:]:
        assert [re.search(r"client (\d+)", reason)[1] for reason in sorted(row["left_out"])] == ["1", "2"]


def test_a_client_that_vanishes_from_secure_aggregation_is_listed_once(path):
    """It answers in the two setup stages of the masks, and vanishes afterwards, evaluation included."""
    answered = []

    def vanish(answer):
        answered.append(answer)
        return answer if len(answered) <= 2 else _in_flowers_name(answer)

    grid = LocalGrid(_clients(path, 4, mods=[secaggplus_mod]), {3: vanish})
    _, history = _serve(path, grid, secure=True, rounds=1)
    assert len(answered) > 3
    (told,) = (reason for row in history for reason in row["left_out"])
    assert told.startswith("The client 3 failed: ")


def test_a_diverging_client_reports_it(path):
    diverging = client_app(path, _data(1), optimizer="sgd(lr=1e30)", epochs=3, **COMMON)
    answer = diverging(_message(path), context())
    assert "The loss became" in answer.error.reason


def test_unchanged_weights_are_an_error(path):
    spoil = dict.fromkeys(range(3), BAD["nan"][0])
    with raises_sentence("no_valid_weights", rounds=2, reasons="NaN"):
        _serve(path, LocalGrid(_clients(path), spoil), FedAvg(fraction_evaluate=0))


def test_another_model_at_the_server(path, tmp_path):
    other = tmp_path / "other.onnx"
    onnx.save(mlp((4, 9, 3)), other)
    answer = _clients(path, 1)[0](_message(other), context())
    assert "The server sent 'layer1.weight' as float32 of shape (9, 4); it needs float32 of shape (8, 4)" in (
        answer.error.reason
    )


def test_the_server_measures_with_the_clients(path):
    app = _clients(path, 1, validation=_data(5), metrics="accuracy")[0]
    answer = app(_message(path, kind="evaluate"), context())
    expected = onnxtrain.evaluate(path, _data(5), metrics="accuracy", loss=COMMON["loss"])
    assert dict(answer.content["metrics"]) == pytest.approx({**expected, "num-examples": 60})


def test_secure_aggregation_gives_the_same_average(path):
    """The server gets masked weights only, and restores the average, up to its 22 bits."""
    plain, _ = _serve(path, LocalGrid(_clients(path)))
    grid = LocalGrid(_clients(path, mods=[secaggplus_mod]))
    secure, history = _serve(path, grid, secure=True, validation=_data(7))
    for name, value in _weights(plain).items():
        np.testing.assert_allclose(_weights(secure)[name], value, atol=2e-3)
    assert len(history) == 3
    assert all(not len(record) for answer in grid.answers for record in answer.content.array_records.values())


def test_secure_aggregation_needs_an_average(path):
    with raises_sentence("secure_aggregation", what="Krum"):
        _serve(path, LocalGrid(_clients(path)), Krum(), secure=True)


def test_flowers_own_noise_on_weights(path):
    noisy = LocalDpMod(clipping_norm=1.0, sensitivity=1.0, epsilon=5.0, delta=1e-5)
    trained, history = _serve(path, LocalGrid(_clients(path, mods=[noisy])), rounds=1)
    plain, _ = _serve(path, LocalGrid(_clients(path)), rounds=1)
    assert history[1]["left_out"] == []
    assert not np.allclose(_weights(trained)["layer1.weight"], _weights(plain)["layer1.weight"], atol=0.05)


class TestPrivacy:
    def test_gradients_are_clipped_per_example(self, path):
        """Without noise a step is the sum of clipped gradients divided by the expected batch size."""
        x, y = _data(0, 12)
        clip, rate = 0.3, 0.5
        app = client_app(path, (x, y), optimizer=SGD, batch_size=12, dp=DP(noise=0.0, clip=clip), **COMMON)
        found = _sent(app(_message(path), context()))
        sums = dict.fromkeys(found, 0.0)
        clipped = 0
        for i in range(12):
            trainer = onnxtrain.Trainer(path, optimizer="sgd(lr=1)", **COMMON)
            start = trainer.get_weights()
            trainer.train_step(x[i : i + 1], y[i : i + 1])
            gradient = {name: start[name] - value for name, value in trainer.parameters.items()}
            norm = math.sqrt(sum(np.sum(g.astype(np.float64) ** 2) for g in gradient.values()))
            clipped += norm > clip
            sums = {name: sums[name] + g * min(1.0, clip / norm) for name, g in gradient.items()}
        assert clipped > 6
        for name, value in found.items():
            np.testing.assert_allclose(value, start[name] - rate * sums[name] / 12, atol=1e-5)

    def test_the_noise_has_the_right_scale(self, path):
        """With a bound that dwarfs the gradients, a step is noise alone."""
        data = _data(0, 20)
        dp = DP(noise=50.0, clip=1e-3, seed=1)
        found = _sent(
            client_app(path, data, optimizer="sgd(lr=1)", batch_size=20, dp=dp, **COMMON)(_message(path), context())
        )
        moved = np.concatenate([(value - _weights(onnx.load(path))[n]).ravel() for n, value in found.items()])
        assert np.std(moved) == pytest.approx(50.0 * 1e-3 / 20, rel=0.25)

    def test_the_noise_is_unpredictable(self, path):
        app = client_app(path, _data(0, 20), optimizer=SGD, batch_size=20, dp=DP(), **COMMON)
        first, second = (_sent(app(_message(path), context())) for _ in range(2))
        assert not np.array_equal(first["layer1.bias"], second["layer1.bias"])

    def test_epsilon_counts_the_steps_of_all_rounds(self, path):
        pytest.importorskip("dp_accounting", reason="dp-accounting is not installed: pip install 'onnxtrain[flower]'")
        dp = DP(noise=1.1, clip=1.0, seed=0)
        app = client_app(path, _data(0, 60), optimizer=SGD, batch_size=20, dp=dp, **COMMON)
        node = context()
        spent = [app(_message(path), node).content["metrics"]["epsilon"] for _ in range(3)]
        assert spent == pytest.approx([dp.epsilon(3 * round_, 1 / 3) for round_ in (1, 2, 3)])
        assert spent[0] < spent[1] < spent[2]
        assert "loss" not in app(_message(path), node).content["metrics"]

    def test_epsilon_matches_the_literature(self):
        """Abadi et al. 2016, section 3.2: noise 4, q 0.01, 10,000 steps is (1.26, 1e-5) by their looser accountant."""
        pytest.importorskip("dp_accounting", reason="dp-accounting is not installed: pip install 'onnxtrain[flower]'")
        assert 0.9 < DP(noise=4.0, delta=1e-5).epsilon(10_000, 0.01) < 1.26
        assert DP(noise=0.0).epsilon(1, 0.5) == math.inf

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"noise": -1.0}, "noise is -1.0; .* at least 0"),
            ({"noise": math.nan}, "noise is nan"),
            ({"clip": 0.0}, "clip is 0.0; .* above 0"),
            ({"delta": 1.0}, "delta is 1.0; it is a probability"),
        ],
    )
    def test_settings_are_checked(self, arguments, message):
        with pytest.raises(OptionError, match=message):
            DP(**arguments)

    def test_a_batch_larger_than_the_data(self, path):
        answer = client_app(path, _data(0, 20), dp=DP(), batch_size=21, **COMMON)(_message(path), context())
        assert "batch_size is 21, but there are 20 examples" in answer.error.reason

    def test_statistics_of_the_data_are_refused(self, tmp_path):
        path = tmp_path / "cnn.onnx"
        onnx.save(onnxtrain.examples.small_resnet(), path)
        data = np.zeros((4, 3, 32, 32), np.float32), np.zeros(4, np.int64)
        app = client_app(path, data, dp=DP(), batch_size=2, batch_norm="train", **COMMON)
        trainer = onnxtrain.Trainer(path, batch_norm="train", **COMMON)
        weights = ArrayRecord({name: Array(np.array(value)) for name, value in dict(trainer.weights).items()})
        answer = app(Message(RecordDict({"arrays": weights}), dst_node_id=0, message_type="train"), context())
        assert "batch_norm='train' computes statistics of the data without noise" in answer.error.reason


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"save": "here.onnx"}, "save is 'here.onnx'; it needs an absolute path"),
        ({"rounds": 0}, "rounds is 0; it needs a number of at least 1"),
        ({"metrics": "accuracy"}, "Metrics are measured on validation data"),
    ],
)
def test_arguments_of_the_server_are_checked(path, arguments, message):
    with pytest.raises(OptionError, match=message):
        server_app(path, **{"save": path.parent / "out.onnx", **COMMON, **arguments})


def test_arguments_of_a_client_are_checked(path):
    with raises_sentence("epochs_of_client", what="epochs", got=0):
        client_app(path, _data(0), epochs=0, **COMMON)


def test_the_page_runs(tmp_path):
    """The examples of docs/federated.md make their apps, with the page's folder replaced."""
    page = (
        (Path(__file__).resolve().parents[3] / "docs" / "federated.md").read_text().replace('"/data/', f'"{tmp_path}/')
    )
    blocks = re.findall(r"^```py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(block, namespace)
    assert {"client", "server", "private", "masked"} < namespace.keys()
