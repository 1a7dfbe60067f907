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
