from __future__ import annotations

import json

import numpy as np
import onnx
import onnxruntime
import pytest
from safetensors.numpy import load_file

import onnxtrain


def logits(path, points) -> np.ndarray:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, {"input": points})[0]


def test_evaluate_prints_the_loss_and_metrics(files, success):
    command = ("evaluate", "model.onnx", "--data", "test.npz", "--loss", "softmax_cross_entropy")
    result = success(*command, "--metrics", "accuracy", "--metrics", "softmax_cross_entropy", "--json")
    measured = json.loads(result.out)
    data = np.load(files / "test.npz")
    scores = logits(files / "model.onnx", data["input"]).astype(np.float64)
    right = scores.argmax(1) == data["label"]
    picked = scores[np.arange(30), data["label"]] - np.log(np.exp(scores).sum(1))
    assert measured["accuracy"] == pytest.approx(right.mean())
    assert measured["loss"] == pytest.approx(-picked.mean(), rel=1e-5)
    assert measured["softmax_cross_entropy"] == pytest.approx(measured["loss"], rel=1e-5)
    table = success(*command, "--metrics", "accuracy", "--batch-size", "7").out
    assert f"{measured['accuracy']:.4f}" in table
    assert f"{measured['loss']:.4f}" in table


def test_evaluate_takes_one_hot_targets(files, success):
    data = np.load(files / "test.npz")
    np.savez(files / "hot.npz", input=data["input"], label=np.eye(3, dtype=np.float32)[data["label"]])
    command = ("--loss", "softmax_cross_entropy", "--json")
    indices = json.loads(success("evaluate", "model.onnx", "--data", "test.npz", *command).out)
    vectors = json.loads(success("evaluate", "model.onnx", "--data", "hot.npz", *command).out)
    assert vectors["loss"] == pytest.approx(indices["loss"], rel=1e-5)


def test_the_arguments_of_a_loss_are_text_or_flags(files, success):
    data = np.load(files / "test.npz")
    labels = np.where(np.arange(30) < 10, -7, data["label"])
    np.savez(files / "ignoring.npz", input=data["input"], label=labels)
    np.savez(files / "kept.npz", input=data["input"][10:], label=labels[10:])

    def measured(source: str, *loss: str) -> dict[str, float]:
        return json.loads(success("evaluate", "model.onnx", "--data", source, "--loss", *loss, "--json").out)

    expected = measured("kept.npz", "softmax_cross_entropy")
    for loss in (
        ("softmax_cross_entropy(ignore_index=-7, axis=1)",),
        ("softmax_cross_entropy", "--ignore-index", "-7", "--axis", "-1"),
        ("softmax_cross_entropy(axis=-1)", "--ignore-index", "-7"),
    ):
        assert measured("ignoring.npz", *loss) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("command", ["fit", "evaluate", "prune"])
def test_targets_of_any_numbers_are_allowed_by_a_flag(files, success, command):
    data = np.load(files / "train.npz")
    counts = np.eye(3, dtype=np.float32)[data["label"]] * 6
    np.savez(files / "counts.npz", input=data["input"], label=counts)
    more = ("--sparsity", "0.5", "--epochs", "1") if command == "prune" else ()
    success(
        *(command, "model.onnx", "--data", "counts.npz", "--loss", "softmax_cross_entropy", "--no-check-targets", *more)
    )


def test_an_export_has_the_arguments_of_the_loss(files, success):
    flags = ("--loss", "softmax_cross_entropy", "--ignore-index", "-7", "--training-model", "training.onnx")
    success("export", "model.onnx", *flags)
    nodes = onnx.load(files / "training.onnx").training_info[0].algorithm.node
    loss = next(node for node in nodes if node.op_type == "SoftmaxCrossEntropyLoss")
    assert next(item.i for item in loss.attribute if item.name == "ignore_index") == -7


def test_evaluate_counts_every_binary_column(files, success):
    data = np.load(files / "test.npz")
    scores = logits(files / "model.onnx", data["input"])
    truth = (np.random.default_rng(0).random(scores.shape) > 0.5).astype(np.float32)
    np.savez(files / "binary.npz", input=data["input"], label=truth)
    command = ("evaluate", "model.onnx", "--data", "binary.npz", "--loss", "binary_cross_entropy")
    found = json.loads(success(*command, "--metrics", "accuracy", "--json").out)
    assert found["accuracy"] == pytest.approx(np.mean((scores > 0) == truth))


def test_evaluate_and_predict_need_no_gradient(files, success):
    model = onnx.load(files / "model.onnx")
    model.graph.node[-1].output[0] = "raw"
    model.graph.node.append(onnx.helper.make_node("Round", ["raw"], ["logits"]))
    onnx.save(model, files / "rounded.onnx")
    out = success("evaluate", "rounded.onnx", "--data", "test.npz", "--loss", "softmax_cross_entropy", "--json").out
    assert json.loads(out)["loss"] > 0
    success("predict", "rounded.onnx", "--data", "test.npz", "--output", "p.npy")
    np.testing.assert_array_equal(np.load(files / "p.npy") % 1, 0)


