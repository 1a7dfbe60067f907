from __future__ import annotations

import csv
import json
import re

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

import onnxtrain
from onnxtrain.runtime import native

FIT = ("fit", "model.onnx", "--data", "train.npz", "--loss", "softmax_cross_entropy", "--learning-rate", "0.02")


EXPORT_OF_FIT = ("export", "model.onnx", "--loss", "softmax_cross_entropy")


def weights(path) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}


def changed(files, name: str = "tuned.onnx") -> set[str]:
    before, after = weights(files / "model.onnx"), weights(files / name)
    return {name for name in before if not np.array_equal(before[name], after[name])}


def column(files, name: str) -> list[float]:
    with (files / "rows.csv").open() as file:
        return [float(row[name]) for row in csv.DictReader(file)]


def test_trains_and_changes_weights_only(files, success):
    success(*FIT, "--epochs", "30", "--output", "tuned.onnx", "--history", "rows.csv")
    losses = column(files, "loss")
    assert len(losses) == 30
    assert losses[-1] < 0.3 * losses[0]
    before, after = onnx.load(files / "model.onnx"), onnx.load(files / "tuned.onnx")
    assert changed(files) == {tensor.name for tensor in before.graph.initializer}
    for model in (before, after):
        for tensor in model.graph.initializer:
            tensor.raw_data = b""
    assert before.SerializeToString() == after.SerializeToString()


def test_equals_the_trainer(files, success):
    success(
        *("fit", "model.onnx", "--data", "train.npz", "--loss", "softmax_cross_entropy", "-o", "tuned.onnx"),
        *("--optimizer", "momentum", "--mode", "nesterov", "--alpha", "0.8", "--learning-rate", "0.1", "--seed", "7"),
        *("--schedule", "warmup(3)+cosine", "--epochs", "3", "--batch-size", "16", "--clip-norm", "0.5"),
    )
    optimizer = onnxtrain.Momentum(learning_rate=0.1, alpha=0.8, mode="nesterov")
    trainer = onnxtrain.Trainer(
        files / "model.onnx", loss="softmax_cross_entropy", optimizer=optimizer, clip_norm=0.5, seed=7
    )
    trainer.fit(files / "train.npz", epochs=3, batch_size=16, schedule="warmup(3)+cosine")
    for name, array in weights(files / "tuned.onnx").items():
        np.testing.assert_array_equal(array, trainer.parameters[name])


def test_the_same_seed_gives_the_same_bytes(files, success):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        success(*FIT, "--seed", seed, "--output", f"{name}.onnx")
    first, second, other = ((files / f"{name}.onnx").read_bytes() for name in "abc")
    assert first == second
    assert first != other


def test_no_shuffle(files, success):
    for seed in (1, 2):
        success(*FIT, "--seed", seed, "--no-shuffle", "--output", f"{seed}.onnx")
    assert (files / "1.onnx").read_bytes() == (files / "2.onnx").read_bytes()


@pytest.mark.parametrize(
    ("flags", "trained"),
    [
        (["--train", "layer2.*"], {"layer2.weight", "layer2.bias"}),
        (["--train", "layer1.weight", "--train", "layer2.bias"], {"layer1.weight", "layer2.bias"}),
        (["--freeze", "*.bias"], {"layer1.weight", "layer2.weight"}),
        (["--freeze", "layer1.*", "--freeze", "layer2.bias"], {"layer2.weight"}),
    ],
)
def test_train_and_freeze(files, success, flags, trained):
    success(*FIT, *flags, "--output", "tuned.onnx")
    assert changed(files) == trained


def test_features_of_frozen_layers_are_computed_once(files, success):
    for name, flags in (("plain", []), ("cached", ["--cache-features"])):
        success(*FIT, "--train", "layer2.*", "--epochs", "3", *flags, "--output", f"{name}.onnx")
    assert changed(files, "cached.onnx") == {"layer2.weight", "layer2.bias"}
    for name, array in weights(files / "cached.onnx").items():
        np.testing.assert_allclose(array, weights(files / "plain.onnx")[name], rtol=1e-3, atol=1e-5)


def test_default_output(files, success):
    result = success(*FIT)
    assert (files / "model-trained.onnx").is_file()
    assert "model-trained.onnx" in result.out


def test_over_the_model_itself(files, success):
    success(*FIT, "--in-place")
    onnxruntime.InferenceSession(files / "model.onnx", providers=["CPUExecutionProvider"])


