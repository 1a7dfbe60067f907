"""Checkpoints record the settings of a training: errors name differences, and ``change`` accepts them."""

from __future__ import annotations

import json
import re

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from test_trainer import data, mlp, trainer, weights

import onnxtrain
from onnxtrain.errors import CheckpointError
from onnxtrain.losses import CustomLoss, Huber, SoftmaxCrossEntropy
from onnxtrain.training.callbacks import Callback, EarlyStopping
from onnxtrain.training.schedules import Cosine, Linear
from onnxtrain.training.trainer import Trainer
from sentences import raises_sentence
from zoo.arrays import assert_same, copied

FIT = {"epochs": 2, "batch_size": 8}


def other_weights(names: str = "layer") -> onnx.ModelProto:
    model = mlp()
    for tensor in model.graph.initializer:
        if tensor.name.startswith(names):
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) + np.float32(0.01), tensor.name))
    return model


def squared(op, prediction, target):
    return op.ReduceMean((prediction - target) * (prediction - target), keepdims=0)


def absolute(op, prediction, target):
    return op.ReduceMean(op.Abs(prediction - target), keepdims=0)


def values() -> tuple[np.ndarray, np.ndarray]:
    x, y = data()
    return x, np.eye(3, dtype=np.float32)[y]


def changed_values() -> tuple[np.ndarray, np.ndarray]:
    x, y = data()
    x[-1, -1] += 1e-3
    return x, y


def swapped_examples() -> tuple[np.ndarray, np.ndarray]:
    x, y = data()
    return x[::-1], y[::-1]


def start_at_half(step: int) -> float:
    return 0.01 if step > 2 else 0.005


def cut_the_first_layer(subject: Trainer) -> None:
    name = next(iter(subject.parameters))
    subject.set_masks({name: np.arange(subject.parameters[name].size).reshape(subject.parameters[name].shape) % 2 == 0})


def doubled(x, rng):
    return x * 2


def halved(x, rng):
    return x / 2


SSGD = onnxtrain.SSGD(0.01)

# Differences: options of the trainer and of fit, for writing and for resuming.
DIFFERENCES = {
    "loss": (({}, {}), ({"loss": SoftmaxCrossEntropy(label_smoothing=0.1)}, {})),
    "loss by class": (({"loss": "mean_squared_error"}, {"data": values()}), ({"loss": "huber"}, {"data": values()})),
    "loss by setting": (({"loss": Huber(1.0)}, {"data": values()}), ({"loss": Huber(2.0)}, {"data": values()})),
    "loss by function": (
        ({"loss": squared}, {"data": values()}),
        ({"loss": CustomLoss(absolute)}, {"data": values()}),
    ),
    "optimizer": (({}, {}), ({"optimizer": onnxtrain.Adagrad(0.01)}, {})),
    "attributes": (({}, {}), ({"optimizer": onnxtrain.Adam(0.01, alpha=0.8)}, {})),
    "sparsity": (
        ({}, {}),
        ({"optimizer": onnxtrain.Adam(0.01, sparsity=onnxtrain.Sparsity())}, {}),
    ),
    "sparsify": (({"optimizer": SSGD}, {}), ({"optimizer": SSGD, "sparsify": "layer2.weight"}, {})),
    "learning_rate": (({}, {}), ({"optimizer": onnxtrain.Adam(0.02)}, {})),
    "schedule": (({}, {"schedule": "cosine"}), ({}, {"schedule": "linear"})),
    "schedule by setting": (({}, {"schedule": "linear(0.1)"}), ({}, {"schedule": "linear(0.2)"})),
    "schedule by class": (({}, {"schedule": Cosine(0.01, 9)}), ({}, {"schedule": Linear(0.01, 9)})),
    "schedule by number": (({}, {"schedule": Cosine(0.01, 9)}), ({}, {"schedule": Cosine(0.01, 10)})),
    "schedule by function": (({}, {}), ({}, {"schedule": start_at_half})),
    "epochs": (({}, {"schedule": "warmup(2)+cosine"}), ({}, {"schedule": "warmup(2)+cosine", "epochs": 3})),
    "clip_norm": (({"clip_norm": 0.5}, {}), ({"clip_norm": 0.4}, {})),
    "clip_value": (({}, {}), ({"clip_value": 0.4}, {})),
    "batch_norm": (({}, {}), ({"batch_norm": "train"}, {})),
    "dropout": (({}, {}), ({"dropout": True}, {})),
    "seed": (({}, {}), ({"seed": 1}, {})),
    "shuffle": (({}, {}), ({}, {"shuffle": False})),
    "batch_size": (({}, {}), ({}, {"batch_size": 6})),
    "accumulate": (({}, {}), ({"accumulate": 2}, {})),
    "straight_through": (({}, {}), ({"straight_through": True}, {})),
    "masks": (({}, {}), ({"prepare": cut_the_first_layer}, {})),
    "early_stopping": (
        ({}, {"validation": data(9), "callbacks": [EarlyStopping(patience=2)]}),
        ({}, {"validation": data(9), "callbacks": [EarlyStopping(patience=3)]}),
    ),
    "augment": (({}, {"augment": doubled}), ({}, {"augment": halved})),
    "validation": (({}, {"validation": data(9)}), ({}, {"validation": data(9, seed=1)})),
    "data": (({}, {}), ({}, {"data": data(seed=1)})),
    "data by one value": (({}, {}), ({}, {"data": changed_values()})),
    "data by order": (({}, {}), ({}, {"data": swapped_examples()})),
    "data by size": (({}, {}), ({}, {"data": data(40)})),
    "weights": (({}, {}), ({"model": other_weights()}, {})),
    "weights that are frozen": (
        ({"freeze": "layer1.*"}, {}),
        ({"freeze": "layer1.*", "model": other_weights("layer1")}, {}),
    ),
    "model": (({}, {}), ({"model": onnxtrain.examples.mlp((5, 8, 3), activation="tanh")}, {})),
}


