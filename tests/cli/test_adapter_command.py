"""``fit --lora`` and ``adapter``: output files and error messages."""

import json

import numpy as np
import onnxruntime
import pytest

LOSS = ("--data", "train.npz", "--loss", "softmax_cross_entropy")
LORA = ("--lora", "2", "--lora-targets", "all-linear", "--lora-targets", "*")


def outputs(path, points):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(path, options).run(None, {"input": points})[0]


def names(success):
    return [row["name"] for row in json.loads(success("inspect", "model.onnx", "--adaptable", "--json").out)]


def test_layers_are_listed(files, success):
    table = success("inspect", "model.onnx", "--adaptable").out
    found = json.loads(success("inspect", "model.onnx", "--adaptable", "--json").out)
    assert [(row["inputs"], row["outputs"], row["bits"]) for row in found] == [(4, 8, 32), (8, 3, 32)]
    assert all(row["name"] in table for row in found)


def test_from_fit_to_every_form_and_back(files, success):
    layers = names(success)
    result = success("fit", "model.onnx", *LOSS, *LORA, "--lora-alpha", "4", "--epochs", "2", "-o", "a.onnx_adapter")
    assert "adapter" in result.out
    success("adapter", "merge", "model.onnx", "a.onnx_adapter", "-o", "merged.onnx")
    success("adapter", "to-peft", "model.onnx", "a.onnx_adapter", "-o", "peft")
    success("adapter", "from-peft", "model.onnx", "peft", "-o", "b.onnx_adapter")
    success("adapter", "merge", "model.onnx", "b.onnx_adapter", "-o", "again.onnx")
    listed = success("adapter", "slots", "model.onnx", "a.onnx_adapter", "-o", "slots.onnx", "--json").out
    assert json.loads(listed)["slots"] == layers
    points = np.load(files / "test.npz")["input"]
    base, merged, again, slots = (
        outputs(files / f"{name}.onnx", points) for name in ("model", "merged", "again", "slots")
    )
    assert np.abs(merged - base).max() > 1e-4
    np.testing.assert_allclose(again, merged, atol=1e-6)
    np.testing.assert_array_equal(slots, base)
    found = json.loads(success("adapter", "inspect", "model.onnx", "b.onnx_adapter", "--json").out)
    assert (found["kind"], found["rank"], found["alpha"]) == ("LoRA", 2, 4)
    assert [row["name"] for row in found["layers"]] == layers
    assert layers[0] in success("adapter", "inspect", "a.onnx_adapter").out


def test_fit_writes_an_adapter_by_default_and_goes_on_with_one(files, success):
    success("fit", "model.onnx", *LOSS, *LORA, "--dora", "--rslora")
    found = json.loads(success("adapter", "inspect", "model-trained.onnx_adapter", "--json").out)
    assert (found["kind"], found["rank_stabilized"]) == ("DoRA", True)
    success("fit", "model.onnx", *LOSS, "--lora-adapter", "model-trained.onnx_adapter", "-o", "tuned.onnx")
    points = np.load(files / "test.npz")["input"]
    assert (outputs(files / "tuned.onnx", points) != outputs(files / "model.onnx", points)).any()


def test_fit_takes_ranks_by_pattern_and_initial_values(files, success):
    first, last = names(success)
    patterns = ("--lora-rank-pattern", f"{first}=3", "--lora-rank-pattern", "*=1", "--lora-alpha-pattern", f"{last}=5")
    success("fit", "model.onnx", *LOSS, *LORA, *patterns, "--lora-lr-ratio", "16", "-o", "a.onnx_adapter")
    rows = json.loads(success("adapter", "inspect", "a.onnx_adapter", "--json").out)["layers"]
    assert {row["name"]: row["rank"] for row in rows} == {first: 3, last: 1}
    assert {row["name"]: row["scale"] for row in rows} == {first: pytest.approx(16 / 3), last: pytest.approx(5)}
    success("fit", "model.onnx", *LOSS, *LORA, "--lora-init", "pissa", "-o", "b.onnx_adapter")
    assert json.loads(success("adapter", "inspect", "b.onnx_adapter", "--json").out)["rank"] == 4


