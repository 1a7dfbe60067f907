"""Time that a training waits for data: LeNet-5 on images and on a CSV file, against PyTorch's DataLoader.

    python benchmarks/reading.py
    python benchmarks/reading.py --examples 20000 --epochs 5

Images are JPEG files of 64 x 64 pixels in one folder per class; PyTorch reads them with Pillow, in the training process
and in two workers. The CSV file has 784 numeric columns and one label column; PyTorch reads it with pandas. Every peer
trains in a separate process, and the peers alternate. Opening is everything before the first step except building the
model; waiting is the time that a step waits for its batch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from harness import (
    ForeignLoad,
    environment,
    last_line,
    load_line,
    machine_line,
    make_parser,
    significant,
    table,
    warn_when_busy,
    write_report,
)

REPOSITORY = Path(__file__).resolve().parent.parent

ONNXTRAIN = """
import json, sys, time
import onnxtrain
from onnxtrain.training.callbacks import Callback

kind, folder, batch, epochs, threads = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])


class Clock(Callback):
    def on_fit_begin(self, state):
        self.begun, self.epochs, self.waited = time.perf_counter(), [], 0.0

    def on_epoch_begin(self, state):
        self.start, self.steps = time.perf_counter(), 0

    def on_step_end(self, state):
        self.end = time.perf_counter()
        if state.step == 1:  # it builds the session
            self.start, self.waited = self.end, state.waited
        self.now = state.waited

    def on_epoch_end(self, state):
        self.epochs.append([self.end - self.start, self.now - self.waited])
        self.waited = self.now


path = f"{folder}/{kind}.onnx"
trainer = onnxtrain.Trainer(path, loss="softmax_cross_entropy", optimizer="adam(1e-3)", threads=threads)
clock, start = Clock(), time.perf_counter()
data = {"data": f"{folder}/pictures"} if kind == "pictures" else {"data": f"{folder}/data.csv", "target": "label"}
trainer.fit(**data, epochs=epochs, batch_size=batch, callbacks=[clock], progress=False)
print(json.dumps({"opening": clock.begun - start, "epochs": clock.epochs}))
"""

TORCH = """
import json, sys, time
from pathlib import Path
import numpy as np
import torch
from torch.nn.functional import cross_entropy
from zoo.architectures import LeNet5

kind, folder, batch, epochs, threads, workers = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:7])
torch.set_num_threads(threads)


class Pictures(torch.utils.data.Dataset):
    def __init__(self, folder):
        self.files = sorted(Path(folder).glob("*/*.jpg"))
        self.classes = {name: index for index, name in enumerate(sorted({file.parent.name for file in self.files}))}

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        from PIL import Image

        with Image.open(self.files[index]) as picture:
            pixels = np.asarray(picture.convert("L").resize((28, 28), Image.Resampling.BILINEAR), np.float32)
        return torch.from_numpy(pixels / 255)[None], self.classes[self.files[index].parent.name]


def table(path):
    import pandas

    read = pandas.read_csv(path)
    labels = read.pop("label").to_numpy(np.int64)
    pixels = read.to_numpy(np.float32).reshape(-1, 1, 28, 28)
    return torch.utils.data.TensorDataset(torch.from_numpy(pixels), torch.from_numpy(labels))


module = LeNet5()
optimizer = torch.optim.Adam(module.parameters(), lr=1e-3, fused=True)
start = time.perf_counter()
data = Pictures(f"{folder}/pictures") if kind == "pictures" else table(f"{folder}/data.csv")
loader = torch.utils.data.DataLoader(
    data, batch, shuffle=True, num_workers=workers, persistent_workers=workers > 0
)
batches = iter(loader)
opened = time.perf_counter()
found, first = [], True
for epoch in range(epochs):
    begun, waited = time.perf_counter(), 0.0
    batches = batches if epoch == 0 else iter(loader)
    while True:
        asked = time.perf_counter()
        got = next(batches, None)
        waited += time.perf_counter() - asked
        if got is None:
            break
        optimizer.zero_grad(set_to_none=True)
        loss = cross_entropy(module(got[0]), got[1])
        loss.backward()
        optimizer.step()
        loss.item()
        if first:
            first, begun, waited = False, time.perf_counter(), 0.0
    found.append([time.perf_counter() - begun, waited])
