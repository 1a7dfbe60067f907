"""Cost of splitting a training step: gradient and update apart, and the backward pass in several sessions.

    python benchmarks/divided_step.py --output build/benchmarks/divided_step.md
    python benchmarks/divided_step.py --models lenet5 --batch 8 --quick

Ranks sum gradients between the gradient and the update, so these are two sessions ("divided"). To overlap communication
with the backward pass, a native operator signals ready gradients. The alternative ends a session after each bucket of
gradients and continues with the next one ("2", "3", "4" sessions for the gradient, one for the update); values needed
later are passed by address. Both run here in a single process that sends nothing, on one thread, alternating every few
steps. The figure is CPU time, since other programs run as well.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from harness import ForeignLoad, load_line, machine_line, make_parser, milliseconds, table, write_report
from models import LOSS, MODELS, find_model
from step import listed

import onnxtrain
from onnxtrain.distributed import Single
from onnxtrain.runtime.step import create_session
from onnxtrain.training.executors.data_parallel import DataParallelExecutor

SESSIONS = (2, 3, 4)
TURN = 8
"""Consecutive steps; the first two run with cold memory and do not count."""

LEARNING_RATE = 1e-4


class Beside(Single):
    """A single process whose step signals ready gradients, as in distributed training."""

    overlap = True


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the report and write it."""
    parser = make_parser(__doc__, "one turn", models=True)
    parser.add_argument("--models", type=listed(MODELS), default=["mlp", "lenet5", "resnet18", "bert_mini"])
    parser.add_argument("--batch", type=lambda text: [int(item) for item in text.split(",")], default=[8, 32])
    parser.add_argument("--rounds", type=int, default=9, help="turns of each (9)")
    given = parser.parse_args(arguments)
    if given.quick:
        given.rounds = 1
    rows = []
    with ForeignLoad() as foreign:
        for name in given.models:
            for batch in given.batch:
                rows.append(row(name, batch, given.rounds, given.folder))
                print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
    several = [title for count in SESSIONS for title in (f"{count} sessions", "MB between")]
    text = "\n\n".join(
        [
            f"# Divided steps\n\n{machine_line()}",
            table(["model", "batch", "buckets", "whole [ms]", "divided", *several], rows),
            f"Processor time of a step on one thread, the least of {given.rounds * (TURN - 2)}, "
            "and of the others over the whole one's. MB between: what goes from one session of the backward pass to "
            "another.",
            load_line(foreign),
        ]
    )
    write_report(text, given.output)
    return 0


def row(name: str, batch: int, rounds: int, folder: str) -> list[str]:
    """A line of the table."""
    model = find_model(name)
    whole, divided = trainer(model.onnx(folder)), trainer(model.onnx(folder))
    inputs, target = model.batch(batch, 0)
    feeds = {**inputs, whole.objective.names.target: target}
    steps = divided_steps(divided)
    ways: dict[str, Callable[[], float]] = {
        "whole": lambda: whole.executor.step(feeds, LEARNING_RATE),
        "divided": lambda: steps.step(feeds, LEARNING_RATE),
    }
    buckets = len(steps._buckets)
    cuts = {count: CutStep(trainer(model.onnx(folder)), count) for count in SESSIONS if count <= buckets}
    for count, cut in cuts.items():
        ways[str(count)] = lambda cut=cut: cut.step(feeds)  # type: ignore[misc]
    seconds = measured(ways, rounds)
    between = {count: f"{cut.bytes_between / 1e6:.1f}" for count, cut in cuts.items()}
    ratios = {way: f"{found / seconds['whole']:.2f}" for way, found in seconds.items()}
    several = [cell for count in SESSIONS for cell in (ratios.get(str(count), ""), between.get(count, ""))]
    return [model.description, str(batch), str(buckets), milliseconds(seconds["whole"]), ratios["divided"], *several]


def trainer(path: Any) -> onnxtrain.Trainer:
    """A single-process training."""
    return onnxtrain.Trainer(path, loss=LOSS, optimizer=onnxtrain.Adam(LEARNING_RATE), threads=1, distributed=Beside())


def divided_steps(made: onnxtrain.Trainer) -> DataParallelExecutor:
    """The executor of a distributed rank, in a single process."""
    kind: Any = type(made.config)
    alone = kind.divided
    kind.divided = property(lambda self: True)
    try:
        steps = DataParallelExecutor(made.objective, made.config)
        steps.session  # noqa: B018 - it is built now
    finally:
        kind.divided = alone
    return steps


