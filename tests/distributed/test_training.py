"""Several processes train like one with as many micro-batches: the same bits if sums are in rank order."""

from __future__ import annotations

import json

import numpy as np
import pytest

import onnxtrain
from distributed.processes import mpiexec, needs_mpi, run_script, script
from zoo.arrays import assert_same

# One script for a single process with micro-batches and for several processes.
LENET = """
    import json, sys
    import numpy as np
    import onnxtrain
    how, given = sys.argv[1], json.loads(sys.argv[2])
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(630, 1, 28, 28)).astype(np.float32), rng.integers(0, 10, 630)
    alone = how.isdigit()
    options = {"accumulate": int(how)} if alone else {"distributed": onnxtrain.distributed.MPI()}
    trainer = onnxtrain.Trainer(
        onnxtrain.examples.lenet5(), loss="softmax_cross_entropy", optimizer=onnxtrain.Adam(1e-3), threads=1,
        clip_norm=1.0, **options,
    )
    history = trainer.fit(x, y, epochs=2, batch_size=64, validation=0.1, metrics=["accuracy", "f1", "auc"], **given)
    if not trainer._communicator.rank:
        np.savez(how, **trainer.executor.states)
        print(json.dumps(history.rows))
"""


def train(folder, ranks: int, how: str, script: str = LENET, **given) -> tuple[list, dict[str, np.ndarray]]:
    printed = run_script(folder, ranks, script, how, json.dumps(given), cwd=str(folder))
    with np.load(folder / f"{how}.npz") as file:
        states = {name: file[name] for name in file if not name.startswith("accumulated") and "/acc" not in name}
    return json.loads(printed.splitlines()[-1]), states


@needs_mpi
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_twenty_steps_of_lenet_are_those_of_micro_batches_bit_for_bit(tmp_path, ranks):
    """The last batch of an epoch has 55 examples, split into 28 and 27, or 14, 14, 14 and 13."""
    alone, states = train(tmp_path, 1, str(ranks))
    together, others = train(tmp_path, ranks, "mpi")
    assert alone == together
    assert alone[-1]["step"] == 18
    assert_same(states, others)


KINDS = """
    import sys
    import numpy as np
    import onnx
    import onnxtrain
    from onnx import numpy_helper, parser
    ranks, kind = int(sys.argv[1]), sys.argv[2]
    rng = np.random.default_rng(0)
    y = np.arange(12) % 4
    if kind == "transformer":  # as read from a file, with types whose byte order is spelt out
        model, x = onnxtrain.examples.small_transformer(), [rng.integers(1, 100, (12, 7)), np.ones((12, 7), np.int64)]
        onnx.save(model, f"{ranks}.onnx")
        model = f"{ranks}.onnx"
    else:
        text = "g (float[n, 4] x) => (float[n, 4] y) { a = MatMul(x, w) y = Mul(a, scale) }"
        model = parser.parse_model('<ir_version: 8, opset_import: ["": 18]>' + text)
        model.graph.initializer.extend([
            numpy_helper.from_array(rng.normal(size=(4, 4)).astype(np.float32), "w"),
            numpy_helper.from_array(np.float32(1.5), "scale"),
        ])
        x = rng.normal(size=(12, 4)).astype(np.float32)
    train = None if kind == "transformer" else ["w", "scale"]
    options = {"distributed": onnxtrain.distributed.MPI()} if ranks > 1 else {"accumulate": 2}
    if kind == "bfloat16 states":
        options["precision"] = "states=bfloat16"
    trainer = onnxtrain.Trainer(
        model, loss="softmax_cross_entropy", optimizer="adam(lr=0.01)", train=train, threads=1, **options
    )
    for _ in range(3):
        trainer.train_step(x, y)
    if not trainer._communicator.rank:
        np.savez(f"{kind}-{ranks}", **trainer.get_weights())
"""


@needs_mpi
@pytest.mark.parametrize("kind", ["transformer", "number", "bfloat16 states"])
def test_parameters_of_any_kind_start_equal_and_stay_so(tmp_path, kind):
    """Train a transformer from a file, a scalar parameter, and states in an ml_dtypes extension type."""
    run_script(tmp_path, 1, KINDS, "1", kind, cwd=tmp_path)
    run_script(tmp_path, 2, KINDS, "2", kind, cwd=tmp_path)
    with np.load(tmp_path / f"{kind}-1.npz") as alone, np.load(tmp_path / f"{kind}-2.npz") as together:
        assert set(alone) == set(together)
        assert kind == "transformer" or "scale" in alone
        for name in alone:
            np.testing.assert_array_equal(alone[name], together[name], err_msg=name)


