"""Step graphs run with one buffer for input and output of every state that their metadata lists, in many orders."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import safetensors.numpy
from onnx import numpy_helper, parser

import onnxtrain
from onnxtrain.lowering.memory.in_place import in_place_states
from zoo.arrays import assert_same, copied

pytestmark = pytest.mark.thorough  # it takes seconds

EXAMPLE = Path(__file__).parents[2] / "examples" / "step_in_place.py"
RANDOM = np.random.default_rng(0)
LENGTH, WIDTH, HIDDEN = 3, 4, 5


def recurrent(operator: str) -> onnx.ModelProto:
    """Return one recurrent layer and a linear one over the last state."""
    gates = {"RNN": 1, "GRU": 3, "LSTM": 4}[operator]
    model = parser.parse_model(f"""<ir_version: 8, opset_import: ["": 18]>
        g (float[N,{LENGTH},{WIDTH}] x) => (float[N,3] y) {{
            t = Transpose<perm = [1, 0, 2]>(x)
            s, h = {operator}<hidden_size = {HIDDEN}>(t, w, r, b)
            l = Squeeze(h, axis)  m = MatMul(l, head)  y = Add(m, bias) }}""")
    shapes = {
        "w": (1, gates * HIDDEN, WIDTH),
        "r": (1, gates * HIDDEN, HIDDEN),
        "b": (1, 2 * gates * HIDDEN),
        "head": (HIDDEN, 3),
        "bias": (3,),
    }
    for name, shape in shapes.items():
        array = 0.5 * RANDOM.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    model.graph.initializer.append(numpy_helper.from_array(np.array([0]), "axis"))
    return model


def scan() -> onnx.ModelProto:
    """Return a recurrence written out, whose body reads the outer weights, one of them twice."""
    model = parser.parse_model(f"""<ir_version: 8, opset_import: ["": 18]>
        g (float[N,{LENGTH},{WIDTH}] x) => (float[N,3] y) {{
            t = Transpose<perm = [1, 0, 2]>(x)
            first = Gather<axis = 0>(t, zero)
            start = MatMul(first, w)
            h, all = Scan(start, t) <num_scan_inputs = 1, body = b (float[N,{HIDDEN}] s, float[N,{WIDTH}] i)
                => (float[N,{HIDDEN}] n, float[N,{HIDDEN}] o)
                {{ a = MatMul(i, w)  c = MatMul(s, r)  d = Add(a, c)  e = Tanh(d)  n = Mul(e, scale)  o = Neg(n) }}>
            y = MatMul(h, head) }}""")
    shapes = {"w": (WIDTH, HIDDEN), "r": (HIDDEN, HIDDEN), "scale": (HIDDEN,), "head": (HIDDEN, 3)}
    for name, shape in shapes.items():
        array = 0.5 * RANDOM.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    model.graph.initializer.append(numpy_helper.from_array(np.array(0), "zero"))
    return model


def batch(*shape: int) -> dict[str, np.ndarray]:
    return {"": RANDOM.standard_normal((4, *shape)).astype(np.float32)}


TEXT = {"input_ids": RANDOM.integers(1, 20, (4, 6)), "attention_mask": np.ones((4, 6), np.int64)}
MODELS: dict[str, tuple[Callable[[], onnx.ModelProto], dict[str, np.ndarray], int]] = {
    "mlp": (lambda: onnxtrain.examples.mlp((6, 8, 7, 3)), batch(6), 3),
    "lenet5": (onnxtrain.examples.lenet5, batch(1, 28, 28), 10),
    "small_resnet": (onnxtrain.examples.small_resnet, batch(3, 16, 16), 10),
    "small_transformer": (onnxtrain.examples.small_transformer, TEXT, 4),
    "RNN": (lambda: recurrent("RNN"), batch(LENGTH, WIDTH), 3),
    "GRU": (lambda: recurrent("GRU"), batch(LENGTH, WIDTH), 3),
    "LSTM": (lambda: recurrent("LSTM"), batch(LENGTH, WIDTH), 3),
    "Scan": (scan, batch(LENGTH, WIDTH), 3),
}
OPTIMIZERS = {
    "SGD": onnxtrain.Momentum(0.1, alpha=0.0),
    "Momentum": onnxtrain.Momentum(0.1),
    "Adam": onnxtrain.Adam(0.01, norm_coefficient=0.01),
    "AdamW": onnxtrain.AdamW(0.01),
    "Adagrad": onnxtrain.Adagrad(0.1),
    "SSGD": onnxtrain.SSGD(0.1),
}


def metadata(graph: onnx.ModelProto) -> tuple[dict[str, str], list[str]]:
    """Return the states of a step graph, and those that may be in place."""
    entries = {entry.key: entry.value for entry in graph.metadata_props}
    return json.loads(entries["onnxtrain.states"]), json.loads(entries["onnxtrain.in_place"])


def eager(graph: onnx.ModelProto, in_place: list[str], seed: int) -> onnx.ModelProto:
    """Return the graph in the worst order: writers as early as their inputs allow, all else as late."""
    result = onnx.ModelProto()
    result.CopyFrom(graph)
    nodes = list(result.graph.node)
    producers = {name: node for node in range(len(nodes)) for name in nodes[node].output}
    writers = [producers[f"{name}_new"] for name in in_place if f"{name}_new" in producers]
    np.random.default_rng(seed).shuffle(writers)
    order: dict[int, None] = {}

    def schedule(node: int) -> None:
        waiting = [(node, False)]
        while waiting:
            node, ready = waiting.pop()
            if ready:
                order[node] = None
            elif node not in order:
                waiting.append((node, True))
                waiting += [(producers[name], False) for name in names_read(nodes[node]) if name in producers]

    for node in (*writers, *reversed(range(len(nodes)))):
        schedule(node)
    del result.graph.node[:]
    result.graph.node.extend(nodes[index] for index in order)
    return result


def names_read(node: onnx.NodeProto) -> Iterator[str]:
    yield from node.input
    for attribute in node.attribute:
        for inner in attribute.g.node:
            yield from names_read(inner)
        yield from (value.name for value in attribute.g.output)


RUNS = ("as written", "unchanged by the runtime", "parallel", "eager 0", "eager 1", "eager 2")


def open_session(graph: onnx.ModelProto, run: str, shared: list[str]) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    if run.startswith("eager"):
        graph = eager(graph, shared, int(run.split()[1]))
        options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED  # the order of the graph
    if not run.startswith("as written"):
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if run == "parallel":
        options.execution_mode = onnxruntime.ExecutionMode.ORT_PARALLEL
        options.inter_op_num_threads = 2
    return onnxruntime.InferenceSession(graph.SerializeToString(), options, providers=["CPUExecutionProvider"])


class Stepper:
    """Step a graph on its own buffers, one for each state in ``shared`` and two for the others."""

    def __init__(self, graph: onnx.ModelProto, shared: list[str], run: str = "as written") -> None:
        self.states = metadata(graph)[0]
        self.shared = set(shared)
        self.session = open_session(graph, run, shared)
        self.inputs = {value.name for value in self.session.get_inputs()}
        returned = [value.name for value in self.session.get_outputs()]
        self.results = [name for name in returned if name not in self.states.values()]

    def __call__(self, values: dict[str, np.ndarray], feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        binding = self.session.io_binding()
        new = {name: values[name] if name in self.shared else np.empty_like(values[name]) for name in self.states}
        for name in self.inputs:
            array = values[name] if name in values else feeds[name]
            binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        for name, output in self.states.items():
            array = new[name]
            binding.bind_output(output, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        for name in self.results:
            binding.bind_output(name, "cpu")
        self.session.run_with_iobinding(binding)
        values.update(new)
        # In the order in which they were bound.
        return [value.numpy().copy() for value in binding.get_outputs()[len(new) :]]


@functools.cache
def training(name: str, optimizer: str, *, accumulate: bool = False) -> onnx.ModelProto:
    modes = {"batch_norm": "train"} if name == "small_resnet" else {}
    return onnxtrain.training_model(
        MODELS[name][0](),
        loss="softmax_cross_entropy",
        optimizer=OPTIMIZERS[optimizer],
        accumulate=accumulate,
        **modes,
    )


@functools.cache
def lowered(name: str, optimizer: str, accumulate: bool) -> list[onnx.ModelProto]:
    model = training(name, optimizer, accumulate=accumulate)
    return [onnxtrain.lower(model, entry=entry) for entry in range(len(model.training_info))]


def feeds_of(name: str, model: onnx.ModelProto) -> dict[str, np.ndarray]:
    _, inputs, classes = MODELS[name]
    first = model.graph.input[0].name
    feeds = {key or first: array for key, array in inputs.items()}
    return feeds | {"target": np.arange(4) % classes, "learning_rate": np.array(0.05, np.float32)}


def first_values(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    options = onnxtrain.RuntimeOptions(kernels=False, threads=1)
    return {key: np.array(array) for key, array in onnxtrain.TrainingSession(model, runtime=options).state.items()}


def losses_and_states(
    steppers: list[Stepper], values: dict[str, np.ndarray], feeds: dict[str, np.ndarray], steps: int = 3
) -> tuple[list[float], dict[str, np.ndarray]]:
    values = copied(values)
    losses = [float(result) for _ in range(steps) for stepper in steppers for result in stepper(values, feeds)]
    return losses, values


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    ("name", "optimizer", "accumulate"),
    [
        *((name, "Adam", False) for name in MODELS),
        *(("mlp", optimizer, False) for optimizer in OPTIMIZERS if optimizer != "Adam"),
        *((name, "Momentum", True) for name in ("mlp", "LSTM", "Scan", "small_resnet")),
        ("LSTM", "SSGD", False),
    ],
)
def test_what_the_metadata_lists_may_be_in_place(name: str, optimizer: str, accumulate: bool, run: str) -> None:
    model = training(name, optimizer, accumulate=accumulate)
    feeds, values = feeds_of(name, model), first_values(model)
    graphs = lowered(name, optimizer, accumulate)
    assert any(metadata(graph)[1] for graph in graphs)
    apart = [Stepper(graph, [], run) for graph in graphs]
    together = [Stepper(graph, metadata(graph)[1], run) for graph in graphs]
    expected, wanted = losses_and_states(apart, values, feeds)
    losses, states = losses_and_states(together, values, feeds)
    assert losses == expected
    for state, array in wanted.items():
        np.testing.assert_array_equal(states[state], array, err_msg=state)


def test_other_states_may_not() -> None:
    """Show the reason for the list, and that the test above detects an error."""
    model = training("mlp", "Momentum")
    feeds, values = feeds_of("mlp", model), first_values(model)
    graph = onnxtrain.lower(model)
    states, in_place = metadata(graph)
    assert set(in_place) < set(states)
    expected, _ = losses_and_states([Stepper(graph, [])], values, feeds)
    wrong = [
        losses_and_states([Stepper(graph, list(states), run)], values, feeds)[0] for run in ("as written", "eager 0")
    ]
    assert any(losses != expected for losses in wrong)


@pytest.mark.parametrize("kernels", [None, False])
def test_sessions_and_files_share_one_proof(kernels: bool | None) -> None:
    model = training("mlp", "Adam")
    session = onnxtrain.TrainingSession(model, runtime=onnxtrain.RuntimeOptions(kernels=kernels))
    (step,) = session._steps
    states = {name: new for name, new in step.step.states.items() if new is not None}
    proved = in_place_states(step.step.model.graph, states)
    assert set(states) - set(step.second_buffers) == proved == step.step.in_place
    written = onnxtrain.lower(model, kernels=kernels is None)
    entries = {entry.key: entry.value for entry in written.metadata_props}
    assert set(json.loads(entries["onnxtrain.in_place"])) == proved


def test_the_list_is_valid_onnx_metadata(tmp_path) -> None:
    graph = onnxtrain.lower(training("mlp", "Adam"))
    onnx.checker.check_model(graph, full_check=True)
    onnx.save(graph, tmp_path / "step.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "step.onnx"), providers=["CPUExecutionProvider"])
    entries = session.get_modelmeta().custom_metadata_map
    names = json.loads(entries["onnxtrain.in_place"])
    assert names
    assert set(names) <= set(json.loads(entries["onnxtrain.states"]))


def test_the_example_steps_without_onnxtrain(tmp_path: Path) -> None:
    model = training("mlp", "Momentum")
    graph, values, feeds = onnxtrain.lower(model), first_values(model), feeds_of("mlp", model)
    onnx.save(graph, tmp_path / "step.onnx")
    safetensors.numpy.save_file(values, tmp_path / "states.safetensors")
    specification = importlib.util.spec_from_file_location("step_in_place", EXAMPLE)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    stepper = module.Stepper(str(tmp_path / "step.onnx"), copied(values))
    expected, wanted = losses_and_states([Stepper(graph, [])], values, feeds, steps=5)
    assert [float(stepper.step(feeds)["loss"]) for _ in range(5)] == expected
    assert_same(wanted, stepper.states)
    command = [sys.executable, EXAMPLE, tmp_path / "step.onnx", tmp_path / "states.safetensors"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    first, last = map(float, re.fullmatch(r"loss ([\d.]+) -> ([\d.]+)\n", done.stdout).groups())
    assert last < 0.5 * first
