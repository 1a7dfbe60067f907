"""Training steps on a GPU with the CUDA provider, against PyTorch eager and compiled, with fused Adam, on the same GPU.

    python benchmarks/gpu.py --output build/benchmarks/gpu.md

Needs a GPU, onnxruntime-gpu, a build of PyTorch for CUDA, and for the updates by kernels the library for CUDA
(docs/devices.md). `--device cpu --quick` tries the script on the CPU. Four tables: time of a step, nodes of the step
that do not run on the device, difference to the losses on the CPU, and bandwidth of Adam's update and of a copy on the
device.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from harness import Interpreters, machine_line, make_parser, prepare, significant, table, write_report
from models import find_model
from peers import EPSILON, LEARNING_RATE, Task, Torch, batches, onnxtrain_trainer
from step import listed

MODELS = {"lenet5": 256, "resnet18": 128, "bert_base": 32, "vit_b16": 32}
WARMUP, AGREEING_STEPS = 3, 5
PARAMETERS = [1 << 20] * 24 + [1000] * 100  # elements per timed tensor


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the report and write it."""
    parser = make_parser(__doc__, "LeNet-5 and two steps, to see that it runs", models=True)
    parser.add_argument("--models", type=listed(MODELS), default=list(MODELS), help=", ".join(MODELS))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rounds", type=int, default=30, help="steps of each side that are timed (30)")
    options = parser.parse_args(arguments)
    missing = what_is_missing(options.device)
    if missing:
        print(f"Nothing is measured: {missing}.")
        return 0
    if options.quick:
        options.models, options.rounds = ["lenet5"], 2
    sizes = {name: 4 if options.quick else MODELS[name] for name in options.models}
    threads = os.cpu_count() or 1
    tasks = [Task("onnxtrain", name, size, threads, options.folder) for name, size in sizes.items()]
    failed = prepare(tasks, Interpreters())
    if failed:
        raise SystemExit(f"Not measured: {failed}.")
    report = "\n\n".join(
        [
            times(tasks, options.device, options.rounds),
            placement(tasks, options.device),
            agreement(tasks, options.device, 2 if options.quick else AGREEING_STEPS),
            update_speed(options.device, PARAMETERS[-2:] if options.quick else PARAMETERS, options.rounds),
            machine_line(),
        ]
    )
    write_report(report, options.output)
    return 0


def what_is_missing(device: str) -> str:
    """Return what is missing for the measurement, or ""."""
    if device == "cpu":
        return ""
    import onnxruntime

    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        return "this onnxruntime has no provider for CUDA (onnxruntime-gpu has), or there is no GPU here"
    import torch

    return "" if torch.cuda.is_available() else "PyTorch finds no GPU here"


class TorchOnDevice(Torch):
    """PyTorch eager with fused Adam on a device; each step copies its batch there."""

    def __init__(self, task: Task, device: str, *, compiled: bool = False) -> None:
        import torch

        self.torch, self.device = torch, device
        self.model = find_model(task.model)
        self.module = self.model.module().to(device)
        self.optimizer = torch.optim.Adam(self.module.parameters(), lr=LEARNING_RATE, eps=EPSILON, fused=True)
        if compiled:
            self.module = torch.compile(self.module)

    def step(self, inputs: dict[str, np.ndarray], target: np.ndarray) -> float:
        """Run one step; return the loss before it."""
        there = [self.torch.from_numpy(array).to(self.device) for array in (*inputs.values(), target)]
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model.torch_loss(self.module(*there[:-1]), there[-1])
        loss.backward()
        self.optimizer.step()
        return float(loss.item())  # synchronizes with the device


