"""Time every differentiable operator of ONNX, forward and backward, beside PyTorch.

    python benchmarks/operators.py --output benchmarks/pages/operators.md     # resumes where it was stopped
    python benchmarks/operators.py --only 'Einsum*' --sizes medium

Each case is one node with its gradients by all floating inputs, in this process and on one thread. The two sides take
turns, and the figure is processor time (user and system), which other programs on the machine disturb less. Results
go to a file of lines as they come; a second run measures what is missing there.
"""

from __future__ import annotations

import fnmatch
import json
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from harness import machine_line, make_parser, table, write_report
from onnx import helper
from step import geometric_mean
from timed_operators import SIZES, Case, cases

from onnxtrain import custom_ops_library
from onnxtrain.autodiff.node import Node
from onnxtrain.autodiff.registry import Gradients, register_gradient
from onnxtrain.graph import Value
from onnxtrain.graph.shapes import infer_shapes
from onnxtrain.lowering.pipeline import lower_graph

if TYPE_CHECKING:
    import torch

DOMAIN, TRAINING = "benchmarks", "ai.onnx.preview.training"
Step = Callable[[], object]


@register_gradient("Seed", domain=DOMAIN)
def seed(node: Node, dy: Value) -> Gradients:
    """The objective, whose gradient by y is the cotangent."""
    return node.inputs[1], None


SECONDS = 0.06
"""Processor time for one side in one round, at least."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing, print the report and write it."""
    import torch

    parser = make_parser(__doc__, "the first size of three operators, to see that it runs")
    parser.add_argument("--only", default="*", help="pattern of operators or cases")
    parser.add_argument("--sizes", default=",".join(SIZES), help="sizes, separated by commas")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side (5)")
    kept = Path("build/benchmarks/operators.jsonl")
    parser.add_argument("--results", type=Path, default=kept, help="file of results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    chosen = [c for c in cases() if fnmatch.fnmatch(c.operator, options.only) or fnmatch.fnmatch(c.name, options.only)]
    sizes = options.sizes.split(",")
    if options.quick:
        chosen = [case for case in chosen if case.operator in ("Relu", "Add", "Einsum")]
        sizes, options.rounds = sizes[:1], 1
    options.results.parent.mkdir(parents=True, exist_ok=True)
    found = _read(options.results)
    for case in chosen:
        for size in sizes:
            if (case.name, size) not in found:
                found[case.name, size] = measured(case, size, options.rounds)
                with options.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"case": case.name, "size": size, **found[case.name, size]}) + "\n")
                print(case.name, size, *(f"{k} {v:.3g}" for k, v in found[case.name, size].items()), flush=True)
    write_report(_report(found, [case.name for case in chosen], sizes), options.output)
    return 0


def _read(path: Path) -> dict[tuple[str, str], dict[str, float]]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    entries = [json.loads(line) for line in lines]
    return {(entry.pop("case"), entry.pop("size")): entry for entry in entries}


def _report(found: dict[tuple[str, str], dict[str, float]], names: Sequence[str], sizes: Sequence[str]) -> str:
    """The cases above PyTorch's time, the slowest first, and what holds for all."""
    kept = {key: entry for key, entry in found.items() if key[0] in names and key[1] in sizes}
    ratios = {key: entry["ours"] / entry["torch"] for key, entry in kept.items()}
    slower = sorted((key for key, ratio in ratios.items() if ratio > 1), key=lambda key: -ratios[key])
    times = {key: [f"{1e3 * kept[key][side]:.3g}" for side in ("ours", "torch")] for key in slower}
    rows = [[*key, *times[key], f"{ratios[key]:.2f}"] for key in slower]
    means = ", ".join(
        f"{size} {geometric_mean([ratio for key, ratio in ratios.items() if key[1] == size]):.2f}"
        for size in sizes
        if any(key[1] == size for key in ratios)
    )
    above = sum(ratio > 1.2 for ratio in ratios.values())
    return (
        f"{table(['case', 'size', 'onnxtrain, ms', 'PyTorch, ms', 'ratio'], rows)}\n\n"
        f"{len(ratios)} measurements; geometric means: {means}. {len(slower)} above 1.0, {above} above 1.2. Forward "
        f"and backward, processor time on one thread, the median of rounds. {machine_line()}"
    )


def measured(case: Case, size: str, rounds: int) -> dict[str, float]:
    """Seconds of processor time of both sides, after their results agree."""
    random = np.random.default_rng(0)
    arrays = [x.array(random, SIZES[size]) for x in case.inputs]
    theirs, expected = _torch_step(case, arrays, random)
    ours, results = _session_step(case, arrays, expected["cotangent"])
    _check(case, results, expected)
    counts = [_repetitions(step) for step in (ours, theirs)]
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds):
        for side in (0, 1) if turn % 2 == 0 else (1, 0):
            times[side].append(_time((ours, theirs)[side], counts[side]))
    return {"ours": statistics.median(times[0]), "torch": statistics.median(times[1])}


def _time(step: Callable[[], object], count: int) -> float:
    start = time.process_time()
    for _ in range(count):
        step()
    return (time.process_time() - start) / count


def _repetitions(step: Callable[[], object]) -> int:
    step()
    once = max(_time(step, 2), 1e-6)
    return max(1, min(20_000, int(SECONDS / once)))


