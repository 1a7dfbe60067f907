"""Train with the onnxtrain of this interpreter and print a hash of every result; ``compare_bits.py`` runs it.

    python tools/compare_bits_driver.py FOLDER [--models mlp,lenet5] [--steps 3] [--extras resume,lora]

FOLDER holds ``NAME.onnx`` and ``NAME.npz`` for each model: ``input:NAME`` and ``target``, each with a leading axis of
batches. Each line of the output is a JSON object with ``case`` and ``hash``, or with ``case`` and ``error``.

This file is frozen: it uses public names only and imports nothing else of this repository, so that the same code
drives versions of before and after any change. Change it only to compare more.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper, parser

import onnxtrain

Batch = tuple[dict[str, np.ndarray], np.ndarray]
Results = Iterator[tuple[str, Mapping[str, Any]]]

LOSS = "softmax_cross_entropy"


def main() -> int:
    """Print the hashes of all cases."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--models", default="")
    arguments.add_argument("--steps", type=int, default=3)
    arguments.add_argument("--extras", default="")
    arguments.add_argument("--first", type=int, default=0, help="index of the first batch (0)")
    arguments.add_argument("--work", type=Path, help="folder of the files that cases hand on to others")
    given = arguments.parse_args()
    warnings.simplefilter("ignore")  # deprecated names are what a frozen file uses
    for name in filter(None, given.models.split(",")):
        report(name, lambda name=name: train_model(given.folder, name, given.steps, given.first))  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as temporary:
        work = given.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        for name in filter(None, given.extras.split(",")):
            report(name, lambda name=name: EXTRAS[name](work, given.steps))  # type: ignore[misc]
    return 0


def report(case: str, results: Callable[[], Results]) -> None:
    """Print a line for each result of a case; an error ends the case and is a result, too."""
    try:
        for part, arrays in results():
            print(json.dumps({"case": f"{case}: {part}", "hash": digest(arrays)}), flush=True)
    except Exception as error:
        print(json.dumps({"case": f"{case}: error", "error": f"{type(error).__name__}: {error}"}), flush=True)


def digest(arrays: Mapping[str, Any]) -> str:
    """Return the SHA-256 of names, types, shapes and bytes."""
    total = hashlib.sha256()
    for name in sorted(arrays):
        array = np.asarray(arrays[name])
        total.update(f"{name} {array.dtype} {array.shape} ".encode())
        total.update(array.tobytes())
    return total.hexdigest()


def new_trainer(model: Any, kernels: bool | None = None, **settings: Any) -> Any:
    """Return a trainer on one thread, with native kernels unless ``kernels`` is false."""
    runtime = onnxtrain.RuntimeOptions(threads=1, kernels=kernels)
    parameters = inspect.signature(onnxtrain.Trainer).parameters
    chosen = {"loss": LOSS, "optimizer": onnxtrain.Adam(1e-3, epsilon=1e-8), **settings}
    return onnxtrain.Trainer(model, **chosen, **{"options" if "options" in parameters else "runtime": runtime})


def saved(trainer: Any) -> dict[str, np.ndarray]:
    """Return the initializers of the file that a trainer saves."""
    with tempfile.TemporaryDirectory() as folder:
        trainer.save(os.path.join(folder, "saved.onnx"))
        model = onnx.load(os.path.join(folder, "saved.onnx"))
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


# The benchmark models


def train_model(folder: Path, name: str, steps: int, first: int) -> Results:
    """Gradients, then losses, weights, predictions and the saved file after some steps, with and without kernels."""
    path = folder / f"{name}.onnx"
    with np.load(folder / f"{name}.npz") as file:
        data = dict(file)
    count = len(data["target"])

    def batch(step: int) -> Batch:
        index = (step + first) % count
        inputs = {key.removeprefix("input:"): array[index] for key, array in data.items() if key != "target"}
        return inputs, data["target"][index]

    yield "gradient", gradients(onnx.load(path), batch(0)[0])
    for kernels in (None, False):
        trainer = new_trainer(path, kernels, batch_norm="train", untie=True)
        losses = [trainer.train_step(*batch(step)) for step in range(steps)]
        way = "standard operators" if kernels is False else "kernels"
        yield f"losses, {way}", {"losses": losses}
        yield f"parameters, {way}", trainer.parameters
        yield f"predictions, {way}", as_arrays(trainer.predict(batch(0)[0]))
        yield f"saved file, {way}", saved(trainer)


