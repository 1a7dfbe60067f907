"""Adapters and heads of language models of 2.5 GB and more: memory of a process beside the mapped file.

    python benchmarks/large_files.py
    python benchmarks/large_files.py --models bfloat16 --folder FOLDER

A random-weight Llama is written piecewise, with external data, and trained in a process with limited anonymous memory
(``--limit``); mapped files do not count, since the system can reclaim them. A model is removed after its runs.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from harness import environment, last_line, machine_line, make_parser, table, write_report
from onnx import TensorProto, helper

OPSET = 24
PIECE = 1 << 22
"""Number of values generated and written at once."""


@dataclass(frozen=True)
class Llama:
    """A decoder of random weights.

    Attributes:
        layers: Number of layers.
        width: Hidden size.
        inner: Intermediate size of the MLP.
        heads: Attention heads.
        vocabulary: Vocabulary size.
        dtype: Element type of the weights.
        begins: Offset of the weights in the data file, after a hole.
        drawn: True if weights are random; otherwise they are holes of a sparse file.
    """

    layers: int
    width: int
    inner: int
    heads: int
    vocabulary: int
    dtype: str = "float32"
    begins: int = 0
    drawn: bool = True

    def write(self, path: Path) -> int:
        """Write the model and its data file, ``NAME.data``; return the bytes of the weights."""
        with path.with_suffix(".data").open("wb") as data:
            graph = _Graph(self, data)
            graph.emit()
            data.truncate(graph.end)
        onnx.save(graph.model(), path)
        return graph.end - self.begins

    def weights(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all weights, in the order of the data file."""
        width, found = self.width, {"model.embed_tokens.weight": (self.vocabulary, self.width)}
        for layer in range(self.layers):
            path = f"model.layers.{layer}."
            found |= {f"{path}self_attn.{part}_proj.weight": (width, width) for part in "qkvo"}
            found |= {f"{path}mlp.{part}_proj.weight": (width, self.inner) for part in ("gate", "up")}
            found[f"{path}mlp.down_proj.weight"] = (self.inner, width)
            found |= {f"{path}{norm}.weight": (width,) for norm in ("input_layernorm", "post_attention_layernorm")}
        return {**found, "model.norm.weight": (width,), "lm_head.weight": (width, self.vocabulary)}


class _Graph:
    """Nodes and weights of a model under construction."""

    def __init__(self, sizes: Llama, data: Any) -> None:
        self.sizes, self.end = sizes, sizes.begins
        self._data, self._random = data, np.random.default_rng(0)
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[TensorProto] = []
        self._type = TensorProto.DataType.Value({"float32": "FLOAT"}.get(sizes.dtype, sizes.dtype.upper()))

    def emit(self) -> None:
        sizes, head = self.sizes, self.sizes.width // self.sizes.heads
        for name, shape in sizes.weights().items():
            self._weight(name, shape)
        x = self._node("Gather", "model.embed_tokens.weight", "input_ids")
        settings = {"q_num_heads": sizes.heads, "kv_num_heads": sizes.heads, "is_causal": 1, "scale": head**-0.5}
        for layer in range(sizes.layers):
            path = f"model.layers.{layer}"
            normed = self._node("RMSNormalization", x, f"{path}.input_layernorm.weight")
            parts = [self._linear(normed, f"{path}.self_attn.{part}_proj") for part in "qkv"]
            mixed = self._node("Attention", *parts, **settings)
            x = self._node("Add", x, self._linear(mixed, f"{path}.self_attn.o_proj"))
            normed = self._node("RMSNormalization", x, f"{path}.post_attention_layernorm.weight")
            gate = self._node("Swish", self._linear(normed, f"{path}.mlp.gate_proj"))
            inner = self._node("Mul", gate, self._linear(normed, f"{path}.mlp.up_proj"))
            x = self._node("Add", x, self._linear(inner, f"{path}.mlp.down_proj"))
        self._node("MatMul", self._node("RMSNormalization", x, "model.norm.weight"), "lm_head.weight", result="logits")

    def model(self) -> onnx.ModelProto:
        logits = ["batch", "tokens", self.sizes.vocabulary]
        graph = helper.make_graph(
            self._nodes,
            "llama",
            [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "tokens"])],
            [helper.make_tensor_value_info("logits", self._type, logits)],
            self._weights,
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)

    def _linear(self, x: str, name: str) -> str:
        return self._node("MatMul", x, f"{name}.weight", name=f"/{name.replace('.', '/')}/MatMul")

    def _node(self, operator: str, *inputs: str, result: str = "", name: str = "", **attributes: Any) -> str:
        result = result or f"v{len(self._nodes)}"
        self._nodes.append(helper.make_node(operator, inputs, [result], name=name or result, **attributes))
        return result

    def _weight(self, name: str, shape: tuple[int, ...]) -> None:
        dtype = helper.tensor_dtype_to_np_dtype(self._type)
        count = math.prod(shape)
        tensor = TensorProto(name=name, dims=shape, data_type=self._type, data_location=TensorProto.EXTERNAL)
        place = {"location": Path(self._data.name).name, "offset": self.end, "length": count * dtype.itemsize}
        for key, value in place.items():
            tensor.external_data.add(key=key, value=str(value))
        self._weights.append(tensor)
        self._data.seek(self.end)
        if len(shape) == 1:
            self._data.write(np.ones(shape, dtype).tobytes())
        elif self.sizes.drawn:
            for start in range(0, count, PIECE):
                piece = self._random.standard_normal(min(PIECE, count - start), np.float32)
                self._data.write((piece * np.float32(0.02)).astype(dtype).tobytes())
        self.end += place["length"]


