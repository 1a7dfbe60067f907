"""Models beyond 2 and 4 GiB: weights stay in their data file, adapters train beside it, and results are streamed."""

import gc
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxtrain
from onnxtrain.model_file.file import ModelFile
from onnxtrain.model_file.large_data import MadeArrays
from sentences import raises_sentence
from zoo.decoder import batch, decoder

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "large_files.py"


def external(folder, begins=0, offsets=()):
    """Write a decoder whose data file and some of whose weights begin with a hole; return the path."""
    folder.mkdir()
    model, end = decoder(), begins
    with (folder / "model.data").open("wb") as data:
        for tensor in model.graph.initializer:
            if len(tensor.dims) < 2:
                continue
            end = max(end, dict(offsets).get(tensor.name, 0))
            data.seek(end)
            data.write(tensor.raw_data)
            for key, value in {"location": "model.data", "offset": end, "length": len(tensor.raw_data)}.items():
                tensor.external_data.add(key=key, value=str(value))
            end += len(tensor.raw_data)
            tensor.data_location = onnx.TensorProto.EXTERNAL
            tensor.ClearField("raw_data")
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


def layers(path):
    """Write three linear layers with weights in the model's file; return the path."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        g (float[n,40] x) => (float[n,40] y) {
        a = MatMul(x, a_proj) b = MatMul(a, b_proj) y = MatMul(b, c_proj) }""")
    arrays = np.random.default_rng(0).standard_normal((3, 40, 40)).astype(np.float32)
    tensors = zip(arrays, "abc", strict=True)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, f"{name}_proj") for array, name in tensors)
    onnx.save(model, path)
    return path


def trained(path, **options):
    trainer = onnxtrain.Trainer(path, loss="softmax_cross_entropy", optimizer="sgd(lr=0.3)", threads=1, **options)
    losses = [trainer.train_step(*batch()) for _ in range(3)]
    (path.parent / "tuned").mkdir()
    trainer.save(path.parent / "tuned" / "tuned.onnx")
    return losses, ModelFile.load(path.parent / "tuned" / "tuned.onnx")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs files with holes")
@pytest.mark.parametrize("options", [{"lora": onnxtrain.Lora(rank=4, alpha=8)}, {"train": "lm_head*"}], ids=str)
def test_weights_beyond_4_gib_train_as_others(options, tmp_path):
    """Some lie before byte 2^31 of the data file, some before 2^32, some behind it; what is saved has its holes."""
    offsets = {
        "model.layers.0.mlp.gate_proj.weight": 2**31 - 256,
        "model.layers.1.self_attn.q_proj.weight": 2**32 - 256,
    }
    expected, plain = trained(external(tmp_path / "plain"), **options)
    losses, far = trained(external(tmp_path / "far", 100, offsets.items()), **options)
    assert losses == expected
    assert expected[-1] < expected[0]
    for name in plain.names():
        np.testing.assert_array_equal(far.value(name), plain.value(name))
    saved = (tmp_path / "far" / "tuned" / "tuned.onnx.data").stat()
    assert saved.st_size == (tmp_path / "far" / "model.data").stat().st_size > 1 << 32
    assert saved.st_blocks * 512 < 1 << 20


@pytest.mark.parametrize("inside", [False, True])
def test_values_are_made_once_and_one_after_the_other_when_they_are_written(inside, tmp_path):
    file = ModelFile.load(layers(tmp_path / "model.onnx") if inside else external(tmp_path / "model"))
    names = [name for name in file.names() if "proj" in name]
    made, alive = [], []

    def make(name):
        gc.collect()
        alive.append(sum(array() is not None for array in made))
        array = file.value(name) + 1
        made.append(weakref.ref(array))
        return array

    values = MadeArrays({name: lambda name=name: make(name) for name in names})
    for times in range(1, 4):  # the second time over the first, where data files get other names, which then stay
        file.save(tmp_path / "saved.onnx", values)
        assert len(made) == times * len(names)
        assert len(list(tmp_path.glob("*.data"))) == (0 if inside else 1)
        for name in names:
            np.testing.assert_array_equal(ModelFile.load(tmp_path / "saved.onnx").value(name), file.value(name) + 1)
    assert max(alive) == 0


def test_a_value_that_does_not_fit_leaves_the_old_files(tmp_path):
    path = external(tmp_path / "model")
    before = {item.name: item.read_bytes() for item in path.parent.iterdir()}
    wrong = MadeArrays({"lm_head.weight": lambda: np.zeros(3, np.float32)})
    with raises_sentence("new_value_differs", what="lm_head.weight", got=(3,), wanted=(16, 13)):
        ModelFile.load(path).save(path, wrong)
    assert {item.name: item.read_bytes() for item in path.parent.iterdir()} == before


@pytest.mark.slow
def test_files_of_2_6_gb_train_within_the_file_and_little_memory():
    """The whole benchmark needs four gigabytes of disk, and minutes."""
    done = subprocess.run([sys.executable, BENCHMARK, "--steps", "2"], capture_output=True, text=True, check=True)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines() if "→" in line]
    assert len(rows) == 7, done.stdout
    for model, weights, what, states, training, saving, *_ in rows:
        weights, states, training, saving = (
            float(cell.replace(",", "")) for cell in (weights, states, training, saving)
        )
        assert weights > 2450  # MiB
        assert training < 300 + states * (4 / 3 if what == "head" else 1), model
        assert saving < training + 600
