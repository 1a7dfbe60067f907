"""``--config`` of commands other than fit: the file gives flags, and the command line overrides them."""

from __future__ import annotations

import tomllib

import pytest

DATA = {"data": "test.npz", "batch_size": 7}
LOSS = {"loss": "softmax_cross_entropy"}
COMMANDS = {
    "evaluate": (DATA | LOSS | {"metrics": ["accuracy", "f1"]}, ()),
    "predict": (DATA | {"output": "found.csv", "probabilities": True}, ("found.csv",)),
    "prune": (
        DATA
        | LOSS
        | {"sparsity": 0.5, "epochs": 1, "fine_tune_epochs": 1, "storage": "sparse", "output": "sparse.onnx"},
        ("sparse.onnx",),
    ),
    "export": (LOSS | {"optimizer": "momentum", "step_graph": "step.onnx", "seed": 3}, ("step.onnx",)),
    "quantize": (DATA | {"output": "small.onnx", "bits": 8}, ("small.onnx",)),
}


def as_flags(values):
    for name, value in values.items():
        flag = f"--{name.replace('_', '-')}"
        for each in value if isinstance(value, list) else [value]:
            yield from (flag,) if each is True else (flag, each)


def as_file(values):
    lines = [f"{name} = {str(value).lower() if value is True else repr(value)}" for name, value in values.items()]
    return "\n".join(lines).replace("'", '"')


@pytest.mark.parametrize("command", COMMANDS)
def test_a_config_file_equals_flags(command, files, success):
    values, written = COMMANDS[command]
    expected = success(command, "model.onnx", *as_flags(values)).out
    before = [(files / name).read_bytes() for name in written]
    for name in written:
        (files / name).unlink()
    (files / "run.toml").write_text(as_file({"model": "model.onnx", **values}))
    found = success(command, "--config", "run.toml").out
    assert [(files / name).read_bytes() for name in written] == before
    if command == "evaluate":
        assert found == expected
        assert success(command, "--config=run.toml", "--metrics", "f1").out != expected


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_of_another_command(command, files, run):
    (files / "run.toml").write_text('early_stopping = 3\ndata = "test.npz"\n')
    result = run(command, "model.onnx", "--config", "run.toml")
    assert result.code == 2
    assert 'Unknown option: "[early_stopping]" from run.toml' in result.err
    assert result.err.count("\n") == 1


def test_a_misspelt_key_is_named_with_the_nearest_flag(files, run):
    (files / "run.toml").write_text('loss = "softmax_cross_entropy"\nlearning-rat = 0.1\n')
    result = run("fit", "model.onnx", "--data", "train.npz", "--config", "run.toml")
    assert result.code == 2
    assert "from run.toml. Did you mean --learning-rate?" in result.err


def test_the_report_of_a_pruning_repeats_it(files, success):
    values, _ = COMMANDS["prune"]
    success("prune", "model.onnx", *as_flags(values), "--report", "report", "--learning-rate", 0.01)
    before = (files / "sparse.onnx").read_bytes()
    settings = tomllib.loads((files / "report" / "config.toml").read_text())
    assert settings["learning_rate"] == 0.01
    assert settings["method"] == "ssgd"
    assert not {"report", "config", "debug", "quiet"} & settings.keys()
    success("prune", "--config", "report/config.toml", "--output", "again.onnx")
    assert (files / "again.onnx").read_bytes() == before