def run(options: tuple[dict, dict], **more) -> Trainer:
    settings, course = dict(options[0]), {"data": data(), **FIT, **options[1], **more}
    prepare = settings.pop("prepare", lambda subject: None)
    subject = trainer(**settings)
    prepare(subject)
    subject.fit(course.pop("data"), **course)
    return subject


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", DIFFERENCES)
def test_a_difference_is_named_or_accepted_by_its_name(case: str, tmp_path) -> None:
    written, resumed = DIFFERENCES[case]
    name = case.split()[0]
    run(written, checkpoint=tmp_path)
    longer = {"epochs": 3}
    with pytest.raises(
        CheckpointError,
        match=rf"belongs to another training: .*(\b{name} is .+ there and .+ here|the content of {name} has changed)",
    ) as info:
        run(resumed, checkpoint=tmp_path, resume=True, **longer)
    assert not re.search("[0-9a-f]{32}", str(info.value))
    names = str(info.value).partition('accept what differs by its name: change="')[2].partition('"')[0]
    assert name in names.split(",")
    assert len(names.split(",")) <= 3, names  # and no equal setting
    subject = run(resumed, checkpoint=tmp_path, resume=True, change=names, **longer)
    assert all(np.isfinite(array).all() for array in subject.parameters.values())
    run(resumed, checkpoint=tmp_path, resume=True, **longer)  # the checkpoints now record the new settings


SAME = {
    "more epochs": {"epochs": 5},
    "the same data as a mapping": {"data": {"input": data()[0], "label": data()[1]}},
    "another type of the same values": {"data": (data()[0].astype(np.float64), data()[1].astype(np.int8))},
    "batches of another layout in memory": {"data": (np.asfortranarray(data()[0]), data()[1])},
    "other checkpoints": {"checkpoint_every": 2, "keep": 1},
    "constant by name": {"schedule": " constant "},
}