def test_plain_lines_without_a_terminal(files, success):
    out = success(*FIT, "--validation", "test.npz", "--metrics", "accuracy", "--epochs", "10").out
    assert "\x1b" not in out
    assert out.startswith("model.onnx: trains 67 of 67 weights with Adam, learning rate 0.02\n")
    lines = re.findall(
        r"^epoch +(\d+)/10  loss [\d.e+-]+  validation loss [\d.e+-]+  validation accuracy [\d.]+  [\d,]+ examples/s$",
        out,
        re.MULTILINE,
    )
    assert [int(line) for line in lines] == list(range(1, 11))
    assert re.search(r"^ validation accuracy +[\d.]+ +[\d.]+ +\d+ *$", out, re.MULTILINE)
    assert re.search(r"^trained +20 steps, [\d.]+ s, [\d,]+ examples/s *$", out, re.MULTILINE)


def test_a_bar_on_a_terminal(files, success, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr("onnxtrain.training.callbacks.progress.Bar.interval", 0.0)
    out = success(*FIT, "--epochs", "2").out
    assert "━" in out
    assert re.search(r"epoch 2/2 .*loss [\d.]+  [\d,]+ examples/s", out)
    assert out.count("\x1b[?25l") == out.count("\x1b[?25h") == 1  # the cursor comes back


def test_lines_may_be_asked_for_in_a_terminal(files, success, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "━" in success(*FIT).out
    assert "━" not in success(*FIT, "--progress", "lines").out


def test_weights_of_examples_and_of_classes(files, success):
    labels = np.load(files / "train.npz")["label"]
    by_class = np.array([1.0, 0.5, 3.0])
    np.savetxt(files / "weights.txt", by_class[labels])
    np.save(files / "weights.npy", by_class[labels])
    one = ("--optimizer", "sgd", "--learning-rate", "0.1", "--batch-size", "100")
    for name in ("weights.txt", "weights.npy"):
        success(*FIT[:-2], *one, "--sample-weight", name, "-o", f"{name}.onnx")
    trainer = onnxtrain.Trainer(files / "model.onnx", loss="cross_entropy", optimizer=onnxtrain.SGD(0.1))
    trainer.fit(files / "train.npz", batch_size=100, sample_weight=by_class[labels], progress=False)
    for name, array in trainer.get_weights().items():
        np.testing.assert_array_equal(weights(files / "weights.txt.onnx")[name], array)
        np.testing.assert_array_equal(weights(files / "weights.npy.onnx")[name], array)
    flags = ("--class-weights", "1,0.5,3", "--label-smoothing", "0.1", "--chunk", "7")
    success(*FIT[:-2], *one, *flags, "-o", "classes.onnx")
    loss = "cross_entropy(class_weights=(1, 0.5, 3), label_smoothing=0.1, chunk=7)"
    trainer = onnxtrain.Trainer(files / "model.onnx", loss=loss, optimizer=onnxtrain.SGD(0.1))
    trainer.fit(files / "train.npz", batch_size=100, progress=False)
    for name, array in trainer.get_weights().items():
        np.testing.assert_array_equal(weights(files / "classes.onnx")[name], array)


def test_a_column_of_weights(files, success):
    data = np.load(files / "train.npz")
    trust = np.linspace(0, 2, len(data["label"]))
    np.savez(files / "weighted.npz", **data, trust=trust)
    one = ("fit", "model.onnx", "--data", "weighted.npz", "--target", "label", "--loss", "softmax_cross_entropy")
    success(
        *one,
        *("--optimizer", "sgd", "--learning-rate", "0.1"),
        *("--sample-weight", "trust"),
        "--validation",
        "0.25",
        "-o",
        "column.onnx",
    )
    trainer = onnxtrain.Trainer(files / "model.onnx", loss="cross_entropy", optimizer=onnxtrain.SGD(0.1))
    trainer.fit(files / "train.npz", sample_weight=trust, validation=0.25, progress=False)
    for name, array in trainer.get_weights().items():
        np.testing.assert_array_equal(weights(files / "column.onnx")[name], array)


def test_the_average_is_what_is_measured_and_saved(files, success):
    success(*FIT, "--ema", "0.9", "--validation", "test.npz", "--epochs", "3", "--history", "rows.csv", "-o", "e.onnx")
    found = onnxtrain.evaluate(files / "e.onnx", files / "test.npz", loss="cross_entropy")["loss"]
    assert column(files, "val_loss")[-1] == pytest.approx(found, rel=1e-5)


def test_the_best_model_is_kept(files, success):
    success(
        *(*FIT, "--validation", "test.npz", "--metrics", "accuracy", "--epochs", "4", "--history", "rows.csv"),
        *("--checkpoint", "kept", "--save-best", "val_loss"),
    )
    best = onnxtrain.Trainer(files / "kept" / "best.onnx", loss="cross_entropy").evaluate(files / "test.npz")["loss"]
    assert best == pytest.approx(min(column(files, "val_loss")), rel=1e-5)


def test_a_fixed_batch_is_freed(files, success, run):
    model = onnx.load(files / "model.onnx")
    for info in (*model.graph.input, *model.graph.output):
        info.type.tensor_type.shape.dim[0].dim_value = 1
    onnx.save(model, files / "model.onnx")
    found = run(*FIT, "--history", "rows.csv", "--batch-size", "20")
    fixed, hint = found.out, found.err
    assert hint.startswith("hint: The model has a fixed batch of 1 example, so that a step takes 1, not --batch-size")
    assert "as fit with --dynamic-batch does" in hint
    assert "; --accumulate 20 takes" in hint
    assert column(files, "step") == [60.0]
    freed = success(*FIT, "--dynamic-batch", "--history", "rows.csv").out
    assert column(files, "step") == [2.0]
    assert "model-trained.onnx" in fixed
    assert "model-trained.onnx" in freed
    saved = onnx.load(files / "model-trained.onnx")
    assert saved.graph.input == model.graph.input


def test_quiet(files, success):
    found = success(*FIT, "--epochs", "2", "--quiet")
    assert (found.out, found.err) == ("", "")
    assert (files / "model-trained.onnx").exists()


def test_quiet_hides_hints_and_warnings_but_no_error(files, run):
    assert run(*FIT, "--quiet", "--batch-norm", "train").err == ""
    failed = run(*FIT, "--quiet", "--train", "nothing*")
    assert (failed.code, failed.out) == (2, "")
    assert failed.err.startswith("error: ")


def test_lr_is_the_learning_rate(files, success):
    success(*("--lr" if flag == "--learning-rate" else flag for flag in FIT), "--history", "rows.csv")
    assert column(files, "learning_rate") == [float(FIT[FIT.index("--learning-rate") + 1])]


def test_tensorboard(files, success):
    pytest.importorskip("tensorboard")
    success(*FIT, "--tensorboard", "logs")
    assert list((files / "logs").glob("events.out.tfevents.*"))


@pytest.mark.parametrize(
    ("flags", "package"),
    [(["--tensorboard", "logs"], "tensorboard"), (["--mlflow"], "mlflow"), (["--wandb"], "wandb")],
)
def test_a_logger_without_its_package_is_one_sentence(files, run, monkeypatch, flags, package):
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None)
    found = run(*FIT, *flags)
    assert found.code == 2
    assert found.err == (f"error: --{package} needs the package {package}; install it: pip install {package}.\n")
    assert not (files / "model-trained.onnx").exists()


@pytest.mark.parametrize(("flag", "logger"), [("--mlflow", "MLflowLogger"), ("--wandb", "WandbLogger")])
def test_loggers_are_called(files, success, monkeypatch, flag, logger):
    from onnxtrain import callbacks
    from onnxtrain.training.callbacks import loggers

    seen = []

    class Fake(callbacks.Callback):
        writes_only = True

        def on_epoch_end(self, state):
            seen.append(state.epoch)

    monkeypatch.setattr(loggers, "needs", lambda *_: None)
    monkeypatch.setattr(callbacks, logger, Fake)
    success(*FIT, "--epochs", "2", flag)
    assert seen == [1, 2]


def test_holds_a_fraction_out(files, success):
    success(*FIT, "--validation", "0.2", "--epochs", "2", "--history", "rows.csv")
    assert column(files, "step") == [2.0, 4.0]  # 48 of 60 examples in batches of 32
    assert all(value > 0 for value in column(files, "val_loss"))


def test_history_as_json(files, success):
    success(*FIT, "--epochs", "2", "--history", "rows.json")
    rows = json.loads((files / "rows.json").read_text())
    assert [row["epoch"] for row in rows] == [1, 2]
    assert {"loss", "learning_rate", "step"} <= set(rows[0])


def test_early_stopping_keeps_the_best(files, success):
    noise = np.random.default_rng(0)
    points = noise.normal(size=(30, 4)).astype(np.float32)
    np.savez(files / "noise.npz", input=points, label=noise.integers(0, 3, 30))
    out = success(
        *FIT, "--epochs", "200", "--validation", "noise.npz", "--early-stopping", "3", "--history", "rows.csv",
        "--output", "tuned.onnx",
    ).out  # fmt: skip
    assert "Stopped early: val_loss has not improved for 3 epochs" in out
    losses = column(files, "val_loss")
    assert len(losses) < 200
    measured = json.loads(
        success("evaluate", "tuned.onnx", "--data", "noise.npz", "--loss", "softmax_cross_entropy", "--json").out
    )
    assert measured["loss"] == pytest.approx(min(losses), rel=1e-5)


def test_resume_equals_an_uninterrupted_training(files, success, run, monkeypatch):
    from onnxtrain.training.executors.executor import Executor

    options = (*FIT, "--epochs", "4", "--validation", "test.npz", "--metrics", "accuracy")
    success(*options, "--output", "whole.onnx")
    step_batch, steps = Executor.step_batch, []

    def step(self, batch, rate):
        steps.append(batch)
        if len(steps) == 6:
            raise KeyboardInterrupt
        return step_batch(self, batch, rate)

    monkeypatch.setattr(Executor, "step_batch", step)
    kept = ("--checkpoint", "kept", "--checkpoint-every", "1", "--output", "parts.onnx")
    assert run(*options, *kept).code == 130
    assert not (files / "parts.onnx").exists()
    success(*options, *kept, "--resume", "--quiet")  # progress flags may differ when a checkpoint resumes
    assert (files / "parts.onnx").read_bytes() == (files / "whole.onnx").read_bytes()


def test_resume_refuses_another_training(files, success, run):
    success(*FIT, "--checkpoint", "kept")
    result = run(*FIT, "--checkpoint", "kept", "--resume", "--epochs", "2", "--alpha", "0.5")
    assert result.code == 2
    assert "belongs to another training: attributes is" in result.err


def test_resume_accepts_by_name_what_differs(files, success, run):
    kept = ("--checkpoint", "kept", "--schedule", "cosine")
    success(*FIT, *kept)
    longer = ("fit", "model.onnx", "--data", "test.npz", *FIT[4:6], "--learning-rate", "0.03", *kept, "--epochs", "3")
    result = run(*longer, "--resume")
    assert result.code == 2
    assert "learning_rate is 0.02 there and 0.03 here" in result.err
    assert result.err.endswith("accept what differs by its name: --change 'data,epochs,learning_rate'.\n")
    assert run(*longer, "--resume", "--change", "data").code == 2
    success(*longer, "--resume", "--change", "data,epochs", "--change", "learning-rate")
    assert run(*longer, "--resume", "--change", "patience").code == 2
    result = run(*FIT, *kept, "--change", "epochs")
    assert (result.code, result.err.partition(";")[2]) == (2, " it needs --resume, too.\n")


@pytest.mark.parametrize("resume", [(), ("--resume",)])
def test_a_checkpoint_folder_without_a_name(files, run, resume):
    before = sorted(path.name for path in files.iterdir())
    result = run(*FIT, "--checkpoint", "", *resume)
    assert result.code == 2
    assert result.err == "error: --checkpoint is empty; give it a value, or leave it out.\n"
    assert sorted(path.name for path in files.iterdir()) == before


def test_a_checkpoint_folder_that_is_a_loop_of_links(files, run):
    (files / "kept").symlink_to("kept")
    result = run(*FIT, "--checkpoint", "kept")
    assert result.code == 2
    assert "error: checkpoints cannot be written to 'kept': " in result.err


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(files, success, run):
    success(*FIT, "--epochs", "3", "--output", "whole.onnx")
    success(*FIT, "--epochs", "2", "--checkpoint", "kept")
    newest = sorted((files / "kept").glob("*.safetensors"))[-1]
    newest.write_bytes(newest.read_bytes()[:-1])
    result = run(*FIT, "--epochs", "3", "--checkpoint", "kept", "--resume", "--output", "parts.onnx")
    assert result.code == 0
    assert (files / "parts.onnx").read_bytes() == (files / "whole.onnx").read_bytes()


def test_epochs_are_counted_alike_in_every_line(files, success):
    noise = np.random.default_rng(0)
    points = noise.normal(size=(30, 4)).astype(np.float32)
    np.savez(files / "noise.npz", input=points, label=noise.integers(0, 3, 30))
    out = success(*FIT, "--epochs", "200", "--validation", "noise.npz", "--early-stopping", "3").out
    lines = re.findall(r"^epoch +(\d+)/200 .*  validation loss ([\d.]+)", out, re.MULTILINE)
    best = min(lines, key=lambda line: float(line[1]))[0]
    assert re.search(rf"best [\d.]+ in epoch {best}\)", out)
    assert re.search(rf"^ validation loss +[\d.]+ +[\d.]+ +{best} *$", out, re.MULTILINE)


def test_hints_name_flags(files, success):
    onnx.save(onnxtrain.examples.small_resnet(width=4), files / "resnet.onnx")
    images = np.random.default_rng(0).normal(size=(8, 3, 8, 8)).astype(np.float32)
    np.savez(files / "images.npz", image=images, label=np.arange(8))
    resnet = ("fit", "resnet.onnx", "--data", "images.npz", "--loss", "softmax_cross_entropy", "--output", "tuned.onnx")
    frozen = success(*resnet).out
    assert "hint: " in frozen
    assert "--batch-norm train trains with batch statistics" in frozen
    trained = success(*resnet, "--batch-norm", "train").out
    assert "hint: " not in trained
    before, after = weights(files / "resnet.onnx"), weights(files / "tuned.onnx")
    assert not np.array_equal(before["stem.norm.mean"], after["stem.norm.mean"])


def test_accumulation_equals_the_large_batch(files, success):
    success(*FIT, "--epochs", "3", "--batch-size", "20", "--output", "whole.onnx")
    success(*FIT, "--epochs", "3", "--batch-size", "20", "--accumulate", "4", "--output", "parts.onnx")
    whole, parts = weights(files / "whole.onnx"), weights(files / "parts.onnx")
    for name, array in whole.items():
        np.testing.assert_allclose(parts[name], array, rtol=2e-4, atol=1e-6)


def test_groups_and_the_moving_average(files, success):
    success(*FIT, "--groups", "layer1.*, lr_scale=0", "--groups", "*.bias, lr_scale=0.5", "--output", "last.onnx")
    before, last = weights(files / "model.onnx"), weights(files / "last.onnx")
    changed = {name for name, array in last.items() if not np.array_equal(array, before[name])}
    assert changed == {name for name in last if not name.startswith("layer1.")}
    success(*FIT, "--ema", "0.9", "--output", "average.onnx")
    success(*FIT, "--output", "whole.onnx")
    average, whole = weights(files / "average.onnx"), weights(files / "whole.onnx")
    assert all(not np.array_equal(array, whole[name]) for name, array in average.items())
    success(*EXPORT_OF_FIT, "--ema", "0.9", "--groups", "*.bias, lr_scale=0.5", "--step-graph", "step.onnx")
    assert "layer1.weight/average" in {value.name for value in onnx.load(files / "step.onnx").graph.input}


def test_threads_are_passed_on(files, success, monkeypatch):
    seen = []
    build = onnxtrain.RuntimeOptions.session_options

    def spy(self, **options):
        seen.append(self.threads)
        return build(self, **options)

    monkeypatch.setattr(onnxtrain.RuntimeOptions, "session_options", spy)
    success(*FIT, "--threads", "1")
    assert set(seen) == {1}


def test_a_new_head_is_trained(files, success, run):
    success(*FIT, "--new-head", "12", "--train", "head.*", "--seed", "3", "-o", "tuned.onnx")
    edited = onnxtrain.replace_head(files / "model.onnx", classes=12, seed=3)
    before = {tensor.name: numpy_helper.to_array(tensor) for tensor in edited.graph.initializer}
    after = weights(files / "tuned.onnx")
    assert sorted(before) == sorted(after)
    assert {name for name in after if not np.array_equal(after[name], before[name])} == {"head.weight", "head.bias"}
    result = run(*FIT, "--new-head", "0", "-o", "other.onnx")
    assert result.code == 2
    assert "--new-head is 0" in result.err or "classes is 0; it must be an integer of at least 1" in result.err


def test_products_in_bfloat16(files, run, monkeypatch):
    monkeypatch.setattr(native, "multiplies_bfloat16", lambda: True)
    result = run(*FIT, "--epochs", "2", "--output", "tuned.onnx", "--precision", "bfloat16")
    assert result.code == 0, result.err
    assert changed(files)
    monkeypatch.setattr(native, "multiplies_bfloat16", lambda: False)
    result = run(*FIT, "--output", "other.onnx", "--precision", "bfloat16")
    assert result.code == 2
    assert "--precision bfloat16 needs a CPU with AVX512-BF16; this one has " in " ".join(result.err.split())
    assert not (files / "other.onnx").exists()


def test_a_portable_step_graph_has_no_products_in_bfloat16(files, run):
    result = run(*EXPORT_OF_FIT, "--step-graph", "step.onnx", "--precision", "bfloat16")
    assert result.code == 2
    assert "asks for --precision bfloat16, which the native kernels compute" in " ".join(result.err.split())
    assert not (files / "step.onnx").exists()
