"""The cost model of networked machines: its arithmetic, and the recovery of known parameters by the fit."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))

import cost_model
import network_costs
from network_costs import Network, Software, exchanges

SOFTWARE = Software(overhead=20e-6, copying=1e-9, trips=2.0)
SLOW = Network(latency=0.01, bandwidth=1e6)


def test_a_sum_is_the_exchanges_that_the_communicator_makes():
    assert exchanges(1 << 15, 7) == [1 << 15]
    assert exchanges(1 << 16, 2) == [1 << 15, 1 << 15]
    assert exchanges(5 << 20, 2) == [1 << 20, 1 << 20, 1 << 19, 5 << 19]
    assert sum(exchanges(90 << 20, 3)) == pytest.approx(2 * (90 << 20) / 3)


def test_the_communicator_makes_these_exchanges(monkeypatch):
    """The messages passed to MPI, as bytes to each other rank."""
    import numpy as np

    from onnxtrain.distributed import MPI

    made = MPI.__new__(MPI)
    made.rank, made.size, made.order, made._scratch = 1, 4, "rank", np.empty(0, np.uint8)
    sizes = []

    def exchange(sent, received, what, size):
        sizes.append(sent[0].nbytes)
        for array in received:
            array[...] = 0

    made._exchange = exchange
    for size in (1 << 10, 1 << 15, 1 << 20, 10 << 20):
        sizes.clear()
        made.all_reduce_(np.zeros(size // 4, np.float32))
        assert sizes == exchanges(size, 4)


def test_an_exchange_waits_for_the_network_or_for_the_copying():
    assert SOFTWARE.exchange(100, 3, SLOW) == pytest.approx(0.01 + 2 * (20e-6 + 1e-4))
    assert SOFTWARE.exchange(10_000, 3, SLOW) == pytest.approx(0.02 + 2 * (20e-6 + 1e-2))
    assert SOFTWARE.exchange(10_000, 3, Network(0.01, 1e12)) == pytest.approx(0.02 + 2 * (20e-6 + 1e-5))
    step = SOFTWARE.step(0.5, [100, 200], 3, SLOW)
    first, last = SOFTWARE.exchange(100, 3, SLOW), 0.02 + 2 * 220e-6
    alone = 0.5 + SOFTWARE.exchange(32, 3, SLOW)
    assert step == pytest.approx(alone + first + last)
    assert SOFTWARE.step(0.5, [100, 200], 3, SLOW, beside=0.002) == pytest.approx(alone + first - 0.002 + last)
    assert SOFTWARE.step(0.5, [100, 200], 3, SLOW, beside=0.4) == pytest.approx(alone + last)


def test_a_fit_finds_what_made_the_numbers():
    bare = Network(3e-6, float("inf"))
    loopback = {
        "exchange": bare.latency,
        "message": 20e-6,
        "sums": {str(1 << 22): 3 * bare.latency + 1e-9 * sum(exchanges(1 << 22, 2))},
    }
    slower = {"exchange": 1.0, "message": 1.0, "sums": {str(1 << 22): 1.0}}
    base = {2: 4e-4, 4: 8e-4}
    settings = ((2, 0.02, 12.5e6), (4, 0.02, 12.5e6))
    found = {}
    for machines, delay, rate in settings:
        network = Network(base[machines] + delay, rate)
        sums = {str(size): SOFTWARE.all_reduce(size, machines, network) for size in cost_model.SUMS}
        found[machines, delay, rate] = {
            "exchange": SOFTWARE.exchange(network_costs.TABLE_BYTES, machines, network),
            "sums": sums,
            "steps": {},
        }
    software, latencies = network_costs.fit_trips(network_costs.fit([loopback, slower]), found)
    assert latencies == pytest.approx(base, rel=1e-3)
    assert network_costs.network_of((3, 0.01, None), latencies).latency == pytest.approx(0.01 + 6e-4, rel=1e-3)
    assert software.overhead == SOFTWARE.overhead
    assert software.copying == pytest.approx(SOFTWARE.copying, rel=1e-3)
    assert software.trips == pytest.approx(2.0, rel=1e-3)
    errors = [expected / measured - 1 for *_, measured, expected in cost_model.points(found, software, base, settings)]
    assert max(map(abs, errors)) < 0.001
    for values in found.values():
        values["sums"] = {size: 2 * seconds for size, seconds in values["sums"].items()}
    assert network_costs.fit_trips(software, found)[0].trips > 3


def test_the_table_of_clusters_says_what_it_takes_for_granted(tmp_path, monkeypatch):
    import numpy as np
    import onnx

    import onnxtrain

    class Model:
        def onnx(self, folder):
            path = tmp_path / "model.onnx"
            onnx.save(onnxtrain.examples.mlp((784, 512, 10)), path)
            return path

        def batch(self, examples):
            return {"input": np.zeros((examples, 784), np.float32)}, None

    monkeypatch.setattr(cost_model, "find_model", lambda name: Model())
    monkeypatch.setattr(cost_model, "SHOWN", {"mlp": 64})
    table, words = cost_model.cluster(SOFTWARE, str(tmp_path))
    rows = [line.split("|") for line in table.splitlines()[2:]]
    assert [int(row[2]) for row in rows] == list(cost_model.CLUSTER)
    shares = np.asarray([[float(row[index].strip().rstrip("%")) for index in (5, 6, 8, 9)] for row in rows])
    assert np.all(np.diff(shares, axis=0) <= 0)  # more machines, less of the time
    assert np.all(shares[:, 2:] >= shares[:, :2])  # on the faster network more
    assert np.all(shares[:, 1::2] >= shares[:, ::2])  # and at best
    assert "Predictions, not measurements" in words
    assert "mlp 64" in words