@pytest.mark.parametrize("case", SAME)
def test_what_changes_no_number_is_welcome(case: str, tmp_path) -> None:
    run(({}, {}), checkpoint=tmp_path)
    run(({}, {}), checkpoint=tmp_path, resume=True, **SAME[case])
    options = onnxtrain.RuntimeOptions(threads=1, memory_pattern=True)
    run(({"runtime": options, "recompute": "*"}, {}), checkpoint=tmp_path, resume=True, **SAME[case])


@pytest.mark.parametrize("schedule", ["step(2, 0.5)", "exponential(0.9)", "warmup(2)+constant", Cosine(0.01, 6)])
def test_more_epochs_are_welcome_where_the_schedule_does_not_end_with_them(schedule, tmp_path) -> None:
    whole = run(({}, {"schedule": schedule}), epochs=4)
    run(({}, {"schedule": schedule}), checkpoint=tmp_path)
    longer = run(({}, {"schedule": schedule}), checkpoint=tmp_path, resume=True, epochs=4)
    assert_same(weights(longer), weights(whole))


class Rates(Callback):
    def __init__(self, rates: list[float], choose: dict[int, float] | None = None, stop: int = 0) -> None:
        self.rates, self.choose, self.stop = rates, choose or {}, stop

    def on_step_end(self, state) -> None:
        self.rates.append(state.learning_rate)
        if state.step in self.choose:
            state.learning_rate = self.choose[state.step]
        if state.step == self.stop:
            raise KeyboardInterrupt


def test_more_epochs_of_a_schedule_that_ends_with_them_follow_the_longer_one(tmp_path) -> None:
    short, long, resumed = [], [], []
    run(({}, {"schedule": "linear"}), epochs=4, callbacks=[Rates(long)])
    run(({}, {"schedule": "linear"}), callbacks=[Rates(short)], checkpoint=tmp_path)
    options = {"checkpoint": tmp_path, "resume": True, "epochs": 4, "change": ("epochs",)}
    run(({}, {"schedule": "linear"}), callbacks=[Rates(resumed)], **options)
    assert short + resumed == short + long[6:]


def test_a_changed_rate_is_the_one_set_last(tmp_path) -> None:
    """It replaces the rate that a callback set before the checkpoint."""
    first, second = [], []
    run(({}, {}), callbacks=[Rates(first, {1: 0.5})], checkpoint=tmp_path)
    options = {"checkpoint": tmp_path, "resume": True, "epochs": 3, "change": "learning_rate"}
    run(({"optimizer": onnxtrain.Adam(0.02)}, {}), callbacks=[Rates(second)], **options)
    assert (first, second) == ([0.01] + [0.5] * 5, [0.02] * 3)


def test_a_changed_batch_size_goes_on_at_the_same_example(tmp_path) -> None:
    seen: list[int] = []

    class Sizes(Rates):
        def on_step_end(self, state) -> None:
            seen.append(state.batch_size)
            super().on_step_end(state)

    with pytest.raises(KeyboardInterrupt):
        run(({}, {}), callbacks=[Sizes([], stop=2)], checkpoint=tmp_path, checkpoint_every=1, epochs=1)
    options = {"checkpoint": tmp_path, "resume": True, "change": "batch_size", "checkpoint_every": 1, "epochs": 1}
    run(({}, {"batch_size": 4}), callbacks=[Sizes([])], **options)
    assert seen == [8, 8, 4, 4, 4, 4]  # one batch of 8 counts (the second was not saved), then four of 4


def rates_of(schedule: str, **more) -> list[float]:
    found: list[float] = []
    run(({}, {"schedule": schedule, "epochs": 4, **more}), callbacks=[Rates(found)])
    return found