ENDS_EARLY = """
    import os, sys
    from onnxtrain.distributed.mpi import environment_rank
    if environment_rank() == 1:
        sys.exit(int(sys.argv[1]))
    import onnxtrain
    onnxtrain.distributed.MPI(timeout=2)
"""


@needs_mpi
@pytest.mark.parametrize("code", [0, 1])
def test_a_rank_that_ends_before_mpi_starts_does_not_keep_the_others(tmp_path, code):
    done = mpiexec(2, script(tmp_path, ENDS_EARLY), code, timeout=30)
    assert done.returncode != 0
    assert "Rank 0 waited 2 s for all ranks to start MPI; one of them has ended before" in done.stderr


STEPS = """
    import sys
    import numpy as np
    import onnxtrain
    mpi = onnxtrain.distributed.MPI()
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 1, 28, 28)).astype(np.float32), rng.integers(0, 10, 40)
    def trainer(**options):
        return onnxtrain.Trainer(
            onnxtrain.examples.lenet5(), loss="softmax_cross_entropy",
            optimizer="sgd(lr=0.1)", threads=1, **options)
    def equal(one, other, close=False):
        for name, array in one.get_weights().items():
            if close:
                np.testing.assert_allclose(array, other.get_weights()[name], rtol=1e-4, atol=1e-6, err_msg=name)
            else:
                np.testing.assert_array_equal(array, other.get_weights()[name], err_msg=name)
"""


def run_steps(folder, ranks: int, text: str) -> str:
    return run_script(folder, ranks, STEPS + text)


@needs_mpi
def test_batches_of_fewer_examples_than_processes_leave_some_with_nothing(tmp_path):
    run_steps(
        tmp_path,
        3,
        """
    together, alone = trainer(distributed=mpi), trainer(accumulate=3)
    for rows in (4, 1, 2, 7):  # shares of 2 2 0, 1 0 0, 1 1 0, 3 3 1
        assert together.train_step(x[:rows], y[:rows]) == alone.train_step(x[:rows], y[:rows]), rows
    equal(together, alone)
    """,
    )


@needs_mpi
def test_weights_of_examples_and_ignored_labels_count_right(tmp_path):
    run_steps(
        tmp_path,
        2,
        """
    weights = np.linspace(0, 2, 40).astype(np.float32)
    together, alone, whole = trainer(distributed=mpi), trainer(accumulate=2), trainer()
    for subject in (together, alone, whole):
        subject.train_step(x, y, sample_weight=weights)
    equal(together, alone)
    equal(together, whole, close=True)
    y[3:30] = -100
    loss = onnxtrain.losses.SoftmaxCrossEntropy(ignore_index=-100)
    def trainer(**options):
        return onnxtrain.Trainer(onnxtrain.examples.lenet5(), loss=loss, optimizer="sgd(lr=0.1)", threads=1, **options)
    together, alone, whole = trainer(distributed=mpi), trainer(accumulate=2), trainer()
    for subject in (together, alone, whole):
        subject.train_step(x, y)
    equal(together, alone)
    equal(together, whole, close=True)
    """,
    )


@needs_mpi
def test_micro_batches_within_processes_and_the_fast_order(tmp_path):
    run_steps(
        tmp_path,
        2,
        """
    two = trainer(distributed=mpi, accumulate=2)
    fast = trainer(distributed=onnxtrain.distributed.MPI(order="fast"))
    whole = trainer()
    for subject in (two, fast, whole):
        for rows in (40, 37, 3):
            subject.train_step(x[:rows], y[:rows])
    equal(two, whole, close=True)
    equal(fast, whole, close=True)
    """,
    )