def test_one_model_takes_several_adapters_and_commands_compute_with_each(files, success):
    layers = names(success)
    for seed, layer in enumerate(layers):
        lora = ("--lora", str(seed + 1), "--lora-targets", layer, "--learning-rate", "0.1", "--seed", str(seed))
        success("fit", "model.onnx", *LOSS, *lora, "-o", f"{seed}.onnx_adapter")
    both = ("0.onnx_adapter", "1.onnx_adapter")
    listed = success("adapter", "slots", "model.onnx", *both, "-o", "slots.onnx", "--json").out
    assert json.loads(listed)["slots"] == layers
    points = np.load(files / "test.npz")["input"]
    found = [outputs(files / "model.onnx", points)]
    for adapter in both:
        success("adapter", "merge", "model.onnx", adapter, "-o", "merged.onnx")
        data = ("--data", "test.npz")
        success("predict", "model.onnx", "--lora-adapter", adapter, *data, "-o", "y.npy")
        found.append(np.load(files / "y.npy"))
        np.testing.assert_allclose(found[-1], outputs(files / "merged.onnx", points), atol=1e-5)
        loss = ("--loss", "softmax_cross_entropy", "--json")
        got = json.loads(success("evaluate", "model.onnx", "--lora-adapter", adapter, *data, *loss).out)
        expected = json.loads(success("evaluate", "merged.onnx", *data, *loss).out)
        assert got["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert all(np.abs(found[one] - found[other]).max() > 1e-3 for one, other in ((0, 1), (0, 2), (1, 2)))


def test_adapters_are_added(files, success):
    for seed in "12":
        success("fit", "model.onnx", *LOSS, *LORA, "--seed", seed, "-o", f"{seed}.onnx_adapter")
    success("adapter", "to-peft", "model.onnx", "2.onnx_adapter", "-o", "peft")
    weighted = ("--weights", "0.5,-2")
    success("adapter", "add", "model.onnx", "1.onnx_adapter", "peft", *weighted, "-o", "sum.onnx_adapter")
    found = json.loads(success("adapter", "inspect", "model.onnx", "sum.onnx_adapter", "--json").out)
    assert (found["rank"], found["layers"][0]["scale"]) == (4, 1)
    svd = ("--combination", "svd", "--rank", "3")
    success("adapter", "add", "model.onnx", "1.onnx_adapter", "peft", *weighted, *svd, "-o", "three")
    assert json.loads(success("adapter", "inspect", "model.onnx", "three", "--json").out)["rank"] == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fit", "model.onnx", *LOSS, "--lora", "0"), r"rank of Lora is 0; it must be an integer"),
        (
            ("fit", "model.onnx", *LOSS, "--lora", "2", "--lora-targets", "q_proj"),
            r"--lora-targets q_proj matches no layer .* model has",
        ),
        (("fit", "model.onnx", *LOSS, "--lora-alpha", "2"), r"--lora-alpha is for adapters, .* --lora 8"),
        (("fit", "model.onnx", *LOSS, "--dora"), r"--dora is for adapters"),
        (("fit", "model.onnx", *LOSS, "--lora-lr-ratio", "2"), r"--lora-lr-ratio is for adapters"),
        (
            ("fit", "model.onnx", *LOSS, *LORA, "--lora-rank-pattern", "a"),
            r"--lora-rank-pattern is 'a'; it needs PATTERN=RANK",
        ),
        (
            ("fit", "model.onnx", *LOSS, *LORA, "--lora-rank-pattern", "a=x"),
            r"--lora-rank-pattern is 'a=x'; it needs PATTERN=RANK",
        ),
        (
            ("fit", "model.onnx", *LOSS, *LORA, "--lora-rank-pattern", "a=2"),
            r"--lora-rank-pattern a matches no layer that gets an adapter; the model has",
        ),
        (
            ("fit", "model.onnx", *LOSS, *LORA, "--lora-init", "loftq"),
            r"needs the weights before quantization; give the float model .* --lora-original",
        ),
        (("adapter", "merge", "model.onnx", "-o", "x.onnx"), r"merge needs a model and an adapter"),
        (("adapter", "slots", "model.onnx"), r"slots writes a result; give --output"),
        (("adapter", "inspect", "a.onnx_adapter", "-o", "x"), r"inspect writes nothing, but --output is 'x'"),
        (("adapter", "inspect", "a.onnx_adapter"), r"a.onnx_adapter' does not exist"),
        (("adapter", "merge", "model.onnx", "a", "-o", "x.onnx", "--dora"), r"--dora is for slots, not for merge"),
        (
            ("adapter", "slots", "model.onnx", "a", "-o", "x.onnx", "--targets", "*"),
            r"--targets determines the slots, and so does the adapter",
        ),
        (("adapter", "slots", "model.onnx", "-o", "x.onnx", "--requantize"), r"--requantize is for merge"),
        (
            ("adapter", "merge", "model.onnx", "a", "-o", "x", "--requantize"),
            r"--requantize is for merge, not for merge into a folder; leave it out",
        ),
        (("adapter", "to-peft", "model.onnx", "a", "-o", "x.onnx_adapter"), r"to-peft writes a folder"),
        (("adapter", "from-peft", "model.onnx", "a", "-o", "x.onnx"), r"from-peft writes an .onnx_adapter file"),
        (("adapter", "merge", "model.onnx", "a", "b", "-o", "x.onnx"), r"merge takes one adapter, but 'b' is another"),
        (("adapter", "merge", "model.onnx", "a", "-o", "x.onnx", "--rank", "2"), r"--rank is for add, not for merge"),
        (("adapter", "add", "model.onnx", "a", "b", "-o", "x"), r"add needs a weight for each of the 2 adapters"),
        (("adapter", "add", "model.onnx", "a", "-o", "x", "--weights", "y"), r"--weights is 'y'; it needs numbers"),
        (
            ("adapter", "add", "model.onnx", "a", "-o", "x", "--weights", "1,2"),
            r"--weights has 2 numbers for 1 adapters",
        ),
        (
            ("predict", "model.onnx", "--lora-adapter", "no.onnx_adapter", "--data", "test.npz", "-o", "y.npy"),
            r"'no.onnx_adapter' does not exist",
        ),
        (("adapter", "slots", "model.onnx", "-o", "model.onnx", "--targets", "*"), r"--output is the model itself"),
    ],
)
def test_mistakes(files, run, arguments, message):
    before = sorted(path.name for path in files.iterdir())
    result = run(*arguments)
    assert result.code == 2
    assert result.err.count("\n") == 1
    import re

    assert re.search(message, result.err), result.err
    assert sorted(path.name for path in files.iterdir()) == before


