"""Every command and every function of a model, on a model with external data."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from safetensors.numpy import load_file, save_file

import onnxtrain
from onnxtrain.cli.app import COMMANDS
from onnxtrain.plugins.sparse import compile as compiling
from plugins.text.chats import decoder
from sentences import raises_sentence

LOSS = ("--loss", "softmax_cross_entropy")
DATA = ("--data", "train.npz")
LINES: dict[str, tuple[tuple[str, ...], ...]] = {
    "fit": (("fit", "MODEL", *DATA, *LOSS, "--epochs", "2", "--threads", "1", "-o", "OUT.onnx"),),
    "prune": (
        ("prune", "MODEL", *DATA, *LOSS, "--sparsity", "0.5", "--epochs", "1", "--threads", "1", "-o", "OUT.onnx"),
        ("prune", "MODEL", *DATA, *LOSS, "--sparsity", "0.8", "--allocation", "uniform", "--epochs", "1",
         "--threads", "1", "--storage", "sparse", "-o", "OUT.onnx"),
    ),
    "evaluate": (("evaluate", "MODEL", *DATA, *LOSS),),
    "predict": (("predict", "MODEL", *DATA, "-o", "OUT.npz"),),
    "inspect": (("inspect", "MODEL"),),
    "doctor": (("doctor", "MODEL"),),
    "check": (("check", "MODEL", *DATA, *LOSS, "--provider", "cpu"),),
    "adapter": (
        ("adapter", "slots", "MODEL", "--targets", "*", "-o", "OUT.onnx"),
        ("adapter", "merge", "MODEL", "given.onnx_adapter", "-o", "OUT.onnx"),
        ("adapter", "to-peft", "MODEL", "given.onnx_adapter", "-o", "OUT"),
        ("adapter", "inspect", "MODEL", "given.onnx_adapter"),
    ),
    "quantize": (("quantize", "MODEL", *DATA, "-o", "OUT.onnx"),),
    "sparsify": (("sparsify", "MODEL", "-o", "OUT.onnx"),),
    "shrink": (("shrink", "MODEL", "-o", "OUT.onnx"),),
    "export": (
        ("export", "MODEL", *LOSS, "--training-model", "OUT.onnx"),
        ("export", "MODEL", *LOSS, "--step-graph", "OUT.onnx"),
        ("export", "MODEL", *LOSS, "--states", "OUT.safetensors"),
    ),
    "checkpoint": (("checkpoint", "FORM/decoder.onnx", "-o", "OUT"),),
    "import-states": (("import-states", "MODEL", "given.safetensors", "-o", "OUT.onnx"),),
}  # fmt: skip
WITHOUT_MODEL = ("runs", "completion", "demo")


def test_every_command_has_a_line() -> None:
    assert {*LINES, *WITHOUT_MODEL} == {*COMMANDS}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model in one file, the same model with external data, and the commands' other inputs."""
    folder = tmp_path_factory.mktemp("made")
    for name in ("inline", "external"):
        (folder / name).mkdir()
    model = onnxtrain.examples.mlp((4, 16, 3))
    for tensor in model.graph.initializer:  # a hidden unit that shrink removes
        array = onnx.numpy_helper.to_array(tensor).copy()
        array[(slice(None), 0) if tensor.name == "layer2.weight" else 0] *= 0 if tensor.name != "layer2.bias" else 1
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    onnx.save(model, folder / "inline" / "model.onnx")
    onnx.save(
        model,
        folder / "external" / "model.onnx",
        save_as_external_data=True,
        location="model.onnx.data",
        size_threshold=0,
    )
    onnx.save(decoder(), folder / "inline" / "decoder.onnx")
    beside = {"save_as_external_data": True, "location": "decoder.onnx.data", "size_threshold": 0}
    onnx.save(decoder(), folder / "external" / "decoder.onnx", **beside)
    for name in ("inline", "external"):
        (folder / name / "config.json").write_text('{"model_type": "llama"}')
    points = np.random.default_rng(0).normal(size=(24, 4)).astype(np.float32)
    np.savez(folder / "train.npz", input=points, label=points[:, :3].argmax(1))
    save_file({"layer1.bias": np.ones(16, np.float32)}, folder / "given.safetensors")
    lora = onnxtrain.Lora(rank=2, targets="*")
    trainer = onnxtrain.Trainer(folder / "inline" / "model.onnx", loss="softmax_cross_entropy", lora=lora)
    trainer.save(folder / "given.onnx_adapter")
    return folder


def results(path: Path) -> dict[str, np.ndarray] | bytes | None:
    """Read a command's result: outputs of a model that runs, the weights of one that does not, arrays or bytes."""
    if path.suffix == ".npz":
        return dict(np.load(path))
    if (path / "model.safetensors").is_file():
        return load_file(path / "model.safetensors")
    if path.suffix != ".onnx":
        return None
    model = onnx.load(path)
    found = {
        tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer if tensor.data_type == 1
    }
    points = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)
    if [value.name for value in model.graph.input][:1] == ["input"] and not model.training_info:
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        if len(session.get_inputs()) == 1:
            found["."] = np.asarray(session.run(None, {"input": points})[0])
    return found


