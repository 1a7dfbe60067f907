"""`cache_features`: the frozen layers run once, and the training is the same as without."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain.errors import OptionError
from onnxtrain.runtime.step import StepSession
from onnxtrain.training import features as cached_features
from onnxtrain.training.executors.executor import Executor
from onnxtrain.training.features import divide
from sentences import raises_sentence

RNG = np.random.default_rng(0)
IMAGES = RNG.random((30, 3, 16, 16), np.float32)
LABELS = np.arange(30) % 4


def resnet() -> onnx.ModelProto:
    return onnxtrain.replace_head(onnxtrain.examples.small_resnet(), classes=4)


def head_trainer(**options: Any) -> onnxtrain.Trainer:
    options = {"optimizer": "adam(lr=0.01)", "train": "head.*", "loss": "cross_entropy"} | options
    return onnxtrain.Trainer(resnet(), **options)


def assert_same(
    trainers: list[onnxtrain.Trainer], *data: Any, rtol: float = 2e-4, **options: Any
) -> list[dict[str, float]]:
    """Train without and with features; losses, metrics and weights are equal to rounding."""
    plain, cached = (
        trainer.fit(*data, progress=False, cache_features=wanted, **options).rows
        for trainer, wanted in zip(trainers, (False, True), strict=True)
    )
    assert len(plain) == len(cached)
    for one, other in zip(plain, cached, strict=True):
        assert one.keys() == other.keys()
        assert np.allclose(list(one.values()), list(other.values()), rtol=rtol, atol=1e-5)
    for name, array in trainers[0].parameters.items():
        np.testing.assert_allclose(trainers[1].parameters[name], array, rtol=1e-3, atol=1e-4)
    return cached


def test_losses_metrics_and_the_trained_file_are_those_of_the_whole_model() -> None:
    """Shuffled, with a last batch of two examples, weights of examples, and validation."""
    trainers = [head_trainer() for _ in range(2)]
    weights = RNG.random(30).astype(np.float32)
    rows = assert_same(
        trainers,
        IMAGES,
        LABELS,
        sample_weight=weights,
        epochs=3,
        batch_size=7,
        validation=(IMAGES[:9], LABELS[:9]),
        metrics="accuracy",
        schedule="cosine",
    )
    assert rows[-1]["loss"] < rows[0]["loss"]
    saved, given = trainers[1].model(), resnet()
    onnx.checker.check_model(saved)
    assert [node.op_type for node in saved.graph.node] == [node.op_type for node in given.graph.node]
    frozen = {tensor.name: tensor for tensor in given.graph.initializer if not tensor.name.startswith("head.")}
    assert frozen
    assert all(tensor == frozen[tensor.name] for tensor in saved.graph.initializer if tensor.name in frozen)
    before = [trainer.train_step(IMAGES[:8], LABELS[:8]) for trainer in trainers]  # steps take images again
    assert before[0] == pytest.approx(before[1], rel=2e-4)


@pytest.mark.thorough
def test_micro_batches_averages_masks_and_clipping() -> None:
    mask = {"head.weight": np.random.default_rng(1).random(head_trainer().parameters["head.weight"].shape) < 0.5}
    trainers = [head_trainer(accumulate=2, ema=0.9, masks=mask, clip_norm=0.1) for _ in range(2)]
    assert_same(trainers, IMAGES, LABELS, epochs=2, batch_size=8, validation=0.2)
    assert not trainers[1].parameters["head.weight"][~mask["head.weight"]].any()


def test_masks_that_a_callback_sets_hold_in_the_steps_on_features() -> None:
    trainer = head_trainer()
    mask = np.ones_like(trainer.parameters["head.weight"], dtype=bool)
    mask[0] = False

    class Prune(onnxtrain.callbacks.Callback):
        def on_epoch_end(self, state: Any) -> None:
            if state.epoch == 1:
                trainer.set_masks({"head.weight": mask})

    trainer.fit(IMAGES, LABELS, epochs=3, batch_size=8, callbacks=[Prune()], progress=False, cache_features=True)
    assert not trainer.parameters["head.weight"][0].any()
    assert trainer.parameters["head.weight"][1].any()


@pytest.mark.thorough
def test_a_block_in_the_middle_is_trained_with_layers_behind_it() -> None:
    """Two features: a residual connection goes past the first trained layer; batch norm behind it is in training."""
    names = [name for name in onnxtrain.Trainer(resnet(), loss="cross_entropy").parameters if "head" not in name]
    last = [name for name in names if name.split(".")[0] == names[-1].split(".")[0]] or names[-2:]
    trainers = [head_trainer(train=["head.*", *last]) for _ in range(2)]
    divided = divide(trainers[0].objective)
    assert len(list(divided.trained.model.graph)) < len(list(trainers[0].objective.model.graph)) / 1.5
    assert_same(trainers, IMAGES, LABELS, epochs=2, batch_size=8)


def test_a_fixed_batch_size_is_padded() -> None:
    model = onnxtrain.examples.mlp((4, 16, 8, 3))
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 4
    model.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 4
    last = [tensor.name for tensor in model.graph.initializer][-2:]
    x, y = RNG.normal(size=(10, 4)).astype(np.float32), np.arange(10) % 3
    trainers = [onnxtrain.Trainer(model, loss="cross_entropy", train=last) for _ in range(2)]
    assert_same(trainers, x, y, epochs=2)


def test_a_head_whose_prediction_is_a_feature_keeps_its_loss_and_its_name() -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 18]>
        f (float[n, 2] x, float s) => (float[n, 2] z, float[n, 2] u)
        <float[2, 2] a = {1.0, 2.0, 3.0, 4.0}, float[2, 2] b = {1.0, 2.0, 3.0, 5.0}> {
            h = MatMul(x, a)
            u = Mul(h, s)
            z = MatMul(u, b)
        }""")
    x, y = RNG.normal(size=(10, 2)).astype(np.float32), np.arange(10) % 2
    losses = {"z": "cross_entropy", "u": "mean_squared_error"}
    trainers = [onnxtrain.Trainer(model, loss=losses, train="b") for _ in range(2)]
    rows = assert_same(trainers, ({"x": x, "s": np.float32(0.5)}, {"z": y, "u": x}), epochs=2, batch_size=4)
    assert rows[0]["u_loss"] > 0