def test_accuracy_reads_a_single_logit(files, success):
    """A logit of 0.2 says yes: a probability of 0.55."""
    onnx.save(onnxtrain.examples.mlp((4, 1)), files / "yes.onnx")
    points = np.load(files / "test.npz")["input"]
    scores = onnxruntime.InferenceSession(files / "yes.onnx").run(None, {"input": points})[0]
    assert ((scores > 0) & (scores < 0.5)).any()
    np.savez(files / "yes.npz", input=points, label=(scores > 0).astype(np.float32))
    command = ("evaluate", "yes.onnx", "--data", "yes.npz", "--loss", "binary_cross_entropy", "--metrics", "accuracy")
    assert json.loads(success(*command, "--json").out)["accuracy"] == 1.0


@pytest.mark.parametrize("batch_size", [7, 256])
def test_predict(files, success, batch_size):
    success("predict", "model.onnx", "--data", "test.npz", "--output", "p.npz", "--batch-size", batch_size)
    expected = logits(files / "model.onnx", np.load(files / "test.npz")["input"])
    with np.load(files / "p.npz") as found:
        assert list(found) == ["logits"]
        np.testing.assert_allclose(found["logits"], expected, rtol=1e-5, atol=1e-6)


def test_predict_takes_a_bare_array(files, success):
    points = np.load(files / "test.npz")["input"]
    np.save(files / "points.npy", points)
    success("predict", "model.onnx", "--data", "points.npy", "--output", "p.npy")
    np.testing.assert_allclose(np.load(files / "p.npy"), logits(files / "model.onnx", points), rtol=1e-5, atol=1e-6)


def test_predict_loses_no_example_of_a_fixed_batch(files, success):
    model = onnx.load(files / "model.onnx")
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 8
    onnx.save(model, files / "fixed.onnx")
    success("predict", "fixed.onnx", "--data", "test.npz", "--output", "p.npy")
    expected = logits(files / "model.onnx", np.load(files / "test.npz")["input"])
    np.testing.assert_allclose(np.load(files / "p.npy"), expected, rtol=1e-5, atol=1e-6)


def test_predict_writes_several_outputs_to_one_file(files, success, run):
    model = onnx.load(files / "model.onnx")
    model.graph.node.append(onnx.helper.make_node("Softmax", ["logits"], ["probabilities"]))
    model.graph.output.append(onnx.helper.make_tensor_value_info("probabilities", 1, ["N", 3]))
    onnx.save(model, files / "two.onnx")
    success("predict", "two.onnx", "--data", "test.npz", "--output", "p.npz")
    with np.load(files / "p.npz") as found:
        assert set(found) == {"logits", "probabilities"}
        np.testing.assert_allclose(found["probabilities"].sum(1), 1, rtol=1e-5)
    result = run("predict", "two.onnx", "--data", "test.npz", "--output", "p.npy")
    assert result.code == 2
    assert "the model has 2 outputs (logits, probabilities); give a .npz file" in result.err


def test_inspect_prints_the_table(files, success):
    out = success("inspect", "model.onnx", "--freeze", "layer1.*").out
    assert "opset 18" in out
    assert "input: float [N, 4]" in out
    assert "logits: float [N, 3]" in out
    assert "27 of 67 elements" in out
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.strip().startswith("layer")}
    assert rows["layer1.weight"] == ["[8,", "4]", "float", "32", "no", "frozen"]
    assert rows["layer2.weight"] == ["[3,", "8]", "float", "24", "yes"]
    assert [line.split() for line in out.splitlines() if line.strip().startswith("Gemm")] == [["Gemm", "2", "yes"]]


def test_inspect_as_json(files, success):
    found = json.loads(success("inspect", "model.onnx", "--json").out)
    assert found["trainable_size"] == 67
    assert [row["name"] for row in found["initializers"]] == [
        *("layer1.weight", "layer1.bias", "layer2.weight", "layer2.bias")
    ]
    assert found["inputs"] == [{"name": "input", "dtype": "float", "shape": ["N", 4]}]
    assert {row["name"]: row["gradient"] for row in found["operators"]} == {"Gemm": "rule", "Relu": "rule"}


def test_inspect_names_what_has_no_gradient(files, success):
    model = onnx.load(files / "model.onnx")
    model.opset_import.append(onnx.helper.make_opsetid("my.domain", 1))
    model.graph.node[1].domain = "my.domain"
    model.graph.node[1].op_type = "Mystery"
    onnx.save(model, files / "strange.onnx")
    out = success("inspect", "strange.onnx").out
    assert [line.split() for line in out.splitlines() if line.strip().startswith("my.domain")] == [
        ["my.domain::Mystery", "1", "MISSING"]
    ]
    assert "Without a gradient between parameters and outputs: my.domain::Mystery node" in out
    assert "register_gradient" in out


def test_inspect_gives_hints_in_flags(files, success):
    onnx.save(onnxtrain.examples.small_resnet(width=4), files / "resnet.onnx")
    out = success("inspect", "resnet.onnx").out
    assert "running mean of batch normalization" in out
    assert "--batch-norm train" in out
    assert "batch_norm=" not in out