def times(tasks: Sequence[Task], device: str, rounds: int) -> str:
    """Time the steps of both sides in turns; each ends with the loss as a Python float."""
    rows = []
    for task in tasks:
        batch = batches(task)
        steps = {
            "onnxtrain": onnxtrain_trainer(task, providers=[device]).train_step,
            "eager": TorchOnDevice(task, device).step,
        }
        if device == "cuda":
            steps["compiled"] = TorchOnDevice(task, device, compiled=True).step
        taken: dict[str, list[float]] = {name: [] for name in steps}
        for number in range(WARMUP + rounds):
            for name, step in steps.items():
                inputs, target = batch(number)
                start = time.perf_counter()
                step(inputs, target)
                if number >= WARMUP:
                    taken[name].append(time.perf_counter() - start)
        ratios = [
            statistics.median(a / b for a, b in zip(taken["onnxtrain"], taken[peer], strict=True))
            for peer in steps
            if peer != "onnxtrain"
        ]
        middle = [significant(1e3 * statistics.median(found)) for found in taken.values()]
        rows.append([find_model(task.model).description, str(task.batch), *middle, *(f"{r:.2f}" for r in ratios)])
        print(*rows[-1], sep="  ", flush=True)
    peers = ["eager", "compiled"][: len(rows[0]) // 2 - 1]
    columns = ["onnxtrain, ms", *(f"PyTorch {peer}, ms" for peer in peers), *(f"ratio to {peer}" for peer in peers)]
    return table(["model", "batch", *columns], rows)


def placement(tasks: Sequence[Task], device: str) -> str:
    """Nodes of the step by the provider that runs them: what runs on the CPU, and the copies that ONNX Runtime adds."""
    rows = []
    for task in tasks:
        few = Task(task.peer, task.model, 4, task.threads, task.folder)
        with tempfile.TemporaryDirectory() as folder:
            trainer = onnxtrain_trainer(few, providers=[device], profile=str(Path(folder) / "profile"))
            trainer.train_step(*batches(few)(0))
            events = json.loads(Path(trainer.executor.session._steps[0]._session.end_profiling()).read_text())
        nodes = [event["args"] for event in events if event["name"].endswith("_kernel_time")]
        elsewhere = Counter(
            node["op_name"] for node in nodes if device not in node["provider"].lower() or "Memcpy" in node["op_name"]
        )
        listed_ones = ", ".join(f"{count} {name}" for name, count in elsewhere.most_common()) or "none"
        rows.append([find_model(task.model).description, str(len(nodes)), listed_ones])
        print(*rows[-1], sep="  ", flush=True)
    return table(["model", "nodes", "on the CPU, and copies"], rows)


def agreement(tasks: Sequence[Task], device: str, steps: int) -> str:
    """The largest difference to the CPU's losses over some steps from the same weights, relative to the first loss."""
    rows = []
    for task in tasks:
        few = Task(task.peer, task.model, 4, task.threads, task.folder)
        there, here = (onnxtrain_trainer(few, providers=[name]) for name in (device, "cpu"))
        batch = batches(few)
        losses = [(there.train_step(*batch(step)), here.train_step(*batch(step))) for step in range(steps)]
        worst = max(abs(one - other) for one, other in losses) / abs(losses[0][1])
        rows.append([find_model(task.model).description, str(steps), f"{worst:.1e}"])
    return table(["model", "steps", "largest difference to the processor's loss"], rows)


def update_speed(device: str, sizes: Sequence[int], rounds: int) -> str:
    """Bandwidth in bytes per second of Adam's update, and of a copy on the device."""
    import onnxruntime
    import torch
    from onnx import TensorProto, helper

    import onnxtrain
    from onnxtrain.graph.domains import TRAINING_DOMAIN

    options = onnxtrain.RuntimeOptions(providers=[device], kernels=True)
    names = [f"{letter}{i}" for letter in "XGVH" for i in range(len(sizes))]
    outputs = [f"{letter}{i}_new" for letter in "XVH" for i in range(len(sizes))]
    lengths = dict(zip(names, [*sizes] * 4, strict=True))
    graph = helper.make_graph(
        [helper.make_node("Adam", ["R", "T", *names], outputs, domain=TRAINING_DOMAIN)],
        "update",
        [
            helper.make_tensor_value_info("R", TensorProto.FLOAT, []),
            helper.make_tensor_value_info("T", TensorProto.INT64, []),
            *(helper.make_tensor_value_info(name, TensorProto.FLOAT, [lengths[name]]) for name in names),
        ],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [lengths[name[:-4]]]) for name in outputs],
    )
    imports = [helper.make_opsetid("", 18), helper.make_opsetid(TRAINING_DOMAIN, 1)]
    session = onnxruntime.InferenceSession(
        helper.make_model(graph, opset_imports=imports, ir_version=8).SerializeToString(),
        options.session_options(kernels=options.uses_kernels()),
        providers=options.provider_list(),
    )
    place = onnxruntime.OrtValue.ortvalue_from_numpy
    values = {name: place(np.full(lengths[name], 0.5, np.float32), device, 0) for name in names}
    binding = session.io_binding()
    binding.bind_cpu_input("R", np.array(1e-3, np.float32))
    binding.bind_cpu_input("T", np.array(3, np.int64))
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for name in outputs:
        binding.bind_ortvalue_output(name, values[name[:-4]])

    source = torch.full((sum(sizes),), 0.5, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()

    speeds = []
    for work, arrays in ((lambda: session.run_with_iobinding(binding), 7), (copy, 2)):
        taken = []
        for number in range(WARMUP + rounds):
            start = time.perf_counter()
            work()
            if number >= WARMUP:
                taken.append(time.perf_counter() - start)
        speeds.append(arrays * 4 * sum(sizes) / statistics.median(taken) / 1e9)
    row = [f"{len(sizes)} tensors, {sum(sizes) / 1e6:.3g} million", *map(significant, speeds)]
    return table(["Adam over", "update, GB/s", "copy, GB/s", "share"], [[*row, f"{speeds[0] / speeds[1]:.2f}"]])


if __name__ == "__main__":
    sys.exit(main())