def test_the_trained_layers_may_read_several_features() -> None:
    """Two features: the hidden states, and the mask of the attention [n, 1, 1, tokens]."""
    model = onnxtrain.examples.small_transformer()
    tokens, labels = RNG.integers(1, 20, (10, 6)), np.arange(10) % 4
    data = {"input_ids": tokens, "attention_mask": (np.arange(6) < RNG.integers(2, 7, (10, 1))).astype(np.int64)}
    trainers = [onnxtrain.Trainer(model, loss="cross_entropy", train="*layer1*") for _ in range(2)]
    sources = divide(trainers[0].objective).sources
    assert len(sources) > 1
    assert_same(trainers, data, labels, epochs=2, batch_size=4)


def test_the_steps_run_no_frozen_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = head_trainer()
    divided = divide(trainer.objective)
    assert not {"Conv", "BatchNormalization"} & {node.op_type for node in divided.trained.model.graph}
    assert {str(value.name) for value in divided.trained.model.graph.inputs} == set(divided.sources)
    fed: list[set[str]] = []
    step = Executor.step

    def recorded(self: Executor, feeds: dict[str, np.ndarray], rate: float) -> float:
        fed.append(set(feeds))
        return step(self, feeds, rate)

    runs: list[int] = []
    run = StepSession.run

    def counted(self: StepSession, feeds: dict[str, np.ndarray], *rest: Any, **more: Any) -> Any:
        runs.extend([len(feeds["image"])] if "image" in feeds else [])
        return run(self, feeds, *rest, **more)

    monkeypatch.setattr(Executor, "step", recorded)
    monkeypatch.setattr(StepSession, "run", counted)
    assert trainer.objective.inputs[0].name == "image"
    trainer.fit(IMAGES, LABELS, epochs=4, batch_size=10, progress=False, cache_features=True)
    assert fed == [{*divided.sources, trainer.objective.names.target}] * 12
    assert runs == [10, 5, 10, 10]  # each example once, and half of the first batch again, alone


def test_a_checkpoint_goes_on_with_features_and_without(tmp_path: Any) -> None:
    options: dict[str, Any] = {"batch_size": 8, "progress": False}
    whole = head_trainer()
    whole.fit(IMAGES, LABELS, epochs=3, **options)
    for wanted in (False, True):
        folder = tmp_path / str(wanted)
        head_trainer().fit(IMAGES, LABELS, epochs=1, checkpoint=folder, cache_features=True, **options)
        trainer = head_trainer()
        trainer.fit(
            IMAGES,
            LABELS,
            epochs=3,
            checkpoint=folder,
            resume=True,
            cache_features=wanted,
            run=folder / "run",
            **options,
        )
        for name, array in whole.parameters.items():
            np.testing.assert_allclose(trainer.parameters[name], array, rtol=1e-3, atol=1e-4)
        assert (folder / "run" / "report.html").exists()


def test_hints_say_the_memory_of_the_features() -> None:
    trainer = head_trainer()
    trainer.fit(IMAGES, LABELS, progress=False, cache_features=True)
    (name,) = divide(trainer.objective).sources.values()
    assert trainer.hints[-1] == f"The features of 30 examples ({name}) take 0.0 MiB of memory."


def fit(trainer: onnxtrain.Trainer, data: Any = (IMAGES, LABELS), **options: Any) -> None:
    trainer.fit(data, progress=False, cache_features=True, batch_size=8, **options)