def test_a_new_head_beside_adapters_is_in_the_files(files, success, run):
    lora = ("--lora", "2", "--lora-targets", "all-linear")
    head = ("fit", "model.onnx", *LOSS, *lora, "--new-head", "7", "--epochs", "2", "--learning-rate", "0.05")
    result = success(*head, "-o", "h.onnx_adapter")
    assert "h-base.onnx" in result.out
    success(*head, "-o", "merged.onnx")
    assert not (files / "merged-base.onnx").exists()
    success("adapter", "merge", "h-base.onnx", "h.onnx_adapter", "-o", "again.onnx")
    points = np.load(files / "test.npz")["input"]
    base, merged, again = (outputs(files / f"{name}.onnx", points) for name in ("h-base", "merged", "again"))
    assert base.shape == merged.shape == (len(points), 7)
    assert np.abs(merged - base).max() > 0.1
    np.testing.assert_allclose(again, merged, atol=1e-5)
    found = json.loads(success("adapter", "inspect", "h-base.onnx", "h.onnx_adapter", "--json").out)
    assert found["trained_in_full"] == ["head.bias", "head.weight"]
    success("adapter", "to-peft", "h-base.onnx", "h.onnx_adapter", "-o", "peft", "--base-model", "some/model")
    config = json.loads((files / "peft" / "adapter_config.json").read_text())
    assert len(config["modules_to_save"]) == 1
    assert config["base_model_name_or_path"] == "some/model"
    success("adapter", "from-peft", "h-base.onnx", "peft", "-o", "back.onnx_adapter")
    success("adapter", "merge", "h-base.onnx", "back.onnx_adapter", "-o", "back.onnx")
    np.testing.assert_allclose(outputs(files / "back.onnx", points), merged, atol=1e-5)
    success("fit", "h-base.onnx", *LOSS, "--lora-adapter", "h.onnx_adapter", "--learning-rate", "1e-9", "-o", "c.onnx")
    np.testing.assert_allclose(outputs(files / "c.onnx", points), merged, atol=1e-4)
    (files / "h-base.onnx").rename(files / "peft-base.onnx")
    result = run("fit", "peft-base.onnx", *LOSS, *lora, "--new-head", "7", "-o", "peft.onnx_adapter")
    assert result.code == 2
    assert "MODEL and the model with the new head are the same file" in result.err


def test_a_folder_that_cannot_hold_a_trained_tensor_is_refused_before_the_training(files, run):
    import onnx

    model = onnx.load(files / "model.onnx")
    output = model.graph.output[0].name
    size = model.graph.output[0].type.tensor_type.shape.dim[-1].dim_value
    model.graph.node.append(onnx.helper.make_node("Mul", [output, "temperatures"], ["scaled"]))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((1, size), np.float32), "temperatures"))
    model.graph.output[0].name = "scaled"
    onnx.save(model, files / "scaled.onnx")
    result = run("fit", "scaled.onnx", *LOSS, *LORA, "--train", "temperatures", "-o", "folder", "--epochs", "100000")
    assert result.code == 2
    assert "cannot hold 'temperatures', which is trained beside the adapters" in result.err
    assert not (files / "folder").exists()