def measured(ways: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Return the minimum seconds of a step for each variant.

    Raises:
        SystemExit: Their results differ.
    """
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    losses: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(rounds + 1):
        for way in ways if turn % 2 else reversed(ways):
            found = []
            for _ in range(TURN):
                began = time.process_time()
                losses[way].append(ways[way]())
                found.append(time.process_time() - began)
            if turn:
                seconds[way] += found[2:]
    first = {way: found[1] for way, found in losses.items()}
    if not np.allclose(list(first.values()), first["whole"], rtol=1e-4, atol=1e-6):
        raise SystemExit(f"The losses differ: {first}.")
    return {way: min(found) for way, found in seconds.items()}


class CutStep:
    """A step whose gradient is computed in several sessions.

    Attributes:
        bytes_between: Bytes passed between sessions.
    """

    def __init__(self, made: onnxtrain.Trainer, count: int) -> None:
        self._steps = divided_steps(made)
        first, self._update = self._steps.session._steps
        self._states, self._written = self._steps.states, first.step.states
        options = made.config.runtime
        self._pieces = []
        for model in pieces(first.step.model, count):
            session = create_session(model, options, kernels=True)
            self._pieces.append((session.io_binding(), session, [str(value.name) for value in model.graph.inputs]))
        self._outputs = [[value.name for value in model.get_outputs()] for model in self._sessions()]
        self.bytes_between = 0

    def _sessions(self) -> Iterator[Any]:
        for _, session, _ in self._pieces:
            yield session._session

    def step(self, feeds: dict[str, np.ndarray]) -> float:
        """Run one step; return the loss before it."""
        new_names = {f"{name}_new": name for name in self._states}
        between: dict[str, Any] = {}
        for (binding, session, inputs), outputs in zip(self._pieces, self._outputs, strict=True):
            binding.clear_binding_inputs()
            for name in inputs:
                if name in feeds:
                    binding.bind_cpu_input(name, np.ascontiguousarray(feeds[name]))
                elif name in between:
                    binding.bind_ortvalue_input(name, between[name])
                else:
                    self._states.bind_input(binding, name)
            for name in outputs:
                if name in new_names:
                    self._states.bind_output(binding, name, new_names[name], other=False)
                else:
                    binding.bind_output(name, "cpu")
            session.run_with_iobinding(binding)
            between |= dict(zip(outputs, binding.get_outputs(), strict=True))
        loss = float(between[self._steps.objective.names.loss].numpy())
        self.bytes_between = sum(
            value.numpy().nbytes for name, value in between.items() if name not in new_names and name != "loss"
        )
        rate = {self._steps.objective.names.learning_rate: np.asarray(LEARNING_RATE, np.float32)}
        self._update.run(rate)
        return loss


def pieces(model: ir.Model, count: int) -> Iterator[ir.Model]:
    """Split a step graph at its gradient-ready notifications into this many graphs, without notifications.

    A value that a later graph reads is an output of the graph that computes it.
    Sizes are those of layers in the benchmark models. The three take turns; a figure is the median over the rounds. The
    """
    parts: list[list[ir.Node]] = [[]]
    nodes = list(model.graph)
    announcements = sum(node.op_type == "GradientsReady" for node in nodes)
    ends = {round(number * announcements / count) for number in range(1, count)}
    seen = 0
    for node in nodes:
        if node.op_type != "GradientsReady":
            parts[-1].append(node)
            continue
        seen += 1
        if seen in ends:
            parts.append([])
    place = {output: number for number, part in enumerate(parts) for node in part for output in node.outputs}
    for number, part in enumerate(parts):
        yield piece(model, part, number, place)


def piece(model: ir.Model, part: Sequence[ir.Node], number: int, place: dict[ir.Value, int]) -> ir.Model:
    """One of the graphs."""
    values: dict[ir.Value, ir.Value] = {}
    inputs, initializers = [], []

    def copied(value: ir.Value) -> ir.Value:
        found = ir.Value(name=value.name, type=value.type, shape=value.shape, const_value=value.const_value)
        values[value] = found
        return found

    nodes = []
    for node in part:
        for value in node.inputs:
            if value is None or value in values:
                continue
            (initializers if value.is_initializer() else inputs).append(copied(value))
        made = [copied(output) for output in node.outputs]
        nodes.append(
            ir.Node(
                node.domain,
                node.op_type,
                [None if value is None else values[value] for value in node.inputs],
                list(node.attributes.values()),
                outputs=made,
                overload=node.overload,
                name=node.name,
            )
        )
    outputs = [
        values[output]
        for node in part
        for output in node.outputs
        if output.is_graph_output()
        or any(place.get(user.outputs[0], number) != number for user, _ in output.uses() if user.outputs)
    ]
    graph = ir.Graph(
        inputs,
        outputs,
        nodes=nodes,
        initializers=initializers,
        opset_imports=dict(model.graph.opset_imports),
        name=f"part {number}",
    )
    return ir.Model(graph, ir_version=model.ir_version, functions=list(model.functions.values()))


if __name__ == "__main__":
    sys.exit(main())