print(json.dumps({"opening": opened - start, "epochs": found}))
"""

PEERS = {
    "onnxtrain": (ONNXTRAIN, ()),
    "PyTorch, no workers": (TORCH, ("0",)),
    "PyTorch, 2 workers": (TORCH, ("2",)),
}
KINDS = {"pictures": "pictures", "csv": "CSV"}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, "one run on a few examples: a test run", threads=2)
    parser.add_argument("--peers", default=";".join(PEERS), help="names with semicolons between them")
    parser.add_argument("--examples", type=int, default=6000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--runs", type=int, default=3, help="processes of each (3)")
    parser.add_argument("--folder", default="build/benchmarks/reading")
    options = parser.parse_args(arguments)
    if options.quick:
        options.examples, options.runs, options.epochs = 200, 1, 2
    folder = Path(options.folder) / str(options.examples)
    write_data(folder, options.examples)
    warn_when_busy()
    rows = []
    with ForeignLoad() as foreign:
        for kind, shown in KINDS.items():
            found: dict[str, list[dict[str, list[list[float]]]]] = {peer: [] for peer in options.peers.split(";")}
            for _ in range(options.runs):
                for peer, results in found.items():
                    results.append(run(peer, kind, folder, options))
            rows += [[shown, peer, *summary(results)] for peer, results in found.items()]
    heads = ["data", "framework", "opening, s", "first epoch, s", "later epochs, s", "waiting in later epochs"]
    lines = [table(heads, rows), ""]
    lines.append(
        f"{options.examples} examples, batches of {options.batch}, {options.epochs} epochs. "
        f"{machine_line()} {options.threads} threads; medians of {options.runs} runs. {load_line(foreign)}"
    )
    write_report("\n".join(lines), options.output)
    return 0


def summary(results: Sequence[dict[str, list[list[float]]]]) -> list[str]:
    """Opening, the first epoch, a later one, and the fraction of later ones spent waiting."""
    opening = statistics.median(result["opening"] for result in results)
    first = statistics.median(result["epochs"][0][0] for result in results)
    later = statistics.median(seconds for result in results for seconds, _ in result["epochs"][1:])
    shares = [
        sum(waited for _, waited in result["epochs"][1:]) / sum(seconds for seconds, _ in result["epochs"][1:])
        for result in results
    ]
    return [*map(significant, (opening, first, later)), f"{100 * statistics.median(shares):.1f} %"]


def write_data(folder: Path, examples: int) -> None:
    """Write smooth random images, the same as a table, and the two models."""
    if (folder / "csv.onnx").exists():
        return
    import numpy as np
    import onnx
    from PIL import Image

    import onnxtrain

    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "data.csv").open("w") as file:
        file.write(",".join([*(f"pixel{index}" for index in range(784)), "label"]) + "\n")
        for index in range(examples):
            label = index % 10
            place = folder / "pictures" / str(label)
            place.mkdir(parents=True, exist_ok=True)
            rough = Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8))
            rough.resize((64, 64), Image.Resampling.BICUBIC).save(place / f"{index:06d}.jpg", quality=90)
            small = np.asarray(rough.convert("L").resize((28, 28)), np.float32).reshape(-1) / 255
            file.write(",".join([*(f"{value:.4f}" for value in small), str(label)]) + "\n")
    lenet = onnxtrain.examples.lenet5()
    onnx.save(lenet, folder / "pictures.onnx")
    front = onnx.parser.parse_model(
        f'<ir_version: {lenet.ir_version}, opset_import: ["": {lenet.opset_import[0].version}]> '
        "front (float[N, 784] pixels) => (float[N, 1, 28, 28] square) "
        "{ shape = Constant<value_ints = [-1, 1, 28, 28]>() square = Reshape(pixels, shape) }"
    )
    name = lenet.graph.input[0].name
    onnx.save(onnx.compose.merge_models(front, lenet, io_map=[("square", name)]), folder / "csv.onnx")


def run(peer: str, kind: str, folder: Path, options: argparse.Namespace) -> dict[str, list[list[float]]]:
    """Run one training in a separate process."""
    program, more = PEERS[peer]
    arguments = [kind, str(folder), str(options.batch), str(options.epochs), str(options.threads), *more]
    found = environment(options.threads)
    found["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY / "tests"), found.get("PYTHONPATH", "")])
    result = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, env=found)
    if result.returncode:
        raise SystemExit(f"{peer} failed on {kind}: {last_line(result.stderr)}")
    measured: dict[str, list[list[float]]] = json.loads(result.stdout.splitlines()[-1])
    return measured


if __name__ == "__main__":
    sys.exit(main())