@pytest.mark.parametrize(
    "schedule", ["cosine", "linear(0.1)", "warmup(0.3)+cosine", "step(2 epochs, 0.5)", "one_cycle"]
)
@pytest.mark.parametrize(
    "changed", [{"batch_size": 4}, {"batch_size": 12}, {"data": data(48)}], ids=["smaller", "larger", "more data"]
)
def test_a_schedule_of_epochs_goes_on_at_its_epoch(schedule: str, changed: dict, tmp_path) -> None:
    """With other steps per epoch, the rate of the rest is that of a training that always had these."""
    whole = rates_of(schedule, **changed)
    per_epoch = len(whole) // 4
    with pytest.raises(KeyboardInterrupt):  # after one epoch of 3 steps
        run(({}, {"schedule": schedule, "epochs": 4}), callbacks=[Rates([], stop=4)], checkpoint=tmp_path)
    rest: list[float] = []
    options = {"schedule": schedule, "epochs": 4, "checkpoint": tmp_path, "resume": True, **changed}
    with pytest.raises(KeyboardInterrupt):  # after the second epoch
        run(({}, options), callbacks=[Rates(rest, stop=3 + per_epoch + 1)], change=[*changed])
    run(({}, options), callbacks=[Rates(rest)])
    del rest[per_epoch]  # the first step of the third epoch was taken twice
    np.testing.assert_allclose(rest, whole[per_epoch:], rtol=1e-12)