@needs_mpi
def test_running_statistics_are_means_and_dropout_differs_by_rank(tmp_path):
    run_steps(
        tmp_path,
        2,
        """
    model = onnxtrain.examples.small_resnet()
    x = rng.normal(size=(8, 3, 32, 32)).astype(np.float32)
    def resnet(**options):
        return onnxtrain.Trainer(model, loss="softmax_cross_entropy", optimizer="sgd(lr=0.0)", batch_norm="train",
            threads=1, **options)
    together, first, second = resnet(distributed=mpi), resnet(), resnet()
    y = y[:8] % 2
    together.train_step(x, y)
    first.train_step(x[:4], y[:4])
    second.train_step(x[4:], y[4:])
    assert together.objective.statistics
    for name in together.objective.statistics:
        mean = (first.weights[name] + second.weights[name]) / 2
        np.testing.assert_allclose(together.weights[name], mean, rtol=1e-5, err_msg=name)
    seeds = mpi.gather_objects(together.config.modes.seed)
    assert seeds[0] == 0 != seeds[1]
    """,
    )


@needs_mpi
def test_a_script_saves_and_evaluates_as_alone(tmp_path):
    printed = run_steps(
        tmp_path,
        2,
        f"""
    together, alone = trainer(distributed=mpi), trainer(accumulate=2)
    for subject in (together, alone):
        subject.fit([(x[:9], y[:9]), (x[9:40], y[9:40])], epochs=2)
    equal(together, alone)
    assert together.evaluate(x, y, batch_size=7, metrics=["accuracy", "auc"]) == alone.evaluate(
        x, y, batch_size=7, metrics=["accuracy", "auc"])
    np.testing.assert_array_equal(together.predict(x), alone.predict(x))
    together.save({str(tmp_path / "saved.onnx")!r})
    """,
    )
    assert printed == ""
    assert (tmp_path / "saved.onnx").exists()
    onnxtrain.Trainer(str(tmp_path / "saved.onnx"), loss="softmax_cross_entropy")


OTHERS = """
    import sys
    import numpy as np
    import onnxtrain
    mpi = onnxtrain.distributed.MPI()
    odd = mpi.rank == 1
    how = sys.argv[1]
    x, y = np.eye(4, dtype=np.float32), np.arange(4) % 3
    if odd and how == "data":
        x = x + 1
    if odd and how == "version":
        from onnxtrain.training.executors import data_parallel
        data_parallel.__version__ = "0.0.9"
    trainer = onnxtrain.Trainer(
        onnxtrain.examples.mlp((4, 7 if odd and how == "model" else 8, 3), seed=mpi.rank), loss="softmax_cross_entropy",
        clip_norm=2.0 if odd and how == "settings" else 1.0, optimizer=onnxtrain.SGD(1e30 if how == "nan" else 0.1),
        distributed=mpi)
    class Changes(onnxtrain.callbacks.Callback):
        def on_step_end(self, state):
            if odd and how == "callback":
                next(iter(state.weights.values()))[...] += 1
            if not odd and how == "stop":
                state.request_stop("enough")
    history = trainer.fit(x, y, epochs=50, batch_size=2, callbacks=[Changes()])
    if how == "stop":
        assert trainer._communicator.gather_objects(history.rows) == 2 * [history.rows]
        assert len(history.rows) == 0
        if not odd:
            print("stopped")
"""


@needs_mpi
@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("model", "ParallelError: Rank 1 differs from rank 0: the graph of its model, "),
        ("settings", "clip_norm is 2.0 on rank 1 and 1.0 on rank 0; start all ranks with the same model"),
        ("version", 'onnxtrain is "0.0.9" on rank 1 and '),
        ("data", "input 'input' of data, float32 [4, 4], has other values in 4 of 4 rows, first in row 0"),
        ("callback", "something changed them in one process alone"),
        ("nan", "NumericalError: The loss became "),
    ],
)
def test_differences_between_ranks_are_reported_once(tmp_path, how, sentence):
    from distributed.processes import mpiexec, script

    done = mpiexec(2, script(tmp_path, OTHERS), how)
    assert done.returncode == 1
    assert done.stderr.count(sentence) == 1, done.stderr
    assert "BAD TERMINATION" not in done.stdout + done.stderr


@needs_mpi
def test_the_callbacks_of_rank_0_decide(tmp_path):
    """Rank 1 starts with other weights and receives those of rank 0."""
    assert run_script(tmp_path, 2, OTHERS, "stop") == "stopped\n"