@pytest.mark.parametrize("line", [line for lines in LINES.values() for line in lines], ids=" ".join)
@pytest.mark.parametrize("place", ["beside", "away"])
def test_commands(
    made: Path,
    tmp_path: Path,
    run: Callable[..., Any],
    line: tuple[str, ...],
    place: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiling, "_times", lambda *_: (2.0, 1.0))  # measured times decide what sparsify writes
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    found = []
    for form in ("inline", "external"):
        original = {path: path.read_bytes() for path in (tmp_path / form).iterdir()}
        out = tmp_path / form if place == "beside" else tmp_path / f"{form}-out"
        out.mkdir(exist_ok=True)
        text = "\n".join(line).replace("MODEL", "FORM/model.onnx").replace("OUT", f"{out.name}/tuned")
        words = text.replace("FORM", form).split("\n")
        result = run(*words)
        assert result.code == 0, result.err
        assert {path: path.read_bytes() for path in original} == original
        written = [word for word in words if word.startswith(out.name + "/tuned")]
        found += [results(tmp_path / word) for word in written]
    if found and found[0] is not None:
        assert found[0].keys() == found[1].keys()
        for name in found[0]:
            np.testing.assert_array_equal(found[0][name], found[1][name], err_msg=name)


X = np.linspace(-1, 1, 96, dtype=np.float32).reshape(24, 4)
Y = np.arange(24) % 3
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "append": lambda model: onnxtrain.append(model, onnxtrain.layers.Linear(2)),
    "cut": lambda model: onnxtrain.cut(model, at=onnx.load(model).graph.node[0].output[0] if isinstance(model, Path)
                                       else model.graph.node[0].output[0]),
    "dynamic_batch": onnxtrain.dynamic_batch,
    "replace_head": lambda model: onnxtrain.replace_head(model, 5),
    "quantize": lambda model: onnxtrain.quantize(model, X),
    "shrink": onnxtrain.shrink,
    "training_model": lambda model: onnxtrain.training_model(model, loss="softmax_cross_entropy",
                                                             optimizer=onnxtrain.SGD(0.1)),
    "evaluate": lambda model: onnxtrain.evaluate(model, (X, Y), loss="softmax_cross_entropy"),
    "predict": lambda model: onnxtrain.predict(model, X),
    "inspect": lambda model: onnxtrain.inspect(model),
    "gradient": lambda model: onnxtrain.gradient(model),
    "prune": lambda model: onnxtrain.prune(model, (X, Y), loss="softmax_cross_entropy", sparsity=0.5, epochs=1,
                                           fine_tune_epochs=0).model(),
    "Trainer": lambda model: onnxtrain.Trainer(model, loss="softmax_cross_entropy").model(),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(made: Path, name: str) -> None:
    """A path and a completely loaded model give the same results; a model without loaded data is refused."""
    path = made / "external" / "model.onnx"
    found = [FUNCTIONS[name](path), FUNCTIONS[name](onnx.load(path))]
    if isinstance(found[0], onnx.ModelProto):
        values = [
            {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer} for model in found
        ]
        assert values[0].keys() == values[1].keys()
        for key in values[0]:
            np.testing.assert_array_equal(values[0][key], values[1][key], err_msg=key)
    elif isinstance(found[0], np.ndarray | dict):
        np.testing.assert_equal(found[0], found[1])
    with raises_sentence("model_cannot_be_used", reason="so that its folder is not known; give"):
        FUNCTIONS[name](onnx.load(path, load_external_data=False))


@pytest.mark.parametrize(
    "command",
    [
        "fit model.onnx --data train.npz --loss softmax_cross_entropy -o out/t.onnx --checkpoint kept --save-best loss",
        "fit model.onnx --data train.npz --loss softmax_cross_entropy -o out/t.onnx --run run",
        "fit model.onnx --data train.npz --loss softmax_cross_entropy --in-place",
        "prune model.onnx --data train.npz --loss softmax_cross_entropy --sparsity 0.5 --epochs 0 "
        "--fine-tune-epochs 0 -o out/t.onnx",
        "prune model.onnx --data train.npz --loss softmax_cross_entropy --sparsity 0.5 --epochs 0 "
        "--fine-tune-epochs 0 --storage sparse -o out/t.onnx",
        "adapter slots model.onnx --targets=* -o out/t.onnx",
        "export model.onnx --loss softmax_cross_entropy --step-graph out/s.onnx --training-model out/t.onnx",
        "quantize model.onnx --data train.npz -o out/t.onnx",
        "sparsify model.onnx -o out/t.onnx",
        "export model.onnx --loss softmax_cross_entropy --web web",
    ],
)
def test_no_model_names_the_files_beside_an_output(command, files, run):
    """A file named numpy.py or conftest.py would be run by the next Python in that folder."""
    model = onnx.load(files / "model.onnx")
    names = itertools.cycle(["numpy.py", "tests/conftest.py", ".git/hooks/pre-commit", "test_x.py"])

    for tensor, name in zip(model.graph.initializer, names, strict=False):
        (files / name).parent.mkdir(parents=True, exist_ok=True)
        (files / name).write_bytes(tensor.raw_data)

        tensor.ClearField("raw_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=name)
    (files / "model.onnx").write_bytes(model.SerializeToString())
    (files / "out").mkdir()
    before = {path for path in files.rglob("*") if path.is_file()}
    result = run(*command.split())
    assert result.code == 0, result.err
    made = {path for path in files.rglob("*") if path.is_file()} - before
    assert made
    hostile = (".py", "pre-commit")
    assert not [path for path in made if path.name.endswith(hostile)]