def test_a_schedule_of_steps_goes_on_at_its_step(tmp_path) -> None:
    schedule = "step(5, 0.5)"
    run(({}, {"schedule": schedule, "epochs": 2}), checkpoint=tmp_path)  # 6 steps
    rest: list[float] = []
    options = {"schedule": schedule, "batch_size": 4, "epochs": 3, "checkpoint": tmp_path, "resume": True}
    run(({}, options), callbacks=[Rates(rest)], change="batch_size")
    np.testing.assert_allclose(rest, [0.01 * 0.5 ** (step // 5) for step in range(6, 12)])


@pytest.mark.parametrize("name", ["AdamW", "Lion", "RMSprop", "SGD"])
def test_optimizers_of_our_own_go_on_bit_for_bit(name, tmp_path) -> None:
    settings = ({"optimizer": getattr(onnxtrain, name)(0.01)}, {})
    run(settings, checkpoint=tmp_path, epochs=1)
    resumed = run(settings, checkpoint=tmp_path, resume=True, epochs=3)
    assert_same(weights(resumed), weights(run(settings, epochs=3)))


def test_a_changed_optimizer_keeps_the_weights_and_begins_its_states_anew(tmp_path) -> None:
    first = run(({}, {}), checkpoint=tmp_path)
    settings = ({"optimizer": onnxtrain.Momentum(0.0, alpha=0.0)}, {})
    options = {"checkpoint": tmp_path, "resume": True, "epochs": 3, "change": "optimizer,attributes,learning_rate"}
    second = run(settings, **options)
    assert_same(weights(second), weights(first))  # with a learning rate of 0, weights do not change
    assert second.executor.session.state["T"] == 3  # the steps of the third epoch


def test_changed_masks_hold_for_the_weights_that_come_back(tmp_path) -> None:
    run(({}, {}), checkpoint=tmp_path)
    options = {"checkpoint": tmp_path, "resume": True, "change": "masks"}
    subject = run(({"prepare": cut_the_first_layer}, {}), **options)
    (name, mask), *_ = subject.masks.items()
    assert not subject.parameters[name][~mask].any()
    assert subject.parameters[name][mask].all()


def test_an_early_stopped_training_continues_with_more_patience(tmp_path) -> None:
    x, y = data(40)
    wrong = (x[:8], (y[:8] + 1) % 3)

    def epochs(patience: int | None, **options) -> int:
        callbacks = [] if patience is None else [EarlyStopping(patience=patience)]
        subject = trainer(optimizer=onnxtrain.Momentum(0.5))
        history = subject.fit((x, y), validation=wrong, epochs=20, batch_size=8, callbacks=callbacks, **options)
        return len(history.rows)

    stopped = epochs(2, checkpoint=tmp_path)
    assert stopped < 15
    assert epochs(2, checkpoint=tmp_path, resume=True) == stopped
    assert epochs(4, checkpoint=tmp_path, resume=True, change="early_stopping") == stopped + 2
    assert epochs(None, checkpoint=tmp_path, resume=True, change="early-stopping") == 20


def test_running_statistics_are_not_lost(tmp_path) -> None:
    images = np.random.default_rng(0).normal(size=(8, 3, 8, 8)).astype(np.float32)

    def fit(batch_norm: str, **options) -> Trainer:
        subject = trainer(model=onnxtrain.examples.small_resnet(width=4), batch_norm=batch_norm)
        subject.fit((images, np.arange(8)), **options)
        return subject

    fit("frozen", checkpoint=tmp_path / "frozen")
    subject = fit("train", checkpoint=tmp_path / "frozen", resume=True, epochs=2, change="batch_norm")
    assert subject.executor.session.state["stem.norm.mean"].any()
    with raises_sentence("values_not_trained_here", lost="['stem.norm.mean'"):
        fit("frozen", checkpoint=tmp_path / "frozen", resume=True, epochs=3, change="batch_norm")


def test_the_trained_parameters_cannot_change(tmp_path) -> None:
    run(({}, {}), checkpoint=tmp_path)
    with raises_sentence("another_training", differences='parameters is {"layer1.bias": [8]} there and {} here'):
        run(({"freeze": "layer1.bias"}, {}), checkpoint=tmp_path, resume=True)
    with raises_sentence("cannot_differ", what="change", got="parameters"):
        run(({"freeze": "layer1.bias"}, {}), checkpoint=tmp_path, resume=True, change="parameters")


def test_change_needs_resume(tmp_path) -> None:
    with raises_sentence("change_needs_resume", what="change"):
        run(({}, {}), checkpoint=tmp_path, change="epochs")
    with raises_sentence("cannot_differ", what="change", got="epoch", changeable="accumulate"):
        run(({}, {}), checkpoint=tmp_path, resume=True, change=["epoch"])


def test_of_an_iterable_nothing_is_known(tmp_path) -> None:
    def batches(seed: int) -> list:
        x, y = data(seed=seed)
        return [(x[:12], y[:12]), (x[12:], y[12:])]

    run(({}, {"data": batches(0)}), checkpoint=tmp_path)
    run(({}, {"data": batches(1)}), checkpoint=tmp_path, resume=True)
    with pytest.raises(CheckpointError, match=r"data is .*null.* there and .* here"):
        run(({}, {}), checkpoint=tmp_path, resume=True)


def test_of_large_data_samples_are_compared(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("onnxtrain.data.array_dataset.BLOCK_BYTES", 20)  # one example
    monkeypatch.setattr("onnxtrain.data.hashing._BLOCKS", 10)
    run(({}, {}), checkpoint=tmp_path)
    for example, refused in ((0, True), (-1, True), (1, False)):
        x, y = data()
        x[example] += 1
        if refused:
            with pytest.raises(CheckpointError, match="the content of data has changed"):
                run(({}, {"data": (x, y)}), checkpoint=tmp_path, resume=True)
        else:
            run(({}, {"data": (x, y)}), checkpoint=tmp_path, resume=True)


def test_the_same_trainer_continues_after_an_interruption(tmp_path) -> None:
    """The weights of the trainer have changed since the start; those of the checkpoint replace them."""
    expected = run(({}, {}))
    subject = trainer()
    with pytest.raises(KeyboardInterrupt):
        subject.fit(data(), callbacks=[Rates([], stop=4)], checkpoint=tmp_path, **FIT)
    subject.fit(data(), callbacks=[Rates([])], checkpoint=tmp_path, resume=True, **FIT)
    assert_same(weights(subject), weights(expected))


def test_training_continues_after_saving_over_the_file(tmp_path) -> None:
    onnx.save(onnxtrain.examples.mlp((5, 600, 3)), tmp_path / "model.onnx")
    subject = trainer(model=tmp_path / "model.onnx")
    subject.save(tmp_path / "model.onnx")
    subject.fit(data(), checkpoint=tmp_path / "kept", **FIT)
    subject.fit(data(), checkpoint=tmp_path / "kept", resume=True, **FIT)


def test_checkpoints_of_before_are_named(tmp_path) -> None:
    run(({}, {}), checkpoint=tmp_path)
    for path in tmp_path.glob("*.json"):
        record = json.loads(path.read_text())
        del record["checksum"]
        path.write_text(json.dumps(record))
    with raises_sentence("damaged_checkpoint", problem="no checksum, since an earlier onnxtrain"):
        run(({}, {}), checkpoint=tmp_path, resume=True)


def test_checkpoints_of_something_else_are_named(tmp_path) -> None:
    from onnxtrain.training.checkpoints import CheckpointStore

    run(({}, {}), checkpoint=tmp_path)
    store = CheckpointStore(tmp_path)
    _, metadata = store.load()
    store.save(7, {}, {"fingerprint": metadata["fingerprint"]})
    with raises_sentence("not_written_by_fit", what=tmp_path, error="'position'"):
        run(({}, {}), checkpoint=tmp_path, resume=True)


def test_the_version_is_noted(tmp_path) -> None:
    run(({}, {}), checkpoint=tmp_path)
    record = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert record["metadata"]["onnxtrain"] == onnxtrain.__version__


@pytest.mark.parametrize("freeze", [None, "layer1.*"])
def test_a_training_in_place_that_ended_after_its_save_continues(freeze: str | None, tmp_path) -> None:
    """The process is killed after the final save: the model file has the weights of the checkpoint."""
    path, folder = tmp_path / "model.onnx", tmp_path / "kept"
    onnx.save(mlp(), path)

    def fit(epochs: int) -> Trainer:
        subject = trainer(model=path, freeze=freeze)
        subject.fit(data(), epochs=epochs, batch_size=8, checkpoint=folder, resume=True)
        subject.save(path)
        return subject

    fit(2)
    first = path.read_bytes()
    fit(2)
    assert path.read_bytes() == first
    longer = fit(3)
    assert_same(weights(longer), weights(run(({"freeze": freeze}, {}), epochs=3)))
    model = onnx.load(path)
    for name in {tensor.name for tensor in model.graph.initializer}:
        changed = onnx.ModelProto()
        changed.CopyFrom(model)
        tensor = next(tensor for tensor in changed.graph.initializer if tensor.name == name)
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) + np.float32(0.01), name))
        path.write_bytes(changed.SerializeToString())
        with raises_sentence("another_training", differences="the content of weights has changed", different="change"):
            fit(4)


def test_any_checkpoint_can_be_loaded(tmp_path):
    seen = {}

    class Notes(Callback):
        def on_epoch_end(self, state):
            seen[state.step] = (state.trainer.get_weights(), copied(state.trainer.executor.states))

    subject = trainer()
    subject.fit(data(20), epochs=4, batch_size=8, callbacks=[Notes()], checkpoint=tmp_path, keep=9)
    assert len(seen) == 4
    for step, (found, states) in seen.items():
        (path,) = tmp_path.glob(f"*-step-{step}.safetensors")
        subject.load_checkpoint(path)
        assert_same(subject.get_weights(), found)
        assert_same(copied(subject.executor.states), states)
    other = trainer(optimizer=onnxtrain.SGD(0.5))
    other.load_checkpoint(tmp_path)  # the newest
    assert_same(other.get_weights(), seen[max(seen)][0])
    with raises_sentence("checkpoint_of_other_shape", name="'layer1."):
        onnxtrain.Trainer(onnxtrain.examples.mlp((4, 9, 3)), loss="cross_entropy").load_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        subject.load_checkpoint(tmp_path / "nothing.json")


def test_a_training_resumes_from_any_checkpoint(tmp_path):
    expected = trainer()
    expected.fit(data(20), epochs=4, batch_size=8)
    trainer().fit(data(20), epochs=3, batch_size=8, checkpoint=tmp_path, keep=9)
    first = min(tmp_path.glob("*.json"))
    subject = trainer()
    history = subject.fit(data(20), epochs=4, batch_size=8, checkpoint=tmp_path, resume=first)
    assert [row["epoch"] for row in history.rows] == [1, 2, 3, 4]
    assert_same(subject.get_weights(), expected.get_weights())
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        subject.fit(data(20), checkpoint=tmp_path, resume="missing")