@needs_mpi
def test_augmentation_draws_by_rank_and_rank_0_writes(tmp_path):
    run_steps(
        tmp_path,
        2,
        f"""
    drawn = []
    def augment(image, generator):
        drawn.append(float(generator.random()))
        return image
    log = {str(tmp_path / "rows.csv")!r}
    class Spy(onnxtrain.callbacks.CsvLogger):
        def on_epoch_end(self, state):
            assert mpi.rank == 0
            super().on_epoch_end(state)
    trainer(distributed=mpi).fit(x, y, batch_size=20, augment=augment, callbacks=[Spy(log)], progress=False)
    first, second = mpi.gather_objects(drawn)
    assert len(first) == len(second) == 2 and not set(first) & set(second)
    del drawn[:]
    trainer().fit(x, y, batch_size=20, augment=augment, progress=False)
    assert drawn == first  # of rank 0 as alone
    """,
    )
    assert (tmp_path / "rows.csv").exists()


@needs_mpi
def test_losses_of_several_outputs_and_losses_that_are_sums(tmp_path):
    run_steps(
        tmp_path,
        2,
        """
    import onnx
    model = onnx.parser.parse_model('''<ir_version: 10, opset_import: ["": 18]>
        two (float[N, 4] x) => (float[N, 3] kind, float[N, 3] size) {
            kind = MatMul(x, a)
            size = MatMul(x, b)
        }''')
    for name in "ab":
        values = np.random.default_rng(len(name)).normal(size=(4, 3)).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    x = rng.normal(size=(9, 4)).astype(np.float32)
    targets = {"kind": np.arange(9) % 3, "size": rng.normal(size=(9, 3)).astype(np.float32)}
    def two(**options):
        return onnxtrain.Trainer(model, loss={"kind": "softmax_cross_entropy", "size": "mse"}, optimizer="sgd(lr=0.1)",
            threads=1, **options)
    together, alone = two(distributed=mpi), two(accumulate=2)
    for _ in range(3):
        assert together.train_step(x, targets) == alone.train_step(x, targets)
    equal(together, alone)
    for name, part in alone.loss_parts.items():
        assert abs(together.loss_parts[name] - part) < 1e-5 * abs(part)
    data = {"x": x, **targets}
    assert together.evaluate(data) == alone.evaluate(data)
    """,
    )


JOINT = """
    import sys
    import numpy as np
    import onnx
    import onnxtrain
    ranks = int(sys.argv[1])
    model = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["": 18]>
        f (float[n, 3] x) => (float[n, 4] kind, float[n, 4] other)
        <float[3, 4] w = {0.5, -1, 0.3, 1, 0.2, 0.4, -0.6, 0.1, 1, -0.3, 0.2, 0.9}>
        { kind = MatMul(x, w) other = Tanh(kind) }''')
    rng = np.random.default_rng(0)
    x = rng.normal(size=(13, 3)).astype(np.float32)
    y = {"kind": np.array([0, -100, -100, -100, 1, 2, 3, 2, 1, 3, 2, 1, 0]), "other": np.arange(13) % 4}
    options = {"distributed": onnxtrain.distributed.MPI()} if ranks > 1 else {}
    other = onnxtrain.losses.SoftmaxCrossEntropy(class_weights=(0.1, 0.7, 1.3, 0.3))
    for accumulate in map(int, sys.argv[2:]):
        trainer = onnxtrain.Trainer(
            model, loss={"kind": "cross_entropy", "other": other}, optimizer="sgd(lr=0.1)", threads=1,
            accumulate=accumulate, **options,
        )
        rows = trainer.fit(x, y, epochs=3, batch_size=13, progress=False).rows
        if not trainer._communicator.rank:
            np.savez(f"{ranks}-{accumulate}", losses=[[*row.values()] for row in rows], **trainer.get_weights())
"""


@needs_mpi
def test_labels_that_count_are_counted_over_all_processes(tmp_path):
    """One process has most of the ignored labels."""
    found = []
    for ranks, accumulated in ((1, (1, 2)), (2, (1, 3))):
        run_script(tmp_path, ranks, JOINT, str(ranks), *map(str, accumulated), cwd=str(tmp_path))
        for accumulate in accumulated:
            with np.load(tmp_path / f"{ranks}-{accumulate}.npz") as file:
                found.append(dict(file))
    whole, parts, together, both = found
    assert_same(parts, together)
    for other in (parts, both):
        np.testing.assert_allclose(other["losses"], whole["losses"], rtol=2e-6)
        np.testing.assert_allclose(other["w"], whole["w"], rtol=2e-6)