GIGABYTES = {
    "float32": Llama(8, 2048, 5632, 16, 65536),
    "bfloat16": Llama(20, 2048, 5632, 16, 65536, "bfloat16"),
    "one tensor over 2 GB": Llama(1, 4608, 4608, 36, 131072),
    "weights behind byte 2^32": Llama(8, 2048, 5632, 16, 65536, begins=(1 << 32) - 4096),
}
MOST = 1 << 30
"""Bytes of the largest head trained in full; with states and gradients it takes four times as much memory."""

QUICK = Llama(2, 64, 160, 4, 512)

RUN = """
import json, resource, sys, threading, time
from pathlib import Path
path, what, limit, steps, vocabulary = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])
resource.setrlimit(resource.RLIMIT_DATA, (limit << 20, limit << 20))  # private dirty memory of the process
import numpy as np
import onnxtrain
def status(*names):
    found = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return [int(found[name].split()[0]) / 1024 for name in names]
class Watch(threading.Thread):
    most = 0.0
    def run(self):
        while not done.wait(0.01):
            self.most = max(self.most, *status("RssAnon"))
done, watch = threading.Event(), Watch(daemon=True)
watch.start()
options = {"lora": onnxtrain.Lora(rank=8, alpha=16)} if what == "LoRA" else {"train": "lm_head*"}
tokens = np.random.default_rng(0).integers(0, vocabulary, (1, 17))
trainer = onnxtrain.Trainer(path, loss="softmax_cross_entropy", optimizer="adamw(lr=1e-3)", threads=1, **options)
times, losses = [], []
for _ in range(steps):
    start = time.perf_counter()
    losses.append(trainer.train_step(tokens[:, :-1], tokens[:, 1:]))
    times.append(time.perf_counter() - start)
trained, watch.most = watch.most, 0.0
(result := Path(path).parent / "tuned").mkdir()
trainer.save(result / "tuned.onnx")
done.set()
watch.join()
print(json.dumps({"step": sorted(times)[len(times) // 2], "losses": losses, "training": trained, "saving": watch.most,
    "states": sum(array.nbytes for array in trainer.parameters.values()) * 3 / 2**20,
    **dict(zip(("peak", "file"), status("VmHWM", "RssFile")))}))
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = make_parser(__doc__, "tiny models")
    parser.add_argument("--models", help=f"some of them, separated by commas: {', '.join(GIGABYTES)}")
    parser.add_argument("--what", default="LoRA,head", help="what is trained, separated by commas")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--limit", type=int, default=0, help="MiB of its own that a process may have; default: by case")
    parser.add_argument("--folder", type=Path, help="where models are written (by default the system's for such files)")
    options = parser.parse_args(arguments)
    rows = []
    for name in options.models.split(",") if options.models else GIGABYTES:
        sizes = GIGABYTES[name]
        if options.quick:
            sizes = replace(QUICK, dtype=sizes.dtype, begins=sizes.begins)
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            path = Path(folder) / "model.onnx"
            weights = sizes.write(path) / 2**20
            for what in options.what.split(","):
                if what == "head" and 4 * sizes.width * sizes.vocabulary > MOST:
                    continue
                found = run(path, what, sizes, options.limit or limit_of(sizes, what), options.steps)
                rows.append([name, f"{weights:,.0f}", what, *found])
    head = [
        "model",
        "weights, MiB",
        "trained",
        "with states, MiB",
        "own, training",
        "own, saving",
        "peak",
        "of which files",
    ]
    text = table([*head, "step, s", "loss"], rows)
    write_report("\n".join([text, "", machine_line()]), options.output)


def limit_of(sizes: Llama, what: str) -> int:
    """Limit on anonymous memory in MiB: 900, plus weights, two states and gradients of a trained head.

    16-bit weights are converted to float one after the other, for which ONNX Runtime's arena may request twice as much.
    """
    head = 4 * sizes.width * sizes.vocabulary >> 20
    return 900 + head * (4 * (what == "head") + 2 * (sizes.dtype != "float32"))


def run(path: Path, what: str, sizes: Llama, limit: int, steps: int) -> list[str]:
    """Run one training in a separate process and return its table cells."""
    command = [sys.executable, "-c", RUN, str(path), what, str(limit), str(steps), str(sizes.vocabulary)]
    result = subprocess.run(command, env=environment(1), capture_output=True, text=True)
    for file in (path.parent / "tuned").glob("*"):
        file.unlink()
    if (path.parent / "tuned").exists():
        (path.parent / "tuned").rmdir()
    if result.returncode:
        print(result.stderr, file=sys.stderr)
        return [last_line(result.stderr), *[""] * 6]
    found = json.loads(result.stdout.splitlines()[-1])
    cells = [f"{found[key]:,.0f}" for key in ("states", "training", "saving", "peak", "file")]
    return [*cells, f"{found['step']:.1f}", f"{found['losses'][0]:.3f} → {found['losses'][-1]:.3f}"]


if __name__ == "__main__":
    main()