def gradients(model: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the gradients of the mean square of the first output, computed by ONNX Runtime."""
    graph = model.graph
    output = graph.output[0].name
    graph.node.append(helper.make_node("Mul", [output, output], ["driver/square"]))
    graph.node.append(helper.make_node("ReduceMean", ["driver/square"], ["driver/y"], keepdims=0))
    graph.output.append(helper.make_tensor_value_info("driver/y", onnx.TensorProto.FLOAT, []))
    model = onnxtrain.gradient(model, "driver/y")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


def as_arrays(predictions: Any) -> dict[str, Any]:
    """Return predictions by name, whether the model has one output or several."""
    return dict(predictions) if isinstance(predictions, Mapping) else {"predictions": predictions}


# Further trainings, on small models


def random_data(examples: int = 90) -> tuple[np.ndarray, np.ndarray]:
    """Return images [examples, 1, 28, 28] and classes."""
    random = np.random.default_rng(0)
    return random.standard_normal((examples, 1, 28, 28)).astype(np.float32), random.integers(0, 10, examples)


def fit(trainer: Any, epochs: int, **settings: Any) -> Any:
    """Train LeNet-5 on random data; returns the trainer."""
    trainer.fit(*random_data(), epochs=epochs, batch_size=32, validation=0.2, progress=False, **settings)
    return trainer


def lenet(**settings: Any) -> Any:
    """Return a trainer of LeNet-5 with most of what acts between gradient and update."""
    return new_trainer(onnxtrain.examples.lenet5(), clip_norm=1.0, accumulate=2, seed=3, **settings)


def run_resume(folder: Path, steps: int) -> Results:
    """Two epochs at once; one, a checkpoint and a resumed second one."""
    yield "undisturbed", fit(lenet(), 2).parameters
    fit(lenet(), 1, checkpoint=folder / "half")
    shutil.copytree(folder / "half", folder / "kept")
    yield "resumed", fit(lenet(), 2, checkpoint=folder / "half", resume=True).parameters


def run_continue(folder: Path, steps: int) -> Results:
    """The second epoch from the checkpoint that the case ``resume`` of another version wrote."""
    yield "resumed", fit(lenet(), 2, checkpoint=folder / "kept", resume=True).parameters


def run_optimizers(folder: Path, steps: int) -> Results:
    """Every optimizer, with and without its kernel."""
    names = ("Adagrad", "Adam", "AdamW", "LAMB", "Lion", "Momentum", "RMSprop", "SGD", "SSGD")
    x, y = random_data()
    for name in names:
        for kernels in (None, False):
            optimizer = getattr(onnxtrain, name)(1e-2)
            trainer = new_trainer(onnxtrain.examples.mlp((784, 64, 10)), kernels, optimizer=optimizer)
            for _ in range(steps):
                trainer.train_step(x.reshape(len(x), -1), y)
            yield f"{name}, {'standard operators' if kernels is False else 'kernels'}", trainer.parameters


def run_lora(folder: Path, steps: int) -> Results:
    """Adapters beside the linear layers of a transformer."""
    random = np.random.default_rng(0)
    x = [random.integers(1, 100, (12, 7)), np.ones((12, 7), np.int64)]
    y = np.arange(12) % 4
    for kernels in (None, False):
        trainer = new_trainer(onnxtrain.examples.small_transformer(), kernels, lora=onnxtrain.Lora(rank=4, alpha=8))
        losses = [trainer.train_step(x, y) for _ in range(steps)]
        way = "standard operators" if kernels is False else "kernels"
        yield f"losses, {way}", {"losses": losses}
        yield f"parameters, {way}", trainer.parameters
        yield f"predictions, {way}", as_arrays(trainer.predict(x))
        yield f"saved file, {way}", saved(trainer)


def int4_model(inputs: int = 64, outputs: int = 32, block: int = 16) -> onnx.ModelProto:
    """Return tanh(x) W by MatMulNBits, with W in 4 bits."""
    random = np.random.default_rng(0)
    model = parser.parse_model(
        '<ir_version: 8, opset_import: ["": 21, "com.microsoft": 1]>'
        f"g (float[n,{inputs}] x) => (float[n,{outputs}] y) {{ h = Tanh(x) "
        f"y = com.microsoft.MatMulNBits<K={inputs}, N={outputs}, bits=4, block_size={block}>(h, weight, scales) }}"
    )
    scales = (0.5 + random.random(outputs * inputs // block)).astype(np.float32) / 16
    weight = random.integers(0, 256, (outputs, inputs // block, block // 2)).astype(np.uint8)
    model.graph.initializer.append(numpy_helper.from_array(weight, "weight"))
    model.graph.initializer.append(numpy_helper.from_array(scales, "scales"))
    return model


def run_int4(folder: Path, steps: int) -> Results:
    """Adapters beside a weight in 4 bits; quantization to 4 bits and quantization-aware training."""
    random = np.random.default_rng(1)
    x, y = random.standard_normal((16, 64)).astype(np.float32), random.standard_normal((16, 32)).astype(np.float32)
    adapters = onnxtrain.Lora(rank=4, alpha=8, targets="weight")
    images, classes = random_data()
    images = images.reshape(len(images), -1)
    quantized = onnxtrain.quantize(onnxtrain.examples.mlp((784, 32, 10)), images, bits=4)
    for kernels in (None, False):
        way = "standard operators" if kernels is False else "kernels"
        trainer = new_trainer(int4_model(), kernels, loss="mean_squared_error", lora=adapters)
        losses = [trainer.train_step(x, y) for _ in range(steps)]
        yield f"LoRA, losses, {way}", {"losses": losses}
        yield f"LoRA, parameters, {way}", trainer.parameters
        trainer = new_trainer(quantized, kernels, qat=True)
        losses = [trainer.train_step(images, classes) for _ in range(steps)]
        yield f"QAT, losses, {way}", {"losses": losses}
        yield f"QAT, saved file, {way}", saved(trainer)


def run_ranks(folder: Path, steps: int) -> Results:
    """Two processes, each on its half of every batch."""
    near = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    mpiexec = shutil.which("mpiexec", path=near)
    if mpiexec is None:
        raise FileNotFoundError("mpiexec is not installed.")
    command = [mpiexec, "-n", "2", sys.executable, __file__, str(folder), "--work", str(folder), "--extras", "rank"]
    result = subprocess.run([*command, "--steps", str(steps)], capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(result.stderr[-2000:])
    hashes = sorted(path.read_text() for path in folder.glob("rank-*"))
    if len(hashes) != 2:
        raise RuntimeError(result.stdout[-2000:])
    for rank, value in enumerate(hashes):
        yield f"parameters of rank {rank}", {"hash": value}


def run_rank(folder: Path, steps: int) -> Results:
    """One of two processes, which writes its hash to a file: the launcher mixes up what they print."""
    ranks = getattr(onnxtrain, "distributed", None) or onnxtrain.parallel  # before 0.1.0's last renames
    trainer = fit(lenet(parallel=ranks.MPI()), 1)
    (folder / f"rank-{os.getpid()}").write_text(digest(trainer.parameters))
    yield "fit", trainer.parameters


EXTRAS: dict[str, Callable[[Path, int], Results]] = {
    "resume": run_resume,
    "continue": run_continue,
    "optimizers": run_optimizers,
    "lora": run_lora,
    "int4": run_int4,
    "ranks": run_ranks,
    "rank": run_rank,
}


if __name__ == "__main__":
    sys.exit(main())