def test_names_with_brackets_are_printed_as_they_are(files, success):
    model = onnx.load(files / "model.onnx")
    model.graph.initializer[0].name = model.graph.node[0].input[1] = "[bold]w[/bold]"
    onnx.save(model, files / "model.onnx")
    assert "[bold]w[/bold]" in success("inspect", "model.onnx").out


EXPORT = (
    "export",
    "model.onnx",
    "--loss",
    "softmax_cross_entropy",
    "--optimizer",
    "momentum",
    "--learning-rate",
    "0.1",
)


def test_export(files, success):
    out = success(
        *EXPORT, "--training-model", "training.onnx", "--step-graph", "step.onnx", "--states", "states.safetensors"
    ).out
    assert "input, target, learning_rate, and 9 states" in out
    assert "loss, and each state as NAME_new" in out
    training = onnx.load(files / "training.onnx")
    assert len(training.training_info) == 1
    step = onnx.load(files / "step.onnx")
    assert {entry.domain for entry in step.opset_import} == {""}
    states = load_file(files / "states.safetensors")
    assert states["layer1.weight"].shape == (8, 4)
    assert states["T"] == 0


def test_an_exported_step_graph_trains_like_fit(files, success):
    """A bare onnxruntime session steps to the weights that fit finds."""
    success(*EXPORT, "--step-graph", "step.onnx", "--states", "states.safetensors")
    session = onnxruntime.InferenceSession(files / "step.onnx", providers=["CPUExecutionProvider"])
    states = load_file(files / "states.safetensors")
    data = np.load(files / "train.npz")
    names = [output.name for output in session.get_outputs()]
    for start in range(0, 60, 20):
        rows = slice(start, start + 20)
        feeds = {
            "input": data["input"][rows],
            "target": data["label"][rows],
            "learning_rate": np.array(0.1, np.float32),
        }
        results = dict(zip(names, session.run(None, {**feeds, **states}), strict=True))
        states = {name: results[f"{name}_new"] for name in states}
    success(
        *("fit", "model.onnx", "--data", "train.npz", "--loss", "softmax_cross_entropy", "--optimizer", "momentum"),
        *("--learning-rate", "0.1", "--batch-size", "20", "--no-shuffle", "--output", "tuned.onnx"),
    )
    for tensor in onnx.load(files / "tuned.onnx").graph.initializer:
        found = onnx.numpy_helper.to_array(tensor)
        np.testing.assert_allclose(states[tensor.name], found, rtol=1e-5, atol=1e-6)


def test_export_lowers_a_training_model(files, success, run):
    success(*EXPORT, "--training-model", "training.onnx", "--step-graph", "one.onnx")
    success("export", "training.onnx", "--step-graph", "two.onnx")
    assert (files / "one.onnx").read_bytes() == (files / "two.onnx").read_bytes()
    result = run("export", "training.onnx", "--loss", "huber", "--step-graph", "three.onnx")
    assert result.code == 2
    assert "'training.onnx' is a training model with its own loss; leave --loss out" in result.err


def test_export_with_entries(files, success, run):
    success(*EXPORT, "--accumulate", "--training-model", "training.onnx")
    assert len(onnx.load(files / "training.onnx").training_info) == 2
    result = run("export", "training.onnx", "--step-graph", "step.onnx")
    assert result.code == 2
    assert "choose one with --entry 0 to 1" in result.err
    success("export", "training.onnx", "--entry", "1", "--step-graph", "apply.onnx")
    assert "accumulated_loss" in {value.name for value in onnx.load(files / "apply.onnx").graph.input}


def test_export_keeps_kernels_as_nodes(files, success):
    success(*EXPORT, "--kernels", "--step-graph", "step.onnx")
    kinds = [(node.domain, node.op_type) for node in onnx.load(files / "step.onnx").graph.node]
    assert ("ai.onnx.preview.training", "Momentum") in kinds


def test_metrics_are_listed_with_commas(files, success, run):
    command = ("evaluate", "model.onnx", "--data", "test.npz", "--loss", "softmax_cross_entropy")
    found = json.loads(
        success(*command, "--metrics", "accuracy,f1,confusion_matrix", "--metrics", "top_k(2)", "--json").out
    )
    assert list(found) == ["loss", "accuracy", "f1", "confusion_matrix", "top_k(2)"]
    assert np.sum(found["confusion_matrix"]) == 30
    assert np.trace(found["confusion_matrix"]) / 30 == pytest.approx(found["accuracy"])
    assert f"{found['confusion_matrix'][0][0]}" in success(*command, "--metrics", "confusion_matrix").out
    wrong = run(*command, "--metrics", "accuracy,f1_scor")
    assert wrong.code == 2
    assert "The nearest is 'f1_score'." in wrong.err
    training = ("--data", "train.npz", "--loss", "softmax_cross_entropy", "--validation", "0.2", "--output", "t.onnx")
    success("fit", "model.onnx", *training, "--metrics", "accuracy,f1_micro", "--history", "h.csv", "--quiet")
    assert "val_accuracy,val_f1_micro" in (files / "h.csv").read_text()