def test_what_changes_the_features_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with raises_sentence("no_frozen_layer_to_cache", what="cache_features", got="stem.conv.weight"):
        fit(head_trainer(train=None))
    with raises_sentence("cached_layer_varies", got="BatchNormalization"):
        fit(head_trainer(batch_norm="train"))
    with raises_sentence("cached_and_augmented"):
        fit(head_trainer(), augment=lambda inputs, rng: inputs)
    batches = [(IMAGES[:8], LABELS[:8])]
    scaled = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 18]>
        f (float[n, 2] x, float s) => (float[n, 2] z)
        <float[2, 2] a = {1.0, 2.0, 3.0, 4.0}, float[2, 2] b = {1.0, 2.0, 3.0, 5.0}> {
            h = MatMul(x, a)
            v = MatMul(h, b)
            z = Mul(v, s)
        }""")
    data = {"x": np.ones((10, 2), np.float32), "s": np.float32(2)}, np.arange(10) % 2
    with raises_sentence("cached_input_without_examples", what="cache_features", got="s"):
        fit(onnxtrain.Trainer(scaled, loss="cross_entropy", train="b"), data)
    with pytest.raises(OptionError, match="does not say how many examples it has"):
        fit(head_trainer(), batches)
    monkeypatch.setattr(cached_features, "free_memory", lambda: 100)
    with raises_sentence("no_memory_to_cache", what="cache_features", needed="0.0 MiB", free="0.0 MiB"):
        fit(head_trainer())


def test_active_dropout_is_refused_before_the_trained_part_and_fine_behind() -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 18]>
        f (float[n, 2] x) => (float[n, 2] z)
        <float[2, 2] a = {1.0, 2.0, 3.0, 4.0}, float[2, 2] b = {1.0, 2.0, 3.0, 5.0},
         float[2, 2] c = {1.0, 0.0, 2.0, 5.0}> {
            h = MatMul(x, a)
            r = MatMul(h, b)
            d = Dropout(r)
            z = MatMul(d, c)
        }""")
    x, y = RNG.normal(size=(10, 2)).astype(np.float32), np.arange(10) % 2

    def trainer(train: list[str]) -> onnxtrain.Trainer:
        return onnxtrain.Trainer(model, loss="cross_entropy", train=train, dropout=True)

    with raises_sentence("cached_layer_varies", got="Dropout"):
        fit(trainer(["c"]), (x, y))
    assert_same([trainer(["b", "c"]) for _ in range(2)], x, y, epochs=2, batch_size=4)  # the same masks, too


def test_examples_that_change_and_layers_that_mix_examples_are_refused() -> None:
    class Random:
        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
            return np.random.default_rng().random((3, 16, 16), np.float32), index % 4

    with raises_sentence("cached_data_varies", what="image"):
        fit(head_trainer(), Random())
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 18]>
        f (float[n, 2] x) => (float[n, 2] z)
        <float[2, 2] a = {1.0, 2.0, 3.0, 4.0}, float[2, 2] b = {1.0, 2.0, 3.0, 5.0}, int64[1] axes = {0}> {
            h = MatMul(x, a)
            m = ReduceMean(h, axes)
            c = Sub(h, m)
            z = MatMul(c, b)
        }""")
    x, y = RNG.normal(size=(10, 2)).astype(np.float32), np.arange(10) % 2
    with raises_sentence("cached_features_of_batch", what="c/features"):
        fit(onnxtrain.Trainer(model, loss="cross_entropy", train="b"), (x, y))


def test_batches_of_features_are_those_of_the_data() -> None:
    """The same examples in every batch of every epoch as without features."""
    trainer = head_trainer()
    dataset = trainer.open_data((IMAGES, LABELS))
    features = trainer._features(dataset, 8, None)

    def targets(batches: Any) -> list[list[int]]:
        return [batch.targets.tolist() for batch in batches]

    for epoch in range(2):
        own, given = (data.batches(8, shuffle=True, seed=3, epoch=epoch) for data in (features, dataset))
        assert targets(own) == targets(given)


def test_features_of_different_lengths_and_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lengths:
        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> dict[str, Any]:
            tokens = np.ones(3 if index < 36 else 5, np.int64)
            return {"input_ids": tokens, "attention_mask": tokens, "label": index % 4}

    trainer = onnxtrain.Trainer(onnxtrain.examples.small_transformer(), loss="cross_entropy", train="*layer1*")
    with raises_sentence(
        "cached_shapes_differ", what="LayerNormalization_44/features", got=(5, 32), wanted=(3, 32), example=36
    ):
        trainer.fit(Lengths(), batch_size=4, shuffle=False, progress=False, cache_features=True)
    trainer = head_trainer()
    dataset = trainer.open_data((IMAGES, LABELS))
    monkeypatch.setattr(onnxtrain.Trainer, "_communicator", SimpleNamespace(size=2, rank=0))
    with pytest.raises(OptionError, match="in one process, but 2 train together"):
        trainer._features(dataset, 8, None)
