"""Time of a training step by operator and by part of the step, from onnxruntime's profile.

    python benchmarks/profile_step.py --models lenet5,resnet18,bert_mini --against-torch

"Part" is the origin of a node: the model's forward pass, the gradient of an operator type, the loss, the update. The
limit is the time of the step's matrix multiplications at the rate of a large one. PyTorch's time by operator, from its
own profiler, is listed for comparison. Profiling adds a few microseconds to every node.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arithmetic import PASSES, fastest_rate, forward_operations
from harness import (
    ForeignLoad,
    Interpreters,
    load_line,
    machine_line,
    make_parser,
    milliseconds,
    prepare,
    table,
    warn_when_busy,
    write_report,
)
from models import MODELS, find_model
from peers import PEERS, Task, Torch, batches, onnxtrain_trainer

WARM_UP = 3


@dataclass(frozen=True)
class NodeTime:
    """One node of the step graph: its operator, the part of the step, and its seconds per step."""

    name: str
    operator: str
    part: str
    seconds: float


@dataclass(frozen=True)
class Profile:
    """Seconds of a step without profiling, and of its nodes with it."""

    step_seconds: float
    nodes: list[NodeTime]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, "2 steps: a test run", threads=2, models=True)
    parser.add_argument("--models", default="lenet5,resnet18,bert_mini", help=", ".join(MODELS))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, help="profiled steps (20)")
    parser.add_argument("--longest", type=int, default=12, help="rows of each table (12)")
    parser.add_argument("--nodes", action="store_true", help="also list the slowest single nodes")
    parser.add_argument("--bodies", action="store_true", help="standard operators instead of native kernels")
    parser.add_argument("--against-torch", action="store_true", help="also profile PyTorch")
    options = parser.parse_args(arguments)
    steps = options.steps or (2 if options.quick else 20)
    warn_when_busy()
    parts, rate = [], fastest_rate(options.threads)
    with ForeignLoad() as foreign:
        for name in options.models.split(","):
            task = Task("onnxtrain", name, options.batch, options.threads, options.folder)
            missing = prepare([task], Interpreters())
            if missing:
                raise SystemExit(f"{name} cannot be exported: {missing['onnxtrain']}")
            parts.append(f"### {find_model(name).description}, batch {options.batch}\n")
            profile = profile_onnxtrain(task, steps, kernels=False if options.bodies else None)
            parts += describe(profile, options.longest, single_nodes=options.nodes)
            parts.append(limit_line(task, profile, rate))
            if options.against_torch:
                parts.append(profile_torch(task, steps, options.longest))
    parts.append(f"{machine_line()} {options.threads} threads; medians of {steps} steps. {load_line(foreign)}")
    write_report("\n".join(parts), options.output)
    return 0


def profile_onnxtrain(task: Task, steps: int, *, kernels: bool | None) -> Profile:
    """Time steps without a profile, then profile as many."""
    batch = batches(task)
    step_seconds = timed(onnxtrain_trainer(task, kernels=kernels).train_step, batch, steps)
    with tempfile.TemporaryDirectory() as folder:
        trainer = onnxtrain_trainer(task, kernels=kernels, profile=str(Path(folder) / "profile"))
        for step in range(WARM_UP + steps):
            trainer.train_step(*batch(step))
        step_session = trainer.executor.session._steps[0]
        events = json.loads(Path(step_session._session.end_profiling()).read_text())
    own = {str(node.name) for node in step_session.step.model.graph}
    return Profile(step_seconds, node_times(events, WARM_UP + steps, own))


def timed(step: Any, batch: Any, steps: int) -> float:
    """Median seconds of a step."""
    seconds = []
    for index in range(WARM_UP + steps):
        inputs, target = batch(index)
        begin = time.perf_counter()
        step(inputs, target)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[WARM_UP:])


def node_times(events: Iterable[dict[str, Any]], steps: int, own: Collection[str]) -> list[NodeTime]:
    """Median seconds per step of every node in a profile of ``steps`` steps, the first ones for warm-up.

    Args:
        events: Events recorded by onnxruntime.
        steps: Number of recorded steps.
        own: Names of the nodes of the step graph; onnxruntime's optimizer adds others.
    """
    runs: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            node = event["name"].removesuffix("_kernel_time")
            runs[node, event["args"]["op_name"]].append(event["dur"] / 1e6)
    found = []
    for (node, operator), seconds in runs.items():
        each = max(1, len(seconds) // steps)  # a node inside a loop runs several times a step
        sums = [sum(seconds[start : start + each]) for start in range(0, len(seconds), each)]
        part = part_of(node, operator, own)
        found.append(NodeTime(node, operator, part, statistics.median(sums[WARM_UP:] or sums)))
    return found


def part_of(node: str, operator: str, own: Collection[str]) -> str:
    """The part of the step that a node belongs to, from its name."""
    gradient = re.match(r"gradient of (.*?)/[A-Za-z]+Gradient_\d+/", node)  # in the body of a fused operator
    gradient = gradient or re.match(r"gradient of (.*)/([A-Za-z]+)_\d+", node)
    if gradient:
        kind = re.search(r"([A-Za-z]+)(?:_\d+)?$", gradient[1])
        return f"gradient of {kind[1] if kind else gradient[1]}"
    for part in ("gradient", "update", "loss"):
        if node.startswith(part):
            return part
    if node in own or node.removeprefix("fused ") in own:
        return f"forward {operator.removeprefix('Fused')}"
    return f"added by onnxruntime: {operator}"


def describe(profile: Profile, longest: int, *, single_nodes: bool) -> list[str]:
    """Tables by operator and by part."""
    total = sum(node.seconds for node in profile.nodes)
    lines = [
        f"A step takes {milliseconds(profile.step_seconds)} ms; its {len(profile.nodes)} nodes take "
        f"{milliseconds(total)} ms when profiled.\n"
    ]
    for title, key in (("operator", lambda node: node.operator), ("part", lambda node: node.part)):
        lines += [ranked(title, [(key(node), node.seconds) for node in profile.nodes], longest), ""]
    if single_nodes:
        named = [(f"{node.name} ({node.operator})", node.seconds) for node in profile.nodes]
        lines += [ranked("node", named, longest), ""]
    return lines


def limit_line(task: Task, profile: Profile, rate: float) -> str:
    """The time of a step relative to the limit of its matrix multiplications."""
    operations = PASSES * forward_operations(task.model_path, batches(task)(0)[0])
    limit = operations / rate
    return (
        f"Arithmetic limit: {operations / 1e9:.3g} GFLOP in matrix multiplications and convolutions, at the "
        f"{rate / 1e9:.0f} GFLOP/s of a large one {milliseconds(limit)} ms: the step takes "
        f"{profile.step_seconds / limit:.1f} times that.\n"
    )


def ranked(title: str, entries: Iterable[tuple[str, float]], longest: int) -> str:
    """A table of the slowest groups, with their numbers of entries."""
    groups: dict[str, list[float]] = defaultdict(list)
    for key, seconds in entries:
        groups[key].append(seconds)
    total = sum(map(sum, groups.values()))
    order = sorted(groups.items(), key=lambda item: -sum(item[1]))
    rows = [
        [key, str(len(times)), milliseconds(sum(times)), f"{100 * sum(times) / total:.0f}"]
        for key, times in order[:longest]
    ]
    return table([title, "nodes", "ms", "%"], rows)


def profile_torch(task: Task, steps: int, longest: int) -> str:
    """PyTorch's own time by operator, the median over individually profiled steps."""
    from torch.profiler import ProfilerActivity, profile

    peer = PEERS["torch"](task)
    assert isinstance(peer, Torch)
    batch = batches(task)
    step_seconds = timed(peer.step, batch, steps)
    seconds: dict[str, list[float]] = defaultdict(list)
    calls: dict[str, int] = {}
    for step in range(steps):
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            peer.step(*batch(step))
        for event in recorded.key_averages():
            seconds[event.key].append(event.self_cpu_time_total / 1e6)
            calls[event.key] = event.count
    medians = {key: statistics.median(times) for key, times in seconds.items()}
    rows = [
        [key, str(calls[key]), milliseconds(time)]
        for key, time in sorted(medians.items(), key=lambda item: -item[1])[:longest]
    ]
    return f"PyTorch takes {milliseconds(step_seconds)} ms:\n\n{table(['operator', 'calls', 'ms'], rows)}\n"


if __name__ == "__main__":
    sys.exit(main())