def _torch_step(case: Case, arrays: Sequence[np.ndarray], random: np.random.Generator) -> tuple[Step, dict[str, Any]]:
    import torch

    tensors = [torch.from_numpy(np.array(array)) for array in arrays]
    for tensor, x in zip(tensors, case.inputs, strict=True):
        tensor.requires_grad_(x.wanted)
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    y = case.peer(*tensors)
    cotangent = random.uniform(-1, 1, y.shape).astype(np.dtype(str(y.dtype).removeprefix("torch.")))
    backward = torch.from_numpy(np.array(cotangent))

    def step() -> list[Any]:
        # A gradient that is the cotangent itself, or a view of it, is written out, as by a session.
        found = torch.autograd.grad(case.peer(*tensors), wanted, backward)
        return [g.clone(memory_format=torch.contiguous_format) if _is_view(g, backward) else g for g in found]

    return step, {"cotangent": cotangent, "y": y.detach().numpy(), "gradients": [g.numpy() for g in step()]}


def _is_view(gradient: torch.Tensor, cotangent: torch.Tensor) -> bool:
    return gradient.data_ptr() == cotangent.data_ptr() or 0 in gradient.stride() or not gradient.is_contiguous()


def _session_step(case: Case, arrays: Sequence[np.ndarray], cotangent: np.ndarray) -> tuple[Step, dict[str, Any]]:
    names = [f"x{index}" for index in range(len(arrays))]
    given = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array, x in zip(names, arrays, case.inputs, strict=True)
        if x.shape
    ]
    constants = [
        onnx.numpy_helper.from_array(np.asarray(array), name)
        for name, array, x in zip(names, arrays, case.inputs, strict=True)
        if not x.shape
    ]
    outputs = [f"y{index}" for index in range(case.outputs)]
    cotangent = cotangent.reshape(_shape(case, cotangent))
    kind = helper.np_dtype_to_tensor_dtype(cotangent.dtype)
    given.append(helper.make_tensor_value_info("cotangent", kind, cotangent.shape))
    nodes = [
        helper.make_node(case.operator, names, outputs, **case.attributes),
        helper.make_node("Seed", ["y0", "cotangent"], ["objective"], domain=DOMAIN),
    ]
    wanted = [name for name, x in zip(names, case.inputs, strict=True) if x.wanted]
    gradients = [f"{name}_grad" for name in wanted]
    nodes.append(helper.make_node("Gradient", wanted, gradients, domain=TRAINING, xs=wanted, y="objective"))
    ends = [helper.make_tensor_value_info("y0", kind, cotangent.shape)]
    shapes = {name: array.shape for name, array in zip(names, arrays, strict=True)}
    ends += [
        helper.make_tensor_value_info(
            f"{name}_grad", helper.np_dtype_to_tensor_dtype(arrays[names.index(name)].dtype), shapes[name]
        )
        for name in wanted
    ]
    objective = helper.make_tensor_value_info("objective", kind, [])
    graph = helper.make_graph(nodes, "case", given, ends, constants, value_info=[objective])
    opsets = [helper.make_opsetid("", case.opset), *(helper.make_opsetid(domain, 1) for domain in (DOMAIN, TRAINING))]
    model = ir.from_proto(helper.make_model(graph, opset_imports=opsets, ir_version=10))
    lowered = ir.to_proto(infer_shapes(lower_graph(infer_shapes(model), kernels=True)))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    options.register_custom_ops_library(str(custom_ops_library()))
    session = onnxruntime.InferenceSession(lowered.SerializeToString(), options, ["CPUExecutionProvider"])
    binding = session.io_binding()
    feeds = {**dict(zip(names, arrays, strict=True)), "cotangent": cotangent}
    for value in session.get_inputs():
        feeds[value.name] = feeds[value.name].copy()  # in order
        binding.bind_cpu_input(value.name, feeds[value.name])
    for value in session.get_outputs():
        binding.bind_output(value.name)
    session.run_with_iobinding(binding)
    results = [value.numpy() for value in binding.get_outputs()]
    for value, array in zip(session.get_outputs(), results, strict=True):
        buffer = onnxruntime.OrtValue.ortvalue_from_numpy(np.empty_like(array))
        binding.bind_ortvalue_output(value.name, buffer)

    def step(_arrays: dict[str, np.ndarray] = feeds) -> None:  # which the binding reads, and does not keep
        session.run_with_iobinding(binding)

    return step, {"y": results[0], "gradients": results[1:]}


def _shape(case: Case, cotangent: np.ndarray) -> tuple[int, ...]:
    """ONNX's outputs of recurrent layers have an axis of directions."""
    return (cotangent.shape[0], 1, *cotangent.shape[1:]) if case.operator in ("LSTM", "GRU", "RNN") else cotangent.shape


def _check(case: Case, results: dict[str, Any], expected: dict[str, Any]) -> None:
    """Both sides compute the same, unless the case has another order of its values, or draws numbers."""
    if case.form in ("order of ONNX", "random"):
        return
    pairs = [(results["y"], expected["y"]), *zip(results["gradients"], expected["gradients"], strict=True)]
    for ours, theirs in pairs:
        limit = 1e-3 * max(1.0, float(np.abs(theirs).max()))
        if ours.size != theirs.size or not np.allclose(ours.reshape(theirs.shape), theirs, rtol=1e-3, atol=limit):
            raise SystemExit(f"{case.name} computes something else than PyTorch's function; mend the case.")


if __name__ == "__main__":
    raise SystemExit(main())
